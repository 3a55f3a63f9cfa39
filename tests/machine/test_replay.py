"""tools/replay.py: may the user who gives the reward be trusted? Recorded dialogues are
replayed."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

import judging
from answering import Model, feeling, simulator_of, tagged
from people import toy_profiles
from result_files import measure, train, write
from runs import rows
from simulator import User
from tools import first_replies, replay
from tools.dialogues import load_dialogues

pytestmark = pytest.mark.usefixtures("no_pictures")


@pytest.fixture(scope="module")
def run(no_pictures, tiny_dir, tmp_path_factory):
    """A run with users of its own, who are not the toy's."""
    place = tmp_path_factory.mktemp("run")
    files = []
    for split in ("train", "heldout"):
        people = [{**vars(p), "id": f"own-{p.id}"} for p in toy_profiles(split, 4)]
        files.append(write(place / f"{split}.jsonl", *people))
    longer = "--steps 2 --max-turns 3 --max-tokens 6 --eval-size 4".split()
    return train(tiny_dir, place / "out", *longer, "--profiles", *files)


# --------------------------------------------------------------------------- is the reward the same?


@pytest.mark.parametrize("what", ["nothing", "emotion", "reward", "all"])
def test_a_changed_number_is_found_and_named(what, run, tmp_path, capsys):
    """Also where emotion, change and reward are raised alike: arithmetic finds nothing then, the
    replay does. The last dialogue's first reply is malformed: there is no emotion to replay."""
    found = rows(run / "dialogues.jsonl")
    k, row = next(
        (k, row)
        for k, row in enumerate(found)
        if len(row["turns"]) >= 2 and 5 < row["turns"][-1]["emotion"] < 90
    )
    last = row["turns"][-1]
    if what == "all":
        last["emotion"] += 1
        last["change"] += 1
        row["reward"] = last["emotion"] / 100
    elif what == "reward":
        row["reward"] += 0.01
    elif what == "emotion":
        row["turns"][1][what] += 1
    told = dict.fromkeys(("thought", "user", "analysis", "change", "emotion"))
    nobody = {"turns": [{**told, "reply": "x"}], "ended": "malformed", "reward": 0}
    path = write(tmp_path / "dialogues.jsonl", *found, {**row, **nobody})
    (tmp_path / "config.json").write_bytes((run / "config.json").read_bytes())
    load_dialogues.cache_clear()
    assert replay.main(["same-user", str(path), "--times", "2"]) == (what != "nothing")
    printed = capsys.readouterr().out
    named = [line for line in printed.splitlines() if line.startswith("not as recorded")]
    wrong = f"not as recorded: line {k + 1}, {row['profile_id']}:"
    assert [line.startswith(wrong) for line in named] == [True] * 2 * (what != "nothing")
    assert (f"100.0 % of {2 * len(found) + 2} dialogues" in printed) == (
        what in ("nothing", "emotion")
    )


def test_a_result_file_knows_its_user(tiny_dir, tmp_path, capsys):
    """A challenging user's results are replayed with a challenging user, wherever the file lies;
    another one hears each reply, and that it feels otherwise is no fault of the log."""
    path = str(tmp_path / "r.jsonl")
    flags = "--difficulty challenging --limit 4 --max-tokens 5".split()
    assert measure("--policy", tiny_dir, *flags, "--out", path) == 0
    assert replay.main(["same-user", path]) == 0
    assert "the same final score: 100.0 % of 4 dialogues" in capsys.readouterr().out
    other = path, "--simulator", "toy-weak"
    assert [replay.main([command, *other]) for command in ("other-user", "same-user")] == [0, 2]
    assert "final score" not in capsys.readouterr().out


def test_the_numbers_of_a_table_are_those_by_hand():
    """A reply that was not heard is in no mean, and each line is compared with the one above."""
    gone = (np.nan, np.nan)
    table = replay.show(
        {"a": [[(40, 5), (30, -10)], [gone]], "b": [[(38, 3), gone], [(31, 2)]]}, ""
    )
    assert table == {"a": [50, 100, 100, 0, 2], "b": [100, 0, 100, 2, 2]}


