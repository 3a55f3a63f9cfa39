"""support/settings.py - the settings of a run, and the flags that set them.

`Settings` is one dataclass: each field is a setting, and its help text makes the flag. Where the
toy and a real model want different defaults, both stand side by side, the toy's with the reason for
it; the real ones are the paper's (RLVER appendix B). Nothing here imports torch or a chapter.
"""

from support.errors import BadInput
from support.flags import (
    Parser,
    above_zero,
    fraction,
    json_object,
    natural,
    not_negative,
    positive,
)

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

SMALL = "smollm2"  # a --model with defaults of its own: a real one that a laptop trains

# Seconds that a rank waits for another one. A rollout ends long before that (ROLLOUT_TIMEOUT).
GROUP_TIMEOUT = 7200


def flag(
    text,
    default=None,
    *,
    toy=None,
    real=None,
    small=None,
    algo=None,
    group=None,
    resumable=False,
    **argparse_options,
):
    """A field of Settings.

    text: its help.
    default: one value, or `toy` and `real` where the toy and a real model want different ones. Each
        of these may be {"ppo": ..., "grpo": ...}, {"think": ..., "direct": ...} or
        {"lora": ..., "full": ...} where it depends on that (`default_for`).
    small: of --model smollm2 alone, where it wants another one than other real models.
    algo: "ppo" or "grpo" if the flag is for one algorithm only; None: for both.
    group: the title of a group of --help that begins with this flag.
    resumable: whether a resumed run may change it, because it changes no result.
    argparse_options: what argparse's add_argument needs besides (type, choices, metavar ...)."""
    two_defaults = toy is not None or real is not None
    if not two_defaults:
        toy = real = default
    return field(
        default=default,
        metadata=dict(
            text=text,
            two_defaults=two_defaults or small is not None,
            toy=toy,
            real=real,
            small=real if small is None else small,
            algo=algo,
            group=group,
            resumable=resumable,
            argparse_options=argparse_options,
        ),
    )


