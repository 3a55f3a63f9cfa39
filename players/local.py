"""players/local.py - language models in this process that are not trained. Each is loaded with its
chat template, and differs from the others in what is taken from it:

    load_engine               replies to whole dialogues: a policy that is evaluated
    load_local, LocalModel    one answer to one prompt: the user's model, or a judge's
    LocalReader               the next word alone: the model of a reader (players/reader.py)

(Models on a server: players/server.py.)
"""

from models.chat_format import ChatFormat
from models.engine import TorchEngine, make_vllm_engine
from models.loading import (
    best_device,
    best_dtype,
    directory_of,
    load_model,
    load_tokenizer,
    read_by,
    stop_ids,
)
from players.calls import (
    CUT,
    MAX_ANSWER_TOKENS,
    MAX_THINKING_TOKENS,
    AdaptiveModel,
    Answer,
    key_of_call,
)
from support.errors import BadInput, BadModel, PromptRefused, naming

import asyncio
import copy
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoConfig

from policy import pack, tree_mask
from rollout import Episode, Segment

# --------------------------------------------------------------------------------- a model that samples


def load_engine(path, temperature, prefix, kind="torch", context=None, **of_chat):
    """(engine, ChatFormat, context) of a model that only samples, loaded once, in the type of
    computing. prefix: what stands before the path in messages; kind: of engine, "torch" or "vllm";
    context: tokens of a dialogue (default: the model's limit); of_chat: more arguments of
    ChatFormat. Raises BadModel or BadInput."""
    device = best_device()
    dtype = best_dtype(device)
    if kind == "vllm":
        with naming(f"{prefix}{path}"):
            path = directory_of(path)
            config, tokenizer = read_by(AutoConfig, path), load_tokenizer(path)
    else:
        model, tokenizer = load_model(path, device, prefix, dtype)
        config = model.config
    longest = config.get_text_config().max_position_embeddings
    if context and context > longest:
        raise BadInput(f"--context {context}: {path} takes {longest} tokens at most")
    context = context or longest
    with naming(f"{prefix}{path}"):
        chat = ChatFormat(tokenizer, stop_ids=stop_ids(path), **of_chat)
    if kind == "vllm":
        settings = {"temperature": temperature, "context": context, "dtype": dtype}
        return make_vllm_engine(path, chat.stop_ids, **settings), chat, context
    engine = TorchEngine(model, chat.stop_ids, temperature, share=True)
    # two tokens: some architectures do not take the engine's cache, or its mask
    with naming(f"{prefix}{path}: cannot be sampled from"):
        asyncio.run(engine.generate([1, 2, 3], 2, np.random.default_rng(0), key=None))
    return engine, chat, context


# ------------------------------------------------------------------ for users and judges: it answers


def load_local(path, temperature, flag="--simulator"):
    """The LocalModel in the directory `path`. flag: the one that named it, for messages."""
    return LocalModel(path, *load_engine(path, temperature, f"{flag} local:"), temperature)


@dataclass
class LocalModel(AdaptiveModel):
    """A model that answers prompts. No schema constrains its answers, so it may break the form more
    often than a model on a server."""

    name: str
    engine: object  # a TorchEngine, as the policy's
    chat: object  # a ChatFormat
    context: int  # the most tokens that prompt and answer may have together
    temperature: float = 0.0
    most_tokens: int = MAX_ANSWER_TOKENS  # of an answer; it is higher for a model that thinks

    FINDINGS = ("most_tokens",)

    async def __call__(self, prompt, schema=None):
        """The Answer to a prompt. The key of the call is the seed: with one generator for all calls
        an answer would depend on the order of the calls, and a resumed run would be another run.
        Raises PromptRefused if the prompt does not fit the context."""
        ids = ids_of_prompt(self, prompt, 1)
        room = self.context - len(ids)  # for the answer
        rng = np.random.default_rng(int(key_of_call.get("0"), 16))
        # key: names a dialogue whose tokens the engine keeps for its next turn. Here each call is
        # a prompt of its own, so there is nothing to keep.
        tokens, _ = await self.engine.generate(ids, min(room, self.most_tokens), rng, key=None)
        has_ended = tokens[-1] in self.chat.stop_ids
        text = self.chat.decode(tokens[:-1] if has_ended else tokens)
        problem = "" if has_ended else CUT
        answer = Answer(text, is_cut=not has_ended, problem=problem, tokens=len(tokens))
        if answer.thinks:
            self.most_tokens = MAX_THINKING_TOKENS
        return answer


