"""support/llm.py - models that are asked, on servers or here; retries, the log of calls, the clock.

A model is any `async def model(prompt) -> text`; those here take the `room` for an answer too. A
call is one request. Trying again is the business of `ask_with_retries` alone, so that one budget
covers all that can go wrong: a server that is busy or away, and an answer that cannot be read. (The
released code asks for ever.)
"""

from support.answers import LONGEST_ANSWER
from support.rundir import read_jsonl, whole_letters
from support.settings import BadInput, SimulatorFailed, SimulatorRefused, UnreadableAnswers

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

AWAY = 5.0  # seconds to wait at least where no server listens: it does not restart in less
MOST_BYTES = 2_000_000  # of a server's answer
LONGEST_KEPT = 2 * LONGEST_ANSWER  # characters of it: what is longer is none, or has ended before


class RetryableError(Exception):
    """One call failed in a way that may heal. `wait`: seconds that the server asked us to wait."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


class PromptRefused(SimulatorRefused):
    """The model refuses this prompt, for its length or for its words, and may well take others."""


# ------------------------------------------------------------------------------------------- models


class Answer(str):
    """The text of a model that also counts its tokens, {"prompt": ..., "completion": ...}, and
    knows whether it was `cut` at their limit."""

    tokens, cut = None, False


def bounded_client():
    """openai's HTTP client, on its guard: it takes no body above MOST_BYTES, nothing compressed (a
    bomb of a gigabyte travels as one megabyte), and follows no redirect, which would hand the
    prompts to another host."""
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request, *, stream=False, **more):
            response = await super().send(request, stream=True, **more)
            try:
                encoding = response.headers.get("content-encoding", "").strip().lower()
                if encoding not in ("", "identity"):
                    raise RetryableError(
                        f"an answer encoded as {encoding[:20]!r}; only plain ones were asked for"
                    )
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise RetryableError(f"an answer of more than {MOST_BYTES:,} bytes")
            finally:
                await response.aclose()
            return type(response)(
                response.status_code, headers=response.headers, content=bytes(body), request=request
            )

    return BoundedClient(follow_redirects=False)


class ServerModel:
    """The chat model `name` of an OpenAI-compatible server at `url`, vLLM's own or anybody's. Its
    key (`read_key`) is written nowhere, and struck out of what the server says: some quote it."""

    def __init__(self, name, url, temperature=0.0, timeout=60.0, max_tokens=2048):
        import openai

        self.openai, self.name, self.url = openai, name, url
        self.temperature, self.timeout, self.max_tokens = temperature, timeout, max_tokens
        self.key = read_key()
        self.told = False  # that it cannot be reached
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=self.key,
            max_retries=0,
            timeout=timeout,
            http_client=bounded_client(),
            default_headers={"Accept-Encoding": "identity"},
        )

    def clean(self, text):
        """The server's words without the key and without half letters."""
        return whole_letters(text if self.key == "none" else text.replace(self.key, "***"))

    def quote(self, error):
        """The server's complaint in one line."""
        return " ".join(self.clean(str(error)).split())[:300]

    async def __call__(self, prompt, room=1):
        """The answer to a prompt, of `room` times the usual number of tokens at most."""
        return await self.chat([{"role": "user", "content": prompt}], room * self.max_tokens)

    async def chat(self, messages, max_tokens=None):
        """One call, of at most `max_tokens` (default: the model's usual). Raises RetryableError for
        what may heal, PromptRefused where this prompt is refused, SimulatorRefused where all are.
        """
        openai = self.openai
        try:
            async with asyncio.timeout(self.timeout):  # the whole call; openai's is of each read
                answer = await self.client.chat.completions.with_raw_response.create(
                    model=self.name,
                    messages=messages,
                    temperature=self.temperature,
                    max_tokens=max_tokens or self.max_tokens,
                )
        except (TimeoutError, openai.APITimeoutError):
            raise RetryableError(f"{self.url}: no answer within {self.timeout:g} s") from None
        except RetryableError as error:  # of `bounded_client`
            raise RetryableError(f"{self.url}: {self.quote(error)}") from None
        except openai.APIStatusError as error:
            raise self.refusal(error) from None
        except openai.APIConnectionError as error:
            reason = self.quote(error.__cause__ or error)
            if not self.told:
                self.told = True
                tqdm.write(
                    f"{self.url} cannot be reached ({reason}); waiting, and trying again",
                    file=sys.stderr,
                )
            raise RetryableError(f"{self.url} cannot be reached: {reason}", AWAY) from None
        except openai.APIError as error:
            raise RetryableError(f"{self.url}: not an answer: {self.quote(error)}") from None
        return self.take_apart(answer.http_response.content)

    def refusal(self, error):
        """What an answer with an error's status means, as an exception."""
        status, words = error.status_code, f"{self.url} says {error.status_code}: "
        if status in (408, 409, 429) or status >= 500:
            wait = seconds_to_wait(error.response.headers.get("retry-after"))
            return RetryableError(words + self.quote(error), wait)
        if status < 400:
            return SimulatorRefused(
                words + "it sends us elsewhere; redirects are not followed, name the address itself"
            )
        # Too long, or filtered, by the server or by a firewall: other prompts may well be taken.
        if status in (400, 403, 406, 413, 422, 451):
            return PromptRefused(words + self.quote(error))
        return SimulatorRefused(words + self.quote(error))

    def take_apart(self, body):
        """The Answer in the bytes of a body, which may be anything. (openai's own reader builds an
        object of whatever it finds, which takes a minute for a hostile body.) Raises
        RetryableError, or PromptRefused for an answer that a content filter took away."""
        try:
            answer = json.loads(body)
            choice, usage = answer["choices"][0], answer.get("usage")
            text = Answer(self.clean(choice["message"]["content"] or "")[:LONGEST_KEPT])
            text.cut = choice.get("finish_reason") == "length"
            filtered = choice.get("finish_reason") == "content_filter"
        except Exception as error:  # too deep, no JSON, a list where an object should be
            raise RetryableError(
                f"{self.url}: not an answer with choices ({type(error).__name__})"
            ) from None
        if filtered:
            raise PromptRefused(f"{self.url}: a content filter took the answer away")
        if isinstance(usage, dict):
            text.tokens = {
                "prompt": count_of(usage, "prompt_tokens"),
                "completion": count_of(usage, "completion_tokens"),
            }
        return text


