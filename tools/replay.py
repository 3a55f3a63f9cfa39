"""tools/replay.py - may the user who gives the reward be trusted? The replies of recorded dialogues
are put to a user again.

    python -m tools.replay same-user runs/NAME/dialogues.jsonl
    python -m tools.replay same-user results/after.jsonl --times 5 --simulator-temperature 1
    python -m tools.replay other-user results/after.jsonl --difficulty vanilla challenging
    python -m tools.replay other-words results/after.jsonl --judge openai:MODEL@URL

    same-user    Is the reward the same again? The recorded user feels each dialogue whole. High
                 shares of the same emotions and final scores say that a reward can be repeated, not
                 that it is right.
    other-user   Would another user accept the same replies (RLVER 3.4)? Each reply is felt after
                 the recorded dialogue before it, at the emotion recorded there. The result is the
                 share of replies that lift the emotion. The user does not answer, so it does not
                 say how a dialogue with that user would have gone.
    other-words  Do the words matter? A judge puts each reply in other words, and the user feels
                 both, as in other-user. (Without --judge a script rewords the toy's sentences.)

Earlier versions had no subcommands. --paraphrase, with any flag, is now other-words; --difficulty,
or another --simulator or --reader, is other-user; all else is same-user.
"""

from players.check import check
from players.policies import settings_of_talk, user_label
from players.users import check_playable, make_simulator
from support.command_line import SCRIPTED, positive, refuse_nesting
from support.errors import BadInput, SimulatorFailed
from support.settings import add_settings

import asyncio
import contextlib

import numpy as np
from tqdm.asyncio import tqdm

from tools.asking import ask, make_cases, need_judge, open_call_log, reply_slots, source_of
from tools.dialogues import load_dialogues
from tools.tables import check_files, mean, show_table, tool_parser, write_outputs

READING = (
    "lift: % of the replies that lift the emotion. Against the line above: % of the same emotions, "
    "% of changes of the same sign, and by how many points a change differs. (A scripted user is "
    "consistent by construction.)"
)

# A dialogue is a dict, as in support/results.py. It is put to a user in one of two ways:
#
#     whole       the user's emotion moves from reply to reply
#     in texts    each turn has a "text", and the user feels each of them by itself, at the emotion
#                 that is recorded there: the reply, or other words for it, or None if the judge
#                 gave none
#
# A feeling is what a user felt at a reply, (emotion, change). The feelings of a user at several
# dialogues are a list for each dialogue; of two dialogues with two replies and one reply:
#
#     [[(48, 8), (41, -7)], [(45, 5)]]

# ------------------------------------------------------------------------------ the three questions


def same_user(args):
    """Put whole dialogues to the recorded user again. Returns the exit code: 1 if it does not feel
    what was recorded. Raises BadInput."""
    dialogues, settings = load(args)
    original = settings_of_talk({}, dialogues[0]["made_by"])
    if args.difficulty or labels_of(settings) != labels_of(original):
        raise BadInput(f"{args.files[0]}: recorded with another user; other-user asks this one")
    simulators = make_simulators(args, settings)  # without a log: they shall answer anew
    feelings = asyncio.run(all_feelings(dialogues, simulators, {"": dialogues}))
    result = {"replies": show(feelings, READING), **compare(dialogues, *feelings.values())}
    write_outputs(args, "replay", result)
    return 1 if result["found"] else 0


def other_user(args):
    """Put each reply, in its place in the recorded dialogue, to users, and with other-words its
    rewording too. Returns the exit code."""
    dialogues, settings = load(args)
    log = None
    if settings.reader or settings.simulator not in SCRIPTED:
        log = open_call_log("results/replay-calls.jsonl")
    simulators = make_simulators(args, settings, log)
    replies = [turn["reply"] for dialogue in dialogues for turn in dialogue["turns"]]
    versions = {"": with_texts(dialogues, replies)}
    source = ""
    if args.question == "other-words":
        texts, source = reword(args)
        versions[", reworded"] = with_texts(dialogues, texts)
    feelings = asyncio.run(all_feelings(dialogues, simulators, versions))
    write_outputs(args, "replay", {"replies": show(feelings, source + READING), "found": []})
    return 0


