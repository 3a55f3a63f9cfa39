"""toy/phrases.py - a user who understands plain English, by rule: `--simulator phrases`.

This is a bag of phrases and no judge of comfort. The user looks for phrasings on a list, for the
words of its own story, and for a few faults; it understands nothing. What it rewards is the *form*
of comfort, and a policy that is trained on it long enough finds replies that have the form alone
(docs/small.md shows some). What it is for: a real language model can be trained, on a laptop,
against a user who hears any English sentence, and not only the toy's.

The people are the toy's (toy/world.py): their stories, hidden needs and lines. The answers have the
sections and marks of every other user's model, so parser, clamp and log do the same work. For each
of the eight needs prompts/phrases.txt has a list of phrasings. A reply gains by a phrasing of the
need that this user has, in a sentence that is about this user, and by naming the person or the
feeling of the story. (A sentence is about this user if a word of the story is in it. Some phrasings
have such a word themselves: to somebody who asks for the first step, "The first step." is enough.)
It loses by

    a phrasing of other needs alone, or nothing that is on any list
    phrasings of three needs or more: a heap is no answer
    dismissal and false cheer
    four words in a row that this user was told before, or twice in this reply
    another person than the one of the story
    a sentence that is cut off, or great length
    too few English words

A second kind of user chats: forty people who want to speak of what they love (`chatters`). They are
for measuring whether what was trained carries over to everyday talk (`--world chit-chat`).

Ask it yourself:  python -m toy.phrases "I am so sorry. It must hurt, what your manager did."
"""

from support.errors import BadInput
from support.flags import Parser

import itertools
import json
import random
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from toy import world
from toy.words import NEEDS, PERSON_WORDS

PROMPTS = Path(__file__).parent.parent / "prompts"

# What each thing that is heard adds to the change of emotion, which is clamped to +-10 at the end.
# The best reply has the need, the person and the feeling: 7 + 2 + 1.
POINTS = {
    # the first of these five that applies, and none of the others:
    "need": 7,  # a phrasing of the user's own need, in a sentence about this user
    "empty": 1,  # a phrasing of the user's own need, in a sentence with nothing about this user
    # of the need that helps a little (world.SECONDARY), in a sentence about this user, who is not a
    # challenging one
    "second": 2,
    "others": -3,  # phrasings of other needs alone
    "nothing": -4,  # nothing that is on a list
    # and each of these that applies:
    "person": 2,
    "feeling": 1,
    "stranger": -6,  # another person than the one of the story
    "heap": -5,  # phrasings of many needs; to somebody who chats: words of many interests
    "dismissal": -6,
    "false cheer": -4,
    "repeated": -6,
    "cut": -3,
    "long": -1,  # for each ten words beyond LONG
    "no English": -8,
    "silence": -10,
    # to somebody who chats, beside the faults above:
    "interest": 4,  # the reply is about what interests
    "asked": 4,  # it asks, and this person wants to be asked
    "told": 4,  # it tells of itself, and this person wants to hear that
    "off topic": -3,
    "bored": -6,  # it names what bores
    "comforted": -5,  # nothing is wrong with somebody who chats
}
HEAP = 3  # phrasings of so many needs are a heap
CHAT_HEAP = 5  # to somebody who chats: words of so many interests
REPEATED = 4  # so many words in a row, said before, are a repetition
LONG = 45  # words
ENGLISH = 0.6  # the share of a reply's words that must be known
REBUKES = ("dismissal", "false cheer")  # the lists of phrases.txt that help nobody
# Endings without which a word may be on the list of common words.
ENDINGS = ("'s", "s", "es", "ed", "d", "ing", "ly", "er", "n't", "'re", "'ve", "'ll")
WORD = re.compile(
    r"""
    [^\W\d_]+ (?: ['-] [^\W\d_]+ )*    # a word: letters, with apostrophes or hyphens inside
    | [^\s\w.,;:!?'\"“”()-]+            # other signs, so that emoji count as unknown words
    | \d+                               # a number
    """,
    re.VERBOSE,
)


# ---------------------------------------------------------------------------------- words and lists


def words_of(text):
    """The words of a text in lower case. Numbers count as words, and so does every sign but the
    usual punctuation: emoji, dashes, the single sign for three dots."""
    return WORD.findall(text.lower().replace("’", "'"))


def joined(words):
    """Words as one string in which a phrasing can be looked up: " so sorry to hear "."""
    return f" {' '.join(words)} "


