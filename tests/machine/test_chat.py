"""tools/chat.py: to talk to a policy, or to watch it talk."""

from support.rundir import RunDir

import re
from unittest.mock import Mock

import pytest

from answering import coded, feeling, saying
from people import toy_profiles
from server import Loopback, completion, failure, toy_people
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


SIGNS = "\x1b]0;mine\x07 \x1b[2J \rpolicy \x9b31m \b\b \u202e\u2066"


def test_control_characters_of_a_model_are_shown_as_signs(tmp_path, monkeypatch, capsys):
    """A terminal obeys them: a reply renamed its window, cleared the screen, and wrote a line of
    the other side. What a user's model says, feels and thinks is a model's, too, and so is the
    complaint of a server. All other signs stay, and so do ends of lines."""
    plain = "Été 🙂\u200d🙂 \u3000你好\tso\r\n\r\nand so"

    def reply(request):
        prompt = request["messages"][0]["content"]
        if request["max_tokens"] == 9:
            return failure(400, SIGNS)
        talk = saying(SIGNS) if "<emotion_level>" in prompt else feeling(5, analysis=SIGNS)
        text = SIGNS + plain if request["messages"][1:] else coded(prompt, talk)
        return 200, {}, completion(text, reasoning=SIGNS)

    with Loopback(reply=reply) as server:
        model, people = f"openai:m@{server.url}", toy_people(tmp_path)[:2]
        talk = ["--show", "--simulator", model, *people, "--max-turns", "2", "--think"]
        for code, flags in ((0, []), (2, ["--max-tokens", "9"]), (0, talk)):
            type_in(monkeypatch, "Hello.")
            assert chat.main([model, *flags]) == code
    RunDir.tell(Mock(first=True), SIGNS)  # a run prints dialogues, too
    out, err = capsys.readouterr()
    assert not re.search(
        r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", re.sub("\r\n", "", out + err)
    )
    assert (
        plain in out
        and r"\x1b]0;mine\x07" in err
        and out.count(r"\x1b]0;mine\x07") > 6
        and r"\u202e\u2066" in out
    )


@pytest.mark.slow
def test_a_dialogue_before_ones_eyes(capsys):
    """--show: line by line, the emotion as a bar."""
    assert chat.main("toy --show --think --seed 2 --max-turns 2".split()) == 0
    text = capsys.readouterr().out
    assert "########------------  40  user" in text and text.count("policy  ") == 2
    assert "wants" in text and "felt: my friend said" in text and "ended by" in text
    assert not RAW.search(text)
