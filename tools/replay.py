"""Is the user that gives the reward consistent? The replies of recorded dialogues are put to their
user again: how often are the emotion, the sign of its change and the final score the same? And is
every reward in the log the one that its dialogue earned?

High shares mean that the user feels the same about the same reply, so that a reward is no accident.
They do not mean that what it feels is right. With --times, "reliability" is the share of the
rewards' variance that the dialogues explain; it depends on how different the dialogues are.

    python -m tools.replay runs/NAME/dialogues.jsonl
    python -m tools.replay results/after.jsonl --times 5 --simulator openai:MODEL@URL
"""

from support.errors import BadInput
from support.files import read_json, read_jsonl, refuse_overwriting, write_json
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION
from support.results import recorded_dialogues, scale_of_settings
from support.rundir import profile_files
from support.settings import Parser, fold, made_by_rule, not_negative, positive
from support.stats import reliability

import asyncio
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evaluate import USUAL_USER, user_label
from simulator import (
    User,
    clamp_change,
    load_profiles,
    make_simulator,
    move_emotion,
    toy_profiles,
)

SHOWN = 20  # of the differences; all are in --json


def people_of(paths):
    """All profiles of the files `paths`. Without any file: all users of the toy that a recorded
    dialogue may be with."""
    people = [profile for path in paths for profile in load_profiles(path)]
    if people:
        return people
    # A run may have held out more than the usual 128 (--eval-size). User i is the same person
    # however many are made, so making 1000 finds those of any usual run.
    return toy_profiles("heldout", 1000) + toy_profiles("train")


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


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.replay",
        description="Put the replies of recorded dialogues to their user again: how often are the "
        "emotion, the sign of its change and the final score the same?",
    )
    parser.add_argument(
        "log", help="a run's dialogues.jsonl, or a result file of evaluate.py", metavar="FILE"
    )
    parser.add_argument(
        "--times",
        help="replay each dialogue N times (default: 1)",
        type=positive,
        default=1,
        metavar="N",
    )
    parser.add_argument(
        "--simulator",
        help="model that plays the user, as in rlver.py (default: the recorded one, else toy)",
        metavar="NAME",
    )
    parser.add_argument(
        "--profiles",
        help="JSONL file with the users of the dialogues (default: that of the run, else the toy's "
        "users)",
        metavar="FILE",
    )
    parser.add_argument(
        "--difficulty",
        help="how much the user hides, and how easily replies please it (default: as recorded, "
        "else vanilla)",
        choices=["vanilla", "challenging"],
    )
    parser.add_argument(
        "--lang",
        help="language of the user's prompts (default: as recorded, else en)",
        choices=["en", "zh"],
    )
    parser.add_argument(
        "--simulator-temperature",
        help="sampling temperature of the model that plays the user (default: 0)",
        type=not_negative,
        default=0.0,
        metavar="T",
    )
    parser.add_argument("--json", help="write the numbers to FILE, too", metavar="FILE")
    return parser


def run(args):
    """The recorded replies put to their own user, or to another one. Returns the exit code: 1 if
    something is not as recorded, though the user is the recorded one."""
    log = Path(args.log)
    refuse_overwriting({"--json": args.json}, [log])
    if not log.is_file():
        raise BadInput(f"{log}: no such file")
    settings = settings_of_log(log)
    recorded_user = {key: settings.get(key, usual) for key, usual in USUAL_USER.items()}
    user = {key: getattr(args, key) or value for key, value in recorded_user.items()}
    simulator = make_simulator(
        user["simulator"],
        user["lang"],
        user["difficulty"],
        temperature=args.simulator_temperature,
    )
    if args.profiles:
        files = [args.profiles]
    else:
        files = profile_files(log.parent, settings.get("profiles"))
    profiles = {profile.id: profile for profile in people_of(files)}
    result = consistency(log, simulator, profiles, args.times)
    if args.json:
        write_json(args.json, result)
    print_shares(result, args.times, scale_of_log(settings))
    by_rule = made_by_rule(user["simulator"])
    if by_rule:  # such a user is consistent by construction
        print(fold(by_rule))
    if not is_same_user(user, recorded_user):
        print(
            "(another user than the one that was recorded: that numbers differ is no fault of "
            "the log)"
        )
        return 0
    print_differences(result["found"])
    return 1 if result["found"] else 0


