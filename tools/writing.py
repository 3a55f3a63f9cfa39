"""tools/writing.py - a model writes users: asking it for their parts, and what its answers must be.

A user is begun as a draft, a dict of what was drawn for it (tools/profiles.py). Three parts are
written, one after the other: the persona, the scene, the first line. An answer is cut into named
sections and checked; one that cannot be used is asked for again, with the complaint. A persona or a
scene that is nearly that of an earlier user is written again, too.
"""

from support.answers import Unreadable, unmarked_sections
from support.errors import SimulatorFailed
from support.signs import words_of

import asyncio
import re

from simulator import PreparedCall, Profile, User, fill, load_prompt, parse_reply, says_goodbye

# The parts of a user, in the order in which they are written, and the field of its profile that
# each goes into.
FIELD_OF_PART = {"persona": "player", "scene": "scene", "first line": "first_talk"}
# The sections of a written part, in the order in which the prompt asks for them.
SECTIONS = {
    "persona": "Name Age Sex Job Hobbies Habits Style Talk".split(),
    "scene": "Event Cause Timeline Conflict Attempts State Moods Raises Lowers".split(),
}
# The fields of a profile, as the file has them.
PROFILE_FIELDS = (
    "id",
    "player",
    "scene",
    "main_cha",
    "cha_group",
    "topic",
    "task",
    "need",
    "first_talk",
)
# {name of a prompt in prompts/*/writer/: its placeholders}
PLACEHOLDERS = {
    "persona": {"main_cha", "traits", "talk"},
    "again": {"complaint"},
    "scene": {"player", "topic", "task"},
    "persona_layout": {*SECTIONS["persona"]},
    "scene_layout": {*SECTIONS["scene"], "task"},
}
# Characters, at least and at most; the released users have 577 and 1,575 on average, in Chinese.
BOUNDS = {
    "en": {"persona": (150, 4000), "scene": (500, 9000), "first line": (4, 500)},
    "zh": {"persona": (60, 2000), "scene": (200, 5000), "first line": (2, 250)},
}
# A text is nearly another one if they share more than half of their n-grams (`alike`), which are so
# many words long, in Chinese characters.
NGRAM = 6
ROUNDS = (
    4  # how often a part may be written before a user is given up whose part is nearly another's
)
# A line in which somebody speaks. A scene with two of them is a dialogue, and no report of one.
WRITTEN_DIALOGUE = re.compile(
    r"""
    ^[ *-]*                                   # in a list or in bold, perhaps:
    (?:(?:[\w'.]{1,12}[ ]?){1,3}[:：][ ]*)?   # a name of up to three words and a colon, or none,
    ["“「].*["”」]\s*$                         # and quotation marks around all the rest
    |
    ^[ *-]*(?:npc|player|friend|me|玩家|朋友|我)[ ]*[:：]  # or a speaker, as in a play
    """,
    re.MULTILINE | re.IGNORECASE | re.VERBOSE,
)


async def write_users(drafts, simulator, lang, bar):
    """Write persona, scene and first line into `drafts`. Returns {id: why it failed for good}."""
    writer = Writer(simulator, lang, bar)
    for part in FIELD_OF_PART:
        # Asked all at once, but accepted in the users' order and not in that of the answers, or a
        # slow server would change the file.
        todo = [draft for draft in drafts if draft["id"] not in writer.lost]
        answers = await asyncio.gather(*[writer.ask(draft, part) for draft in todo])
        accepted = {}
        for draft, answer in zip(todo, answers):
            if part == "first line":
                draft["first_talk"] = answer
            else:
                await writer.accept(draft, part, answer, accepted)
    return writer.lost


