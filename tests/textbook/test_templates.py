"""Chat templates of real families over tokenizers of their kinds (families.py): what is glued
together from pieces must be what the template writes.

Silent mistakes live here: a blank too many in front of every message, a newline that only a past
reply has, the next speaker's token taken for the end of a reply. A model that is trained on such a
scaffold learns, and is wrong wherever its own template is used.
"""

from support.errors import BadModel
from support.loading import ChatFormat, load_model, stop_ids

import json

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from agents import LINES, speak
from engine import TorchEngine
from families import FAMILIES, THINKING, tokenizer_of
from policy import take_thoughts


def own_ids(chat, *said):
    """What the template writes."""
    return chat.tokenizer(chat.render(*said), add_special_tokens=False)["input_ids"]


def little_model(tokenizer):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=512,
        )
    ).eval()


def converse(chat, texts, think):
    """A dialogue in which the policy says `texts` as its next tokens. Returns (agent, replies)."""
    engine = TorchEngine(little_model(chat.tokenizer), chat.stop_id)
    said = [t if isinstance(t, list) else chat.text(t) + [chat.stop_id] for t in texts]
    return speak(engine, chat, said, think=think, max_tokens=200)


def trunk_of(agent):
    """What later turns see."""
    return [token for s in agent.segments if not s.branch for token in s.ids]


def parts_of(replies):
    return [(r.thought, r.visible, r.malformed) for r in replies]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["", "Be warm."])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_policy_reads_is_what_its_template_writes(name, system):
    """Every prompt of a dialogue of three turns, in both modes, in the template's own ids."""
    tokenizer = tokenizer_of(name)
    for think in (False, True):
        chat = ChatFormat(tokenizer, system, think)
        said = ["I am here, take your time.", "Tell me more."]
        texts = [
            chat.past_reply_prefix + "<think>hurt, wants ears</think>" + text
            if think
            else chat.past_reply(text)
            for text in said
        ]
        agent, replies = converse(chat, [*texts, "Be warm."], think)
        assert [r.visible for r in replies[:2]] == said and (think or not replies[0].thought)
        trunk, at = [], []
        for segment in agent.segments:
            if segment.log_probs is not None:
                at.append(trunk + chat.opening)
            trunk += segment.ids * (segment.branch == 0)
        assert at == [
            own_ids(chat, LINES[0]),
            own_ids(chat, LINES[0], said[0], LINES[1]),
            own_ids(chat, LINES[0], said[0], LINES[1], said[1], LINES[2]),
        ]


def test_a_tokenizer_that_adds_blanks_is_refused_with_the_reason():
    """Pieces that are encoded one by one would each get the blank of a text's beginning: the policy
    would be trained on "[INST]  My sister" and served "[INST] My sister"."""
    with pytest.raises(BadModel, match="adds a blank in front of every text.*byte-level"):
        ChatFormat(tokenizer_of("Llama-2"))


def test_other_text_is_refused_with_the_first_difference():
    """A template may look at its neighbours; here a user is thanked from the second turn on."""
    tokenizer = tokenizer_of("Qwen2.5")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "m.content", "('Thanks! ' if m.content == 'It was last Monday.' else '') + m.content"
    )
    with pytest.raises(BadModel, match=r"writes '.*user\\nThanks! .*pieces give '.*user\\nIt was"):
        ChatFormat(tokenizer)


def test_the_stop_token_is_one_at_which_the_model_stops(tmp_path):
    """A template without an end of reply: the next speaker's token looks like one. The model's
    generation_config knows better, where there is one; GLM-4 really stops at <|user|>."""
    tokenizer = tokenizer_of("GLM-4")
    user, end = tokenizer.convert_tokens_to_ids(["<|user|>", "<|endoftext|>"])
    assert ChatFormat(tokenizer).stop_id == user
    assert ChatFormat(tokenizer, stop_ids=[end, user]).stop_id == user
    with pytest.raises(BadModel, match=r"ends a reply with '<\|user\|>'.*'<\|endoftext\|>'"):
        ChatFormat(tokenizer, stop_ids=[end])
    for said, found in ((end, [end]), ([end, user], [end, user]), (None, [])):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": said}))
        assert stop_ids(tmp_path) == found