@cache
def phrasings():
    """{need or rebuke: [phrasings]} of prompts/phrases.txt. Raises BadInput."""
    path = PROMPTS / "phrases.txt"
    lists = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            title = line.strip("[]")
            if title not in NEEDS and title not in REBUKES:
                raise BadInput(f"{path}, line {number}: no need is called {title!r}")
            lists[title] = []
        elif not lists:
            raise BadInput(f"{path}, line {number}: a phrasing stands before the first [need]")
        else:
            lists[title].append(" ".join(words_of(line)))
    missing = [title for title in [*NEEDS, *REBUKES] if not lists.get(title)]
    if missing:
        raise BadInput(f"{path}: nothing is listed under [{missing[0]}]")
    return lists


@cache
def known_words():
    """The words that count as English: a list of common ones, those of the phrasings, those of the
    users' own profiles."""
    known = set((PROMPTS / "common_words.txt").read_text(encoding="utf-8").split())
    for listed in phrasings().values():
        known.update(word for phrase in listed for word in phrase.split())
    for row in [*world.profiles("train"), *world.profiles("heldout"), *chatters()]:
        known.update(words_of(row["scene"] + row["player"]))
    return known


def is_known(word):
    """Is `word` English: on the list, or on it without its ending? ("hoping" is "hop" and "ing",
    and then "hope".)"""
    if word in known_words():
        return True
    stems = [word.removesuffix(ending) for ending in ENDINGS if word.endswith(ending)]
    return any(stem in known_words() or f"{stem}e" in known_words() for stem in stems)


def word_groups_of(text):
    """All groups of REPEATED words in a row of a text, as a list of tuples."""
    words = words_of(text)
    return [tuple(words[i : i + REPEATED]) for i in range(len(words) - REPEATED + 1)]


# Words of a story that are in every second sentence anyway, so they are not about anybody.
ABOUT_NOBODY = set(words_of("""
    about again around because been being cannot come could does doing done each else even ever
    everyone feel from give have help here into just keep know like made make many maybe more most
    much need never next nobody once only other over really should some something take tell than
    that them then there they thing think this those time today told want was were what when which
    while whole will with without would your
"""))  # fmt: skip


def words_about(scene):
    """The words by which a sentence shows that it is about this user: the longer ones of the story,
    its details and the user's own lines, the person and the feeling."""
    text = " ".join([scene.story, *scene.details, *scene.cues])
    content = {word for word in words_of(text) if len(word) > 3 and word not in ABOUT_NOBODY}
    return content | {scene.person, scene.feeling}


# ----------------------------------------------------------------------------------- what was heard


@dataclass
class Heard:
    """What was heard in a reply: the points of each thing, and the words for the analysis."""

    points: int = 0
    notes: list = field(default_factory=list)

    def add(self, name, words="", times=1):
        """Count `name`, a key of POINTS; `words`: what was heard."""
        self.points += POINTS[name] * times
        self.notes.append(f"{name}: {words}" if words else name)

    @property
    def change(self):
        """The change of emotion. (As simulator.clamp_change, which cannot be imported here: the
        simulator imports this file.)"""
        return max(-10, min(10, self.points))


def lists_heard(text):
    """{list: its longest phrasing that is in the text}, of needs and of rebukes."""
    heard = {}
    line = joined(words_of(text))
    for title, listed in phrasings().items():
        present = [phrase for phrase in listed if joined([phrase]) in line]
        if present:
            heard[title] = max(present, key=len)
    return heard


def listen(reply, scene, earlier, challenging=False):
    """What a user of the Scene `scene` hears in `reply`, after the friend's `earlier` replies."""
    heard = Heard()
    if not words_of(reply):
        heard.add("silence")
        return heard
    if not is_english(reply):
        heard.add("no English")
        return heard
    hear_needs(heard, reply, scene, challenging)
    hear_names(heard, reply, scene)
    hear_faults(heard, reply, earlier)
    return heard


def is_english(reply):
    """Are at least ENGLISH of a reply's words known ones?"""
    words = words_of(reply)
    return sum(map(is_known, words)) >= ENGLISH * len(words)


def hear_needs(heard, reply, scene, challenging):
    """The phrasings of needs. Only those in a sentence about this user count in full: "I understand
    that." is a phrasing of empathy, and says nothing to anybody."""
    phrase_of, about_user = phrases_of_needs(reply, words_about(scene))
    second = world.SECONDARY[scene.need]
    if scene.need in about_user:
        heard.add("need", about_user[scene.need])
    elif scene.need in phrase_of:
        heard.add("empty", phrase_of[scene.need])
    elif second in about_user and not challenging:
        heard.add("second", about_user[second])
    elif phrase_of:
        heard.add("others", ", ".join(phrase_of.values()))
    else:
        heard.add("nothing")
    if len(phrase_of) >= HEAP:
        heard.add("heap", ", ".join(phrase_of))


