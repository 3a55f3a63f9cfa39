"""tools/foils.py - is a reply worth more to its own person than to others? The second half of
tools/fitness.py, with --foils.

Words that are warm to anybody move a reader as much as a reply to the point. So K other people,
the *foils*, with another story and another need, hear the same reply behind their own first words.
Two signals see whether it is this person's:

    difference = c(i, y) - 1/K sum_j c(j, y)                         c: the change before rounding
    likelihood = (1/|y|) log p(y | dialogue of i) - log 1/K sum_j p(y | dialogue of j)^(1/|y|)

The first is in points of emotion. The second is in nats a token; p is a small language model that
was not trained here. `worth` is a formula that a policy might be paid by. It was chosen with the
replies marked "fitness" and "test", and its gate was set, before anybody heard those marked
"foils".
"""

from support.answers import load_prompt
from support.chat_format import ChatFormat
from support.command_line import print_folded
from support.errors import BadInput, SimulatorFailed
from support.loading import load_model

import random

import numpy as np
import torch
from tqdm.asyncio import tqdm

from policy import Policy, pack
from rollout import Episode, Segment
from tools.dialogues import mean, parts_by, show_table
from tools.stats import auc, interval

LIFTING, UNKIND = (
    ("to the point", "advice needed", "generic warm"),
    ("cold", "dismissive", "off topic"),
)
# The gate of `worth`: {comparison: (the mark of the replies, kinds, other kinds, the least AUC
# within a person, the least lower end of its interval)}. Within a person, because all dialogues of
# a GRPO group are with one.
GATE = {
    "to the point over generic warm": ("foils", ["to the point"], ["generic warm"], 0.75, 0.5),
    "to the point over cold": ("foils", ["to the point"], ["cold"], 0.75, 0),
    "to the point over echo": ("foils", ["to the point"], ["echo"], 0.75, 0),
    "all that lift over cold, dismissive, off topic": ("test", LIFTING, UNKIND, 0.85, 0),
}
SIGNALS = ("own", "difference", "likelihood", "worth")
READING = (
    "own: the change of the emotion before rounding, -10 to 10. difference: minus the mean change of "
    "the foils. likelihood: in nats a token, behind the own dialogue against those of the foils. "
    "worth: the formula of tools/foils.py. AUC: how often a reply of the first kind has more than "
    "one of the second; 0.50 is chance. low, high: 95 % interval over people."
)
MOST_LIKELY = 0.6  # nats a token: what is more the person's own than that earns no more


def worth(own, likelihood):
    """The points that a reply is worth: its change, and up to 15 more if it is this person's,

        own + sigmoid(own + 3) 25 clip(likelihood, 0, 0.6)

    The factor leaves out replies that the reader is against: a cold reply that names what was told
    is this person's, too. The bound is for copies, whose likelihood has none."""
    return own + float(25 * np.clip(likelihood, 0, MOST_LIKELY) / (1 + np.exp(-own - 3)))


# ------------------------------------------------------------------------------------- two signals


def draw_foils(rows, count):
    """{user: a row of each of its foils}: `count` people with another story and another need, of
    those whose replies have the same mark, drawn from the user's id. All replies to a person have
    the same foils, as all dialogues of a group would. Raises BadInput if there are not so many."""
    foils = {}
    for part in parts_by("used", rows).values():
        people = {row["user"]: row for row in part}
        for user, row in people.items():
            profile = row["profile"]
            others = [
                other
                for other in people.values()
                if other["profile"].need != profile.need and other["profile"].scene != profile.scene
            ]
            if len(others) < count:
                raise BadInput(
                    f"--foils {count}: only {len(others)} can hear the replies to {user}"
                )
            foils[user] = random.Random(user).sample(others, count)
    return foils


def load_scorer(path, lang="en", prefix=""):
    """(Policy, ChatFormat) of a model that says how likely replies are, behind the system prompt of
    a policy in direct mode. prefix: what stands before the path in messages. Raises BadModel."""
    model, tokenizer = load_model(path, prefix=prefix)
    return Policy(model), ChatFormat(tokenizer, load_prompt("policy_direct", lang))


def behind(row, other):
    """The dialogue of a row if the person of row `other` heard it: its own first line, and the same
    replies."""
    return [other["dialogue"][0], *row["dialogue"][1:]]


async def change_of(reader, row, other):
    """c(j, y): how far the reply of a row moves the person of row `other`, before rounding."""
    reading = await reader.hear(reader.questions(other["profile"], behind(row, other)))
    return float(np.clip(reading["sum"], -10, 10))


