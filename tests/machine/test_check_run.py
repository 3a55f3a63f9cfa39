"""`course.py check-run`: each thing that it says about a run, on a real run of two steps whose
files are edited here; the signatures, on what runs with the real mistakes logged
(docs/reference/mistakes.jsonl) and on healthy runs that no limit was taken from."""

from support import reference
from support.metrics import summarise
from support.settings import read_flags, resolve_settings

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import mistakes
import rlver
from handed_in import HandedIn, gaps, read_run
from recompute import contradictions, episode_of, replay_sample
from runs import rows
from signatures import SIGNATURES, of_reference, signatures_in

FLAGS = (
    "--algo grpo --think --steps 2 --batch-size 8 --group-size 4 --max-turns 4 --eval-size 4 "
    "--save-every 9"
)


# --------------------------------------------------------------------------------- a run, and edits


@pytest.fixture(scope="module")
def made(tmp_path_factory, no_pictures):
    """The directory of a run of two steps of the toy."""
    out = tmp_path_factory.mktemp("made") / "run"
    assert rlver.main([*FLAGS.split(), "--out", str(out)]) == 0
    return out


@pytest.fixture
def run(made, tmp_path):
    """A copy of it, to be edited."""
    return shutil.copytree(made, tmp_path / "anna")


def check(capsys, *words, settings=FLAGS):
    """`course.py check-run`, told the settings of the run. Returns (exit code, what is printed)."""
    capsys.readouterr()
    asked = [f"--settings={settings}"] if settings else []
    code = course.main(["check-run", *map(str, words), *asked])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return code, " ".join((out + err).split())


def edit(path, change):
    """Rewrite a JSONL file: change(row, number from 0) changes a row in place."""
    lines = rows(path)
    for number, row in enumerate(lines):
        change(row, number)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")


