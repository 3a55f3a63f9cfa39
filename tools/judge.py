"""tools/judge.py - what the tools that ask a judge have in common; it is no tool itself.

A judge is one more prompt chain over any model, like the simulated user: a prompt is rendered from
a file (prompts/en/judge, prompts/zh/judge), the model is asked, and its answer is read by named
sections, each with the mark of this prompt (support/answers.py). An answer that cannot be read is
asked for again, and then it is missing and counted: it is never scored 0 or the middle, which a
judge might have said. A judge sees no thoughts. docs/judging.md says what the numbers are not.

From top to bottom: asking a judge; reading its answers; the dialogues that it is asked about; means
of its scores; tables; flags and files that the tools share.
"""

from support import stats
from support.answers import Unreadable, find_sections, marked_sections, peel, whole_number
from support.errors import BadInput, SimulatorFailed
from support.flags import Parser, natural, not_negative, positive
from support.llm import CallLog, digest
from support.page import write_report
from support.report import radar_of
from support.results import intention_of, recorded_dialogues
from support.rundir import profile_files, read_json, refuse_overwriting, write_json
from support.settings import split_name

import argparse
import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

import simulator
from simulator import CHECK, Simulator, as_json, fill
from tools.scripted import ScriptedJudge

# ----------------------------------------------------------------------------------- asking a judge


@dataclass(frozen=True)
class Question:
    """What a judge is asked: a prompt, and how an answer to it is read."""

    name: str  # of the prompt's file, prompts/*/judge/NAME.txt
    template: str  # the prompt's text, with its placeholders
    read: Callable  # read(answer, mark) -> {what was said: value}; raises ValueError
    repeated: bool = True  # is it asked --repeats times? only where answers have a mean


def load_question(name, lang, placeholders, read, repeated=True):
    """The Question `name`, its prompt in the language `lang`. Raises BadInput if the file, or one
    of the `placeholders` in it, is missing."""
    return Question(name, load_template(name, lang, placeholders), read, repeated)


def load_template(name, lang, placeholders):
    """The text of a judge's prompt. Raises BadInput."""
    return simulator.load_prompt(name, lang, "judge", placeholders={*placeholders, "mark"})


class Case(NamedTuple):
    """One thing that a judge is asked about."""

    about: dict  # the file, the id of the dialogue, ...: this goes into the answer, for --json
    slots: dict  # what stands in the prompt's placeholders


def example():
    """What `Judge.check` asks about: something for every placeholder of every prompt."""
    messages = [
        {"speaker": "user", "text": "My bus was late again."},
        {"speaker": "assistant", "text": CHECK},
    ]
    return {
        "dialogue": as_json(messages),
        "line": as_json("My bus was late again."),
        "reply": as_json(CHECK),
        "need": "You want to be listened to.",
        "thought": as_json(f"My friend said: {CHECK}"),
        "record": as_json([[f"My friend said: {CHECK}", "It does me good to be asked."]]),
        "outcome": "success",
    }


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, answers in parts.
    An unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        """args: the flags of `add_judge_flags`. Without --judge, and for --plan, which asks nobody,
        the judge is the toy's scripted one. Raises BadInput."""
        model, log = ScriptedJudge(), None
        if args.judge and not args.plan:
            if not re.match(r"openai:.+@https?://\S|local:.", args.judge):
                raise BadInput(f"--judge {args.judge}: openai:MODEL@URL or local:DIR is needed")
            model = simulator.make_simulator(
                args.judge, args.lang, timeout=300, flag="--judge", temperature=args.temperature
            ).model
            log = open_call_log("judge")
        super().__init__(model, args.lang, retries=args.retries, wait=0.4, concurrency=16, log=log)
        self.repeats = args.repeats

    def key(self, prompt, repeat, unreadable):
        """As a user's, but for the repeat: else three repeats at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, unreadable)

    async def check(self, question):
        """One question about an example before anything is paid for: can this judge keep the form?
        Raises SimulatorRefused, BadInput or TooManyLost, as a user's `check`."""
        self.prompts[question.name] = question.template
        await self.pass_check(lambda judge: judge.ask_once(question, example(), 0))

    async def ask_once(self, question, slots, repeat):
        """What `question.read` makes of the answer to one question. Raises SimulatorFailed."""
        answer = await self.ask(question.name, slots, question.read, repeat)
        return answer.parsed

    async def ask_all(self, question, cases):
        """Ask `question` about each of `cases`, as often as `repeats_of` says. Returns one answer a
        call: what its case is about, what the answer depends on, and under "found" what was read,
        None where nothing could be. Raises BadInput if that is so for all of a file."""
        self.prompts[question.name] = question.template

        async def answer(case, repeat):
            values = None
            with contextlib.suppress(SimulatorFailed):
                values = await self.ask_once(question, case.slots, repeat)
            return {
                **case.about,
                "judge": self.model.name,
                "prompt": digest(question.template)[:8],
                "temperature": self.model.temperature,
                "repeat": repeat,
                "found": values,
            }

        repeats = range(self.repeats_of(question))
        jobs = [(case, repeat) for case in cases for repeat in repeats]
        answers = await together(answer, jobs, question.name)
        answered = {answer["file"] for answer in answers if answer["found"]}
        for path in {answer["file"] for answer in answers} - answered:
            raise BadInput(
                f"{path}: no answer of judge {self.model.name} to prompt {question.name!r} could "
                f"be read; {self.last_failure}"
            )
        return answers

    def repeats_of(self, question):
        """How often a question is asked about each case."""
        return self.repeats if question.repeated else 1


