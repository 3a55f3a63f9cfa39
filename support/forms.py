"""support/forms.py - the forms that a judge fills in, and how what it wrote into them is read.

There are three kinds: a Rubric asks for named parts, each with a whole number; a Questionnaire asks
for numbered statements, each with a grade from A to F; and `read_words` reads answers in words. In
all of them only a header that bears the mark of the prompt counts (support/answers.py): a judge
quotes the replies that it judges, and a policy may write "Score: 5" into a reply.

An answer that cannot be read raises Unreadable, which is a ValueError, and the judge is asked
again. Nothing is guessed: there is no score that stands for "no answer".
"""

from support.answers import Unreadable, find_sections, marked_sections, peel, whole_number

import re
from dataclasses import dataclass

import numpy as np

# The header of a score within a part, as a pattern.
SCORE = "(?:score|rating|得分|评分|分数|打分)"

# ------------------------------------------------------------------- named parts, each with a score


@dataclass(frozen=True)
class Rubric:
    """A form of named parts, each scored with a whole number from `low` to `high`."""

    low: int
    high: int
    parts: dict  # {key: pattern of the part's header}
    # Keys of the parts whose score means nothing for a dialogue of fewer than three replies.
    too_short: tuple = ()

    def read(self, text, mark):
        """{part: score} of an answer. Raises ValueError."""

        def parse(line):
            return parse_score(line, self.low, self.high)

        return read_parts(text, self.parts, mark, parse)


def parse_score(line, low, high):
    """The whole number from `low` to `high` that stands alone on a line: "4", "**4/5**", "4.0".
    Raises ValueError for all else: a half, two numbers, another scale, a number in a sentence."""
    score = whole_number(line, out_of=high)
    if not low <= score <= high:
        raise Unreadable("value", f"no score from {low} to {high}: {line[:60]!r}")
    return score


def read_parts(text, names, mark, parse):
    """{key: value} of a judge's answer in named parts, in any order. names: {key: pattern of its
    header}; parse(line) -> the value that stands alone on a line.

    The value stands on the line of a header Score within the part or, where there is none, on the
    part's own. Only headers with the mark are read. Raises ValueError if a part is missing, or if
    two different values are there.
    """
    own_lines = []  # (key, rest of the header's line) of each part, in the answer's order
    score_lines = []  # of each of these parts, the lines of the headers Score below it
    for section in find_sections(text, {**names, "score": SCORE}, mark):
        if section.name in names:
            own_lines.append((section.name, section.line))
            score_lines.append([])
        elif score_lines:
            score_lines[-1].append(section.line)
    values_of = {key: set() for key in names}
    for (key, own_line), lines in zip(own_lines, score_lines):
        values_of[key] |= {parse(line) for line in lines or [own_line]}
    for key, values in values_of.items():
        if not values:
            raise Unreadable("header", f"no part {key} with its mark")
        if len(values) > 1:
            raise Unreadable("twice", f"{key}: two different values")
    return {key: values.pop() for key, values in values_of.items()}


# ----------------------------------------------------------- numbered statements, each with a grade


@dataclass(frozen=True)
class Questionnaire:
    """A form of numbered statements, each graded from A, strongly agree, to F."""

    low: int  # the score of an F
    high: int  # the score of an A
    items: int  # how many statements there are
    reversed_items: tuple  # numbers of the statements that speak ill of the friend
    scales: dict  # {name: (its first statement, its last)}

    def read(self, text, mark):
        """{scale: its mean score} of an answer. Raises ValueError.

        Under "overall, unreversed" stands the mean of all items as if none were reversed: SAGE
        words some items negatively, and does not say that it reverses them."""
        headers = {
            f"i{i}": rf"(?:item|sentence|statement|第|题目?|句子?)? ?{i} ?(?:题|句)?"
            for i in range(1, self.items + 1)
        }
        grades = list(read_parts(text, headers, mark, parse_grade).values())
        scores = questionnaire(grades, self.reversed_items, self.low, self.high)
        means = {}
        for name, (first, last) in self.scales.items():
            means[name] = float(np.mean(scores[first - 1 : last]))
        scores_unreversed = questionnaire(grades, (), self.low, self.high)
        means["overall, unreversed"] = float(np.mean(scores_unreversed))
        return means


def parse_grade(line):
    """The letter from A to F that stands alone on a line. Raises ValueError for all else."""
    grade = peel(line).upper()
    if grade not in list("ABCDEF"):
        raise Unreadable("value", f"no letter from A to F alone on its line: {line[:60]!r}")
    return grade


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = ["FEDCBA".index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


# -------------------------------------------------------------------------------------------- words


def read_words(text, headers, mark):
    """{"text"} of an answer in words: its sections, with their names where there are several.
    headers: {name: pattern}. Raises ValueError if one is missing or empty."""
    sections = marked_sections(text, headers, mark)
    if not all(re.search(r"\w", words) for words in sections.values()):
        raise Unreadable("empty", "a section is empty")
    if len(sections) == 1:
        (words,) = sections.values()
        return {"text": words.strip(' \n*"“”')}
    return {"text": "\n".join(f"{name}: {words}" for name, words in sections.items())}
