"""support/judged.py - reading a judge's answers, and all arithmetic over judged dialogues.

Nothing here asks a model. An answer that cannot be read is a ValueError, so that the judge is asked
again: it is never scored 0 or the middle, which a judge might have said.
"""
import json
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from unicodedata import normalize

import numpy as np

FORMS = json.loads((Path(__file__).parent.parent / "prompts/judge.json").read_text("utf-8"))
CODES = [f"{letter}-{i}" for letter, n in FORMS["codes"].items() for i in range(1, n + 1)]
PROMPTS = {name: set(slots) for name, slots in FORMS["prompts"].items()}
GROUPS = FORMS["groups"]    # the five that RLVER plots (its Table 4), of 24 codes (SAGE Table 5)


# ------------------------------------------------------------------------- reading a judge's answer

WORDS = "zero one two three four five six seven eight nine ten".split()
SCORE_LINE = re.compile(r"(?im)^[^\w\n]*(?:score|rating|得分|评分|分数|打分)[^\w\n]*[:=]\s*(.*)$")
MINUS = str.maketrans("−–—‐‑", "-----")
PLACE = re.compile(r"[^\w.+-]*([-+]? ?\d*\.?\d+)(?![\d.,/])[^\w\n]*?(?: *\(|$)", re.M)
GRADE = re.compile(r"(?:\A\W*|(?i:grade|answer|选择|等级|答案)\W*)([A-F])\b(?! +[a-z])")


def parse_score(text, low, high):
    """The one whole number from `low` to `high` that a judge means: "4", "**4/5**", "four",
    "4 分". Raises ValueError for none, two ("3 or 4", "3-4"), a half, another scale ("4/10")."""
    text = re.sub(rf"\b({'|'.join(WORDS)})\b", lambda m: str(WORDS.index(m[1].lower())),
                  normalize("NFKC", text), flags=re.I)
    text = re.sub(rf"\s*(?:/|out of)\s*{high}(?!\d|\.[1-9])", "", text)
    first = re.match(r"[^\w-]*(\d+(?:\.0+)?)(?!\.?\d)"
                     r"(?!\s*(?:[-–—~/,]|to\b|or\b|and\b|out of\b|至|到|或|和)\s*\d)", text)
    numbers = [first.group(1)] if first else re.findall(r"-?\d+(?:\.\d+)?", text)
    if len(numbers) != 1 or float(numbers[0]) not in range(low, high + 1):
        raise ValueError(f"no single whole number from {low} to {high} in {text[:60]!r}")
    return int(float(numbers[0]))


def scores_in(part, low, high):
    """The scores of one part of an answer: of its lines "Score: ...", else of its first line, which
    may be a sentence about a number that is no score: "3 replies are warm"."""
    lines = SCORE_LINE.findall(part)
    if not lines and re.match(r"\W*\w{1,5}\s*(/\s*\d+|out of \d+|分)?\s*([^\w\s]|$)", part, re.M):
        lines = part.split("\n")[:1]
    return {parse_score(line, low, high) for line in lines}


def read_parts(text, names, values):
    """{key: value} of an answer in named parts, in any order. names: {key: pattern of its header};
    values(part) -> the set of what it says.

    A header starts a line, whatever number or Markdown stands before it, and ends it or comes
    before a colon, a dash, the bar of a table. Raises ValueError if a part is missing, or if two
    different values are there: a judge that quotes a forged score of the dialogue is asked again.
    """
    text = re.sub(r"</[^>\n]*>", "", normalize("NFKC", text))
    header = re.compile(r"^[^\w\n]*(?:\d{1,2}[^\w\n]+)?(?:" + "|".join(
        f"(?P<{key}>{words})" for key, words in names.items())
        + r")(?: *\([^)\n]*\))?[^\w\n]*?(?:[:|=>.)–—]|-(?=\s)|$)", re.I | re.M)
    cuts, said = list(header.finditer(text)), {key: set() for key in names}
    for m, end in zip(cuts, [m.start() for m in cuts[1:]] + [len(text)]):
        said[m.lastgroup] |= values(text[m.end():end].strip())
    for key, found in said.items():
        if len(found) != 1:
            raise ValueError(f"{key}: {'two different answers' if found else 'no answer'}")
    return {key: found.pop() for key, found in said.items()}


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = ["FEDCBA".index(grade) / 5 for grade in grades]
    return [low + (high - low) * (1 - share if i in reversed_items else share)
            for i, share in enumerate(shares, 1)]


