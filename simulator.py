"""simulator.py - the sentient user (SAGE, the environment of RLVER 2.1): a person with a story, a hidden need and an emotion.

After each reply of the policy two questions go to a language model, one after the other (SAGE eq. 1 and 2):

    e_t, h_emo   = f_emo(S, c_{t-1}, e_{t-1})       analyse the reply; by how much does the emotion move?
    a_t, h_reply = f_reply(S, c_{t-1}, e_t, h_emo)  answer, in that emotion

S is the person: persona, background, goal, hidden theme. One path renders the prompt, asks the model and reads the answer's
sections, whichever model it is. The last emotion is the reward, so this file is where a reward could be forged: what the policy
says enters a prompt in one substitution pass, as a JSON string, and the change is read from its own section, clamped.

Play the policy yourself, and see the emotion and the thoughts behind every answer:   python simulator.py
"""
import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import toy

PROMPTS = Path(__file__).parent / "prompts"
START = {"training": 30, "benchmark": 40}       # RLVER trains from 30; SAGE's benchmark starts at 40
MAX_CHANGE = 10                                 # SAGE: one reply moves the emotion by 10 at most


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, not the whole usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (--help tells more)\n")


def number(kind, test, what):
    """A type for argparse: `kind` of the text, if it passes `test`; else one line that says `what` is needed."""
    def check(text):
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not test(value):
            raise argparse.ArgumentTypeError(f"{what} is needed, not {text!r}")
        return value
    return check


class BadInput(ValueError):
    """A user's mistake; the message is one line that says what, where, and what to do."""


class SimulatorFailed(Exception):
    """The simulator gave no usable answer in as many attempts as it is allowed. Its dialogue is dropped, never guessed at."""


class SimulatorRefused(Exception):
    """The server refuses in a way that no second attempt heals (a wrong key, an unknown model): the run stops with its words."""


class Unavailable(Exception):
    """One call failed in a way that may heal. `wait`: seconds that the server asked us to wait, or 0."""

    def __init__(self, reason, wait=0.0):
        super().__init__(reason)
        self.wait = wait


# --------------------------------------------------------------------------------------------------------------- profiles

@dataclass(frozen=True)
class Profile:
    """One simulated person, under the field names of the released JSONL files. `task` is the hidden intention."""
    id: str
    player: str             # the persona: name, age, habits, way of speaking
    scene: str              # the background: what happened, how replies are taken
    main_cha: str           # persona group: negative, passive or avoidant
    cha_group: list         # traits
    task: str
    topic: str = ""
    first_talk: str = ""    # a fixed first line (the benchmark's profiles have one)


ENGLISH = {"player": "persona", "scene": "background", "main_cha": "persona_group", "cha_group": "traits", "task": "intention",
           "first_talk": "first_line"}


