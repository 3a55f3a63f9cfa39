"""models/vllm_engine.py - the engine that samples for the policy by vLLM. It has the methods of
models.engine.TorchEngine, and shares no code with the trainer, not even the layers of transformers.
"""

from support.clock import Clock
from support.errors import BadModel, one_line
from support.ranks import world_size

import asyncio
import gc
import os

import torch


class VllmEngine:
    """vLLM inside this process, step by step: continuous batching, prefix caching, ids in and out.

    path: directory of the starting weights; stop_ids: a set of ids, each of which ends a reply;
    context: tokens of a dialogue; memory_share: of a GPU's memory, for weights and cache (default:
    nine tenths of what is free, because other models of this process may be there). Raises BadModel
    if vLLM refuses the model.
    """

    def __init__(
        self,
        path,
        stop_ids,
        temperature=1.0,
        *,
        context,
        seed=0,
        dtype=torch.float32,
        memory_share=None,
        dialogues=None,
        clock=None,
    ):
        self.stop_ids, self.temperature = stop_ids, temperature
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
            trust_remote_code=False,
            # Otherwise vLLM applies the checkpoint's own top-p, top-k and stop ids.
            generation_config="vllm",
            # By default log-probs are those before the temperature, unlike the trainer's.
            logprobs_mode="processed_logprobs",
            # chunks of prompts, and of other dialogues' tokens, in a step
            max_num_batched_tokens=8192,
            enable_prefix_caching=True,
            disable_log_stats=True,
            enforce_eager=not self.cuda,  # CUDA graphs need CUDA
            enable_sleep_mode=self.cuda,  # for `sleep`; the CPU build has no such mode
        )
        if dialogues:  # else vLLM plans for 1024 at once on a large card, with graphs and buffers
            settings["max_num_seqs"] = dialogues
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
        """Sample up to `max_tokens` after the ids `prompt`. Returns (ids, log_probs). `key` is not
        needed: the prefix cache compares the tokens."""
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
        result = self.running[name] = asyncio.Future()
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
                    outputs = [out for out in self.llm.llm_engine.step() if out.finished]
                for output in outputs:
                    result = self.running.pop(output.request_id, None)
                    if result is not None and not result.done():
                        [reply] = output.outputs
                        ids = list(reply.token_ids)
                        # logprobs: for each token {id: Logprob}, of it and of other candidates
                        pairs = zip(ids, reply.logprobs)
                        log_probs = [candidates[token].logprob for token, candidates in pairs]
                        result.set_result((ids, log_probs))
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
            torch.cuda.empty_cache()  # what the update has freed and torch still holds
            self.llm.wake_up(tags=["weights"])
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(named_tensors)})
        if self.asleep:  # the cache comes back after the weights, so that these had its memory
            self.llm.wake_up(tags=["kv_cache"])
        self.asleep = False
        self.forget()

    def forget(self):
        """Empty the prefix cache. No request may be under way."""
        if not self.llm.reset_prefix_cache():  # vLLM would only log it
            raise RuntimeError("vLLM keeps its prefix cache: requests are still under way")

    def sleep(self):
        """Free the GPU's memory for the update: weights and cache are dropped, until the next
        `load_weights`. (The CPU build of vLLM cannot sleep.)"""
        if self.cuda and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True
