"""The sentient user over a model server: a real server on loopback, with every fault that three
days of dialogues will meet.

Waits are made short by a smaller first wait; nothing here measures time but for one Retry-After,
which is a promise about time."""

from support import llm
from support.answers import mark_in
from support.llm import CallLog, RetryableError, seconds_to_wait
from support.rundir import open_run
from support.settings import (
    GROUP_TIMEOUT,
    BadInput,
    SimulatorFailed,
    SimulatorRefused,
    UnreadableAnswers,
    make_parser,
    split_name,
)

import asyncio
import gzip
import itertools
import json
import time
import tracemalloc
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

import rlver
from marks import sign
from rlver import rollout
from server import Handler, Loopback, completion, toy_people
from simulator import CHECK, Simulator, User, load_local, make_simulator, parse_reply, toy_profiles
from test_dialogue import Agent

ANN = toy_profiles("train", 1)[0]
FIRST_WAIT = make_simulator("openai:m@http://127.0.0.1").wait
SMALL = [
    "--steps",
    "2",
    "--batch-size",
    "4",
    "--group-size",
    "2",
    "--max-turns",
    "2",
    "--max-tokens",
    "6",
    "--eval-size",
    "4",
    "--lr",
    "2e-3",
    "--save-every",
    "1",
    "--simulator-retries",
    "6",
]


@pytest.fixture(autouse=True)
def quick(no_pictures, monkeypatch):
    """The first wait of a retry is 5 ms in here, not 400."""
    monkeypatch.setattr(llm, "AWAY", 0.005)
    init = Simulator.__init__
    monkeypatch.setattr(
        Simulator,
        "__init__",
        lambda self, model, lang="en", difficulty="vanilla", retries=2, wait=0.0, *rest, **more: (
            init(self, model, lang, difficulty, retries, wait and 0.005, *rest, **more)
        ),
    )


def Script(*replies):
    return Agent(replies)


def user_at(server, retries=8, timeout=5.0, **more):
    return User(
        make_simulator(f"openai:scripted@{server.url}", retries=retries, timeout=timeout, **more),
        ANN,
    )


def run(model, url, out, *flags):
    return rlver.main(
        [
            "--model",
            str(model),
            "--simulator",
            f"openai:scripted@{url}",
            *SMALL,
            *toy_people(out.parent),
            "--out",
            str(out),
            *map(str, flags),
        ]
    )


def without_marks(out):
    """A run's dialogues, with no mark in them."""
    dialogues = rows(out / "dialogues.jsonl")
    for turn in (turn for d in dialogues for turn in d["turns"] if turn["mark"]):
        turn["analysis"] = turn["analysis"].replace(turn.pop("mark"), "")
    return dialogues


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


# -------------------------------------------------------------------------------------- the address


def test_the_name_is_split_at_the_first_colon_and_the_last_at():
    """Model names hold colons and slashes, URLs hold colons, and somebody's model name will hold
    an @."""
    for name, parts in (
        ("openai:deepseek-chat@https://host/v1", ("openai", "deepseek-chat", "https://host/v1")),
        (
            "openai:org/m:70b@2@http://127.0.0.1:8000/v1",
            ("openai", "org/m:70b@2", "http://127.0.0.1:8000/v1"),
        ),
        ("local:models/a@b", ("local", "models/a@b", "")),
    ):
        assert split_name(name) == parts
    assert split_name("toy") == ("toy", "", "")