async def together(work, jobs, title):
    """`work`, a coroutine function, for the arguments of each of `jobs`, side by side behind a
    progress bar. Returns the results. (Not coroutines: Ctrl-C would leave those that have not begun
    to complain that nobody awaited them.)"""
    with tqdm(total=len(jobs), desc=title, leave=False) as bar:

        async def one(arguments):
            result = await work(*arguments)
            bar.update()
            return result

        return await asyncio.gather(*map(one, jobs))


def open_call_log(name):
    """The log of calls in results/, read again: nothing is paid for twice."""
    path = Path("results") / f"{name}-calls.jsonl"
    path.parent.mkdir(exist_ok=True)
    return CallLog(path, path if path.exists() else None)


# ------------------------------------------------------------------------------ reading its answers

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


@dataclass(frozen=True)
class Rubric:
    """A form of named parts, each scored with a whole number from `low` to `high`."""

    low: int
    high: int
    parts: dict  # {key: pattern of the part's header}
    too_short: tuple = ()  # keys of parts that say nothing of dialogues of less than three replies

    def read(self, text, mark):
        """{part: score} of an answer. Raises ValueError."""

        def parse(line):
            return parse_score(line, self.low, self.high)

        return read_parts(text, self.parts, mark, parse)


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = ["FEDCBA".index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


@dataclass(frozen=True)
class Questionnaire:
    """A form of numbered statements, each graded from A, strongly agree, to F."""

    low: int  # the score of an F
    high: int
    items: int  # how many statements
    reversed_items: tuple  # numbers of those that speak ill of the friend
    scales: dict  # {name: (its first statement, its last)}
    too_short: tuple = ()  # as of a Rubric

    def read(self, text, mark):
        """{scale: its mean score} of an answer, and under "overall, unreversed" the mean of all
        items as if none were reversed: SAGE words some of them negatively, and does not say that it
        reverses its questionnaire's. Raises ValueError."""
        headers = {
            f"i{i}": rf"(?:item|sentence|statement|第|题目?|句子?)? ?{i} ?(?:题|句)?"
            for i in range(1, self.items + 1)
        }
        grades = list(read_parts(text, headers, mark, parse_grade).values())
        scores = questionnaire(grades, self.reversed_items, self.low, self.high)
        means = {
            name: float(np.mean(scores[first - 1 : last]))
            for name, (first, last) in self.scales.items()
        }
        unreversed = questionnaire(grades, (), self.low, self.high)
        return means | {"overall, unreversed": float(np.mean(unreversed))}


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


# ------------------------------------------------------------------- the dialogues that it is shown


@cache
def load_dialogues(path):
    """The dialogues of a file, as `recorded_dialogues` has them, with what a judge may see: replies
    without thoughts, none malformed. Also of each its "task", "intention", "final" emotion and
    "user", the simulator's name. Raises BadInput."""
    config = read_json(Path(path).parent / "config.json")
    files = profile_files(Path(path).parent, config.get("profiles"))
    people = {profile.id: facts_of(profile) for profile in simulator.people_of(files)}
    dialogues = []
    for number, recorded in enumerate(recorded_dialogues(path), 1):
        if "task" not in recorded and recorded["profile_id"] not in people:
            name = recorded["profile_id"]
            raise BadInput(f"{path}: user {name!r} is not among the run's profiles")
        dialogues.append(
            {
                "step": None,
                "split": "",
                # with the number of the line: a log has many dialogues of one profile
                "id": f"{recorded['profile_id']}, line {number}",
                **people.get(recorded["profile_id"], {}),
                **recorded,
                "turns": visible_turns(recorded),
                "user": simulator_name(recorded, config),
                "final": round(100 * recorded["reward"]),
            }
        )
    if not any(dialogue["turns"] for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def facts_of(profile):
    """What a dialogue in a log, which names its user alone, has to be told of the profile."""
    intention, kind = intention_of(profile.task, profile.need)
    return {"profile": profile, "task": profile.task, "intention": intention, "kind": kind}


def visible_turns(dialogue):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in dialogue["turns"]:
        if turn["emotion"] is None and dialogue.get("ended") == "malformed":
            continue
        after_thought = turn["reply"].rpartition("</think>")[2]
        turns.append({**turn, "reply": after_thought.partition("<think>")[0].strip()})
    return turns


def simulator_name(dialogue, config):
    """The model that played the user: as a result file says it, or the log's config.json."""
    name = dialogue.get("made_by", {}).get("simulator") or dialogue.get("simulator")
    kind, model, _ = split_name(name or config.get("simulator", "?"))
    return model or kind


def messages_of(dialogue, turns=None):
    """[{"speaker", "text"}] of a dialogue; with `turns`, up to the user's line after so many."""
    texts = [dialogue["first_line"]]
    for turn in dialogue["turns"][:turns]:
        texts += [turn["reply"], turn["user"]]
    return [
        {"speaker": "assistant" if i % 2 else "user", "text": text}
        for i, text in enumerate(texts)
        if text
    ]


def make_cases(path, name, slots_of, hint=""):
    """The Cases of the question `name` about a file. slots_of(dialogue) -> a list: what stands in
    the prompt's placeholders, once for each time that the dialogue is asked about. Raises BadInput
    if there is nothing to ask about; `hint` says why that may be."""
    cases = []
    for dialogue in load_dialogues(path):
        for part, slots in enumerate(slots_of(dialogue)):
            about = {
                "file": path,
                "id": dialogue["id"],
                "part": part,
                "replies": len(dialogue["turns"]),
                "final": dialogue["final"],
            }
            cases.append(Case(about, slots))
    if not cases:
        raise BadInput(f"{path}: nothing in it that {name} could be asked about{hint}")
    return cases


def dialogue_slots(dialogue):
    """For `make_cases`: a dialogue as a whole, if there is a reply in it. (One whose first reply
    was malformed has none.)"""
    return [{"dialogue": as_json(messages_of(dialogue))}] if dialogue["turns"] else []


def reply_slots(dialogue):
    """For `make_cases`: each reply of a dialogue, with the dialogue before it."""
    slots = []
    for i, turn in enumerate(dialogue["turns"]):
        past = messages_of(dialogue, i)
        slots.append(
            {
                "dialogue": as_json(past),
                "reply": as_json(turn["reply"]),
                "line": as_json(past[-1]["text"]),
            }
        )
    return slots


# ------------------------------------------------------------------------------ means of its scores


def score_table(answers, too_short=()):
    """{item: {"mean", "stderr" (over dialogues), "spread" (standard deviation over the repeats of a
    question, averaged), "missing" (share of answers), "n" (dialogues), "short", "means": {id}}}.

    answers: [{"id", "part", "replies", "found": {item: score} or None}], one per question and
    repeat. Items of `too_short` leave out dialogues of fewer than three replies, and count them."""
    readable = [answer for answer in answers if answer["found"]]
    missing = 1 - len(readable) / len(answers)
    short = {answer["id"] for answer in answers if answer["replies"] < 3}
    table = {}
    for item in readable[0]["found"]:
        left_out = short if item in too_short else set()
        counted = [answer for answer in readable if answer["id"] not in left_out]
        means, spreads = means_of(item, counted)
        values = list(means.values())
        stderr = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else None
        table[item] = {
            "mean": float(np.mean(values)) if values else None,
            "stderr": None if stderr is None else float(stderr),
            "spread": float(np.mean(spreads)) if spreads else None,
            "missing": missing,
            "n": len(values),
            "short": len(left_out),
            "means": means,
        }
    return table


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
        means[dialogue] = float(np.mean([score for scores in parts.values() for score in scores]))
        spreads += [np.std(scores, ddof=1) for scores in parts.values() if len(scores) > 1]
    return means, spreads


def score_files(files, answers, too_short=()):
    """{"answers", "tables": {file: its `score_table`}}; of two files also "paired": {item: mean of
    the second less the first over the dialogues of both, with its interval}."""
    tables = {
        path: score_table([answer for answer in answers if answer["file"] == path], too_short)
        for path in files
    }
    scores = {"answers": answers, "tables": tables}
    if len(files) == 2:
        before, after = tables.values()
        scores["paired"] = {}
        for item in before:
            means_before, means_after = before[item]["means"], after[item]["means"]
            differences = [
                means_after[dialogue] - mean
                for dialogue, mean in means_before.items()
                if dialogue in means_after
            ]
            scores["paired"][item] = stats.interval(np.mean, differences)
    return scores


def show_scores(tables, name, scores):
    """Show the tables of `score_files` for the question `name`."""
    reading = made_by(scores["answers"])
    columns = ["mean", "stderr", "spread", "missing", "n", "short"]
    for path, table in scores["tables"].items():
        rows = {item: [row[column] for column in columns] for item, row in table.items()}
        tables.show(f"{name}, {path}", columns, rows, reading)
    if "paired" in scores:
        tables.show(
            "after minus before: the second FILE minus the first, paired over dialogues",
            ["mean", "from", "to", "n"],
            scores["paired"],
            reading,
        )


def correlations_of(name, scores):
    """How far the overall score goes with the final emotion: {row of a table: [r, from, to, n]},
    within each file over its dialogues and, of three files or more, over the files' means."""
    finals = {(answer["file"], answer["id"]): answer["final"] for answer in scores["answers"]}
    rows, means = {}, []
    for path, table in scores["tables"].items():
        pairs = [
            (score, finals[path, dialogue]) for dialogue, score in table["overall"]["means"].items()
        ]
        rows[f"{name}, {path}"] = stats.interval(stats.pearson, *np.transpose(pairs))
        means.append(np.mean(pairs, 0))
    if len(means) > 2:
        rows[f"{name}, over files"] = stats.interval(stats.pearson, *np.transpose(means))
    return rows


def made_by(answers):
    """Which judge gave these answers, in words; two judges never stand in one table."""
    settings = ", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
    return f"{settings}, repeats {1 + answers[-1]['repeat']}. "


# ------------------------------------------------------------------------------------------- tables


def cell(value):
    """A value as a table has it."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class Tables:
    """The tables of one command: printed as they come, and kept for --html."""

    def __init__(self):
        self.shown = []  # in the form that `write_report` takes

    def show(self, title, columns, rows, reading):
        """Print a table, rows {name: cells}, and how to read it."""
        self.shown.append(
            {
                "title": title,
                "columns": ["", *columns],
                "reading": reading,
                "rows": [[str(name), *map(cell, cells)] for name, cells in rows.items()],
            }
        )
        first_width = max([len(str(name)) for name in rows], default=0) + 1
        print(f"\n{title}")
        for name, cells in {"": columns, **rows}.items():
            line = f"{name!s:{first_width}}"
            for value, column in zip(cells, columns):
                line += f"  {cell(value):>{max(10, len(column))}}"
            print(line)
        print(reading)


def write_outputs(args, tool, result, tables):
    """What --json and --html ask for."""
    if args.json:
        write_json(args.json, {"command": tool, **result})
    if args.html:
        write_report(
            args.html,
            title=f"tools.{tool}",
            settings={},
            curves=[],
            evaluations=[],
            dialogues=[],
            tables=tables.shown,
            radar=radar_of(result),
        )


# ---------------------------------------------------------------------------------- flags and files


def make_parser(tool, about):
    """A parser for `python -m tools.TOOL` with the flags of every tool. about: its docstring."""
    parser = Parser(
        prog=f"python -m tools.{tool}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="write everything here")
    parser.add_argument("--html", metavar="FILE", help="write the tables as a page")
    return parser


def add_files(parser):
    """The files that a tool reads."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="result files, ours or SAGE's, or a run's dialogues.jsonl",
    )


def add_judge_flags(parser, repeats=1):
    """Who the judge is and how it is asked. repeats: how often, if the flag does not say."""
    parser.add_argument("--judge", help="openai:MODEL@URL or local:DIR (the toy's files need none)")
    parser.add_argument(
        "--repeats",
        type=positive,
        default=repeats,
        help=f"how often all is asked (default: {repeats})",
    )
    parser.add_argument(
        "--temperature", type=not_negative, default=0.0, help="of the judge (default: 0.0)"
    )
    parser.add_argument("--retries", type=natural, default=4, help="of one question (default: 4)")
    parser.add_argument(
        "--lang", choices=["en", "zh"], default="en", help="of the prompts (default: en)"
    )
    parser.add_argument("--plan", action="store_true", help="tell the calls and tokens, ask nobody")


def check_files(args, least, inputs=(), out=None):
    """Take each of `args.files` once; refuse fewer than `least`, and outputs (--json, --html, and
    the file of --out, if the tool has one) that would overwrite one of them, one of `inputs`, or
    each other. Raises BadInput."""
    args.files = list(dict.fromkeys(args.files))
    outputs = {"--json": args.json, "--html": args.html, "--out": out}
    refuse_overwriting(outputs, [*args.files, *inputs])
    if len(args.files) < least:
        raise BadInput(f"{least} FILE or more wanted")


def users_of(files):
    """The names of the simulators that played the users of these files."""
    return {load_dialogues(path)[0]["user"] for path in files}


def need_model(flag, args):
    """Raise BadInput if the model that `flag` names (judge, simulator) is not given and cannot be a
    scripted one. A plan asks nobody, so it needs none."""
    is_given = getattr(args, flag) or args.plan
    if not is_given and not are_of_toy(args.files):
        raise BadInput(
            f"--{flag} is needed, openai:MODEL@URL or local:DIR: what is scripted "
            "understands the toy's files alone"
        )


def are_of_toy(files):
    """Are all users of these files the toy's?"""
    return all(user.startswith("toy") for user in users_of(files))


def print_plan(judge, planned, more_calls=0, user_calls=0):
    """What --plan tells. planned: [(question, its cases)]; more_calls: to the judge, about what is
    not known before; user_calls: to users who hear replies."""
    calls, letters = more_calls, 0
    for question, cases in planned:
        repeats = judge.repeats_of(question)
        prompts = [fill(question.template, {**case.slots, "mark": ""}) for case in cases]
        calls += repeats * len(prompts)
        letters += repeats * sum(map(len, prompts))
    print(
        f"{calls:,} calls to the judge, about {letters // 4:,} tokens to it and "
        f"{300 * calls:,} from it, but for what is asked again (estimate); {user_calls:,} calls to "
        "users"
    )
