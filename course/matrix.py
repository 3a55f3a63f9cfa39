"""matrix.py - are the tests strong enough? Every exercise's tests are run on its stub, on the
solution, and on the wrong answers of wrong_answers.toml. Only the solution may pass. A wrong
nano.py, which is tried whole, must lose its own check and no other.
"""

from patches import ROOT, exercises, plural, read_toml, replaced

import ast
from typing import NamedTuple

from grading import cases_of, passing, try_out, workers
from handouts import stubs_of
from surgery import find, put, text_of

# The three answers that every exercise has beside its wrong ones.
STUB = "the stub"
SOLVED = "the solution"
ALONE = "the solution, with only the exercises that it needs"


class Trial(NamedTuple):
    """The project with one exercise answered in one way, to be tested."""

    exercise: str
    answer: str  # STUB, SOLVED, ALONE, or the name of a wrong answer
    changed: dict  # {file: text}


def matrix(chosen, limit):
    """Run the tests of every exercise on all of its Trials, and print a line for each. limit:
    seconds for one of them. True if all went as it should."""
    todo = trials(chosen)
    cases = cases_of(chosen)
    unexpected = []
    last_name = None
    whole = {name: exercise for name, exercise in chosen.items() if not exercise["functions"]}

    def run_trial(trial):
        name, is_wrong = trial.exercise, trial.answer not in (SOLVED, ALONE)
        if name in whole and is_wrong and trial.answer != STUB:
            lost = whole.keys() - passing(whole, cases, limit, trial.changed)
            return f"loses {', '.join(sorted(lost)) or 'nothing'}", lost == {name}
        problem = try_out(name, chosen[name], trial.changed, cases[name], limit)
        return problem, bool(problem) == is_wrong

    with workers() as pool:
        for trial, (problem, as_expected) in zip(todo, pool.map(run_trial, todo)):
            if trial.exercise != last_name:
                print(f"\n{trial.exercise}: {chosen[trial.exercise]['title']}")
                last_name = trial.exercise
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
    known = everything | chosen
    wrong = list(wrong_answers(chosen))

    def with_needs(name):
        return {name}.union(*map(with_needs, known[name]["needs"]))

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
            function = answer.get("function", *exercise["functions"][:1])  # None: the whole file
            label = f"wrong_answers.toml, {name}, {answer['name']!r}"
            wrong = replaced(
                text_of(source, find(tree, function)) if function else source,
                old=answer["old"],
                new=answer["new"],
                change=label,
                place=function or exercise["file"],
                advice="the function was edited, so the answer must be",
            )
            ast.parse(wrong)  # a wrong answer must run, or its rejection says nothing
            changed = put(source, function, wrong) if function else wrong
            yield Trial(name, answer["name"], {exercise["file"]: changed})