def count_of(usage, name):
    """A number of tokens as a server counts them: an integer or nothing. Any text there would go
    into the log as it is, an echoed key among it."""
    value = usage.get(name)
    return value if type(value) is int else None


def read_key():
    """$RLVER_API_KEY, else $OPENAI_API_KEY, else "none", without white space around it: a key that
    was read from a file ends in a newline. Raises BadInput for signs that no header can hold."""
    name = "RLVER_API_KEY" if os.environ.get("RLVER_API_KEY") else "OPENAI_API_KEY"
    key = os.environ.get(name, "").strip() or "none"
    if not all(" " < sign < "\x7f" for sign in key):
        raise BadInput(
            f"${name}: the key holds a sign that no key has (a space, a line "
            "end, a letter that is not ASCII); set it again"
        )
    return key


class LocalModel:
    """A model in this process. It is handed its engine and its ChatFormat, which are the policy's
    kind of both; context: tokens of prompt and answer; rng: for the engine."""

    def __init__(self, name, engine, chat, context, rng, temperature=0.0, max_tokens=1024):
        self.name, self.engine, self.chat, self.context, self.rng = name, engine, chat, context, rng
        self.temperature, self.max_tokens = temperature, max_tokens

    async def __call__(self, prompt, room=1):
        """The answer to a prompt, of `room` times the usual number of tokens at most."""
        ids = self.chat.first_prompt(prompt) + self.chat.opening
        left = self.context - len(ids)
        if left < 1:
            raise PromptRefused(
                f"local:{self.name}: a prompt of {len(ids)} tokens does not fit "
                f"its context of {self.context}"
            )
        said, _ = await self.engine.generate(
            ids, min(left, room * self.max_tokens), self.rng, key=None
        )
        cut = said[-1] != self.chat.stop_id
        text = Answer(self.chat.decode(said if cut else said[:-1])[:LONGEST_KEPT])
        text.tokens, text.cut = {"prompt": len(ids), "completion": len(said)}, cut
        return text


# ---------------------------------------------------------------------------------------- try again


def seconds_to_wait(retry_after):
    """The Retry-After header (RFC 9110 also allows a date) in seconds, at most 60; 0 if none."""
    for read in (float, lambda date: parsedate_to_datetime(date).timestamp() - time.time()):
        with suppress(TypeError, ValueError):
            return min(60.0, max(0.0, read(retry_after)))  # in this order: NaN gives 0
    return 0.0


def backoff(attempt, first=0.4, longest=12.0):
    """Seconds to wait before the attempt'th retry: doubled each time, up to `longest`, and a
    quarter shorter by chance, so that a hundred dialogues do not come back at the same moment.
    Eight retries last 36 s at least."""
    return min(longest, first * 2 ** (attempt - 1)) * random.uniform(0.75, 1.0)


async def ask_with_retries(what, call, parse, retries, first_wait=0.4, retries_unreadable=None):
    """Ask until an answer can be read. Returns what `parse` makes of it.

    call(errors) makes one call; `errors` are of the answers before it that could not be read.
    parse(answer) raises ValueError where it is no answer. After a failed call there are waits,
    which grow, and are no shorter than the server asked for; after an unreadable answer there is
    none, for the server is well. Raises SimulatorFailed after `retries` further attempts, and
    UnreadableAnswers where the last one gave an answer that cannot be read, or after
    `retries_unreadable` of those."""
    errors, wait = [], 0.0
    most_unreadable = retries if retries_unreadable is None else retries_unreadable
    for attempt in range(1, retries + 2):
        if wait:
            await asyncio.sleep(wait)
        try:
            answer = await call(errors)
        except RetryableError as error:
            reason, kind = error, SimulatorFailed
            wait = max(error.wait * random.uniform(1.0, 1.25), backoff(attempt, first_wait))
            continue
        try:
            return parse(answer)
        except ValueError as error:
            reason, kind, wait = error, UnreadableAnswers, 0.0
            errors.append(error)
            if len(errors) > most_unreadable:
                break
    raise kind(f"{attempt} attempts at {what} failed, the last one: {reason}")


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
                marked = self.read(cache)
            except OSError as error:
                raise BadInput(f"--simulator-cache {cache}: {error.strerror}") from None
            if self.answers and not marked:
                tqdm.write(
                    f"{cache}: answers to prompts of an earlier version, which asked for no "
                    "mark; none of them will be used",
                    file=sys.stderr,
                )

    def read(self, path, start=0):
        """Take in the answers of an earlier log, from byte `start` on. Returns whether any of them
        was made with a mark."""
        marked = False
        for _, row, _ in read_jsonl(path, start):
            if isinstance(row, dict) and "key" in row and "answer" in row:
                self.answers[row["key"]] = Answer(row["answer"])
                self.answers[row["key"]].cut = row.get("cut", False)
                marked = marked or "mark" in row
        return marked

    def write(self, key, prompt, text, seconds, mark=""):
        """Log one answer, and the mark that its prompt asked for."""
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
