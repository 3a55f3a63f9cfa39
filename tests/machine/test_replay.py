"""tools/replay.py: may the user who gives the reward be trusted? Recorded dialogues are
replayed."""

import json
import random

import pytest

from result_files import lines, measure, train, write
from simulator import Simulator, make_simulator, toy_profiles
from tools import replay
from tools.replay import consistency, wrong_sum_in
from toy import world

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def run(no_pictures, tiny_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    longer = "--steps 2 --max-turns 3 --max-tokens 6 --eval-size 4".split()
    return train(tiny_dir, out, *longer)


PEOPLE = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}


@pytest.mark.parametrize("what", ["emotion", "change", "reward", "all"])
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
        assert wrong_sum_in({**row, "start": 30}, row["turns"]) is None
    elif what == "reward":
        row["reward"] += 0.01
    else:
        row["turns"][1][what] += 1
    path = write(tmp_path / "dialogues.jsonl", *found)
    assert replay.main([str(path)]) == 1
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not as recorded")
    ]
    assert f"line {k + 1}, {row['profile_id']}, " in line and ("turn" in line or what == "reward")


def test_a_result_file_knows_its_user(tiny_dir, tmp_path, capsys):
    """A challenging user's results are replayed with a challenging user, wherever the file lies;
    with another one the difference is no fault of the log, and is not called one."""
    path = str(tmp_path / "r.jsonl")
    flags = "--difficulty challenging --limit 4 --max-tokens 5".split()
    assert measure("--policy", tiny_dir, *flags, "--out", path) == 0
    assert replay.main([path]) == 0
    assert replay.main([path, "--simulator", "toy-weak"]) == 0
    out = capsys.readouterr().out
    assert (
        "same emotion in 100.0 %" in out
        and "another user than the one that was recorded" in out
        and "not as recorded" not in out
    )


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
    assert result["spread"] > 0 and 0 < result["reliability"] < 1


def test_replays_of_a_dialogue_that_nobody_felt(run, tmp_path):
    """Its first reply was malformed: there is no emotion to replay, and none in the reliability."""
    rows = [json.loads(line) for line in open(run / "dialogues.jsonl", encoding="utf-8")][:3]
    told = dict.fromkeys(("thought", "user", "analysis", "change", "emotion"))
    rows.append({**rows[0], "turns": [{**told, "reply": "x"}], "ended": "malformed", "reward": 0})
    found = consistency(write(tmp_path / "d.jsonl", *rows), make_simulator("toy"), PEOPLE, times=2)
    assert found["dialogues"] == 8 and found["spread"] == 0 and not found["found"]
