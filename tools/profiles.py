"""tools/profiles.py - write profiles of simulated users, or count what is in files of profiles.

A profile has a persona group, a persona, a need, a scene and a first line (SAGE 2.2, appendix G).

    python -m tools.profiles --out results/users.jsonl --count 500           the toy's, offline
    python -m tools.profiles --out results/written.jsonl --split 0.2 --writer openai:MODEL@URL
    python -m tools.profiles --check results/users.jsonl                     what is in such a file

--check counts how many profiles are alike. It does not say whether they are believable.

The released script has no seed, reads nothing that the LLM returns and lacks its two seed files.
Here chance decides first (`draw_drafts`): for each profile a persona group, traits, topic and need.
Then a model writes the draft out (`write_profile`): persona, scene, first line, each of them one
JSON object. A profile with a part that cannot be used is left out and counted. The seed alone
decides what is drawn, and every answer of a model is logged (FILE.calls.jsonl): a command that was
killed goes on where it was and ends with the same file.
"""

from players.calls import MAX_THINKING_TOKENS
from players.check import check
from players.users import make_simulator
from support.answers import fill
from support.command_line import SCRIPTED, Parser, fraction, natural, positive, refuse_nesting
from support.errors import BadInput, SimulatorFailed, UnreadableAnswers
from support.files import write_file
from support.needs import need_of

import asyncio
import json
import random
import re
import uuid
from collections import Counter
from pathlib import Path

from tqdm.asyncio import tqdm

from emotion import NEEDS
from people import Profile, load_profiles
from simulator import User
from tools.asking import load_text, open_call_log
from toy import world

# -------------------------------------------------------------------------- write files of profiles

# The fields of a profile, as the file has them.
PROFILE_FIELDS = "id player scene main_cha cha_group topic task need first_talk".split()


