"""simulator.py - the sentient user (SAGE, the environment of RLVER 2.1): a person with a story, a
hidden need and an emotion.

After each reply of the policy two questions go to a language model, one after the other (SAGE eq.
1 and 2):

    e_t, h_emo   = f_emo(S, c_{t-1}, e_{t-1})       analyse the reply; how far does e move?
    a_t, h_reply = f_reply(S, c_{t-1}, e_t, h_emo)  answer, in that emotion

S is the person: persona, background, purpose of the talk, hidden intention. c_{t-1} is the dialogue
up to the policy's reply of turn t, and with it; e is the emotion, h_emo the analysis, a_t the
user's line. (The prompt of f_reply has e_t only as a level, from Emotion-S to Emotion-F.) The same
code renders the prompt, asks and reads the answer for every model.

The last emotion is the reward, so this file is where a policy could forge its reward. Three things
prevent that:

* What the policy says enters a prompt in one substitution pass, as JSON (`fill`, `as_json`).
* The change is read only from a header with the mark of this prompt, four letters that the policy
  cannot know (support/answers.py).
* The change is clamped to +-10 (`clamp_change`).

Behind the user stand the people of a run (who is trained on, who is held out, which simulator can
play whom), and a recorded dialogue that is heard again.

Be the assistant yourself, and see the analysis and the emotion:  python -m tools.chat --as-policy
"""

from support.answers import (
    Unreadable,
    end_of,
    mark_of,
    marked_sections,
    peel,
    whole_number,
    without_surrogates,
)
from support.errors import BadInput, SimulatorFailed, TooManyLost, UnreadableAnswers
from support.files import read_jsonl
from support.llm import (
    CallLog,
    Clock,
    LocalModel,
    PromptRefused,
    RetryableError,
    ask_with_retries,
    digest,
)
from support.metrics import INITIAL_EMOTION, emotion_level
from support.results import intention_of
from support.settings import SCRIPTED, split_name

import asyncio
import copy
import dataclasses
import json
import random
import re
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from toy import world
from toy.words import NEEDS

PROMPTS = Path(__file__).parent / "prompts"
MAX_CHANGE = 10  # SAGE: one reply moves the emotion by 10 at most
CHECK_REPLY = "I am here. Tell me a little more about it."  # what the user hears in `check`
# What a talk is for. The prompts' purpose_*.txt tell it to the model.
PURPOSES = (
    "eq",  # a heart-to-heart: the user is troubled (all released users)
    "target",  # chit-chat: first a small aim of the user's own, then what the user loves
    "no-target",  # chit-chat: the user waits for the other one to bring something up
)


# ------------------------------------------------------------------------------------- the person


@dataclass(frozen=True)
class Profile:
    """One simulated person. The names of the fields are those of the released JSONL files."""

    id: str
    player: str  # the persona: name, age, habits, way of speaking
    scene: str  # the background: what happened, how replies are taken
    main_cha: str  # persona group: negative, passive or avoidant
    cha_group: list  # traits
    task: str  # the hidden intention: what this person needs from the talk, and does not say
    topic: str = ""
    first_talk: str = ""  # a fixed first line (the benchmark's profiles have one)
    need: str = ""  # the name of the need that `task` words, a key of NEEDS; released files: none
    target: str = "eq"  # what the talk is for: one of PURPOSES


def hidden_need(profile):
    """What this person needed and only hinted at, in words: revealed when a dialogue is over."""
    name, _ = intention_of(profile.task, profile.need)
    in_brackets = "" if name == "other" else f" ({name})"
    return f"The hidden need{in_brackets}, at which the user only hinted: {profile.task}"


# ------------------------------------------------------------------------------------------ emotion


def clamp_change(change):
    """The change, limited to +-10 (RLVER appendix E.1): otherwise one misread number could decide a
    whole dialogue."""
    return min(MAX_CHANGE, max(-MAX_CHANGE, change))


def move_emotion(emotion, change):
    """e_t = e_{t-1} + change, the change clamped to +-10, the emotion to 0..100."""
    return min(100, max(0, emotion + clamp_change(change)))


# -------------------------------------------------------------------------------- leaving the talk

