"""support/llm.py - language models that answer prompts, on a server or in this process; retries,
the log of calls, the clock.

A model is any `async def model(prompt) -> text`; those here also take the `room` for the answer. A
call is one request. Only `ask_with_retries` tries again, so that one budget covers all that can go
wrong: a server that is busy or away, and an answer that cannot be parsed. (The released code asks
for ever.)
"""

from support.answers import LONGEST_ANSWER
from support.errors import BadInput, SimulatorFailed, SimulatorRefused, UnreadableAnswers
from support.rundir import read_jsonl, whole_letters

import asyncio
import hashlib
import json
import os
import random
import sys
import time
from contextlib import contextmanager
from email.utils import parsedate_to_datetime

from tqdm import tqdm

AWAY = 5.0  # seconds to wait at least if no server listens: it does not restart in less
MOST_BYTES = 2_000_000  # of a server's answer
# Characters of an answer that are kept. A longer one is no answer, or its sections ended before.
LONGEST_KEPT = 2 * LONGEST_ANSWER


class RetryableError(Exception):
    """One call failed, and a retry may succeed. wait: seconds that the server asked us to wait."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


class PromptRefused(SimulatorRefused):
    """The model refuses this prompt, for its length or its words, and may well accept others."""


# ------------------------------------------------------------------------------------------- models


class Answer(str):
    """The text that a model answered. tokens: {"prompt": ..., "completion": ...}, or None if they
    are not known; cut: whether it was cut at the limit of tokens."""

    tokens = None
    cut = False


def bounded_client():
    """openai's HTTP client, made safe against a hostile server: it takes no body above MOST_BYTES
    and nothing compressed (a gigabyte can be sent as one megabyte), and it follows no redirect,
    which would send the prompts to another host."""
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
    """The chat model `name` of an OpenAI-compatible server at `url`, vLLM's own or any other. The
    key (`read_key`) is never written to a file, and removed from what the server says, because some
    servers quote it."""

    def __init__(self, name, url, temperature=0.0, timeout=60.0, max_tokens=2048):
        import openai

        self.openai, self.name, self.url = openai, name, url
        self.temperature, self.timeout, self.max_tokens = temperature, timeout, max_tokens
        self.key = read_key()
        self.warned = False  # that the server cannot be reached
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=self.key,
            max_retries=0,
            timeout=timeout,
            http_client=bounded_client(),
            default_headers={"Accept-Encoding": "identity"},
        )

    def clean(self, text):
        """The server's text without the key, and without halves of surrogate pairs."""
        if self.key != "none":
            text = text.replace(self.key, "***")
        return whole_letters(text)

    def quote(self, error):
        """The server's complaint in one line."""
        return " ".join(self.clean(str(error)).split())[:300]

    async def __call__(self, prompt, room=1):
        """The answer to a prompt, of at most `room` times the usual number of tokens."""
        return await self.chat([{"role": "user", "content": prompt}], room * self.max_tokens)

    async def chat(self, messages, max_tokens=None):
        """One call, for at most `max_tokens` (default: the model's usual number). Raises
        RetryableError if a retry may succeed, PromptRefused if this prompt is refused,
        SimulatorRefused if every prompt is."""
        openai = self.openai
        try:
            # This timeout is for the whole call; openai's own is for each read.
            async with asyncio.timeout(self.timeout):
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
            if not self.warned:
                self.warned = True
                tqdm.write(
                    f"{self.url} cannot be reached ({reason}); waiting, and trying again",
                    file=sys.stderr,
                )
            raise RetryableError(f"{self.url} cannot be reached: {reason}", AWAY) from None
        except openai.APIError as error:
            raise RetryableError(f"{self.url}: not an answer: {self.quote(error)}") from None
        return self.take_apart(answer.http_response.content)

    def refusal(self, error):
        """The exception that an answer with an error's status stands for."""
        status = error.status_code
        message = f"{self.url} says {status}: {self.quote(error)}"
        if status in (408, 409, 429) or status >= 500:
            wait = seconds_to_wait(error.response.headers.get("retry-after"))
            return RetryableError(message, wait)
        if status < 400:
            return SimulatorRefused(
                f"{self.url} says {status}: it sends us elsewhere; redirects are not followed, "
                "name the address itself"
            )
        # The prompt is too long, or filtered by the server or a firewall: others may be accepted.
        if status in (400, 403, 406, 413, 422, 451):
            return PromptRefused(message)
        return SimulatorRefused(message)

    def take_apart(self, body):
        """The Answer in the bytes of a body, which may be anything. (openai's own parser builds an
        object of whatever it finds, and a hostile body can keep it busy for a minute.) Raises
        RetryableError, or PromptRefused for an answer that a content filter removed."""
        try:
            answer = json.loads(body)
            choice, usage = answer["choices"][0], answer.get("usage")
            text = Answer(self.clean(choice["message"]["content"] or "")[:LONGEST_KEPT])
            text.cut = choice.get("finish_reason") == "length"
            filtered = choice.get("finish_reason") == "content_filter"
        except Exception as error:  # nested too deeply, no JSON, a list instead of an object
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
    """A number of tokens as the server counts it, or None if that is no integer: a text there would
    go into the log as it is, even if it were the key."""
    value = usage.get(name)
    return value if type(value) is int else None


