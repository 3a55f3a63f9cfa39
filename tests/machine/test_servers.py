"""A model on a server behind the user: what is tried again, what is refused, what the log keeps,
dialogues side by side, and whole runs. A real server on loopback (server.py) has every fault that
three days of dialogues will meet."""

from players.calls import MAX_ANSWER_TOKENS, Answer, Caller, CallLog
from players.check import check, print_bill
from players.reader import Reader
from players.responses import FORMAT_RETRIES, seconds_to_wait
from players.server import (
    FORMATS,
    SAMPLING,
    ServerModel,
    json_schema,
)
from players.users import make_simulator
from support.errors import (
    BadInput,
    PromptRefused,
    SimulatorFailed,
    SimulatorRefused,
    UnreadableAnswers,
)
from support.settings import resolve_settings

import asyncio
import json
import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path

import pytest

import evaluate
import rlver
from answering import Model, coded, feeling, saying, simulator_of
from emotion import TRAINING
from people import toy_profiles
from result_files import measure
from rollout import rollout
from runs import files, go_on, output_of, refuse, rows, words
from scripted import Agent
from server import (
    SOON,
    Loopback,
    check_change,
    completion,
    failure,
    mild_answer,
    toy_people,
)
from simulator import REPLY_SCHEMA, Simulator, User
from tools.asking import open_call_log

pytestmark = pytest.mark.usefixtures("quick")

TWO_REPLIES = replace(TRAINING, max_turns=2)
PEOPLE = toy_profiles("train", 16)
KEY = "sk-very-secret"
SMALL = (
    "--steps 2 --batch-size 4 --group-size 2 --max-turns 2 --max-tokens 6 --eval-size 4 --lr 2e-3 "
    "--save-every 1"
).split()


def user_at(server, **settings):
    return User(make_simulator(f"openai:scripted@{server.url}", **settings), PEOPLE[0])


def answer_of(server, **settings):
    """What the model on a server answers to one question."""
    return asyncio.run(ServerModel("scripted", server.url, **settings)("Hello.", REPLY_SCHEMA))


def always(response):
    """A server whose responses are all this body, with status 200."""
    return Loopback(reply=lambda request: (200, {}, response))


def flags_of(model, url, out):
    """The flags of a small run."""
    user = ["--simulator", f"openai:scripted@{url}", *toy_people(out.parent)]
    return words("--model", model, *user, *SMALL, "--out", out)


# ----------------------------------------------------------------------------------------- the form


