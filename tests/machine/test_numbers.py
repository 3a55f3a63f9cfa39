"""Numbers that are what they say: whose score it is, of how many, with which settings."""

from support.errors import BadInput
from support.metrics import cut_replies
from support.results import differences

import asyncio
import json

import pytest

import evaluate
import rlver
from result_files import SHORT, lines, measure, train, write
from server import Loopback
from simulator import load_profiles, make_simulator, users_of_run
from toy import world

pytestmark = pytest.mark.usefixtures("no_pictures")


def profiles(path, count=12, first=0):
    """A file with users of the toy."""
    return write(path, *world.profiles("train", first + count)[first:])


@pytest.fixture
def trained(tiny_dir, tmp_path, monkeypatch):
    """A run on twelve users of a file, which is named as it lies beside us."""
    profiles(tmp_path / "people.jsonl")
    monkeypatch.chdir(tmp_path)
    return train(tiny_dir, tmp_path / "run", "--eval-size", 1, "--profiles", "people.jsonl")


def measured(place, *flags):
    """Run evaluate.py with files in `place`. Returns its exit code."""
    return measure(*SHORT, "--out", place / "r.jsonl", "--json", place / "j.json", *flags)


def told_in(place):
    return json.loads((place / "j.json").read_text())


# ---------------------------------------------------------------------------- users of the training


