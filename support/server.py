"""support/server.py - a language model on a server that speaks OpenAI's protocol (vLLM and others).

The server is not trusted: its answers are bounded, and whatever it sends is either an answer, or
one of three exceptions that say what to do.

    RetryableError    the call failed, the next one may succeed    (a rate limit, a lost connection)
    PromptRefused     it refuses this prompt, not others           (too long, a content filter)
    SimulatorRefused  it will refuse every prompt                  (a wrong key, an unknown model)

`openai` is imported inside of functions, because most runs need no server and the import takes a
second.
"""

from support.answers import without_surrogates
from support.errors import BadInput, SimulatorRefused
from support.llm import LONGEST_KEPT, Answer, PromptRefused, RetryableError

import asyncio
import json
import os
import sys
import time
from email.utils import parsedate_to_datetime

from tqdm import tqdm

# Seconds to wait at least if the server cannot be reached: it does not restart in less.
WAIT_IF_UNREACHABLE = 5.0
LONGEST_BODY = 2_000_000  # bytes of a server's response that are accepted

# HTTP statuses below 500 that a retry may cure: a timeout, a conflict, a rate limit.
RETRYABLE_STATUSES = (408, 409, 429)
# The prompt is too long, or the server or a firewall refuses its words. Others may be accepted.
PROMPT_STATUSES = (400, 403, 406, 413, 422, 451)


class ServerModel:
    """The chat model `name` of the server at `url`. It is called as support/llm.py says.

    Its key (`read_key`) is never written to a file. It is struck out of what the server says,
    because some servers quote it."""

    def __init__(self, name, url, temperature=0.0, timeout=60.0, max_tokens=2048):
        """timeout: seconds that one call may take. max_tokens: the most tokens of an answer."""
        import openai

        self.name = name
        self.url = url
        self.temperature = temperature
        self.timeout = timeout
        self.max_tokens = max_tokens
        self.key = read_key()
        self.warned = False  # have we said that the server cannot be reached?
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=self.key,
            max_retries=0,
            timeout=timeout,
            http_client=bounded_client(),
            default_headers={"Accept-Encoding": "identity"},
        )

    async def __call__(self, prompt, length_factor=1):
        """The answer to a prompt, of at most `length_factor` times `max_tokens` tokens."""
        messages = [{"role": "user", "content": prompt}]
        return await self.chat(messages, length_factor * self.max_tokens)

    async def chat(self, messages, max_tokens=None):
        """One call, as an Answer of at most `max_tokens` (default: the model's own limit). Raises
        RetryableError, PromptRefused or SimulatorRefused."""
        import openai

        try:
            # This timeout is for the whole call; openai's own is for each read.
            async with asyncio.timeout(self.timeout):
                response = await self.client.chat.completions.with_raw_response.create(
                    model=self.name,
                    messages=messages,
                    temperature=self.temperature,
                    max_tokens=max_tokens or self.max_tokens,
                )
        except (TimeoutError, openai.APITimeoutError):
            raise RetryableError(f"{self.url}: no answer within {self.timeout:g} s") from None
        except RetryableError as error:
            # `bounded_client` did not take the response. It does not know the server's address.
            raise RetryableError(f"{self.url}: {self.quote(error)}") from None
        except openai.APIStatusError as error:
            raise self.refusal(error) from None
        except openai.APIConnectionError as error:
            reason = self.quote(error.__cause__ or error)
            self.warn_once(reason)
            message = f"{self.url} cannot be reached: {reason}"
            raise RetryableError(message, WAIT_IF_UNREACHABLE) from None
        except openai.APIError as error:
            raise RetryableError(f"{self.url}: not an answer: {self.quote(error)}") from None
        return self.parse_body(response.http_response.content)

    def warn_once(self, reason):
        """Say the first time that the server cannot be reached, or the wait would look like a
        hang."""
        if self.warned:
            return
        self.warned = True
        tqdm.write(
            f"{self.url} cannot be reached ({reason}); waiting, and trying again",
            file=sys.stderr,
        )

    def refusal(self, error):
        """The exception for a response with the status of an error, openai.APIStatusError."""
        status = error.status_code
        message = f"{self.url} says {status}: {self.quote(error)}"
        if status in RETRYABLE_STATUSES or status >= 500:
            wait = seconds_to_wait(error.response.headers.get("retry-after"))
            return RetryableError(message, wait)
        if status < 400:
            return SimulatorRefused(
                f"{self.url} says {status}: it sends us elsewhere; redirects are not followed, "
                "name the address itself"
            )
        if status in PROMPT_STATUSES:
            return PromptRefused(message)
        return SimulatorRefused(message)

    def parse_body(self, body):
        """The Answer in the body of a response, bytes that may be anything. Raises RetryableError,
        or PromptRefused for an answer that a content filter removed.

        (openai's own parser builds an object of whatever is there: a hostile body can keep it busy
        for a minute.)"""
        try:
            response = json.loads(body)
            choice = response["choices"][0]
            usage = response.get("usage")
            content = choice["message"]["content"] or ""
            answer = Answer(self.clean(content)[:LONGEST_KEPT])
            finish_reason = choice.get("finish_reason")
        except Exception as error:  # no JSON, nested too deeply, a list instead of an object ...
            raise RetryableError(
                f"{self.url}: not an answer with choices ({type(error).__name__})"
            ) from None
        if finish_reason == "content_filter":
            raise PromptRefused(f"{self.url}: a content filter took the answer away")
        answer.cut = finish_reason == "length"
        if isinstance(usage, dict):
            answer.tokens = {
                "prompt": token_count(usage, "prompt_tokens"),
                "completion": token_count(usage, "completion_tokens"),
            }
        return answer

    def clean(self, text):
        """A text of the server without our key, and without halves of surrogate pairs."""
        if self.key != "none":
            text = text.replace(self.key, "***")
        return without_surrogates(text)

    def quote(self, error):
        """An error of the server's as one line, for a message."""
        return " ".join(self.clean(str(error)).split())[:300]


