"""recompute.py - does a run that was handed in fit together?

A run of this project can be recomputed to a large part. The metrics follow from the dialogues, the
emotions from the changes, the users of each step from the seed. The toy's user answers by rule, so
it can be asked again, and must say the same word for word. What cannot be recomputed is what the
policy sampled and how it was trained: for that there are the bands of the reference runs
(support/reference.py) and the signatures of known mistakes (signatures.py).
"""

from support.answers import mark_of
from support.metrics import batch_metrics, summarise
from support.settings import SCRIPTED
from support.users import INITIAL_EMOTION

import asyncio
import functools
import hashlib
import json
import math
import random
from collections import Counter

from handed_in import and_more, with_others
from policy import Episode, split_thought
from simulator import (
    MAX_CHANGE,
    User,
    make_simulator,
    move_emotion,
    parse_emotion,
    profiles_of_step,
    says_goodbye,
    users_of_run,
)

START = INITIAL_EMOTION["training"]  # of all dialogues of a run, also of its evaluations

# ---------------------------------------------------------------------------- is it consistent?


def contradictions(run):
    """What in a run's files does not follow from the rest: sentences, none for a consistent run."""
    return [
        *contradictions_in_dialogues(run),
        *contradictions_in_metrics(run),
        *contradictions_in_summary(run),
        *contradictions_in_users(run),
        *contradictions_in_replays(run),
    ]


def all_dialogues(run):
    """The dialogues of a run, of training and of evaluations."""
    for split in (run.training, run.heldout):
        for dialogues in split.values():
            yield from dialogues


def contradictions_in_dialogues(run):
    """Whether emotions follow from changes, and ends and rewards from emotions."""
    wrong = []
    for dialogue in all_dialogues(run):
        problem = problem_of_dialogue(dialogue, run.settings)
        if problem:
            wrong.append(f"step {dialogue['step']}, {dialogue['profile_id']}: {problem}")
    if wrong:
        yield f"a dialogue does not fit together: {wrong[0]}{and_more(wrong)}"


def problem_of_dialogue(dialogue, cfg):
    """What in one dialogue does not follow from the rest of it, in words; None if all does."""
    emotion = START
    for turn in dialogue["turns"]:
        if turn["emotion"] is None:  # malformed: never sent
            break
        if turn["change"] is None or abs(turn["change"]) > MAX_CHANGE:
            return f"a change of {turn['change']}"
        moved = move_emotion(emotion, turn["change"])
        if turn["emotion"] != moved:
            return f"an emotion of {turn['emotion']} after {emotion} {turn['change']:+d}"
        emotion = turn["emotion"]
    ended = end_of_dialogue(dialogue, cfg)
    if ended != dialogue["ended"]:
        return f"it ended as {dialogue['ended']!r}, by its turns as {ended!r}"
    final = 0 if ended == "malformed" else emotion
    if not math.isclose(dialogue["reward"], final / 100, abs_tol=1e-9):
        return f"a reward of {dialogue['reward']:g} for a final emotion of {final}"
    return None


def end_of_dialogue(dialogue, cfg):
    """How a dialogue must have ended, by its last turn (see `rlver.converse`)."""
    turns = dialogue["turns"]
    if not turns:
        return "context"
    last = turns[-1]
    if last["emotion"] is None:
        keeps_the_form = cfg.think and not split_thought(last["reply"])[2]
        return "a reply that keeps the form and was not sent" if keeps_the_form else "malformed"
    if last["emotion"] >= 100:
        return "emotion_max"
    if last["emotion"] <= 0:
        return "emotion_min"
    if len(turns) >= cfg.max_turns:
        return "turn_limit"
    return "goodbye" if says_goodbye(last["user"] or "") else "context"


def episode_of(dialogue):
    """A line of dialogues.jsonl as the Episode that it was, but for its tokens."""
    scored = [turn["emotion"] for turn in dialogue["turns"] if turn["emotion"] is not None]
    final = scored[-1] if scored else START
    return Episode(
        dialogue["profile_id"],
        dialogue["group"],
        dialogue["first_line"],
        turns=dialogue["turns"],
        ended=dialogue["ended"],
        emotion=0 if dialogue["ended"] == "malformed" else final,
        reward=dialogue["reward"],
    )


