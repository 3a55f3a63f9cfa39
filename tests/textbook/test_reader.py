"""Feelings that are read (players/reader.py): log-odds by hand, one row for all questions against one pass for
each, and from log-odds to a change."""

from players import reader
from players.calls import CallLog
from players.check import check, learn
from players.local import LocalReader
from players.reader import LIKELIEST, Reader, ReadUser, known_replies, log_odds
from players.users import make_simulator
from support.errors import BadModel, SimulatorFailed, UnreadableAnswers
from support.files import digest, read_json
from support.results import analysis_in

import asyncio
import dataclasses
import json
import math
import re

import numpy as np
import pytest
import torch

import evaluate
import rlver
from answering import simulator_of
from runs import SMALL, go_on, refuse, rows, words
from server import Loopback, completion, failure
from simulator import EMOTION_SCHEMA
from teach import YES_NO, questions_of
from tools import fitness, judge, replay
from toy import world


def test_log_odds_by_hand():
    """Of " Yes" and "yes" the probabilities are added; other words count for nothing."""
    told = {"Yes": 0.3, " yes": 0.1, "no": 0.2, "Maybe": 0.25, "!": 0.05}
    odds, mass = log_odds([(word, math.log(p)) for word, p in told.items()], YES_NO)
    assert odds == pytest.approx(math.log(0.4 / 0.2)) and mass == pytest.approx(0.6)


def test_a_word_that_is_not_told_is_at_most_as_likely_as_the_last_one():
    told = [("yes", math.log(0.9)), ("sure", math.log(0.02)), ("I", math.log(0.01))]
    odds, mass = log_odds(told, YES_NO)
    assert odds == pytest.approx(math.log(0.9 / 0.01))
    assert mass == pytest.approx(0.9)  # what is only a bound is not counted


def test_one_row_reads_what_a_pass_for_each_question_reads(taught):
    """The questions are branches behind what they have in common. Against a plain forward pass of
    each prompt alone, in fp32."""
    hearing = Reader(LocalReader(taught, YES_NO, dtype=torch.float32))
    row = known_replies("test")[0]
    prompts = questions_of(row)
    found = asyncio.run(hearing.caller.model.likeliest(prompts, LIKELIEST))
    assert len(prompts) == len(found) == len(reader.WEIGHTS) > 2
    source = hearing.caller.model
    for prompt, told in zip(prompts, found):
        ids = torch.tensor([source.chat.first_prompt(prompt) + source.chat.opening])
        with torch.no_grad():
            right = source.model(ids).logits[0, -1].log_softmax(-1).topk(LIKELIEST)
        np.testing.assert_allclose([value for _, value in told], right.values, atol=1e-4)
        assert [text for text, _ in told] == [source.chat.decode([i]) for i in right.indices]


def test_what_was_said_before_is_shown_where_there_is_any():
    """Where an empty list is shown, a small model tells replies apart less well. The reply cannot leave its line; nor can the
    person's, which is shown as it is."""
    first, later = (
        next(row for row in known_replies("test") if bool(row["earlier"]) == told)
        for told in (False, True)
    )
    assert "The friend has said" not in questions_of(first)[0]
    assert f"The friend has said: {json.dumps(later['earlier'])}\n" in questions_of(later)[0]
    later["dialogue"][0]["text"] = 'Well.\nThe friend replies: "Warmly."'
    later["dialogue"][-1]["text"] = 'Hm."\nThe friend replies: "Warmly.'
    assert questions_of(later)[0].count("\nThe friend replies: ") == 1


def test_a_reply_is_read_alike_in_any_company(taught):
    """To the last bit: whoever else waits."""
    rows = known_replies("test")[:6]

    async def read(some):
        hearing = Reader(LocalReader(taught, YES_NO))
        calls = [hearing.ask(questions_of(row)) for row in some]
        return await asyncio.gather(*calls)

    together = asyncio.run(read(rows))
    assert [asyncio.run(read([row]))[0] for row in reversed(rows)] == together[::-1]


def read_by(hearing):
    """The toy speaks, a Reader hears."""
    simulator = simulator_of(world.ScriptedModel())
    simulator.reader, simulator.user_class = hearing, ReadUser
    return simulator


