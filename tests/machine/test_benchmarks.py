"""The benchmarks: what they compare is alike, and the tables of the documents follow from the
numbers that are kept. (How long anything takes is no test: this machine may be busy.)"""

from models.loading import load_model
from players.users import make_simulator
from support.results import recorded_dialogues
from support.rundir import RunDir

import asyncio
import re

import numpy as np
import pytest
import torch

from benchmarks import gpu, small, speed, tables
from policy import Policy, pack
from rollout import Episode, Segment
from runs import rows

MEASURED = tables.Results(tables.ROOT / "benchmarks" / "runs.jsonl").read()

# --------------------------------------------------------------------------------------- speed, gpu


@pytest.mark.slow
def test_the_benchmark_compares_like_with_like():
    """The ratio of packed to one row a turn means something only if both train the very same
    tokens. What one row a turn costs is the history, again and again."""
    episode = Episode("p", 0, "")
    episode.segments = [
        Segment([1, 2]),
        Segment([3, 4], 1, [0.0, 0.0]),
        Segment([5]),
        Segment([6]),
        Segment([7], 2, [0.0]),
    ]
    turns = speed.rows_per_turn(episode)
    ids = [[s.ids for s in row.segments] for row in turns]
    assert ids == [[[1, 2], [3, 4]], [[1, 2, 5, 6], [7]]]
    trained = [batch.ids[batch.action_mask].tolist() for batch in (pack([episode]), pack(turns))]
    assert trained == [[3, 4, 7], [3, 4, 7]]
    result = speed.bench(False, dialogues=4, repeats=1)
    assert 2 * result["packed_tokens"] < result["rows_tokens"]


@pytest.mark.slow
def test_the_benchmark_of_a_gpu_measures(tiny_dir, tmp_path, monkeypatch, no_pictures):
    """On whatever is here, with a model of no size: what it would print on a GPU."""
    model, run = tmp_path / "model", tmp_path / "run"
    config = load_model(tiny_dir)[0].config
    config.max_position_embeddings, config.vocab_size = 4096, 1024
    gpu.make_model("tiny", model, config)
    results = {
        ("tiny", rank): gpu.measure(model, rank, rank > 0, [48], 192, [3, 8, 4]) for rank in (0, 4)
    }
    assert all(u["tokens"] > 0 for result in results.values() for u in result["updates"])
    results["tiny", 16] = "CUDA out of memory"
    lines = [gpu.HEAD, *(gpu.lines_of(*key, result) for key, result in results.items())]
    lines = "\n".join(lines).split("\n")
    assert len(lines) == 2 + 2 * 2 + 1 and {line.count("|") for line in lines} == {8}
    monkeypatch.setattr(RunDir, "save", None)  # `steps` sets it, too, and for good
    assert gpu.steps(model, run) == 0
    assert len(rows(run / "metrics.jsonl")) == 3 and not list(run.glob("checkpoint-*"))
    assert gpu.child("-c", "1 / 0", limit=60)[:2] == (1, "ZeroDivisionError: division by zero")


def test_replies_that_share_a_context_are_scored_as_if_each_stood_alone(tiny_dir):
    policy = Policy(load_model(tiny_dir)[0])
    context, replies = [5, 6, 7], [[8, 9], [10], [11, 12, 13]]
    alone = []
    for ids in replies:
        segments = [Segment(context), Segment(ids, log_probs=[0.0] * len(ids))]
        alone.append(policy(pack([Episode("", 0, "", segments=segments)]))[0].sum().item())
    assert small.log_likelihoods(policy, context, replies) == pytest.approx(alone, abs=1e-5)


def test_a_perplexity_is_that_of_the_replies_each_behind_its_dialogue(tiny_dir):
    """The formula, a token at a time. Not the mean over dialogues, in which a short one would weigh
    as much as a long one; and what the user says is not asked for."""
    policy, chat = small.load_scorer(tiny_dir)
    replies = [["No.", "I am here. Tell me more."], ["Yes."]]
    dialogues = [
        {"first_line": "Well.", "turns": [{"reply": text, "user": "Oh!"} for text in texts]}
        for texts in replies
    ]
    log_probs = []
    for texts in replies:
        history = chat.first_prompt("Well.")
        for text in texts:
            for token in chat.text(text):
                with torch.no_grad():
                    logits = policy.model(torch.tensor([history])).logits[0, -1].double()
                log_probs.append(logits.log_softmax(-1)[token].item())
                history.append(token)
            history += [*chat.close, chat.stop_id, *chat.next_prompt("Oh!")]
    wanted = np.exp(-np.mean(log_probs))
    assert float(small.perplexity(policy, chat, dialogues)) == pytest.approx(wanted, rel=1e-5)


