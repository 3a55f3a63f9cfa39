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

from support.errors import BadInput
from support.strategies import RLVER_GROUPS

import asyncio
import sys

import numpy as np

from tools.dialogues import need_model, refuse_unreadable
from tools.hearing import NO_EFFECT, WHO_HEARS, add_user_flags, changes_felt, scored_replies
from tools.judge import Judge, add_judge_flags, print_plan
from tools.scores import made_by
from tools.strategies import cases_of as reply_cases
from tools.strategies import strategies_question, tagged_dialogues
from tools.tables import Tables, add_files, check_files, tool_parser, write_outputs

READING_OF_GROUPS = (
    "a group: where it is more than half of what a reply does; told of the toy's replies,\n"
    "or by a --judge"
)


async def acceptance(args):
    """Count the replies that lifted the emotion, as recorded; with --difficulty also those that
    users accept who all hear them. Returns the exit code."""
    check_files(args, least=1)
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
        result |= await acceptance_by_user(args, tags, tables)
    write_outputs(args, "acceptance", result, tables)
    return 0


def check_flags(args):
    """Raise BadInput for flags that would do nothing, and where a model is needed and not named;
    fill in the difficulties of --simulator."""
    refuse_unreadable(args.files)
    if args.simulator:
        args.difficulty = args.difficulty or ["vanilla", "challenging"]
    if args.difficulty and (args.counted or len(args.files) > 1):
        raise BadInput(WHO_HEARS)
    if (args.judge or args.limit) and not args.difficulty:
        raise BadInput(NO_EFFECT)
    if args.difficulty:
        need_model("simulator", args)


def heard_cases(args):
    """The replies that a judge shall tag: what users do not hear needs no tags."""
    path = args.files[0]
    heard = {(reply.dialogue.id, reply.turn) for reply in scored_replies(path)[: args.limit]}
    return [case for case in reply_cases(path) if (case.about["id"], case.about["part"]) in heard]


# --------------------------------------------------------------------------------- what is recorded


def recorded_acceptance(files):
    """{"positive": % of the scored replies of all files that lifted the emotion, "replies": how
    many there are}. Prints both."""
    changes = []
    for path in files:
        for dialogue, i, _ in scored_replies(path):
            changes.append(dialogue.turns[i]["change"])
    share = 100 * sum(change > 0 for change in changes) / len(changes)
    print(f"{share:.1f} % of {len(changes)} replies lifted the emotion")
    return {"positive": share, "replies": len(changes)}


# ---------------------------------------------------------------------------- what users hear again


async def acceptance_by_user(args, tags, tables):
    """Of users who all hear the same replies: {"accepted": {"all" or a group of strategies: [% of
    the replies that each user accepts, number of replies]}, "changes", "missing"}. tags: a judge's
    answers, or None, by the toy's grammar."""
    path = args.files[0]
    replies = scored_replies(path)[: args.limit]
    changes = await changes_felt(args, replies)
    codes_of = codes_by_reply(path, tags)
    codes = [codes_of[reply.dialogue.id, reply.turn] for reply in replies]
    # (changes of all users, strategies) of each reply about which all users could be asked
    answered = []
    for changes_of_reply, codes_of_reply in zip(zip(*changes.values()), codes):
        if None not in changes_of_reply:
            answered.append((changes_of_reply, codes_of_reply))

    rows = {}
    if answered:
        rows["all"] = accepted_shares([felt for felt, _ in answered])
    for name, group in RLVER_GROUPS.items():
        of_group = [felt for felt, used in answered if is_mostly(used, group)]
        if of_group:
            rows[name] = accepted_shares(of_group)

    missing = len(replies) - len(answered)
    judged_by = made_by(tags) if tags else ""
    reading = f"{judged_by}missing {missing}; {READING_OF_GROUPS}"
    tables.show("accepted, % of the same replies", [*changes, "n"], rows, reading)
    return {"accepted": rows, "changes": changes, "missing": missing}


def codes_by_reply(path, tags):
    """{(id of a dialogue, number of a turn): the strategies of the reply} of a file."""
    codes_of = {}
    for tagged in tagged_dialogues(path, tags):
        for i, (codes, _) in enumerate(tagged["replies"]):
            codes_of[tagged["id"], i] = codes
    return codes_of


def accepted_shares(changes_of_replies):
    """[% of the replies that each user accepts, number of replies]. changes_of_replies: of each
    reply the changes of all users."""
    shares = []
    for changes_of_user in zip(*changes_of_replies):
        accepted = [100.0 * (change > 0) for change in changes_of_user]
        shares.append(float(np.mean(accepted)))
    return [*shares, len(changes_of_replies)]


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
    parser.add_argument("--counted", action="store_true", help="as recorded alone, the default")
    add_user_flags(parser, "where --simulator is named both")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(acceptance(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