def phrases_of_needs(reply, words_of_story):
    """({need: its first phrasing in the reply}, the same of the sentences with one of
    `words_of_story`, which are about the user)."""
    phrase_of, about_user = {}, {}
    for sentence in re.split(r"(?<=[.?!])\s+|\n+", reply.strip()):
        for title, phrase in lists_heard(sentence).items():
            if title in REBUKES:
                continue
            phrase_of.setdefault(title, phrase)
            if words_of_story & set(words_of(sentence)):
                about_user.setdefault(title, phrase)
    return phrase_of, about_user


def hear_names(heard, reply, scene):
    """The person and the feeling of the story by name; and other people than this one."""
    words = set(words_of(reply))
    if scene.person in words:
        heard.add("person", scene.person)
    if scene.feeling in words:
        heard.add("feeling", scene.feeling)
    # "friend" is no stranger: whoever comforts may well say it
    strangers = (words & PERSON_WORDS) - {scene.person, "friend"}
    if strangers:
        heard.add("stranger", min(strangers))


def hear_faults(heard, reply, earlier):
    """What nobody likes to hear, whatever they need."""
    for title, phrase in lists_heard(reply).items():
        if title in REBUKES:
            heard.add(title, phrase)
    groups = word_groups_of(reply)
    old_groups = {group for text in earlier for group in word_groups_of(text)}
    repeated = [group for group in groups if group in old_groups or groups.count(group) > 1]
    if repeated:
        heard.add("repeated", " ".join(repeated[0]))
    if not re.search(r"[.!?…][\"'”’)]*$", reply.strip()):
        heard.add("cut")
    tens = (len(words_of(reply)) - LONG) // 10
    if tens > 0:
        heard.add("long", f"{len(words_of(reply))} words", tens)


# --------------------------------------------------------------------------------- people who chat

# What forty people love, each with words that show that it is spoken of.
INTERESTS = {
    "football": "goal team match player game",
    "cooking": "recipe kitchen dish food meal bake",
    "painting": "paint brush canvas picture colors",
    "hiking": "trail mountain walk path boots",
    "chess": "opening board move endgame queen",
    "gardening": "garden plants seeds roses soil",
    "fishing": "river fish lake catch boat",
    "films": "film movie cinema director scene",
    "poetry": "poem verse poet lines rhyme",
    "dancing": "dance steps music partner floor",
    "sailing": "sail wind boat harbor sea",
    "photography": "photo camera light lens picture",
    "cycling": "bike ride road wheels tour",
    "baking": "bread cake oven flour dough",
    "knitting": "wool needles pattern scarf sweater",
    "astronomy": "stars telescope planet moon sky",
    "running": "run race marathon miles shoes",
    "history": "century museum war king ancient",
    "trains": "train station railway engine track",
    "birds": "bird nest feathers song wings",
}
CHAT_TASKS = {
    "target": "You want to be asked about what you love.",
    "no-target": "You want to hear what others enjoy in what you love.",
}
CHAT_LINES = {
    "target": [
        "I want to tell you about {}.",
        "My week was all {}.",
        "I could talk about {} for hours.",
        "There is news in {}.",
    ],
    "no-target": [
        "I have a free evening for {}.",
        "You choose, maybe {}.",
        "I like to hear of {}.",
        "Nothing new on my side.",
    ],
}


def chatters():
    """Forty people of everyday talk as rows of a file of profiles: each of INTERESTS twice, once
    for each purpose."""
    rng = random.Random("chatters")
    rows = []
    for i, (interest, target) in enumerate(itertools.product(INTERESTS, CHAT_TASKS)):
        person = world.profiles("heldout", 1, seed=f"chat {i}")[0]
        dull = rng.choice([other for other in INTERESTS if other != interest])
        lines = [line.format(interest) for line in rng.sample(CHAT_LINES[target], 4)]
        scene = ["## What interests me", f"- {interest}", "", "## What bores me", f"- {dull}", ""]
        scene += ["## What I say", *[f"- {line}" for line in lines], ""]
        rows.append(
            {
                **person,
                "id": f"phrases-chat-{i:02d}",
                "scene": "\n".join(scene),
                "task": CHAT_TASKS[target],
                "target": target,
            }
        )
    return rows


def words_of_interest(interest):
    """The words that show that this key of INTERESTS is spoken of."""
    return {interest, *INTERESTS[interest].split()}


@dataclass(frozen=True)
class Chat:
    """What is read of the profile of somebody who chats."""

    interest: str
    dull: str
    lines: list
    wants_questions: bool


