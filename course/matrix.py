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
    everything = exercises()
    for name in names:
        if name not in everything and name not in DERIVATIONS:
            raise BadInput(
                f"--only {only}: there is no exercise or derivation {name!r}; there are "
                f"{', '.join([*everything, *DERIVATIONS])}"
            )
    chosen = {name: exercise for name, exercise in everything.items() if name in names}
    return chosen, [name for name in DERIVATIONS if name in names]


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


MODEL = "the model answer"


class Formulas(NamedTuple):
    """A derivation answered in one way."""

    derivation: str
    answer: str  # MODEL, or the name of a wrong answer
    text: str  # of the file


def formulas_of(names):
    """The Formulas of the derivations `names`: of each the model answer first, then the wrong ones.
    Raises BadInput."""
    if not names:
        return []
    models = [Formulas(name, MODEL, text) for name, text in model_answers().items()]
    wrong = wrong_formulas()
    return [item for name in names for item in models + wrong if item.derivation == name]


def check_derivations(todo, limit):
    """Check the Formulas in `todo`, and print a line for each. limit: seconds for one of them. True
    if only the model answers pass."""
    unexpected = []

    def problem_of(formulas):
        return check(formulas.derivation, formulas.text, file="answer", seed=0, limit=limit)

    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        for formulas, problem in zip(todo, pool.map(problem_of, todo)):
            is_model = formulas.answer == MODEL
            if is_model:
                print(f"\n{formulas.derivation}")
            prefix = ""
            if is_model != (problem == ""):
                unexpected.append(f"{formulas.derivation}, {formulas.answer}")
                prefix = "NO: "
            print(f"  {prefix}{formulas.answer:<60} {problem or 'passes'}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    summary = "only the model answers pass"
    if unexpected:
        summary = f"not as they should be: {'; '.join(unexpected)}"
    count = len({formulas.derivation for formulas in todo})
    wrong_count = len(todo) - count
    print(f"\n{plural(count, 'derivation')}, {wrong_count} wrong answers: {summary}")
    return not unexpected


def model_answers():
    """The Python blocks of teacher/derivations.md, {name of the derivation: text}. Raises BadInput
    where that page is missing: students get the project without it."""
    path = HERE / "teacher" / "derivations.md"
    try:
        page = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"{path}: cannot be read ({error.strerror}), and it has the model answers; without it "
            "name exercises alone with --only"
        ) from None
    texts = {}
    for section in re.split(r"(?m)^## ", page)[1:]:
        blocks = re.findall(r"(?ms)^```python\n(.*?)^```$", section)
        texts[section.split("\n")[0]] = "\n\n".join(blocks)
    return texts


def wrong_formulas():
    """The Formulas of wrong_derivations.toml. Raises BadInput for one that no longer fits the model
    answer."""
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
            answers.append(Formulas(derivation, change["name"], wrong))
    return answers
