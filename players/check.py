"""players/check.py - the questions to a user's model before the first dialogue. They reveal a wrong
key, and a model that cannot keep the form of an answer or tell kind from cruel.

From top to bottom: the check; its two halves; its user; the models that find out something.
"""

from players.calls import AdaptiveModel, CallLog
from support.answers import PROMPTS
from support.command_line import print_folded
from support.errors import BadInput, BadModel, SimulatorFailed, TooManyLost, UnreadableAnswers

import copy

from people import load_profiles

# What the policy says in the check, in each language, to the user of prompts/*/check.jsonl: a kind
# reply that is to the point, and a cruel one.
CHECK_REPLIES = {
    "en": (
        "I'd like to hear about that roof. Take your time. What keeps you awake?",
        "Nobody cares about you or your roof. You are a ridiculous old woman, so stop moaning.",
    ),
    "zh": (
        "八十六万，是该一样样称清楚。钱、理、情分、各人出过的力，你慢慢摆给我听，我陪你从头掂量。",
        "没人想听你这点破事。为了几个臭钱跟自家人闹，你真不要脸，少来烦我。",
    ),
}


async def check(simulator, with_feelings=True):
    """Ask what must be known before the first dialogue. Logged answers are not used, but for the
    scale of a reader. with_feelings: False for programs that ask the model something else, or
    measure its feelings.

    1. `find_form`: which form of answers the model takes, and whether it keeps it (a script does).
    2. A reader sets its scale. From then on it is asked, and not the user's model.
    3. `compare_feelings`: is a cruel reply felt as worse than a kind one, which is felt the same
       again?

    Returns what was found out, a list with the `findings` of each of `adaptive_models`, for `learn`
    on other ranks. (A simulator of another class is asked nothing.) Raises BadInput if the first
    question is refused, BadModel if no answer can be read, TooManyLost if there is none, and
    SimulatorRefused."""
    if not hasattr(simulator, "caller"):
        return []
    is_scripted = getattr(simulator.caller.model, "is_scripted", False)
    try:
        at_kind = None if is_scripted else await find_form(simulator)
        if simulator.reader:
            await simulator.reader.set_scale()
        if with_feelings and (simulator.reader or not is_scripted):
            await compare_feelings(simulator, at_kind)
    except SimulatorFailed as error:
        raise TooManyLost(str(error)) from None
    return [model.findings() for model in adaptive_models(simulator)]


def learn(simulator, findings):
    """Take over the findings of a check on another rank."""
    for model, attributes in zip(adaptive_models(simulator), findings):
        model.adopt(**attributes)


def print_bill(simulator, cfg, heldout, state):
    """Print how many questions each server behind the users of a run is still asked at most, but for
    those that are asked again, and how many tokens that is by the questions of `check`. cfg: the
    run's Settings; heldout: the profiles of an evaluation; state: of the run."""
    step = max(0, state["step"])  # the last one that is done
    groups = (cfg.steps - step) * cfg.batch_size // cfg.group_size
    done = [scores["step"] for scores in state["evaluations"]]
    evaluations = sum(cfg.evaluates(n) for n in range(step, cfg.steps + 1) if n not in done)
    dialogues = groups * cfg.group_size + evaluations * len(heldout)
    # One first line for each group, and for a profile that brings none; the last reply is not answered.
    lines = groups + dialogues * (cfg.max_turns - 1)
    lines += evaluations * sum(not profile.first_talk.strip() for profile in heldout)
    feelings, models = dialogues * cfg.max_turns, models_of(simulator)
    asked = {"simulator": lines + feelings}
    if reader := getattr(simulator, "reader", None):
        asked = {"simulator": lines, "reader": feelings * len(reader.texts)}
    for part, questions in asked.items():
        if usage := getattr(models[part], "usage", None):  # a server's
            times = questions / usage["answers"] / 1e6
            tokens = (
                f"; by the first ones {times * usage['read']:,.2f} million tokens to read and "
                f"{times * usage['written']:,.2f} to write, and more as dialogues grow"
            )
            print_folded(
                f"Questions to {models[part].name} ({part}): {questions:,} at most, if none is asked "
                f"again{tokens if usage['read'] else ''}."
            )