# A clause that is nothing but a farewell, its words separated by single spaces.
FAREWELL = re.compile(
    r"""
    # English: words that lead up to a farewell,
    (?: (?: ok | okay | well | so | then | anyway | alright | all\ right | thanks | thank\ you | and
          | now | just | i'?ll\ say | i\ say | for\ now ) \s+ )*
    # the farewell itself,
    (?: good\s?bye | bye (?: \s?bye )? | farewell | see\ you | see\ ya | good\ night )
    # and words that follow it.
    (?: \s+ (?: for | now | then | and | thanks | thank | you | again | soon | later | tomorrow | my
          | dear | friend | everyone | all | take | care | around | the ) )*
    |
    # Chinese: the same three parts; blanks may stand anywhere.
    (?: 那 | 那么 | 就 | 好 | 好的 | 好了 | 嗯 | 行 | 行吧 | 我 | 我们 | 咱们 | 咱 | 先 | 下次 | 谢谢
      | 谢谢你 | \s )*
    (?: 再见 | 拜拜 | 拜拜了 | 回头见 )
    (?: 了 | 啦 | 吧 | 咯 | 喽 | 哦 | 呀 | 啊 | 您 | 你 | 朋友 | \s )*
    """,
    re.IGNORECASE | re.VERBOSE,
)


def says_goodbye(line):
    """Does the last sentence of `line` take leave? Being *about* a goodbye is not enough: one
    clause of the sentence must be nothing but a farewell. The released code ends the dialogue
    wherever the word occurs.

        Thanks for listening. Goodbye!      yes
        I have to run, see you tomorrow!    yes   one clause is enough
        Bye-bye                             yes
        好吧，那就这样，再见！                yes
        He never said goodbye.              no    the clause says more than that
        他没有说再见。                       no    the same in Chinese
        我们还能再见面吗？                    no    the word is part of another one
        Goodbye! No, wait, one thing.       no    not in the last sentence
        He just said, "Goodbye."            no    somebody else's farewell
        Goodbye is the word she used.       no
        Goodbye :)                          yes

    The list of verbs of saying is short: "Her note read, goodbye" is taken for a farewell.
    """
    sentences = [s for s in re.split(r"[.!?。！？…\n]+", line) if re.search(r"\w", s)]
    if not sentences:
        return False
    last = sentences[-1].replace("’", "'")
    last = re.sub(r"[:;=]-?[()DP](?!\w)", " ", last)  # smileys
    # Drop the comma or colon behind a verb of saying, so that what is reported stays in the clause
    # of its verb: 'He just said, "Goodbye."' becomes one clause, which is more than a farewell.
    saying = r"(said|says|say|wrote|whispered|shouted|answered|说|道|回|写|喊)"
    last = re.sub(saying + r"\s*[,:，：]", r"\1 ", last)
    # Only letters, apostrophes, hyphens, colons and what ends a clause are looked at. A colon ends
    # none: "My last word: goodbye" is one clause, and more than a farewell.
    last = re.sub(r"[^\w\s,;:，、；：()（）—–'-]", " ", last)
    for clause in re.split(r"[,;，、；()（）—–]+|\s-\s", last):
        words = clause.replace("-", " ").split()
        if FAREWELL.fullmatch(" ".join(words)):
            return True
    return False


# ------------------------------------------------------------------------ prompts and their answers

PLACEHOLDERS = {
    "emotion": {"purpose", "persona", "scene", "task", "emotion", "dialogue", "mark"},
    "reply": {"purpose", "persona", "scene", "task", "level", "planning", "dialogue", "mark"},
    "complaints": {"mark"},
}
# The headers of both hops' answers, as patterns. The challenging prompt says Reason.
EMOTION_HEADERS = {
    "Content": "Content",
    "TargetCompletion": "Target[ _]?Completion|Reason",
    "Activity": "Activity",
    "Analyse": "Anal(?:yse|yze|ysis)",
    "Change": "Change",
}
REPLY_HEADERS = {name: name for name in ("Thinking", "Origin", "Change", "Response")}


