"""support/settings.py - the settings of a run, which are the flags of rlver.py.

From top to bottom: the settings, each a field with its default and the help text of its flag; the
defaults that differ between the toy and a real model; what refuses settings; the command line; the
settings of a resumed run; a new run or an old one. Nothing here imports torch, except to see
whether there is a GPU, and which.
"""

from support.command_line import (
    SCRIPTED,
    Parser,
    above_zero,
    fraction,
    from_anywhere,
    json_object,
    natural,
    not_negative,
    positive,
    split_name,
)
from support.errors import BadInput
from support.files import read_json

import argparse
import importlib.util
import time
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path

from emotion import TRAINING

# ------------------------------------------------------------------------------------- the settings


def flag(default, text, read=None, **options):
    """A setting, the field of a dataclass, with all that argparse needs for its flag.

    default: the value if the flag is not given. text: its help. read: makes a value of the flag's
    text and checks its bounds. options: more of argparse's."""
    if read:
        options = {"type": read, "metavar": "N", **options}
    return field(default=default, metadata={"help": text, **options})


# A default of None: TOY and REAL have another one, or the help says what None means.
unset = partial(flag, None)
model_name = partial(flag, read=from_anywhere, metavar="NAME")


@dataclass
class Settings:
    """The settings of a run. config.json holds these fields and nothing else."""

    # ---- what to train, on whom
    algo: str = flag("grpo", "reinforcement learning algorithm", choices=["ppo", "grpo"])
    think: bool = flag(
        False, "think before each reply: <think>...</think>, then the reply", action="store_true"
    )
    model: str = model_name(
        "toy", "what is trained: toy, or a Hugging Face causal LM, its directory or name on the hub"
    )
    template_args: dict = unset(
        "arguments of the chat templates of policy and --reader, such as "
        "'{\"enable_thinking\": false}'",
        json_object,
        metavar="JSON",
    )
    simulator: str = model_name(
        "toy",
        "model that plays the user: toy, a script; toy-weak, a script that can be hacked; "
        "openai:MODEL@URL, a server, its key in $RLVER_API_KEY or $OPENAI_API_KEY; local:DIR, a model "
        "in this process",
    )
    reader: str = model_name(
        None,
        "model that reads replies for the user, openai:MODEL@URL or local:DIR: feelings are read "
        "from its log-probs (players/reader.py); not given: the user's model writes them, as in the "
        "paper",
    )
    difficulty: str = flag(
        "vanilla",
        "how much users hide, and how easily replies please them",
        choices=["vanilla", "challenging"],
    )
    profiles: list = unset(
        "JSONL file with the users to train on, then one with held-out users; without the second "
        "a fifth of the personas of each need is held out (one of two), --eval-size users at most "
        "(default: the toy's 500 and 128 users)",
        from_anywhere,
        nargs="+",
        metavar="FILE",
    )
    lang: str = flag("en", "language of all prompts", choices=["en", "zh"])

    # ---- the run
    steps: int = unset("training steps; 0: only evaluate", natural)
    seed: int = flag(0, "seed of all random numbers", natural)
    save_every: int = unset("steps from one checkpoint to the next", positive)

    # ---- rollout
    batch_size: int = unset("dialogues in a training step", positive)
    group_size: int = unset(
        "dialogues in a group: with the same user and the same first line", positive
    )
    max_turns: int = flag(TRAINING.max_turns, "replies in a dialogue, at most", positive)
    max_tokens: int = unset("tokens of a reply with its thought, at most", positive)
    temperature: float = flag(
        1.0, "sampling temperature, also used to compute the log-probs", above_zero
    )
    engine: str = unset(
        "what samples (default: vllm for a real model on a GPU with bf16, if it is installed; else "
        "torch)",
        choices=["torch", "vllm"],
    )
    engine_memory: float = flag(
        0.45, "share of the GPU's memory that vLLM takes while it samples", fraction
    )

    # ---- the user's model
    simulator_concurrency: int = unset(
        "calls to the server at the same time, from each rank; not given: --batch-size", positive
    )
    simulator_timeout: float = flag(
        60.0, "seconds until a call is tried again; after 300 in all it is given up", above_zero
    )
    simulator_temperature: float = flag(
        0.0, "sampling temperature of the user's model", not_negative
    )

    # ---- what is rewarded
    reward: str = flag(
        "terminal",
        "terminal: the final emotion e_T / 100, once; delta: its change (e_t - e_{t-1}) / 100 "
        "after each reply, which has the same optimum (docs/math.md)",
        choices=["terminal", "delta"],
    )
    advantage: str = flag(
        "grpo",
        "a reward less the mean of its group, divided by the group's std (grpo) or not divided "
        "(dr-grpo); or less the mean of the others in the group (rloo); only with --algo grpo",
        choices=["grpo", "dr-grpo", "rloo"],
    )

    # ---- update
    lora_rank: int = flag(
        0, "train adapters (LoRA) of this rank on the frozen model; 0: train all weights", natural
    )
    lr: float = unset("learning rate of the policy", above_zero)
    critic_lr: float = unset("learning rate of the critic (PPO)", above_zero)
    warmup: int = unset("steps in which the learning rates rise from 0", natural)
    minibatches: int = unset("optimizer steps on each batch; with 1 clipping never acts", positive)
    gamma: float = flag(
        1.0, "discount of the reward per token of the policy; only with --algo ppo", fraction
    )
    lam: float = flag(1.0, "lambda of GAE; only with --algo ppo", fraction)
    clip_eps: float = flag(0.2, "clip pi / pi_old to 1 +- this (--minibatches above 1)", above_zero)
    kl_coef: float = flag(
        0.0,
        "weight of the KL from the starting policy; 0: no KL, and no reference model",
        not_negative,
    )
    kl_estimator: str = flag(
        "k3",
        "estimator of the KL: k1 (PPO only) goes into the reward, the others into the loss; only "
        "with --kl-coef",
        choices=["k1", "k2", "k3", "k3-ratio"],
    )
    entropy_coef: float = flag(0.001, "weight of the entropy bonus", not_negative)
    tokens_per_gpu: int = unset(
        "tokens of a micro-batch with its padding; changes the memory, not the result", positive
    )
    keep_activations: bool = flag(
        False,
        "keep the activations of a real model for the backward pass: faster by a fifth, for much "
        "more memory (the toy's are always kept)",
        action=argparse.BooleanOptionalAction,
    )

    # ---- evaluation on held-out users
    eval_size: int = unset(
        "held-out users in an evaluation, one dialogue with each, at most", positive
    )
    eval_every: int = flag(0, "steps between evaluations; 0: only before and after", natural)

    @property
    def toy(self):
        return self.model == "toy"

    @property
    def mode(self):
        return "think" if self.think else "direct"

    @property
    def scripted(self):
        """Is the user a script, which asks no model?"""
        return self.simulator in SCRIPTED and not self.reader

    def evaluates(self, step):
        """Does a run evaluate after this step? (0: before the first one.)"""
        return step in (0, self.steps) or self.eval_every > 0 and step % self.eval_every == 0