def is_same_user(user, recorded_user):
    """Are two users the same, {"simulator", "lang", "difficulty"}? The address of a server does not
    matter."""
    is_same_model = user_label(user["simulator"]) == user_label(recorded_user["simulator"])
    is_same_lang = user["lang"] == recorded_user["lang"]
    return is_same_model and is_same_lang and user["difficulty"] == recorded_user["difficulty"]


def settings_of_log(log):
    """The settings that the dialogues of a file were recorded with: of a run's log those of its
    directory; a line of a result file has them itself."""
    of_run = read_json(log.parent / "config.json")
    first = next((row for _, row, _ in read_jsonl(log)), None)
    if isinstance(first, dict) and "history" in first:
        of_sage = {"start": INITIAL_EMOTION["benchmark"], "max_turns": BENCHMARK_TURNS}
        return {"profiles": of_run.get("profiles"), **of_sage, **first.get("rlver", {})}
    return of_run


def scale_of_log(settings):
    """The scale of recorded scores, in words. settings: of `settings_of_log`. Those of a run do not
    hold the start, because training always has the same one."""
    return scale_of_settings({"start": INITIAL_EMOTION["training"], **settings})


def print_shares(result, times, scale):
    """Print what `consistency` returns, but for the differences one by one. scale: of
    `scale_of_log`."""
    print(
        f"{result['turns']} turns replayed: the same emotion in {100 * result['emotion']:.1f} %, "
        f"the same sign in {100 * result['sign']:.1f} %; {result['dialogues']} dialogues: the "
        f"same final score in {100 * result['final']:.1f} %"
    )
    if "spread" in result:
        share = result["reliability"]
        print(
            f"final emotion ({scale}) of one dialogue over {times} replays: standard deviation "
            f"{result['spread']:.1f}; reliability of the reward, the share of its variance that "
            f"dialogues explain: {'-' if share is None else f'{share:.2f}'}"
        )
    for step, (recorded, again) in result["scores"].items():
        print(
            f"held-out users, step {step}: score ({scale}) {recorded:.1f} as recorded, "
            f"{again:.1f} again"
        )


def print_differences(differences):
    """Print the first differences from the record, one a line."""
    for difference in differences[:SHOWN]:
        print(f"not as recorded: {difference}")
    if len(differences) > SHOWN:
        print(f"... and {len(differences) - SHOWN} more")


# -------------------------------------------------------------------------------------- the numbers


class Replayed(NamedTuple):
    """A recorded dialogue and what its user felt when it heard the same replies again."""

    dialogue: dict  # as `recorded_dialogues` has it
    turns: list  # those of its turns whose reply got an emotion
    recorded: list  # the emotion after each of them
    replays: list  # of each replay the emotions; fewer where this user would have ended earlier

    @property
    def is_malformed(self):
        """Did the dialogue end with a malformed reply? Then its reward is 0."""
        return self.dialogue.get("ended") == "malformed"


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
    replayed = []
    for dialogue, replays in zip(dialogues, replays_of_all):
        turns = [turn for turn in dialogue["turns"] if turn["emotion"] is not None]
        recorded = [turn["emotion"] for turn in turns]
        replayed.append(Replayed(dialogue, turns, recorded, replays))
    return {
        **agreement(replayed),
        "found": differences_of(replayed),
        "scores": mean_scores(replayed),
        **reliability(final_emotions(replayed)),
    }


async def replay_all(dialogues, simulator, profiles, times):
    """Replay each dialogue `times` times, all at once, since a server takes its time. Returns
    emotions, [dialogues][times][turns]."""
    await simulator.check()

    async def replay_one(dialogue):
        profile = profiles[dialogue["profile_id"]]
        users = [User(simulator, profile, dialogue["start"], f"replay {k}") for k in range(times)]
        return await asyncio.gather(
            *[replay(dialogue["first_line"], dialogue["turns"], user) for user in users]
        )

    return await asyncio.gather(*[replay_one(dialogue) for dialogue in dialogues])


