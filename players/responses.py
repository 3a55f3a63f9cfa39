"""players/responses.py - what a response of a server holds, and what follows from one without an
answer.

`read_response` and `refusal_by` are called by players/server.py. Servers and gateways write the same
thing in many ways, and send 200 with an error inside: the table of `read_body` has an example of
each.
"""

from players.calls import CUT, Answer
from support.errors import PromptRefused, SimulatorRefused
from support.files import parse_json

import json
import re
import time
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz

# Values of finish_reason in a response without an answer, because of the server or because of the
# words that were asked.
FAILED = ("error", "abort", "network_error", "insufficient_system_resource")
FILTERED = ("content_filter", "safety", "refusal", "sensitive")
FORMAT_RETRIES = 3  # after a 5xx, until the check (players/check.py) tries the next format
# The least log-prob that is believed: servers write -9999, or the lowest float, for a token that was
# cut off. (The largest is 0, and a little more by rounding.)
LEAST_LOG_PROB = -100


def read_response(response, error=None):
    """What a response of the HTTP library holds. error: what its status means, in words, unless it
    is 200. Returns

    status   the one that the server should have sent (`read_body`)
    answer   an Answer, or in words why there is none
    wait     the seconds that the server wants to be left alone, 0 if it does not say how many"""
    status, answer = (response.status_code, error) if error else read_body(response.text)
    if status != 200:
        answer = f"status {status} {answer}"
    elif answer is None:
        answer = f"its response holds no answer: {response.text}"
    # no rate limit, but an empty account
    if status == 429 and re.search("insufficient_quota|exceeded_current_quota", response.text):
        status = 402
    return status, answer, seconds_to_wait(response.headers)


def refusal_by(status, failures, is_patient):
    """Which refusal a response without an answer is, by its status: an exception; None if the
    question is asked again. failures: the number of tries before this one; is_patient: see
    `ServerModel`."""
    match status:
        case 200 | 408 | 409 | 429 | 503:  # no answer in it; or it is slow, busy, loading
            return None
        case 404 if not is_patient:  # a gateway's may mean the format
            return PromptRefused
        case 401 | 402 | 404 | 406:  # a wrong key, no money, an unknown model, a stream
            return SimulatorRefused
        case _ if status < 500:  # the prompt is too long, or a filter does not want its words
            return PromptRefused
        case _:  # another fault; some servers have it at a schema alone
            return None if is_patient or failures <= FORMAT_RETRIES else PromptRefused


def read_body(text):
    """The body of a response, as (status, what it holds). The status is the one that the server
    should have sent with this body, whatever it did send:

        {"choices": [{"message": {"content": "Hi."}}]}         200, Answer "Hi."; it may be empty or
                                                               cut (`Answer.problem`)
        {"error": {"code": 502, "message": "overloaded"}}      502, "overloaded"; 500 without a code
        {"choices": [{"finish_reason": "content_filter"}]}     400, that a filter took it away
        data: {"choices": [...]}                               406, that it is an event stream
        a web page, half an object, an unknown kind of content 200, None

    Content may be a list of parts. Reasoning is in a field with one of two names."""
    text = text.removeprefix("\ufeff")
    try:
        body = parse_json(text)
    except (ValueError, RecursionError):
        if re.search(r"^data:|data: ?\[DONE\]\s*$", text, re.M):
            return 406, 'an event stream, though the request says "stream": false; switch it off'
        return 200, None
    choice = value_at(body, "choices", 0)
    message = value_at(choice, "message")
    content = value_at(message, "content")
    answer = Answer(texts_in(content), model=texts_in(value_at(body, "model")))
    reason = str(value_at(choice, "finish_reason")).lower()  # why the answer has ended
    error = value_at(body, "error") or value_at(choice, "error") or value_at(message, "error")
    # some gateways write "no error" beside an answer
    if (error and not answer.text) or reason in FAILED:
        code = re.search(r'"(?:code|status|http_status)": "?([45]\d\d)\b', json.dumps(body))
        status = int(code[1]) if code else 500
        return status, str(value_at(error, "message") or error or f"finish_reason {reason}")
    refusal = not answer.text and value_at(message, "refusal")
    if refusal or reason in FILTERED:
        return 400, f"a content filter took the answer away. {refusal or ''}"
    if not isinstance(message, dict) or not isinstance(content, str | list | None):
        return 200, None
    answer.thought = texts_in(
        value_at(message, "reasoning_content") or value_at(message, "reasoning")
    )
    # JSON may hold anything in place of a number: text, true, NaN, Infinity.
    counts = (value_at(body, "usage", f"{part}_tokens") for part in ("completion", "prompt"))
    answer.tokens, answer.tokens_read = (
        n if type(n) is int and 0 <= n < 1e9 else None for n in counts
    )
    tops = value_at(choice, "logprobs", "content", 0, "top_logprobs")
    if isinstance(tops, list):
        pairs = [pair for pair in map(token_and_log_prob, tops) if pair]
        # Some servers list the sampled token twice: its probability must not count twice. (Two
        # tokens may have the same text, but not the same log-prob, too.)
        answer.likeliest = [*dict.fromkeys(pairs)]
        answer.has_floors = len(pairs) < len(tops)
    answer.is_cut = reason in ("length", "max_tokens", "model_length")
    empty = "" if answer.text.strip() else "empty"
    answer.problem = CUT if answer.is_cut else empty
    if answer.problem and answer.thought:
        answer.problem += ", with words in its reasoning"
    return 200, answer


def token_and_log_prob(top):
    """(text, log-prob) of one of the `top_logprobs`; None if its log-prob cannot be believed."""
    log_prob = value_at(top, "logprob")
    # NaN is not between two numbers
    if type(log_prob) in (int, float) and LEAST_LOG_PROB <= log_prob <= 0.01:
        return texts_in(value_at(top, "token")), log_prob


def value_at(value, *keys):
    """The value under these keys or indices of a JSON value, one inside the other; None if there is
    no such value."""
    try:
        for key in keys:
            value = value[key]
        return value
    except (LookupError, TypeError):
        return None


def texts_in(content):
    """The text of a message's content: a string, or a list of parts, whose texts are joined."""
    if isinstance(content, list):
        return "".join(texts_in(value_at(part, "text")) for part in content)
    return content if isinstance(content, str) else ""


def seconds_to_wait(headers):
    """The seconds that a server wants to be left alone: Retry-After, in seconds or as a date, or
    retry-after-ms. 0 if it says nothing that can be read."""
    value = headers.get("retry-after", 0)
    with suppress(ValueError):
        if date := parsedate_tz(value):
            return mktime_tz(date) - time.time()
        return float(headers.get("retry-after-ms", 0)) / 1000 or float(value)
    return 0
