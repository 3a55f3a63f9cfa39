"""What tests share: the path, an offline world, which tests run, and a policy so small that tests
can run it hundreds of times. The markers are in pyproject.toml."""

import os
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = map(str, (HERE.parent, HERE, HERE / "textbook", HERE / "machine"))
import support  # noqa: F401 - before all that may import torch: it sets what torch reads

# a name that is no directory must fail at once, not ask the network
os.environ["HF_HUB_OFFLINE"] = "1"
# Read by torch when it is imported, by the processes that tests start too. These models are so
# small that a second thread would mostly wait for the first, and waiting takes a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

# ChatML as Qwen writes it: the newline behind <|im_end|> is scaffold, no policy ever samples it.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen's split into words: one sign in front of a word belongs to it. So in "</think>I" the last
# token is ">I".
QWEN_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "system\nBe warm.",
    "user\nMy sister forgot my birthday. I feel hurt.",
    "assistant\nI am here, take your time.",
    "<think>hurt, sister, wants ears</think>I am here.",
    "<think>lonely, wants ears</think>I am all ears.",
] * 4


def pytest_collection_modifyitems(config, items):
    """Tests marked soak run only where they are asked for: `pytest -m soak`. Tests that wait for a
    learning run come last."""
    if "soak" not in (config.option.markexpr or ""):
        soak = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=soak)
        items[:] = [item for item in items if item not in soak]
    items.sort(key=lambda item: "learning" in item.fixturenames)


def suited(flags):
    """`flags` of a run, but for those that are the other algorithm's: a run refuses them, and tests
    have one list for both."""
    flags = [str(word) for word in flags]
    algo = (["grpo"] + [after for word, after in zip(flags, flags[1:]) if word == "--algo"])[-1]
    foreign = {"ppo": "--group-size", "grpo": "--critic-lr"}[algo]
    return [word for before, word in zip(["", *flags], flags) if foreign not in (before, word)]


@pytest.fixture(scope="session", autouse=True)
def early(request):
    """Start the learning runs that the selected tests ask for before the first test runs."""
    if any("learning" in item.fixturenames for item in request.session.items):
        request.getfixturevalue("learning")


@pytest.fixture(scope="session")
def learning(request, tmp_path_factory):
    """Runs of the toy in processes of their own, beside the tests: learning.py."""
    from learning import RUNS, Learning

    names = {name for item in request.session.items for name in item.fixturenames} & set(RUNS)
    runs = Learning(names, tmp_path_factory.mktemp("learning"))
    yield runs
    runs.close()


@pytest.fixture(scope="session")
def learnt(learning):
    """The directory of a run of twenty steps, with the toy's defaults."""
    return learning.wait("learnt")


@pytest.fixture(scope="session")
def hacked(learning):
    """The directory of a run that learned from the scorer that can be hacked."""
    return learning.wait("hacked")


@pytest.fixture(scope="module")
def no_pictures():
    """Runs draw no learning curve: half the time of a run this small. Only where it is looked at is
    it drawn."""
    from support import report

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "learning_curve", lambda *_: None)
        yield


@pytest.fixture(scope="module")
def moods(no_pictures):
    """The checksum of a reply decides how it feels: runs.py says why."""
    import toy
    from runs import mood

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "judge", mood)
        yield


@pytest.fixture(scope="session")
def whole(tiny_dir, tmp_path_factory):
    """Uninterrupted runs, one per algorithm, made when asked for: whole("grpo") is the directory,
    whole.trainers["grpo"] the Trainer. Copy a directory before you go on with it."""
    import rlver
    from runs import DRAW, go, in_moods

    made = {}

    def run(algo):
        class Seen(rlver.Trainer):
            def __init__(self, *args, **more):
                run.trainers[algo] = self
                super().__init__(*args, **more)

        if algo not in made:
            made[algo] = tmp_path_factory.mktemp("whole") / algo
            # one picture is enough
            with in_moods(DRAW if algo == "ppo" else lambda *_: None) as patch:
                patch.setattr(rlver, "Trainer", Seen)
                assert go(tiny_dir, made[algo], "--algo", algo) == 0
        return made[algo]

    run.trainers = {}
    return run


@pytest.fixture(scope="session")
def half(tiny_dir, tmp_path_factory):
    """A run of two steps; copy it before you go on with it."""
    from runs import go, in_moods

    out = tmp_path_factory.mktemp("half") / "out"
    with in_moods():
        assert go(tiny_dir, out, "--steps", 2) == 0
    return out


@pytest.fixture
def quick(no_pictures, monkeypatch):
    """The first wait of a retry is 5 ms in here, not 400."""
    from support import server

    from simulator import Simulator

    monkeypatch.setattr(server, "WAIT_IF_UNREACHABLE", 0.005)
    init = Simulator.__init__
    monkeypatch.setattr(
        Simulator,
        "__init__",
        lambda self, model, lang="en", difficulty="vanilla", retries=2, wait=0.0, *rest, **more: (
            init(self, model, lang, difficulty, retries, wait and 0.005, *rest, **more)
        ),
    )


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    """Headless Chromium, driven by selenium."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, path in paths.items():
        if not path:
            pytest.skip(f"{name} is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('chromium')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService(executable_path=paths["chromedriver"])
    )
    yield driver
    driver.quit()


@pytest.fixture
def page(chromium, tmp_path):
    """The page of a report, opened in Chromium; none of its tests may leave an error there."""
    from pages import Page

    page = Page(chromium, tmp_path / "report.html")
    yield page
    assert page.complaints() == []  # no error and no exception, in any of these tests
    assert page.js("window.pwned") is None


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A byte-level BPE in the manner of Qwen: three special tokens, <think> and </think> are only
    text, in several tokens."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.decoder = normalizers.NFC(), decoders.ByteLevel()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.train_from_iterator(
        TEXTS,
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
    """Its template in pieces, with a system prompt."""
    from support.chat_format import ChatFormat

    return ChatFormat(tiny_tokenizer, "Be warm.")


def make_tiny_model(tokenizer, **settings):
    """A random Qwen2 of two layers. Its weights are large for their number, so that no two tokens
    are equally likely."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(
            Qwen2Config(
                **{
                    **dict(
                        vocab_size=len(tokenizer),
                        hidden_size=32,
                        intermediate_size=64,
                        num_hidden_layers=2,
                        num_attention_heads=2,
                        num_key_value_heads=2,
                        max_position_embeddings=512,
                        initializer_range=0.2,
                        tie_word_embeddings=False,
                        pad_token_id=tokenizer.pad_token_id,
                        bos_token_id=None,
                        eos_token_id=tokenizer.eos_token_id,
                    ),
                    **settings,
                }
            )
        )


@pytest.fixture(scope="session")
def tiny_model(tiny_tokenizer):
    """Shared by all tests: copy it before you change it."""
    return make_tiny_model(tiny_tokenizer)


@pytest.fixture(scope="session")
def tiny_gqa_model(tiny_tokenizer):
    """Its two heads share keys and values, and its embeddings serve as output layer too: both as in
    the small Qwens."""
    return make_tiny_model(tiny_tokenizer, num_key_value_heads=1, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_dir(tiny_model, tiny_tokenizer, tmp_path_factory):
    """Both on disk, as `load_model` wants them."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model.save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path
