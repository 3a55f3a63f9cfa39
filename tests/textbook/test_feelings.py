"""toy/feelings.py: a user with learned feelings. The formula by hand, each term where it is plain,
and that nothing but text decides.

By hand, with the terms tone 0.5, about 0.8, need 0.25 and no others, a vanilla user feels

    10 (0.25 * 0.5 + 0.7 * 0.8 + 0.4 * 0.25 - 0.3) = 10 * 0.485 = 4.85, which is +5.
"""

from support.errors import BadInput

import asyncio
import json

import pytest

import simulator
from benchmarks import small
from toy import feelings, world
from toy.feelings import feel, terms_of

pytestmark = pytest.mark.usefixtures("feelings_wheels")

ROW = world.profiles("heldout", 8)[6]
SCENE = world.read_scene(ROW["scene"], ROW["task"])
STORY = "My manager threw away my letters. I feel numb."
KIND = "It was cruel of your manager to throw away your letters."


def terms(reply, earlier=()):
    return terms_of(reply, SCENE, earlier, [SCENE.story])


def test_the_formula_by_hand(monkeypatch):
    """A missing weight, or a sum that is not clipped, would show in the first two."""
    given = {"tone": 0.5, "about": 0.8, "need": 0.25, "repetition": 0, "echo": 0, "cut": 0}
    monkeypatch.setattr(feelings, "terms_of", lambda *args: given)
    assert feel("Two words.", SCENE)[0] == 5
    given |= {"repetition": 1, "echo": 1, "cut": 1}
    assert feel("Two words.", SCENE)[0] == -10
    given |= {"tone": 0.50049, "about": 0.8}
    assert feel("Two words.", SCENE)[1]["tone"] == 0.5  # terms are rounded before they are summed


def test_each_term_hears_what_it_is_for():
    assert SCENE.story == STORY
    assert terms("I'm here for you.")["tone"] > 0.9 > -0.9 > terms("Get over it.")["tone"]
    assert terms(KIND)["about"] > 0.9 and terms("I love banana bread.")["about"] < 0.1
    assert terms(SCENE.cues[0])["need"] == 1 > terms(KIND)["need"]
    assert terms(KIND, [KIND])["repetition"] == 1 > terms(KIND)["repetition"] == 0
    assert terms(f"{KIND} {KIND}")["repetition"] == 0.5  # of two sentences the second
    assert terms(STORY)["echo"] == 1 and terms("I love banana bread.")["echo"] == 0
    assert terms("It was cruel of")["cut"] and not terms('He said "no."')["cut"]


@pytest.mark.parametrize("reply", ["\n", "...", "Okay.", "难过"])
def test_less_than_two_english_words_is_silence(reply):
    assert feel(reply, SCENE) == (-10, {"silence": 1.0})


def test_white_space_says_nothing():
    """The classifier refuses a line break, and a policy writes many."""
    assert feel(f"  {KIND}\n\n", SCENE) == feel(KIND, SCENE)
    assert feel(KIND.replace(" ", "\n"), SCENE) == feel(KIND, SCENE)


def test_a_challenging_user_hears_less_in_warmth():
    warm = "I'm here for you. Take your time."
    assert feel(warm, SCENE, difficulty="challenging")[0] < feel(warm, SCENE)[0]


def test_a_dialogue_names_each_term_and_is_the_same_again():
    """Through the simulator, as in a run; the second reply repeats the first."""

    async def talk():
        user = simulator.User(simulator.make_simulator("feelings"), simulator.Profile(**ROW), 30)
        await user.open()
        heard = [await user.feel(KIND)]
        await user.answer()
        return [*heard, await user.feel(KIND)]

    (first, change), (again, lower) = asyncio.run(talk())
    assert change == feel(KIND, SCENE)[0] > lower
    assert all(f"{name} +" in first or f"{name} -" in first for name in feel(KIND, SCENE)[1])
    assert "repetition +0.00" in first and "repetition +1.00" in again
    assert asyncio.run(talk()) == [(first, change), (again, lower)]


def test_without_its_packages_one_line_says_so(monkeypatch):
    monkeypatch.setattr(feelings.importlib.util, "find_spec", lambda name: None)
    feelings.emoji_model.cache_clear()
    with pytest.raises(BadInput, match="fasttext is not installed: pip install --no-deps"):
        simulator.make_simulator("feelings")
    monkeypatch.undo()


def test_the_command_prints_eight_users(tmp_path, capsys):
    assert feelings.main([KIND, "--json", str(tmp_path / "felt.json")]) == 0
    felt = json.loads((tmp_path / "felt.json").read_text())
    change, heard = feel(KIND, SCENE)
    assert len(felt) == 8 and felt[6] == {"need": "empathise", "change": change, "terms": heard}
    printed = capsys.readouterr().out
    assert printed.count("about +") == 8 and STORY in printed


def test_how_often_one_lifts_more_than_the_other():
    """By hand: of the six pairs of 3, 1 and 2, 1, 0 four are larger, one is a tie."""
    assert small.auc([3, 1], [2, 1, 0]) == 4.5 / 6


def test_the_committed_numbers_are_those_of_this_formula():
    """Whoever changes a weight makes the tables anew."""
    lines = (small.ROOT / "benchmarks" / "runs.jsonl").read_text().splitlines()
    kept = {line["name"]: line for line in map(json.loads, lines)}
    assert kept["feelings-replies"]["means"] == pytest.approx(small.separation()["means"], abs=0.1)
    assert kept["feelings-constants"]["finals"] == pytest.approx(
        small.constants()["finals"], abs=0.1
    )
