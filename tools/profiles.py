"""Make simulated users, or count what is in files of users.

A user has a persona type, a persona, a need, a scene and a first line (SAGE 2.2, appendix G).

    python -m tools.profiles --out results/users.jsonl --count 500           by rule, offline
    python -m tools.profiles --out results/written.jsonl --split 0.2 --writer openai:MODEL@URL
    python -m tools.profiles --check results/users.jsonl                     what is in such a file

What --check counts is what can be counted: how many are alike, how many give their hidden theme
away. It does not say whether the people are believable.

The released script has no seed, reads nothing that the LLM returns and lacks its two seed files.
Here each user is written in one pass: persona, scene, first line, each of them one JSON object. A
user with a part that cannot be used, or nearly an earlier user's, is left out and counted. What is
drawn depends on the seed alone and every answer of a model is logged (FILE.calls.jsonl): a command
that was killed goes on where it was and ends with the same file.
"""

from support.errors import BadInput, SimulatorFailed, UnreadableAnswers
from support.files import write_file
from support.metrics import words_of
from support.results import PURPOSE_NAMES, intention_of
from support.servers import CallLog
from support.settings import Parser, fraction, natural, not_negative, positive

import asyncio
import json
import random
import re
import sys
import uuid
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from simulator import (
    PROMPTS,
    Profile,
    Simulator,
    User,
    as_json,
    fill,
    load_profiles,
    load_prompt,
    make_simulator,
)
from toy.words import DETAILS, EVENTS, FEELINGS, NEEDS, PEOPLE
from toy.world import ScriptedModel, need_of, tags_of

# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """Make users, or look at files of users. Returns the exit code; raises RunError."""
    return print_check(args.check) if args.check else make_users(args)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.profiles",
        description="Make simulated users, or count what is in files of users.",
    )
    parser.add_argument(
        "--count", help="make N users (default: 500)", type=positive, default=500, metavar="N"
    )
    parser.add_argument("--out", help="write them to FILE, a JSONL file", metavar="FILE")
    parser.add_argument(
        "--writer",
        help="model that writes them: toy (no model: by rule, from lists and templates), "
        "openai:MODEL@URL, local:DIR (default: toy)",
        default="toy",
        metavar="NAME",
    )
    parser.add_argument(
        "--lang", help="language of the users (default: en)", choices=["en", "zh"], default="en"
    )
    parser.add_argument(
        "--seed",
        help="seed of needs, topics and traits (default: 0)",
        type=natural,
        default=0,
        metavar="N",
    )
    parser.add_argument(
        "--split",
        help="share of the users, and of the topics, that goes to FILE-test.jsonl (default: 0.0)",
        type=fraction,
        default=0.0,
        metavar="SHARE",
    )
    parser.add_argument(
        "--temperature",
        help="sampling temperature of the writer (default: 1.0)",
        type=not_negative,
        default=1.0,
        metavar="T",
    )
    parser.add_argument(
        "--check",
        help="count what is in a file of users; of two files also what the second shares with the "
        "first",
        nargs="+",
        metavar="FILE",
    )
    return parser


# --------------------------------------------------------------------------------------- make users


def make_users(args):
    """From the flags to the files. Returns the exit code."""
    if not args.out:
        raise BadInput("--out FILE is needed: the file that the users are written to")
    count, out = args.count + args.count % 2, Path(args.out)
    if count != args.count:
        print(f"--count {args.count} is odd: rounded up to {count}, half rational, half emotional")
    drafts = draw_from_seeds(args, count)
    paths = {"train": out}
    if args.split:
        paths["test"] = out.with_name(out.stem + "-test.jsonl")
    if any(path.exists() for path in paths.values()):
        raise BadInput(f"--out {out}: is there already; choose another file, or remove it")
    writer = open_writer(args, out.with_name(out.stem + ".calls.jsonl"))
    lost = asyncio.run(write_users(drafts, writer, args.lang))
    for split, path in paths.items():
        users = [d for d in drafts if d["split"] == split and d["id"] not in lost]
        rows = [{name: user[name] for name in PROFILE_FIELDS} for user in users]
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        by_rule = ", made by rule: no model wrote them" if args.writer == "toy" else ""
        print(f"{path}: {len(users)} users{by_rule}")
    if lost:
        print(
            f"python -m tools.profiles: {len(lost)} of {count} users are missing, the first "
            f"because {next(iter(lost.values()))}",
            file=sys.stderr,
        )
    return 2 if lost else 0


