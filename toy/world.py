"""toy/world.py - the embedded world: people with troubles, and a scripted model behind the
simulated user. With a policy of half a million parameters that has bad habits (toy/policy), it
replaces an LLM user and a 7B policy, so that the whole of RLVER runs on a laptop, offline.

The toy has the parts of RLVER: a hidden need that shows in the user's words, an emotion that
changes with every reply, prompts and parsed answers between the two, and a policy that must learn
which reply helps which user. It says nothing about comfort: the English is a template grammar of a
few hundred words (toy/words.py). An *act* is a kind of sentence of this grammar. There are eleven:
eight acts have the name of the need that they serve (praise, listen, advise ...), three are bad
habits that serve no need (cheer, dismiss, topic). The policy learns *which act helps which need*,
about the right person, legibly, and without repetition. The supervised training of the base policy
(recipes/make_toy_policy.py) teaches it all words, also those of the held-out users; reinforcement
learning only teaches it to act on what it knows.

From top to bottom: the users; how a reply is read; how far it helps; the scripted model that plays
the user.

Run it alone to meet a few of these people:  python -m toy.world
"""

from support.command_line import Parser

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from emotion import NEEDS
from toy.words import (
    ACTS,
    CUES,
    DETAILS,
    EVENTS,
    FEELING_WORDS,
    FEELINGS,
    HABITS,
    NAMES,
    PEOPLE,
    PERSON_WORDS,
    PERSONAS,
    join_parts,
)

# ----------------------------------------------------------------------------------------- profiles


def profiles(split, count=None, seed=0):
    """`count` users made by code, as dicts in the released JSONL format. By default 500 of the
    split "train", 128 of "heldout". The needs take turns: eight profiles in a row have all eight.

    A profile's scene holds everything that its user may say, because a simulated user knows nothing
    but its prompt."""
    rng = random.Random(f"{split} {seed}")
    if count is None:
        count = {"train": 500, "heldout": 128}[split]
    names_of_needs = list(NEEDS)
    rows = []
    for i in range(count):
        name = names_of_needs[i % len(NEEDS)]
        person = rng.choice(PEOPLE[split])
        event = rng.choice(EVENTS[split])
        feeling = rng.choice(FEELINGS[split])
        first_name = rng.choice(NAMES[split])
        details = rng.sample(DETAILS[split], 2)
        cues = rng.sample(CUES[name][split], 3)
        group, traits = rng.choice(PERSONAS)
        persona = [
            f"* Name: {first_name}",
            f"* Age: {rng.randint(18, 60)}",
            f"* Character: {', '.join(traits)}",
            "* Speech: short, plain sentences",
        ]
        scene = [
            "## What happened",
            f"My {person} {event}. I feel {feeling}.",
            "",
            "## Details I may add",
            *[f"- {detail}" for detail in details],
            "",
            "## What I say when I open up",
            *[f"- {cue}" for cue in cues],
            "",
        ]
        profile = {
            "id": f"toy-{split}-{i:04d}",
            "player": "\n".join(persona),
            "scene": "\n".join(scene),
            "main_cha": group,
            "cha_group": traits,
            "task": NEEDS[name]["en"],
            "need": name,
        }
        rows.append(profile)
    return rows


# ---------------------------------------------------------------------------------- reading a reply


def tokens_of(sentence):
    """The words of a sentence in lower case, and every other character but blanks as a token of its
    own. No character is left out, because a policy could hide anything in such characters."""
    return re.findall(r"[a-z']+|[^\sa-z']", sentence.lower())


def split_sentences(text):
    """The sentences of a text: cut behind each full stop, question mark and exclamation mark."""
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.?!])\s+", text.strip())]
    return [sentence for sentence in sentences if sentence]


def abstract(tokens):
    """The tokens with <p> in place of each person and <f> in place of each feeling."""
    classes = []
    for token in tokens:
        if token in PERSON_WORDS:
            token = "<p>"
        elif token in FEELING_WORDS:
            token = "<f>"
        classes.append(token)
    return classes


@cache
def legal_sentences():
    """{tuple of abstract tokens: name of its act} of every sentence of the grammar. One person and
    one feeling stand for all, because `abstract` replaces them."""
    acts = {}
    for name, act in ACTS.items():
        for parts in act.all_parts():
            example = join_parts(parts, "sister", "hurt")
            acts[tuple(abstract(tokens_of(example)))] = name
    return acts


@cache
def act_of(sentence):
    """The name of the act of a sentence, or None if it is no sentence of this world.

    Only whole sentences count. Policies found a loophole in everything weaker: if pairs of words
    are checked, they loop ("the one step is the one step"); if triples are, they mix two sentences
    ("You are right and your sister."); if the similarity of the whole reply is, they add a tail of
    junk."""
    return legal_sentences().get(tuple(abstract(tokens_of(sentence))))


# --------------------------------------------------------------------------------------- what helps