def test_a_judges_schema_by_hand():
    """Scales and lists of allowed words are left to whoever reads the answer: not all servers know
    a bound or an enum."""
    schema = {"why": {"ED": str}, "code": str, "score": range(1, 6), "kinds": [("a", "b")]}
    found = json_schema(schema)["properties"]
    assert found["score"] == {"type": "integer"} and found["why"]["required"] == ["ED"]
    assert found["kinds"] == {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize("told", FORMATS)
def test_only_the_check_decides_how_the_form_is_kept(told, capsys):
    """And says it, whichever program asks. If any refused prompt could lower it, one that a filter
    refuses would cost the rest of a run its schema."""

    async def ask(user):
        with suppress(PromptRefused):
            await user.answer()
        before = user.simulator.caller.model.format
        [found] = await check(user.simulator)
        await user.answer()
        return before, user.simulator.caller.model.format, found["format"]

    with Loopback(formats=["text", told], difficulty="challenging") as server:
        user = user_at(server, difficulty="challenging")
        assert asyncio.run(ask(user)) == ("json_schema", told, told)
    assert f"by {told}" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------------------ what is tried again


def test_what_may_heal_is_tried_again(capsys):
    """A line that is cut, a rate limit (no earlier than the server says), faults of the server, one
    that is silent, and responses that hold no answer: an HTML page, a JSON list, half of an object,
    brackets without end, an error, and one in its choice, as of a gateway whose provider is down. The
    first failure is told, or the wait would look like a hang. Half a letter is good JSON and no
    UTF-8: the log could not be written, nor the run resumed."""
    half = json.dumps(completion("x")).encode()[:-9]
    down = {"code": 502, "message": "Provider returned error"}
    no_answers = [b"<html>", [1], half, b"[" * 200_000, completion(5), {"error": down}]
    no_answers.append(completion("", "error", down))
    responses = [
        failure(429, "slow down", {"Retry-After": "0.4"}),
        failure(503, "busy", SOON),
        failure(408, "slow", SOON),
        "silence",
        *[(200, {}, response) for response in no_answers],
        (200, {}, completion("good \ud83d")),
    ]
    times = []

    def reply(request):
        times.append(time.monotonic())
        response = responses[len(times) - 1]
        if response == "silence":
            time.sleep(5)
        return response

    with Loopback(outage=(1, 0.1), reply=reply) as server:
        assert answer_of(server, timeout=0.6).text == "good \ufffd"
    assert len(times) == len(responses) and times[1] - times[0] >= 0.4
    assert times[-1] - times[0] < 4  # nobody waited for the silent one
    assert capsys.readouterr().err.count("trying again") == 1


@pytest.mark.parametrize(
    "value, seconds",
    [
        ("12", 12),
        ("0.25", 0.25),
        (lambda: formatdate(time.time() + 3600, usegmt=True), 3600),
        (lambda: time.asctime(time.gmtime(time.time() + 3600)), 3600),  # an older form of the date
        ("Wed, 21 Oct 2015 07:28:00 GMT", -1e8),  # it is over
        *[(value, 0) for value in ("", "soon", "1,5", "Wed, 21 Oct 99999 07:28:00 GMT")],
    ],
)
def test_how_long_a_server_wants_to_be_left_alone(value, seconds):
    """A date was no pause at all: six requests in the 14 seconds of rest that it asked for, which
    gateways punish with a longer one."""
    value = value() if callable(value) else value  # in an hour from now, not from the collection
    found = seconds_to_wait({"retry-after": value})
    assert found == pytest.approx(seconds, abs=60) if seconds > 99 else found <= seconds
    assert seconds_to_wait({"retry-after-ms": "250", "retry-after": "1"}) == 0.25
    assert seconds_to_wait({}) == 0


def test_a_pause_is_kept_and_one_that_is_too_long_is_named(monkeypatch):
    """In milliseconds, too. Nobody could see that the pause was an hour."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 5)
    responses = [failure(429, "slow", {"retry-after-ms": "400"}), (200, {}, completion("good"))]
    times, later = [], formatdate(time.time() + 3950, usegmt=True)

    def reply(request):
        times.append(time.monotonic())
        return responses[len(times) - 1]

    with Loopback(reply=reply) as server:
        assert answer_of(server).text == "good" and times[1] - times[0] >= 0.4
    with Loopback(reply=lambda request: failure(429, "slow", {"Retry-After": later})) as server:
        with pytest.raises(SimulatorFailed, match=r"a pause of 39\d\d s: .*slow"):
            answer_of(server)


STREAM = f"data: {json.dumps(completion('Hi.'))}\n\ndata: [DONE]\n\n".encode()
GLUED = json.dumps(completion("Hi.")).encode() + b"\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    "status, body, told",
    [
        (200, STREAM, "an event stream"),
        (200, b": connected\n\nevent: message\n" + STREAM[:-14], "an event stream"),
        (200, b"\xef\xbb\xbf" + STREAM[:-14], "an event stream"),
        (200, GLUED, "an event stream"),
        (200, GLUED.replace(b"\n", b""), "an event stream"),
        (200, {"error": {"code": 401, "message": "bad key"}}, "401 bad key"),
        (402, {"error": {"message": "no credit"}}, "402 .*no credit"),
        (429, {"error": {"code": "insufficient_quota", "message": "plan"}}, "429 .*plan"),
        (200, {"error": {"code": 429, "message": "exceeded_current_quota"}}, "429 exceeded"),
    ],
)
def test_what_every_question_would_meet_ends_the_check_at_once(status, body, told, monkeypatch):
    """A stream was asked for eight times, each maybe paid, and then "may be tried later"; a quota
    that is used up for five minutes. One request, and the server's words."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 5)
    with Loopback(reply=lambda request: (status, {}, body)) as server:
        with pytest.raises(SimulatorRefused, match=told):
            asyncio.run(check(user_at(server).simulator))
        assert server.requests == 1


@pytest.mark.parametrize(
    "body",
    [
        b"\n\n\n" + json.dumps(completion("data: [DONE]")).encode(),
        json.dumps(completion("a\ndata: b"), indent=1).encode(),
        b"\xef\xbb\xbf" + json.dumps(completion("Hi.")).encode(),
    ],
)
def test_what_is_whole_json_is_read(body):
    """Behind empty lines, which keep a connection open; with a byte order mark; as a reply about a
    stream; whatever the header says. And no stream is asked for: some servers stream unless they
    are told not to."""
    asked = []

    def reply(request):
        asked.append(request)
        return 200, {"Content-Type": "text/event-stream"}, body

    with Loopback(reply=reply) as server:
        text = json.loads(body.decode("utf-8-sig"))["choices"][0]["message"]["content"]
        assert answer_of(server).text == text
    assert [request["stream"] for request in asked] == [False]


@pytest.mark.parametrize("fault, last", [("500", "status 500"), ("hang", "silent")])
def test_what_does_not_heal_in_time_is_given_up(fault, last, monkeypatch):
    """No answer is made up, and nobody waits for ever."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 0.3)
    began = time.monotonic()
    with Loopback(faults={fault: 1.0}) as server:
        with pytest.raises(SimulatorFailed, match=f"no answer within 0.3 s; .*{last}"):
            answer_of(server)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("fault", "401 402 404 400 403 422 filter 429".split())
def test_what_is_refused_is_not_asked_twice(fault):
    """Each with the server's own words. What hangs on the prompt costs its dialogue: if it ended
    the run, a policy could end it. (429: ten minutes is more than a question has.)"""
    others = dict.fromkeys(("401", "402", "404"), SimulatorRefused)
    error = {**others, "429": SimulatorFailed}.get(fault, PromptRefused)

    def reply(request):
        asked.append(request)
        if fault == "filter":
            return 200, {}, completion("no such words", "content_filter")
        return failure(int(fault), "no such words", {"Retry-After": "600"})

    asked = []
    with Loopback(reply=reply) as server:
        model = ServerModel("scripted", server.url)
        model.format = "text"
        with pytest.raises(error, match="content filter" if fault == "filter" else "no such words"):
            asyncio.run(model("Hello.", REPLY_SCHEMA))
        (request,) = asked
        assert request["max_tokens"] == MAX_ANSWER_TOKENS and request["temperature"] == 0
        assert issubclass(PromptRefused, UnreadableAnswers)
        if error is PromptRefused:  # at the first question it is the server's matter
            with pytest.raises(BadInput, match="refuses the prompts"):
                asyncio.run(check(user_at(server).simulator))


@pytest.mark.parametrize(
    "name, value, told",
    [
        ("RLVER_API_KEY", "sk-\nsecret", r"\$RLVER_API_KEY"),
        *[
            (name, "socks9://somebody:secret@h:1", name.upper())
            for name in ("ALL_PROXY", "HTTPS_PROXY", "http_proxy")
        ],
    ],
)
def test_a_key_or_a_proxy_that_cannot_be_used_is_one_line(name, value, told, monkeypatch):
    """And not shown. The HTTP library printed the whole header in its complaint of a key; and it
    makes its proxies before it knows whether it needs them."""
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(BadInput, match=told) as error:
        ServerModel("m", "http://127.0.0.1:9/v1")
    assert "secret" not in str(error.value)


# --------------------------------------------------------------------------- whatever the form is


NO_MONEY = {"message": "Insufficient credits", "code": 402}
PARTS = [
    {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
    {"type": "text", "text": "I am "},
    {"type": "text", "text": "here."},
]


@pytest.mark.parametrize(
    "response, error, words",
    [
        ({"error": NO_MONEY}, SimulatorRefused, "Insufficient credits"),
        (completion("", "error", NO_MONEY), SimulatorRefused, "Insufficient credits"),
        (completion("", "error", {**NO_MONEY, "code": "402"}), SimulatorRefused, "Insufficient"),
        ({"choices": [{"message": {"content": "", "error": NO_MONEY}}]}, SimulatorRefused, "Insuf"),
        ({"error": "Unauthorized", "code": 401}, SimulatorRefused, "Unauthorized"),
        ({"error": {"message": "too long", "code": 400}}, PromptRefused, "too long"),
        ({"error": {"message": "no such model", "status": 404}}, SimulatorRefused, "no such model"),
        (completion(None, refusal="I cannot play that."), PromptRefused, "I cannot play that"),
        (completion("", "SAFETY"), PromptRefused, "content filter"),
        ({"error": {"message": "asleep", "code": 503}}, SimulatorFailed, "no answer .*503 asleep"),
        ({"error": "the model has crashed"}, SimulatorFailed, "no answer .*500 the model has"),
        (completion("", "error"), SimulatorFailed, "no answer .*finish_reason error"),
        ({"choices": []}, SimulatorFailed, "no answer in 8 tries; .*choices"),
        (completion({"text": "I am here."}), SimulatorFailed, "no answer in 8 tries"),
    ],
)
def test_a_failure_inside_of_a_200_is_the_failure_that_it_says(response, error, words, monkeypatch):
    """Gateways send 200 and say inside of it what went wrong: with the code that the status should
    have been, in their own words. What is no answer at all may have been paid for: it is asked for
    a few times, not for five minutes."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 20 if "tries" in words else 0.5)
    with always(response) as server, pytest.raises(error, match=words):
        answer_of(server)


@pytest.mark.parametrize(
    "response, text, thought, problem",
    [
        (completion(PARTS), "I am here.", "", ""),
        (completion("I am here.", reasoning_content="hm"), "I am here.", "hm", ""),
        (completion("I am here.", reasoning="hm"), "I am here.", "hm", ""),
        (completion("I am h", "length"), "I am h", "", "cut"),
        ({**completion("I am here."), "error": {"code": 0, "message": "ok"}}, "I am here.", "", ""),
        (
            completion(None, "length", reasoning_content="hm"),
            "",
            "hm",
            "cut .*words in its reasoning",
        ),
        (completion(None), "", "", "empty$"),
        (completion("", reasoning="hm"), "", "hm", "empty, .*words in its reasoning"),
    ],
)
def test_an_answer_is_read_from_all_its_places(response, text, thought, problem):
    """Parts, reasoning in a field of its own, and why there is nothing to read."""
    with always(response) as server:
        answer = answer_of(server)
    assert (answer.text, answer.thought) == (text, thought)
    assert answer.is_cut == ("cut" in problem) and re.match(problem, answer.problem)


def in_reasoning(form, answer):
    hidden = completion(None, reasoning_content=answer)
    return hidden if form == "json_schema" else completion(answer)


def fails_at_a_schema(code):
    """As a gateway says it, inside of a 200: no provider knows schemas, or one fails at them."""

    def body(form, answer):
        return {"error": {"code": code}} if form == "json_schema" else completion(answer)

    return body


def sorted_keys(form, answer):
    return completion(json.dumps(json.loads(answer), sort_keys=form != "text"))


@pytest.mark.parametrize(
    "body, kept, tries",
    [
        (in_reasoning, "json_object", 3),
        (sorted_keys, "text", 3),
        (fails_at_a_schema(404), "json_object", 1),
        (fails_at_a_schema(502), "json_object", 2 + FORMAT_RETRIES),
        (lambda *_: completion("", "length", reasoning_content="hm"), "cut by the limit", 3),
        (lambda *_: completion(""), "read: empty", 3),
    ],
)
def test_the_check_tries_the_next_form_where_answers_cannot_be_read(body, kept, tries):
    """Three in a row. Under a schema some servers put the answer into the reasoning, or sort its
    keys, or find nobody who takes one, and without one they do neither. If no form helps, it says
    what was wrong with them."""
    forms = []

    def reply(request):
        forms.append(request.get("response_format", {"type": "text"})["type"])
        answer = coded(request["messages"][0]["content"], feeling(1))
        return 200, {}, body(forms[-1], answer)

    with Loopback(reply=reply) as server:
        simulator = user_at(server).simulator
        if kept in FORMATS:
            asyncio.run(check(simulator))
            assert (
                simulator.caller.model.format == kept == forms[-1]
                and simulator.caller.model.is_patient
            )
            stricter = FORMATS[: FORMATS.index(kept)]
            assert forms == [form for form in stricter for _ in range(tries)] + 3 * [kept]
        else:
            with pytest.raises(BadInput, match=kept):
                asyncio.run(check(simulator))
            assert len(forms) == 3 * tries


def test_a_parameter_that_a_model_refuses_is_left_out(capsys):
    """gpt-5 takes no max_tokens, and no temperature but its own. It is said once, whoever asks at
    the same time; and as samples are drawn then, each dialogue has its own."""
    refused = []

    def reply(request):
        if "max_tokens" in request:
            refused.append("max_tokens")
            return failure(400, "Unsupported 'max_tokens'. Use 'max_completion_tokens' instead.")
        if "temperature" in request:
            refused.append("temperature")
            return failure(400, "'temperature' does not support 0 with this model.")
        assert request["max_completion_tokens"] == MAX_ANSWER_TOKENS
        return 200, {}, completion("good")

    async def ask(model):
        calls = [model("Hello.", REPLY_SCHEMA) for _ in range(4)]
        return [*await asyncio.gather(*calls), await model("Hello.", REPLY_SCHEMA)]

    with Loopback(reply=reply) as server:
        model = ServerModel("m", server.url)
        assert {answer.text for answer in asyncio.run(ask(model))} == {"good"}
        assert capsys.readouterr().err.count("refuses a parameter") == 2 and len(refused) <= 8
        key = Caller(model).key
        assert key("p", "one", 0) != key("p", "two", 0)
        assert (model.limit, model.temperature) == ("max_completion_tokens", None)


@pytest.mark.parametrize("refused", [[], ["top_p"], ["presence_penalty", "temperature"]])
def test_a_result_says_how_a_policy_behind_a_server_was_sampled(refused, tmp_path):
    """vLLM takes what is not sent from generation_config.json: with a top-p of 0.8 the result said
    "temperature 1.0" only. What a server refuses is left out, and the result says so; some spell it
    as presencePenalty."""
    sent = []

    def reply(request):
        for name in refused:
            if name in request:
                return failure(400, f"not supported: {name.replace('_p', 'P')}")
        sent.append(request)
        return 200, {}, completion("I am here.")

    with Loopback(reply=reply) as server:
        flags = ["--policy", f"openai:m@{server.url}", "--max-turns", 1, "--limit"]
        for count in (1, 2):  # the second one resumes
            assert measure(*flags, count, "--out", tmp_path / "r.jsonl") == 0
    asked = {"temperature": 1.0, **SAMPLING}
    for row, request in zip(rows(tmp_path / "r.jsonl"), sent, strict=True):
        assert {**asked, "replaced": dict.fromkeys(refused)}.items() <= row["rlver"].items()
        assert asked.keys() - request.keys() == {*refused}


def test_a_prompt_that_speaks_of_a_parameter_changes_none():
    """Once a model has answered, what it refuses may be the words of a prompt."""
    told = "not supported: 'temperature of 39'; see max_completion_tokens"
    replies = [(200, {}, completion("good")), failure(400, told)]

    async def ask(model):
        await model("Hello.", REPLY_SCHEMA)
        with pytest.raises(PromptRefused):
            await model("I have a temperature of 39.", REPLY_SCHEMA)

    with Loopback(reply=lambda request: replies.pop(0)) as server:
        model = ServerModel("m", server.url)
        asyncio.run(ask(model))
    assert (model.limit, model.temperature) == ("max_tokens", 0.0)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_a_server_that_drops_the_beginning_of_a_prompt_is_found_out(lang):
    """Ollama does, silently, for prompts of more than 4,096 tokens: persona and story were gone, the
    answer was read, and counted. The code stands in the first line, so it goes first."""
    dropped = [0]  # characters

    def reply(request):
        prompt = request["messages"][0]["content"][dropped[-1] :]
        return 200, {}, completion(coded(prompt, feeling(5)))

    async def talk(user):
        assert (await user.feel("Oh."))[1] == 5
        dropped.append(20)
        with pytest.raises(UnreadableAnswers, match="cut long prompts .*num_ctx"):
            await user.feel("Oh.")

    with Loopback(reply=reply) as server:
        asyncio.run(talk(User(make_simulator(f"openai:m@{server.url}", lang), PEOPLE[0])))


@pytest.mark.parametrize(
    "flags, response, told, thoughts",
    [
        (
            [],
            completion(None, "length", reasoning_content="hm"),
            "100.0 % of the replies cut",
            "hm",
        ),
        ([], completion("I am here, tell m", "length"), "100.0 % of the replies cut", ""),
        (["--think"], completion("I am here.", reasoning_content="hm"), " 0.0 % malformed", "hm"),
        (["--think"], completion("I am here."), "100.0 % malformed", "I am here."),
    ],
)
def test_a_policy_behind_a_server_that_thinks(flags, response, told, thoughts, tmp_path, capfd):
    """An empty reply that was cut inside of its thought was sent, scored, and nothing said; a thought
    that the server took out made every dialogue malformed, without a hint."""
    with always(response) as server:
        args = ["--policy", f"openai:m@{server.url}", "--limit", 2, "--max-turns", 2, *flags]
        text = output_of(capfd, 0, evaluate.main, *args, "--out", tmp_path / "r.jsonl")
    assert told in " ".join(text.split())
    for row in rows(tmp_path / "r.jsonl"):
        said = [message for message in row["history"] if message["role"] == "assistant"]
        assert {message["rlver"]["thought"] for message in said} == {thoughts}


@pytest.mark.parametrize(
    "text, mark",
    [
        ("<|channel|>analysis<|message|>Sad.<|end|><|start|>assistant...", "<|channel|>"),
        ("<|channel>thought\nSad.<channel|>I am here.", "<|channel>"),
        ("analysisSad.assistantfinalI am here.", "assistantfinal"),  # without its special tokens
        ("[THINK]Sad.[/THINK]I am here.", "[THINK]"),
        ("<seed:think>Sad.</seed:think>I am here.", "<seed:think>"),
        ("Sad.\n</thinking>\n\nI am here.", "</thinking>"),
        ("◁think▷Sad.◁/think▷I am here.", "◁think▷"),
        ("I am here.<|im_end|>", "<|im_end|>"),
        ("I am here.<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("I am here.[|endofturn|]", "[|endofturn|]"),
        ("I am here.<end_of_turn>\n", "<end_of_turn>"),
        ("I am here.</s>\n", "</s>"),
        ("<s> I am here.</s>", "<s>"),
        ('You said "no", I said `yes`.</s>', "</s>"),
        ("I don't mind, it's `fine`. <|eot_id|>", "<|eot_id|>"),
    ],
)
def test_marks_of_a_template_in_a_policys_reply_are_told(text, mark, tmp_path, capfd):
    """A thought in other tags than <think>, or an end token: the user heard it, and it was scored,
    without a word. The first one is named, once for all dialogues; the reply stays as it is."""
    out = tmp_path / "r.jsonl"
    with always(completion(text)) as server:
        flags = ["--policy", f"openai:m@{server.url}", "--limit", 2, "--max-turns", 2, "--out", out]
        told = output_of(capfd, 0, evaluate.main, *flags)
    assert told.count("warning") == 1 and f"a reply has {mark!r}, a mark" in told
    assert all(row["history"][1]["content"] == text.strip() for row in rows(out))


def test_a_plain_reply_is_no_mark(capsys):
    """Hearts, stars and faces, comparisons, tags of HTML, stage directions, and marks that are quoted."""
    plain = """I <3 you. *hugs* **Really**, a < b, b > a, a <| b |> c, x<y>z <|-_-|>
[sic] [THINKING ABOUT IT] [YOUR NAME] <sigh> <b>bold</b>, <s>bad</s> good, see <https://a.b/c>.
`</s>`, ``<|im_end|>`` and "<thinking>" or '<|eot_id|>' are marks; "it wrote [THINK] first" he said.
“A <seed:think> tag”, «<channel|>», 「[INST]」 and <code><|end|></code> are quoted as well.
> <|im_end|> stood in my answer
I will be final, assistant finally, and keep </s> in the middle. It's the boys' <3
```
print("<|im_end|>")</s>
```"""
    model = ServerModel("m", "http://127.0.0.1:9/v1")
    for reply in (
        plain,
        *plain.splitlines()[:6],
        "",
        "<s>bad</s> good",
        "good <s>bad</s>",
        "```\n</s>",
    ):
        model.warn_of_marks(reply)
    assert capsys.readouterr().err == ""


# --------------------------------------------------------------------------------- who has answered


@pytest.mark.parametrize("side", ["simulator", "policy"])
@pytest.mark.parametrize("second", ["small", "big-2024-08", None])
def test_the_names_of_the_models_that_answered_are_kept(side, second, tiny_dir, tmp_path, capfd):
    """A gateway that falls back to another model says so in "model", and nobody looked: two models
    played the user, or the policy. One name that is not the one asked for is an alias, and no news;
    some servers say none. The names are no setting: an evaluation with another one goes on."""
    out, names = tmp_path / "r.jsonl", [second and "big-2024-08", second]

    def reply(request):
        prompt = request["messages"][0]["content"]
        text = "I am here."
        if side == "simulator":
            felt = feeling(1 + check_change(prompt))
            text = coded(prompt, saying("Go on.") if "<emotion_level>" in prompt else felt)
        return 200, {}, completion(text) | {"model": names[server.requests > 6]}

    with Loopback(reply=reply) as server:
        users = ["--policy", tiny_dir, "--max-tokens", 4, *toy_people(tmp_path / "users")[:2]]
        flags = [f"--{side}", f"openai:big@{server.url}", *(users if side == "simulator" else ())]
        flags += ["--max-turns", 3, "--out", out, "--limit"]
        told = output_of(capfd, 0, evaluate.main, *flags, 4)
        first, *_, last = [row["rlver"]["served"] for row in rows(out)]
        found = list(dict.fromkeys(filter(None, names)))
        assert first[side][:1] == found[:1] and last == {side: found}
        assert told.count("warning") == (second == "small") == ("now as 'small'" in told)
        output_of(capfd, 0, evaluate.main, *flags, 5)
    assert rows(out)[-1]["rlver"]["served"] == {side: found}


@pytest.mark.parametrize("is_read_first", [False, True])  # a run's log; a judge's
def test_a_second_name_after_a_pause(is_read_first, tmp_path, capfd):
    """An alias was served by another version when an evaluation, or a run, went on, and nobody said
    so. Each is told once; who is still the same is no news, nor is a reader of the same name."""
    path, out = tmp_path / "calls.jsonl", tmp_path / "r.jsonl"
    path.touch()
    answered = [("old", 0), ("old", 0), ("new", 1), ("old", 0), ("third", 1)]
    for n, (name, news) in enumerate(answered, 1):
        with always(completion("I am here.") | {"model": name}) as server:
            log = open_call_log(path) if is_read_first else CallLog(path)
            caller = user_at(server, log=log).simulator.caller
            log.read(path)
            asyncio.run(caller.call("Hello.", REPLY_SCHEMA, str(n)))
            Reader(ServerModel("scripted", server.url), log=log).caller.model.keep_name("another")
            assert capfd.readouterr().err.count("and now as") == news
            flags = ["--policy", f"openai:m@{server.url}", "--max-turns", 1, "--out", out]
            told = output_of(capfd, 0, evaluate.main, *flags, "--limit", n)
            assert told.count("and now as") == news
    names = [row["served"] for row in rows(path)]
    known = ["old", "new", "third"]
    assert names == [known[:1], known[:1], known[:2], known[:2], known]
    assert names == [row["rlver"]["served"]["policy"] for row in rows(out)]


@pytest.mark.parametrize("name", ["big-2024-08", None])
def test_the_log_of_answers_names_who_answered(name, tmp_path):
    """Of a run's user and of its reader; a server that says no name adds nothing."""
    tops = [{"token": "yes", "logprob": -0.5}, {"token": "no", "logprob": -1.5}]
    body = completion("Hi.") | {"model": name}
    body["choices"][0]["logprobs"] = {"content": [{"top_logprobs": tops}]}
    log = CallLog(tmp_path / "calls.jsonl")
    with always(body) as server:
        reader = make_simulator("toy", reader=f"openai:big@{server.url}", log=log).reader
        asyncio.run(user_at(server, log=log).simulator.caller.call("Hello.", REPLY_SCHEMA, "one"))
        asyncio.run(reader.caller.call(["Is it?"], ("yes", "no"), "two"))
    assert [row.get("served") for row in rows(log.path)] == 2 * [name and [name]]


# ------------------------------------------------------------------------------- the log of answers


def test_the_log_of_answers(tmp_path):
    """A resumed step finds its answers there: nothing is paid for twice. A line that was cut off is
    no answer, and spoils no other."""
    path = tmp_path / "calls.jsonl"
    with Loopback() as server:
        said = asyncio.run(user_at(server, log=CallLog(path)).answer())
        (line,) = rows(path)
        assert set(line) == {"key", "answer", "seconds", "tokens"} and said[0] in line["answer"]
        with open(path, "ab") as file:
            file.write('{"key": "two", "answer": "好'.encode()[:-1])
        log = CallLog(path)
        log.read(path)
        log.write("three", Answer("3"), 0.1)
        assert asyncio.run(user_at(server, log=log).answer()) == said
        assert server.calls == 1
    log.read(path)
    assert log.answers == {line["key"]: line["answer"], "three": "3"}


def test_half_a_line_is_cut_off_our_own_log_only(tmp_path):
    """A resumed run reads the logs of all ranks, and whatever else is called so."""
    notes = tmp_path / "calls-notes.jsonl"
    notes.write_text('{"key": "one", "answer": "1"}\n{"key": "tw')
    log = CallLog(tmp_path / "calls.jsonl")
    log.read(notes)
    assert log.answers == {"one": "1"} and notes.read_text().endswith('"tw')


def test_equal_questions_are_paid_for_once(tmp_path):
    """Within a run, too, and at the same time: on resume the first answer of the log is the one that
    was used."""
    path = tmp_path / "calls.jsonl"
    with Loopback(latency=0.05) as server:
        log = CallLog(path)
        user = user_at(server, log=log)

        async def ask():
            users = [user.copy(str(n)) for n in range(3)]
            return await asyncio.gather(*[other.feel("Oh.") for other in users])

        assert len(set(asyncio.run(ask()))) == 1
        assert asyncio.run(user.feel("Oh.")) and server.calls == 1
    (line,) = rows(path)
    with open(path, "a") as file:  # of a version that paid for each
        file.write(json.dumps({**line, "answer": "another"}) + "\n")
    again = CallLog()
    again.read(path)
    assert again.answers == {line["key"]: line["answer"]} == log.answers


def test_equal_questions_fail_together(tmp_path, monkeypatch):
    """One after the other, eight of them waited forty minutes for a server that was down. Afterwards
    the question is asked again."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 0.5)
    with Loopback(faults={"hang": 1.0}) as server:
        user, began = user_at(server, log=CallLog(tmp_path / "calls.jsonl")), time.monotonic()

        async def ask():
            calls = [user.copy().feel("Oh.") for _ in range(8)]
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(error) for error in failed} == {SimulatorFailed}
            user.simulator.caller.model = Model()
            return await user.feel("Oh.")

        assert asyncio.run(ask())[1] == 7 and server.calls == 1
    assert time.monotonic() - began < 3


# ----------------------------------------------------------------------------------- many dialogues


@pytest.mark.slow
def test_calls_overlap_within_their_bound():
    """Defect 18: the released code makes one call after the other. Here all dialogues wait at the
    same time, as many as allowed."""

    def together(prompt):
        """Answer nobody before as many are waiting as may be (or for long it is clear that they
        never will)."""
        began = time.monotonic()
        while server.most < bound and time.monotonic() < began + 10:
            time.sleep(0.005)
        return asyncio.run(server.model(prompt))

    for bound in (3, 16):
        with Loopback(answer=together) as server:
            simulator = make_simulator(f"openai:scripted@{server.url}", concurrency=bound)
            people = dict(enumerate(PEOPLE))
            dialogues = rollout(
                simulator, people, 1, lambda n: Agent(["Go on.", "Hm."]), TWO_REPLIES
            )
            episodes, dropped = asyncio.run(dialogues)
            assert len(episodes) == 16 and not dropped and server.most == bound


@pytest.mark.slow
def test_a_rollout_has_a_deadline():
    """Dialogues that are still open then are dropped: other ranks wait for this one, and they have
    a limit of their own."""

    def answer(prompt):
        time.sleep(10 * ("slow" in prompt))
        return mild_answer(prompt)

    def make_agent(number):
        return Agent(["slow" if number == 1 else "Hm.", "Hm."])

    with Loopback(answer=answer) as server:
        simulator = make_simulator(f"openai:scripted@{server.url}")
        people = dict(enumerate(PEOPLE[:3]))
        episodes, errors = asyncio.run(
            rollout(simulator, people, 1, make_agent, TWO_REPLIES, timeout=1.0)
        )
    assert [e.number for e in episodes] == [0, 2]
    (lost,) = errors
    assert lost["reason"] == "the rollout ran out of time" and not lost["unreadable"]


def test_a_user_that_times_out_is_not_the_rollouts_deadline():
    """A TimeoutError of a user of one's own was logged as "the rollout ran out of time"."""

    async def model(prompt, schema=None):
        raise TimeoutError

    dialogues = rollout(simulator_of(model), {0: PEOPLE[0]}, 1, Agent, TWO_REPLIES, timeout=60)
    [lost] = asyncio.run(dialogues)[1]
    assert lost["reason"] == "the user timed out"


def test_samples_are_not_shared_between_the_dialogues_of_a_group():
    """At temperature 0 equal prompts have equal answers, and one will do. Above, each dialogue
    draws its own: a log without the dialogue in its keys would make a group of copies."""
    model = Model()
    key = Caller(model).key
    assert key("p", "training 1 0", 0) == key("p", "training 1 1", 0)
    model.temperature = 0.7
    assert len({key("p", f"training 1 {n}", k) for n in range(3) for k in range(3)}) == 9
    names = set()

    class Listening(Simulator):
        async def ask(self, *question):
            names.add(question[-1])
            return await super().ask(*question)

    people = dict.fromkeys((4, 7), PEOPLE[0])
    asyncio.run(
        rollout(
            Listening(Caller(model)),
            people,
            2,
            lambda n: Agent(["Hm."]),
            replace(TRAINING, max_turns=1),
            name="step 3",
        )
    )
    assert sorted(names) == [f"step 3 {who}" for who in (14, 15, 8, 9, "group 4", "group 7")]


def test_a_reply_that_is_refused_costs_its_dialogue(tmp_path, capsys):
    """A content filter at one reply of a policy behind a server ended the whole evaluation."""

    def reply(request):
        _, first, *more = request["messages"]
        is_refused = more and "lonely" not in first["content"]
        return 200, {}, completion("I am here.", "content_filter" if is_refused else "stop")

    with Loopback(reply=reply) as server:
        flags = ["--policy", f"openai:m@{server.url}", "--limit", 4, "--max-turns", 2]
        assert measure(*flags, "--out", tmp_path / "r.jsonl") == 75
    assert "a content filter took" in capsys.readouterr().err


# -------------------------------------------------------------------------------------- whole runs


@pytest.fixture(scope="module")
def served(no_pictures, tiny_dir, tmp_path_factory):
    """A whole run over a server that wants a key: (its directory, the prompts that the server was
    asked)."""
    out = tmp_path_factory.mktemp("served") / "whole"
    with Loopback(key=KEY) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLVER_API_KEY", KEY + "\n")  # as a key from a file may end
        assert rlver.main(flags_of(tiny_dir, server.url, out)) == 0
        return out, list(server.prompts)


@pytest.mark.parametrize(
    "algo, questions, read, written",
    [("ppo", "182,400", "364.80", "41.95"), ("grpo", "686,400", "1,372.80", "157.87")],
)
def test_the_bill_of_the_papers_run(algo, questions, read, written, capsys):
    """Of 350 steps, and two evaluations with a hundred people. (Pages named PPO's alone.)"""
    model = ServerModel("m", "http://127.0.0.1:9/v1")
    model.usage.update(answers=3, read=6000, written=690)
    cfg = resolve_settings({"algo": algo, "model": "m", "engine": "torch"})
    new = {"step": -1, "evaluations": []}
    print_bill(simulator_of(model), cfg, toy_profiles("heldout", 100), new)
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(f"Questions to m (simulator): {questions} at most")
    assert f"first ones {read} million tokens to read and {written} to write" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, parts",
    [
        ("--algo grpo --steps 3 --eval-every 2", "simulator"),
        ("--algo ppo --group-size 1", "simulator"),
        ("--algo grpo", "simulator reader"),
        ("--algo grpo", "reader"),
    ],
)
def test_a_run_asks_what_its_bill_says(flags, parts, tiny_dir, tmp_path, capfd, monkeypatch):
    """If nobody leaves early. One person brings a first line; a run that goes on has a bill of its
    own, for what no log answers. A reader has four questions about each reply. Tokens are named where the server counts."""
    asked, usage = Counter(), {}

    def reply(request):
        prompt = request["messages"][0]["content"]
        if "logprobs" in request:
            asked["reader"] += 1
            top = [{"token": "yes", "logprob": -0.4}, {"token": "no", "logprob": -1.2}]
            body = completion("")
            body["choices"][0]["logprobs"] = {"content": [{"top_logprobs": top}]}
            return 200, {}, body | usage
        asked["simulator"] += 1
        felt = feeling(1 + check_change(prompt))
        text = coded(prompt, saying("Go on.") if "<emotion_level>" in prompt else felt)
        return 200, {}, completion(text) | usage

    def bill(*args):  # what was asked before is the check's
        print_bill(*args)
        asked.clear()

    monkeypatch.setattr(rlver, "print_bill", bill)
    out, users = tmp_path / "out", toy_people(tmp_path)
    heldout = Path(users[-1])
    first, more = heldout.read_text().split("\n", 1)
    heldout.write_text(json.dumps(json.loads(first) | {"first_talk": "I am sad."}) + "\n" + more)
    with Loopback(reply=reply) as server:
        url = f"openai:scripted@{server.url}"
        user = ["--simulator", url, "--simulator-temperature", 1] if "simulator" in parts else []
        user += ["--reader", url] if "reader" in parts else []
        run = ["--model", tiny_dir, *SMALL, *flags.split(), *user, *users, "--out", out]
        for argv in (run, ["--resume", out, "--steps", 4]):
            told = " ".join(output_of(capfd, 0, rlver.main, *argv).split())
            bills = re.findall(r"\((simulator|reader)\): ([\d,]+) at most", told)
            assert {part: int(count.replace(",", "")) for part, count in bills} == asked
            assert [part for part, _ in bills] == parts.split()
            assert told.count("tokens to read") == len(bills) * bool(usage)
            usage["usage"] = {"prompt_tokens": 2000, "completion_tokens": 100}


@pytest.mark.slow
def test_a_run_over_a_server_is_the_run_of_the_scripted_user(served, tiny_dir, tmp_path):
    """The same dialogues, word for word; and 39 % of failing calls change nothing but the number of
    calls, and the codes of what was asked again."""
    assert rlver.main(words("--model", tiny_dir, *SMALL, "--out", tmp_path / "scripted")) == 0
    with Loopback(faults={"429": 0.30, "garbage": 0.05, "500": 0.04}) as server:
        assert rlver.main(flags_of(tiny_dir, server.url, tmp_path / "troubled")) == 0
        assert len(rows(tmp_path / "troubled" / "calls.jsonl")) <= server.calls
    scripted = without_analyses(tmp_path / "scripted")
    assert without_analyses(served[0]) == scripted == without_analyses(tmp_path / "troubled")


def without_analyses(out):
    """A run's dialogues, without the text of f_emo's answers: they hold the code."""
    dialogues = rows(out / "dialogues.jsonl")
    for turn in (turn for dialogue in dialogues for turn in dialogue["turns"]):
        del turn["analysis"]
    return dialogues


@pytest.mark.slow
def test_a_server_that_goes_away_pauses_the_run(served, tiny_dir, tmp_path, capfd, monkeypatch):
    """Exit code 75, saved; the server comes back elsewhere, the run goes on there, and what was
    answered is not asked again."""
    whole, prompts = served
    out = tmp_path / "out"
    with Loopback(outage=(len(prompts) * 2 // 3, 1e9)) as server, monkeypatch.context() as patch:
        patch.setattr("players.server.CALL_TIMEOUT", 3)
        assert rlver.main(flags_of(tiny_dir, server.url, out)) == 75
    answered = len(rows(out / "calls.jsonl"))
    assert answered == len(prompts) * 2 // 3 - 1
    assert not any(row["unreadable"] for row in rows(out / "dropped.jsonl"))
    err = capfd.readouterr().err
    assert "no answer within 3 s" in err and f"python rlver.py --resume {out}" in err
    with Loopback() as server:
        assert go_on(out, "--simulator", f"openai:scripted@{server.url}") == 0
        assert answered + server.calls == len(prompts)
    assert rows(out / "dialogues.jsonl") == rows(whole / "dialogues.jsonl")
    other = "--resume", whole, "--simulator", f"openai:other@{server.url}"
    assert "--simulator cannot change" in refuse(capfd, *other)


@pytest.mark.slow
def test_the_key_is_sent_and_never_shown(served, tiny_dir, tmp_path, monkeypatch, capfd):
    """Some servers quote a refused key. What it must not do is to end up on a screen, or in a run
    that is shared. A wrong one shows before anything is paid for, and the run leaves nothing."""
    whole, _ = served
    for text in files(whole).values():
        assert text is None or KEY.encode() not in text
    monkeypatch.setenv("RLVER_API_KEY", KEY)
    out = tmp_path / "refused"
    with Loopback(key="another") as server:
        told = output_of(capfd, 2, rlver.main, *flags_of(tiny_dir, server.url, out))
        assert server.calls == 0 and not out.exists()
    (line,) = [line for line in told.splitlines() if line.startswith("rlver.py: ")]
    assert "401" in line and "Incorrect API key: Bearer ***" in line and "--resume" not in line
    assert KEY not in told


def test_nobody_listening_is_said_at_once(tiny_dir, tmp_path, monkeypatch, capfd):
    """The first try says that there will be more, or a newcomer takes the silence for a hang."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 0.3)
    flags = flags_of(tiny_dir, "http://127.0.0.1:9/v1", tmp_path / "out")
    _, told, stopped = output_of(capfd, 75, rlver.main, *flags).splitlines()
    assert "Connect" in told and told.endswith("trying again")
    assert "no answer within 0.3 s" in stopped and "--resume" not in stopped