def make_profiles(args):
    """Write the files that the flags ask for. Returns the exit code. Raises BadInput, also if
    profiles are missing in the files."""
    out = Path(args.out)
    paths = {"train": out}
    if args.split:
        paths["test"] = out.with_name(f"{out.stem}-test.jsonl")
    for path in paths.values():
        if path.exists():
            raise BadInput(f"--out: {path} is there already; choose another file, or remove it")
    log = open_call_log(out.with_name(f"{out.stem}.calls.jsonl"))
    writer = make_simulator(
        args.writer, args.lang, timeout=180.0, flag="--writer", temperature=1.0, log=log
    )
    missing = {}  # {id of a profile: why it could not be written}
    if args.writer in SCRIPTED:
        profiles = draw_toy_profiles(args.count, args.seed, args.split)
    else:
        profiles = draw_drafts(args.count, args.lang, args.seed, args.split)
        refuse_nesting()
        drafts = profiles["train"] + profiles["test"]
        missing = asyncio.run(write_profiles(drafts, writer, args.lang))
    for split, path in paths.items():
        rows = [profile_row(one) for one in profiles[split] if one["id"] not in missing]
        write_file(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{path}: {len(rows)} users, written by {args.writer}")
    if missing:
        reason = min(missing.values())
        raise BadInput(f"{len(missing)} users are missing, one because {reason}")
    return 0


def draw_toy_profiles(count, seed, split):
    """Draw profiles of the toy, which its scripted user can play: {"train": rows, "test": rows}.
    Their needs take turns."""
    tests = 2 * size_of_test(count // 2, split)
    return {
        "train": world.profiles("train", count - tests, seed),
        "test": world.profiles("heldout", tests, seed),
    }


def size_of_test(count, split):
    """How many of `count` users or topics go to the test file. Raises BadInput if the share `split` would leave one
    of the two files empty."""
    size = round(count * split)
    if split and not 0 < size < count:
        raise BadInput(f"--split {split:g}: there are too few users or topics to cut them so")
    return size


def profile_row(draft):
    """A line of the file: the fields of a profile, "" where the draft has none."""
    return {name: draft.get(name, "") for name in PROFILE_FIELDS}


# ------------------------------------------------------------------------------ what chance decides


def draw_drafts(count, lang, seed, split=0.0):
    """Draw what is decided before a word is written: {"train": drafts, "test": drafts}. A draft is a
    dict of some fields of a profile and of what the prompts ask for.

    The persona group is drawn evenly, and so are three of its traits, three everyday utterances for
    the way of talking, and the topic, all from the seed files (prompts/LANG/writer/).

    split: the share of profiles, and of topics, for the test file. Raises BadInput."""
    topics, utterances, groups = (
        load_text(f"writer/{name}", lang).splitlines() for name in ("topics", "talk", "traits")
    )
    rng = random.Random(f"users {seed}")
    topics = rng.sample(topics, len(topics))
    tests, cut = 2 * size_of_test(count // 2, split), size_of_test(len(topics), split)
    drafts = {"train": [], "test": []}
    for part, size, topics_of_part in (
        ("train", count - tests, topics[cut:]),
        ("test", tests, topics[:cut]),
    ):
        for need, task in draw_needs(size, lang, rng):
            group, traits = rng.choice(groups).split(": ")
            traits = rng.sample(traits.split(", "), 3)
            drafts[part].append(
                {
                    "id": str(uuid.UUID(int=rng.getrandbits(128), version=4)),
                    "main_cha": group,
                    "cha_group": traits,
                    "traits": "\n".join(traits),
                    "talk": "\n".join(rng.sample(utterances, 3)),
                    "topic": rng.choice(topics_of_part),
                    "need": need,
                    "task": task,
                }
            )
    return drafts


def draw_needs(count, lang, rng):
    """Draw the needs of `count` profiles, [(need, its task in words)], by quota: half rational, half
    emotional, and the four of each kind equally often to within one. (RLVER drew each need at random: 57 to 66 of
    its 500 users have each need.)"""
    needs = [(name, need[lang]) for name, need in NEEDS.items()]
    half = count // 2  # of an odd number one more is rational
    quota = (needs[:4] * count)[: count - half] + (needs[4:] * count)[:half]
    return rng.sample(quota, count)


# ------------------------------------------------------------------------------ what a model writes

# What an answer holds: {part: its schema}, see simulator.EMOTION_SCHEMA. No policy speaks here, so
# no code is asked for. The prompts' persona_layout and scene_layout put the texts together.
TEXTS = "sex job hobbies habits speaking_style way_of_talking".split()
PARTS = "event cause timeline conflict attempts state moods raises lowers".split()
SCHEMAS = {
    "persona": {"name": str, "age": int, **dict.fromkeys(TEXTS, str)},
    "scene": dict.fromkeys(PARTS, str),
}


async def write_profiles(drafts, simulator, lang):
    """Write persona, scene and first line into `drafts`, all at the same time. Returns {id of a
    draft that is missing: why}."""
    missing = {}
    # a story is longer than a user's answer
    simulator.caller.model.most_tokens = MAX_THINKING_TOKENS
    await check(simulator, with_feelings=False)

    async def write(draft):
        try:
            await write_profile(draft, simulator, lang)
        except SimulatorFailed as error:
            missing[draft["id"]] = str(error)

    await tqdm.gather(*map(write, drafts), desc="writing users", unit="user")
    return missing


async def write_profile(draft, simulator, lang):
    """Write one draft out: the persona, the scene, and the first line, as the user itself says it in
    a dialogue. Raises SimulatorFailed."""
    for part, field in (("persona", "player"), ("scene", "scene")):
        prompt, layout = load_text(f"writer/{part}", lang), load_text(f"writer/{part}_layout", lang)
        _, answer = await simulator.ask(prompt, draft, SCHEMAS[part], draft["id"])
        refuse_faults(part, map(str, answer.values()), draft["task"])
        draft[field] = fill(layout, draft | answer)
    user = User(simulator, Profile(**profile_row(draft)), name=draft["id"])
    line, goodbye = await user.answer()
    refuse_faults("first line", [line], draft["task"])
    if goodbye:
        raise UnreadableAnswers("its first line says goodbye")
    draft["first_talk"] = line


def refuse_faults(part, texts, theme):
    """Refuse a part of a profile, with these texts, that cannot be used: raise UnreadableAnswers if
    one is blank, or if they say the hidden theme. (The theme in other words is not noticed.)"""
    # only letters and digits are compared: neither a comma nor a line end may hide the theme
    theme, *texts = (re.sub(r"[\W_]+", "", text).casefold() for text in (theme, *texts))
    if "" in texts:
        raise UnreadableAnswers(f"its {part} is not complete")
    if theme in "".join(texts):
        raise UnreadableAnswers(f"its {part} says the hidden theme")


# --------------------------------------------------------------------- what is in files of profiles


def print_check(paths):
    """Print what is in files of profiles and, for two files, what the second shares with the first.
    Returns the exit code. Raises BadInput."""
    files = [load_profiles(path, "--check") for path in paths]
    for path, profiles in zip(paths, files):
        personas = {profile.player for profile in profiles}
        print(f"{path}: {len(profiles)} users, {len(personas)} different personas; needs:")
        needs = Counter(need_of(profile.task, profile.need)[0] for profile in profiles)
        print(f"    {dict(needs.most_common())}")
    if len(files) == 2:
        print(f"{paths[1]} shares with {paths[0]}:")
        for field in ("id", "player", "scene", "topic"):
            first, second = ([getattr(profile, field) for profile in file] for file in files)
            count = sum(value in {*first} - {""} for value in second)
            print(f"    {field:<8}{count} of {len(second)} users")
    return 0


# --------------------------------------------------------------------------------------------- main


def run(args):
    """Look at files, with --check, or write some. Returns the exit code."""
    return print_check(args.check) if args.check else make_profiles(args)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = Parser(
        prog="python -m tools.profiles",
        description="Write profiles of simulated users, or count what is in files of profiles.",
    )
    add = parser.add_argument
    add("--count", type=positive, default=500, metavar="N", help="make N users (default: 500)")
    text = "write them to FILE, a JSONL file (default: results/users.jsonl)"
    add("--out", default="results/users.jsonl", metavar="FILE", help=text)
    text = "toy (users of the toy, the default), openai:MODEL@URL or local:DIR"
    add("--writer", default="toy", metavar="NAME", help=f"who writes them: {text}")
    add("--lang", choices=["en", "zh"], default="en", help="their language (default: en)")
    add("--seed", type=natural, default=0, metavar="N", help="of what is drawn (default: 0)")
    text = "share of users, and of topics, that goes to FILE-test.jsonl (default: 0.0)"
    add("--split", type=fraction, default=0.0, metavar="SHARE", help=text)
    text = "count what is in files of users, and what the second of two shares with the first"
    add("--check", nargs="+", metavar="FILE", help=text)
    return parser.run(run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
