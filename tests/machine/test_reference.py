"""The reference: what healthy runs of the toy look like, and the tables that are made of them. The
arithmetic is checked on curves made here, and its use on the forty runs that are committed."""

from support import picture, reference, report
from support.page import PANELS
from support.reference import (
    bands_of,
    columns_of,
    longest_stretch,
    outside,
    sentence,
    smoothed,
    variant_of,
)
from support.settings import resolve_settings

import json
import re

import numpy as np
import pytest

import tables
from rlver import main

THERE = tables.Results(reference.PLACE / "runs.jsonl").read()
VARIANT_RUNS = [(name, line) for name, line in THERE.items() if line["part"] == "variants"]


def runs_of(count=10, steps=30, seed=0):
    """Curves that rise from 20 to 80 with noise, as `columns_of` has them."""
    rng = np.random.default_rng(seed)
    rise = np.linspace(20, 80, steps)
    return [
        {"emotion": list(rise + rng.normal(0, 3, steps)), "constant": [1.0] * steps}
        for _ in range(count)
    ]


# ----------------------------------------------------------------------------------- the arithmetic


def test_a_curve_is_smoothed_by_the_last_five_steps():
    values = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0]
    by_hand = [3.0, 2.0, 8 / 3, 9 / 4, 14 / 5, 20 / 5, 21 / 5]
    assert np.allclose(smoothed(values), by_hand)
    assert smoothed([None, 4.0, None, 2.0])[1:].tolist() == [4.0, 4.0, 3.0]
    assert np.isnan(smoothed([None])[0])


def test_bands_are_mean_and_deviation_of_the_smoothed_runs():
    """Against a loop. A metric that never varies has no band, and a shorter run shortens all."""
    runs = runs_of(4, steps=8) + runs_of(1, steps=6, seed=1)
    bands = bands_of(runs)
    assert set(bands) == {"emotion"}
    mean, s = bands["emotion"]
    assert len(mean) == len(s) == 6
    for i in range(6):
        there = [np.mean(run["emotion"][max(0, i - 4) : i + 1]) for run in runs]
        assert mean[i] == pytest.approx(np.mean(there), rel=1e-12)
        assert s[i] == pytest.approx(np.std(there, ddof=1), rel=1e-12)


def test_runs_that_agree_by_chance_still_leave_room():
    """s is at least a hundredth of the range, or a tenth run that differs by rounding is out."""
    runs = [{"emotion": [20.0, 60.0, 70.0 + 1e-9 * i]} for i in range(10)]
    _, s = bands_of(runs)["emotion"]
    assert np.allclose(s, 0.01 * (50.0 - 20.0))


def test_a_stretch_is_the_longest_in_a_row():
    flags = [True, False, True, True, False, True, True, True, False]
    assert longest_stretch(flags) == (5, 8)
    assert longest_stretch([]) == longest_stretch([False] * 3) == (0, 0)
    assert longest_stretch([True] * 4) == (0, 4)


def test_out_is_a_stretch_outside_and_not_a_step():
    bands = bands_of(runs_of())
    mean, s = bands["emotion"]
    assert outside({"emotion": list(mean)}, bands) == []
    one_step = np.array(mean)
    one_step[20] += 30
    assert outside({"emotion": list(one_step)}, bands) == []
    flat = np.minimum(mean, 40.0)  # it learns until 40 and stands there
    (stretch,) = outside({"emotion": list(flat)}, bands)
    assert stretch.metric == "emotion" and stretch.last == 30
    assert stretch.value == pytest.approx(40, abs=1e-9) and stretch.mean == mean[-1]
    before = stretch.first - 2  # the index of the step before the stretch
    assert abs(flat[before] - mean[before]) <= 20
    text = sentence([stretch])
    assert f"emotion in steps {stretch.first} to 30 (40 at the end of it, usually" in text
    assert outside({"another": [1.0] * 30}, bands) == []
    short = {"emotion": list(mean[:4] + 50)}  # a run that was stopped early
    assert outside(short, bands) == []


def test_what_has_no_band():
    """Times, counts of tokens, measures of rounding, what is not there in each step."""
    row = {
        "step": 1,
        "emotion": 3.0,
        "seconds": 2.0,
        "tokens_trained": 5,
        "tokens_sampled": 5,
        "logp_gap": 1e-7,
        "logp_gap_max": 1e-6,
        "gap": 1.0,
        "watched": 2.0,
        "kl": None,
    }
    assert columns_of([row, {**row, "emotion": 4}]) == {"emotion": [3.0, 4]}
    assert columns_of([]) == {}