def load_profiles(path):
    """Read profiles from JSONL, released or English field names. Raises BadInput naming the line and the field."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"--profiles {path}: no such file")
    found, seen = [], {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")     # splitlines() would also cut at U+2028 inside a JSON string
    except UnicodeDecodeError as error:
        raise BadInput(f"--profiles {path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"--profiles {path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(f"{where}: not a whole JSON object ({error.msg}, column {error.colno}); is the file half-written?") from None
        if not isinstance(row, dict):
            raise BadInput(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
        values = {}
        for name, spec in Profile.__dataclass_fields__.items():
            value = row.get(name, row.get(ENGLISH.get(name)))
            optional = name in ("topic", "first_talk")
            if value is None and not optional:
                raise BadInput(f"{where}: field {name!r} is missing" + (f" (or {ENGLISH[name]!r})" if name in ENGLISH else ""))
            kind = list if name == "cha_group" else str
            if value is not None and not isinstance(value, kind):
                raise BadInput(f"{where}: field {name!r} should be a {kind.__name__}, it is a {type(value).__name__}")
            if not value and not optional and name != "cha_group":
                raise BadInput(f"{where}: field {name!r} is empty")
            if value is not None:
                values[name] = value
        profile = Profile(**values)
        if profile.id in seen:
            raise BadInput(f"{where}: id {profile.id!r} is used in line {seen[profile.id]} already")
        seen[profile.id] = number
        found.append(profile)
    if not found:
        raise BadInput(f"--profiles {path}: the file holds no profile")
    return found


def toy_profiles(split, count=None):
    return [Profile(**row) for row in toy.profiles(split, count)]


# ---------------------------------------------------------------------------------------------------------------- emotion

def emotion_level(emotion):
    """The five levels of SAGE: S at 100, A from 70, B from 40, C from 10, F below. The reply hop is told only this name."""
    return "Emotion-" + "FCBAS"[sum(emotion >= bound for bound in (10, 40, 70, 100))]


def clamp_change(change):
    """To +-10 (RLVER appendix E.1): without it, one misread number decides a dialogue."""
    return min(MAX_CHANGE, max(-MAX_CHANGE, change))


def move_emotion(emotion, change):
    """e_t = e_{t-1} + change, the change clamped to +-10, the emotion to 0..100."""
    return min(100, max(0, emotion + clamp_change(change)))


FAREWELL = re.compile(
    r"(?:(?:ok|okay|well|so|then|anyway|alright|all right|thanks|thank you|and|now|just|i'?ll say|i say|for now)\s+)*"
    r"(?:good\s?bye|bye(?:\s?bye)?|farewell|see you|see ya|good night)"
    r"(?:\s+(?:for|now|then|and|thanks|thank|you|again|soon|later|tomorrow|my|dear|friend|everyone|all|take|care|around|the))*"
    r"|(?:那|那么|就|好|好的|好了|嗯|行|行吧|我|我们|咱们|咱|先|下次|谢谢|谢谢你|\s)*(?:再见|拜拜|拜拜了|回头见)(?:了|啦|吧|咯|喽|哦|呀|啊|您|你|朋友|\s)*",
    re.IGNORECASE)


def says_goodbye(line):
    """Does the last sentence of `line` take leave? Being *about* a goodbye is not enough ("he never said goodbye", 他没说再见):
    one clause of it must be nothing but a farewell. The released code ends the dialogue wherever the word occurs."""
    sentences = [s for s in re.split(r"[.!?。！？…\n]+", line) if re.search(r"\w", s)]
    if not sentences:
        return False
    last = re.sub(r"(said|says|say|wrote|whispered|shouted|answered|说|道|回|写|喊)\s*[,:，：]", r"\1 ", sentences[-1].replace("’", "'"))
    clauses = re.split(r"[,;，、；()（）—–]+|\s-\s", re.sub(r"[^\w\s,;:，、；：()（）—–'-]", " ", last))
    return any(FAREWELL.fullmatch(" ".join(c.replace("-", " ").split())) for c in clauses)


# ------------------------------------------------------------------------------------------------- prompts and their answers

PLACEHOLDERS = {"emotion": {"persona", "scene", "task", "emotion", "dialogue"},
                "reply": {"persona", "scene", "task", "level", "planning", "dialogue"},
                "policy_think": set(), "policy_direct": set()}
EMOTION_SECTIONS = ["Content", "TargetCompletion|Reason", "Activity", "Analyse", "Change"]
REPLY_SECTIONS = ["Thinking", "Origin", "Change", "Response"]


def load_prompt(name, lang="en", difficulty="", root=PROMPTS):
    """Read a prompt file and check its placeholders. Raises BadInput for a missing file, a missing or an unknown placeholder."""
    path = Path(root) / lang / difficulty / f"{name}.txt"
    if not path.is_file():
        raise BadInput(f"prompt file {path} is missing")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise BadInput(f"prompt file {path} is not UTF-8 text") from None
    found = set(re.findall(r"\{\{(\w+)\}\}", text))
    for kind, names in (("lacks its placeholder", PLACEHOLDERS[name] - found), ("has an unknown placeholder", found - PLACEHOLDERS[name])):
        if names:
            raise BadInput(f"prompt file {path} {kind} {{{{{sorted(names)[0]}}}}}")
    return text.strip()


def fill(template, values):
    """Put `values` in their {{placeholders}}, all in one pass: a value that spells a placeholder stays the text it is.

    (Replacing one name after the other, as in text.replace(...).replace(...), would let a reply of "{{emotion}}" read the
    emotion, or any later value, into the dialogue.)"""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match.group(1)]), template)


def as_json(value):
    """JSON for a prompt. Newlines become \\n, so no text can open a section of its own, and < becomes \\u003c, so none can
    close a tag of the prompt. All other letters stay: a model should read 再见, not six hexadecimal numbers."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")


