"""The board of the open task: what an entry may change, where its logs pass the mark, that its
checkpoints are held to their word, and that its page and its table are what the code says.

The first tests read entries that are written by hand. The last ones measure two real runs of the
toy, of two steps each.
"""

from support.errors import BadInput
from support.files import read_json, write_json
from support.settings import read_flags, resolve_settings

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import board
import course
import toy
from entries import Rules, changed_settings, find_mark, read_entry

RULES = Rules(seeds=(5, 6), users=2)  # of the entries by hand
TRAINING_USER = toy.profiles("train")[0]["id"]
DIFF = "--- a/ppo.py\n+++ b/ppo.py\n@@ -1 +1 @@\n-old\n+new\n"


# ------------------------------------------------------------------------------ entries by hand


def config_of(flags):
    return dataclasses.asdict(resolve_settings(read_flags(flags.split())))


def dialogue(step, split, user, emotion):
    turns = [{"reply": "I am here.", "thought": "", "emotion": emotion}]
    return {
        "step": step,
        "split": split,
        "profile_id": user,
        "turns": turns,
        "reward": emotion / 100,
    }


def write_run(home, flags, scores=(70, 76, 80), every=4, dialogues=64):
    """A run whose evaluations, every so many steps, have these scores, with two users; the first
    has three points more and the second three less."""
    home.mkdir(parents=True)
    write_json(home / "config.json", config_of(flags))
    log, metrics = [], []
    for step in range(1, every * len(scores) + 1):
        log += [dialogue(step, "train", TRAINING_USER, 50)] * dialogues
        metrics.append({"step": step, "refilled": 0, "dropped": 0, "seconds": 2.0})
    for number, score in enumerate(scores, 1):
        log += [dialogue(every * number, "heldout", f"u{n}", score + n) for n in (-3, 3)]
    evaluations = [{"step": every * n, "score": float(s)} for n, s in enumerate(scores, 1)]
    write_json(home / "summary.json", {"evaluations": evaluations})
    write_rows(home / "dialogues.jsonl", log)
    write_rows(home / "metrics.jsonl", metrics)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def make_entry(tmp_path):
    """make_entry("--lr 0.001") writes an entry of grpo with this flag and returns its directory.
    The other arguments are those of `write_run`."""

    def make(flags="--lr 0.001", diff="", **of_runs):
        place = tmp_path / "anna"
        for seed in RULES.seeds:
            all_flags = f"--seed {seed} --eval-every 4 --eval-size 2 {flags}"
            write_run(place / str(seed), all_flags, **of_runs)
        (place / "entry.toml").write_text('by = "Anna"\nchange = "A higher rate."\n')
        (place / "change.diff").write_text(diff)
        return place

    return make


def test_an_entry_is_read(make_entry):
    """The mark is the first of two evaluations of 75 or more: here that of step 8, after 512
    dialogues and 16 seconds."""
    entry = read_entry(make_entry(), RULES)
    assert (entry.by, entry.sentence) == ("Anna", "A higher rate.")
    assert (entry.baseline, entry.flags) == ("grpo", "--lr 0.001")
    assert [run.config["seed"] for run in entry.runs] == [5, 6]
    for run in entry.runs:
        assert (run.mark_step, run.next_step) == (8, 12)
        assert (run.dialogues_to_mark(), run.seconds_to_mark()) == (512, 16.0)


@pytest.mark.parametrize(
    "scores, step",
    [((76, 76), 4), ((75, 75), 4), ((76, 74, 76, 76), 12), ((10, 76, 74, 74, 80, 90), 20)],
)
def test_a_single_lucky_evaluation_is_no_mark(make_entry, scores, step):
    run = read_entry(make_entry(scores=scores), RULES).runs[0]
    assert find_mark(run, RULES) == step


