"""simulator.py - the sentient user (SAGE, the environment of RLVER 2.1), who has a story, a hidden
need and an emotion.

After each reply of the policy two questions go to the user's model, a language model, one after the
other (SAGE eq. 1 and 2):

    e_t, h_emo   = f_emo(S, c_{t-1}, e_{t-1})       analyse the reply; how far does e move?
    a_t, h_reply = f_reply(S, c_{t-1}, e_t, h_emo)  answer, in that emotion

S is the profile: persona, background, purpose of the talk, hidden need. c_{t-1} is the dialogue
so far; its last line is the policy's reply of turn t. e is the emotion, h_emo what f_reply is told
of the answer to f_emo (`User.planning`), a_t the user's line. (The prompt of f_reply has e_t only
as a level, from Emotion-S to Emotion-F.) The same code renders the prompt, asks and reads the
answer for every model.

The last emotion is the reward, so a policy may learn to forge it. support/answers.py says
what keeps its words from setting the number, and the change is clamped to +-10.

From top to bottom: the user; what all users share. (When a dialogue ends is decided in
rollout.py, by `converse`. players/users.py chooses the user's model. The profiles, and which of them
are trained on and which held out, are in people.py.)

Reply to a user yourself, and see the analysis and the emotion:  python -m tools.chat --as-policy
"""

from support.answers import Unreadable, as_json, code_of, fill, load_prompt, read_answer
from support.errors import UnreadableAnswers

import dataclasses
import itertools
from dataclasses import dataclass, field

from emotion import TRAINING, clamp_change, emotion_level, move_emotion
from people import PURPOSES, Profile

RETRIES = 8  # how often a question is asked again if its answer cannot be read
CUT_RETRIES = 2  # the same after answers that the token limit cut

# ----------------------------------------------------------------------------------------- the user

# What the two answers hold: schemas, see support/answers.py.
EMOTION_SCHEMA = {
    "content": str,  # what the policy wants to express
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
    """One sentient user in one dialogue: who it is, what was said, what it feels. In the dialogue,
    as in the prompts, the user is "me" and the policy the "friend".

    A User belongs to one dialogue. (The released code finds users by their position in a list of
    unfinished dialogues; when one ends, later replies go to another dialogue's user.)"""

    simulator: "Simulator"
    profile: Profile
    emotion: int = TRAINING.start
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

    def add(self, speaker, text):
        """Add what "me" or "friend" says to the dialogue."""
        self.dialogue.append({"speaker": speaker, "text": text})

    async def feel(self, reply: str) -> tuple[str, int]:
        """f_emo (SAGE eq. 1): feel `reply`, which moves the emotion. Returns (text, change): the
        model's whole answer, which makes the reward verifiable, and the clamped change. Raises
        SimulatorFailed."""
        self.add("friend", reply)
        simulator = self.simulator
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

    async def answer(self) -> tuple[str, bool]:
        """f_reply (SAGE eq. 2): say the next line, the first one too. Returns (line, goodbye): is
        the user leaving with it? Raises SimulatorFailed."""
        _, answer = await self.simulator.ask(
            self.simulator.prompts["reply"], self.values(), REPLY_SCHEMA, self.name
        )
        line = answer["response"].strip()
        self.add("me", line)
        self.thoughts.append(answer["thinking"])
        return line, answer["goodbye"]

    async def open(self):
        """Begin the talk: with the profile's own first line if it has one. Returns the line.
        (A user cannot leave with it, so goodbye is ignored.)"""
        first_line = self.profile.first_talk.strip()  # stripped, as every line is
        if first_line:
            self.add("me", first_line)
        else:
            first_line, _ = await self.answer()
        return first_line

    def copy(self, name=""):
        """Another user with the same past, for one dialogue of a group: all dialogues of the group
        go on from the same first line."""
        # lists of its own; what is in them, and `planning`, is replaced but never changed
        return dataclasses.replace(
            self, name=name, dialogue=[*self.dialogue], thoughts=[*self.thoughts]
        )


# ----------------------------------------------------------------------------- what all users share


class Simulator:
    """What all users of a run share: the user's model, and the prompts that it is asked with."""

    user_class = User
    reader = None  # a Reader decides what a ReadUser feels (players/reader.py)

    def __init__(self, caller, lang="en", difficulty="vanilla", retries=RETRIES):
        """caller: what asks the user's model, a Caller of players/calls.py. retries: after these the
        dialogue is dropped. (The released code never stops.)"""
        self.caller = caller
        self.lang = lang
        self.retries = retries
        self.prompts = {name: load_prompt(name, lang, difficulty) for name in ("emotion", "reply")}
        self.purposes = {
            name: load_prompt(f"purpose_{name}", lang, difficulty) for name in PURPOSES
        }
        # What the model is told when it is asked again. Otherwise the same prompt would get the same
        # answer at temperature 0. A fixed line, because words of its answer might be the policy's.
        self.complaint = load_prompt("complaint", lang)

    def texts(self):
        """All texts that the user's model and the reader are asked with, without profiles."""
        return [self.prompts, self.purposes, self.complaint, self.reader and self.reader.known()]

    def user(self, profile, emotion, name):
        """The user with this profile. name: of its dialogue, in the log of calls."""
        return self.user_class(self, profile, emotion, name)

    async def ask(self, template, values, schema, dialogue=""):
        """Ask the user's model a question until its answer can be read. Returns (text, object) of
        the answer. values: {placeholder of the template: value}, all but the code. dialogue: its
        name, for the key of the call.

        An answer in the log is not asked for again, because it was paid for. Unreadable answers in
        the log do not count as tries: a run that stopped because of them would stop again at every
        resume. Raises UnreadableAnswers or another SimulatorFailed."""
        failures, cuts = 0, 0  # unreadable answers that were not in the log; those that were cut
        for attempt in itertools.count():
            question = f"{template}\n\n{self.complaint}" if attempt else template
            code = code_of(question, values, attempt)
            prompt = fill(question, {**values, "code": code})
            key = self.caller.key(prompt, dialogue, attempt)
            logged = self.caller.logged(key)
            answer = logged or await self.caller.call(prompt, schema, key)
            wanted = code if "code" in schema else None
            try:
                return answer.text, read_answer(answer.text, schema, wanted)
            except Unreadable as error:
                problem = answer.problem or error
            if not logged:
                failures += 1
                cuts += answer.is_cut
                if failures > self.retries or cuts > CUT_RETRIES:
                    raise UnreadableAnswers(f"{failures} answers could not be read: {problem}")
