"""Users: which profiles a file may hold, what is told about a bad one, and who plays whom.

"Defect N" is a line of docs/differences.md of what the released code does.
"""

from players.users import check_playable, make_simulator
from support.errors import BadInput

import asyncio
import json

import pytest

from answering import LIN, Model, simulator_of
from people import Profile, load_profiles, toy_profiles
from result_files import write
from simulator import User


def test_an_example_by_hand(tmp_path):
    """One line of a file is one person. The field names may be the released ones or English."""
    line = (
        '{"id": "a", "persona": "* Name: Ann", "background": "Her cat ran away.", '
        '"persona_group": "passive", "traits": ["shy"], "intention": "You want to be heard."}'
    )
    (ann,) = load_profiles(write(tmp_path / "ann.jsonl", line))
    assert ann == Profile(
        id="a",
        player="* Name: Ann",
        scene="Her cat ran away.",
        main_cha="passive",
        cha_group=["shy"],
        task="You want to be heard.",
    )


def test_profiles_of_the_released_files_load(tmp_path):
    """Defect 7: released profiles have no topic, and the released code dies of a KeyError."""
    first = write(tmp_path / "a.jsonl", LIN, "", {**LIN, "id": "p-2", "first_talk": "最近有点烦。"})
    one, two = load_profiles(first)
    assert vars(one) == {**LIN, "topic": "", "first_talk": "", "need": "", "target": "eq"}
    assert two.first_talk == "最近有点烦。"


def test_only_a_newline_ends_a_line_of_jsonl(tmp_path):
    """JSON may hold U+2028, U+0085 and their like as they are, and text from the web and from
    models does. str.splitlines cuts there: a whole profile would be called half-written."""
    scene = "她说：\u2028“算了。”\u0085然后\u2029走了。"
    assert load_profiles(write(tmp_path / "a.jsonl", {**LIN, "scene": scene}))[0].scene == scene


@pytest.mark.parametrize(
    "line, said",
    [
        ("Hello there.", "Hello there."),
        ("Hello there. \r\n", "Hello there."),
        ("\u3000Hello \n there.\t", "Hello \n there."),
        ("", "Go on."),  # none: the model makes one
        (" \n", "Go on."),
        ("\u3000", "Go on."),
    ],
)
def test_a_first_line_is_said_without_white_space_at_its_ends(line, said, tmp_path):
    """As all later lines are: a chat template that trims, such as Llama's, would write another
    prompt than ours. A blank line was said as it is. The profile keeps what stands in the file, or
    the digest of the users in result files would be another one."""
    for name in ("first_talk", "first_line"):
        (profile,) = load_profiles(write(tmp_path / "p.jsonl", {**LIN, name: line}))
        user = User(simulator_of(Model()), profile)
        assert asyncio.run(user.open()) == said == user.dialogue[0]["text"]
        assert profile.first_talk == (line if line.strip() else "")


BAD_FILES = {
    "empty": ([], ["holds no profile"]),
    "half-written": ([LIN, json.dumps({**LIN, "id": "p-2"})[:90]], ["line 2", "half-written"]),
    "not an object": ([LIN, [1]], ["line 2", "object"]),
    "no task": ([LIN, {"id": "p-2"}], ["line 2", "'player'", "missing"]),
    "empty field": ([{**LIN, "scene": ""}], ["line 1", "'scene'", "empty"]),
    "blank persona": ([{**LIN, "player": " \u3000"}], ["line 1", "'player'", "empty"]),
    "blank need": ([{**LIN, "task": "\r\n"}], ["line 1", "'task'", "empty"]),
    "number": ([{**LIN, "id": 7}], ["line 1", "'id'", "is 7", "a str"]),
    "text for a list": ([{**LIN, "cha_group": "内向"}], ["line 1", "'cha_group'", "list"]),
    "twice": ([LIN, {**LIN, "id": "p-2"}, LIN], ["line 3", "'p-1'", "earlier line"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_profile_file_is_one_clear_line(tmp_path, name):
    """Who points the program at the wrong file learns the file, the line and the field; a wrong
    profile never plays."""
    rows, needles = BAD_FILES[name]
    path = write(tmp_path / "people.jsonl", *rows)
    with pytest.raises(BadInput) as caught:
        load_profiles(path)
    message = str(caught.value)
    assert "\n" not in message
    assert all(needle in message for needle in [str(path), *needles]), message


def test_a_profile_file_that_is_missing_or_no_text(tmp_path):
    """As above, for what cannot be read at all: no file, a directory, bytes that are no UTF-8."""
    (tmp_path / "gbk.jsonl").write_bytes("姓名".encode("gbk"))
    for name in ("nowhere.jsonl", "", "gbk.jsonl"):
        with pytest.raises((BadInput, OSError)):  # both are told in one line
            load_profiles(tmp_path / name)


def test_the_toy_user_is_refused_where_it_cannot_play():
    """--simulator toy --lang zh would answer Chinese prompts in English, an unknown name must not
    fall back on anything, and a profile of another world is named before a run begins."""
    with pytest.raises(BadInput, match="--lang zh"):
        make_simulator("toy", "zh")
    with pytest.raises(BadInput, match="--simulator toi"):
        make_simulator("toi")
    check_playable("toy", toy_profiles("heldout", 8))
    with pytest.raises(BadInput, match="'p-1'"):
        check_playable("toy", [*toy_profiles("heldout", 8), Profile(**LIN)])
