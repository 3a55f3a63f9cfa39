"""May the user who gives the reward be trusted? The replies of recorded dialogues are put to their
user again: how often are emotion, its sign and the final score the same? And is every reward in the
log the one that its dialogue earned?

High shares mean that the user feels the same about the same reply, so that a reward is no accident.
They do not mean that what it feels is right. With --times, "reliability" is the share of the
rewards' variance that the dialogues explain; it depends on how different the dialogues are.

    python -m tools.replay runs/NAME/dialogues.jsonl
    python -m tools.replay results/after.jsonl --times 5 --simulator openai:MODEL@URL
"""

from support.errors import BadInput
from support.flags import Parser, not_negative, positive
from support.results import recorded_dialogues
from support.rundir import profile_files, read_json, read_jsonl, refuse_overwriting, write_json
from support.stats import reliability

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evaluate import USUAL_USER, user_label
from simulator import User, make_simulator, move_emotion, people_of, replay

SHOWN = 20  # of the differences; all are in --json


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.replay",
        description="Replay recorded dialogues: may the user who gives the reward be trusted?",
    )
    parser.add_argument(
        "log", help="replay the dialogues of a log or a result file", metavar="FILE"
    )
    parser.add_argument(
        "--times", help="how often to replay (default: 1)", type=positive, default=1
    )
    parser.add_argument(
        "--simulator", help="as in rlver.py (default: the run's own, else toy)", metavar="S"
    )
    parser.add_argument(
        "--profiles",
        help="users as JSONL (default: those that the run held out, else the toy's)",
        metavar="FILE",
    )
    parser.add_argument(
        "--difficulty",
        help="(default: the run's own, else vanilla)",
        choices=["vanilla", "challenging"],
    )
    parser.add_argument(
        "--lang",
        help="language of the prompts (default: the run's own, else en)",
        choices=["en", "zh"],
    )
    parser.add_argument(
        "--simulator-temperature", help="(default: 0)", type=not_negative, default=0.0
    )
    parser.add_argument("--json", help="write the tables here too", metavar="FILE")
    return parser


def run(args):
    """The recorded replies put to their own user, or to another one. Returns the exit code: 1 if
    something is not as recorded, though the user is the recorded one."""
    log = Path(args.log)
    refuse_overwriting({"--json": args.json}, [log])
    if not log.is_file():
        raise BadInput(f"{log}: no such file")
    made_by = settings_of_log(log)
    recorded_user = [made_by.get(key, usual) for key, usual in USUAL_USER.items()]
    user = [getattr(args, key) or value for key, value in zip(USUAL_USER, recorded_user)]
    simulator = make_simulator(*user, temperature=args.simulator_temperature)
    if args.profiles:
        files = [args.profiles]
    else:
        files = profile_files(log.parent, made_by.get("profiles"))
    profiles = {profile.id: profile for profile in people_of(files)}
    result = consistency(log, simulator, profiles, args.times)
    if args.json:
        write_json(args.json, result)
    print_shares(result, args.times)
    if [user_label(user[0]), *user[1:]] != [user_label(recorded_user[0]), *recorded_user[1:]]:
        print(
            "(another user than the one that was recorded: that numbers differ is no fault of "
            "the log)"
        )
        return 0
    differences = result["found"]
    for difference in differences[:SHOWN]:
        print(f"not as recorded: {difference}")
    if len(differences) > SHOWN:
        print(f"... and {len(differences) - SHOWN} more")
    return 1 if differences else 0


def settings_of_log(log):
    """The settings that the dialogues of a file were recorded with: of a run's log those of its
    directory; a line of a result file has them itself."""
    of_run = read_json(log.parent / "config.json")
    first = next((row for _, row, _ in read_jsonl(log)), None)
    if isinstance(first, dict) and "history" in first:
        return {"profiles": of_run.get("profiles"), **first.get("rlver", {})}
    return of_run


def print_shares(result, times):
    """What `consistency` says, but for the differences one by one."""
    print(
        f"{result['turns']} turns replayed: the same emotion in {100 * result['emotion']:.1f} %, "
        f"the same sign in {100 * result['sign']:.1f} %; {result['dialogues']} dialogues: the "
        f"same final score in {100 * result['final']:.1f} %"
    )
    if "spread" in result:
        share = result["reliability"]
        print(
            f"final emotion of one dialogue over {times} replays: standard deviation "
            f"{result['spread']:.1f}; reliability of the reward, the share of its variance that "
            f"dialogues explain: {'-' if share is None else f'{share:.2f}'}"
        )
    for step, (recorded, again) in result["scores"].items():
        print(f"held-out users, step {step}: score {recorded:.1f} as recorded, {again:.1f} again")


# --------------------------------------------------------------------------------- the numbers