def load_prompt(name, lang="en", difficulty="", root=PROMPTS, placeholders=None):
    """The text of a prompt file. placeholders: the set of names that stand in it as {{name}}, no
    more and no less; default: PLACEHOLDERS[name], or none if the file is not listed there. Raises
    BadInput if the file or a placeholder is missing, or a placeholder is unknown."""
    path = Path(root) / lang / difficulty / f"{name}.txt"
    if not path.is_file():
        raise BadInput(f"prompt file {path} is missing")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"prompt file {path} is not UTF-8 text") from None
    if placeholders is None:
        placeholders = PLACEHOLDERS.get(name, set())
    present = set(re.findall(r"\{\{(\w+)\}\}", text))
    missing = placeholders - present
    unknown = present - placeholders
    if missing:
        raise BadInput(f"prompt file {path} lacks its placeholder " + "{{" + min(missing) + "}}")
    if unknown:
        raise BadInput(
            f"prompt file {path} has an unknown placeholder " + "{{" + min(unknown) + "}}"
        )
    return text.strip()


def fill(template, values):
    """Put `values` in their {{placeholders}}, all in one pass: a value that spells a placeholder
    stays the text it is.

    (Replacing one name after the other, as in text.replace(...).replace(...), would let a reply of
    "{{emotion}}" read the emotion, or any later value, into the dialogue.)"""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match.group(1)]), template)


# What `as_json` escapes beside JSON's own signs: "<", which could close a tag of the prompt, and
# three signs that end a line as \n does (next line, line separator, paragraph separator).
ESCAPED_SIGNS = "<\u0085\u2028\u2029"


def as_json(value):
    """JSON for a prompt. A newline becomes \\n, and every sign of ESCAPED_SIGNS becomes its number,
    such as \\u003c for "<", so no text can begin a line of its own (and with it a section), or
    close a tag. All other letters stay: a model should read 再见, not six hexadecimal numbers."""
    text = json.dumps(value, ensure_ascii=False)
    escapes = {ord(sign): f"\\u{ord(sign):04x}" for sign in ESCAPED_SIGNS}
    return text.translate(escapes)


def load_complaints(lang):
    """{name: line}: what a model is told when it is asked again, one line for each kind of mistake.
    The lines are fixed texts and quote nothing of the answer: its words might be the policy's, and
    they would stand outside of all JSON."""
    lines = load_prompt("complaints", lang).splitlines()
    return dict(line.split(": ", 1) for line in lines)


def parse_change(line):
    """The signed integer that stands alone on the line of the header Change: "-3", "+5.0", "-3/10",
    "no change". Raises ValueError for everything else, and the model is asked again."""
    if peel(line).casefold() in ("no change", "不变"):
        return 0
    return whole_number(line, out_of=MAX_CHANGE)


def parse_emotion(text, mark):
    """Read an answer of f_emo: ({header: text}, change), the change an integer, not yet clamped.
    Only headers with the mark are read. Raises ValueError if one of them is missing, or the change
    cannot be read."""
    # deciding: of Change only what stands on the header's own line counts, nothing below it
    sections = marked_sections(text, EMOTION_HEADERS, mark, deciding=["Change"])
    return sections, parse_change(sections["Change"])


def parse_reply(text, mark):
    """Read an answer of f_reply: ({header: text}, the first paragraph of Response, which is the
    user's line). Only headers with the mark are read. Raises ValueError if one of them is missing,
    or the line is empty."""
    sections = marked_sections(text, REPLY_HEADERS, mark)
    paragraph = re.split(r"\n\s*\n", sections["Response"])[0]
    response = paragraph.strip().strip('"“”').strip()
    if not response:
        raise Unreadable("empty", "the Response section is empty")
    return sections, response


# ----------------------------------------------------------------------------------- the simulator


class PreparedCall(NamedTuple):
    """One call to the model, ready to be made."""

    prompt: str
    mark: str  # the mark that the prompt asks for, "" if it asks for none
    key: str  # the log keeps the answer under this key


class ReadAnswer(NamedTuple):
    """An answer of the model that could be read."""

    text: str  # the whole answer
    mark: str  # the mark by which it was read
    parsed: object  # what `parse(text, mark)` returned


