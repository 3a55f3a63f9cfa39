"""What the README and docs/ say: every command parses, and those of the toy run; every function,
file, flag, key and link that they name is there."""

from support.settings import Settings, make_parser, resolve_settings

import ast
import dataclasses
import functools
import importlib
import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser as torchrun_parser

import evaluate
import rlver
from tools import replay
from tools.__main__ import tools

ROOT = Path(__file__).resolve().parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    "README.md": README,
    **{
        f"docs/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "docs").glob("*.md"))
    },
}
METRICS = PAGES["docs/metrics.md"]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in (ROOT, ROOT / "support", ROOT / "tools")
    for path in folder.glob("[a-z]*.py")
}


def quoted(text):
    """What stands in `backticks`, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\n.*?^```$", "", text, flags=re.S | re.M))


def commands_of(text):
    """The commands of a page, in blocks of code or in a line, as lists of words that begin with the
    script or with -m, or with "torchrun" if its own parser refuses torchrun's own flags."""
    lines = [
        part.strip()
        for block in re.findall(r"^```\n(.*?)^```$", text, re.S | re.M)
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


def test_the_readme_has_its_two_lines_and_ci_runs_the_second():
    """Two commands do all of their own set-up; CI calls the one that tests, so that it keeps
    working on a bare machine. What only tests need, the first does not install."""
    lines = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert [line.split("&& ")[-1] for line in lines] == [
        "python rlver.py --algo grpo --think",
        "python -m pytest -q",
    ]
    ci = (ROOT / ".ci" / "run").read_text()
    pattern = re.search(r"grep -m1 '(.*?)'", ci).group(1)
    assert [line for line in README.splitlines() if re.search(pattern, line)] == lines[1:]
    needs = [re.search(r"pip install -q -r (\S+) ", line).group(1) for line in lines]
    run, test = ((ROOT / name).read_text().split() for name in needs)
    assert "pytest" in test and "pytest" not in run and f"-r {needs[0]}" in " ".join(test)
    assert needs[1] in ci


def check_flags_of_tool(module, *flags):
    """A tool's parser takes them; or they stand in its own file, or in those that it takes some
    from."""
    tool = importlib.import_module(module)
    if getattr(tool, "make_parser", check_flags_of_tool).__module__ == module:
        tool.make_parser().parse_args(flags)
        return
    path = ROOT / f"{module.replace('.', '/')}.py"
    shared = [ROOT / "tools" / name for name in ("judge.py", "hearing.py", "tables.py")]
    sources = "".join(place.read_text(encoding="utf-8") for place in (path, *shared))
    for word in flags:
        assert not word.startswith("--") or f'"{word}"' in sources, (module, word)


def test_every_command_parses():
    """A README that names a flag which is gone sends its readers away."""
    assert len(of("rlver.py")) >= 6 and len(of("evaluate.py")) >= 6
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
            source = (ROOT / script).read_text(encoding="utf-8")  # whose parser is inside of main
            for word in flags:
                assert not word.startswith("--") or f'"{word}"' in source, (script, word)


# ------------------------------------------------------------------------- functions that are named


class NoSuchName(Exception):
    pass


def attribute(thing, name):
    """thing.name; of a class also a field that has no default and so is no attribute of it."""
    try:
        return getattr(thing, name)
    except AttributeError:
        if name in getattr(thing, "__dataclass_fields__", {}):
            return None
        raise NoSuchName(name) from None


def resolve(name, home=None):
    """Find what `name` names. Returns the module that it was found in; raises NoSuchName.

    name: "ppo.gae", "policy.Policy.forward", "support.signs", or without a module: then it is a
    name of the module `home`, which was named before it ("parse_emotion" behind
    "simulator.User.feel"), or "Trainer.evaluate", a method of a class of any module."""
    parts = name.split(".")
    module = next((".".join(parts[:k]) for k in (2, 1) if ".".join(parts[:k]) in MODULES), None)
    if module:
        parts = parts[module.count(".") + 1 :]
    elif home and hasattr(importlib.import_module(home), parts[0]):
        module = home
    elif len(parts) > 1:
        module = next(
            (m for m in sorted(MODULES) if hasattr(importlib.import_module(m), parts[0])), None
        )
    if not module:
        raise NoSuchName(name)
    functools.reduce(attribute, parts, importlib.import_module(module))
    return module


def resolve_all(words, strict):
    """Resolve the names among `words`, a cell of a table or the whole text of a page, in their
    order. strict: a name without a module must be one too; else only names that begin with a module
    or a class are looked at. Returns how many were."""
    home, count = None, 0
    for word in words:
        if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", word) or word.endswith(
            (".py", ".md", ".txt", ".json", ".jsonl")
        ):
            continue
        first = ".".join(word.split(".")[: 1 + word.startswith(("support.", "tools."))])
        if strict or "." in word and (first in MODULES or re.match("[A-Z][a-z]", word)):
            home, count = resolve(word, home), count + 1
    return count


