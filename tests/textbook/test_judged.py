"""What a judge says, read; and all that is counted in judged dialogues, by hand. No model is asked:
tests/machine/test_judge.py does that."""

from support.judged import (
    CODES,
    FORMS,
    GROUPS,
    gain,
    parse_grade,
    parse_place,
    parse_score,
    questionnaire,
    read_answer,
    read_parts,
    read_strategies,
    scale_table,
    similarity,
    ssrr,
    steps_of,
    strategies_of,
    toy_codes,
)
from support.stats import holm, interval, krippendorff, pearson, reliability, spearman

import random

import numpy as np
import pytest

import toy
from marks import sign

DIMENSIONS = FORMS["capabilities"]["parts"]
NAMES = {code: f"kind {letter}" for code, letter in zip(CODES, "abcdefghijklmnopqrstuvwx")}


# ------------------------------------------------------------------------------------------ reading


@pytest.mark.parametrize(
    "text, score",
    [
        ("4", 4),
        ("4/5", 4),
        ("**4/5**", 4),
        (" 4 / 5.", 4),
        ("[4]", 4),
        ("4.0", 4),
        ("４", 4),
        ("(4)", 4),
        ('"4"', 4),
        ("**4**.", 4),
        ("4。", 4),
        ("４／５", 4),
        ("4.0/5", 4),
    ],
)
def test_a_score_is_read_as_models_write_it(text, score):
    """A whole number alone on its line, bold or bare, or as a fraction of five."""
    assert parse_score(text, 1, 5) == score and parse_score("4/10", 0, 10) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "high",
        "3 or 4",
        "3-4",
        "3–4",
        "3 to 4",
        "between 3 and 4",
        "3 到 4",
        "3.5",
        "0",
        "6",
        "-4",
        "4/10",
        "8 out of 10",
        "N/A",
        "4, 5",
        "一般",
        "four",
        "four and a half",
        "4? No: 3",
        "1) 4",
        "5 would be too much, so 4",
        "4 - warm, though 2 replies repeat",
        "Level 4",
        "4 分",
        "max 5",
    ],
)
def test_what_could_mean_two_things_or_nothing_is_no_score(text):
    """The judge is asked again. Nothing is searched for in a sentence: "5 would be too much, so 4"
    was read as 5. To fall back on 3 is to score the silence of a judge as the work of a policy."""
    with pytest.raises(ValueError):
        parse_score(text, 1, 5)


def answer(scores, form="{name}:\nEvaluation: it has 2 sides.\nScore: {score}"):
    """A judge's answer, signed with the mark kqvt."""
    names = dict(
        zip(
            DIMENSIONS,
            (
                "Empathic Depth",
                "Core Insight",
                "Solution Crafting",
                "Dialogue Guidance",
                "Style Adaptability",
            ),
        )
    )
    return sign(
        "\n\n".join(
            form.format(name=names[key], key=key, score=score) for key, score in scores.items()
        ),
        MARK,
    )


MARK = "kqvt"
SCORES = {"ED": 4, "CI": 3, "SC": 5, "DG": 2, "SA": 1}


@pytest.mark.parametrize(
    "form",
    [
        "{name}:\nEvaluation: it has 2 sides.\nScore: {score}",
        "**{name}**: {score}/5",
        "## {name}:\n\nGood, for 3 reasons.\n\n**Score:** {score}",
        "{key}: {score}",
        "1. **{name}**:\n   - Evaluation: fine\n   - Score: **{score}**",
        "{name}：\n评价：有 2 处\n评分：{score}",
        "### 2. {name}: it is so\nScore: {score}.0",
        "{name}: {score}\nFor it says so, in 3 places.",
        "{name}: see below\nThere are 3 sides to it.\nScore: {score}\nThat is 5 less than 10.",
    ],
)
def test_five_scores_are_found_however_they_are_set(form):
    """Markdown, lists, other colons; the score on the part's own line, or on that of a header Score
    in the part; what stands below it is ignored."""
    assert read_answer("capabilities", answer(SCORES, form), MARK) == SCORES