class Simulator:
    """What all users share: the model, the prompts, bounded retries, the log of calls, the clock.

    The methods in reading order: `ask` renders the prompt of a hop. `ask_until_readable` looks for
    its answer in the log (`look_up`), or asks the model (`call_model`) until an answer can be read.
    `check` asks one question before the first dialogue."""

    def __init__(
        self,
        model,
        lang="en",
        difficulty="vanilla",
        retries=2,
        wait=0.0,
        concurrency=None,
        log=None,
        clock=None,
        retries_unreadable=None,
    ):
        """model: any `async def model(prompt) -> text`. wait: seconds before the first retry of a
        call that failed; they grow from there. concurrency: how many calls may be under way at once
        (default: any number).

        retries: further attempts at a question, after calls that failed and after answers that
        could not be read; retries_unreadable: how many of them after the latter (default: all).
        Then the dialogue is given up. (The released code asks for ever.)"""
        self.model = model
        self.retries = retries
        self.retries_unreadable = retries_unreadable
        self.wait = wait
        self.clock = clock or Clock()
        self.log = log or CallLog()
        self.slots = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
        self.checked = False  # has this model shown that it can keep the form?
        self.asks_for_more = True  # is an answer that was cut asked for again, longer?
        self.last_failure = ""  # the message of the last question that failed for good
        self.prompts = {name: load_prompt(name, lang, difficulty) for name in ("emotion", "reply")}
        self.purposes = {
            name: load_prompt(f"purpose_{name}", lang, difficulty) for name in PURPOSES
        }
        self.complaints = load_complaints(lang)

    async def ask(self, name, values, parse, dialogue=""):
        """Ask one hop, "emotion" or "reply". Returns a ReadAnswer; raises SimulatorFailed.

        values: {placeholder of the prompt: value}, all but the mark. parse(text, mark): reads the
        answer. dialogue: its name, for `key`."""

        def prepare_call(errors):
            template = self.prompts[name]
            if errors:
                # Say what was wrong: at temperature 0 the same prompt would get the same answer.
                # An Unreadable names its complaint; any other ValueError gets the general one.
                complaint = getattr(errors[-1], "complaint", "form")
                template += "\n\n" + self.complaints[complaint]
            mark = mark_of(template, values, len(errors))
            prompt = fill(template, {**values, "mark": mark})
            return PreparedCall(prompt, mark, self.key(prompt, dialogue, len(errors)))

        return await self.ask_until_readable(f"the {name} hop", prepare_call, parse)

    async def ask_until_readable(self, what, prepare_call, parse):
        """Put a question to the model until an answer can be read. Returns a ReadAnswer; raises
        SimulatorFailed. what: the question's name, for the error message.

        prepare_call(errors): the next PreparedCall. `errors` are the ValueErrors of the answers to
            this question so far, all of which could not be read.
        parse(text, mark): what the answer says. Raises ValueError if it cannot be read.

        For example, if the first answer cannot be read and the second one can:

            prepare_call([])      the prompt, mark 0                    ->  parse raises e1
            prepare_call([e1])    the prompt and a complaint, mark 1    ->  a ReadAnswer

        The loop over the attempts is in `ask_with_retries` (support/llm.py)."""
        logged = self.look_up(prepare_call, parse)
        if logged is not None:
            return logged

        async def next_attempt(errors):
            prepared = prepare_call(errors)
            return prepared.mark, await self.call_model(prepared)

        def read(answer):
            mark, text = answer
            return ReadAnswer(text, mark, parse(text, mark))

        try:
            return await ask_with_retries(
                what, next_attempt, read, self.retries, self.wait, self.retries_unreadable
            )
        except PromptRefused as error:
            self.last_failure = str(error)
            if not self.checked:
                raise
            # The model has answered before, so it is this dialogue's words that it refuses. A
            # policy that finds such words loses its own dialogue, and must not end the run.
            raise UnreadableAnswers(str(error)) from None
        except SimulatorFailed as error:
            self.last_failure = str(error)
            raise

    def look_up(self, prepare_call, parse):
        """The same as `ask_until_readable`, but from the log alone: a ReadAnswer, or None if the
        log has no answer that can be read.

        What was paid for is not asked again, nor are the unreadable answers on the way to a
        readable one. If the log ends in an unreadable answer, everything is asked again: otherwise
        a run that stopped because of such answers would stop at them whenever it is resumed."""
        if not self.log.answers:  # so no prompt need be made to look for its answer
            return None
        errors = []
        while True:
            prepared = prepare_call(errors)
            if prepared.key not in self.log.answers:
                return None
            text = self.log.answers[prepared.key]
            try:
                return ReadAnswer(text, prepared.mark, parse(text, prepared.mark))
            except ValueError as error:
                errors.append(error)

    def key(self, prompt, dialogue, unreadable):
        """The cache key of a model call: the log keeps its answer under it. At temperature 0 equal
        prompts share an answer. At any other the name of the dialogue is part of the key, or all
        dialogues of a group would share one "sample". unreadable: how many earlier answers to this
        question could not be read."""
        name = getattr(self.model, "name", "")
        temperature = getattr(self.model, "temperature", 0.0)
        return digest(name, temperature, prompt, dialogue if temperature else "", unreadable)

    async def call_model(self, prepared):
        """Make one PreparedCall and log its answer, which is returned. An answer that was cut short
        is asked for once more, with four times the length."""
        async with self.slots:
            began = time.perf_counter()
            with self.clock.during("calls"):
                text = await self.model(prepared.prompt)
                # `cut`: it stopped at the length limit. (The toy's answers are never cut and have
                # no such attribute.) If the End line is there all the same, only words behind it
                # are missing, and nobody reads those.
                was_cut = getattr(text, "cut", False)
                has_its_end = prepared.mark != "" and end_of(text, prepared.mark) is not None
                if was_cut and not has_its_end and self.asks_for_more:
                    text = await self.call_with_more_room(prepared.prompt, text)
        seconds = time.perf_counter() - began
        self.log.write(prepared.key, prepared.prompt, text, seconds, prepared.mark)
        return text

    async def call_with_more_room(self, prompt, cut_text):
        """The answer to a prompt with four times the usual length, or `cut_text`, the answer that
        was cut, if the call fails."""
        try:
            return await self.model(prompt, length_factor=4)
        except RetryableError:
            return cut_text

    async def check(self):
        """Ask one question before anything is paid for, as in a dialogue. So a wrong key or address
        shows at once, and so does a model that cannot play a user because it cannot copy the mark.
        Returns the tokens of question and answer (Answer.tokens), None if they are not known.
        Raises what `pass_check` raises."""

        async def hear_a_reply(simulator):
            user = User(simulator, toy_profiles("train", 1)[0])
            analysis, _, _ = await user.feel(CHECK_REPLY)
            return getattr(analysis, "tokens", None)

        return await self.pass_check(hear_a_reply)

    async def pass_check(self, ask_one_question):
        """Return what `ask_one_question(simulator)` returns, which asks one question of a copy of
        this simulator. The copy has an empty log: an old answer says nothing about the server of
        today. A scripted model needs no check, and gives None.

        This is a method of its own because a judge (tools/judge.py) is checked with another
        question than a user.

        Raises BadInput if no answer can be read, and TooManyLost if there is none. Not caught here:
        a refusal of every prompt (a wrong key) or of this one (PromptRefused)."""
        if getattr(self.model, "is_scripted", False):
            return None
        unlogged = copy.copy(self)
        unlogged.log = CallLog()
        unlogged.retries_unreadable = 2  # a model that can keep the form has done so by then
        if isinstance(self.model, LocalModel):
            # It computes here. One that is too small to keep the form does not stop by itself
            # either, and each of its answers takes as long as an answer can.
            unlogged.retries_unreadable = 1
            unlogged.asks_for_more = False
        try:
            # `checked` is still False, so a PromptRefused is passed on
            answer = await ask_one_question(unlogged)
        except UnreadableAnswers as error:
            raise BadInput(
                f"{getattr(self.model, 'name', 'the model')} cannot keep the form that "
                f"the prompts ask for ({error}); choose another model"
            ) from None
        except SimulatorFailed as error:
            raise TooManyLost(str(error)) from None
        self.checked = True
        return answer