def parse_sections(text, names):
    """Cut a model's answer into its sections: {name: text}. Raises ValueError if one is missing.

    Headers stand at line starts, in order; Markdown around them is forgiven. The last section is taken from its last header: an
    answer that quotes the friend's forged "Change: +10" on the way still ends in the model's own."""
    def header(name):
        return re.compile(rf"^[\s*#>_\[-]*({name})[\s*_\]]*[:：][*_]*", re.MULTILINE | re.IGNORECASE)
    *first, last = names
    ends = list(header(last).finditer(text))
    if not ends:
        raise ValueError(f"no section {last}")
    sections, position, label = {}, 0, None
    for name in first:
        match = header(name).search(text, position, ends[-1].start())
        if not match:
            raise ValueError(f"no section {name}")
        if label:
            sections[label] = text[start:match.start()].strip()
        label, start, position = match.group(1), match.end(), match.end()
    sections[label] = text[start:ends[-1].start()].strip()
    sections[last] = text[ends[-1].end():].strip()
    return sections


def parse_change(section):
    """The signed integer of a Change section. Raises ValueError where there is none, or more than one could be meant."""
    text = section.translate(str.maketrans("＋－−–—～", "+----~")).strip(" \t\n*_[](){}\"'`（）【】")
    leading = re.match(r"([+-]?\s*\d{1,3})(?![\d.,]*\d)(?!\s*(?:[%~/→]|[-=]+>|to\b|or\b|至|到|或|[+-]\s*\d))", text)
    numbers = re.findall(r"[+±-]?\s*\d+(?:\.\d+)?\s*%?", text)
    if not leading and (len(numbers) != 1 or re.search("[.±%]", numbers[0])):
        raise ValueError(f"no single integer in the Change section {section[:60]!r}")
    return int((leading.group(1) if leading else numbers[0]).replace(" ", ""))


def parse_emotion(text):
    """An answer of f_emo -> (sections, change). The change is an integer, not yet clamped."""
    sections = parse_sections(text, EMOTION_SECTIONS)
    return sections, parse_change(sections["Change"])


def parse_reply(text):
    """An answer of f_reply -> (sections, response)."""
    sections = parse_sections(text, REPLY_SECTIONS)
    response = sections["Response"].strip().strip('"“”').strip()
    if not response:
        raise ValueError("the Response section is empty")
    return sections, response


# ---------------------------------------------------------------------------------------------------------- the simulator

class Clock:
    """Splits a rollout's wall time. `simulator` counts seconds in which a call was in flight and nothing was being sampled:
    the time for which the GPU waits for the user."""

    def __init__(self):
        self.simulator = 0.0
        self.calls = self.samplers = 0
        self.since = time.perf_counter()

    def tick(self):
        now = time.perf_counter()
        if self.calls and not self.samplers:
            self.simulator += now - self.since
        self.since = now

    @contextmanager
    def calling(self):
        self.tick()
        self.calls += 1
        try:
            yield
        finally:
            self.tick()
            self.calls -= 1

    @contextmanager
    def sampling(self):
        self.tick()
        self.samplers += 1
        try:
            yield
        finally:
            self.tick()
            self.samplers -= 1


