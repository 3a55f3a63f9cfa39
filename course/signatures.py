"""signatures.py - mistakes that can be told from the files of a run alone.

Each function below is one mistake. It gets a run (handed_in.HandedIn) and returns a sentence with
the number that gave the mistake away, or None. Its docstring says what the mistake does, why it
shows there, for which variants that holds, and where the limit comes from.

Limits come from the forty reference runs in docs/reference/runs.jsonl, ten of each variant
(`of_reference`). They are computed over as many steps as the run has, because a run of twelve steps
is to be compared with the first twelve steps. Each limit has a margin, FACTOR or more, so that
healthy runs with other settings (another reward, adapters, challenging users) stay within it.
course/mistakes.toml has the mistakes as patches, docs/reference/mistakes.jsonl what runs with them
logged.

These limits are those of the toy. The signatures that need no limit from the reference runs hold
for every model (`Signature.any_model`).
"""

from support.reference import runs_of, variant_of

import functools
from dataclasses import dataclass
from typing import Callable

import numpy as np

from recompute import (
    LINES,
    OTHER_ANSWER,
    OTHER_LINE,
    OTHER_QUESTION,
    REPLIES,
    TOLD_START,
)

FACTOR = 10  # how far a number must be from those of all ten reference runs
LENGTH_FACTOR = 1.3  # the same of the length of replies, which hardly varies in healthy runs
CRITIC_FACTOR = 100  # the same of the critic: with --reward delta it predicts small returns
LAST = 5  # steps at the end of a run


@functools.cache
def reference_runs(variant):
    """The metrics of the ten reference runs of a variant: a list of {metric: values by step}."""
    return [run["metrics"] for run in runs_of(variant)]


def of_reference(run, metric):
    """[10, steps]: a metric in the reference runs of the run's variant, over as many steps as the
    run has, or as they have."""
    values = [metrics[metric] for metrics in reference_runs(run.variant)]
    return np.array(values, dtype=float)[:, : len(run.rows)]


# ------------------------------------------------------------------------ told by the metrics


def users_tokens_trained(run):
    """The user's tokens are in the loss, or some of the policy's are not.

    Each sampled token is trained once, and no other token is. So tokens_trained must be
    tokens_sampled, in all variants (only --refill samples tokens that are not trained). There is no
    limit to choose: one token too many is wrong."""
    trained, sampled = run.column("tokens_trained"), run.column("tokens_sampled")
    replaced = run.column("refilled") > 0
    wrong = (trained != sampled) & ~replaced
    if wrong.any():
        first = int(np.argmax(wrong))
        return (
            f"in {wrong.sum()} of {len(wrong)} steps the loss has another number of tokens than "
            f"the policy sampled (step {run.rows[first]['step']}: {trained[first]:.0f} trained, "
            f"{sampled[first]:.0f} sampled)"
        )


def policy_never_moves(run):
    """The policy is not trained: the optimizer has other parameters, the weights are frozen, or the
    learning rate is far too small.

    kl_start, the distance from the starting policy, then stays where it was. It holds for all
    variants, from the third step on: the learning rate rises from 0, and adapters start slowly.
    Limit: a FACTOR below the smallest of ten reference runs at the same step."""
    if len(run.rows) < 3:
        return None
    moved = run.column("kl_start")[-1]
    healthy = of_reference(run, "kl_start")[:, -1].min()
    if moved < healthy / FACTOR:
        return (
            f"after {len(run.rows)} steps the policy is {moved:.1e} nats a token from where it "
            f"started (reference runs: {healthy:.1e} or more)"
        )