class Writer:
    """Asks a model for the parts of users."""

    def __init__(self, simulator, lang, bar):
        self.simulator, self.lang, self.bar = simulator, lang, bar
        self.lost = {}  # {id: why this user failed for good}
        self.prompts = {
            name: load_prompt(name, lang, "writer", placeholders=placeholders)
            for name, placeholders in PLACEHOLDERS.items()
        }

    async def ask(self, draft, part, complaint="", attempt=0):
        """One part of one user: of persona and scene {section: text}, of the first line the text;
        None once it failed for good. attempt: how many answers were refused as somebody else's, the
        last of them with this `complaint`."""
        try:
            if part == "first line":
                return await self.ask_first_line(draft)
            return await self.ask_sections(draft, part, complaint, attempt)
        except SimulatorFailed as error:
            self.lost[draft["id"]] = str(error)
            return None
        finally:
            if attempt == 0:
                self.bar.update(1)

    async def ask_sections(self, draft, part, complaint, attempt):
        """A persona or a scene, {section: text}. Raises SimulatorFailed."""

        def prepare(errors):  # no mark: no policy speaks in a persona or a scene
            prompt = fill(self.prompts[part], draft)
            last_complaint = str(errors[-1]) if errors else complaint
            if last_complaint:
                prompt += "\n\n" + fill(self.prompts["again"], {"complaint": last_complaint})
            key = self.simulator.key(prompt, draft["id"] + part, [attempt, len(errors)])
            return PreparedCall(prompt, "", key)

        def parse(text, mark):
            return read_sections(text, part, self.lang, draft["task"])

        answer = await self.simulator.ask_until_readable(f"the {part}", prepare, parse)
        return answer.parsed

    async def ask_first_line(self, draft):
        """The first line, by the simulator's own prompt, as in a dialogue. Raises
        SimulatorFailed."""

        def parse(text, mark):
            return read_first_line(text, mark, self.lang, draft["task"])

        profile = Profile(**{name: draft.get(name, "") for name in PROFILE_FIELDS})
        user = User(self.simulator, profile)
        name = draft["id"] + "first line"
        answer = await self.simulator.ask("reply", user.values(), parse, name)
        return answer.parsed

    async def accept(self, draft, part, sections, accepted):
        """Put a persona or a scene into `draft`. One that is nearly that of an earlier user is
        written again, ROUNDS times in all; then the user is lost.

        sections: the first answer, None if there is none. accepted: {name: ngrams} of the users
        before this one. Only the sections are compared: the headings are ours, and a text that all
        have in common makes nobody alike."""
        duplicate = None
        for attempt in range(ROUNDS):
            if attempt > 0:
                complaint = f"it is nearly the same as {duplicate}"
                sections = await self.ask(draft, part, complaint, attempt)
            if sections is None:  # `ask` has written down why
                return
            name = f"{sections['Name']}, {sections['Job']}" if part == "persona" else draft["id"]
            ngrams = ngrams_of("\n".join(sections.values()))
            duplicate = duplicate_of(name, ngrams, accepted)
            if duplicate is None:
                accepted[name] = ngrams
                layout = self.prompts[f"{part}_layout"]
                draft[FIELD_OF_PART[part]] = fill(layout, {**draft, **sections})
                return
        self.lost[draft["id"]] = f"the {part} is nearly that of {duplicate}, {ROUNDS} times"


# ------------------------------------------------------------------------- what an answer has to be


def read_sections(text, part, lang, task):
    """The sections of a persona or a scene, {name: text}. Raises ValueError with a complaint that
    the writer can act on. (A hidden theme that is said in other words is not noticed.)"""
    if getattr(text, "cut", False):
        raise ValueError("it was cut off at the limit of its length; be shorter")
    sections = unmarked_sections(text, {name: name for name in SECTIONS[part]})
    for name, section in sections.items():
        needed = r"\d" if name == "Age" else r"\w"
        if not re.search(needed, section):
            raise ValueError(f"section {name} is empty")
    body = "\n".join(sections.values())
    refuse_length_and_theme(body, part, lang, task)
    if part == "scene":
        lines_of_dialogue = WRITTEN_DIALOGUE.findall(body)
        if len(lines_of_dialogue) > 1:
            raise ValueError(f"dialogue is written out in it ({lines_of_dialogue[:1]}); report it")
        if squeeze(sections["Raises"]) == squeeze(sections["Lowers"]):
            raise ValueError("the same replies raise and lower the emotion")
    return sections


def read_first_line(text, mark, lang, task):
    """The first line that the user's own hop has answered. Raises ValueError."""
    line = parse_reply(text, mark)[1]
    try:
        refuse_length_and_theme(line, "first line", lang, task)
    except ValueError as error:  # an answer with a mark has a complaint of the fixed list
        raise Unreadable("opening", str(error)) from None
    if says_goodbye(line):
        raise Unreadable("opening", "the first line says goodbye")
    return line


def refuse_length_and_theme(body, part, lang, task):
    """Raise ValueError if a text is too short or too long, or says the hidden theme."""
    least, most = BOUNDS[lang][part]
    if not least <= len(body) <= most:
        raise ValueError(f"the {part} has {len(body)} characters; {least} to {most} are wanted")
    if squeeze(task) in squeeze(body):
        raise ValueError("it says the hidden theme, which must stay unsaid")


def squeeze(text):
    """Letters and digits alone: neither a comma nor a line end may hide a theme."""
    return re.sub(r"[\W_]+", "", text).casefold()


# ---------------------------------------------------------------------------------- near-duplicates


def ngrams_of(text):
    """The n-grams of a text: all sequences of NGRAM words that follow each other in it."""
    words = words_of(text)
    return {tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)}


def duplicate_of(name, ngrams, others):
    """Who of `others`, {name: ngrams}, has the same name, or else nearly the same text: a name, or
    None."""
    if name in others:
        return name
    return alike(ngrams, others)


def alike(ngrams, others):
    """The first of `others`, {name: ngrams}, who shares over half of the n-grams of the shorter
    text of the two: a name, or None."""
    for name, ngrams_of_other in others.items():
        shared = len(ngrams & ngrams_of_other)
        if 2 * shared > min(len(ngrams), len(ngrams_of_other)):
            return name
    return None
