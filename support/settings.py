"""support/settings.py - a run's flags, what they say together, and the errors a person may see.

One dataclass, `Settings`: a field is a setting, its help text makes the flag. Where the toy and a
real model want different numbers both stand side by side, the toy's first, with the reason for the
toy's; the real ones are the paper's (RLVER appendix B). Nothing here imports torch or a chapter.
"""

import support

import argparse
import contextlib
import dataclasses
import importlib.util
import io
import json
import re
import signal
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

# ------------------------------------------------------------------------------------------- errors


class RunError(Exception):
    """What ends a program with words instead of a traceback.

    exit_code: of the process. everywhere: found alike by all ranks, so told by the first alone.
    advice: what to do next; {out} is the run's directory; advice_at_start: as long as nothing there
    is named as the pattern `resumed_from`."""

    exit_code, everywhere, advice, advice_at_start, resumed_from = 1, False, "", "", ""


class BadInput(RunError, ValueError):
    """A user's mistake; the message is one line that says what, where, and what to do."""

    exit_code, everywhere = 2, True


class BadModel(BadInput):
    """A model directory that cannot be used."""


class SimulatorFailed(RunError):
    """No usable answer in as many attempts as allowed: its dialogue is dropped, never guessed."""

    exit_code = 2


class UnreadableAnswers(SimulatorFailed):
    """The model answers, and nothing that it says can be read, or it will not answer this prompt. A
    policy can bring that about by what it says, so such dialogues are counted apart."""


class SimulatorRefused(RunError):
    """The server refuses in a way that no second attempt heals (a wrong key, an unknown model): the
    run stops with its words."""

    exit_code = 2
    advice = "; when that is mended: python rlver.py --resume {out}"
    advice_at_start, resumed_from = "; when that is mended, start it again", "metrics.jsonl"


class TooManyLost(RunError):
    """More than a fifth of a batch was lost to the simulator: a pause for repairs, not an end."""

    exit_code, everywhere = 75, True  # EX_TEMPFAIL
    advice_at_start = "; nothing is saved yet: start the run again when the simulator is well"
    resumed_from = "checkpoint-*"
    advice = "\nthe run is saved; when the simulator is well again: python rlver.py --resume {out}"


class CannotWrite(RunError):
    """A checkpoint that could not be written: a full disk, mostly."""

    everywhere, resumed_from = True, "checkpoint-*"
    advice_at_start = "; make room, and start the run again"
    advice = "; make room, then: python rlver.py --resume {out}"


class SelfCheckFailed(RunError, RuntimeError):
    """Something that must hold does not: training on would waste the run. It says where to look."""


def explain(error, out=None, rank=0, world=1):
    """(exit code, what this rank says of it, perhaps nothing) for an error that ended a run in
    `out`. Raises the error again if it is nobody's mistake but ours."""
    name = f"rlver.py (rank {rank})" if world > 1 else "rlver.py"
    if isinstance(error, SelfCheckFailed):
        return error.exit_code, f"{name}: stopped by a self-check: {error}"
    if isinstance(error, RunError):
        started = out and error.resumed_from and any(out.glob(error.resumed_from))
        advice = error.advice if started else error.advice_at_start
        told = rank == 0 or not error.everywhere
        return error.exit_code, f"rlver.py: {error}{advice.format(out=out)}" if told else ""
    if isinstance(error, KeyboardInterrupt):
        started = out and (out / "config.json").exists()
        return 130, "\nstopped" + f"; go on with: python rlver.py --resume {out}" * bool(started)
    if isinstance(error, OSError):
        return 1, (
            f"rlver.py: {error}; the run can be continued from its last checkpoint: "
            f"python rlver.py --resume {out}"
        )
    if isinstance(error, RuntimeError) and world > 1:
        if re.search("gloo|nccl|connection", str(error), re.I):
            return 1, f"{name}: another rank is gone"
    raise error


# -------------------------------------------------------------------------------------------- flags