def replies_of_a_group_are_equal(run):
    """All dialogues of a group are sampled with the same random numbers (one seed for a whole
    request), or at temperature 0.

    They are then equal word for word, so their rewards are, and all advantages of GRPO are 0. It
    holds for GRPO. Equal dialogues would show in flat_groups; in the twenty reference runs of GRPO
    that is 0 in every step. Limit: half of all groups."""
    groups = equal = 0
    for dialogues in run.training.values():
        replies_of = {}
        for dialogue in dialogues:
            replies = tuple(turn["reply"] for turn in dialogue["turns"])
            replies_of.setdefault(dialogue["group"], []).append(replies)
        for replies in replies_of.values():
            if len(replies) > 1:
                groups += 1
                if len(set(replies)) == 1:
                    equal += 1
    if groups and equal > groups / 2:
        return f"in {equal} of {groups} groups all dialogues are the same word for word"


def gradient_is_cut_off(run):
    """The ratio or the advantages do not reach the weights: a detached tensor, a mask of zeros, or
    advantages that are all 0.

    What is left is the gradient of the entropy bonus, a hundredth of the usual one. Adam makes
    steps of the usual size from it, towards more entropy. It holds for all variants. Limit: the
    median grad_norm is a FACTOR below the smallest single step of ten reference runs."""
    norm = np.median(run.column("grad_norm"))
    healthy = of_reference(run, "grad_norm").min()
    if norm < healthy / FACTOR:
        return f"the gradient's norm is {norm:.1e} (reference runs: {healthy:.1e} or more)"


def old_log_probs_recomputed(run):
    """log pi_old is computed anew for each mini-batch, so that the ratio is always 1.

    kl, from pi_old to pi, is then exactly 0 in all steps, and so is clipfrac. It holds for all
    variants with two mini-batches or more (with one the ratio is rightly 1) and from the second
    step on. (clipfrac alone would not do: it is 0 in many steps of a healthy run, too.) Limit: the
    largest kl of the run is a FACTOR below the smallest of ten reference runs."""
    if run.settings.minibatches < 2 or len(run.rows) < 2:
        return None
    largest = run.column("kl").max()
    healthy = of_reference(run, "kl").max(axis=1).min()
    if largest < healthy / FACTOR:
        return (
            f"with {run.settings.minibatches} mini-batches kl is {largest:.1g} at most (reference "
            f"runs: {healthy:.1e} or more), and clipfrac is {run.column('clipfrac').max():.1g}"
        )


def steps_are_too_large(run):
    """The learning rate is too high, or the gradient is not clipped.

    A single optimizer step then moves the policy far: kl, from pi_old to pi, is many times the
    usual one, long before the reward falls. It holds for all variants. Limit: the mean kl is a
    FACTOR above the largest of ten reference runs."""
    mean = run.column("kl").mean()
    healthy = of_reference(run, "kl").mean(axis=1).max()
    if mean > FACTOR * healthy:
        return f"kl is {mean:.1e} on average (reference runs: {healthy:.1e} at most)"


def critic_is_not_trained(run):
    """The critic is never stepped, so that V stays 0, where its head began.

    explained_variance, 1 - Var(R - V) / Var(R), is then exactly 0 in all steps. It holds for PPO,
    from the third step on. A healthy critic of the toy is hardly better than 0 on average, but it
    moves: in the reference runs there are steps far above and far below 0. Limit: the largest
    distance from 0 is a CRITIC_FACTOR below the smallest of ten reference runs."""
    if run.settings.algo != "ppo" or len(run.rows) < 3:
        return None
    largest = np.abs(run.column("explained_variance")).max()
    healthy = np.abs(of_reference(run, "explained_variance")).max(axis=1).min()
    if largest < healthy / CRITIC_FACTOR:
        return (
            f"the explained variance is never farther than {largest:.1g} from 0 (reference runs: "
            f"up to {healthy:.2f} or more)"
        )


def engine_has_old_weights(run):
    """The new weights do not reach the engine, which goes on sampling from the starting policy.

    logp_gap, between the engine's log-probs and the trainer's, is as usual in the first step, where
    both have the same weights, and grows from the second step on. It holds for all variants.
    Limit: a FACTOR above the largest of ten reference runs. (The self-check of the gap stops such a
    run in its second step, so it must be off for the mistake to come this far.)"""
    gap, limit = run.column("logp_gap"), FACTOR * of_reference(run, "logp_gap").max()
    if len(gap) > 1 and gap[0] <= limit < gap[1:].min():
        return (
            f"engine and trainer agree in the first step and differ by {gap[-1]:.1e} nats a token "
            f"in the last (reference runs: {limit / FACTOR:.1e} at most)"
        )