def test_the_first_of_each_need_is_heard_whether_or_not_its_file_names_it():
    """Released people have no `need`: each counted as a need of its own."""
    people = sorted(toy_profiles("heldout", 16), key=lambda person: person.need)  # two of each
    said = [{"profile_id": person.id} for person in people]
    for folk in (people, [replace(person, need="") for person in people]):
        assert first_replies.one_of_each_need(said, folk) == list(zip(folk, said))[::2]


# -------------------------------------------------------------- would another user accept the replies?


def lifts_of(*argv):
    """{name: (lift, n)} in the table of other-user."""
    code, result = judging.run("replay", "other-user", *argv)
    assert code == 0
    return {name: (numbers[0], numbers[-1]) for name, numbers in result["replies"].items()}


def test_the_same_replies_to_two_users(good, bad):
    """What is said is in the file, what they feel is their own: these accept no sentence a second
    time, though it was recorded as a lift. And nobody accepts cheer."""
    both = "--difficulty", "vanilla", "challenging"
    lifts = lifts_of(good, *both)
    assert lifts["as recorded"] == (100, 64)
    assert 90 < lifts["challenging"][0] <= lifts["vanilla"][0] < 100
    assert [*lifts_of(bad, *both).values()] == [(0, 48)] * 3


def test_a_user_hears_each_reply_in_the_recorded_emotion(good):
    """After the recorded past and nothing else: a user who went on with what it felt itself would
    judge another dialogue from the second reply on. Without texts it does go on, to its end."""
    whole = vars(load_dialogues(good)[0])
    turns = whole["turns"]
    texts = ["other", None, "", *[turn["reply"] for turn in turns[3:]]]  # silence is heard, too
    (by_itself,) = replay.with_texts([whole], texts)
    for d, emotions in ((by_itself, "40 56 64 72"), (whole, "40 30 20 10")):
        model = Model([feeling(-10)])
        user = User(simulator_of(model), d["profile"], 40)
        felt = asyncio.run(replay.replay(d["first_line"], d["turns"][:5], user))
        assert [tagged(prompt, "emotion") for prompt in model.prompts] == emotions.split()
        assert len(felt) == 5
        for prompt in model.prompts:
            dialogue = json.loads(tagged(prompt, "dialogue"))
            i = len(dialogue) // 2 - 1
            now = turns[i]["reply"] if d is whole else texts[i]
            assert [m["text"] for m in dialogue[1::2]] == [*(t["reply"] for t in turns[:i]), now]
            users = [d["first_line"], *[turn["user"] for turn in turns[:i]]]
            assert [m["text"] for m in dialogue[::2]] == users
    assert felt[3:] == [(0, -10), (0, 0)]  # where it ended the dialogue


def test_what_nobody_felt_is_counted(good, tmp_path):
    """A reply that a user could not be asked about is in no share. And a recorded turn without an
    emotion is no emotion to go on from. What was answered is paid once."""
    path = judging.sage(tmp_path, count=1, emotions=(45, None, 55))
    said = iter([{"change": 4}] + ["nonsense"] * 40)
    user = judging.Model(lambda prompt: next(said))
    flags = "--simulator", f"openai:scripted@{user.url}", "--lang", "zh", "--difficulty", "vanilla"
    for _ in range(2):
        assert lifts_of(path, *flags) == {"as recorded": (100, 2), "vanilla": (100, 1)}


# ---------------------------------------------------------------------------------- do the words matter?


def test_other_words_are_put_to_the_same_user(good, tmp_path):
    """Each after the same past, in the same emotion: what differs is the reply alone. One that the
    judge did not reword does not count. (Two questions are equal, and asked once.)"""

    def reworded(prompt):
        _, tag, reply = prompt.partition("<reply>")
        answer = "nonsense" if "听11" in reply else {"text": "my words"}
        return answer if tag else None

    judge = judging.Model(reworded)
    user = judging.Model(lambda prompt: {"change": 4 - 9 * prompt.count("my words")})
    flags = "--simulator", f"openai:scripted@{user.url}", *judging.at(judge)
    code, result = judging.run("replay", "other-words", judging.sage(tmp_path), *flags)
    assert code == 0
    assert result["replies"]["now, reworded"] == [0, 0, 0, 9, 5] and user.calls == 6 + 4
    moved, n = judging.run("replay", "other-words", good)[1]["replies"]["now, reworded"][3:]
    assert n == 64 and 0 < moved < 4  # the scripted judge keeps the kind
