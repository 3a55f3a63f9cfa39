"""support/llm.py - models that are asked, on servers or here; retries, the log of calls, the clock.

A model is any `async def model(prompt) -> text`. A call is one request. Trying again is the
business of `ask_with_retries` alone, so that one budget covers all that can go wrong: a server that
is busy or away, and an answer that cannot be read. (The released code asks for ever.)
"""
import asyncio
import hashlib
import json
import os
import random
import sys
import time
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime

from tqdm import tqdm

from support.rundir import read_jsonl, whole_letters
from support.settings import BadInput, SimulatorFailed, SimulatorRefused

AWAY = 5.0          # seconds to wait at least where no server listens: it does not restart in less


class RetryableError(Exception):
    """One call failed in a way that may heal. `wait`: seconds that the server asked us to wait."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


# ------------------------------------------------------------------------------------------- models

class Answer(str):
    """The text of a model that also counts its tokens, {"prompt": ..., "completion": ...}, and
    knows whether it was `cut` at their limit."""
    tokens, cut = None, False


class ServerModel:
    """The chat model `name` of an OpenAI-compatible server at `url`, vLLM's own or anybody's. Its
    key (`read_key`) is written nowhere, and struck out of what the server says: some quote it."""

    def __init__(self, name, url, temperature=0.0, timeout=60.0, max_tokens=2048):
        import openai
        self.openai, self.name, self.url = openai, name, url
        self.temperature, self.timeout, self.max_tokens = temperature, timeout, max_tokens
        self.key = read_key()
        self.told = False           # that it cannot be reached
        self.client = openai.AsyncOpenAI(base_url=url, api_key=self.key, max_retries=0,
                                         timeout=timeout)

    def clean(self, text):
        """The server's words without the key and without half letters."""
        return whole_letters(text if self.key == "none" else text.replace(self.key, "***"))

    def quote(self, error):
        """The server's complaint in one line."""
        return " ".join(self.clean(str(error)).split())[:300]

    async def __call__(self, prompt):
        messages = [{"role": "user", "content": prompt}]
        text = await self.chat(messages)
        return await self.chat(messages, 4 * self.max_tokens) if text.cut else text     # once

    async def chat(self, messages, max_tokens=None):
        """One call, of at most `max_tokens` (default: the model's usual). Raises RetryableError for
        what may heal, SimulatorRefused for what cannot."""
        openai = self.openai
        try:
            async with asyncio.timeout(self.timeout):   # the whole call; openai's is of each read
                answer = await self.client.chat.completions.create(
                    model=self.name, messages=messages, temperature=self.temperature,
                    max_tokens=max_tokens or self.max_tokens)
        except (TimeoutError, openai.APITimeoutError):
            raise RetryableError(f"{self.url}: no answer within {self.timeout:g} s") from None
        except openai.APIStatusError as error:
            said = f"{self.url} says {error.status_code}: {self.quote(error)}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                wait = seconds_to_wait(error.response.headers.get("retry-after"))
                raise RetryableError(said, wait) from None
            raise SimulatorRefused(said) from None
        except openai.APIConnectionError as error:
            said = self.quote(error.__cause__ or error)
            if not self.told:
                self.told = True
                tqdm.write(f"{self.url} cannot be reached ({said}); waiting, and trying again",
                           file=sys.stderr)
            raise RetryableError(f"{self.url} cannot be reached: {said}", AWAY) from None
        except (openai.APIError, ValueError) as error:  # an answer of no protocol, no JSON perhaps
            raise RetryableError(f"{self.url}: not an answer: {self.quote(error)}") from None
        try:
            text = Answer(self.clean(answer.choices[0].message.content or ""))
            text.cut = answer.choices[0].finish_reason == "length"
            if answer.usage:
                text.tokens = {"prompt": answer.usage.prompt_tokens,
                               "completion": answer.usage.completion_tokens}
            return text
        except (AttributeError, IndexError, TypeError):
            raise RetryableError(f"{self.url}: an answer without choices") from None


def read_key():
    """$RLVER_API_KEY, else $OPENAI_API_KEY, else "none", without white space around it: a key that
    was read from a file ends in a newline. Raises BadInput for signs that no header can hold."""
    name = "RLVER_API_KEY" if os.environ.get("RLVER_API_KEY") else "OPENAI_API_KEY"
    key = os.environ.get(name, "").strip() or "none"
    if not all(" " < sign < "\x7f" for sign in key):
        raise BadInput(f"${name}: the key holds a sign that no key has (a space, a line "
                       "end, a letter that is not ASCII); set it again")
    return key


