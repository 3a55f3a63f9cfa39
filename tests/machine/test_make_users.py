"""tools/profiles.py: users that one makes oneself. The writer stands behind a real server on
loopback, with every fault that a language model has."""

from support import llm
from support.answers import unmarked_sections
from support.results import intention_of
from support.toy_words import NEEDS

import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

import simulator
from marks import signed
from server import Loopback, answer_check, completion
from simulator import (
    PROMPTS,
    Profile,
    Simulator,
    load_profiles,
    load_prompt,
    refuse_foreign,
)
from tools import profiles
from tools.checking_profiles import count_files
from tools.profiles import draw_drafts, seed_lines
from tools.scripted import ScriptedWriter
from tools.writing import (
    PLACEHOLDERS,
    PROFILE_FIELDS,
    SECTIONS,
    write_users,
)

ROOT = Path(__file__).resolve().parent.parent.parent
RULE = PROMPTS / "en" / "writer" / "by_rule.txt"
NEED = {
    lang: (PROMPTS / lang / "writer" / "needs.txt").read_text(encoding="utf-8").splitlines()
    for lang in ("en", "zh")
}
TASKS = dict(zip(NEEDS, NEED["en"]))
GROUPS = {"negative": list("abcdef"), "passive": list("ghijk")}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The first wait of a retry is nothing in here."""
    monkeypatch.setattr(llm, "backoff", lambda *_: 0.0)


def make(out, *flags):
    return profiles.main(["--out", str(out), *map(str, flags)])


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def slots(count=20, split=0.0, seed=0, topics=30):
    return draw_drafts(
        count, [f"t{i}" for i in range(topics)], ["x", "y", "z"], GROUPS, TASKS, seed, split
    )


# ------------------------------------------------------------------------------ what chance decides


@pytest.mark.parametrize("count, split", [(8, 0.0), (500, 0.0), (502, 0.2), (90, 0.5), (12, 0.3)])
def test_quotas_are_exact(count, split):
    """Half rational, half emotional, the four of each equal to within one, in training and in test
    alike. (Drawn one by one, RLVER's 500 came out as 57 to 66 of each.)"""
    drawn = slots(count, split)
    assert len(drawn) == count == len({slot["id"] for slot in drawn})
    for part in {slot["split"] for slot in drawn}:
        needs = Counter(slot["need"] for slot in drawn if slot["split"] == part)
        halves = [[needs[name] for name in list(NEEDS)[i : i + 4]] for i in (0, 4)]
        assert sum(halves[0]) == sum(halves[1]) and all(max(h) - min(h) <= 1 for h in halves)
    tests = [slot for slot in drawn if slot["split"] == "test"]
    assert abs(len(tests) - split * count) <= 1
    assert not {s["topic"] for s in tests} & {s["topic"] for s in drawn if s["split"] == "train"}
    assert all(
        slot["task"] == NEEDS[slot["need"]].theme
        and len(set(slot["cha_group"])) == 3
        and set(slot["cha_group"]) <= set(GROUPS[slot["main_cha"]])
        for slot in drawn
    )


def test_the_seed_alone_decides():
    assert slots(seed=3) == slots(seed=3) != slots(seed=4)
    groups = Counter(slot["main_cha"] for slot in slots(500))
    assert min(groups.values()) > 200


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_seed_files_are_there_and_the_prompts_are_whole(lang):
    """The released script names two files of seeds and ships neither."""

    def read(name):
        return seed_lines(PROMPTS / lang / "writer" / name, 1, "")

    assert len(read("topics.txt")) >= 120 and len(read("talk.txt")) >= 60
    sizes = {
        line.split(": ")[0]: len(set(line.split(": ")[1].split(", ")))
        for line in read("traits.txt")
    }
    assert list(sizes.values()) == [10, 15, 13]  # as in the released script
    for name, need in zip(NEEDS, read("needs.txt"), strict=True):
        assert intention_of(need)[0] in (name, "other") and (
            lang == "zh" or need == NEEDS[name].theme
        )
    forms = {
        name: load_prompt(name, lang, "writer", placeholders=placeholders)
        for name, placeholders in PLACEHOLDERS.items()
    }
    assert set(forms) == {"persona", "scene", "again", "persona_layout", "scene_layout"}
    for kind, parts in SECTIONS.items():  # the parser reads the form that is asked for
        form = forms[kind]
        assert list(unmarked_sections(form, {name: name for name in parts})) == parts


# ------------------------------------------------------------------------------------- the pipeline


def faulty(share=0.5, seed=0):
    """A writer by rule that makes every kind of fault, and mends what it is told of."""
    writer, rng = ScriptedWriter(RULE), random.Random(seed)
    first = {}

    def answer(prompt):
        good = asyncio.run(writer(prompt.split("\n\nYou have answered this before")[0]))
        kind = (
            "first line"
            if "<hidden_theme>" in prompt
            else "persona"
            if "<samples>" in prompt
            else "scene"
        )
        if "You have answered this before" in prompt or "Your last answer" in prompt:
            if "nearly the same" in prompt:
                return asyncio.run(writer(prompt))
            return good
        first.setdefault(kind, good)
        theme = re.search(r"<(?:theme|hidden_theme)>\s*(.*?)\s*</", prompt, re.S)
        leak = theme.group(1) if theme else NEED["en"][0]
        lines = good.split("\n")
        faults = [
            "I am sorry, I cannot write about people.",
            "\n".join(lines[: len(lines) // 2]),
            good.rstrip() + f" {leak}",
        ]
        if kind == "persona":
            faults += [first[kind]]
        if kind == "scene":
            faults += [good.replace("Cause:", 'Cause:\nAnna: "Go."\nMe: "No."\n')]
        return rng.choice(faults) if rng.random() < share else good

    return answer


@pytest.mark.slow
def test_every_fault_is_mended(tmp_path, capsys):
    """Half answers, refusals, leaked themes, dialogues and copies: half of all answers at first.
    What comes out has none of it, keeps the quotas, and is told apart by --check."""
    with Loopback(answer=faulty(), faults={"500": 0.05}) as server:
        writer = f"openai:scripted@{server.url}"
        assert make(tmp_path / "u.jsonl", "--count", 24, "--split", 0.25, "--writer", writer) == 0
        asked = [p for p in server.prompts if "You have answered this before" in p]
    for words in (
        "no section",
        "says the hidden theme",
        "dialogue is written out",
        "nearly the same",
    ):
        assert any(words in prompt for prompt in asked), words
    files = [load_profiles(tmp_path / name) for name in ("u.jsonl", "u-test.jsonl")]
    train, test, shared = count_files(files)
    assert (train["users"], test["users"]) == (18, 6) and not any(shared.values())
    for report, people in zip((train, test), files):
        assert report["different personas"] == report["theme once in the scene"] == len(people)
        assert not any(
            report[key]
            for key in (
                "theme in the persona",
                "theme in the first line",
                "dialogue in the scene",
                "near-duplicate scenes",
            )
        )
    assert all("by rule" in p.player for p in files[0])  # and it says what it is
    refuse_foreign("toy", files[0] + files[1])  # the toy's user can play them
    released = {"id", "player", "scene", "main_cha", "cha_group", "topic", "task", "first_talk"}
    assert all(set(row) == released | {"need"} for row in rows(tmp_path / "u.jsonl"))
    assert all(row["scene"].endswith(f"***{row['task']}") for row in rows(tmp_path / "u.jsonl"))


@pytest.mark.slow
def test_what_fails_for_good_is_counted(tmp_path, capfd):
    """A writer that refuses one topic for ever: the others are written, the exit code is 2, one
    line says how many are missing and why, and the released code would ask to this day."""
    rule = ScriptedWriter(RULE)
    (tmp_path / "topics").write_text("a lost glove\na found glove\n")

    def answer(p):
        return (
            "I would rather not."
            if "a lost glove" in p and "<topic>" in p
            else asyncio.run(rule(p))
        )

    with Loopback(answer=answer) as server:
        assert (
            make(
                tmp_path / "u.jsonl",
                "--count",
                16,
                "--topics",
                tmp_path / "topics",
                "--retries",
                2,
                "--writer",
                f"openai:scripted@{server.url}",
            )
            == 2
        )
    kept = rows(tmp_path / "u.jsonl")
    assert 0 < len(kept) < 16 and {row["topic"] for row in kept} == {"a found glove"}
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "tools.profiles" in x]
    assert f"{16 - len(kept)} of 16 users are missing" in line and "no section" in line


@pytest.mark.slow
def test_stopped_and_started_again_it_pays_for_nothing_twice(tmp_path):
    """Stopped by a server that goes away after 20 calls: the same command goes on where it was and
    ends with the very file of a run that was not stopped. At temperature 1 too, where equal prompts
    are not equal questions."""
    flags = ["--count", 12, "--seed", 5, "--retries", 3]
    with Loopback(answer=faulty(0.0)) as server:
        whole = tmp_path / "whole.jsonl"
        assert make(whole, *flags, "--writer", f"openai:scripted@{server.url}") == 0
        needed = server.calls
    part, write = tmp_path / "part.jsonl", faulty(0.0)

    def reply(request):
        prompt = request["messages"][0]["content"]
        if server.calls > 20:
            return 402, {}, {"error": {"message": "no credit"}}
        return (
            200,
            {},
            completion(
                signed(
                    prompt,
                    asyncio.run(answer_check(prompt))
                    if simulator.CHECK_REPLY in prompt
                    else write(prompt),
                )
            ),
        )

    with Loopback(reply=reply) as server:
        assert make(part, *flags, "--writer", f"openai:scripted@{server.url}") == 2
    assert not part.exists()
    paid = len(rows(tmp_path / "part.calls.jsonl"))
    assert 0 < paid <= 20
    with Loopback(answer=faulty(0.0)) as server:
        assert make(part, *flags, "--writer", f"openai:scripted@{server.url}") == 0
        assert server.calls == needed - paid
    assert part.read_bytes() == whole.read_bytes()


@pytest.mark.slow
def test_killed_it_goes_on_to_the_same_file(tmp_path):
    """With SIGKILL, in the middle of a line of the log, perhaps."""
    command = [sys.executable, "-m", "tools.profiles", "--count", "60", "--seed", "2", "--out"]
    subprocess.run([*command, tmp_path / "whole.jsonl"], check=True, capture_output=True, cwd=ROOT)
    process = subprocess.Popen(
        [*command, tmp_path / "u.jsonl"], stderr=subprocess.DEVNULL, cwd=ROOT
    )
    log = tmp_path / "u.calls.jsonl"
    while process.poll() is None and not (log.exists() and log.stat().st_size > 20_000):
        time.sleep(0.01)
    process.kill()
    process.wait()
    with open(log, "ab") as file:
        file.write(b'{"key": "half')
    (tmp_path / "u.jsonl").unlink(missing_ok=True)
    subprocess.run([*command, tmp_path / "u.jsonl"], check=True, capture_output=True, cwd=ROOT)
    assert (tmp_path / "u.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_the_rule_writes_different_people():
    """Offline, as the command does by default: quotas, no duplicates, everybody playable."""
    drawn = draw_drafts(
        60,
        seed_lines(PROMPTS / "en/writer/topics.txt", 2, ""),
        seed_lines(PROMPTS / "en/writer/talk.txt", 3, ""),
        {"passive": ["shy", "modest", "gentle"]},
        TASKS,
        0,
    )
    bar = SimpleNamespace(update=lambda n: None)
    assert asyncio.run(write_users(drawn, Simulator(ScriptedWriter(RULE)), "en", bar)) == {}
    people = [Profile(**{name: slot[name] for name in PROFILE_FIELDS}) for slot in drawn]
    refuse_foreign("toy", people)
    (report,) = count_files([people])
    assert report["different personas"] == 60 and report["near-duplicate scenes"] == 0
    assert not any(re.search(r"\{\{|<P>", p.scene + p.player) for p in people)


def test_bad_input_is_one_line(tmp_path, capfd):
    """Exit code 2 and one line; an odd count is rounded up, said, and no mistake."""

    def refuse(*flags):
        assert profiles.main(list(map(str, flags))) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    out, one = tmp_path / "u.jsonl", tmp_path / "one.txt"
    one.write_text("only this\n\n only this \n")
    assert "--out" in refuse("--count", 4)
    assert f"--topics {one}: at least 2" in refuse("--out", out, "--topics", one)
    assert "--talk" in refuse("--out", out, "--talk", one)
    assert "No such file" in refuse("--out", out, "--topics", tmp_path / "none")
    assert "English only" in refuse("--out", out, "--lang", "zh")
    assert "--writer toy-weak: unknown" in refuse("--out", out, "--writer", "toy-weak")
    assert "--split 0.01" in refuse("--out", out, "--count", 4, "--split", 0.01)
    assert "--check" in refuse("--check", one, one, one)
    assert f"--check {one}, line 1" in refuse("--check", one)
    assert not out.exists()
    assert make(out, "--count", 7) == 0 and len(rows(out)) == 8
    assert "rounded up to 8" in capfd.readouterr().out
    assert "is there already" in refuse("--out", out)


def test_check_counts_what_files_share(tmp_path, capsys):
    """On the released files it says 500 users, 402 personas by exact text, and that 54 of the 100
    test users reuse a training persona; here the same by hand, on four and three."""

    def users(name, *personas, theme="You want X."):
        path = tmp_path / name
        path.write_text(
            "".join(
                json.dumps(
                    {
                        "id": f"{name}{i}",
                        "player": p,
                        "scene": f"{p} number {i} {' '.join(p * 9)} {theme}",
                        "main_cha": "passive",
                        "cha_group": [],
                        "task": "You want X.",
                    }
                )
                + "\n"
                for i, p in enumerate(personas)
            )
        )
        return path

    a, b = users("a", "Ann", "Ben", "Ben", "Cleo"), users("b", "Ben", "Dora", "Ann", theme="")
    one, two, shared = count_files([load_profiles(a), load_profiles(b)])
    assert (one["users"], one["different personas"], two["different personas"]) == (4, 3, 3)
    assert (one["theme once in the scene"], two["theme once in the scene"]) == (4, 0)
    assert one["near-duplicate scenes"] == 1
    assert shared == {
        "id is in the first file": 0,
        "player is in the first file": 2,
        "scene is in the first file": 0,
        "topic is in the first file": 0,
    }
    assert profiles.main(["--check", str(a), str(b)]) == 0
    assert re.search(r"player is in the first file +2", capsys.readouterr().out)
