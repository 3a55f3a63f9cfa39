"""tools/asking.py - asking a judge; what the tools that have one share, and no tool itself.

A judge is asked as the simulated user is: a prompt is rendered from a file (prompts/en/judge,
prompts/zh/judge), any model answers with one JSON object, reasons first, then the code of this
prompt, then what decides, and `simulator.read_answer` reads it. An answer that cannot be read is
asked for again, and then it is missing and counted: it is never scored 0 or the middle, which a
judge might have said. A judge sees no thoughts. tools/dialogues.py says what it is asked about.
"""

from support.errors import BadInput, SimulatorFailed
from support.servers import CallLog, digest
from support.settings import natural, not_negative, positive

import contextlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm.asyncio import tqdm

import simulator
from simulator import Simulator, as_json
from toy.words import ACTS, NEEDS
from toy.world import act_of, code_in, split_sentences, tags_of

# The name of the judge that is a script, and what must stand beside its scores.
SCRIPTED_JUDGE = "scripted"
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."


@dataclass(frozen=True)
class Question:
    """What a judge is asked: a prompt, and the schema of its answer."""

    name: str  # of the prompt's file, prompts/*/judge/NAME.txt
    template: str  # the prompt's text, with its placeholders
    schema: dict  # see simulator.py
    found: Callable = dict  # found(answer, without its code) -> {item: value}
    repeated: bool = True  # is it asked --repeats times? only where answers have a mean


def load_question(name, lang, placeholders, schema, **more):
    """The Question `name`, its prompt in the language `lang`; more: its other fields. Raises
    BadInput if the file, or one of the `placeholders` in it, is missing."""
    template = simulator.load_prompt(name, lang, "judge", placeholders={*placeholders, "code"})
    return Question(name, template, schema, **more)


# ---------------------------------------------------------------------------------------- the judge


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, the same reader. An
    unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        """args: the flags of `add_judge_flags`. Without --judge it is the toy's scripted one.
        Raises BadInput."""
        model, log = ScriptedJudge(), None
        if args.judge:
            model, log = (
                load_judge(args.judge, args.temperature),
                open_call_log("results/judge-calls.jsonl"),
            )
        super().__init__(model, args.lang, retries=args.retries, concurrency=16, log=log)
        self.repeats = args.repeats

    def key(self, prompt, repeat, attempt):
        """The key of a call in the log. Unlike a user's it has the repeat in it: else three repeats
        at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, attempt)

    async def check(self, question):
        """One question about an example before anything is paid for: can this judge keep the form?
        Raises SimulatorRefused, BadInput or TooManyLost, as a user's `check`."""
        names = re.findall(r"\{\{(\w+)\}\}", question.template)
        dialogue = self.example().dialogue
        values = dict.fromkeys(names, as_json(dialogue[-1]["text"]))
        values["dialogue"] = as_json(dialogue)
        await self.pass_check(question.template, values, question.schema)

    async def ask_row(self, question, case, repeat):
        """One call, as a row of --json: what the case is about, what the answer depends on, and
        under "found" what was read, None where no answer could be."""
        found = None
        with contextlib.suppress(SimulatorFailed):
            _, answer = await self.ask(question.template, case.slots, question.schema, repeat)
            answer.pop("code")
            found = question.found(answer)
        return {
            **case.about,
            "judge": self.model.name,
            "prompt": digest(question.template)[:8],
            "temperature": self.model.temperature,
            "repeat": repeat,
            "found": found,
        }

    async def ask_all(self, question, cases):
        """Ask `question` about each of `cases`, --repeats times if it is `repeated`. Returns the
        rows of `ask_row`, one a call. Raises BadInput if no answer about one of the files could be
        read."""
        repeats = range(self.repeats if question.repeated else 1)
        calls = [self.ask_row(question, case, repeat) for case in cases for repeat in repeats]
        rows = await tqdm.gather(*calls, desc=question.name, leave=False)
        answered = {row["file"] for row in rows if row["found"]}
        for row in rows:
            if row["file"] not in answered:
                raise BadInput(
                    f"{row['file']}: no answer of judge {self.model.name} to prompt "
                    f"{question.name!r} could be read"
                )
        return rows


def load_judge(name, temperature):
    """The model that --judge names: openai:MODEL@URL or local:DIR. Raises BadInput."""
    if not name.startswith(("openai:", "local:")):
        raise BadInput(f"--judge {name}: openai:MODEL@URL or local:DIR is needed")
    return simulator.make_simulator(name, temperature=temperature, flag="--judge").model


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


def add_judge_flags(parser, repeats=1):
    """Who the judge is and how it is asked. repeats: how often, if the flag does not say."""
    parser.add_argument(
        "--judge",
        metavar="NAME",
        help="model that judges: openai:MODEL@URL, a server, or local:DIR (default: a script, for "
        "the toy's files only, whose answers say nothing about quality)",
    )
    parser.add_argument(
        "--repeats",
        type=positive,
        default=repeats,
        metavar="N",
        help=f"ask the judge each question N times (default: {repeats or '1, coordinate 3'})",
    )
    parser.add_argument(
        "--temperature",
        type=not_negative,
        default=0.0,
        metavar="T",
        help="sampling temperature of the judge (default: 0.0)",
    )
    parser.add_argument(
        "--retries",
        type=natural,
        default=4,
        metavar="N",
        help="ask again up to N times if an answer cannot be read (default: 4)",
    )
    parser.add_argument(
        "--lang",
        choices=["en", "zh"],
        default="en",
        help="language of the judge's prompts (default: en)",
    )


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
    reactions = re.findall("lifted|let down", tags.get("record", ""))
    good += [reaction == "lifted" for reaction in reactions]
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
        used = next((opening for opening in openings if sentence.startswith(f"{opening} ")), None)
        if used is not None:
            others = [opening for opening in openings if opening != used]
            new_opening = random.Random(sentence).choice(others)
            sentence = new_opening + sentence.removeprefix(used)
        reworded.append(sentence)
    return " ".join(reworded)