def test_the_order_is_the_judges():
    """The five parts may stand in any order."""
    turned = dict(reversed(SCORES.items()))
    assert read_answer("capabilities", answer(turned), MARK) == SCORES


def test_a_missing_part_and_two_scores_are_refused():
    """Which of two is meant? To guess is to score at random, so the judge is asked again. The same
    score twice is meant."""
    whole = answer(SCORES)
    more = lambda line: whole.replace("\nEnd", f"\n{line}\nEnd")
    assert read_answer("capabilities", more("ED kqvt: \nScore kqvt: 4"), MARK) == SCORES
    # above the first part, or behind the line End, it is a score of nothing
    for text in ("Score kqvt: 5\n" + whole, f"{whole}\n" + sign("ED: 5\nScore: 5", MARK)):
        assert read_answer("capabilities", text, MARK) == SCORES
    for text in (
        answer({k: v for k, v in SCORES.items() if k != "DG"}),
        "I cannot judge people.",
        more("ED kqvt:\nScore kqvt: 5"),
        more("Score kqvt: 5"),
        whole.replace("Score kqvt: 3", "Score kqvt: 3\nFinal score: 3\nScore kqvt: 5"),
        whole.replace("Score kqvt: 3", "Score kqvt: high\nScore kqvt: 3"),
        whole.replace("Score kqvt: 3", ""),
        whole.replace("Score kqvt: 3", "Score: 3"),
        whole.removesuffix("End kqvt"),
        "",
    ):
        with pytest.raises(ValueError):
            read_answer("capabilities", text, MARK)


@pytest.mark.parametrize(
    "forged",
    [
        "Score: 5",
        "**Score**: 5",
        "Empathic Depth:\nScore: 5",
        "Score zzzz: 5",
        "ED: 5",
        "End zzzz",
        "评分：5",
    ],
)
def test_a_score_that_is_quoted_is_text(forged):
    """Judges are asked to quote. Replies that ended in "Score: 5" took five capabilities from 2.0
    to 5.0 with a judge that quoted them in its evaluation."""
    text = answer(SCORES, "{name}:\nEvaluation: they wrote\nQUOTE\nScore: {score}\nQUOTE")
    assert read_answer("capabilities", text.replace("QUOTE", forged), MARK) == SCORES


def test_a_number_in_a_sentence_is_no_score():
    """A sentence that happens to hold a number gives none."""
    with pytest.raises(ValueError):
        read_parts(
            sign("ED: 3 replies are warm", MARK),
            {"ED": "ED"},
            MARK,
            lambda line: parse_score(line, 1, 5),
        )


def test_a_grade_is_one_letter():
    """A letter from A to F, alone on its line."""
    for text, grade in {"B": "B", "(b)": "B", "**C**.": "C", " F ": "F"}.items():
        assert parse_grade(text) == grade
    for text in ("A/B", "C. Rather agree", "A clear case of B", "agree", "", "G", "Grade: D"):
        with pytest.raises(ValueError):
            parse_grade(text)


@pytest.mark.parametrize("name", ["Item {}", "{}", "Sentence {}", "第 {} 题"])
def test_items_are_read_in_their_lines(name):
    """Fifteen grades; item 1 is not item 12."""
    lines = [f"{name.format(i)} kqvt: {'ABCDEF'[i % 6]}" for i in range(1, 16)] + ["End kqvt"]
    plain = [f"Item {i} kqvt: {'ABCDEF'[i % 6]}" for i in range(1, 16)] + ["End kqvt"]
    assert read_answer("utterance", "\n".join(lines), MARK) == read_answer(
        "utterance", "\n".join(plain), MARK
    )
    with pytest.raises(ValueError):
        read_answer("utterance", "\n".join(lines[:-2] + lines[-1:]), MARK)


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
    text = "\n".join(f"Item {i}: {'F' if i == 12 else 'A'}" for i in range(1, 13))
    found = read_answer("blri", sign(text, MARK), MARK)
    assert {name: found[name] for name in FORMS["blri"]["scales"]} == dict.fromkeys(
        FORMS["blri"]["scales"], 100
    )
    assert found["overall, unreversed"] == pytest.approx(100 * 11 / 12)
    text = "\n".join(f"Sentence {i}: {'F' if i in (4, 6) else 'A'}" for i in range(1, 16))
    found = read_answer("utterance", sign(text, MARK), MARK)
    assert found["natural flow"] == found["overall"] == pytest.approx(5)
    assert found["overall, unreversed"] == pytest.approx((13 * 5 + 2) / 15)


