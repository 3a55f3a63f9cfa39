"""The commands of the README and of docs/: every one parses, and those of the toy run. (What else
the pages name: test_documents.py.)"""

from support.settings import make_parser, resolve_settings

import importlib
import inspect
import re
import runpy
import shlex
import sys

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import evaluate
import rlver
import rollout
from documents import MODULES, PAGES, README, ROOT, quoted
from several_ranks import run
from tools import replay


def commands_of(text):
    """The commands of a page, in blocks of code or in a line, as lists of words that begin with the
    script or with -m, or with "torchrun" if its own parser refuses torchrun's own flags."""
    lines = [
        part.strip()
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.S | re.M)
        for line in block.splitlines()
        for part in line.split("&&")
    ]
    for line in [*lines, *quoted(text)]:
        program, *words = shlex.split(line) if re.match("(python|torchrun) ", line) else [""]
        if program == "torchrun":
            try:
                args = torchrun_parser().parse_args(words)
                words = [args.training_script, *args.training_script_args]
            except SystemExit:
                words = ["torchrun", *words]
        if program:
            yield words


# each once, in the order of the pages
COMMANDS = [
    list(command)
    for command in dict.fromkeys(
        tuple(words) for text in PAGES.values() for words in commands_of(text)
    )
]


def of(script):
    return [c[1:] for c in COMMANDS if c[0] == script]


def is_toy(flags):
    """Needs nothing that is not here. (Resuming a run has tests of its own.)"""
    return not {"--model", "--profiles", "--plan", "--resume"} & set(flags) and not any(
        word.startswith(("openai:", "local:")) for word in flags
    )


def test_the_readme_has_its_three_commands_and_ci_runs_them():
    """Install, train, test, a line each. CI installs and tests by these very lines, so that they
    keep working on a bare machine."""
    block = re.search(r"^```\n(.*?)^```$", README, re.S | re.M)[1]
    install, train, test = block.splitlines()
    assert (train, test) == ("python rlver.py --algo grpo --think", "python -m pytest -q")
    patterns = re.findall(r"grep -m1 '(.*?)' README.md", (ROOT / ".ci" / "run").read_text())
    first = [next(x for x in README.splitlines() if re.search(p, x)) for p in patterns]
    assert first == [install, test]


def test_the_dialogue_is_that_of_the_code():
    """README shows `converse` without its docstring. A link leads to the loop."""
    shown = re.search(r"^```python\n(.*?)^```$", README, re.S | re.M)[1]
    source = re.sub(r' +""".*?"""\n', "", inspect.getsource(rollout.converse), flags=re.S)
    assert shown == source and "[`train`](rlver.py#L" in README


def test_links_lead_to_the_lines_of_functions():
    """From an equation to the function: `gae` in line 70 of ppo.py."""
    links = re.findall(r"\[`([\w.]+)`\]\(([\w/]+\.py)#L(\d+)\)", README)
    assert len(links) >= 15
    for name, path, line in links:
        code = (ROOT / path).read_text("utf-8").splitlines()
        begins = re.compile(rf" *(async )?(def|class) {name.split('.')[-1]}\b")
        [number] = [n for n, text in enumerate(code, 1) if begins.match(text)]
        assert number == int(line), (name, number)


def check_flags_of_tool(module, *flags):
    """A tool's parser takes them; or they stand in its own file, or in those that it takes some
    from."""
    tool = importlib.import_module(module)
    if getattr(tool, "make_parser", check_flags_of_tool).__module__ == module:
        tool.make_parser().parse_args(flags)
        return
    path = ROOT / f"{module.replace('.', '/')}.py"
    shared = [ROOT / "tools" / name for name in ("asking.py", "tables.py")]
    sources = "".join(place.read_text("utf-8") for place in (path, *shared))
    for word in flags:
        assert not word.startswith("--") or f'"{word}"' in sources, (module, word)


def test_every_command_parses():
    """A README that names a flag which is gone sends its readers away."""
    assert len(of("rlver.py")) >= 6 and len(of("evaluate.py")) >= 3
    for flags in of("rlver.py"):
        resolve_settings(vars(make_parser().parse_args(flags)))
    for flags in of("evaluate.py"):
        evaluate.make_parser().parse_args(flags)
    assert not of("torchrun")
    for script, *flags in COMMANDS:
        if script == "-m":
            assert flags[0] in ("pytest", "tools") or flags[0] in MODULES, flags
            if flags[0].startswith("tools."):
                check_flags_of_tool(*flags)
        elif script not in ("rlver.py", "evaluate.py"):
            source = (ROOT / script).read_text("utf-8")  # whose parser is inside of main
            for word in flags:
                assert not word.startswith("--") or f'"{word}"' in source, (script, word)


# --------------------------------------------------------------------------------- does it all run?


@pytest.mark.parametrize(
    "flags",
    [  # the README's is usual, its variants are soak
        pytest.param(f, marks=pytest.mark.soak if n else pytest.mark.slow, id=" ".join(f))
        for n, f in enumerate(f for f in of("rlver.py") if is_toy(f))
    ],
)
def test_the_toy_commands_run(flags, tmp_path):
    """As they stand in the README and in docs/, but for fewer steps, dialogues and users."""
    steps = "0" if "0" in flags else "1"
    short = ["--steps", steps, *"--batch-size 16 --eval-size 8 --out".split(), str(tmp_path)]
    assert rlver.main([*flags, *short]) == 0
    assert replay.main(["same-user", str(tmp_path / "dialogues.jsonl")]) == 0


# what a run is made of, with no example of its own; and nano.py, whose flags are argparse's
NO_SCRIPTS = {f"{name}.py" for name in ("emotion nano people rollout simulator".split())}
SCRIPTS = sorted({path.name for path in ROOT.glob("*.py")} - NO_SCRIPTS)
TOOLS = [
    f"tools.{path.stem}"
    for path in sorted((ROOT / "tools").glob("*.py"))
    if "\ndef main(" in path.read_text("utf-8")
]


@pytest.mark.parametrize("script", [*SCRIPTS, *TOOLS])
def test_each_script_answers_help(script, monkeypatch, capsys):
    """--help says in words what the script does; a flag that it does not know is one line. (In this
    process: nine starts of torch would take half a minute.)"""
    is_tool = script in TOOLS
    path = ROOT / (script.replace(".", "/") + ".py" if is_tool else script)
    for flag in ("--help", "--no-such-flag"):
        monkeypatch.setattr(sys, "argv", [str(path), flag])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(path), run_name="__main__")
        told = capsys.readouterr()
        if flag == "--help":
            name = f"python -m {script}" if is_tool else script
            assert end.value.code == 0 and told.out.startswith(f"usage: {name}")
            assert re.search(r"^[A-Z].{40}", told.out, re.M) and not told.err
        else:
            assert end.value.code == 2 and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize("script", ["-m toy.world", "policy.py", "ppo.py", "grpo.py"])
@pytest.mark.slow
def test_each_script_can_be_run_alone(script):
    """`python ppo.py` prints the smallest example of what the file is about."""
    code, out, err = run(*script.split(), timeout=120)
    assert code == 0 and out and not err