FLAGS = tomllib.loads((Path(__file__).parent / "flags.toml").read_text("utf-8"))


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, not the whole usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help tells more)\n")

    def flags(self, program, group=None):
        """Add the flags of a program, or of a part of one, as flags.toml has them; of a default the
        help says what it is. Returns the parser."""
        for name, about in FLAGS[program].items():
            about = {**about, **{"type": globals()[kind] for kind in [about.get("type")] if kind}}
            if isinstance(about.get("metavar"), list):
                about["metavar"] = tuple(about["metavar"])
            if about.get("default") not in (None, []) and "(default" not in about["help"]:
                about["help"] += f" (default: {about['default']})"
            (group or self).add_argument("--" + name.replace("_", "-"), **about)
        return self

    def run(self, work, argv):
        """Parse the flags and call work(args). Returns the exit code; of an error that is the
        user's, one line is said."""
        args = self.parse_intermixed_args(argv)
        if signal.getsignal(signal.SIGINT) is support.stop:  # the imports are over
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return work(args)
        except (RunError, OSError) as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 2)
        except KeyboardInterrupt:
            print("\nstopped; the same command goes on where it was", file=sys.stderr)
            return 130


def checked(read, test, what, example=""):
    """A type for argparse: what `read` makes of the text, if it passes `test`; else one line that
    says `what` is needed, as in the `example`."""

    def check(text):
        try:
            value = read(text)
        except (ValueError, RecursionError):
            value = None
        if value is None or not test(value):
            raise argparse.ArgumentTypeError(f"{what} is needed{example}, not {text!r}")
        return value

    return check