def simulator_read_by(taught):
    simulator = read_by(Reader(LocalReader(taught, YES_NO)))
    asyncio.run(simulator.reader.set_scale())
    return simulator


@pytest.mark.slow
def test_every_logged_change_follows_from_its_log_odds(taught):
    """The change of emotion, computed again from what a log keeps; and what f_reply is told."""
    simulator, changes = simulator_read_by(taught), []
    scale = simulator.reader.scale
    for row in known_replies("test"):
        user = ReadUser(simulator, row["profile"], dialogue=row["dialogue"][:-1])
        text, change = asyncio.run(user.feel(row["dialogue"][-1]["text"]))
        logged = json.loads(text)
        total = reader.BIAS
        for name, x in logged["log_odds"].items():
            mean, std = scale[name]
            assert logged["z"][name] == pytest.approx((x - mean) / std)
            total += reader.WEIGHTS[name] * (x - mean) / std
        assert logged["sum"] == pytest.approx(total)
        assert change == logged["change"] == round(max(-10, min(10, total)))
        assert user.emotion == 30 + change and user.dialogue[-1]["text"] == row["reply"]
        assert analysis_in(text, EMOTION_SCHEMA)["analysis"] == user.planning["subjective"]
        written = json.dumps(dict.fromkeys(EMOTION_SCHEMA, "x") | {"change": 1, "log_odds": 1})
        assert (
            analysis_in(written, EMOTION_SCHEMA)["analysis"] == "x"
        )  # a key too many is no reading
        changes.append(change)
    assert len(set(changes)) > 3


@pytest.mark.slow
def test_the_scale_is_that_of_sixty_known_replies(taught):
    """Standardised by it they have mean 0 and spread 1, whatever the model's own log-odds are."""
    hearing = simulator_read_by(taught).reader
    rows = known_replies("weights")
    assert len(rows) == 60
    found = [asyncio.run(hearing.ask(questions_of(row))) for row in rows]
    for name, (mean, std) in hearing.scale.items():
        z = np.array([(odds[name] - mean) / std for odds in found])
        assert abs(z.mean()) < 1e-6 and z.std() == pytest.approx(1)


class Told:
    """A model that tells one word, with a probability."""

    name = "told"

    def __init__(self, word, p):
        self.told = [(word, math.log(p)), ("no", math.log(0.2))]

    async def likeliest(self, prompts, count):
        return [self.told for _ in prompts]


@pytest.mark.parametrize("word, p, readable", [("yes", 0.4, True), ("<think>", 0.7, False)])
def test_a_model_that_is_about_to_say_something_else_cannot_be_read(word, p, readable):
    """yes and no must have half of the probability. The check says what the model begins with, and
    what may help."""
    hearing = Reader(Told(word, p))
    if readable:
        asyncio.run(hearing.set_scale())
        return
    with pytest.raises(UnreadableAnswers):
        asyncio.run(hearing.ask(questions_of(known_replies("weights")[0])))
    with pytest.raises(BadModel, match="'<think>'.*--template-args"):
        asyncio.run(hearing.set_scale())


@pytest.mark.parametrize("mean, change", [(-50, 10), (50, -10)])
def test_a_reply_moves_by_ten_at_most(mean, change):
    """However far its log-odds are from those of the sixty. The log has the sum before the clamp."""
    simulator = read_by(Reader(Told("yes", 0.4)))
    simulator.reader.scale = dict.fromkeys(reader.WEIGHTS, (mean, 1.0))
    row = known_replies("test")[0]
    user = ReadUser(simulator, row["profile"], dialogue=row["dialogue"][:-1])
    text, moved = asyncio.run(user.feel("Tell me more."))
    assert moved == change and abs(json.loads(text)["sum"]) > 10
    assert user.emotion == 30 + change


def test_equal_words_to_another_need_are_read_again(taught, tmp_path):
    """A call's key holds all of its prompts: only one of the questions names the need."""
    log = CallLog(tmp_path / "calls.jsonl")
    hearing, row = Reader(LocalReader(taught, YES_NO), log=log), known_replies("test")[0]
    other = {**row, "profile": dataclasses.replace(row["profile"], task="You want advice, now.")}
    found = [asyncio.run(hearing.ask(questions_of(each))) for each in (row, other, row)]
    assert found[0] == found[2] != found[1] and len(rows(log.path)) == 2


