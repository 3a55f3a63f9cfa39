"""models.py - what one rank trains and samples with: policy, critic, reference, optimizers, engine.

A run builds them from where the policy starts, or from a checkpoint; after each update the engine
is given the new weights, and asked to prove that they arrived. `kl_start` says how far the policy
has moved. Apart from rlver.py because a first reader needs to know only that all this exists; apart
from policy.py because the policy itself knows nothing of runs, files and engines.
"""

from support.chat_format import ChatFormat
from support.loading import best_device, load_model, stop_ids
from support.ranks import (
    all_gather_list,
    all_reduce_sum,
    broadcast,
    check_world,
    full_tensor,
    iter_full_weights,
    load_optimizer_state,
    make_masters,
    optimizer_state,
    rank,
    shard,
    wait_for_all,
    world,
)
from support.rundir import write_json
from support.settings import BadInput, Parser

import json
import time

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

import toy
from engine import TorchEngine, VllmEngine
from lora import AdapterView, SharedBase, merge
from policy import Agent, Critic, Episode, Policy, Segment, empty_batch, pack, recompute_activations
from ppo import kl_penalty, logp_gap
from simulator import load_prompt

# How far the engine's log-probs may be from the trainer's, on average and for a single token; and
# the first ratio from 1, where the kernels are mostly the same. On the toy, in fp32, log-probs are
# 1e-7 apart, but once in some hundred thousand tokens, by rounding, 1e-4. Stale weights show as
# 1e-2 and more, and so does a single token in bf16, of course: there the mean has to tell.
LIMITS = {
    torch.float32: dict(gap_limits=(1e-4, 1e-2), ratio_limit=1e-3),
    torch.bfloat16: dict(gap_limits=(0.05, float("inf")), ratio_limit=0.2),
}
START_DIALOGUES = 8  # of the starting policy, whose log-probs are kept
PROBE = (
    "I do not know where to begin. Last week my sister forgot my birthday, and when I asked "
    "her about it she laughed and told me that I make too much of such things. Since then we "
    "have not spoken. I keep going over it, at night above all. "
) * 3