GROUP_TIMEOUT = 7200  # seconds a rank waits for another; a rollout must be over long before
natural = checked(int, lambda x: x >= 0, "a whole number from 0")
positive = checked(int, lambda x: x >= 1, "a whole number from 1")
above_zero = checked(float, lambda x: 0 < x < float("inf"), "a number above 0")
not_negative = checked(float, lambda x: 0 <= x < float("inf"), "a number from 0")
fraction = checked(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
emotion = checked(int, lambda x: 0 <= x <= 100, "a number from 0 to 100")
rollout_seconds = checked(
    float, lambda x: 0 < x <= GROUP_TIMEOUT / 2, f"a number of seconds up to {GROUP_TIMEOUT // 2}"
)
price = checked(
    lambda text: tuple(float(part) for part in text.split(",")),
    lambda pair: len(pair) == 2 and all(0 <= x < float("inf") for x in pair),
    "a pair of prices",
    ", as 0.27,1.10",
)
json_object = checked(
    json.loads,
    lambda value: isinstance(value, dict),
    "a JSON object",
    ", as '{\"enable_thinking\": false}'",
)


def flag(text, default=None, *, toy=None, real=None, group=None, resumable=False, **kind):
    """A field of Settings.

    text: its help. default, or toy and real where the two differ; {"ppo": ..., "grpo": ...} or
    {"think": ..., "direct": ...} where it depends on those. group: opens a group of --help.
    resumable: may change in a resumed run, because it changes no result. kind: for argparse."""
    return field(
        default=default,
        metadata=dict(
            text=text,
            toy=default if toy is None else toy,
            real=default if real is None else real,
            group=group,
            resumable=resumable,
            kind=kind,
        ),
    )


@dataclass
class Settings:
    """What a run is made with; config.json holds just this."""

    # ---- what to train, on whom
    algo: str = flag("algorithm", "grpo", choices=["ppo", "grpo"], group="what to train, on whom")
    think: bool = flag(
        "think before speaking: <think>...</think>, then the reply",
        action="store_const",
        const=True,
    )
    model: str = flag(
        "policy: toy, or a Hugging Face causal LM: its directory, or its name on the hub",
        "toy",
        metavar="DIR",
    )
    template_args: dict = flag(
        "arguments of the model's own chat template, as '{\"enable_thinking\": false}'",
        type=json_object,
        metavar="JSON",
    )
    simulator: str = flag(
        "model behind the user: toy; toy-weak, a scorer that can be hacked; "
        "openai:MODEL@URL, a server, its key in $RLVER_API_KEY or "
        "$OPENAI_API_KEY; local:DIR, a model in this process",
        "toy",
        metavar="NAME",
    )
    difficulty: str = flag(
        "how guarded the user is and how exacting", "vanilla", choices=["vanilla", "challenging"]
    )
    profiles: list = flag(
        "users as JSONL, for training and, if a second file is named, held out; "
        "without one the last fifth is held out, --eval-size at most (default: "
        "the toy's 500 and 128)",
        nargs="+",
        metavar="FILE",
    )
    lang: str = flag("language of the prompts", "en", choices=["en", "zh"])
    history_thoughts: str = flag(
        "--think: whether later turns see thoughts (if the template does)",
        "strip",
        choices=["strip", "keep"],
    )

    # ---- the run. The toy runs until its curve is nearly flat; direct steps are cheaper.
    steps: int = flag(
        "training steps; 0 only evaluates",
        toy={"think": 30, "direct": 36},
        real=350,
        type=natural,
        resumable=True,
        group="the run",
    )
    seed: int = flag("seed of all randomness", 0, type=natural)
    # one of 7B by PPO is 176 GB and takes minutes
    save_every: int = flag(
        "steps between checkpoints", toy=5, real=25, type=positive, resumable=True
    )
    tensorboard: bool = flag(
        "write the metrics for TensorBoard too (a package of its own)",
        action="store_const",
        const=True,
        resumable=True,
    )
    keep: int = flag("checkpoints that are kept, the newest", 2, type=positive, resumable=True)

    # ---- rollout. The paper's batch is 32 dialogues for PPO and 32 groups of 4 for GRPO. The toy:
    # enough tokens for one whole reply, not two.
    batch_size: int = flag(
        "dialogues a step, for both algorithms",
        toy=64,
        real={"ppo": 32, "grpo": 128},
        type=positive,
        group="rollout",
    )
    group_size: int = flag(
        "GRPO: dialogues that share a user and its first line", toy=8, real=4, type=positive
    )
    max_turns: int = flag(
        "replies of the policy in a dialogue, at most", toy=8, real=8, type=positive
    )
    max_tokens: int = flag(
        "tokens of a reply, thought included, at most", toy=48, real=5000, type=positive
    )
    temperature: float = flag("sampling temperature, also of all log-probs", 1.0, type=above_zero)
    engine: str = flag(
        "what samples (default: vllm, if it is there, on a GPU; else torch)",
        choices=["torch", "vllm"],
    )
    engine_memory: float = flag(
        "vLLM: its share of the GPU's memory while it samples", 0.45, type=fraction, resumable=True
    )
    rollout_timeout: float = flag(
        "seconds after which open dialogues are dropped",
        1800.0,
        type=rollout_seconds,
        resumable=True,
    )

    # ---- the user's model, where it is a server
    simulator_concurrency: int = flag(
        "calls under way at a time, for each rank (default: as many as a batch has dialogues)",
        type=positive,
        resumable=True,
        group="the user's model, where it is a server",
    )
    simulator_timeout: float = flag("seconds until a call is given up", 60.0, type=above_zero)
    simulator_retries: int = flag(
        "further attempts at a call that failed or cannot be read", 8, type=natural
    )
    simulator_temperature: float = flag("its sampling temperature", 0.0, type=not_negative)
    simulator_cache: str = flag("calls.jsonl of a run, not to be paid again", metavar="FILE")

    # ---- what is rewarded
    reward: str = flag(
        "terminal: e_T / 100, once; delta: (e_t - e_{t-1}) / 100 after each reply",
        "terminal",
        choices=["terminal", "delta"],
        group="what is rewarded",
    )
    advantage: str = flag(
        "GRPO: divided by the group's std; not divided (dr-grpo); against the "
        "mean of the others (rloo)",
        "grpo",
        choices=["grpo", "dr-grpo", "rloo"],
    )
    refill: int = flag("GRPO: rounds of new users for groups without a lesson", 0, type=natural)
    watch: str = flag(
        "a second user, as --simulator, who is told the same replies and never trained on",
        metavar="NAME",
    )
    watch_every: int = flag("steps between two looks of --watch", 1, type=positive)
    watch_difficulty: str = flag(
        "of --watch, where it is not the run's", choices=["vanilla", "challenging"]
    )
    watch_lang: str = flag("of --watch, where it is not the run's", choices=["en", "zh"])

    # ---- update. The toy's learning rate is the largest that was safe: at 6e-4 one thinking run of
    # three garbled its thoughts halfway ("lost, father, father, father"). Adapters want ten times
    # that; on the toy five, as at ten PPO without thoughts stood still at 62 from step 15
    # on. Two mini-batches, so that clipping has something to do.
    lora_rank: int = flag(
        "train low-rank adapters of this rank, on a frozen model; 0: the whole model",
        0,
        type=natural,
        group="update",
    )
    lora_alpha: float = flag("adapters count alpha / rank", 32.0, type=above_zero)
    lr: float = flag(
        "learning rate of the policy",
        toy={"lora": 2e-3, "full": 4e-4},
        real={"lora": 1e-5, "full": 1e-6},
        type=above_zero,
    )
    critic_lr: float = flag(
        "PPO: learning rate of the critic",
        toy={"lora": 5e-3, "full": 1e-3},
        real={"lora": 5e-5, "full": 5e-6},
        type=above_zero,
    )
    warmup: int = flag("steps over which both rise from 0", toy=3, real=50, type=natural)
    minibatches: int = flag(
        "optimizer steps from one rollout; with 1 clipping never acts", toy=2, real=1, type=positive
    )
    gamma: float = flag("PPO: discount per policy token", 1.0, type=fraction)
    lam: float = flag("PPO: GAE's lambda", 1.0, type=fraction)
    clip_eps: float = flag("the ratio is clipped to 1 +- this", 0.2, type=above_zero)
    value_clip: float = flag("PPO: how far values may move; 0: anywhere", 0.5, type=not_negative)
    kl_coef: float = flag("weight of the KL to the start; 0: no reference", 0.0, type=not_negative)
    kl_estimator: str = flag(
        "k1 (PPO only, in the reward), or in the loss k2, k3, k3-ratio",
        "k3",
        choices=["k1", "k2", "k3", "k3-ratio"],
    )
    entropy_coef: float = flag("weight of the entropy bonus", 0.001, type=not_negative)
    critic_warmup: int = flag("PPO: first steps, in which the critic alone learns", 0, type=natural)
    tokens_per_gpu: int = flag(
        "padded tokens of a micro-batch; changes memory, not the result",
        toy=8192,
        real=16384,
        type=positive,
        resumable=True,
    )

    # ---- evaluation on held-out users
    eval_size: int = flag(
        "dialogues", toy=128, real=100, type=positive, group="evaluation on held-out users"
    )
    eval_every: int = flag(
        "steps between evaluations; 0: only before and after", toy=0, real=0, type=natural
    )

    # ---- no flag: tokens of a dialogue, where that is not the model's own limit
    context: int = flag(None, toy=1024)

    @property
    def toy(self):
        return self.model == "toy"

    @property
    def mode(self):
        return "think" if self.think else "direct"


def make_parser():
    """The flags of rlver.py; None is "not given", for --resume to know what shall change."""
    parser = Parser(
        prog="rlver.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="RLVER from scratch: a model talks with a simulated user whose "
        "final emotion is the reward.",
        epilog="Without --model and --simulator everything is embedded and offline. Defaults are "
        "given as toy / real model.",
    )
    said = lambda value: (
        ", ".join(f"{v} for {k}" for k, v in value.items())
        if isinstance(value, dict)
        else str(value)
    )
    for setting in dataclasses.fields(Settings):
        about, text = setting.metadata, setting.metadata["text"]
        if text is None:
            continue
        if about["group"]:
            group = parser.add_argument_group(about["group"])
        if about["toy"] is not setting.default:
            text += f" (default: {said(about['toy'])} / {said(about['real'])})"
        elif setting.default is not None:
            text += f" (default: {setting.default})"
        group.add_argument("--" + setting.name.replace("_", "-"), help=text, **about["kind"])
        if setting.name == "seed":
            parser.flags("run", group)
    return parser


def read_flags(argv, quiet=False):
    """The flags as {name: value}, None where not given. quiet: eight ranks need one complaint."""
    with contextlib.redirect_stderr(io.StringIO()) if quiet else contextlib.nullcontext():
        return vars(make_parser().parse_args(argv))


# ----------------------------------------------------------------------------------------- settings


def vllm_is_there():
    return importlib.util.find_spec("vllm") is not None


def may_be_on_the_hub(name):
    """Could `name` be a model's name there: OWNER/NAME, or of the oldest models NAME alone?"""
    return re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(name)) and not Path(name).exists()


