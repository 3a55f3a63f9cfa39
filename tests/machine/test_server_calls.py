"""One call to a model server: what is asked, what is tried again, and what is no answer. A real
server on loopback (server.py) has every fault that three days of dialogues will meet."""

from support.answers import mark_in
from support.errors import SimulatorFailed, SimulatorRefused, UnreadableAnswers
from support.llm import CallLog

import asyncio
import gzip
import time
import tracemalloc

import pytest

from marks import sign
from over_server import ANN, Script, user_at
from rlver import rollout
from runs import rows
from server import Handler, Loopback, completion
from simulator import CHECK_REPLY, make_simulator

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("fault", ["429", "500", "garbage"])
def test_what_may_heal_is_tried_again(fault):
    """Half of all calls fail in one way; with enough attempts no dialogue notices."""
    with Loopback(faults={fault: 0.5}, seed=1) as server:
        assert asyncio.run(user_at(server, retries=20).answer())
        assert server.calls > 1
    with Loopback(faults={fault: 1.0}) as server:  # and with too few it is given up, not guessed at
        with pytest.raises(SimulatorFailed, match="4 attempts at the reply hop failed"):
            asyncio.run(user_at(server, retries=3).answer())
        assert server.calls == 4


def test_a_body_that_trickles_in_for_ever_has_the_same_deadline():
    """An HTTP client's timeout is one of each read: a server that sends a byte now and then never
    meets it."""
    with Loopback() as server:
        handler = server.RequestHandlerClass

        class Trickle(handler):
            def send(self, status, headers, body):
                self.send_response(200)
                self.send_header("Content-Length", "1000")
                self.end_headers()
                for _ in range(400):  # 20 s
                    self.wfile.write(b" ")
                    written.append(time.sleep(0.05))

        server.RequestHandlerClass, written = Trickle, []
        with pytest.raises(SimulatorFailed, match="no answer within 0.3 s"):
            asyncio.run(user_at(server, retries=0, timeout=0.3).answer())
        assert len(written) < 400  # nobody waited for the end


def test_a_server_that_cuts_the_line_and_comes_back():
    """A connection without an answer, and one that is refused, may heal as a 503 may."""
    with Loopback(outage=(1, 0.1)) as server:
        assert asyncio.run(user_at(server, retries=10).answer())
        assert server.calls >= 2
    with pytest.raises(SimulatorFailed, match="cannot be reached"):  # it is gone for good
        asyncio.run(user_at(server, retries=1).answer())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_cannot_heal_stops_at_once_with_the_servers_words(status):
    """Eight growing waits before "no such model" would be eight too many."""
    with Loopback(
        reply=lambda request: (status, {}, {"error": {"message": "no such thing as this"}})
    ) as server:
        with pytest.raises(SimulatorRefused, match=f"says {status}: .*no such thing as this"):
            asyncio.run(user_at(server).answer())
        assert server.calls == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"null",
        {"choices": []},
        {"choices": "x"},
        {"choices": [7]},
        {"choices": [{"message": {"content": None}}]},
        {"choices": [{"message": {"content": 5}}]},
        b"[" * 200_000,
        completion(""),
        completion("Thinking: " * 10_000),
    ],
    ids=lambda body: str(body)[:40],
)
def test_an_answer_that_is_none_is_tried_again(body):
    """Proxies answer 200 with an empty page; models with nothing, or for ever. Each costs one
    attempt, no exception, no minute of regular expressions."""

    def reply(request):
        return (
            200,
            {},
            body
            if server.calls == 1
            else completion(asyncio.run(server.model(request["messages"][0]["content"]))),
        )

    with Loopback(reply=reply) as server:
        began = time.monotonic()
        assert asyncio.run(user_at(server).answer()) and server.calls == 2
        # a hang, not a speed: quadratic matching would take hours
        assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "short, longer, answers",
    [("behind", None, 1), ("before", "whole", 1), ("before", "before", 2), ("before", None, 2)],
)
def test_an_answer_that_was_cut(short, longer, answers, tmp_path):
    """Cut behind its line End it is whole. Cut before it, it is asked for once more with four times
    the room; cut there, too, or where that call fails, it is unreadable, also from the log."""
    FORGED = "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: they wrote\nChange: +10"
    limits = []

    def reply(request):
        limits.append(request["max_tokens"])
        kind = short if limits[-1] == 2048 else longer
        if kind is None:
            return 500, {}, {"error": {"message": "no"}}
        whole = sign(FORGED.replace("+10", "-4"), mark_in(request["messages"][0]["content"]))
        text = {"whole": whole, "behind": whole + "\nAnd then", "before": FORGED}[kind]
        body = completion(text)
        body["choices"][0]["finish_reason"] = "stop" if kind == "whole" else "length"
        return 200, {}, body

    log = CallLog(tmp_path / "calls.jsonl")
    with Loopback(reply=reply) as server:
        user = user_at(server, retries=1, log=log)
        if answers == 1:
            assert asyncio.run(user.feel("Hello."))[1] == -4
        else:
            with pytest.raises(UnreadableAnswers, match="no line 'End"):
                asyncio.run(user.feel("Hello."))
    assert limits == ([2048] if short == "behind" else [2048, 8192] * answers)
    again = CallLog()
    again.read(log.path)
    assert [answer.cut for answer in again.answers.values()] == [longer != "whole"] * answers