def cells(text, header):
    """The cells of all columns headed `header` in the tables of a page."""
    column = None
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line[:1] == "|" else []
        if header in row:
            column = row.index(header)
        elif not row:
            column = None
        elif column is not None and not set(line) <= set("|-"):
            yield row[column]


def test_every_function_that_the_readme_names_is_there():
    """The tables lead from an equation to a function; a renamed function must not leave them
    pointing nowhere. In the text the same goes for what is named with its module or its class."""
    named = [quoted(cell) for cell in cells(README, "function")]
    assert len(named) >= 12 and all(resolve_all(words, strict=True) for words in named)
    named = [quoted(cell) for cell in cells(PAGES["docs/differences.md"], "here")]
    assert sum(resolve_all([w for w in words if "." in w], strict=True) for words in named) >= 15
    assert sum(resolve_all(quoted(text), strict=False) for text in PAGES.values()) >= 40


@pytest.mark.parametrize(
    "cell",
    [
        "`ppo.gea`",
        "`gae`",
        "`policy.Policy.forwards`",
        "`policy.Polices.forward`",
        "`simulator.User.feels`",
        "`simulator.User.feel`, `parse_emotions`",
        "`Trainer.evaluated`",
        "`Trainers.evaluate`",
        "`support.sign.signs`",
        "`support.signs.sign`",
        "`policy.Batch.mask`",
        "`grpo.group_advantages`, `policy_loss`",
    ],
)
def test_a_misspelt_name_is_found(cell):
    """The last one is in ppo.py, not in the module that was named before it."""
    with pytest.raises(NoSuchName):
        resolve_all(quoted(cell), strict=True)


def test_methods_and_bare_names_are_resolved():
    words = [
        "simulator.User.feel",
        "parse_emotion",
        "User.answer",
        "policy.Batch.action_mask",
        "tree_mask",
        "Trainer.evaluate",
        "support.signs.signs",
        "support.plan",
    ]
    assert resolve_all(words, strict=True) == len(words)
    assert resolve("Trainer.evaluate") == "rlver" and resolve("tree_mask", "policy") == "policy"


# --------------------------------------------------------------------- links, files, steps, numbers


def test_every_page_is_linked_and_every_link_resolves():
    """A page that nothing leads to is not read."""
    for page, text in PAGES.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            assert target.startswith("https://") or ((ROOT / page).parent / target).exists(), target
    linked = set(re.findall(r"\]\(([^)\s]+)\)", README))
    assert set(PAGES) - {"README.md"} <= linked and "docs/learning_curve.png" in linked