def is_beside_us(name):
    """Would `name`, if it were there, be a path here and no name on the hub? Where its parent is a
    directory, and in runs/, a typo is meant: the hub need not be asked for it."""
    parent = Path(name).parent
    return Path(name).parts[0] == "runs" or parent != Path() and parent.is_dir()


def need_vllm(engine):
    if engine == "vllm" and not vllm_is_there():
        raise BadInput(
            "--engine vllm: vLLM is not installed; requirements-vllm.txt says what to install"
        )


def resolve_settings(given):
    """Fill in the defaults and check what flags say together.

    given: {name: value}, None where a flag was not given. Returns Settings; raises BadInput."""
    which, found = "toy" if given.get("model") in (None, "toy") else "real", {}
    for setting in dataclasses.fields(Settings):
        value = given.get(setting.name)
        if value is None:
            value = setting.metadata[which]
            if isinstance(value, dict):
                kinds = {
                    found["algo"],
                    "think" if found["think"] else "direct",
                    "lora" if found.get("lora_rank") else "full",
                }
                value = next(v for k, v in value.items() if k in kinds)
        found[setting.name] = value
    cfg = Settings(**found)
    cfg.think = bool(cfg.think)
    said = lambda names: " ".join(
        f"--{name.replace('_', '-')} {given[name]}" for name in names if given.get(name) is not None
    )
    # a flag of one algorithm says so in its help
    of = lambda algo: said(
        f.name
        for f in dataclasses.fields(Settings)
        if (f.metadata["text"] or "").startswith(f"{algo}: ")
    )
    grpo, groups, critics = cfg.algo == "grpo", of("GRPO"), of("PPO")
    looks = said(["watch_every", "watch_difficulty", "watch_lang"])
    for wrong, complaint in (
        (
            grpo and cfg.batch_size % cfg.group_size,
            f"--batch-size {cfg.batch_size} is not a multiple of --group-size {cfg.group_size}: "
            "groups must be whole",
        ),
        (
            grpo and cfg.group_size == 1,
            "--group-size 1: a group of one has no mean to be compared with, and GRPO would learn "
            "nothing; take 2 or more, or --algo ppo",
        ),
        (
            grpo and cfg.kl_coef and cfg.kl_estimator == "k1",
            "--kl-estimator k1 goes into a per-token reward, which GRPO does not have; use k2, k3 "
            "or k3-ratio",
        ),
        (
            groups and not grpo,
            f"{groups} is for GRPO, which has groups; leave it out, or take --algo grpo",
        ),
        (
            critics and grpo,
            f"{critics} is for PPO, which has a critic; leave it out, or take --algo ppo",
        ),
        (
            given.get("lora_alpha") and not cfg.lora_rank,
            "--lora-alpha is for adapters; say --lora-rank R too",
        ),
        (looks and not cfg.watch, f"{looks}: nobody watches; say who by --watch NAME"),
        (
            cfg.history_thoughts == "keep" and not cfg.think,
            "--history-thoughts keep: there are no thoughts without --think",
        ),
        (
            cfg.reward == "delta" and cfg.gamma < 1,
            f"--gamma {cfg.gamma}: with --reward delta "
            "it must be 1, or the deltas no longer add up to how far the emotion came",
        ),
        (
            cfg.tensorboard and not importlib.util.find_spec("tensorboard"),
            "--tensorboard: the package is not installed; pip install tensorboard",
        ),
        (
            cfg.batch_size < cfg.minibatches,
            f"--minibatches {cfg.minibatches} cannot be cut from --batch-size {cfg.batch_size}",
        ),
    ):
        if wrong:
            raise BadInput(complaint)
    refuse_price(cfg, given.get("price"))
    cfg.group_size = cfg.group_size if grpo else 1
    need_vllm(cfg.engine)
    if not cfg.engine:
        cfg.engine = "vllm" if not cfg.toy and vllm_is_there() and gpu_is_there() else "torch"
    return cfg


