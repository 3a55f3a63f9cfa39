"""simulator.py - the sentient user (SAGE, the environment of RLVER 2.1): a person with a story, a
hidden need and an emotion.

After each reply of the policy two questions go to a language model, one after the other (SAGE eq.
1 and 2):

    e_t, h_emo   = f_emo(S, c_{t-1}, e_{t-1})       analyse the reply; how far does e move?
    a_t, h_reply = f_reply(S, c_{t-1}, e_t, h_emo)  answer, in that emotion

S is the person: persona, background, purpose of the talk, hidden need. c_{t-1} is the dialogue
so far; its last line is the policy's reply of turn t. e is the emotion, h_emo what f_reply is told
of the answer to f_emo (`User.planning`), a_t the user's line. (The prompt of f_reply has e_t only
as a level, from Emotion-S to Emotion-F.) The same code renders the prompt, asks and reads the
answer for every model.

The last emotion is the reward, so a policy may learn to forge it. support/answers.py prevents its
words from setting the number, and the change is clamped to +-10.

From top to bottom: the user; the model behind all users; the choice of this model. (The profiles,
and the split into training and held-out users, are in people.py.)

Reply to a user yourself, and see the analysis and the emotion:  python -m tools.chat --as-policy
"""

from support import user_check
from support.answers import PROMPTS, Unreadable, as_json, code_of, fill, load_prompt, read_answer
from support.calls import Caller
from support.command_line import SCRIPTED, split_name
from support.errors import BadInput, UnreadableAnswers
from support.files import digest, parse_json
from support.servers import ServerModel

import dataclasses
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field

from emotion import INITIAL_EMOTION, clamp_change, emotion_level, move_emotion
from people import PURPOSES, Profile, known_replies, load_profiles, story_of
from reader import make_reader
from toy import world

CUT_RETRIES = 2  # how often a question is asked again after the token limit cut its answer

# ------------------------------------------------------------------------------------------- the user

# What the two answers hold: schemas, see support/answers.py.
EMOTION_SCHEMA = {
    "content": str,  # what the friend wants to express
    "target_completion": str,  # whether and why it fits the purpose and the hidden need
    "activity": str,  # what goes on inside
    "analysis": str,  # the feeling, and where it comes from
    "code": str,
    "change": int,
}
REPLY_SCHEMA = {
    "thinking": str,
    "origin": str,  # a draft
    "revision": str,  # what to change in it
    "response": str,
    "code": str,
    "goodbye": bool,
}


