"""The settings of a run and bad input: what `--help` tells, the defaults, and what is refused in
one line, before anything is written."""

from support.command_line import Parser, from_anywhere, split_name
from support.settings import REAL, TOY, make_parser, model_of, resolve_settings

import asyncio
import importlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import evaluate
import rlver
from answering import LIN
from ppo import VALUE_CLIP
from result_files import write
from runs import files, output_of, refuse
from several_ranks import run
from tools import chat, fitness, judge, lens, profiles, replay
from toy import world

pytestmark = pytest.mark.usefixtures("moods")

# ----------------------------------------------------------------------------------------- settings


def test_help_explains_every_flag_and_names_both_defaults(capfd):
    """`--help` is the manual: a flag without a text, or a default that is not the one in force,
    sends people to the source."""
    said = " ".join(output_of(capfd, 0, rlver.main, "--help").split())
    texts = {action.dest: action.help for action in make_parser()._actions}
    for name, text in texts.items():
        assert text.partition("(default")[0].strip(), name
        assert "--" + name.replace("_", "-") in said
    assert set(TOY) == set(REAL)
    assert all("; real model: " in texts[name] for name in TOY)
    for model, algo, think in itertools.product(("toy", "some/dir"), ("ppo", "grpo"), (True, None)):
        values = vars(resolve_settings(dict(model=model, algo=algo, think=think)))
        for name in TOY:
            assert str(values[name]) in texts[name].partition("default: ")[2], texts[name]


# {setting: its default, or {case: default}}, as the paper and our results have it
PAPER = dict(  # RLVER appendix B and the released script
    steps=350,
    lr={"lora": 1e-5, "full": 1e-6},  # adapters are not the paper's
    critic_lr={"lora": 5e-5, "full": 5e-6},
    warmup=50,
    minibatches=1,
    eval_size=100,
    max_tokens=5000,
    batch_size={"ppo": 32, "grpo": 32 * 4},
    group_size={"ppo": 1, "grpo": 4},
    save_every=25,
    tokens_per_gpu=16384,
)
RESULTS = dict(  # of the toy, docs/results.md
    steps={"think": 28, "direct": 36},
    lr={"lora": 2e-3, "full": 4e-4},
    critic_lr={"lora": 5e-3, "full": 1e-3},
    warmup=3,
    minibatches=4,
    eval_size=128,
    max_tokens=48,
    batch_size=64,
    group_size={"ppo": 1, "grpo": 8},
    save_every=5,
    tokens_per_gpu=8192,
)
BOTH = dict(  # the paper's
    max_turns=8,
    gamma=1.0,
    lam=1.0,
    clip_eps=0.2,
    kl_coef=0.0,
    entropy_coef=0.001,
    temperature=1.0,
    eval_every=0,
    think=False,
)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("think", [None, True])
@pytest.mark.parametrize("lora", [None, 8])
@pytest.mark.parametrize("model, table", [("some/dir", PAPER), ("toy", RESULTS)])
def test_the_defaults_are_those_of_the_paper_and_of_our_results(model, table, algo, think, lora):
    """Who trains a real model and names no flag gets the paper's run, not the toy's; who trains the
    toy gets the runs of the README. A rate that is 26 times as high was in no test."""
    assert set(table) == set(TOY) == set(REAL)
    flags = dict(algo=algo, model=model, think=think, lora_rank=lora)
    cfg, cases = vars(resolve_settings(flags)), (algo, "think" if think else "direct")
    for name, value in {**BOTH, "think": bool(think), **table}.items():
        if isinstance(value, dict):
            [value] = [
                value[case] for case in (*cases, "lora" if lora else "full") if case in value
            ]
        assert cfg[name] == value, name
    assert VALUE_CLIP == 0.5  # the released script's


def test_the_model_is_known_before_the_ranks_are_joined(tmp_path):
    """Ranks with a GPU are joined for CUDA unless the toy is trained, also in a resumed run. On a
    machine without a GPU nobody asks, so no run of the tests would see it."""
    assert model_of(dict(resume=None, model=None)) == "toy"
    assert model_of(dict(resume=None, model="some/dir")) == "some/dir"
    (tmp_path / "config.json").write_text('{"model": "some/dir"}')
    assert model_of(dict(resume=str(tmp_path), model=None)) == "some/dir"


