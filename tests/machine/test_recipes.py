"""recipes/: bash can read them, and rlver.py and evaluate.py take their flags. Nothing is trained:
`python` and `torchrun` are scripts that write down what they were asked to do."""

from support import settings
from support.settings import make_parser, resolve_settings

import os
import re
import shutil
import subprocess
from collections import defaultdict

import pytest

import evaluate
from several_ranks import ROOT

SERVER = {"SIMULATOR": "openai:m@https://h/v1"}
COMMANDS = [  # words behind the name of the recipe, and how often each program is called
    ("smollm2.sh --steps 1 --out runs/x", {"rlver.py": 1}),
    ("smollm2.sh ppo --seed 1", {"rlver.py": 1}),
    ("qwen7b.sh ppo --think", {"rlver.py": 1}),
    ("qwen7b.sh grpo --think --steps 12 --warmup 2 --save-every 4", {"rlver.py": 1}),  # an hour
    ("one_gpu.sh grpo --think", {"rlver.py": 1}),
    (
        "one_gpu.sh grpo --think --engine torch --steps 24 --warmup 2 READER=local:m CARD=24",
        {"card.py 24 rlver.py": 1},
    ),
    # four trainings, eight measurements, and a line of scores for each file that is there
    ("environments.sh runs/nowhere 8 --steps 2", {"rlver.py": 4, "evaluate.py": 9}),
    # six trainings; three policies of three seeds, each measured with two users; and a score of each
    ("transfer.sh runs/nowhere 8 --steps 2", {"rlver.py": 6, "evaluate.py": 36}),
]


def test_every_recipe_is_tried():
    names = {command.split()[0] for command, _ in COMMANDS}
    assert names == {path.name for path in ROOT.glob("recipes/*.sh")}


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_checkout_on_windows_runs_under_wsl(tmp_path):
    """Git for Windows writes its own line ends into texts; bash could not read four recipes."""
    recipe = tmp_path / "transfer.sh"
    shutil.copy(ROOT / ".gitattributes", tmp_path)
    shutil.copy(ROOT / "recipes" / recipe.name, recipe)
    git = ["git", "-C", tmp_path, "-c", "core.autocrlf=true"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True, capture_output=True)
    recipe.unlink()
    subprocess.run([*git, "checkout-index", "-a"], check=True)
    assert b"\r" not in recipe.read_bytes()


def run(place, name, *words, **env):
    """Run the recipe `name`. Returns (the flags of each program that it asked for, what it said)."""
    for program in ("python", "torchrun"):
        (place / program).write_text(f'#!/bin/sh\necho "$@" >> {place}/asked\n')
        (place / program).chmod(0o755)
    recipe = ROOT / "recipes" / name
    given = {
        name: value for name, value in os.environ.items() if name not in ("READER", "PROFILES")
    }
    env = {**given, **SERVER, "PATH": f"{place}:{os.environ['PATH']}", **env}
    subprocess.run(["bash", "-n", recipe], check=True)
    ended = subprocess.run(["bash", recipe, *words], check=True, env=env, stdout=subprocess.PIPE)
    return (place / "asked").read_text().splitlines(), ended.stdout.decode()


@pytest.mark.parametrize("recipe", ["qwen7b.sh", "one_gpu.sh"])
def test_whom_a_policy_is_trained_on(recipe, tmp_path):
    """(Sixteen people, and nothing said so or how to have others.)"""
    shipped = "prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl"
    for people, env in ((shipped, {}), ("a.jsonl b.jsonl", {"PROFILES": "a.jsonl b.jsonl"})):
        asked, said = run(tmp_path, recipe, "grpo", **env)
        assert f"--profiles {people}" in asked[-1]
        assert said.count("too few") == said.count("\n") == (people == shipped)


@pytest.mark.parametrize("command, calls", COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_recipe_is_short_and_its_flags_are_taken(command, calls, tmp_path, monkeypatch):
    """And with the number of steps that it names, the learning rate has risen in a sixth of them."""
    monkeypatch.setattr(settings, "vllm_is_there", lambda: True)
    name, *words = re.sub(r" \w+=.*", "", command).split()
    assert len((ROOT / "recipes" / name).read_text().splitlines()) < 40
    asked, _ = run(tmp_path, name, *words, **dict(re.findall(r" (\w+)=(\S+)", command)))
    parsers = defaultdict(make_parser, {"evaluate.py": evaluate.make_parser()})
    seen = dict.fromkeys(calls, 0)
    for line in asked:
        for script in calls:
            before, found, flags = line.partition(script)
            if found:
                seen[script] += 1
                given = vars(parsers[script].parse_args(flags.split()))
                if script != "evaluate.py":
                    cfg = resolve_settings(given)
                    assert cfg.warmup <= max(3, cfg.steps / 6)
    assert seen == calls