SUBCOMMANDS = {"same-user": same_user, "other-user": other_user, "other-words": other_user}


def load(args):
    """Load what is replayed, and to whom: (the dialogues, the TalkSettings by the flags and by the
    record). Raises BadInput."""
    refuse_nesting()
    check_files(args)
    dialogues = [vars(dialogue) for dialogue in load_dialogues(*args.files)] * args.times
    settings = settings_of_talk(vars(args), dialogues[0]["made_by"])
    args.lang = settings.lang  # for the judge
    check_playable(settings.simulator, [dialogue["profile"] for dialogue in dialogues])
    return dialogues, settings


def make_simulators(args, settings, log=None):
    """The Simulator of each --difficulty, {name in the table: Simulator}."""
    return {
        level or "now": make_simulator(
            settings.simulator,
            args.lang,
            level or settings.difficulty,
            temperature=args.simulator_temperature,
            reader=settings.reader,
            template_args=settings.reader_template_args,
            log=log,
        )
        for level in args.difficulty or [None]
    }


def with_texts(dialogues, texts):
    """Copies of the dialogues in which each turn has the next one of `texts`."""
    texts = iter(texts)
    return [
        dialogue | {"turns": [turn | {"text": next(texts)} for turn in dialogue["turns"]]}
        for dialogue in dialogues
    ]


def reword(args):
    """Let a judge put each reply in other words. Returns (texts, for `with_texts`, None where an
    answer could not be read; who the judge is)."""
    need_judge(args)
    cases = make_cases(args.files, "paraphrase", reply_slots)
    answers = ask(args, cases, "paraphrase", {"code": str, "text": str})
    texts = [(answer["found"] or {}).get("text") for answer in answers]
    return texts * args.times, source_of(answers)


def labels_of(settings):
    """The user's model and the reader's, without the addresses of servers."""
    return user_label(settings.simulator), user_label(settings.reader or "")


# ---------------------------------------------------------------------------------- what users feel


async def replay(first_line, turns, user):
    """Put the replies of a recorded dialogue to `user` again. Returns its feelings, [(emotion,
    change)]. turns: as in dialogues.jsonl; where they have a "text", the user feels that, at the
    recorded emotion: with its own last emotion it would judge another dialogue from the second
    reply on."""
    past, feelings = [{"speaker": "me", "text": first_line}], []
    for turn in turns:
        if turn["emotion"] is not None:  # else it was malformed and never sent, or never scored
            user.dialogue = list(past)
            feelings.append(await feeling_at(user, turn.get("text", turn["reply"])))
            if "text" in turn:
                user.emotion = turn["emotion"]
        past.append({"speaker": "friend", "text": turn["reply"]})
        if turn["user"]:
            past.append({"speaker": "me", "text": turn["user"]})
    return feelings


async def feeling_at(user, text):
    """What a user feels at this text, (emotion, change); both are NaN if it fails, or if there is
    no text, None. (An empty text is one: a direct reply may be nothing but a thought, which is
    removed.) A user at 0 or 100 has ended the dialogue, whatever the recorded one did."""
    if user.emotion in (0, 100):
        return user.emotion, 0
    with contextlib.suppress(SimulatorFailed):
        if text is not None:
            _, change = await user.feel(text)
            return user.emotion, change
    return np.nan, np.nan


async def replay_all(dialogues, simulator, profiles):
    """Put each of these dialogues to its user, all at once, since a server takes its time.
    profiles: {id: Profile}. Returns the feelings, a list for each dialogue."""
    await check(simulator)
    calls = []
    for number, dialogue in enumerate(dialogues):
        profile = profiles[dialogue["profile_id"]]
        user = simulator.user(profile, dialogue["start"], f"replay {number}")
        calls.append(replay(dialogue["first_line"], dialogue["turns"], user))
    return await tqdm.gather(*calls, leave=False)


