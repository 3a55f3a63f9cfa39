"""Make users, or say what is in files of users.

A user has a persona type, a persona, a need, a scene and a first line (SAGE 2.2, appendix G).

    python -m tools.profiles --out results/users.jsonl --count 500           by rule, offline
    python -m tools.profiles --out results/written.jsonl --split 0.2 --writer openai:MODEL@URL
    python -m tools.profiles --check results/users.jsonl                     what is in such a file

What --check counts is what can be counted: how many are alike, how many give their hidden theme
away. It does not say whether the people are believable.

The released script has no seed, reads nothing that the LLM returns and lacks its two seed files.
Here every answer is cut into named parts and checked; one that cannot be used is asked for again,
with the complaint. What is drawn hangs on the seed alone and every answer is logged
(FILE.calls.jsonl): a command that was killed goes on where it was and ends with the same file.
"""

from support.answers import Unreadable, unmarked_sections
from support.errors import BadInput, SimulatorFailed
from support.flags import Parser, fraction, natural, not_negative, positive
from support.llm import CallLog
from support.results import intention_of
from support.rundir import write_file
from support.signs import words_of
from support.toy_words import NEEDS

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
    PreparedCall,
    Profile,
    Simulator,
    User,
    fill,
    load_profiles,
    load_prompt,
    make_simulator,
    parse_reply,
    says_goodbye,
)
from tools.scripted import ScriptedWriter

PARTS = {
    "persona": "Name Age Sex Job Hobbies Habits Style Talk".split(),
    "scene": "Event Cause Timeline Conflict Attempts State Moods Raises Lowers".split(),
}
# what is written of a user, in this order, and the field of its profile that it goes into
FIELD = {"persona": "player", "scene": "scene", "first line": "first_talk"}
FIELDS = ("id", "player", "scene", "main_cha", "cha_group", "topic", "task", "need", "first_talk")
PLACEHOLDERS = {  # of the prompts in prompts/*/writer/
    "persona": {"main_cha", "traits", "talk"},
    "again": {"complaint"},
    "scene": {"player", "topic", "task"},
    "persona_layout": {*PARTS["persona"]},
    "scene_layout": {*PARTS["scene"], "task"},
}
# Characters, at least and at most; the released users have 577 and 1,575 on average, in Chinese.
BOUNDS = {
    "en": {"persona": (150, 4000), "scene": (500, 9000), "first line": (4, 500)},
    "zh": {"persona": (60, 2000), "scene": (200, 5000), "first line": (2, 250)},
}
RUN = 6  # words, in Chinese characters; who shares half of the runs is a near-duplicate
ROUNDS = 4  # in which somebody who is nearly somebody else may be written
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


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """Make users, or look at files of users. Returns the exit code; raises RunError."""
    return print_check(args) if args.check else make_users(args)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.profiles", description="Make simulated users; say what is in files."
    )
    parser.add_argument("--count", help="users (default: 500)", type=positive, default=500)
    parser.add_argument("--out", help="where they go, as JSONL", metavar="FILE")
    parser.add_argument(
        "--writer",
        help="toy (by rule), openai:MODEL@URL, local:DIR (default: toy)",
        default="toy",
        metavar="NAME",
    )
    parser.add_argument("--lang", help="language (default: en)", choices=["en", "zh"], default="en")
    parser.add_argument("--topics", help="troubles, one a line, instead of ours", metavar="FILE")
    parser.add_argument(
        "--talk", help="everyday utterances, one a line, instead of ours", metavar="FILE"
    )
    parser.add_argument("--seed", help="of all that is drawn (default: 0)", type=natural, default=0)
    parser.add_argument(
        "--split",
        help="share of users and topics for FILE-test.jsonl (default: 0.0)",
        type=fraction,
        default=0.0,
    )
    parser.add_argument(
        "--temperature", help="of the writer (default: 1.0)", type=not_negative, default=1.0
    )
    parser.add_argument(
        "--retries", help="further attempts at a part (default: 8)", type=natural, default=8
    )
    parser.add_argument(
        "--check",
        help="what is in a file of users, or in two and shared",
        nargs="+",
        metavar="FILE",
    )
    return parser


# --------------------------------------------------------------------------------------- make users


