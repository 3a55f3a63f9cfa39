"""models/build.py - what one rank trains and samples with: policy, critic, reference, optimizers,
engine.

A run builds them from the starting policy or from a checkpoint (`Models`). After each update the
engine is given the new weights (`sync`); vLLM then samples a few tokens, whose log-probs show that
the new weights have arrived (`probe`). What a checkpoint holds of them is in models/checkpoint.py.
"""

from models.chat_format import ChatFormat
from models.checkpoint import load_optimizer_state
from models.distance import DistanceFromStart
from models.engine import TorchEngine, make_vllm_engine
from models.loading import (
    best_device,
    best_dtype,
    load_model,
    load_tensors,
    return_freed_memory,
    stop_ids,
)
from support.answers import load_prompt
from support.errors import SelfCheckFailed, naming
from support.ranks import all_reduce_sum, iter_full_weights, world_size
from support.rundir import FIRST_CHECKPOINT

import math

import numpy as np
import torch

from policy import Critic, Policy, pack, recompute_activations
from ppo import log_probs_of, logp_gap
from rollout import SEEDS, Episode, Segment

# What the two self-checks of an update allow (ppo.logp_gap, ppo.check_first_ratio):
#   gap_limits   (mean, maximum) of |log pi_engine - log pi_trainer|, over the sampled tokens
#   ratio_limit  of |log(pi / pi_old)| before the first step
# In fp32 the gap is about 1e-7 on the toy; rounding makes it 1e-4 once in some hundred thousand
# tokens. Engine weights that are out of date make it 1e-2 and more. In bf16 rounding alone may make
# it that large for a single token, so only the mean is limited: it was 0.05 with SmolLM2-135M, and
# 1.1 with weights of one step before.
# The first ratio compares the trainer with itself, mostly by the same kernels.
LIMITS = {  # dtype: (gap_limits, ratio_limit)
    torch.float32: ((1e-4, 1e-2), 1e-3),
    torch.bfloat16: ((0.1, float("inf")), 0.2),
}
# What a user says in `probe`.
PROBE = (
    "I do not know where to begin. Last week my sister forgot my birthday, and when I asked "
    "her about it she laughed and told me that I make too much of such things. Since then we "
    "have not spoken. I keep going over it, at night above all. "
) * 3