class LocalModel:
    """A model in this process. It is handed its engine and its ChatFormat, which are the policy's
    kind of both; context: tokens of prompt and answer; rng: for the engine."""

    def __init__(self, name, engine, chat, context, rng, temperature=0.0, max_tokens=1024):
        self.name, self.engine, self.chat, self.context, self.rng = name, engine, chat, context, rng
        self.temperature, self.max_tokens = temperature, max_tokens

    async def __call__(self, prompt):
        ids = self.chat.first_prompt(prompt) + self.chat.opening
        room = self.context - len(ids)
        if room < 1:
            raise SimulatorRefused(f"--simulator local:{self.name}: a prompt of {len(ids)} tokens "
                                   f"does not fit its context of {self.context}")
        for most in (self.max_tokens, 4 * self.max_tokens):     # a cut answer: again with more
            said, _ = await self.engine.generate(ids, min(room, most), self.rng, key=None)
            cut = said[-1] != self.chat.stop_id
            if not cut or room <= most:
                break
        text = Answer(self.chat.decode(said if cut else said[:-1]))
        text.tokens, text.cut = {"prompt": len(ids), "completion": len(said)}, cut
        return text


# ---------------------------------------------------------------------------------------- try again

def seconds_to_wait(retry_after):
    """The Retry-After header (RFC 9110 also allows a date) in seconds, at most 60; 0 if none."""
    for read in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with suppress(TypeError, ValueError):
            return min(60.0, max(0.0, read(retry_after)))       # in this order: NaN gives 0
    return 0.0


def backoff(attempt, first=0.4, longest=12.0):
    """Seconds to wait before the attempt'th retry: doubled each time, up to `longest`, and a
    quarter shorter by chance, so that a hundred dialogues do not come back at the same moment.
    Eight retries last 36 s at least."""
    return min(longest, first * 2 ** (attempt - 1)) * random.uniform(0.75, 1.0)


async def ask_with_retries(what, call, parse, retries, first_wait=0.4):
    """Ask until an answer can be read. Returns (the answer, *what `parse` makes of it).

    call(answered) -> text makes one call; `answered` counts the unreadable answers before it.
    parse(text) returns a tuple, or raises ValueError where it is no answer. Waits grow, and are no
    shorter than the server asked for. Raises SimulatorFailed after `retries` further attempts."""
    answered, asked_for = 0, 0.0
    for attempt in range(retries + 1):
        if attempt:
            await asyncio.sleep(max(asked_for * random.uniform(1.0, 1.25),
                                    backoff(attempt, first_wait)))
        try:
            text = await call(answered)
        except RetryableError as error:
            reason, asked_for = error, error.wait
            continue
        answered, asked_for = answered + 1, 0.0
        try:
            return text, *parse(text)
        except ValueError as error:
            reason = error
    raise SimulatorFailed(f"{retries + 1} attempts at {what} failed, the last one: {reason}")


# ------------------------------------------------------------------------------------ log and clock

class CallLog:
    """Every answer that was paid for, one line a call, and the answers of earlier logs, to be used
    instead of paying again. path: the file to append to, or None. cache: another run's log, to
    begin with. A line that a killed run left half-written is no answer; one clean newline keeps the
    next line whole."""

    def __init__(self, path=None, cache=None):
        self.path, self.answers = path, {}
        if cache:
            try:
                self.read(cache)
            except OSError as error:
                raise BadInput(f"--simulator-cache {cache}: {error.strerror}") from None

    def read(self, path, start=0):
        """Take in the answers of an earlier log, from byte `start` on."""
        for _, row, _ in read_jsonl(path, start):
            if isinstance(row, dict) and "key" in row and "answer" in row:
                self.answers[row["key"]] = Answer(row["answer"])
                self.answers[row["key"]].cut = row.get("cut", False)

    def write(self, key, prompt, text, seconds):
        """Log one answer."""
        if self.path is None:
            return
        row = {"key": key, "prompt": digest(prompt), "answer": text, "seconds": round(seconds, 4),
               "tokens": getattr(text, "tokens", None)}
        if getattr(text, "cut", False):
            row["cut"] = True
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def digest(*parts):
    """A short hash of whatever JSON can say."""
    text = json.dumps(parts, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Clock:
    """Splits a rollout's wall time. `simulator` counts seconds in which a call was in flight and
    nothing was being sampled: the time for which the GPU waits for the user."""

    def __init__(self):
        self.simulator, self.since = 0.0, time.perf_counter()
        self.under_way = {"calls": 0, "samplers": 0}

    def tick(self, kind, more):
        now = time.perf_counter()
        if self.under_way["calls"] and not self.under_way["samplers"]:
            self.simulator += now - self.since
        self.since = now
        self.under_way[kind] += more

    @contextmanager
    def during(self, kind):
        """One more of "calls" or "samplers" is at work."""
        self.tick(kind, 1)
        try:
            yield
        finally:
            self.tick(kind, -1)
