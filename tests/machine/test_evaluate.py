"""evaluate.py: the Sentient Benchmark, comparisons, and whether the user may be trusted. Result
files are made here, in SAGE's format."""

from support.results import intention_of, read_results

import json
import random
import re
import shutil

import numpy as np
import pytest

import evaluate
import rlver
import toy
from evaluate import BadInput, arithmetic, compare, consistency, final_of, score
from server import Loopback, completion
from simulator import make_simulator, toy_profiles

pytestmark = pytest.mark.usefixtures("no_pictures")
TASKS = [need.theme for need in toy.NEEDS.values()]


def sage_line(number, emotions, task=TASKS[0], group="被动型", **more):
    """A dialogue as SAGE's released files hold it: the emotion stands at each line of the user, and
    a tenth reply has none behind it."""
    history = [{"role": "user", "content": "Well.", "emotion-point": 40}]
    for k, emotion in enumerate(emotions):
        history += [
            {"role": "assistant", "content": f"reply {k}"},
            {
                "role": "user",
                "content": f"line {k}",
                "thinking": "t",
                "emotion-point": emotion,
                "planning": {
                    "activity": "a",
                    "TargetCompletion": "t",
                    "content": "c",
                    "analyse": "x",
                    "change": 0,
                },
            },
        ]
    if len(emotions) == 9:
        history.append({"role": "assistant", "content": "never scored"})
    return {
        "id": f"p{number}",
        "emo_point": emotions[-1],
        "emo_state": "Emotion-F",
        "target": "eq",
        "player": "p",
        "scene": "s",
        "character": group,
        "topic": "t",
        "task": task,
        "history": history,
        **more,
    }


def our_line(
    number,
    emotions,
    task=TASKS[0],
    group="passive",
    ended="turn_limit",
    simulator="toy",
    policy="a",
    max_turns=10,
):
    history, last = [{"role": "user", "content": "Well.", "emotion-point": 40}], 40
    for k, emotion in enumerate(emotions):
        history += [
            {
                "role": "assistant",
                "content": f"reply {k}",
                "rlver": {
                    "thought": "",
                    "change": emotion - last,
                    "emotion": emotion,
                    "analysis": "a",
                },
            }
        ]
        if k + 1 < len(emotions):
            history += [{"role": "user", "content": f"line {k}", "emotion-point": emotion}]
        last = emotion
    return {
        "id": f"p{number}",
        "emo_point": last,
        "emo_state": "E",
        "player": "p",
        "scene": "s",
        "character": group,
        "topic": "",
        "task": task,
        "history": history,
        "rlver": {
            "policy": policy,
            "simulator": simulator,
            "start": 40,
            "max_turns": max_turns,
            "ended": ended,
        },
    }