@dataclass
class Settings:
    """The settings of a run. config.json holds these fields and nothing else."""

    # ---- what to train, on whom
    algo: str = flag(
        "reinforcement learning algorithm",
        "grpo",
        choices=["ppo", "grpo"],
        group="what to train, on whom",
    )
    # store_const and not store_true: a flag that was not given must be None, as in `make_parser`
    think: bool = flag(
        "the policy thinks before each reply: <think>...</think>, then the reply",
        action="store_const",
        const=True,
    )
    model: str = flag(
        "the policy that is trained: toy; smollm2, a small language model that a package brings; "
        "or a Hugging Face causal LM, by its directory or its name on the hub",
        "toy",
        metavar="NAME",
    )
    template_args: dict = flag(
        "arguments of the policy's chat template, such as '{\"enable_thinking\": false}'",
        type=json_object,
        metavar="JSON",
    )
    simulator: str = flag(
        "model that plays the user: toy, a script; toy-weak, a script that can be hacked; phrases, "
        "a script that looks for English phrasings; openai:MODEL@URL, a server, its key in "
        "$RLVER_API_KEY or $OPENAI_API_KEY; local:DIR, a model in this process",
        toy="toy",
        real="toy",
        small="phrases",
        metavar="NAME",
    )
    difficulty: str = flag(
        "how much the user hides, and how easily replies please it",
        "vanilla",
        choices=["vanilla", "challenging"],
    )
    profiles: list = flag(
        "JSONL file with the users to train on; a second file holds the held-out users; without "
        "one the last fifth of the first is held out, --eval-size at most (default: the toy's 500 "
        "and 128 users)",
        nargs="+",
        metavar="FILE",
    )
    lang: str = flag("language of all prompts", "en", choices=["en", "zh"])

    # ---- the run. The toy runs until its learning curve is nearly flat. A step without thoughts is
    # cheaper, so there it makes more of them. smollm2 makes as many steps as two cores can make in
    # half an hour, of about a minute each, and saves every four minutes.
    steps: int = flag(
        "training steps; 0: only evaluate",
        toy={"think": 30, "direct": 36},
        real=350,
        small=24,
        type=natural,
        resumable=True,
        group="the run",
    )
    seed: int = flag("seed of all random numbers", 0, type=natural)
    # a checkpoint of a 7B model trained by PPO has 176 GB and takes minutes to write
    save_every: int = flag(
        "steps from one checkpoint to the next",
        toy=5,
        real=25,
        small=4,
        type=positive,
        resumable=True,
    )
    tensorboard: bool = flag(
        "also write the metrics for TensorBoard, which must be installed",
        action="store_const",
        const=True,
        resumable=True,
    )

    # ---- rollout. The paper's batch is 32 dialogues for PPO and 32 groups of 4 for GRPO. The toy's
    # --max-tokens is enough for one whole reply and not for two. smollm2 has what fits into a
    # minute of two cores: four users with six dialogues each, three replies of a sentence or two.
    # At temperature 1.0 a model of this size leaves the English language; at 0.7 it stays in it.
    batch_size: int = flag(
        "dialogues in a training step",
        toy=64,
        real={"ppo": 32, "grpo": 128},
        small=24,
        type=positive,
        group="rollout",
    )
    group_size: int = flag(
        "dialogues in a group: with the same user and the same first line",
        toy=8,
        real=4,
        small=6,
        type=positive,
        algo="grpo",
    )
    max_turns: int = flag("replies in a dialogue, at most", 8, small=3, type=positive)
    max_tokens: int = flag(
        "tokens of a reply with its thought, at most", toy=48, real=5000, small=40, type=positive
    )
    temperature: float = flag(
        "sampling temperature; log-probs are taken at it, too", 1.0, small=0.7, type=above_zero
    )
    engine: str = flag(
        "sampling engine (default: vllm for a real model on a GPU, if it is installed; else torch)",
        choices=["torch", "vllm"],
    )
    engine_memory: float = flag(
        "share of the GPU's memory that vLLM takes while it samples",
        0.45,
        type=fraction,
        resumable=True,
    )

    # ---- the user's model, where it is a server
    simulator_concurrency: int = flag(
        "calls to the server at the same time, from each rank (default: --batch-size)",
        type=positive,
        resumable=True,
        group="the user's model, where it is a server",
    )
    simulator_timeout: float = flag(
        "seconds after which a call has failed", 60.0, type=above_zero, resumable=True
    )
    simulator_temperature: float = flag(
        "sampling temperature of the user's model", 0.0, type=not_negative
    )

    # ---- what is rewarded
    reward: str = flag(
        "terminal: the final emotion e_T / 100, once; delta: its change (e_t - e_{t-1}) / 100 "
        "after each reply, which has the same optimum (docs/math.md)",
        "terminal",
        choices=["terminal", "delta"],
        group="what is rewarded",
    )
    advantage: str = flag(
        "a reward less the mean of its group, divided by the group's std (grpo) or not divided "
        "(dr-grpo); or less the mean of the others in the group (rloo)",
        "grpo",
        choices=["grpo", "dr-grpo", "rloo"],
        algo="grpo",
    )

    # ---- update. The toy's learning rate is the largest that was safe: at 6e-4 one thinking run of
    # three garbled its thoughts halfway ("lost, father, father, father"). Adapters want ten times
    # the learning rate of the whole model; on the toy they get five times, because at ten times PPO
    # without thoughts stayed at a score of 62 from step 15 on. The toy makes two mini-batches of a
    # rollout, because with a single one clipping never acts. smollm2 trains adapters, whose moments
    # take little memory. With so few steps their rate must be high and the warm-up short. (The
    # critic's rate and those of the whole model were not searched for; docs/small.md.) A KL, which
    # other real models do without, is to keep its replies English: 0.02 held the score back, and
    # with 0.004 the perplexity rose too far. Its micro-batches keep a run below 4 GB.
    lora_rank: int = flag(
        "train low-rank adapters (LoRA) of this rank on the frozen model; 0: train all weights",
        0,
        small=16,
        type=natural,
        group="update",
    )
    lora_alpha: float = flag(
        "the adapters' output is scaled by alpha / rank", 32.0, type=above_zero
    )
    lr: float = flag(
        "learning rate of the policy",
        toy={"lora": 2e-3, "full": 4e-4},
        real={"lora": 1e-5, "full": 1e-6},
        small={"lora": 7e-4, "full": 2e-5},
        type=above_zero,
    )
    critic_lr: float = flag(
        "learning rate of the critic",
        toy={"lora": 5e-3, "full": 1e-3},
        real={"lora": 5e-5, "full": 5e-6},
        small={"lora": 2e-3, "full": 5e-5},
        type=above_zero,
        algo="ppo",
    )
    warmup: int = flag(
        "steps in which the learning rates rise from 0", toy=3, real=50, small=2, type=natural
    )
    minibatches: int = flag(
        "optimizer steps on each batch; with 1 clipping never acts", toy=2, real=1, type=positive
    )
    gamma: float = flag(
        "discount of the reward per token of the policy", 1.0, type=fraction, algo="ppo"
    )
    lam: float = flag("lambda of GAE", 1.0, type=fraction, algo="ppo")
    clip_eps: float = flag(
        "clip the ratio pi / pi_old to 1 - this .. 1 + this", 0.2, type=above_zero
    )
    value_clip: float = flag(
        "how far the critic's values may move in an update; 0: any distance",
        0.5,
        type=not_negative,
        algo="ppo",
    )
    kl_coef: float = flag(
        "weight of the KL from the starting policy; 0: no KL, and no reference model",
        0.0,
        small=0.006,
        type=not_negative,
    )
    kl_estimator: str = flag(
        "estimator of the KL: k1 (PPO only) goes into the reward, the others into the loss",
        "k3",
        choices=["k1", "k2", "k3", "k3-ratio"],
    )
    entropy_coef: float = flag("weight of the entropy bonus", 0.001, type=not_negative)
    tokens_per_gpu: int = flag(
        "tokens of a micro-batch with its padding; changes the memory, not the result",
        toy=8192,
        real=16384,
        small=512,
        type=positive,
        resumable=True,
    )

    # ---- evaluation on held-out users. One of smollm2 takes a minute of two cores.
    eval_size: int = flag(
        "held-out users in an evaluation, one dialogue with each, at most",
        toy=128,
        real=100,
        small=64,
        type=positive,
        group="evaluation on held-out users",
    )
    eval_every: int = flag(
        "evaluate every so many steps; 0: only before and after", 0, type=natural
    )

    # ---- not flags. context: the most tokens of a dialogue; None: the model's own limit. A
    # dialogue of smollm2 has fewer than 1024 tokens.
    context: int = flag(None, toy=1024, real=None, small=1024)

    @property
    def toy(self):
        return self.model == "toy"

    @property
    def mode(self):
        return "think" if self.think else "direct"


