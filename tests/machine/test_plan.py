"""plan.py: what it calls exact is exact, and it needs nothing but a config."""

from support import plan
from support.errors import BadInput
from support.loading import load_model
from support.settings import make_parser, resolve_settings

from pathlib import Path

import pytest
import torch

import rlver
from models import adamw
from policy import Critic, Policy


def settings(*flags):
    return resolve_settings(vars(make_parser().parse_args(list(map(str, flags)))))


def memory(cfg, config, gpus):
    return plan.memory(cfg, config, plan.sizes_of(config, cfg.lora_rank), gpus)


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_masters_gradients_and_adam_are_what_they_will_be(algo, tiny_dir):
    """To 5 %, as bytes of the tensors that a step leaves behind; the critic included, and no output
    layer counted for it."""
    model, _ = load_model(tiny_dir)
    modules = [Policy(model)] + [Critic(model)] * (algo == "ppo")
    real = {"masters": 0, "gradients": 0, "Adam": 0}

    def size(tensors):
        return sum(t.numel() * t.element_size() for t in tensors)

    for module in modules:
        optimizer = adamw(module, 1e-3)
        for p in module.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        real["masters"] += size(module.parameters())
        real["gradients"] += size(p.grad for p in module.parameters())
        real["Adam"] += size(t for state in optimizer.state.values() for t in state.values())
    parts = memory(settings("--algo", algo, "--model", tiny_dir), plan.config_of(str(tiny_dir)), 1)
    for name, wanted in real.items():
        assert parts[name] == pytest.approx(wanted, rel=0.05) and name not in plan.ESTIMATES


def test_shards_and_copies():
    """What is sharded is divided, what each rank has a whole copy of is not; a reference only where
    there is a KL."""
    config = plan.config_of("Qwen/Qwen2.5-7B-Instruct")
    one, eight = (
        memory(settings("--algo", "ppo", "--model", "Qwen/Qwen2.5-7B-Instruct"), config, gpus)
        for gpus in (1, 8)
    )
    for part in ("masters", "gradients", "Adam"):
        assert one[part] == 8 * eight[part]
    assert one["engine weights"] == eight["engine weights"] and one["reference"] == 0
    cfg = settings("--algo", "ppo", "--model", "Qwen/Qwen2.5-7B-Instruct", "--kl-coef", 0.1)
    parts = memory(cfg, config, 1)
    assert parts["reference"] == parts["engine weights"] * 2


def test_published_sizes():
    """The models' own pages say 0.49, 1.54, 3.09 and 7.61 billion parameters."""
    for name, billions in zip(plan.KNOWN, (0.49, 1.54, 3.09, 7.61)):
        assert plan.sizes_of(plan.config_of(name))["all"] / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_report_loads_nothing_and_says_what_is_estimated(tmp_path, capsys, monkeypatch):
    """From a directory with a config.json alone. At most 8 x 2 - 1 calls a dialogue and one first
    line a group."""
    plan.config_of("Qwen/Qwen2.5-0.5B-Instruct").save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert (
        rlver.main(["--plan", "--algo", "grpo", "--think", "--model", "model", "--out", "out"]) == 0
    )
    text = capsys.readouterr().out
    assert (
        f"at most: {32 + 128 * 15:,} a step" in text
        and "activations  (estimate)" in text
        and "0.49 billion" in text
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
    assert rlver.main(["--plan", "--model", "nowhere"]) == 2
    with pytest.raises(BadInput, match="no such directory"):
        plan.config_of("nowhere")


@pytest.mark.slow
def test_the_table_in_the_docs_is_the_plans():
    docs = Path(plan.__file__).parent.parent / "docs" / "several-gpus.md"
    assert plan.gpu_table() in docs.read_text(encoding="utf-8")


# -------------------------------------------------------------------------- adapters, and the rest


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_adapters_are_what_they_will_be(algo, tiny_dir):
    """The base once, whatever the algorithm, and no reference beside it."""
    from lora import SharedBase

    model, _ = load_model(tiny_dir)
    root = SharedBase(Policy(model), 4, 32, critic=algo == "ppo")
    trained = sum(p.numel() for p in root.parameters() if p.requires_grad)
    parts = memory(
        settings("--algo", algo, "--model", tiny_dir, "--lora-rank", 4, "--kl-coef", 0.1),
        plan.config_of(str(tiny_dir)),
        1,
    )
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert parts["frozen base"] == 2 * frozen
    for name, size in (("masters", 4), ("gradients", 4), ("Adam", 8), ("reference", 0)):
        assert parts[name] == size * trained and name not in plan.ESTIMATES


def told(capsys, *flags):
    """{first words: [numbers]} of the lines of a plan that have columns, and all of its text."""
    assert rlver.main(["--plan", "--think", "--model", "Qwen/Qwen2.5-7B-Instruct", *flags]) == 0
    text = capsys.readouterr().out
    rows = [line.split("  ") for line in text.split("\n") if line[-2:-1] == "."]
    return {row[0]: [float(x) for x in row[1:] if x.strip() and "e" not in x] for row in rows}, text


@pytest.mark.slow
def test_what_else_a_run_needs(capsys):
    """By hand: the peak of a rollout is what rests on the card and the engine's share of it; a
    checkpoint of 7B PPO is 4 x 7.62 + 4 x 7.07 of weights and 8 x 14.7 of moments, 176 GB, and the
    disk holds three."""
    rows, text = told(capsys, "--algo", "ppo", "--latency", "10", "--engine-memory", "0.4")
    assert rows["disk"] == [528.7] * 4 and rows["host memory"] == [176.2] * 4
    rest = rows["masters"][3] + rows["Adam"][3]
    assert rows["at the peak"][3] == pytest.approx(rest + 0.4 * 80, abs=0.2)
    assert f"{350 * 16 * 10 / 3600:.1f} hours" in text and len(rows["at the peak"]) == 4
    rows, text = told(capsys, "--algo", "ppo", "--lora-rank", "32", "--card", "40")
    assert rows["at the peak"][0] == pytest.approx(
        rows["frozen base"][0] + rows["masters"][0] + rows["Adam"][0] + 18, abs=0.2
    )
    assert rows["disk"][0] < 100 and "81 million" in text


@pytest.mark.slow
def test_an_engine_without_room_for_a_cache_is_refused(capsys):
    """7B in bf16 is 15.2 GB; 15 % of a card of 80 GB is 12."""
    flags = ["--plan", "--model", "Qwen/Qwen2.5-7B-Instruct", "--engine-memory", "0.15"]
    assert rlver.main(flags) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "12.0 GB of 80 (--card), and the weights alone are" in line
    assert rlver.main([*flags, "--engine", "torch"]) == 0  # which has no share
    assert rlver.main([*flags, "--card", "141"]) == 0
