"""support/metrics.py - the numbers that sum up dialogues: scores, and the metrics of a training
step (docs/troubleshooting.md says what each of them means).
"""

from support.signs import signs

import numpy as np

from emotion import FAILURE_BELOW

# ------------------------------------------------------------------------------------------ scores


def score_summary(finals):
    """The numbers that sum up final emotions everywhere: mean, standard error (None for a single
    emotion), success (100) and failure (below 10) in percent, n."""
    emotions = np.array(finals, dtype=float)
    n = len(finals)
    stderr = None
    if n > 1:
        stderr = emotions.std(ddof=1) / n**0.5
    return {
        "score": emotions.mean(),
        "stderr": stderr,
        "success": 100 * (emotions >= 100).mean(),
        "failure": 100 * (emotions < FAILURE_BELOW).mean(),
        "n": n,
    }


def scores_by(name, rows):
    """The scores of each part of `rows`: {value of the column `name`: score_summary}."""
    parts = {}
    for row in rows:
        parts.setdefault(row[name], []).append(row["final"])
    return {value: score_summary(part) for value, part in sorted(parts.items())}


def summarise(episodes):
    """`score_summary`, and malformed in percent: they score 0, so they are failures, too."""
    return {
        **score_summary([e.emotion for e in episodes]),
        "malformed": 100 * sum(e.ended == "malformed" for e in episodes) / len(episodes),
    }


def batch_metrics(episodes, needs, think, compares_groups):
    """The metrics of the `episodes` of a training step: {name: number, or None if it does not
    apply}. needs: of the people of groups 0, 1, 2, ...; think: the mode; compares_groups: does the
    algorithm compare dialogues?"""
    summary = summarise(episodes)
    rewards, emotions = [e.reward for e in episodes], [e.emotion for e in episodes]
    turns = [turn for e in episodes for turn in e.turns]
    return {
        "reward": np.mean(rewards),
        "emotion": summary["score"],
        "emotion_std": np.std(emotions),
        **{key: summary[key] for key in ("success", "failure", "malformed")},
        "episodes": len(episodes),
        "turns": len(turns) / len(episodes),
        # thoughts that were taken out of replies in direct mode
        "stray_thoughts": 0 if think else sum(bool(turn.thought) for turn in turns),
        **(zero_std_shares(episodes) if compares_groups else lost_needs(episodes, needs)),
        **signs([e.delivered_replies for e in episodes]),
    }


def zero_std_shares(episodes):
    """The shares of the groups without variance, whose dialogues all have the same reward:
    "zero_std_groups", and "lost_groups", those of them at a reward below 0.2. GRPO's advantages are
    0 there, and nothing is learned. (With deltas, dr-grpo and rloo may still learn there, because
    turns may differ although the sums are equal.)"""
    rewards_of = {}  # group: the different rewards in it
    for episode in episodes:
        rewards_of.setdefault(episode.group, set()).add(episode.reward)
    zero_std = [min(rewards) for rewards in rewards_of.values() if len(rewards) == 1]
    lost = [reward for reward in zero_std if reward < 0.2]
    n = len(rewards_of)
    return {"zero_std_groups": len(zero_std) / n, "lost_groups": len(lost) / n}


def lost_needs(episodes, needs):
    """In the place of `zero_std_shares` for PPO, which compares no dialogues: "lost_groups" is the
    share of the needs whose dialogues all have a reward below 0.2. Only needs with eight dialogues or
    more are counted, because fewer may all be low by chance: a step of 64 dialogues has eight of each
    need. needs: of the people of groups 0, 1, 2, ...; "" if it has no name."""
    rewards_of = {}
    for episode in episodes:
        rewards_of.setdefault(needs[episode.group], []).append(episode.reward)
    peaks = [max(some) for need, some in rewards_of.items() if need and len(some) >= 8]
    share = np.mean([peak < 0.2 for peak in peaks]) if peaks else None
    return {"zero_std_groups": None, "lost_groups": share}
