"""The tools that ask a judge, and those that ask people or users again: what is asked, what is
counted, and what is shown. What all share that ask a judge is in test_judge.py."""

from support.files import read_json, write_json
from support.results import recorded_dialogues

import asyncio
import csv
import json
import random
import re
from pathlib import Path

import pytest

import judging
import simulator
from judging import Model, at, call, run, sage, toy_result, write
from tools import coordinate
from tools.dialogues import load_dialogues
from tools.hearing import Reply, hear
from tools.scores import MACHINERY_ONLY
from toy.words import NEEDS


def users(model):
    return "--simulator", f"openai:scripted@{model.url}"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


# -------------------------------------------------------------------- capabilities, needs, validity


def test_two_files_are_paired(good, bad, capsys):
    """And what a script judged says so."""
    code, result = run("capabilities", good, bad)
    paired = result["capabilities"]["paired"]
    assert code == 0 and paired["SA"][0] == -4 and paired["SA"][3] == 8
    assert MACHINERY_ONLY in capsys.readouterr().out


def test_needs_are_asked_per_line_of_the_user(tmp_path):
    scores = {"attitude": 8, "thoughts": 7, "needs": 6, "overall": 7}
    judge = Model(lambda prompt: {"scores": scores})
    code, result = run("needs", sage(tmp_path), *at(judge))
    (table,) = result["needs"]["tables"].values()
    assert code == 0 and judge.calls == 6 and table["needs"]["mean"] == 6
    assert table["thoughts"]["mean"] == 7 and table["overall"]["n"] == 2
    assert all("倾听" in p and "心里一暖" in p for p in judge.prompts)


def test_validity_and_what_the_record_shows(good, bad, tmp_path):
    """BLRI is asked with the user's record alone: no reply stands in it."""
    judge = Model()
    code, result = run("validity", good, bad, *at(judge))
    assert code == 0 and result["blri"]["tables"][good]["overall"]["mean"] > 90
    assert set(result["correlations"]) == {
        f"{q}, {p}" for q in ("blri", "utterance") for p in (good, bad)
    }
    reply = load_dialogues(good)[0].turns[0]["reply"]
    shown = {"<record>" in p for p in judge.prompts if reply in p}
    assert shown == {False}


def test_three_files_are_correlated_over_files_too(good, bad, tmp_path):
    """The mean score of each against its mean final emotion."""
    rng = random.Random(3)
    mixed = [toy_result(i, [need, "cheer"] * 3, rng) for i, need in enumerate(NEEDS)]
    files = good, bad, write(tmp_path / "mixed.jsonl", mixed)
    rows = run("validity", *files)[1]["correlations"]
    assert rows["blri, over files"][0] > 0.9 and rows["blri, over files"][3] == 3
    assert len(rows) == 2 * 4


def test_other_words_are_put_to_the_same_user(good, tmp_path):
    """Each after the same past, in the same emotion: what differs is the reply alone."""

    judge = Model(lambda prompt: {"text": "my words"} if "<reply>" in prompt else None)
    user = Model(lambda prompt: {"change": 4 - 9 * prompt.count("my words")})
    flags = "--paraphrase", "--limit", 5, *users(user), *at(judge)
    code, result = run("validity", sage(tmp_path), *flags)
    assert code == 0 and user.calls == 10 and judge.calls == 4 + 5
    assert result["paraphrase"] == {"moved": [9, 9, 9, 5], "same sign": [0, 0, 0, 5]}
    moved = run("validity", good, "--paraphrase", "--limit", 16)[1]["paraphrase"]
    assert moved["moved"][3] == 16 and moved["moved"][0] < 4  # the scripted judge keeps the kind


# --------------------------------------------------------------------------- strategies, coordinate


def test_strategies_by_the_grammar(bad, capsys):
    """Exact, and asked of nobody. In the table the codes have names."""
    told = run("strategies", bad)[1]["files"][bad]
    assert re.search(r"D-1 comfort +3.00 +-6.00 +24", capsys.readouterr().out)
    assert told["strategies"]["D-1"].items() >= {"uses": 3, "gain": -6, "n": 24}.items()


def test_strategies_by_a_server(tmp_path):
    """SAGE's own files, in which the emotion stands at the next line; the last reply has none.
    Half of the answers cannot be read: their replies have no tags, and are counted."""
    judge = Model(lambda prompt: "no" if "在听10" in prompt else {"strategies": ["F-3"]})
    flags = at(judge, "--lang", "zh", "--retries", 0, "--repeats", 3)
    code, result = run("strategies", sage(tmp_path), *flags)
    told = next(iter(result["files"].values()))
    assert code == 0 and told["missing"] == 4 and told["ssrr"] == 1
    # two of four replies a dialogue could be read, and all of those use it
    assert told["strategies"]["F-3"].items() >= {"uses": 4, "gain": 5, "n": 3}.items()
    assert judge.calls == 8 and all("此前的对话" in p for p in judge.prompts)