def ids_of_prompt(model, prompt, room):
    """The token ids of a prompt for a LocalModel or a LocalReader. Raises PromptRefused if its context
    has no `room` for so many more tokens."""
    ids = model.chat.first_prompt(prompt) + model.chat.opening
    if len(ids) + room > model.context:
        raise PromptRefused(
            f"local:{model.name}: a prompt of {len(ids)} tokens does not fit its context of "
            f"{model.context}"
        )
    return ids


# ----------------------------------------------------------------- for a reader: its next word is read


class LocalReader:
    """A reader's model, whose log-probs for the next word are taken, in the directory `path`.

    All questions about a reply begin alike. So they are one row: the beginning once, as a trunk,
    and each question behind it as a branch that sees the trunk and itself. A row is never batched
    with others, so its result does not depend on them, to the last bit."""

    def __init__(self, path, words, template_args=None, dtype=None):
        """words: what will be read. dtype: the type of computing (default: bf16 on a GPU, or on a
        processor that can multiply it, with AVX-512 twice as fast as fp32, with AMX faster still;
        else fp32). Raises BadModel, also if a word is not one token."""
        self.name = str(path)
        device = best_device()
        on_fast_cpu = device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()
        dtype = dtype or (torch.bfloat16 if on_fast_cpu else best_dtype(device))
        self.model, tokenizer = load_model(path, device, "--reader local:", dtype)
        # in fp32: in bf16 logits of 20, and so log-odds, would be rounded to eighths
        self.head = copy.deepcopy(self.model.get_output_embeddings()).float()
        self.context = self.model.config.get_text_config().max_position_embeddings
        with naming(f"--reader local:{path}"):
            self.chat = ChatFormat(tokenizer, template_args=template_args, stop_ids=stop_ids(path))
            tokens = {ids[0] for ids in map(self.chat.text, words) if len(ids) == 1}
            if len(tokens) < len(words):
                raise BadModel(f"{' and '.join(words)} must be a token each")
            self.forward(["Is it?", "Is it not?"], 1)  # some architectures do not take this mask

    async def likeliest(self, prompts, count):
        """The `count` likeliest tokens behind each of `prompts`, which begin alike: a list of
        [(text, log-prob)]. Raises PromptRefused if one does not fit the context."""
        return self.forward(prompts, count)

    @torch.inference_mode()
    def forward(self, prompts, count):
        """One forward pass for all prompts (see `likeliest`)."""
        rows = [ids_of_prompt(self, prompt, 0) for prompt in prompts]
        trunk = os.path.commonprefix(rows)
        segments = [Segment(trunk)]
        segments += [Segment(row[len(trunk) :], k) for k, row in enumerate(rows, 1)]  # branches
        batch = pack([Episode("", 0, "", segments=segments)]).to(self.model.device)
        ends = np.cumsum([len(segment.ids) for segment in segments]) - 1
        hidden = self.model.base_model(
            input_ids=batch.ids,
            position_ids=batch.positions,
            attention_mask=tree_mask(batch.branch),
            use_cache=False,
        ).last_hidden_state[0, ends[1:]]
        best = F.log_softmax(self.head(hidden.float()), dim=-1).topk(count)
        return [
            [(self.chat.decode([token]), value) for token, value in zip(tokens, values)]
            for tokens, values in zip(best.indices.tolist(), best.values.tolist())
        ]
