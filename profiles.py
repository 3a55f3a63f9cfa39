"""profiles.py - makes users: persona type, persona, need, scene, first line (SAGE 2.2, appendix G).

    python profiles.py --out results/users.jsonl --count 500           by rule, offline
    python profiles.py --out results/written.jsonl --split 0.2 --writer openai:MODEL@URL
    python profiles.py --check results/users.jsonl                     what is in such a file

The released script has no seed, reads nothing that the LLM returns and lacks its two seed files.
Here every answer is cut into named parts and checked; one that cannot be used is asked for again,
with the complaint. What is drawn hangs on the seed alone and every answer is logged
(FILE.calls.jsonl): a command that was killed goes on where it was and ends with the same file.
"""

from support.answers import Unreadable, unmarked_sections
from support.llm import CallLog
from support.results import intention_of
from support.rundir import write_file
from support.settings import BadInput, Parser, SimulatorFailed
from support.signs import words_of

import asyncio
import json
import random
import re
import sys
import uuid
from collections import Counter
from pathlib import Path

from tqdm import tqdm

import toy
from simulator import (
    PLACEHOLDERS,
    PROMPTS,
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

PARTS = {
    "persona": "Name Age Sex Job Hobbies Habits Style Talk".split(),
    "scene": "Event Cause Timeline Conflict Attempts State Moods Raises Lowers".split(),
}
FIELD = {"persona": "player", "scene": "scene", "first line": "first_talk"}
FIELDS = ("id", "player", "scene", "main_cha", "cha_group", "topic", "task", "need", "first_talk")
PLACEHOLDERS.update(
    {
        "persona": {"main_cha", "traits", "talk"},
        "again": {"complaint"},
        "scene": {"player", "topic", "task"},
        "persona_layout": {*PARTS["persona"]},
        "scene_layout": {*PARTS["scene"], "task"},
    }
)
# Characters, at least and at most; the released users have 577 and 1,575 on average, in Chinese.
BOUNDS = {
    "en": {"persona": (150, 4000), "scene": (500, 9000), "first line": (4, 500)},
    "zh": {"persona": (60, 2000), "scene": (200, 5000), "first line": (2, 250)},
}
RUN = 6  # words, in Chinese characters; who shares half of the runs is a near-duplicate
ROUNDS = 4  # in which somebody who is nearly somebody else may be written
# A line of written dialogue: a name, a colon, quotation marks around all the rest; or only those.
SAID = re.compile(
    r"""^[ *-]*(?:(?:[\w'.]{1,12} ?){1,3}[:：] *)?["“「].*["”」]\s*$"""
    r"|^[ *-]*(?:npc|player|friend|me|玩家|朋友|我) *[:：]",
    re.M | re.I,
)


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


def draw_slots(count, topics, talk, groups, tasks, seed, split=0.0):
    """What is settled before a word is written, a dict for each user: persona type uniform, three
    of its traits, three utterances for the way of talking, topic uniform. Needs by quota: half
    rational, half emotional, the four of each equal to within one (RLVER's 500 were drawn: 57 to 66
    of each). `split`: the share of users, and of topics, for the test file. Raises BadInput."""
    rng, slots, names = random.Random(f"users {seed}"), [], list(toy.NEEDS)
    topics, held = rng.sample(topics, len(topics)), round(len(topics) * split)
    tests = 2 * round(count * split / 2)
    if split and not (0 < held < len(topics) and 0 < tests < count):
        raise BadInput(
            f"--split {split:g}: {len(topics)} topics and {count} users cannot be cut "
            "so; take more of them, or a share nearer to 0.5"
        )
    for part, n, own in ("train", count - tests, topics[held:]), ("test", tests, topics[:held]):
        needs = [names[4 * half + k % 4] for half in (0, 1) for k in range(n // 2)]
        for need in rng.sample(needs, n):
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
                    "topic": rng.choice(own),
                    "need": need,
                    "task": tasks[names.index(need)],
                }
            )
    return slots


def squeeze(text):
    """Letters and digits alone: neither a comma nor a line end may hide a theme."""
    return re.sub(r"[\W_]+", "", text).casefold()


def read_parts(text, kind, lang, task):
    """The parts of a persona or a scene, {name: text}. Raises ValueError with a complaint that the
    writer can act on. (A theme that is paraphrased is not seen.)"""
    if getattr(text, "cut", False):
        raise ValueError("it was cut off at the limit of its length; be shorter")
    parts = unmarked_sections(text, {name: name for name in PARTS[kind]})
    for name, part in parts.items():
        if not re.search(r"\d" if name == "Age" else r"\w", part):
            raise ValueError(f"section {name} is empty")
    body, said = "\n".join(parts.values()), SAID.findall("\n".join(parts.values()))
    refuse_length_and_theme(body, kind, lang, task)
    if kind == "scene" and len(said) > 1:
        raise ValueError(f"dialogue is written out in it ({said[:1]}); report it")
    if kind == "scene" and squeeze(parts["Raises"]) == squeeze(parts["Lowers"]):
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


def runs_of(text):
    """All runs of RUN words of a text."""
    words = words_of(text)
    return {tuple(words[i : i + RUN]) for i in range(len(words) - RUN + 1)}


def alike(own, seen):
    """Who in `seen`, {name: runs}, shares over half of the shorter one's runs: a name, or None."""
    return next(
        (name for name, runs in seen.items() if 2 * len(own & runs) > min(len(own), len(runs))),
        None,
    )


async def write_users(slots, simulator, lang, bar):
    """Write persona, scene, first line into `slots`. Returns {id: why it failed for good}."""
    prompts = {
        name: load_prompt(name, lang, "writer")
        for name in ("persona", "scene", "again", "persona_layout", "scene_layout")
    }
    lost = {}

    async def ask(slot, kind, complaint="", round=0):
        """One part of one user, or None once it failed for good. complaint: why the one of an
        earlier `round` will not do."""
        key_of = lambda prompt, unreadable: simulator.key(
            prompt, slot["id"] + kind, [round, unreadable]
        )

        def render(errors):  # no mark: no policy speaks in a persona or a scene
            last = str(errors[-1]) if errors else complaint
            again = "\n\n" + fill(prompts["again"], {"complaint": last}) if last else ""
            return fill(prompts[kind], slot) + again, ""

        try:
            if kind in PARTS:
                *_, found = await simulator.put(
                    f"the {kind}",
                    render,
                    lambda text, _: (read_parts(text, kind, lang, slot["task"]),),
                    key_of,
                )
            else:  # the simulator's own prompt, as in a dialogue
                user = User(simulator, Profile(**{name: slot.get(name, "") for name in FIELDS}))
                *_, found = await simulator.ask(
                    "reply",
                    user.values(),
                    lambda text, mark: (read_first_line(text, mark, lang, slot["task"]),),
                    slot["id"] + kind,
                )
            return found
        except SimulatorFailed as error:
            lost[slot["id"]] = str(error)
        finally:
            bar.update(not round)

    for kind in FIELD:
        # Asked all at once, but accepted in the users' order and not in that of the answers, or a
        # slow server would change the file. Only the parts are compared: the headings are ours, and
        # template text makes nobody alike.
        people, seen = [slot for slot in slots if slot["id"] not in lost], {}
        for slot, found in zip(people, await asyncio.gather(*[ask(slot, kind) for slot in people])):
            for round in range(1, ROUNDS + 1):
                if kind not in PARTS or found is None:
                    slot[FIELD[kind]] = found
                    break
                own = runs_of("\n".join(found.values()))
                name = f"{found['Name']}, {found['Job']}" if kind == "persona" else slot["id"]
                if not (other := name if name in seen else alike(own, seen)):
                    seen[name] = own
                    slot[FIELD[kind]] = fill(prompts[f"{kind}_layout"], {**slot, **found})
                    break
                if round == ROUNDS:
                    lost[slot["id"]] = f"the {kind} is nearly that of {other}, {ROUNDS} times"
                else:
                    found = await ask(slot, kind, f"it is nearly the same as {other}", round)
    return lost


def make_users(args):
    """From the flags to the files. Returns the exit code."""
    if not args.out:
        raise BadInput("--out FILE: say where the users go")
    here, count, out = PROMPTS / args.lang / "writer", args.count + args.count % 2, Path(args.out)
    if count != args.count:
        print(f"--count {args.count} is odd: rounded up to {count}, half rational, half emotional")
    topics = seed_lines(args.topics or here / "topics.txt", 2, "--topics")
    talk = seed_lines(args.talk or here / "talk.txt", 3, "--talk")
    groups = {
        name: traits.split(", ")
        for name, traits in (
            line.split(": ") for line in seed_lines(here / "traits.txt", 3, "traits")
        )
    }
    slots = draw_slots(
        count,
        topics,
        talk,
        groups,
        seed_lines(here / "needs.txt", 8, "needs"),
        args.seed,
        args.split,
    )
    test, calls = (out.with_name(out.stem + end) for end in ("-test.jsonl", ".calls.jsonl"))
    if out.exists() or args.split and test.exists():
        raise BadInput(f"--out {out}: is there already; choose another file, or remove it")
    if args.writer.partition(":")[0] not in ("toy", "openai", "local"):
        raise BadInput(f"--writer {args.writer}: unknown; choose toy, openai:MODEL@URL, local:DIR")
    if args.writer == "toy" and args.lang != "en":
        raise BadInput(
            f"--lang {args.lang}: the writer by rule knows English only; name another "
            "with --writer openai:MODEL@URL or local:DIR"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(calls, calls if calls.exists() else None)
    simulator = (
        Simulator(toy.ScriptedWriter(here / "by_rule.txt"), log=log)
        if args.writer == "toy"
        else make_simulator(
            args.writer,
            args.lang,
            timeout=180.0,
            retries=args.retries,
            flag="--writer",
            temperature=args.temperature,
            log=log,
        )
    )

    async def work():
        await simulator.check()
        with tqdm(total=3 * count, desc="writing users", unit="part") as bar:
            return await write_users(slots, simulator, args.lang, bar)

    lost = asyncio.run(work())
    for part, path in (("train", out), ("test", test))[: 1 + bool(args.split)]:
        own = [
            {name: slot[name] for name in FIELDS}
            for slot in slots
            if slot["part"] == part and slot["id"] not in lost
        ]
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own))
        print(f"{path}: {len(own)} users")
    if lost:
        print(
            f"profiles.py: {len(lost)} of {count} users are missing, the first because "
            f"{next(iter(lost.values()))}; to try again, remove the file and take more --retries "
            f"(what is in {calls} is not paid again)",
            file=sys.stderr,
        )
    return 2 if lost else 0