# ------------------------------------------------------------------------------------------ a user


@dataclass
class User:
    """One sentient user in one dialogue: who it is, what was said, what it feels.

    A User travels with its dialogue. (The released code finds users by their position in a list of
    unfinished dialogues; when one ends, every later reply goes to somebody else's user.)"""

    simulator: Simulator
    profile: Profile
    emotion: int = INITIAL_EMOTION["training"]
    name: str = ""  # of the dialogue, in the log of calls
    dialogue: list = field(default_factory=list)  # [{"speaker": "me" | "friend", "text": ...}]
    planning: dict = field(default_factory=dict)  # h_emo: from the last f_emo, for f_reply
    thoughts: list = field(default_factory=list)  # the Thinking behind each line

    def values(self):
        """What stands in the prompts' placeholders."""
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

    async def feel(self, reply):
        """f_emo (SAGE eq. 1): hear `reply` and move the emotion. Returns (analysis, change, mark):
        the model's whole answer, which makes the reward verifiable; the clamped change; and the
        mark by which the answer can be read again. Raises SimulatorFailed."""
        self.dialogue.append({"speaker": "friend", "text": reply})
        answer = await self.simulator.ask("emotion", self.values(), parse_emotion, self.name)
        sections, change = answer.parsed
        change = clamp_change(change)  # what is logged; `move_emotion` would clamp it anyway
        self.emotion = move_emotion(self.emotion, change)
        self.planning = {
            "objective": sections["TargetCompletion"],
            "subjective": sections["Activity"] + "\n" + sections["Analyse"],
        }
        return answer.text, change, answer.mark

    async def answer(self):
        """f_reply (SAGE eq. 2): say the next line, the first one too. Raises SimulatorFailed."""
        answer = await self.simulator.ask("reply", self.values(), parse_reply, self.name)
        sections, line = answer.parsed
        self.dialogue.append({"speaker": "me", "text": line})
        self.thoughts.append(sections["Thinking"])
        return line

    async def open(self):
        """Begin the talk: with the profile's own first line if it has one. Returns the line."""
        if not self.profile.first_talk:
            return await self.answer()
        self.dialogue.append({"speaker": "me", "text": self.profile.first_talk})
        return self.profile.first_talk

    def copy(self, name=""):
        """Another user with the same past, for one dialogue of a group: all dialogues of the group
        go on from the same first line."""
        return User(
            self.simulator,
            self.profile,
            emotion=self.emotion,
            name=name,
            dialogue=[dict(message) for message in self.dialogue],
            planning=dict(self.planning),
            thoughts=list(self.thoughts),
        )


