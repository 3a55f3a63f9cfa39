"""tools/chat.py: to talk to a policy, or to watch it talk."""

import re
from unittest.mock import Mock

import pytest

from people import toy_profiles
from tools import chat

RAW = re.compile('"change": -?\\d')  # of an analysis as the model wrote it


def type_in(monkeypatch, *lines):
    """These lines are typed; then it is Ctrl-D."""
    typed = Mock(side_effect=[*lines, EOFError])
    monkeypatch.setattr("builtins.input", typed)


@pytest.mark.parametrize("end", [[], [""]])
def test_a_chat_ends_at_an_empty_line_or_ctrl_d(end, tiny_dir, monkeypatch, capsys):
    type_in(monkeypatch, "Hello.", "I feel hurt.", *end)
    assert chat.main([str(tiny_dir), "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("it>") == 2


def test_to_be_the_policy_oneself(monkeypatch, capsys):
    """Typed replies are heard as any: analysis in plain words, emotion and answer are printed; the
    hidden need is told at the end, and not before."""
    profile = toy_profiles("heldout")[3]
    type_in(monkeypatch, "I lost my spaceship.", "You did well.")
    assert chat.main(["--as-policy", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    dialogue, end = [" ".join(part.split()) for part in text.split("final emotion")]
    assert profile.player.splitlines()[0] in dialogue and profile.task not in dialogue
    assert "I think: I cannot follow that." in dialogue and not RAW.search(text)
    assert len(re.findall(r"^[#-]{20} +26  user    Hm\.", text, re.M)) == 1
    assert "26 (from 40, 10 replies)" in end and profile.task in end


def test_such_a_talk_ends_where_the_benchmark_ends(monkeypatch, capsys):
    """At the turn limit, and at the user's goodbye or an emotion below 10."""
    type_in(monkeypatch, *["You did well."] * 8)
    for flags, end in ((["--max-turns", "2"], "26 (from 40, 2 replies)"), ([], "5 ")):
        assert chat.main(["--as-policy", *flags]) == 0
        assert f"final emotion {end}" in capsys.readouterr().out
    assert chat.main([]) == 2 == chat.main(["toy", "--as-policy"])


@pytest.mark.slow
def test_a_dialogue_before_ones_eyes(capsys):
    """--show: line by line, the emotion as a bar."""
    assert chat.main("toy --show --think --seed 2 --max-turns 2".split()) == 0
    text = capsys.readouterr().out
    assert "########------------  40  user" in text and text.count("policy  ") == 2
    assert "wants" in text and "felt: my friend said" in text and "ended by" in text
    assert not RAW.search(text)