@dataclass
class User:
    """One sentient user in one dialogue: who it is, what was said, what it feels.

    A User belongs to one dialogue. (The released code finds users by their position in a list of
    unfinished dialogues; when one ends, later replies go to another dialogue's user.)"""

    simulator: "Simulator"
    profile: Profile
    emotion: int = INITIAL_EMOTION["training"]
    name: str = ""  # of the dialogue, in the log of calls
    dialogue: list = field(default_factory=list)  # [{"speaker": "me" | "friend", "text": ...}]
    planning: dict = field(default_factory=dict)  # h_emo: from the last f_emo, for f_reply
    thoughts: list = field(default_factory=list)  # the thinking behind each line

    def values(self):
        """The values of the prompts' placeholders."""
        return {
            "purpose": self.simulator.purposes[self.profile.target],
            "persona": self.profile.player,
            "scene": self.profile.scene,
            "task": self.profile.task,
            # The live value. (The released code always says 30.)
            "emotion": self.emotion,
            "level": emotion_level(self.emotion),
            "planning": as_json(self.planning),
            "dialogue": as_json(self.dialogue),
        }

    async def feel(self, reply: str) -> tuple[str, int]:
        """f_emo (SAGE eq. 1): hear `reply` and move the emotion. Returns (text, change): the
        model's whole answer, which makes the reward verifiable, and the clamped change. Raises
        SimulatorFailed."""
        self.dialogue.append({"speaker": "friend", "text": reply})
        simulator = self.simulator
        if simulator.reader:
            return await self.feel_by_reading()
        text, answer = await simulator.ask(
            simulator.prompts["emotion"], self.values(), EMOTION_SCHEMA, self.name
        )
        change = clamp_change(answer["change"])
        self.emotion = move_emotion(self.emotion, change)
        self.planning = {
            "objective": answer["target_completion"],
            "subjective": answer["activity"] + "\n" + answer["analysis"],
        }
        return text, change

    def questions(self):
        """The questions to a Reader about the friend's last reply."""
        *earlier, reply = [turn["text"] for turn in self.dialogue if turn["speaker"] == "friend"]
        lines = [turn["text"] for turn in self.dialogue if turn["speaker"] == "me"]
        return self.simulator.reader.questions(
            story_of(self.profile), self.profile.task, lines[-1], earlier, reply
        )

    async def feel_by_reading(self):
        """`feel` with a Reader. f_reply is told one fixed sentence for each question."""
        reader = self.simulator.reader
        heard = await reader.hear(self.questions())
        self.emotion = move_emotion(self.emotion, heard["change"])
        told = reader.told(heard["z"])
        self.planning = {"objective": told.pop("need"), "subjective": " ".join(told.values())}
        return json.dumps(heard | self.planning, ensure_ascii=False), heard["change"]

    async def answer(self) -> tuple[str, bool]:
        """f_reply (SAGE eq. 2): say the next line, the first one too. Returns (line, goodbye): is
        the user leaving with it? Raises SimulatorFailed."""
        _, answer = await self.simulator.ask(
            self.simulator.prompts["reply"], self.values(), REPLY_SCHEMA, self.name
        )
        line = answer["response"].strip()
        self.dialogue.append({"speaker": "me", "text": line})
        self.thoughts.append(answer["thinking"])
        return line, answer["goodbye"]

    async def open(self):
        """Begin the talk: with the profile's own first line if it has one. Returns the line.
        (A user cannot leave with it, so goodbye is ignored.)"""
        first_line = self.profile.first_talk
        if first_line:
            self.dialogue.append({"speaker": "me", "text": first_line})
        else:
            first_line, _ = await self.answer()
        return first_line

    def copy(self, name=""):
        """Another user with the same past, for one dialogue of a group: all dialogues of the group
        go on from the same first line."""
        # lists of its own; what is in them, and `planning`, is replaced but never changed
        lists = {"dialogue": [*self.dialogue], "thoughts": [*self.thoughts]}
        return dataclasses.replace(self, name=name, **lists)


def analysis_in(text):
    """What an answer to f_emo says beside the number, {key of EMOTION_SCHEMA: text}. An answer of a
    Reader has sentences for only two of the keys. Raises Unreadable."""
    if not is_reading(text):
        return read_answer(text, EMOTION_SCHEMA)
    told = parse_json(text)
    return dict.fromkeys(EMOTION_SCHEMA, "") | {
        "target_completion": told["objective"],
        "analysis": told["subjective"],
    }


def is_reading(text):
    """Does a logged answer to f_emo come from a Reader? (`Reader.hear` has the order of its
    keys.)"""
    return text.startswith('{"log_odds"')


# --------------------------------------------------------------------- the model behind all users