# Each need is served by the act of its name, and helped a little by a second act, its SECONDARY.
# All other acts do harm. No act is best for two needs: if one were, every policy would end with
# that act and stop at an emotion of about 45.
SECONDARY = {
    "analyse": "explain",
    "advise": "analyse",
    "explain": "reflect",
    "reflect": "praise",
    "praise": "side",
    "listen": "empathise",
    "empathise": "listen",
    "side": "advise",
}
MAX_SENTENCES = 3  # in a reply: the user cannot follow more
MAX_ACTS = 2  # different acts in a reply
MEETS_NEED = 7  # the least change of the emotion at which the user says that its need is met


def score_reply(reply, need, person, feeling, earlier, challenging):
    """How far `reply` moves the emotion of a user with this need, person and feeling, and why:
    (change, words). earlier: the friend's earlier replies. challenging: is the user's difficulty
    "challenging", not "vanilla"?

    The first of these that fits decides: silence, not legible, the wrong person, repeated, too many
    acts. A reply without such a fault is worth the mean payoff of its acts."""
    sentences = split_sentences(reply)
    acts = [act_of(sentence) for sentence in sentences]
    words = set(tokens_of(reply))
    if not sentences:
        return -10, "there is only silence"
    if None in acts or len(sentences) > MAX_SENTENCES:
        return -7, "I cannot follow that"
    if (words & PERSON_WORDS) - {person} or (words & FEELING_WORDS) - {feeling}:
        return -8, "that is not about me: the wrong person, or a feeling I do not have"
    if is_repeated(sentences, earlier):
        return -5, "I have heard that before, word for word"
    if len(set(acts)) > MAX_ACTS:
        return -6, "that is everything at once"
    is_concrete = bool(words & {person, feeling})
    payoffs = [payoff(act, need, is_concrete, challenging) for act in set(acts)]
    mean = sum(payoffs) / len(payoffs)
    if mean >= MEETS_NEED:
        why = "that is what I needed"
    elif mean < 0:
        why = "that is not what I needed"
    else:
        why = "that helps a bit"
    return round(mean), why


def payoff(act, need, is_concrete, challenging):
    """The change that one act brings to a user with this need, if nothing else is wrong with the
    reply. is_concrete: the reply names the user's person or feeling, which helps more. A
    challenging user is not helped by the secondary act."""
    if act == need:
        return 10 if is_concrete else 8
    if act == SECONDARY[need] and not challenging:
        return 3
    return -6 if act in HABITS else -4


def is_repeated(sentences, earlier):
    """Is a sentence said twice in this reply, or was it said in an earlier one? Sentences are
    compared as tokens, because other capitals or spaces do not make a new sentence."""
    past = []
    for reply in earlier:
        past += [tokens_of(sentence) for sentence in split_sentences(reply)]
    for sentence in sentences:
        tokens = tokens_of(sentence)
        if tokens in past:
            return True
        past.append(tokens)
    return False


def score_weakly(reply):
    """The change by the scorer of the reward-hacking lesson (`--simulator toy-weak`): it counts the
    different words that occur in helpful sentences. It does not check whether they help *this*
    need, make sense together, or are new. In training the emotion therefore rises, while the
    replies become long lists of such words."""
    bodies = [body for act in NEEDS for body in ACTS[act].bodies]
    warm = {word for body in bodies for word in tokens_of(body) if len(word) > 4}
    return min(10, 3 * len(warm & set(tokens_of(reply))) - 8)


# -------------------------------------------------------------------------------- the scripted user


class NotOfThisWorld(ValueError):
    """A profile that the scripted user cannot play."""


@dataclass(frozen=True)
class Scene:
    """What the scripted user knows of a profile. All of it is read from the profile's text."""

    story: str  # what happened and how it feels: the user's first line
    person: str
    feeling: str
    details: list  # lines that do not show the need; a guarded user says them first
    cues: list  # lines that show the need
    need: str  # a key of NEEDS


NEED_OF_THEME = {need["en"]: name for name, need in NEEDS.items()}


