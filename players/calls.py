"""players/calls.py - calling a language model: its answers, the number of calls at once, and the log
of all answers.

A model is any `async def model(prompt, schema=None)` that returns an Answer or its text. The schema
describes the answer, a JSON object (support/answers.py). A model may ignore it, because whoever
asks reads the answer by the schema and asks again.
"""

from support.clock import Clock
from support.files import append_line, cut_unfinished_line, digest, read_jsonl

import asyncio
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

# The most tokens of a user's answer: twice the longest readable answer that was measured. A small
# model may never end a string.
MAX_ANSWER_TOKENS = 800
MAX_THINKING_TOKENS = 4096  # the same for a model that thinks before it answers
CUT = "cut by the limit of tokens"
# The key of the call that is under way: a hash of all that tells it from other calls. A model in
# this process takes it as the seed of its answer. (Each task has a value of its own.)
key_of_call = ContextVar("key_of_call")


@dataclass
class Answer:
    """An answer of a model. (A script and a log know its text alone.)"""

    text: str
    thought: str = ""  # reasoning that the server has taken out of the text
    is_cut: bool = False  # was it ended by the limit of tokens?
    problem: str = ""  # why it cannot be read, if it is empty or cut
    likeliest: list = ()  # [(text, log-prob)] of the first token, if they were asked for
    has_floors: bool = False  # were there others, with no log-prob but a floor such as -9999?
    tokens: int = None  # its number of tokens, with those of the thought, if the model counts them
    tokens_read: int = None  # those of the prompt, likewise
    model: str = ""  # the name of the model that answered, if a server says it

    @property
    def thinks(self):
        """Did the model think before it answered? If it was cut within a thought, it did not reach
        the answer, or the end of the thought."""
        has_begun = self.text.lstrip().startswith(("{", "```"))
        return bool(self.thought) or (not has_begun and (self.is_cut or "</think>" in self.text))


class AdaptiveModel:
    """A model that finds out, while it is asked, how it has to be asked. Only `adopt` changes that
    from outside. (A model may be any async function; then it finds out nothing.)"""

    FINDINGS = ()  # the attributes that it finds out

    def findings(self):
        """What it has found out, {name of an attribute: value}, for `adopt` on another rank."""
        return {name: getattr(self, name) for name in self.FINDINGS}

    def adopt(self, **attributes):
        """Set what the check, or this model on another rank, has found out."""
        vars(self).update(attributes)


class Caller:
    """Asks a model: at most `concurrency` calls at once (None: any number), timed by `clock`, a
    Clock, and logged in `log`, a CallLog."""

    side = "user"  # what the model is for; a reader may share its log

    def __init__(self, model, *, log=None, clock=None, concurrency=None):
        """model: any `async def model(prompt, schema)`, see the top of this file."""
        self.model = model
        self.name = getattr(model, "name", "")
        self.log = log or CallLog()
        self.asked = f"{self.side} {self.name}"
        if hasattr(model, "served"):  # a ServerModel's: who has answered, before a resume, too
            model.served = self.log.served.setdefault(self.asked, model.served)
        self.clock = clock or Clock()
        self.slots = asyncio.Semaphore(concurrency or sys.maxsize)

    @property
    def temperature(self):
        """The model's. None: a server's own, which is not 0."""
        return getattr(self.model, "temperature", 0.0)

    def key(self, prompt, dialogue, attempt):
        """The key of a call: the log keeps its answer under it. At temperature 0 equal prompts
        share an answer. At any other temperature the name of the dialogue is part of the key;
        otherwise all dialogues of a group would share one "sample"."""
        dialogue = "" if self.temperature == 0 else dialogue
        return digest(self.name, self.temperature, prompt, dialogue, attempt)

    def logged(self, key):
        """The Answer with this key in the log, which was paid for; None if there is none."""
        return Answer(self.log.answers[key]) if key in self.log.answers else None

    async def call(self, prompt, schema, key):
        """Call the model once. Returns the Answer, and logs it if there is a log.

        With a log, equal questions at the same time share one call, even if it fails. This call is
        a task of its own, because one of the dialogues that wait for it may be cancelled (`shield`).
        Raises what the model raises."""
        if not self.log.path:
            return await self.call_model(prompt, schema, key)
        tasks = self.log.tasks
        if key not in tasks:
            tasks[key] = asyncio.create_task(self.call_model(prompt, schema, key))
            tasks[key].add_done_callback(lambda task: tasks.pop(key))
        return await asyncio.shield(tasks[key])

    async def call_model(self, prompt, schema, key):
        """Call the model when there is a free slot, time the call and log the Answer."""
        async with self.slots:
            start = time.perf_counter()
            key_of_call.set(key)
            with self.clock.during("calls"):
                answer = await self.ask_model(prompt, schema)
        if isinstance(answer, str):
            answer = Answer(answer)
        if self.log.path:
            self.log.write(key, answer, time.perf_counter() - start, self.asked)
        return answer

    async def ask_model(self, prompt, schema):
        """The model's answer, an Answer or its text. (Each kind of Caller asks in its own way.)"""
        return await self.model(prompt, schema)


@dataclass
class CallLog:
    """The answers of this run and of earlier logs, one line of JSON each, so that no answer is
    paid for twice. If two logged answers have the same key, the first one counts. Without a file
    nothing is kept."""

    path: Path = None  # the file to append to
    answers: dict = field(default_factory=dict)  # {key: text}, see Caller.key
    # {`Caller.asked`: the names of the models on a server that have answered so far}
    served: dict = field(default_factory=dict)
    tasks: dict = field(default_factory=dict)  # {key: the Task of a call that is under way}
    # Rows to append. A new run has no directory before its models are loaded, and a reader is asked
    # earlier: a run that cannot begin must leave nothing.
    rows: list = field(default_factory=list)

    def read(self, path):
        """Read the answers of a log. If it is our own, the half line of a killed run is cut off."""
        if path == self.path:
            cut_unfinished_line(path)
        for _, row, _ in read_jsonl(path):
            match row:  # whatever is not of this form is damaged
                case {"key": str(key), "answer": str(answer)}:
                    self.answers.setdefault(key, answer)
            match row:  # without "asked" an earlier version wrote it
                case {"asked": str(asked), "served": [*names]}:
                    known = self.served.setdefault(asked, [])
                    known += [name for name in names if name not in known]

    def write(self, key, answer, seconds, asked=""):
        """Append an Answer. asked: `Caller.asked`."""
        self.answers[key] = answer.text
        row = {"key": key, "answer": answer.text, "seconds": round(seconds, 4)}
        row |= {"tokens": answer.tokens}
        if names := self.served.get(asked):
            row |= {"asked": asked, "served": [*names]}
        self.rows.append(row)
        while self.rows and self.path.parent.exists():
            append_line(self.path, self.rows.pop(0))
