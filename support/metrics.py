"""support/metrics.py - the numbers that sum up dialogues: scores, and the metrics of a training
step (docs/metrics.md says what each of them means).
"""

from support.signs import signs

import math

import numpy as np


def score_summary(finals):
    """The numbers that sum up final emotions everywhere: mean, standard error, success (100) and
    failure (below 10) in percent, n."""
    emotions = np.array(finals, dtype=float)
    n = len(emotions)
    return {
        "score": float(emotions.mean()),
        "stderr": float(emotions.std(ddof=1) / n**0.5) if n > 1 else 0.0,
        "success": 100 * float((emotions >= 100).mean()),
        "failure": 100 * float((emotions < 10).mean()),
        "n": n,
    }


def stderr_of(scores):
    """The standard error of a score, to be shown: None for that of a single dialogue, whose spread
    is unknown (the files hold 0 there). scores: of `score_summary`."""
    return None if scores.get("n") == 1 else scores.get("stderr")


def stderr_text(scores):
    """`stderr_of` for a table on the terminal."""
    stderr = stderr_of(scores)
    return "-" if stderr is None else f"{stderr:.1f}"


def summarise(episodes):
    """`score_summary`, and malformed in percent: these score 0, so they are failures too."""
    malformed = sum(e.ended == "malformed" for e in episodes)
    return {
        **score_summary([e.emotion for e in episodes]),
        "malformed": 100 * malformed / len(episodes),
    }


def batch_metrics(episodes, think):
    """The metrics of the `episodes` of a training step, think or direct: {name: number, or None for
    what they do not have}."""
    summary = summarise(episodes)
    group_count = len({e.group for e in episodes})
    flat_share = None  # where each dialogue is a group of its own, as for PPO
    if group_count < len(episodes):
        flat_share = len(flat_groups(episodes)) / group_count
    turns = [turn for e in episodes for turn in e.turns]
    stray_thoughts = 0  # thoughts that were taken out of replies in direct mode
    if not think:
        stray_thoughts = sum(bool(turn["thought"]) for turn in turns)
    rewards = [e.reward for e in episodes]
    emotions = [e.emotion for e in episodes]
    return {
        "reward": float(np.mean(rewards)),
        "emotion": summary["score"],
        "emotion_std": float(np.std(emotions)),
        **{key: summary[key] for key in ("success", "failure", "malformed")},
        "episodes": len(episodes),
        "turns": len(turns) / len(episodes),
        "stray_thoughts": stray_thoughts,
        "flat_groups": flat_share,
        **signs([e.delivered_replies for e in episodes]),
    }


def flat_groups(episodes):
    """The ids of the zero-variance groups, whose dialogues all have the same reward: GRPO's
    advantages are 0 there, and nothing is learned. (PPO's groups of one need no spread. With
    deltas, dr-grpo and rloo still tell turns apart in which equal sums were earned.)"""
    rewards_of = {}  # group: the different rewards in it
    for episode in episodes:
        rewards_of.setdefault(episode.group, set()).add(episode.reward)
    return sorted(group for group, rewards in rewards_of.items() if len(rewards) == 1)


def cut_replies(episodes, stop_id, max_tokens):
    """[number of replies that the limit of `max_tokens` cut, so that they lack a stop token;
    replies]. A reply for which the context had no room is shorter, and is not counted."""
    segments = [segment for episode in episodes for segment in episode.segments]
    # the policy sampled those segments that have log-probs
    replies = [segment.ids for segment in segments if segment.log_probs is not None]
    cut = sum(len(ids) == max_tokens and ids[-1] != stop_id for ids in replies)
    return [cut, len(replies)]


# ----------------------------------------------------------------------- warnings while a run trains


def warnings_of(rows):
    """{name: sentence} of the WARNINGS that hold for `rows`, the lines of metrics.jsonl so far."""
    return {name: sentence for name, holds, sentence in WARNINGS if holds(rows)}


def in_steps(count, is_in):
    """The condition that is_in(row) is true in at least `count` of the rows."""
    return lambda rows: sum(bool(is_in(row)) for row in rows) >= count


def groups_are_copies(row):
    """Do most groups earn the same within the group, in replies that hardly any dialogue has to
    itself? Not all must: two rows of one batch are rounded differently now and then."""
    flat, repeated = row.get("flat_groups"), row.get("repeat_across")
    return flat is not None and repeated is not None and flat >= 0.5 and repeated > 0.9


def policy_stands_still(row):
    """Does the policy have a gradient, and give the first dialogues the very probabilities that it
    gave them before training? One bit of one weight would change them."""
    return row.get("kl_start") == 0 and row.get("grad_norm", 0) > 0


def gradient_is_zero(row):
    """Is there no gradient at all, although some advantage is not 0? GRPO's are 0 in groups in
    which all rewards are equal, PPO's if they are equal everywhere."""
    flat = row.get("flat_groups")
    rewards_differ = row.get("emotion_std", 0) > 0 if flat is None else flat < 1
    return row.get("grad_norm") == 0 and rewards_differ


def foreign_tokens_are_trained(row):
    """Does the update count more tokens than the policy sampled in the dialogues that it is given?
    (Dialogues that were dropped are not among them.)"""
    given = row.get("tokens_sampled", math.inf) - row.get("tokens_dropped", 0)
    return row.get("tokens_trained", 0) > given


def users_are_unreadable(rows):
    """Was more than one dialogue in a hundred dropped because of UnreadableAnswers? A policy that
    learns to bring this about loses no reward by it."""
    dropped, unreadable, episodes = (
        sum(row.get(key) or 0 for row in rows) for key in ("dropped", "unreadable", "episodes")
    )
    return unreadable > 0.01 * (episodes + dropped)


# Faults of the training itself, which no curve of the reward would show. They are looked for once a
# step, in numbers that are logged anyway: (name, condition over the rows so far, sentence).
WARNINGS = (
    (
        "copies",
        in_steps(3, groups_are_copies),
        "the dialogues of a group are the same word for word: they share one sampling seed, or the "
        "policy has collapsed",
    ),
    (
        "still",
        in_steps(3, policy_stands_still),
        "the policy has a gradient and does not move: its weights are frozen, or the optimizer "
        "holds other ones, or the learning rate is 0",
    ),
    (
        "zero gradient",
        in_steps(1, gradient_is_zero),
        "the gradient is exactly 0 although rewards differ: the loss does not reach the weights",
    ),
    (
        "foreign tokens",
        in_steps(1, foreign_tokens_are_trained),
        "more tokens are trained than were sampled: words of the user are in the loss",
    ),
    (
        "unreadable",
        users_are_unreadable,
        "more than one dialogue in a hundred was dropped because the user's answers could not be "
        "read, or the prompt was refused; dropped.jsonl has what was said before",
    ),
)