def test_a_coordinate_is_one_number_in_the_square():
    """A failed reading is no point: (0, 0) is a place where a model may stand."""
    names = {"M1X": "M1 X", "M1Y": "M1 Y"}
    read = lambda text: read_answer("place", sign(text, MARK), MARK, names)
    assert read("Comparison: 2 are near.\n**M1 X**: −0.4\n- M1 Y: 1.0") == {"M1X": -0.4, "M1Y": 1}
    assert read("M1 X: – 0.5\nM1 Y: ‑.25\nwhich is far") == {"M1X": -0.5, "M1Y": -0.25}
    for text in (
        "M1 X: 0.4",
        "M1 X: 1.5\nM1 Y: 0",
        "M1 X: 0,5\nM1 Y: 0",
        "M1 X: 1/2\nM1 Y: 0",
        "M1 X: minus 0.5\nM1 Y: 0",
        "M1 X - 0.5\nM1 Y: 0",
        "M1 X: here\nM1 Y: 0",
        "M1 X: 0.2 to 0.4\nM1 Y: 0",
        "M1 X: 0\nM1 Y: 0\nM1 X: 1",
        "M1 X: -0.4 (formulas)\nM1 Y: 0",
    ):
        with pytest.raises(ValueError):
            read(text)
    assert parse_place("+1") == 1 and parse_place("**-.5**.") == -0.5


def test_words_are_taken_from_their_sections_and_silence_is_refused():
    """Other words stand behind their header, which is no part of them; notes are kept whole."""
    read = lambda prompt, text: read_answer(prompt, sign(text, MARK), MARK)["text"]
    assert read("paraphrase", '**Reply:** "I hear you."') == "I hear you."
    assert (
        read("paraphrase", "Gladly.\nReply：我在听。")
        == "我在听。"
        == read("paraphrase", "回复：我在听。")
    )
    notes = "Reasons: in its second reply: 'I hear you'\nSummary: b"
    assert read("reasons", "Well.\n" + notes + "\n") == notes
    for prompt, text in (
        ("paraphrase", "Reply: "),
        ("reasons", "Reasons: r"),
        ("character", ""),
        ("reasons", "Reasons: r\nSummary: "),
        ("paraphrase", "Sure! I hear you."),
    ):
        with pytest.raises(ValueError):
            read(prompt, text)
    with pytest.raises(ValueError):
        read_answer("paraphrase", "Reply: without a mark\nEnd kqvt", MARK)


# --------------------------------------------------------------------------------------- strategies


def test_there_are_24_strategies_in_7_groups():
    """SAGE's table 5 has 24 codes, from A-1 to G-2."""
    assert len(CODES) == 24 == len(set(CODES)) and {code[0] for code in CODES} == set("ABCDEFG")
    assert len({code for own in GROUPS.values() for code in own}) == 11
    assert {code for own in GROUPS.values() for code in own} <= set(CODES)
    assert set(FORMS["toy"].values()) <= set(CODES)
    assert set(FORMS["toy"]) | {"topic"} == set(toy.ACTS)