def test_only_a_usual_run_is_compared():
    """Another learning rate is another curve; another seed, or a flag of memory, is not."""
    usual = {"algo": "grpo", "think": True}

    def compared(**more):
        return variant_of(resolve_settings({**usual, **more}))

    free = dict(seed=7, eval_every=5, eval_size=64, steps=10, tokens_per_gpu=999, save_every=1)
    assert compared() == compared(**free) == "grpo-think"
    assert variant_of(resolve_settings({"algo": "ppo"})) == "ppo-direct"
    for more in (
        dict(lr=1e-3),
        dict(reward="delta"),
        dict(difficulty="challenging"),
        dict(simulator="toy-weak"),
        dict(lora_rank=4),
        dict(batch_size=128),
        dict(model="some/model"),
        dict(temperature=1.2),
    ):
        assert compared(**more) is None, more
    assert reference.bands_of_config({}) == reference.bands_of_config({"algo": "what"}) == {}


def test_tables_of_bands_are_read_as_they_were_written(tmp_path, monkeypatch):
    monkeypatch.setattr(reference, "PLACE", tmp_path)
    bands = bands_of(runs_of())
    reference.write_bands("a-variant", bands)
    read = reference.read_bands("a-variant")
    assert set(read) == {"emotion"}
    for one, other in zip(read["emotion"], bands["emotion"]):
        assert np.allclose(one, other, rtol=1e-3)
    assert reference.read_bands("another") == {}


# --------------------------------------------------------------------------------- in a run's files


@pytest.mark.slow
def test_a_run_that_leaves_the_band_says_so(tmp_path, tiny_dir, monkeypatch, capsys):
    """In one line at its end, and the picture shows the band; a run inside of it says nothing."""
    far = {"emotion": (np.full(12, 500.0), np.full(12, 1.0))}
    near = {"emotion": (np.full(12, 50.0), np.full(12, 50.0))}
    drawn, draw = [], picture.learning_curve
    monkeypatch.setattr(
        report, "learning_curve", lambda *given: drawn.append(given) or draw(*given)
    )
    flags = [
        "--algo",
        "grpo",
        "--steps",
        "6",
        "--batch-size",
        "8",
        "--group-size",
        "4",
        "--eval-size",
        "2",
        "--max-tokens",
        "4",
        "--max-turns",
        "1",
        "--model",
        str(tiny_dir),
        "--lr",
        "1e-4",
        "--profiles",
        str(tmp_path / "people.jsonl"),
    ]
    import toy

    (tmp_path / "people.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in toy.profiles("train", 12))
    )
    for name, bands, lines in (("far", far, 1), ("near", near, 0)):
        monkeypatch.setattr(reference, "bands_of_config", lambda config, b=bands: b)
        assert main([*flags, "--out", str(tmp_path / name)]) == 0
        told = capsys.readouterr().out
        assert (
            told.count("unlike the reference runs (docs/reference): emotion in steps 1 to 6")
            == lines
        )
        assert drawn[-1][3] == bands  # learning_curve(out, rows, evaluations, bands, scale)


# ------------------------------------------------------------------------ the forty runs, committed

forty = pytest.mark.skipif(
    sum(line["part"] == "variants" for line in THERE.values()) < 40,
    reason="the forty runs are not all there: python tests/tables.py",
)


@forty
def test_healthy_runs_are_not_flagged_by_the_others():
    """Leaving one out: of forty at most two."""
    flagged = tables.leave_one_out(THERE)
    assert sum(map(len, flagged.values())) <= 2, flagged


@forty
def test_the_bands_are_those_of_the_committed_runs():
    """docs/reference/*.csv follow from docs/reference/runs.jsonl."""
    for variant in reference.VARIANTS:
        bands = bands_of([tables.metric_columns(line) for line in tables.seeds_of(THERE, variant)])
        read = reference.read_bands(variant)
        assert set(read) == set(bands)
        for metric in bands:
            assert np.allclose(read[metric], bands[metric], rtol=1e-3, atol=1e-12), metric