# ---------------------------------------------------------------------- which model plays the users


def make_simulator(
    name,
    lang="en",
    difficulty="vanilla",
    *,
    concurrency=64,
    timeout=60.0,
    retries=8,
    temperature=0.0,
    log=None,
    clock=None,
    flag="--simulator",
):
    """The Simulator over the model `name`: toy, toy-weak (can be hacked), phrases (hears plain
    English), openai:MODEL@URL or local:DIR. flag: the flag that named it, for messages. Raises
    BadInput."""
    kind, model, url = split_name(name)
    if name in SCRIPTED:
        if lang != "en":
            raise BadInput(
                f"--lang {lang}: the scripted user of --simulator {name} speaks English only"
            )
        if name == "phrases":
            from toy import phrases

            scripted = phrases.PhrasesModel(difficulty)
        else:
            scripted = world.ScriptedModel(difficulty, weak=name == "toy-weak")
        return Simulator(scripted, lang, difficulty, clock=clock)
    if kind == "openai":
        if not model or not re.match(r"https?://[^\s/]", url):
            raise BadInput(
                f"{flag} {name}: openai:MODEL@URL is needed, the URL with http:// or https://"
            )
        from support.server import ServerModel

        llm = ServerModel(model, url, temperature, timeout)
    elif kind == "local" and model:
        llm = load_local(model, temperature, flag)
        concurrency = None  # the engine has a queue of its own
    else:
        raise BadInput(
            f"{flag} {name}: unknown; choose {', '.join(SCRIPTED)}, openai:MODEL@URL or local:DIR"
        )
    return Simulator(
        llm,
        lang,
        difficulty,
        retries=retries,
        wait=0.4,
        concurrency=concurrency,
        log=log,
        clock=clock,
    )


