"""Low-rank adapters: the maths by hand in float64, one base for policy, critic and reference, and
the merged model that everybody else sees. The yardstick is the plain model with W + (alpha / r) B A
in the place of W."""

from models.lora import add_adapters, merge, use_adapter
from support.errors import BadInput
from support.ranks import iter_full_weights

import copy

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    DbrxConfig,
    DbrxForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
)

from adapters import shared
from agents import assert_close, random_episode
from conftest import make_tiny_model
from policy import Policy, pack, recompute_activations


@pytest.fixture
def batch(tiny_tokenizer):
    rng = np.random.default_rng(3)
    return pack([random_episode(rng, len(tiny_tokenizer), think=True) for _ in range(3)])


# -------------------------------------------------------------------------------------- one layer


def layer_of(rank=2, names=("policy",), sides=(5, 7)):
    """(LoraLinear in float64, its switch), its B no longer zero."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.ModuleList([nn.Linear(*sides)])).double()
    switch = add_adapters(block, rank, names)
    layer = block[0][0].double()
    for name in names:
        nn.init.normal_(layer.lora_B[name])
    return layer, switch


def test_a_layer_is_w_plus_the_scaled_product():
    """y = (W + alpha/r B A) x + b. The scale is alpha / r: as alpha alone, rank 16 would take steps
    four times those of rank 4."""
    layer, switch = layer_of()
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    assert A.shape == (2, 5) and B.shape == (7, 2)
    with use_adapter(switch, "policy"):
        assert_close([layer(x)], [x @ (layer.weight + 16.0 * B @ A).T + layer.bias], 1e-12)
    assert torch.equal(layer(x), x @ layer.weight.T + layer.bias)  # off again


def test_in_the_first_step_only_b_moves():
    """B is zero, so that training starts at the model; A's gradient is a product with B, so A waits
    for the second step. W never gets one."""
    layer, switch = layer_of()
    A, B = layer.lora_A["policy"], layer.lora_B["policy"]
    nn.init.zeros_(B)
    with use_adapter(switch, "policy"):
        layer(torch.randn(5, dtype=torch.float64)).sum().backward()
    assert (A.grad == 0).all() and (B.grad != 0).all()
    assert layer.weight.grad is None and layer.bias.grad is None


def test_a_keeps_the_size_of_what_it_reads():
    """U(-1/sqrt(in), 1/sqrt(in)), whatever the layer's width; one seed gives every rank the same
    numbers, or shards of different adapters would be put together."""
    made = [layer_of(sides=(1000, 8), rank=8)[0].lora_A["policy"] for _ in range(2)]
    assert torch.equal(*made)
    assert made[0].abs().max() <= 1000**-0.5
    assert made[0].std().item() == pytest.approx((3 * 1000) ** -0.5, rel=0.05)


# ------------------------------------------------------------------------------------ whole models


def test_it_starts_as_the_model_itself(tiny_model, batch):
    """Log-probs and the policy's entropies bit for bit, values all 0."""
    _, policy, critic, reference = shared(tiny_model, learnt=False)
    plain = Policy(tiny_model, 0.7)(batch)
    assert all(torch.equal(x, y) for x, y in zip(policy(batch), plain))
    assert torch.equal(reference(batch)[0], plain[0])
    assert (critic(batch) == 0).all()


@pytest.mark.parametrize("family", ["untied", "tied"])
def test_the_merged_weights_are_a_plain_model_that_says_the_same(family, tiny_tokenizer, batch):
    """What the engine and a checkpoint get: the names of a plain model, all of them and no others,
    and the policy's adapters in them, not the critic's."""
    model = make_tiny_model(tiny_tokenizer, tie_word_embeddings=family == "tied")
    _, policy, _, _ = shared(model)
    weights = dict(merge(iter_full_weights(policy.model), policy.model))
    assert list(weights) == list(model.state_dict())
    plain = copy.deepcopy(model)
    plain.load_state_dict(weights)
    with torch.no_grad():
        assert_close(Policy(plain, 0.7)(batch), policy(batch), 1e-5)
        assert (Policy(model, 0.7)(batch)[0] - policy(batch)[0]).abs().max() > 1e-2


