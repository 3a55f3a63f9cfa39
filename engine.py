"""engine.py - the two engines that sample for the policy: plain PyTorch, and vLLM. Both hold the
whole weights, not a shard of them.

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

from support.calls import Clock
from support.errors import BadModel, one_line
from support.loading import stop_ids
from support.ranks import world_size

import asyncio
import copy
import gc
import os
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

# --------------------------------------------------------------------------------- the torch engine


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
        rows = torch.tensor(slots, device=columns.device)
        self.n_slots, self.length = max(slots) + 1, length
        # [R, 1] and [R, W] broadcast to [R, W]. As a slice stands between them, torch puts these
        # two dimensions in front of the others: [R, W, heads, size].
        self.written = rows[:, None], slice(None), columns
        # a range is read as a slice, which is a view and copies nothing
        read = slice(len(slots)) if isinstance(slots, range) else rows
        self.read = read, slice(None), slice(length)

    def update(self, key, value, layer, *args, **kwargs):
        """Store the keys and values of the new tokens, [R, heads, W, size]. Returns those of all
        tokens of the rows, [R, heads, length, size]."""
        for store, new in ((self.keys, key), (self.values, value)):
            old = store.setdefault(layer, new[:0, :, :0])  # no slots and no columns
            slots = max(self.n_slots - old.shape[0], 0)  # the missing ones
            columns = max(self.length - old.shape[2], 0)
            if slots or columns:
                columns = (columns + 127) // 128 * 128  # it grows by 128 columns at a time
                store[layer] = F.pad(old, (0, 0, 0, columns, 0, 0, 0, slots))
            store[layer][self.written] = new.transpose(1, 2)
        return self.keys[layer][self.read], self.values[layer][self.read]

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
    token for every running request at a time.

    A dialogue keeps its slot of the cache, so its next turn computes only the new tokens. Waiting
    requests are admitted once there is one for every four running ones: a forward pass for each of
    them would cost more than the wait.
    """

    def __init__(
        self,
        model,
        stop_id,
        temperature=1.0,
        *,
        max_slots=256,
        clock=None,
        share=False,
        device=None,
        dtype=None,
    ):
        """The weights are a copy of the given model's. stop_id: the id that ends a reply, beside
        the model's own stop ids. share: the weights are the given model's own, for a caller that
        has loaded it only for the engine. device, dtype: where the weights go, and in which type;
        None: as they are."""
        from transformers import AttentionInterface

        model = model if share else copy.deepcopy(model)
        self.model = model.to(device).eval().requires_grad_(False)
        # Not by `model.to(dtype)`: that casts buffers too, and rotary frequencies in bf16 are off
        # by a radian at position 1,000.
        for p in model.parameters():
            p.data = p.data.to(dtype or p.dtype)
        # in the place of "sdpa", PyTorch's attention, with which `load_model` loads
        AttentionInterface.register("grouped", grouped_attention)
        self.model.set_attn_implementation("grouped")
        own = model.generation_config.eos_token_id  # None, an id, or a list of ids
        self.stop_ids = {stop_id, *np.ravel(own).tolist()}
        self.temperature, self.max_slots = temperature, max_slots
        self.last_position = model.config.get_text_config().max_position_embeddings - 1
        self.clock = clock or Clock()
        self.cache = SlotCache()
        self.waiting = []  # Requests
        self.running = {}  # slot -> Request
        self.key_of_slot = {}  # slot -> the key of the dialogue that had it last
        # slot -> the token ids whose keys and values its row holds, least recently used first:
        # `admit` re-inserts a slot at the end, `pick_slot` takes from the front.
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
        """Forget which dialogue has which slot, and what the slots hold. The rows of a batch, and
        so the last bits of its log-probs, must not depend on dialogues that are over."""
        self.key_of_slot = {}
        self.ids_in_slot = {}

    def sleep(self):
        """Give the memory of the cache to the update; the weights stay."""
        self.forget()
        self.cache = SlotCache()

    async def generate(self, prompt, max_tokens, rng, key):
        """Sample up to `max_tokens` after the ids `prompt`. `key` names the dialogue, so that its
        row of the cache is found again; None: a single request.

        Returns (ids, log_probs): a stop token, if one was drawn, is the last of both. All random
        numbers of a reply are drawn from `rng` at once, `max_tokens` of them, however long the
        reply becomes.
        """
        result = asyncio.get_running_loop().create_future()
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
            # None of them is done or cancelled: those were left out above, and no other task has
            # run since.
            for request in [*self.waiting, *self.running.values()]:
                request.result.set_exception(error)
            self.waiting, self.running = [], {}

    def admit(self):
        """Give each waiting request a slot, as long as there are any; compute what the slot's row
        lacks of its prompt, and draw the first token of its reply."""
        chunks = {}  # slot -> ids to be computed
        while self.waiting and len(self.running) < self.max_slots:
            request = self.waiting.pop(0)
            slot = self.pick_slot(request.key)

            held = self.ids_in_slot.pop(slot, [])
            # at least one token must be computed, for its logits
            reused = os.path.commonprefix([held, request.prompt[:-1]])
            # put in again, so it is the last of the dict: the slot that was used most recently
            self.ids_in_slot[slot] = reused
            chunks[slot] = request.prompt[len(reused) :]

            self.key_of_slot[slot] = request.key
            self.running[slot] = request
        if chunks:
            self.forward(list(chunks), list(chunks.values()))

    def pick_slot(self, key):
        """The slot of the dialogue `key`, if it still has one that is free; else a slot that holds
        nothing; else, of the free ones, the one that was used longest ago: its dialogue is the
        least likely to go on."""
        known = [s for s, owner in self.key_of_slot.items() if key is not None and owner == key]
        empty = [s for s in range(self.max_slots) if s not in self.ids_in_slot]
        # a dict keeps its order: the least recently used first
        return next(s for s in [*known, *empty, *self.ids_in_slot] if s not in self.running)

    def step(self):
        """Draw one token for each running request.

        All slots up to the last running one take part, because a slice of the cache need not be
        copied. An idle slot among them gets an empty chunk: what is computed for it is written
        behind the ids that its row holds and never read, and no token is drawn.
        """
        slots = range(max(self.running) + 1)
        chunks = [self.running[s].ids[-1:] if s in self.running else [] for s in slots]
        self.forward(slots, chunks)

    @torch.inference_mode()
    def forward(self, slots, chunks):
        """Append `chunks`, a list of ids for each of `slots`, to the cache; draw the next token of
        each slot whose chunk is not empty. slots: a list, or a range from 0. A token that is drawn
        here is the slot's chunk in the next pass.

            from     slots       chunks               draws
            admit    [0, 2]      [[5, 6, 7], [8]]     what follows 7 in slot 0, 8 in slot 2
            step     range(3)    [[4], [], [9]]       what follows 4 and 9; slot 1 is idle
        """
        device = self.model.device
        width = max(map(len, chunks))  # W: shorter chunks are padded
        ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=device)

        # A row's new tokens stand behind those that it holds.
        start = torch.tensor([len(self.ids_in_slot.get(s, [])) for s in slots])
        positions = (start[:, None] + torch.arange(width)).to(device)  # [R, W]
        length = int(start.max()) + width
        self.cache.place(slots, positions, length)
        visible = torch.arange(length, device=device) <= positions[:, :, None]  # [R, W, length]

        # Padding may lie beyond the model's last position. It can have any valid position, because
        # its results are never read.
        hidden = self.model.base_model(
            input_ids=ids,
            position_ids=positions.clamp(max=self.last_position),
            attention_mask=visible[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state  # [R, W, H]

        # Only the last token of each chunk predicts a token that is not yet there.
        active = [i for i, chunk in enumerate(chunks) if chunk]  # R' of the R places in `slots`
        ends = torch.tensor([len(chunks[i]) - 1 for i in active], device=device)
        last = hidden[torch.tensor(active, device=device), ends]  # [R', H]
        logits = self.model.get_output_embeddings()(last)  # [R', V]
        # at temperature 0, which takes the likeliest token, the log-probs are the model's own
        log_probs = F.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)
        tokens = self.draw(log_probs, [self.running[slots[i]] for i in active])  # [R', 1]
        drawn_log_probs = log_probs.gather(-1, tokens)[:, 0].tolist()

        for i, token, log_prob in zip(active, tokens[:, 0].tolist(), drawn_log_probs):
            slot, request = slots[i], self.running[slots[i]]
            self.ids_in_slot[slot] += chunks[i]
            request.ids.append(token)
            request.log_probs.append(log_prob)
            # a reply ends with a stop token or at its limit
            if token in self.stop_ids or len(request.ids) == len(request.uniform):
                del self.running[slot]
                if request.key is None:  # no later turn will use the slot's row again
                    del self.ids_in_slot[slot]
                request.result.set_result((request.ids, request.log_probs))

    def draw(self, log_probs, requests):
        """The next token of each of the R requests, from its row of log_probs [R, V]: [R, 1]."""
        if not self.temperature:  # 0, for a simulated user: the likeliest token
            return log_probs.argmax(-1, keepdim=True)
        # inverse-CDF sampling: the first token whose cdf exceeds a uniform draw
        cdf = log_probs.double().exp().cumsum(-1)
        draws = [[request.uniform[len(request.ids)]] for request in requests]
        uniform = torch.tensor(draws, dtype=torch.float64, device=cdf.device)  # [R, 1]
        tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)
        return tokens.clamp(max=cdf.shape[-1] - 1)  # a draw next to 1 may be rounded to the end