def load_local(path, temperature, flag="--simulator"):
    """The model in the directory `path` as a LocalModel, sampled by the same engine code as the
    policy. Raises BadInput."""
    # Imported here, because these modules load torch.
    from support.chat_format import ChatFormat
    from support.loading import load_to_sample, stop_ids

    import numpy as np

    from engine import TorchEngine

    model, tokenizer = load_to_sample(path, prefix=f"{flag} local:")
    chat = ChatFormat(tokenizer, stop_ids=stop_ids(path))
    return LocalModel(
        path,
        TorchEngine(model, chat.stop_id, temperature, share=True),
        chat,
        model.config.max_position_embeddings,
        np.random.default_rng(0),
        temperature,
    )


def simulator_of_run(cfg, log, clock):
    """The Simulator that a run's Settings `cfg` ask for."""
    return make_simulator(
        cfg.simulator,
        cfg.lang,
        cfg.difficulty,
        concurrency=cfg.simulator_concurrency or cfg.batch_size,
        timeout=cfg.simulator_timeout,
        temperature=cfg.simulator_temperature,
        log=log,
        clock=clock,
    )


# ------------------------------------------------------------------------------- the users of a run

# The fields of a Profile that allow only certain values.
ALLOWED_VALUES = {"need": NEEDS, "target": PURPOSES}
# A file may use either name for a field. Left: the field of the dataclass, as in the released
# files (mixed Chinese pinyin and English). Right: a plain English name for the same field.
ENGLISH_NAMES = {
    "player": "persona",
    "scene": "background",
    "main_cha": "persona_group",
    "cha_group": "traits",
    "task": "intention",
    "first_talk": "first_line",
}


def load_profiles(path, flag="--profiles"):
    """The profiles of a JSONL file, with released or English field names. flag: the one that named
    the file, for messages. Raises BadInput, naming the line and the field."""
    if not Path(path).is_file():
        raise BadInput(f"{flag} {path}: no such file")
    profiles = []
    line_of_id = {}
    for number, row, problem in read_jsonl(path):
        where = f"{flag} {path}, line {number}"
        if problem:
            raise BadInput(f"{where}: {problem}")
        profile = parse_profile(row, where)
        if profile.id in line_of_id:
            first = line_of_id[profile.id]
            raise BadInput(f"{where}: id {profile.id!r} is used in line {first} already")
        line_of_id[profile.id] = number
        profiles.append(profile)
    if not profiles:
        raise BadInput(f"{flag} {path}: the file holds no profile")
    return profiles


