"""support/servers.py - asking language models, on a server or in this process, and the log of what
they answered.

A model is any `async def model(prompt, schema=None) -> text`. The schema says what the answer, a
JSON object, looks like (simulator.py); a model may ignore it, because whoever asks reads the answer
by it and asks again. What goes wrong is one of three exceptions (support/errors.py):

    SimulatorFailed   no answer within CALL_TIMEOUT: this question is given up
    PromptRefused     the model refuses this prompt, not others (too long, a content filter)
    SimulatorRefused  it will refuse every prompt (a wrong key, an unknown model)

`openai` is imported inside of functions, because most runs need no server and the import takes a
second.
"""

from support.errors import BadInput, PromptRefused, SimulatorFailed, SimulatorRefused
from support.files import append_line, cut_unfinished_line, read_jsonl, without_surrogates

import asyncio
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

MAX_ANSWER_TOKENS = 4096
CALL_TIMEOUT = 300  # seconds until a question to a server is given up, all tries together
# How an answer's form is enforced, the strictest way first (OpenAI's `response_format`).
FORMATS = ("json_schema", "json_object", "text")


class Answer(str):
    """The text of a model's answer. (Scripted models answer with a plain str.)"""

    form = None  # the one of FORMATS in which a server was asked for it


# ------------------------------------------------------------------------------ a model on a server


class ServerModel:
    """The chat model `name` of the server at `url`, which speaks OpenAI's protocol (vLLM, llama.cpp
    and Ollama do).

    Its key is in the environment (`read_key`) and never written to a file. openai's client tries
    again by itself: after a lost connection, a timeout, a rate limit (no earlier than the server's
    Retry-After says) and a fault of the server, with at most 8 s between two tries."""

    def __init__(self, name, url, temperature=0.0, timeout=60.0):
        """timeout: seconds of one try; CALL_TIMEOUT is the time of all of them."""
        import openai

        self.name = name
        self.url = url
        self.temperature = temperature
        # The strictest of FORMATS that the server takes; None: not known yet. Simulator.check
        # sets it, and nothing else: what refuses a prompt later may be its words.
        self.format = None
        self.last_failure = ""
        self.key = read_key()
        self.client = openai.AsyncOpenAI(
            base_url=url,
            api_key=self.key,
            max_retries=1000,  # CALL_TIMEOUT decides
            timeout=timeout,
            http_client=client_that_tells(self.tell_failure),
        )

    async def __call__(self, prompt, schema):
        """The answer to a prompt. Servers differ in what they take as `response_format`, and the
        first question finds it out: what is refused is asked again with the next of FORMATS."""
        messages = [{"role": "user", "content": prompt}]
        for form in [self.format] if self.format else FORMATS:
            try:
                answer = await self.chat(messages, MAX_ANSWER_TOKENS, **form_options(form, schema))
                answer.form = form
                return answer
            except PromptRefused as error:
                refusal = error
        raise refusal

    async def chat(self, messages, max_tokens, **options):
        """One question, as an Answer. options: more of OpenAI's parameters. Raises SimulatorFailed,
        PromptRefused or SimulatorRefused."""
        import openai

        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                while True:
                    response = await self.client.chat.completions.create(
                        model=self.name,
                        messages=messages,
                        temperature=self.temperature,
                        max_tokens=max_tokens,
                        **options,
                    )
                    # what is no answer (a gateway's page, an error) has other attributes, or none
                    with suppress(AttributeError, LookupError, TypeError):
                        return self.answer_in(response.choices[0])
                    self.tell_failure("its response holds no answer")
                    await asyncio.sleep(1)
        except TimeoutError:
            raise SimulatorFailed(
                f"{self.url}: no answer within {CALL_TIMEOUT} s; the last failure: "
                f"{self.last_failure or 'it is silent'}"
            ) from None
        except openai.APIError as error:
            raise self.refusal(error) from None

    def answer_in(self, choice):
        """The Answer in a response. Raises PromptRefused if a content filter removed it."""
        if choice.finish_reason == "content_filter":
            raise PromptRefused(f"{self.url}: a content filter took the answer away")
        return Answer(without_surrogates(choice.message.content or ""))

    def refusal(self, error):
        """The exception for what openai's client raises, an openai.APIError."""
        message = f"{self.url}: {self.quote(error)}"
        status = getattr(error, "status_code", 500)  # none: there was no whole response
        if status in (401, 402, 404):  # a wrong key, no money, an unknown model
            return SimulatorRefused(message)
        if may_heal(status):  # but its Retry-After is longer than openai's client waits
            return SimulatorFailed(message)
        return PromptRefused(message)  # too long, or words that a filter does not want

    def tell_failure(self, reason):
        """Say the first time that a try failed, or the wait would look like a hang."""
        reason = self.quote(reason)
        if not self.last_failure:
            tqdm.write(f"{self.url}: {reason}; trying again", file=sys.stderr)
        self.last_failure = reason

    def quote(self, words):
        """An error or a server's words as one line, for a message. Without our key: some servers
        quote it."""
        text = str(words).replace(self.key, "***")
        return " ".join(without_surrogates(text).split())[:300]