def make_users(args):
    """From the flags to the files. Returns the exit code."""
    if not args.out:
        raise BadInput("--out FILE: say where the users go")
    count, out = args.count + args.count % 2, Path(args.out)
    if count != args.count:
        print(f"--count {args.count} is odd: rounded up to {count}, half rational, half emotional")
    slots = slots_of_flags(args, count)
    paths = {"train": out}
    if args.split:
        paths["test"] = out.with_name(out.stem + "-test.jsonl")
    if any(path.exists() for path in paths.values()):
        raise BadInput(f"--out {out}: is there already; choose another file, or remove it")
    calls = out.with_name(out.stem + ".calls.jsonl")
    writer = open_writer(args, calls)
    lost = asyncio.run(write_with_bar(slots, writer, args.lang))
    for part, path in paths.items():
        written = [slot for slot in slots if slot["part"] == part and slot["id"] not in lost]
        rows = [{name: slot[name] for name in FIELDS} for slot in written]
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{path}: {len(rows)} users")
    if lost:
        print(
            f"python -m tools.profiles: {len(lost)} of {count} users are missing, the first "
            f"because {next(iter(lost.values()))}; to try again, remove the file and take more "
            f"--retries (what is in {calls} is not paid again)",
            file=sys.stderr,
        )
    return 2 if lost else 0


def slots_of_flags(args, count):
    """`draw_slots` from the seed files that the flags name, or from ours. Raises BadInput."""
    ours = PROMPTS / args.lang / "writer"
    topics = seed_lines(args.topics or ours / "topics.txt", 2, "--topics")
    talk = seed_lines(args.talk or ours / "talk.txt", 3, "--talk")
    groups = {}
    for line in seed_lines(ours / "traits.txt", 3, "traits"):
        group, traits = line.split(": ")
        groups[group] = traits.split(", ")
    tasks = seed_lines(ours / "needs.txt", 8, "needs")
    return draw_slots(count, topics, talk, groups, tasks, args.seed, args.split)