async def find_form(simulator):
    """Ask the first question in each format of the user's model, the strictest first, until an
    answer can be read. This format is printed, and used from then on. One is given up after a
    refusal of the prompt (a gateway's 404 may mean the form), three unreadable answers in a row, or
    some faults of the server (5xx; some fail at a schema alone); at the last one the run waits for
    the server. (A model that is not on a server has no formats: the prompt alone enforces the
    form.)

    Returns the change of emotion at the kind reply. With a reader the model is asked for the user's
    next line instead; then it is None. Raises BadInput, BadModel or SimulatorFailed."""
    model, problems = simulator.caller.model, []
    formats = getattr(model, "formats", [None])
    for form in formats:
        if form:
            model.adopt(format=form, is_patient=form == formats[-1])
        try:
            if simulator.reader:
                change, _ = None, await user_of_check(simulator).answer()
            else:
                change = await change_at(simulator, CHECK_REPLIES[simulator.lang][0])
        except UnreadableAnswers as error:
            problems.append(error)
            continue
        if form:
            model.adopt(is_patient=True)
        by = form or "the prompt"
        print_folded(f"{simulator.caller.name}: the form of its answers is enforced by {by}.")
        return change
    has_answered = any(type(problem) is UnreadableAnswers for problem in problems)
    # Each problem is named once: often all formats have the same.
    raise (BadModel if has_answered else BadInput)(
        f"{simulator.caller.name} refuses the prompts, or cannot keep the form that they ask for "
        f"({'; '.join(dict.fromkeys(map(str, problems)))}); look at its key and its name, or "
        "choose another model"
    )


async def compare_feelings(simulator, at_kind=None):
    """Print a warning if a cruel reply is not felt as worse than a kind one, or the kind one
    differently the second time. at_kind: the change at the kind one, if that was asked already."""
    kind_reply, cruel_reply = CHECK_REPLIES[simulator.lang]
    reader, doubt = simulator.reader, ""  # what is odd about the changes, in words
    try:
        if at_kind is None:
            at_kind = await change_at(simulator, kind_reply)
        at_cruel = await change_at(simulator, cruel_reply)
        again = await change_at(simulator, kind_reply)
        # a reader, and a model at temperature 0, must say the same twice
        is_fixed = reader or simulator.caller.temperature == 0
        if at_cruel >= at_kind:
            doubt = f"a kind reply moves its user by {at_kind:+d}, a cruel one by {at_cruel:+d}"
        elif is_fixed and again != at_kind:
            doubt = f"the same reply moves its user by {at_kind:+d} and by {again:+d}"
    except UnreadableAnswers as error:
        doubt = str(error)
    if doubt:
        name = (reader or simulator).caller.name
        print_folded(f"warning: {name}: {doubt}. Is it fit? See python -m tools.fitness")


async def change_at(simulator, reply):
    """How far this reply moves the user of the check."""
    _, change = await user_of_check(simulator).feel(reply)
    return change


def user_of_check(simulator):
    """A user in the run's language who has said the first line, and whose answers are not
    logged."""
    [profile] = load_profiles(PROMPTS / simulator.lang / "check.jsonl")
    line = {"speaker": "me", "text": profile.first_talk}
    return simulator.user_class(unlogged(simulator), profile, dialogue=[line])


def unlogged(simulator):
    """A copy with empty logs: an old answer says nothing about the model of today."""
    other = copy.copy(simulator)
    other.reader = copy.copy(simulator.reader)
    for one in filter(None, (other, other.reader)):
        one.caller = copy.copy(one.caller)
        one.caller.log = CallLog()
    other.retries = 2  # a model that can keep the form has done so by then
    return other


def adaptive_models(simulator):
    """What finds out something while it is asked: the user's model, the Reader, the Reader's
    model."""
    models = models_of(simulator)
    asked = models["simulator"], getattr(simulator, "reader", None), models["reader"]
    return [model for model in asked if isinstance(model, AdaptiveModel)]


def models_of(simulator):
    """The user's model and the Reader's model, {"simulator": model, "reader": model}; None for one
    that a simulator lacks, as a simulator of another class may lack both."""
    sides = {"simulator": simulator, "reader": getattr(simulator, "reader", None)}
    return {
        name: getattr(getattr(side, "caller", None), "model", None) for name, side in sides.items()
    }