# --------------------------------------------------------------------------------------------- vLLM


class VllmEngine:
    """vLLM inside this process, step by step: continuous batching, prefix caching, ids in and out.

    path: directory of the starting weights; context: tokens of a dialogue; memory_share: of a GPU's
    memory, for weights and cache (default: nine tenths of what is free, because other models of
    this process may be there). Raises BadModel if vLLM refuses the model.
    """

    def __init__(
        self,
        path,
        stop_id,
        temperature=1.0,
        *,
        context,
        seed=0,
        dtype=torch.float32,
        memory_share=None,
        clock=None,
    ):
        self.stop_ids, self.temperature = {stop_id, *stop_ids(path)}, temperature
        self.clock = clock or Clock()
        self.cuda = torch.cuda.is_available()
        self.running = {}  # request id -> Future of (ids, log_probs)
        self.count = 0  # of the requests so far
        self.loop_task = None
        self.asleep = False
        # Otherwise the engine core is another process, and cannot take weights tensor by tensor.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB of cache, without a GPU
        from vllm import LLM, SamplingParams  # reads these variables; not installed everywhere

        # An engine that is not used any more gives its memory back when it is collected. But vLLM
        # has frozen what existed when that engine was made, which excludes it from the collection.
        gc.unfreeze()
        gc.collect()
        self.SamplingParams = SamplingParams
        settings = dict(
            model=str(path),
            max_model_len=context,
            seed=seed,
            dtype=str(dtype).removeprefix("torch."),
            skip_tokenizer_init=True,  # ids in, ids out
            # Otherwise vLLM applies the checkpoint's own top-p, top-k and stop ids.
            generation_config="vllm",
            # By default log-probs are those before the temperature, unlike the trainer's.
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            disable_log_stats=True,
            enforce_eager=not self.cuda,  # CUDA graphs need CUDA
            enable_sleep_mode=self.cuda,  # for `sleep`; the CPU build has no such mode
        )
        if self.cuda:
            free, total = torch.cuda.mem_get_info()
            settings["gpu_memory_utilization"] = memory_share or 0.9 * free / total
        if world_size() > 1:
            # torchrun has started the processes already, an engine in each; vLLM starts none.
            settings["distributed_executor_backend"] = "external_launcher"
        try:
            self.llm = LLM(**settings)
        except ValueError as error:  # no room for a dialogue in this share, mostly
            raise BadModel(
                f"vLLM refuses {path} in its share of the GPU's memory (in rlver.py "
                f"--engine-memory, in evaluate.py 0.9 of what is free): {one_line(error)}"
            ) from None

    async def generate(self, prompt, max_tokens, rng, key=None):
        """As TorchEngine.generate. `key` is not needed: the prefix cache compares the tokens."""
        params = self.SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            stop_token_ids=list(self.stop_ids),
            logprobs=0,  # of the sampled token alone, without the likeliest ones
            seed=int(rng.integers(2**31)),
            detokenize=False,
        )
        self.count += 1
        name = str(self.count)
        result = self.running[name] = asyncio.get_running_loop().create_future()
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self.work())
        try:
            return await result
        except asyncio.CancelledError:
            # The dialogue was cancelled. Cache blocks still in use would survive the next sync.
            if self.running.pop(name, None) is not None:
                self.llm.llm_engine.abort_request([name])
            raise

    async def work(self):
        """Step vLLM until all requests are served."""
        try:
            while self.running:
                await asyncio.sleep(0)  # dialogues that go on send their requests before the step
                with self.clock.during("samplers"):
                    finished = [out for out in self.llm.llm_engine.step() if out.finished]
                for out in finished:
                    result = self.running.pop(out.request_id, None)
                    if result is not None and not result.done():
                        # for each token {id: Logprob}, of the token and of further candidates
                        [output] = out.outputs
                        ids = list(output.token_ids)
                        drawn = [of[token].logprob for token, of in zip(ids, output.logprobs)]
                        result.set_result((ids, drawn))
        except Exception as error:
            for result in self.running.values():
                if not result.done():
                    result.set_exception(error)
            self.running = {}

    def load_weights(self, named_tensors):
        """Take over the trainer's weights, and forget all keys and values made with the old ones.

        With tied embeddings `lm_head.weight` must be among them, as it is in a state_dict but not
        in named_parameters(): without it the call succeeds, but the output layer keeps its old
        weights. Only a comparison of log-probs shows it."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        if self.asleep:  # the cache only now: it was not there while the weights came in
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        self.forget()

    def forget(self):
        """Empty the prefix cache. Raises RuntimeError if requests are still under way."""
        if not self.llm.reset_prefix_cache():  # vLLM would only log it
            raise RuntimeError("vLLM keeps its prefix cache: requests are still under way")

    def sleep(self):
        """Free the GPU's memory for the update: weights and cache are dropped, until the next
        `load_weights`. (The CPU build of vLLM cannot sleep.)"""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True