# The settings that a resumed run may change.
RESUMABLE = [s.name for s in dataclasses.fields(Settings) if s.metadata["resumable"]]


EPILOG = """\
A demonstration of 20 seconds, offline, on a CPU:
    python rlver.py --steps 10 --eval-size 32
It prints a dialogue before training and one after it, and the mean final emotion
of 32 held-out users: about 27 before and 42 after, with a standard error of 4. So
it shows that the loop learns; ten steps are too few to show how far it gets.

The whole run of the toy, one to two minutes on two cores:
    python rlver.py --algo grpo --think

Without --model and --simulator nothing is downloaded and no server is asked.
Defaults are given as toy / real model, or toy / real model / smollm2."""


def make_parser():
    """The flags of rlver.py. A flag that was not given is None, so that `resolve_settings` knows
    where a default is wanted, and `resumed_settings` which settings are to change."""
    parser = Parser(
        prog="rlver.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="RLVER from scratch: train a language model with PPO or GRPO to comfort "
        "a\nsimulated user, whose final emotion is the reward.",
        epilog=EPILOG,
    )
    for setting in dataclasses.fields(Settings):
        if setting.metadata["text"] is None:  # a setting without a flag
            continue
        # A title begins a new group of --help. It holds this flag and all those after it, up to the
        # next title; the first setting has one.
        if setting.metadata["group"]:
            group = parser.add_argument_group(setting.metadata["group"])
        options = dict(setting.metadata["argparse_options"])
        if "type" in options:  # a number; without a metavar argparse would repeat the flag's name
            options.setdefault("metavar", "N" if setting.type is int else "X")
        group.add_argument(flag_name(setting.name), help=help_of(setting), **options)
        if setting.name == "seed":
            add_run_flags(group)
    return parser