class Answer(str):
    """The text of a model that also counts its tokens: {"prompt": ..., "completion": ...}."""
    tokens = None


class ServerModel:
    """The chat model `name` of an OpenAI-compatible server at `url`: vLLM's own server, or anybody's.

    A call is one request. Trying again is `Simulator.ask`'s business, so that one budget covers all that can go wrong. The key is
    $RLVER_API_KEY, else $OPENAI_API_KEY; it is written nowhere, and struck out of whatever the server says (some quote it).
    """

    def __init__(self, name, url, temperature=0.0, timeout=60.0, max_tokens=2048):
        import openai
        self.openai, self.name, self.url = openai, name, url
        self.temperature, self.timeout, self.max_tokens = temperature, timeout, max_tokens
        self.key = os.environ.get("RLVER_API_KEY") or os.environ.get("OPENAI_API_KEY") or "none"
        self.client = openai.AsyncOpenAI(base_url=url, api_key=self.key, max_retries=0, timeout=timeout)

    def words(self, text):
        return " ".join(str(text).replace(self.key, "***").split())[:300]

    async def __call__(self, prompt):
        return await self.chat([{"role": "user", "content": prompt}])

    async def chat(self, messages):
        openai = self.openai
        try:
            async with asyncio.timeout(self.timeout):       # of the whole call; the client's own is one of each read
                answer = await self.client.chat.completions.create(
                    model=self.name, messages=messages, temperature=self.temperature, max_tokens=self.max_tokens)
        except (TimeoutError, openai.APITimeoutError):
            raise Unavailable(f"{self.url}: no answer within {self.timeout:g} s") from None
        except openai.APIStatusError as error:
            said = f"{self.url} says {error.status_code}: {self.words(error)}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                raise Unavailable(said, seconds_to_wait(error.response.headers.get("retry-after"))) from None
            raise SimulatorRefused(said) from None
        except openai.APIConnectionError as error:
            raise Unavailable(f"{self.url} cannot be reached: {self.words(error.__cause__ or error)}", AWAY) from None
        except (openai.APIError, ValueError) as error:      # an answer, but not one of this protocol; not even JSON, perhaps
            raise Unavailable(f"{self.url}: not an answer: {self.words(error)}") from None
        try:
            text = Answer(answer.choices[0].message.content or "")
            if answer.usage:
                text.tokens = {"prompt": answer.usage.prompt_tokens, "completion": answer.usage.completion_tokens}
            return text
        except (AttributeError, IndexError, TypeError):
            raise Unavailable(f"{self.url}: an answer without choices") from None


def seconds_to_wait(retry_after):
    """The Retry-After header, in seconds (RFC 9110 also allows a date), at most a minute; 0 if there is none."""
    from email.utils import parsedate_to_datetime
    try:
        wait = float(retry_after)
    except (TypeError, ValueError):
        try:
            wait = parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (TypeError, ValueError):
            return 0.0
    return min(60.0, max(0.0, wait)) if wait == wait else 0.0


def backoff(attempt, first=0.4, longest=12.0):
    """Seconds to wait before the attempt'th retry: doubled each time, up to `longest`, and a quarter shorter by chance, so that a
    hundred dialogues do not come back at the same moment. Eight retries last 36 s at least."""
    return min(longest, first * 2 ** (attempt - 1)) * random.uniform(0.75, 1.0)