# ------------------------------------------------- their defaults, for the toy and for a real model

# Some defaults depend on the algorithm, on thinking, or on what is trained: {case: default}.
TOY = {
    # until the learning curve is nearly flat; a step without thoughts is cheaper
    "steps": {"think": 28, "direct": 36},
    "save_every": 5,
    "batch_size": 64,
    "group_size": {"ppo": 1, "grpo": 8},
    "max_tokens": 48,  # enough for one whole reply, and not for two
    # The largest rate that was safe: at 6e-4 one thinking run of three garbled its thoughts halfway
    # ("lost, father, father, father"). Adapters get five times as much, not the usual ten, at which
    # PPO without thoughts stayed at a score of 62 from step 15 on.
    "lr": {"lora": 2e-3, "full": 4e-4},
    "critic_lr": {"lora": 5e-3, "full": 1e-3},
    "warmup": 3,
    # With one, as for a real model, clipping never acts. Four learn faster than two (74 against 59
    # after ten thinking steps); with eight, thinking runs stay at 80.
    "minibatches": 4,
    "tokens_per_gpu": 8192,
    "eval_size": 128,
}
# The paper's (RLVER appendix B) or its script's: 32 dialogues for PPO, 32 groups of 4 for GRPO.
REAL = {
    "steps": 350,
    "save_every": 25,  # a checkpoint of a 7B model trained by PPO has 176 GB and takes minutes
    "batch_size": {"ppo": 32, "grpo": 128},
    "group_size": {"ppo": 1, "grpo": 4},
    "max_tokens": 5000,
    "lr": {"lora": 1e-5, "full": 1e-6},
    "critic_lr": {"lora": 5e-5, "full": 5e-6},
    "warmup": 50,
    "minibatches": 1,
    "tokens_per_gpu": 16384,
    "eval_size": 100,
}


def resolve_settings(flags):
    """The Settings of a new run: the flags that were given, and defaults. flags: {name: value},
    None where a flag was not given. Raises BadInput if they do not fit together."""
    explicit = {  # without the flags that are no settings
        name: value
        for name, value in flags.items()
        if value is not None and name not in ("out", "resume")
    }
    cfg = Settings(**explicit)
    cases = (cfg.algo, cfg.mode, "lora" if cfg.lora_rank else "full")
    for name, value in (TOY if cfg.toy else REAL).items():
        if isinstance(value, dict):
            value = next(value[case] for case in cases if case in value)
        if name not in explicit:
            setattr(cfg, name, value)
    cfg.engine = cfg.engine or usual_engine(cfg.toy)
    check(cfg, explicit)
    return cfg


