"""tools/fitness.py: is a language model fit to play the user? Models of every kind stand on a
loopback server, and each gets the right words."""

from players.reader import known_replies
from support import answers
from support.files import read_json

import json
import random
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from answering import coded, feeling, saying, tagged
from server import Loopback, completion, failure
from tools import fitness

ROWS = [*known_replies("fitness"), *known_replies("test")]
KINDS = {row["reply"]: row["kind"] for row in ROWS}


def reply_in(prompt):
    """The friend's last reply in a prompt."""
    return json.loads(tagged(prompt, "dialogue"))[-1]["text"]


def hears(prompt):
    """The change of a person who knows the ten kinds; what the check says is kind or cruel."""
    kind = KINDS.get(reply_in(prompt), "cold")
    return 6 if kind in fitness.LIFTING else -3 - len(kind) % 3


def guesses(prompt):
    """Of ten replies three are heard as noise, always the same."""
    rng = random.Random(reply_in(prompt))
    return rng.randint(-10, 10) if rng.random() < 0.3 else hears(prompt)


MODELS = {
    "good": hears,
    "always 4": lambda prompt: 4,
    "mostly 4": lambda prompt: 4 if len(reply_in(prompt)) % 10 else hears(prompt),
    "upside down": lambda prompt: -hears(prompt),
    "random": lambda prompt: random.Random(f"seed 1 {reply_in(prompt)}").randint(-10, 10),
    "unsure": guesses,
}


def answering(change):
    """What a model answers to a prompt: `change(prompt)`, or a line, and a goodbye at Emotion-F."""

    def answer(prompt):
        if "<emotion_level>" not in prompt:
            return feeling(change(prompt))
        leaves = "<emotion_level>Emotion-F" in prompt
        return saying("I'm glad to hear that. Goodbye." if leaves else "And?", leaves)

    return answer


@pytest.fixture
def examine(tmp_path, monkeypatch, capsys):
    """A function that asks fitness about a model on a server, in the test's own directory. Returns
    (exit code, what is printed, what --json has)."""
    monkeypatch.chdir(tmp_path)

    def examined(server):
        name = f"openai:scripted@{server.url}"
        code = fitness.main(["--simulator", name, "--json", "out.json"])
        return code, " ".join(" ".join(capsys.readouterr()).split()), read_json("out.json")

    return examined


@pytest.mark.parametrize(
    "name, verdict",
    [
        ("good", "verdict: fit"),
        ("always 4", "verdict: unfit: it gives one number whatever is said; what should lift"),
        ("mostly 4", "verdict: unfit: it gives one number"),
        ("random", "verdict: unfit: what should lift lifts too little"),
        ("upside down", "verdict: unfit: what should lift lifts too little"),
        ("unsure", "verdict: weak: what should lift lifts too little"),
    ],
)
def test_each_model_gets_its_verdict(name, verdict, examine):
    """And is asked 100 questions: 60 changes, and for 20 replies the change again and a line."""
    with Loopback(answer=answering(MODELS[name])) as server:
        code, said, result = examine(server)
    assert verdict in said and code == ("unfit" in verdict)
    assert "80 calls" in said and server.calls == 100
    user = result["table"]
    assert user["answers read at the first try"] == [1, None, None, 100]
    assert user["questions that failed"] == [0, None, None, 100]
    assert user["leaves at Emotion-F"] == [1, None, None, 4]
    assert user["leaves at Emotion-C"] == [0, None, None, 4]
    assert user["lines that speak as the friend"][0] == 0.2
    assert user["the same change again"] == [1, None, None, 20]
    if name == "always 4":
        assert user["changes that are +4, the commonest"] == [1, None, None, 60]
        assert user["AUC, all that lift over all that do not"] == [0.5, 0.5, 0.5, 6]


def test_the_auc_is_over_pairs_of_the_same_person():
    """By brute force, with ties and missing answers. Persons who start from other levels may not be
    mixed: there one's cold reply beats another's warm one."""
    rng = np.random.default_rng(0)
    found = []
    for person in range(7):
        for kind in fitness.LIFTING + fitness.NOT_LIFTING:
            found.append({"user": person, "kind": kind, "change": rng.integers(-3, 4)})
            found[-1]["change"] += 5 * (person % 2)
    del found[3]["change"]
    wins = pairs = 0
    for a in found:
        for b in found:
            good = a["kind"] in fitness.LIFTING and b["kind"] in fitness.NOT_LIFTING
            if good and a["user"] == b["user"] and "change" in a and "change" in b:
                pairs += 1
                wins += (a["change"] > b["change"]) + 0.5 * (a["change"] == b["change"])
    value, low, high, people = fitness.auc_between(found, fitness.LIFTING, fitness.NOT_LIFTING)
    assert value == pytest.approx(wins / pairs) and low < value < high and people == 7
    assert fitness.auc_between(found[8:16], ["echo"], ["cold"])[1:] == [None, None, 1]


@pytest.mark.parametrize(
    "readable, commonest, low, grade",
    [
        (0.95, 0.5, 0.75, "fit"),
        (0.94, 0.5, 0.75, "weak"),
        (0.95, 0.51, 0.75, "weak"),
        (0.95, 0.5, 0.74, "weak"),
        (0.8, 0.8, 0.51, "weak"),
        (0.79, 0.8, 0.9, "unfit"),
        (1.0, 0.81, 0.9, "unfit"),
        (1.0, 0.5, 0.5, "unfit"),  # the interval holds chance
        (1.0, 0.5, 0.2, "unfit"),  # or all of it is below
        (1.0, 0.5, None, "weak"),  # fewer than five people have no interval
    ],
)
def test_the_bounds_of_the_verdict(readable, commonest, low, grade):
    assert fitness.verdict(readable, commonest, low)[0] == grade