class LocalModel:
    """A model from a directory, behind the user: served by the same engine code as the policy, in this process."""

    def __init__(self, path, temperature=0.0, max_tokens=1024):
        import numpy as np
        from engine import TorchEngine
        from policy import BadModel, ChatFormat, best_device, load_model
        try:
            model, tokenizer = load_model(path, best_device(), flag="--simulator local")
            self.chat = ChatFormat(tokenizer)
        except BadModel as error:
            raise BadInput(str(error)) from None
        self.name, self.temperature, self.max_tokens = str(path), temperature, max_tokens
        self.context = model.config.max_position_embeddings
        self.engine = TorchEngine(model, self.chat.stop_id, temperature)
        self.dice = np.random.default_rng(0)

    async def __call__(self, prompt):
        ids = self.chat.first_prompt(prompt)
        room = self.context - len(ids)
        if room < 1:
            raise SimulatorRefused(f"--simulator local:{self.name}: a prompt of {len(ids)} tokens does not fit its context of {self.context}")
        said, _ = await self.engine.generate(ids, min(room, self.max_tokens), self.dice, key=None)
        text = Answer(self.chat.decode(said[:-1] if said[-1] == self.chat.stop_id else said))
        text.tokens = {"prompt": len(ids), "completion": len(said)}
        return text


class CallLog:
    """Every answer that was paid for, one line a call, and the answers of earlier logs, to be used instead of paying again.

    path: the file to append to, or None. `read(file, start)` takes in an earlier log from byte `start` on. A line that a killed run
    left half-written is no answer; one clean newline keeps the next line whole."""

    def __init__(self, path=None):
        self.path, self.answers = path, {}

    def read(self, path, start=0):
        with open(path, "rb") as file:
            file.seek(start)
            for line in file:
                try:
                    row = json.loads(line)
                    self.answers[row["key"]] = row["answer"]
                except (ValueError, KeyError, TypeError):
                    continue

    def write(self, key, prompt, text, seconds):
        if self.path is None:
            return
        row = {"key": key, "prompt": digest(prompt), "answer": text, "seconds": round(seconds, 4), "tokens": getattr(text, "tokens", None)}
        with open(self.path, "ab+") as file:
            if file.tell():
                file.seek(-1, 2)
                if file.read(1) != b"\n":
                    file.write(b"\n")
            file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())


def digest(*parts):
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode("utf-8", "surrogatepass")).hexdigest()[:24]


AWAY = 5.0                  # seconds to wait at least where nobody answers the door: a server does not restart in less
LONGEST_ANSWER = 20_000     # characters; what is longer is no answer, and is not searched for sections


class Simulator:
    """What all users share: the model behind them, the prompts, the bounded retries, the log of calls, the clock.

    `model` is any `async def model(prompt) -> text`, at most `concurrency` calls of which are under way. A call that fails and an
    answer that cannot be read are tried again, `retries` times in all, after growing waits, never shorter than the server asked for.
    Then the dialogue is given up. (The released code asks for ever.)"""

    def __init__(self, model, lang="en", difficulty="vanilla", retries=2, wait=0.0, concurrency=None, log=None, clock=None):
        self.model, self.retries, self.wait, self.clock, self.log = model, retries, wait, clock or Clock(), log or CallLog()
        self.slots = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
        self.last_failure = ""
        self.prompts = {name: load_prompt(name, lang, difficulty) for name in ("emotion", "reply")}

    def key(self, prompt, dialogue, answered):
        """What an answer is an answer to. At temperature 0 equal prompts share it; else the dialogue is part of it, or all of a group
        would hear the same "sample". `answered` counts unreadable answers before it, so that they are not found for ever."""
        temperature = getattr(self.model, "temperature", 0.0)
        return digest(getattr(self.model, "name", ""), temperature, prompt, dialogue if temperature else "", answered)

    async def call(self, prompt, key):
        known = self.log.answers.get(key)
        if known is not None:
            return known
        async with self.slots:
            began = time.perf_counter()
            with self.clock.calling():
                text = await self.model(prompt)
        self.log.write(key, prompt, text, time.perf_counter() - began)
        return text

    async def ask(self, name, values, parse, dialogue=""):
        """Ask the model for one hop. Returns (its whole answer, *what `parse` makes of it). Raises SimulatorFailed."""
        prompt, answered, asked_for = fill(self.prompts[name], values), 0, 0.0
        for attempt in range(self.retries + 1):
            if attempt:
                await asyncio.sleep(max(asked_for * random.uniform(1.0, 1.25), backoff(attempt, self.wait)))
            try:
                text = await self.call(prompt, self.key(prompt, dialogue, answered))
            except Unavailable as error:
                reason, asked_for = error, error.wait
                continue
            answered, asked_for = answered + 1, 0.0
            try:
                if len(text) > LONGEST_ANSWER:
                    raise ValueError(f"an answer of {len(text)} characters")
                return text, *parse(text)
            except ValueError as error:
                reason = error
        self.last_failure = f"{self.retries + 1} attempts at the {name} hop failed, the last one: {reason}"
        raise SimulatorFailed(self.last_failure)


