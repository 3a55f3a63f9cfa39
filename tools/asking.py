"""tools/asking.py - asking a judge: what the tools with a judge share. It is no tool itself.

A judge is asked as the simulated user is: a prompt is rendered from a file (prompts/en/judge,
prompts/zh/judge), any model answers with one JSON object, reasons first, then the code of this
prompt, then the decision, and `answers.read_answer` reads it. An unreadable answer is asked for
again, and then counted as missing. It is never scored 0 or the middle, because a judge might have
said these. A judge sees no thoughts. tools/dialogues.py says what it is asked about.
"""

from players.calls import MAX_THINKING_TOKENS, Caller, CallLog
from players.check import check
from players.users import language_model
from support.answers import PROMPTS
from support.command_line import SCRIPTED, not_negative, refuse_nesting
from support.errors import BadInput, SimulatorFailed
from support.files import digest, read_text

import asyncio
import contextlib
from functools import cache
from pathlib import Path

from tqdm.asyncio import tqdm

from simulator import Simulator
from tools.dialogues import add_files
from toy.judge import SCRIPTED_JUDGE, ScriptedJudge

RETRIES = 4  # how often a question with an unreadable answer is asked again
# stands beside the scores of the scripted judge
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."


# ---------------------------------------------------------------------------------------- the judge


class JudgeCaller(Caller):
    """Asks a judge."""

    def key(self, prompt, repeat, attempt):
        """The key of a call in the log. Unlike a user's key it always includes the repeat: otherwise
        three repeats at temperature 0 would be one call."""
        return digest(self.name, self.temperature, prompt, repeat, attempt)


def make_judge(args):
    """The judge that the flags of `add_judge_flags` name; without --judge it is the toy's scripted
    judge. It plays nobody: of a Simulator it needs only `ask`, with its bounded retries. Raises
    BadInput."""
    model, log = ScriptedJudge(), None
    if args.judge:
        if args.judge in SCRIPTED:
            raise BadInput(f"--judge {args.judge}: openai:MODEL@URL or local:DIR is needed")
        model = language_model(args.judge, "--judge", args.temperature)
        model.most_tokens = MAX_THINKING_TOKENS  # its reasons may be long
        log = open_call_log("results/judge-calls.jsonl")
    caller = JudgeCaller(model, concurrency=16, log=log)
    return Simulator(caller, args.lang, retries=RETRIES)


def ask(args, cases, name, schema, items_of=dict, repeats=1):
    """Ask the judge of the flags a question about each of `cases`, from `make_cases`. Before that a
    user's `check` runs, without the feelings; its errors are raised.

    name       of the prompt's file, prompts/*/judge/NAME.txt
    schema     of the answer, see support/answers.py
    items_of   items_of(answer, without its code) -> {item: value}
    repeats    how often it is asked about the same thing

    Returns a row of --json for each call, a dict: what the case is about ("file", "id", "replies",
    "final", "part"), what the answer depends on ("judge", "prompt", "temperature", "repeat"), and
    under "found" its {item: value}, or None if the answer could not be read. Raises BadInput if no
    answer about one of the files could be read."""
    refuse_nesting()
    judge, template = make_judge(args), load_text(f"judge/{name}", args.lang)

    async def ask_once(about, slots, repeat):
        row = {
            **about,
            "judge": judge.caller.name,
            "prompt": digest(template)[:8],
            "temperature": judge.caller.temperature,
            "repeat": repeat,
            "found": None,
        }
        with contextlib.suppress(SimulatorFailed):
            _, answer = await judge.ask(template, slots, schema, repeat)
            answer.pop("code")
            row["found"] = items_of(answer)
        return row

    async def ask_all():
        await check(judge, with_feelings=False)
        calls = [ask_once(*case, repeat) for case in cases for repeat in range(repeats)]
        return await tqdm.gather(*calls, desc=name, leave=False)

    rows = asyncio.run(ask_all())
    silent = {row["file"] for row in rows} - {row["file"] for row in rows if row["found"]}
    if silent:
        raise BadInput(f"{min(silent)}: no answer of judge {judge.caller.name} could be read")
    return rows


def open_call_log(path):
    """The log of calls in the file `path`, read again: nothing is paid for twice."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(path)
    if path.exists():
        log.read(path)
    return log


@cache
def load_text(name, lang):
    """The text of a file in prompts/LANG/. name: its folder there and its own, "judge/needs"."""
    return read_text(PROMPTS / lang / f"{name}.txt").strip()


def source_of(answers):
    """Which judge gave these answers: a line below a table, after a warning if the judge is a
    script. A table never has two judges."""
    settings = ", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
    warning = f"{MACHINERY_ONLY}\n" if answers[0]["judge"] == SCRIPTED_JUDGE else ""
    return f"{warning}{settings}, repeats {1 + answers[-1]['repeat']}\n"


def add_judge_flags(parser):
    """The files that a judge is asked about, who it is and how it is asked."""
    add_files(parser)
    add = parser.add_argument
    add(
        "--judge",
        metavar="NAME",
        help="openai:MODEL@URL or local:DIR (default: a script, for the toy's files only)",
    )
    add(
        "--temperature",
        type=not_negative,
        default=0.0,
        metavar="T",
        help="sampling temperature of the judge (default: 0.0)",
    )
    add("--lang", choices=["en", "zh"], default="en", help="of the judge's prompts (default: en)")
