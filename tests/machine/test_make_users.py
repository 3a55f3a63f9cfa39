"""tools/profiles.py: users that one makes oneself."""

from support.results import intention_of

import asyncio
import json
import random
import re
from collections import Counter

import pytest

from result_files import write
from simulator import (
    PROMPTS,
    Simulator,
    Unreadable,
    check_playable,
    load_profiles,
    load_prompt,
    read_answer,
)
from tools import profiles
from tools.profiles import (
    PLACEHOLDERS,
    SCHEMAS,
    count_users,
    draw_drafts,
    shared_fields,
    write_users,
)
from toy.words import NEEDS
from toy.world import code_in

WRITER = ("--writer", "openai:MODEL@URL")
NEED = {
    lang: (PROMPTS / lang / "writer" / "needs.txt").read_text(encoding="utf-8").splitlines()
    for lang in ("en", "zh")
}
THEME = NEED["en"][5]


async def scripted(prompt, schema):
    """A writer without a model: every text is some word of its own."""
    words = random.Random(prompt)
    values = {str: lambda: f"word{words.randrange(10**6)}", int: lambda: 30, bool: lambda: False}
    answer = {key: values[kind]() for key, kind in schema.items()}
    return json.dumps({**answer, **({"code": code_in(prompt)} if "code" in schema else {})})


def make(out, *flags):
    return profiles.main(["--out", str(out), *map(str, flags)])


def rows(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def slots(count=20, split=0.0, seed=0):
    return draw_drafts(count, "en", seed, split)


# ------------------------------------------------------------------------------ what chance decides


@pytest.mark.parametrize("count, split", [(8, 0.0), (502, 0.2)])
def test_quotas_are_exact(count, split):
    """Half rational, half emotional, the four of each equal to within one, in training and in test
    alike. (Drawn one by one, RLVER's 500 came out as 57 to 66 of each.)"""
    drawn = slots(count, split)
    assert drawn == slots(count, split) != slots(count, split, seed=1)
    assert len(drawn) == count == len({slot["id"] for slot in drawn})
    for part in {slot["split"] for slot in drawn}:
        needs = Counter(slot["need"] for slot in drawn if slot["split"] == part)
        halves = [[needs[name] for name in list(NEEDS)[i : i + 4]] for i in (0, 4)]
        assert sum(halves[0]) == sum(halves[1]) and all(max(h) - min(h) <= 1 for h in halves)
    tests = [slot for slot in drawn if slot["split"] == "test"]
    assert abs(len(tests) - split * count) <= 1
    assert not {s["topic"] for s in tests} & {s["topic"] for s in drawn if s["split"] == "train"}
    assert all(
        slot["task"] == NEEDS[slot["need"]].theme and len(set(slot["cha_group"])) == 3
        for slot in drawn
    )


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_seed_files_are_there_and_the_prompts_are_whole(lang):
    """The released script names two files of seeds and ships neither."""

    def read(name):
        return (PROMPTS / lang / "writer" / name).read_text(encoding="utf-8").splitlines()

    assert len(set(read("topics.txt"))) >= 120 and len(set(read("talk.txt"))) >= 60
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
    for part, schema in SCHEMAS.items():  # all keys are asked for, and an echo is no answer
        form = forms[part][forms[part].index("\n{\n") :]
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
    draft = next(draft for draft in slots() if draft["task"] == THEME)
    lost = asyncio.run(write_users([draft], Simulator(writer), "en"))
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
        return Simulator(model, lang, log=log)

    model.temperature, model.is_scripted = 1.0, True
    monkeypatch.setattr(profiles, "make_simulator", make_simulator)
    return prompts


def test_who_cannot_be_written_is_counted(tmp_path, capfd, monkeypatch):
    """A writer that refuses one user for ever: the exit code is 2, and one line says how many are
    missing and why. At temperature 0 only another prompt can have another answer, so no attempt
    repeats one."""
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
    assert len(refused) == len(set(refused)) == 9 and refused[8].endswith("(8)")
    kept = rows(tmp_path / "u.jsonl")
    assert len(kept) == 7 and topics[0] not in {row["topic"] for row in kept}
    (line,) = [x for x in capfd.readouterr().err.splitlines() if "missing" in x]
    assert line.startswith("1 users are missing") and "could not be read" in line


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
    """Offline, as the command does by default: two files that share nobody, quotas to within one,
    everybody playable."""
    assert make(tmp_path / "u.jsonl", "--count", 60, "--split", 0.2) == 0
    files = [load_profiles(tmp_path / name) for name in ("u.jsonl", "u-test.jsonl")]
    counts = [count_users(people) for people in files]
    assert [count["users"] for count in counts] == [48, 12]
    assert not any(shared_fields(*files).values())
    for people, count in zip(files, counts):
        check_playable("toy", people)
        assert max(count["needs"].values()) - min(count["needs"].values()) <= 1
        assert count["different scenes"] == count["users"]


def test_bad_input_is_one_line(tmp_path, capfd):
    """Exit code 2 and one line."""

    def refuse(*flags):
        assert profiles.main(list(map(str, flags))) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1, flags

    out, one = tmp_path / "u.jsonl", tmp_path / "one.txt"
    one.write_text("only this\n\n only this \n")
    refuse("--count", 4)
    refuse("--out", out, "--lang", "zh")
    refuse("--out", out, "--count", 7)
    refuse("--out", out, "--count", 4, "--split", 0.01)
    refuse("--check", one)
    assert not out.exists()
    assert make(out, "--count", 8) == 0 and len(rows(out)) == 8
    capfd.readouterr()
    refuse("--out", out)  # it is there already


def test_check_counts_what_files_share(tmp_path, capsys):
    """On the released files it says 500 users, 402 personas by exact text, and that 54 of the 100
    test users reuse a training persona; here the same by hand, on four and three."""

    def users(name, *personas, theme="You want X."):
        rows = [
            {
                "id": f"{name}{i}",
                "player": p,
                "scene": f"{p} number {i} {' '.join(p * 9)} {theme}",
                "main_cha": "passive",
                "cha_group": [],
                "task": "You want X.",
            }
            for i, p in enumerate(personas)
        ]
        return write(tmp_path / name, *rows)

    a, b = users("a", "Ann", "Ben", "Ben", "Cleo"), users("b", "Ben", "Dora", "Ann", theme="")
    files = load_profiles(a), load_profiles(b)
    one, two = map(count_users, files)
    assert (one["users"], one["different personas"], two["different personas"]) == (4, 3, 3)
    assert (one["theme in scene"], two["theme in scene"]) == (4, 0)
    shared = {name: n for name, n in shared_fields(*files).items() if n}
    assert shared == {"player is in the first file": 2}
    assert profiles.main(["--check", str(a), str(b)]) == 0
    assert re.search(r"player is in the first file +2", capsys.readouterr().out)
