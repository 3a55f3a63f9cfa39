"""tools/scripted.py - what stands in for a language model where a tool needs one, offline; it is no
tool itself.

The simulated user of the toy is toy.ScriptedModel. Here are the other two: a writer of users, for
tools/profiles.py, and a judge of dialogues, for the tools that ask one. Both read the same prompts
as a model would and answer in the form that these ask for.
"""

from support.toy_words import ACTS, DETAILS, EVENTS, FEELINGS, NEEDS, PEOPLE

import json
import random
import re

from tools.judged import SCRIPTED_JUDGE
from toy import ScriptedModel, act_of, need_of, split_sentences, tags_of


class ScriptedWriter:
    """Writes users by rule, from a file of templates and lists of words:

        [a persona]
        Name: {{first name}}
        [first name]
        Agnes

    The lines below a [heading] are a template, "a persona" or "a scene", or the list that fills the
    placeholder of that name. What it writes is readable, can be played by the scripted user, and
    resembles nobody."""

    def __init__(self, path):
        # the pieces: what stands before the first heading, then heading and text by turns
        pieces = re.split(r"^\[(.+)\]\n", path.read_text(encoding="utf-8"), flags=re.M)
        headings, texts = pieces[1::2], pieces[2::2]
        self.blocks = dict(zip(headings, texts))
        self.user = ScriptedModel()

    async def __call__(self, prompt):
        tags = tags_of(prompt)
        if "hidden_theme" in tags:  # a first line is asked for: the user says it, not the writer
            return await self.user(prompt)
        rng = random.Random(prompt)
        shuffled = {}
        for name, choices in self.choices_for(tags).items():
            shuffled[name] = rng.sample(choices, len(choices))
        template = self.blocks["a persona" if "type" in tags else "a scene"]
        text = template.replace("<P>", shuffled["person"][0])
        # each {{name}} takes a line that no other {{name}} has taken
        return re.sub(r"\{\{(.+?)\}\}", lambda match: shuffled[match.group(1)].pop(), text)

    def choices_for(self, tags):
        """{name of a placeholder: the lines that may fill it}, for the tags of a prompt."""
        need = need_of(tags.get("theme")) or "side"
        choices = {}
        for name, text in {**self.blocks, **tags}.items():
            choices[name] = text.strip().split("\n")
        choices["person"] = PEOPLE["train"] + PEOPLE["heldout"]
        choices["event"] = EVENTS["train"] + EVENTS["heldout"]
        choices["feeling"] = FEELINGS["train"] + FEELINGS["heldout"]
        choices["detail"] = DETAILS["train"] + DETAILS["heldout"]
        choices["cue"] = NEEDS[need].cues["train"] + NEEDS[need].cues["heldout"]
        choices["age"] = [str(age) for age in range(16, 76)]
        choices["raises"] = choices[f"raises {need}"]
        return choices


class ScriptedJudge:
    """Fills in the form at the end of a judge's prompt, below a line "---":

        Evaluation ABCD: [why]
        Score ABCD: [1-5]
        End ABCD

    Each [scale] gets a number by the share of sentences that serve any need; what is not on a scale
    gets a text. It has no opinion, and stands where a judge would in the toy's world."""

    name, temperature = SCRIPTED_JUDGE, 0.0
    is_scripted = True  # its answers always have the form, so no tool need check that first

    async def __call__(self, prompt):
        body, _, form = prompt.rpartition("\n---\n")
        tags = tags_of(body)
        share = self.share_of_good(tags)
        fills = {
            "1-5": 1 + round(4 * share),
            "0-10": round(10 * share),
            "A-F": "FEDCBA"[round(5 * share)],
            "-1 to 1": 0,
            "codes": "none",
            "reply": in_other_words(json.loads(tags.get("reply", '""'))),
        }
        return re.sub(r"\[([^\]]*)\]", lambda match: str(fills.get(match[1], "scripted")), form)

    def share_of_good(self, tags):
        """The share, from 0 to 1, of the good ones among the policy's sentences (those that serve
        any need) and the user's reactions in the record (those of a mood that was lifted)."""
        replies = json.loads(tags.get("dialogue", "[]"))[1::2]  # the policy's turns
        good = []
        for message in replies:
            good += [act_of(sentence) in NEEDS for sentence in split_sentences(message["text"])]
        reactions = re.findall("lifted|let down", tags.get("record", ""))
        good += [reaction == "lifted" for reaction in reactions]
        return sum(good) / max(1, len(good))


def in_other_words(reply):
    """The same sentences, each with another opening of its act. A sentence that is not in the
    grammar stays as it is."""
    reworded = []
    for sentence in split_sentences(reply):
        act = act_of(sentence)
        openings = ACTS[act].openings if act else []
        used = next((opening for opening in openings if sentence.startswith(f"{opening} ")), None)
        if used is not None:
            others = [opening for opening in openings if opening != used]
            new_opening = random.Random(sentence).choice(others)
            sentence = new_opening + sentence.removeprefix(used)
        reworded.append(sentence)
    return " ".join(reworded)
