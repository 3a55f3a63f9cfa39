"""Chat templates of real families, written down from memory, over tokenizers of their kinds."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agents import LINES

CORPUS = [
    *LINES,
    "user system assistant USER ASSISTANT INST SYS think Tell me more. It was last "
    "Monday. Be warm. I am here, take your time. hurt wants ears",
] * 4


def byte_level(special, add_prefix_space=False):
    """The kind of Qwen, Llama 3, DeepSeek: what is encoded in pieces is what is encoded whole, but
    where a blank is put in front of every text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(CORPUS, trainer)
    ends = dict(eos_token=special[0], pad_token=special[0])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, **ends)
    tokenizer.add_tokens([AddedToken(t, special=True) for t in special], special_tokens=True)
    return tokenizer


def chatml(thinking=""):
    return (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>"
        "\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n"
        + thinking
        + "' }}{%- endif %}"
    )


def turns(user, reply, system="", ask="", start=""):
    """A template of turns: in `user`, `reply` and `system`, %s is the content; %S in `user` is what
    `system` makes of a system prompt, in the first turn."""

    def quoted(text):
        filled = text.replace("%s", "' + m.content + '").replace("%S", "' + ns.system + '")
        return f"'{filled}'"

    return (
        f"{{%- set ns = namespace(system='') %}}{{{{ '{start}' }}}}{{%- for m in messages %}}"
        f"{{%- if m.role == 'system' %}}{{%- set ns.system = {quoted(system)} %}}"
        f"{{%- elif m.role == 'user' %}}{{{{ {quoted(user)} }}}}{{%- set ns.system = '' %}}"
        f"{{%- else %}}{{{{ {quoted(reply)} }}}}{{%- endif %}}{{%- endfor %}}"
        f"{{%- if add_generation_prompt %}}{{{{ '{ask}' }}}}{{%- endif %}}"
    )


QWEN3 = (
    "{%- for m in messages %}{%- if m.role == 'assistant' and '</think>' in m.content %}"
    "{{ '<|im_start|>assistant\\n' + m.content.split('</think>')[-1].lstrip('\\n') + "
    "'<|im_end|>\\n' }}{%- else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + "
    "'<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{%- if enable_thinking is defined and not enable_thinking"
    " %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)


IM = ["<|im_end|>", "<|im_start|>", "<|endoftext|>"]


# name: (its special tokens, template)
FAMILIES = {
    "Qwen2.5": (IM, chatml()),
    "Qwen3": (IM, QWEN3),
    "Llama-3.1": (
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        "{{ '<|begin_of_text|>' }}{%- for m in messages %}{{ '<|start_header_id|>' + "
        "m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant"
        "<|end_header_id|>\\n\\n' }}{%- endif %}",
    ),
    "GLM-4": (
        ["<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "[gMASK]", "<sop>"],
        turns(
            "%S<|user|>\\n%s",
            "<|assistant|>\\n%s",
            "<|system|>\\n%s",
            "<|assistant|>",
            start="[gMASK]<sop>",
        ),
    ),
}


THINKING = {  # always: their template opens the reply with the tag
    "R1-distill": (
        ["<end>", "<begin>", "<User>", "<Assistant>"],
        turns("%S<User>%s", "<Assistant>%s<end>", "%s", "<Assistant><think>\\n", start="<begin>"),
    ),
    "Qwen3-Thinking": (IM, chatml(thinking="<think>\\n")),
}


def tokenizer_of(name, **settings):
    special, template = {**FAMILIES, **THINKING}[name]
    tokenizer = byte_level(special, **settings)
    tokenizer.chat_template = template
    return tokenizer