@forty
def test_captions_say_what_is_usual_on_the_toy():
    """The numbers in the captions are those of the forty runs: their last tenths, rounded;
    of the KL within the update, single steps, and those of the lab whose learning rate is
    ten times too high."""
    captions = {
        panel.title: " ".join([panel.reading, *panel.reading_if.values()]) for panel in PANELS
    }

    def last_tenths(key, algo=""):
        runs = [line["metrics"][key] for name, line in VARIANT_RUNS if name.startswith(algo)]
        return [np.mean(values[-(len(values) // 10) :]) for values in runs]

    for title, key, algo, low, high in (
        ("Repetition", "repeat_within", "", 0.06, 0.10),
        ("Repetition", "repeat_across", "grpo", 0.61, 0.73),
        ("Repetition", "repeat_across", "ppo", 0.24, 0.36),
        ("Variety", "distinct_2", "grpo", 0.09, 0.12),
        ("Variety", "distinct_2", "ppo", 0.15, 0.16),
        ("KL from the start", "kl_start", "", 0.14, 0.24),
    ):
        means = last_tenths(key, algo)
        assert (round(min(means), 2), round(max(means), 2)) == (low, high), (key, algo)
        assert f"between {low:.2f} and {high:.2f}" in captions[title], (key, algo)
    assert "between -3 and 5" in captions["Gap"]
    assert -3 <= min(last_tenths("gap")) and max(last_tenths("gap")) <= 5
    assert max(last_tenths("reward_talk")) == max(last_tenths("dropped")) == 0
    kl = [line["metrics"]["kl"] for _, line in VARIANT_RUNS]
    broken = np.array(THERE["grpo-direct-learning-rate"]["metrics"]["kl"])
    for number in ("up to 0.0025", "below 0.0001", "above 0.003"):
        assert number in captions["KL within the update"]
    assert 0.002 < max(map(max, kl)) < 0.0025 and np.median(np.concatenate(kl)) < 1e-4
    assert (broken > 0.003).sum() == 33 and len(broken) == 36


def test_the_tables_in_the_documents_are_those_of_the_committed_numbers():
    """A number in a table is one that was measured: `python tests/tables.py --write`."""
    for path in tables.documents():
        text = path.read_text(encoding="utf-8")
        assert tables.with_measured(text, THERE) == text, path
        comments = re.findall(r"<!-- tables: (\w+) -->", text)
        assert comments[1::2] == ["end"] * (len(comments) // 2), f"{path}: an end is missing"


# ---------------------------------------------------------------------------------- the one command


def test_each_job_has_its_name_and_is_made_once(tmp_path, monkeypatch):
    """A job whose line is there is not made again; one that fails leaves no line."""
    everything = list(tables.jobs())
    assert len({job.name for job in everything}) == len(everything) >= 100
    made, results = [], tables.Results(tmp_path / "runs.jsonl")
    jobs = [tables.Job("a", "one", "--algo grpo"), tables.Job("a", "bad", "--algo ppo")]
    monkeypatch.setattr(
        tables,
        "train",
        lambda job: made.append(job.name) or (tmp_path if job.name == "one" else None),
    )
    monkeypatch.setattr(tables, "line_of_run", lambda job, place: {"name": job.name})
    for _ in range(2):
        for job in jobs:
            tables.do_job(job, results)
    assert made == ["one", "bad", "bad"] and list(results.read()) == ["one"]
    # nor are the runs that it needs
    needy = tables.Job("replay", "replay", needs=("grpo-think-0",), command="-m tools.replay")
    results.add({"name": "replay"})
    monkeypatch.setattr(tables, "RUNS", tmp_path)
    tables.do_job(needy, results)
    assert made == ["one", "bad", "bad"]


def test_what_a_job_raises_is_seen(tmp_path, monkeypatch):
    """In a pool of threads an exception is lost unless somebody asks for the result."""

    def broken(job, results):
        raise ZeroDivisionError(job.name)

    monkeypatch.setattr(tables, "do_job", broken)
    with pytest.raises(ZeroDivisionError, match="grpo-think-0"):
        tables.main(["--only", "variants", "--results", str(tmp_path / "runs.jsonl")])


def test_a_line_holds_what_tables_need(tmp_path):
    """Short numbers, and no metric that is null throughout."""
    rows = [
        {"step": i, "emotion": 1 / 3, "gap": None, "late": None if i == 1 else 2.0} for i in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(
        json.dumps(
            {
                "evaluations": [{"step": 0, "score": 1 / 7}],
                "seconds": {},
                "peak_rss_mb": 1.0,
                "warnings": [],
                "after": {},
            }
        )
    )
    line = tables.line_of_run(tables.Job("variants", "grpo-think-0", "--algo grpo"), tmp_path)
    assert line["metrics"] == {"step": [1, 2], "emotion": [0.33333] * 2, "late": [None, 2.0]}
    assert line["evaluations"] == [{"step": 0, "score": 0.14286}]
    assert re.match(r"\d+\.\d+", line["machine"]["torch"])


def test_the_tables_arithmetic():
    """Dialogues until the goal by hand, between two evaluations; never is never; the interval of
    three seeds is Student's."""
    points = [(0, 20.0), (5, 70.0), (10, 80.0), (15, 60.0), (20, 90.0)]
    assert tables.dialogues_until(points, 75) == 64 * 7.5
    assert tables.dialogues_until(points, 95) is None
    assert tables.interval([70.0, 80.0, 90.0]) == "80.0 ± 24.8"
    there = {
        f"ppo-direct-delta-{seed}": {
            "name": f"ppo-direct-delta-{seed}",
            "evaluations": [
                {"step": step, "score": 20.0 + 2 * step + seed} for step in range(0, 35, 5)
            ],
        }
        for seed in range(3)
    }
    assert tables.table_rewards(there).split("\n")[2] == (
        "| ppo, delta | 41.0 ± 2.5 | 81.0 ± 2.5 | 1248 ± 79 | 1280, 1248, 1216 |"
    )