def engine_has_another_distribution(run):
    """Engine and trainer do not compute the same log-probs: the temperature is left out of one of
    them, or a mask, a position or dropout differs.

    logp_gap is then large from the first step on. It holds for all variants; a temperature of 1
    hides the first of these mistakes. Limit: a FACTOR above the largest of ten reference runs."""
    gap, limit = run.column("logp_gap"), FACTOR * of_reference(run, "logp_gap").max()
    if gap[0] > limit:
        return (
            f"engine and trainer differ by {gap[0]:.1e} nats a token from the first step on "
            f"(reference runs: {limit / FACTOR:.1e} at most)"
        )


def replies_run_away(run):
    """The reward counts something that long replies have more of: words, warm words, sentences.

    reply_words then grows without an end. It holds for all variants, if the user hears the toy's
    language. Limit: the mean of the last steps is LENGTH_FACTOR times the largest step of ten
    reference runs. (A policy that has lost its language, by steps that are too large, also writes
    long replies.)"""
    length = np.nanmean(run.column("reply_words")[-LAST:])
    healthy = of_reference(run, "reply_words").max()
    if length > LENGTH_FACTOR * healthy:
        return f"replies have {length:.0f} words at the end (reference runs: {healthy:.0f} at most)"


def reward_falls(run):
    """The sign of the loss, or of the advantages, is wrong: what was rewarded becomes less likely.

    The emotion then falls below that of the starting policy. It holds for all variants, from ten
    steps on, where the user and all other settings are those of the reference runs. Limit: the mean
    of the last steps is below the lowest step of ten reference runs."""
    if len(run.rows) < 2 * LAST or variant_of(run.settings) is None:
        return None
    emotion = run.column("emotion")[-LAST:].mean()
    lowest = of_reference(run, "emotion").min()
    if emotion < lowest:
        return (
            f"the emotion is {emotion:.1f} in the last steps (reference runs: {lowest:.1f} or more "
            "in every step)"
        )


# ------------------------------------------------------------------------ told by the dialogues


def form_is_not_checked(run):
    """Replies that break the form are sent to the user, thoughts and all, and rewarded like others.

    A reply that was sent then holds a <think> tag, or nothing that can be seen. It holds for runs
    with thoughts. No limit: the check lets no such reply pass. The starting policy of the toy makes
    about one in two hundred dialogues malformed, so a run of twelve steps may have none."""
    if not run.settings.think:
        return None
    sent = [
        turn["reply"]
        for dialogues in [*run.training.values(), *run.heldout.values()]
        for dialogue in dialogues
        for turn in dialogue["turns"]
        if turn["emotion"] is not None
    ]
    broken = [reply for reply in sent if "<think>" in reply or "</think>" in reply or not reply]
    if broken:
        return f"{len(broken)} of {len(sent)} replies reached the user with a thought in them"


def user_is_told_the_initial_emotion(run):
    """f_emo is told the emotion at the start of the dialogue, for ever (defect 3 of the released
    code).

    The mark of an analysis is made from the whole question. So the log shows which emotion was in
    the question, even if the answer is the same. It holds for all variants with a scripted user,
    whose questions can be made again. Limit: half of the replies that were put to the user again;
    in a healthy run there is none."""
    counts = run.replayed
    if counts[TOLD_START] > counts[REPLIES] / 2:
        return (
            f"{counts[TOLD_START]} of {counts[REPLIES]} replies that were put to the user again "
            "were judged by a user who was told the initial emotion"
        )