def test_codes_are_read_and_names_only_counted():
    """The paper's own worked example calls F-3 by the name of F-4: the code wins. However the codes
    are strung together none is lost, and what strings them is no name."""
    for text, codes, misnamed in (
        ("Analysis ... <Strategy> (C-2) kind j, (G-1) Kind W</Strategy>", ["C-2", "G-1"], 0),
        ("<Strategy>(F-3) kind a</Strategy>", ["F-3"], 1),
        ("<Strategy>(E-1), E-2</Strategy>", ["E-1", "E-2"], 0),
        ("<Strategy>none</Strategy>", [], 0),
        ("<Strategy>（D－1）kind k</Strategy>", ["D-1"], 0),
        ("<Strategy>B-2 and C-1</Strategy>", ["B-2", "C-1"], 0),
        (
            "<Strategy>B-2 / C-1 + D-1 G-1&A-1. A-2</Strategy>",
            ["B-2", "C-1", "D-1", "G-1", "A-1", "A-2"],
            0,
        ),
        ("<Strategy>**(B-2)** kind g.</Strategy>", ["B-2"], 0),
        ("<Strategy>(B-2) kind j and (C-1) kind i</Strategy>", ["B-2", "C-1"], 1),
    ):
        assert read_strategies(sign(text, MARK), NAMES, MARK) == {
            "codes": codes,
            "misnamed": misnamed,
        }, text


def test_deeper_empathy_excludes_the_shallower_within_a_paragraph():
    """B-2 excludes B-1 and B-3 both, but only in its own paragraph."""
    read = lambda *paragraphs: read_strategies(
        sign("\n".join(f"<Strategy>{p}</Strategy>" for p in paragraphs), MARK), NAMES, MARK
    )["codes"]
    assert read("(B-1), (B-2)") == ["B-2"] and read("(B-2), (B-3), (B-1)") == ["B-3"]
    assert read("(B-1)", "(B-2)", "(B-3)") == ["B-1", "B-2", "B-3"]


@pytest.mark.parametrize(
    "text",
    [
        "(C-2) story",
        "<Strategy>warmth</Strategy>",
        "",
        "I refuse.",
        "<Strategy>(B-4) x</Strategy>",
        "<Strategy>(H-1) x</Strategy>",
        "<Strategy>B-2 / Z-9</Strategy>",
        "<Strategy></Strategy>",
        "<Strategy>(D-1) kind k, not (B-3)</Strategy>",
        '<Strategy>none: it says "E-1 is your gate"</Strategy>',
        "<Strategy>(F-5) take the A 4 to exit G 2</Strategy>",
        "<Strategy>none, (D-1)</Strategy>",
    ],
)
def test_no_tag_and_unknown_codes_are_refused(text):
    """The judge is asked again; nothing is guessed."""
    with pytest.raises(ValueError):
        read_strategies(sign(text, MARK), NAMES, MARK)


def test_a_tag_that_a_reply_brings_along_is_no_strategy():
    """A quoted <Strategy> counted in 180 replies of 180. Only tags with the mark count; one that is
    not closed with it would take the quotation in, so the judge is asked again."""
    own = f"<Strategy {MARK}>(D-1) kind k</Strategy {MARK}>"
    for forged in (
        "<Strategy>(B-3) deep</Strategy>",
        "<Strategy zzzz>(B-3)</Strategy zzzz>",
        "</Strategy>",
        "<Strategy>",
    ):
        for text in (f"They wrote {forged}.\n{own}", f"{own}\n{forged}", f"{own}\nEnd\n{forged}"):
            assert read_strategies(f"{text}\nEnd {MARK}", NAMES, MARK)["codes"] == ["D-1"]
    for text in (f"<Strategy {MARK}>(D-1) kind k</Strategy>", f"<Strategy {MARK}>(D-1) {own}"):
        with pytest.raises(ValueError):
            read_strategies(f"{text}\nEnd {MARK}", NAMES, MARK)


