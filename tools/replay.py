"""tools/replay.py - may the user who gives the reward be trusted? The replies of recorded dialogues
are put to a user again.

    python -m tools.replay runs/NAME/dialogues.jsonl
    python -m tools.replay results/after.jsonl --times 5 --simulator-temperature 1
    python -m tools.replay results/after.jsonl --difficulty vanilla challenging
    python -m tools.replay results/after.jsonl --paraphrase --judge openai:MODEL@URL

Is the reward the same again? Each dialogue is heard whole by its own user: how often are the
emotion, the sign of its change and the final score the same? High shares say that a reward is no
accident, not that it is right.

Would another user accept the same replies (RLVER 3.4)? With --difficulty, or another --simulator,
each reply is heard after the recorded dialogue before it, in the emotion recorded there. Accepted
is the share after which the emotion rises. Nobody answers, so it does not say how a dialogue with
that user would have gone.

Do the words matter? With --paraphrase a judge puts each reply in other words, and one user hears
both. (Without --judge a script does it, for the toy's sentences.)
"""

from support import stats
from support.errors import BadInput, SimulatorFailed
from support.files import read_json, read_jsonl
from support.results import recorded_dialogues
from support.settings import SCRIPTED, fold, not_negative, positive, scripted_notice

import asyncio
import contextlib
import dataclasses
import sys
from itertools import zip_longest
from pathlib import Path

import numpy as np
from tqdm.asyncio import tqdm

import simulator
from evaluate import USUAL_USER, user_label
from simulator import User
from tools.asking import Judge, load_question, made_by, open_call_log
from tools.dialogues import (
    check_files,
    load_dialogues,
    make_cases,
    messages_of,
    need_model,
    reply_slots,
    show_table,
    tool_parser,
    write_outputs,
)

SHOWN = 20  # differences from the record; all are in --json


def replay_file(args):
    """Answer the question that the flags ask. Returns the exit code: 1 if something is not as
    recorded, though the user is the recorded one."""
    check_files(args, least=1)
    (path,) = args.files
    people = {dialogue.profile_id: profile_of(dialogue) for dialogue in load_dialogues(path)}
    recorded = USUAL_USER | settings_of(path)
    args.simulator = args.simulator or recorded["simulator"]
    args.lang = args.lang or recorded["lang"]
    levels = args.difficulty or [recorded["difficulty"]]
    # the address of a server does not matter
    is_same_user = user_label(args.simulator) == user_label(recorded["simulator"])
    is_other = args.difficulty or not is_same_user or args.lang != recorded["lang"]
    if args.paraphrase and len(levels) > 1:
        raise BadInput("--paraphrase: one user hears both wordings; name one --difficulty")
    simulator.check_playable(args.simulator, people.values())
    if args.paraphrase:
        result = {"paraphrase": asyncio.run(compare_words(args, levels[0], people))}
    elif is_other:
        result = asyncio.run(acceptance(args, levels, people))
    else:
        user = make_user(args, levels[0], log=None)  # which is there to be asked again
        result = consistency(path, user, people, args.times)
        print_consistency(result)
    if args.simulator in SCRIPTED:  # such a user is consistent by construction
        print(fold(scripted_notice(args.simulator)))
    write_outputs(args, "replay", result)
    return 1 if result.get("found") else 0


def settings_of(path):
    """The settings that the dialogues of a file were recorded with: a line of our result files has
    them itself; those of a run's log are in its directory."""
    first = next((row for _, row, _ in read_jsonl(path) if row), {})
    return read_json(Path(path).parent / "config.json") | first.get("rlver", {})


def profile_of(dialogue):
    """The profile of a dialogue's user: of a log it is known, of a result file it is read."""
    if dialogue.raw is None:
        return dialogue.profile
    # a result file does not have these two
    row = {"main_cha": "?", "cha_group": [], **dialogue.raw}
    names = [field.name for field in dataclasses.fields(simulator.Profile)]
    return simulator.Profile(**{name: row[name] for name in names if row.get(name) is not None})


def make_user(args, level, log):
    """The Simulator of one difficulty. What a server answers is kept in `log`, a CallLog."""
    temperature = args.simulator_temperature
    return simulator.make_simulator(
        args.simulator, args.lang, level, temperature=temperature, log=log
    )


# --------------------------------------------------------------------- is the reward the same again?