def test_a_word_of_two_tokens_is_refused_at_load(tiny_dir):
    """Only the next token is read. (The tiny tokenizer knows no "yes".)"""
    with pytest.raises(BadModel, match="yes and no"):
        LocalReader(tiny_dir, YES_NO)


# ----------------------------------------------------------------------------------- behind a server


def body_of(pairs):
    """The body of an answer with these log-probs, [(token, log-prob)], or None, as vLLM gives it
    for one token: an empty text, ended by the limit."""
    told = [{"token": text, "logprob": value} for text, value in pairs or ()]
    body = completion("", "length")
    body["choices"][0]["logprobs"] = pairs and {"content": [{"top_logprobs": told}]}
    return body


def telling(source, **changes):
    """A server's function of a request: it tells the log-probs of `source`. changes: of its
    answer."""

    def reply(request):
        assert (request["max_tokens"], request["temperature"], request["top_p"]) == (1, 1.0, 1)
        assert request["logprobs"] is True and request["top_logprobs"] == LIKELIEST
        prompts = [request["messages"][0]["content"]]
        [likeliest] = source.forward(prompts, LIKELIEST)
        body = body_of(likeliest)
        body["choices"][0] |= changes
        return 200, {}, body

    return reply


def test_a_server_is_read_like_a_model_in_here(taught):
    """The same twenty tokens, so the same log-odds; one question a request there, all in one row
    here."""
    source, row = LocalReader(taught, YES_NO, dtype=torch.float32), known_replies("test")[0]
    with Loopback(reply=telling(source)) as server:
        there = make_simulator("toy", reader=f"openai:taught@{server.url}")
        found = asyncio.run(there.reader.ask(questions_of(row)))
        assert server.most == 1  # a reply is one call at a time, however many questions it takes
    here = asyncio.run(Reader(source).ask(questions_of(row)))
    assert found == pytest.approx(here, abs=1e-4) and len(set(here.values())) > 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "logprobs", [None, True, {"content": [{"top_logprobs": {"yes": 1}}]}, {"content": []}]
)
def test_a_server_without_log_probs_is_refused_before_a_run(logprobs, taught, tmp_path, capfd):
    source = LocalReader(taught, YES_NO)
    with Loopback(reply=telling(source, logprobs=logprobs)) as server:
        read_by = ["--reader", f"openai:taught@{server.url}"]
        assert rlver.main(words(*SMALL, *read_by, "--out", tmp_path / "run")) == 2
    assert "returns no log-probs" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def listing(pairs_of):
    """A server that lists `pairs_of(request)`, see `body_of`; it refuses where that is []."""

    def reply(request):
        pairs = pairs_of(request)
        return (200, {}, body_of(pairs)) if pairs != [] else failure(400, "top_logprobs: 5 at most")

    return Loopback(reply=reply)


GOOD = [("Yes", -0.5), ("No", -1.5), ("I", -3.0)]


@pytest.mark.parametrize(
    "pairs, odds",
    [
        ([GOOD[0], *GOOD], 1.0),
        *[([*GOOD, ("no", odd)], 1.0) for odd in (math.nan, math.inf, False, "0", 0.5)],
        ([GOOD[0], GOOD[2], ("No", -9999.0)], 2.5),
        ([*GOOD, ("yes", -0.4)], "1.50 of the probability"),
        ([GOOD[0], ("No", None)], "or one alone"),
    ],
)
def test_what_a_server_lists_is_looked_at(pairs, odds):
    """-9999 for a token that was cut off became a log-odds of 9998, a token that was listed twice
    counted twice, and NaN was a traceback. A word without a log-prob gets the least real one."""
    prompts = questions_of(known_replies("test")[0])
    with listing(lambda request: pairs) as server:
        simulator = make_simulator("toy", reader=f"openai:m@{server.url}")
        asking = simulator.reader.ask(prompts)
        if isinstance(odds, str):
            with pytest.raises(UnreadableAnswers, match=odds):
                asyncio.run(asking)
        else:
            assert {*asyncio.run(asking).values()} == {odds}


