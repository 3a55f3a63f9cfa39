"""What a judge says, read: scores, grades and words of an answer in its form, and means over the
dialogues. No model is asked: tests/machine/test_judge.py does that.

By hand: an answer of two parts, to a prompt whose mark is kqvt, is

    ED kqvt:                            the header of a part, with the mark
    Evaluation: "Score: 5", they wrote  text, for it bears no mark
    Score kqvt: 4                       the part's score
    CI kqvt: 3/5                        a part whose score stands on its own line
    End kqvt                            what follows is not looked at

and is read as {"ED": 4, "CI": 3}.
"""

from support.forms import parse_grade, parse_score, questionnaire, read_parts, read_words

import pytest

from marks import sign
from tools.capabilities import RUBRIC
from tools.coordinate import CHARACTER_HEADERS, REASONS_HEADERS, parse_coordinate
from tools.scores import score_table
from tools.validity import BLRI, PARAPHRASE_HEADERS, UTTERANCE

DIMENSIONS = RUBRIC.parts


def test_the_example_by_hand():
    """The answer above."""
    text = 'ED kqvt:\nEvaluation: "Score: 5", they wrote\nScore kqvt: 4\nCI kqvt: 3/5\nEnd kqvt'
    names = {"ED": "ED", "CI": "CI"}
    assert read_parts(text, names, "kqvt", lambda line: parse_score(line, 1, 5)) == {
        "ED": 4,
        "CI": 3,
    }


# ------------------------------------------------------------------------------------------- scores