def test_every_file_that_is_named_is_there():
    for page, text in [
        *PAGES.items(),
        (".ci/run", (ROOT / ".ci" / "run").read_text()),
        ("BENCHMARKS.md", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")),
    ]:
        words = text.split() if page == ".ci/run" else " ".join(quoted(text)).split()
        for word in words:
            if re.fullmatch(r"[\w/-]+(\.py|\.md|\.txt|/)", word) and not word.startswith(
                ("runs/", "results/")
            ):
                at = [ROOT / word, ROOT / "support" / word]
                of_a_run = word in ("checkpoint-000050/", "tensorboard/")
                assert any(p.exists() for p in at) or of_a_run, (page, word)


def test_the_readme_is_short_enough_to_be_read():
    """Lines of text end at 100 columns; a command is one line, however long."""
    lines = README.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 100 and not line.startswith("python3 ")]


def test_the_numbered_steps_are_those_of_the_code():
    """Each step of the README is a comment above the code that does it."""
    steps = re.findall(r"^(\d)\. \*\*([\w ]+)", README, re.M)
    comments = " ".join(re.findall(r"^ +# (\d\. .*)$", (ROOT / "rlver.py").read_text(), re.M))
    assert [int(number) for number, _ in steps] == [1, 2, 3, 4, 5, 6]
    for number, name in steps:
        assert re.search(rf"\b{number}\. {name}\b", comments, re.I), name


def test_the_docs_name_what_a_resumed_run_may_change():
    section = PAGES["docs/gpus.md"].split("## Checkpoints")[1]
    for setting in dataclasses.fields(Settings):
        if setting.metadata["resumable"]:
            assert f"`--{setting.name.replace('_', '-')}`" in section, setting.name


@pytest.mark.slow
def test_the_defects_are_listed_by_number_with_tests_that_are_there():
    """All 28, in order. A test that is named for one is there; and where docstrings name a defect,
    one of those tests is."""
    about = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        about |= {
            node.name: ast.get_docstring(node) or ""
            for node in tree.body
            if isinstance(node, ast.FunctionDef)
        }
    rows = re.findall(r"^\| (\d+) \|.*\| (.*?) \|$", PAGES["docs/differences.md"], re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 29))
    for number, cell in rows:
        tests = quoted(cell)
        assert set(tests) <= set(about) and (tests or cell == "-"), (number, cell)
        named = {
            name for name, text in about.items() if re.search(rf"\bdefect {number}\b", text, re.I)
        }
        assert not named or named & set(tests), (number, named)


