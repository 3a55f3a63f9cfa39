"""support/metrics.py - the numbers that sum up dialogues: scores, the metrics of a training step
(docs/files.md says what each of them means), and signs that a run goes wrong.

`signs` counts signs that a policy learns the reward and not the task (RLVER 3.7; Gao 2022 on
overoptimisation). A rising reward does not say why it rises. A healthy run may move any of the
signs, so a rising curve is a reason to read dialogues, not a proof. `warnings_of` finds faults of
the training itself, which no curve of the reward would show.
"""

import itertools
import re
from collections import Counter
from functools import partial

import numpy as np

from emotion import FAILURE_BELOW, SUCCESS

# ------------------------------------------------------------------------------------------ scores


def score_summary(finals):
    """The numbers that sum up final emotions everywhere: mean, standard error (None for a single
    emotion), success (100) and failure (below 10) in percent, n."""
    emotions = np.array(finals, dtype=float)
    n = len(finals)
    return {
        "score": emotions.mean(),
        "stderr": emotions.std(ddof=1) / n**0.5 if n > 1 else None,
        "success": 100 * (emotions >= SUCCESS).mean(),
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


def batch_metrics(episodes, needs, cfg, failed):
    """The metrics of the `episodes` of a training step: {name: number, or None if it does not
    apply}. needs, failed: see `lost_needs`; cfg: the Settings of the run."""
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
        "stray_thoughts": 0 if cfg.think else sum(bool(turn.thought) for turn in turns),
        **(lost_needs(episodes, needs, failed) if cfg.algo == "ppo" else zero_std_shares(episodes)),
        # of the replies that the user felt
        **signs([[t.reply for t in e.turns if t.emotion is not None] for e in episodes]),
    }


def zero_std_shares(episodes):
    """The shares of the groups without variance, whose dialogues all have the same reward, in which
    GRPO learns nothing: "zero_std_groups", and "lost_groups", the part of them at a reward below
    0.2. (With deltas, dr-grpo and rloo may still learn there, because turns may differ although the
    sums are equal.)"""
    rewards_of = {}  # group: the different rewards in it
    for episode in episodes:
        rewards_of.setdefault(episode.group, set()).add(episode.reward)
    zero_std = [min(rewards) for rewards in rewards_of.values() if len(rewards) == 1]
    lost, n = sum(reward < 0.2 for reward in zero_std), len(rewards_of)
    return {"zero_std_groups": len(zero_std) / n, "lost_groups": lost / n}


def lost_needs(episodes, needs, failed):
    """What PPO has for `zero_std_shares`, because it compares no dialogues: "lost_groups" is the
    share of the needs whose last 16 dialogues or more all had a reward below 0.2, None without a
    need. It is 0 where most dialogues of this step have one, because then no need is worse than
    others. needs: of groups 0, 1, 2, ...; "" if it has no name. failed: {need: how many of its last
    dialogues had such a reward}, from the steps before; it is brought up to date.

    (A step of the paper has four dialogues of a need, which may all be low by chance.)"""
    for episode in episodes:
        if need := needs[episode.group]:
            failed[need] = failed.get(need, 0) + 1 if episode.reward < 0.2 else 0
    most_are_low = np.median([episode.reward for episode in episodes]) < 0.2
    lost = [count >= 16 and not most_are_low for count in failed.values()]
    return {"zero_std_groups": None, "lost_groups": np.mean(lost) if lost else None}


# -------------------------------------------------------------------- signs in the words of replies