def test_there_is_one_base_in_memory(tiny_model):
    """The parameters that are not trained are those of one model: no copy for the critic, none for
    the reference. Trained are r (in + out) numbers a layer, twice, and a head."""
    root, policy, critic, reference = shared(tiny_model)
    frozen = {p.data_ptr(): p.numel() for p in root.parameters() if not p.requires_grad}
    assert sum(frozen.values()) == sum(p.numel() for p in tiny_model.parameters())
    layers = [m for block in tiny_model.model.layers for m in block.modules()]
    sides = [sum(m.weight.shape) for m in layers if isinstance(m, nn.Linear)]
    sizes = [sum(p.numel() for p in part.parameters()) for part in (policy, critic, reference)]
    assert sizes == [4 * sum(sides), 4 * sum(sides) + 33, 0]


def test_policy_and_critic_learn_apart_and_the_reference_not_at_all(tiny_model, batch):
    """They share every W; a step of one must not move the other, nor what both stand on."""
    root, *parts = shared(tiny_model)
    policy, critic, reference = parts

    def say():
        return [policy(batch)[0], critic(batch), reference(batch)[0]]

    for part, other in ((0, 1), (1, 0)):
        before = say()
        before[part].sum().backward()
        assert all(p.grad is None for p in parts[other].parameters())
        for p in parts[part].parameters():
            p.data -= 1e-3 * p.grad
            p.grad = None
        moved = [not torch.equal(x, y) for x, y in zip(before, say())]
        assert moved == [i == part for i in range(3)]
    assert torch.equal(say()[2], Policy(tiny_model, 0.7)(batch)[0])  # the base, to the last bit
    assert all(p.grad is None for p in root.parameters() if not p.requires_grad)


def test_what_is_made_again_is_made_with_the_same_adapters(tiny_model, batch):
    """With activation checkpointing a block runs again in the backward pass. If somebody else was
    asked in between, it must not run with their adapters: the gradient would be of no function."""
    gradients = []
    for again in (False, True):
        root, policy, critic, reference = shared(tiny_model)
        if again:
            recompute_activations(policy.model, context_fn=root.checkpoint_contexts)
        log_probs, values = policy(batch)[0], critic(batch)
        with torch.no_grad():
            reference(batch)
        (log_probs.sum() + values.sum()).backward()
        gradients.append([p.grad for part in (policy, critic) for p in part.parameters()])
    assert all(g.abs().max() > 1e-3 for g in gradients[0])
    assert_close(*gradients, 1e-5)


# --------------------------------------------------------------------------------------- bad input


def test_what_cannot_be_adapted_is_refused(tiny_model):
    """GPT-2's layers are no nn.Linear, and neither are Mixtral's experts: adapters would reach a
    tenth of the model. A rank above a layer's own would be the whole layer twice over."""
    small = dict(hidden_size=8, intermediate_size=16, num_hidden_layers=1, vocab_size=16)
    heads = dict(num_attention_heads=2, num_key_value_heads=2)
    mixtral = MixtralForCausalLM(MixtralConfig(**small, **heads))
    ffn = dict(ffn_hidden_size=16, moe_num_experts=2, moe_top_k=1)
    dbrx = DbrxForCausalLM(
        DbrxConfig(
            d_model=8,
            n_heads=2,
            n_layers=1,
            max_seq_len=16,
            vocab_size=16,
            attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0),
            ffn_config=ffn,
        )
    )
    for model in (mixtral, dbrx):  # experts as one tensor of three dimensions, and of two
        with pytest.raises(BadInput, match=f"{type(model).__name__} is a mixture of experts"):
            add_adapters(model, 1)
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=16, n_positions=8))
    with pytest.raises(BadInput, match="GPT2LMHeadModel has no linear layers"):
        add_adapters(gpt2, 1)
    with pytest.raises(BadInput, match="larger than a layer.*take 32 at most"):
        add_adapters(copy.deepcopy(tiny_model), 33)