def refuse_price(cfg, price):
    """Raise BadInput if --price is given where nobody is paid."""
    if price and not any((name or "").startswith("openai:") for name in (cfg.simulator, cfg.watch)):
        raise BadInput(
            f"--price {price[0]:g},{price[1]:g}: neither --simulator nor --watch is a "
            "server, so nothing is paid; name one by openai:MODEL@URL, or leave it out"
        )


def gpu_is_there():
    import torch  # late: scoring a result file does without it

    return torch.cuda.is_available()


def split_name(name):
    """A --simulator value in its parts (kind, model, address): split at the first ":" and, for
    openai, the last "@"."""
    kind, _, rest = name.partition(":")
    model, _, url = rest.rpartition("@") if kind == "openai" else (rest, "", "")
    return kind, model, url


def resumed_settings(config, given):
    """The settings of a run that goes on. config: its config.json, given: as in `resolve_settings`.

    Raises ValueError if `config` is none of this version's, BadInput for a flag that would make it
    another run."""
    names = {setting.name: setting for setting in dataclasses.fields(Settings)}
    if not isinstance(config, dict) or set(config) != set(names):
        raise ValueError
    for name, setting in names.items():
        check_value(name, setting, config[name])
    changed = {
        key: value
        for key, value in given.items()
        if value is not None
        and value != config.get(key)
        and key not in ("resume", "plan", "price", "card", "latency")
    }
    free = [name for name, setting in names.items() if setting.metadata["resumable"]]
    for key, value in changed.items():
        moved = key == "simulator" and split_name(value)[:2] == split_name(config[key])[:2]
        if not moved and key not in free:
            raise BadInput(
                f"--{key.replace('_', '-')} cannot change in a resumed run (it has "
                f"{config.get(key)!r}); only --{', --'.join(free).replace('_', '-')} "
                "and the simulator's address can"
            )
    need_vllm(config["engine"])
    cfg = Settings(**{**config, **changed})
    refuse_price(cfg, given.get("price"))
    return cfg


def check_value(name, setting, value):
    """Raise BadInput if `value`, of an edited config.json, is none that the flag could have."""
    about = setting.metadata
    kind, choices = about["kind"], about["kind"].get("choices")
    if value in (about["toy"], about["real"]) or choices and value in choices:
        return
    try:
        if (
            choices
            or any(isinstance(value, c) != (setting.type is c) for c in (list, str))
            or "type" in kind
            and kind["type"](json.dumps(value) if isinstance(value, dict) else str(value)) != value
        ):
            raise argparse.ArgumentTypeError(f"{value!r} is no value of it")
    except argparse.ArgumentTypeError as error:
        raise BadInput(f"config.json: {name}: {error}; put the file back as it was") from None