def form_options(form, schema):
    """What a request says of the form of its answer. form: one of FORMATS; nothing is said of
    "text", because some servers do not know `response_format` at all."""
    if form == "json_schema":
        named = {"name": "answer", "schema": json_schema(schema), "strict": True}
        return {"response_format": {"type": form, "json_schema": named}}
    if form == "json_object":
        return {"response_format": {"type": form}}
    return {}


def json_schema(kind):
    """A schema of simulator.py in the words of JSON Schema. Only those are used that all servers
    know: bounds of numbers and lists of allowed words are left to `read_answer`."""
    if isinstance(kind, dict):
        return {
            "type": "object",
            "properties": {key: json_schema(value) for key, value in kind.items()},
            "required": list(kind),
            "additionalProperties": False,
        }
    if isinstance(kind, list):
        return {"type": "array", "items": json_schema(kind[0])}
    if isinstance(kind, tuple | range):
        kind = type(kind[0])
    return {"type": {str: "string", int: "integer", bool: "boolean"}[kind]}


def may_heal(status):
    """Does openai's client try again after a response with this HTTP status?"""
    return status in (408, 409, 429) or status >= 500


def client_that_tells(tell):
    """openai's HTTP client, which also calls tell(reason) after each try that failed. (openai tries
    again silently.)"""
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        async def send(self, request, **options):
            try:
                response = await super().send(request, **options)
            except Exception as error:
                tell(f"{type(error).__name__} {error}")
                raise
            if may_heal(response.status_code):
                tell(f"status {response.status_code}")
            return response

    return Client()


def read_key():
    """The server's key: $RLVER_API_KEY, else $OPENAI_API_KEY, else "no-key". White space around it
    is removed, because a key that was read from a file ends in a newline. Raises BadInput for
    characters that no HTTP header can hold: the HTTP library would show the key."""
    key = os.environ.get("RLVER_API_KEY") or os.environ.get("OPENAI_API_KEY") or "no-key"
    if not re.fullmatch("[!-~]+", key.strip()):
        raise BadInput("$RLVER_API_KEY or $OPENAI_API_KEY holds a character that no key can hold")
    return key.strip()


# --------------------------------------------------------------------------- a model in this process


@dataclass
class LocalModel:
    """A model in this process. Nothing holds it to a schema: it may break the form more often than
    one on a server."""

    name: str
    engine: object  # of the same classes as the policy's: a TorchEngine ...
    chat: object  # ... and a ChatFormat
    context: int  # the most tokens that prompt and answer may have together
    rng: object  # what the engine samples with
    temperature: float = 0.0

    async def __call__(self, prompt, schema=None):
        """The answer to a prompt. Raises PromptRefused if the prompt does not fit the context."""
        ids = self.chat.first_prompt(prompt) + self.chat.opening
        left = self.context - len(ids)
        if left < 1:
            raise PromptRefused(
                f"local:{self.name}: a prompt of {len(ids)} tokens does not fit "
                f"its context of {self.context}"
            )
        # key: names a dialogue whose tokens the engine keeps for its next turn. Here each call is
        # a prompt of its own, so there is nothing to keep.
        max_tokens = min(left, MAX_ANSWER_TOKENS)
        sampled, _ = await self.engine.generate(ids, max_tokens, self.rng, key=None)
        has_ended = sampled[-1] == self.chat.stop_id
        return self.chat.decode(sampled[:-1] if has_ended else sampled)


# ---------------------------------------------------------------------------------- the log of calls


@dataclass
class CallLog:
    """All answers that were paid for, one line of JSON each, so that none is paid for twice. Also
    the answers of earlier logs, which `Simulator.ask` searches before it asks the model."""

    path: Path | None = None  # the file to append to
    answers: dict = field(default_factory=dict)  # {key: text}, see Simulator.key

    def read(self, path, start=0):
        """Read the answers of an earlier log, from byte `start` on. A line that a killed run left
        half-written is cut off."""
        cut_unfinished_line(path)
        for _, row, _ in read_jsonl(path, start):
            if isinstance(row, dict) and "key" in row and "answer" in row:
                self.answers[row["key"]] = row["answer"]

    def write(self, key, text, seconds):
        """Append one answer."""
        if self.path:
            append_line(self.path, {"key": key, "answer": text, "seconds": round(seconds, 4)})


def open_call_log(path):
    """The log of calls in the file `path`, read again: nothing is paid for twice."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = CallLog(path)
    if path.exists():
        log.read(path)
    return log