@pytest.mark.parametrize("name", THINKING)
def test_a_template_that_begins_the_thought(name):
    """The tag is scaffold: seen by its own reply, never trained, gone from what later turns see."""
    tokenizer = tokenizer_of(name)
    with pytest.raises(BadModel, match="--think"):
        ChatFormat(tokenizer)
    chat = ChatFormat(tokenizer, "Be warm.", think=True)
    assert chat.decode(chat.opening) == "<think>\n"
    agent, replies = converse(
        chat,
        ["hurt, wants ears</think>I am here.", "x</think>Tell me more.", "no end of it"],
        think=True,
    )
    assert parts_of(replies) == [
        ("hurt, wants ears", "I am here.", False),
        ("x", "Tell me more.", False),
        ("no end of it", "", True),
    ]
    assert trunk_of(agent) + chat.opening == own_ids(
        chat, LINES[0], "I am here.", LINES[1], "Tell me more.", LINES[2]
    )
    opened = [s for s in agent.segments if s.branch and s.log_probs is None]
    assert [s.ids for s in opened] == [chat.opening] * 3 and [s.branch for s in opened] == [1, 2, 3]


def test_a_switch_of_the_template_closes_the_thought():
    """Qwen3 with {"enable_thinking": false}: direct replies behind an empty thought, which is not
    in the history."""
    tokenizer = tokenizer_of("Qwen3")
    chat = ChatFormat(tokenizer, "Be warm.", template_args={"enable_thinking": False})
    agent, replies = converse(chat, ["I am here.", "Tell me more.", "x"], think=False)
    assert parts_of(replies) == [
        ("", "I am here.", False),
        ("", "Tell me more.", False),
        ("", "x", False),
    ]
    trunk = chat.decode(trunk_of(agent))
    assert trunk.endswith(LINES[2] + "<|im_end|>\n<|im_start|>assistant\nx<|im_end|>")
    assert "<think>" not in trunk
    with pytest.raises(BadModel, match="without if it is an empty one"):
        ChatFormat(tokenizer, think=True, template_args={"enable_thinking": False})


@pytest.mark.parametrize(
    "text, thought, visible",
    [
        ("I am here.", "", "I am here."),
        ("<think>hurt</think>I am here.", "hurt", "I am here."),
        ("\n<think>\n\n</think>\n\nI am here.", "", "I am here."),
        (
            "I see. <think>hurt</think> I am here. <think>more</think>",
            "hurt\nmore",
            "I see.  I am here.",
        ),
        ("hurt</think>I am here.", "hurt", "I am here."),
        # a template that opens a reply with an empty thought, and a model that thinks all the same
        ("<think>\n\n</think>\n\nShe is hurt </think> I am here.", "She is hurt", "I am here."),
        ("<think>hurt</think> more </think> I am here.", "hurt\nmore", "I am here."),
        ("hurt</think> I see. <think>more</think> Yes.", "hurt\nmore", "I see.  Yes."),
        ("I am here. <think>cut off", "cut off", "I am here."),
        ("<think>cut off", "cut off", ""),
        ("", "", ""),
    ],
)
def test_take_thoughts(text, thought, visible):
    """Wherever a thought stands, and where a tag is missing: the user hears none of it."""
    assert take_thoughts(text) == (thought, visible)


def test_a_stray_thought_is_taken_out_and_logged():
    """Qwen3 thinks unless it is told not to. In direct mode the user would hear all of it."""
    chat = ChatFormat(tokenizer_of("Qwen3"), "Be warm.")
    agent, replies = converse(
        chat, ["<think>hurt</think>I am here.", "Tell me more.", "<think>why</think>x"], think=False
    )
    assert parts_of(replies) == [
        ("hurt", "I am here.", False),
        ("", "Tell me more.", False),
        ("why", "x", False),
    ]
    trunk = chat.decode(trunk_of(agent))
    assert "<think>" not in trunk and "I am here.<|im_end|>" in trunk
    assert [s.branch for s in agent.segments if s.log_probs] == [1, 0, 2]


def test_a_directory_says_where_its_model_stops(tmp_path):
    """The whole way: a directory whose generation_config contradicts its template is refused, in
    one line."""
    tokenizer = tokenizer_of("GLM-4")
    little_model(tokenizer).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert load_model(tmp_path)
    from simulator import make_simulator

    with pytest.raises(BadModel, match="generation_config"):
        make_simulator(f"local:{tmp_path}")