def contradictions_in_metrics(run):
    """Whether metrics.jsonl says what the dialogues give: all of `batch_metrics`."""
    wrong = []
    for row in run.rows:
        dialogues = run.training.get(row["step"])
        if not dialogues:
            continue  # `gaps` tells
        episodes = [episode_of(dialogue) for dialogue in dialogues]
        for metric, value in batch_metrics(episodes, run.settings.think).items():
            if not same(row.get(metric), value):
                logged = row.get(metric)
                wrong.append(
                    f"{metric} {shown(logged)} in step {row['step']}, by the dialogues "
                    f"{shown(value)}"
                )
    if wrong:
        yield f"metrics.jsonl does not follow from dialogues.jsonl: {wrong[0]}{and_more(wrong)}"


def same(one, other):
    """Whether two numbers, or None, are the same but for the last digits: sums are added up in
    another order by another version of numpy."""
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


def shown(value):
    return "missing" if value is None else f"{value:.6g}"


def contradictions_in_summary(run):
    """Whether summary.json says what the evaluations and metrics.jsonl give."""
    if not run.summary:
        return  # `gaps` tells
    try:
        wrong = [*wrong_scores(run), *wrong_totals(run)]
    except (TypeError, AttributeError, KeyError):  # other types of values than a run writes
        wrong = ["it is not as a run writes it"]
    if wrong:
        yield f"summary.json does not follow from the rest: {wrong[0]}{and_more(wrong)}"


def wrong_scores(run):
    """The scores in summary.json that do not follow from the dialogues with held-out users."""
    for scores in run.summary["evaluations"]:
        dialogues = run.heldout.get(scores["step"])
        if not dialogues:
            continue  # `gaps` tells
        recomputed = summarise([episode_of(dialogue) for dialogue in dialogues])
        for key, value in recomputed.items():
            if not same(scores.get(key), value):
                yield (
                    f"{key} {shown(scores.get(key))} after step {scores['step']}, by the "
                    f"dialogues {shown(value)}"
                )


def wrong_totals(run):
    """What else in summary.json does not follow: before, after, and the tokens."""
    evaluations = run.summary["evaluations"]
    for key, scores in (("before", evaluations[:1]), ("after", evaluations[-1:])):
        without_step = [{k: v for k, v in row.items() if k != "step"} for row in scores]
        if [run.summary.get(key)] != without_step:
            yield f"{key!r} is not the evaluation of that moment"
    for key in ("sampled", "trained"):
        logged = run.summary["tokens"].get(key)
        total = int(run.column(f"tokens_{key}").sum())
        if logged != total:
            yield f"{logged} tokens {key}, by the steps {total}"


@functools.cache
def toy_users(held_out):
    """(the users to train on, so many held-out users) of a run without --profiles."""
    return users_of_run(None, held_out, "toy")


def people_of_run(run):
    """(the users to train on, the held-out users), or None where they came from files, which the
    teacher may not have, or are not played by rule."""
    cfg = run.settings
    if cfg.profiles or cfg.simulator not in SCRIPTED:
        return None
    # no more than the run talks with: --eval-size may be an absurd number
    held_out = max(map(len, run.heldout.values()), default=1)
    return toy_users(min(held_out, cfg.eval_size))


def contradictions_in_users(run):
    """Whether the users of each step are those that the seed draws, and the held-out users those
    of the project: they are drawn by --seed and the step alone."""
    people = people_of_run(run)
    if people is None:
        return
    training, held_out = people
    cfg = run.settings
    n_groups = cfg.batch_size // cfg.group_size
    wrong = []
    for row in run.rows:
        dialogues = run.training.get(row["step"], [])
        if row.get("refilled") or n_groups > len(dialogues):
            continue  # other users were drawn; or dialogues are missing, and `gaps` tells
        drawn = profiles_of_step(training, n_groups, cfg.seed, row["step"])
        ids = {number: profile.id for number, profile in enumerate(drawn)}
        if any(dialogue["profile_id"] != ids.get(dialogue["group"]) for dialogue in dialogues):
            wrong.append(row["step"])
    if wrong:
        yield f"the users of {with_others('step', wrong)} are not those that seed {cfg.seed} draws"
    known = {profile.id for profile in held_out}
    evaluated = [dialogue for dialogues in run.heldout.values() for dialogue in dialogues]
    strangers = sorted({d["profile_id"] for d in evaluated} - known)
    if strangers:
        yield f"{strangers[0]} is no held-out user of the toy{and_more(strangers)}"