def test_every_sampled_dialogue_counts(make_entry):
    """--refill replaces whole groups of 8; what it replaced was sampled, and so was a dialogue that
    was dropped. What comes after the mark does not count. A step with lines taken out of the log
    counts as a whole batch."""
    place = make_entry("--refill 2")
    for seed in RULES.seeds:
        path = place / str(seed) / "metrics.jsonl"
        rows = rows_of(path)
        rows[2] |= {"refilled": 3, "dropped": 1}
        rows[10] |= {"refilled": 5, "dropped": 5}
        write_rows(path, rows)
        path = place / str(seed) / "dialogues.jsonl"
        write_rows(path, rows_of(path)[32:])
    entry = read_entry(place, RULES)
    assert [run.dialogues_to_mark() for run in entry.runs] == [512 + 24 + 1] * 2


@pytest.mark.parametrize(
    "flags, names",
    [
        ("", []),
        ("--think --steps 99 --keep 7 --tokens-per-gpu 4096", []),
        ("--algo ppo", []),
        ("--lora-rank 8", ["lora_rank"]),  # its learning rate is another, too, by default
        ("--lora-rank 8 --lr 4e-4", ["lora_rank", "lr"]),
        ("--algo ppo --think --critic-lr 0.01", ["critic_lr"]),
        ("--reward delta --advantage rloo", ["advantage", "reward"]),
    ],
)
def test_a_change_is_what_differs_from_the_baseline(flags, names):
    """Neither what changes no result nor what follows from a flag is a change."""
    assert sorted(changed_settings(config_of(flags))) == names


def test_a_diff_is_a_change(make_entry):
    """It may add a setting, which the project does not know."""
    place = make_entry(flags="", diff=DIFF)
    path = place / "5" / "config.json"
    write_json(path, {**read_json(path), "new_setting": 3})
    assert read_entry(place, RULES).flags == ""
    (place / "change.diff").unlink()
    with pytest.raises(BadInput, match="no setting new_setting; hand in change.diff"):
        read_entry(place, RULES)


@pytest.mark.parametrize(
    "arguments, problem",
    [
        (dict(flags=""), "nothing is changed: its flags are those of grpo"),
        (dict(flags="--think"), "nothing is changed: its flags are those of grpo --think"),
        (dict(flags="--lr 1e-3 --reward delta"), r"2 changes \(--reward, --lr\); exactly one"),
        (dict(diff=DIFF), r"2 changes \(--lr, change.diff\)"),
        (dict(flags="--max-turns 4"), "--max-turns is 4; no entry may change"),
        (dict(flags="--temperature 0.7"), "--temperature is 0.7; no entry may change"),
        (dict(flags="--simulator toy-weak"), "--simulator is 'toy-weak'; no entry may change"),
        (
            dict(flags="--lr 1e-3 --eval-every 2"),
            "evaluates every 2 steps of 64 dialogues, and not every",
        ),
        (dict(flags="--lr 1e-3 --eval-size 3"), "--eval-size is 3; it must be 2"),
        (dict(flags="", diff=DIFF.replace("ppo.py", "toy.py")), "changes toy.py; users, scorer"),
        (dict(flags="", diff="I changed a line"), "is no unified diff"),
        (dict(scores=(70, 74, 80)), "never passes 75 in two evaluations in a row, up to step 12"),
    ],
)
def test_what_an_entry_may_not_change_is_refused(make_entry, arguments, problem):
    """In one line, with the value."""
    with pytest.raises(BadInput, match=problem) as error:
        read_entry(make_entry(**arguments), RULES)
    assert "\n" not in str(error.value)


def edit(name, change):
    """A fault: `change` edits the rows of a log, or the value of a JSON file, of the first run."""

    def make_fault(place):
        path = place / "5" / name
        if name.endswith(".jsonl"):
            rows = rows_of(path)
            change(rows)
            write_rows(path, rows)
        else:
            value = read_json(path)
            change(value)
            write_json(path, value)

    return make_fault


def write(name, text):
    return lambda place: (place / name).write_text(text)