# Words of a reply that talks about its own reward.
REWARD_TALK = re.compile(
    r"""
    \b(
        rewards?\b
        | emotion[ ](?:score|value|level|point)s?
        | Emotion-[SABCF]\b           # the levels of emotion in the user's prompts
        | change["']?\s*:\s*[+-]?\d   # the key that decides the emotion in its answers
        | rate[ ](?:me|this)
        | \d+[ ]points
    )
    | \d+\s*/\s*100                  # 90/100
    | 情绪值 | 情绪分                   # value and score of the emotion
    | 打分 | 评分 | 奖励 | 分数         # give a score, rating, reward, score
    """,
    re.IGNORECASE | re.VERBOSE,
)
# A word. In a script without spaces each character is one.
WORD = re.compile(
    r"""
    [\u3040-\u30ff\u3400-\u9fff]             # one Japanese kana, or one Chinese character
    | [^\W\d_\u3040-\u30ff\u3400-\u9fff]+    # letters of any other script
    | \d+                                     # a number
    """,
    re.VERBOSE,
)
SENTENCE_END = re.compile(r"[.!?。！？\n]+")
WORD_LIMIT = 4000


def signs(dialogues):
    """The signs in a batch. dialogues: a list of lists of replies (texts). Shares are from 0 to 1.

    repeat_within   replies that hold a sentence, of three words or more, that the same user was
                    told before
    repeat_across   replies that occur word for word in another dialogue of the batch, too (with
                    GRPO this may be a dialogue with the same user)
    distinct_2      different word pairs per word pair (Li 2016). It falls as the text gets longer,
                    so it is always counted over the first WORD_LIMIT words
    reply_words     words per reply
    reward_talk     replies that name their own reward
    """
    repeats, talks = 0, 0  # replies that repeat a sentence, and that talk about their reward
    replies = []  # each as a tuple of its words
    dialogues_with = Counter()  # reply: number of dialogues
    for dialogue in dialogues:
        replies_here = [tuple(words_of(text)) for text in dialogue]
        replies += replies_here
        dialogues_with.update(set(replies_here))
        earlier_sentences = set()
        for text in dialogue:
            talks += bool(REWARD_TALK.search(text))
            # as tuples of words, so that capitals and commas make no new one
            sentences = [tuple(words_of(part)) for part in SENTENCE_END.split(text)]
            long_sentences = {words for words in sentences if len(words) >= 3}
            repeats += bool(long_sentences & earlier_sentences)
            earlier_sentences |= long_sentences
    n = len(replies)
    if not n:
        return {}
    return {
        "repeat_within": repeats / n,
        "repeat_across": sum(dialogues_with[reply] > 1 for reply in replies) / n,
        "reply_words": sum(map(len, replies)) / n,
        "reward_talk": talks / n,
        "distinct_2": distinct_pairs(replies),
    }


def signs_in_words(numbers):
    """The numbers of `signs` as a sentence for the terminal; "" if there were no replies."""
    if not numbers:
        return ""
    return (
        f"Signs of reward hacking: of all replies {100 * numbers['repeat_within']:.0f} % repeat a "
        f"sentence to the same user, {100 * numbers['repeat_across']:.0f} % are told in several "
        f"dialogues word for word, {100 * numbers['reward_talk']:.0f} % talk about their own "
        f"reward; {numbers['reply_words']:.1f} words a reply; {100 * numbers['distinct_2']:.0f} % "
        "of the word pairs are different ones"
    )


def words_of(text):
    """Words; for a script without spaces, characters."""
    return WORD.findall(text.lower())


def distinct_pairs(replies):
    """Different word pairs per word pair of replies (tuples of words); 0 if there are none. Only
    those replies count that begin within the first WORD_LIMIT words of all."""
    starts = itertools.accumulate(map(len, replies), initial=0)
    first = [reply for reply, start in zip(replies, starts) if start < WORD_LIMIT]
    pairs = [pair for reply in first for pair in itertools.pairwise(reply)]
    return len(set(pairs)) / max(1, len(pairs))


# ---------------------------------------------------------------------- warnings while a run trains

# Of an evaluation before training in which most dialogues earn 0: there is nothing to learn from.
MALFORMED = (
    "{:.0f} % of the dialogues before training ended malformed, at a reward of 0: the model does "
    "not write <think>...</think> and a reply within --max-tokens, and it will hardly learn to. Give "
    "it more tokens, or train without --think"
)
FLAT = "for 3 steps no group (PPO: no batch) had two different rewards, so nothing was learned: "