@pytest.mark.slow
def test_an_evaluation_meets_whom_the_run_held_out_and_nobody_else(trained, tmp_path, monkeypatch):
    """The run held out one user of twelve, evaluate.py a fifth, two: one of them had been trained
    on, under a table that says "never trained on". From another directory, too."""
    told = json.loads((trained / "heldout.json").read_text())
    assert told["ids"] == ["toy-train-0011"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert measured(elsewhere, "--policy", trained) == 0
    assert [line["id"] for line in lines(elsewhere / "r.jsonl")] == told["ids"]
    assert all(line["rlver"]["held_out"] for line in lines(elsewhere / "r.jsonl"))
    monkeypatch.chdir(tmp_path)
    # users that are named, and a policy that is no run: nobody knows
    assert measured(tmp_path, "--policy", trained, "--profiles", "people.jsonl", "--limit", 2) == 0
    assert not any(line["rlver"]["held_out"] for line in lines(tmp_path / "r.jsonl"))


@pytest.mark.slow
def test_other_held_out_users_are_refused(trained, tmp_path, capsys):
    """In another order other users are held out: "before" and "after" were of different people."""
    path = tmp_path / "people.jsonl"
    text = path.read_text()
    path.write_text("".join(reversed(text.splitlines(keepends=True))))
    for main, flags in (
        (rlver.main, ["--resume", str(trained), "--steps", "2"]),
        (evaluate.main, ["--policy", str(trained), "--out", "r.jsonl"]),
    ):
        assert main(flags) == 2
        err = capsys.readouterr().err.strip().split("\n")[-1]
        assert "the profiles have changed since the run began" in err
    path.write_text(text)
    assert rlver.main(["--resume", str(trained), "--steps", "2"]) == 0


def test_two_files_that_share_users_are_refused(tmp_path):
    """One file twice, too: training users would be held out."""
    a, b = profiles(tmp_path / "a.jsonl", 4), profiles(tmp_path / "b.jsonl", 4, first=3)
    for names in ([a, b], [a, a]):
        with pytest.raises(BadInput, match="different people"):
            users_of_run(list(map(str, names)), 4, "toy")
    train, held = users_of_run([str(a), str(profiles(tmp_path / "c.jsonl", 4, first=4))], 2, "toy")
    assert len(train) == 4 and len(held) == 2


# ----------------------------------------------------------------------------------- other settings


def test_all_settings_tell_results_apart():
    """Only keys that the new results have were compared: with --template-args, and then without,
    everything was there already, and the old score was printed as the new one."""
    here = {"policy": "p", "simulator_temperature": 0.0, "users": "abc", "world": None, "seed": 0}

    def words(there, here):
        return differences([{"made_by": there}], here)

    assert words(dict(here), here) == ""
    assert words({**here, "ended": "goodbye", "traits": []}, here) == ""
    for more in ({"template_args": {"a": 1}}, {"context": 9}, {"users": "abd"}):
        (key,) = more
        assert words({**here, **more}, here).startswith(f"{key} {more[key]} there, ")
        assert words(here, {**here, **more}).endswith(f"{more[key]} here")


# -------------------------------------------------------------------------------------- of how many


@pytest.mark.slow
def test_the_score_is_of_the_users_asked_for(tiny_dir, tmp_path):
    """--limit 1 after --limit 3 printed the score of all three."""
    for limit in (3, 1):
        assert measured(tmp_path, "--policy", tiny_dir, "--limit", limit) == 0
    told = told_in(tmp_path)
    assert told["n"] == 1 == told["asked"] and len(lines(tmp_path / "r.jsonl")) == 3


@pytest.mark.slow
@pytest.mark.parametrize("deaf, code", [(1, 0), (6, 75), (8, 75)])
def test_the_lost_stand_in_the_table(deaf, code, tiny_dir, tmp_path, capsys, monkeypatch):
    """With six of eight dialogues lost a score was printed, and the exit code was 0."""
    path = profiles(tmp_path / "p.jsonl", 8)
    scenes = [p.scene.split("\n")[1] for p in load_profiles(path)][:deaf]
    scripted = world.ScriptedModel()

    def answer(prompt):
        lost = any(scene in prompt for scene in scenes)
        return "no" if lost else asyncio.run(scripted(prompt))

    def impatient(*names, **more):
        return make_simulator(*names, **{**more, "retries": 0})

    monkeypatch.setattr(evaluate, "make_simulator", impatient)
    with Loopback(answer=answer) as server:
        users = ["--profiles", path, "--simulator", f"openai:scripted@{server.url}"]
        assert measured(tmp_path, "--policy", tiny_dir, *users) == code
    out, err = capsys.readouterr()
    assert err.count(" is missing: ") == deaf
    if deaf < 8:
        told = told_in(tmp_path)
        assert (told["n"], told["lost"], told["asked"]) == (8 - deaf, deaf, 8)
        assert f"{8 - deaf} of 8\n" in out
    else:
        assert "all 8 dialogues are lost" in err


def test_a_dialogue_without_a_reply_is_no_score(tiny_dir, tmp_path, capsys):
    """Its first prompt does not fit the context: it was scored 40, the start."""
    assert measured(tmp_path, "--policy", tiny_dir, "--context", 8, "--limit", 2) == 75
    assert "leaves no room in the context" in capsys.readouterr().err
    assert not (tmp_path / "r.jsonl").read_text()


@pytest.mark.slow
def test_evaluations_of_a_run_open_with_the_users_own_line(tiny_dir, tmp_path):
    """So evaluate.py has it; in training the model behind the user says one, as RLVER does."""
    rows = [
        {**row, "first_talk": f"My own line {i}."}
        for i, row in enumerate(world.profiles("train", 6))
    ]
    path = write(tmp_path / "p.jsonl", *rows)
    run = train(tiny_dir, tmp_path / "run", "--eval-size", 2, "--profiles", path)
    for d in lines(run / "dialogues.jsonl"):
        assert d["first_line"].startswith("My own line") == (d["split"] == "heldout")


# --------------------------------------------------------------------------------- small, and wrong


def test_cut_replies_are_counted():
    """A --max-tokens that cuts most replies must be seen. The last reply of a full context is
    shorter: it was cut as well, but more tokens a reply would not help."""
    from policy import Episode, Segment

    e = Episode("p", 0, "Hi.")
    e.segments = [
        Segment([1, 2]),
        Segment([5, 9], log_probs=[-1.0, -1.0]),
        Segment([9]),
        Segment([5, 6], branch=1, log_probs=[-1.0, -1.0]),
        Segment([7], branch=2, log_probs=[-1.0]),
    ]
    assert cut_replies([e, e], stop_id=9, max_tokens=2) == [2, 6]
