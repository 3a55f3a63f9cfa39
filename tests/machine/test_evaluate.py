"""evaluate.py: the Sentient Benchmark, whose results are files in SAGE's format; and its numbers,
which are what they say: whose score it is, of how many, with which settings."""

from support.errors import BadInput
from support.files import read_json

import asyncio
import json

import pytest

import evaluate
import rlver
from people import load_profiles, profiles_of_run
from result_files import SHORT, measure, train, write
from runs import refuse, rows
from server import Loopback, completion
from toy import world

pytestmark = pytest.mark.usefixtures("no_pictures")


def profiles(path, count=12, first=0, **more):
    """A file with users of the toy."""
    return write(path, *[{**row, **more} for row in world.profiles("train", first + count)[first:]])


def measured(place, *flags):
    """Run evaluate.py with files in `place`. Returns its exit code."""
    return measure(*SHORT, "--out", place / "r.jsonl", "--json", place / "j.json", *flags)


def told_in(place):
    return read_json(place / "j.json")


# --------------------------------------------------------------------------------- the result file


@pytest.mark.parametrize(
    "text, told",
    [
        *[(text, "holds no results") for text in ("notes", '{"a": 1}', '[{"id": 1}]\nx')],
        ('{"id": "p1", "emo_point": 50, "history": []}', "holds other results"),  # SAGE's
    ],
)
def test_a_file_of_somebody_elses_is_left_as_it_is(text, told, tmp_path, capfd):
    """Its last line was cut off before anybody looked at it, as if it were half of ours. SAGE's
    files begin as ours do, and their last line may be whole without a newline behind it."""
    path = tmp_path / "notes.txt"
    path.write_text(text)
    flags = ["--policy", "toy", "--limit", 1, "--out", path]
    assert told in refuse(capfd, *flags, main=evaluate.main)
    assert path.read_text() == text


def test_the_benchmark_in_sages_format(results):
    """Their field names, ours under a name of our own; the emotions in the history are those that
    the score is made of."""
    found = rows(results)
    assert len(found) == 12
    for line in found:
        keys = "id emo_point emo_state player scene character task history rlver"
        assert set(keys.split()) <= set(line)
        assert line["history"][0]["emotion-point"] == 40 == line["rlver"]["start"]
        replies = [m for m in line["history"] if m["role"] == "assistant"]
        assert 1 <= len(replies) <= 10 and line["emo_point"] == replies[-1]["rlver"]["emotion"]
        emotions = [40] + [m["rlver"]["emotion"] for m in replies]
        assert all(9 < e < 100 for e in emotions[:-1])  # it stops below 10 and at 100, at once
        assert (line["rlver"]["ended"] == "emotion_min") == (line["emo_point"] < 10)
        for m, after in zip(line["history"][1::2], line["history"][2::2]):
            assert after["emotion-point"] == m["rlver"]["emotion"] and after["thinking"]
            keys = "activity TargetCompletion content analyse change"
            assert set(after["planning"]) == set(keys.split())
            assert after["planning"]["change"] == m["rlver"]["change"]


@pytest.mark.slow
def test_a_stopped_evaluation_continues(results, tiny_dir, tmp_path, capsys):
    """What is there is kept, half a line is done again, and the whole is what one go would have
    given. The score is of the users that were asked for, though the file holds more; other settings
    are refused."""
    path = tmp_path / "r.jsonl"
    text = results.read_text("utf-8").splitlines(keepends=True)
    before = "".join(text[:5])
    path.write_text(before + text[5][:40], "utf-8")
    flags = ["--policy", tiny_dir, "--max-tokens", 6, "--limit", 12, "--out", path]
    assert measure(*flags) == 0
    assert path.read_text("utf-8").startswith(before)
    ids, wanted = (sorted(line["id"] for line in rows(file)) for file in (path, results))
    assert ids == wanted
    assert measure(*flags, "--limit", 1, "--json", tmp_path / "j.json") == 0
    assert told_in(tmp_path)["n"] == 1 and len(rows(path)) == 12
    told = refuse(capsys, *flags, "--seed", 1, main=evaluate.main)
    assert "holds other results (seed 0 there, 1 here)" in told


