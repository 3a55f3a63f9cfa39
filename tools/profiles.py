"""Make simulated users, or count what is in files of users.

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

from support.errors import BadInput
from support.files import write_file
from support.flags import Parser, fraction, natural, not_negative, positive
from support.llm import CallLog
from support.toy_words import NEEDS

import asyncio
import json
import random
import sys
import uuid
from pathlib import Path

from tqdm import tqdm

from simulator import PROMPTS, Simulator, make_simulator
from tools.checking_profiles import print_check
from tools.scripted import ScriptedWriter
from tools.writing import FIELD_OF_PART, PROFILE_FIELDS, write_users

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
        "--topics",
        help="list of troubles, one a line (default: writer/topics.txt in prompts/en/ or zh/)",
        metavar="FILE",
    )
    parser.add_argument(
        "--talk",
        help="list of everyday utterances, one a line, as examples of how users talk (default: "
        "writer/talk.txt there)",
        metavar="FILE",
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
        "--retries",
        help="ask up to N times again for a part that cannot be used (default: 8)",
        type=natural,
        default=8,
        metavar="N",
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
    calls = out.with_name(out.stem + ".calls.jsonl")
    writer = open_writer(args, calls)
    lost = asyncio.run(write_with_bar(drafts, writer, args.lang))
    for split, path in paths.items():
        users = [d for d in drafts if d["split"] == split and d["id"] not in lost]
        write_profiles(path, users)
        by_rule = ", made by rule: no model wrote them" if args.writer == "toy" else ""
        print(f"{path}: {len(users)} users{by_rule}")
    if lost:
        print(
            f"python -m tools.profiles: {len(lost)} of {count} users are missing, the first "
            f"because {next(iter(lost.values()))}; to try again, remove the file and take more "
            f"--retries (what is in {calls} is not paid again)",
            file=sys.stderr,
        )
    return 2 if lost else 0


async def write_with_bar(drafts, simulator, lang):
    """`write_users`, once the model has shown that it is there."""
    await simulator.check()
    parts = len(FIELD_OF_PART) * len(drafts)
    with tqdm(total=parts, desc="writing users", unit="part") as bar:
        return await write_users(drafts, simulator, lang, bar)


def write_profiles(path, users):
    """Write a file of users, one a line."""
    lines = []
    for user in users:
        row = {name: user[name] for name in PROFILE_FIELDS}
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    write_file(path, "".join(lines))


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
    log = CallLog(calls)
    if calls.exists():
        log.read(calls)
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


# ------------------------------------------------------------------------------ what chance decides


def draw_from_seeds(args, count):
    """`draw_drafts` from the seed files that the flags name, or from ours. Raises BadInput."""
    ours = PROMPTS / args.lang / "writer"
    topics = seed_lines(args.topics or ours / "topics.txt", 2, "--topics")
    utterances = seed_lines(args.talk or ours / "talk.txt", 3, "--talk")
    traits_of = {}
    for line in seed_lines(ours / "traits.txt", 3, "traits"):
        group, traits = line.split(": ")
        traits_of[group] = traits.split(", ")
    tasks = seed_lines(ours / "needs.txt", 8, "needs")
    task_of = dict(zip(NEEDS, tasks))  # needs.txt has the order of NEEDS
    return draw_drafts(count, topics, utterances, traits_of, task_of, args.seed, args.split)


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


if __name__ == "__main__":
    sys.exit(main())