def open_writer(args, calls):
    """The Simulator behind --writer, whose answers are logged in the file `calls`, and are taken
    from there if it holds them already. Raises BadInput."""
    if args.writer.partition(":")[0] not in ("toy", "openai", "local"):
        raise BadInput(f"--writer {args.writer}: unknown; choose toy, openai:MODEL@URL, local:DIR")
    if args.writer == "toy" and args.lang != "en":
        raise BadInput(
            f"--lang {args.lang}: the writer by rule knows English only; name another "
            "with --writer openai:MODEL@URL or local:DIR"
        )
    if args.writer == "toy":
        return Simulator(ScriptedWriter(PROMPTS / "en" / "writer" / "by_rule.txt"))
    calls.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(calls)
    if calls.exists():
        log.read(calls)
    return make_simulator(
        args.writer,
        args.lang,
        timeout=180.0,
        flag="--writer",
        temperature=args.temperature,
        log=log,
    )


# ------------------------------------------------------------------------------ what chance decides


def draw_from_seeds(args, count):
    """`draw_drafts` from the seed files: lists of topics, of everyday utterances, of the traits of
    each persona group, and of needs. Raises BadInput."""

    def lines_of(name):
        return (PROMPTS / args.lang / "writer" / name).read_text(encoding="utf-8").splitlines()

    traits_of = {}
    for line in lines_of("traits.txt"):
        group, traits = line.split(": ")
        traits_of[group] = traits.split(", ")
    task_of = dict(zip(NEEDS, lines_of("needs.txt")))  # needs.txt has the order of NEEDS
    topics, utterances = lines_of("topics.txt"), lines_of("talk.txt")
    return draw_drafts(count, topics, utterances, traits_of, task_of, args.seed, args.split)


def draw_drafts(count, topics, utterances, traits_of, task_of, seed, split=0.0):
    """What is settled before a word is written: a draft for each user, a dict of some fields of its
    profile and of what the prompts ask for. Raises BadInput.

    The persona group is drawn evenly, and so are three of its traits, three utterances for the way
    of talking, and the topic. Needs are dealt by quota (`needs_of`), where RLVER drew them one by
    one: of its 500 users 57 to 66 have each need.

    traits_of: {persona group: [traits]}. task_of: {need: the hidden intention, in words}. split:
    the share of users, and of topics, for the test file."""
    rng = random.Random(f"users {seed}")
    shuffled = rng.sample(topics, len(topics))
    test_topics = round(len(topics) * split)
    test_users = 2 * round(count * split / 2)
    if split and not (0 < test_topics < len(topics) and 0 < test_users < count):
        raise BadInput(
            f"--split {split:g}: {len(topics)} topics and {count} users cannot be cut "
            "so; take more of them, or a share nearer to 0.5"
        )
    parts = [
        ("train", count - test_users, shuffled[test_topics:]),
        ("test", test_users, shuffled[:test_topics]),
    ]
    drafts = []
    for name, users, topics_of_part in parts:
        for need in rng.sample(needs_of(users), users):
            group = rng.choice(list(traits_of))
            traits = rng.sample(traits_of[group], 3)
            drafts.append(
                {
                    "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
                    "split": name,
                    "main_cha": group,
                    "cha_group": traits,
                    "traits": "\n".join(traits),
                    "talk": "\n".join(rng.sample(utterances, 3)),
                    "topic": rng.choice(topics_of_part),
                    "need": need,
                    "task": task_of[need],
                }
            )
    return drafts