# -------------------------------------------------------- what refuses settings: it raises BadInput


def check(cfg, explicit):
    """Refuse settings that contradict each other, and a flag among `explicit` that has no effect in
    this run."""
    ppo = cfg.algo == "ppo"
    no_server = "openai:" not in f"{cfg.simulator} {cfg.reader}"
    # in it every ratio is 1, and the critic's values are the old ones: nothing is clipped
    one_step = cfg.minibatches == 1
    has_no_effect = {
        "gamma": not ppo,
        "lam": not ppo,
        "critic_lr": not ppo,
        "clip_eps": one_step,
        "advantage": ppo,
        "kl_estimator": not cfg.kl_coef,
        "engine_memory": cfg.engine != "vllm",
        "keep_activations": cfg.toy,
        "simulator_temperature": cfg.simulator in SCRIPTED,
        "simulator_concurrency": no_server,
        "simulator_timeout": no_server,
    }
    for name in explicit:
        if has_no_effect.get(name):
            raise BadInput(f"{option(name)} has no effect in this run; --help says what it needs")
    lack = cfg.engine == "vllm" and vllm_lacks()
    contradictions = (
        (
            cfg.batch_size % cfg.group_size,
            f"--batch-size {cfg.batch_size} is not a multiple of --group-size {cfg.group_size}: "
            "groups must be whole",
        ),
        (
            cfg.minibatches > cfg.batch_size,
            f"--minibatches {cfg.minibatches}: --batch-size {cfg.batch_size} has too few dialogues",
        ),
        (
            not ppo and cfg.group_size == 1,
            "--group-size 1: a group of one has no mean to learn from; take 2 or more",
        ),
        (
            not ppo and cfg.kl_coef and cfg.kl_estimator == "k1",
            "--kl-estimator k1 goes into a per-token reward, which GRPO does not have",
        ),
        (
            cfg.reward == "delta" and cfg.gamma < 1,
            f"--gamma {cfg.gamma}: with --reward delta it must be 1, or the deltas no longer add "
            "up to how far the emotion came",
        ),
        (lack, f"--engine vllm: {lack}"),
    )
    for is_wrong, sentence in contradictions:
        if is_wrong:
            raise BadInput(sentence)


def vllm_lacks():
    """What vLLM needs and this machine does not have, or "". A CPU is enough for its CPU build."""
    if not vllm_is_there():
        return "vLLM is not installed; requirements-vllm.txt says what to install"
    gpu = old_gpu()
    return gpu and f"vLLM needs a GPU with bf16 (Ampere or later), not a {gpu}; take --engine torch"


def old_gpu():
    """The name of this machine's GPU if it is one before Ampere, else "". It has no bf16: torch
    emulates it there, slowly, and vLLM refuses it."""
    import torch  # imported late: scoring a result file does not need it

    is_old = torch.cuda.is_available() and not torch.cuda.is_bf16_supported(
        including_emulation=False
    )
    return torch.cuda.get_device_name() if is_old else ""


def vllm_is_there():
    return importlib.util.find_spec("vllm") is not None


def usual_engine(is_toy):
    """The default engine: vLLM for a real model, if there is a GPU, and nothing that it needs is
    lacking; else torch."""
    if is_toy or vllm_lacks():
        return "torch"
    import torch

    return "vllm" if torch.cuda.is_available() else "torch"


# --------------------------------------------------------------------------------- the command line

# The groups of --help: {the first setting of a group: its title}, as in Settings' comments.
GROUPS = {
    "algo": "what to train, on whom",
    "steps": "the run",
    "batch_size": "rollout",
    "simulator_concurrency": "the user's model",
    "reward": "what is rewarded",
    "lora_rank": "update",
    "eval_size": "evaluation on held-out users",
}
EPILOG = """\
A demonstration, offline, on a CPU:
    python rlver.py --steps 10 --eval-size 32
It prints a dialogue before training and one after it, and the mean final emotion
of 32 held-out users: about 27 before and 45 to 60 after, by machine (standard error 4).
This shows that the loop learns. Ten steps are too few to show how far it gets.

The whole run of the toy, two to eight minutes on two cores:
    python rlver.py --algo grpo --think

Without --model, --simulator and --reader nothing is downloaded or asked.
Where two defaults are given, the first is the toy's. recipes/ has commands for
real models."""