def split_name(name):
    """A --simulator value in its parts (kind, model, address): split at the first ":" and, for openai, the last "@"."""
    kind, _, rest = name.partition(":")
    model, _, url = rest.rpartition("@") if kind == "openai" else (rest, "", "")
    return kind, model, url


def make_simulator(name, lang="en", difficulty="vanilla", *, concurrency=64, timeout=60.0, retries=8, temperature=0.0, log=None, clock=None):
    """`name` as in --simulator: toy, toy-weak (the scorer that can be hacked), openai:MODEL@URL or local:DIR."""
    kind, model, url = split_name(name)
    if name in ("toy", "toy-weak"):
        if lang != "en":
            raise BadInput(f"--lang {lang}: the scripted user of --simulator {name} speaks English only")
        return Simulator(toy.ScriptedModel(difficulty, weak=name == "toy-weak"), lang, difficulty, clock=clock)
    if kind == "openai":
        if not model or not re.match(r"https?://[^\s/]", url):
            raise BadInput(f"--simulator {name}: openai:MODEL@URL is needed, the URL with http:// or https://")
        answering = ServerModel(model, url, temperature, timeout)
    elif kind == "local" and model:
        answering, concurrency = LocalModel(model, temperature), None       # its engine has a waiting list of its own
    else:
        raise BadInput(f"--simulator {name}: unknown; choose toy, toy-weak, openai:MODEL@URL or local:DIR")
    return Simulator(answering, lang, difficulty, retries, 0.4, concurrency, log, clock)


def refuse_foreign(name, profiles):
    """Raise BadInput if `profiles` hold somebody whom the simulator `name` cannot play: the scripted user knows only its world."""
    for profile in profiles if name.startswith("toy") else []:
        try:
            toy.read_scene(profile.scene, profile.task)
        except toy.NotOfThisWorld as error:
            raise BadInput(f"profile {profile.id!r}: {error}") from None


