"""tools/acceptance.py - how many replies lift the user's emotion (RLVER 3.4).

    python -m tools.acceptance results/after.jsonl --counted
    python -m tools.acceptance results/after.jsonl --difficulty vanilla challenging \\
        --simulator openai:MODEL@URL

The first number is the share of replies after which the recorded emotion rose. With --difficulty or
--simulator users of each difficulty hear the same replies, each after its recorded past and in the
emotion recorded before it; "accepted" is the share after which theirs rises. It is shown over all
replies, and over those of which more than half the strategies are of one group; the strategies are
told by the toy's grammar or, with --judge, by a judge.

The recorded share is no property of the user alone: it is the policy's too. And what users accept
here does not say how a dialogue with them would have gone: nobody answers.
"""

from support.errors import BadInput
from support.strategies import RLVER_GROUPS

import asyncio
import sys

import numpy as np

from tools.dialogues import need_model, refuse_unreadable
from tools.hearing import add_user_flags, changes_felt, scored_replies
from tools.judge import Judge, add_judge_flags, print_plan
from tools.scores import made_by
from tools.strategies import cases_of as reply_cases
from tools.strategies import strategies_question, tagged_dialogues
from tools.tables import Tables, add_files, check_files, tool_parser, write_outputs

READING_OF_GROUPS = (
    "a group: the replies of which more than half the strategies are of this group,\n"
    "as the toy's grammar or a --judge tells them"
)


async def acceptance(args):
    """Show the share of replies that lifted the emotion, as recorded; with --difficulty also the
    share that a user of each difficulty accepts, all hearing the same replies. Returns the exit
    code."""
    check_files(args, least=1)
    refuse_unreadable(args.files)
    if args.simulator and not args.difficulty:
        args.difficulty = ["vanilla", "challenging"]  # as the help of --difficulty says
    check_flags(args)
    question = strategies_question(args.lang)
    cases = heard_cases(args) if args.judge else []
    judge = Judge(args)
    if args.plan:
        heard = scored_replies(args.files[0])[: args.limit] if args.difficulty else []
        print_plan(judge, [(question, cases)], user_calls=len(heard) * len(args.difficulty))
        return 0
    tags = None
    if args.judge:
        await judge.check(question)
        tags = await judge.ask_all(question, cases)
    result = recorded_acceptance(args.files)
    tables = Tables()
    if args.difficulty:
        result |= await acceptance_by_difficulty(args, tags, tables)
    write_outputs(args, "acceptance", result, tables)
    return 0


def check_flags(args):
    """Raise BadInput for flags that do not go together, or would do nothing, and where a model is
    needed and not named."""
    if not args.difficulty:
        if args.judge or args.limit:
            raise BadInput(
                "--judge and --limit: they are for replies that users hear; name the users with "
                "--difficulty or --simulator"
            )
        return
    if args.counted:
        raise BadInput(
            "--counted: with it nobody hears the replies; leave it out, or --difficulty and "
            "--simulator"
        )
    if len(args.files) > 1:
        raise BadInput("--difficulty and --simulator: users hear the replies of one FILE at a time")
    need_model("simulator", args)


def heard_cases(args):
    """The cases that a judge shall tag: only of replies that users hear."""
    path = args.files[0]
    heard = {(reply.dialogue.id, reply.turn) for reply in scored_replies(path)[: args.limit]}
    cases = []
    for case in reply_cases(path):
        turn = case.about["part"]  # a case is one reply, and its "part" the number of the turn
        if (case.about["id"], turn) in heard:
            cases.append(case)
    return cases


# --------------------------------------------------------------------------------- what is recorded


def recorded_acceptance(files):
    """{"positive": % of the scored replies of all files that lifted the emotion, "replies": how
    many there are}. Prints both."""
    replies = [reply for path in files for reply in scored_replies(path)]
    changes = [reply.dialogue.turns[reply.turn]["change"] for reply in replies]
    share = 100 * sum(change > 0 for change in changes) / len(changes)
    print(f"{share:.1f} % of {len(changes)} replies lifted the emotion")
    return {"positive": share, "replies": len(changes)}


# ---------------------------------------------------------------------------- what users hear again


async def acceptance_by_difficulty(args, tags, tables):
    """Of users of each difficulty, who all hear the same replies: {"accepted": {"all" or a group of
    strategies: `accepted_shares`}, "changes", "missing"}. tags: a judge's answers, or None, by the
    toy's grammar."""
    path = args.files[0]
    replies = scored_replies(path)[: args.limit]
    changes = await changes_felt(args, replies)  # {difficulty: [change, or None, of each reply]}
    difficulties = list(changes)
    codes_of = codes_by_reply(path, tags)

    # the replies, by their numbers, about which the users of all difficulties could be asked
    answered = []
    for i in range(len(replies)):
        if all(changes[difficulty][i] is not None for difficulty in difficulties):
            answered.append(i)

    rows = {}
    if answered:
        rows["all"] = accepted_shares(changes, answered)
    for name, group in RLVER_GROUPS.items():
        of_group = []
        for i in answered:
            codes = codes_of[replies[i].dialogue.id, replies[i].turn]
            if is_mostly(codes, group):
                of_group.append(i)
        if of_group:
            rows[name] = accepted_shares(changes, of_group)

    missing = len(replies) - len(answered)
    judged_by = made_by(tags) if tags else ""
    reading = f"{judged_by}missing {missing}; {READING_OF_GROUPS}"
    tables.show("accepted, % of the same replies", [*difficulties, "n"], rows, reading)
    return {"accepted": rows, "changes": changes, "missing": missing}


def codes_by_reply(path, tags):
    """{(id of a dialogue, number of a turn): the strategies of the reply} of a file."""
    codes_of = {}
    for tagged in tagged_dialogues(path, tags):
        for i, (codes, _) in enumerate(tagged["replies"]):
            codes_of[tagged["id"], i] = codes
    return codes_of


def accepted_shares(changes, numbers):
    """Of the replies with these `numbers`: [% that the user of a difficulty accepts, one for each
    difficulty; last, how many replies they are]. changes: {difficulty: [change of each reply]}."""
    shares = []
    for changes_of_user in changes.values():
        accepted = [100.0 * (changes_of_user[i] > 0) for i in numbers]
        shares.append(float(np.mean(accepted)))
    return [*shares, len(numbers)]


def is_mostly(codes, group):
    """Are more than half of the strategies of a reply of this group? A reply that could not be
    tagged (None) is of none."""
    if codes is None:
        return False
    return 2 * sum(code in group for code in codes) > len(codes)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("acceptance", __doc__)
    add_files(parser)
    # --counted names what is done without any flag, so that a command can say it
    parser.add_argument("--counted", action="store_true", help="as recorded alone, the default")
    add_user_flags(parser, "where --simulator is named both")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(acceptance(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