def read_answer(prompt, text, names=None):
    """What an answer to a prompt says: {item: number} of a questionnaire, {"codes", "misnamed"} of
    "strategies" (names: of the codes), {place: -1 to 1} of "place" (names: patterns of the places),
    {"text"} of what asks for words. Raises ValueError."""
    if prompt == "strategies":
        return read_strategies(text, names)
    if prompt == "place":
        return read_parts(text, names, lambda part: {
            float(place[1].replace(" ", "")) for place in [PLACE.match(part.translate(MINUS))]
            if place and abs(float(place[1].replace(" ", ""))) <= 1})
    if prompt in FORMS["once"]:
        said = text.rpartition("</think>")[2]
        if prompt == "paraphrase":
            said = (*re.split(r"(?im)^\W*(?:reply|回复)\W*?[:：]", said, maxsplit=1), "")[1]
        if not said.strip():
            raise ValueError("nothing is said")
        return {"text": said.strip(' \n*"“”')}
    form = FORMS[prompt]
    low, high = form["range"]
    if "parts" in form:
        return read_parts(text, form["parts"], lambda part: scores_in(part, low, high))
    items = {f"i{i}": rf"(?:item|sentence|statement|第|题目?|句子?)? *{i} *(?:题|句)?"
             for i in range(1, form["items"] + 1)}
    grades = list(read_parts(text, items, lambda part: set(GRADE.findall(part))).values())
    scores = questionnaire(grades, form["reversed"], low, high)
    found = {name: float(np.mean(scores[first - 1:last]))
             for name, (first, last) in form["scales"].items()}
    # SAGE words these items negatively, and does not say that it reverses its questionnaire's
    return found | {"overall, unreversed": float(np.mean(questionnaire(grades, [], low, high)))}


def read_strategies(text, names):
    """{"codes": of a reply's strategies in order, "misnamed": how many bear another one's name}.
    names: {code: name}; where the two disagree the code wins. Within a paragraph (one <Strategy>)
    B-2 excludes B-1, and B-3 both. Raises ValueError for an answer without the tag, and for a code
    that is none of the 24."""
    codes, misnamed = [], 0
    paragraphs = re.findall(r"<Strategy>(.*?)</Strategy>", normalize("NFKC", text), re.S | re.I)
    for paragraph in paragraphs:
        found = list(re.finditer(r"\b([A-Z]) *[-–—_]? *(\d+)", paragraph))
        own = [f"{code[1]}-{code[2]}" for code in found]
        if unknown := set(own) - set(CODES):
            raise ValueError(f"{min(unknown)!r} is no strategy; there are A-1 to G-2")
        for code, one, end in zip(own, found, [m.start() for m in found[1:]] + [len(paragraph)]):
            name = re.split(r"[,;、(\n]", paragraph[one.end():end].lstrip(")] *:.-"))[0].lower()
            words = re.sub(r"\b(?:and|plus|with)\b|[和与及]", "", name)
            misnamed += (normalize("NFKC", names[code]).lower() not in name
                         and bool(re.search(r"[^\W\d_]", words)))
        beaten = {"B-1", "B-2"} if "B-3" in own else {"B-1"} if "B-2" in own else set()
        codes += [code for code in own if code not in beaten]
    if not codes and not re.search(r"none|无", "".join(paragraphs), re.I):
        raise ValueError("no strategy in it")
    return {"codes": codes, "misnamed": misnamed}


def toy_codes(reply, toy):
    """The strategies of a reply in the toy's grammar, exact: the kinds of its sentences."""
    kinds = [toy.act_of(sentence) for sentence in toy.split_sentences(reply)]
    return [FORMS["toy"][kind] for kind in kinds if kind in FORMS["toy"]]


# ------------------------------------------------------------------- strategies and what they earn
# A tagged dialogue: {"intention", "step", "split", "replies": [[codes, change of emotion], ...]}.
# The codes are None where the judge failed, the change is for a reply that got no emotion.

def gain(replies, codes):
    """(mean, n) of the change over the n replies that use any of `codes` (SC(s), RLVER 3.6); mean
    None if n is 0. A reply of several strategies counts for each: association, no cause."""
    codes = set(codes)
    changes = [c for used, c in replies if used and c is not None and not codes.isdisjoint(used)]
    return (sum(changes) / len(changes) if changes else None), len(changes)


def similarity(a, b):
    """How alike two sequences are, 0 to 1: (s + n) / 2n of the longer length n and the best global
    alignment s (Needleman-Wunsch; match +1, mismatch and gap -1: SAGE gives no scores)."""
    row = [-j for j in range(len(b) + 1)]
    for i, x in enumerate(a, 1):
        above, row = row, [-i]
        for j, y in enumerate(b, 1):
            row.append(max(above[j - 1] + (1 if x == y else -1), above[j] - 1, row[-1] - 1))
    n = max(len(a), len(b))
    return (row[-1] + n) / (2 * n)