def flag_name(name):
    """A setting's flag: "batch_size" -> "--batch-size"."""
    return "--" + name.replace("_", "-")


def help_of(setting):
    """The help of a setting's flag, with its default, or those of the toy, of a real model and, if
    it is another one, of smollm2."""
    text = setting.metadata["text"]
    if setting.metadata["algo"]:
        text = f"{setting.metadata['algo'].upper()}: {text}"
    if setting.metadata["two_defaults"]:
        toy, real, small = (default_in_words(setting.metadata[k]) for k in ("toy", "real", "small"))
        defaults = f"{toy} / {real}" if small == real else f"{toy} / {real} / {small}"
        return f"{text} (default: {defaults})"
    if setting.default is not None:
        return f"{text} (default: {setting.default})"
    return text


def default_in_words(default):
    """A default as --help prints it: "32 for ppo, 128 for grpo" where it depends on something."""
    if isinstance(default, dict):
        return ", ".join(f"{value} for {case}" for case, value in default.items())
    return str(default)


def add_run_flags(group):
    """The flags of rlver.py that are no settings: they do not change what a run does."""
    group.add_argument(
        "--out",
        metavar="DIR",
        help="directory for all files of the run (default: runs/<time>-<algo>-<mode>)",
    )
    group.add_argument(
        "--resume",
        metavar="DIR",
        help="continue the run in DIR with its settings; only flags that change no result may be "
        "given: --steps, the simulator's address, and those about memory, saving and waiting",
    )


def read_flags(argv, quiet=False):
    """The flags as {name: value}, None where a flag was not given. quiet: print no complaint,
    because the first of many ranks prints the same one."""
    errors = contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext()
    with errors:
        return vars(make_parser().parse_args(argv))


# -------------------------------------------------------------------------- settings of a new run


def resolve_settings(given):
    """Fill in the defaults, and check that the flags fit together.

    given: {name: value}, None where a flag was not given. Returns Settings; raises BadInput."""
    values = {}
    for setting in dataclasses.fields(Settings):
        value = given.get(setting.name)
        values[setting.name] = default_for(setting, given) if value is None else value
    cfg = Settings(**values)
    cfg.think = bool(cfg.think)
    refuse_what_grpo_cannot_do(cfg)
    refuse_flags_of_the_other_algorithm(cfg, given)
    refuse_flags_without_effect(cfg, given)
    refuse_contradictions(cfg)
    refuse_missing_tensorboard(cfg)
    if cfg.algo == "ppo":
        cfg.group_size = 1
    refuse_missing_vllm(cfg.engine)
    if not cfg.engine:
        cfg.engine = default_engine(cfg)
    return cfg


def default_for(setting, given):
    """The default of a setting in a run with the flags `given`."""
    model = given.get("model") or "toy"
    column = {"toy": "toy", SMALL: "small"}.get(model, "real")
    default = setting.metadata[column]
    if not isinstance(default, dict):
        return default
    if "ppo" in default:
        return default[given.get("algo") or "grpo"]
    if "think" in default:
        return default["think" if given.get("think") else "direct"]
    lora_rank = given.get("lora_rank")
    if lora_rank is None:  # not given: smollm2 trains adapters all the same
        fields = {field.name: field for field in dataclasses.fields(Settings)}
        lora_rank = default_for(fields["lora_rank"], given)
    return default["lora" if lora_rank else "full"]


