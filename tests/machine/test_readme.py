"""What the README says to type: every command parses, and those of the toy run."""
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import evaluate
import rlver
import simulator
from support.settings import make_parser, resolve_settings

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(part.strip())[1:] for block in re.findall(r"```\n(.*?)```", README, re.S)
            for line in block.splitlines() for part in line.split("&&")
            if part.strip().startswith(("python ", "torchrun "))]
COMMANDS = [c[2:] if c[0] == "--nproc-per-node" else c for c in COMMANDS]


def of(script):
    return [c[1:] for c in COMMANDS if c[0] == script]


def is_toy(flags):
    return not {"--model", "--profiles"} & set(flags)


def test_the_readme_has_its_two_lines_and_ci_runs_the_second():
    """Two commands do all of their own set-up; CI calls the one that tests, so that it keeps
    working on a bare machine."""
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert [line.split("&& ")[-1] for line in lines] == ["python rlver.py --algo grpo --think",
                                                         "python -m pytest -q"]
    pattern = re.search(r"grep -m1 '(.*?)'", (ROOT / ".ci" / "run").read_text()).group(1)
    assert [line for line in README.splitlines() if re.search(pattern, line)] == lines[1:]


def test_every_command_parses():
    """A README that names a flag which is gone sends its readers away."""
    assert len(of("rlver.py")) >= 6
    for flags in of("rlver.py"):
        resolve_settings(vars(make_parser().parse_args(flags)))
    for flags in of("evaluate.py"):
        evaluate.make_parser().parse_args(flags)
    for script, *_ in COMMANDS:
        assert script == "-m" or (ROOT / script).is_file(), script


def test_every_function_that_the_readme_names_is_there():
    """The tables lead from an equation to a function; a renamed function must not leave them
    pointing nowhere."""
    import engine, grpo, plan, policy, ppo, signs, toy
    modules = {m.__name__: m for m in (engine, evaluate, grpo, plan, policy, ppo, rlver, signs,
                                       simulator, toy)}
    for module, name in re.findall(r"`(engine|evaluate|grpo|plan|policy|ppo|rlver|signs|simulator"
                                   r"|toy)\.(\w+)(?:\.\w+)?`", README):
        if name != "py":
            assert hasattr(modules[module], name), f"{module}.{name}"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [f for f in of("rlver.py") if is_toy(f)], ids=" ".join)
def test_the_toy_commands_run(flags, tmp_path):
    """As they stand in the README, but for fewer steps and users."""
    short = [] if "--resume" in flags else ["--steps", "0" if "0" in flags else "1", "--eval-size",
                                            "8", "--out", str(tmp_path / "run")]
    if "--resume" in flags:
        pytest.skip("needs the run that it names; resuming has tests of its own")
    assert rlver.main([*flags, *short]) == 0
    assert evaluate.main(["--consistency", str(tmp_path / "run" / "dialogues.jsonl")]) == 0


@pytest.mark.parametrize("script", ["toy.py", "policy.py", "ppo.py", "grpo.py"])
@pytest.mark.slow
def test_each_script_can_be_run_alone(script):
    """`python ppo.py` prints the smallest example of what the file is about."""
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0 and done.stdout and not done.stderr


@pytest.mark.slow
def test_the_benchmark_compares_like_with_like():
    """The ratio of packed to one row a turn means something only if both train the very same
    tokens."""
    sys.path.insert(0, str(ROOT / "tests"))
    import bench
    from policy import Episode, Segment, pack
    episode = Episode("p", 0, "")
    episode.segments = [Segment([1, 2]), Segment([3, 4], 1, [0.0, 0.0]), Segment([5]), Segment([6]),
                        Segment([7], 2, [0.0])]
    rows = bench.rows_per_turn(episode)
    assert [[s.ids for s in row.segments] for row in rows] == [[[1, 2], [3, 4]],
                                                               [[1, 2, 5, 6], [7]]]
    assert pack([episode]).action_mask.sum() == pack(rows).action_mask.sum() == 3
    assert bench.bench(False, dialogues=4, repeats=1)["packed_speedup"] > 0
