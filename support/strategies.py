"""support/strategies.py - the 24 strategies of emotional support, and what is counted over replies
that are tagged with them: how often each is used, what its replies earned, how much is repeated.

No model is asked here. The tags come from a judge (tools/strategies.py), or from the toy's grammar,
which knows the kind of every sentence. A tagged dialogue is

    {"intention": what the user hopes for, "step": of training or None, "split": "train" or other,
     "replies": [[codes, change of the emotion], ...]}

where the codes are None if the judge's answer could not be read, and the change is None if the
reply got no emotion.
"""

from functools import cache
from itertools import pairwise

# SAGE Table 5: seven groups of strategies and how many each has.
GROUP_SIZES = {
    "A": 5,  # asks
    "B": 3,  # empathises: restates, or goes deeper
    "C": 2,  # tells of itself
    "D": 3,  # comforts
    "E": 4,  # affirms
    "F": 5,  # suggests, from its own view
    "G": 2,  # informs, objectively
}
CODES = [f"{letter}-{i}" for letter, size in GROUP_SIZES.items() for i in range(1, size + 1)]

# The five groups that RLVER plots (its Table 4), in the codes of SAGE.
GROUPS = {
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

# The kinds of sentences of the toy (toy.ACTS). Its "topic" talks of something else: no strategy.
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


def toy_codes(reply, toy):
    """The strategies of a reply in the toy's grammar, exact: the kinds of its sentences. toy: the
    module."""
    kinds = [toy.act_of(sentence) for sentence in toy.split_sentences(reply)]
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
    """How alike two sequences are, 0 to 1: (s + n) / 2n of the longer length n and the best global
    alignment s (Needleman-Wunsch; match +1, mismatch and gap -1: SAGE gives no scores)."""
    row = [-j for j in range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        above, row = row, [-i]
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

    The last two are the counted coordinate, whose numbers are no judge's: variety is 1 - SSRR, and
    support the share of strategies of groups B to E less that of F and G."""
    codes_of = GROUPS | {code: [code] for code in CODES}
    repeated = ssrr([[used for used, _ in d["replies"]] for d in dialogues])
    letters = [code[0] for d in dialogues for used, _ in d["replies"] for code in used or ()]
    return {
        "strategies": {name: usage_of(name, codes, dialogues) for name, codes in codes_of.items()},
        "dialogues": len(dialogues),
        "ssrr": repeated,
        "variety": None if repeated is None else 1 - repeated,
        "support": share_of(letters, "BCDE") - share_of(letters, "FG"),
    }


def usage_of(name, codes, dialogues):
    """{"uses": replies per dialogue that use any of `codes`, "gain", "n", "asked", "asked_n": gain
    and n where the hidden intention asks for the group `name`}."""
    replies = [reply for d in dialogues for reply in d["replies"]]
    # A reply whose tags could not be read is in no numerator; so it is in no denominator either.
    readable = sum(used is not None for used, _ in replies) / max(1, len(replies))
    uses = sum(not set(codes).isdisjoint(used or ()) for used, _ in replies)
    intention = INTENTION_OF_GROUP.get(name)
    asking = [
        reply
        for d in dialogues
        if intention and d["intention"] == intention
        for reply in d["replies"]
    ]
    mean, n = gain(replies, codes)
    mean_asked, n_asked = gain(asking, codes)
    return {
        "uses": uses / readable / len(dialogues) if readable else None,
        "gain": mean,
        "n": n,
        "asked": mean_asked,
        "asked_n": n_asked,
    }


def share_of(letters, wanted):
    """Which share of a list of letters are among those `wanted`; 0 of an empty list."""
    return sum(map(wanted.count, letters)) / max(1, len(letters))


def steps_of(dialogues, most=10):
    """`strategies_of` the training dialogues of a log, a tenth of its steps at a time (a step has
    few users, and what they need decides what is used): {last step of the tenth: ...}."""
    dialogues_of_step = {}
    for d in dialogues:
        if d["split"] == "train":
            dialogues_of_step.setdefault(d["step"], []).append(d)
    steps = sorted(dialogues_of_step)
    size = max(1, -(-len(steps) // most))  # rounded up
    result = {}
    for start in range(0, len(steps), size):
        tenth = steps[start : start + size]
        together = [d for step in tenth for d in dialogues_of_step[step]]
        result[tenth[-1]] = strategies_of(together)
    return result