def ssrr(sequences):
    """Strategy sequence repetition rate (SAGE 4.2): the mean over dialogues of the mean similarity
    of neighbouring replies. sequences: per dialogue a list of replies, each a list of codes. Left
    out: dialogues of one reply, neighbours both without a strategy or one without an answer (None).
    None if nothing is left."""
    alike = cache(similarity)
    told = [[alike(tuple(a), tuple(b)) for a, b in pairwise(replies) if None not in (a, b)
             and (a or b)] for replies in sequences]
    means = [sum(own) / len(own) for own in told if own]
    return sum(means) / len(means) if means else None


def strategies_of(dialogues):
    """Of each group and each code the replies per dialogue that use it, its gain, n, and of a group
    the gain where the hidden need asks for it; the SSRR; and the counted coordinate, whose two
    numbers are no judge's: variety, 1 - SSRR, and support, the share of B to E less F and G."""
    replies, found = [r for d in dialogues for r in d["replies"]], {}
    for name, codes in (GROUPS | {code: [code] for code in CODES}).items():
        uses = sum(not set(codes).isdisjoint(used or ()) for used, _ in replies) / len(dialogues)
        asking = [r for d in dialogues if d["intention"] == FORMS["asked_by"].get(name, "-")
                  for r in d["replies"]]
        found[name] = dict(zip(("uses", "gain", "n", "asked", "asked_n"),
                               (uses, *gain(replies, codes), *gain(asking, codes))))
    letters = [code[0] for used, _ in replies for code in used or ()]
    share = lambda group: sum(map(group.count, letters)) / max(1, len(letters))
    repeated = ssrr([[used for used, _ in d["replies"]] for d in dialogues])
    return {"strategies": found, "dialogues": len(dialogues), "ssrr": repeated,
            "variety": None if repeated is None else 1 - repeated,
            "support": share("BCDE") - share("FG")}


def steps_of(dialogues, most=10):
    """`strategies_of` the training dialogues of a log, a tenth of its steps at a time (a step has
    few users, and what they need decides what is used): {last step of the tenth: ...}."""
    steps = {}
    for d in dialogues:
        if d["split"] == "train":
            steps.setdefault(d["step"], []).append(d)
    size, order = -(-len(steps) // most), sorted(steps)
    tenths = [order[i:i + size] for i in range(0, len(order), size)] if size else []
    return {own[-1]: strategies_of(sum((steps[step] for step in own), [])) for own in tenths}


# ------------------------------------------------------------------------------ means and intervals

def scale_table(answers, too_short=()):
    """{item: {"mean", "stderr" (over dialogues), "spread" (standard deviation over the repeats of a
    question, averaged), "missing" (share of answers), "n" (dialogues), "short", "means": {id}}}.

    answers: [{"id", "part", "replies", "found": {item: score} or None}], one per question and
    repeat. Items of `too_short` leave out dialogues of fewer than three replies, and count them."""
    table, read = {}, [a for a in answers if a["found"]]
    for item in read[0]["found"]:
        short = {a["id"] for a in answers if item in too_short and a["replies"] < 3}
        scores = {}         # {dialogue: {part: [one a repeat]}}
        for a in read:
            if a["id"] not in short:
                scores.setdefault(a["id"], {}).setdefault(a["part"], []).append(a["found"][item])
        means = {i: float(np.mean(sum(own.values(), []))) for i, own in scores.items()}
        stds = [np.std(s, ddof=1) for own in scores.values() for s in own.values() if s[1:]]
        x = list(means.values())
        table[item] = {"mean": float(np.mean(x)) if x else None,
                       "stderr": float(np.std(x, ddof=1) / len(x) ** 0.5) if x[1:] else None,
                       "spread": float(np.mean(stds)) if stds else None,
                       "missing": 1 - len(read) / len(answers), "n": len(x), "short": len(short),
                       "means": means}
    return table


def pearson(x, y):
    """Correlation (Pearson's); of two points, which is always 1 or -1, none."""
    return np.corrcoef(x, y)[0, 1] if len(x) > 2 else np.nan


def spearman(x, y):
    """Correlation of ranks (Spearman's); ties share theirs."""
    return pearson(*(np.sort(v).searchsorted(v) + np.sort(v).searchsorted(v, "right")
                     for v in (x, y)))


def interval(statistic, *columns, draws=1000):
    """[value, low, high, n] of statistic(*columns), n units in a row each, with its 95 % bootstrap
    interval over units; None where there is no telling. (Of fewer than five units most draws are of
    one or two.)"""
    columns, rng = np.array(columns, float), np.random.default_rng(0)
    if (n := columns.shape[1]) < 2:
        return [None, None, None, n]
    with np.errstate(all="ignore"):         # what does not vary has no correlation
        found = [float(statistic(*columns[:, i]))
                 for i in [np.arange(n), *rng.integers(n, size=(draws, n))]]
    drawn = [x for x in found[1:] if np.isfinite(x) and n > 4]
    return [found[0] if np.isfinite(found[0]) else None,
            *(np.percentile(drawn, [2.5, 97.5]).tolist() if drawn else [None, None]), n]
