"""tools/judge.py - asking a judge; what several tools share, and no tool itself.

A judge is asked as the simulated user is: a prompt is rendered from a file (prompts/en/judge,
prompts/zh/judge), any model answers with one JSON object, reasons first, then the code of this
prompt, then what decides, and `simulator.read_answer` reads it. An answer that cannot be read is
asked for again, and then it is missing and counted: it is never scored 0 or the middle, which a
judge might have said. A judge sees no thoughts. docs/judging.md says what the numbers are not.

tools/dialogues.py says what a judge is asked about, and tools/scores.py takes the means of what it
said.
"""

from support.errors import BadInput, SimulatorFailed
from support.servers import CallLog, ServerModel, digest
from support.settings import natural, not_negative, positive, split_name

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

import simulator
from engine import load_local
from simulator import Simulator, as_json, fill
from tools.dialogues import cases_of_files, need_model
from tools.scores import SCRIPTED_JUDGE, score_files, show_scores
from tools.tables import check_files
from toy.words import ACTS, NEEDS
from toy.world import act_of, code_in, split_sentences, tags_of

# For the estimate of --plan.
TOKENS_OF_AN_ANSWER = 300
LETTERS_OF_A_TOKEN = 4

# ---------------------------------------------------------------------------------------- questions


def without_code(answer):
    """An answer as it is kept where no other function says how."""
    return {key: value for key, value in answer.items() if key != "code"}


@dataclass(frozen=True)
class Question:
    """What a judge is asked: a prompt, and the schema of its answer."""

    name: str  # of the prompt's file, prompts/*/judge/NAME.txt
    template: str  # the prompt's text, with its placeholders
    schema: dict  # see simulator.py
    found: Callable = without_code  # found(answer) -> {item: value}
    repeated: bool = True  # is it asked --repeats times? only where answers have a mean


def load_question(name, lang, placeholders, schema, **more):
    """The Question `name`, its prompt in the language `lang`; more: its other fields. Raises
    BadInput if the file, or one of the `placeholders` in it, is missing."""
    template = simulator.load_prompt(name, lang, "judge", placeholders={*placeholders, "code"})
    return Question(name, template, schema, **more)


def example(user):
    """What `Judge.check` asks about, of this user: something for every placeholder of every
    prompt."""
    line, reply = thought = [message["text"] for message in user.dialogue]
    return {
        "dialogue": as_json(user.dialogue),
        "line": as_json(line),
        "reply": as_json(reply),
        "need": user.profile.task,
        "thought": as_json(thought),
        "record": as_json([thought]),
        "outcome": "success",
    }


# ---------------------------------------------------------------------------------------- the judge


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, the same reader. An
    unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        """args: the flags of `add_judge_flags`. Without --judge, and for --plan, which asks nobody,
        the judge is the toy's scripted one. Raises BadInput."""
        if args.judge and not args.plan:
            model = load_judge(args.judge, args.temperature)
            log = open_call_log("judge")
        else:
            model, log = ScriptedJudge(), None
        super().__init__(model, args.lang, retries=args.retries, concurrency=16, log=log)
        self.repeats = args.repeats

    def repeats_of(self, question):
        """How often a question is asked about each case."""
        return self.repeats if question.repeated else 1

    def key(self, prompt, repeat, attempt):
        """The key of a call in the log. Unlike a user's it has the repeat in it: else three repeats
        at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, attempt)

    async def check(self, question):
        """One question about an example before anything is paid for: can this judge keep the form?
        Raises SimulatorRefused, BadInput or TooManyLost, as a user's `check`."""
        await self.pass_check(question.template, example(self.example()), question.schema)

    async def ask_row(self, question, case, repeat):
        """One call, as a row of --json: what the case is about, what the answer depends on, and
        under "found" what was read, None where no answer could be."""
        found = None
        with contextlib.suppress(SimulatorFailed):
            _, answer = await self.ask(question.template, case.slots, question.schema, repeat)
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
        """Ask `question` about each of `cases`, as often as `repeats_of` says. Returns the rows of
        `ask_row`, one a call. Raises BadInput if no answer about one of the files could be read."""
        repeats = range(self.repeats_of(question))
        jobs = [(question, case, repeat) for case in cases for repeat in repeats]
        rows = await together(self.ask_row, jobs, question.name)
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
    if not re.match(r"openai:.+@https?://[^\s/]|local:.", name):
        raise BadInput(f"--judge {name}: openai:MODEL@URL or local:DIR is needed")
    kind, model, url = split_name(name)
    if kind == "local":
        return load_local(model, temperature, "--judge")
    return ServerModel(model, url, temperature)


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
    log = CallLog(path)
    if path.exists():
        log.read(path)
    return log


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
        answer = filled(schema, self.share_of_good(tags), reworded or "scripted")
        return json.dumps({**answer, "code": code_in(prompt)})

    def share_of_good(self, tags):
        """The share, from 0 to 1, of the good ones among the policy's sentences (those that serve
        any need) and the user's reactions in the record (those of a mood that was lifted)."""
        replies = json.loads(tags.get("dialogue", "[]"))[1::2]  # the policy's turns
        good = []
        for message in replies:
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


# ------------------------------------------------------------------------- a tool with one question


async def score_dialogues(args, question, cases_of, too_short=(), names=None):
    """All that a tool of one question does: ask it about each of `args.files`, and print the
    means. cases_of(path) -> the cases of a file; too_short: of the question's Rubric; names:
    as in `show_scores`. Returns the FileScores, or None if --plan told what would be asked. Raises
    BadInput."""
    check_files(args, least=1)
    need_model("judge", args)
    cases = cases_of_files(args.files, cases_of)
    judge = Judge(args)
    if args.plan:
        print_plan(judge, [(question, cases)])
        return None
    await judge.check(question)
    answers = await judge.ask_all(question, cases)
    scores = score_files(args.files, answers, too_short)
    show_scores(question.name, scores, names or {})
    return scores


# ----------------------------------------------------------------------------------- flags and plan


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
        help=f"ask the judge each question N times (default: {repeats})",
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
    parser.add_argument(
        "--plan",
        action="store_true",
        help="print how many calls and tokens it would take, and ask no model",
    )


def print_plan(judge, planned, more_calls=0, user_calls=0):
    """What --plan tells. planned: [(question, its cases)]; more_calls: calls to the judge whose
    prompts are made of earlier answers; user_calls: calls to users who hear replies."""
    calls = more_calls
    letters = 0
    for question, cases in planned:
        repeats = judge.repeats_of(question)
        calls += repeats * len(cases)
        for case in cases:
            letters += repeats * len(fill(question.template, {**case.slots, "code": ""}))
    print(
        f"{calls:,} calls to the judge, about {letters // LETTERS_OF_A_TOKEN:,} tokens to it and "
        f"{TOKENS_OF_AN_ANSWER * calls:,} from it, without repeated questions (estimate); "
        f"{user_calls:,} calls to users"
    )
