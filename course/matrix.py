"""matrix.py - are the tests strong enough? Every exercise's tests are run on its stub, on the
solution, and on the wrong answers of wrong_answers.toml. Only the solution may pass. Likewise every
derivation is checked with its model answer and with the wrong formulas of wrong_derivations.toml.
"""

from patches import HERE, ROOT, exercises, plural, read_toml, replaced
from support.errors import BadInput

import ast
import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from derive import check
from enumerations import DERIVATIONS
from grading import try_out, workers
from handouts import stubs_of
from surgery import find, parses, put, text_of

# The three answers that every exercise has beside its wrong ones.
STUB = "the stub"
SOLVED = "the solution"
ALONE = "the solution, and of the rest only what it needs"


def choose(only):
    """What `--only` names, or everything without it: ({name: exercise}, [name of a derivation]).
    Raises BadInput for an unknown name."""
    if only is None:
        return exercises(), list(DERIVATIONS)
    names = [name.strip() for name in only.split(",")]
    derivations = [name for name in names if name in DERIVATIONS]
    others = [name for name in names if name not in DERIVATIONS]
    if derivations and not others:
        return {}, derivations
    return exercises(",".join(others)), derivations


# ---------------------------------------------------------------------------------------- exercises


class Trial(NamedTuple):
    """The project with one exercise answered in one way, to be tested."""

    exercise: str
    answer: str  # STUB, SOLVED, ALONE, or the name of a wrong answer
    changed: dict  # {file: text}


def matrix(chosen, limit):
    """Run the tests of every exercise on all of its Trials, and print a line for each. limit:
    seconds for one of them. True if only the solutions pass."""
    todo = trials(chosen)
    unexpected = []
    last_name = None

    def run_trial(trial):
        return try_out(trial.exercise, chosen[trial.exercise], trial.changed, limit)

    with workers() as pool:
        for trial, problem in zip(todo, pool.map(run_trial, todo)):
            if trial.exercise != last_name:
                print(f"\n{trial.exercise}: {chosen[trial.exercise]['title']}")
                last_name = trial.exercise
            passed = problem == ""
            as_expected = passed == (trial.answer in (SOLVED, ALONE))
            if not as_expected:
                unexpected.append(f"{trial.exercise}, {trial.answer}")
            prefix = "" if as_expected else "NO: "
            line = f"  {prefix}{trial.answer:<60} {problem or 'passes'}"
            print(line[:200], flush=True)
    summary = "only the solutions pass"
    if unexpected:
        summary = f"not as they should be: {'; '.join(unexpected)}"
    wrong_count = len(todo) - 3 * len(chosen)
    print(f"\n{plural(len(chosen))}, {wrong_count} wrong answers: {summary}")
    return not unexpected


def trials(chosen):
    """All Trials, exercise by exercise: the stub first, then the solution, then the solution in a
    handout in which only this exercise and those that it `needs` are done, then the wrong
    answers."""
    everything = exercises()
    wrong = list(wrong_answers(chosen))

    def with_needs(name):
        return {name}.union(*map(with_needs, everything[name]["needs"]))

    todo = []
    for name, exercise in chosen.items():
        done = with_needs(name)
        not_done = {other: everything[other] for other in everything if other not in done}
        todo.append(Trial(name, STUB, stubs_of({name: exercise})))
        todo.append(Trial(name, SOLVED, {}))
        todo.append(Trial(name, ALONE, stubs_of(not_done)))
        todo += [trial for trial in wrong if trial.exercise == name]
    return todo


def wrong_answers(chosen):
    """Yield a Trial for every wrong answer to the chosen exercises. Raises BadInput for one that no
    longer fits the project's code."""
    for name, answers in read_toml("wrong_answers.toml").items():
        if name not in chosen:
            continue
        exercise = chosen[name]
        source = (ROOT / exercise["file"]).read_text(encoding="utf-8")
        tree = ast.parse(source)
        for answer in answers:
            function = answer.get("function", exercise["functions"][0])
            label = f"wrong_answers.toml, {name}, {answer['name']!r}"
            wrong = replaced(
                text_of(source, find(tree, function)),
                old=answer["old"],
                new=answer["new"],
                change=label,
                place=function,
                advice="the function was edited, so the answer must be",
            )
            if not parses(wrong):
                raise BadInput(f"{label}: does not parse; a wrong answer must run")
            yield Trial(name, answer["name"], {exercise["file"]: put(source, function, wrong)})


# -------------------------------------------------------------------------------------- derivations


def check_derivations(names, limit):
    """Check the model answers and the wrong formulas of the derivations `names`, and print a line
    for each. limit: seconds for one of them. True if only the model answers pass."""
    todo = [(name, "the model answer", text) for name, text in model_answers().items()]
    todo += wrong_formulas()
    todo.sort(key=lambda item: list(DERIVATIONS).index(item[0]))  # a stable sort
    todo = [item for item in todo if item[0] in names]
    unexpected = []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        problems = pool.map(lambda item: check(item[0], item[2], "answer", 0, limit), todo)
        for (name, answer, _), problem in zip(todo, problems):
            is_model = answer == "the model answer"
            if is_model:
                print(f"\n{name}")
            prefix = ""
            if is_model != (problem == ""):
                unexpected.append(f"{name}, {answer}")
                prefix = "NO: "
            print(f"  {prefix}{answer:<60} {problem or 'passes'}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    summary = "only the model answers pass"
    if unexpected:
        summary = f"not as they should be: {'; '.join(unexpected)}"
    wrong_count = len(todo) - len(names)
    print(f"\n{plural(len(names), 'derivation')}, {wrong_count} wrong answers: {summary}")
    return not unexpected


def model_answers():
    """The Python blocks of teacher/derivations.md, {name of the derivation: text}."""
    page = (HERE / "teacher" / "derivations.md").read_text(encoding="utf-8")
    texts = {}
    for section in re.split(r"(?m)^## ", page)[1:]:
        blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", section)
        texts[section.split("\n")[0]] = "\n\n".join(blocks)
    return texts


def wrong_formulas():
    """Every wrong formula of wrong_derivations.toml, as [(derivation, name, text of the file)].
    Raises BadInput for one that no longer fits the model answer."""
    texts = model_answers()
    answers = []
    for derivation, changes in read_toml("wrong_derivations.toml").items():
        for change in changes:
            wrong = replaced(
                texts[derivation],
                old=change["old"],
                new=change["new"],
                change=f"wrong_derivations.toml, {derivation}, {change['name']!r}",
                place="the model answer",
                advice="the model answer was edited, so the wrong one must be",
            )
            answers.append((derivation, change["name"], wrong))
    return answers