def refuse_what_grpo_cannot_do(cfg):
    """Raise BadInput for groups of GRPO that are not whole or of one dialogue, and for a KL in the
    reward."""
    if cfg.algo != "grpo":
        return
    if cfg.batch_size % cfg.group_size:
        raise BadInput(
            f"--batch-size {cfg.batch_size} is not a multiple of --group-size {cfg.group_size}: "
            "groups must be whole"
        )
    if cfg.group_size == 1:
        raise BadInput(
            "--group-size 1: a group of one has no mean to be compared with, and GRPO would learn "
            "nothing; take 2 or more, or --algo ppo"
        )
    if cfg.kl_coef and cfg.kl_estimator == "k1":
        raise BadInput(
            "--kl-estimator k1 goes into a per-token reward, which GRPO does not have; use k2, k3 "
            "or k3-ratio"
        )


def refuse_flags_of_the_other_algorithm(cfg, given):
    """Raise BadInput if a flag was given that only the algorithm has which the run does not use."""
    flags_of = {"grpo": [], "ppo": []}
    for setting in dataclasses.fields(Settings):
        if setting.metadata["algo"]:
            flags_of[setting.metadata["algo"]].append(setting.name)
    grpo_flags = as_typed(given, flags_of["grpo"])
    ppo_flags = as_typed(given, flags_of["ppo"])
    if grpo_flags and cfg.algo != "grpo":
        raise BadInput(
            f"{grpo_flags} is for GRPO, which has groups; leave it out, or take --algo grpo"
        )
    if ppo_flags and cfg.algo != "ppo":
        raise BadInput(
            f"{ppo_flags} is for PPO, which has a critic; leave it out, or take --algo ppo"
        )


def as_typed(given, names):
    """Those of the flags `names` that were given, as one types them: "--gamma 0.9 --lam 1"."""
    flags = []
    for name in names:
        value = given.get(name)
        if value is None:
            continue
        flags.append(flag_name(name))
        if isinstance(value, list):
            flags += value
        elif isinstance(value, dict):
            flags.append(shlex.quote(json.dumps(value)))
        elif value is not True:  # a flag that is switched on has no value
            flags.append(str(value))
    return " ".join(flags)


def changed_from_defaults(cfg):
    """What differs in the Settings `cfg` from the defaults of its algorithm and model, as one types
    it: "--steps 10 --eval-size 32"; "" if nothing does."""
    values = dataclasses.asdict(cfg)
    changed = []
    for setting in dataclasses.fields(Settings):
        if setting.metadata["text"] is None or setting.metadata["algo"] not in (None, cfg.algo):
            continue  # no flag sets it, or it is the other algorithm's
        default = default_for(setting, values)
        if setting.name == "engine":
            default = default_engine(cfg)
        value = values[setting.name]
        is_default = not value if setting.type is bool else value == default
        if not is_default:
            changed.append(setting.name)
    return as_typed(values, changed)


def refuse_flags_without_effect(cfg, given):
    """Raise BadInput for a flag that does nothing without another one, which was not given."""
    if given.get("lora_alpha") and not cfg.lora_rank:
        raise BadInput("--lora-alpha has no effect without adapters; give --lora-rank, too")


def refuse_contradictions(cfg):
    """Raise BadInput for settings that contradict each other."""
    if cfg.reward == "delta" and cfg.gamma < 1:
        raise BadInput(
            f"--gamma {cfg.gamma}: with --reward delta "
            "it must be 1, or the deltas no longer add up to how far the emotion came"
        )
    if cfg.batch_size < cfg.minibatches:
        raise BadInput(
            f"--minibatches {cfg.minibatches}: more than the dialogues of a step (--batch-size "
            f"{cfg.batch_size}); give fewer"
        )


def refuse_missing_tensorboard(cfg):
    """Raise BadInput for --tensorboard where its package is not installed."""
    if cfg.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise BadInput("--tensorboard: the package is not installed; pip install tensorboard")