def consistency(path, simulator, profiles, times=1):
    """Replay recorded dialogues through `simulator`, `times` times: how often are emotion, its sign
    and the final score the same, and is every reward in the log the one that its dialogue earned?
    path: a run's dialogues.jsonl, or a result file of ours. profiles: {id: Profile}.

    Returns {"turns", "emotion", "sign", "final" (shares), "dialogues", "found": [what is not as
    recorded, by line and turn], "scores": for each evaluation in a log, by its step, the mean final
    emotion [as recorded, again]}: with another simulator than the recorded one that tells how the
    same replies do with another user. And with several `times` the `reliability` of the reward."""
    dialogues = list(recorded_dialogues(path))
    for number, dialogue in enumerate(dialogues, 1):
        if dialogue["profile_id"] not in profiles:
            raise BadInput(
                f"{path}, line {number}: profile {dialogue['profile_id']!r} is "
                "unknown; name its file with --profiles"
            )
    replays_of_all = asyncio.run(replay_all(dialogues, simulator, profiles, times))
    agreement, differences, scores, finals = Agreement(), [], {}, []
    for number, (dialogue, replays) in enumerate(zip(dialogues, replays_of_all), 1):
        turns = [turn for turn in dialogue["turns"] if turn["emotion"] is not None]
        recorded = [turn["emotion"] for turn in turns]
        malformed = dialogue.get("ended") == "malformed"
        for emotions in replays:
            agreement.count(dialogue["start"], recorded, emotions)
        problem = arithmetic(dialogue, turns) or first_difference(recorded, replays)
        if problem:
            differences.append(f"line {number}, {dialogue['profile_id']}, {problem}")
        if all(replays) and not malformed:  # the reward of a malformed one is 0 anyway
            finals.append([emotions[-1] for emotions in replays])
        if dialogue.get("split") == "heldout":
            score = final_score(recorded, malformed)
            again = sum(final_score(emotions, malformed) for emotions in replays) / times
            scores.setdefault(dialogue["step"], []).append((score, again))
    return {
        **agreement.shares(),
        "found": differences,
        "scores": {step: mean_of_pairs(pairs) for step, pairs in scores.items()},
        **reliability(finals),
    }


async def replay_all(dialogues, simulator, profiles, times):
    """Replay each dialogue `times` times, all at once, since a server takes its time. Returns
    emotions, [dialogues][times][turns]."""
    await simulator.check()

    async def replay_one(dialogue):
        profile = profiles[dialogue["profile_id"]]
        users = [User(simulator, profile, dialogue["start"], f"replay {k}") for k in range(times)]
        return await asyncio.gather(*[replay(dialogue, user) for user in users])

    return await asyncio.gather(*[replay_one(dialogue) for dialogue in dialogues])


@dataclass
class Agreement:
    """In how many turns, and at how many ends, replays agree with the record."""

    turns: int = 0
    same_emotion: int = 0
    same_sign: int = 0  # of the change of emotion
    replays: int = 0
    same_final: int = 0

    def count(self, start, recorded, again):
        """Count one replay. recorded, again: emotions after each turn. (A replay may be shorter,
        where this user would have ended the dialogue.)"""
        signs_recorded = np.sign(np.diff([start, *recorded]))
        signs_again = np.sign(np.diff([start, *again]))
        self.turns += len(recorded)
        self.same_emotion += sum(x == y for x, y in zip(recorded, again))
        self.same_sign += int(sum(x == y for x, y in zip(signs_recorded, signs_again)))
        self.replays += 1
        self.same_final += recorded[-1:] == again[-1:]

    def shares(self):
        """As the result has them."""
        return {
            "turns": self.turns,
            "emotion": self.same_emotion / max(1, self.turns),
            "sign": self.same_sign / max(1, self.turns),
            "dialogues": self.replays,
            "final": self.same_final / max(1, self.replays),
        }


def final_score(emotions, malformed):
    """The score of a dialogue with these emotions: 0 if malformed, or if nobody felt anything."""
    return 0 if malformed or not emotions else emotions[-1]


def mean_of_pairs(pairs):
    """[mean of the first ones, mean of the second ones]."""
    return [sum(column) / len(pairs) for column in zip(*pairs)]


def first_difference(recorded, replays):
    """The first emotion that a replay has otherwise, in words, or None."""
    for emotions in replays:
        for k, (before, now) in enumerate(zip(recorded, emotions), 1):
            if before != now:
                return f"turn {k}: emotion {before} as recorded, {now} again"
    return None


def arithmetic(dialogue, turns):
    """What in a dialogue's own numbers does not add up, or None: each emotion is the one before
    plus the change, clamped; the reward is the last emotion / 100, or 0 if malformed."""
    emotion = dialogue["start"]
    for k, turn in enumerate(turns, 1):
        change = turn.get("change")
        if change is not None and move_emotion(emotion, change) != turn["emotion"]:
            return f"turn {k}: {emotion} and a change of {change:+d} do not give {turn['emotion']}"
        emotion = turn["emotion"]
    reward = 0 if dialogue.get("ended") == "malformed" else emotion / 100
    if abs(dialogue.get("reward", reward) - reward) > 1e-9:
        return f"reward {dialogue['reward']} as recorded, {reward} by its last emotion"
    return None


if __name__ == "__main__":
    sys.exit(main())
