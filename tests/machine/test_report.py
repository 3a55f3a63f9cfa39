"""support/report.py and tools/report.py: what the page of a run holds, that nothing a model says
runs there, and that a damaged run is a line on the terminal."""

from support import report
from support.files import write_json
from support.settings import resolve_settings

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.figure import Figure

from people import toy_profiles
from tools.report import draw_panel, main

# What a policy, or a user's model, might say. Each must come out as the text that it is.
HOSTILE = (
    "</p></details><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> {{ 1 }}"
    " \u2028 \ud83d half a pair, \x1b, \u202eturned round"
)
BEFORE = dict(step=0, score=21.06, stderr=1.3, success=0.0, failure=36.72, malformed=1.0, n=128)
AFTER = dict(step=2, score=85.04, stderr=1.42, success=30.5, failure=0.78, malformed=0.8, n=128)


def write(path, *rows):
    """A JSONL file, in which half a surrogate pair is an escape."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """The directory of a run of two steps, with one held-out user who is told hostile things."""
    out = tmp_path / "a <b>run"
    settings = {"algo": "grpo", "steps": 4, "max_turns": 3, "eval_size": 1, "simulator": "toy"}
    write_json(out / "config.json", vars(resolve_settings(settings)))
    write_json(
        out / "checkpoint-000002" / "state.json", {"step": 2, "evaluations": [BEFORE, AFTER]}
    )
    row = {"emotion": 40.0, "emotion_std": 15.0, "failure": 30.0, "kl": 2e-4, "clipfrac": 0.0}
    write(out / "metrics.jsonl", *[{**row, "step": step} for step in (1, 2)])
    (person,) = toy_profiles("heldout", 1)
    turn = dict.fromkeys(("reply", "thought", "user", "analysis"), HOSTILE)
    answer = json.dumps({"content": HOSTILE, "code": "bcdf", "change": -3})
    turns = [{**turn, "change": -3, "emotion": 27, "analysis": answer}]
    turns += [{**turn, "change": None, "emotion": None}]
    dialogue = {"profile_id": person.id, "split": "heldout", "turns": turns, "ended": "malformed"}
    dialogue |= {"first_line": HOSTILE, "group": 0}
    dialogues = [{**dialogue, "step": step, "reward": 0.1 + step / 4} for step in (0, 2)]
    write(out / "dialogues.jsonl", *dialogues)
    with open(out / "dialogues.jsonl", "a") as file:
        file.write('{"split": "heldout", "st')  # of a process that was killed as it wrote
    return out


def read(page):
    """The text of a page, in which nothing may run and nothing be fetched."""
    html = page.read_text("utf-8")
    assert "<script" not in html and "<img" not in html and "default-src 'none'" in html
    # the names of a picture's formats are no addresses that a browser fetches
    assert not re.search(r"(https?:)?//\w", re.sub("<svg.*?</metadata>", "", html, flags=re.S))
    return html


def test_the_page_of_a_run(run):
    """Numbers and words of the log, each word as a text. The picture beside it is one."""
    html = read(
        report.draw(run, toy_profiles("heldout", 1))
    )  # without a summary.json: the run is not over
    assert html.count("&lt;script&gt;window.pwned = 1") == 18  # two sides of nine texts
    assert "bcdf" not in html and "&#34;content" not in html  # an analysis is told in sentences
    assert "21.1 ± 1.3 → 85.0 ± 1.4" in html
    assert "from 30, 3 replies" in html and "2 of 4 training steps" in html
    assert "The user toy is a script" in html and "27 (-3)" in html
    assert "KL within the update" in html and "Clipped" not in html and "never trained on" in html
    assert html.count("<svg") == 1
    write_json(run / "summary.json", {"evaluations": [BEFORE, {**AFTER, "score": 90.0}]})
    page = report.draw(run, toy_profiles("heldout", 1))
    assert "90.0 ± 1.4" in read(page)
    page.unlink()
    assert main([str(run)]) == 0 and "90.0 ± 1.4" in read(page)
    assert (run / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "dialogues.jsonl", "checkpoint-000002"]
)
def test_a_damaged_run_is_one_line(run, name, capsys):
    """It is no reason to end a run of days."""
    path = run / name
    if path.is_dir():
        path = path / "state.json"
    path.write_text(json.dumps(["heldout"]) + "\n")
    assert report.draw(run, toy_profiles("heldout", 1)) is None and main([str(run)]) == 2
    error = capsys.readouterr().err
    told = error.count("the report could not be written: ") + error.count("there is no run here")
    assert told == error.count("\n") == 2


# ------------------------------------------------------------------------------ beside each other


@pytest.fixture
def make(tmp_path, monkeypatch):
    """make(name, final, people=(0, 8), **settings): the directory of a run of two steps in which
    each of these held-out users ended at `final`, one of them at 9 less."""
    monkeypatch.chdir(tmp_path)

    def make(name, final=50, people=(0, 8), step=2, prompts="a", **settings):
        held_out = toy_profiles("heldout", 128)[slice(*people)]
        given = {"algo": "grpo", "steps": 2, "simulator": "toy", **settings}
        write_json(tmp_path / name / "config.json", vars(resolve_settings(given)))
        after = dict(BEFORE, step=step, score=final)
        evaluations = [BEFORE, after][: 1 + bool(step)]
        state = {"step": step, "evaluations": evaluations, "user_prompts": prompts}
        state["seconds"] = {"total": 100 + final}
        write_json(tmp_path / name / f"checkpoint-00000{step}" / "state.json", state)
        rows = [{"step": n, "emotion": final + n, "tokens_sampled": 500} for n in (1, 2)]
        write(tmp_path / name / "metrics.jsonl", *rows[:step])
        dialogues = [
            {
                "profile_id": one.id,
                "split": "heldout",
                "step": at,
                "reward": (final - 9 * (not n)) / 100,
            }
            for n, one in enumerate(held_out)
            for at in (0, 2)
        ]
        write(tmp_path / name / "dialogues.jsonl", *dialogues)
        return name

    return make


def row_of(html, start):
    """The texts of the first row of a table that begins with `start`."""
    for row in re.findall("<tr>.*?</tr>", html, re.S):
        cells = [re.sub("<svg.*?</svg>|<.*?>", " ", cell) for cell in re.split("<t[dh]>", row)[1:]]
        texts = [" ".join(cell.split()) for cell in cells]
        if texts and texts[0].startswith(start):
            return texts
    return None


def test_runs_beside_each_other(make, tmp_path):
    """Seeds of the same settings are one line, mean and range, also where they are drawn. (Seen when
    put back: the seed as a setting like the others; the first run in place of the mean; a verdict
    on the pooled dialogues, which would have n = 24; a name that is a tag, or a
    formula.)"""
    seeds = [make(f"s{seed}", 50 + 10 * seed, seed=seed) for seed in range(3)]
    other, again = make("<b>$\\o$", 80, lr=1e-3), make("again", seed=0)
    assert main([*seeds, other, again]) == 0
    html = read(tmp_path / "runs" / "compare.html")
    assert "<h1>5 runs" in html and (tmp_path / "runs" / "compare.png").stat().st_size > 10_000
    line = row_of(html, "s0 (3 seeds) s0, s1, s2; from 30, 8 replies")
    assert line[3] == "60.0 50.0 to 70.0" and line[5] == "0.0"
    assert line[7:] == ["2", "160 150 to 170", "1,000"]
    assert (
        row_of(html, "&lt;b&gt;$\\o$ from")[3] == "80.0" and row_of(html, "again from")[3] == "50.0"
    )
    assert row_of(html, "lr")[2] == "0.001" and row_of(html, "seed")[1:] == ["0, 1, 2", "0", "0"]
    assert not row_of(html, "steps") and html.count("The user toy is a script") == 1
    better = row_of(html, "s0 (3 seeds) and &lt;b&gt;$\\o$")
    assert (
        better[0].endswith("$\\o$ is better by 20.0, 20.0 to 20.0 They differ in seed, lr.")
        and better[-1] == "8"
    )
    worse = row_of(html, "s0 (3 seeds) and again s0 (3 seeds) is better by 10.0")
    assert worse[1] == "-10.0 -10.0 to -10.0"

    runs = [
        SimpleNamespace(
            path="a",
            steps=np.arange(1, 1 + len(curve)),
            curves={"emotion": curve},
            evaluations=[AFTER],
        )
        for curve in ([10, 15, 20], [30, 32.5])
    ]
    axis = Figure().add_subplot()
    draw_panel([runs, runs[:1]], axis, "emotion")
    assert axis.lines[0].get_ydata().tolist() == [20, 23.75]  # as far as all of them went
    assert axis.collections[0].get_paths()[0].get_extents().intervaly.tolist() == [10, 32.5]
    one, other = axis.lines[0], axis.lines[3]  # behind one are the points of two runs
    assert one.get_color() != other.get_color() and one._dash_pattern != other._dash_pattern


@pytest.mark.parametrize(
    "other, said",
    [
        (dict(simulator="toy-weak"), "cannot be compared: they differ in simulator"),
        (dict(max_turns=3), "they differ in max_turns"),
        (dict(prompts="b"), "<b>the user&#39;s prompts were edited between these results"),
        (dict(people=(3, 11)), "no verdict: 5 people in common, 6 are needed"),
        (dict(people=(8, 16)), "<b>the files have fewer than two users in common"),
        (dict(step=0), "no verdict before both have an evaluation after training"),
        (dict(people=(2, 10)), "<b>b is better by 28.5, 25.5 to 30.0"),  # six, the twin of five
    ],
)
def test_what_cannot_be_compared_is_said(make, tmp_path, monkeypatch, other, said):
    """In the table of the verdicts, and the runs stand beside each other all the same. With five
    people in common no p is below 0.05, however good one of the two is."""
    monkeypatch.setattr("tools.report.draw_panels", lambda *_: [])
    assert main([make("a"), make("b", 80, **other), "--out", "p/page.html"]) == 0
    html = read(tmp_path / "p" / "page.html")
    verdict = html[: html.index("<h2>Scores")]
    assert said in verdict and verdict.count("<b>b is better") == ("better" in said)
    assert "from 30" in row_of(html, "b from")[0]


def test_what_is_asked_wrongly_is_one_line(make, tmp_path, capsys):
    """And nothing is written."""
    good, bare = make("a"), make("bare")
    (tmp_path / "bare" / "metrics.jsonl").unlink()
    (tmp_path / "empty").mkdir()
    broken = make("broken")
    write(tmp_path / "broken" / "dialogues.jsonl", {"split": "heldout"})
    odd = make("odd")
    write(tmp_path / "odd" / "metrics.jsonl", {"step": 1, "kl": "much"})
    many = [make(f"m{n}", lr=n / 100) for n in range(1, 10)]
    for argv, said in [
        ([good, bare], "no step is in it"),
        ([good, "empty"], "there is no run here"),
        ([good, broken], "broken: KeyError"),
        ([good, odd], "odd: ValueError"),
        ([good, "./a"], "each named once"),
        ([good, many[0], "--out", "x.png"], "ends in .html"),
        ([good, "--out", "x.html"], "--out has no effect with one RUN"),
        (many, "9 runs differ in more than their seed; 8 may"),
    ]:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error
    assert not [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.png")]
