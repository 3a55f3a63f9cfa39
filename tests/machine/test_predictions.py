"""The predictions of the course: what is refused, which prediction counts, and what is right.

The runs here are written by hand, as files: two numbers a step, so that means can be checked on
paper. One test, a soak, makes real ones."""

from support.files import read_json, write_json
from support.settings import read_flags, resolve_settings

import dataclasses
import json
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import labs
import predictions
from labs import Run
from predictions import ARMS, load_settings, panels_of, problem_with, runs_of, verdict
from surgery import parses

SETTINGS = load_settings()
CRITIC = SETTINGS["critic"]

# For the setting critic: what the runs written below bear out, number by number.
FILLED = """
[critic]
why = "V stays 0"
explained_variance = { direction = "down", change = [-0.15, -0.1] }
grad_norm = { direction = "up", change = [0.0, 0.05] }
emotion = { direction = "same", change = [-2, 2] }
"""

GAMMA_FILLED = """
[gamma]
why = "the reward fades"
explained_variance = { direction = "same", change = [0, 0] }
reply_tokens = { direction = "same", change = [0, 0] }
emotion = { direction = "same", change = [0, 0] }
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty directory for runs, records and predictions.toml; no picture is drawn."""
    monkeypatch.setattr(labs, "RUNS", tmp_path / "labs")
    monkeypatch.setattr(predictions, "PREDICTIONS", tmp_path / "predictions")
    monkeypatch.setattr(predictions, "draw", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_run(run, **numbers):
    """Write a finished run. Each of the `numbers` is 99 up to the last five steps, and in these
    itself: the others must not count."""
    cfg = resolve_settings(read_flags(run.flags))
    write_json(run.out / "config.json", dataclasses.asdict(cfg))
    rows = [dict.fromkeys(numbers, 99)] * (cfg.steps - 5) + [numbers] * 5
    lines = [json.dumps(row) + "\n" for row in rows]
    (run.out / "metrics.jsonl").write_text("".join(lines))
    write_json(run.out / "summary.json", {})


def write_critic_runs(runs=None):
    """The runs of the setting critic. changed - base, for the seeds 0, 1, 2: explained variance
    -0.12, -0.13, -0.14; gradient 0.02 each; emotion 1, 0, -1."""
    runs = runs or runs_of(CRITIC)
    for seed, (base, changed) in enumerate(zip(*(runs[arm] for arm in ARMS))):
        write_run(base, explained_variance=0.12 + seed / 100, grad_norm=0.09, emotion=60)
        write_run(changed, explained_variance=0, grad_norm=0.11, emotion=61 - seed)


def refused(argv, capsys):
    """The one line with which a command is refused."""
    assert course.main(["predict", *argv]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.endswith("\n")
    return error


# ------------------------------------------------------------------------------------ the settings


def test_eight_settings_with_three_numbers_each_make_fifteen_points():
    """With the three points of the reasons, as the page of the course says."""
    assert len(SETTINGS) == 8
    numbers = [len(panels_of(setting)) for setting in SETTINGS.values()]
    assert numbers == [3] * 8 and sum(numbers) * predictions.POINTS == 12
    readme = " ".join((ROOT / "course" / "README.md").read_text(encoding="utf-8").split())
    assert "| predictions | 15 |" in readme
    assert "half a point each (12 points)" in readme and "3 points" in readme


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_changes_one_thing_and_can_be_run(name):
    """Either a flag or the code is changed; the flags are accepted, and the patches fit."""
    setting = SETTINGS[name]
    base, changed = (Run(setting, arm, 0) for arm in ARMS)
    assert (base.flags != changed.flags) != (base.scripts != changed.scripts)
    for run in (base, changed):
        resolve_settings(read_flags(run.flags))
    edited = [file for file in base.scripts if changed.scripts[file] != base.scripts[file]]
    assert all(parses(changed.scripts[file].decode()) for file in edited)


def test_settings_and_labs_share_their_runs():
    """Where scripts and flags are the same, it is the same run: it is made once."""

    def name(setting, arm):
        return Run(setting, arm, 1).out.name[-10:]  # the digest

    everything = labs.load_labs()
    assert name(SETTINGS["groups"], "base") == name(everything["turn-rows"], "healthy")
    assert name(SETTINGS["groups"], "base") == name(SETTINGS["turns"], "base")
    assert name(SETTINGS["gamma"], "base") == name(SETTINGS["critic"], "base")
    lab = everything["no-format-check"]
    assert name(SETTINGS["format"], "base") == name(lab, "healthy")
    assert name(SETTINGS["format"], "changed") == name(lab, "broken")
    runs = {name(setting, arm) for setting in SETTINGS.values() for arm in ARMS}
    page = (ROOT / "course" / "teacher" / "predictions.md").read_text(encoding="utf-8")
    assert f"{3 * len(runs)} runs" in page


# ------------------------------------------------------------------- what a student has to write


def test_the_form_asks_for_every_number_and_is_refused_unfilled(place, capsys):
    assert course.main(["predict", "--template"]) == 0
    form = capsys.readouterr().out
    assert max(map(len, form.splitlines())) <= 100
    (place / "predictions.toml").write_text(form)
    tables = tomllib.loads(form)
    assert list(tables) == list(SETTINGS)
    for name, setting in SETTINGS.items():
        assert list(tables[name]) == ["why", *panels_of(setting)]
        assert f"[{name}] 'why' is empty" in refused([name], capsys)
    assert not (place / "predictions").exists()


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("[critic]", "[critc]", "the table [critic] is missing"),
        ('why = "V stays 0"', "", "has no 'why'"),
        ('"V stays 0"', '" "', "'why' is empty"),
        ("grad_norm =", "#", "has no 'grad_norm'"),
        ("grad_norm =", "clipfrac =", "has no 'grad_norm'"),
        ("[critic]", "[critic]\nclipfrac = 1", "'clipfrac': asked are only why, explained"),
        ('direction = "up", ', "", "'grad_norm': write { direction"),
        ('"up"', '"upwards"', "'upwards' and must be up, down or same"),
        ("[0.0, 0.05]", "0.05", "'grad_norm': its change is 0.05 and must be two numbers"),
        ("[0.0, 0.05]", "[0.0, nan]", "must be two numbers"),
        ("[0.0, 0.05]", "[true, 2]", "must be two numbers"),
        ("[0.0, 0.05]", "[0.05, 0.0]", "the lower number comes first"),
        ("[0.0, 0.05]", "[-0.01, 0.02]", "'up' and the change [-0.01, 0.02] contradict"),
        ("[-2, 2]", "[1, 2]", "'same' and the change [1, 2] contradict"),
        ("[-2, 2]", "[-20, 20]", "'emotion': its range is 40 wide, and at most 10 is allowed"),
        ("[critic]", "[critic", "is no TOML file"),
    ],
)
def test_an_entry_that_is_not_whole_is_refused_in_one_line(old, new, complaint, place, capsys):
    """And nothing is recorded or run: the student can still write it."""
    assert old in FILLED
    (place / "predictions.toml").write_text(FILLED.replace(old, new))
    assert complaint in refused(["critic"], capsys)
    assert [path.name for path in place.iterdir()] == ["predictions.toml"]


