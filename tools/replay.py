"""tools/replay.py - may the user who gives the reward be trusted? The replies of recorded dialogues
are put to a user again.

    python -m tools.replay runs/NAME/dialogues.jsonl
    python -m tools.replay results/after.jsonl --times 5 --simulator-temperature 1
    python -m tools.replay results/after.jsonl --difficulty vanilla challenging
    python -m tools.replay results/after.jsonl --paraphrase --judge openai:MODEL@URL

Is the reward the same again? Each dialogue is heard whole by its own user. High shares of the same
emotions and final scores say that a reward can be repeated, not that it is right.

Would another user accept the same replies (RLVER 3.4)? With --difficulty, or another --simulator,
each reply is heard after the recorded dialogue before it, at the emotion recorded there. The result
is the share of replies that lift the emotion. The user does not answer, so it does not say how a
dialogue with that user would have gone.

Do the words matter? With --paraphrase a judge puts each reply in other words, and the user hears
both. (Without --judge a script does it, for the toy's sentences.)
"""

from support.command_line import SCRIPTED, from_anywhere, not_negative, positive
from support.errors import SimulatorFailed

import asyncio
import contextlib

import numpy as np
from tqdm.asyncio import tqdm

from partners import USUAL_USER, user_label
from people import check_playable
from players import make_simulator
from tools.asking import ask_files, made_by, open_call_log
from tools.dialogues import (
    check_files,
    load_dialogues,
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


def replay_file(args):
    """Answer the question that the flags ask. Returns the exit code: 1 if the recorded user does
    not feel what was recorded."""
    check_files(args)
    (path,) = args.files
    rows = [vars(dialogue) for dialogue in load_dialogues(path)] * args.times
    people = {row["profile_id"]: row["profile"] for row in rows}
    recorded = USUAL_USER | rows[0]["made_by"]
    name = args.simulator or recorded["simulator"]
    args.lang = args.lang or recorded["lang"]
    check_playable(name, people.values())
    as_recorded = not (args.simulator or args.reader)
    reader = recorded["reader"] if as_recorded else args.reader
    # the address of a server does not matter
    is_same = user_label(name) == user_label(recorded["simulator"])
    hears_alike = user_label(reader or "") == user_label(recorded["reader"] or "")
    is_replay = is_same and hears_alike and not (args.difficulty or args.paraphrase)
    log = None  # a replay asks again
    if (reader or name not in SCRIPTED) and not is_replay:
        log = open_call_log("results/replay-calls.jsonl")
    how = {"temperature": args.simulator_temperature, "log": log, "reader": reader}
    labels = args.difficulty or ["now"]
    levels = args.difficulty or [recorded["difficulty"]]
    users = {
        label: make_simulator(name, args.lang, level, **how) for label, level in zip(labels, levels)
    }
    wordings, reading = {"": None}, READING
    if not is_replay:
        wordings[""] = [[turn["reply"] for turn in row["turns"]] for row in rows]
    if args.paraphrase:
        wordings[", reworded"], judged_by = reword(args)
        reading = judged_by + READING
    heard = asyncio.run(hear_all(rows, users, wordings, people))
    result = {"replies": show(heard, reading), "found": []}
    if is_replay:
        result |= compare(rows, *heard.values())
    write_outputs(args, "replay", result)
    return 1 if result["found"] else 0


# ------------------------------------------------------------------------------------------ hearing


async def replay(first_line, turns, user, texts=None):
    """Put the replies of a recorded dialogue to `user` again. turns: as in dialogues.jsonl; texts:
    what is said in place of the replies. Then each is heard at the recorded emotion: a user with
    its own last emotion would judge another dialogue from the second reply on. Returns what it
    felt, [(emotion, change)]."""
    past, felt = [{"speaker": "me", "text": first_line}], []
    for i, turn in enumerate(turns):
        if turn["emotion"] is not None:  # else it was malformed and never sent, or never scored
            user.dialogue = list(past)
            felt.append(await hear(user, texts[i] if texts else turn["reply"]))
            if texts:
                user.emotion = turn["emotion"]
        past.append({"speaker": "friend", "text": turn["reply"]})
        if turn["user"]:
            past.append({"speaker": "me", "text": turn["user"]})
    return felt


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
    time. model: a Simulator; people: {id: Profile}; texts: of each row. Returns [rows][turns]."""
    await model.check()
    calls = []
    for k, row in enumerate(rows):
        user = model.user(people[row["profile_id"]], row["start"], f"replay {k}")
        calls.append(replay(row["first_line"], row["turns"], user, texts and texts[k]))
    return await tqdm.gather(*calls, leave=False)


async def hear_all(rows, users, wordings, people):
    """What was felt in the dialogues of `rows`: as recorded, and by each of `users`, {name:
    Simulator}, who hears each of the wordings, {name: texts as in `replay_all`}. Without texts a
    dialogue is heard whole, otherwise each reply by itself. Returns {name: [rows][turns]}."""
    heard = {"as recorded": []}
    for row in rows:
        pairs = [(turn["emotion"], turn["change"]) for turn in row["turns"]]
        heard["as recorded"].append([pair for pair in pairs if None not in pair])
    for name, model in users.items():
        for wording, texts in wordings.items():
            heard[name + wording] = await replay_all(rows, model, people, texts)
    return heard


def show(heard, reading):
    """Print what was felt, {name: [rows][turns]}, as a table. Returns {name: numbers}."""
    table, above = {}, None
    for name, felt in heard.items():
        felt = np.ma.masked_invalid(np.array(sum(felt, []), float)).T  # [2, replies]
        emotion, change = felt
        above = felt if above is None else above
        means = [
            100 * np.mean(change > 0),
            100 * np.mean(emotion == above[0]),
            100 * np.mean(np.sign(change) == np.sign(above[1])),
            np.mean(abs(change - above[1])),
        ]
        table[name] = [*map(float, means), int(change.count())]
        above = felt
    show_table("replies", ["lift", "same", "same sign", "moved", "n"], table, reading)
    return table


def final_score(row, felt):
    """The score of a recorded dialogue in which a user felt this: 0 if it ended malformed, or if no
    reply was felt."""
    return 0 if row["ended"] == "malformed" or not felt else felt[-1][0]


def compare(rows, recorded, heard):
    """Print what a replay found. recorded, heard: what was felt in the dialogues of `rows` then and
    now, [rows][turns]. Returns {"found": [a dialogue that is not as recorded], "final": the share
    of dialogues with the recorded score}."""
    same, found = [], []
    for row, before, after in zip(rows, recorded, heard):
        same.append(final_score(row, after) == round(100 * row["reward"], 6))
        if before != after or not same[-1]:
            found.append(
                f"line {rows.index(row) + 1}, {row['profile_id']}: {before}, reward "
                f"{row['reward']}; now {after}"
            )
    share = mean(same)
    print(f"the same final score: {100 * share:.1f} % of {len(rows)} dialogues")
    for difference in found[:20]:  # all are in --json
        print(f"not as recorded: {difference}")
    return {"found": found, "final": share}


def reword(args):
    """Let a judge put each reply in other words. Returns (texts, [rows][turns], None where its
    answer could not be read; who the judge is)."""
    need_judge(args)
    answers = ask_files(args, reply_slots, "paraphrase", {"code": str, "text": str})
    texts = {dialogue.id: [] for dialogue in load_dialogues(*args.files)}
    for answer in answers:
        texts[answer["id"]].append((answer["found"] or {}).get("text"))
    return list(texts.values()) * args.times, made_by(answers)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("replay", __doc__)
    add = parser.add_argument
    add("files", nargs=1, metavar="FILE", help="a run's dialogues.jsonl, or a result file")
    add("--times", type=positive, default=1, metavar="N", help="replay each dialogue N times")
    text = "who plays the user (default: as recorded, else toy)"
    add("--simulator", type=from_anywhere, metavar="NAME", help=text)
    text = "whose feelings are read in place of it (default: as recorded, without --simulator)"
    add("--reader", type=from_anywhere, metavar="NAME", help=text)
    text = "sampling temperature of that model (default: 0)"
    add("--simulator-temperature", type=not_negative, default=0.0, metavar="T", help=text)
    levels = ["vanilla", "challenging"]
    add("--difficulty", nargs="+", choices=levels, help="of the users who hear each reply")
    add("--lang", choices=["en", "zh"], help="language of the prompts (default: as recorded)")
    add("--paraphrase", action="store_true", help="hear each reply in other words, too")
    add("--judge", metavar="NAME", help="who rewords them: openai:MODEL@URL or local:DIR")
    parser.set_defaults(temperature=0.0)  # of the judge
    return parser.run(replay_file, argv)


if __name__ == "__main__":
    raise SystemExit(main())
