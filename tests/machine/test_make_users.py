"""tools/profiles.py: users that one makes oneself."""

from players.users import check_playable
from support.answers import Unreadable, read_answer

import asyncio
import json
import random
import re
from collections import Counter

import pytest

from answering import simulator_of
from emotion import NEEDS
from people import load_profiles
from result_files import write
from runs import refuse, rows
from tools import profiles
from tools.asking import load_text
from tools.profiles import SCHEMAS, draw_drafts, write_profiles
from toy.world import code_in

WRITER = ("--writer", "openai:MODEL@URL")
THEME = NEEDS["listen"]["en"]


async def scripted(prompt, schema):
    """A writer without a model: every text is some word of its own."""
    words = random.Random(prompt)
    values = {str: lambda: f"word{words.randrange(10**6)}", int: lambda: 30, bool: lambda: False}
    answer = {key: values[kind]() for key, kind in schema.items()}
    return json.dumps({**answer, **({"code": code_in(prompt)} if "code" in schema else {})})


def make(out, *flags):
    return profiles.main(["--out", str(out), *map(str, flags)])


# ------------------------------------------------------------------------------ what chance decides


@pytest.mark.parametrize("count, split", [(9, 0.0), (502, 0.2)])
def test_quotas_are_exact(count, split):
    """Half rational, half emotional, the four of each equal to within one, in training and in test
    alike. (Drawn one by one, RLVER's 500 came out as 57 to 66 of each.)"""
    drawn = draw_drafts(count, "en", 0, split)
    assert drawn == draw_drafts(count, "en", 0, split) != draw_drafts(count, "en", 1, split)
    for part in drawn.values():
        needs = Counter(draft["need"] for draft in part)
        halves = [[needs[name] for name in list(NEEDS)[i : i + 4]] for i in (0, 4)]
        assert sum(halves[0]) - sum(halves[1]) == len(part) % 2
        assert all(max(half) - min(half) <= 1 for half in halves)
    train, test = drawn["train"], drawn["test"]
    assert len({draft["id"] for draft in train + test}) == len(train + test) == count
    assert abs(len(test) - split * count) <= 1
    assert not {draft["topic"] for draft in train} & {draft["topic"] for draft in test}
    for draft in train + test:
        assert draft["task"] == NEEDS[draft["need"]]["en"] and len(set(draft["cha_group"])) == 3


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_seed_files_are_there_and_the_prompts_are_whole(lang):
    """The released script names two files of seeds and ships neither."""
    topics, talk, traits = (
        load_text(f"writer/{name}", lang).splitlines() for name in ("topics", "talk", "traits")
    )
    assert len(set(topics)) >= 120 and len(set(talk)) >= 60
    sizes = [len(set(line.split(": ")[1].split(", "))) for line in traits]
    assert sizes == [10, 15, 13]  # as in the released script
    asked_for = {"persona": {"main_cha", "traits", "talk"}, "scene": {"player", "topic", "task"}}
    for part, schema in SCHEMAS.items():  # all keys are asked for, and an echo is no answer
        prompt, layout = (load_text(f"writer/{name}", lang) for name in (part, f"{part}_layout"))
        assert set(re.findall(r"\{\{(\w+)\}\}", prompt)) == asked_for[part]
        assert set(re.findall(r"\{\{(\w+)\}\}", layout)) - {"task"} == set(schema)
        form = prompt[prompt.index("\n{\n") :]
        assert re.findall(r'^  "(\w+)": <', form, re.M) == list(schema)
        with pytest.raises(Unreadable):
            read_answer(form, schema)


# ------------------------------------------------------------------------------------- the pipeline


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"hobbies": "-"}, "persona is not complete"),
        ({"way_of_talking": f"Thinks: {THEME.upper()}"}, "persona says the hidden theme"),
        ({"state": THEME.replace(" ", "\n ").rstrip(".")}, "scene says the hidden theme"),
        ({"response": THEME}, "first line says the hidden theme"),
        ({"goodbye": True}, "goodbye"),
        ({"event": "“No.”\nMy boss left. I feel hurt.", "response": "Well, it rains."}, ""),
    ],
)
def test_a_user_with_a_fault_is_left_out(changes, fault):
    """The scripted writer's answers, but for these changes. The last ones are no fault."""

    async def writer(prompt, schema=None):
        answer = json.loads(await scripted(prompt, schema))
        return json.dumps({key: changes.get(key, value) for key, value in answer.items()})

    writer.is_scripted = True
    draft = next(draft for draft in draw_drafts(20, "en", 0)["train"] if draft["task"] == THEME)
    lost = asyncio.run(write_profiles([draft], simulator_of(writer), "en"))
    assert bool(lost) == bool(fault) and fault in "".join(lost.values())
    assert fault or draft["first_talk"] == "Well, it rains."