def bounded_client():
    """openai's HTTP client, made safe against a hostile server. It takes no body above LONGEST_BODY
    and nothing compressed (a gigabyte can be sent as one megabyte), and it follows no redirect,
    which would send the prompts to another host. Raises RetryableError for such a response."""
    import openai

    class BoundedClient(openai.DefaultAsyncHttpxClient):
        async def send(self, request, *, stream=False, **options):
            response = await super().send(request, stream=True, **options)
            try:
                encoding = response.headers.get("content-encoding", "").strip().lower()
                if encoding not in ("", "identity"):
                    raise RetryableError(
                        f"an answer encoded as {encoding[:20]!r}; only plain ones were asked for"
                    )
                body = bytearray()
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > LONGEST_BODY:
                        raise RetryableError(f"an answer of more than {LONGEST_BODY:,} bytes")
            finally:
                await response.aclose()
            return type(response)(
                response.status_code, headers=response.headers, content=bytes(body), request=request
            )

    return BoundedClient(follow_redirects=False)


def token_count(usage, name):
    """A number of tokens as the server counts it, or None if it is no integer: a text there would
    be written to the log as it is, even if it were the key."""
    value = usage.get(name)
    return value if type(value) is int else None


def read_key():
    """The server's key: $RLVER_API_KEY, else $OPENAI_API_KEY, else "none". White space around it is
    removed, because a key that was read from a file ends in a newline. Raises BadInput for
    characters that no HTTP header can hold."""
    name = "RLVER_API_KEY" if os.environ.get("RLVER_API_KEY") else "OPENAI_API_KEY"
    key = os.environ.get(name, "").strip() or "none"
    if not all(" " < character < "\x7f" for character in key):
        raise BadInput(
            f"${name}: the key contains a character that a key cannot contain (a space, a line "
            "end, a letter that is not ASCII); set it again"
        )
    return key


def seconds_to_wait(retry_after):
    """The Retry-After header in seconds, at most 60; 0 if there is none. RFC 9110 allows a number
    of seconds or a date."""
    try:
        seconds = float(retry_after)
    except (TypeError, ValueError):
        seconds = seconds_until(retry_after)
    # The order matters for NaN: every comparison with it is false, so max(0.0, NaN) is 0.0.
    return min(60.0, max(0.0, seconds))


def seconds_until(date):
    """The seconds from now to a date in the form of HTTP; 0 if it is no such date."""
    try:
        return parsedate_to_datetime(date).timestamp() - time.time()
    except (TypeError, ValueError):
        return 0.0