FAULTS = {
    "needs one run of each of the seeds 5, 6.*are 6, 7": edit(
        "config.json", lambda config: config.update(seed=7)
    ),
    "each of the seeds 5, 6.*; the seeds here are 6": lambda place: shutil.rmtree(place / "5"),
    "differ in more than the seed: --lr": edit("config.json", lambda c: c.update(lr=0.002)),
    "config.json: lr: a number above 0 is needed": edit("config.json", lambda c: c.update(lr=-1)),
    "is no config.json of a run": edit("config.json", lambda config: config.pop("lr")),
    "trains on toy-heldout-0001, who is no training user": edit(
        "dialogues.jsonl", lambda rows: rows[3].update(profile_id="toy-heldout-0001")
    ),
    "score of step 8 is 76.0 in summary.json and 86.00": edit(
        "dialogues.jsonl", lambda rows: [row.update(reward=0.86) for row in rows[-4:-2]]
    ),
    "has 1 held-out users at step 8, not 2": edit("dialogues.jsonl", lambda rows: rows.pop(-3)),
    "dialogues.jsonl, line 4: is no dialogue": edit(
        "dialogues.jsonl", lambda rows: rows[3].update(step="x")
    ),
    "dialogues.jsonl, line 772: is no dialogue": edit(
        "dialogues.jsonl", lambda rows: rows[-3].update(reward=float("inf"))
    ),
    "dialogues.jsonl, line 771: is no dialogue": edit(
        "dialogues.jsonl", lambda rows: rows[-4].update(reward=10**400)
    ),
    "dialogues.jsonl, line 1: is no dialogue": write("5/dialogues.jsonl", '{"step": 1, "sp'),
    "dialogues.jsonl: cannot be read": lambda place: (place / "5/dialogues.jsonl").unlink(),
    "metrics.jsonl has no training step 7": edit("metrics.jsonl", lambda rows: rows.pop(6)),
    "metrics.jsonl, line 2: is no line": edit("metrics.jsonl", lambda rows: rows[1].pop("dropped")),
    "metrics.jsonl, line 3: is no line": edit("metrics.jsonl", lambda r: r[2].update(refilled=-1)),
    "metrics.jsonl, line 4: is no line": edit(
        "metrics.jsonl", lambda rows: rows[3].update(seconds=10**400)
    ),
    "has not come to its first checkpoint": lambda place: (place / "5/summary.json").unlink(),
    "has no held-out scores": write("5/summary.json", '{"evaluations": [1]}'),
    "entry.toml: no such file; it needs two lines": lambda place: (place / "entry.toml").unlink(),
    "entry.toml: cannot be read": write("entry.toml", "by = Anna"),
    "entry.toml: change is None": write("entry.toml", 'by = "Anna"'),
    r"entry.toml: by is 'A\|B'": write("entry.toml", 'by = "A|B"\nchange = "C"'),
    "tell it in one sentence": write("entry.toml", f'by = "A"\nchange = "{"long " * 50}"'),
}


@pytest.mark.parametrize("problem", FAULTS)
def test_an_entry_that_is_not_whole_is_refused(make_entry, problem):
    place = make_entry()
    FAULTS[problem](place)
    with pytest.raises(BadInput, match=problem) as error:
        read_entry(place, RULES)
    assert "\n" not in str(error.value)


# ----------------------------------------------------------------------- the table, and the page


def line(name="anna", baseline="grpo", dialogues=(512,), challenging=50.0, other=70.0, seconds=1.0):
    """A measured line of one seed and eight users, who all end with the same emotion."""
    finals = {"held-out": [[76] * 8], "challenging": [[challenging] * 8], "other": [[other] * 8]}
    return {
        "name": name,
        "by": "Anna",
        "sentence": "A change.",
        "baseline": baseline,
        "flags": "--lr 0.001",
        "dialogues": list(dialogues),
        "seconds": [seconds],
        "finals": finals,
    }


def test_worse_with_either_kind_of_user_is_refused():
    """All users differ by the same number here, so the interval is that number. It must be below
    -5 with one of them."""
    base = line("grpo")
    assert board.why_refused(line(challenging=45, other=65), base, RULES) == ""
    assert "challenging user it differs from grpo by -6.0" in board.why_refused(
        line(challenging=44), base, RULES
    )
    assert "with other users it differs from grpo by -7.0" in board.why_refused(
        line(other=63), base, RULES
    )