# -------------------------------------------------------------------------------------- the policy


def test_a_policy_behind_a_server(tmp_path):
    """It is sent the whole dialogue as messages, its own thoughts left out; its malformed replies
    are malformed there too."""
    seen, out = [], tmp_path / "r.jsonl"

    def reply(request):
        seen.append(request["messages"])
        good = "<think>secret</think>I am here, let it all out."
        return 200, {}, completion(good if len(request["messages"]) < 6 else "no tags")

    with Loopback(reply=reply) as server:
        flags = "--think --limit 2 --max-turns 4".split()
        assert measure("--policy", f"openai:m@{server.url}", *flags, "--out", out) == 0
    found = rows(out)
    endings = {line["rlver"]["ended"] for line in found}
    assert endings <= {"malformed", "goodbye", "emotion_min"}
    assert found[0]["rlver"]["policy"] == "openai:m"
    for messages in seen:
        first, *roles = [message["role"] for message in messages]
        assert first == "system" and roles == (["user", "assistant"] * 4)[: len(roles)]
    assert "secret" not in json.dumps(seen)
    assert found[0]["history"][1]["rlver"]["thought"] == "secret"


@pytest.mark.slow
def test_before_and_after_in_one_command(tiny_dir, tmp_path, capsys):
    """Three commands with long paths stood at the end of a run, too long to be copied."""
    run = train(tiny_dir, tmp_path / "run", "--eval-size", 3, "--max-turns", 1)
    # a third user that the files hold is not compared with --limit 2
    command = ["--policy", run, "--before-after", "--max-turns", 1]
    assert measure(*command) == 0
    capsys.readouterr()
    assert measure(*command, "--limit", 2, "--json", tmp_path / "j.json") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"by: the starting policy of {run}" in text and "after minus before" in text
    sides = [run / "before.jsonl", run / "after.jsonl"]
    labels = [rows(side)[0]["rlver"]["policy"] for side in sides]
    assert labels == [f"{run}/checkpoint-000000", f"{run}/checkpoint-000001"]
    assert told_in(tmp_path)["n"] == 2
    assert measure(*command, "--json", run / "after.jsonl") == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--before-after --score x",
        "--before-after --compare a b",
        "--score a --compare b c",
        "--before-after --policy toy",  # no run, so it has no start
        "--policy toy --world chit-chat --profiles prompts/profiles/en_test.jsonl",
    ],
)
def test_what_cannot_be_combined(flags, capfd):
    """`--score A --compare B C` compared, and said nothing of A."""
    refuse(capfd, *flags.split(), main=evaluate.main)


@pytest.mark.parametrize(
    "flags",
    [
        "--before-after --step 0",
        "--before-after --out x",
        "--score x --out y",
        "--compare x y --anyway",
    ],
)
def test_a_flag_that_would_do_nothing(flags, capfd):
    assert "has no effect with" in refuse(capfd, *flags.split(), main=evaluate.main)


# --------------------------------------------------------------------------------------- the users


@pytest.fixture
def trained(tiny_dir, tmp_path, monkeypatch):
    """A run on twelve users of a file, which is named as it lies beside us."""
    profiles(tmp_path / "people.jsonl", first_talk="My own line.")
    monkeypatch.chdir(tmp_path)
    return train(tiny_dir, tmp_path / "run", "--eval-size", 1, "--profiles", "people.jsonl")


