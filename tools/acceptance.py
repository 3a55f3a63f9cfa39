"""tools/acceptance.py - how many replies lift the user's emotion (RLVER 3.4).

    python -m tools.acceptance results/after.jsonl --counted
    python -m tools.acceptance results/after.jsonl --difficulty vanilla challenging \\
        --simulator openai:MODEL@URL

The first number is the share of replies after which the recorded emotion rose. With --difficulty or
--simulator users of each difficulty hear the same replies, each after its recorded past and in the
emotion recorded before it; "accepted" is the share after which theirs rises. It is also shown by
groups of strategies, where one is more than half of what a reply does: told by the toy's grammar,
or by a --judge.

The recorded share is no property of the user alone: it is the policy's too. And what users accept
here does not say how a dialogue with them would have gone: nobody answers.
"""

from support.errors import BadInput, SimulatorFailed
from support.flags import positive
from support.strategies import GROUPS

import asyncio
import contextlib
import sys

import numpy as np

import simulator
from tools.judge import (
    Judge,
    Tables,
    add_files,
    add_judge_flags,
    check_files,
    load_dialogues,
    made_by,
    make_parser,
    messages_of,
    need_model,
    open_call_log,
    print_plan,
    together,
    users_of,
    write_outputs,
)
from tools.strategies import cases_of as reply_cases
from tools.strategies import strategies_question, tagged_dialogues

READING = (
    "; a group: where it is more than half of what a reply does; told of the toy's replies,\n"
    "or by a --judge"
)
# Complaints of the two tools in which users hear replies.
WHO_HEARS = (
    "--difficulty and --simulator are for acceptance, of one FILE and without "
    "--counted, and for validity --paraphrase, with one difficulty and one user"
)
NO_EFFECT = "nobody is asked or hears what --judge or --limit could be for"


async def acceptance(args):
    """Count the replies that lifted the emotion, as recorded; with --difficulty also those that
    users accept who all hear them. Returns the exit code."""
    check_files(args, least=1)
    check_flags(args)
    asked_about = []
    if args.judge:
        asked_about.append((strategies_question(args.lang), heard_cases(args)))
    judge = Judge(args)
    if args.plan:
        replies = scored_replies(args.files[0])[: args.limit] if args.difficulty else []
        print_plan(judge, asked_about, user_calls=len(replies) * len(args.difficulty))
        return 0
    answers = None
    for question, cases in asked_about:
        await judge.check(question)
        answers = await judge.ask_all(question, cases)
    result = recorded_acceptance(args.files)
    tables = Tables()
    if args.difficulty:
        result |= await acceptance_by_user(args, answers, tables)
    write_outputs(args, "acceptance", result, tables)
    return 0


def check_flags(args):
    """Raise BadInput for flags that would do nothing, and where a model is needed and not named;
    fill in the difficulties of --simulator."""
    users_of(args.files)  # raises BadInput for a file that cannot be read
    if args.simulator:
        args.difficulty = args.difficulty or ["vanilla", "challenging"]
    if args.difficulty and (args.counted or len(args.files) > 1):
        raise BadInput(WHO_HEARS)
    if (args.judge or args.limit) and not args.difficulty:
        raise BadInput(NO_EFFECT)
    if args.difficulty:
        need_model("simulator", args)


def recorded_acceptance(files):
    """{"positive": % of the scored replies of all files that lifted the emotion, "replies"}."""
    changes = [
        dialogue["turns"][i]["change"] for path in files for dialogue, i, _ in scored_replies(path)
    ]
    positive = 100 * sum(change > 0 for change in changes) / len(changes)
    print(f"{positive:.1f} % of {len(changes)} replies lifted the emotion")
    return {"positive": positive, "replies": len(changes)}


def scored_replies(path):
    """[(dialogue, number of a turn, reply)] of the replies of a file that got an emotion."""
    replies = [
        (dialogue, i, turn["reply"])
        for dialogue in load_dialogues(path)
        for i, turn in enumerate(dialogue["turns"])
        if turn["change"] is not None
    ]
    if not replies:
        raise BadInput(f"{path}: no reply in it got an emotion")
    return replies


def heard_cases(args):
    """The replies that a judge shall tag: what users do not hear needs no tags."""
    path = args.files[0]
    heard = {(dialogue["id"], i) for dialogue, i, _ in scored_replies(path)[: args.limit]}
    return [case for case in reply_cases(path) if (case.about["id"], case.about["part"]) in heard]


