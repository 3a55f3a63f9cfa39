"""support/metrics.py - the numbers that sum up dialogues: scores, and the metrics of a training
step (docs/metrics.md says what each of them means).
"""

from support.signs import signs

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


def cut_replies(episodes, stop_id):
    """[number of replies that the token limit cut, so that they lack a stop token; replies]."""
    segments = [segment for episode in episodes for segment in episode.segments]
    # the policy sampled those segments that have log-probs
    last_ids = [segment.ids[-1] for segment in segments if segment.log_probs is not None]
    cut = sum(last_id != stop_id for last_id in last_ids)
    return [cut, len(last_ids)]
