"""What the README and docs/ name is there: every function, file, flag, key, step and link."""

from support.settings import RESUMABLE

import ast
import importlib
import json
import re
from itertools import product

import pytest

import rlver
from documents import MODULES, PAGES, ROOT, quoted

METRICS = PAGES["docs/troubleshooting.md"]


# ------------------------------------------------------------------------- functions that are named


def named_in(text):
    """What a text names in backticks by its module, "policy.Policy.forward": (module, names)."""
    for word, module in product(quoted(text), MODULES):
        rest = word.removeprefix(module + ".")
        if rest not in (word, "py", "json") and re.fullmatch(r"[A-Za-z_][\w.]*", rest):
            yield module, rest.split(".")


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


def test_every_function_that_a_page_names_is_there():
    """The tables lead from an equation to a function; a renamed function must not leave them
    pointing nowhere. (A field of a class that has no default is no attribute of it.)"""
    named = [found for text in PAGES.values() for found in named_in(text)]
    assert len(named) >= 40
    for module, names in named:
        thing = importlib.import_module(module)
        for name in names:
            fields = getattr(thing, "__dataclass_fields__", {})
            assert hasattr(thing, name) or name in fields, (module, names)
            thing = getattr(thing, name, None)


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
        is_line = re.fullmatch(r"L\d+", heading)  # test_readme.py knows which one
        assert not heading or is_line or heading in anchors_of(path), (page, path, heading)


def test_every_page_is_linked():
    """A page that nothing leads to is not read. The README lists all of them."""
    in_readme = {path for path, _ in links_of("README.md")}
    assert {*PAGES, "docs/learning_curve.png"} - {"README.md"} <= in_readme


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
                at = [ROOT / folder / word for folder in (".", "support", "tests/textbook")]
                of_a_run = word == "checkpoint-000050/"
                assert any(p.exists() for p in at) or of_a_run, (page, word)


def test_the_docs_name_what_a_resumed_run_may_change():
    section = PAGES["docs/running.md"].split("It keeps its settings but for these:")[1]
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
    """docs/troubleshooting.md explains each key of the files of a run, and none that is not there."""
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
