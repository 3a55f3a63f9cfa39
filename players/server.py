"""players/server.py - a language model on a server that speaks OpenAI's protocol.

From top to bottom: the model asks (`chat`); what is sent, and changed after a refusal; making a
request. players/responses.py reads a response, and says whether it is a refusal.

A failure is one of three exceptions (support/errors.py):

    SimulatorFailed   no answer within CALL_TIMEOUT, or in TRIES tries: this question is given up
    PromptRefused     the model refuses this prompt, not others (too long, a content filter)
    SimulatorRefused  it will refuse every prompt (a wrong key, an unknown model)

`openai` is imported inside of functions, because most runs need no server and the import takes a
second.
"""

from players.calls import MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, AdaptiveModel, Answer
from players.marks import mark_in
from players.responses import LEAST_LOG_PROB, read_response, refusal_by
from support.errors import BadInput, PromptRefused, SimulatorFailed, one_line

import asyncio
import os
import random
import re
import sys
from collections import Counter

from tqdm import tqdm

CALL_TIMEOUT = 300  # seconds until a question to a server is given up, all tries together
TRIES = 8  # tries of a question whose responses hold no answer
# How an answer's form is enforced, the strictest way first (OpenAI's `response_format`).
FORMATS = ("json_schema", "json_object", "text")
# Seconds between two tries: they double from the first to the last one.
FIRST_PAUSE, MAX_PAUSE = 0.5, 8
# Sent with every question, beside the temperature. vLLM takes what a request does not say from the
# model's generation_config.json, so a policy would be sampled with another top-p than the result
# file says. (OpenAI's protocol has no word for top_k and repetition_penalty.)
SAMPLING = {"frequency_penalty": 0, "presence_penalty": 0, "top_p": 1}
FEW_LOG_PROBS = 5  # top_logprobs where a server refuses more: some have this limit


# ------------------------------------------------------------------------------ a model on a server