def test_a_log_has_many_dialogues_of_one_profile(good, tmp_path):
    """Dialogues of a group and of every step are units of their own; curves go by step."""
    rows = []
    for number, row in enumerate(json.loads(line) for line in open(good, encoding="utf-8")):
        [d] = recorded_dialogues(write(tmp_path / "one.jsonl", [row]))
        keep = {k: d[k] for k in ("profile_id", "first_line", "turns", "ended", "reward")}
        rows += [{**keep, "step": step, "split": "train", "group": number} for step in (1, 2)]
    log = write(tmp_path / "dialogues.jsonl", rows)
    write_json("config.json", {"algo": "grpo", "simulator": "toy", "profiles": None})
    assert run("capabilities", log)[1]["capabilities"]["tables"][log]["ED"]["n"] == 16
    steps = run("strategies", log)[1]["files"][log]["steps"]
    assert list(steps) == ["1", "2"] and steps["1"] == steps["2"]


def test_reasons_are_of_five_dialogues_of_a_kind(tmp_path):
    """Sixteen users end content, eight with either kind of need: five of each are looked at."""
    rng, needs = random.Random(4), list(NEEDS) * 2
    rows = [toy_result(i, [need] * 8, rng) for i, need in enumerate(needs)]
    slots = [case.slots for case in coordinate.reasons_cases(write(tmp_path / "many.jsonl", rows))]
    assert [s["outcome"] for s in slots] == ["success"] * 10
    assert [s["kind"] for s in slots].count("rational") == 5


def test_coordinates_are_of_one_call(good, bad):
    """Both files in one prompt; an answer outside of the square is no point at (0, 0)."""
    said = []

    def answer(prompt):
        if "<reply>" in prompt:
            return {"strategies": ["D-1", "F-4"]}
        if "<models>" not in prompt:
            return None
        said.append(prompt)
        x = 107 if len(said) == 1 else 50
        return {"places": {"M1": {"x": x, "y": -25}, "M2": {"x": 0, "y": 100}}}

    code, result = run("coordinate", good, bad, *at(Model(answer)))
    assert code == 0 and len(said) == 4 and all("M1\n" in p and "M2\n" in p for p in said)
    assert result["placed"][good][:4] == [0.5, 0, -0.25, 0] and result["placed"][bad][2] == 1
    assert result["placed"][bad][4:] == [0, 0]  # every reply the same: D-1 and F-4
    told = run("coordinate", good, bad)[1]["placed"]  # by the toy's grammar
    assert told[good][5] > 0 == told[bad][5] and told[good][4] == 0 < told[bad][4]


# --------------------------------------------------------------------------------------- acceptance


def test_acceptance_counted(good, bad, tmp_path, capsys):
    """The share of scored replies that lift the emotion: of SAGE's two of three, the fourth has no
    emotion."""
    assert run("acceptance", sage(tmp_path), "--counted")[1]["positive"] == pytest.approx(200 / 3)
    counted = run("acceptance", good, "--counted")[1]
    assert (counted["positive"], counted["replies"]) == (100, 64)
    # that the user is a script is said beside the number, as everywhere
    assert "Made by rule: the user toy is a script." in capsys.readouterr().out
    assert run("acceptance", bad, "--counted")[1]["positive"] == 0


def test_the_same_replies_to_two_users(good, bad, capsys):
    """What is said is in the file, what they feel is their own: these accept no sentence a second
    time, though it was recorded as a lift. And nobody accepts cheer."""
    code, result = run("acceptance", good, "--difficulty", "vanilla", "challenging")
    accepted = result["accepted"]
    assert code == 0 and result["positive"] == 100 and accepted["all"][2] == 64
    assert 90 < accepted["all"][1] <= accepted["all"][0] < 100
    assert accepted["Deep Empathy"] == [100, 100, 8] and "Praise" in capsys.readouterr().out
    twice = run("acceptance", bad, "--difficulty", "challenging", "vanilla", "--limit", 12)[1]
    assert twice["accepted"] == {"all": [0, 0, 12]} and twice["positive"] == 0


def test_a_user_hears_one_reply_in_the_recorded_emotion(good):
    """After the recorded past and nothing else: a user who went on with what it felt itself would
    judge another dialogue from the second reply on."""
    asked = []

    class Deaf:
        purposes = {"eq": ""}

        prompts = {"emotion": ""}
        goal = simulator.GOAL["vanilla"]
        emotion_schema = simulator.EMOTION_SCHEMAS["vanilla"]

        async def ask(self, template, values, schema, dialogue):
            asked.append((values["emotion"], json.loads(values["dialogue"])))
            return "", {**dict.fromkeys(schema, ""), "change": -10}

    d = load_dialogues(good)[0]
    changes = [
        asyncio.run(hear(simulator.User(Deaf(), d.profile), Reply(d, i, d.turns[i]["reply"])))
        for i in range(3)
    ]
    assert changes == [-10] * 3 and [emotion for emotion, _ in asked] == [40, 48, 56]
    for i, (_, said) in enumerate(asked):
        assert [m["text"] for m in said[1::2]] == [t["reply"] for t in d.turns[: i + 1]]
        assert [m["text"] for m in said[::2]] == [d.first_line] + [t["user"] for t in d.turns[:i]]


