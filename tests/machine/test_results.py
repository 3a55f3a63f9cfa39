"""Result files: what they hold, their scores, and comparisons of them."""

from players.policies import find_weights, load_both_sides, newest_run, settings_of_talk
from support.errors import BadInput
from support.files import read_json
from support.needs import need_of
from support.results import differences, what_scores_are

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

import evaluate
from emotion import NEEDS, scale_in_words
from evaluate import compare, score
from result_files import TASKS, measure, our_line, sage_line, write
from runs import files, refuse, rows

CHINESE = {
    "你想批判、辩证地分析事件中的问题": "analyse",
    "你想得到对眼前困境真正有帮助的建议": "advise",
    "你想知道事件里的其他人物为什么这么做": "explain",
    "你想被引导着自我反思，有所成长": "reflect",
    "你想要对方真诚地夸你做得好的地方": "praise",
    "你想有人用心倾听你的诉说": "listen",
    "你想被深深地共情，不只是被安慰": "empathise",
    "你认为自己没有责任，要对方也同意": "side",
}


def test_intentions_are_told_apart():
    themes = {sentence: name for name, need in NEEDS.items() for sentence in need.values()}
    for theme, name in {**themes, **CHINESE}.items():
        is_rational = name in ("explain", "analyse", "advise", "reflect")
        assert need_of(theme) == (name, "rational" if is_rational else "emotional")
    assert need_of("Something else.") == need_of(None) == ("other", "other")


# ------------------------------------------------------------------------------------------ scoring


def test_the_scale_stands_beside_a_score_and_what_is_scripted_says_so():
    """Numbers of two scales stood side by side: 87 in the README, 98 by the next command."""
    assert scale_in_words(30, 1) == "from 30, 1 reply"
    text = what_scores_are({"start": 30, "max_turns": 8, "simulator": "toy"})
    assert "from 30, 8 replies." in text and "user toy is a script" in text
    benchmark = {"start": 40, "max_turns": 10, "simulator": "a model"}
    assert "a script" not in what_scores_are(benchmark)


def test_scores_by_hand(tmp_path, capsys):
    """Mean, standard error, success at 100, failure below 10, and the same for each part. A single
    user has no standard error: "0.0" looked like certainty."""
    finals = [0, 9, 10, 55, 100, 100, 7]
    tasks = [*TASKS[:1] * 3, *TASKS[4:5] * 3, TASKS[1]]
    groups = ["negative", "passive"] * 3 + ["avoidant"]
    users = enumerate(zip(finals, tasks, groups))
    lines = [our_line(i, [f], *who, ended="goodbye") for i, (f, *who) in users]
    path = write(tmp_path / "r.jsonl", *lines)
    table = tmp_path / "s.json"
    assert measure("--score", path, "--json", table) == 0
    found = read_json(table)
    assert found["by"]["intention"]["praise"]["score"] == pytest.approx(np.mean(finals[3:6]))
    stderr = np.std(finals, ddof=1) / 7**0.5
    wanted = dict(score=np.mean(finals), stderr=stderr, success=200 / 7, failure=300 / 7, turns=1)
    assert {key: found[key] for key in wanted} == pytest.approx(wanted)
    out = capsys.readouterr().out
    columns = {line[:26].strip(): line[26:].split() for line in out.splitlines() if "%" in line}
    assert columns["all"][:2] == ["40.1", f"{stderr:.1f}"] and columns["all"][-1] == "7"
    assert columns["group: avoidant"][:2] == ["7.0", "-"]
    # the result first, how it was made last
    assert out.index("stderr") < out.index("score: mean") < out.index("by: policy")


@pytest.mark.parametrize(
    "bad, told",
    [
        ("{", "not a whole JSON object"),
        ("5", "no JSON object"),
        (our_line(7, [5]) | {"emo_point": 101}, "101 is not in 0..100"),
        (our_line(7, [5]) | {"emo_point": "5"}, "not supported between"),
        (our_line(7, [5]) | {"history": ["hello"]}, "string indices must be integers"),
        ({"id": "p7"}, "it lacks 'emo_point'"),
        (our_line(7, [-3, 5]), "-3 is not in 0..100"),
        (our_line(0, [5]), "stands in an earlier line already"),
        (sage_line(7, [5]), "SAGE's files: python -m tools.sage"),
    ],
)
def test_a_line_that_is_no_result_is_named(bad, told, tmp_path, capfd):
    path = write(tmp_path / "r.jsonl", our_line(0, [50]), bad, our_line(1, [70]))
    line = refuse(capfd, "--score", path, main=evaluate.main)
    assert line.startswith(f"evaluate.py: {path}, line 2: ") and told in line