def test_bad_commands_are_one_line(place, capsys):
    assert "predictions.toml: cannot be read" in refused(["critic"], capsys)
    assert "critik: unknown; choose from temperature," in refused(["critik"], capsys)
    (place / "predictions.toml").write_text(FILLED)
    assert "the table [temperature] is missing" in refused(["all"], capsys)
    assert not (place / "predictions").exists()


def test_a_range_as_wide_as_allowed_is_not_refused_for_its_rounding():
    """0.4 - 0.3 is a little more than 0.1."""
    assert 0.4 - 0.3 > 0.1
    assert problem_with({"direction": "up", "change": [0.3, 0.4]}, 0.1) is None


# ------------------------------------------------------------------- the prediction that counts


def test_a_prediction_is_recorded_before_its_runs_begin(place, capsys, monkeypatch):
    """With its SHA-256, its time, and no changed run yet. Then prediction and result stand beside
    each other."""
    records = []

    def make(runs):
        records.append(read_json(place / "predictions" / "critic" / "prediction.json"))
        write_critic_runs()

    monkeypatch.setattr(predictions, "make_runs", make)
    (place / "predictions.toml").write_text(FILLED)
    assert course.main(["predict", "critic"]) == 0
    (record,) = records
    assert record["prediction"] == tomllib.loads(FILLED)["critic"]
    assert len(record["sha256"]) == 64 and record["changed_runs_there_before"] == []
    assert record["time"].endswith("+00:00")
    table = capsys.readouterr().out
    rows = {line.split()[0]: " ".join(line.split()[1:]) for line in table.splitlines() if line}
    # by hand: s = 0.01, half = 4.30 * 0.01 / sqrt(3) = 0.0248; for the emotion a hundred times that
    assert rows["explained_variance"] == (
        "0.13 0 -0.13 (-0.155 to -0.105) down, -0.15 to -0.1 right"
    )
    assert rows["grad_norm"] == "0.09 0.11 0.02 (0.02 to 0.02) up, 0 to 0.05 right"
    assert rows["emotion"] == "60 60 0 (-2.48 to 2.48) same, -2 to 2 right"
    assert "3 of 3 right, 1.5 of 1.5 points" in table
    assert "were there before" not in table