async def replay(first_line, turns, user):
    """Put the replies of a recorded dialogue to `user` again. turns: as in dialogues.jsonl. Returns
    the emotion after each of them."""
    user.dialogue = [{"speaker": "me", "text": first_line}]
    emotions = []
    for turn in turns:
        if turn["emotion"] is None:  # a malformed reply: never sent
            break
        await user.feel(turn["reply"])
        emotions.append(user.emotion)
        if user.emotion in (0, 100):  # where this user ends it, whatever the recorded one did
            break
        if turn["user"]:
            user.dialogue.append({"speaker": "me", "text": turn["user"]})
    return emotions


async def replay_all(dialogues, model, profiles, times):
    """Replay each of `dialogues` (of `recorded_dialogues`) `times` times, all at once, since a
    server takes its time. model: a Simulator; profiles: {id: Profile}. Returns emotions,
    [dialogues][times][turns]."""
    await model.check()

    async def replay_one(dialogue):
        profile = profiles[dialogue["profile_id"]]
        users = [User(model, profile, dialogue["start"], f"replay {k}") for k in range(times)]
        return await asyncio.gather(
            *[replay(dialogue["first_line"], dialogue["turns"], user) for user in users]
        )

    return await asyncio.gather(*[replay_one(dialogue) for dialogue in dialogues])


def final_score(emotions, is_malformed):
    """The score of a dialogue with these emotions: 0 if malformed, or if nobody felt anything."""
    return 0 if is_malformed or not emotions else emotions[-1]


def consistency(path, model, profiles, times=1):
    """Replay the dialogues of a run's log, or of a result file. Each replay counts. Returns
    {"turns", "emotion" and "sign" (the shares of turns in which they are as recorded), "dialogues",
    "final" (the share whose last emotion is), "found": [the first thing in a dialogue that is not as
    recorded]}."""
    dialogues = list(recorded_dialogues(path))
    same_emotion, same_sign, same_final, found = [], [], [], []
    heard = asyncio.run(replay_all(dialogues, model, profiles, times))
    for number, (dialogue, replays) in enumerate(zip(dialogues, heard), 1):
        recorded = [turn["emotion"] for turn in dialogue["turns"] if turn["emotion"] is not None]
        for emotions in replays:
            # a user who ends the dialogue earlier has not the same emotion in the turns left out
            same_emotion += [a == b for a, b in zip_longest(recorded, emotions)]
            signs = [np.sign(np.diff([dialogue["start"], *felt])) for felt in (recorded, emotions)]
            same_sign += [a == b for a, b in zip_longest(*signs)]
            same_final.append(recorded[-1:] == emotions[-1:])  # also where nobody felt anything
        where = f"line {number}, {dialogue['profile_id']}"
        score = final_score(recorded, dialogue.get("ended") == "malformed")
        if round(100 * dialogue["reward"], 6) != score:
            found.append(f"{where}, reward {dialogue['reward']}, though it ends at {score}")
        elif any(emotions != recorded for emotions in replays):
            found.append(f"{where}, emotions {recorded} as recorded, {replays} again")
    return {
        "turns": len(same_emotion),
        "emotion": float(np.mean(same_emotion)),
        "sign": float(np.mean(same_sign)),
        "dialogues": len(same_final),
        "final": float(np.mean(same_final)),
        "found": found,
    }


def print_consistency(result):
    """Print what `consistency` returns, and the first of the differences."""
    for what, of in (("emotion", "turns"), ("sign", "turns"), ("final", "dialogues")):
        print(f"the same {what:<8} {100 * result[what]:5.1f} % of {result[of]} {of}")
    for difference in result["found"][:SHOWN]:
        print(f"not as recorded: {difference}")


# ------------------------------------------- would another user accept the replies? do words matter?


async def acceptance(args, levels, people):
    """How many replies lift the emotion: {"as recorded" and each difficulty: [% of them, their
    number]}. A reply that the user failed to hear does not count."""
    (path,) = args.files
    replies, recorded = [], []
    for dialogue in load_dialogues(path):
        for i, turn in enumerate(dialogue.turns):
            if turn["change"] is not None:
                replies.append((dialogue, i, turn["reply"]))
                recorded.append(turn["change"])
    if not replies:
        raise BadInput(f"{path}: no reply in it has a change of emotion")
    changes = {"as recorded": recorded}
    for level in levels:
        felt = await hear_all(args, level, replies[: args.limit], people)
        changes[level] = [change for change in felt if change is not None]
    rows = {
        name: [100 * float(np.mean(np.array(felt) > 0)), len(felt)]
        for name, felt in changes.items()
    }
    show_table("replies that lift the emotion", ["%", "replies"], rows, "")
    return {"accepted": rows}