async def acceptance_by_user(args, answers, tables):
    """Of users who all hear the same replies: {"accepted": {"all" or a group of strategies: [% of
    the replies that each user accepts, number of replies]}, "changes", "missing"}. answers: the
    tags of a judge, or None, by the toy's grammar."""
    path = args.files[0]
    replies = scored_replies(path)[: args.limit]
    changes = await changes_felt(args, replies)
    codes_of = {
        (d["id"], i): used
        for d in tagged_dialogues(path, answers)
        for i, (used, _) in enumerate(d["replies"])
    }
    rows = {}
    for name, group in {"all": None, **GROUPS}.items():
        accepted = []  # of each reply that counts, 100 or 0 for each user
        for number, (dialogue, i, _) in enumerate(replies):
            felt = [changes_of_user[number] for changes_of_user in changes.values()]
            used = codes_of[dialogue["id"], i] or ()
            if None not in felt and (group is None or is_mostly(used, group)):
                accepted.append([100.0 * (change > 0) for change in felt])
        if accepted:
            rows[name] = [*np.mean(accepted, 0).tolist(), len(accepted)]
    missing = len(replies) - rows.get("all", [0])[-1]
    source = made_by(answers) if answers else ""
    tables.show(
        "accepted, % of the same replies",
        [*changes, "n"],
        rows,
        f"{source}missing {missing}{READING}",
    )
    return {"accepted": rows, "changes": changes, "missing": missing}


def is_mostly(used, group):
    """Are more than half of the strategies of a reply of this group?"""
    return 2 * sum(code in group for code in used) > len(used)


# --------------------------------------------------------------------------- users who hear replies


async def changes_felt(args, replies):
    """What users of each difficulty feel who hear the same replies, each after its recorded past:
    {difficulty: [change, None where there is none]}. Raises BadInput if a user never answers."""
    path, name = args.files[0], args.simulator or "toy"
    people = {dialogue["id"]: profile_of(dialogue, path) for dialogue, _, _ in replies}
    simulator.refuse_foreign(name, people.values())
    log = None if name.startswith("toy") else open_call_log("acceptance")
    changes = {}
    for level in args.difficulty:  # one after the other: a local model goes before the next comes
        changes[level] = await changes_of_level(args, name, level, replies, people, log)
    return changes


async def changes_of_level(args, name, level, replies, people, log):
    """What users of one difficulty feel: [change, or None, of each of `replies`]. name: of their
    model; people: {id of a dialogue: profile}. Raises BadInput if none answers."""
    model = simulator.make_simulator(name, args.lang, level, retries=args.retries, log=log)
    await model.check()
    jobs = []
    for dialogue, i, reply in replies:
        user = simulator.User(model, people[dialogue["id"]], name=f"{dialogue['id']} {i}")
        jobs.append((user, dialogue, i, reply))
    changes = await together(hear, jobs, level)
    if changes.count(None) == len(replies):
        raise BadInput(
            f"{args.files[0]}: no answer of the {level} user {name} could be read; "
            f"{model.last_failure}"
        )
    return changes


def profile_of(dialogue, path):
    """The profile of a dialogue's user: of a log it is known, of a result file it is read."""
    if "raw" not in dialogue:
        return dialogue["profile"]
    # a result file does not have these two
    return simulator.parse_profile({"main_cha": "?", "cha_group": [], **dialogue["raw"]}, path)


async def hear(user, dialogue, turn, reply):
    """The change of a User who hears `reply` after the recorded dialogue before a turn, in the
    recorded emotion; None if it fails."""
    emotions = [dialogue["start"]]
    emotions += [t["emotion"] for t in dialogue["turns"][:turn] if t["emotion"] is not None]
    user.emotion = emotions[-1]
    user.dialogue = [
        {"speaker": "me" if message["speaker"] == "user" else "friend", "text": message["text"]}
        for message in messages_of(dialogue, turn)
    ]
    with contextlib.suppress(SimulatorFailed):
        _, change, _ = await user.feel(reply)
        return change


def add_user_flags(parser, default_difficulty):
    """Who hears the replies, and how many of them."""
    parser.add_argument(
        "--difficulty",
        nargs="+",
        choices=["vanilla", "challenging"],
        default=[],
        help=f"of users who all hear the same replies (default: {default_difficulty})",
    )
    parser.add_argument(
        "--simulator", help="their model, as in rlver.py (the toy's files need none)"
    )
    parser.add_argument("--limit", type=positive, help="only so many replies")


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = make_parser("acceptance", __doc__)
    add_files(parser)
    parser.add_argument("--counted", action="store_true", help="as recorded alone, the default")
    add_user_flags(parser, "where --simulator is named both")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(acceptance(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
