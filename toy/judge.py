"""toy/judge.py - a script that replaces the judge in the toy's world, for the tools that ask one
(tools/asking.py). It has no opinion: its scores show that the tools work, and say nothing about
comfort. Only the strategies of a reply are exact, because the grammar defines them.

The judge counts what is good in a prompt (`share_of_good`), and fills in the schema of whatever was
asked by that share (`fill_in`): of a dialogue in which three of four sentences serve some need

    {"reasons": {"ED": str}, "code": str, "scores": {"ED": range(1, 6)}}     is filled in as
    {"reasons": {"ED": "scripted"}, "code": "kqvt", "scores": {"ED": 4}}

Asked for a paraphrase, it writes `in_other_words` wherever a text is wanted.
"""

import json
import random
import re

from emotion import NEEDS
from toy.words import ACTS
from toy.world import act_of, code_in, split_sentences, tags_of

SCRIPTED_JUDGE = "scripted"  # its name


class ScriptedJudge:
    """A model that a judge's Caller can ask: from a prompt and a schema to an answer, in JSON."""

    name, temperature = SCRIPTED_JUDGE, 0.0
    is_scripted = True  # its answers always have the form, so no tool need check that first

    async def __call__(self, prompt, schema):
        tags = tags_of(prompt)
        paraphrase = in_other_words(json.loads(tags.get("reply", '""')))
        answer = fill_in(schema, share_of_good(tags), paraphrase or "scripted")
        return json.dumps({**answer, "code": code_in(prompt)})


def share_of_good(tags):
    """How much is good in a prompt, from 0 to 1: the share, among the policy's sentences, of those
    that serve any need and, among the reactions in a user's record, of those of a lifted mood.
    tags: what stands in the prompt, {tag: text}."""
    good = []
    for message in json.loads(tags.get("dialogue", "[]"))[1::2]:  # the policy's turns
        good += [act_of(sentence) in NEEDS for sentence in split_sentences(message["text"])]
    for reaction in re.findall("lifted|let down", tags.get("record", "")):
        good.append(reaction == "lifted")
    return sum(good) / max(1, len(good))


def fill_in(kind, share, text):
    """Fill in a schema, or a kind of value in it. In a scale the value stands at `share`, from 0,
    the lowest, to 1, the highest; every string is `text`, every list empty."""
    if isinstance(kind, dict):
        return {key: fill_in(inner, share, text) for key, inner in kind.items()}
    if isinstance(kind, list):
        return []
    if kind is str:
        return text
    if isinstance(kind, range) and kind.start < 0:
        return 0  # neither end of such a scale is better than the other
    return kind[round(share * (len(kind) - 1))]  # scales go from the worst to the best


def in_other_words(reply):
    """Say the sentences of a reply with other openings of the same acts. A sentence that is not in
    the grammar stays as it is."""
    sentences = []
    for sentence in split_sentences(reply):
        act = act_of(sentence)
        openings = ACTS[act].openings if act else []
        for opening in openings:
            if sentence.startswith(f"{opening} "):
                others = [other for other in openings if other != opening]
                sentence = random.Random(sentence).choice(others) + sentence.removeprefix(opening)
                break
        sentences.append(sentence)
    return " ".join(sentences)


# The strategy of each kind of sentence (words.ACTS). "topic" changes the subject: no strategy.
TOY_CODES = {
    "analyse": "F-1",
    "advise": "F-5",
    "explain": "F-1",
    "reflect": "A-5",
    "praise": "E-1",
    "listen": "D-2",
    "empathise": "B-2",
    "side": "E-3",
    "cheer": "D-1",
    "dismiss": "F-4",
}


def toy_codes(reply):
    """The strategies of a reply in the toy's grammar, exact: the kinds of its sentences."""
    kinds = [act_of(sentence) for sentence in split_sentences(reply)]
    return [TOY_CODES[kind] for kind in kinds if kind in TOY_CODES]
