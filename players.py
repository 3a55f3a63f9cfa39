"""players.py - which model plays the users: a script, a model on a server or one in this process.
With a reader (reader.py) that model only speaks, and a second one hears.
"""

from support.command_line import SCRIPTED, split_name
from support.errors import BadInput
from support.files import digest
from support.servers import ServerModel

from functools import partial

from simulator import Simulator
from toy import world


def make_simulator(
    name,
    lang="en",
    difficulty="vanilla",
    *,
    concurrency=64,
    timeout=60.0,
    temperature=0.0,
    flag="--simulator",
    reader=None,
    template_args=None,
    retries=8,
    **shared,
):
    """The Simulator over the model `name`: toy, toy-weak (can be hacked), openai:MODEL@URL or
    local:DIR; None where only a reader is asked. flag: the flag that named it, for messages;
    reader: the name of the model that hears for the user; template_args: for its chat template;
    retries: of Simulator; shared: a Caller's log and clock. Raises BadInput."""
    kind, model, url = split_name(name or "toy")
    if name in SCRIPTED and lang != "en":
        raise BadInput(f"--lang {lang}: the scripted user of {flag} {name} speaks English only")
    if name in (None, *SCRIPTED):
        llm = world.ScriptedModel(difficulty, weak=name == "toy-weak")
    elif kind == "openai":
        llm = ServerModel(model, url, temperature, timeout)
    elif kind == "local" and model:
        from local import load_local  # here, because it loads torch

        llm = load_local(model, temperature, flag)
    else:
        raise BadInput(
            f"{flag} {name}: unknown; choose {', '.join(SCRIPTED)}, openai:MODEL@URL or local:DIR"
        )
    make = Simulator
    if reader:
        from reader import ReadSimulator, make_reader  # here, because most runs have none

        hearing_model = make_reader(
            reader, lang, difficulty, timeout, template_args, concurrency=concurrency, **shared
        )
        make = partial(ReadSimulator, reader=hearing_model)
    if kind == "openai":  # a script never waits, and an engine has a queue of its own
        shared["concurrency"] = concurrency
    return make(llm, lang=lang, difficulty=difficulty, retries=retries, **shared)


def simulator_of_run(cfg, log, clock):
    """The Simulator that a run's Settings `cfg` ask for."""
    return make_simulator(
        cfg.simulator,
        cfg.lang,
        cfg.difficulty,
        concurrency=cfg.simulator_concurrency or cfg.batch_size,
        timeout=cfg.simulator_timeout,
        temperature=cfg.simulator_temperature,
        reader=cfg.reader,
        template_args=cfg.template_args,
        log=log,
        clock=clock,
    )


def digest_of_templates(policy, simulator):
    """A digest of what the chat templates of this process write: of the `policy` (whatever has its
    `chat`), of the user's model and of the reader. A template may write today's date. (A simulator
    of another class need not have these attributes.)"""
    model, reader = (getattr(simulator, name, None) for name in ("model", "reader"))
    models = policy, model, getattr(reader, "source", None)
    chats = [getattr(one, "chat", None) for one in models]  # of a ServerModel it is a function
    return digest([chat.rendered for chat in chats if hasattr(chat, "rendered")])
