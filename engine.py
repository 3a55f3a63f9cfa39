"""engine.py - the two engines that sample for the policy: a page of PyTorch, and vLLM. Either holds
a whole copy of the weights.

An engine knows the trainer only by `load_weights`. It is given token ids and gives token ids, each
with the log-prob that it was drawn with, and serves whatever dialogues are waiting, as they come.
It is apart from policy.py because the two must not share code: that they agree about every log-prob
is checked at every step, and would be worth nothing if one were the other.
"""

from support.settings import BadInput, Parser

import asyncio
import contextlib
import copy
import os
import re
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

# --------------------------------------------------------------------------------- the torch engine


class SlotCache:
    """A KV cache whose rows (slots) grow at their own pace; transformers takes it for its own.

    Layer l keeps keys and values [slots, heads, length, size]. `place` says which rows a forward
    pass serves and at which column each of its tokens goes. What lies beyond a row's own length is
    garbage that the attention mask hides.
    """

    is_compileable = False

    def __init__(self):
        self.keys, self.values = {}, {}

    def place(self, rows, columns, slots, length):
        """Say where the next forward pass reads and writes."""
        self.rows, self.columns, self.slots, self.length = rows, columns, slots, length
        self.index = torch.arange(slots, device=columns.device)[rows, None]  # [rows, 1]

    def update(self, key, value, layer, *args, **kwargs):  # [rows, heads, new, size]
        for store, new in ((self.keys, key), (self.values, value)):
            old = store.get(layer, new[:0, :, :0])  # at first nothing, of this shape
            if old.shape[0] < self.slots or old.shape[2] < self.length:
                size = (self.slots, new.shape[1], (self.length + 127) // 128 * 128, new.shape[3])
                store[layer] = new.new_zeros([max(a, b) for a, b in zip(size, old.shape)])
                store[layer][: old.shape[0], :, : old.shape[2]] = old
            store[layer][self.index, :, self.columns] = new.transpose(1, 2)
        return [store[layer][self.rows, :, : self.length] for store in (self.keys, self.values)]

    def get_seq_length(self, *args):
        return self.length


@dataclass
class Request:
    """One reply in the making."""

    prompt: list
    max_tokens: int
    rng: np.random.Generator
    key: object
    done: asyncio.Future
    ids: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)