def test_a_reply_that_is_needed_moves_its_person_and_one_for_all_moves_everybody(good):
    rows = recorded_dialogues(good)
    needed, alike = (
        asyncio.run(small.moved_by_first_replies(dialogues, make_simulator("toy")))
        for dialogues in (rows, [row | {"turns": rows[0]["turns"]} for row in rows])
    )
    assert needed[0] > 5 and needed[1] < 0 and alike[0] == pytest.approx(alike[1])


# ------------------------------------------------------------------------------------------- tables


def test_a_column_is_empty_where_a_line_was_measured_before_it():
    line = MEASURED["small-kl-10"]
    line = line | {"before_and_after": line["before_and_after"] | {"new": [1, 2.5]}}
    *_, kl, short, _ = tables.table_small(MEASURED | {"small-kl-10": line}).splitlines()
    assert kl.endswith(" | 1 to 2.5 | 7 |") and short.endswith(" |  | 5 |")


def test_the_tables_in_the_documents_are_those_of_the_committed_numbers():
    """A number in a table is one that was measured: `python benchmarks/tables.py --write`."""
    assert set(MEASURED) == {job.name for job in tables.jobs()}
    shown = set()
    for path in tables.documents():
        text = path.read_text("utf-8")
        assert tables.with_measured(text, MEASURED) == text, path
        comments = re.findall(r"<!-- tables: (\w+) -->", text)
        assert comments[1::2] == ["end"] * (len(comments) // 2), f"{path}: an end is missing"
        shown |= set(comments[::2])
    assert shown == set(tables.TABLES)


def test_the_scores_in_readme_are_the_measured_ones():
    """Means over the seeds, in the columns of the toy and of SmolLM2."""
    text = (tables.ROOT / "README.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    cells = {row[0].strip("`"): row[1:] for row in rows}
    small_model = tables.seeds_of(MEASURED, "small-grpo")

    def mean(score, lines):
        return f"{np.mean([score(line) for line in lines]):.1f}"

    before = []
    for name, words in tables.NAMES.items():
        lines = tables.seeds_of(MEASURED, name)[-tables.SEEDS :]
        assert cells[words][1] == mean(tables.last, lines)
        before.append(mean(tables.first, lines))
    assert cells["grpo"][2] == mean(tables.last, small_model)
    think, direct, *_ = before
    assert cells["before"][1:] == [f"{think}, direct {direct}", mean(tables.first, small_model)]
    assert cells["seeds"][1:] == [str(tables.SEEDS), str(len(small_model))]


def test_a_dialogue_in_a_document_is_a_measured_one():
    """Of seed 0, before and after, word for word: the first held-out person's first reply, and two
    that docs/small.md judges. What fixed replies earn, too."""
    readme, page = (
        " ".join((tables.ROOT / name).read_text("utf-8").split())
        for name in ("README.md", "docs/small.md")
    )
    measured = []
    for when, dialogues in zip(("before", "after"), MEASURED["small-grpo-0"]["dialogues"]):
        reply, felt = dialogues[0][1:3]
        assert f"{when} [{felt - 30:+d}] {' '.join(reply.split())}" in readme
        for dialogue in dialogues:
            starts = [30, *dialogue[2::3]]
            for reply, felt, before in zip(dialogue[1::3], dialogue[2::3], starts):
                measured.append(f"{' '.join(reply.split())} ({felt - before:+d})")
    judged = re.findall(r" \| ([^|]*? \([+-]\d+\))(?= \|)", page)
    assert len(judged) == 6 and len({*judged} & {*measured}) == 4  # the worst of 192 is not kept
    finals = MEASURED["reader-constants"]["finals"]
    best, least = (f"{score:.0f}" for score in (max(finals.values()), finals["nothing"]))
    assert f'ends at {best}, and "Okay." at {least}' in page


@pytest.mark.slow
def test_a_line_holds_what_tables_need(learnt):
    """Short numbers, of a whole run. Its own user is the strict one."""
    line = tables.line_of_run(tables.Job("hackable", "a-run", "--algo grpo"), learnt)
    assert len(line["evaluations"]) == 2 and len(line["metrics"]["emotion"]) == 12
    assert line["metrics"]["strict"] == line["metrics"]["emotion"]
    assert len(str(line["seconds"])) <= 6


def test_the_interval_of_three_seeds_is_students():
    assert tables.interval([70.0, 80.0, 90.0]) == "80.0 ± 24.8"