def option(name):
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def in_words(default):
    """A default of TOY or REAL for --help: "64", or "think: 28, direct: 36" of one with cases."""
    if not isinstance(default, dict):
        return str(default)
    return ", ".join(f"{case}: {value}" for case, value in default.items())


def make_parser():
    """The flags of rlver.py. A flag that was not given is None, so that `resolve_settings` knows
    where a default is wanted, and `resumed_settings` which settings change."""
    parser = Parser(
        prog="rlver.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="RLVER from scratch: train a language model with PPO or GRPO to comfort "
        "a\nsimulated user, whose final emotion is the reward.",
        epilog=EPILOG,
    )
    for setting in fields(Settings):
        name, default, options = setting.name, setting.default, {**setting.metadata}
        if name in GROUPS:
            group = parser.add_argument_group(GROUPS[name])
        if name in TOY:
            default = f"{in_words(TOY[name])}; real model: {in_words(REAL[name])}"
        if default is not None:
            options["help"] += f" (default: {default})"
        group.add_argument(option(name), default=None, **options)
    add = parser.add_argument_group("where the files go").add_argument
    add(
        "--out",
        metavar="DIR",
        help="directory for all files of the run (default: runs/<time>-<algo>-<mode>)",
    )
    add(
        "--resume",
        metavar="DIR",
        help="continue the run in DIR with its settings; only flags that change no result may be "
        "given: --steps, the servers' addresses, and those about memory, saving and waiting",
    )
    return parser


def add_settings(parser, texts):
    """Add flags of rlver.py to the parser of another program, with the same types and choices, and
    without a default. texts: {setting: help}."""
    options_of = {setting.name: setting.metadata for setting in fields(Settings)}
    for name, text in texts.items():
        parser.add_argument(option(name), **{**options_of[name], "help": text})


# ---------------------------------------------------------------------- settings of a resumed run

# A resumed run has the settings of its config.json. A flag may change the address of a server, and
# these settings, because they change no result. It may change no other.
RESUMABLE = (
    "--steps",
    "--save-every",
    "--engine-memory",
    "--simulator-concurrency",
    "--simulator-timeout",
    "--tokens-per-gpu",
    "--keep-activations",
)


def resumed_settings(config, flags):
    """The Settings of a resumed run: its config.json, `config`, with the changes that `flags` asks
    for ({name: value}, None where a flag was not given). Raises BadInput if `config` does not have
    the fields of this version, and for a flag that may not change."""
    if config.keys() != vars(Settings()).keys():
        raise BadInput(
            f"--resume {flags['resume']}: there is no run here (config.json is missing, "
            "unreadable or of another version)"
        )
    changes = {
        name: value for name, value in flags.items() if value not in (None, config.get(name))
    }
    del changes["resume"]
    if "out" in changes:
        raise BadInput(f"--out has no effect with --resume: the run stays in {flags['resume']}")
    for name, value in changes.items():
        is_model = name in ("simulator", "reader") and config[name]
        same_model = is_model and split_name(value)[:2] == split_name(config[name])[:2]
        if option(name) not in RESUMABLE and not same_model:
            raise BadInput(
                f"{option(name)} cannot change in a resumed run (it has {config[name]!r}); only "
                f"{', '.join(RESUMABLE)} and the servers' addresses can"
            )
    cfg = Settings(**(config | changes))
    check(cfg, changes)  # vLLM may be missing on this machine, too
    return cfg


# ------------------------------------------------------------------------- a new run, or an old one


def open_run(flags):
    """Decide between a new run and a resumed one, and write nothing. flags: {name: value}, None
    where a flag was not given. Returns

    settings   Settings
    directory  Path; of a new run it may not exist yet
    finished   whether all steps are done and evaluated, so that there is nothing to resume

    Raises BadInput."""
    if flags["resume"] is not None:
        out = Path(flags["resume"])
        settings = resumed_settings(read_json(out / "config.json"), flags)
        finished = read_json(out / "summary.json").get("steps") == settings.steps
        return settings, out, finished
    settings = resolve_settings(flags)
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{settings.algo}-{settings.mode}"
    out = Path(flags["out"] or default)
    # a start that was killed may have left hidden files
    if out.is_file() or any(out.glob("[!.]*")):
        raise BadInput(
            f"--out {out}: is there already; choose another, or continue that run with "
            f"--resume {out}"
        )
    return settings, out, False


def model_of(flags):
    """The name of the policy's model; of a resumed run, the name in its config.json. It is needed
    before the ranks are joined. `open_run`, which comes later, reports a bad config.json."""
    if flags["resume"] is None:
        return flags["model"] or "toy"
    return read_json(Path(flags["resume"]) / "config.json").get("model", "toy")
