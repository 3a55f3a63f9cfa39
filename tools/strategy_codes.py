"""tools/strategy_codes.py - the 24 strategies of emotional support, and what is counted over
replies that are tagged with them: how often each is used, what its replies earned, how much is
repeated.

No model is asked here. The tags come from a judge (tools/strategies.py), or from the toy's grammar,
which knows the kind of every sentence. A tagged dialogue is

    {"intention": what the user hopes for, "step": of training or None, "split": "train" or other,
     "replies": [[codes, change of the emotion], ...]}

where the codes are None if the judge's answer could not be read, and the change is None if the
reply got no emotion.
"""

from functools import cache
from itertools import pairwise

from toy import world

# SAGE Table 5: seven groups of strategies and how many each has. CODES lists all: "A-1", "A-2" ...
SAGE_GROUP_SIZES = {
    "A": 5,  # asks
    "B": 3,  # empathises: restates, or goes deeper
    "C": 2,  # tells of itself
    "D": 3,  # comforts
    "E": 4,  # affirms
    "F": 5,  # suggests, from its own view
    "G": 2,  # informs, objectively
}
CODES = [f"{letter}-{i}" for letter, size in SAGE_GROUP_SIZES.items() for i in range(1, size + 1)]

# The five groups that RLVER plots (its Table 4), in the codes of SAGE.
RLVER_GROUPS = {
    "Praise": ["E-1", "E-2", "E-3"],
    "Deep Empathy": ["B-2", "B-3", "C-1", "C-2"],
    "Emotional Venting": ["D-2", "D-3"],
    "Advice Provision": ["F-5"],
    "Problem Analysis": ["F-1"],
}

# The hidden intention of a user (support/results.py, INTENTIONS) that asks for such a group. No
# intention asks for Problem Analysis alone.
INTENTION_OF_GROUP = {
    "Praise": "praise",
    "Deep Empathy": "empathise",
    "Emotional Venting": "listen",
    "Advice Provision": "advise",
}

# The kinds of sentences of the toy (world.ACTS). Its "topic" talks of something else: no strategy.
TOY_CODES = {
    "analyse": "F-1",
    "advise": "F-5",
    "explain": "F-1",
    "reflect": "A-5",
    "praise": "E-1",
    "listen": "D-2",
    "empathise": "B-2",
    "side": "E-3",
    "cheer": "D-1",
    "dismiss": "F-4",
}


def toy_codes(reply):
    """The strategies of a reply in the toy's grammar, exact: the kinds of its sentences."""
    kinds = [world.act_of(sentence) for sentence in world.split_sentences(reply)]
    return [TOY_CODES[kind] for kind in kinds if kind in TOY_CODES]


# ------------------------------------------------------------------------- what a strategy earns


def gain(replies, codes):
    """(mean, n) of the change over the n replies that use any of `codes` (SC(s), RLVER 3.6); mean
    None if n is 0. A reply of several strategies counts for each: association, no cause."""
    codes = set(codes)
    changes = []
    for used, change in replies:
        if used and change is not None and not codes.isdisjoint(used):
            changes.append(change)
    return (sum(changes) / len(changes) if changes else None), len(changes)


# --------------------------------------------------------------------------- how much is repeated


def similarity(a, b):
    """How alike two sequences are, 0 to 1: (s + n) / 2n, where n is the length of the longer one
    and s the score of their best global alignment, from -n to n (Needleman-Wunsch: match +1,
    mismatch and gap -1; SAGE gives no scores).

    Let S(i, j) be the best score of the first i items of a and the first j of b. Their last two
    items stand under each other, or one of them stands at a gap:

        S(i, j) = max(S(i-1, j-1) + (1 if a_i == b_j else -1), S(i-1, j) - 1, S(i, j-1) - 1)
        S(i, 0) = -i,  S(0, j) = -j
    """
    row = [-j for j in range(len(b) + 1)]  # S(0, j) for all j; in the loop S(i, j)
    for i, x in enumerate(a, 1):
        above, row = row, [-i]  # S(i-1, j) for all j; S(i, 0)
        for j, y in enumerate(b, 1):
            diagonal = above[j - 1] + (1 if x == y else -1)
            row.append(max(diagonal, above[j] - 1, row[-1] - 1))
    n = max(len(a), len(b))
    return (row[-1] + n) / (2 * n)