def test_references_explain_every_name_with_a_year():
    """ "Shao 2024" says nothing to who has not read it."""
    explained = set(re.findall(r"^\| ([A-Z]\w+ \d{4}) \|", PAGES["docs/references.md"], re.M))
    chapters = [
        path.read_text(encoding="utf-8")
        for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py"), *ROOT.glob("course/*.md")]
    ]
    named = re.findall(
        r"\b(Schulman|Shao|Yao et al\.|Gao|Li) (\d{4})", " ".join([*PAGES.values(), *chapters])
    )
    named = {f"{name.removesuffix(' et al.')} {year}" for name, year in named}
    assert len(named) >= 7 and named <= explained


def test_every_defect_that_tests_name_is_in_the_table():
    tests = " ".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    named = {
        int(number)
        for numbers in re.findall(r"\bdefects? ([\d, ]+)", tests, re.I)
        for number in re.findall(r"\d+", numbers)
    }
    listed = {
        int(number)
        for numbers in re.findall(r" \(([\d, ]+)\)", PAGES["docs/differences.md"])
        for number in numbers.split(",")
    }
    assert len(named) > 10 and named <= listed


def keys_of(value):
    """The keys of a JSON value, at any depth."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return set(value if isinstance(value, dict) else ()).union(*map(keys_of, inner))


@pytest.mark.slow
def test_the_glossary_has_every_key(tiny_dir, tmp_path):
    """docs/metrics.md explains each key of the files of a run, and none that is not there."""
    flags = (
        "--algo ppo --steps 1 --batch-size 4 --max-turns 2 --max-tokens 4 --eval-size 2 "
        "--minibatches 1"
    ).split()
    assert rlver.main(["--model", str(tiny_dir), *flags, "--out", str(tmp_path / "run")]) == 0
    for name in ("metrics.jsonl", "summary.json", "dialogues.jsonl"):
        text = (tmp_path / "run" / name).read_text(encoding="utf-8")
        row = json.loads(text if name == "summary.json" else text.split("\n")[0])
        section = re.search(rf"^## `{re.escape(name)}`$(.*?)(?=^## |\Z)", METRICS, re.S | re.M)
        explained = {key for cell in cells(section.group(1), "key") for key in quoted(cell)}
        assert explained == keys_of(row), name


# --------------------------------------------------------------------------------- does it all run?


@pytest.mark.parametrize(
    "flags",
    [  # the first two are usual, their variants are soak
        pytest.param(f, marks=pytest.mark.slow if n < 2 else pytest.mark.soak, id=" ".join(f))
        for n, f in enumerate(f for f in of("rlver.py") if is_toy(f))
    ],
)
def test_the_toy_commands_run(flags, tmp_path):
    """As they stand in the README and in docs/, but for fewer steps, dialogues and users."""
    short = [
        "--steps",
        "0" if "0" in flags else "1",
        "--batch-size",
        "16",
        "--eval-size",
        "8",
        "--out",
        str(tmp_path / "run"),
    ]
    assert rlver.main([*flags, *short]) == 0
    assert replay.main([str(tmp_path / "run" / "dialogues.jsonl")]) == 0


NO_SCRIPTS = {"engine.py", "models.py"}  # what a run is made of, with no example of its own
SCRIPTS = sorted({path.name for path in ROOT.glob("*.py")} - NO_SCRIPTS)
TOOLS = sorted(f"tools.{name}" for name in tools())


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


@pytest.mark.parametrize("script", ["toy.py", "policy.py", "ppo.py", "grpo.py"])
@pytest.mark.slow
def test_each_script_can_be_run_alone(script):
    """`python ppo.py` prints the smallest example of what the file is about."""
    done = subprocess.run(
        [sys.executable, script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout and not done.stderr


@pytest.mark.slow
def test_the_benchmark_compares_like_with_like():
    """The ratio of packed to one row a turn means something only if both train the very same
    tokens. What one row a turn costs is the history, again and again. (How long either takes is no
    test: this machine may be busy.)"""
    sys.path.insert(0, str(ROOT / "tests"))
    import bench
    from policy import Episode, Segment, pack

    episode = Episode("p", 0, "")
    episode.segments = [
        Segment([1, 2]),
        Segment([3, 4], 1, [0.0, 0.0]),
        Segment([5]),
        Segment([6]),
        Segment([7], 2, [0.0]),
    ]
    rows = bench.rows_per_turn(episode)
    assert [[s.ids for s in row.segments] for row in rows] == [
        [[1, 2], [3, 4]],
        [[1, 2, 5, 6], [7]],
    ]
    trained = [batch.ids[batch.action_mask].tolist() for batch in (pack([episode]), pack(rows))]
    assert trained == [[3, 4, 7], [3, 4, 7]]
    result = bench.bench(False, dialogues=4, repeats=1)
    assert 0 < 2 * result["packed_tokens"] < result["rows_tokens"]


def test_a_comparison_with_trl_needs_trl(monkeypatch, tmp_path, capsys):
    """One line that says how to get it."""
    import bench
    import bench_trl

    monkeypatch.setattr(bench_trl, "PYTHON", tmp_path / "python")
    monkeypatch.setattr(sys, "argv", ["bench.py", "--trl"])
    with pytest.raises(SystemExit) as end:
        bench.main()
    told = capsys.readouterr()
    assert end.value.code == 2 and not told.out and told.err.count("\n") == 1
    assert "python3 -m venv .venv-trl && .venv-trl/bin/pip install" in told.err