def refuse_missing_vllm(engine):
    """Raise BadInput for --engine vllm where vLLM is not installed."""
    if engine == "vllm" and not vllm_is_there():
        raise BadInput(
            "--engine vllm: vLLM is not installed; requirements-vllm.txt says what to install"
        )


def default_engine(cfg):
    """The sampling engine where --engine names none: of a real model vLLM, if it is installed, on a
    GPU; else torch."""
    return "vllm" if not cfg.toy and vllm_is_there() and gpu_is_there() else "torch"


def vllm_is_there():
    return importlib.util.find_spec("vllm") is not None


def gpu_is_there():
    import torch  # imported late: scoring a result file does not need it

    return torch.cuda.is_available()


# ---------------------------------------------------------------------- settings of a resumed run


def resumed_settings(config, given):
    """The settings of a resumed run: those of its config.json, `config`, with the changes that the
    flags `given` ask for ({name: value}, None where a flag was not given).

    Raises BadInput if `config` does not have the fields of this version, and for a flag that would
    change the results."""
    settings = [setting.name for setting in dataclasses.fields(Settings)]
    if not isinstance(config, dict) or set(config) != set(settings):
        raise BadInput(
            f"--resume {Path(given['resume'])}: there is no run here (config.json is missing or "
            "unreadable)"
        )
    if given.get("out") is not None:
        raise BadInput(cannot_change("out", None))
    changes = {
        name: given[name]
        for name in settings
        if given.get(name) is not None and given[name] != config[name]
    }
    refuse_other_results(config, changes)
    refuse_missing_vllm(config["engine"])
    return Settings(**{**config, **changes})


def refuse_other_results(config, changes):
    """Raise BadInput if `changes`, {name: new value}, would change the results of the run. The
    address of the simulator's server may change, but not its model."""
    for name, value in changes.items():
        if name in RESUMABLE:
            continue
        if name == "simulator" and is_same_simulator(value, config[name]):
            continue
        raise BadInput(cannot_change(name, config[name]))


def cannot_change(name, value):
    """The message for a flag that may not be given with --resume; `value`: what the run has."""
    return (
        f"{flag_name(name)} cannot change in a resumed run (it has {value!r}); only "
        f"{', '.join(map(flag_name, RESUMABLE))} and the simulator's address can"
    )


# ------------------------------------------------------------------------------- names of models


# The --simulator names of users that are played by rule, and what these rules are. They cost
# nothing, log no calls, and can play only the people that were made for them.
SCRIPTED = {
    "toy": "a script. It knows a small grammar and cannot judge comfort",
    "toy-weak": "a script. It counts words and is made to be hacked",
    "phrases": "a script. It looks for phrases on a list and understands nothing",
}


def made_by_rule(simulator_name):
    """A sentence that says so if this user is played by rule; else ""."""
    if simulator_name not in SCRIPTED:
        return ""
    return f"Made by rule: the user {simulator_name} is {SCRIPTED[simulator_name]}."


def split_name(name):
    """A --simulator value in its parts (kind, model, address): split at the first ":" and, for
    openai, the last "@"."""
    kind, _, rest = name.partition(":")
    if kind != "openai":
        return kind, rest, ""
    model, _, url = rest.rpartition("@")
    return kind, model, url


def is_same_simulator(name, other_name):
    """Are two --simulator values the same model, perhaps at another address?"""
    return split_name(name)[:2] == split_name(other_name)[:2]


def may_be_on_the_hub(name):
    """Could `name` be a model on the hub, OWNER/NAME? (`./NAME` and `../NAME` are paths, and NAME
    alone is more likely a directory that is not here. The oldest models of the hub once had such
    names, and have an owner now: openai-community/gpt2.)"""
    is_a_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name))
    return bool(is_a_name) and not Path(name).exists() and not looks_like_a_path(name)


def looks_like_a_path(name):
    """Is `name`, which does not exist here, meant as a path and not as a model on the hub? It is if
    it begins with runs/, or if its parent is a directory. Then it is a typing error, and the hub
    need not be asked for it."""
    if Path(name).parts[0] == "runs":
        return True
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()