def ssrr(sequences):
    """Strategy sequence repetition rate (SAGE 4.2): the mean over dialogues of the mean similarity
    of neighbouring replies. sequences: per dialogue a list of replies, each a list of codes. Left
    out: dialogues of one reply, neighbours both without a strategy or one without an answer (None).
    None if nothing is left."""
    cached_similarity = cache(similarity)
    means = []
    for replies in sequences:
        similarities = []
        for a, b in pairwise(replies):
            if a is None or b is None or not (a or b):
                continue
            similarities.append(cached_similarity(tuple(a), tuple(b)))
        if similarities:
            means.append(sum(similarities) / len(similarities))
    return sum(means) / len(means) if means else None


# --------------------------------------------------------------------------------------- together


def strategies_of(dialogues):
    """All that is counted over tagged dialogues: {"strategies": {group or code: `usage_of` it},
    "dialogues": their number, "ssrr", "variety", "support"}.

    The last two are the "counted coordinate". SAGE places a policy in a plane, structured to
    creative and solution to empathy, as a judge sees it (tools/coordinate.py); these two numbers
    are counted instead, so no judge has a say in them. variety: 1 - SSRR. support: the share of
    strategies of groups B to E, which turn to the feeling, less that of F and G, which turn to the
    solution."""
    codes_of = RLVER_GROUPS | {code: [code] for code in CODES}
    usages = {name: usage_of(name, codes, dialogues) for name, codes in codes_of.items()}
    repetition = ssrr([[used for used, _ in d["replies"]] for d in dialogues])
    letters = [code[0] for used, _ in replies_of(dialogues) for code in used or ()]
    return {
        "strategies": usages,
        "dialogues": len(dialogues),
        "ssrr": repetition,
        "variety": None if repetition is None else 1 - repetition,
        "support": share_in(letters, "BCDE") - share_in(letters, "FG"),
    }


def replies_of(dialogues):
    """All replies of tagged dialogues, as [codes, change]."""
    return [reply for dialogue in dialogues for reply in dialogue["replies"]]


def usage_of(name, codes, dialogues):
    """{"uses": replies per dialogue that use any of `codes`, "gain", "n": the `gain` of these
    replies and their number, "asked", "asked_n": the same in the dialogues whose user's hidden
    intention asks for the group `name`}."""
    replies = replies_of(dialogues)
    mean, n = gain(replies, codes)
    asking = []
    if name in INTENTION_OF_GROUP:
        intention = INTENTION_OF_GROUP[name]
        asking = [d for d in dialogues if d["intention"] == intention]
    mean_asked, n_asked = gain(replies_of(asking), codes)
    return {
        "uses": uses_per_dialogue(replies, codes, len(dialogues)),
        "gain": mean,
        "n": n,
        "asked": mean_asked,
        "asked_n": n_asked,
    }


def uses_per_dialogue(replies, codes, dialogue_count):
    """Replies per dialogue that use any of `codes`; None if no reply could be tagged.

    A reply whose tags could not be read (None) is in no numerator. So it is in no denominator
    either: a dialogue counts only as much as the share of readable replies."""
    readable = sum(used is not None for used, _ in replies) / max(1, len(replies))
    if not readable:
        return None
    uses = sum(not set(codes).isdisjoint(used or ()) for used, _ in replies)
    return uses / readable / dialogue_count


def share_in(letters, groups):
    """The share of a list of letters that are among those of `groups`, such as "BCDE"; 0 of an
    empty list."""
    return sum(letter in groups for letter in letters) / max(1, len(letters))


def steps_of(dialogues, parts=10):
    """`strategies_of` the training dialogues of a log, in `parts` parts of its steps, because a
    single step has few users, and what they need decides what is used: {last step of the part:
    its counts}."""
    dialogues_of_step = {}
    for d in dialogues:
        if d["split"] == "train":
            dialogues_of_step.setdefault(d["step"], []).append(d)
    steps = sorted(dialogues_of_step)
    size = max(1, -(-len(steps) // parts))  # steps of a part, rounded up
    result = {}
    for start in range(0, len(steps), size):
        steps_of_part = steps[start : start + size]
        dialogues_of_part = [d for step in steps_of_part for d in dialogues_of_step[step]]
        result[steps_of_part[-1]] = strategies_of(dialogues_of_part)
    return result