def test_simulators_are_not_mixed(tmp_path):
    """The same dialogues shift by 20 points with another model behind the users: an average over
    two is a number about nothing. Nor are rules of the game."""
    for other in (dict(simulator="deepseek"), dict(simulator_temperature=1.0), dict(max_turns=8)):
        path = write(tmp_path / "r.jsonl", our_line(0, [50]), our_line(1, [70], **other))
        ((key, value),) = other.items()
        with pytest.raises(BadInput, match=f"2 simulators or settings .*{key} {value}"):
            score(path)
        result = score(path, anyway=True)
        assert result["score"] == 60
        if key == "simulator":  # all of them are named
            assert result["simulator"].endswith("; deepseek") and value in result["by_whom"]
        elif key == "max_turns":
            assert "8 replies" in result["scale"] and "10 replies" in result["scale"]


def test_all_settings_tell_results_apart():
    """Only keys that the new results have were compared: with --template-args, and then without,
    everything was there already, and the old score was printed as the new one."""
    here = {"policy": "p", "simulator_temperature": 0.0, "users": "abc", "world": None, "seed": 0}
    assert differences({**here, "ended": "goodbye", "traits": []}, here) == ""
    for key, value in {"template_args": {"a": 1}, "context": 9, "users": "abd"}.items():
        other = {**here, key: value}
        assert differences(other, here).startswith(f"{key} {value} there, ")
        assert differences(here, other).endswith(f"{value} here")


# -------------------------------------------------------------------------------------- comparisons


def side(tmp_path, name, finals, first=0):
    """A result file of users with these final emotions."""
    lines = [our_line(i, [f], ended="goodbye") for i, f in enumerate(finals, first)]
    return str(write(tmp_path / f"{name}.jsonl", *lines))


def test_pairing_tells_what_means_cannot(tmp_path):
    """Users differ by 30 points, the two policies by 4 on each: unpaired that is noise, paired it
    is certain."""
    rng = random.Random(0)
    base = [rng.randint(5, 85) for _ in range(60)]
    better = side(tmp_path, "a", [x + rng.randint(2, 6) for x in base])
    before = side(tmp_path, "b", base)
    result = compare(before, better)
    low, high = result["interval"]
    assert 3 < result["difference"] < 5 and low > 2 and result["p"] < 0.001
    told = f"after is better by {result['difference']:.1f}, {low:.1f} to {high:.1f}"
    assert result["sentence"] == told
    back = compare(better, before)
    assert back["sentence"].startswith("before is better by ")
    assert back["difference"] == -result["difference"]


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says(tmp_path, capsys):
    """Against simulation: of 100 experiments without a difference, about 5 tell one. The others say
    that they tell none."""
    told = 0
    for seed in range(100):
        rng = random.Random(seed)
        a, b = (side(tmp_path, name, [rng.randint(0, 100) for _ in range(40)]) for name in "ab")
        told += "better" in compare(a, b, draws=500)["sentence"]
    assert told <= 12
    assert compare(a, a)["p"] == 1
    assert measure("--compare", a, a) == 0
    said = " ".join(capsys.readouterr().out.split())  # the sentence is folded to 80 columns
    assert "no difference can be told at n = 40" in said


@pytest.mark.parametrize(
    "gains, said",
    [
        ([1, 2], "no clear difference at n = 2"),
        ([1, 5, 20], "no clear difference at n = 3"),
        ([1, 1, 1, 1, 1], "no clear difference at n = 5"),  # p is 1/16 at least
        ([1, 2, 3, 4, 5, 6], "after is better by 3.5, 2.2 to 4.8"),
        ([-1, -2, -3, -4, -5, -6], "before is better by 3.5, 2.2 to 4.8"),
        ([20, 20, 20, 20, -10, -15, 5, 1], "no difference can be told at n = 8"),
        ([9, 9, 9, 1, 1, 0, -1], "no clear difference at n = 7"),  # +0.7 to +7.3, p = 0.06
    ],
)
def test_interval_and_p_must_agree_on_a_verdict(gains, said, tmp_path):
    """The bootstrap's interval is too narrow for few users: two users who ended 1 and 2 higher were
    "better by 1.5", p = 0.5. Without any difference 43 of 100 such pairs were."""
    before, after = side(tmp_path, "a", [40] * len(gains)), [40 + gain for gain in gains]
    assert compare(before, side(tmp_path, "b", after))["sentence"] == said