class ServerModel(AdaptiveModel):
    """The chat model `name` of the server at `url`, which speaks OpenAI's protocol (vLLM, llama.cpp
    and Ollama do). Its key is in the environment (`read_key`) and never written to a file.

    Servers and models accept different parameters. So the model has a state. It begins with what
    most of them accept, and changes for the rest of the process."""

    formats = FORMATS
    FINDINGS = ("format", "limit", "most_tokens", "replaced", "has_answered")

    def __init__(self, name, url, temperature=0.0, timeout=60.0, template_args=None):
        """timeout: seconds of one try; CALL_TIMEOUT is the time of all of them. template_args: of
        the chat template. Raises BadInput if the environment or the address allows no client."""
        import openai

        self.name, self.url = name, url
        # sent with every question, as long as it is not refused
        self.always = {
            "chat_template_kwargs": template_args,
            **SAMPLING,
            "temperature": temperature,
        }
        # The names of the models that have answered. Another one than was asked for is usual: an
        # alias is served by a version. A second one is another model, and the results are mixed.
        # (Those of the log stand first: a Caller puts its list here.)
        self.served = []
        # sums over all answers, as the server counts: of "answers", of tokens "read" and "written"
        self.usage = Counter()

        # The state. Only the check changes the format, because a later refusal may be about the
        # words of a prompt.
        self.format = FORMATS[0]
        self.limit = "max_tokens"  # the name of the limit of tokens: gpt-5 has another
        self.most_tokens = MAX_ANSWER_TOKENS  # the limit: it is higher for a model that thinks
        # {parameter: the value that is sent in place of the one that was refused}; None where it is
        # not sent any more
        self.replaced = {}
        self.has_answered = False
        # Is a 5xx tried again until CALL_TIMEOUT, and a 404 final? (Not while the check looks for a
        # format, which both may mean.)
        self.is_patient = True
        self.last_failure = ""
        self.told = set()  # what was printed, once

        self.key = read_key()
        try:
            self.client = openai.AsyncOpenAI(
                base_url=url,
                api_key=self.key,
                max_retries=0,  # `chat` tries again
                timeout=timeout,
                # openai's own one closes itself in an event loop that may be gone
                http_client=openai.DefaultAsyncHttpxClient(),
            )
        except Exception as error:  # the HTTP library has many kinds
            raise BadInput(
                f"{url}: no connection can be made: {self.quote(error)} (the environment may "
                "say so in ALL_PROXY, HTTPS_PROXY, HTTP_PROXY, NO_PROXY or SSL_CERT_FILE)"
            ) from None

    @property
    def temperature(self):
        """None where the model has one of its own and refuses any other."""
        return (self.always | self.replaced)["temperature"]

    async def __call__(self, prompt, schema):
        """The Answer to a prompt, in the format that was found."""
        messages = [{"role": "user", "content": prompt}]
        form = {"type": self.format}
        if self.format == "json_schema":
            form["json_schema"] = {"name": "answer", "schema": json_schema(schema), "strict": True}
        if self.format == "text":  # not sent, because some servers do not know it at all
            form = None
        answer = await self.chat(messages, self.most_tokens, response_format=form)
        if answer.thinks:
            self.most_tokens = MAX_THINKING_TOKENS
        return answer

    async def likeliest(self, prompts, count):
        """The `count` likeliest tokens behind each of `prompts`, or FEW_LOG_PROBS: a list of
        [(text, log-prob)]. Raises PromptRefused if a response has no two of them: then nothing can
        be compared. (The model may have ended at once. If the server never returns log-probs,
        `Reader.set_scale` sees it.)"""
        options = {"logprobs": True, "top_logprobs": count}
        # One after the other: a Caller counts them as one call at a time, and the server keeps what
        # it has computed for their common beginning.
        answers = [
            await self.chat([{"role": "user", "content": prompt}], 1, **options)
            for prompt in prompts
        ]
        if any(answer.has_floors for answer in answers):
            self.tell_once(
                "floors",
                f"warning: {self.url}: it lists tokens without a log-prob from {LEAST_LOG_PROB} to 0; they "
                "count as not listed, and feelings that are read may be a little off",
            )
        lists = [answer.likeliest for answer in answers]
        if min(map(len, lists)) < 2:
            raise PromptRefused(
                f"{self.url}: to this prompt {self.name} returns no log-probs, or one alone "
                "(top_logprobs), and a reader needs two; if this happens at every prompt, use a server "
                "and a model that return them"
            )
        return lists

    async def chat(self, messages, max_tokens, **options):
        """The Answer to one question. options: more of OpenAI's parameters; one that is None is not
        sent. Raises SimulatorFailed, PromptRefused or SimulatorRefused."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT):
                return await self.ask(messages, max_tokens, options)
        except TimeoutError:
            raise SimulatorFailed(
                f"{self.url}: no answer within {CALL_TIMEOUT} s; the last failure: "
                f"{self.last_failure or 'it is silent'}"
            ) from None

    async def ask(self, messages, max_tokens, options):
        """Try a question until a response holds an Answer. After a refusal (`refusal_by`) it is
        asked with other parameters (`adapt`) or given up; after any other failure it is asked
        again."""
        failed = []  # the statuses of the tries that failed
        while True:
            parameters = self.parameters(max_tokens, options)
            status, answer, wait = await self.request(messages, parameters)
            if isinstance(answer, Answer):
                self.has_answered = True
                self.usage.update(
                    answers=1, read=answer.tokens_read or 0, written=answer.tokens or 0
                )
                self.keep_name(answer.model)
                return answer
            if refusal := refusal_by(status, len(failed), self.is_patient):
                # another call may have been quicker, and have changed the parameters meanwhile
                is_current = parameters == self.parameters(max_tokens, options)
                if is_current and not self.adapt(answer, parameters):
                    raise refusal(f"{self.url}: {self.quote(answer)}")
                continue
            if wait > CALL_TIMEOUT:
                raise SimulatorFailed(
                    f"{self.url}: it asks for a pause of {wait:.0f} s: {self.quote(answer)}"
                )
            pause = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(len(failed), 10))
            failed.append(status)
            self.report_failure(answer)
            if failed.count(200) == TRIES:  # each of these may be paid for
                raise SimulatorFailed(
                    f"{self.url}: no answer in {len(failed)} tries; {self.last_failure}"
                )
            # at random, so that questions that failed together do not come back together
            await asyncio.sleep(max(pause * random.uniform(0.5, 1), wait))

    async def request(self, messages, parameters):
        """Send one request. Returns (status, answer, wait) of `read_response`; (503, why, 0)
        without a response."""
        import openai

        create = self.client.chat.completions.with_raw_response.create
        try:
            # stream: some servers stream where it is not sent
            response = await create(
                model=self.name, messages=messages, stream=False, extra_body=parameters
            )
        except openai.APIStatusError as error:  # any status but 200
            return read_response(error.response, error.message)
        except openai.APIError as error:
            cause = error.__cause__ or error  # the HTTP library's, which says more
            return 503, f"{type(cause).__name__} {cause}", 0
        return read_response(response)

    # ---------------------------------------------------- what is sent, and changed after a refusal

    def parameters(self, max_tokens, options):
        """What is sent now beside the messages. options: of `chat`."""
        values = {self.limit: max_tokens, **self.always, **options, **self.replaced}
        return {name: value for name, value in values.items() if value is not None}

    def adapt(self, words, parameters):
        """Change what is sent from now on, if `parameters` were refused in these words because of
        one of them. Returns whether something has changed. After the first answer nothing changes:
        a later refusal may be about the words of a prompt. Examples of refusals:

            "Use 'max_completion_tokens' instead"   the limit gets that name
            "temperature: only 1 is supported"      not sent any more (the same for all of `always`)
            "top_logprobs: 5 at most"               FEW_LOG_PROBS are asked for"""
        if self.has_answered:
            return False
        # Temperature is the last, because some models refuse it only together with top_p. Some
        # servers write topP, or "Penalty is not enabled" for both penalties.
        words = words.replace("enable_thinking", "chat_template_kwargs")  # which holds it
        names = [
            name
            for name in self.always
            if name in parameters
            and re.search(rf"\b{name.replace('_', '_?')}\b|penalty is not", words, re.I)
        ]
        if "max_completion_tokens" in words and self.limit == "max_tokens":
            self.limit = "max_completion_tokens"
        elif names:
            self.replaced[names[0]] = None
        elif "logprobs" in words and parameters.get("top_logprobs", 0) > FEW_LOG_PROBS:
            self.replaced["top_logprobs"] = FEW_LOG_PROBS
        else:
            return False
        tell(
            f"{self.name} refuses a parameter; from now on its limit is {self.limit}, and it is sent "
            f"{self.replaced} in place of what it refused (None: nothing, it has a value of its own)"
        )
        return True

    def report_failure(self, reason):
        """Print the first failed try: without a message the wait would look like a hang."""
        reason = self.quote(reason)
        self.tell_once("failure", f"{self.url}: {reason}; trying again")
        self.last_failure = reason

    # ------------------------------------------------------------------- what is noticed on the way

    def keep_name(self, name):
        """Keep the name of the model that has answered. Print a warning at each but the first."""
        if name and name not in self.served:
            self.served.append(name)
            if len(self.served) > 1:
                tell(
                    f"warning: {self.url}: asked for {self.name}, it answered as {self.served[-2]!r}, and "
                    f"now as {name!r}: results of two models are mixed (their names are kept)"
                )

    def warn_of_marks(self, reply):
        """Print a warning if a reply has a mark of a chat template, but for quotations."""
        if mark := mark_in(reply):
            self.tell_once(
                "marks",
                f"warning: {self.url}: a reply has {mark!r}, a mark of a chat template, and the user "
                "sees it. Let the server take out thoughts (vLLM: --reasoning-parser, llama.cpp: "
                "--reasoning-format) and end tokens (skip_special_tokens; make them stop a reply)",
            )

    def tell_once(self, name, words):
        """Print a line above the progress bar, unless one of this name was printed."""
        if name not in self.told:
            self.told.add(name)
            tell(words)

    def quote(self, words):
        """An error or a server's words as one line, for a message. Without our key: some servers
        quote it."""
        return one_line(str(words).replace(self.key, "***"))


# --------------------------------------------------------------------------------- making a request


def tell(words):
    """Print a line above the progress bar."""
    tqdm.write(words, file=sys.stderr)


def json_schema(kind):
    """A schema of support/answers.py as a JSON Schema. It uses only keywords that all servers know:
    `read_answer` checks the bounds of numbers and the allowed words."""
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


def read_key():
    """The server's key: $RLVER_API_KEY, else $OPENAI_API_KEY, else "no-key". White space around it
    is removed, because a key that was read from a file ends in a newline. Raises BadInput for
    characters that no HTTP header can hold: the HTTP library would show the key."""
    key = os.environ.get("RLVER_API_KEY") or os.environ.get("OPENAI_API_KEY") or "no-key"
    if not re.fullmatch("[!-~]+", key.strip()):
        raise BadInput("$RLVER_API_KEY or $OPENAI_API_KEY holds a character that no key can hold")
    return key.strip()