def agreement(replayed):
    """{"turns": how many were replayed; "emotion", "sign": in which share of them the emotion and
    the sign of its change are as recorded; "dialogues": how many were replayed; "final": in which
    share of them the last emotion is as recorded}. Each replay counts."""
    turns = same_emotions = same_signs = 0
    dialogues = same_finals = 0
    for dialogue, _, recorded, replays in replayed:
        signs_recorded = signs_of_changes(dialogue["start"], recorded)
        for emotions in replays:
            turns += len(recorded)
            same_emotions += count_equal(recorded, emotions)
            same_signs += count_equal(signs_recorded, signs_of_changes(dialogue["start"], emotions))
            dialogues += 1
            same_finals += recorded[-1:] == emotions[-1:]  # also where nobody felt anything
    return {
        "turns": turns,
        "emotion": same_emotions / max(1, turns),
        "sign": same_signs / max(1, turns),
        "dialogues": dialogues,
        "final": same_finals / max(1, dialogues),
    }


def signs_of_changes(start, emotions):
    """-1, 0 or 1 for each emotion: did it fall, stay or rise?"""
    return np.sign(np.diff([start, *emotions])).tolist()


def count_equal(first, second):
    """In how many places two lists have the same; one may be shorter."""
    return sum(x == y for x, y in zip(first, second))


def differences_of(replayed):
    """What is not as recorded: at most one text for each dialogue, with the number of its line."""
    differences = []
    for number, entry in enumerate(replayed, 1):
        problem = wrong_sum_in(entry.dialogue, entry.turns)
        if not problem:
            problem = first_difference(entry.recorded, entry.replays)
        if problem:
            differences.append(f"line {number}, {entry.dialogue['profile_id']}, {problem}")
    return differences


def wrong_sum_in(dialogue, turns):
    """What in a dialogue's own numbers does not add up, or None: each emotion is the one before
    plus the change, clamped; the reward is the last emotion / 100, or 0 if malformed."""
    emotion = dialogue["start"]
    for k, turn in enumerate(turns, 1):
        change = turn.get("change")
        if change is not None and move_emotion(emotion, clamp_change(change)) != turn["emotion"]:
            return f"turn {k}: {emotion} and a change of {change:+d} do not give {turn['emotion']}"
        emotion = turn["emotion"]
    reward = 0 if dialogue.get("ended") == "malformed" else emotion / 100
    if abs(dialogue.get("reward", reward) - reward) > 1e-9:
        return f"reward {dialogue['reward']} as recorded, {reward} by its last emotion"
    return None


def first_difference(recorded, replays):
    """The first emotion that a replay has otherwise, in words, or None."""
    for emotions in replays:
        for k, (before, now) in enumerate(zip(recorded, emotions), 1):
            if before != now:
                return f"turn {k}: emotion {before} as recorded, {now} again"
    return None


def mean_scores(replayed):
    """{step: [mean score of the held-out users as recorded, the same again]} of the evaluations in
    a log. Of several replays the mean counts."""
    pairs_of_step = {}
    for entry in replayed:
        if entry.dialogue.get("split") != "heldout":
            continue
        score = final_score(entry.recorded, entry.is_malformed)
        scores_again = [final_score(emotions, entry.is_malformed) for emotions in entry.replays]
        again = sum(scores_again) / len(scores_again)
        pairs_of_step.setdefault(entry.dialogue["step"], []).append((score, again))
    means = {}
    for step, pairs in pairs_of_step.items():
        means[step] = [sum(column) / len(pairs) for column in zip(*pairs)]
    return means


def final_score(emotions, is_malformed):
    """The score of a dialogue with these emotions: 0 if malformed, or if nobody felt anything."""
    if is_malformed or not emotions:
        return 0
    return emotions[-1]


def final_emotions(replayed):
    """[final emotion of each replay] of each dialogue that has one, for `reliability`. A malformed
    dialogue is left out: its reward is 0, whatever its user feels."""
    finals = []
    for entry in replayed:
        if all(entry.replays) and not entry.is_malformed:
            finals.append([emotions[-1] for emotions in entry.replays])
    return finals


if __name__ == "__main__":
    sys.exit(main())