def users_are_mixed_up(run):
    """A reply goes to the user of another dialogue (defects 1 and 2 of the released code).

    The analysis then belongs to another question than this dialogue's, and the next line is not
    what this user says. It holds for all variants with a scripted user. Limit: a tenth of the
    replies that were put to the user again, and of the lines; in a healthy run there is none."""
    counts = run.replayed
    wrong = counts[OTHER_QUESTION]
    if wrong > counts[REPLIES] / 10 and counts[OTHER_LINE] > counts[LINES] / 10:
        return (
            f"{wrong} of {counts[REPLIES]} replies that were put to their user again were judged "
            f"by somebody else, and {counts[OTHER_LINE]} of {counts[LINES]} lines are not what "
            "their user says"
        )


def user_judges_by_other_rules(run):
    """The scripted user was edited: the question is the right one, and the answer another.

    It holds for all variants with a scripted user, who gives the same answer to the same question.
    Limit: a tenth of the replies that were put to the user again; in a healthy run there is
    none."""
    counts = run.replayed
    if counts[OTHER_ANSWER] > counts[REPLIES] / 10:
        return (
            f"{counts[OTHER_ANSWER]} of {counts[REPLIES]} replies that were put to the scripted "
            "user again got another answer in this run"
        )


# -------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class Signature:
    """A mistake that can be told from a run's files."""

    name: str
    likely: str  # what the feedback says about the cause
    check: Callable  # run -> a sentence, or None
    any_model: bool = False  # does it hold for policies other than the toy's?
    hides: tuple = ()  # names of signatures that this mistake causes as well


SIGNATURES = (
    Signature(
        "users-tokens",
        "the user's tokens are in the loss",
        users_tokens_trained,
        any_model=True,
        hides=("other-log-probs", "large-steps"),
    ),
    Signature(
        "never-moves",
        "the optimizer does not move the policy",
        policy_never_moves,
        hides=("old-log-probs",),
    ),
    Signature(
        "equal-groups",
        "the dialogues of a group are sampled with one seed",
        replies_of_a_group_are_equal,
        any_model=True,
        hides=("no-gradient", "long-replies", "wrong-sign"),
    ),
    Signature(
        "no-gradient",
        "the advantages do not reach the weights",
        gradient_is_cut_off,
        hides=("long-replies", "wrong-sign"),
    ),
    Signature(
        "old-log-probs",
        "log pi_old is computed anew for each mini-batch",
        old_log_probs_recomputed,
    ),
    Signature(
        "large-steps",
        "the learning rate is too high",
        steps_are_too_large,
        hides=("long-replies", "wrong-sign"),
    ),
    Signature("critic", "the critic is not trained", critic_is_not_trained),
    Signature("old-weights", "the engine samples with old weights", engine_has_old_weights),
    Signature(
        "other-log-probs",
        "engine and trainer compute different log-probs, as without the temperature",
        engine_has_another_distribution,
    ),
    Signature("long-replies", "the reward pays for length", replies_run_away),
    Signature("wrong-sign", "the loss or the advantages have the wrong sign", reward_falls),
    Signature(
        "no-format-check",
        "malformed replies are not refused",
        form_is_not_checked,
        any_model=True,
    ),
    Signature(
        "stale-emotion",
        "the user is always told the initial emotion",
        user_is_told_the_initial_emotion,
        any_model=True,
    ),
    Signature(
        "mixed-users",
        "replies go to the users of other dialogues",
        users_are_mixed_up,
        any_model=True,
        hides=("wrong-sign",),
    ),
    Signature(
        "other-user",
        "the scripted user was edited",
        user_judges_by_other_rules,
        any_model=True,
    ),
)


def signatures_in(run):
    """The signatures that a run has: [(Signature, sentence)]. One that another mistake explains is
    left out."""
    if not run.rows:
        return []
    present = []
    for signature in SIGNATURES:
        if signature.any_model or run.settings.toy:
            sentence = signature.check(run)
            if sentence:
                present.append((signature, sentence))
    hidden = {name for signature, _ in present for name in signature.hides}
    return [
        (signature, sentence) for signature, sentence in present if signature.name not in hidden
    ]