def test_ppo_and_grpo_get_the_same_dialogues_and_the_same_number_of_updates():
    """Defect 22: eight updates a step in one mode and one in the other make a comparison of them
    worthless."""
    for model, think in itertools.product(("toy", "some/dir"), (True, None)):
        given = dict(model=model, think=think, batch_size=32)
        ppo, grpo = (resolve_settings({"algo": algo, **given}) for algo in ("ppo", "grpo"))
        assert ppo.minibatches == grpo.minibatches and ppo.batch_size == grpo.batch_size == 32


def test_the_name_is_split_at_the_first_colon_and_the_last_at():
    """Model names hold colons and slashes, URLs hold colons, and somebody's model name will hold
    an @."""
    assert split_name("openai:org/m:70b@2@http://h:8/v1") == (
        "openai",
        "org/m:70b@2",
        "http://h:8/v1",
    )
    assert split_name("local:models/a@b") == ("local", "models/a@b", "")


def test_a_directory_is_known_from_everywhere(tmp_path, monkeypatch):
    """A run was begun with --model models/qwen and resumed from another directory: there the name
    was one of the hub, and the adapters went on that model. Other names stay as they are, also
    where a directory has the name of a script."""
    monkeypatch.chdir(tmp_path)
    for place in ("models/qwen", "toy", "toy-weak"):
        Path(place).mkdir(parents=True)
    flags = "--model models/qwen --simulator local:models/qwen --profiles p.jsonl".split()
    cfg = resolve_settings(vars(make_parser().parse_args(flags)))
    place = str(tmp_path / "models" / "qwen")
    assert (cfg.model, cfg.simulator) == (place, f"local:{place}")
    for name in ("Qwen/Qwen3-8B", "toy", "toy-weak", "openai:a/b@http://h:1", "local:nowhere"):
        assert from_anywhere(name) == name


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--lr nan", "--lr"),
        ("--lr inf", "--lr"),
        ("--reader=", "--reader"),  # of a shell's variable that is not set
        ("--learning-rate 1", "--learning-rate"),
        ("--batch-size 6 --group-size 4", "--group-size 4"),
        ("--group-size 1", "--group-size 1"),  # its advantage would always be 0
        ("--algo grpo --kl-coef 0.1 --kl-estimator k1", "k1"),
        ("--algo ppo --reward delta --gamma 0.9", "--gamma 0.9"),
        # Who says it believes that it does something, also where the value is the default. Half a
        # day of runs "with lambda 0.9" were GRPO, which has no lambda.
        ("--gamma 1", "--gamma has no effect"),
        ("--lam 0.95", "--lam has no effect"),
        ("--algo ppo --advantage rloo", "--advantage has no effect"),
        ("--kl-estimator k3", "--kl-estimator has no effect"),
        ("--critic-lr 1e-3", "--critic-lr has no effect"),
        ("--clip-eps 0.1", "--clip-eps has no effect"),
        ("--minibatches 9 --batch-size 8", "--minibatches 9"),  # there were 8 steps
        ("--engine-memory 0.3", "--engine-memory has no effect"),
        ("--simulator-temperature 1", "--simulator-temperature has no effect"),
        ("--simulator-timeout 9", "--simulator-timeout has no effect"),
        ("--simulator-concurrency 9", "--simulator-concurrency has no effect"),
        ("--lang zh", "--lang zh"),
        ("--simulator toy-weak --lang zh", "--lang zh: the scripted user of --simulator toy-weak"),
        ("--simulator openai:m@host/v1", "openai:m@host/v1: openai:MODEL@URL is needed"),
        ("--simulator openai:m@http://host:99999/v1", "openai:MODEL@URL is needed"),
        # of a password, also one with an @ or a ', in whatever name and flag
        ("--simulator openai:m@http://me:S'E/C@RET@host/v1", "openai:m@http://***@host/v1: "),
        ("--simulater openai:m@http://me:SECRET@host/v1", "openai:m@http://***@host/v1"),
        ("--simulator http://me:SECRET@host/v1", "--simulator http://***@host/v1: unknown"),
        ("--model https://me:SECRET@host/m", "https://***@host/m"),
        ("--simulator local:nowhere", "local:nowhere"),
        ("--simulator openia:m@http://h", "openia:m@http://h"),
        ("--template-args [1]", "a JSON object is needed"),
        ("--profiles good.jsonl missing.jsonl", "missing.jsonl"),
        ("--profiles half.jsonl", "half.jsonl, line 3"),
        ("--profiles one.jsonl", "one.jsonl"),
        ("--profiles good.jsonl chinese.jsonl", "profile"),
        ("--profiles good.jsonl good.jsonl good.jsonl", "--profiles"),
        ("--out file", "--out file"),
        ("--out file/out", "file/out"),
        ("--model absent", "--model absent"),
        ("--resume .", "--resume ."),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    flags, words, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Exit code 2 and one line that names the flag, the file, the line; no traceback, no directory,
    no file changed. A run that dies of bad input after an hour of setting up, or leaves an empty
    directory that the next try trips over, costs more than the mistake."""
    monkeypatch.chdir(tmp_path)
    good = world.profiles("train", 10)
    write(Path("good.jsonl"), *good)
    write(Path("one.jsonl"), good[0])
    write(Path("half.jsonl"), *good[:2], '{"id": ')
    write(Path("chinese.jsonl"), LIN)
    Path("file").write_text("not a directory")
    before = files(".")
    line = refuse(capfd, "--model", tiny_dir, "--steps", 1, *flags.split())
    assert words in line and "RET@" not in line
    assert files(".") == before


def in_a_loop(work):
    """What a cell of a notebook does: its loop runs already."""

    async def cell():
        return work()

    return asyncio.run(cell())


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize(
    "place, main, flags",
    [
        (in_a_loop, rlver.main, "--steps 0 --out out"),
        (in_a_thread, rlver.main, "--steps 0 --out out"),  # Python sets signals in the main one
        (in_a_loop, evaluate.main, "--policy toy --limit 1 --out r.jsonl"),
        (in_a_loop, chat.main, "--as-policy"),
        (in_a_loop, fitness.main, "--simulator toy --replies 1"),
        (in_a_loop, replay.main, "same-user {results}"),
        (in_a_loop, judge.main, "utterance {results}"),
        (in_a_loop, lens.main, "{half}"),
        (in_a_loop, profiles.main, "--writer openai:m@http://127.0.0.1:1 --out u.jsonl"),
    ],
)
def test_a_program_inside_of_another_is_one_line(
    place, main, flags, results, half, tmp_path, monkeypatch, capfd
):
    """asyncio.run() cannot be called from a running event loop; signal only works in main thread:
    with ten lines above it, and a coroutine that was never awaited."""
    monkeypatch.chdir(tmp_path)
    flags = flags.format(results=results, half=half).split()
    told = place(lambda: refuse(capfd, *flags, main=main))
    assert "run it as a command" in told and not [*tmp_path.iterdir()]


def test_what_needs_no_loop_runs_in_a_notebook(results, capfd):
    """And evaluate.py has no signals to handle: it may be in a thread."""
    told = in_a_loop(lambda: output_of(capfd, 0, evaluate.main, "--score", results))
    assert told == output_of(capfd, 0, evaluate.main, "--score", results)
    flags = "--policy", "toy", "--limit", 1, "--max-turns", 1, "--out", results.with_name("t.jsonl")
    assert "score" in in_a_thread(lambda: output_of(capfd, 0, evaluate.main, *flags))


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--lr 1",
        "--algo ppo",
        "--think",
        "--seed 1",
        "--out elsewhere",
        "--engine-memory 0.3",  # it may change, but the run has no vLLM
        "--lora-rank 8",
        "--tokens-per-gpu 40 --lr 1",  # the first may change
        "--steps 3",  # four are done; and the refusal must not be remembered
    ],
)
def test_a_resumed_run_keeps_its_settings(flags, whole, tmp_path, monkeypatch, capfd):
    """Half a run at one temperature and half at another is neither. The flag in the way is named;
    nothing is written."""
    monkeypatch.chdir(tmp_path)
    out = whole("grpo")
    before = files(out)
    flag = [word for word in flags.split() if word.startswith("--")][-1]
    assert flag in refuse(capfd, "--resume", out, *flags.split())
    assert files(out) == before and files(tmp_path) == {}


@pytest.mark.slow
def test_another_run_is_never_written_over(whole, tiny_dir, capfd):
    """Three days of dialogues must survive an arrow-up and a return. And `--resume
    runs/x/checkpoint-000040` is the obvious slip: a checkpoint holds a config.json, the model's."""
    out = whole("grpo")
    before = files(out)
    assert "--resume" in refuse(capfd, "--model", tiny_dir, "--out", out)
    assert "there is no run here" in refuse(capfd, "--resume", out / "checkpoint-000004")
    assert files(out) == before