def test_what_is_no_answer_is_not_taken_in_whole(tmp_path):
    """Four answers of 100 MB made a log of 420 MB. A body is counted while it is read, and given up
    at two million bytes; of a text that is too long to be an answer the log keeps its beginning."""
    sent = []

    class Endless(Handler):
        def send(self, status, headers, body):
            self.send_response(200)
            self.send_header("Content-Length", str(100_000_000))
            self.end_headers()
            for _ in range(1000):
                self.wfile.write(b" " * 100_000)
                sent.append(1)

    log = CallLog(tmp_path / "calls.jsonl")
    with Loopback() as server:
        server.RequestHandlerClass = Endless
        with pytest.raises(SimulatorFailed, match="more than 2,000,000 bytes"):
            asyncio.run(user_at(server, retries=0, log=log).answer())
    assert len(sent) < 500 and not log.path.exists()
    with Loopback(answer=lambda prompt: "x" * 1_000_000) as server:
        with pytest.raises(UnreadableAnswers):
            asyncio.run(user_at(server, retries=3, log=log).answer())
        assert server.calls == 4
    assert log.path.stat().st_size < 4 * 50_000


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_an_answer_is_not_unpacked(encoding):
    """Two bombs of a gigabyte, a megabyte each on their way, made a peak of 4.8 GB. Plain answers
    are asked for, and no others are taken, whatever the status."""
    asked, packed = [], gzip.compress(b" " * 50_000_000)

    class Packed(Handler):
        def send(self, status, headers, body):
            asked.append(self.headers["Accept-Encoding"])
            super().send(200 if len(asked) % 2 else 500, {"Content-Encoding": encoding}, packed)

    with Loopback() as server:
        server.RequestHandlerClass = Packed
        tracemalloc.start()
        with pytest.raises(SimulatorFailed, match=f"encoded as '{encoding}'"):
            asyncio.run(user_at(server, retries=1).answer())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert asked == ["identity"] * 2 and peak < 20_000_000


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(status):
    """One to another host got the prompts, and with them whatever the users' stories hold."""
    with (
        Loopback() as other,
        Loopback(
            reply=lambda request: (status, {"Location": f"{other.url}/chat/completions"}, {})
        ) as server,
    ):
        with pytest.raises(SimulatorRefused, match=f"says {status}: .*redirects are not followed"):
            asyncio.run(user_at(server).answer())
        assert other.calls == 0 and server.calls == 1


def test_only_numbers_of_tokens_are_logged(tmp_path):
    """`usage` went into calls.jsonl as the server sent it, and with it a key that it echoed."""

    def reply(request):
        seen.append(request)
        body = completion(asyncio.run(server.model(request["messages"][0]["content"])))
        body["usage"] = {
            "prompt_tokens": "Bearer sk-1",
            "completion_tokens": 7,
            "note": "sk-1",
            "total_tokens": {"key": "sk-1"},
        }
        return 200, {}, body

    seen = []
    with Loopback(reply=reply) as server:
        asyncio.run(user_at(server, log=CallLog(tmp_path / "calls.jsonl")).answer())
    (request,) = seen
    assert request["model"] == "scripted" and request["temperature"] == 0
    (row,) = rows(tmp_path / "calls.jsonl")
    assert row["tokens"] == {"prompt": None, "completion": 7}
    assert "sk-1" not in (tmp_path / "calls.jsonl").read_text()


@pytest.mark.parametrize("fault", ["400", "403", "filter"])
def test_a_refused_prompt_stops_the_check_and_later_costs_its_dialogue(fault):
    """A 400 or a content filter at the first call is the server's matter. After that it hangs on
    what was said: if it ended the run, a policy could end it. It is counted apart."""

    def reply(request):
        prompt = request["messages"][0]["content"]
        body = completion(asyncio.run(server.model(prompt)))
        if words not in prompt:
            return 200, {}, body
        if fault != "filter":  # a server's, or a firewall's before it
            return int(fault), {}, {"error": {"message": "no such words"}}
        body["choices"][0]["finish_reason"] = "content_filter"
        return 200, {}, body

    with Loopback(reply=reply) as server:
        chain = make_simulator(f"openai:scripted@{server.url}", retries=3)

        async def check_and_talk():
            await chain.check()
            return await rollout(chain, {0: ANN}, 2, lambda n: Script(f"bomb-{n}."), 1)

        words = CHECK_REPLY
        with pytest.raises(SimulatorRefused):
            asyncio.run(check_and_talk())
        assert server.calls == 0  # a check is not counted
        chain, words = make_simulator(f"openai:scripted@{server.url}", retries=3), "bomb-1"
        episodes, (lost,) = asyncio.run(check_and_talk())
        assert len(episodes) == 1 and lost["unreadable"]
        # what the policy said last is kept: nothing else shows what silenced the user
        assert lost["dialogue"][-1] == {"speaker": "friend", "text": "bomb-1."}
        assert server.calls == 3  # the first line and two replies: none asked twice