@pytest.mark.slow
def test_an_evaluation_meets_whom_the_run_held_out_and_nobody_else(trained, tmp_path, monkeypatch):
    """The run held out one user of twelve, evaluate.py a fifth, two: one of them had been trained
    on, under a table that says "never trained on". From another directory, too. Both open with the
    user's own line; in training the model behind the user says one, as RLVER does."""
    for dialogue in rows(trained / "dialogues.jsonl"):
        is_own = dialogue["first_line"] == "My own line."
        assert is_own == (dialogue["split"] == "heldout")
    told = read_json(trained / "heldout.json")
    assert told["ids"] == ["toy-train-0003"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert measured(elsewhere, "--policy", trained) == 0
    (line,) = rows(elsewhere / "r.jsonl")
    assert [line["id"]] == told["ids"] and line["rlver"]["held_out"]
    assert line["history"][0]["content"] == "My own line."
    monkeypatch.chdir(tmp_path)
    # users that are named, and a policy that is no run: nobody knows
    assert measured(tmp_path, "--policy", trained, "--profiles", "people.jsonl", "--limit", 2) == 0
    assert not any(line["rlver"]["held_out"] for line in rows(tmp_path / "r.jsonl"))


@pytest.mark.slow
def test_other_held_out_users_are_refused(trained, tmp_path, capsys):
    """Without the one who was held out another user is: "before" and "after" were of different
    people. An evaluation meets the one whom the run has kept."""
    path = tmp_path / "people.jsonl"
    text = path.read_text()
    others = [line for line in text.splitlines(keepends=True) if "toy-train-0003" not in line]
    path.write_text("".join(others))
    resume = ["--resume", str(trained), "--steps", "2"]
    assert rlver.main(resume) == 2
    err = capsys.readouterr().err.strip().split("\n")[-1]
    assert "the profiles have changed since the run began" in err
    assert measured(tmp_path, "--policy", trained) == 0
    assert [row["id"] for row in rows(tmp_path / "r.jsonl")] == ["toy-train-0003"]
    path.write_text(text)
    assert rlver.main(resume) == 0


def test_two_files_that_share_users_are_refused(tmp_path):
    """One file twice, too: training users would be held out."""
    a, b, c = (str(profiles(tmp_path / f"{first}.jsonl", 4, first)) for first in (0, 3, 4))
    for names in ([a, b], [a, a]):
        with pytest.raises(BadInput, match="others than those to train"):
            profiles_of_run(names, 4)
    assert list(map(len, profiles_of_run([a, c], 2))) == [4, 2]


# -------------------------------------------------------------------------------------- of how many


@pytest.mark.slow
@pytest.mark.parametrize("deaf, code", [(1, 0), (6, 75), (8, 75)])
def test_the_lost_stand_in_the_table(deaf, code, tiny_dir, tmp_path, capsys):
    """With six of eight dialogues lost a score was printed, and the exit code was 0."""
    path = profiles(tmp_path / "p.jsonl", 8)
    scenes = [p.scene.split("\n")[1] for p in load_profiles(path)][:deaf]
    scripted = world.ScriptedModel()

    def answer(prompt):
        lost = any(scene in prompt for scene in scenes)
        return "no" if lost else asyncio.run(scripted(prompt))

    with Loopback(answer=answer) as server:
        users = ["--profiles", path, "--simulator", f"openai:scripted@{server.url}"]
        assert measured(tmp_path, "--policy", tiny_dir, *users) == code
    out, err = capsys.readouterr()
    assert err.count(" is missing: ") == deaf
    if deaf < 8:
        told = told_in(tmp_path)
        assert (told["n"], told["lost"]) == (8 - deaf, deaf) and f"{8 - deaf} of 8\n" in out
    else:
        assert "all 8 dialogues are lost" in err


def test_a_dialogue_without_a_reply_is_no_score(tiny_dir, tmp_path, capsys):
    """Its first prompt does not fit the context: it was scored 40, the start."""
    assert measured(tmp_path, "--policy", tiny_dir, "--context", 8, "--limit", 2) == 75
    assert "leaves no room in the context" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").read_text()
    # positions beyond the model's last one would all be the last one
    assert measured(tmp_path, "--policy", tiny_dir, "--context", 10**6, "--limit", 2) == 2
    assert "--context 1000000: " in capsys.readouterr().err