class Simulator(Caller):
    """What all users share: the model, the prompts, bounded attempts, the log of calls, the clock.
    `ask` asks a question; `check` asks three before the first dialogue."""

    def __init__(self, model, lang="en", difficulty="vanilla", *, retries=8, reader=None, **shared):
        """model: any `async def model(prompt, schema=None) -> text`. retries: how often a question
        is asked again if its answer cannot be read; then the dialogue is dropped. (The released
        code never stops.) reader: a Reader, if feelings are read. shared: arguments of Caller."""
        super().__init__(model, **shared)
        self.lang = lang
        self.retries = retries
        self.reader = reader
        self.tries = Counter()  # {attempt, from 0: how many answers it brought, logged ones too}
        self.prompts = {name: load_prompt(name, lang, difficulty) for name in ("emotion", "reply")}
        self.purposes = {
            name: load_prompt(f"purpose_{name}", lang, difficulty) for name in PURPOSES
        }
        # What a model is told when it is asked again: a fixed line, because words of its answer
        # might be the policy's. At temperature 0 the same prompt would get the same answer.
        self.complaint = load_prompt("complaint", lang)

    def user(self, profile, emotion, name):
        """A User of this model. name: of its dialogue, in the log of calls."""
        return User(self, profile, emotion, name)

    async def ask(self, template, values, schema, dialogue=""):
        """Ask a question until its answer can be read. Returns (text, object) of the answer; raises
        SimulatorFailed. values: {placeholder of the template: value}, all but the code. dialogue:
        its name, for `key`.

        An answer in the log is not asked for again, because it was paid for. Unreadable answers in
        the log do not count as tries: a run that stopped because of them would stop again at every
        resume."""
        asked, cut, question, problem = 0, 0, template, None
        for attempt in itertools.count():
            code = code_of(question, values, attempt)
            prompt = fill(question, {**values, "code": code})
            key = self.key(prompt, dialogue, attempt)
            text = self.log.answers.get(key)
            if text is None:
                if asked > self.retries or cut > CUT_RETRIES:
                    raise UnreadableAnswers(f"{asked} answers could not be read: {problem}")
                asked += 1
                text = await self.call(prompt, schema, key)
                cut += getattr(text, "cut", False)
            self.tries[attempt] += 1
            try:
                return text, read_answer(text, schema, code if "code" in schema else None)
            except Unreadable as error:
                question = f"{template}\n\n{self.complaint}"
                problem = getattr(text, "problem", "") or str(error)

    def key(self, prompt, dialogue, attempt):
        """The key of a call: the log keeps its answer under it. At temperature 0 equal prompts
        share an answer. At any other temperature the name of the dialogue is part of the key;
        otherwise all dialogues of a group would share one "sample"."""
        temperature = getattr(self.model, "temperature", 0.0)
        # None: a server's own temperature, which is not 0
        return digest(self.name, temperature, prompt, "" if temperature == 0 else dialogue, attempt)

    def unlogged(self):
        """As Caller.unlogged."""
        other = super().unlogged()
        other.retries = 2  # a model that can keep the form has done so by then
        other.reader = other.reader and other.reader.unlogged()
        return other

    def example(self):
        """The user of `check`, in the run's language, before any reply."""
        profile, *_ = load_profiles(PROMPTS / "profiles" / f"{self.lang}_train.jsonl")
        return User(self, profile, dialogue=[{"speaker": "me", "text": profile.first_talk}])

    async def check(self):
        """`user_check.check`. Other ranks `learn` what it finds out."""
        return await user_check.check(self)

    def learn(self, found):
        """Take over what the `check` of another rank has found out."""
        if self.reader:
            self.reader.scale = found.pop("scale")
            vars(self.reader.source).update(found.pop("source"))
        vars(self.model).update(found)

    def digest_of_templates(self, policy):
        """A digest of what the chat templates of this process write: of the `policy` (whatever has
        its `chat`), of the user's model and of the reader. A template may write today's date."""
        who = policy, self.model, self.reader and self.reader.source
        return digest([one.chat.rendered for one in who if hasattr(one, "chat")])

    async def check_reader(self):
        """`Reader.check` with the replies marked "weights"."""
        await self.reader.check(
            [
                User(self, row["profile"], dialogue=row["dialogue"]).questions()
                for row in known_replies("weights")
            ]
        )


# ---------------------------------------------------------------------- which model plays the users


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
    if reader and difficulty != "vanilla":
        raise BadInput(f"--reader hears vanilla users, not --difficulty {difficulty}")
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
    if reader:
        reader = make_reader(
            reader, lang, timeout, template_args, concurrency=concurrency, **shared
        )
    if kind == "openai":  # a script never waits, and an engine has a queue of its own
        shared["concurrency"] = concurrency
    return Simulator(llm, lang, difficulty, retries=retries, reader=reader, **shared)


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