def parse_profile(row, where):
    """One line of the file, a parsed JSON value, as a Profile. where: the file and the line, for
    messages. Raises BadInput."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
    values = {}
    for member in dataclasses.fields(Profile):
        english_name = ENGLISH_NAMES.get(member.name)
        value = row.get(member.name, row.get(english_name))
        check_field(member, value, where)
        choices = ALLOWED_VALUES.get(member.name)
        if choices and value and value not in choices:
            raise BadInput(
                f"{where}: {member.name} {value!r} is unknown; there are {', '.join(choices)}"
            )
        if value and member.type is str:
            value = without_surrogates(value)
        # An optional text that is empty keeps the field's default. A list may be empty.
        if value or member.type is list:
            values[member.name] = value
    return Profile(**values)


def check_field(member, value, where):
    """Raise BadInput if the `value` of a dataclass's field, `member`, is missing, empty or of
    another type. Only a field with a default may be missing or empty."""
    name, kind = member.name, member.type
    is_optional = member.default is not dataclasses.MISSING
    if value is None:
        if is_optional:
            return
        english = f" (or {ENGLISH_NAMES[name]!r})" if name in ENGLISH_NAMES else ""
        raise BadInput(f"{where}: field {name!r} is missing{english}")
    if not isinstance(value, kind):
        raise BadInput(
            f"{where}: field {name!r} should be a {kind.__name__}, it is a {type(value).__name__}"
        )
    if kind is str and not value and not is_optional:
        raise BadInput(f"{where}: field {name!r} is empty")


def toy_profiles(split, count=None):
    """`count` users of the toy, of "train" or "heldout" (default: 500 and 128)."""
    return [Profile(**row) for row in world.profiles(split, count)]


def people_of(paths):
    """All profiles of the files `paths`. Without any file: all users of the toy that a recorded
    dialogue may be with."""
    people = [profile for path in paths for profile in load_profiles(path)]
    if people:
        return people
    # A run may have held out more than the usual 128 (--eval-size). User i is the same person
    # however many are made, so making 1000 finds those of any usual run.
    return toy_profiles("heldout", 1000) + toy_profiles("train")


def users_of_run(paths, held_out, simulator_name):
    """(the users to train on, the held-out users, at most `held_out` of them). paths: the files of
    --profiles, if there are any.

        --profiles       to train on       held out
        none             the toy's 500     the toy's held-out users
        one file         the rest          its last fifth, at least one user
        two files        the first file    the second file

    Raises BadInput, also for two files that share users: a score on users that were trained on says
    nothing about others."""
    if not paths:
        need_profiles(simulator_name)
        return toy_profiles("train"), toy_profiles("heldout", held_out)
    if len(paths) > 2:
        raise BadInput("--profiles takes one file, or two: for training and held out")
    files = [load_profiles(path) for path in paths]
    for people in files:
        refuse_foreign(simulator_name, people)
    if len(files) == 2:
        train, test = files
        refuse_shared(paths, train, test)
        return train, test[:held_out]
    (people,) = files
    if len(people) < 2:
        raise BadInput(
            f"--profiles {paths[0]}: one profile is too few to train and to "
            "hold one out; name a second file"
        )
    count = min(held_out, max(1, len(people) // 5))
    return people[:-count], people[-count:]


def refuse_shared(paths, train, test):
    """Raise BadInput if the two files `paths` share a user."""
    shared = {profile.id for profile in train} & {profile.id for profile in test}
    if shared:
        raise BadInput(
            f"--profiles {paths[0]} {paths[1]}: both files hold user "
            f"{min(shared)!r} (and {len(shared) - 1} more ids are in both); users "
            "to train on and users held out must be different people"
        )


def profiles_of_step(people, count, seed, step):
    """The `count` users of a training step (steps count from 1). Training goes over all people once
    an epoch, in an order that depends on the seed and the epoch alone."""
    chosen = []
    order_of_epoch = {}
    first = (step - 1) * count
    for i in range(first, first + count):
        epoch, place = divmod(i, len(people))
        if epoch not in order_of_epoch:
            rng = random.Random(f"{seed} {epoch}")
            order_of_epoch[epoch] = rng.sample(range(len(people)), len(people))
        chosen.append(people[order_of_epoch[epoch][place]])
    return chosen


# -------------------------------------------------------------------------------- who can play whom


def need_profiles(simulator_name):
    """Raise BadInput if this simulator needs files of profiles: the toy's users are for the
    scripted ones alone."""
    if simulator_name not in SCRIPTED:
        raise BadInput(
            f"--simulator {simulator_name}: name its users with --profiles; 40 people are in "
            "prompts/profiles/ (en_train.jsonl en_test.jsonl and zh_...), the released "
            "ones are train_profile.jsonl and test_profile.jsonl"
        )


def refuse_foreign(simulator_name, profiles):
    """Raise BadInput if this simulator cannot play one of `profiles`. A language model can play
    everybody; the scripted users play the toy's people, and `phrases` its own chatters too."""
    if simulator_name not in SCRIPTED:
        return
    from toy import phrases

    for profile in profiles:
        if profile.target != "eq":
            if simulator_name == "phrases" and phrases.read_chat(profile.scene, profile.task):
                continue
            raise BadInput(
                f"profile {profile.id!r}: its target is {profile.target}, and the scripted user "
                "knows no chit-chat; choose a real --simulator, as openai:MODEL@URL"
            )
        try:
            world.read_scene(profile.scene, profile.task)
        except world.NotOfThisWorld as error:
            raise BadInput(f"profile {profile.id!r}: {error}") from None


# ----------------------------------------------------------------- a recorded dialogue, heard again


async def replay(first_line, turns, user):
    """Put the replies of a recorded dialogue to `user` again. turns: as in dialogues.jsonl. Returns
    the emotion after each of them."""
    user.dialogue = [{"speaker": "me", "text": first_line}]
    emotions = []
    for turn in turns:
        if turn["emotion"] is None:  # a malformed reply: never sent
            break
        await user.feel(turn["reply"])
        emotions.append(user.emotion)
        if user.emotion in (0, 100):  # where this user ends it, whatever the recorded one did
            break
        if turn["user"]:
            user.dialogue.append({"speaker": "me", "text": turn["user"]})
    return emotions