class Models:
    """Policy, critic (PPO), reference (with a KL or adapters), their optimizers, and the sampling
    engine.

    policy, critic, reference     modules, or views of one (lora.py); None for what the run lacks
    optimizer, critic_optimizer   AdamW over the fp32 masters; the second is None without a critic
    engine                        a TorchEngine or a VllmEngine
    tokenizer, chat               the tokenizer, and its ChatFormat
    context                       the most tokens of a dialogue
    device, dtype                 where and in which type this rank computes
    gap_limits, ratio_limit       LIMITS of that type
    reduce, world_size            what ppo.py knows about ranks: the sum of a tensor over them, and
                                  their number
    distance                      the DistanceFromStart
    clock                         the Clock: how long the run waits for the user's model
    """

    def __init__(self, cfg, start, checkpoint, start_file, clock, runner):
        """cfg: Settings. start: where pi_0 lies, a directory or a name on the hub. checkpoint: the
        directory that the run goes on from, or None. start_file: of DistanceFromStart. clock: a
        Clock, which the engine tells when it samples. runner: an asyncio.Runner, for `probe`. Raises
        BadModel, BadInput or SelfCheckFailed.

        Each step needs what the step before it has made."""
        self.cfg, self.clock, self.runner = cfg, clock, runner
        self.device = torch.device("cpu") if cfg.toy else best_device()
        self.dtype = best_dtype(self.device)
        self.gap_limits, self.ratio_limit = LIMITS[self.dtype]
        self.reduce, self.world_size = all_reduce_sum, world_size()
        # cuDNN's attention would be planned anew for every shape, and batches have many shapes
        torch.backends.cuda.enable_cudnn_sdp(False)

        # 1. Load the weights: the checkpoint's, if there is one (the first has none). With adapters
        # they are pi_0's, because in the checkpoint's weights the adapters are merged.
        trained = checkpoint and checkpoint.name != FIRST_CHECKPOINT
        source = checkpoint if trained and not cfg.lora_rank else start
        model = self.load(source)
        # 2. The engine: TorchEngine copies the weights, which are still whole; vLLM reads `source`.
        self.engine = self.make_engine(model, source, clock)
        # 3. Policy, critic and reference. From here on a rank has only its shard of their weights.
        # tensors: what a checkpoint holds beside the policy's weights, or None.
        tensors = load_tensors(checkpoint / "trainer.pt") if trained else None
        self.build(model, tensors, source, start)
        # 4. The optimizers, of the parameters that now exist.
        self.make_optimizers(tensors)
        # 5. The dialogues of the starting policy. A new run has none yet.
        self.distance = DistanceFromStart(self.policy, self.device, start_file)
        if checkpoint:
            self.distance.read()
        # 6. A trial. The torch engine has the base alone, without a checkpoint's adapters.
        self.try_out(is_synced=cfg.engine == "vllm" or (tensors and cfg.lora_rank))

    # -------------------------------------------------------------- the steps of __init__, in order

    def load(self, source):
        """Load tokenizer and chat template, and return the model. Frozen weights, under adapters,
        are loaded in the type of computing. Others stay as they are stored (None), mapped from the
        file, until `make_masters` makes the fp32 masters that the optimizers change."""
        cfg = self.cfg
        model, self.tokenizer = load_model(source, dtype=self.dtype if cfg.lora_rank else None)
        # The toy knows its task; a system prompt would take a third of its context.
        system = "" if cfg.toy else load_prompt(f"policy_{cfg.mode}", cfg.lang)
        with naming(f"--model {cfg.model}"):
            self.chat = ChatFormat(
                self.tokenizer, system, cfg.think, cfg.template_args, stop_ids(source)
            )
        self.context = model.config.get_text_config().max_position_embeddings
        return model

    def make_engine(self, model, source, clock):
        """The engine that samples: a TorchEngine or a VllmEngine."""
        cfg, stops = self.cfg, self.chat.stop_ids
        more = {"dtype": self.dtype, "clock": clock, "temperature": cfg.temperature}
        if cfg.engine == "torch":
            return TorchEngine(model, stops, device=self.device, **more)
        more |= {"context": self.context, "memory_share": cfg.engine_memory}
        # the dialogues of this rank
        more["dialogues"] = math.ceil(max(cfg.batch_size, cfg.eval_size) / world_size())
        return make_vllm_engine(source, stops, seed=cfg.seed, **more)

    def build(self, model, tensors, source, start):
        """Build policy, critic and reference, with their masters: of the models that own their
        parameters. With adapters all three are views of the base."""
        if self.cfg.lora_rank:
            base, *parts = build_lora(self.cfg, model, tensors)
            masters = [base]
        else:
            masters = parts = build_full(self.cfg, model, tensors, source, start, self.dtype)
        self.policy, self.critic, self.reference = parts
        for module in filter(None, masters):
            make_masters(module, self.device.type, self.dtype)

    def make_optimizers(self, tensors):
        """Make the optimizers of policy and critic, and load their state."""
        cfg = self.cfg
        self.optimizer = adamw(self.policy, cfg.lr)
        self.critic_optimizer = adamw(self.critic, cfg.critic_lr) if self.critic else None
        if tensors:
            for name, module, optimizer in self.trained_parts():
                load_optimizer_state(module, optimizer, tensors[name])

    def trained_parts(self):
        """[(name of an optimizer in trainer.pt, the module that it changes, the optimizer)]."""
        parts = [("optimizer", self.policy, self.optimizer)]
        if self.critic:
            parts.append(("critic_optimizer", self.critic, self.critic_optimizer))
        return parts

    def try_out(self, is_synced):
        """Sample and score a few tokens, after a first sync where one is needed (`is_synced`). vLLM
        sleeps and wakes before the first rollout, so that a failure shows at once."""
        # Memory and other ranks say nothing about the model. Nor does a self-check behind a sync:
        # the weights may not have reached the engine.
        others = torch.OutOfMemoryError, torch.distributed.DistError
        if is_synced:
            others += (SelfCheckFailed,)
        with naming(f"--model {self.cfg.model}: cannot be trained", others):
            if is_synced:
                self.engine.sleep()
                self.sync()  # wakes it
            self.probe(32)

    def set_learning_rates(self, share):
        """Set the learning rates of policy and critic to this share of their full values."""
        for _, _, optimizer in self.trained_parts():
            optimizer.param_groups[0]["lr"] = optimizer.defaults["lr"] * share

    # ------------------------------------------------------------------------------------- sampling

    def begin_sampling(self):
        """Before dialogues: the engine forgets the last ones."""
        self.engine.forget()
        self.return_memory()

    def end_sampling(self):
        """Before an update: it needs the memory of the engine's cache. (Not after an evaluation: vLLM
        sleeps until the next `sync`.)"""
        self.engine.sleep()
        self.return_memory()

    def return_memory(self):
        """Return freed memory to the system. (The toy has little, and would be slower by a
        twentieth.)"""
        if not self.cfg.toy:
            return_freed_memory()

    def sync(self):
        """Give the engine the new weights, tensor by tensor, on every rank."""
        self.engine.load_weights(self.plain_weights())
        if self.cfg.engine == "vllm":  # the torch engine copies tensors by name and needs no test
            self.probe()

    def plain_weights(self):
        """Yield (name, whole tensor) of the policy as a plain model: adapters are merged. A
        collective call: every rank must iterate to the end."""
        if self.cfg.lora_rank:
            return self.policy.merged_weights()
        return iter_full_weights(self.policy.model)

    def probe(self, length=None):
        """Let the engine sample a few tokens, and compare its log-probs with the trainer's. Nothing
        else shows that a sync had no effect, or that the engine still has cached results of the old
        weights. At the start this tests whether the architecture can be trained at all. The prompt
        is always the same, and long enough for vLLM's prefix cache, unless `length` limits it. The
        trainer's row has a neighbour that ends at the last position of the context: some models
        score a short row differently beside such a row. Raises SelfCheckFailed."""
        prompt = self.chat.first_prompt(PROBE)[: length or self.context // 2]
        rng = np.random.default_rng([self.cfg.seed, SEEDS["probe"]])
        ids, log_probs = self.runner.run(self.engine.generate(prompt, 16, rng, key=None))
        rows = [Segment(prompt), Segment(ids, log_probs=log_probs)], [Segment(prompt)]
        batch = pack([Episode("probe", 0, "", segments=row) for row in rows])
        batch.positions[1] += self.context - len(prompt)
        batch = batch.to(self.device)
        # raises SelfCheckFailed beyond the limits
        logp_gap([batch], log_probs_of(self.policy, [batch]), self.gap_limits, self.reduce)


# -------------------------------------------------------------------------- what Models is built of


def build_full(cfg, model, tensors, source, start, dtype):
    """(policy, critic, reference), each a whole model: critic is None without PPO, reference
    without a KL. model: of the policy, loaded from `source`; tensors: of a checkpoint's trainer.pt,
    or None; start: the directory of pi_0; dtype: of computing.

    Critic and reference are loaded once more, and not copied: mapped from the same file, weights
    take no memory before they become masters."""
    policy, critic, reference = Policy(model, cfg.temperature), None, None
    if cfg.algo == "ppo":
        critic = Critic(load_model(source, dtype=None)[0])
        if tensors:
            critic.load_state_dict(tensors["critic"], assign=True)
    if cfg.kl_coef:
        # frozen, so it needs no masters: 2 bytes a number on a GPU
        reference = Policy(load_model(start, dtype=dtype)[0], cfg.temperature)
        reference.requires_grad_(False)
    if not (cfg.toy or cfg.keep_activations):
        recompute_activations(model)
        if critic:
            recompute_activations(critic.body)
    return policy, critic, reference


def build_lora(cfg, model, tensors):
    """(base, policy, critic, reference): three views of one frozen model with adapters, the base;
    critic is None without PPO. cfg, model, tensors: see `build_full`."""
    from models.lora import AdapterView, SharedBase  # here, because most runs train the whole model

    base = SharedBase(
        Policy(model, cfg.temperature),
        rank=cfg.lora_rank,
        critic=cfg.algo == "ppo",
        seed=cfg.seed,
    )
    if tensors:
        for name, p in base.named_parameters():
            if p.requires_grad:  # a KeyError is better than an adapter that stays at its start
                p.data.copy_(tensors["adapters"][name])
    if not (cfg.toy or cfg.keep_activations):
        recompute_activations(model, context_fn=base.checkpoint_contexts)
    critic = base.critic and AdapterView(base, "critic")
    return base, AdapterView(base, "policy"), critic, AdapterView(base, "reference")


def make_masters(module, device="cpu", dtype=torch.float32):
    """Give a Policy, a Critic or a SharedBase its master weights, in place: each parameter that is
    not frozen becomes an fp32 copy. Where there is a process group, all parameters are sharded over
    the ranks, and computed with in `dtype`.

    Before this call a parameter may have the type in which it is stored, and may be mapped from the
    checkpoint's file, so that unread weights take no memory. Build an optimizer after it: the
    parameters of shards are new ones."""
    if torch.distributed.is_initialized():
        from models.sharding import shard  # here, because one process on a CPU has no shards

        shard(module, device, dtype, before=to_fp32)
    else:
        to_fp32(module)


def to_fp32(module):
    """Make fp32 copies of a module's parameters, except of those that are frozen or sharded."""
    for p in module.parameters():
        if p.requires_grad and not hasattr(p, "full_tensor"):
            p.data = p.data.to(torch.float32, copy=True)


def adamw(module, lr):
    """The optimizer of the released script: AdamW with torch's own betas, 0.9 and 0.999, and weight
    decay, 0.01. `fused`, on a GPU, saves work of the CPU."""
    parameters = list(module.parameters())
    return torch.optim.AdamW(parameters, lr, fused=parameters[0].is_cuda or None)
