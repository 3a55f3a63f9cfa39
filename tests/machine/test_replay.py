"""tools/replay.py: may the user who gives the reward be trusted? Recorded dialogues are
replayed."""

import asyncio
import json
import random

import pytest

import judging
import simulator
from result_files import lines, measure, train, write
from simulator import Simulator, make_simulator, toy_profiles
from tools import replay
from tools.dialogues import load_dialogues
from tools.replay import consistency
from toy import world

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def run(no_pictures, tiny_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    longer = "--steps 2 --max-turns 3 --max-tokens 6 --eval-size 4".split()
    return train(tiny_dir, out, *longer)


PEOPLE = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}


def users(model):
    return "--simulator", f"openai:scripted@{model.url}"


# --------------------------------------------------------------------------- is the reward the same?


@pytest.mark.parametrize("what", ["emotion", "reward", "all"])
def test_a_changed_number_is_found_and_named(what, run, tmp_path, capsys):
    """Also where emotion, change and reward are raised alike: arithmetic finds nothing then, the
    replay does."""
    found = lines(run / "dialogues.jsonl")
    k, row = next(
        (k, row)
        for k, row in enumerate(found)
        if len(row["turns"]) >= 2 and 5 < row["turns"][-1]["emotion"] < 90
    )
    last = row["turns"][-1]
    if what == "all":
        last["emotion"] += 1
        last["change"] += 1
        row["reward"] = last["emotion"] / 100
    elif what == "reward":
        row["reward"] += 0.01
    else:
        row["turns"][1][what] += 1
    write(tmp_path / "dialogues.jsonl", *found)
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    assert replay.main([str(tmp_path / "dialogues.jsonl")]) == 1
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not as recorded")
    ]
    assert f"line {k + 1}, {row['profile_id']}, " in line


def test_a_result_file_knows_its_user(tiny_dir, tmp_path, capsys):
    """A challenging user's results are replayed with a challenging user, wherever the file lies;
    another one hears each reply, and that it feels otherwise is no fault of the log."""
    path = str(tmp_path / "r.jsonl")
    flags = "--difficulty challenging --limit 4 --max-tokens 5".split()
    assert measure("--policy", tiny_dir, *flags, "--out", path) == 0
    assert replay.main([path]) == 0
    assert "the same emotion  100.0 %" in capsys.readouterr().out
    assert replay.main([path, "--simulator", "toy-weak"]) == 0
    out = capsys.readouterr().out
    assert "as recorded" in out and "not as recorded" not in out


def test_a_run_with_its_own_users_is_replayed_with_them(tiny_dir, tmp_path):
    files = [
        str(
            write(
                tmp_path / f"{split}.jsonl",
                *[
                    {**vars(p), "id": f"own-{split}-{i}"}
                    for i, p in enumerate(toy_profiles(split, 4))
                ],
            )
        )
        for split in ("train", "heldout")
    ]
    out = train(tiny_dir, tmp_path / "run", "--profiles", *files, "--eval-size", 2)
    assert replay.main([str(out / "dialogues.jsonl")]) == 0


def test_a_moody_user_is_seen_to_be_moody(run):
    """Shares as by hand: a user whose change has the right sign and half of the time another
    size."""
    rng, scripted = random.Random(0), world.ScriptedModel()

    async def moody(prompt, schema):
        answer = json.loads(await scripted(prompt))
        if "change" in answer:
            answer["change"] += (rng.random() < 0.5) * (1 if answer["change"] > 0 else -1)
        return json.dumps(answer)

    moody.is_scripted = True
    result = consistency(run / "dialogues.jsonl", Simulator(moody), PEOPLE, times=5)
    assert 0.05 < result["emotion"] < 0.95 and result["sign"] > 0.9


def test_replays_of_a_dialogue_that_nobody_felt(run, tmp_path):
    """Its first reply was malformed: there is no emotion to replay."""
    rows = [json.loads(line) for line in open(run / "dialogues.jsonl", encoding="utf-8")][:3]
    told = dict.fromkeys(("thought", "user", "analysis", "change", "emotion"))
    rows.append({**rows[0], "turns": [{**told, "reply": "x"}], "ended": "malformed", "reward": 0})
    found = consistency(write(tmp_path / "d.jsonl", *rows), make_simulator("toy"), PEOPLE, times=2)
    assert found["dialogues"] == 8 and found["final"] == 1 and not found["found"]


# -------------------------------------------------------------- would another user accept the replies?


def test_the_same_replies_to_two_users(good, tmp_path):
    """What is said is in the file, what they feel is their own: these accept no sentence a second
    time, though it was recorded as a lift. And nobody accepts cheer."""
    both = "--difficulty", "vanilla", "challenging"
    code, result = judging.run("replay", good, *both)
    accepted = result["accepted"]
    assert code == 0 and accepted["as recorded"] == [100, 64]
    assert 90 < accepted["challenging"][0] <= accepted["vanilla"][0] < 100
    bad = judging.run("replay", judging.bad_file(tmp_path), *both, "--limit", 12)[1]["accepted"]
    assert bad == {"as recorded": [0, 48], "vanilla": [0, 12], "challenging": [0, 12]}


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
    user = simulator.User(Deaf(), d.profile)
    changes = [asyncio.run(replay.hear(user, d, i, d.turns[i]["reply"])) for i in range(3)]
    assert changes == [-10] * 3 and [emotion for emotion, _ in asked] == [40, 48, 56]
    for i, (_, said) in enumerate(asked):
        assert [m["text"] for m in said[1::2]] == [t["reply"] for t in d.turns[: i + 1]]
        assert [m["text"] for m in said[::2]] == [d.first_line] + [t["user"] for t in d.turns[:i]]


def test_what_nobody_felt_is_counted_and_where_all_failed_it_is_said(good, tmp_path, capfd):
    """A reply that a user could not be asked about is in no share. And a recorded turn without an
    emotion is no emotion to go on from. What was answered is paid once."""
    path = judging.sage(tmp_path, count=1, emotions=(45, None, 55))
    said = iter([{"change": 4}] + ["nonsense"] * 40)
    user = judging.Model(lambda prompt: next(said))
    flags = *users(user), "--lang", "zh", "--difficulty"
    code, result = judging.run("replay", path, *flags, "vanilla")
    assert code == 0 and result["accepted"] == {"as recorded": [100, 2], "vanilla": [100, 1]}
    assert judging.call("replay", path, *flags, "challenging") == 2
    assert "could be read" in capfd.readouterr().err


# ---------------------------------------------------------------------------------- do the words matter?


def test_other_words_are_put_to_the_same_user(good, tmp_path):
    """Each after the same past, in the same emotion: what differs is the reply alone."""
    judge = judging.Model(lambda prompt: {"text": "my words"} if "<reply>" in prompt else None)
    user = judging.Model(lambda prompt: {"change": 4 - 9 * prompt.count("my words")})
    flags = "--paraphrase", "--limit", 5, *users(user), *judging.at(judge)
    code, result = judging.run("replay", judging.sage(tmp_path), *flags)
    assert code == 0 and user.calls == 10 and judge.calls == 5
    assert result["paraphrase"] == {"moved": [9, 9, 9, 5], "same sign": [0, 0, 0, 5]}
    moved = judging.run("replay", good, "--paraphrase", "--limit", 16)[1]["paraphrase"]
    assert moved["moved"][3] == 16 and moved["moved"][0] < 4  # the scripted judge keeps the kind
    both = "--difficulty", "vanilla", "challenging"
    assert judging.call("replay", good, "--paraphrase", *both) == 2  # one user hears both wordings