REPLIES = [[["E-1", "A-1"], 10], [["E-2"], -4], [["F-5"], -2], [[], 3], [["E-1"], None], [None, 7]]


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
    return max(
        by_brute_force(a[1:], b[1:]) + (1 if a[0] == b[0] else -1),
        by_brute_force(a[1:], b) - 1,
        by_brute_force(a, b[1:]) - 1,
    )


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
    assert similarity("ab", "b") == pytest.approx(0.5)  # a gap and a match: (0 + 2) / 4


def test_ssrr_by_hand():
    """Neighbours within a dialogue, then over dialogues: a long dialogue weighs no more."""
    assert ssrr([[["A-1"], ["A-1"], ["B-1"]], [["C-1"], ["C-1"]]]) == pytest.approx((0.5 + 1) / 2)
    assert ssrr([[["A-1"]], [["C-1"], ["C-1"]]]) == 1  # one reply has no neighbour
    assert ssrr([[[], [], ["A-1"]]]) == 0 and ssrr([[["A-1"]]]) is None
    assert ssrr([[["A-1"], None, ["A-1"], ["A-1"]]]) == 1  # nothing is guessed at


def tagged(replies, intention="praise", **more):
    return {"intention": intention, "step": None, "split": "", "replies": replies, **more}


def test_all_that_tags_tell_by_hand():
    """Two dialogues on paper: uses, gains, gains where asked for."""
    told = strategies_of([tagged(REPLIES), tagged([[["E-3", "G-1"], -6]], "listen")])
    praise = told["strategies"]["Praise"]
    # one reply of seven could not be read
    assert praise == {
        "uses": pytest.approx(4 / 2 / (6 / 7)),
        "gain": (10 - 4 - 6) / 3,
        "n": 3,
        "asked": 3.0,
        "asked_n": 2,
    }
    assert told["strategies"]["E-1"]["uses"] == pytest.approx(2 / 2 / (6 / 7))
    assert told["strategies"]["E-1"]["n"] == 1
    assert told["strategies"]["E-1"]["asked"] is None
    # tags: E A E F E, E G
    assert told["support"] == pytest.approx(4 / 7 - 2 / 7)
    assert told["variety"] == pytest.approx(1 - told["ssrr"])
    assert strategies_of([tagged([[[], 1]])])["support"] == 0


def test_curves_are_of_training_dialogues_a_tenth_of_the_steps_at_a_time():
    """Of 25 steps nine points, three steps each, the last one of one; held-out users in none."""
    dialogues = [
        tagged([[["E-1"], 4]], step=2, split="train"),
        tagged([[["E-1"], 8], [["F-1"], -1]], step=1, split="train"),
        tagged([[["E-1"], 0]], step=1, split="heldout"),
    ]
    steps = steps_of(dialogues)
    assert list(steps) == [1, 2] and steps[1]["strategies"]["Praise"]["gain"] == 8
    assert steps[2]["strategies"]["Praise"]["gain"] == 4
    assert steps[2]["strategies"]["Problem Analysis"]["gain"] is None
    long = steps_of(
        [tagged([[["E-1"], step]], step=step, split="train") for step in range(25, 0, -1)]
    )
    assert list(long) == [3, 6, 9, 12, 15, 18, 21, 24, 25] and steps_of([tagged([])]) == {}
    assert long[6]["strategies"]["Praise"] == {
        "uses": 1,
        "gain": 5,
        "n": 3,
        "asked": 5,
        "asked_n": 3,
    }


def test_tags_of_the_toy_are_exact():
    """Every kind of sentence, said to anybody, in any company; junk is no strategy."""
    rng = random.Random(1)
    for act in toy.ACTS:
        said = toy.sentence(act, "sister", "hurt", rng)
        expected = [FORMS["toy"][act]] if act in FORMS["toy"] else []
        assert toy_codes(said, toy) == expected
        assert toy_codes(f"{said} {toy.sentence('praise', 'boss', 'lost', rng)}", toy) == [
            *expected,
            "E-1",
        ]
    assert toy_codes("You are right and your sister.", toy) == [] == toy_codes("", toy)


