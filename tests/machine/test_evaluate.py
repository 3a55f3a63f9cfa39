"""evaluate.py: the Sentient Benchmark, whose results are files in SAGE's format."""

import json

import pytest

import evaluate
from result_files import SHORT, lines, measure, train, write
from server import Loopback, completion
from simulator import toy_profiles

pytestmark = pytest.mark.usefixtures("no_pictures")
TWELVE = ["--max-tokens", "6", "--limit", "12"]


def test_the_benchmark_in_sages_format(results):
    """Their field names, ours under a name of our own; the emotions in the history are those that
    the score is made of."""
    found = lines(results)
    assert len(found) == 12
    for line in found:
        keys = "id emo_point emo_state player scene character task history rlver"
        assert set(keys.split()) <= set(line)
        assert line["history"][0]["emotion-point"] == 40 == line["rlver"]["start"]
        replies = [m for m in line["history"] if m["role"] == "assistant"]
        assert 1 <= len(replies) <= 10 and line["emo_point"] == replies[-1]["rlver"]["emotion"]
        emotions = [40] + [m["rlver"]["emotion"] for m in replies]
        assert all(9 < e < 100 for e in emotions[:-1])  # it stops below 10 and at 100, at once
        endings = "turn_limit goodbye emotion_min emotion_max context"
        assert line["rlver"]["ended"] in endings.split()
        assert (line["rlver"]["ended"] == "emotion_min") == (line["emo_point"] < 10)
        for m, after in zip(line["history"][1::2], line["history"][2::2]):
            assert (
                after["planning"]["change"] == m["rlver"]["change"]
                and after["emotion-point"] == m["rlver"]["emotion"]
            )
            keys = "activity TargetCompletion content analyse change"
            assert set(after["planning"]) == set(keys.split()) and after["thinking"]


@pytest.mark.slow
def test_a_stopped_evaluation_continues(results, tiny_dir, tmp_path, capsys):
    """What is there is kept, half a line is done again, and the whole is what one go would have
    given."""
    path = tmp_path / "r.jsonl"
    text = results.read_text(encoding="utf-8")
    path.write_text(
        "".join(text.splitlines(keepends=True)[:5]) + text.splitlines()[5][:40], encoding="utf-8"
    )
    before = path.read_text(encoding="utf-8").rsplit("\n", 1)[0]
    flags = ["--policy", tiny_dir, "--max-tokens", 6, "--limit", 12, "--out", path]
    measure(*flags)
    assert path.read_text(encoding="utf-8").startswith(before)

    ids, wanted = ([line["id"] for line in lines(file)] for file in (path, results))
    assert set(ids) == set(wanted) and len(ids) == 12
    assert (
        measure(*flags, "--seed", 1) == 2
        and "holds other results (seed 0 there, 1 here)" in capsys.readouterr().err
    )


def test_a_fixed_first_line_is_used(tiny_dir, tmp_path):
    rows = [
        {**vars(p), "first_talk": f"Hello {i}."} for i, p in enumerate(toy_profiles("heldout", 3))
    ]
    profiles, out = write(tmp_path / "p.jsonl", *rows), tmp_path / "r.jsonl"
    assert measure("--policy", tiny_dir, *SHORT, "--profiles", profiles, "--out", out) == 0
    opened = [[message["role"] for message in line["history"][:2]] for line in lines(out)]
    assert opened == [["user", "assistant"]] * 3
    first_lines = {line["history"][0]["content"] for line in lines(out)}
    assert first_lines == {"Hello 0.", "Hello 1.", "Hello 2."}


def test_a_policy_behind_a_server(tmp_path):
    """It is sent the whole dialogue as messages, its own thoughts left out; its malformed replies
    are malformed there too."""
    seen, out = [], tmp_path / "r.jsonl"

    def reply(request):
        seen.append(request["messages"])
        good = "<think>secret</think>I am here, let it all out."
        return 200, {}, completion(good if len(request["messages"]) < 6 else "no tags")

    with Loopback(reply=reply) as server:
        flags = "--think --limit 2 --max-turns 4".split()
        assert measure("--policy", f"openai:m@{server.url}", *flags, "--out", out) == 0
    found = lines(out)
    endings = {line["rlver"]["ended"] for line in found}
    assert endings <= {"malformed", "goodbye", "emotion_min"}
    assert found[0]["rlver"]["policy"] == "openai:m"
    for messages in seen:
        first, *roles = [message["role"] for message in messages]
        assert first == "system" and roles == (["user", "assistant"] * 4)[: len(roles)]
    assert "secret" not in json.dumps(seen)
    assert found[0]["history"][1]["rlver"]["thought"] == "secret"


@pytest.mark.slow
def test_before_and_after_in_one_command(tiny_dir, tmp_path, capsys):
    """Three commands with long paths stood at the end of a run, too long to be copied."""
    # --compare would part this name at its comma
    run = train(tiny_dir, tmp_path / "run, 1", "--eval-size", 3, "--max-turns", 1)
    # a third user that the files hold is not compared with --limit 2
    assert measure("--policy", run, "--before-after", "--max-turns", 1) == 0
    capsys.readouterr()
    command = ["--policy", str(run), "--before-after", "--limit", "2", "--max-turns", "1"]
    assert evaluate.main([*command, "--json", str(tmp_path / "c.json")]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"by: the starting policy of {run}" in text and "after minus before" in text
    labels = [lines(run / f"{name}.jsonl")[0]["rlver"]["policy"] for name in ("before", "after")]
    assert labels == [f"{run}/checkpoint-000000", f"{run}/checkpoint-000001"]
    assert json.loads((tmp_path / "c.json").read_text())["n"] == 2
    held = [(run / f"{name}.jsonl").read_bytes() for name in ("before", "after")]
    assert measure(*command) == 0  # nothing is held twice
    assert held == [(run / f"{name}.jsonl").read_bytes() for name in ("before", "after")]
    assert measure(*command, "--json", run / "after.jsonl") == 2


@pytest.mark.parametrize(
    "flags", ["--before-after --score x", "--before-after --compare a b", "--score a --compare b c"]
)
def test_one_thing_is_asked_at_a_time(flags, capsys):
    """`--score A --compare B C` compared, and said nothing of A."""
    with pytest.raises(SystemExit, match="2"):
        measure(*flags.split())
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("flags", ["--step 0", "--out x.jsonl", "--policy toy"])
def test_what_before_after_cannot_be_combined_with(flags, capsys):
    assert measure("--before-after", *flags.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_table_that_cannot_be_written_loses_no_dialogue(tiny_dir, tmp_path, capsys):
    out, table = tmp_path / "b.jsonl", tiny_dir / "config.json" / "b.json"
    assert measure("--policy", tiny_dir, *SHORT, "--limit", 1, "--out", out, "--json", table) == 2
    assert "config.json" in capsys.readouterr().err and out.exists()
