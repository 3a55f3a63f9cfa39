"""tools/acceptance.py - how many replies lift the user's emotion (RLVER 3.4).

    python -m tools.acceptance results/after.jsonl --counted
    python -m tools.acceptance results/after.jsonl --difficulty vanilla challenging \\
        --simulator openai:MODEL@URL

The first number is the share of replies after which the recorded emotion rose. With --difficulty or
--simulator users of each difficulty hear the same replies, each after its recorded past and in the
emotion recorded before it; "accepted" is the share after which theirs rises. It is shown for all
replies, and for each of RLVER's groups of strategies: the replies that use mostly that group. The
toy's grammar names the strategies, or with --judge a judge.

The recorded share is no property of the user alone: it is the policy's too. And what users accept
here does not say how a dialogue with them would have gone: nobody answers.
"""

from support.errors import BadInput
from support.settings import fold, made_by_rule

import asyncio
import sys
from typing import NamedTuple

from tools.dialogues import need_model, users_of
from tools.hearing import add_user_flags, changes_felt, scored_replies
from tools.judge import Judge, add_judge_flags, print_plan
from tools.scores import made_by
from tools.strategies import cases_of as cases_of_file
from tools.strategies import strategies_question, tagged_dialogues
from tools.strategy_codes import RLVER_GROUPS
from tools.tables import add_files, check_files, show_table, tool_parser, write_outputs

READING_OF_GROUPS = "a row: the replies more than half of whose strategies are of this group"


async def acceptance(args):
    """Show the share of replies that lifted the emotion, as recorded; with --difficulty also the
    share that a user of each difficulty accepts, all hearing the same replies. Returns the exit
    code."""
    check_files(args, least=1)
    users_of(args.files)  # refuses what cannot be read before anything is paid for
    check_flags(args)
    replies = []  # those that users hear
    if args.difficulty:
        replies = scored_replies(args.files[0])[: args.limit]

    question = strategies_question(args.lang)
    cases = cases_of_replies(replies, args.files[0]) if args.judge else []
    if args.plan:
        user_calls = len(replies) * len(args.difficulty)
        print_plan(Judge(args), [(question, cases)], user_calls=user_calls)
        return 0
    answers = None  # the judge's
    if args.judge:
        judge = Judge(args)
        await judge.check(question)
        answers = await judge.ask_all(question, cases)

    result = recorded_acceptance(args.files)
    if args.difficulty:
        result |= await acceptance_by_difficulty(args, replies, answers)
    write_outputs(args, "acceptance", result)
    return 0


def check_flags(args):
    """Set the default of --difficulty. Raise BadInput for flags that do not go together, or would
    do nothing, and where a model is needed and not named."""
    if args.simulator and not args.difficulty:
        args.difficulty = ["vanilla", "challenging"]  # as the help of --difficulty says
    if not args.difficulty:
        if args.judge or args.limit:
            raise BadInput(
                "--judge and --limit have no effect on what is recorded: they are for users who "
                "hear the replies again; add --difficulty or --simulator"
            )
        return
    if args.counted:
        raise BadInput(
            "--counted counts what is recorded, --difficulty and --simulator ask users again; "
            "leave out one of the two"
        )
    if len(args.files) > 1:
        raise BadInput("--difficulty and --simulator take the replies of one FILE; name one")
    need_model("simulator", args)


def cases_of_replies(replies, path):
    """What a judge is asked about: a case for each of `replies`, which are of the file `path`."""
    wanted = {(reply.dialogue.id, reply.turn_number) for reply in replies}
    cases = []
    for case in cases_of_file(path):  # one for each reply of the file
        turn_number = case.about["part"]  # a part of a dialogue is here one of its replies
        if (case.about["id"], turn_number) in wanted:
            cases.append(case)
    return cases


# --------------------------------------------------------------------------------- what is recorded