def change_json(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def remove_setting(run, name):
    config = json.loads((run / "config.json").read_text())
    del config[name]
    (run / "config.json").write_text(json.dumps(config))


def trained(dialogue):
    return dialogue["split"] == "train" and dialogue["step"] == 1


# ------------------------------------------------------------------------------------- what is said


def test_a_run_as_asked(run, capsys, tmp_path):
    """Nothing is wrong: exit code 0, and a paragraph that says so."""
    code, text = check(capsys, run, "--csv", tmp_path / "runs.csv")
    assert code == 0 and text.endswith(f"{run}: as asked")
    for words in (
        "Its settings are those asked for.",
        "It is whole: 2 steps of 8 dialogues and 2 evaluations of 4 users.",
        "Its metrics follow from its dialogues",
        "gives the answers of the log",
        "It has the signature of no known mistake.",
    ):
        assert words in text
    (row,) = csv.DictReader((tmp_path / "runs.csv").open())
    assert (row["run"], row["verdict"], row["variant"]) == (str(run), "as asked", "grpo-think")


def test_other_settings_are_named(run, capsys):
    """Each with what was asked for. The seed may be any, unless one was asked for."""
    code, text = check(capsys, run, settings=None)
    assert code == 1 and text.endswith(f"{run}: other settings")
    assert "--steps 2 (asked for: --steps 30), --batch-size 8 (asked for: --batch-size 64)" in text
    assert "--seed" not in text
    code, text = check(capsys, run, settings=f"{FLAGS} --seed 3 --lr 1e-3")
    assert code == 1
    assert (
        "those asked for: --seed 0 (asked for: --seed 3), --lr 0.0004 (asked for: --lr 0.001)."
        in text
    )


@pytest.mark.parametrize("asked", ["--nonsense 1", "--algo ppo --group-size 4", "'"])
def test_settings_that_cannot_be_asked_for(run, capsys, asked):
    """One line, as for rlver.py itself."""
    try:
        code, text = check(capsys, run, settings=asked)
    except SystemExit as stop:
        code, text = stop.code, capsys.readouterr().err
        assert text.count("\n") == 1
    assert code == 2 and "as asked" not in text


def test_a_run_that_has_not_ended(run, capsys):
    (run / "summary.json").unlink()
    edit_out = rows(run / "metrics.jsonl")[:1]
    (run / "metrics.jsonl").write_text(json.dumps(edit_out[0]) + "\n")
    code, text = check(capsys, run)
    assert code == 1 and text.endswith(f"{run}: not whole")
    assert "it has done 1 of 2 steps" in text
    assert "metrics.jsonl has no line of step 2" in text


def test_dialogues_that_are_missing(run, capsys):
    """A dialogue of a step, an evaluation, a step."""
    log = run / "dialogues.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:4] + lines[5:]))  # four of the evaluation, then step 1
    code, text = check(capsys, run)
    assert code == 1 and "step 1 has 7 dialogues, but a batch has 8 in groups of 4" in text
    log.write_text("".join(lines[4:]))
    assert "the evaluation after step 0 is missing" in check(capsys, run)[1]
    log.write_text("".join(lines))
    first, second = rows(run / "metrics.jsonl")
    (run / "metrics.jsonl").write_text(json.dumps(second) + "\n")
    assert "metrics.jsonl has step 2 where step 1 should be" in check(capsys, run)[1]


def score_again(run):
    """Write the scores of summary.json that the dialogues in the log give."""
    handed_in = read_run(run)
    summary = handed_in.summary
    for scores in summary["evaluations"]:
        scores |= summarise([episode_of(row) for row in handed_in.heldout[scores["step"]]])
    for moment, place in (("before", 0), ("after", -1)):
        scores = {k: v for k, v in summary["evaluations"][place].items() if k != "step"}
        summary[moment] = scores
    change_json(run / "summary.json", **summary)


def test_the_worst_users_of_an_evaluation_are_left_out(run, capsys):
    """From dialogues.jsonl and summary.json; then from heldout.json too. A scripted user never
    fails, so to call them dropped does not help."""
    log = run / "dialogues.jsonl"
    last = [row for row in rows(log) if row["split"] == "heldout" and row["step"] == 2]
    worst = min(last, key=lambda row: row["reward"])
    log.write_text("".join(json.dumps(row) + "\n" for row in rows(log) if row != worst))
    score_again(run)
    code, text = check(capsys, run)
    assert code == 1 and text.endswith(f"{run}: not whole")
    assert "the evaluation after step 2 has 3 of 4 held-out users" in text
    summary = json.loads((run / "summary.json").read_text())
    summary["evaluations"][-1]["dropped"] = summary["after"]["dropped"] = 1
    change_json(run / "summary.json", **summary)
    assert "has 3 of 4 held-out users" in check(capsys, run)[1]
    others = [row for row in rows(log) if row["profile_id"] != worst["profile_id"]]
    log.write_text("".join(json.dumps(row) + "\n" for row in others))
    score_again(run)
    ids = json.loads((run / "heldout.json").read_text())["ids"]
    change_json(run / "heldout.json", ids=[name for name in ids if name != worst["profile_id"]])
    code, text = check(capsys, run)
    assert code == 1 and "heldout.json has 3 users, but --eval-size is 4" in text


def test_dialogues_that_failed_in_an_evaluation_are_counted(run):
    """A model behind the user may fail; summary.json says how often."""
    handed_in = read_run(run)
    handed_in.settings.simulator = "openai:a-model"
    handed_in.heldout[2].pop()
    assert gaps(handed_in) == ["the evaluation after step 2 has 3 of 4 held-out users"]
    handed_in.summary["evaluations"][-1]["dropped"] = 1
    assert gaps(handed_in) == []


@pytest.mark.parametrize("metric", ["emotion", "success", "malformed", "turns", "distinct_2"])
def test_a_metric_that_was_improved(run, capsys, metric):
    """All that follows from the dialogues is counted again."""
    edit(run / "metrics.jsonl", lambda row, number: row.update({metric: row[metric] + 0.01}))
    code, text = check(capsys, run)
    assert code == 1 and f"does not follow from dialogues.jsonl: {metric} " in text
    assert "in step 1, by the dialogues" in text and "(and 1 more)" in text


def test_a_summary_that_was_improved(run, capsys):
    summary = json.loads((run / "summary.json").read_text())
    change_json(run / "summary.json", after={**summary["after"], "score": 91.0})
    assert "'after' is not the evaluation of that moment" in check(capsys, run)[1]
    change_json(run / "summary.json", **{**summary, "tokens": {"sampled": 5, "trained": 5}})
    assert "5 tokens sampled, by the steps" in check(capsys, run)[1]
    summary["evaluations"][-1]["score"] = 91.0
    change_json(run / "summary.json", **summary)
    assert "score 91 after step 2, by the dialogues" in check(capsys, run)[1]
    change_json(run / "summary.json", evaluations=None)
    assert "it is not as a run writes it" in check(capsys, run)[1]


def make_happier(dialogue, _):
    """Every change of this step is +10, in the emotions, too."""
    emotion = 30
    for turn in dialogue["turns"] if trained(dialogue) else ():
        emotion = min(100, emotion + 10)
        turn.update(change=10, emotion=emotion)
        dialogue["reward"] = emotion / 100


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d, _: d["turns"][-1].update(emotion=99), "an emotion of 99 after"),
        (lambda d, _: d["turns"][0].update(change=30), "a change of 30"),
        (lambda d, _: d.update(reward=1.0), "a reward of 1 for a final emotion of"),
        (lambda d, _: d.update(ended="goodbye"), "it ended as 'goodbye', by its turns as"),
        (lambda d, _: d.update(profile_id="toy-train-0001"), "are not those that seed 0 draws"),
        (make_happier, "get another analysis than the log has"),
    ],
)
def test_dialogues_that_were_edited(run, capsys, change, words):
    """Emotions follow from changes, rewards and ends from emotions, users from the seed, and
    changes from what the scripted user says."""
    edit(run / "dialogues.jsonl", change)
    code, text = check(capsys, run, "--replay", 0)
    assert code == 1 and "numbers do not fit together" in text and words in text