async def hear_all(args, level, replies, people):
    """What users of this difficulty feel who hear each of `replies`, (dialogue, turn from 0, text):
    [change, None where the user failed]. Raises BadInput if all fail."""
    log = None if args.simulator in SCRIPTED else open_call_log("results/replay-calls.jsonl")
    model = make_user(args, level, log)
    await model.check()
    calls = []
    for dialogue, i, text in replies:
        name = f"{dialogue.id} {i}"  # in the log of calls
        user = User(model, people[dialogue.profile_id], name=name)
        calls.append(hear(user, dialogue, i, text))
    changes = await tqdm.gather(*calls, leave=False)
    if changes.count(None) == len(changes):
        raise BadInput(f"no answer of the user {args.simulator} could be read")
    return changes


async def hear(user, dialogue, i, text):
    """The change of a User who hears `text` after the recorded dialogue before turn i, in the
    emotion recorded there; None if it fails. (A user who went on with what it felt itself would
    judge another dialogue from the second reply on.)"""
    felt = [turn["emotion"] for turn in dialogue.turns[:i] if turn["emotion"] is not None]
    user.emotion = [dialogue.start, *felt][-1]
    speakers = {"user": "me", "assistant": "friend"}
    user.dialogue = [
        {**message, "speaker": speakers[message["speaker"]]} for message in messages_of(dialogue, i)
    ]
    with contextlib.suppress(SimulatorFailed):
        _, change = await user.feel(text)
        return change
    return None


async def compare_words(args, level, people):
    """By how much does the change of one user differ when a judge puts the same reply in other
    words? Shows and returns {"moved": [mean, from, to, n], "same sign": the same}."""
    (path,) = args.files
    need_model("judge", args)
    judge = Judge(args)
    schema = {"code": str, "text": str}
    question = load_question("paraphrase", args.lang, ["dialogue", "reply"], schema, repeated=False)
    await judge.check(question)
    cases = make_cases(path, "paraphrase", reply_slots)[: args.limit]
    answers = await judge.ask_all(question, cases)
    dialogue_of = {dialogue.id: dialogue for dialogue in load_dialogues(path)}
    pairs = []
    for answer in answers:
        if answer["found"]:
            dialogue, i = dialogue_of[answer["id"]], answer["part"]
            for text in (dialogue.turns[i]["reply"], answer["found"]["text"]):
                pairs.append((dialogue, i, text))
    changes = await hear_all(args, level, pairs, people)
    heard = [pair for pair in zip(changes[::2], changes[1::2]) if None not in pair]
    moved = [abs(before - after) for before, after in heard]
    same_sign = [np.sign(before) == np.sign(after) for before, after in heard]
    rows = {
        "moved": stats.interval(np.mean, moved),
        "same sign": stats.interval(np.mean, same_sign),
    }
    reading = "moved: by how many points the change differs; same sign: how often it keeps its sign"
    columns = ["mean", "from", "to", "n"]
    show_table("the same reply in other words", columns, rows, made_by(answers) + reading)
    return rows


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("replay", __doc__)
    add = parser.add_argument
    add("files", nargs=1, metavar="FILE", help="a run's dialogues.jsonl, or a result file")
    add("--times", type=positive, default=1, metavar="N", help="replay each dialogue N times")
    add("--simulator", metavar="NAME", help="who plays the user (default: as recorded, else toy)")
    text = "sampling temperature of that model (default: 0)"
    add("--simulator-temperature", type=not_negative, default=0.0, metavar="T", help=text)
    levels = ["vanilla", "challenging"]
    add("--difficulty", nargs="+", choices=levels, help="of the users who hear each reply")
    add("--lang", choices=["en", "zh"], help="language of the prompts (default: as recorded)")
    add("--limit", type=positive, metavar="N", help="only the first N replies")
    add("--paraphrase", action="store_true", help="hear each reply in other words, too")
    add("--judge", metavar="NAME", help="who finds them: openai:MODEL@URL or local:DIR")
    parser.set_defaults(repeats=1, temperature=0.0, retries=4)  # of the judge
    return parser.run(replay_file, argv)


if __name__ == "__main__":
    sys.exit(main())