def needs_of(users):
    """The needs of an even number of users: half rational, half emotional, the four of each equally
    often to within one."""
    names = list(NEEDS)
    rational, emotional = names[:4], names[4:]
    needs = [rational[k % 4] for k in range(users // 2)]
    return needs + [emotional[k % 4] for k in range(users // 2)]


# ---------------------------------------------------------------------------------- one pass a user

# What an answer holds: {part: its schema}, see simulator.EMOTION_SCHEMAS. No policy speaks here, so
# no code is asked for. The prompts' persona_layout and scene_layout put the texts together.
SCHEMAS = {
    "persona": {
        "name": str,
        "age": int,
        "sex": str,
        "job": str,
        "hobbies": str,
        "habits": str,
        "speaking_style": str,
        "way_of_talking": str,
    },
    "scene": dict.fromkeys(
        "event cause timeline conflict attempts state moods raises lowers".split(), str
    ),
}
# The fields of a profile, as the file has them.
PROFILE_FIELDS = (
    "id",
    "player",
    "scene",
    "main_cha",
    "cha_group",
    "topic",
    "task",
    "need",
    "first_talk",
)
# {name of a prompt in prompts/*/writer/: its placeholders}
PLACEHOLDERS = {
    "persona": {"main_cha", "traits", "talk"},
    "scene": {"player", "topic", "task"},
    "persona_layout": {*SCHEMAS["persona"]},
    "scene_layout": {*SCHEMAS["scene"], "task"},
}


async def write_users(drafts, simulator, lang):
    """Write persona, scene and first line into `drafts`, one user beside the other. Returns {id of
    a user that is missing: why}."""
    prompts = {
        name: load_prompt(name, lang, "writer", placeholders=placeholders)
        for name, placeholders in PLACEHOLDERS.items()
    }
    lost = {}
    await simulator.check()
    # No code is asked for here, so only its number makes each attempt another prompt.
    simulator.complaint += " ({{attempt}})"
    with tqdm(total=len(drafts), desc="writing users", unit="user") as bar:

        async def write(draft):
            try:
                await write_user(draft, simulator, prompts)
            except SimulatorFailed as error:
                lost[draft["id"]] = str(error)
            bar.update(1)

        await asyncio.gather(*map(write, drafts))
    if isinstance(simulator.model, ScriptedWriter):  # all of the same lists of words: no copies
        return lost
    # in the users' order, and not in that of the answers: a slow server must not change the file
    written = [draft for draft in drafts if draft["id"] not in lost]
    for field in ("player", "scene"):
        for i in near_duplicates([draft[field] for draft in written], most=len(written)):
            lost[written[i]["id"]] = f"its {field} is nearly that of an earlier user"
    return lost


async def write_user(draft, simulator, prompts):
    """One pass: the persona, the scene, and the first line as the user itself says it in a
    dialogue. Raises SimulatorFailed."""
    for part, field in (("persona", "player"), ("scene", "scene")):
        _, answer = await simulator.ask(prompts[part], draft, SCHEMAS[part], draft["id"])
        refuse_faults(part, [str(text) for text in answer.values()], draft["task"])
        draft[field] = fill(prompts[f"{part}_layout"], {**draft, **answer})
    profile = Profile(**{name: draft.get(name, "") for name in PROFILE_FIELDS})
    line, goodbye = await User(simulator, profile, name=draft["id"]).answer()
    refuse_faults("first line", [line], draft["task"])
    if goodbye:
        raise UnreadableAnswers("its first line says goodbye")
    draft["first_talk"] = line


# ---------------------------------------------------------------------------------- who is left out

# A line in which somebody speaks. A scene with two of them is a dialogue, and no report of one.
WRITTEN_DIALOGUE = re.compile(
    r"""
    ^[ *-]*                                   # in a list or in bold, perhaps:
    (?:(?:[\w'.]{1,12}[ ]?){1,3}[:：][ ]*)?   # a name of up to three words and a colon, or none,
    ["“「].*["”」]\s*$                         # and quotation marks around all the rest
    |
    ^[ *-]*(?:npc|player|friend|me|玩家|朋友|我)[ ]*[:：]  # or a speaker, as in a play
    """,
    re.MULTILINE | re.IGNORECASE | re.VERBOSE,
)


def refuse_faults(part, texts, task):
    """Raise UnreadableAnswers if a part of a user that consists of these texts cannot be used. (A
    hidden theme in other words is not noticed.)"""
    if not all(re.search(r"\w", text) for text in texts):
        raise UnreadableAnswers(f"its {part} is not complete")
    body = "\n".join(texts)
    if times_said(task, body):
        raise UnreadableAnswers(f"its {part} says the hidden theme")
    if part == "scene" and len(WRITTEN_DIALOGUE.findall(body)) > 1:
        raise UnreadableAnswers("dialogue is written out in its scene")


def times_said(theme, text):
    """How often a text says a hidden theme. Only letters and digits are compared: neither a comma
    nor a line end may hide a theme."""

    def squeeze(words):
        return re.sub(r"[\W_]+", "", words).casefold()

    return squeeze(text).count(squeeze(theme))


# ---------------------------------------------------------------------------------- near-duplicates

NGRAM = 6  # words, in Chinese characters


def ngrams_of(text):
    """The n-grams of a text: all sequences of NGRAM words that follow each other in it."""
    words = words_of(text)
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def near_duplicates(texts, most):
    """The indices of the texts that are nearly one before them: that share over half of the n-grams
    of the shorter text of the two. N-grams that stand in more than `most` of the texts are template
    text, and make nobody alike."""
    ngrams_of_texts = [ngrams_of(text) for text in texts]
    texts_with = Counter(ngram for ngrams in ngrams_of_texts for ngram in ngrams)
    before, duplicates = [], []
    for i, ngrams in enumerate(ngrams_of_texts):
        rare = {ngram for ngram in ngrams if texts_with[ngram] <= most}
        if any(2 * len(rare & other) > min(len(rare), len(other)) for other in before):
            duplicates.append(i)
        before.append(rare)
    return duplicates


# ------------------------------------------------------------------------------ the scripted writer


class ScriptedWriter:
    """Writes users without a model, from a file of templates and lists of words:

        [a persona]
        {"name": "{{first name}}"}
        [first name]
        Agnes

    The lines below a [heading] are a template, "a persona" or "a scene", or the list that fills the
    placeholder of that name. What it writes is readable, can be played by the scripted user, and
    resembles nobody."""

    is_scripted = True  # as the users' scripts: no run need check it first

    def __init__(self, path):
        # the pieces: what stands before the first heading, then heading and text by turns
        pieces = re.split(r"^\[(.+)\]\n", path.read_text(encoding="utf-8"), flags=re.M)
        headings, texts = pieces[1::2], pieces[2::2]
        self.blocks = dict(zip(headings, texts))
        self.user = ScriptedModel()

    async def __call__(self, prompt, schema=None):
        tags = tags_of(prompt)
        if "hidden_theme" in tags:  # a first line is asked for: the user says it, not the writer
            return await self.user(prompt)
        rng = random.Random(prompt)
        shuffled = {}
        for name, choices in self.choices_for(tags).items():
            shuffled[name] = rng.sample(choices, len(choices))
        template = self.blocks["a persona" if "type" in tags else "a scene"]
        text = template.replace("<P>", shuffled["person"][0])

        def take_line(match):  # each {{name}} takes a line that no other {{name}} has taken
            return as_json(shuffled[match.group(1)].pop())[1:-1]  # within the template's quotes

        return re.sub(r"\{\{(.+?)\}\}", take_line, text)

    def choices_for(self, tags):
        """{name of a placeholder: the lines that may fill it}, for the tags of a prompt."""
        need = need_of(tags.get("theme")) or "side"
        choices = {}
        for name, text in {**self.blocks, **tags}.items():
            choices[name] = text.strip().split("\n")
        choices["person"] = PEOPLE["train"] + PEOPLE["heldout"]
        choices["event"] = EVENTS["train"] + EVENTS["heldout"]
        choices["feeling"] = FEELINGS["train"] + FEELINGS["heldout"]
        choices["detail"] = DETAILS["train"] + DETAILS["heldout"]
        choices["cue"] = NEEDS[need].cues["train"] + NEEDS[need].cues["heldout"]
        choices["age"] = [str(age) for age in range(16, 76)]
        choices["raises"] = choices[f"raises {need}"]
        return choices


# ------------------------------------------------------------------------ what is in files of users


def print_check(paths):
    """Print what is in one file of users, or in two and shared. Returns the exit code. Raises
    BadInput."""
    if len(paths) > 2:
        raise BadInput("--check takes one file, or two: of training users and of test users")
    counts_of_files = count_files([load_profiles(path, "--check") for path in paths])
    titles = [*paths, f"of the users of {paths[-1]}"]
    for title, counts in zip(titles, counts_of_files):
        print(title)
        for what, number in counts.items():
            if isinstance(number, Counter):
                number = ", ".join(
                    f"{PURPOSE_NAMES.get(name, name)} {k}" for name, k in number.most_common()
                )
            print(f"    {what:<30}{number}")
    return 0


def count_files(files):
    """What files of users hold, each by itself, and what a second one shares with the first:
    [{what: number, or {value: number}}]. files: lists of Profile."""
    counts_of_files = [count_users(people) for people in files]
    if len(files) == 2:
        counts_of_files.append(shared_fields(*files))
    return counts_of_files


def count_users(people):
    """What a file of users holds: {what: number, or {value: number}}."""

    def times_theme(field):
        """How often each user's field says the hidden theme."""
        return [times_said(p.task, getattr(p, field)) for p in people]

    def mean_length(field):
        """The mean number of characters of a field."""
        return round(sum(len(getattr(p, field)) for p in people) / len(people))

    most = max(2, len(people) / 20)  # what stands in more scenes is template text
    intentions = [intention_of(p.task, p.need) for p in people]
    lines_of_dialogue = [len(WRITTEN_DIALOGUE.findall(p.scene)) for p in people]
    return {
        "users": len(people),
        "different personas": len({p.player for p in people}),
        "different scenes": len({p.scene for p in people}),
        "near-duplicate scenes": len(near_duplicates([p.scene for p in people], most)),
        "purposes": Counter(p.target for p in people),
        "needs": Counter(need for need, _ in intentions),
        "kinds": Counter(kind for _, kind in intentions),
        "groups": Counter(p.main_cha for p in people),
        "theme once in the scene": times_theme("scene").count(1),
        "theme in the persona": sum(times > 0 for times in times_theme("player")),
        "theme in the first line": sum(times > 0 for times in times_theme("first_talk")),
        "dialogue in the scene": sum(lines > 1 for lines in lines_of_dialogue),
        "characters, persona": mean_length("player"),
        "characters, scene": mean_length("scene"),
    }


def shared_fields(first, second):
    """How many users of the second file have a field in common with one of the first."""
    counts = {}
    for field in ("id", "player", "scene", "topic"):
        known = {getattr(p, field) for p in first} - {""}
        counts[f"{field} is in the first file"] = sum(getattr(p, field) in known for p in second)
    return counts


if __name__ == "__main__":
    sys.exit(main())
