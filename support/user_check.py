"""support/user_check.py - the questions to a user's model before the first dialogue. They reveal a
wrong key, and a model that cannot keep the form of an answer or tell kind from cruel.
"""

from support.calls import AdaptiveModel
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


async def check(simulator, with_feelings=True):  # noqa: C901 - the questions, from top to bottom
    """Ask three questions before the first dialogue: what does a person feel at a kind reply, at a
    cruel one, and at the kind one again? Logged answers are not used. with_feelings: False for
    programs that ask the model something else, or measure its feelings: they need no step 3.

    1. The first question reveals a wrong key or model, and a model that cannot keep the form. A
       server is asked in each of its formats, the strictest first. A format is given up after a
       refusal (a gateway's 404 may mean the form), three unreadable answers in a row, or some
       faults of the server (5xx; some fail at a schema alone). The last one is waited for. The
       first format that brings a readable answer is printed, and used from then on. A scripted
       model needs no check. With a reader the model is asked for the person's next line instead.
    2. A reader sets its scale. Then it is asked all three questions.
    3. A warning is printed if the cruel reply is not felt as worse than the kind one, or the kind
       one differently the second time.

    Raises BadInput if the first question is refused, BadModel if no answer can be read, TooManyLost
    if there is none, and SimulatorRefused. Returns what was found out, for `learn` on other
    ranks."""
    model, reader = simulator.model, simulator.reader
    kind_reply, cruel_reply = CHECK_REPLIES[simulator.lang]
    # A model may be any async function: what it does not say of itself has the usual value.
    is_scripted = getattr(model, "is_scripted", False)
    formats = [] if is_scripted else getattr(model, "formats", [None])
    problems = []  # one for each format that was given up

    async def change_at(reply):
        _, change = await simulator.unlogged().example().feel(reply)
        return change

    try:
        # ---- 1. The form.
        for form in formats:
            if form:
                model.adopt(format=form, is_patient=form == formats[-1])
            try:
                if reader:
                    await simulator.unlogged().example().answer()
                else:
                    at_kind = await change_at(kind_reply)
            except (UnreadableAnswers, SimulatorRefused) as error:
                problems.append(error)
                continue
            if form:
                model.adopt(is_patient=True)
            by = form or "the prompt"
            print_folded(f"{simulator.name}: the form of its answers is enforced by {by}.")
            break
        if formats and len(problems) == len(formats):
            has_answered = any(type(problem) is UnreadableAnswers for problem in problems)
            # Each problem is named once: often all formats have the same.
            raise (BadModel if has_answered else BadInput)(
                f"{simulator.name} refuses the prompts, or cannot keep the form that they ask for "
                f"({'; '.join(dict.fromkeys(map(str, problems)))}); look at its key and its name, "
                "or choose another model"
            )

        # ---- 2. The reader.
        if reader:
            await reader.set_scale()
        if not with_feelings or not (formats or reader):
            return []

        # ---- 3. Kind against cruel, and kind again.
        doubt = ""  # what is odd about the changes, in words
        try:
            if reader:
                at_kind = await change_at(kind_reply)
            at_cruel, again = await change_at(cruel_reply), await change_at(kind_reply)
            # a reader, and a model at temperature 0, must say the same twice
            is_fixed = reader or getattr(model, "temperature", None) == 0
            if at_cruel >= at_kind:
                doubt = (
                    f"a kind reply moves its person by {at_kind:+d}, a cruel one by {at_cruel:+d}"
                )
            elif is_fixed and again != at_kind:
                doubt = f"one reply moves its person by {at_kind:+d} and by {again:+d}, at temperature 0"
        except UnreadableAnswers as error:
            doubt = str(error)
    except SimulatorFailed as error:
        raise TooManyLost(str(error)) from None
    if doubt:
        name = (reader or simulator).name
        print_folded(f"warning: {name}: {doubt}. Is it fit? See python -m tools.fitness")
    return [model.findings() for model in adaptive_models(simulator)]


def learn(simulator, findings):
    """Take over what `check` has found out on another rank."""
    for model, attributes in zip(adaptive_models(simulator), findings):
        model.adopt(**attributes)


def adaptive_models(simulator):
    """The models of a simulator that find out something while they are asked."""
    reader = simulator.reader
    models = simulator.model, reader, getattr(reader, "source", None)
    return [model for model in models if isinstance(model, AdaptiveModel)]