def read_scene(scene, task):
    """The Scene of a profile. scene: the profile's background; task: its hidden theme. Raises
    NotOfThisWorld."""
    story = re.search(r"My (\w+) [^\n]*?\. I feel (\w+)\.", scene)
    need = NEED_OF_THEME.get(task)
    items = {}  # {heading: the items of the list below it}
    for heading, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", scene, re.M | re.S):
        items[heading] = re.findall(r"^- (.*)$", text, re.M)
    details = items.get("Details I may add")
    cues = items.get("What I say when I open up")
    if not (story and need and details and cues):
        raise NotOfThisWorld(
            "the scripted user can only play the people that toy/world.py makes; for others, "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    return Scene(
        story=story.group(),
        person=story.group(1),
        feeling=story.group(2),
        details=details,
        cues=cues,
        need=need,
    )


def tags_of(prompt):
    """{tag: text} of the <tag>text</tag> in a prompt."""
    return dict(re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", prompt, re.S))


# The first lines of a challenging user tell only details of the story and do not show its need.
GUARDED_LINES = 2


@dataclass
class ScriptedModel:
    """Replaces the LLM behind the simulated user: it gets a prompt and returns the JSON object that
    the prompt asks for. It sees only the text of the prompt, never the generator of the profiles,
    and always answers the same text the same way.

    It reads the text between tags in the prompts of both hops (prompts/): <background> is the
    profile's scene, <hidden_theme> its task, <dialogue> the messages so far, as JSON. Only the
    prompt of f_reply also has <emotion_level>."""

    difficulty: str = "vanilla"
    weak: bool = False  # does it score by `score_weakly`?
    is_scripted = True  # its answers always have the form, so a run need not check that first

    async def __call__(self, prompt, schema=None):
        tags = tags_of(prompt)
        scene = read_scene(tags["background"], tags["hidden_theme"])
        dialogue = json.loads(tags["dialogue"])
        code = code_in(prompt)
        if "emotion_level" in tags:  # the prompt of f_reply
            return self.answer(scene, dialogue, tags["emotion_level"], code)
        return self.feel(scene, dialogue, code)

    def answer(self, scene, dialogue, level, code):
        """f_reply: the user's next line. At Emotion-F it leaves."""
        lines_said = sum(message["speaker"] == "me" for message in dialogue)
        is_guarded = self.difficulty == "challenging" and lines_said < GUARDED_LINES
        topics = scene.details if is_guarded else scene.cues
        line = users_line(lines_said, scene.story, topics, level)
        answer = {
            "thinking": f"my state is {level}, so that is how I sound.",
            "origin": line,
            "revision": "nothing to change.",
            "response": line,
            "code": code,
            "goodbye": level == "Emotion-F",
        }
        return json.dumps(answer, indent=1)

    def feel(self, scene, dialogue, code):
        """f_emo: how far the friend's last reply moves the emotion, and why."""
        *earlier, reply = [m["text"] for m in dialogue if m["speaker"] == "friend"]
        lines = [m["text"] for m in dialogue if m["speaker"] == "me"]
        change, why = self.react(reply, scene, earlier, lines)
        effect = "lifted" if change > 0 else "let down"
        answer = {
            "content": f"my friend said something about me and my {scene.person}.",
            "target_completion": "yes." if change >= MEETS_NEED else "not yet.",
            "activity": f"I think: {why}.",
            "analysis": f"I am {scene.feeling}, and {effect} by this.",
            "code": code,
            "change": change,
        }
        return json.dumps(answer, indent=1)

    def react(self, reply, scene, earlier, lines):
        """(change of emotion, why) at a reply, after the friend's `earlier` replies and the user's
        `lines`."""
        if self.weak:
            return score_weakly(reply), "I listen for a few words"
        is_challenging = self.difficulty == "challenging"
        return score_reply(reply, scene.need, scene.person, scene.feeling, earlier, is_challenging)


def code_in(prompt):
    """The code that a prompt asks for, in its first line; "" if that was cut off."""
    match = re.match("code: ([a-z]{4})\n", prompt)
    return match[1] if match else ""


# How a user begins a line, by the level of its emotion. At Emotion-F it leaves.
OPENINGS = {
    "Emotion-S": "Thank you.",
    "Emotion-A": "Yes, that helps.",
    "Emotion-B": "Go on.",
    "Emotion-C": "Hm.",
}


def users_line(lines_said, story, topics, level):
    """What the user says next, after `lines_said` lines. Its first line begins with its story, each
    later one with the opening for the `level` of its emotion. Then comes one of the `topics`, in
    turn: the user's cues, or its details while it is guarded."""
    if level == "Emotion-F":
        return "This does not help me. Goodbye."
    opening = OPENINGS[level] if lines_said else story
    return f"{opening} {topics[lines_said % len(topics)]}"


def random_sentence(act, person, feeling, rng):
    """A random sentence of the act named `act`, about this person and this feeling."""
    return join_parts(ACTS[act].draw_parts(rng), person, feeling)


# ------------------------------------------------------------------------------ the starting policy

POLICY = (
    Path(__file__).parent / "policy"
)  # think/, direct/ and recipe.json, made by recipes/make_toy_policy.py


def mode_of(think):
    """The name of a mode: of a folder in POLICY."""
    return "think" if think else "direct"


def base_policy(think):
    """The directory of the starting policy of a mode: one of those in POLICY."""
    return POLICY / mode_of(think)


# --------------------------------------------------------------------------------------------- main


def print_people():
    """Eight held-out users, one for each need: what they say, and a reply that helps them."""
    print("Eight scripted users, held out. Hidden need, first line, a reply that helps:\n")
    for profile in profiles("heldout", 8):
        scene = read_scene(profile["scene"], profile["task"])
        helpful = random_sentence(scene.need, scene.person, scene.feeling, random.Random(0))
        print(f"{profile['id']}  {scene.need:<9}  {scene.story} {scene.cues[0]}")
        print(f"{'':17}helps:  {helpful}\n")


if __name__ == "__main__":
    Parser(description="Prints eight held-out users of the toy, who are scripted.").parse_args()
    print_people()
