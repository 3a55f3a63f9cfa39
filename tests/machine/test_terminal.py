"""What programs print: the head and the end of a run, the scale beside every score, names beside
codes, and what is scripted."""

from support import rundir
from support.metrics import scale_in_words
from support.results import scale_of_settings, what_scores_are
from support.settings import SCRIPTED, resolve_settings, scripted_notice

import json
import random
from pathlib import Path

from policy import Episode
from simulator import toy_profiles
from toy import world

# ------------------------------------------------------------------------------- the head of a run


def head(capsys, given, **more):
    """What a run with the flags `given` prints at its start."""
    rundir.print_head(resolve_settings(given), Path("runs/x"), 500, 128, **more)
    return capsys.readouterr().out


def test_a_usual_run_says_what_is_trained_on_whom_and_nothing_of_defaults(capsys):
    """It printed forty settings, none of which anybody had chosen."""
    text = head(capsys, {})
    assert "GRPO trains toy (direct): 36 steps of 64 dialogues" in text
    assert "500 users to train on, 128 held out" in text and "config.json" in text
    assert "critic_lr" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_resumed_run_says_where_it_is(capsys):
    assert head(capsys, {}, step=5).startswith("Step 5 is done, going on: GRPO trains")
    text = head(capsys, {"algo": "ppo", "think": True, "eval_size": 32}, ranks=2)
    assert "PPO trains toy (think)" in text and "on 2 ranks." in text


def test_a_scripted_user_says_so_and_a_model_does_not(capsys):
    for name in SCRIPTED:
        text = " ".join(head(capsys, {"simulator": name}).split())
        assert f"The user {name} is a script" in text
    assert scripted_notice("openai:m@http://x") == scripted_notice("local:d") == ""


# -------------------------------------------------------------------------------- the end of a run


def finished_run(out, **settings):
    """Make the directory of a run that is over, as far as `print_summary` reads it."""
    out.mkdir()
    config = {"simulator": "toy", "max_turns": 8, **settings}
    (out / "config.json").write_text(json.dumps(config))
    (out / "metrics.jsonl").write_text("")
    scores = {"stderr": 1.5, "success": 0.0, "failure": 30.0, "malformed": 2.0, "n": 32}
    summary = {
        "before": {"score": 23.5, **scores},
        "after": {"score": 87.25, **scores, "failure": 0.0},
        "steps": 10,
        "seconds": {"total": 50, "rollout": 30, "simulator": 6, "update": 9, "evaluate": 4},
        "warnings": [],
    }
    (out / "summary.json").write_text(json.dumps(summary))


def test_a_run_ends_with_its_table_its_report_and_the_next_command(tmp_path, capsys):
    out = tmp_path / "a run"
    finished_run(out, max_turns=3)
    rundir.print_summary(out)
    text = capsys.readouterr().out
    assert "held-out users, mean final emotion (from 30, 3 replies):" in text
    after = next(line for line in text.splitlines() if line.startswith("after"))
    assert after.split() == ["after", "87.2", "1.5", "0.0%", "0.0%", "32"]
    assert ["rollout", "30", "s"] in [line.split() for line in text.splitlines()]
    assert "The user toy is a script" in " ".join(text.split())
    # the path has a space in it: what is printed can be typed
    *_, opened, title, command = text.splitlines()
    assert opened == f"open '{out}/report.html'" and "(from 40, 10 replies)" in title
    assert command == f"    python evaluate.py --policy '{out}' --before-after"


def test_the_last_line_of_a_dialogue_says_that_it_is_the_end():
    """It was `user  [ 24]    (-4)`, which looks cut off, under a title with a reward of 0.24."""
    heard = {"thought": "", "reply": "Cheer up."}
    turns = [
        {**heard, "emotion": 28, "user": "Hm.", "change": -2},
        {**heard, "emotion": 24, "user": None, "change": -4},
    ]
    episode = Episode("toy-heldout-0000", 0, "Hi.", turns=turns, ended="turn_limit", emotion=24)
    text = rundir.dialogue_text("before training", episode, "The hidden need: advice.")
    first, *_, last, need = text.strip().splitlines()
    assert first.endswith("ended by turn_limit, final emotion 24")
    assert last == "    user  [ 24]  (the end)  (-4)" and need == "The hidden need: advice."


# --------------------------------------------------------------------------------------- the scale


def test_the_scale_is_read_off_the_settings():
    """Numbers of two scales stood side by side: 87 in the README, 98 by the next command."""
    assert scale_in_words(30, 8) == "from 30, 8 replies" and "1 reply" in scale_in_words(30, 1)
    assert scale_of_settings({"start": 30, "max_turns": 4}) == "from 30, 4 replies"


def test_result_files_say_their_scale_and_their_user():
    text = what_scores_are({"start": 30, "max_turns": 8, "simulator": "toy"})
    assert "from 30, 8 replies." in text and "user toy is a script" in text
    benchmark = {"start": 40, "max_turns": 10, "simulator": "a model"}
    assert "a script" not in what_scores_are(benchmark)


# ------------------------------------------------------------------------------- scripted people


def test_the_toy_knows_all_that_its_people_and_its_policy_say():
    """And what they do not say is named once, in its order."""
    for profile in toy_profiles("heldout") + toy_profiles("train", 64):
        scene = world.read_scene(profile.scene, profile.task)
        said = [scene.story, *scene.details, *scene.cues]
        assert world.unknown_words(" ".join(said)) == []
    rng = random.Random(0)
    for act in world.ACTS:
        assert world.unknown_words(world.random_sentence(act, "sister", "hurt", rng)) == []
    assert world.unknown_words("My dog, my Dog and 3 cats!") == ["dog", "cats"]


def test_scripted_people_are_introduced_as_such(capsys):
    world.print_people()
    assert "scripted" in capsys.readouterr().out
