"""support/judged.py - reading a judge's answers, and all arithmetic over judged dialogues.

Nothing here asks a model. An answer that cannot be read is a ValueError, so that the judge is asked
again: it is never scored 0 or the middle, which a judge might have said.
"""

from support.answers import (
    Unreadable,
    before_end,
    find_sections,
    marked_sections,
    peel,
    whole_number,
)

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
GROUPS = FORMS["groups"]  # the five that RLVER plots (its Table 4), of 24 codes (SAGE Table 5)


# ------------------------------------------------------------------------- reading a judge's answer

SCORE = "(?:score|rating|得分|评分|分数|打分)"  # the header of a score within a part


def parse_score(line, low, high):
    """The whole number from `low` to `high` that stands alone on a line: "4", "**4/5**", "4.0".
    Raises ValueError for all else: a half, two numbers, another scale, a number in a sentence."""
    score = whole_number(line, out_of=high)
    if not low <= score <= high:
        raise Unreadable("value", f"no score from {low} to {high}: {line[:60]!r}")
    return score


def parse_grade(line):
    """The letter from A to F that stands alone on a line. Raises ValueError for all else."""
    grade = peel(line).upper()
    if grade not in list("ABCDEF"):
        raise Unreadable("value", f"no letter from A to F alone on its line: {line[:60]!r}")
    return grade


def parse_place(line):
    """The decimal from -1 to 1 that stands alone on a line. Raises ValueError for all else."""
    place = re.fullmatch(r"([+-]?) ?(\d+(?:\.\d+)?|\.\d+)", peel(line))
    if place is None or float(place.group(2)) > 1:
        raise Unreadable("value", f"no decimal from -1 to 1 alone on its line: {line[:60]!r}")
    return float(place.group(1) + place.group(2))