def test_runs_that_were_there_before_the_prediction_are_told(place, capsys):
    write_critic_runs()
    (place / "predictions.toml").write_text(FILLED)
    assert course.main(["predict", "critic"]) == 0
    assert "3 of the changed runs were there before it" in capsys.readouterr().out


def test_a_prediction_that_is_changed_later_does_not_count(place, capsys):
    write_critic_runs()
    file, record = place / "mine.toml", place / "predictions" / "critic" / "prediction.json"
    file.write_text(FILLED.replace('"up", change = [0.0, 0.05]', '"same", change = [0, 0]'))
    assert course.main(["predict", "critic", "mine.toml"]) == 0
    assert "2 of 3 right, 1 of 1.5 points" in capsys.readouterr().out
    before = record.read_bytes()
    file.write_text(FILLED)
    assert course.main(["predict", "critic", "mine.toml"]) == 0
    table = capsys.readouterr().out
    assert "grad_norm: recorded same, 0 to 0; not counted up, 0 to 0.05" in table
    assert "2 of 3 right" in table and "wrong: up" in table
    assert record.read_bytes() == before


@pytest.mark.parametrize("edit", [lambda text: text.replace("0.05", "0.04"), lambda text: "{"])
def test_a_record_that_was_edited_is_refused(edit, place, capsys):
    write_critic_runs()
    (place / "predictions.toml").write_text(FILLED)
    course.main(["predict", "critic"])
    record = place / "predictions" / "critic" / "prediction.json"
    record.write_text(edit(record.read_text()))
    edited = record.read_bytes()
    assert "was edited" in refused(["critic"], capsys)
    assert record.read_bytes() == edited


def test_a_run_of_other_settings_is_refused_and_kept(place, capsys):
    """Somebody put another run in its place, went on with it for more steps, or cut its file."""
    write_critic_runs()
    run = runs_of(CRITIC)["changed"][2]
    config = read_json(run.out / "config.json")
    metrics = run.out / "metrics.jsonl"
    (place / "predictions.toml").write_text(FILLED)
    for other, words in (
        ({"critic_lr": 0.001}, "is a run of other settings: its critic_lr is 0.001, not 1e-12"),
        ({"steps": 30}, "is a run of other settings: its steps is 30, not 20"),
    ):
        write_json(run.out / "config.json", {**config, **other})
        assert f"{run.out} {words}" in refused(["critic"], capsys)
    write_json(run.out / "config.json", config)
    metrics.write_text(metrics.read_text()[:-10])
    assert f"{run.out} is not whole: metrics.jsonl has 19 of 20" in refused(["critic"], capsys)
    assert run.done() and not (place / "predictions").exists()


# --------------------------------------------------------------------------------- right and wrong