class TorchEngine:
    """Samples replies with plain PyTorch: a waiting list, a KV cache, one token a step for all.

    A dialogue keeps its slot, so the next turn computes only what is new. Newcomers are let in when
    they are a quarter of those at work: a forward pass for each would cost more than the wait.
    """

    def __init__(self, model, stop_id, temperature=1.0, max_slots=256, clock=None):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.stop_id, self.temperature = stop_id, temperature
        self.max_slots, self.clock = max_slots, clock
        self.cache, self.waiting, self.running = SlotCache(), [], {}  # running: slot -> Request
        self.slot_of, self.known = {}, {}  # dialogue -> slot; slot -> ids in its cache row
        self.loop_task = None

    def move(self, device, dtype):
        """To a device, parameters in `dtype`. Not `model.to(dtype)`: that casts buffers too, and
        rotary frequencies in bf16 are off by a radian at position 1,000."""
        self.model.to(device)
        for p in self.model.parameters():
            p.data = p.data.to(dtype)

    def load_weights(self, named_tensors):
        """Copy the trainer's weights in, and forget everything computed with the old ones."""
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in named_tensors:
                own[name].copy_(tensor)
        self.forget()

    def forget(self):
        """Start as new: which rows a batch has, and so its last bits, must not depend on dialogues
        that are over."""
        self.slot_of, self.known = {}, {}

    def sleep(self):
        """Give the memory of the cache to the update; the weights stay."""
        self.forget()
        self.cache = SlotCache()

    async def generate(self, prompt, max_tokens, rng, key):
        """Sample up to `max_tokens` after the ids `prompt`; `key` names the dialogue, so that its
        cache row is found again; None: a single request.

        Returns (ids, log_probs): the stop token, if it was drawn, is the last of both. `rng` is
        drawn from once a call.
        """
        request = Request(prompt, max_tokens, rng, key, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self.work())
        return await request.done

    async def work(self):
        """Serve requests until there are none, one token for everybody at a time."""
        try:
            while self.waiting or self.running:
                # whose dialogue was given up
                self.waiting = [r for r in self.waiting if not r.done.cancelled()]
                self.running = {s: r for s, r in self.running.items() if not r.done.cancelled()}
                with self.clock.during("samplers") if self.clock else contextlib.nullcontext():
                    if len(self.waiting) * 4 >= len(self.running):
                        self.admit()
                    self.step()
                await asyncio.sleep(0)  # dialogues whose reply is ready go on here, and come back
        except Exception as error:  # a failure here is the failure of everybody who waits
            for request in [*self.waiting, *self.running.values()]:
                if not request.done.done():
                    request.done.set_exception(error)
            self.waiting, self.running = [], {}

    def admit(self):
        """Give each waiting request a slot, and read what the slot does not hold of its prompt."""
        chunks = {}
        while self.waiting and len(self.running) < self.max_slots:
            request = self.waiting.pop(0)
            slot = self.slot_of.get(request.key) if request.key is not None else None
            if slot is None or slot in self.running:
                # one without a past; if all have one, the longest unused loses it
                new = [s for s in range(self.max_slots) if s not in self.known]
                slot = next(s for s in [*new, *self.known] if s not in self.running)
            # popped and put back: the order of the dict is the order of use
            known = self.known.pop(slot, [])
            past = request.prompt[:-1]  # at least one token must run, for its logits
            same = next(
                (i for i, (a, b) in enumerate(zip(known, past)) if a != b),
                min(len(known), len(past)),
            )
            chunks[slot] = request.prompt[same:]
            self.known[slot], self.running[slot] = request.prompt[:same], request
            self.slot_of = {k: s for k, s in self.slot_of.items() if s != slot} | {
                request.key: slot
            }
            request.uniform = iter(request.rng.random(request.max_tokens))
        if chunks:
            self.forward(torch.tensor([*chunks]), [*chunks], [*chunks.values()])

    def step(self):
        """One token for everybody at work. The rows are a slice of the cache, so nothing is copied;
        idle rows among them compute garbage beside their own past and keep it."""
        if self.running:
            last = max(self.running) + 1
            self.forward(
                slice(0, last),
                range(last),
                [self.running[s].ids[-1:] if s in self.running else [] for s in range(last)],
            )

    @torch.inference_mode()
    def forward(self, rows, slots, chunks):
        """Append `chunks` (a list of ids for each of `slots`) to the cache, and draw the next token
        of each that is at work."""
        device = next(self.model.parameters()).device
        start = torch.tensor([len(self.known.get(s, [])) for s in slots])
        width = max(map(len, chunks))
        ids = torch.tensor([chunk + [0] * (width - len(chunk)) for chunk in chunks], device=device)
        positions = (start[:, None] + torch.arange(width)).to(device)  # as ids: [R, W]
        length = int(start.max()) + width
        self.cache.place(
            rows.to(device) if torch.is_tensor(rows) else rows, positions, max(slots) + 1, length
        )
        visible = torch.arange(length, device=device) <= positions[:, :, None]  # [R, W, length]
        # only padding ever comes to stand beyond it
        last = self.model.config.max_position_embeddings - 1
        hidden = self.model.base_model(
            input_ids=ids,
            position_ids=positions.clamp(max=last),
            attention_mask=visible[:, None],
            past_key_values=self.cache,
            use_cache=True,
        ).last_hidden_state
        at = [i for i, chunk in enumerate(chunks) if chunk]
        ends = torch.tensor([len(chunks[i]) - 1 for i in at], device=device)
        head = self.model.get_output_embeddings()
        logits = head(hidden[torch.tensor(at, device=device), ends])  # [R', V]
        log_probs = F.log_softmax(logits.float() / (self.temperature or 1.0), dim=-1)
        if self.temperature:
            # inverse-CDF sampling: the first token whose cdf passes a uniform draw
            cdf = log_probs.double().exp().cumsum(-1)
            draw = torch.tensor(
                [[next(self.running[slots[i]].uniform)] for i in at],
                dtype=torch.float64,
                device=device,
            )  # [R', 1]
            tokens = torch.searchsorted(cdf, draw * cdf[:, -1:], right=True)  # [R', 1]
            tokens = tokens.clamp(max=cdf.shape[-1] - 1)
        else:  # temperature 0, for a simulated user: the likeliest token
            tokens = log_probs.argmax(-1, keepdim=True)
        for i, token, log_prob in zip(
            at, tokens[:, 0].tolist(), log_probs.gather(-1, tokens)[:, 0].tolist()
        ):
            slot, request = slots[i], self.running[slots[i]]
            self.known[slot] += chunks[i]
            request.ids.append(token)
            request.log_probs.append(log_prob)
            if token == self.stop_id or len(request.ids) == request.max_tokens:
                del self.running[slot]
                if request.key is None:  # nobody will come back to it: the slot is free
                    del self.known[slot]
                if not request.done.cancelled():
                    request.done.set_result((request.ids, request.log_probs))


