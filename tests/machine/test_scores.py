"""evaluate.py: scores of result files, ours and SAGE's, and comparisons of them."""

from support.errors import BadInput
from support.results import compare, files_of_side, final_of, intention_of, read_results, score

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import evaluate
from result_files import TASKS, our_line, sage_line, write
from toy.words import NEEDS

pytestmark = pytest.mark.usefixtures("no_pictures")


# --------------------------------------------------------------------------------------- intentions


@pytest.mark.parametrize(
    "task, name, kind",
    [
        *[
            (need.theme, name, "rational" if i < 4 else "emotional")
            for i, (name, need) in enumerate(NEEDS.items())
        ],
        ("你想批判、辩证地分析事件中的问题", "analyse", "rational"),
        ("你想得到对眼前困境真正有帮助的建议", "advise", "rational"),
        ("你想知道事件里的其他人物为什么这么做", "explain", "rational"),
        ("你想被引导着自我反思，有所成长", "reflect", "rational"),
        ("你想要对方真诚地夸你做得好的地方", "praise", "emotional"),
        ("你想有人用心倾听你的诉说", "listen", "emotional"),
        ("你想被深深地共情，不只是被安慰", "empathise", "emotional"),
        ("你认为自己没有责任，要对方也同意", "side", "emotional"),
        ("Something else.", "other", "other"),
        (None, "other", "other"),
    ],
)
def test_intentions_are_told_apart(task, name, kind):
    assert intention_of(task) == (name, kind)


# ------------------------------------------------------------------------------------------ scoring


def test_scores_by_hand(tmp_path, capsys):
    """Mean, standard error, success at 100, failure below 10, and the same for each part."""
    finals = [0, 9, 10, 55, 100, 100]
    path = write(
        tmp_path / "r.jsonl",
        *[
            our_line(i, [f], TASKS[i % 2 * 4], ["negative", "passive"][i % 2], ended="goodbye")
            for i, f in enumerate(finals)
        ],
    )
    assert evaluate.main(["--score", str(path), "--json", str(tmp_path / "s.json")]) == 0
    s = json.loads((tmp_path / "s.json").read_text())
    assert s["score"] == pytest.approx(np.mean(finals)) and s["stderr"] == pytest.approx(
        np.std(finals, ddof=1) / 6**0.5
    )
    assert (
        s["success"] == pytest.approx(100 / 3)
        and s["failure"] == pytest.approx(100 / 3)
        and s["n"] == 6
    )
    assert (
        s["by"]["kind"]["rational"]["score"] == pytest.approx(np.mean(finals[::2]))
        and s["by"]["group"]["passive"]["n"] == 3
    )
    assert (
        s["turns"] == 1
        and s["length"] == len("reply 0")
        and s["rule"] == "every"
        and s["unusable"] == 0
    )
    out = capsys.readouterr().out
    assert "hidden need: praise" in out and "rule '" not in out  # the default needs none
    # the result first, how it was made last
    assert out.index("stderr") < out.index("score: mean") < out.index("by: policy")
    assert evaluate.main(["--score", str(path), str(path), "--json", str(tmp_path / "s.json")]) == 0
    assert len(json.loads((tmp_path / "s.json").read_text())) == 2


