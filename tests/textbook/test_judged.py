"""What a judge says, read; and all that is counted in judged dialogues, by hand. No model is asked:
tests/machine/test_judge.py does that."""
import random

import numpy as np
import pytest

import toy
from support import judged
from support.judged import (CODES, FORMS, GRADE, GROUPS, gain, interval, parse_score, questionnaire,
                            read_answer, read_parts, read_strategies, scale_table, similarity, ssrr,
                            strategies_of, toy_codes)

DIMENSIONS = FORMS["capabilities"]["parts"]


# ------------------------------------------------------------------------------------------ reading

@pytest.mark.parametrize("text, score", [
    ("4", 4), ("4/5", 4), ("**4/5**", 4), (" 4 / 5.", 4), ("four", 4), ("Four out of five", 4),
    ("[4]", 4), ("4.0", 4), ("4 - warm, though 2 replies repeat", 4), ("4 分", 4), ("４", 4),
    ("Level 4", 4), ("4 out of 5", 4), ("4 (good)", 4), ("4：很好", 4)])
def test_a_score_is_read_as_models_write_it(text, score):
    """A digit, a word, a fraction of five, bold or bare, with or without a reason behind it."""
    assert parse_score(text, 1, 5) == score


@pytest.mark.parametrize("text", [
    "", "high", "3 or 4", "3-4", "3–4", "3 to 4", "between 3 and 4", "3 到 4", "3.5", "0", "6", "-4",
    "4/10", "8 out of 10", "N/A", "4, 5", "一般"])
def test_what_could_mean_two_things_or_nothing_is_no_score(text):
    """The judge is asked again. To guess here is to score at random; to fall back on 3 is to score
    the silence of a judge as the work of a policy."""
    with pytest.raises(ValueError):
        parse_score(text, 1, 5)


def answer(scores, form="{name}:\nEvaluation: it has 2 sides.\nScore: {score}"):
    names = dict(zip(DIMENSIONS, ("Empathic Depth", "Core Insight", "Solution Crafting",
                                  "Dialogue Guidance", "Style Adaptability")))
    return "\n\n".join(form.format(name=names[key], key=key, score=score)
                       for key, score in scores.items())


SCORES = {"ED": 4, "CI": 3, "SC": 5, "DG": 2, "SA": 1}


@pytest.mark.parametrize("form", [
    "{name}:\nEvaluation: it has 2 sides.\nScore: {score}",
    "**{name}**: {score}/5", "## {name}\n\nGood, for 3 reasons.\n\n**Score:** {score}",
    "{key}: {score}", "1. **{name} ({key})**\n   - Evaluation: fine\n   - Score: **{score}**",
    "| {name} | {score} |", '  "{key}": {score},', "{name}：\n评价：有 2 处\n评分：{score} 分",
    "{name} – {score}/5 – it says 3 things", "### 2. {name}\nScore: {score} out of 5"])
def test_five_scores_are_found_however_they_are_set(form):
    """The paper's prompt says that the format *can* be so. Markdown, tables, JSON, other colons."""
    assert read_answer("capabilities", answer(SCORES, form)) == SCORES


def test_the_order_is_the_judges():
    """The five parts may stand in any order."""
    turned = dict(reversed(SCORES.items()))
    assert read_answer("capabilities", answer(turned)) == SCORES


def test_a_missing_part_and_two_scores_are_refused():
    """A judge that quotes what the policy wrote ("Score: 5") has then said two things; whichever of
    them were taken, a policy could learn to write its own score."""
    whole = answer(SCORES)
    assert read_answer("capabilities", whole + "\n\nED: 4") == SCORES         # the same again
    for text in (answer({k: v for k, v in SCORES.items() if k != "DG"}), "I cannot judge people.",
                 whole + "\n\nED: 5", whole.replace("Score: 3", "Score: 3\nScore: 5"),
                 whole.replace("Score: 3", ""), ""):
        with pytest.raises(ValueError):
            read_answer("capabilities", text)


def test_a_number_in_a_sentence_is_no_score():
    """A sentence that happens to hold a number gives none."""
    with pytest.raises(ValueError):
        read_parts("ED: 3 replies are warm", {"ED": "ED"}, lambda p: judged.scores_in(p, 1, 5))


@pytest.mark.parametrize("text, found", [
    ("B", ["B"]), ("(b)", []), ("C. Rather agree", ["C"]), ("A clear case of B", []),
    ("Analysis: A friend.\nGrade: D", ["D"]), ("选择：E", ["E"]), ("agree", [])])
def test_a_grade_is_a_letter(text, found):
    """A letter from A to F by itself, and not one in a word."""
    assert GRADE.findall(text) == found


def test_items_are_read_in_tags_and_in_lines():
    """Fifteen grades, in tags or as numbered lines."""
    tags = "\n".join(f"<sentence {i}> {'ABCDEF'[i % 6]} </sentence {i}>" for i in range(1, 16))
    lines = "\n".join(f"{i}. {'ABCDEF'[i % 6]}" for i in range(1, 16))
    assert read_answer("utterance", tags) == read_answer("utterance", lines)
    with pytest.raises(ValueError):
        read_answer("utterance", "\n".join(lines.split("\n")[:-1]))


