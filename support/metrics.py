"""support/metrics.py - the numbers that sum up dialogues: scores, and the metrics of a training
step (docs/troubleshooting.md says what each of them means).
"""

from support.signs import signs

import numpy as np

from emotion import FAILURE_BELOW

# ------------------------------------------------------------------------------------------ scores


def score_summary(finals):
    """The numbers that sum up final emotions everywhere: mean, standard error (None of a single
    one, whose spread is unknown), success (100) and failure (below 10) in percent, n."""
    emotions, n = np.array(finals, dtype=float), len(finals)
    return {
        "score": emotions.mean(),
        "stderr": emotions.std(ddof=1) / n**0.5 if n > 1 else None,
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
    """`score_summary`, and malformed in percent: these score 0, so they are failures too."""
    return {
        **score_summary([e.emotion for e in episodes]),
        "malformed": 100 * sum(e.ended == "malformed" for e in episodes) / len(episodes),
    }


def batch_metrics(episodes, think, algo):
    """The metrics of the `episodes` of a training step, think or direct: {name: number, or None for
    what they do not have}."""
    summary = summarise(episodes)
    turns = [turn for e in episodes for turn in e.turns]
    return {
        "reward": np.mean([e.reward for e in episodes]),
        "emotion": summary["score"],
        "emotion_std": np.std([e.emotion for e in episodes]),
        **{key: summary[key] for key in ("success", "failure", "malformed")},
        "episodes": len(episodes),
        "turns": len(turns) / len(episodes),
        # thoughts that were taken out of replies in direct mode
        "stray_thoughts": 0 if think else sum(bool(turn.thought) for turn in turns),
        **zero_std_shares(episodes, algo),
        **signs([e.delivered_replies for e in episodes]),
    }


def zero_std_shares(episodes, algo):
    """The shares of the groups without variance, whose dialogues all have the same reward:
    "zero_std_groups", and "lost_groups", those of them at a reward below 0.2. GRPO's advantages are
    0 there, and nothing is learned. (With deltas, dr-grpo and rloo still tell turns apart in which
    equal sums were earned.) None for PPO, which compares no dialogues and learns all the same."""
    if algo == "ppo":
        return dict.fromkeys(("zero_std_groups", "lost_groups"))
    rewards_of = {}  # group: the different rewards in it
    for episode in episodes:
        rewards_of.setdefault(episode.group, set()).add(episode.reward)
    zero_std = [min(rewards) for rewards in rewards_of.values() if len(rewards) == 1]
    lost = [reward for reward in zero_std if reward < 0.2]
    n = len(rewards_of)
    return {"zero_std_groups": len(zero_std) / n, "lost_groups": len(lost) / n}


# ---------------------------------------------------------------------- warnings while a run trains


def warnings_of(rows):
    """{name: sentence} of the WARNINGS that hold for `rows`, the lines of metrics.jsonl so far."""
    return {name: sentence for name, holds, sentence in WARNINGS if holds(rows)}


def groups_are_copies(row):
    """Do most groups earn the same within the group, in replies that hardly any dialogue has to
    itself? Not all must: two rows of one batch are rounded differently now and then."""
    # the first is None for PPO, the second is missing where no user heard a reply
    return (row.get("zero_std_groups") or 0) >= 0.5 and row.get("repeat_across", 0) > 0.9


def policy_stands_still(row):
    """Does the policy have a gradient, and give the first dialogues the very probabilities that it
    gave them before training? One bit of one weight would change them."""
    return row.get("kl_start") == 0 and row.get("grad_norm", 0) > 0


def gradient_is_zero(row):
    """Is there no gradient at all, although some advantage is not 0? GRPO's are 0 in groups in
    which all rewards are equal, PPO's if they are equal everywhere."""
    rewards_differ = row.get("emotion_std", 0) > 0 and row.get("zero_std_groups") != 1
    return row.get("grad_norm") == 0 and rewards_differ


def foreign_tokens_are_trained(row):
    """Does the update count more tokens than the policy sampled in the dialogues that it is given?
    (Dialogues that were dropped are not among them.)"""
    not_foreign = row.get("tokens_sampled", 0) - row.get("tokens_dropped", 0)
    return row.get("tokens_trained", 0) > not_foreign


def need_is_lost(rows):
    """Are there groups that all failed alike in half of some ten steps running? A need that the
    policy does not serve any more is not drawn in every step."""
    steps = [bool(row.get("lost_groups")) for row in rows]
    return any(sum(steps[i : i + 10]) >= 5 for i in range(len(steps)))


def groups_are_flat(rows, end):
    """Did in three steps running no group have two different rewards, so that there was no
    gradient? (A KL has one, and with deltas there may be one.) end: where all dialogues ended then,
    "success" or "failure", or "elsewhere"."""
    flat = []
    for row in rows:
        here = [name for name in ("success", "failure") if row.get(name) == 100] or ["elsewhere"]
        no_gradient = row.get("zero_std_groups") == 1 and row.get("grad_norm") == 0
        flat.append(no_gradient and here == [end])
    return any(all(flat[i : i + 3]) for i in range(len(flat) - 2))


def users_are_unreadable(rows):
    """Was more than one dialogue in a hundred dropped because of UnreadableAnswers? A policy that
    learns to bring this about loses no reward by it."""
    dropped, unreadable, episodes = (
        sum(row.get(key) or 0 for row in rows) for key in ("dropped", "unreadable", "episodes")
    )
    return unreadable > 0.01 * (episodes + dropped)


FLAT = "for three steps no group had two different rewards, so nothing was learned: "
# Faults of the training itself, which no curve of the reward would show. They are looked for once a
# step, in numbers that are logged anyway: (name, condition over the rows so far, sentence).
WARNINGS = []


def warn(name, condition, sentence):
    """Add one to WARNINGS."""
    WARNINGS.append((name, condition, sentence))


warn(
    "copies",
    lambda rows: sum(map(groups_are_copies, rows)) >= 3,
    "the dialogues of a group are the same word for word: they share one sampling seed, or the "
    "policy has collapsed",
)
warn(
    "still",
    lambda rows: sum(map(policy_stands_still, rows)) >= 3,
    "the policy has a gradient and does not move: its weights are frozen, or the optimizer "
    "holds other ones, or the learning rate is 0",
)
warn(
    "zero gradient",
    lambda rows: any(map(gradient_is_zero, rows)),
    "the gradient is exactly 0 although rewards differ: the loss does not reach the weights",
)
warn(
    "foreign tokens",
    lambda rows: any(map(foreign_tokens_are_trained, rows)),
    "more tokens are trained than were sampled: words of the user are in the loss",
)
warn(
    "lost need",
    need_is_lost,
    "whole groups fail alike, step after step, so nothing is learned from them: the policy has "
    "lost one of the users' needs",
)
warn(
    "flat at the top",
    lambda rows: groups_are_flat(rows, "success"),
    FLAT + "all dialogues end at 100, and these users have nothing more to teach",
)
warn(
    "flat at the bottom",
    lambda rows: groups_are_flat(rows, "failure"),
    FLAT + "all dialogues end at the bottom; read some: are the replies malformed, or are these "
    "users too hard to please?",
)
warn(
    "flat",
    lambda rows: groups_are_flat(rows, "elsewhere"),
    FLAT + "not all dialogues end at 100, nor all at the bottom; does the user tell replies "
    "apart? python -m tools.fitness measures that",
)
warn(
    "unreadable",
    users_are_unreadable,
    "more than one dialogue in a hundred was dropped because the user's answers could not be "
    "read, or the prompt was refused; dropped.jsonl has what was said before",
)
