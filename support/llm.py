"""support/llm.py - asking language models: a model in this process, retries, the log of calls, the
clock. (A model on a server: support/server.py.)

A model is any `async def model(prompt) -> text`; a call to it is one request. Only
`ask_with_retries` tries again, so that one bound covers everything that can go wrong: a server that
is busy or cannot be reached, and an answer that cannot be parsed. (The released code retries for
ever.)

The models here and in support/server.py also take a `length_factor`: simulator.py repeats a call
with length_factor=4 if the answer was cut at the limit of tokens.

The log keeps the *mark* of each call. A mark is four letters that a prompt asks the model to write
behind each header of its answer, so that the policy cannot forge one (support/answers.py).
"""

from support.answers import LONGEST_ANSWER
from support.errors import SimulatorFailed, SimulatorRefused, UnreadableAnswers
from support.files import read_jsonl

import asyncio
import hashlib
import json
import os
import random
import time
from contextlib import contextmanager

# An answer is cut to so many characters: a longer one is refused, or its sections ended before.
LONGEST_KEPT = 2 * LONGEST_ANSWER


class RetryableError(Exception):
    """One call failed, and a retry may succeed. wait: the least number of seconds until then."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


class PromptRefused(SimulatorRefused):
    """The model refuses this prompt, because of its length or its words. It may accept others."""


# ------------------------------------------------------------------------------------------- models


class Answer(str):
    """The text of a model's answer, a str with two more attributes. (The toy's scripted models
    answer with a plain str.)"""

    tokens = None  # {"prompt": number, "completion": number}, or None if they are not known
    cut = False  # did the answer stop at the limit of tokens?


class LocalModel:
    """A model in this process."""

    def __init__(self, name, engine, chat, context, rng, temperature=0.0, max_tokens=1024):
        """engine, chat: of the same classes as the policy's (TorchEngine, ChatFormat). context: the
        most tokens that prompt and answer may have together. rng: what the engine samples with."""
        self.name = name
        self.engine = engine
        self.chat = chat
        self.context = context
        self.rng = rng
        self.temperature = temperature
        self.max_tokens = max_tokens

    async def __call__(self, prompt, length_factor=1):
        """The answer to a prompt, of at most `length_factor` times `max_tokens` tokens. Raises
        PromptRefused if the prompt does not fit the context."""
        ids = self.chat.first_prompt(prompt) + self.chat.opening
        left = self.context - len(ids)
        if left < 1:
            raise PromptRefused(
                f"local:{self.name}: a prompt of {len(ids)} tokens does not fit "
                f"its context of {self.context}"
            )
        max_tokens = min(left, length_factor * self.max_tokens)
        # key: names a dialogue whose tokens the engine keeps for its next turn. Here each call is
        # a prompt of its own, so there is nothing to keep.
        sampled, _ = await self.engine.generate(ids, max_tokens, self.rng, key=None)
        cut = sampled[-1] != self.chat.stop_id
        without_stop = sampled if cut else sampled[:-1]
        answer = Answer(self.chat.decode(without_stop)[:LONGEST_KEPT])
        answer.tokens = {"prompt": len(ids), "completion": len(sampled)}
        answer.cut = cut
        return answer


# ------------------------------------------------------------------------------------------ retries


async def ask_with_retries(what, call, parse, retries, first_wait=0.4, retries_unreadable=None):
    """Call a model until its answer can be parsed. Returns the result of `parse`.

    what: the name of the question, for the error message.
    call(errors): makes one call and returns the answer. `errors` are the ValueErrors of the answers
        before it that could not be parsed.
    parse(answer): raises ValueError if the answer cannot be parsed.
    retries: further attempts after the first.
    retries_unreadable: how many of these may follow an unreadable answer (default: all).

    After a failed call we wait, longer each time, and never shorter than the server asked for.
    After an unreadable answer we do not wait, because the server works.

    Raises SimulatorFailed if the last attempt's call failed, and UnreadableAnswers if its answer
    could not be parsed. What else `call` raises, such as PromptRefused, is not caught here."""
    errors = []
    failure = None  # the exception to raise if this attempt was the last
    wait = 0.0
    if retries_unreadable is None:
        retries_unreadable = retries
    for attempt in range(1, retries + 2):
        if wait:
            await asyncio.sleep(wait)
        try:
            answer = await call(errors)
        except RetryableError as error:
            failure = SimulatorFailed(failed_attempts(attempt, what, error))
            wait_of_server = error.wait * random.uniform(1.0, 1.25)
            wait = max(wait_of_server, backoff(attempt, first_wait))
            continue
        try:
            return parse(answer)
        except ValueError as error:
            errors.append(error)
            failure = UnreadableAnswers(failed_attempts(attempt, what, error))
            wait = 0.0
            if len(errors) > retries_unreadable:
                break
    raise failure


def failed_attempts(attempts, what, error):
    """The message of the exception that ends `ask_with_retries`."""
    return f"{attempts} attempts at {what} failed, the last one: {error}"


def backoff(attempt, first=0.4, longest=12.0):
    """The seconds to wait before a retry, which is number `attempt`, from 1. They double each time,
    up to `longest`, and are up to a quarter shorter at random, so that a hundred dialogues do not
    come back at the same moment. Eight retries take 36 to 48 s."""
    return min(longest, first * 2 ** (attempt - 1)) * random.uniform(0.75, 1.0)


# ------------------------------------------------------------------------------------ log and clock


class CallLog:
    """All answers that were paid for, one line of JSON each, so that none is paid for twice. Also
    the answers of earlier logs, which `Simulator.look_up` searches before it asks the model.

    A line that a killed run left half-written is skipped, and the next line begins after a
    newline."""

    def __init__(self, path=None):
        """path: the file to append to, or None."""
        self.path = path
        self.answers = {}  # {key: Answer}, see Simulator.key

    def read(self, path, start=0):
        """Read the answers of an earlier log, from byte `start` on."""
        for _, row, _ in read_jsonl(path, start):
            if isinstance(row, dict) and "key" in row and "answer" in row:
                answer = Answer(row["answer"])
                answer.cut = row.get("cut", False)
                self.answers[row["key"]] = answer

    def write(self, key, prompt, text, seconds, mark=""):
        """Append one answer. text: an Answer or a str. mark: the one that its prompt asked for."""
        if self.path is None:
            return
        row = {
            "key": key,
            "prompt": digest(prompt),
            "mark": mark,
            "answer": text,
            "seconds": round(seconds, 4),
            "tokens": getattr(text, "tokens", None),
        }
        if getattr(text, "cut", False):
            row["cut"] = True
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # the last line is half-written
                    file.write(b"\n")
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def digest(*parts):
    """A short hash of values that JSON can hold."""
    text = json.dumps(parts, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Clock:
    """Measures how long the GPU waits for the simulated users. simulator: the seconds in which at
    least one call to their model was under way and the policy was sampling nothing."""

    def __init__(self):
        self.simulator = 0.0
        self.last_tick = time.perf_counter()
        self.under_way = {"calls": 0, "samplers": 0}

    def tick(self, kind, change):
        """Count the time since the last tick. Then the number of `kind` under way changes by
        `change`."""
        now = time.perf_counter()
        if self.under_way["calls"] and not self.under_way["samplers"]:
            self.simulator += now - self.last_tick
        self.last_tick = now
        self.under_way[kind] += change

    @contextmanager
    def during(self, kind):
        """A context in which one more of "calls" or of "samplers" is under way."""
        self.tick(kind, 1)
        try:
            yield
        finally:
            self.tick(kind, -1)