def mean_log_prob(policy, chat, row, other):
    """(1/|y|) log p(y | dialogue) of the reply of a row, behind the dialogue of row `other`: nats a
    token. What was said between two earlier replies is not known; an empty line stands for it."""
    first, *replies = [turn["text"] for turn in behind(row, other)]
    *_, log_probs = log_probs_of_replies(policy, chat, [first] + [""] * len(replies), replies)
    return log_probs.mean().item()


@torch.no_grad()
def log_probs_of_replies(policy, chat, lines, replies):
    """The log-probs of the tokens of each of `replies`, a list of tensors, given the dialogue before
    it: lines[0], replies[0], lines[1] ... There are at least as many lines as replies. Without stop
    tokens."""
    segments, prompt = [], chat.first_prompt(lines[0])
    for reply, line in zip(replies, [*lines[1:], ""]):
        ids = chat.text(reply)
        segments += [Segment(prompt), Segment(ids, log_probs=[0.0] * len(ids))]
        prompt = [*chat.close, chat.stop_id, *chat.next_prompt(line)]
    batch = pack([Episode("", 0, "", segments=segments)])
    log_probs, _ = policy(batch)
    return [log_probs[batch.turn == k] for k in range(1, len(replies) + 1)]


async def measure_foils(rows, reader, foils, scorer=None):
    """What each reply is worth to its own person and to its `foils`, as `draw_foils` returns them:
    one dict a row, with its "used", "user", "kind" and "reply", and SIGNALS. scorer: of
    `load_scorer`; without it, the likelihood and the formula are left out. Replies that cannot be
    read are left out, too."""

    async def measure_row(row):
        others = foils[row["user"]]
        try:
            changes = [await change_of(reader, row, other) for other in (row, *others)]
        except SimulatorFailed:
            return None
        result = {name: row[name] for name in ("used", "user", "kind", "reply")}
        result |= {"own": changes[0], "difference": changes[0] - mean(changes[1:])}
        if scorer:
            own, *foreign = [mean_log_prob(*scorer, row, other) for other in (row, *others)]
            result["likelihood"] = own - float(np.log(np.mean(np.exp(foreign))))
            result["worth"] = worth(result["own"], result["likelihood"])
        return result

    results = await tqdm.gather(*map(measure_row, rows), desc="foils", leave=False)
    return [result for result in results if result]


# ------------------------------------------------------------------------------------- the table


def aucs(rows, signal, good, bad):
    """Of pairs of a reply of the kinds `good` and one of the kinds `bad`: the AUC over all pairs, and
    [mean over people of the AUC within a person, low, high, people]. None where there is no pair."""

    def of_kinds(rows):
        return [[row[signal] for row in rows if row["kind"] in kinds] for kinds in (good, bad)]

    pairs = map(of_kinds, parts_by("user", rows).values())
    within = [auc(a, b) for a, b in pairs if a and b]
    return float(auc(*of_kinds(rows))) if within else None, interval(np.mean, within)


def show_foils(results):
    """Print the second half of the table, and whether the gate is passed. Returns what --json asks
    for."""
    signals = [name for name in SIGNALS if name in results[0]]
    table = {
        f"mean, {used}: {kind}": [mean([row[name] for row in rows]) for name in signals]
        for used, part in parts_by("used", results).items()
        for kind, rows in parts_by("kind", part).items()
    }
    gate = {}  # {comparison: is it passed? None: not measured}
    for name, (used, good, bad, *bounds) in GATE.items():
        rows = [row for row in results if row["used"] == used]
        pairs = [aucs(rows, signal, good, bad) for signal in signals]
        table[f"AUC, all pairs: {name}"] = [overall for overall, _ in pairs]
        for k, part in enumerate(("mean", "low", "high")):
            table[f"AUC, within a person, {part}: {name}"] = [within[k] for _, within in pairs]
        if "worth" in signals:
            *_, (_, within) = pairs
            passed = [x >= least for x, least in zip(within, bounds) if x is not None]
            gate[name] = all(passed) if len(passed) == len(bounds) else None
    show_table("its own person's, or anybody's?", signals, table, READING)
    if "worth" in signals:
        for name, is_passed in gate.items():
            words = {True: "passed", False: "missed", None: "not measured"}[is_passed]
            print_folded(f"gate of the formula, {name}: {words}")
    return {"table": table, "signals": signals, "gate": gate, "found": results}