def read_key():
    """$RLVER_API_KEY, else $OPENAI_API_KEY, else "none", without white space around it: a key that
    was read from a file ends in a newline. Raises BadInput for characters that no HTTP header can
    hold."""
    name = "RLVER_API_KEY" if os.environ.get("RLVER_API_KEY") else "OPENAI_API_KEY"
    key = os.environ.get(name, "").strip() or "none"
    if not all(" " < character < "\x7f" for character in key):
        raise BadInput(
            f"${name}: the key holds a sign that no key has (a space, a line "
            "end, a letter that is not ASCII); set it again"
        )
    return key


class LocalModel:
    """A model in this process. engine, chat: of the same classes as the policy's (TorchEngine,
    ChatFormat); context: the most tokens of prompt and answer; rng: for the engine."""

    def __init__(self, name, engine, chat, context, rng, temperature=0.0, max_tokens=1024):
        self.name, self.engine, self.chat, self.context, self.rng = name, engine, chat, context, rng
        self.temperature, self.max_tokens = temperature, max_tokens

    async def __call__(self, prompt, room=1):
        """The answer to a prompt, of at most `room` times the usual number of tokens."""
        ids = self.chat.first_prompt(prompt) + self.chat.opening
        left = self.context - len(ids)
        if left < 1:
            raise PromptRefused(
                f"local:{self.name}: a prompt of {len(ids)} tokens does not fit "
                f"its context of {self.context}"
            )
        max_tokens = min(left, room * self.max_tokens)
        sampled, _ = await self.engine.generate(ids, max_tokens, self.rng, key=None)
        cut = sampled[-1] != self.chat.stop_id
        without_stop = sampled if cut else sampled[:-1]
        answer = Answer(self.chat.decode(without_stop)[:LONGEST_KEPT])
        answer.tokens = {"prompt": len(ids), "completion": len(sampled)}
        answer.cut = cut
        return answer


# ------------------------------------------------------------------------------------------ retries


async def ask_with_retries(what, call, parse, retries, first_wait=0.4, retries_unreadable=None):
    """Ask until an answer can be parsed. Returns the result of `parse`.

    what: named in the error. call(errors): makes one call; `errors` are those of the unreadable
    answers so far. parse(answer): raises ValueError if the answer cannot be parsed. After a failed
    call we wait, longer each time, and never shorter than the server asked for; after an unreadable
    answer we do not wait, because the server works. Raises SimulatorFailed after `retries` further
    attempts, and UnreadableAnswers if the last of them gave an unreadable answer, or after
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


def seconds_to_wait(retry_after):
    """The Retry-After header in seconds, at most 60; 0 if there is none. RFC 9110 allows a number
    of seconds or a date."""
    try:
        seconds = float(retry_after)
    except (TypeError, ValueError):
        seconds = seconds_until(retry_after)
    return min(60.0, max(0.0, seconds))  # in this order: NaN gives 0


def seconds_until(date):
    """The seconds from now to a date as HTTP writes it; 0 if it is none."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0


def backoff(attempt, first=0.4, longest=12.0):
    """Seconds to wait before a retry, `attempt` being 1 for the first: doubled each time, up to
    `longest`, and up to a quarter shorter at random, so that a hundred dialogues do not come back
    at the same moment. Eight retries take 36 s at least."""
    return min(longest, first * 2 ** (attempt - 1)) * random.uniform(0.75, 1.0)


# ------------------------------------------------------------------------------------ log and clock


class CallLog:
    """A log of all answers that were paid for, one line a call, and the answers of earlier logs, so
    that they need not be paid again. path: the file to append to, or None. cache: another run's
    log, whose answers are read first. A line that a killed run left half-written is no answer; the
    next line begins after a newline."""

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
        """Read the answers of an earlier log, from byte `start` on. Returns whether any of their
        prompts had asked for a mark."""
        marked = False
        for _, row, _ in read_jsonl(path, start):
            if isinstance(row, dict) and "key" in row and "answer" in row:
                answer = Answer(row["answer"])
                answer.cut = row.get("cut", False)
                self.answers[row["key"]] = answer
                marked = marked or "mark" in row
        return marked

    def write(self, key, prompt, text, seconds, mark=""):
        """Append one answer, and the mark that its prompt asked for."""
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
    """A short hash of values that JSON can hold."""
    text = json.dumps(parts, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:24]


class Clock:
    """Measures how long the GPU waits for the user. simulator: seconds in which a call was under
    way and nothing was being sampled."""

    def __init__(self):
        self.simulator, self.since = 0.0, time.perf_counter()
        self.under_way = {"calls": 0, "samplers": 0}

    def tick(self, kind, more):
        """Count the time since the last tick; from now on `more` of `kind` are under way."""
        now = time.perf_counter()
        if self.under_way["calls"] and not self.under_way["samplers"]:
            self.simulator += now - self.since
        self.since = now
        self.under_way[kind] += more

    @contextmanager
    def during(self, kind):
        """A context in which one more of "calls" or of "samplers" is under way."""
        self.tick(kind, 1)
        try:
            yield
        finally:
            self.tick(kind, -1)
