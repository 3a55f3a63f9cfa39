"""tools/asking.py - asking a judge; what the tools that have one share, and no tool itself.

A judge is asked as the simulated user is: a prompt is rendered from a file (prompts/en/judge,
prompts/zh/judge), any model answers with one JSON object, reasons first, then the code of this
prompt, then what decides, and `simulator.read_answer` reads it. An answer that cannot be read is
asked for again, and then it is missing and counted: it is never scored 0 or the middle, which a
judge might have said. A judge sees no thoughts. tools/dialogues.py says what it is asked about.
"""

from support.errors import BadInput, SimulatorFailed
from support.servers import CallLog, digest
from support.settings import SCRIPTED, not_negative

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tqdm.asyncio import tqdm

import simulator
from simulator import Simulator
from tools.dialogues import make_cases
from toy.words import ACTS, NEEDS
from toy.world import act_of, code_in, split_sentences, tags_of

RETRIES = 4  # how often a question is asked again whose answer cannot be read
# The name of the judge that is a script, and what must stand beside its scores.
SCRIPTED_JUDGE = "scripted"
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."


class Question(NamedTuple):
    """What a judge is asked."""

    name: str  # of the prompt's file, prompts/*/judge/NAME.txt
    schema: dict  # of the answer, see simulator.py
    found: Callable = dict  # found(answer, without its code) -> {item: value}
    repeats: int = 1  # how often it is asked about the same thing


def load_question(name, lang, placeholders, schema, repeated):
    """For tools/replay.py: a Question."""
    return Question(name, schema)


# ---------------------------------------------------------------------------------------- the judge


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, the same reader. An
    unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        """args: the flags of `add_judge_flags`. Without --judge it is the toy's scripted one.
        Raises BadInput."""
        model, log = ScriptedJudge(), None
        if args.judge:
            if args.judge in SCRIPTED:
                raise BadInput(f"--judge {args.judge}: openai:MODEL@URL or local:DIR is needed")
            how = {"temperature": args.temperature, "flag": "--judge"}
            model = simulator.make_simulator(args.judge, **how).model
            log = open_call_log("results/judge-calls.jsonl")
        super().__init__(model, args.lang, retries=RETRIES, concurrency=16, log=log)

    def key(self, prompt, repeat, attempt):
        """The key of a call in the log. Unlike a user's it has the repeat in it: else three repeats
        at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, attempt)

    async def check(self, question):
        """For tools/replay.py: `ask_all` checks."""

    async def ask_all(self, question, cases):
        """Ask a Question about each of `cases`, of `make_cases`, after one question as a user's
        `check`, which raises what that raises. Returns a row of --json for each call: what the case
        is about, what the answer depends on, and under "found" what was read, None where no answer
        could be. Raises BadInput if no answer about one of the files could be read."""
        await super().check()
        path = simulator.PROMPTS / self.lang / "judge" / f"{question.name}.txt"
        template = path.read_text(encoding="utf-8").strip()

        async def ask_row(about, slots, repeat):
            found = None
            with contextlib.suppress(SimulatorFailed):
                _, answer = await self.ask(template, slots, question.schema, repeat)
                answer.pop("code")
                found = question.found(answer)
            return {
                **about,
                "judge": self.model.name,
                "prompt": digest(template)[:8],
                "temperature": self.model.temperature,
                "repeat": repeat,
                "found": found,
            }

        calls = [ask_row(*case, repeat) for case in cases for repeat in range(question.repeats)]
        rows = await tqdm.gather(*calls, desc=question.name, leave=False)
        unread = {row["file"] for row in rows} - {row["file"] for row in rows if row["found"]}
        if unread:
            raise BadInput(f"{min(unread)}: no answer of judge {self.model.name} could be read")
        return rows


def ask_files(args, question, slots_of):
    """Ask a Question about each of `args.files`. slots_of: for `make_cases`. Returns what `ask_all`
    returns, and raises what `make_cases` and `ask_all` raise."""
    cases = []
    for path in args.files:
        cases += make_cases(path, question.name, slots_of)
    return asyncio.run(Judge(args).ask_all(question, cases))


def open_call_log(path):
    """The log of calls in the file `path`, read again: nothing is paid for twice."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(path)
    if path.exists():
        log.read(path)
    return log


def made_by(answers):
    """Which judge gave these answers: a line for the reading of a table, before it another one if
    the judge is the script. Two judges never stand in one table."""
    settings = ", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
    warning = f"{MACHINERY_ONLY}\n" if answers[0]["judge"] == SCRIPTED_JUDGE else ""
    return f"{warning}{settings}, repeats {1 + answers[-1]['repeat']}\n"


def add_judge_flags(parser):
    """Who the judge is and how it is asked."""
    add = parser.add_argument
    text = "openai:MODEL@URL or local:DIR (default: a script, for the toy's files only)"
    add("--judge", metavar="NAME", help=text)
    text = "sampling temperature of the judge (default: 0.0)"
    add("--temperature", type=not_negative, default=0.0, metavar="T", help=text)
    text = "of the judge's prompts (default: en)"
    add("--lang", choices=["en", "zh"], default="en", help=text)


# ------------------------------------------------------------------------------- the scripted judge


class ScriptedJudge:
    """Fills in the schema of a question: the greater the share of sentences that serve any need,
    the higher is what it gives on each scale. It has no opinion, and stands where a judge would in
    the toy's world."""

    name, temperature = SCRIPTED_JUDGE, 0.0
    is_scripted = True  # its answers always have the form, so no tool need check that first

    async def __call__(self, prompt, schema):
        tags = tags_of(prompt)
        reworded = in_other_words(json.loads(tags.get("reply", '""')))
        answer = filled(schema, share_of_good(tags), reworded or "scripted")
        return json.dumps({**answer, "code": code_in(prompt)})


def share_of_good(tags):
    """The share, from 0 to 1, of the good ones among the policy's sentences (those that serve any
    need) and the user's reactions in the record (those of a mood that was lifted). tags: what
    stands in a prompt, {tag: text}."""
    good = []
    for message in json.loads(tags.get("dialogue", "[]"))[1::2]:  # the policy's turns
        good += [act_of(sentence) in NEEDS for sentence in split_sentences(message["text"])]
    for reaction in re.findall("lifted|let down", tags.get("record", "")):
        good.append(reaction == "lifted")
    return sum(good) / max(1, len(good))


def filled(kind, share, text):
    """A value of this kind of a schema. In a scale it stands at `share`, from 0, its lowest value,
    to 1, its highest; every string is `text`, every list empty."""
    if isinstance(kind, dict):
        return {key: filled(inner, share, text) for key, inner in kind.items()}
    if isinstance(kind, list):
        return []
    if kind is str:
        return text
    if isinstance(kind, range) and kind.start < 0:
        return 0  # neither end of such a scale is better than the other
    return kind[round(share * (len(kind) - 1))]  # scales go from the worst to the best


def in_other_words(reply):
    """The same sentences, each with another opening of its act. A sentence that is not in the
    grammar stays as it is."""
    reworded = []
    for sentence in split_sentences(reply):
        act = act_of(sentence)
        openings = ACTS[act].openings if act else []
        for used in openings:
            if sentence.startswith(f"{used} "):
                others = [opening for opening in openings if opening != used]
                sentence = random.Random(sentence).choice(others) + sentence.removeprefix(used)
                break
        reworded.append(sentence)
    return " ".join(reworded)