async def all_feelings(dialogues, simulators, versions):
    """The feelings recorded in `dialogues`, and those of the users of each of `simulators`, {name:
    Simulator}, at each of `versions`, {name: dialogues}: {name in the table: feelings}."""
    recorded = []
    for dialogue in dialogues:
        pairs = [(turn["emotion"], turn["change"]) for turn in dialogue["turns"]]
        recorded.append([pair for pair in pairs if None not in pair])
    feelings = {"as recorded": recorded}
    profiles = {dialogue["profile_id"]: dialogue["profile"] for dialogue in dialogues}
    for name, simulator in simulators.items():
        for version, changed in versions.items():
            feelings[name + version] = await replay_all(changed, simulator, profiles)
    return feelings


# ------------------------------------------------------------------------------------ what is shown


def show(feelings, reading):
    """Print {name: feelings} as a table. Returns {name: numbers}."""
    table, above = {}, None
    for name, lists in feelings.items():
        array = np.array(sum(lists, []), float)  # [replies, 2], of all dialogues
        emotion, change = np.ma.masked_invalid(array).T  # NaN: not felt, in no mean
        emotion_above, change_above = above or (emotion, change)
        means = [
            100 * np.mean(change > 0),
            100 * np.mean(emotion == emotion_above),
            100 * np.mean(np.sign(change) == np.sign(change_above)),
            np.mean(abs(change - change_above)),
        ]
        table[name] = [*map(float, means), int(change.count())]
        above = emotion, change
    show_table("replies", ["lift", "same", "same sign", "moved", "n"], table, reading)
    return table


def final_score(dialogue, feelings):
    """The score of a recorded dialogue in which a user felt this: 0 if it ended malformed, or if no
    reply was felt."""
    return 0 if dialogue["ended"] == "malformed" or not feelings else feelings[-1][0]


def compare(dialogues, old, new):
    """Print how the `new` feelings differ from the `old`, recorded ones, a list for each of
    `dialogues`. Returns {"found": [a sentence about a dialogue that is not as recorded], "final":
    the share of dialogues with the recorded score}."""
    same, differences = [], []
    for dialogue, before, after in zip(dialogues, old, new):
        same.append(final_score(dialogue, after) == dialogue["final"])
        if before != after or not same[-1]:
            differences.append(
                f"line {dialogues.index(dialogue) + 1}, {dialogue['profile_id']}: {before}, reward "
                f"{dialogue['final'] / 100}; now {after}"
            )
    share = mean(same)
    print(f"the same final score: {100 * share:.1f} % of {len(dialogues)} dialogues")
    for difference in differences[:20]:  # all are in --json
        print(f"not as recorded: {difference}")
    return {"found": differences, "final": share}


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run the subcommand that the command line names. Returns the exit code."""
    parser = tool_parser("replay", __doc__)
    add = parser.add_argument
    add("question", choices=SUBCOMMANDS, help="see above")
    add("files", nargs=1, metavar="FILE", help="a run's dialogues.jsonl, or a result file")
    add("--times", type=positive, default=1, metavar="N", help="replay each dialogue N times")
    add_settings(
        parser,
        {
            "simulator": "who plays the user (default: as recorded, else toy); for same-user only "
            "its address",
            "reader": "model that reads the replies for it (default: as recorded, without "
            "--simulator)",
            "simulator_temperature": "sampling temperature of that model (default: 0)",
            "lang": "language of the prompts (default: as recorded)",
        },
    )
    add(
        "--difficulty",
        nargs="+",
        choices=["vanilla", "challenging"],
        help="other-user, other-words: of the users who feel each reply (default: as recorded)",
    )
    add(
        "--judge",
        metavar="NAME",
        help="other-words: who rewords the replies, openai:MODEL@URL or local:DIR",
    )
    parser.set_defaults(simulator_temperature=0.0, temperature=0.0)  # the second: of the judge
    return parser.run(lambda args: SUBCOMMANDS[args.question](args), argv)


if __name__ == "__main__":
    raise SystemExit(main())