def read_parts(text, names, mark, parse):
    """{key: value} of a judge's answer in named parts, in any order. names: {key: pattern of its
    header}; parse(line) -> the value that stands alone on a line.

    The value stands on the line of a header Score within the part or, where there is none, on the
    part's own. Only headers with the mark are read. Raises ValueError if a part is missing, or if
    two different values are there.
    """
    own_lines, values = [], {key: set() for key in names}
    scores = []  # of each part that a header opens, in the answer's order
    for section in find_sections(text, {**names, "score": SCORE}, mark):
        if section.name in names:
            own_lines.append((section.name, section.line))
            scores.append([])
        elif scores:
            scores[-1].append(section.line)
    for (key, own_line), lines in zip(own_lines, scores):
        values[key] |= {parse(line) for line in lines or [own_line]}
    for key, found in values.items():
        if not found:
            raise Unreadable("header", f"no part {key} with its mark")
        if len(found) > 1:
            raise Unreadable("twice", f"{key}: two different values")
    return {key: found.pop() for key, found in values.items()}


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = ["FEDCBA".index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


def read_answer(prompt, text, mark, names=None):
    """What an answer to a prompt says: {item: number} of a questionnaire, {"codes", "misnamed"} of
    "strategies" (names: of the codes), {place: -1 to 1} of "place" (names: patterns of the places),
    {"text"} of what asks for words. Raises ValueError."""
    if prompt == "strategies":
        return read_strategies(text, names, mark)
    if prompt == "place":
        return read_parts(text, names, mark, parse_place)
    if prompt in FORMS["texts"]:
        return read_words(text, FORMS["texts"][prompt], mark)
    form = FORMS[prompt]
    low, high = form["range"]
    if "parts" in form:
        return read_parts(text, form["parts"], mark, lambda line: parse_score(line, low, high))
    items = {
        f"i{i}": rf"(?:item|sentence|statement|第|题目?|句子?)? ?{i} ?(?:题|句)?"
        for i in range(1, form["items"] + 1)
    }
    grades = list(read_parts(text, items, mark, parse_grade).values())
    scores = questionnaire(grades, form["reversed"], low, high)
    found = {
        name: float(np.mean(scores[first - 1 : last]))
        for name, (first, last) in form["scales"].items()
    }
    # SAGE words these items negatively, and does not say that it reverses its questionnaire's
    return found | {"overall, unreversed": float(np.mean(questionnaire(grades, [], low, high)))}


def read_words(text, headers, mark):
    """{"text"} of an answer in words: its sections, with their names where there are several.
    Raises ValueError if one is missing or empty."""
    sections = marked_sections(text, headers, mark)
    if not all(re.search(r"\w", words) for words in sections.values()):
        raise Unreadable("empty", "a section is empty")
    if len(sections) == 1:
        return {"text": next(iter(sections.values())).strip(' \n*"“”')}
    return {"text": "\n".join(f"{name}: {words}" for name, words in sections.items())}


def read_strategies(text, names, mark):
    """{"codes": of a reply's strategies in order, "misnamed": how many bear another one's name}.
    names: {code: name}; where the two disagree the code wins. Only tags with the mark are read:
    <Strategy kqvt>...</Strategy kqvt>. Within a paragraph (one tag) B-2 excludes B-1, and B-3 both.
    Raises ValueError for an answer without the tag, and for a code that is none of the 24."""
    text = normalize("NFKC", before_end(text, mark))
    # What stands between an opening tag and the next one, or the end, up to the closing tag.
    opened = re.split(rf"<Strategy {mark}>", text, flags=re.I)[1:]
    codes, misnamed, none = [], 0, False
    for rest in opened:
        inside, closing, _ = re.split(rf"(</Strategy {mark}>|\Z)", rest, maxsplit=1, flags=re.I)
        if not closing:
            raise Unreadable("header", "a tag that is not closed with its mark")
        used, wrong_names = read_tag(inside, names)
        beaten = {"B-1", "B-2"} if "B-3" in used else {"B-1"} if "B-2" in used else set()
        codes += [code for code in used if code not in beaten]
        misnamed, none = misnamed + wrong_names, none or not used
    if not codes and not none:
        raise Unreadable("header", "no strategy in a tag with its mark")
    return {"codes": codes, "misnamed": misnamed}


def read_tag(inside, names):
    """([codes], how many bear another one's name) of the text of one tag: codes and names of the
    24, strung together in any way, or "none". Raises Unreadable for all else: in a sentence, or in
    a quotation, nothing is searched for."""
    each_name = "|".join(
        re.escape(normalize("NFKC", name)) for name in sorted(names.values(), key=len, reverse=True)
    )
    token = re.compile(
        rf"(?P<name>(?i:{each_name}))|(?P<letter>[A-Z]) ?[-–—_]? ?(?P<number>\d+)"
        r"|(?P<word>[^\W\d_]+|\d+)"
    )
    used, misnamed, none = [], 0, False
    for match in token.finditer(inside):
        if match["letter"]:
            code = f"{match['letter']}-{match['number']}"
            if code not in CODES:
                raise Unreadable("value", f"{code[:20]!r} is no strategy; there are A-1 to G-2")
            used.append(code)
        elif match["name"]:
            own_name = normalize("NFKC", names[used[-1]]) if used else ""
            misnamed += match["name"].casefold() != own_name.casefold()
        elif match["word"].casefold() in ("none", "无"):
            none = True
        elif match["word"].casefold() not in ("and", "plus", "with", "和", "与", "及"):
            raise Unreadable("value", f"not a strategy by code and name: {inside[:60]!r}")
    if bool(used) == none:
        raise Unreadable("value", f"not a strategy by code and name: {inside[:60]!r}")
    return used, misnamed


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
    told = [
        [alike(tuple(a), tuple(b)) for a, b in pairwise(replies) if None not in (a, b) and (a or b)]
        for replies in sequences
    ]
    means = [sum(own) / len(own) for own in told if own]
    return sum(means) / len(means) if means else None


def strategies_of(dialogues):
    """Of each group and each code the replies per dialogue that use it, its gain, n, and of a group
    the gain where the hidden need asks for it; the SSRR; and the counted coordinate, whose two
    numbers are no judge's: variety, 1 - SSRR, and support, the share of B to E less F and G."""
    replies, found = [r for d in dialogues for r in d["replies"]], {}
    # A reply whose tags could not be read is in no numerator; so it is in no denominator either.
    readable = sum(used is not None for used, _ in replies) / max(1, len(replies))
    for name, codes in (GROUPS | {code: [code] for code in CODES}).items():
        uses = sum(not set(codes).isdisjoint(used or ()) for used, _ in replies)
        uses = uses / readable / len(dialogues) if readable else None
        asking = [
            r
            for d in dialogues
            if d["intention"] == FORMS["asked_by"].get(name, "-")
            for r in d["replies"]
        ]
        found[name] = dict(
            zip(
                ("uses", "gain", "n", "asked", "asked_n"),
                (uses, *gain(replies, codes), *gain(asking, codes)),
            )
        )
    letters = [code[0] for used, _ in replies for code in used or ()]
    share = lambda group: sum(map(group.count, letters)) / max(1, len(letters))
    repeated = ssrr([[used for used, _ in d["replies"]] for d in dialogues])
    return {
        "strategies": found,
        "dialogues": len(dialogues),
        "ssrr": repeated,
        "variety": None if repeated is None else 1 - repeated,
        "support": share("BCDE") - share("FG"),
    }


def steps_of(dialogues, most=10):
    """`strategies_of` the training dialogues of a log, a tenth of its steps at a time (a step has
    few users, and what they need decides what is used): {last step of the tenth: ...}."""
    steps = {}
    for d in dialogues:
        if d["split"] == "train":
            steps.setdefault(d["step"], []).append(d)
    size, order = -(-len(steps) // most), sorted(steps)
    tenths = [order[i : i + size] for i in range(0, len(order), size)] if size else []
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
        scores = {}  # {dialogue: {part: [one a repeat]}}
        for a in read:
            if a["id"] not in short:
                scores.setdefault(a["id"], {}).setdefault(a["part"], []).append(a["found"][item])
        means = {i: float(np.mean(sum(own.values(), []))) for i, own in scores.items()}
        stds = [np.std(s, ddof=1) for own in scores.values() for s in own.values() if s[1:]]
        x = list(means.values())
        table[item] = {
            "mean": float(np.mean(x)) if x else None,
            "stderr": float(np.std(x, ddof=1) / len(x) ** 0.5) if x[1:] else None,
            "spread": float(np.mean(stds)) if stds else None,
            "missing": 1 - len(read) / len(answers),
            "n": len(x),
            "short": len(short),
            "means": means,
        }
    return table