@pytest.mark.parametrize(
    "text, score",
    [
        ("4", 4),
        ("**4/5**", 4),
        (" 4 / 5.", 4),
        ("[4]", 4),
        ("**4**.", 4),
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
        "3–4",
        "between 3 and 4",
        "3.5",
        "0",
        "6",
        "-4",
        "4/10",
        "8 out of 10",
        "four",
        "4? No: 3",
        "1) 4",
        "5 would be too much, so 4",
        "4 - warm, though 2 replies repeat",
        "4 分",
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
    assert RUBRIC.read(answer(SCORES, form), MARK) == SCORES


def test_the_order_is_the_judges():
    """The five parts may stand in any order."""
    turned = dict(reversed(SCORES.items()))
    assert RUBRIC.read(answer(turned), MARK) == SCORES


def test_a_missing_part_and_two_scores_are_refused():
    """Which of two is meant? To guess is to score at random, so the judge is asked again. The same
    score twice is meant."""
    whole = answer(SCORES)

    def more(line):
        return whole.replace("\nEnd", f"\n{line}\nEnd")

    assert RUBRIC.read(more("ED kqvt: \nScore kqvt: 4"), MARK) == SCORES
    # above the first part, or behind the line End, it is a score of nothing
    for text in ("Score kqvt: 5\n" + whole, f"{whole}\n" + sign("ED: 5\nScore: 5", MARK)):
        assert RUBRIC.read(text, MARK) == SCORES
    for text in (
        answer({k: v for k, v in SCORES.items() if k != "DG"}),
        more("ED kqvt:\nScore kqvt: 5"),
        more("Score kqvt: 5"),
        whole.replace("Score kqvt: 3", "Score kqvt: 3\nFinal score: 3\nScore kqvt: 5"),
        whole.replace("Score kqvt: 3", "Score: 3"),
        whole.removesuffix("End kqvt"),
    ):
        with pytest.raises(ValueError):
            RUBRIC.read(text, MARK)


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
    assert RUBRIC.read(text.replace("QUOTE", forged), MARK) == SCORES


def test_a_number_in_a_sentence_is_no_score():
    """A sentence that happens to hold a number gives none."""
    with pytest.raises(ValueError):
        read_parts(
            sign("ED: 3 replies are warm", MARK),
            {"ED": "ED"},
            MARK,
            lambda line: parse_score(line, 1, 5),
        )


# ----------------------------------------------------------------------------------- questionnaires


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
    assert UTTERANCE.read("\n".join(lines), MARK) == UTTERANCE.read("\n".join(plain), MARK)
    with pytest.raises(ValueError):
        UTTERANCE.read("\n".join(lines[:-2] + lines[-1:]), MARK)


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
    found = BLRI.read(sign(text, MARK), MARK)
    assert {name: found[name] for name in BLRI.scales} == dict.fromkeys(BLRI.scales, 100)
    assert found["overall, unreversed"] == pytest.approx(100 * 11 / 12)
    text = "\n".join(f"Sentence {i}: {'F' if i in (4, 6) else 'A'}" for i in range(1, 16))
    found = UTTERANCE.read(sign(text, MARK), MARK)
    assert found["natural flow"] == found["overall"] == pytest.approx(5)
    assert found["overall, unreversed"] == pytest.approx((13 * 5 + 2) / 15)


# --------------------------------------------------------------------------------- places and words


def test_a_coordinate_is_one_number_in_the_square():
    """A failed reading is no point: (0, 0) is a place where a model may stand."""
    names = {"M1X": "M1 X", "M1Y": "M1 Y"}

    def read(text):
        return read_parts(sign(text, MARK), names, MARK, parse_coordinate)

    assert read("Comparison: 2 are near.\n**M1 X**: −0.4\n- M1 Y: 1.0") == {"M1X": -0.4, "M1Y": 1}
    assert read("M1 X: – 0.5\nM1 Y: ‑.25\nwhich is far") == {"M1X": -0.5, "M1Y": -0.25}
    for text in (
        "M1 X: 0.4",
        "M1 X: 1.5\nM1 Y: 0",
        "M1 X: 0,5\nM1 Y: 0",
        "M1 X: minus 0.5\nM1 Y: 0",
        "M1 X: 0.2 to 0.4\nM1 Y: 0",
        "M1 X: 0\nM1 Y: 0\nM1 X: 1",
        "M1 X: -0.4 (formulas)\nM1 Y: 0",
    ):
        with pytest.raises(ValueError):
            read(text)
    assert parse_coordinate("+1") == 1 and parse_coordinate("**-.5**.") == -0.5


def test_words_are_taken_from_their_sections_and_silence_is_refused():
    """Other words stand behind their header, which is no part of them; notes are kept whole."""
    headers = {
        "paraphrase": PARAPHRASE_HEADERS,
        "reasons": REASONS_HEADERS,
        "character": CHARACTER_HEADERS,
    }

    def read(prompt, text):
        return read_words(sign(text, MARK), headers[prompt], MARK)["text"]

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
        read_words("Reply: without a mark\nEnd kqvt", PARAPHRASE_HEADERS, MARK)


# ----------------------------------------------------------------------------- means over dialogues


def rated(key, score, repeat=0, replies=5, part=0):
    found = None if score is None else {"ED": score, "DG": score}
    return {"id": key, "part": part, "replies": replies, "repeat": repeat, "found": found}


def test_means_are_over_dialogues_and_what_is_missing_is_left_out():
    """Dialogue a: 2 and 4, so 3; b: 5 and one answer missing, so 5; c: two replies long, so no DG.
    A missing answer scored 0 would make a mean of 2.3 of what is 3."""
    table = score_table(
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
    assert table["ED"].means == {"a": 3, "b": 5, "c": 1}
    assert table["ED"].mean == 3 and table["ED"].n == 3 and table["ED"].short == 0
    assert table["ED"].stderr == pytest.approx(2 / 3**0.5)
    assert table["ED"].spread == pytest.approx((2**0.5 + 0) / 2)  # of a and of c
    assert table["ED"].missing == pytest.approx(1 / 6)
    assert table["DG"].mean == 4 and table["DG"].n == 2 and table["DG"].short == 1


def test_turns_of_one_dialogue_are_one_dialogue():
    """A dialogue of many questions counts once in the mean."""
    table = score_table([rated("a", 1), rated("a", 5, part=1), rated("b", 5)])
    assert table["ED"].mean == 4 and table["ED"].n == 2 and table["ED"].spread is None