class Models:
    """Policy, critic (PPO), reference (with a KL), their optimizers, the engine that samples."""

    def __init__(self, cfg, checkpoint, clock, runner):
        """cfg: Settings. checkpoint: a directory, or None. clock: told when the engine samples.
        runner: of the coroutines, for the probe. Raises BadModel or BadInput.

        The engine comes first, while the weights are whole. Masters are fp32; `dtype` is that of
        computing."""
        self.cfg, self.runner, start = cfg, runner, cfg.model
        self.toy_seconds, self.start_batches = 0.0, None
        self.device = torch.device("cpu") if cfg.toy else best_device()
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.limits = LIMITS[dtype]
        torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for every new shape
        if cfg.toy:
            began = time.perf_counter()
            for turn in (True, False):  # the first rank makes it, the others find it made
                if turn == (rank() == 0) and (not checkpoint or cfg.kl_coef or cfg.lora_rank):
                    start = toy.base_policy(cfg.think, quiet=rank() > 0)
                wait_for_all()
            self.toy_seconds = time.perf_counter() - began
        # The toy knows its job; a system prompt would cost it a third of its tokens.
        system = "" if cfg.toy else load_prompt(f"policy_{cfg.mode}", cfg.lang)
        # adapters go on the model that they were made for; a checkpoint has them merged into it
        source = start if cfg.lora_rank else checkpoint or start
        load = lambda place: load_model(
            place,
            dtype=dtype if cfg.lora_rank else None,
            flag="the base of this run's adapters:" if cfg.lora_rank and checkpoint else "--model",
        )
        model, self.tokenizer = load(source)
        self.context = cfg.context or model.config.max_position_embeddings
        self.chat = ChatFormat(
            self.tokenizer, system, cfg.think, cfg.template_args, stop_ids(source)
        )
        if cfg.history_thoughts == "keep":
            self.chat.refuse_to_keep()
        self.pad = self.tokenizer.pad_token_id or 0
        if len(self.chat.first_prompt("")) + 2 > self.context:
            raise BadInput(
                f"--model {cfg.model}: its context of {self.context} tokens "
                "is too short for the system prompt alone"
            )
        if cfg.engine == "vllm":
            self.engine = VllmEngine(
                source,
                self.chat.stop_id,
                cfg.temperature,
                context=self.context,
                seed=cfg.seed,
                dtype=dtype,
                clock=clock,
                memory_share=cfg.engine_memory,
            )
            check_world()
        else:
            self.engine = TorchEngine(model, self.chat.stop_id, cfg.temperature, clock=clock)
            self.engine.move(self.device, dtype)
        saved = checkpoint and torch.load(
            checkpoint / "trainer.pt", map_location="cpu", mmap=True, weights_only=True
        )
        self.policy, self.critic, self.reference = Policy(model, cfg.temperature), None, None
        if cfg.lora_rank:  # one model, of three parts
            root = SharedBase(
                self.policy, cfg.lora_rank, cfg.lora_alpha, cfg.algo == "ppo", cfg.seed
            )
            if saved:
                load_adapters(root, saved["adapters"], checkpoint, source)
            self.policy, self.reference = (
                AdapterView(root, "policy"),
                AdapterView(root, "reference"),
            )
            self.critic = AdapterView(root, "critic") if cfg.algo == "ppo" else None
            modules, bodies, how = [root], [model], {"context_fn": root.checkpoint_contexts}
        else:
            if cfg.algo == "ppo":  # its body is loaded again: what is mapped costs nothing
                self.critic = Critic(load(source)[0], share=True)
                if saved:
                    self.critic.load_state_dict(saved["critic"], assign=True)
            if cfg.kl_coef:
                self.reference = Policy(load(start)[0], cfg.temperature)
            modules = list(filter(None, (self.policy, self.critic, self.reference)))
            bodies, how = [model, *([self.critic.body] if self.critic else [])], {}
        for body in bodies if not cfg.toy else ():
            recompute_activations(body, **how)
        for module in modules:  # to the device, block by block
            if dist.is_initialized():
                shard(module, self.device.type, None if dtype == torch.float32 else dtype)
            else:
                make_masters(module)
        self.optimizer = adamw(self.policy, cfg.lr)
        self.critic_optimizer = self.critic and adamw(self.critic, cfg.critic_lr)
        if saved:
            load_optimizer_state(self.policy, self.optimizer, saved["optimizer"])
            if self.critic:
                load_optimizer_state(self.critic, self.critic_optimizer, saved["critic_optimizer"])
        if cfg.engine == "vllm":  # its first sleep now, and not after a rollout
            self.engine.sleep()
        if cfg.engine == "vllm" or saved and cfg.lora_rank:  # wakes it; a resumed adapter
            self.sync()
        self.fresh = True  # nothing has been trained since the start, or the resume

    def make_agent(self, seed):
        """The policy's side of one dialogue."""
        return Agent(
            self.engine,
            self.chat,
            think=self.cfg.think,
            max_tokens=self.cfg.max_tokens,
            context=self.context,
            seed=seed,
            history=self.cfg.history_thoughts,
        )

    def sync(self):
        """The new weights go to the engine, tensor by tensor, on every rank."""
        model = self.policy.model
        self.engine.load_weights(merge(iter_full_weights(model), model))
        self.fresh = False
        if self.cfg.engine == "vllm":  # the torch engine copies by name; vLLM has ways of its own
            self.probe()

    def probe(self):
        """Let the engine say something, and compare its log-probs with the trainer's: nothing else
        shows that a sync did not take, or that a cache is stale. The prompt is the same each time
        and long enough for the prefix cache. Raises SelfCheckFailed."""
        prompt = self.chat.first_prompt(PROBE)[: self.context // 2]
        ids, log_probs = self.runner.run(
            self.engine.generate(prompt, 16, np.random.default_rng([self.cfg.seed, 2]), key=None)
        )
        segments = [Segment(prompt), Segment(ids, log_probs=log_probs)]
        batch = pack([Episode("probe", 0, "", segments=segments)], self.pad).to(self.device)
        with torch.no_grad():
            logp_gap([batch], [self.policy(batch)[0]], self.limits["gap_limits"], all_reduce_sum)

    # ------------------------------------------------------------------- distance from the start

    def keep_start(self, episodes, path):
        """Keep a few dialogues of the starting policy with its log-probs in the file `path`, so
        that the distance from it can be told at every step without a second model in memory."""
        few = all_gather_list(episodes[:START_DIALOGUES])
        few = sorted(few, key=lambda e: e.number)[:START_DIALOGUES]
        for episode in few:
            batch = pack([episode], self.pad).to(self.device)
            with torch.no_grad():
                log_probs = iter(self.policy(batch)[0][batch.action_mask].tolist())
            for segment in episode.segments:
                if segment.log_probs is not None:
                    segment.log_probs = [next(log_probs) for _ in segment.ids]
        if rank() == 0:
            write_json(path, [[vars(s) for s in e.segments] for e in few])

    def read_start(self, path):
        """This rank's part of them, one dialogue a batch, and as many batches on each rank. Only
        the first rank need have the file."""
        rows = broadcast(lambda: json.loads(path.read_text(encoding="utf-8")))
        batches = [
            pack([Episode("start", 0, "", segments=[Segment(**s) for s in row])], self.pad)
            for row in rows
        ]
        own = batches[rank() :: world()]
        return own + [empty_batch(self.pad)] * (-(-len(batches) // world()) - len(own))

    def kl_start(self, path):
        """KL(pi_0, pi) per token, by k3, from the samples of pi_0 in the file `path`."""
        sums = torch.zeros(2, dtype=torch.float64)
        self.start_batches = self.start_batches or self.read_start(path)
        for batch in self.start_batches:
            batch = batch.to(self.device)
            with torch.no_grad():
                log_probs, _ = self.policy(batch)
            k3 = kl_penalty(batch.engine_log_probs, log_probs, "k3")[batch.action_mask]
            sums += torch.tensor([k3.double().sum().item(), k3.numel()])
        kl, tokens = all_reduce_sum(sums).tolist()
        return kl / max(1, tokens)

    # --------------------------------------------------------------------------------- to a file

    def gather(self):
        """Returns write(directory), for a checkpoint from which any number of ranks can go on.

        Every rank gathers the shards, tensor by tensor, but only the first keeps them: eight copies
        of a 7B model with its moments are a terabyte."""
        first, model = rank() == 0, self.policy.model
        weights = {
            name: w.cpu()
            for name, w in merge(iter_full_weights(model), model)
            if first and name not in second_names(model)
        }
        saved = {"optimizer": optimizer_state(self.policy, self.optimizer, first)}
        if self.critic:
            saved["critic_optimizer"] = optimizer_state(self.critic, self.critic_optimizer, first)
        if self.cfg.lora_rank:
            saved["adapters"] = {
                name: full_tensor(p.detach()).cpu()
                for part in filter(None, (self.policy, self.critic))
                for name, p in part.named_parameters()
            }
        elif self.critic:
            saved["critic"] = {name: w.cpu() for name, w in iter_full_weights(self.critic) if first}

        def write(directory):
            self.policy.model.save_pretrained(directory, state_dict=weights)
            self.tokenizer.save_pretrained(directory)
            torch.save(saved, directory / "trainer.pt")
            if self.cfg.lora_rank:
                write_peft(directory / "adapter", saved["adapters"], self.cfg)

        return write


def second_names(model):
    """The second names of tied tensors in the state_dict (lm_head.weight of a small Qwen). A
    checkpoint holds them once, from any number of ranks; transformers ties them again."""
    first = {}
    return {
        name
        for name, p in model.named_parameters(remove_duplicate=False)
        if first.setdefault(id(p), name) != name
    }


def load_adapters(root, saved, checkpoint, source):
    """Give a SharedBase the adapters of a checkpoint. Raises BadInput if they are of another rank,
    or do not give the checkpoint's model with this base: `source` has then been changed."""
    for name, p in root.named_parameters():
        if p.requires_grad:
            if name not in saved or saved[name].shape != p.shape:
                raise BadInput(
                    f"--resume: the adapters in {checkpoint.name} are not of "
                    f"config.json's lora_rank ({name}); has it been edited?"
                )
            p.data.copy_(saved[name])
    files = [safe_open(path, "pt") for path in checkpoint.glob("*.safetensors")]
    there = {name: file for file in files for name in file.keys()}
    for name, w in merge(root.policy.model.state_dict().items(), root.policy.model):
        if name in there and not torch.allclose(
            there[name].get_tensor(name).float(), w.float(), rtol=1e-5, atol=1e-6
        ):
            raise BadInput(
                f"--resume: {source} is not the base that this run's adapters were made "
                f"for ({name} differs from {checkpoint.name}'s); put it back"
            )


def write_peft(directory, adapters, cfg):
    """The policy's adapters as the package peft reads them, in a folder of their own: beside
    config.json transformers would silently put them on top of the merged weights."""
    tensors = {
        f"base_model.{name.removeprefix('policy.').removesuffix('policy')}weight": w
        for name, w in adapters.items()
        if name.endswith(".policy")
    }
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
    write_json(
        directory / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": cfg.model,
            "r": cfg.lora_rank,
            "lora_alpha": cfg.lora_alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        },
    )


def adamw(module, lr):
    """The released script's optimizer; `fused`, on a GPU, is a sixth of the host's work."""
    ps = list(module.parameters())
    return torch.optim.AdamW(ps, lr, (0.9, 0.999), weight_decay=0.01, fused=ps[0].is_cuda or None)


if __name__ == "__main__":
    Parser(description="Tells what one rank of a run trains and samples with.").parse_args()
    print(__doc__)
