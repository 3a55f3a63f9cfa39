"""tools/replay.py - may the user who gives the reward be trusted? The replies of recorded dialogues
are put to a user again.

    python -m tools.replay same-user runs/NAME/dialogues.jsonl
    python -m tools.replay same-user results/after.jsonl --times 5 --simulator-temperature 1
    python -m tools.replay other-user results/after.jsonl --difficulty vanilla challenging
    python -m tools.replay other-words results/after.jsonl --judge openai:MODEL@URL

    same-user    Is the reward the same again? The recorded user hears each dialogue whole. High
                 shares of the same emotions and final scores say that a reward can be repeated, not
                 that it is right.
    other-user   Would another user accept the same replies (RLVER 3.4)? Each reply is heard after
                 the recorded dialogue before it, at the emotion recorded there. The result is the
                 share of replies that lift the emotion. The user does not answer, so it does not
                 say how a dialogue with that user would have gone.
    other-words  Do the words matter? A judge puts each reply in other words, and the user hears
                 both, as in other-user. (Without --judge a script rewords the toy's sentences.)

Earlier versions had no subcommands. --paraphrase, with any flag, is now other-words; --difficulty,
or another --simulator or --reader, is other-user; all else is same-user.
"""

from support.command_line import SCRIPTED, from_anywhere, not_negative, positive
from support.errors import BadInput, SimulatorFailed

import asyncio
import contextlib

import numpy as np
from tqdm.asyncio import tqdm

from players import check_playable, make_simulator
from policy_and_users import USUAL_USER, user_label
from tools.asking import ask, open_call_log, source_of
from tools.dialogues import (
    check_files,
    load_dialogues,
    make_cases,
    mean,
    need_judge,
    reply_slots,
    show_table,
    tool_parser,
    write_outputs,
)

READING = (
    "lift: % of the replies that lift the emotion. Against the line above: % of the same emotions, "
    "% of changes of the same sign, and by how many points a change differs. (A scripted user is "
    "consistent by construction.)"
)

# A feeling is what a user felt at a reply, (emotion, change). The feelings in several dialogues are
# a list of lists, [dialogues][replies].

# ------------------------------------------------------------------------------ the three questions


def same_user(args):
    """Put whole dialogues to the recorded user again. Returns the exit code: 1 if it does not feel
    what was recorded. Raises BadInput."""
    rows, settings = load_rows(args)
    original = USUAL_USER | rows[0]["made_by"]
    if args.difficulty or models_of(settings) != models_of(original):
        raise BadInput(f"{args.files[0]}: recorded with another user; other-user asks this one")
    users = make_users(args, settings)  # without a log: they shall answer anew
    feelings = asyncio.run(hear_all(rows, users, {"": None}))
    result = {"replies": show(feelings, READING), **compare(rows, *feelings.values())}
    write_outputs(args, "replay", result)
    return 1 if result["found"] else 0


def other_user(args):
    """Put each reply, and with other-words its rewording too, to users in its place in the recorded
    dialogue. Returns the exit code."""
    rows, settings = load_rows(args)
    log = None
    if settings["reader"] or settings["simulator"] not in SCRIPTED:
        log = open_call_log("results/replay-calls.jsonl")
    users = make_users(args, settings, log)
    wordings = {"": [[turn["reply"] for turn in row["turns"]] for row in rows]}
    reading = READING
    if args.question == "other-words":
        wordings[", reworded"], source = reword(args)
        reading = source + READING
    feelings = asyncio.run(hear_all(rows, users, wordings))
    write_outputs(args, "replay", {"replies": show(feelings, reading), "found": []})
    return 0


SUBCOMMANDS = {"same-user": same_user, "other-user": other_user, "other-words": other_user}


def load_rows(args):
    """What is replayed, and to whom: (the dialogues as dicts, the settings of the recorded user,
    but for what the flags say). Raises BadInput."""
    check_files(args)
    rows = [vars(dialogue) for dialogue in load_dialogues(*args.files)] * args.times
    settings = USUAL_USER | rows[0]["made_by"]
    settings["lang"] = args.lang = args.lang or settings["lang"]  # args: for the judge
    if args.simulator or args.reader:  # the recorded reader belongs to the recorded simulator
        settings["simulator"] = args.simulator or settings["simulator"]
        settings["reader"] = args.reader
    check_playable(settings["simulator"], [row["profile"] for row in rows])
    return rows, settings


def make_users(args, settings, log=None):
    """{name in the table: Simulator}: a user of each --difficulty."""
    return {
        level or "now": make_simulator(
            settings["simulator"],
            args.lang,
            level or settings["difficulty"],
            temperature=args.simulator_temperature,
            reader=settings["reader"],
            log=log,
        )
        for level in args.difficulty or [None]
    }


def reword(args):
    """Let a judge put each reply in other words. Returns (texts, as in `replay_all`, None where its
    answer could not be read; who the judge is)."""
    need_judge(args)
    cases = make_cases(args.files, "paraphrase", reply_slots)
    answers = ask(args, cases, "paraphrase", {"code": str, "text": str})
    texts = {dialogue.id: [] for dialogue in load_dialogues(*args.files)}
    for answer in answers:
        texts[answer["id"]].append((answer["found"] or {}).get("text"))
    return list(texts.values()) * args.times, source_of(answers)


