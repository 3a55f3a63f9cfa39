"""players/users.py - which model plays the users: a script, a model on a server or in this process.
With a reader (players/reader.py) that model only speaks, and a second one reads the replies.

From top to bottom: the Simulator of a run; of any program; its language model; its texts; which
profiles it can play.
"""

from players.calls import Caller
from players.check import models_of
from support.command_line import SCRIPTED, split_name
from support.errors import BadInput
from support.files import digest

from simulator import RETRIES, Simulator
from toy import world


def simulator_of_run(cfg, log, clock, find=None):
    """The Simulator that a run's Settings `cfg` ask for. find: see `make_simulator`."""
    return make_simulator(
        cfg.simulator,
        cfg.lang,
        cfg.difficulty,
        concurrency=cfg.simulator_concurrency or cfg.batch_size,
        timeout=cfg.simulator_timeout,
        temperature=cfg.simulator_temperature,
        reader=cfg.reader,
        template_args=cfg.template_args,
        find=find,
        log=log,
        clock=clock,
    )


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
    retries=RETRIES,
    find=None,
    **shared,
):
    """The Simulator whose users the model `name` plays: toy, toy-weak (can be hacked),
    openai:MODEL@URL or local:DIR; None where only a reader is asked.

    concurrency     calls to a server at the same time, at most
    timeout         seconds of one try of a call to a server
    flag            the flag that named the model, for messages
    reader          the name of the reader's model, if there is one
    template_args   of the chat template of the reader's model
    retries         of Simulator
    find            a function that finds a model by its name; None: `language_model`
    shared          the log and the clock of a Caller

    Raises BadInput."""
    find = find or language_model
    if name in SCRIPTED and lang != "en":
        raise BadInput(f"--lang {lang}: the scripted user of {flag} {name} speaks English only")
    if name in (None, *SCRIPTED):
        llm = world.ScriptedModel(difficulty, weak=name == "toy-weak")
    else:
        llm = find(name, flag, temperature, timeout)
    # a script never waits, and an engine has a queue of its own
    bound = concurrency if (name or "").startswith("openai:") else None
    simulator = Simulator(Caller(llm, concurrency=bound, **shared), lang, difficulty, retries)
    if reader:
        from players.reader import WORDS, Reader, ReadUser  # here, because most runs have none

        if difficulty != "vanilla":
            raise BadInput(f"--reader reads for vanilla users, not for --difficulty {difficulty}")
        source = find(reader, "--reader", 1.0, timeout, template_args, WORDS[lang])
        simulator.reader = Reader(source, lang, concurrency=concurrency, **shared)
        simulator.user_class = ReadUser
    return simulator


def language_model(name, flag, temperature, timeout=60.0, template_args=None, words=None):
    """The language model `name`, openai:MODEL@URL or local:DIR. flag: the one that named it, for
    messages; words: of a reader's model, those whose log-probs it returns."""
    kind, model, url = split_name(name)
    if words:  # the first word is read, so it must not be part of a thought
        template_args = {**(template_args or {}), "enable_thinking": False}
    if kind == "openai":
        from players.server import ServerModel  # here, because most runs of the toy ask no server

        return ServerModel(model, url, temperature, timeout, template_args)
    if kind != "local" or not model:
        choose = "give" if words else f"choose {', '.join(SCRIPTED)},"
        raise BadInput(f"{flag} {name}: unknown; {choose} openai:MODEL@URL or local:DIR")
    if words:
        return local_models().LocalReader(model, words, template_args)
    return local_models().load_local(model, temperature, flag)


def local_models():
    """The module players.local, imported by the first call, because it loads torch: to print the
    scores of a result file, evaluate.py needs no model."""
    from players import local

    return local


def digests_of_texts(policy, simulator):
    """Digests of the texts that decide a dialogue and stand in no setting:

        chat_template   what the chat templates of this process write: of the `policy` (whatever has
                        its `chat`), of the user's model and of the reader; some write today's date
        user_prompts    the prompts of the user's model, and those of the reader with the known
                        replies that set its scale

    (A simulator of another class need not have these attributes.)"""
    texts = getattr(simulator, "texts", None)
    # of a ServerModel it is a function
    chats = [getattr(one, "chat", None) for one in (policy, *models_of(simulator).values())]
    rendered = [chat.rendered for chat in chats if hasattr(chat, "rendered")]
    return {"chat_template": digest(rendered), "user_prompts": digest(texts and texts())}


# -------------------------------------------------------------------- which profiles can be played


def check_playable(name, profiles, unnamed=False):
    """Refuse profiles that the model `name` cannot play: a language model can play all of them, the
    scripted users the toy's alone. unnamed: no --profiles names these, so they are the toy's; then
    a language model is refused, too. Raises BadInput."""
    if name not in SCRIPTED:
        if unnamed:
            raise BadInput(
                f"--simulator {name}: name its users with --profiles; 40 profiles are in "
                "prompts/profiles/ (en_train.jsonl en_test.jsonl and zh_...), the released "
                "ones are train_profile.jsonl and test_profile.jsonl"
            )
        return
    for profile in profiles:
        try:
            world.read_scene(profile.scene, profile.task)
        except world.NotOfThisWorld as error:
            raise BadInput(f"profile {profile.id!r}: {error}") from None