def check_files(files):
    """What files of users hold, each by itself, and what a second one shares with the first:
    [{what: number, or {value: number}}]. Runs of words that stand in more than a twentieth of a
    file's scenes are template text, and make nobody alike."""
    reports = []
    for people in files:
        theme = lambda field: [squeeze(getattr(p, field)).count(squeeze(p.task)) for p in people]
        mean = lambda field: round(sum(len(getattr(p, field)) for p in people) / len(people))
        often = Counter(run for p in people for run in runs_of(p.scene))
        seen, near = {}, 0
        for p in people:
            own = {run for run in runs_of(p.scene) if often[run] <= max(2, len(people) / 20)}
            near += alike(own, seen) is not None
            seen[p.id] = own
        needs, kinds = zip(*[intention_of(p.task, p.need) for p in people])
        reports.append(
            {
                "users": len(people),
                "different personas": len({p.player for p in people}),
                "different scenes": len({p.scene for p in people}),
                "near-duplicate scenes": near,
                "purposes": Counter(p.target for p in people),
                "needs": Counter(needs),
                "kinds": Counter(kinds),
                "groups": Counter(p.main_cha for p in people),
                "theme once in the scene": theme("scene").count(1),
                "theme in the persona": sum(map(bool, theme("player"))),
                "theme in the first line": sum(map(bool, theme("first_talk"))),
                "dialogue in the scene": sum(len(SAID.findall(p.scene)) > 1 for p in people),
                "characters, persona": mean("player"),
                "characters, scene": mean("scene"),
            }
        )
    if len(files) == 2:
        known = lambda field: {getattr(p, field) for p in files[0]} - {""}
        reports.append(
            {
                f"{field} is in the first file": sum(
                    getattr(p, field) in known(field) for p in files[1]
                )
                for field in ("id", "player", "scene", "topic")
            }
        )
    return reports


def print_check(args):
    """--check. Returns the exit code."""
    if len(args.check) > 2:
        raise BadInput("--check takes one file, or two: of training users and of test users")
    reports = check_files([load_profiles(path, "--check") for path in args.check])
    for title, report in zip([*args.check, f"of the users of {args.check[-1]}"], reports):
        print(title)
        for what, n in report.items():
            print(
                f"    {what:<30}"
                + (
                    ", ".join(f"{name} {k}" for name, k in n.most_common())
                    if isinstance(n, Counter)
                    else str(n)
                )
            )
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = Parser(prog="profiles.py", description="Make simulated users; say what is in files.")
    return parser.flags("profiles").run(
        lambda args: (print_check if args.check else make_users)(args), argv
    )


if __name__ == "__main__":
    sys.exit(main())