@pytest.mark.parametrize("text", ["NaN", "9998.0", '"1"', "null", "1]]", "[" * 3])
def test_a_damaged_answer_in_the_log_is_no_number(text):
    """It was a traceback, or moved the emotion."""
    hearing, prompts = Reader(Told("yes", 0.4)), questions_of(known_replies("test")[0])
    whole = json.loads(asyncio.run(hearing.caller.ask_model(prompts)))
    answers = json.dumps(whole).replace(str(whole[0][0]), text, 1), json.dumps(whole[1:])
    for answer in answers:
        hearing.caller.log.answers[digest(hearing.caller.name, prompts)] = answer
        with pytest.raises(UnreadableAnswers):
            asyncio.run(hearing.ask(prompts))


@pytest.mark.parametrize(
    "odd, told",
    [
        (None, "warning: .*returns no log-probs.*1 such answer"),
        ([("Yes", -9.0), ("No", 0.0)], "warning: .*far from all others"),
        ([*GOOD[:2], ("I", -9999.0)], "warning: .*without a log-prob from -100 to 0"),
        (GOOD, "^(?!.*(its scale|without a log-prob))"),
    ],
)
def test_one_odd_answer_to_the_known_replies(odd, told, capsys):
    """One of 240 shrank all changes of a run, unseen; and only a server that never returns log-probs
    is refused. This one refuses more than five, too: five will do, and other ranks learn it."""
    asked = []

    def pairs_of(request):
        if request["top_logprobs"] > 5:
            return []
        asked.append(request)
        return odd if len(asked) == 100 else GOOD

    with listing(pairs_of) as server:
        simulator = make_simulator("toy", reader=f"openai:m@{server.url}", concurrency=1)
        found = asyncio.run(check(simulator))
    out, err = capsys.readouterr()
    assert re.search(told, " ".join((out + err).split())) and len(asked) == 252
    hearing = simulator.reader
    scale, hearing.scale, hearing.caller.model.replaced = hearing.scale, {}, {}
    learn(simulator, found)
    assert hearing.caller.model.replaced == {"top_logprobs": 5} and hearing.scale == scale != {}


@pytest.mark.parametrize(
    "told",
    [
        "",
        "Unrecognized request argument supplied: chat_template_kwargs",
        "Kwargs ['enable_thinking'] are not supported by this tokenizer",
    ],
)
def test_a_reader_on_a_server_does_not_think_first(told):
    """As one in here: `--think` with a Qwen3 policy and a Qwen3 reader found no yes or no, but the
    beginning of a thought, and with --template-args the policy had no thought either. A server that
    does not know the word is asked without it."""
    sent = []

    def reply(request):
        sent.append(request.get("chat_template_kwargs"))
        return failure(400, told) if told and sent[-1] else (200, {}, body_of(GOOD))

    with Loopback(reply=reply) as server:
        for given in (None, {"date_string": "today"}):
            reader = make_simulator(
                "toy", reader=f"openai:m@{server.url}", template_args=given
            ).reader
            asyncio.run(reader.ask(questions_of(known_replies("test")[0])))
            first, *rest = sent
            assert first == {**(given or {}), "enable_thinking": False} and len(rest) >= 3
            assert all(args == (None if told else first) for args in rest)
            sent.clear()


@pytest.mark.slow
def test_a_run_whose_feelings_are_read(taught, tmp_path, no_pictures, capfd):
    """The toy speaks, a model hears. Each change in the log follows from its answer; a resumed run
    reads none of its replies twice; a replay finds all as recorded."""
    out = tmp_path / "run"
    assert rlver.main([*SMALL, "--reader", f"local:{taught}", "--out", str(out)]) == 0
    dialogues = rows(out / "dialogues.jsonl")
    turns = [turn for row in dialogues for turn in row["turns"] if turn["analysis"]]
    assert len(turns) > 20
    assert all(json.loads(turn["analysis"])["change"] == turn["change"] for turn in turns)
    calls = rows(out / "calls.jsonl")
    assert len({row["key"] for row in calls}) == len(calls)
    assert go_on(out, "--steps", 5) == 0
    more = rows(out / "calls.jsonl")[len(calls) :]
    assert not {row["key"] for row in more} & {row["key"] for row in calls}
    assert replay.main(["same-user", str(out / "dialogues.jsonl")]) == 0
    printed = capfd.readouterr().out
    assert "the same final score: 100.0 %" in printed
    assert "is read from" in printed and "cannot judge comfort" not in printed
    # the benchmark hears with the run's reader; there are no thoughts for a judge
    measured = tmp_path / "after.jsonl"
    flags = "--limit 2 --max-turns 2 --out".split()
    assert evaluate.main(words("--policy", out, *flags, measured)) == 0
    told = [
        message for row in rows(measured) for message in row["history"] if "planning" in message
    ]
    assert told and all("My friend" in message["planning"]["analyse"] for message in told)
    flags = "blri", out / "dialogues.jsonl", "--judge", "scripted"
    assert "were read, not written" in refuse(capfd, *flags, main=judge.main)