def models_of(settings):
    """Who plays the user and whose feelings are read, without the addresses of servers."""
    return user_label(settings["simulator"]), user_label(settings["reader"] or "")


# ------------------------------------------------------------------------------------------ hearing


async def replay(first_line, turns, user, texts=None):
    """Put the replies of a recorded dialogue to `user` again. turns: as in dialogues.jsonl; texts:
    what is said in place of the replies. Then each is heard at the recorded emotion: a user with
    its own last emotion would judge another dialogue from the second reply on. Returns its
    feelings, [(emotion, change)]."""
    past, feelings = [{"speaker": "me", "text": first_line}], []
    for i, turn in enumerate(turns):
        if turn["emotion"] is not None:  # else it was malformed and never sent, or never scored
            user.dialogue = list(past)
            feelings.append(await hear(user, texts[i] if texts else turn["reply"]))
            if texts:
                user.emotion = turn["emotion"]
        past.append({"speaker": "friend", "text": turn["reply"]})
        if turn["user"]:
            past.append({"speaker": "me", "text": turn["user"]})
    return feelings


async def hear(user, text):
    """What a user feels after this text, (emotion, change); both are NaN if it fails, or if there
    is no text. A user at 0 or 100 has ended the dialogue, whatever the recorded one did."""
    if user.emotion in (0, 100):
        return user.emotion, 0
    with contextlib.suppress(SimulatorFailed):
        if text:
            _, change = await user.feel(text)
            return user.emotion, change
    return np.nan, np.nan


async def replay_all(rows, model, people, texts=None):
    """`replay` each of `rows` (of `recorded_dialogues`), all at once, since a server takes its
    time. model: a Simulator; people: {id: Profile}; texts: of each row. Without texts a dialogue is
    heard whole, otherwise each reply by itself. Returns the feelings."""
    await model.check()
    calls = []
    for k, row in enumerate(rows):
        user = model.user(people[row["profile_id"]], row["start"], f"replay {k}")
        calls.append(replay(row["first_line"], row["turns"], user, texts and texts[k]))
    return await tqdm.gather(*calls, leave=False)


async def hear_all(rows, users, wordings):
    """The feelings in the dialogues of `rows`: as recorded, and of each of `users`, {name:
    Simulator}, at each of the wordings, {name: texts as in `replay_all`}. Returns {name:
    feelings}."""
    feelings = {"as recorded": []}
    for row in rows:
        pairs = [(turn["emotion"], turn["change"]) for turn in row["turns"]]
        feelings["as recorded"].append([pair for pair in pairs if None not in pair])
    people = {row["profile_id"]: row["profile"] for row in rows}
    for name, model in users.items():
        for wording, texts in wordings.items():
            feelings[name + wording] = await replay_all(rows, model, people, texts)
    return feelings


# ---------------------------------------------------------------------------------------- comparing


def show(feelings, reading):
    """Print {name: feelings} as a table. Returns {name: numbers}."""
    table, above = {}, None
    for name, in_dialogues in feelings.items():
        of_replies = np.array(sum(in_dialogues, []), float)  # [replies, 2]
        emotion, change = np.ma.masked_invalid(of_replies).T
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


def final_score(row, feelings):
    """The score of a recorded dialogue in which a user felt this: 0 if it ended malformed, or if no
    reply was felt."""
    return 0 if row["ended"] == "malformed" or not feelings else feelings[-1][0]


def compare(rows, old, new):
    """Print how the `new` feelings differ from the `old`, recorded ones. Returns {"found": [a
    sentence about a dialogue that is not as recorded], "final": the share of dialogues with the
    recorded score}."""
    same, differences = [], []
    for row, before, after in zip(rows, old, new):
        same.append(final_score(row, after) == row["final"])
        if before != after or not same[-1]:
            differences.append(
                f"line {rows.index(row) + 1}, {row['profile_id']}: {before}, reward "
                f"{row['final'] / 100}; now {after}"
            )
    share = mean(same)
    print(f"the same final score: {100 * share:.1f} % of {len(rows)} dialogues")
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
    text = "who plays the user (default: as recorded, else toy); for same-user only its address"
    add("--simulator", type=from_anywhere, metavar="NAME", help=text)
    text = "whose feelings are read in place of it (default: as recorded, without --simulator)"
    add("--reader", type=from_anywhere, metavar="NAME", help=text)
    text = "sampling temperature of that model (default: 0)"
    add("--simulator-temperature", type=not_negative, default=0.0, metavar="T", help=text)
    add("--lang", choices=["en", "zh"], help="language of the prompts (default: as recorded)")
    levels = ["vanilla", "challenging"]
    text = "other-user, other-words: of the users who hear each reply (default: as recorded)"
    add("--difficulty", nargs="+", choices=levels, help=text)
    text = "other-words: who rewords the replies, openai:MODEL@URL or local:DIR"
    add("--judge", metavar="NAME", help=text)
    parser.set_defaults(temperature=0.0)  # of the judge
    return parser.run(lambda args: SUBCOMMANDS[args.question](args), argv)


if __name__ == "__main__":
    raise SystemExit(main())