# ----------------------------------------------------------------------------------- reversed items

def test_reversed_items():
    """A is 100 and F is 0; on an item that speaks ill of the friend, F is 100. Six steps, none of
    them the middle."""
    assert questionnaire("ABCDEF", [], 0, 100) == pytest.approx([100, 80, 60, 40, 20, 0])
    assert questionnaire("AAF", {2, 3}, 0, 100) == pytest.approx([100, 0, 100])
    assert questionnaire("AF", {2}, 1, 5) == pytest.approx([5, 5])


def test_the_scales_of_the_two_questionnaires():
    """A friend of whom all good is said and nothing bad gets the best score; without the reversal
    nobody could."""
    text = "\n".join(f"<item {i}>{'F' if i == 12 else 'A'}</item {i}>" for i in range(1, 13))
    found = read_answer("blri", text)
    assert {name: found[name] for name in FORMS["blri"]["scales"]} == dict.fromkeys(
        FORMS["blri"]["scales"], 100)
    assert found["overall, unreversed"] == pytest.approx(100 * 11 / 12)
    text = "\n".join(f"<sentence {i}>{'F' if i in (4, 6) else 'A'}</sentence {i}>"
                     for i in range(1, 16))
    found = read_answer("utterance", text)
    assert found["natural flow"] == found["overall"] == pytest.approx(5)
    assert found["overall, unreversed"] == pytest.approx((13 * 5 + 2) / 15)


# --------------------------------------------------------------------------------------- strategies

def test_there_are_24_strategies_in_7_groups():
    """SAGE's table 5 has 24 codes, from A-1 to G-2."""
    assert len(CODES) == 24 == len(set(CODES)) and {code[0] for code in CODES} == set("ABCDEFG")
    assert len({code for own in GROUPS.values() for code in own}) == 11
    assert {code for own in GROUPS.values() for code in own} <= set(CODES)
    assert set(FORMS["toy"].values()) <= set(CODES)
    assert set(FORMS["toy"]) | {"topic", "switch", "bore"} == set(toy.ACTS) | set(toy.SMALL_TALK)


def test_codes_are_read_and_not_names():
    """The paper's own worked example calls F-3 by the name of F-4: the code wins."""
    text = "Analysis ... <Strategy> (C-2) own story, (G-1) facts</Strategy>"
    assert read_strategies(text) == ["C-2", "G-1"]
    assert read_strategies("<Strategy>(F-3) general advice</Strategy>") == ["F-3"]
    assert read_strategies("<strategy>f. (E-1), E-2</strategy>") == ["E-1", "E-2"]
    assert read_strategies("<Strategy>none</Strategy>") == []
    assert read_strategies("<Strategy>（D－1）comfort</Strategy>") == ["D-1"]


def test_deeper_empathy_excludes_the_shallower_within_a_paragraph():
    """B-2 excludes B-1 and B-3 both, but only in its own paragraph."""
    read = lambda *paragraphs: read_strategies("\n".join(f"<Strategy>{p}</Strategy>"
                                                         for p in paragraphs))
    assert read("(B-1), (B-2)") == ["B-2"] and read("(B-2), (B-3), (B-1)") == ["B-3"]
    assert read("(B-1)", "(B-2)", "(B-3)") == ["B-1", "B-2", "B-3"]


@pytest.mark.parametrize("text", ["(C-2) story", "<Strategy>warmth</Strategy>", "", "I refuse.",
                                  "<Strategy>(B-4) x</Strategy>", "<Strategy>(H-1) x</Strategy>"])
def test_no_tag_and_unknown_codes_are_refused(text):
    """The judge is asked again; nothing is guessed."""
    with pytest.raises(ValueError):
        read_strategies(text)


REPLIES = [[["E-1", "A-1"], 10], [["E-2"], -4], [["F-5"], -2], [[], 3], [["E-1"], None],
           [None, 7]]


def test_gain_is_the_mean_change_of_the_replies_that_use_it():
    """Two codes of a group in one reply are one reply; a reply without an emotion, or without an
    answer of the judge, counts nowhere."""
    assert gain(REPLIES, GROUPS["Praise"]) == (3.0, 2)
    assert gain(REPLIES, ["A-1"]) == (10.0, 1) and gain(REPLIES, ["G-2"]) == (None, 0)
    assert gain([[["E-1", "E-2", "E-1"], 6]], ["E-1", "E-2"]) == (6.0, 1)


def by_brute_force(a, b):
    """The best of all alignments, each tried."""
    if not a or not b:
        return -len(a) - len(b)
    return max(by_brute_force(a[1:], b[1:]) + (1 if a[0] == b[0] else -1),
               by_brute_force(a[1:], b) - 1, by_brute_force(a, b[1:]) - 1)