def write(path, *lines):
    path.write_text(
        "".join(
            (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n"
            for line in lines
        ),
        encoding="utf-8",
    )
    return path


# --------------------------------------------------------------------------------------- intentions


@pytest.mark.parametrize(
    "task, name, kind",
    [
        *[
            (need.theme, name, "rational" if i < 4 else "emotional")
            for i, (name, need) in enumerate(toy.NEEDS.items())
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
    assert "every reply is scored" in out and "intention: praise" in out
    assert evaluate.main(["--score", str(path), str(path), "--json", str(tmp_path / "s.json")]) == 0
    assert len(json.loads((tmp_path / "s.json").read_text())) == 2


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
    ("[1]", "a JSON object is needed"),
    ({**sage_line(7, [5]), "emo_point": 101}, "101 is not in 0..100"),
    ({**sage_line(7, [5]), "emo_point": "5"}, "'emo_point' is a str"),
    ({k: v for k, v in sage_line(7, [5]).items() if k != "history"}, "'history' is missing"),
    ({**sage_line(7, [5]), "history": ["hello"]}, "no message"),
    (sage_line(7, [-3, 5]), "-3 is not in 0..100"),
    (sage_line(0, [5]), "stands in line 1 already"),
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
        BadInput, match="2 simulators or settings .simulator deepseek, .*; simulator toy, "
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
    assert (
        evaluate.main(["--compare", a, b]) == 0
        and "no difference can be told at n = 100" in capsys.readouterr().out
    )


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
    assert evaluate.seeds_of(f"{tmp_path}/a?.jsonl") == a and evaluate.seeds_of(",".join(a)) == a


def test_only_common_users_are_compared(tmp_path):
    a = write(tmp_path / "a.jsonl", *[our_line(i, [50], ended="x") for i in range(0, 10)])
    b = write(tmp_path / "b.jsonl", *[our_line(i, [50], ended="x") for i in range(5, 15)])
    assert compare([str(a)], [str(b)])["n"] == 5
    c = write(tmp_path / "c.jsonl", *[our_line(i, [50], ended="x") for i in range(20, 30)])
    with pytest.raises(BadInput, match="fewer than two users in common"):
        compare([str(a)], [str(c)])
    d = write(
        tmp_path / "d.jsonl", *[our_line(i, [50], ended="x", simulator="other") for i in range(10)]
    )
    with pytest.raises(BadInput, match="different simulators or settings"):
        compare([str(a)], [str(d)])


# ------------------------------------------------------------------------------------ the benchmark


@pytest.fixture(scope="module")
def results(tiny_dir, tmp_path_factory):
    """The benchmark of a random model, twelve users."""
    path = tmp_path_factory.mktemp("benchmark") / "r.jsonl"
    assert (
        evaluate.main(
            ["--policy", str(tiny_dir), "--max-tokens", "6", "--limit", "12", "--out", str(path)]
        )
        == 0
    )
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def test_the_benchmark_in_sages_format(results):
    """Their field names, ours under a name of our own; the emotions in the history are those that
    the score is made of."""
    found = lines(results)
    assert len(found) == 12
    for line in found:
        assert {
            "id",
            "emo_point",
            "emo_state",
            "player",
            "scene",
            "character",
            "task",
            "history",
            "rlver",
        } <= set(line)
        assert line["history"][0]["emotion-point"] == 40 == line["rlver"]["start"]
        replies = [m for m in line["history"] if m["role"] == "assistant"]
        assert 1 <= len(replies) <= 10 and line["emo_point"] == replies[-1]["rlver"]["emotion"]
        emotions = [40] + [m["rlver"]["emotion"] for m in replies]
        assert all(9 < e < 100 for e in emotions[:-1])  # it stops below 10 and at 100, at once
        assert line["rlver"]["ended"] in (
            "turn_limit",
            "goodbye",
            "emotion_min",
            "emotion_max",
            "context",
        )
        assert (line["rlver"]["ended"] == "emotion_min") == (line["emo_point"] < 10)
        for m, after in zip(line["history"][1::2], line["history"][2::2]):
            assert (
                after["planning"]["change"] == m["rlver"]["change"]
                and after["emotion-point"] == m["rlver"]["emotion"]
            )
            assert (
                set(after["planning"])
                == {"activity", "TargetCompletion", "content", "analyse", "change"}
                and after["thinking"]
            )


@pytest.mark.slow
def test_a_stopped_evaluation_continues(results, tiny_dir, tmp_path):
    """What is there is kept, half a line is done again, and the whole is what one go would have
    given."""
    path = tmp_path / "r.jsonl"
    text = results.read_text(encoding="utf-8")
    path.write_text(
        "".join(text.splitlines(keepends=True)[:5]) + text.splitlines()[5][:40], encoding="utf-8"
    )
    before = path.read_text(encoding="utf-8").rsplit("\n", 1)[0]
    evaluate.main(
        ["--policy", str(tiny_dir), "--max-tokens", "6", "--limit", "12", "--out", str(path)]
    )
    assert path.read_text(encoding="utf-8").startswith(before)
    by_id = lambda p: {line["id"]: line for line in lines(p)}
    assert set(by_id(path)) == set(by_id(results)) and len(lines(path)) == 12
    with pytest.raises(BadInput, match="holds results of"):
        evaluate.run(
            evaluate.make_parser().parse_args(
                ["--policy", str(tiny_dir), "--limit", "12", "--seed", "1", "--out", str(path)]
            )
        )


def test_a_fixed_first_line_is_used(tiny_dir, tmp_path):
    rows = [
        {**vars(p), "first_talk": f"Hello {i}."} for i, p in enumerate(toy_profiles("heldout", 3))
    ]
    profiles = write(tmp_path / "p.jsonl", *rows)
    assert (
        evaluate.main(
            [
                "--policy",
                str(tiny_dir),
                "--profiles",
                str(profiles),
                "--max-tokens",
                "4",
                "--out",
                str(tmp_path / "r.jsonl"),
            ]
        )
        == 0
    )
    assert {line["history"][0]["content"] for line in lines(tmp_path / "r.jsonl")} == {
        "Hello 0.",
        "Hello 1.",
        "Hello 2.",
    }
    assert all(
        line["history"][1]["role"] == "assistant" and line["history"][0]["role"] == "user"
        for line in lines(tmp_path / "r.jsonl")
    )


def test_a_policy_behind_a_server(tmp_path):
    """It is sent the whole dialogue as messages, its own thoughts left out; its malformed replies
    are malformed there too."""
    seen = []

    def reply(request):
        seen.append(request["messages"])
        return (
            200,
            {},
            completion(
                "<think>secret</think>I am here, let it all out."
                if len(request["messages"]) < 6
                else "no tags"
            ),
        )

    with Loopback(reply=reply) as server:
        assert (
            evaluate.main(
                [
                    "--policy",
                    f"openai:m@{server.url}",
                    "--think",
                    "--limit",
                    "2",
                    "--max-turns",
                    "4",
                    "--out",
                    str(tmp_path / "r.jsonl"),
                ]
            )
            == 0
        )
    found = lines(tmp_path / "r.jsonl")
    assert {line["rlver"]["ended"] for line in found} <= {
        "malformed",
        "goodbye",
        "emotion_min",
    } and found[0]["rlver"]["policy"] == "openai:m"
    assert all(
        m["role"] == ("system" if k == 0 else "user" if k % 2 else "assistant")
        for messages in seen
        for k, m in enumerate(messages)
    )
    assert (
        "secret" not in json.dumps(seen) and found[0]["history"][1]["rlver"]["thought"] == "secret"
    )


@pytest.mark.slow
def test_a_run_that_never_finished_a_step(tiny_dir, tmp_path, capsys):
    assert (
        rlver.main(
            [
                "--model",
                str(tiny_dir),
                "--steps",
                "0",
                "--eval-size",
                "2",
                "--max-tokens",
                "4",
                "--max-turns",
                "1",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert (
        evaluate.main(
            ["--policy", str(tmp_path / "run"), "--limit", "1", "--out", str(tmp_path / "r.jsonl")]
        )
        == 0
    )
    shutil.rmtree(tmp_path / "run" / "checkpoint-000000")
    assert (
        evaluate.main(["--policy", str(tmp_path / "run"), "--out", str(tmp_path / "r.jsonl")]) == 2
    )
    assert "no checkpoint" in capsys.readouterr().err
    assert (
        evaluate.main(
            [
                "--policy",
                str(tiny_dir),
                "--limit",
                "1",
                "--max-tokens",
                "4",
                "--max-turns",
                "1",
                "--out",
                str(tmp_path / "b.jsonl"),
                "--json",
                str(tiny_dir / "config.json" / "b.json"),
            ]
        )
        == 2
    )
    # and nothing is lost
    assert "config.json" in capsys.readouterr().err and (tmp_path / "b.jsonl").exists()
    assert evaluate.main(["--policy", str(tmp_path / "nowhere")]) == 2


def test_chat(tiny_dir, monkeypatch, capsys):
    said = iter(["Hello.", "I feel hurt.", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert evaluate.main(["--chat", str(tiny_dir), "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("it>") == 2


# ------------------------------------------------------------------------- may the user be trusted?


@pytest.fixture(scope="module")
def run(no_pictures, tiny_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    assert (
        rlver.main(
            [
                "--model",
                str(tiny_dir),
                "--steps",
                "2",
                "--batch-size",
                "4",
                "--group-size",
                "2",
                "--max-turns",
                "3",
                "--max-tokens",
                "6",
                "--eval-size",
                "4",
                "--out",
                str(out),
            ]
        )
        == 0
    )
    return out


PEOPLE = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}


@pytest.mark.slow
def test_the_scripted_user_says_all_of_it_again(run, results):
    for path in (run / "dialogues.jsonl", results):
        found = consistency(path, make_simulator("toy"), PEOPLE, times=2)
        assert (
            found["emotion"] == found["sign"] == found["final"] == 1
            and found["found"] == []
            and found["turns"] > 20
        )
    assert evaluate.main(["--consistency", str(run / "dialogues.jsonl")]) == 0


@pytest.mark.parametrize("what", ["emotion", "change", "reward"])
def test_one_changed_number_is_found_and_named(what, run, tmp_path, capsys):
    found = lines(run / "dialogues.jsonl")
    k, row = next(
        (k, row)
        for k, row in enumerate(found)
        if len(row["turns"]) >= 2 and 5 < row["turns"][-1]["emotion"] < 90
    )
    if what == "reward":
        row["reward"] += 0.01
    else:
        row["turns"][1][what] += 1
    path = write(tmp_path / "dialogues.jsonl", *found)
    assert evaluate.main(["--consistency", str(path)]) == 1
    [line] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("not as recorded")
    ]
    assert f"line {k + 1}, {row['profile_id']}, " in line and ("turn 2" in line or what == "reward")


def test_a_log_whose_numbers_agree_among_themselves_is_still_replayed(run, tmp_path):
    """Emotion, change and reward all raised alike: arithmetic finds nothing, the replay does."""
    found = lines(run / "dialogues.jsonl")
    k, row = next(
        (k, row)
        for k, row in enumerate(found)
        if len(row["turns"]) >= 2 and 5 < row["turns"][-1]["emotion"] < 90
    )
    row["turns"][-1]["emotion"] += 1
    row["turns"][-1]["change"] += 1
    row["reward"] = row["turns"][-1]["emotion"] / 100
    assert arithmetic({**row, "start": 30}, row["turns"]) is None
    result = consistency(write(tmp_path / "d.jsonl", *found), make_simulator("toy"), PEOPLE)
    assert (
        len(result["found"]) == 1 and f"line {k + 1}" in result["found"][0] and result["final"] < 1
    )


def test_a_result_file_knows_its_user(tiny_dir, tmp_path, capsys):
    """A challenging user's results are replayed with a challenging user, wherever the file lies;
    with another one the difference is no fault of the log, and is not called one."""
    path = str(tmp_path / "r.jsonl")
    assert (
        evaluate.main(
            [
                "--policy",
                str(tiny_dir),
                "--difficulty",
                "challenging",
                "--limit",
                "4",
                "--max-tokens",
                "5",
                "--out",
                path,
            ]
        )
        == 0
    )
    assert evaluate.main(["--consistency", path]) == 0
    assert evaluate.main(["--consistency", path, "--simulator", "toy-weak"]) == 0
    out = capsys.readouterr().out
    assert (
        "same emotion in 100.0 %" in out
        and "another user than the one that was recorded" in out
        and "not as recorded" not in out
    )


def test_a_run_with_its_own_users_is_replayed_with_them(tiny_dir, tmp_path):
    files = [
        str(
            write(
                tmp_path / f"{split}.jsonl",
                *[
                    {**vars(p), "id": f"own-{split}-{i}"}
                    for i, p in enumerate(toy_profiles(split, 4))
                ],
            )
        )
        for split in ("train", "heldout")
    ]
    assert (
        rlver.main(
            [
                "--model",
                str(tiny_dir),
                "--profiles",
                *files,
                "--steps",
                "1",
                "--batch-size",
                "2",
                "--group-size",
                "2",
                "--max-turns",
                "2",
                "--max-tokens",
                "4",
                "--eval-size",
                "2",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    assert evaluate.main(["--consistency", str(tmp_path / "run" / "dialogues.jsonl")]) == 0


def test_a_moody_user_is_seen_to_be_moody(run):
    """Shares as by hand: a user whose change has the right sign and half of the time another
    size."""
    rng, scripted = random.Random(0), toy.ScriptedModel()

    async def moody(prompt):
        text = await scripted(prompt)
        if "Response" in text:
            return text
        head, change, end = re.fullmatch(r"(.*): ([+-]\d+)(\nEnd .*)", text, re.S).groups()
        change = int(change) + (rng.random() < 0.5) * (1 if int(change) > 0 else -1)
        return f"{head}: {change:+d}{end}"

    from simulator import Simulator

    result = consistency(run / "dialogues.jsonl", Simulator(moody), PEOPLE, times=5)
    assert 0.05 < result["emotion"] < 0.95 and result["sign"] > 0.9
    assert result["spread"] > 0 and 0 < result["reliability"] < 1


def test_replays_of_a_dialogue_that_nobody_felt(run, tmp_path):
    """Its first reply was malformed: there is no emotion to replay, and none in the reliability."""
    rows = [json.loads(line) for line in open(run / "dialogues.jsonl", encoding="utf-8")][:3]
    told = dict.fromkeys(("thought", "user", "analysis", "change", "emotion"))
    rows.append({**rows[0], "turns": [{**told, "reply": "x"}], "ended": "malformed", "reward": 0})
    found = consistency(write(tmp_path / "d.jsonl", *rows), make_simulator("toy"), PEOPLE, times=2)
    assert found["dialogues"] == 8 and found["spread"] == 0 and not found["found"]


def test_scoring_ten_thousand_lines_needs_no_torch(tmp_path):
    """`--score` is for anybody with a result file; importing torch would be most of its time."""
    import subprocess
    import sys
    from pathlib import Path

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