@pytest.mark.parametrize(
    "direction, change, result, words",
    [
        # mean, half; a prediction may be 10 wide
        ("up", [4, 9], (5, 2), "right"),
        ("up", [0, 3.5], (5, 2), "right"),  # 3 to 7 overlaps it
        ("up", [8, 12], (5, 2), "wrong: the range"),
        ("same", [-5, 5], (5, 2), "wrong: up"),
        ("down", [-9, 0], (5, 2), "wrong: up"),
        ("down", [-6, -4], (-5, 2), "right"),
        ("same", [-1, 1], (1, 2), "right"),
        ("up", [0, 3], (1, 2), "wrong: same"),  # narrow, and 0 is in it: no difference was seen
        ("up", [0, 3], (1, 6), "right"),  # three seeds do not decide
        ("down", [-3, 0], (1, 6), "right"),
        ("up", [8, 12], (1, 6), "wrong: the range"),
        ("same", [0, 0], (0, 0), "right"),
        ("up", [0, 1], (0, 0), "wrong: same"),
    ],
)
def test_what_is_right(direction, change, result, words):
    guess = {"direction": direction, "change": change}
    assert problem_with(guess, 10) is None
    assert verdict(guess, *result, widest=10) == words


# ------------------------------------------------------------------------------------ for teachers


@pytest.fixture
def two_settings(place, monkeypatch):
    """A course with the settings gamma and critic alone, and a teacher's directory in `place`."""
    chosen = {name: SETTINGS[name] for name in ("gamma", "critic")}
    monkeypatch.setattr(predictions, "load_settings", lambda: chosen)
    monkeypatch.setattr(predictions, "RESULTS", place / "predictions.json")
    monkeypatch.setattr(predictions, "PAGE", place / "predictions.md")
    page = "# Results\n"
    for name in chosen:
        page += f"\n<!-- predict: {name} -->\nold\n<!-- predict: end -->\nwhy {name}\n"
    (place / "predictions.md").write_text(page)
    return place


def test_a_teachers_results_are_kept_and_written_into_the_page(two_settings, capsys, monkeypatch):
    """Setting by setting: what was measured before it was stopped is there."""

    def stopped(runs):
        if runs[0].lab["name"] == "gamma":
            for run in runs:
                write_run(run, explained_variance=0.1, reply_tokens=12, emotion=60)
            return
        raise KeyboardInterrupt

    monkeypatch.setattr(predictions, "make_runs", stopped)
    assert course.main(["predict", "--teacher"]) == 130
    assert "goes on where it was" in capsys.readouterr().err
    page = (two_settings / "predictions.md").read_text()
    assert "| `reply_tokens` | 12 | 12 | 0, 0, 0 | 0 ± 0 | same |" in page
    assert predictions.NOT_MEASURED in page and "old" not in page and "why critic" in page
    assert "not measured yet: critic" in refused(["--grade", "x.toml"], capsys)

    def rest(runs):
        if runs[0].lab["name"] == "critic":
            write_critic_runs()

    monkeypatch.setattr(predictions, "make_runs", rest)
    assert course.main(["predict", "--teacher"]) == 0
    page = (two_settings / "predictions.md").read_text()
    assert "| `emotion` | 60 | 60 | 1, 0, -1 | 0 ± 2.5 | same |" in page
    assert predictions.NOT_MEASURED not in page