def test_a_single_user_has_no_standard_error(tmp_path, capsys):
    """Its "stderr 0.0" looked like certainty. The terminal says "-"."""
    path = write(
        tmp_path / "r.jsonl", *[our_line(i, [50 + i], TASKS[min(i, 1) * 4]) for i in range(3)]
    )
    assert evaluate.main(["--score", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {line[:26].strip(): line[26:].split() for line in lines if "%" in line}
    assert columns["all"][:2] == ["51.0", "0.6"] and columns["all"][-1] == "3"
    alone = [numbers for numbers in columns.values() if numbers[-1] == "1"]
    assert alone and all(numbers[1] == "-" for numbers in alone)


def test_two_simulators_that_rank_three_policies(tmp_path, capsys):
    """By hand: 1, 2, 3 and 1, 3, 2 have rho = 1 - 6 (0 + 1 + 1) / (3 (9 - 1)) = 0.5."""
    for user, finals in (("a", (10, 30, 80)), ("b", (60, 70, 65))):
        folder = tmp_path / f"{user}_based_simulator"
        folder.mkdir()
        for policy, final in zip("pqr", finals):
            write(folder / f"{policy}.jsonl", *[sage_line(i, [final]) for i in range(3)])
    files = [str(path) for path in sorted(tmp_path.glob("*_simulator/*.jsonl"))]
    assert evaluate.main(["--score", *files]) == 0
    assert "ranks of 3 policies, a_based_simulator and b_based_simulator: rho = 0.50" in (
        " ".join(capsys.readouterr().out.split())
    )
    assert evaluate.main(["--score", *files[:5]]) == 0
    assert "rho" not in capsys.readouterr().out


def test_the_released_sample():
    """Three of SAGE's own dialogues: scores, shares and what they are parted by."""
    path = Path(evaluate.__file__).parent.parent / "shared" / "data" / "sage_results_sample.jsonl"
    if not path.exists():
        pytest.skip("the sample of the released files is not there")
    found = score(path)
    assert found["n"] == 3 and found["rule"] == "sage" and found["score"] == pytest.approx(20 / 3)
    assert found["failure"] == pytest.approx(200 / 3) and found["success"] == 0
    assert found["by"]["intention"]["listen"]["score"] == 15 and found["turns"] == pytest.approx(
        22 / 3
    )
    assert found["positive"] == pytest.approx(100 / 7) and found["malformed"] == 0


def test_both_rules(tmp_path):
    """SAGE holds ten replies and scores nine. Ours can be scored so too; SAGE's own only so."""
    full, early = (
        our_line(1, [45, 50, 55, 60, 65, 70, 75, 80, 85, 95]),
        our_line(2, [50, 100], ended="emotion_max"),
    )
    # at the very last reply: SAGE never scores it
    late = our_line(4, [45, 50, 55, 60, 65, 70, 75, 80, 90, 100], ended="emotion_max")
    assert [
        final_of(read_results(write(tmp_path / "l.jsonl", late))[0][0], rule)
        for rule in ("every", "sage")
    ] == [100, 90]
    sage = sage_line(3, [45, 50, 55, 60, 65, 70, 75, 80, 85])
    path = write(tmp_path / "ours.jsonl", full, early)
    assert score(path)["score"] == (95 + 100) / 2 and score(path, "sage")["score"] == (85 + 100) / 2
    theirs = write(tmp_path / "sage.jsonl", sage)
    assert (
        score(theirs)["score"] == 85
        and score(theirs)["rule"] == "sage"
        and score(theirs)["turns"] == 10
    )
    with pytest.raises(BadInput, match="do not score a tenth reply"):
        score(theirs, "every")
    [row], _ = read_results(theirs)
    assert row["emotions"] == [45, 50, 55, 60, 65, 70, 75, 80, 85]


BAD = [
    ("{", "not a whole JSON object"),
    ("[1]", "'list' object has no attribute"),
    ({**sage_line(7, [5]), "emo_point": 101}, "101 is not in 0..100"),
    ({**sage_line(7, [5]), "emo_point": "5"}, "'5' is not in 0..100"),
    ({k: v for k, v in sage_line(7, [5]).items() if k != "history"}, "KeyError('history')"),
    ({**sage_line(7, [5]), "history": ["hello"]}, "string indices must be integers"),
    (sage_line(7, [-3, 5]), "-3 is not in 0..100"),
    (sage_line(0, [5]), "stands in an earlier line already"),
]


@pytest.mark.parametrize("bad, told", BAD, ids=[told for _, told in BAD])
def test_a_bad_line_is_named_counted_and_not_averaged(bad, told, tmp_path, capsys):
    path = write(tmp_path / "r.jsonl", sage_line(0, [50]), bad, sage_line(1, [70]))
    assert evaluate.main(["--score", str(path)]) == 2
    out, err = capsys.readouterr()
    assert f"{path}, line 2: " in err and told in err and len(err.splitlines()) == 1
    assert "1 lines could not be used" in out
    assert score(path)["score"] == 60 and score(path)["unusable"] == 1


def test_files_without_anything_usable(tmp_path, capsys):
    for content in ("", "\n\n", "{\n", "\ufeff"):
        path = tmp_path / "r.jsonl"
        path.write_text(content, encoding="utf-8")
        assert evaluate.main(["--score", str(path)]) == 2
    assert evaluate.main(["--score", str(tmp_path / "none.jsonl")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) >= 5 and all(line.startswith("evaluate.py: ") for line in told)


def test_simulators_are_not_mixed(tmp_path):
    """The same dialogues shift by 20 points with another model behind the users: an average over
    two is a number about nothing."""
    path = write(tmp_path / "r.jsonl", our_line(0, [50]), our_line(1, [70], simulator="deepseek"))
    with pytest.raises(
        BadInput, match="2 simulators or settings .*.simulator deepseek, .*; simulator toy, "
    ):
        score(path)
    assert score(path, anyway=True)["score"] == 60
    # nor are rules of the game
    path = write(tmp_path / "t.jsonl", our_line(0, [50]), our_line(1, [70], max_turns=8))
    with pytest.raises(BadInput, match="max_turns 8"):
        score(path)


# -------------------------------------------------------------------------------------- comparisons


def side(tmp_path, name, finals, **more):
    return str(
        write(
            tmp_path / f"{name}.jsonl",
            *[our_line(i, [int(f)], ended="goodbye", **more) for i, f in enumerate(finals)],
        )
    )


@pytest.mark.slow
def test_pairing_tells_what_means_cannot(tmp_path):
    """Users differ by 30 points, the two policies by 4 on each: unpaired that is noise, paired it
    is certain."""
    rng = random.Random(0)
    base = [rng.randint(5, 85) for _ in range(60)]
    a, b = side(tmp_path, "a", [x + rng.randint(2, 6) for x in base]), side(tmp_path, "b", base)
    result = compare([b], [a])  # before, after
    assert 3 < result["difference"] < 5 and result["interval"][0] > 2 and result["p"] < 0.001
    assert (
        result["sentence"] == f"after is better by {result['difference']:.1f}, "
        f"{result['interval'][0]:.1f} to {result['interval'][1]:.1f}"
    )
    back = compare([a], [b])
    assert (
        back["sentence"].startswith("before is better by ")
        and back["difference"] == -result["difference"]
    )
    unpaired = (np.var(base, ddof=1) * 2 / 60) ** 0.5
    assert result["difference"] < 2 * unpaired


@pytest.mark.slow
def test_no_difference_is_said_so(tmp_path, capsys):
    rng = random.Random(1)
    a, b = (side(tmp_path, name, [rng.randint(0, 100) for _ in range(100)]) for name in "ab")
    assert compare([a], [b])["sentence"] == "no difference can be told at n = 100"
    assert compare([a], [a])["p"] == 1
    assert evaluate.main(["--compare", a, b]) == 0
    printed = " ".join(capsys.readouterr().out.split())  # the sentence is folded to 80 columns
    assert "no difference can be told" in printed


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says(tmp_path):
    """Against simulation: of 100 experiments without a difference, about 5 tell one."""
    told = 0
    for seed in range(100):
        rng = random.Random(seed)
        a, b = (side(tmp_path, name, [rng.randint(0, 100) for _ in range(40)]) for name in "ab")
        told += "better" in compare([a], [b], draws=500)["sentence"]
    assert told <= 12


@pytest.mark.slow
def test_several_seeds_are_one_side(tmp_path):
    """Three seeds of a method that swings by 20 points between them: with one seed each the
    difference looks certain, with three not."""
    rng = random.Random(2)
    base = [rng.randint(30, 50) for _ in range(60)]
    a = [side(tmp_path, f"a{s}", [x + shift for x in base]) for s, shift in enumerate((20, 0, -18))]
    b = [
        side(tmp_path, f"b{s}", [x + shift + rng.randint(-1, 1) for x in base])
        for s, shift in enumerate((-9, 9, 0))
    ]
    assert "better" in compare(a[:1], b[:1])["sentence"]
    result = compare(a, b)
    assert result["seeds"] == [3, 3] and "no difference" in result["sentence"]
    assert files_of_side(f"{tmp_path}/a?.jsonl") == a and files_of_side(",".join(a)) == a


def test_only_common_users_are_compared(tmp_path):
    def file(users, **more):
        lines = [our_line(i, [50], ended="x", **more) for i in users]
        return [str(write(tmp_path / f"{users}{more}.jsonl", *lines))]

    first = file(range(10))
    assert compare(first, file(range(5, 15)))["n"] == 5
    with pytest.raises(BadInput, match="fewer than two users in common"):
        compare(first, file(range(20, 30)))
    with pytest.raises(BadInput, match="2 simulators or settings"):
        compare(first, file(range(10), simulator="other"))


def test_scoring_ten_thousand_lines_needs_no_torch(tmp_path):
    """`--score` is for anybody with a result file; importing torch would be most of its time."""
    path = write(tmp_path / "r.jsonl", our_line(0, [50]))
    code = "import sys, evaluate; evaluate.main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code, "--score", str(path)],
            cwd=Path(evaluate.__file__).parent,
            capture_output=True,
        ).returncode
        == 0
    )
