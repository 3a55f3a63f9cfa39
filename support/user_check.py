"""support/user_check.py - the questions to a user's model before the first dialogue. They reveal a
wrong key, and a model that cannot keep the form of an answer or tell kind from cruel.
"""

from support.command_line import print_folded
from support.errors import (
    BadInput,
    BadModel,
    SimulatorFailed,
    SimulatorRefused,
    TooManyLost,
    UnreadableAnswers,
)

# What the friend says in the questions of `check`, in each language, to the first person of
# prompts/profiles: a kind reply that is to the point, and a cruel one.
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

# What a ServerModel finds out about its server while it is asked (support/servers.py).
LEARNT = ("format", "limit", "temperature", "replaced", "most_tokens", "has_answered")


async def check_form(simulator):
    """The first question of `check`, for all programs that ask the model. It reveals a wrong key or
    model, and a model that cannot keep the form. A server is asked in each of its formats, the
    strictest first. A format is given up after a refusal (a gateway's 404 may mean the form), three
    unreadable answers in a row, or some faults of the server (5xx; some fail at a schema alone). The
    last one is waited for. The first format that brings a readable answer is printed, and used
    from then on.

    Returns the change of emotion in the answer; None for a scripted model, which needs no
    check, and with a reader, which is not asked here. Raises BadInput if the question is
    refused, BadModel if no answer can be read, and TooManyLost if there is none."""
    model, problems = simulator.model, []
    # A model may be any async function: what it does not say of itself has the usual value.
    if getattr(model, "is_scripted", False):
        return None
    for form in getattr(model, "formats", ["the prompt"]):
        model.format, model.is_patient = form, form == "text"
        user, change = simulator.unlogged().example(), None
        try:
            if simulator.reader:
                await user.answer()
            else:
                _, change = await user.feel(CHECK_REPLIES[simulator.lang][0])
            print_folded(f"{simulator.name}: the form of its answers is enforced by {form}.")
            model.is_patient = True
            return change
        except (UnreadableAnswers, SimulatorRefused) as error:
            problems.append(error)
        except SimulatorFailed as error:
            raise TooManyLost(str(error)) from None
    answered = any(type(problem) is UnreadableAnswers for problem in problems)
    # Each problem is told once: often all forms have the same.
    raise (BadModel if answered else BadInput)(
        f"{simulator.name} refuses the prompts, or cannot keep the form that they ask for "
        f"({'; '.join(dict.fromkeys(map(str, problems)))}); look at its key and its name, or "
        "choose another model"
    )


async def check(simulator):
    """Ask three questions before the first dialogue: what does a person feel at a kind reply, at a
    cruel one, and at the kind one again? A warning is printed if the model does not tell them
    apart, or if it feels something else the second time.

    Returns what was found out, {attribute of the model: value}, and with a reader its "scale" and
    the same of its "source", for `Simulator.learn` on other ranks. Raises as `check_form`, and
    SimulatorRefused."""
    at_kind = await check_form(simulator)
    if at_kind is None and not simulator.reader:
        return {}
    kind_reply, cruel_reply = CHECK_REPLIES[simulator.lang]
    doubt = ""  # what is odd about the changes, in words

    async def change_at(reply):
        _, change = await simulator.unlogged().example().feel(reply)
        return change

    try:
        if simulator.reader:  # which was not asked by `check_form`
            await simulator.check_reader()
            at_kind = await change_at(kind_reply)
        at_cruel, again = await change_at(cruel_reply), await change_at(kind_reply)
        # a reader, and a model at temperature 0, must say the same twice
        is_fixed = simulator.reader or getattr(simulator.model, "temperature", None) == 0
        if at_cruel >= at_kind:
            doubt = f"a kind reply moves its person by {at_kind:+d}, a cruel one by {at_cruel:+d}"
        elif is_fixed and again != at_kind:
            doubt = (
                f"one reply moves its person by {at_kind:+d} and by {again:+d}, at temperature 0"
            )
    except UnreadableAnswers as error:
        doubt = str(error)
    except SimulatorFailed as error:
        raise TooManyLost(str(error)) from None
    if doubt:
        name = (simulator.reader or simulator).name
        print_folded(f"warning: {name}: {doubt}. Is it fit? See python -m tools.fitness")
    found = learnt(simulator.model)
    if simulator.reader:
        found["scale"], found["source"] = simulator.reader.scale, learnt(simulator.reader.source)
    return found


def learnt(model):
    """{attribute of a model: value}, those of LEARNT that it has."""
    return {name: value for name, value in vars(model).items() if name in LEARNT}
