"""tools/scores.py - means of what a judge answered: over repeats, over the dialogues of a file, and
of one file against another.

An answer is a row as `tools.judge.Judge.ask_all` returns it; of these this file reads

    "file", "id", "part"    which question about which dialogue of which file
    "repeat"                how often it had been asked before
    "replies", "final"      of the dialogue: the number of its replies, and its final emotion
    "found"                 {item: score}, or None if no answer could be read

A dialogue counts once, however many questions were asked about it. What is missing is counted, and
is in no mean.
"""

from support import stats

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tools.tables import show_table

# The name of the judge that is a script (tools/judge.py), and what must stand beside its scores.
SCRIPTED_JUDGE = "scripted"
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."


class ItemScore(NamedTuple):
    """What the dialogues of a file got for one item."""

    mean: float | None  # over dialogues; None if none is left
    stderr: float | None  # of this mean, over dialogues
    spread: float | None  # standard deviation over the repeats of a question, averaged
    missing: float  # share of the answers that could not be read
    n: int  # dialogues
    short: int  # dialogues left out because they have fewer than three replies
    means: dict  # {id of a dialogue: its mean score}


def score_table(answers, too_short=()):
    """{item: ItemScore} of the answers about one file. Items of `too_short` leave out dialogues of
    fewer than three replies, and count them."""
    readable = [answer for answer in answers if answer["found"]]
    missing = 1 - len(readable) / len(answers)
    short = {answer["id"] for answer in answers if answer["replies"] < 3}
    table = {}
    for item in readable[0]["found"]:
        left_out = short if item in too_short else set()
        counted = [answer for answer in readable if answer["id"] not in left_out]
        table[item] = score_item(item, counted, missing, len(left_out))
    return table


def score_item(item, answers, missing, short):
    """The ItemScore of readable answers."""
    means, spreads = means_of(item, answers)
    values = list(means.values())
    mean = stderr = spread = None
    if values:
        mean = float(np.mean(values))
    if len(values) > 1:
        stderr = float(np.std(values, ddof=1) / len(values) ** 0.5)
    if spreads:
        spread = float(np.mean(spreads))
    return ItemScore(mean, stderr, spread, missing, len(values), short, means)


def means_of(item, answers):
    """({dialogue: mean score}, [standard deviation over the repeats of each question that has
    several]) of readable answers. A dialogue's mean is over all questions about it and all repeats:
    each dialogue counts once."""
    scores_of = {}  # {dialogue: {part: [score, one a repeat]}}
    for answer in answers:
        parts = scores_of.setdefault(answer["id"], {})
        parts.setdefault(answer["part"], []).append(answer["found"][item])
    means, spreads = {}, []
    for dialogue, parts in scores_of.items():
        all_scores = []
        for scores in parts.values():
            all_scores += scores
            if len(scores) > 1:
                spreads.append(np.std(scores, ddof=1))
        means[dialogue] = float(np.mean(all_scores))
    return means, spreads


# ------------------------------------------------------------------------------------ several files


@dataclass
class FileScores:
    """What the dialogues of several files got from one question."""

    answers: list  # the judge's
    tables: dict  # {file: {item: ItemScore}}
    # Of two files {item: [mean, low, high, n] of the second less the first}, else empty.
    paired: dict = field(default_factory=dict)

    def as_json(self):
        """As --json has it."""
        tables = {}
        for path, table in self.tables.items():
            tables[path] = {item: score._asdict() for item, score in table.items()}
        result = {"answers": self.answers, "tables": tables}
        if len(self.tables) == 2:
            result["paired"] = self.paired
        return result


def score_files(files, answers, too_short=()):
    """The FileScores of the answers to one question about all `files`."""
    tables = {}
    for path in files:
        answers_of_file = [answer for answer in answers if answer["file"] == path]
        tables[path] = score_table(answers_of_file, too_short)
    scores = FileScores(answers, tables)
    if len(files) == 2:
        before, after = tables.values()
        for item in before:
            scores.paired[item] = paired_difference(before[item].means, after[item].means)
    return scores


def paired_difference(before, after):
    """[mean, low, high, n] of `after` less `before`, {dialogue: score}, over the dialogues that are
    in both."""
    differences = [after[dialogue] - before[dialogue] for dialogue in before if dialogue in after]
    return stats.interval(np.mean, differences)


READING_OF_SCORES = (
    "mean: over dialogues; stderr: its standard error; spread: standard deviation over repeats; "
    "missing: share of answers that could not be read; n: dialogues; short: dialogues left out, "
    "of fewer than three replies"
)


def show_scores(name, scores, names):
    """Print the FileScores of the question `name`. names: {item: how a row is called},
    where that is not the item itself."""
    reading = made_by(scores.answers) + READING_OF_SCORES
    columns = ["mean", "stderr", "spread", "missing", "n", "short"]
    for path, table in scores.tables.items():
        rows = {}
        for item, score in table.items():
            rows[names.get(item, item)] = [getattr(score, column) for column in columns]
        show_table(f"{name}, {path}", columns, rows, reading)
    if len(scores.tables) == 2:
        show_table(
            "after minus before: the second FILE minus the first, paired over dialogues",
            ["mean", "from", "to", "n"],
            {names.get(item, item): difference for item, difference in scores.paired.items()},
            f"{made_by(scores.answers)}from, to: the 95 % interval; n: dialogues",
        )


def correlations_of(name, scores):
    """How far the item "overall" of FileScores goes with the final emotion (Pearson's r): {row of a
    table: [r, from, to, n]}. There is a row for each file, over its dialogues, and, of three files
    or more, a row over the files' means."""
    final_of = {(answer["file"], answer["id"]): answer["final"] for answer in scores.answers}
    rows = {}
    means = []  # of each file (its mean score, its mean final emotion)
    for path, table in scores.tables.items():
        score_of = table["overall"].means
        pairs = [(score, final_of[path, dialogue]) for dialogue, score in score_of.items()]
        rows[f"{name}, {path}"] = stats.interval(stats.pearson, *zip(*pairs))
        means.append(np.mean(pairs, axis=0))
    if len(means) > 2:
        rows[f"{name}, over files"] = stats.interval(stats.pearson, *zip(*means))
    return rows


def made_by(answers):
    """Which judge gave these answers: a line for the reading of a table, before it another one if
    the judge is the script. Two judges never stand in one table."""
    settings = ", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
    warning = f"{MACHINERY_ONLY}\n" if answers[0]["judge"] == SCRIPTED_JUDGE else ""
    return f"{warning}{settings}, repeats {1 + answers[-1]['repeat']}\n"