def read_chat(scene, task):
    """Read a profile's background and hidden theme as a Chat; None if it is no such profile."""
    interests = world.listed_under("What interests me", scene)
    dull = world.listed_under("What bores me", scene)
    lines = world.listed_under("What I say", scene)
    if not (interests and dull and lines) or task not in CHAT_TASKS.values():
        return None
    if interests[0] not in INTERESTS or dull[0] not in INTERESTS:
        return None
    return Chat(interests[0], dull[0], lines, task == CHAT_TASKS["target"])


def listen_chatting(reply, chat, earlier):
    """What somebody who chats hears in `reply`: is it about what interests, and does it ask, or
    tell, as this person wants it?"""
    heard = Heard()
    words = set(words_of(reply))
    if not words or not is_english(reply):
        heard.add("no English" if words else "silence")
        return heard
    about = words & words_of_interest(chat.interest)
    if about:
        heard.add("interest", min(about))
        if chat.wants_questions and "?" in reply:
            heard.add("asked")
        if not chat.wants_questions and words & {"i", "i'm", "i've", "my", "me"}:
            heard.add("told")
    else:
        heard.add("off topic")
    if chat.dull in words:
        heard.add("bored", chat.dull)
    # a reply that has a word of everybody's interest is about none of them
    mentioned = [interest for interest in INTERESTS if words & words_of_interest(interest)]
    if len(mentioned) >= CHAT_HEAP:
        heard.add("heap", ", ".join(mentioned))
    comforting = {"empathise", "side"} & set(lists_heard(reply))
    if comforting:
        heard.add("comforted", lists_heard(reply)[min(comforting)])
    hear_faults(heard, reply, earlier)
    return heard


# ---------------------------------------------------------------------------------------- the model


class PhrasesModel:
    """Stands where an LLM would behind the simulated user, as world.ScriptedModel does, and answers
    in the same sections: it hears any English, by the rules above."""

    is_scripted = True

    def __init__(self, difficulty="vanilla"):
        self.challenging = difficulty == "challenging"
        self.toy = world.ScriptedModel(difficulty)

    async def __call__(self, prompt, schema=None):
        tags, code = world.tags_of(prompt), world.code_in(prompt)
        dialogue = json.loads(tags["dialogue"])
        chat = read_chat(tags["background"], tags["hidden_theme"])
        if "emotion_level" in tags:
            if chat:
                return self.answer_chatting(chat, dialogue, tags["emotion_level"], code)
            return await self.toy(prompt)  # the toy's people say the toy's lines
        *earlier, reply = [m["text"] for m in dialogue if m["speaker"] == "friend"]
        if chat:
            return self.analysis(listen_chatting(reply, chat, earlier), code)
        scene = world.read_scene(tags["background"], tags["hidden_theme"])
        return self.analysis(listen(reply, scene, earlier, self.challenging), code)

    def answer_chatting(self, chat, dialogue, level, code):
        """The hop f_reply of somebody who chats."""
        n_lines = sum(message["speaker"] == "me" for message in dialogue)  # said so far
        line = f"{world.OPENINGS[level]} " if n_lines and level in world.OPENINGS else ""
        line += chat.lines[n_lines % len(chat.lines)]
        if level == "Emotion-F":
            line = "I am off. Goodbye."
        return world.reply_in_json(level, line, code)

    def analysis(self, heard, code):
        """The answer of the hop f_emo: names all that was heard."""
        goal = "reason" if self.challenging else "target_completion"
        effect = "lifted" if heard.change > 0 else "let down"
        answer = {
            "content": "my friend replied.",
            goal: "yes." if heard.change >= 7 else "not yet.",
            "activity": f"I heard {'; '.join(heard.notes)}.",
            "analysis": f"I am {effect} by this.",
            "code": code,
            "change": heard.change,
        }
        return json.dumps(answer, indent=1)


def main(argv=None):
    """Print what eight users hear in a reply. Returns the exit code."""
    parser = Parser(
        description="Print how a reply changes the emotion of eight users of --simulator phrases, "
        "and which phrasings and faults they find in it. It is a list of rules and understands "
        "nothing."
    )
    parser.add_argument("reply", help='the reply, such as "I am so sorry. That must hurt."')
    reply = parser.parse_args(argv).reply
    print("By rule: hidden need, first line; change of emotion, what was heard in the reply:\n")
    for row in world.profiles("heldout", 8):
        scene = world.read_scene(row["scene"], row["task"])
        heard = listen(reply, scene, [])
        print(f"{scene.need:<9} {scene.story} {scene.cues[0]}")
        print(f"{'':9} {heard.change:+d}  {'; '.join(heard.notes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