def test_the_lower_bound_decides_and_users_are_paired():
    """Half of the users lose 8 points and half of them none: 4 on average, but with eight users the
    lower bound is below -5. If each loses 4 it is not, although emotions differ by 80."""
    base, spread, even = line("grpo"), line(), line()
    emotions = [10, 20, 30, 40, 60, 70, 80, 90]
    base["finals"]["other"] = [emotions]
    spread["finals"]["other"] = [[e - 8 * (n % 2) for n, e in enumerate(emotions)]]
    even["finals"]["other"] = [[e - 4 for e in emotions]]
    mean, lower, upper = board.difference(spread, base, "other")
    assert mean == -4 and lower < -5 and upper > -3
    assert board.why_refused(spread, base, RULES)
    assert board.difference(even, base, "other") == (-4, -4, -4)
    assert board.why_refused(even, base, RULES) == ""


def test_the_table_is_sorted_by_dialogues_then_by_seconds():
    lines = {
        "grpo": line("grpo", dialogues=(1024, 512)),
        "fast": line("fast", dialogues=(768, 768), seconds=0.5),
        "bad": line("bad", dialogues=(256, 256), challenging=20),
        "best": line("best", dialogues=(512, 512)),
    }
    rows = board.table_of(lines, RULES).split("\n")[2:]
    assert [re.match(r"\| `([^`]+)`", row)[1] for row in rows[:4]] == [
        "best",
        "fast",
        "grpo",
        "bad",
    ]
    assert "| 768 | 768, 768 | 0 | 76.0 (+0.0, +0.0 to +0.0) | 50.0 (+0.0" in rows[1]
    assert "| 768 | 1024, 512 | 1 | 76.0 | 50.0 | 70.0 |" in rows[2]
    assert "refused" in rows[3] and "not measured yet" in rows[4]
    assert {row.count(" | ") for row in rows if row} == {8}


def test_fewer_dialogues_have_more_points():
    """Accepted, fewer than the baseline, fewer than the best of the project."""
    own = {
        "grpo": {"dialogues": [1024, 1024, 768]},
        "grpo, delta": {"dialogues": [768, 768, 768]},
    }
    for dialogues, points in (
        ([1024] * 3, 4),
        ([768, 768, 1024], 7),
        ([768] * 3, 7),
        ([512] * 3, 10),
    ):
        line = {"baseline": "grpo", "dialogues": dialogues}
        assert sum(board.points_of(line, own).values()) == points
    page = board.PAGE.read_text(encoding="utf-8")
    assert all(f"\n| {points} | " in page for points in board.POINTS.values())


def test_the_page_shows_the_measured_table():
    page = board.PAGE.read_text(encoding="utf-8")
    table = board.table_of(board.read_lines(), board.RULES)
    assert f"<!-- board: table -->\n{table}\n<!-- board: end -->" in page


def test_the_page_has_the_numbers_of_the_code(capsys):
    page = " ".join(board.PAGE.read_text(encoding="utf-8").split())
    rules = board.RULES
    assert "seeds {}, {} and {}".format(*rules.seeds) in page
    assert f"Every {rules.every} training dialogues" in page
    assert f"the {rules.users} held-out users" in page
    assert f"a score of {rules.mark} or more" in page
    assert f"At most {rules.most_different} of the {rules.users} dialogues may differ" in page
    assert f"if the lower end of the interval is below {rules.lowest}" in page
    assert f"`--steps` is {rules.length} / B" in page
    assert course.main(["board"]) == 0
    (command, *_) = [row for row in capsys.readouterr().out.split("\n") if row.startswith("python")]
    assert command in page


@pytest.mark.parametrize("recipe", board.RECIPES, ids=lambda recipe: recipe.name)
def test_the_boards_command_keeps_the_rules(recipe):
    """Its runs differ from a baseline in one flag, or, a baseline's own, in none; they evaluate and
    save where the board looks, and keep all checkpoints."""
    rules = board.RULES
    script, *flags = board.command_of(recipe.flags, 100, "E/100", rules)
    config = config_of(" ".join(flags))
    assert script == "rlver.py" and config["seed"] == 100
    assert len(changed_settings(config)) == (recipe.name not in board.BASELINES)
    assert config["eval_every"] == config["save_every"]
    assert config["eval_every"] * config["batch_size"] == rules.every
    assert config["steps"] * config["batch_size"] == rules.length
    assert config["keep"] > config["steps"] / config["save_every"]


