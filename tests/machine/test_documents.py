"""What the README and docs/ name is there: every function, file, flag, key, step and link."""

from support.settings import REAL, RESUMABLE

import ast
import importlib
import json
import re
from itertools import product

import pytest

from documents import MODULES, PAGES, ROOT, quoted

# ------------------------------------------------------------------------- functions that are named


def named_in(text):
    """What a text names in backticks by its module, "policy.Policy.forward": (module, names)."""
    for word, module in product(quoted(text), MODULES):
        rest = word.removeprefix(module + ".")
        if rest not in (word, "py", "json") and re.fullmatch(r"[A-Za-z_][\w.]*", rest):
            yield module, rest.split(".")


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
            place = folder / path if path else ROOT / page
            links.append([place.resolve().relative_to(ROOT).as_posix(), heading])
    return links


def anchors_of(page):
    """The headings of a page as links name them: "My numbers differ" is "my-numbers-differ"."""
    text = (ROOT / page).read_text("utf-8")  # links lead to pages of the course, too
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
    texts = {page: " ".join(quoted(text)) for page, text in PAGES.items()}
    texts[".ci/run"] = (ROOT / ".ci" / "run").read_text()
    texts["BENCHMARKS.md"] = " ".join(quoted((ROOT / "BENCHMARKS.md").read_text("utf-8")))
    of_a_run = re.compile(r"runs/|results/|checkpoint-000050/")
    for page, text in texts.items():
        for word in text.split():
            if re.fullmatch(r"[\w/-]+(\.py|\.md|\.txt|/)", word) and not of_a_run.match(word):
                at = [ROOT / folder / word for folder in (".", "support", "tests/textbook")]
                assert any(path.exists() for path in at), (page, word)


def test_the_docs_name_what_a_resumed_run_may_change():
    section = " ".join(PAGES["docs/files.md"].split()).split("All settings stay, except")[1]
    for flag in RESUMABLE:
        assert f"`{flag}`" in section, flag


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_the_bill_is_that_of_the_defaults(algo):
    """Questions of the whole run: one for a group's first line, fifteen for a dialogue of eight
    replies, sixteen for one of an evaluation. (Once the page trained with GRPO and priced PPO.)"""
    size = REAL["group_size"][algo]
    step = REAL["batch_size"][algo] // size * (1 + 15 * size)
    bill = f"{REAL['steps'] * step + 2 * 16 * REAL['eval_size']:,}"
    assert f"= {step:,} |" in PAGES["docs/running.md"]
    assert all(f"| {bill} |" in PAGES[page] for page in ("README.md", "docs/running.md"))


def test_a_short_run_of_a_recipe_warms_up_within_it():
    """A real model's rate rises for 50 steps: a page that asks for fewer names the warm-up, too."""
    runs = re.findall(
        r"recipes/(?:one_gpu|qwen7b)\.sh[^`\n]* --steps .*", "\n".join(PAGES.values())
    )
    assert len(runs) >= 4
    for line in runs:
        steps, warmup = (
            int(re.search(rf"--{flag} (\d+)", line)[1]) for flag in ("steps", "warmup")
        )
        assert 4 * warmup <= steps, line


def test_a_page_has_the_flags_of_its_recipe_and_one_row_for_a_command():
    """A KL of 0.02 says little to whom nobody told of the recipe's 0.006; and of two scores of one
    command a reader believes the wrong one."""
    recipe = (ROOT / "recipes" / "smollm2.sh").read_text("utf-8")
    shown = re.findall(r"--(?:kl-coef|temperature) [\d.]+", PAGES["docs/small.md"])
    assert len(shown) == 2 and all(flag in recipe for flag in shown)
    for page, text in PAGES.items():
        rows = re.findall(r"^\| (`[^`]+ -[^`]+`) \|", text, re.M)
        assert len(rows) == len(set(rows)), page


@pytest.mark.slow
def test_the_defects_are_listed_by_number_with_tests_that_are_there():
    """All 28, in order. A test that is named for one is there; and where docstrings name a defect,
    one of those tests is."""
    about = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                about[node.name] = ast.get_docstring(node) or ""
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
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json", "dialogues.jsonl"])
def test_the_glossary_has_every_key(name, whole):
    """docs/files.md explains each key of the files of a run, and none that is not there."""
    text = (whole("ppo") / name).read_text("utf-8")
    row = json.loads(text if name == "summary.json" else text.split("\n")[0])
    page = PAGES["docs/files.md"]
    section = re.search(rf"^## `{re.escape(name)}`$(.*?)(?=^## |\Z)", page, re.S | re.M)[1]
    assert re.search(r"^\| key ", section, re.M)
    explained = re.findall(r"^\|(.*?)\|", section, re.M)  # the first column
    assert set(quoted(" ".join(explained))) == keys_of(row)