def test_what_was_stopped_goes_on(examine):
    """Only the 20 questions that are put past the log are asked again, and the table is the same."""
    tables = []
    with Loopback(answer=answering(hears)) as server:
        for asked in (100, 150):
            code, _, result = examine(server)
            assert code == 0 and server.calls == asked
            result["table"].pop("seconds a call")
            tables.append(result)
            (log,) = Path("results").glob("fitness-*.jsonl")
            whole = log.read_text().splitlines(keepends=True)
            assert len(whole) == 80
            log.write_text("".join(whole[:50]) + whole[50][:9])
    assert tables[0] == tables[1]


def test_what_is_refused_or_unreadable_is_not_read(examine):
    """A filter that takes the cruel replies away would leave a model that hears kind ones well. What
    can be read at the second try was not read at the first one."""
    complaint = answers.load_prompt("complaint")

    def reply(request):
        prompt = request["messages"][0]["content"]
        kind = "check" if reply_in(prompt) not in KINDS else KINDS[reply_in(prompt)]
        if kind == "cold":
            return failure(400, "no such words")
        if kind == "echo" and complaint not in prompt:
            return 200, {}, completion("Hm.")
        return 200, {}, completion(coded(prompt, answering(hears)(prompt)))

    with Loopback(reply=reply) as server:
        code, said, result = examine(server)
    assert code == 0 and result["verdict"] == "weak" and "it is asked for again" in said
    table, asked = result["table"], Counter()
    for row in result["found"]:
        asked[row["kind"]] += len(row["outcomes"])
    asked, echoes = asked.total(), asked["echo"]
    assert table["questions that failed"] == [6 / asked, None, None, asked]
    assert table["answers read at the first try"][0] == 1 - echoes / (asked - 6)
    assert table["change, cold"] == [None, None, None, 0] and table["change, echo"][3] == 6


def test_a_model_that_keeps_the_form_at_the_check_only_is_unfit(examine):
    """The check is answered by the server's script here, and nothing else can be read."""
    with Loopback(answer=lambda prompt: "I feel better now.") as server:
        code, said, _ = examine(server)
    assert code == 1 and "verdict: unfit: too few answers can be read" in said
    assert "answers read at the first try 0.00" in said


def test_lines_out_of_their_part_are_counted():
    row = {"line": "My sister forgot my birthday."}
    for line in ("Your birthday matters.", "I'm sorry to hear that.", "I am here for you."):
        assert fitness.speaks_as_friend(line, row)
    for line in ("She forgot my birthday, again.", "What would your brother say?", "Your turn."):
        assert not fitness.speaks_as_friend(line, row)
    told = ["You did all that you could do."]
    assert fitness.repeats("You did all that you could, you say.", told)
    assert not fitness.repeats("I did all that I could.", told) and not fitness.repeats("Hm.", told)


def test_a_scripted_user_hears_the_toys_people(tmp_path, capsys):
    rows = known_replies("test")
    assert len(rows) == 120 and {row["profile"].id[:3] for row in rows} == {"toy"}
    assert len(ROWS) == 180  # never those that set weights
    assert fitness.main(["--simulator", "toy", "--replies", "20"]) == 1  # it knows the toy's words
    assert "five users must have answered" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "content, finish_reason, told",
    [
        ('{"content": "and so on and so on', "length", "cut by the limit of tokens"),
        ("I feel better now.", "stop", "not one JSON object"),
        ("", "stop", "empty"),
    ],
)
def test_a_model_that_fails_the_check_is_unfit(content, finish_reason, told, examine):
    """The check's reason is the verdict's."""
    reply = completion(content, finish_reason)
    with Loopback(reply=lambda request: (200, {}, reply)) as server:
        code, said, _ = examine(server)
    assert code == 1 and "unfit: scripted refuses the prompts, or cannot keep" in said
    assert told in said


def test_who_does_not_answer_gets_no_verdict(examine, monkeypatch):
    """A wrong key says nothing about the model, nor does a server that is silent: the exit code is
    that of a run."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 0.5)
    for reply, code, told in (
        (lambda request: failure(401, "no such key"), 2, "no such key"),
        (lambda request: time.sleep(2), 75, "no answer within 0.5 s"),
    ):
        with Loopback(reply=reply) as server:
            ended, said, _ = examine(server)
        assert ended == code and "verdict" not in said and told in said


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["cold", "cold, echo, off topic, dismissive"])
def test_a_slow_model_is_told_from_one_that_cannot_be_read(slow, examine, monkeypatch):
    """Calls that fail say nothing about its answers. If they are more than a fifth, there is a table
    and no verdict."""
    monkeypatch.setattr("players.server.CALL_TIMEOUT", 1)

    def change(prompt):
        if KINDS.get(reply_in(prompt), "none") in slow:
            time.sleep(3)
        return hears(prompt)

    with Loopback(answer=answering(change)) as server:
        code, said, result = examine(server)
    assert code == (0 if slow == "cold" else 75) and ("verdict: fit" in said) == (code == 0)
    assert "answers read at the first try 1.00" in said and "questions that failed 0." in said
    if code == 0:
        assert result["table"]["change, cold"] == [None, None, None, 0]
