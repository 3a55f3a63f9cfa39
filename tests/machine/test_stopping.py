"""A signal loses no step (support/stopping.py). It comes at six moments of a run to the
only process, at four to one of two ranks, and what goes on is the run that was let alone."""

from models import checkpoint
from support import errors, report, rundir

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import ppo
import rlver
from conftest import ROOT
from runs import SMALL, alike, go, go_on, in_moods, words
from several_ranks import torchrun

# {moment: (object, its function, at which of the calls the signal comes, the step saved last)}. A
# run has four steps of two mini-batches, with four dialogues each; evaluations with four users at
# 0, 3 and 4; checkpoints at 0, 2 and 4. So agents 1-4 are of the first evaluation, 17-20 of that at
# step 3, 21-24 of step 4.
MOMENTS = {
    "in the evaluation before": (rlver, "Agent", 2, None),
    "in a save": (checkpoint, "write", 2, 2),  # the first one is the trial
    "between two mini-batches": (ppo, "clip_gradient", 5, 3),
    "between the two logs": (rundir.RunDir, "append", 19, 3),
    "in an evaluation": (rlver, "Agent", 18, 3),
    "in a rollout": (rlver, "Agent", 22, 3),
}


def signal_at(moment, patch, kind, ranks=1):
    """Send this process signals of these kinds, one behind the other, when the moment has come; or
    raise an exception that stands among them."""
    place, name, number, _ = MOMENTS[moment]
    function, calls = getattr(place, name), itertools.count(1)
    if name == "Agent":  # each rank has its own
        number = -(-number // ranks)

    def with_signals(*args, **more):
        if next(calls) == number:
            for one in kind:
                if isinstance(one, Exception):
                    raise one
                os.kill(os.getpid(), one)
        return function(*args, **more)

    patch.setattr(place, name, with_signals)


def saved(out):
    """The step of the newest checkpoint, which must be the last one in the log."""
    steps = [int(path.name[-6:]) for path in rundir.checkpoints(out)]
    assert len(rundir.metrics_of(out)) == max(steps, default=0)
    return max(steps, default=None)


@pytest.mark.slow
@pytest.mark.parametrize("moment, kind", [*zip(MOMENTS, 3 * [signal.SIGINT, signal.SIGTERM])])
def test_a_signal_loses_no_step(moment, kind, whole, tiny_dir, tmp_path, monkeypatch, capfd, moods):
    """In dialogues these are given up, and the last whole step is saved; from the update on the step
    is finished. (It was thrown away, up to --save-every steps with it.)"""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        signal_at(moment, patch, [kind])
        assert go(tiny_dir, out) == 128 + kind
    printed = capfd.readouterr().err
    assert f"python rlver.py --resume {out}\n" in printed and "Traceback" not in printed
    assert saved(out) == MOMENTS[moment][-1]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # as before the run
    assert go_on(out) == 0
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tiny_dir, tmp_path, monkeypatch, moods):
    """Somebody does not want to wait for the step."""
    signal_at("between two mini-batches", monkeypatch, [signal.SIGTERM, signal.SIGINT])
    assert go(tiny_dir, tmp_path / "out") == 128 + signal.SIGINT
    assert saved(tmp_path / "out") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "every, end, drawn",
    [
        (1e9, [], [1, 4]),
        (-1, [], [1, 2, 3, 4, 4]),
        (1e9, [signal.SIGTERM], [1, 3]),
        (1e9, [signal.SIGTERM, signal.SIGINT], [1]),  # at once
        (1e9, [errors.SimulatorRefused("no money")], [1, 3]),
    ],
)
def test_a_run_is_drawn_first_and_last(every, end, drawn, tiny_dir, tmp_path, monkeypatch, moods):
    """It has a checkpoint after each step; between the first and its end, whatever that is, it draws
    once a minute at most. (A drawing takes a second, and a run of two minutes drew seven times. An
    error left the page of an earlier step.)"""
    steps = []  # on the page
    monkeypatch.setattr(report, "draw", lambda out, _: steps.append(len(rundir.metrics_of(out))))
    monkeypatch.setattr(rlver, "DRAW_EVERY", every)
    signal_at("in a rollout", monkeypatch, end)
    go(tiny_dir, tmp_path / "out", "--save-every", 1)
    assert steps == drawn


PATH = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


def on_two_ranks(*argv):
    """`main` below on two ranks."""
    return torchrun(2, __file__, *argv, env=PATH)


@pytest.fixture(scope="module")
def two_ranks(tiny_dir, tmp_path_factory):
    """The directory of an uninterrupted run of two ranks."""
    out = tmp_path_factory.mktemp("two ranks") / "whole"
    code, _, err = on_two_ranks("", "--model", tiny_dir, *SMALL, "--out", out)
    assert code == 0, err
    return out


# Two moments are left out: on ranks a signal in a log does what one in a save does, and one in an
# evaluation what one in a rollout does.
ON_RANKS = [m for m in MOMENTS if m not in ("between the two logs", "in an evaluation")]


@pytest.mark.soak
@pytest.mark.parametrize("moment", ON_RANKS)
def test_ranks_agree_to_stop(moment, two_ranks, tiny_dir, tmp_path):
    """One of two ranks gets the signal, and both stop at the same place. torchrun sends it to all of
    them; but what some see before a collective call, others see behind it."""
    flags = "--model", tiny_dir, *SMALL, "--out", tmp_path / "out"
    code, _, err = on_two_ranks(moment, *flags)
    assert code == 1 and err.count("stopped; go on with") == 1, err
    assert saved(tmp_path / "out") == MOMENTS[moment][-1]
    code, _, err = on_two_ranks("", "--resume", tmp_path / "out")
    assert code == 0, err
    alike(tmp_path / "out", two_ranks)


@pytest.mark.soak
def test_torchrun_hands_its_signal_on(two_ranks, tiny_dir, tmp_path):
    """And waits for the ranks as long as the recipe asks it to: the only way in which a node that is
    taken away says so."""
    recipe = (ROOT / "recipes" / "qwen7b.sh").read_text()
    [timeout] = re.findall(r"--shutdown-timeout \d+", recipe)
    command = f"-m torch.distributed.run --standalone --nproc-per-node 2 {timeout}".split()
    argv = words(*command, __file__, "", "--model", tiny_dir, *SMALL, "--out", tmp_path / "out")
    process = subprocess.Popen([sys.executable, *argv], env={**os.environ, **PATH})
    while process.poll() is None and not (tmp_path / "out" / "metrics.jsonl").exists():
        time.sleep(0.001)
    process.terminate()
    assert process.wait(timeout=120) != 0, "the run was over too soon"
    assert saved(tmp_path / "out") >= 1
    code, _, err = on_two_ranks("", "--resume", tmp_path / "out")
    assert code == 0, err
    alike(tmp_path / "out", two_ranks)


def main(moment, *flags):
    """What each rank does in the test above."""
    with in_moods() as patch:
        # only the first rank writes
        first = MOMENTS.get(moment, [None])[0] is checkpoint
        if moment in MOMENTS and (os.environ["RANK"] == "0") == first:
            signal_at(moment, patch, [signal.SIGTERM], ranks=2)
        rlver.ranks.leave_ranks(rlver.main(list(flags)))


if __name__ == "__main__":
    main(*sys.argv[1:])