def test_another_seed_is_claimed(run, made, capsys):
    """Its users are not those of that seed; and beside the real run it is seen to be a copy."""
    change_json(run / "config.json", seed=7)
    code, text = check(capsys, made, run)
    assert code == 1 and "as asked" in text
    assert "step 1 (and 1 more) are not those that seed 7 draws" in text
    assert f"its training dialogues are those of {made}, word for word, which has seed 0" in text


def test_the_same_run_twice(run, made, capsys):
    """With the same seed that may be chance: the toy is the same to the byte on like computers."""
    code, text = check(capsys, made, run)
    assert code == 0 and f"those of {made}, word for word, and so is its seed" in text


@pytest.mark.parametrize(
    "spoil, words",
    [
        (lambda run: shutil.rmtree(run), "no such directory"),
        (lambda run: [shutil.rmtree(run), run.mkdir()], "it lacks config.json, metrics.jsonl"),
        (lambda run: [shutil.rmtree(run), run.write_text("a run")], "no such directory"),
        (lambda run: (run / "metrics.jsonl").unlink(), "it lacks metrics.jsonl"),
        (lambda run: (run / "config.json").write_text("{}"), "not the settings of a run"),
        (lambda run: (run / "metrics.jsonl").write_text('{"a": 1}\n'), "metrics.jsonl, line 1"),
        (lambda run: (run / "dialogues.jsonl").write_bytes(b"\xff\n"), "not UTF-8 text"),
        (lambda run: change_json(run / "config.json", lr="fast"), "config.json: lr"),
        (lambda run: change_json(run / "config.json", wings=2), "unknown to this version"),
        (lambda run: remove_setting(run, "batch_size"), "batch_size is missing"),
        (
            lambda run: (run / "dialogues.jsonl").write_bytes(
                (run / "dialogues.jsonl").read_bytes()[:-99]
            ),
            "is the file half-written?",
        ),
    ],
)
def test_what_cannot_be_read(run, made, capsys, spoil, words):
    """One line with the file and what is wrong with it; the next run is checked all the same."""
    spoil(run)
    code, _ = check(capsys, run, made)
    assert code == 2
    capsys.readouterr()
    course.main(["check-run", str(run), str(made), f"--settings={FLAGS}"])
    out, err = capsys.readouterr()
    assert err.startswith(f"{run}: cannot be read: ") and err.count("\n") == 1 and words in err
    assert f"{made}: as asked" in out


def test_a_setting_of_another_version_that_was_not_used(run, capsys):
    change_json(run / "config.json", wings=None)
    assert check(capsys, run)[0] == 0


