"""What the README and docs/ name is there: every function, file, flag, key, step and link."""

from support.settings import RESUMABLE

import ast
import functools
import importlib
import json
import re

import pytest

import rlver
from documents import MODULES, PAGES, README, ROOT, quoted

METRICS = PAGES["docs/metrics.md"]


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

    name: "ppo.gae", "policy.Policy.forward", "support.metrics", or without a module: then it is a
    name of the module `home`, which was named before it ("read_answer" behind
    "simulator.User.feel"), or "RunDir.save", a method of a class of any module."""
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
        first = ".".join(word.split(".")[: 1 + word.startswith(("support.", "tools.", "toy."))])
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


# --------------------------------------------------------------------- links, files, steps, numbers


def links_of(page):
    """The links of a page within the project, as [path from the root, heading or ""]."""
    folder = (ROOT / page).parent
    links = []
    for target in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not target.startswith("https://"):
            path, _, heading = target.partition("#")
            links.append([(folder / path).resolve().relative_to(ROOT).as_posix(), heading])
    return links


def anchors_of(page):
    """The headings of a page as links name them: "My numbers differ" is "my-numbers-differ"."""
    text = (ROOT / page).read_text(encoding="utf-8")  # links lead to pages of the course, too
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_resolves(page):
    """Also to the heading, if a link names one: a reader would be left at the top of the page."""
    for path, heading in links_of(page):
        assert (ROOT / path).exists(), (page, path)
        assert not heading or heading in anchors_of(path), (page, path, heading)


def test_every_page_is_linked():
    """A page that nothing leads to is not read. All pages are in the index, docs/README.md."""
    in_readme = {path for path, _ in links_of("README.md")}
    in_index = {path for path, _ in links_of("docs/README.md")}
    assert {"docs/README.md", "docs/learning_curve.png"} <= in_readme
    assert set(PAGES) - {"docs/README.md"} <= in_index


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
    comments = " ".join(re.findall(r"^ +# ---- (\d\. .*)$", (ROOT / "rlver.py").read_text(), re.M))
    assert [int(number) for number, _ in steps] == [1, 2, 3, 4, 5, 6]
    for number, name in steps:
        assert re.search(rf"\b{number}\. {name}\b", comments, re.I), name


def test_the_docs_name_what_a_resumed_run_may_change():
    page = PAGES["docs/checkpoints.md"]
    section = page.split("## What may a resumed run change?")[1].split("\n## ")[0]
    for name in RESUMABLE:
        assert f"`--{name.replace('_', '-')}`" in section, name


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
