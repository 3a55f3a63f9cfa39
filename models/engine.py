"""models/engine.py - the engine that samples for the policy, in plain PyTorch. (The other one is
models/vllm_engine.py.) An engine holds the whole weights, not a shard of them.

    await generate(prompt, max_tokens, rng, key)    sample a reply: (ids, log_probs)
    load_weights(named_tensors)                     sync: take the trainer's new weights
    forget()                                        drop what was cached for earlier dialogues
    sleep()                                         free memory for the update, until the next sync

An engine knows the trainer only by `load_weights`. It takes token ids and returns token ids, each
with the log-prob that it was drawn with, and serves the waiting dialogues at the same time. Neither
engine uses policy.py: cache, positions, mask, attention and sampling are written a second time, so
that the comparison of all log-probs at every step tests them. (The torch engine shares only the
layers of transformers with the trainer; vLLM does not share them either.)
"""

from support.clock import Clock

import asyncio
import copy
import os
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

# ----------------------------------------------------------------------------- cache and attention


@dataclass
class SlotCache:
    """A KV cache whose rows (slots) grow at their own pace. transformers uses it like its own
    caches: it calls `update` in each layer, and `get_seq_length`.

    `place` says which rows the next forward pass serves, and in which column each of its tokens is
    stored. Columns beyond a row's own length hold garbage, which the attention mask hides.
    """

    keys: dict = field(default_factory=dict)  # {layer: [slots, heads, columns, size]}
    values: dict = field(default_factory=dict)  # the same
    is_compileable = False  # transformers asks whether it may compile a model with this cache

    def place(self, slots, columns, length):
        """Say where the next forward pass reads and writes, once for all of its layers. slots: a
        list of R, or a range from 0; columns: in which the new tokens are stored, [R, W]; length:
        the number of columns that the pass reads."""
        rows = torch.tensor(slots, device=columns.device)  # [R]
        self.n_slots, self.length = max(slots) + 1, length
        # Both are indices of a store, [slots, heads, columns, size].
        # store[write_index] is [R, W, heads, size]: [R, 1] and [R, W] broadcast to [R, W], and as a
        # slice stands between them, torch puts these two dimensions in front of the others.
        self.write_index = rows[:, None], slice(None), columns
        # store[read_index] is [R, heads, length, size]; with a range, which is read as a slice, it
        # is a view and copies nothing
        first = slice(len(slots)) if isinstance(slots, range) else rows
        self.read_index = first, slice(None), slice(length)

    def update(self, key, value, layer, *args, **kwargs):
        """Store the keys and values of the new tokens, [R, heads, W, size]. Returns those of all
        tokens of the rows, [R, heads, length, size]."""
        for store, new in ((self.keys, key), (self.values, value)):
            old = store.setdefault(layer, new[:0, :, :0])  # [0, heads, 0, size]: it starts empty
            slots = max(self.n_slots - old.shape[0], 0)  # the missing ones
            columns = max(self.length - old.shape[2], 0)
            if slots or columns:
                columns = (columns + 127) // 128 * 128  # it grows by 128 columns at a time
                # F.pad takes pairs of (before, after), of the last dimension first
                store[layer] = F.pad(old, (0, 0, 0, columns, 0, 0, 0, slots))
            store[layer][self.write_index] = new.transpose(1, 2)  # [R, W, heads, size]
        return self.keys[layer][self.read_index], self.values[layer][self.read_index]

    def get_seq_length(self, *args):
        """The number of columns that the pass reads. transformers asks for it."""
        return self.length


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Attention where several heads of queries share one head of keys and values (grouped-query
    attention). query: [R, heads, W, size]; key, value: [R, kv_heads, length, size]; attention_mask:
    [R, 1, W, length], bool. Returns ([R, W, heads, size], None), as transformers wants it.

    If there is a mask, transformers' own attention copies keys and values for every head of
    queries, at every token: a third of the time of a rollout with SmolLM2 on a CPU."""
    result = F.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return result.transpose(1, 2).contiguous(), None


# --------------------------------------------------------------------------------------- the engine


@dataclass
class Request:
    """One reply that is being sampled."""

    prompt: list  # token ids
    uniform: np.ndarray  # random numbers in [0, 1), one for each token that it may have
    key: object  # of its dialogue, or None
    result: asyncio.Future  # (ids, log_probs)
    ids: list = field(default_factory=list)  # sampled so far
    log_probs: list = field(default_factory=list)


class TorchEngine:
    """Samples replies with plain PyTorch: a waiting list, a KV cache, and a loop that draws one
    token for every running request at a time. The way of a request:

        generate    it waits; `work` is started, if it does not run
        admit       it gets a slot of the cache, a row that may hold the dialogue's earlier tokens
        prefill     the rest of its prompt is computed, and its first token drawn
        step        its last token is computed, and the next one drawn, until a stop token

    Waiting requests are admitted once there is one for every four running ones: a forward pass for
    each of them would cost more than the wait.
    """

    def __init__(
        self,
        model,
        stop_ids,
        temperature=1.0,
        *,
        max_slots=256,
        clock=None,
        share=False,
        device=None,
        dtype=None,
    ):
        """The weights are a copy of the given model's. stop_ids: a set of ids; each ends a reply.
        share: the weights are the given model's own, for a caller that has loaded it only for the
        engine. device, dtype: where the weights go, and in which type; None: as they are."""
        from transformers import AttentionInterface

        model = model if share else copy.deepcopy(model)
        self.model = model.to(device).eval().requires_grad_(False)
        # Not by `model.to(dtype)`: that casts buffers too, and rotary frequencies in bf16 are off
        # by a radian at position 1,000.
        for p in model.parameters():
            p.data = p.data.to(dtype or p.dtype)
        # instead of "sdpa", PyTorch's attention, with which `load_model` loads
        AttentionInterface.register("grouped", grouped_attention)
        self.model.set_attn_implementation("grouped")
        self.stop_ids, self.temperature, self.max_slots = stop_ids, temperature, max_slots
        self.last_position = model.config.get_text_config().max_position_embeddings - 1
        self.clock = clock or Clock()
        self.cache = SlotCache()
        self.waiting = []  # Requests
        self.running = {}  # slot -> Request
        self.key_of_slot = {}  # slot -> the key of the dialogue that had it last
        # slot -> the token ids whose keys and values its row holds. The slot that was given to a
        # request longest ago is the first.
        self.ids_in_slot = {}
        self.loop_task = None

    def load_weights(self, named_tensors):
        """Copy the trainer's weights in, and forget everything computed with the old ones."""
        weights = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in named_tensors:
                weights[name].copy_(tensor)
        self.forget()

    def forget(self):
        """Forget which dialogue has which slot and what the slots hold, and free the cache. The
        rows of a batch, and so the last bits of its log-probs, must not depend on dialogues that
        are over."""
        self.key_of_slot = {}
        self.ids_in_slot = {}
        self.cache = SlotCache()

    sleep = forget  # the update needs the memory of the cache; the weights stay

    async def generate(self, prompt, max_tokens, rng, key):
        """Sample up to `max_tokens` after the ids `prompt`. `key` names the dialogue, so that its
        row of the cache is found again; None: a single request.

        Returns (ids, log_probs): a stop token, if one was drawn, is the last of both. All random
        numbers of a reply are drawn from `rng` at once, `max_tokens` of them, however long the
        reply becomes.
        """
        result = asyncio.Future()
        self.waiting.append(Request(prompt, rng.random(max_tokens), key, result))
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self.work())
        return await result

    async def work(self):
        """Serve requests until there are none: one token for each running request at a time."""
        try:
            while self.waiting or self.running:
                # without the requests of cancelled dialogues
                self.waiting = [r for r in self.waiting if not r.result.cancelled()]
                self.running = {s: r for s, r in self.running.items() if not r.result.cancelled()}
                with self.clock.during("samplers"):
                    if len(self.waiting) * 4 >= len(self.running):
                        self.admit()
                    if self.running:
                        self.step()
                await asyncio.sleep(0)  # dialogues whose reply is ready go on here, and come back
        except Exception as error:  # passed on to every dialogue that waits
            for request in [*self.waiting, *self.running.values()]:
                if not request.result.done():
                    request.result.set_exception(error)
            self.waiting, self.running = [], {}

    def admit(self):
        """Give each waiting request a slot, as long as there are any; compute what the slot's row
        lacks of its prompt, and draw the first token of its reply.

        The slot is that of the request's dialogue, if it still has one that is free; else one that
        holds nothing; else, of the free ones, the one that was used longest ago: its dialogue is
        the least likely to go on."""
        chunks = {}  # slot -> ids to be computed
        while self.waiting and len(self.running) < self.max_slots:
            request = self.waiting.pop(0)
            key = request.key
            own = [s for s, owner in self.key_of_slot.items() if key is not None and owner == key]
            empty = [s for s in range(self.max_slots) if s not in self.ids_in_slot]
            slot = next(s for s in [*own, *empty, *self.ids_in_slot] if s not in self.running)

            # at least one token must be computed, for its logits
            prefix = os.path.commonprefix([self.ids_in_slot.pop(slot, []), request.prompt[:-1]])
            self.ids_in_slot[slot] = prefix  # the last one of them now
            chunks[slot] = request.prompt[len(prefix) :]
            self.key_of_slot[slot], self.running[slot] = key, request
        if chunks:
            self.prefill(chunks)

    def prefill(self, chunks):
        """Compute the part of each prompt that the row of its slot does not hold yet, and draw the
        first token of each reply. chunks: {slot: ids of this part}, R slots, none of them empty."""
        width = max(map(len, chunks.values()))  # W: shorter chunks are padded
        padded = [ids + [0] * (width - len(ids)) for ids in chunks.values()]
        hidden = self.compute(list(chunks), padded)  # [R, W, H]
        for slot, ids in chunks.items():
            self.ids_in_slot[slot] += ids
        # only the last token of each chunk predicts a token that is not yet there
        ends = torch.tensor([len(ids) - 1 for ids in chunks.values()], device=hidden.device)  # [R]
        rows = torch.arange(len(chunks), device=hidden.device)  # [R]
        self.draw_next(list(chunks), hidden[rows, ends])  # [R, H]

    def step(self):
        """Decode: compute the last token that was drawn for each running request, and draw the next
        one.

        All slots up to the last running one take part, because a slice of the cache need not be
        copied. An idle slot among them gets a token, too: what is computed for it is written behind
        the ids that its row holds and never read.
        """
        tokens = {slot: self.running[slot].ids[-1] for slot in sorted(self.running)}
        slots, active = range(max(tokens) + 1), list(tokens)
        hidden = self.compute(slots, [[tokens.get(slot, 0)] for slot in slots])  # [R, 1, H]
        for slot in active:
            self.ids_in_slot[slot].append(tokens[slot])
        rows = torch.tensor(active, device=hidden.device)  # [A], of the A active slots
        self.draw_next(active, hidden[rows, 0])  # [A, H]

    @torch.inference_mode()
    def compute(self, slots, ids):
        """The hidden states of new tokens, [R, W, H], each of which sees what its row holds and the
        new tokens before it. Their keys and values go into the cache. slots: a list of R, or a
        range from 0; ids: [R, W], with padding."""
        device = self.model.device
        ids = torch.tensor(ids, device=device)  # [R, W]
        # A row's new tokens stand behind those that it holds.
        start = torch.tensor([len(self.ids_in_slot.get(slot, [])) for slot in slots])  # [R]
        positions = (start[:, None] + torch.arange(ids.shape[1])).to(device)  # [R, W]
        length = int(start.max()) + ids.shape[1]
        self.cache.place(slots, positions, length)
        visible = torch.arange(length, device=device) <= positions[:, :, None]  # [R, W, length]
        # Padding may lie beyond the model's last position. It can have any valid position, because
        # its results are never read.
        return self.model.base_model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=visible[:, None],  # [R, 1, W, length]
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state

    @torch.inference_mode()
    def draw_next(self, slots, hidden):
        """Draw the next token of the request in each of the R `slots`. hidden: the states that
        predict them, [R, H]. A reply ends with a stop token, or at its limit."""
        requests = [self.running[slot] for slot in slots]
        logits = self.model.get_output_embeddings()(hidden)  # [R, V]
        # at temperature 0, which takes the likeliest token, the log-probs are the model's own
        log_probs = F.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)  # [R, V]
        if self.temperature:
            # inverse-CDF sampling: the first token whose cdf exceeds a uniform draw
            cdf = log_probs.double().exp().cumsum(-1)  # [R, V]
            draws = [[request.uniform[len(request.ids)]] for request in requests]
            uniform = torch.tensor(draws, dtype=cdf.dtype, device=cdf.device)  # [R, 1]
            tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)  # [R, 1]
            # a draw next to 1 may be rounded to the end
            tokens = tokens.clamp(max=cdf.shape[-1] - 1)
        else:  # 0, for a user's model: the likeliest token
            tokens = log_probs.argmax(-1, keepdim=True)  # [R, 1]
        chosen = log_probs.gather(-1, tokens)  # [R, 1]
        results = zip(slots, requests, tokens[:, 0].tolist(), chosen[:, 0].tolist())
        for slot, request, token, log_prob in results:
            request.ids.append(token)
            request.log_probs.append(log_prob)
            if token in self.stop_ids or len(request.ids) == len(request.uniform):
                del self.running[slot]
                if request.key is None:  # no later turn will use the slot's row again
                    del self.ids_in_slot[slot]
                # cancelled: at Ctrl-C asyncio cancels all tasks at once, in the middle of a step
                if not request.result.cancelled():
                    request.result.set_result((request.ids, request.log_probs))


# -------------------------------------------------------------------------------- the other engine


def make_vllm_engine(path, stop_ids, **settings):
    """A VllmEngine (models/vllm_engine.py says what its arguments are)."""
    from models.vllm_engine import VllmEngine  # here, because most machines have no vLLM

    return VllmEngine(path, stop_ids, **settings)