def test_what_a_terminal_lacks_is_shown_as_a_question_mark():
    """A user's 好 ended a run after its first evaluation, where the terminal has no such letter."""
    said = "from support.settings import Parser; Parser(); print('well… 好')"
    code, out, err = run("-c", said, env={"PYTHONIOENCODING": "latin-1"})
    assert (code, out) == (0, "well? ?\n"), err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of en_US.UTF-8, of C.UTF-8
@pytest.mark.parametrize("typed", [b"a \xe4\xbd b", b"\xc4\xe3\xba\xc3", b"\xed\xa0\xbd"])
def test_what_is_typed_and_is_no_text_is_replaced(typed, errors):
    """Half a character that was erased, GBK, half a surrogate: a chat ended in a traceback, at once
    or in its tokenizer."""
    said = "from support.settings import Parser; Parser(); print(input())"
    env = {"PYTHONIOENCODING": f"utf-8:{errors}"}
    _, out, err = run("-c", said, env=env, input=typed, text=False)
    assert out.decode().strip() == typed.decode(errors="replace"), err


@pytest.mark.parametrize(
    "flags",
    [
        "rlver --steps=0 --eval-size=2 --out=~/there/x",
        "rlver --resume=~/x",
        "rlver --model=~/x",
        "rlver --simulator=local:~/x --profiles=~/there",
        "rlver --simulator=openai:m@http://h --profiles ~/there ~/x",
        "rlver --reader=local:~/x",
        "evaluate --policy=~/x",
        "evaluate --policy=toy --profiles=~/x",
        "evaluate --policy=toy --limit=1 --out=~/there/x",
        "evaluate --score=~/x",
        "evaluate --compare ~/x ~/y",
        "evaluate --score ~/there --json=~/there",
        "tools.ability ~/x ~/y",
        "tools.blind --read=~/x",
        "tools.blind ~/there --out=~/there",
        "tools.chat ~/x",
        "tools.fitness --reader=local:~/x",
        "tools.judge needs ~/x",
        "tools.judge capabilities ~/there --judge=toy --picture=~/there",
        "tools.profiles --out=~/there",
        "tools.profiles --check=~/x",
        "tools.replay same-user ~/x",
        "tools.report ~/x",
        "tools.strategies ~/x",
        "course handout ~/there",
        "course grade ~/x",
        "course grade . --only kl --csv=~/there/x",
    ],
)
def test_every_flag_that_takes_a_path_knows_the_home_directory(flags, tmp_path, monkeypatch, capfd):
    """No shell expands the ~ of --out=~/run: the run went to a directory named ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write(Path("there"), *world.profiles("train", 10))
    Path("ppo.py").touch()  # a student's
    program, *flags = flags.split()
    told = output_of(capfd, 2, importlib.import_module(program).main, *flags)
    assert f"{tmp_path}/" in told and not Path("~").exists()


@pytest.mark.parametrize("flag", ["--model=\udcff", "--out=/\udcff", "--out=~nobody-has-it/run"])
def test_a_path_that_no_log_can_hold_is_refused(flag, capfd):
    """Bytes that are no UTF-8 ended a run where its first line was logged; no such home directory
    was a directory of that name."""
    assert "a path or name in UTF-8" in refuse(capfd, flag)


def test_a_program_that_saves_nothing_does_not_promise_to_go_on(capfd):
    """ "The same command goes on where it was" stood under a talk that was over."""

    def work(args):
        raise KeyboardInterrupt

    assert output_of(capfd, 130, lambda argv: Parser().run(work, argv)) == "\nstopped\n"