def column(rows, key):
    """A column of metrics.jsonl as an array, NaN where a step has no such number."""
    return np.array([row.get(key) for row in rows], dtype=float)


def often(steps, count, window):
    """Are at least `count` of some `window` consecutive `steps` true?"""
    return any(sum(steps[i : i + window]) >= count for i in range(len(steps)))


def warnings_of(rows):
    """{name: sentence} of the faults of the training itself that `rows` show, the lines of
    metrics.jsonl so far. They are looked for once a step, in numbers that are logged anyway.

    No comparison with NaN is true, so a number that a step lacks makes no warning."""
    of = partial(column, rows)
    grad_norm, emotion_std, malformed = of("grad_norm"), of("emotion_std"), of("malformed")
    # All rewards are equal within each group, or in the whole batch (PPO has no groups).
    groups_equal = of("zero_std_groups") == 1
    # Most groups have equal rewards, and nearly all replies occur in several dialogues. Not all
    # groups must be equal: two rows of one batch are rounded differently now and then.
    copies = (of("zero_std_groups") >= 0.5) & (of("repeat_across") > 0.9)
    # The gradient need not be 0 then: the entropy bonus and a KL have one.
    flat = (groups_equal | (emotion_std == 0)) & ~copies
    top, bottom = of("success") == 100, of("failure") == 100
    dialogues = np.nansum([of("episodes"), of("dropped")])
    table = {  # name: (does it hold?, sentence)
        "copies": (
            sum(copies) >= 3,
            "the dialogues of a group are the same word for word: they share one sampling seed, or "
            "the policy has collapsed",
        ),
        # One changed bit of one weight would change the probabilities of the first dialogues.
        "still": (
            sum((of("kl_start") == 0) & (grad_norm > 0)) >= 3,
            "the policy has a gradient and does not move: its weights are frozen, or the optimizer "
            "holds other ones, or the learning rate is 0",
        ),
        # Some advantage is not 0. GRPO's are 0 in groups of equal rewards, PPO's in such a batch.
        "zero gradient": (
            any((grad_norm == 0) & (emotion_std > 0) & ~groups_equal),
            "the gradient is exactly 0 although rewards differ: the loss does not reach the weights",
        ),
        # The update is not given the dialogues that were dropped.
        "foreign tokens": (
            any(of("tokens_trained") > of("tokens_sampled") - of("tokens_dropped")),
            "more tokens are trained than were sampled: words of the user are in the loss",
        ),
        # A need that the policy does not serve any more is not drawn in every step.
        "lost need": (
            often(of("lost_groups") > 0, 5, 10),
            "all dialogues of a group (PPO: with a need) fail, step after step: the policy has lost "
            "one of the users' needs. GRPO learns nothing from such a group, and the need may not "
            "come back; try another --seed",
        ),
        # by 20 points more than in an earlier step
        "lost format": (
            any(malformed > np.minimum.accumulate(malformed) + 20),
            "far more dialogues end malformed than earlier in the run: the policy unlearns the "
            "format of its replies, and may not find it again; read some, and try another --seed or "
            "a lower --lr",
        ),
        "flat at the top": (
            often(flat & top, 3, 3),
            f"{FLAT}all dialogues end at 100, and these users have nothing more to teach",
        ),
        "flat at the bottom": (
            often(flat & bottom, 3, 3),
            f"{FLAT}all dialogues end at the bottom; read some: are the replies malformed, or "
            "are these users too hard to please?",
        ),
        "flat": (
            often(flat & ~top & ~bottom, 3, 3),
            f"{FLAT}not all dialogues end at 100, nor all at the bottom; does the user tell "
            "replies apart? python -m tools.fitness measures that",
        ),
        # A policy that learns to bring this about loses no reward by it.
        "unreadable": (
            np.nansum(of("unreadable")) > 0.01 * dialogues,
            "more than one dialogue in a hundred was dropped because the user's answers could not be "
            "read, or the prompt was refused; dropped.jsonl has what was said before",
        ),
    }
    return {name: sentence for name, (holds, sentence) in table.items() if holds}