def seed_lines(path, least, flag):
    """The different lines of a file of seeds. Raises BadInput for fewer than `least`."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{flag} {path}: {getattr(error, 'strerror', 'not UTF-8 text')}") from None
    lines = list(dict.fromkeys(line.strip() for line in lines if line.strip()))
    if len(lines) < least:
        raise BadInput(
            f"{flag} {path}: at least {least} different lines are needed, this file has "
            f"{len(lines)}"
        )
    return lines


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
    calls.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(calls, calls if calls.exists() else None)
    if args.writer == "toy":
        return Simulator(ScriptedWriter(PROMPTS / "en" / "writer" / "by_rule.txt"), log=log)
    return make_simulator(
        args.writer,
        args.lang,
        timeout=180.0,
        retries=args.retries,
        flag="--writer",
        temperature=args.temperature,
        log=log,
    )


def draw_slots(count, topics, talk, groups, tasks, seed, split=0.0):
    """What is settled before a word is written, a dict for each user: persona type uniform, three
    of its traits, three utterances for the way of talking, topic uniform. Needs by quota: half
    rational, half emotional, the four of each equal to within one (RLVER's 500 were drawn: 57 to 66
    of each). `split`: the share of users, and of topics, for the test file. Raises BadInput."""
    rng, names = random.Random(f"users {seed}"), list(NEEDS)
    topics, topics_held_out = rng.sample(topics, len(topics)), round(len(topics) * split)
    tests = 2 * round(count * split / 2)
    if split and not (0 < topics_held_out < len(topics) and 0 < tests < count):
        raise BadInput(
            f"--split {split:g}: {len(topics)} topics and {count} users cannot be cut "
            "so; take more of them, or a share nearer to 0.5"
        )
    parts = [
        ("train", count - tests, topics[topics_held_out:]),
        ("test", tests, topics[:topics_held_out]),
    ]
    slots = []
    for part, users, topics_of_part in parts:
        rational = [names[k % 4] for k in range(users // 2)]
        emotional = [names[4 + k % 4] for k in range(users // 2)]
        for need in rng.sample(rational + emotional, users):
            group = rng.choice(list(groups))
            traits = rng.sample(groups[group], 3)
            slots.append(
                {
                    "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
                    "part": part,
                    "main_cha": group,
                    "cha_group": traits,
                    "traits": "\n".join(traits),
                    "talk": "\n".join(rng.sample(talk, 3)),
                    "topic": rng.choice(topics_of_part),
                    "need": need,
                    "task": tasks[names.index(need)],
                }
            )
    return slots


# -------------------------------------------------------------------------------------- the writing


async def write_with_bar(slots, simulator, lang):
    """`write_users`, once the model has shown that it is there."""
    await simulator.check()
    with tqdm(total=3 * len(slots), desc="writing users", unit="part") as bar:
        return await write_users(slots, simulator, lang, bar)


async def write_users(slots, simulator, lang, bar):
    """Write persona, scene, first line into `slots`. Returns {id: why it failed for good}."""
    writer = Writer(simulator, lang, bar)
    for kind in FIELD:
        # Asked all at once, but accepted in the users' order and not in that of the answers, or a
        # slow server would change the file.
        todo = [slot for slot in slots if slot["id"] not in writer.lost]
        answers = await asyncio.gather(*[writer.ask(slot, kind) for slot in todo])
        accepted = {}
        for slot, answer in zip(todo, answers):
            if kind == "first line":
                slot["first_talk"] = answer
            else:
                await writer.accept(slot, kind, answer, accepted)
    return writer.lost


class Writer:
    """Asks a model for the parts of users."""

    def __init__(self, simulator, lang, bar):
        self.simulator, self.lang, self.bar = simulator, lang, bar
        self.lost = {}  # {id: why this user failed for good}
        self.prompts = {
            name: load_prompt(name, lang, "writer", placeholders=placeholders)
            for name, placeholders in PLACEHOLDERS.items()
        }

    async def ask(self, slot, kind, complaint="", attempt=0):
        """One part of one user: of persona and scene {section: text}, of the first line the text;
        None once it failed for good. complaint: why that of an earlier attempt will not do."""
        try:
            if kind == "first line":
                return await self.ask_first_line(slot)
            return await self.ask_sections(slot, kind, complaint, attempt)
        except SimulatorFailed as error:
            self.lost[slot["id"]] = str(error)
            return None
        finally:
            self.bar.update(0 if attempt else 1)

    async def ask_sections(self, slot, kind, complaint, attempt):
        """A persona or a scene. Raises SimulatorFailed."""

        def prepare(errors):  # no mark: no policy speaks in a persona or a scene
            prompt = fill(self.prompts[kind], slot)
            last = str(errors[-1]) if errors else complaint
            if last:
                prompt += "\n\n" + fill(self.prompts["again"], {"complaint": last})
            key = self.simulator.key(prompt, slot["id"] + kind, [attempt, len(errors)])
            return PreparedCall(prompt, "", key)

        def parse(text, mark):
            return read_parts(text, kind, self.lang, slot["task"])

        answer = await self.simulator.put(f"the {kind}", prepare, parse)
        return answer.parsed

    async def ask_first_line(self, slot):
        """The first line, by the simulator's own prompt, as in a dialogue. Raises
        SimulatorFailed."""

        def parse(text, mark):
            return read_first_line(text, mark, self.lang, slot["task"])

        user = User(self.simulator, Profile(**{name: slot.get(name, "") for name in FIELDS}))
        name = slot["id"] + "first line"
        answer = await self.simulator.ask("reply", user.values(), parse, name)
        return answer.parsed

    async def accept(self, slot, kind, parts, accepted):
        """Put a persona or a scene into `slot`. One that is nearly that of somebody else is written
        again. accepted: {name: runs} of those before it. Only the parts are compared: the headings
        are ours, and template text makes nobody alike."""
        for attempt in range(1, ROUNDS + 1):
            if parts is None:
                slot[FIELD[kind]] = None
                return
            runs = runs_of("\n".join(parts.values()))
            name = f"{parts['Name']}, {parts['Job']}" if kind == "persona" else slot["id"]
            duplicate = name if name in accepted else alike(runs, accepted)
            if not duplicate:
                accepted[name] = runs
                slot[FIELD[kind]] = fill(self.prompts[f"{kind}_layout"], {**slot, **parts})
                return
            if attempt < ROUNDS:
                complaint = f"it is nearly the same as {duplicate}"
                parts = await self.ask(slot, kind, complaint, attempt)
        self.lost[slot["id"]] = f"the {kind} is nearly that of {duplicate}, {ROUNDS} times"


# ------------------------------------------------------------------------ what an answer has to be


def read_parts(text, kind, lang, task):
    """The parts of a persona or a scene, {name: text}. Raises ValueError with a complaint that the
    writer can act on. (A theme that is paraphrased is not seen.)"""
    if getattr(text, "cut", False):
        raise ValueError("it was cut off at the limit of its length; be shorter")
    parts = unmarked_sections(text, {name: name for name in PARTS[kind]})
    for name, part in parts.items():
        if not re.search(r"\d" if name == "Age" else r"\w", part):
            raise ValueError(f"section {name} is empty")
    body = "\n".join(parts.values())
    refuse_length_and_theme(body, kind, lang, task)
    if kind == "scene":
        lines_of_dialogue = WRITTEN_DIALOGUE.findall(body)
        if len(lines_of_dialogue) > 1:
            raise ValueError(f"dialogue is written out in it ({lines_of_dialogue[:1]}); report it")
        if squeeze(parts["Raises"]) == squeeze(parts["Lowers"]):
            raise ValueError("the same replies raise and lower the emotion")
    return parts


def read_first_line(text, mark, lang, task):
    """The first line that the user's own hop has answered. Raises ValueError."""
    line = parse_reply(text, mark)[1]
    try:
        refuse_length_and_theme(line, "first line", lang, task)
    except ValueError as error:  # of the fixed list, as for every answer with a mark
        raise Unreadable("opening", str(error)) from None
    if says_goodbye(line):
        raise Unreadable("opening", "the first line says goodbye")
    return line


