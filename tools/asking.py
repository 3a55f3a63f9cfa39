"""tools/asking.py - asking a judge: what the tools with a judge share. It is no tool itself.

A judge is asked as the user's model is: a prompt is rendered from a file (prompts/en/judge,
prompts/zh/judge), any model answers with one JSON object, reasons first, then the code of this
prompt, then the decision, and `answers.read_answer` reads it. An unreadable answer is asked for
again, and then counted as missing. It is never scored 0 or the middle, because a judge might have
said these. A judge sees no thoughts.

`make_cases` says what is asked about, `ask` asks. One question is a *case*: what it is about, and
the *slots*, the values of the prompt's placeholders. The second reply of a dialogue is a case of
the prompt "paraphrase":

    ({"file": "results/r.jsonl", "id": "p7", "replies": 8, "final": 48, "part": 1},
     {"dialogue": "[{...}]", "reply": "Go on.", "line": "Well."})

and `ask` returns about it

    {"file": "results/r.jsonl", "id": "p7", "replies": 8, "final": 48, "part": 1,
     "judge": "qwen3", "prompt": "1f0c9a2b", "temperature": 0.0, "repeat": 0,
     "found": {"text": "Tell me more."}}
"""

from players.calls import MAX_THINKING_TOKENS, Caller, CallLog
from players.check import check
from players.users import language_model
from support.answers import PROMPTS, as_json
from support.command_line import SCRIPTED, not_negative, refuse_nesting
from support.errors import BadInput, SimulatorFailed
from support.files import digest, read_text

import asyncio
import contextlib
from functools import cache
from pathlib import Path

from tqdm.asyncio import tqdm

from simulator import Simulator
from tools.dialogues import load_dialogues, messages_of
from tools.tables import add_files
from toy.judge import SCRIPTED_JUDGE, ScriptedJudge

RETRIES = 4  # how often a question with an unreadable answer is asked again
# stands beside the scores of the scripted judge
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."

# ---------------------------------------------------------------------- what a judge is asked about


def make_cases(paths, name, slots_of):
    """The cases of the question `name` in some files, [(about, slots)].

    slots_of(dialogue) -> [slots], one for each question about the dialogue: one question if it is
    about the whole, else one for each reply or line. The number of the question, from 0, is the
    "part". Raises BadInput if one of the files has no case."""
    cases = []
    for path in paths:
        before = len(cases)
        for dialogue in load_dialogues(path):
            for part, slots in enumerate(slots_of(dialogue)):
                about = {
                    "file": path,
                    "id": dialogue.id,
                    "replies": len(dialogue.turns),
                    "final": dialogue.final,
                    "part": part,
                }
                cases.append((about, slots))
        if len(cases) == before:
            raise BadInput(f"{path}: it holds nothing to ask the question {name!r} about")
    return cases


def dialogue_slots(dialogue):
    """The slots of one question about a dialogue as a whole; of none if it has no reply, because the
    first one was malformed."""
    return [{"dialogue": as_json(messages_of(dialogue))}] if dialogue.turns else []


def reply_slots(dialogue):
    """The slots of a question about each reply of a dialogue, with the dialogue before it."""
    slots = []
    for i, turn in enumerate(dialogue.turns):
        past = messages_of(dialogue, i)
        reply, line = as_json(turn["reply"]), as_json(past[-1]["text"])
        slots.append({"dialogue": as_json(past), "reply": reply, "line": line})
    return slots


# ---------------------------------------------------------------------------------------- the judge


class JudgeCaller(Caller):
    """Asks a judge, whose log has other keys than a user's."""

    def key(self, prompt, repeat, attempt):
        """The key of a call in the log. Unlike a user's key it always includes the repeat: otherwise
        three repeats at temperature 0 would be one call."""
        return digest(self.name, self.temperature, prompt, repeat, attempt)


def make_judge(args):
    """The judge that the flags of `add_judge_flags` name; without --judge the toy's scripted judge.
    It is a Simulator that plays nobody: only `ask`, with its bounded retries, is used. Raises
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


def need_judge(args):
    """Refuse the scripted judge for files whose users are not the toy's: raise BadInput if --judge is
    missing."""
    users = {load_dialogues(path)[0].made_by.get("simulator") for path in args.files}
    if not (args.judge or users <= {"toy", "toy-weak"}):
        raise BadInput("--judge is needed: the script understands the toy's files only")


def ask(args, cases, name, schema, items_of=dict, repeats=1):
    """Ask the judge of the flags a question about each of `cases`. Returns a row of --json for each
    call: what the case is about, what the answer depends on ("judge", "prompt", "temperature",
    "repeat"), and under "found" {item: value}, or None if the answer could not be read.

    name       of the prompt's file, prompts/*/judge/NAME.txt
    schema     of the answer, see support/answers.py
    items_of   items_of(answer, without its code) -> {item: value}
    repeats    how often it is asked about the same thing

    Raises BadInput if no answer about one of the files could be read, and what `check`, which runs
    before the first question, raises."""
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
    """Open the log of calls in the file `path`, and read it: nothing is paid for twice."""
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
    """Add to a parser: the files that a judge is asked about, who it is and how it is asked."""
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