def recorded_acceptance(files):
    """{"positive": % of the scored replies of all files that lifted the emotion, "replies": how
    many there are}. Prints both, and whether the user is a script. A Reply is its dialogue, the
    number of its turn, and its text; its `change` is the recorded one."""
    replies = [reply for path in files for reply in scored_replies(path)]
    changes = [reply.change for reply in replies]
    share = percent_positive(changes)
    print(f"{share:.1f} % of {len(changes)} replies lifted the emotion")
    for user in sorted({reply.dialogue.played_by for reply in replies}):
        if made_by_rule(user):
            print(fold(made_by_rule(user)))
    return {"positive": share, "replies": len(changes)}


def percent_positive(changes):
    """% of these changes of the emotion that lift it."""
    return 100 * sum(change > 0 for change in changes) / len(changes)


# ---------------------------------------------------------------------------- what users hear again


class HeardReply(NamedTuple):
    """A reply to which the users of all difficulties answered."""

    strategies: list | None  # their codes, as "E-1"; None if the judge's answer could not be read
    changes: tuple  # of the emotion of the user of each difficulty


async def acceptance_by_difficulty(args, replies, answers):
    """Let users of each difficulty hear the same Replies. answers: the judge's, with the
    strategies; None, they are named by the toy's grammar. Shows the table, and returns

    {"accepted": its rows, see `rows_of_groups`; "changes": as `changes_felt`; "missing": how many
    replies got no answer from the user of some difficulty}"""
    changes_by_difficulty = await changes_felt(args, replies)
    strategies_of = strategies_by_reply(args.files[0], answers)

    heard_replies = []
    changes_by_reply = zip(*changes_by_difficulty.values())
    for reply, changes in zip(replies, changes_by_reply):
        if None not in changes:
            strategies = strategies_of[reply.dialogue.id, reply.turn_number]
            heard_replies.append(HeardReply(strategies, changes))

    rows = rows_of_groups(heard_replies)
    missing = len(replies) - len(heard_replies)
    notes = [
        made_by_rule(args.simulator or "toy"),
        f"{missing} replies got no answer; {READING_OF_GROUPS}",
    ]
    source = made_by(answers) if answers else "Strategies by the toy's grammar, exactly. "
    reading = source + " ".join(note for note in notes if note)
    show_table("accepted, % of the same replies", [*changes_by_difficulty, "n"], rows, reading)
    return {"accepted": rows, "changes": changes_by_difficulty, "missing": missing}


def strategies_by_reply(path, answers):
    """{(id of a dialogue, number of a turn): the strategies of the reply} of a file. A strategy is
    named by its code."""
    strategies_of = {}
    for tagged in tagged_dialogues(path, answers):
        # each reply: [codes of its strategies, its recorded change]
        for turn_number, (codes, _) in enumerate(tagged["replies"]):
            strategies_of[tagged["id"], turn_number] = codes
    return strategies_of


def rows_of_groups(heard_replies):
    """The rows of the table: {"all", or the name of a group of strategies: [% of its replies that
    the user of a difficulty accepts, one for each difficulty; last, how many replies it has]}.
    Without a row where there is no reply."""
    groups = {"all": heard_replies}
    for name, codes_of_group in RLVER_GROUPS.items():
        groups[name] = [reply for reply in heard_replies if is_mostly(reply, codes_of_group)]

    rows = {}
    for name, replies in groups.items():
        if replies:
            changes_by_difficulty = zip(*[reply.changes for reply in replies])
            shares = [percent_positive(changes) for changes in changes_by_difficulty]
            rows[name] = [*shares, len(replies)]
    return rows


def is_mostly(heard_reply, codes_of_group):
    """Are more than half of the strategies of a HeardReply of this group? One whose strategies are
    not known is of none."""
    strategies = heard_reply.strategies
    if strategies is None:
        return False
    n_of_group = sum(code in codes_of_group for code in strategies)
    return 2 * n_of_group > len(strategies)


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("acceptance", __doc__)
    add_files(parser)
    # --counted changes nothing: with it a command can name the default, as docs/judging.md does
    parser.add_argument(
        "--counted", action="store_true", help="only count the recorded changes (the default)"
    )
    add_user_flags(parser, default_difficulty="both, if --simulator is named")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(acceptance(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