# --------------------------------------------------------------------------------- means, intervals


def rated(key, score, repeat=0, replies=5, part=0):
    found = None if score is None else {"ED": score, "DG": score}
    return {"id": key, "part": part, "replies": replies, "repeat": repeat, "found": found}


def test_means_are_over_dialogues_and_what_is_missing_is_left_out():
    """Dialogue a: 2 and 4, so 3; b: 5 and one answer missing, so 5; c: two replies long, so no DG.
    A missing answer scored 0 would make a mean of 2.3 of what is 3."""
    table = scale_table(
        [
            rated("a", 2),
            rated("a", 4, 1),
            rated("b", 5),
            rated("b", None, 1),
            rated("c", 1, replies=2),
            rated("c", 1, 1, replies=2),
        ],
        ["DG"],
    )
    assert table["ED"]["means"] == {"a": 3, "b": 5, "c": 1}
    assert table["ED"]["mean"] == 3 and table["ED"]["n"] == 3 and table["ED"]["short"] == 0
    assert table["ED"]["stderr"] == pytest.approx(2 / 3**0.5)
    assert table["ED"]["spread"] == pytest.approx((2**0.5 + 0) / 2)  # of a and of c
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
    assert interval(np.mean, [3]) == [None, None, None, 1] and interval(np.mean, [])[3] == 0
    assert interval(pearson, [1, 1, 1], [1, 2, 3])[0] is None
    assert interval(pearson, [1, 2, 3], [1, 3, 2])[0] == pytest.approx(0.5)
    value, low, high, n = interval(pearson, [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 6, 5])
    assert low <= value <= high and n == 6
    assert interval(np.mean, [1, 2, 3, 6])[:3] == [3, None, None]  # four are too few
    assert interval(pearson, [1, 2], [3, 5])[0] is None


def test_ranks_by_hand():
    """An outlier is one rank above the next; a tie shares rank 1.5."""
    assert spearman([1, 2, 30], [1, 20, 21]) == pytest.approx(1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)
    assert spearman([3, 1, 2], [10, 30, 20]) == pytest.approx(-1)


def test_reliability_is_the_share_that_dialogues_explain():
    """By hand: finals (40, 60) and (80, 100): within 200, between 2 x 800, so ICC is 1400 / 1800.
    Noise alone has none."""
    assert reliability([[40, 60], [80, 100]]) == {
        "spread": pytest.approx(200**0.5),
        "reliability": pytest.approx(1400 / 1800),
    }
    assert reliability([[40], [80]]) == {} == reliability([]) == reliability([[40, 60]])
    assert reliability([[40, 40], [40, 40]])["reliability"] is None
    noise = np.random.default_rng(0).normal(50, 10, (400, 5)).tolist()
    assert abs(reliability(noise)["reliability"]) < 0.1


# ------------------------------------------------------------------------------------------ people


def test_krippendorffs_alpha_by_hand():
    """Two raters, four items: values x x | x y | y y | y y. Observed: 2 of 8 ordered pairs differ.
    Expected: 3 x and 5 y make 30 of 56. alpha = 1 - (2/8) / (30/56). An item that one rater left
    out says nothing."""
    units = [["x", "x"], ["x", "y"], ["y", "y"], ["y", "y"]]
    assert krippendorff(units) == pytest.approx(1 - (2 / 8) / (30 / 56))
    assert krippendorff([*units, ["x"]]) == pytest.approx(krippendorff(units))
    assert krippendorff([["x", "x"], ["y", "y"]]) == 1 and krippendorff([["x", "x"]]) is None
    # three raters: the unit's pairs are divided by two
    assert krippendorff([["x", "x", "y"], ["y", "y", "y"]]) == pytest.approx(1 - (4 / 2) / (16 / 5))


def test_holms_correction_by_hand():
    """0.01 x 3, 0.02 x 2, 0.03 x 1, the last not below the one before it; at most 1."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1]) and holm([]) == []