@pytest.mark.parametrize(
    "name",
    [
        "openai:",
        "openai:m",
        "openai:m@",
        "openai:@http://h/v1",
        "openai:m@host/v1",
        "openai:m@ftp://h",
        "local:",
        "openia:m@http://h",
    ],
)
def test_a_bad_address_is_one_line(name, tmp_path, capfd):
    assert rlver.main(["--simulator", name, "--out", str(tmp_path / "out")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert name in line and not (tmp_path / "out").exists()


# ----------------------------------------------------------------------------------------- one call


def test_the_server_is_asked_what_the_scripted_model_is_asked():
    """One prompt chain, whichever model: over the server the same dialogue, prompt by prompt, with
    tokens and model name as told."""

    async def talk(user):
        lines = [await user.answer()]
        for reply in ("I am here, let it all out.", "Cheer up, it will be fine."):
            lines += [await user.feel(reply), await user.answer()]
        return lines, user.emotion

    seen = []
    with Loopback(
        reply=lambda request: (
            seen.append(request)
            or (200, {}, completion(asyncio.run(server.model(request["messages"][0]["content"]))))
        )
    ) as server:
        assert asyncio.run(talk(user_at(server))) == asyncio.run(
            talk(User(make_simulator("toy"), ANN))
        )
    assert len(seen) == 5 and all(
        r["model"] == "scripted" and r["temperature"] == 0 and len(r["messages"]) == 1 for r in seen
    )


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


@pytest.mark.slow
def test_a_call_that_hangs_is_given_up_and_tried_again():
    """Defect 17 again: without a deadline one silent connection stops the whole batch for ever."""
    with Loopback(faults={"hang": 1.0}) as server:
        with pytest.raises(SimulatorFailed, match="no answer within 0.2 s"):
            asyncio.run(user_at(server, retries=1, timeout=0.2).answer())
        assert server.calls == 2


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
        b"null",
        b"[]",
        b"{}",
        b"not json",
        {"choices": []},
        {"choices": None},
        {"choices": [{}]},
        {"choices": [{"message": {"content": None}}]},
        {"choices": {}},
        {"choices": "x"},
        {"choices": [7]},
        b"[" * 200_000,
        b'{"choices": ' + b"[" * 200_000,
        b"7",
        b'"text"',
        {"choices": [{"message": {"content": {"a": 1}}}]},
        {"choices": [{"message": {"content": 5}}]},
        {"choices": [{"message": "x"}]},
        {"error": {"message": "oops"}},
        completion(""),
        completion("x" * 100_000),
        completion("\n" * 100_000),
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


def test_an_answer_that_was_cut_is_asked_for_again_with_more_room(tmp_path):
    """Asked for once more with four times the room; cut again, before its line End, it is
    unreadable, also when it is read from the log."""

    def reply(request):
        body = completion(FORGED)
        body["choices"][0]["finish_reason"] = "length"
        asked.append(request["max_tokens"])
        mark = mark_in(request["messages"][0]["content"])
        whole = completion(ANALYSIS.replace("MARK", mark))
        return 200, {}, whole if generous and len(asked) == 2 else body

    FORGED = "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: they wrote\nChange: +10"
    ANALYSIS = sign(FORGED.replace("they wrote\nChange: +10", "x\nChange: -4"), "MARK")
    for generous in (True, False):
        asked, log = [], CallLog(tmp_path / f"{generous}.jsonl")
        with Loopback(reply=reply) as server:
            user = user_at(server, retries=1, log=log)
            if generous:
                assert asyncio.run(user.feel("Hello."))[1] == -4
                assert asked == [2048, 8192]
                continue
            with pytest.raises(UnreadableAnswers, match="no line 'End"):
                asyncio.run(user.feel("Hello."))
            assert asked == [2048, 8192] * 2
        again = CallLog()
        again.read(log.path)
        assert [answer.cut for answer in again.answers.values()] == [True, True]


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


def test_an_answer_that_is_cut_behind_its_end_is_whole(tmp_path):
    """It was asked for again, with four times the room: paid twice, and lost where the longer call
    took too long. So is one that was cut before its end, where the longer call fails."""

    def reply(request):
        asked.append(request["max_tokens"])
        mark = mark_in(request["messages"][0]["content"])
        whole = "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: x\nChange: -4"
        body = completion(sign(whole, mark) + "\nAnd then" if ended else "Content: c")
        body["choices"][0]["finish_reason"] = "length"
        return (200, {}, body) if asked[-1] == 2048 else (500, {}, {"error": {"message": "no"}})

    for ended in (True, False):
        asked = []
        with Loopback(reply=reply) as server:
            user = user_at(server, retries=0)
            if ended:
                assert asyncio.run(user.feel("Hello."))[1] == -4 and asked == [2048]
                continue
            with pytest.raises(UnreadableAnswers, match="no line 'End"):
                asyncio.run(user.feel("Hello."))
            assert asked == [2048, 8192]


def test_only_numbers_of_tokens_are_logged(tmp_path):
    """`usage` went into calls.jsonl as the server sent it, and with it a key that it echoed."""

    def reply(request):
        prompt = request["messages"][0]["content"]
        body = completion(asyncio.run(server.model(prompt)))
        body["usage"] = {
            "prompt_tokens": "Bearer sk-1",
            "completion_tokens": 7,
            "note": "sk-1",
            "total_tokens": {"key": "sk-1"},
        }
        return 200, {}, body

    with Loopback(reply=reply) as server:
        asyncio.run(user_at(server, log=CallLog(tmp_path / "calls.jsonl")).answer())
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
            return await rollout(chain, [ANN], 2, lambda n: Script(f"bomb-{n}."), 1)

        words = CHECK
        with pytest.raises(SimulatorRefused):
            asyncio.run(check_and_talk())
        assert server.calls == 0  # a check is not counted
        chain, words = make_simulator(f"openai:scripted@{server.url}", retries=3), "bomb-1"
        episodes, (lost,) = asyncio.run(check_and_talk())
        assert len(episodes) == 1 and lost["unreadable"]
        # what the policy said last is kept: nothing else shows what silenced the user
        assert lost["dialogue"][-1] == {"speaker": "friend", "text": "bomb-1."}
        assert server.calls == 3  # the first line and two replies: none asked twice


# ---------------------------------------------------------------------------------------- the waits


@pytest.mark.slow
def test_retry_after_is_honoured():
    """In seconds or as a date; not for ever, and nonsense is no time at all."""
    assert (
        seconds_to_wait("1.5") == 1.5
        and seconds_to_wait("-3") == 0
        and seconds_to_wait("86400") == 60
    )
    assert [seconds_to_wait(x) for x in (None, "", "soon", "nan")] == [0] * 4
    later = datetime.now(timezone.utc) + timedelta(seconds=30)
    assert 25 < seconds_to_wait(format_datetime(later, usegmt=True)) <= 30
    said = iter([(429, {"Retry-After": "0.4"}, {"error": {"message": "slow down"}})])
    with Loopback(
        reply=lambda request: (
            next(said, None)
            or (200, {}, completion(asyncio.run(server.model(request["messages"][0]["content"]))))
        )
    ) as server:
        asyncio.run(user_at(server).answer())
        first, second = server.times
        assert second - first >= 0.4


def test_waits_grow_and_differ(monkeypatch):
    """0.4 s, doubled each time up to 12 s, between three quarters and the whole of it by chance:
    eight retries last half a minute at least, and a hundred dialogues do not come back at the same
    moment."""
    waits, make_wait = [], FIRST_WAIT

    async def sleep(seconds):
        waits.append(seconds)

    async def down(prompt):
        raise RetryableError("down")

    chain = Simulator(down, retries=8)
    chain.wait = make_wait
    monkeypatch.setattr(llm.asyncio, "sleep", sleep)
    for _ in range(20):
        with pytest.raises(SimulatorFailed):
            asyncio.run(chain.ask("reply", User(chain, ANN).values(), parse_reply))
    for column in zip(*[iter(waits)] * 8):
        assert all(0.75 <= wait / min(12, 0.4 * 2**k) <= 1 for k, wait in enumerate(column))
    assert (
        len(set(waits)) == len(waits) == 160
        and min(sum(waits[i : i + 8]) for i in range(0, 160, 8)) >= 30
    )


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
            chain = make_simulator(f"openai:scripted@{server.url}", concurrency=bound)
            episodes, dropped = asyncio.run(
                rollout(
                    chain,
                    toy_profiles("train", 16),
                    1,
                    lambda n: Script("Go on, let it all out.", "Hm."),
                    2,
                )
            )
            assert len(episodes) == 16 and not dropped
            assert server.most == bound


@pytest.mark.slow
def test_a_rollout_has_a_deadline():
    """Dialogues that are still open then are dropped: other ranks wait for this one, and they have
    a limit of their own."""
    with Loopback(
        answer=lambda prompt: (
            time.sleep(10 * ("slow" in prompt)) or asyncio.run(server.model(prompt))
        )
    ) as server:
        chain = make_simulator(f"openai:scripted@{server.url}")

        def make_agent(number):
            return Script("slow" if number == 1 else "Hm.", "Hm.")

        people = toy_profiles("train", 3)
        episodes, errors = asyncio.run(rollout(chain, people, 1, make_agent, 2, timeout=1.0))
    assert [e.number for e in episodes] == [0, 2]
    assert [lost["reason"] for lost in errors] == ["the rollout ran out of time"]
    assert not errors[0]["unreadable"]
    with pytest.raises(SystemExit):
        make_parser().parse_args(["--rollout-timeout", str(GROUP_TIMEOUT)])


# ------------------------------------------------------------------------------------ log and cache


def test_every_call_is_logged_and_none_is_paid_for_twice(tmp_path):
    """A resumed step finds its answers in the log: unreadable ones too, or it would be told
    something else than the first time."""
    path = tmp_path / "calls.jsonl"
    with Loopback(faults={"garbage": 0.4}, seed=3) as server:
        said = asyncio.run(user_at(server, log=CallLog(path)).answer())
        paid = server.calls
        lines = rows(path)
        assert len(lines) == paid > 1 and len({line["key"] for line in lines}) == paid
        assert all(
            set(line) == {"key", "prompt", "mark", "answer", "seconds", "tokens"} for line in lines
        )
        assert lines[-1]["tokens"]["prompt"] == 10 and said in lines[-1]["answer"]
        again = CallLog(tmp_path / "other.jsonl")
        again.read(path)
        assert asyncio.run(user_at(server, log=again).answer()) == said
        assert server.calls == paid and not (tmp_path / "other.jsonl").exists()


def test_a_line_that_was_cut_off_is_no_answer_and_spoils_no_other(tmp_path):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.write("one", "p", "1", 0.1)
    with open(path, "ab") as file:
        file.write('{"key": "two", "answer": "好'.encode()[:-1])
    log = CallLog(path)
    log.write("three", "p", "3", 0.1)
    log.read(path)
    assert log.answers == {"one": "1", "three": "3"}
    skipping = CallLog()
    skipping.read(path, path.read_bytes().index(b"\n") + 1)  # from where a checkpoint was made
    assert skipping.answers == {"three": "3"}


def test_samples_are_not_shared_between_the_dialogues_of_a_group():
    """At temperature 0 equal prompts have equal answers, and one will do. Above, each dialogue
    draws its own: a cache without the dialogue in its key would make a group of copies."""

    async def model(prompt):
        return "x"

    chain = Simulator(model)
    assert (
        chain.key("p", "training 1 0", 0)
        == chain.key("p", "training 1 1", 0)
        != chain.key("q", "training 1 0", 0)
    )
    assert chain.key("p", "training 1 0", 0) != chain.key("p", "training 1 0", 1)
    model.temperature = 0.7
    assert len({chain.key("p", f"training 1 {n}", k) for n in range(3) for k in range(3)}) == 9
    # nor between steps
    assert chain.key("p", "training 1 0", 0) != chain.key("p", "training 2 0", 0)
    names = []

    class Listening(Simulator):
        async def ask(self, name, values, parse, dialogue=""):
            names.append(dialogue)
            return await super().ask(name, values, parse, dialogue)

    listening = Listening(make_simulator("toy").model)
    asyncio.run(
        rollout(
            listening, [ANN, ANN], 2, lambda n: Script("Hm."), 1, groups=[4, 7], name="training 3"
        )
    )
    assert sorted(names) == [
        "training 3 14",
        "training 3 15",
        "training 3 8",
        "training 3 9",
        "training 3 group 4",
        "training 3 group 7",
    ]


# -------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def served(no_pictures, tiny_dir, tmp_path_factory):
    """A whole run over a server: (its directory, the prompts that the server was asked)."""
    out = tmp_path_factory.mktemp("served") / "whole"
    with Loopback() as server:
        assert run(tiny_dir, server.url, out) == 0
        return out, list(server.prompts)


@pytest.mark.slow
def test_a_run_over_a_server_is_the_run_of_the_scripted_user(tiny_dir, tmp_path):
    """The same dialogues, word for word; and 16 % of failing calls change nothing but the number of
    calls, and the marks of what was asked again."""
    assert rlver.main(["--model", str(tiny_dir), *SMALL, "--out", str(tmp_path / "scripted")]) == 0
    for name, faults in (("served", {}), ("troubled", {"429": 0.08, "garbage": 0.04, "500": 0.04})):
        with Loopback(faults=faults) as server:
            assert run(tiny_dir, server.url, tmp_path / name) == 0
            assert len(rows(tmp_path / name / "calls.jsonl")) <= server.calls
        assert without_marks(tmp_path / name) == without_marks(tmp_path / "scripted")


@pytest.mark.slow
def test_a_server_that_goes_away_pauses_the_run(served, tiny_dir, tmp_path, capfd):
    """Exit code 75, saved; the server comes back elsewhere, the run goes on there, and what was
    answered is not asked again."""
    whole, prompts = served
    with Loopback(outage=(len(prompts) * 2 // 3, 1e9)) as server:
        assert run(tiny_dir, server.url, tmp_path / "out", "--simulator-retries", 1) == 75
        answered = len(rows(tmp_path / "out" / "calls.jsonl"))
    assert answered == len(prompts) * 2 // 3 - 1
    err = capfd.readouterr().err
    assert "cannot be reached" in err and f"python rlver.py --resume {tmp_path / 'out'}" in err
    with Loopback() as server:
        assert (
            rlver.main(
                ["--resume", str(tmp_path / "out"), "--simulator", f"openai:scripted@{server.url}"]
            )
            == 0
        )
        assert answered + server.calls == len(prompts)
    assert (tmp_path / "out" / "dialogues.jsonl").read_text() == (
        whole / "dialogues.jsonl"
    ).read_text()
    with pytest.raises(BadInput, match="--simulator cannot change"):
        open_run(
            {
                **vars(
                    make_parser().parse_args(
                        ["--resume", str(whole), "--simulator", f"openai:other@{server.url}"]
                    )
                )
            }
        )


@pytest.mark.slow
def test_a_cache_of_another_run_pays_for_its_calls(served, tiny_dir, tmp_path):
    with Loopback() as server:
        assert (
            run(
                tiny_dir,
                server.url,
                tmp_path / "two",
                "--simulator-cache",
                served[0] / "calls.jsonl",
            )
            == 0
        )
        assert server.calls == 0
    assert (tmp_path / "two" / "dialogues.jsonl").read_text() == (
        served[0] / "dialogues.jsonl"
    ).read_text()
    assert (
        rlver.main(
            [
                "--model",
                str(tiny_dir),
                *SMALL,
                "--simulator-cache",
                str(tmp_path / "none"),
                "--out",
                str(tmp_path / "three"),
            ]
        )
        == 2
    )


@pytest.mark.slow
def test_the_key_is_sent_and_never_shown(tiny_dir, tmp_path, monkeypatch, capfd):
    """Some servers quote a refused key. What it must not do is to end up on a screen, or in a run
    that is shared."""
    monkeypatch.setenv("RLVER_API_KEY", "sk-very-secret")
    with Loopback(key="sk-very-secret") as server:
        assert run(tiny_dir, server.url, tmp_path / "out", "--steps", 1) == 0
    with Loopback(key="another") as server:
        assert run(tiny_dir, server.url, tmp_path / "refused") == 2
    out, err = capfd.readouterr()
    assert "401" in err and "Incorrect API key" in err and "***" in err and "Traceback" not in err
    assert "sk-very-secret" not in out + err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-very-secret" not in path.read_bytes(), path


def test_an_unknown_model_stops_the_run_in_the_servers_words(tiny_dir, tmp_path, capfd):
    with Loopback() as server:
        assert (
            rlver.main(
                [
                    "--model",
                    str(tiny_dir),
                    "--simulator",
                    f"openai:gpt-9@{server.url}",
                    *SMALL,
                    *toy_people(tmp_path),
                    "--out",
                    str(tmp_path / "out"),
                ]
            )
            == 2
        )
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlver.py:")]
    assert len(lines) == 1 and "The model `gpt-9` does not exist." in lines[0]


# ------------------------------------------------------------------------------------- local models


def test_a_model_from_a_directory_can_be_the_user(tiny_dir, tmp_path, capfd):
    """The same engine code serves it. A random model knows no sections, so every dialogue is lost,
    which is told; what it is asked, and that it answers greedily, is seen in the log."""
    code = rlver.main(
        [
            "--model",
            str(tiny_dir),
            "--simulator",
            f"local:{tiny_dir}",
            *SMALL,
            *toy_people(tmp_path),
            "--out",
            str(tmp_path / "out"),
        ]
    )
    assert code == 2 and "does not fit its context of 512" in capfd.readouterr().err


def test_a_local_model_answers_greedily_and_counts_its_tokens(tiny_dir):
    from support.loading import load_model

    import torch

    local = load_local(str(tiny_dir), 0.0)
    local.max_tokens = 8

    async def twice():
        return await asyncio.gather(
            local("How are you?", room=4), local("How are you?", room=4), local("Why?")
        )

    one, two, other = asyncio.run(twice())
    assert one == two and one.tokens == two.tokens and one.tokens["completion"] <= 32
    model, _ = load_model(tiny_dir)
    ids = local.chat.first_prompt("How are you?")
    assert one.tokens["prompt"] == len(ids)
    for _ in range(32):  # four times the limit
        with torch.no_grad():
            ids = ids + [int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == local.chat.stop_id:
            break
    said = ids[one.tokens["prompt"] :]
    assert one == local.chat.decode(said[:-1] if said[-1] == local.chat.stop_id else said)
    with pytest.raises(BadInput, match="--simulator local"):
        make_simulator(f"local:{tiny_dir / 'nowhere'}")


# ------------------------------------------------------------- what is said of a run that stopped


@pytest.mark.slow
def test_unreadable_dialogues_are_counted_apart_and_warned_of(tiny_dir, tmp_path, capfd):
    """A model that goes astray at one reply of one user: that dialogue is dropped, stands under
    `unreadable`, and the run says what that may mean. Dialogues lost to a server do not."""
    calls = itertools.count(1)

    def answer(prompt):
        if "<emotion>" in prompt and next(calls) == 3:  # two are of the evaluation before training
            return "I would rather talk about something else."
        return asyncio.run(server.model(prompt))

    with Loopback(answer=answer) as server:
        flags = ["--eval-size", 1, "--steps", 1, "--batch-size", 16, "--simulator-retries", 0]
        assert run(tiny_dir, server.url, tmp_path / "out", *flags) == 0
    (row,) = rows(tmp_path / "out" / "dropped.jsonl")
    assert (row["step"], row["kind"], row["unreadable"]) == (1, "training", True)
    assert [m["speaker"] for m in row["dialogue"]] == ["me", "friend"]
    assert row["dialogue"][1]["text"]
    (line,) = rows(tmp_path / "out" / "metrics.jsonl")
    assert line["unreadable"] == line["dropped"] == 1 and line["episodes"] == 15
    assert "1 of 16 dialogues were dropped because the user's answers" in capfd.readouterr().out


@pytest.mark.slow
def test_a_run_is_saved_where_there_is_a_checkpoint(served, tiny_dir, tmp_path, capfd):
    """ "The run is saved" was said as soon as there was a config.json."""
    _, prompts = served
    for calls, words in ((3, "nothing is saved yet"), (len(prompts) * 2 // 3, "the run is saved")):
        out = tmp_path / str(calls)
        with Loopback(outage=(calls, 1e9)) as server:
            assert run(tiny_dir, server.url, out, "--simulator-retries", 1) == 75
        said = capfd.readouterr().err
        assert words in said and ("--resume" in said) == bool(list(out.glob("checkpoint-*")))