@pytest.mark.parametrize(
    "argv, problem",
    [
        (["nowhere"], "board nowhere: no such directory"),
        (["--own", "."], "leave out the directories"),
        (["--own", "--csv", "points.csv"], "--csv has the points of entries: name their"),
        (["--csv", "points.csv"], "--csv has the points of entries: name their directories"),
    ],
)
def test_a_bad_command_has_one_line(argv, problem, capsys):
    assert course.main(["board", *argv]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1


def test_without_its_baseline_an_entry_is_not_measured(make_entry, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(board, "LINES", tmp_path / "board.jsonl")
    assert board.main([str(make_entry())], RULES) == 1
    assert "its baseline grpo is not measured yet; run first" in capsys.readouterr().err


# --------------------------------------------------------------------------------- two real runs

# A score of 1 is passed at the first evaluation, after a step of 64 dialogues.
REAL_RULES = Rules(seeds=(100,), mark=1, every=64, users=4, length=128, most_different=0)
BASELINE = board.Recipe("grpo", "--algo grpo", "Nothing: a baseline.")
FASTER = board.Recipe("faster", "--algo grpo --lr 0.001", "A higher learning rate.")


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """The directory in which the board has made and measured its own entries, two here, with their
    table: runs/, board.jsonl, board.md."""
    place = tmp_path_factory.mktemp("board")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(board, "RUNS", place / "runs")
        patch.setattr(board, "LINES", place / "board.jsonl")
        patch.setattr(board, "PAGE", place / "board.md")
        patch.setattr(board, "RECIPES", [BASELINE, FASTER])
        board.PAGE.write_text("above\n<!-- board: table -->\n<!-- board: end -->\nbelow\n")
        assert board.main(["--own"], REAL_RULES) == 0
        yield place


@pytest.mark.slow
def test_the_projects_entries_are_made_and_measured_once(real):
    """Their scores are those that the runs have logged. Done again, nothing is made; with a line
    lost, its runs are not made again, and the line is the same."""
    lines = board.read_lines()
    assert list(lines) == ["grpo", "faster"]
    for line_here in lines.values():
        assert line_here["dialogues"] == [64]
        assert [len(users) for users in line_here["finals"]["other"]] == [4]
    run = real / "runs" / "grpo" / "100"
    score = next(e["score"] for e in read_json(run / "summary.json")["evaluations"] if e["step"])
    assert sum(lines["grpo"]["finals"]["held-out"][0]) / 4 == score
    table = (real / "board.md").read_text()
    assert table.startswith("above\n") and table.endswith("\nbelow\n")
    assert "`faster`" in table and "not measured yet" not in table

    before = board.LINES.read_bytes()
    board.LINES.write_bytes(before.split(b"\n")[0] + b"\n")
    metrics = (run / "metrics.jsonl").stat().st_mtime_ns
    assert board.main(["--own"], REAL_RULES) == 0
    assert board.LINES.read_bytes() == before
    assert (run / "metrics.jsonl").stat().st_mtime_ns == metrics


@pytest.fixture
def handed_in(real, tmp_path, monkeypatch):
    """A copy of the entry `faster`, as somebody hands it in who does not have it from the project:
    it is not among the project's lines."""
    lines = [line for line in rows_of(real / "board.jsonl") if line["name"] != "faster"]
    write_rows(tmp_path / "board.jsonl", lines)
    monkeypatch.setattr(board, "LINES", tmp_path / "board.jsonl")
    return Path(shutil.copytree(real / "runs" / "faster", tmp_path / "anna"))


@pytest.mark.slow
def test_an_honest_entry_has_its_line(handed_in, capsys):
    """Four users are too few to trust an interval, so no bound is set here. Of an entry only what
    the page lists is needed."""
    run = handed_in / "100"
    kept = {"config.json", "metrics.jsonl", "dialogues.jsonl", "summary.json"}
    for path in [path for path in run.rglob("*") if path.is_file()]:
        if path.parent == run and path.name not in kept or path.name == "trainer.pt":
            path.unlink()
    rules = dataclasses.replace(REAL_RULES, lowest=-100)
    points = handed_in.parent / "points.csv"
    assert board.main([str(handed_in), "--csv", str(points)], rules) == 0
    assert "| `anna` | the project | A higher learning rate. `--lr 0.001` | 64 | 64 |" in (
        capsys.readouterr().out
    )
    # as many dialogues as the baseline are not fewer
    total = points.read_text(encoding="utf-8").splitlines()[-1]
    assert total == f"{handed_in},total,4,10,A higher learning rate."


@pytest.mark.slow
def test_the_change_of_a_project_entry_earns_nothing(handed_in, real, monkeypatch, capsys):
    monkeypatch.setattr(board, "LINES", real / "board.jsonl")
    points = handed_in.parent / "points.csv"
    assert board.main([str(handed_in), "--csv", str(points)], REAL_RULES) == 1
    assert "its change is that of the project's faster" in capsys.readouterr().err
    assert ",total,0,10," in points.read_text(encoding="utf-8")


def swap_checkpoint(run):
    """Hand in the weights of a later step."""
    weights = "model.safetensors"
    shutil.copy(run / "checkpoint-000002" / weights, run / "checkpoint-000001" / weights)


def other_start(run):
    """The evaluation before training was not the shipped policy's."""
    rows = rows_of(run / "dialogues.jsonl")
    for row in rows:
        if row["step"] == 0:
            row["turns"][0]["reply"] = "You are right."
    write_rows(run / "dialogues.jsonl", rows)


def forge_score(run):
    """Raise the emotion of one user at the mark, in all files that have it."""
    rows = rows_of(run / "dialogues.jsonl")
    row = next(row for row in rows if row["step"] == 1 and row["split"] == "heldout")
    gain = 1 - row["reward"]
    row["reward"] = 1.0
    write_rows(run / "dialogues.jsonl", rows)
    summary = read_json(run / "summary.json")
    for evaluation in summary["evaluations"]:
        if evaluation["step"] == 1:
            evaluation["score"] += 100 * gain / 4
    write_json(run / "summary.json", summary)


def change_weights(change):
    """A cheat or fault that edits the weights of the mark's checkpoint."""

    def edit_file(run):
        from safetensors.torch import load_file, save_file

        path = run / "checkpoint-000001" / "model.safetensors"
        weights = load_file(path)
        change(weights)
        save_file(weights, path, {"format": "pt"})

    return edit_file


NORM = "model.norm.weight"
CHEATS = {
    "of the evaluation at step 1 are not what checkpoint-000001 says": swap_checkpoint,
    "of the evaluation at step 0 are not what the shipped policy says": other_start,
    "1 of 4 dialogues of the evaluation at step 1": forge_score,
    "some of its weights are not finite": change_weights(lambda w: w[NORM].fill_(float("nan"))),
    "have not the shapes of the shipped policy's": change_weights(
        lambda weights: weights.update({NORM: weights[NORM][:3].clone()})
    ),
    "model.safetensors: cannot be loaded": lambda run: (
        run / "checkpoint-000001" / "model.safetensors"
    ).write_bytes(b"x" * 100),
    "checkpoint-000002/model.safetensors: cannot be loaded": lambda run: shutil.rmtree(
        run / "checkpoint-000002"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("problem", CHEATS)
def test_a_log_that_its_checkpoint_does_not_confirm_is_refused(handed_in, problem, capsys):
    """One line each, and no table."""
    CHEATS[problem](handed_in / "100")
    assert board.main([str(handed_in)], REAL_RULES) == 1
    out, error = capsys.readouterr()
    assert problem in error and error.count("\n") == 1
    assert "| `anna`" not in out


@pytest.mark.slow
def test_a_refused_entry_does_not_stop_the_others(handed_in, tmp_path, capsys):
    """`worse` may not be 100 points better, so it is refused; `broken` cannot be read."""
    broken = tmp_path / "broken"
    broken.mkdir()
    rules = dataclasses.replace(REAL_RULES, lowest=101)
    assert board.main([str(broken), str(handed_in)], rules) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "broken/entry.toml: no such file" in first
    assert "anna: refused: with the challenging user it differs from grpo by" in second