def test_only_common_users_are_compared(tmp_path):
    first = side(tmp_path, "first", [50] * 10)
    assert compare(first, side(tmp_path, "other", [50] * 10, first=5))["n"] == 5
    with pytest.raises(BadInput, match="fewer than two users in common"):
        compare(first, side(tmp_path, "other", [50] * 10, first=20))


# ----------------------------------------------------------------------------- what is this policy?


@pytest.mark.slow
def test_the_same_weights_are_the_same_policy_however_they_are_named(
    half, tiny_dir, tmp_path, monkeypatch
):
    """A checkpoint was once measured without the settings of its run: 5 in place of 97, under the
    same name. A run, its newest checkpoint and a copy of that elsewhere are one policy; only the
    copy has another name."""
    newest = half / "checkpoint-000002"
    copied = shutil.copytree(newest, tmp_path / "copied")
    monkeypatch.chdir(tmp_path)
    before, histories = files(tiny_dir), []
    for policy, label in ((half, newest), (newest, newest), (copied, copied)):
        path = tmp_path / f"{len(histories)}.jsonl"
        flags = ["--policy", policy, "--limit", 4, "--max-turns", 2]
        assert measure(*flags, "--out", path) == 0
        dialogues = rows(path)
        assert dialogues[0]["rlver"].items() >= {"max_tokens": 6, "policy": str(label)}.items()
        histories.append([row["history"] for row in dialogues])
    assert histories[0] == histories[1] == histories[2]
    # without --out the results of a model are not written into its directory
    assert measure("--policy", tiny_dir, "--limit", 1, "--max-turns", 1) == 0
    assert files(tiny_dir) == before and list(Path("results").glob("*.jsonl"))


def test_a_policy_that_is_not_there_is_said_in_plain_words(half, tmp_path, monkeypatch, capfd):
    """Not in twelve lines of a download library's retries."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(half, tmp_path / "runs" / "mine")
    (tmp_path / "empty").mkdir()
    refuse(capfd, "--score", "nowhere.jsonl", main=evaluate.main)
    for flags in ("runs/TYPO", "empty", "runs/mine --think", "runs/mine --step 7"):
        refuse(capfd, "--policy", *flags.split(), main=evaluate.main)


def test_who_decides_a_flag_or_the_run():
    """The policy replies as it was trained, but for the length; its users are those of the flags; the
    run's reader belongs to the run's simulator."""
    names = "think lang max_tokens template_args simulator difficulty reader".split()
    flags, run = ({name: (side, name) for name in names} for side in ("flag", "run"))

    def deciders(flags, run):
        found = vars(settings_of_talk(flags, run)).items()
        return {name: value[0] for name, value in found if isinstance(value, tuple)}

    both = deciders(flags, run)
    of_run = {name for name, side in both.items() if side == "run"}
    assert of_run == {"think", "policy_lang", "template_args"}
    assert {*deciders(flags, {}).values()} == {"flag"} and deciders(flags, {}).keys() == both.keys()
    assert {*deciders({}, run).values()} == {"run"} and deciders({}, run).keys() == both.keys()
    assert both.keys() - deciders({"simulator": "toy"}, run).keys() == {"simulator", "reader"}


def test_a_readers_template_args_are_kept(half):
    """A run's policy has its own. A file was gone on with whose reader had been asked otherwise."""
    flags = '--reader openai:m@http://127.0.0.1:9/v1 --template-args {"a":1}'.split()
    for given, of_reader in ((flags, {"a": 1}), (flags[:2], None), ([], None)):
        *_, found = load_both_sides(evaluate.make_parser().parse_args(given), str(half))
        assert (found["template_args"], found["reader_template_args"]) == (None, of_reader)
        if given:  # and tools.replay asks it so again
            again = settings_of_talk({}, found | {"template_args": {"b": 2}})
            assert again.reader_template_args == of_reader


def test_the_newest_run_is_the_one_that_ended_last(tmp_path, monkeypatch):
    """Whatever was written into another run's directory since."""
    monkeypatch.chdir(tmp_path)
    for name in ("new", "old"):
        path = Path("runs", name, "summary.json")
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(path, (1, 1))
    assert newest_run() == "runs/new"


def test_a_run_without_a_checkpoint_is_measured_only_where_it_started(tmp_path):
    """Whoever asks for its newest step must not be given the start in its place."""
    (tmp_path / "config.json").write_text('{"model": "toy", "algo": "grpo"}')
    assert find_weights(tmp_path, 0).weights == "toy"
    with pytest.raises(BadInput, match="no such checkpoint; --step 0 measures where it started"):
        find_weights(tmp_path, None)