def test_a_class_is_graded_without_runs(two_settings, capsys):
    """An entry that is not whole costs its own points and no others, and is named."""
    same = {arm: [1.0, 1.0, 1.0] for arm in ARMS}
    down = {"base": [0.12, 0.13, 0.14], "changed": [0.0, 0.0, 0.0]}
    measured = {
        "gamma": dict.fromkeys(panels_of(SETTINGS["gamma"]), same),
        "critic": {"explained_variance": down, "grad_norm": same, "emotion": same},
    }
    results = {
        name: {"flags": predictions.flags_of(SETTINGS[name]), "numbers": numbers}
        for name, numbers in measured.items()
    }
    # results of other flags than the setting has now do not count
    write_json(predictions.RESULTS, {**results, "gamma": {**results["gamma"], "flags": {}}})
    assert "not measured yet: gamma;" in refused(["--grade", "x.toml"], capsys)
    assert "--csv has the points of --grade" in refused(["gamma", "--csv", "a.csv"], capsys)
    write_json(predictions.RESULTS, results)
    Path("ann.toml").write_text(FILLED)
    Path("bob.toml").write_text(FILLED + GAMMA_FILLED)
    Path("eve.toml").write_text("[")
    assert course.main(["predict", "--grade", "ann.toml", "bob.toml", "eve.toml"]) == 1
    ann, missing, bob, eve = capsys.readouterr().out.splitlines()
    assert ann == "ann.toml: 2 of 6 right, 1 of 3 points (gamma 0, critic 2)"
    assert "ann.toml: the table [gamma] is missing" in missing
    assert bob == "bob.toml: 5 of 6 right, 2.5 of 3 points (gamma 3, critic 2)"
    assert eve.startswith("eve.toml: 0 points: ") and "no TOML file" in eve
    assert course.main(["predict", "--grade", "bob.toml", "--csv", "points.csv"]) == 0
    head, gamma, critic, total = Path("points.csv").read_text().splitlines()
    assert head == "submission,setting,points,of,result"
    assert gamma == "bob.toml,gamma,1.5,1.5,3 of 3 right"
    assert total == "bob.toml,total,2.5,3.0,without the reasons"
    assert not list(Path().glob("labs/*"))


def test_a_students_copy_makes_no_runs_for_teachers(two_settings, capsys, monkeypatch):
    """It has no teacher/."""
    monkeypatch.setattr(predictions, "make_runs", lambda runs: pytest.fail("runs were made"))
    predictions.PAGE.unlink()
    for argv in (["--teacher"], ["--grade", "x.toml"]):
        assert f"{two_settings} is missing; what it holds" in refused(argv, capsys)


def test_the_teachers_page_says_what_a_blank_prediction_earns():
    """The same range around 0 for all numbers; and how many numbers accept any direction."""
    results = read_json(predictions.RESULTS)
    undecided = right = 0
    for setting in SETTINGS.values():
        numbers = predictions.measured_numbers(setting, results)
        blank = {}
        for name, panel in panels_of(setting).items():
            half_range = panel["widest"] / 2
            blank[name] = {"direction": "same", "change": [-half_range, half_range]}
            mean, half = predictions.rounded_interval(predictions.differences(numbers[name]))
            possible = predictions.possible_directions(mean, half, panel["widest"])
            undecided += len(possible) == 3
        right += predictions.count_right(predictions.verdicts_of(setting, blank, numbers))
    page = " ".join(predictions.PAGE.read_text(encoding="utf-8").split())
    assert f"{undecided} of the 24 numbers are undecided" in page
    assert f"has {right} of the 24 numbers right" in page


def test_the_tables_of_the_teachers_page_are_those_of_its_numbers():
    """Each setting has a place for its table, and a paragraph."""
    page = predictions.PAGE.read_text(encoding="utf-8")
    results = read_json(predictions.RESULTS)
    assert predictions.page_with_results(page, SETTINGS, results) == page
    for name, setting in SETTINGS.items():
        assert f"\n## {name}: {setting['title']}\n" in page


# ---------------------------------------------------------------------------------- the real thing


@pytest.mark.soak
def test_a_prediction_makes_its_runs_and_goes_on(place, capsys, monkeypatch):
    """Two seeds of two small steps; asked for again, the runs are there."""
    flags = "--algo ppo --steps 2 --batch-size 4 --max-turns 2 --eval-size 1"
    monkeypatch.setattr(predictions, "SEEDS", [0, 1])
    monkeypatch.setattr(predictions, "load_settings", lambda: {"critic": CRITIC | {"flags": flags}})
    (place / "predictions.toml").write_text(FILLED)
    for there in ("recorded: ", "4 of 4 runs are there already"):
        assert course.main(["predict", "critic"]) == 0
        assert there in capsys.readouterr().out
    assert course.main(["predict"]) == 0
    assert "predicted, 4 of 4 runs" in capsys.readouterr().out
