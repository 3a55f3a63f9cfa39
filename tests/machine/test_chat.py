"""tools/chat.py: to talk to a policy, or to watch it talk."""

import re

import pytest

from tools import chat

MARKED = re.compile("Change [a-z]{4}: ")  # a header of an analysis


def test_the_whole_analysis_is_for_those_who_ask(capsys):
    assert chat.main(["toy", "--show", "--raw", "--max-turns", "1"]) == 0
    assert MARKED.search(capsys.readouterr().out)


def test_a_chat_ends_at_exit(tiny_dir, monkeypatch, capsys):
    typed = iter(["Hello.", " Exit "])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    assert chat.main([str(tiny_dir), "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("it>") == 1


def test_chat(tiny_dir, monkeypatch, capsys):
    said = iter(["Hello.", "I feel hurt.", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    assert chat.main([str(tiny_dir), "--max-tokens", "5"]) == 0
    assert capsys.readouterr().out.count("it>") == 2


@pytest.mark.slow
def test_a_dialogue_before_ones_eyes(tmp_path, capsys, monkeypatch):
    """--show: line by line, the emotion as a bar; --pause waits at each; --html is the dialogue."""
    waited = []
    monkeypatch.setattr("builtins.input", lambda prompt: waited.append(prompt) or "")
    page = tmp_path / "d.html"
    assert (
        chat.main(
            [
                "toy",
                "--show",
                "--think",
                "--seed",
                "2",
                "--max-turns",
                "2",
                "--pause",
                "--html",
                str(page),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "########------------  40  user" in text and text.count("policy  ") == 2
    assert "wants" in text and "felt: my friend said" in text and "ended by" in text
    assert not MARKED.search(text)
    assert len(waited) == len(re.findall(r"^[#-]{20}", text, re.M))
    said = re.search(r"policy  (.*)", text).group(1)
    assert said in page.read_text(encoding="utf-8")


def test_a_policy_that_is_not_there_is_named_without_a_flag(tmp_path, capsys):
    """The complaint named --policy, a flag of evaluate.py that this tool does not have."""
    missing, empty = tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for name in (missing, empty):
        assert chat.main([str(name)]) == 2
        error = capsys.readouterr().err
        assert (
            error.startswith(f"python -m tools.chat: policy {name}: ") and "--policy" not in error
        )
        assert error.count("\n") == 1