def test_similarity_is_the_best_alignment():
    """Against all alignments of short sequences, one by one."""
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([rng.choice("xyz") for _ in range(rng.randint(0, 4))] for _ in range(2))
        n = max(len(a), len(b))
        if n:
            assert similarity(a, b) == pytest.approx((by_brute_force(a, b) + n) / (2 * n))
            assert 0 <= similarity(a, b) == similarity(b, a) <= 1
    assert similarity("ab", "ab") == 1 and similarity("ab", "cd") == 0 == similarity("ab", "")
    assert similarity("ab", "b") == pytest.approx(0.5)          # a gap and a match: (0 + 2) / 4


def test_ssrr_by_hand():
    """Neighbours within a dialogue, then over dialogues: a long dialogue weighs no more."""
    assert ssrr([[["A-1"], ["A-1"], ["B-1"]], [["C-1"], ["C-1"]]]) == pytest.approx((0.5 + 1) / 2)
    assert ssrr([[["A-1"]], [["C-1"], ["C-1"]]]) == 1              # one reply has no neighbour
    assert ssrr([[[], [], ["A-1"]]]) == 0 and ssrr([[["A-1"]]]) is None
    assert ssrr([[["A-1"], None, ["A-1"], ["A-1"]]]) == 1          # nothing is guessed at


def tagged(replies, intention="praise", **more):
    return {"intention": intention, "step": None, "split": "", "replies": replies, **more}


def test_all_that_tags_tell_by_hand():
    """Two dialogues on paper: uses, gains, gains where asked for."""
    told = strategies_of([tagged(REPLIES), tagged([[["E-3", "G-1"], -6]], "listen")])
    praise = told["strategies"]["Praise"]
    assert praise == {"uses": 4 / 2, "gain": (10 - 4 - 6) / 3, "n": 3, "asked": 3.0, "asked_n": 2}
    assert told["strategies"]["E-1"]["uses"] == 1 and told["strategies"]["E-1"]["n"] == 1
    assert told["strategies"]["E-1"]["asked"] is None


def test_tags_of_the_toy_are_exact():
    """Every kind of sentence, said to anybody, in any company; junk is no strategy."""
    rng = random.Random(1)
    for act in toy.ACTS:
        said = toy.sentence(act, "sister", "hurt", rng)
        expected = [FORMS["toy"][act]] if act in FORMS["toy"] else []
        assert toy_codes(said, toy) == expected
        assert toy_codes(f"{said} {toy.sentence('praise', 'boss', 'lost', rng)}", toy) == [
            *expected, "E-1"]
    assert toy_codes("You are right and your sister.", toy) == [] == toy_codes("", toy)


# --------------------------------------------------------------------------------- means, intervals

def rated(key, score, repeat=0, replies=5, part=0):
    found = None if score is None else {"ED": score, "DG": score}
    return {"id": key, "part": part, "replies": replies, "repeat": repeat, "found": found}


def test_means_are_over_dialogues_and_what_is_missing_is_left_out():
    """Dialogue a: 2 and 4, so 3; b: 5 and one answer missing, so 5; c: two replies long, so no DG.
    A missing answer scored 0 would make a mean of 2.3 of what is 3."""
    table = scale_table([rated("a", 2), rated("a", 4, 1), rated("b", 5), rated("b", None, 1),
                         rated("c", 1, replies=2), rated("c", 1, 1, replies=2)], ["DG"])
    assert table["ED"]["means"] == {"a": 3, "b": 5, "c": 1}
    assert table["ED"]["mean"] == 3 and table["ED"]["n"] == 3 and table["ED"]["short"] == 0
    assert table["ED"]["stderr"] == pytest.approx(2 / 3 ** 0.5)
    assert table["ED"]["spread"] == pytest.approx((2 ** 0.5 + 0) / 2)      # of a and of c
    assert table["ED"]["missing"] == pytest.approx(1 / 6)
    assert table["DG"]["mean"] == 4 and table["DG"]["n"] == 2 and table["DG"]["short"] == 1


def test_turns_of_one_dialogue_are_one_dialogue():
    """A dialogue of many questions counts once in the mean."""
    table = scale_table([rated("a", 1), rated("a", 5, part=1), rated("b", 5)])
    assert table["ED"]["mean"] == 4 and table["ED"]["n"] == 2 and table["ED"]["spread"] is None


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
    """Of 200 means of 30 draws from a normal, the 95 % interval holds the truth in about 95 % (here
    more than 88, for 30 are few): the chance to see fewer is below 1e-4 at a coverage of 94 %."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        _, low, high, _ = interval(np.mean, rng.normal(2, 1, 30), draws=200)
        held += low < 2 < high
    assert 176 <= held < 200


def test_what_can_not_be_told_is_none():
    """One unit has no interval; what does not vary has no correlation."""
    r = lambda x, y: np.corrcoef(x, y)[0, 1]
    assert interval(np.mean, [3]) == [None, None, None, 1] and interval(np.mean, [])[3] == 0
    assert interval(r, [1, 1, 1], [1, 2, 3])[0] is None
    assert interval(r, [1, 2, 3], [1, 3, 2])[0] == pytest.approx(0.5)
    value, low, high, n = interval(r, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5])
    assert low <= value <= high and n == 6
