"""tools/writing.py: what an answer of the writer has to be, and when two people are too much
alike."""

from support import llm
from support.answers import Unreadable

import re

import pytest

from marks import sign
from simulator import PROMPTS
from tools.writing import (
    SECTIONS,
    alike,
    ngrams_of,
    read_first_line,
    read_sections,
)

SCENE = {
    name: f"{name} is a long story of which a good deal can be told, with place and day. " * 2
    for name in SECTIONS["scene"]
}
PERSON = {
    name: f"{name} with 3 details that nobody would think of at once"
    for name in SECTIONS["persona"]
}
THEME = (PROMPTS / "en" / "writer" / "needs.txt").read_text(encoding="utf-8").splitlines()[5]


def answer(parts, **changes):
    """An answer with these sections; `changes` override them, None leaves one out."""
    return "\n".join(f"{name}: {text}" for name, text in {**parts, **changes}.items() if text)


FAULTS = {
    "no section Age": ("persona", answer(PERSON, Age=None)),
    "section Hobbies is empty": ("persona", answer(PERSON, Hobbies="-")),
    "section Age is empty": ("persona", answer(PERSON, Age="old")),
    "it says the hidden theme": ("persona", answer(PERSON, Talk=f"Thinks: {THEME.upper()}")),
    "the persona has": ("persona", "\n".join(f"{name}: 1" for name in SECTIONS["persona"])),
    "no section Raises": ("scene", answer(SCENE, Raises=None)),
    "no section Lowers": ("scene", answer(SCENE, Lowers=None)),
    "hidden theme, which": ("scene", answer(SCENE, State=THEME.replace(" ", "\n ").rstrip("."))),
    "dialogue is written": (
        "scene",
        answer(SCENE, Timeline='A day.\nAnna: "You again."\nMe: "Yes."\n'),
    ),
    "dialogue is written out": ("scene", answer(SCENE, Event="So:\n“You again.”\n“Yes, me.”\n")),
    "the same replies": ("scene", answer(SCENE, Raises="Kind words.", Lowers="kind words")),
    "the scene has": ("scene", answer(SCENE, Cause="and so on\n" * 1200)),
    "no line 'End kqvt'": ("first line", "I cannot help with that."),
    "says goodbye": ("first line", "I am off. Bye."),
    "says the hidden": ("first line", THEME),
    "first line has 2 characters": ("first line", "Hm"),
}


def first_line(text):
    """What is made of an answer of the reply hop, whose Response is `text`."""
    whole = sign(f"Thinking: t\nOrigin: o\nChange: c\nResponse: {text}", "kqvt")
    return read_first_line(text if "cannot help" in text else whole, "kqvt", "en", THEME)


@pytest.mark.parametrize("complaint", FAULTS)
def test_a_faulty_answer_is_complained_of(complaint):
    """In words that the writer can act on. The same answer without its fault is taken."""
    kind, text = FAULTS[complaint]
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        first_line(text) if kind == "first line" else read_sections(text, kind, "en", THEME)
    # of a first line one of the fixed list is told, for it is read by its mark
    assert isinstance(caught.value, Unreadable) or kind != "first line"
    assert read_sections(answer(PERSON), "persona", "en", THEME)["Name"].startswith("Name with")
    assert read_sections(answer(SCENE, Event='He said "no" and left.'), "scene", "en", THEME)
    assert first_line("Well, it rains.") == "Well, it rains."


def test_a_cut_answer_is_none():
    """It may end in the middle of Lowers, and nobody would see."""
    text = llm.Answer(answer(SCENE))
    text.cut = True
    with pytest.raises(ValueError, match="cut off"):
        read_sections(text, "scene", "en", THEME)


def test_near_duplicates_by_hand():
    """N-grams of six words: of 12 words there are 7. Half of them and one more is a near-duplicate;
    in Chinese the words are characters."""
    text = "a b c d e f g h i j k l"
    assert len(ngrams_of(text)) == 7
    seen = {"one": ngrams_of(text)}
    assert alike(ngrams_of("a b c d e f g h i X Y Z"), seen) == "one"  # 4 of 7
    assert alike(ngrams_of("a b c d e f g h X Y Z W"), seen) is None  # 3 of 7
    assert alike(set(), seen) is None  # too short to tell
    assert len(ngrams_of("她把我从主桌挪到了")) == 4