# --------------------------------------------------------------------------------------------- vLLM


class VllmEngine:
    """vLLM inside this process, step by step: continuous batching, prefix caching, ids in and out.

    path: directory of the starting weights; context: tokens of a dialogue. The settings below that
    are no matter of taste:
      * multiprocessing off: else the engine core is another process, which weights cannot be handed
        to tensor by tensor;
      * processed_logprobs: vLLM's default log-probs are those before the temperature, which no
        trainer agrees with;
      * generation_config="vllm": else the checkpoint's own top-p, top-k and stop ids are applied
        behind our back.
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
        memory_share=0.45,
        clock=None,
    ):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        from vllm import LLM, SamplingParams

        self.SamplingParams, self.clock = SamplingParams, clock
        self.stop_id, self.temperature = stop_id, temperature
        self.cuda = torch.cuda.is_available()
        many = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        settings = dict(
            model=str(path),
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            max_model_len=context,
            seed=seed,
            disable_log_stats=True,
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=not self.cuda,
            enable_sleep_mode=self.cuda,
            **({"gpu_memory_utilization": memory_share} if self.cuda else {}),
            **({"distributed_executor_backend": "external_launcher"} if many else {}),
        )
        try:
            self.llm = LLM(**settings)
        except ValueError as error:
            if not re.search("cache blocks|KV cache|free memory", str(error), re.I):
                raise
            raise BadInput(
                f"--engine-memory {memory_share}: there vLLM has no room for a dialogue "
                f"of {context} tokens: {str(error).splitlines()[0][:200]}"
            ) from None
        self.running, self.count, self.loop_task = {}, 0, None  # running: request id -> Future
        self.asleep = False

    async def generate(self, prompt, max_tokens, rng, key=None):
        """As TorchEngine.generate. `key` is not needed: the prefix cache goes by the tokens."""
        params = self.SamplingParams(
            temperature=self.temperature,
            max_tokens=max_tokens,
            stop_token_ids=[self.stop_id],
            logprobs=0,
            seed=int(rng.integers(2**31)),
            detokenize=False,
        )
        self.count += 1
        name, done = str(self.count), asyncio.get_running_loop().create_future()
        self.running[name] = done
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt)}, params)
        if self.loop_task is None or self.loop_task.done():
            self.loop_task = asyncio.create_task(self.work())
        try:
            return await done
        except asyncio.CancelledError:
            # its dialogue was given up; blocks that stay in use would survive the next sync
            if self.running.pop(name, None) is not None:
                self.llm.llm_engine.abort_request([name])
            raise

    async def work(self):
        """Step vLLM until nobody waits."""
        try:
            while self.running:
                await asyncio.sleep(0)  # whoever has something to ask does so before the step
                with self.clock.during("samplers") if self.clock else contextlib.nullcontext():
                    finished = [out for out in self.llm.llm_engine.step() if out.finished]
                for out in finished:
                    ids, found = list(out.outputs[0].token_ids), out.outputs[0].logprobs
                    done = self.running.pop(out.request_id, None)
                    if done is not None and not done.done():
                        done.set_result((ids, [at[i].logprob for i, at in zip(ids, found)]))
        except Exception as error:
            for done in self.running.values():
                if not done.done():
                    done.set_exception(error)
            self.running = {}

    def load_weights(self, named_tensors):
        """Hand the trainer's weights over, and forget all keys and values made with the old ones.

        With tied embeddings `lm_head.weight` must be among them, as it is in a state_dict but not
        in named_parameters(): without it the call succeeds and the output layer stays what it was.
        Nothing but a comparison of log-probs shows it."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        if self.asleep:  # the cache only now: it was not there while the weights came in
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        self.forget()

    def forget(self):
        if not self.llm.reset_prefix_cache():  # vLLM would only log it
            raise RuntimeError("vLLM keeps its prefix cache: requests are still under way")

    def sleep(self):
        """Give the GPU's memory to the update: weights and cache are dropped, the next
        `load_weights` wakes it up. (The CPU build has no such thing.)"""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True


if __name__ == "__main__":
    ABOUT = (
        "The two engines that sample for the policy, PyTorch and vLLM. A part of rlver.py "
        "and evaluate.py; it prints nothing but this."
    )
    Parser(description=ABOUT).parse_args()
    print(ABOUT)