def test_no_file_of_a_run_is_overwritten(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    code, text = check(capsys, run, "--csv", run / "metrics.jsonl")
    assert code == 2 and "would overwrite" in text
    assert (run / "metrics.jsonl").read_bytes() == before


# ----------------------------------------------------------------------------------- the band


def test_a_run_that_leaves_the_band(run, capsys):
    """A run with the metrics of a reference run lies inside; one whose emotion is low leaves it,
    and the text says from which step on. (Its dialogues are not those of that run, of course.)"""
    (line,) = [line for line in reference_lines("variants") if line["name"] == "grpo-think-0"]
    change_json(run / "config.json", steps=30, batch_size=64, group_size=8, max_turns=8)
    columns = line["metrics"]
    steps = [dict(zip(columns, values)) for values in zip(*columns.values())]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
    assert "Its curves lie in the band" in check(capsys, run, settings="--think")[1]
    edit(run / "metrics.jsonl", lambda row, n: row.update(emotion=row["emotion"] - 20 * (n > 9)))
    code, text = check(capsys, run, settings="--think")
    assert "outside of the band" in text
    assert "It left the band of the reference runs: emotion from step 14 to 30 (" in text


# ------------------------------------------------------------------------------- the signatures


def reference_lines(*parts):
    """The lines of docs/reference/runs.jsonl of these parts."""
    lines = map(json.loads, (reference.PLACE / "runs.jsonl").open(encoding="utf-8"))
    return [line for line in lines if line["part"] in parts]


def run_of_line(line):
    """A line of docs/reference/runs.jsonl as a HandedIn, without dialogues."""
    columns = line["metrics"]
    metrics = [dict(zip(columns, values)) for values in zip(*columns.values())]
    settings = resolve_settings(read_flags(line["flags"].split()))
    return HandedIn(ROOT, settings, metrics, {}, {}, {})


@pytest.mark.parametrize("line", mistakes.lines(), ids=lambda line: line["name"])
def test_each_mistake_has_its_signature(line):
    """What a real run with the mistake logged, and no other signature is seen in it."""
    assert [signature.name for signature, _ in signatures_in(mistakes.run_of(line))] == [
        line["name"]
    ]


def test_the_users_tokens_explain_large_steps():
    """Trained with the user's tokens, the policy moves far; the lab user-words has both."""
    (line,) = [line for line in mistakes.lines() if line["name"] == "users-tokens"]
    run = mistakes.run_of(line)
    for row in run.rows:
        row["kl"] = 1.0
    assert [signature.name for signature, _ in signatures_in(run)] == ["users-tokens"]


def test_each_signature_has_a_run_and_says_what_it_is():
    """Its docstring says for which variants it holds, and where the limit comes from."""
    names = [signature.name for signature in SIGNATURES]
    assert names == [line["name"] for line in mistakes.lines()] == list(mistakes.mistakes())
    assert len(names) >= 6
    readme = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
    for signature in SIGNATURES:
        text = " ".join(signature.check.__doc__.split())
        assert "It holds for" in text or "in all variants" in text, signature.name
        assert "limit" in text.casefold(), signature.name
        assert f"| `{signature.name}` " in readme


def test_healthy_runs_have_none():
    """Runs that no limit was taken from: other rewards and advantages, adapters, challenging users,
    two threads, another processor's arithmetic."""
    healthy = reference_lines("rewards", "ranks", "challenging", "machine")
    assert len(healthy) > 50
    for line in healthy:
        for steps in (1, 4, 12, None):  # stopped early, or whole
            run = run_of_line(line)
            run.rows = run.rows[:steps]
            assert signatures_in(run) == [], (line["name"], steps)


def test_the_limits_are_those_of_the_first_steps():
    """A short run is compared with as many steps of the ten reference runs."""
    run = run_of_line(reference_lines("machine")[0])
    assert of_reference(run, "kl").shape == (10, len(run.rows))
    run.rows = run.rows[:4]
    assert of_reference(run, "kl").shape == (10, 4)


def test_the_mistakes_still_fit_the_project():
    """Whoever edits a patched line learns here that course/mistakes.toml must be edited with it."""
    for mistake in mistakes.mistakes().values():
        assert mistakes.lab_run(mistake).scripts


def test_a_healthy_run_is_answered_word_for_word(made):
    """The scripted user says the same to the same replies, in every dialogue of the run."""
    run = read_run(made)
    run.replayed = replay_sample(run, 0)
    turns = [t for d in rows(made / "dialogues.jsonl") for t in d["turns"]]
    sent = [turn for turn in turns if turn["emotion"] is not None]
    answered = [turn for turn in sent if turn["user"]]
    assert run.replayed == {"replies": len(sent), "lines": len(answered)}
    assert contradictions(run) == []