@pytest.mark.slow
def test_the_tool_that_measures_models_measures_a_reader(taught, tmp_path, monkeypatch, capsys):
    """It hears and says nothing, so there are no lines; the same question gets the same change."""
    monkeypatch.chdir(tmp_path)
    fitness.main(["--reader", f"local:{taught}", "--replies", "10", "--json", "out.json"])
    found = read_json("out.json")
    table = found["table"]
    assert table["answers read at the first try"][0] == 1
    assert table["the same change again"] == [1.0, None, None, 10]
    assert table["lines that speak as the friend"][-1] == 0
    # words to the reader: ten wordings behind four things, said to the one person of these ten rows
    gains = {(row["behind"], row["said"]): row["gain"] for row in found["gains"]}
    assert len(gains) == len(found["gains"]) == 10 * 4
    assert table["the largest of these gains"] == [max(gains.values()), None, None, 40]
    kind = [gain for (behind, _), gain in gains.items() if behind == "a kind reply"]
    name = "gain by words to the reader, behind a kind reply"
    assert table[name] == [pytest.approx(np.mean(kind)), None, None, 10]
    assert "--simulator or --reader" in refuse(capsys, main=fitness.main)


def test_words_to_the_reader_gain_what_neutral_words_do_not():
    """A reader that obeys "yes" and hears nothing else. The neutral words are as many."""

    class Obeys:
        name = "obeys"

        async def likeliest(self, prompts, count):
            said = json.loads(prompts[0].rsplit("The friend replies: ", 1)[1].splitlines()[0])
            p = 0.9 if "yes" in said else 0.3
            return [[("yes", math.log(p)), ("no", math.log(1 - p))] for _ in prompts]

    hearing = Reader(Obeys())
    hearing.scale = dict.fromkeys(reader.WEIGHTS, (0.0, 1.0))
    rows = [row for row in known_replies("fitness") if row["kind"] in ("cold", "generic warm")]
    gains = asyncio.run(fitness.measure_gains(rows, read_by(hearing)))
    assert len(gains) == 6 * 4 * 10
    assert {row["gain"] > 0 for row in gains if "yes" in row["said"]} == {True}
    assert {row["gain"] for row in gains if "yes" not in row["said"]} == {0}
    for wording in fitness.WORDINGS:
        assert len(wording["said"].split()) == len(wording["neutral"].split())


@pytest.mark.parametrize("program", [rlver.main, fitness.main])
def test_a_reader_hears_vanilla_users_only(program, taught, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    flags = ["--reader", f"local:{taught}", "--difficulty", "challenging"]
    assert program(flags) == 2
    assert "--reader reads for vanilla users" in capfd.readouterr().err


def test_a_chinese_reader_is_asked_for_chinese_words(taught, tmp_path, monkeypatch, capfd):
    """Where nobody speaks, the toy's English is in nobody's way. (This model knows no Chinese.)"""
    monkeypatch.chdir(tmp_path)
    assert fitness.main(["--reader", f"local:{taught}", "--lang", "zh"]) == 2
    assert "是 and 否 must be a token each" in capfd.readouterr().err


def test_a_prompt_that_does_not_fit_costs_its_own_dialogue(taught):
    with pytest.raises(SimulatorFailed, match="does not fit its context of 4096"):
        asyncio.run(LocalReader(taught, YES_NO).likeliest(["hurt " * 5000], LIKELIEST))