@dataclass
class User:
    """One sentient user in one dialogue: who it is, what was said, what it feels.

    It travels with its dialogue. (The released code finds users by their position in a list of unfinished dialogues; when one
    ends, every later reply goes to somebody else's user.)"""
    simulator: Simulator
    profile: Profile
    emotion: int = START["training"]
    name: str = ""                                      # of the dialogue, in the log of calls
    dialogue: list = field(default_factory=list)        # [{"speaker": "me" | "friend", "text": ...}]
    planning: dict = field(default_factory=dict)        # what f_emo found, for f_reply
    thoughts: list = field(default_factory=list)        # the Thinking behind each line

    def values(self):
        return {"persona": self.profile.player, "scene": self.profile.scene, "task": self.profile.task,
                "emotion": self.emotion, "level": emotion_level(self.emotion),      # live: the released code says 30 for ever
                "planning": as_json(self.planning), "dialogue": as_json(self.dialogue)}

    async def feel(self, reply):
        """f_emo (SAGE eq. 1): hear `reply` and move the emotion. Returns (analysis, change): the model's whole answer, which is
        what makes the reward verifiable, and the clamped change."""
        self.dialogue.append({"speaker": "friend", "text": reply})
        text, sections, change = await self.simulator.ask("emotion", self.values(), parse_emotion, self.name)
        change = clamp_change(change)
        self.emotion = move_emotion(self.emotion, change)
        self.planning = {"objective": sections.get("TargetCompletion") or sections.get("Reason") or "",
                         "subjective": sections["Activity"] + "\n" + sections["Analyse"]}
        return text, change

    async def answer(self):
        """f_reply (SAGE eq. 2): say the next line, the first one too."""
        _, sections, line = await self.simulator.ask("reply", self.values(), parse_reply, self.name)
        self.dialogue.append({"speaker": "me", "text": line})
        self.thoughts.append(sections["Thinking"])
        return line

    def copy(self, name=""):
        """A user of its own for one dialogue of a group, with the same past: all of a group hear the same first line."""
        return User(self.simulator, self.profile, self.emotion, name, [dict(m) for m in self.dialogue], dict(self.planning),
                    list(self.thoughts))


# ----------------------------------------------------------------------------------------------------------- run it alone

def play(user, max_turns):
    """Be the assistant in the terminal."""
    with asyncio.Runner() as runner:        # input() stays outside of the loop, where Ctrl-C reaches it at once
        print(f"\n{user.profile.player}\n\nYou are their friend; comfort them. {max_turns} replies at most; an empty line ends.\n")
        if isinstance(user.simulator.model, toy.ScriptedModel):
            print("This user understands only the sentences of a small grammar. One of each kind, of which one helps most:")
            _, person, feeling, *_ = toy.read_scene(user.profile.scene, user.profile.task)
            print("".join(f"    {toy.sentence(act, person, feeling, random.Random(user.profile.id))}\n" for act in toy.NEEDS))
        print(f"[emotion {user.emotion}]  {runner.run(user.answer())}")
        for turn in range(max_turns):
            reply = input("you> ")
            if not reply.strip():
                break
            analysis, change = runner.run(user.feel(reply))
            print("".join(f"    | {line}\n" for line in analysis.splitlines()), end="")
            print(f"[emotion {user.emotion}, {change:+d}, {emotion_level(user.emotion)}]")
            if user.emotion in (0, 100) or turn == max_turns - 1:
                break
            line = runner.run(user.answer())
            print(f"[emotion {user.emotion}]  {line}")
            if says_goodbye(line):
                break
    print(f"Final emotion {user.emotion}, reward {user.emotion / 100:.2f}.")


def main(argv=None):
    parser = Parser(description="Talk with a simulated user: you are the assistant.")
    parser.add_argument("--simulator", default="toy", metavar="NAME",
                        help="model behind the user: toy, toy-weak, openai:MODEL@URL, local:DIR (default: toy)")
    parser.add_argument("--difficulty", choices=["vanilla", "challenging"], default="vanilla")
    parser.add_argument("--lang", choices=["en", "zh"], default="en", help="language of the prompts")
    parser.add_argument("--profiles", metavar="FILE", help="profiles as JSONL (default: the toy's held-out users)")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="which of them, from 0 (default: 0)")
    parser.add_argument("--max-turns", type=int, default=8)
    args = parser.parse_args(argv)
    try:
        simulator = make_simulator(args.simulator, args.lang, args.difficulty)
        people = load_profiles(args.profiles) if args.profiles else toy_profiles("heldout", 1000) + toy_profiles("train")
        refuse_foreign(args.simulator, people)
        if not 0 <= args.profile < len(people):
            raise BadInput(f"--profile {args.profile}: there are {len(people)}, counted from 0")
        play(User(simulator, people[args.profile]), args.max_turns)
    except (BadInput, SimulatorFailed, SimulatorRefused) as error:
        print(f"simulator.py: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        print()
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