def serve(monkeypatch, answer):
    """Put `answer`, an async function of a prompt, where a model on a server would stand. Returns
    the list of the prompts that it is asked."""
    prompts = []

    async def model(prompt, schema=None):
        prompts.append(prompt)
        return await answer(prompt, schema)

    def make_simulator(name, lang, log, **flags):
        return simulator_of(model, lang, log=log)

    model.temperature, model.is_scripted = 1.0, True
    monkeypatch.setattr(profiles, "make_simulator", make_simulator)
    return prompts


def test_who_cannot_be_written_is_counted(tmp_path, capfd, monkeypatch):
    """A writer that refuses one user for ever: the exit code is 2, and one line says how many are
    missing and why."""
    topics = []

    async def answer(prompt, schema):
        if "<topic>" in prompt:
            topics.append(re.search(r"<topic>\n(.*)", prompt)[1])
            if topics[-1] == topics[0]:
                return "I would rather not."
        return await scripted(prompt, schema)

    prompts = serve(monkeypatch, answer)
    assert make(tmp_path / "u.jsonl", "--count", 8, *WRITER) == 2
    refused = [prompt for prompt in prompts if f"<topic>\n{topics[0]}\n" in prompt]
    assert len(refused) == 9
    kept = rows(tmp_path / "u.jsonl")
    assert len(kept) == 7 and topics[0] not in {row["topic"] for row in kept}
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "missing" in x]
    assert "1 users are missing" in line and "could not be read" in line


def test_started_again_it_pays_for_nothing_twice(tmp_path, monkeypatch):
    """With half of the answers in the log the same command asks the rest, and ends with the very
    file. At temperature 1 too, where equal prompts are not equal questions."""
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    asked = serve(monkeypatch, scripted)
    assert make(whole, "--count", 12, *WRITER) == 0
    needed = len(asked)
    answers = (tmp_path / "whole.calls.jsonl").read_text("utf-8").splitlines(keepends=True)
    (tmp_path / "part.calls.jsonl").write_text("".join(answers[:20]), "utf-8")
    assert make(part, "--count", 12, *WRITER) == 0 and len(asked) == 2 * needed - 20
    assert part.read_bytes() == whole.read_bytes()


def test_the_toys_users_are_different_people(tmp_path):
    """Offline, as the command does by default: two files that share nobody, everybody
    playable."""
    assert make(tmp_path / "u.jsonl", "--count", 60, "--split", 0.2) == 0
    files = [load_profiles(tmp_path / name) for name in ("u.jsonl", "u-test.jsonl")]
    assert [len(people) for people in files] == [48, 12]
    train, test = ({p.scene for p in people} for people in files)
    assert len(train | test) == 60 and not {p.id for p in files[0]} & {p.id for p in files[1]}
    check_playable("toy", sum(files, []))


def test_bad_input_is_one_line(tmp_path, capfd):
    """Exit code 2 and one line."""
    out, one = tmp_path / "u.jsonl", tmp_path / "one.txt"
    one.write_text("only this\n\n only this \n")
    refuse(capfd, "--out", out, "--lang", "zh", main=profiles.main)
    refuse(capfd, "--out", out, "--count", 4, "--split", 0.01, main=profiles.main)
    refuse(capfd, "--check", one, main=profiles.main)
    assert not out.exists()
    assert make(out, "--count", 8) == 0 and len(rows(out)) == 8
    refuse(capfd, "--out", out, main=profiles.main)  # it is there already


def test_check_counts_what_files_share(tmp_path, capsys):
    """On the released files it says 500 users, 402 personas by exact text, and that 54 of the 100
    test users reuse a training persona; here the same by hand, on four and three."""

    def users(name, *personas):
        rows = []
        for i, persona in enumerate(personas):
            row = {"id": f"{name}{i}", "player": persona, "scene": f"{name} number {i}"}
            rows.append({**row, "main_cha": "passive", "cha_group": [], "task": "You want advice."})
        return str(write(tmp_path / name, *rows))

    a, b = users("a", "Ann", "Ben", "Ben", "Cleo"), users("b", "Ben", "Dora", "Ann")
    assert profiles.main(["--check", a, b]) == 0
    printed = capsys.readouterr().out
    assert "a: 4 users, 3 different personas" in printed and "{'advise': 4}" in printed
    assert re.findall(r"(\w+) +(\d) of 3 users", printed) == [
        ("id", "0"),
        ("player", "2"),
        ("scene", "0"),
        ("topic", "0"),
    ]