# ---------------------------------------------------------------------- the user is asked again

# The keys of the Counter that `replay_sample` returns.
REPLIES = "replies"  # that were put to the user again
TOLD_START = "told the initial emotion"  # the logged question says 30, and the emotion was another
OTHER_QUESTION = "another question"  # the logged question is another one, in any other way
OTHER_ANSWER = "another answer"  # the same question, and the log has another analysis or change
LINES = "lines"  # of the user, asked for again
OTHER_LINE = "another line"  # the log has another line


def replay_sample(run, per_step):
    """Put replies of the run to its scripted user again, those of `per_step` dialogues of each step
    and each evaluation (0: of all). Returns a Counter of the keys above; an empty one where the
    user is not scripted.

    The mark of an analysis is made from everything in the question: the profile, the dialogue so
    far and the emotion that the user was told. So the mark in the log shows whether the question
    was the right one, even where the answer does not depend on it."""
    counts = Counter()
    people = people_of_run(run)
    if people is None:
        return counts
    cfg = run.settings
    simulator = make_simulator(cfg.simulator, cfg.lang, cfg.difficulty)
    profiles = {profile.id: profile for group in people for profile in group}

    async def replay_all():
        for split in (run.training, run.heldout):
            for step, dialogues in split.items():
                count = min(per_step or len(dialogues), len(dialogues))
                for dialogue in random.Random(step).sample(dialogues, count):
                    if dialogue["profile_id"] in profiles:
                        user = User(simulator, profiles[dialogue["profile_id"]])
                        await replay_dialogue(dialogue, user, counts)

    asyncio.run(replay_all())
    return counts


async def replay_dialogue(dialogue, user, counts):
    """Put the replies of one dialogue to `user` again, and count in what it agrees with the log.
    After each turn the user goes on from what the log says, so that one difference counts once."""
    user.dialogue = [{"speaker": "me", "text": dialogue["first_line"]}]
    for turn in dialogue["turns"]:
        if turn["emotion"] is None:
            return
        values = user.values()  # those of the question, but for the reply
        analysis, change, mark = await user.feel(turn["reply"])
        counts[REPLIES] += 1
        if mark != turn["mark"]:
            # The question as it would be with emotion 30. `feel` has put the reply into the
            # dialogue, and has changed the emotion and the planning, so only the dialogue is new.
            with_start = {**values, "dialogue": user.values()["dialogue"], "emotion": START}
            stale = mark_of(user.simulator.prompts["emotion"], with_start)
            is_stale = values["emotion"] != START and stale == turn["mark"]
            counts[TOLD_START if is_stale else OTHER_QUESTION] += 1
        elif (analysis, change) != (turn["analysis"], turn["change"]):
            counts[OTHER_ANSWER] += 1
        user.emotion = turn["emotion"]
        try:
            sections, _ = parse_emotion(turn["analysis"], turn["mark"])
        except (ValueError, AttributeError, TypeError):  # an analysis that was edited
            return
        user.planning = {
            "objective": sections["TargetCompletion"],
            "subjective": sections["Activity"] + "\n" + sections["Analyse"],
        }
        if turn["user"]:
            line = await user.answer()
            counts[LINES] += 1
            if line != turn["user"]:
                counts[OTHER_LINE] += 1
            user.dialogue[-1]["text"] = turn["user"]


def contradictions_in_replays(run):
    """Whether the scripted user, asked again, says what the log says."""
    counts = run.replayed
    differ = counts[TOLD_START] + counts[OTHER_QUESTION] + counts[OTHER_ANSWER]
    if differ:
        yield (
            f"put to the scripted user again, {differ} of {counts[REPLIES]} replies get another "
            "analysis than the log has"
        )


# ------------------------------------------------------------------------------ the same run twice


def digest_of_dialogues(run):
    """A text that is the same for two runs with the same training dialogues, whatever else their
    files say; None for a run without any."""
    dialogues = [
        [dialogue["profile_id"], dialogue["first_line"], dialogue["turns"]]
        for step in sorted(run.training)
        for dialogue in run.training[step]
    ]
    return hashlib.sha256(json.dumps(dialogues).encode()).hexdigest() if dialogues else None