def refuse_length_and_theme(body, kind, lang, task):
    """Raise ValueError if a text is too short or too long, or says the hidden theme."""
    least, most = BOUNDS[lang][kind]
    if not least <= len(body) <= most:
        raise ValueError(f"the {kind} has {len(body)} characters; {least} to {most} are wanted")
    if squeeze(task) in squeeze(body):
        raise ValueError("it says the hidden theme, which must stay unsaid")


def squeeze(text):
    """Letters and digits alone: neither a comma nor a line end may hide a theme."""
    return re.sub(r"[\W_]+", "", text).casefold()


def runs_of(text):
    """All runs of RUN words of a text."""
    words = words_of(text)
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def alike(runs, others):
    """Who of `others`, {name: runs}, shares over half of the shorter one's runs: a name, or
    None."""
    for name, runs_of_other in others.items():
        if 2 * len(runs & runs_of_other) > min(len(runs), len(runs_of_other)):
            return name
    return None


# --------------------------------------------------------------------------- what is in such a file


def print_check(args):
    """--check. Returns the exit code."""
    if len(args.check) > 2:
        raise BadInput("--check takes one file, or two: of training users and of test users")
    reports = check_files([load_profiles(path, "--check") for path in args.check])
    titles = [*args.check, f"of the users of {args.check[-1]}"]
    for title, report in zip(titles, reports):
        print(title)
        for what, number in report.items():
            if isinstance(number, Counter):
                number = ", ".join(f"{name} {k}" for name, k in number.most_common())
            print(f"    {what:<30}{number}")
    return 0


def check_files(files):
    """What files of users hold, each by itself, and what a second one shares with the first:
    [{what: number, or {value: number}}]. files: lists of Profile."""
    reports = [check_file(people) for people in files]
    if len(files) == 2:
        reports.append(shared_fields(*files))
    return reports


def check_file(people):
    """What a file of users holds: {what: number, or {value: number}}."""

    def times_theme(field):
        """How often each user's field says the hidden theme."""
        return [squeeze(getattr(p, field)).count(squeeze(p.task)) for p in people]

    def mean_length(field):
        return round(sum(len(getattr(p, field)) for p in people) / len(people))

    intentions = [intention_of(p.task, p.need) for p in people]
    return {
        "users": len(people),
        "different personas": len({p.player for p in people}),
        "different scenes": len({p.scene for p in people}),
        "near-duplicate scenes": near_duplicates(people),
        "purposes": Counter(p.target for p in people),
        "needs": Counter(need for need, _ in intentions),
        "kinds": Counter(kind for _, kind in intentions),
        "groups": Counter(p.main_cha for p in people),
        "theme once in the scene": times_theme("scene").count(1),
        "theme in the persona": sum(times > 0 for times in times_theme("player")),
        "theme in the first line": sum(times > 0 for times in times_theme("first_talk")),
        "dialogue in the scene": sum(len(WRITTEN_DIALOGUE.findall(p.scene)) > 1 for p in people),
        "characters, persona": mean_length("player"),
        "characters, scene": mean_length("scene"),
    }


def near_duplicates(people):
    """How many scenes are nearly one before them. Runs of words that stand in more than a twentieth
    of the scenes are template text, and make nobody alike."""
    scenes_with = Counter(run for p in people for run in runs_of(p.scene))
    most = max(2, len(people) / 20)
    before, duplicates = {}, 0
    for p in people:
        runs = {run for run in runs_of(p.scene) if scenes_with[run] <= most}
        if alike(runs, before) is not None:
            duplicates += 1
        before[p.id] = runs
    return duplicates


def shared_fields(first, second):
    """How many users of the second file have a field in common with one of the first."""
    report = {}
    for field in ("id", "player", "scene", "topic"):
        known = {getattr(p, field) for p in first} - {""}
        report[f"{field} is in the first file"] = sum(getattr(p, field) in known for p in second)
    return report


if __name__ == "__main__":
    sys.exit(main())