def test_what_nobody_felt_is_counted_and_where_all_failed_it_is_said(tmp_path, capfd):
    """A reply that a user could not be asked about is in no share. And a recorded turn without an
    emotion is no emotion to go on from."""
    path = sage(tmp_path, count=1, emotions=(45, None, 55))
    said = iter([{"change": 4}] + ["nonsense"] * 9)
    flags = *users(Model(lambda prompt: next(said))), "--retries", 1, "--difficulty"
    code, result = run("acceptance", path, *flags, "vanilla")
    assert code == 0 and result["accepted"]["all"] == [100, 1] and result["missing"] == 1
    assert call("acceptance", path, *flags, "challenging") == 2
    assert "could be read" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["acceptance", "FILE", "--difficulty", "vanilla"],  # whose model?
        ["acceptance", "FILE", "FILE2", "--difficulty", "vanilla", "--simulator", "toy"],
        ["acceptance", "FILE", "--counted", "--difficulty", "vanilla", "--simulator", "toy"],
        ["capabilities", "FILE", "--judge", "local:x", "--paraphrase"],  # a flag of another tool
        ["validity", "FILE", "FILE2", "--judge", "local:x"],
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, tmp_path, capfd):
    files = {"FILE": sage(tmp_path), "FILE2": sage(tmp_path, folder="two_based_simulator")}
    assert call(*[files.get(flag, flag) for flag in flags]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_groups_of_strategies_by_a_judge(tmp_path):
    """Where no grammar tells them, a judge does: a group counts where it is more than half of what
    a reply does; a reply that could not be tagged is in no group."""

    def tag(prompt):
        if "在听12" in prompt:
            return "no"
        more = ["E-2"] if '<reply>\n"我在听00' in prompt else []
        return {"strategies": ["E-1", "F-1", *more]}

    user, judge = Model(lambda prompt: {"change": 4}), Model(tag)
    flags = "--difficulty", "vanilla", "--retries", 0, *users(user), *at(judge)
    code, result = run("acceptance", sage(tmp_path), *flags)
    assert code == 0 and judge.calls == 6  # of eight replies two got no emotion
    assert run("acceptance", sage(tmp_path), *flags) == (code, result)
    assert user.calls == 6  # paid once
    assert result["accepted"] == {"all": [100, 6], "Praise": [100, 1]}


# -------------------------------------------------------------------------------------------- blind


def rows_of(sheet):
    return list(csv.reader(open(sheet, encoding="utf-8-sig", newline="")))


def save(sheet, rows):
    with open(sheet, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)


def test_blind_sheets_hide_and_tell(good, bad):
    """Sides are drawn, names are in the key alone; two raters who see through it."""
    assert run("blind", good, bad, "--out", "sheet.csv")[0] == 0
    text = open("sheet.csv", encoding="utf-8-sig").read()
    assert not any(word in text for word in ("good.jsonl", "bad.jsonl", "toy-heldout", "secret"))
    key = read_json("sheet.csv.key.json")
    assert {p["left"] for p in key["pairs"].values()} == {good, bad}
    rows = rows_of("sheet.csv")
    for row in rows[1:]:
        pair = key["pairs"][row[0]]
        (left,) = [d for d in load_dialogues(pair["left"]) if d.profile_id == pair["id"]]
        assert row[2].count(left.turns[0]["reply"]) and row[2].startswith("USER: My ")
    for rater in range(2):
        for row in rows[1:]:
            wins = "L" if key["pairs"][row[0]]["left"] == good else "R"
            row[4:] = [wins, "=", "" if rater else wins.lower()]
        save(f"rater{rater}.csv", rows)
    code, result = run("blind", "--read", "rater0.csv", "rater1.csv")
    first, draws, third = result["blind"].values()
    assert code == 0 and first[0] == 1 and first[3] == 8 and first[4] is None  # nothing differs
    assert first[5] == pytest.approx(3 * 2 / 256, abs=0.01)  # all eight pairs, and Holm's 3
    assert draws[0] == 0.5 and draws[5] == 1 and third[0] == 1
    rows[3][4] = "good"
    save("odd.csv", rows)
    Path("excel.csv").write_bytes("pair;é".encode("cp1252"))
    assert call("blind", good, bad, "--out", "sheet.csv") == 2  # it may be filled in
    assert call("blind", bad, good, "--out", "other.csv") == 0
    for sheets in ("odd.csv", "rater1.csv other.csv", "excel.csv"):
        assert call("blind", "--read", *sheets.split()) == 2


def test_one_rater_is_one_however_often_the_sheet_is_named(good, bad):
    """Else two of them agree. And what a spreadsheet adds at the end is no row."""
    assert run("blind", good, bad, "--out", "sheet.csv", "--limit", 6)[0] == 0
    rows = rows_of("sheet.csv")
    for k, row in enumerate(rows[1:]):
        row[4:] = ["LR"[k % 2]] * 3
    save("sheet.csv", [*rows, [""] * 7])
    once = run("blind", "--read", "sheet.csv")[1]
    assert run("blind", "--read", "sheet.csv", "sheet.csv")[1] == once
    assert all(row[3] == 6 and row[4] is None for row in once["blind"].values())
