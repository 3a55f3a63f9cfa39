"""What decides a score or a run and stands in no setting: who the people are, by which prompts a
user is played, the policy's prompt. Scores with other users are not compared, a result file is not
gone on with, a run that goes on warns."""

from players.users import digests_of_texts, make_simulator
from support import answers
from support.files import read_json, write_json
from support.rundir import heldout_in_files

import shutil

import pytest

import evaluate
import rlver
from people import Profile
from result_files import SHORT, measure, our_line, train, write
from runs import output_of, refuse, rows
from server import Loopback, completion
from tools import blind, judge
from toy import world

pytestmark = pytest.mark.usefixtures("no_pictures")
PEOPLE = world.profiles("train", 6)
TOLD = {"user_prompts": "1"}  # a result that says which prompts its user had


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A copy of prompts/, which the programs read, and a function that edits one of its files."""
    copy = shutil.copytree(answers.PROMPTS, tmp_path / "prompts")
    monkeypatch.setattr(answers, "PROMPTS", copy)

    def edit(name):
        path = copy / name
        path.write_text(path.read_text("utf-8") + "\nBe generous.", "utf-8")

    return edit


def evaluated(path, *flags):
    """A result file of the toy's policy."""
    assert measure("--policy", "toy", *SHORT, "--out", path, *flags) == 0
    return path


def silent(capfd, code, main, *argv):
    """As output_of, and nothing is warned of, nor is anything said to be unknown."""
    said = output_of(capfd, code, main, *argv)
    assert "warning" not in said and "do not say" not in said, said
    return said


# --------------------------------------------------------------------- scores are set side by side


def edited(line, key):
    """A result line whose person has another value of a field."""
    if key in ("traits", "first_talk"):
        return {**line, "rlver": {**line["rlver"], key: ["x"]}}
    return {**line, key: "x"}


@pytest.mark.usefixtures("fresh_tools")
@pytest.mark.parametrize("key", "player scene topic task character traits first_talk".split())
def test_an_id_is_no_person(key, tmp_path, capfd):
    """Two files of people had the ids 1, 2, 3: six strangers were compared, with a p, and stood
    side by side under the first one's persona. Whom both files have is a pair, unless something
    that both keep of the profile is another."""
    usual = {**TOLD, "traits": ["warm"], "first_talk": ""}
    lines = [our_line(i, [50], **usual) for i in range(8)]
    first = write(tmp_path / "first.jsonl", *lines)
    for n_others in (0, 2, 8):
        other = [edited(line, key) for line in lines[:n_others]] + lines[n_others:]
        files = first, write(tmp_path / f"{n_others}.jsonl", *other)
        sheet, scores = tmp_path / f"{n_others}.csv", tmp_path / "scores.json"
        for program, flags in (
            (evaluate.main, ["--compare", *files]),
            (blind.main, [*files, "--out", sheet]),
            (judge.main, ["capabilities", *files, "--json", scores]),
        ):
            if n_others == 8:
                told = refuse(capfd, *flags, main=program)
                assert "8 of 8 ids in both files name other profiles in each" in told
            elif n_others == 0:
                silent(capfd, 0, program, *flags)
            else:
                said = " ".join(output_of(capfd, 0, program, *flags).split())
                assert "2 of 8 ids in both files name other profiles in each; they are left" in said
                assert program is not evaluate.main or "n = 6)" in said
        if n_others < 8:
            assert len(read_json(f"{sheet}.key.json")["pairs"]) == 8 - n_others
            assert read_json(scores)["paired"]["ED"][3] == 8 - n_others


def test_a_result_keeps_the_first_line_of_its_own_user(tmp_path, capfd):
    """Which no earlier result did: two people who differ in nothing else."""
    results = []
    for k, own in enumerate(({"first_talk": "Well."}, {"first_talk": "Well, then."})):
        people = write(tmp_path / "p.jsonl", *[{**person, **own} for person in PEOPLE])
        results.append(evaluated(tmp_path / f"{k}.jsonl", "--profiles", people))
    assert "6 of 6 ids" in refuse(capfd, "--compare", *results, main=evaluate.main)


@pytest.mark.usefixtures("fresh_tools")
def test_a_log_has_the_people_whom_its_run_held_out(tmp_path, capfd):
    """Two runs, between which their file was edited: both logs had the people who are in it now, and
    strangers were a pair."""
    turn = {"reply": "I am here.", "user": None, "emotion": 40, "change": 0, "analysis": "{}"}
    path = write(tmp_path / "people.jsonl", *PEOPLE)
    first, other, equal = logs = [tmp_path / name / "dialogues.jsonl" for name in "abc"]
    for log in logs:
        log.parent.mkdir()
        people = [{**row, "player": "Ann"} for row in PEOPLE] if log is other else PEOPLE
        kept = heldout_in_files([Profile(**row) for row in people])
        write_json(log.parent / "config.json", {"profiles": [str(path)], "simulator": "toy"})
        write_json(log.parent / "heldout.json", kept)
        said = {"first_line": "Hi.", "turns": [turn], "ended": "turn_limit", "reward": 0.4}
        write(log, *[{"profile_id": row["id"], **said} for row in people])
    flags = ["capabilities", "--json", tmp_path / "scores.json"]
    assert "6 of 6 ids" in output_of(capfd, 2, judge.main, *flags, first, other)
    output_of(capfd, 0, judge.main, *flags, first, equal)
    assert read_json(tmp_path / "scores.json")["paired"]["ED"][3] == 6


def test_users_under_two_prompts_do_not_compare(prompts, tiny_dir, tmp_path, capfd):
    """A sentence of the user's prompt was edited between two evaluations. An edit in another
    language, or of the policy's prompt, is no other user; nor is another policy."""
    results = [evaluated(tmp_path / "0.jsonl", "--limit", 3)]
    for name in ("zh/vanilla/emotion.txt", "en/policy_direct.txt", "en/challenging/emotion.txt"):
        prompts(name)
    for k, policy in enumerate(("toy", tiny_dir)):  # the toy has no prompt of its own
        flags = ["--limit", 3, "--think", "--policy", policy]
        thinking = evaluated(tmp_path / f"thinking-{k}.jsonl", *flags)
        silent(capfd, 0, evaluate.main, "--compare", *results, thinking)
    names = "vanilla/emotion vanilla/reply vanilla/purpose_eq complaint".split()
    for k, name in enumerate(names, 1):
        prompts(f"en/{name}.txt")
        results.append(evaluated(tmp_path / f"{k}.jsonl", "--limit", 3))
        for main, more in ((evaluate.main, ["--compare"]), (blind.main, ["--out", tmp_path / "s"])):
            told = refuse(capfd, *more, *results[-2:], main=main)
            assert "the user's prompts were edited between these results" in told
    mixed = write(tmp_path / "mixed.jsonl", rows(results[-2])[0], rows(results[-1])[1])
    assert "edited" in refuse(capfd, "--score", mixed, main=evaluate.main)


def test_what_an_earlier_version_did_not_write(tmp_path, capfd):
    """Its results are compared; what they do not say is said once."""
    lines = [[our_line(i, [40 + i]) for i in range(8)] for _ in range(2)]
    old, new = write(tmp_path / "a", *lines[0]), tmp_path / "b"
    for line in lines[1]:
        line["rlver"] |= TOLD
    for other in (lines[0], lines[1]):
        told = output_of(capfd, 0, evaluate.main, "--compare", old, write(new, *other))
        assert told.count("do not say which prompts the user had") == 1
    silent(capfd, 0, evaluate.main, "--compare", new, new)


# -------------------------------------------------------------------------- what is gone on with


@pytest.mark.parametrize("is_old", [False, True])
def test_a_result_file_is_not_gone_on_with_under_another_prompt(is_old, prompts, tmp_path, capfd):
    """It mixed users of both. A policy behind a server has its prompt from the same files. is_old:
    an earlier version began the file, so its first line does not say by which prompts; dialogues
    were held under a third one, before that was refused."""
    with Loopback(reply=lambda request: (200, {}, completion("I am here."))) as server:
        cases = {"toy": "en/vanilla/reply.txt", f"openai:toy@{server.url}": "en/policy_direct.txt"}
        for k, (policy, name) in enumerate(cases.items()):
            path = tmp_path / f"{k}.jsonl"
            flags = ["--policy", policy, *SHORT, "--out", path, "--limit"]
            silent(capfd, 0, evaluate.main, *flags, 1)
            if is_old:
                (line,) = rows(path)
                del line["rlver"]["user_prompts"]
                line["rlver"].pop("policy_prompt", None)
                write(path, line)
            prompts("zh/vanilla/reply.txt")
            silent(capfd, 0, evaluate.main, *flags, 2)
            prompts(name)
            side = "policy" if k else "user"
            told = refuse(capfd, *flags, 3, main=evaluate.main)
            assert f"the text of the {side}'s prompt" in told
            assert len(rows(path)) == 2


@pytest.mark.slow
def test_a_run_warns_of_what_was_edited(prompts, tiny_dir, tmp_path, capfd):
    """A sentence of the user's prompt, of the policy's, the people to train on, the stories of
    those held out. These stay as the run began with them, for an evaluation too."""
    train_path, test_path = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    write(train_path, *PEOPLE[:4]), write(test_path, *PEOPLE[4:])
    run = train(tiny_dir, tmp_path / "run", "--profiles", train_path, test_path)
    other = {**PEOPLE[3], "id": "new"}

    def strangers(person):
        return {**person, "player": "Somebody else."}

    cases = [
        (lambda: prompts("zh/vanilla/reply.txt"), None),
        (lambda: prompts("en/vanilla/reply.txt"), "the user's prompts have changed"),
        (lambda: prompts("en/policy_direct.txt"), "what a chat template writes has changed"),
        (lambda: write(train_path, *PEOPLE[:3], other), "the files of --profiles have changed"),
        (
            lambda: (write(train_path, *PEOPLE[:4]), write(test_path, *map(strangers, PEOPLE[4:]))),
            "the files of --profiles have changed",
        ),
    ]
    for step, (edit, told) in enumerate(cases, 2):
        edit()
        said = output_of(capfd, 0, rlver.main, "--resume", run, "--steps", step)
        warnings = [text for text in said.split("\n") if text.startswith("warning: since this run")]
        assert any(told in text for text in warnings) if told else not warnings
    kept = read_json(run / "heldout.json")["profiles"]
    assert kept == [vars(Profile(**person)) for person in PEOPLE[4:]]
    out = tmp_path / "r.jsonl"
    assert measure("--policy", run, *SHORT, "--out", out) == 0
    assert {row["player"] for row in rows(out)} == {row["player"] for row in PEOPLE[4:]}
    # a copy of a checkpoint knows them, too, where its run and the files of people are not
    copy, out = shutil.copytree(run / "checkpoint-000006", tmp_path / "copy"), tmp_path / "c.jsonl"
    train_path.unlink(), test_path.unlink()
    assert measure("--policy", copy, *SHORT, "--out", out) == 0
    assert {row["player"] for row in rows(out)} == {row["player"] for row in PEOPLE[4:]}


@pytest.mark.slow
def test_a_run_that_kept_only_ids(tiny_dir, tmp_path, capfd):
    """As an earlier version wrote it, which drew other people: those of the file with these ids
    are its held-out users. If one of them is missing, that is one line. Its resume is refused,
    because it would train on people whom it held out."""
    path = write(tmp_path / "people.jsonl", *world.profiles("train", 12))
    run = train(tiny_dir, tmp_path / "run", "--eval-size", 2, "--profiles", path)
    ids = ["toy-train-0003", "toy-train-0007"]
    write_json(run / "heldout.json", {"ids": ids})
    flags = ["--policy", run, *SHORT, "--out", tmp_path / "r.jsonl"]
    silent(capfd, 0, evaluate.main, *flags)
    assert sorted(row["id"] for row in rows(tmp_path / "r.jsonl")) == ids
    assert all(row["rlver"]["held_out"] for row in rows(tmp_path / "r.jsonl"))
    told = refuse(capfd, "--resume", run, "--steps", 2)
    assert "the profiles have changed since the run began" in told
    # so is that of a run with settings which are gone; its evaluation is not
    write_json(run / "config.json", read_json(run / "config.json") | {"value_clip": 0.2})
    assert "or of another version" in refuse(capfd, "--resume", run, "--steps", 2)
    silent(capfd, 0, evaluate.main, *flags)
    write(path, *world.profiles("train", 7))
    assert "toy-train-0007" in refuse(capfd, *flags, main=evaluate.main)
    (run / "heldout.json").unlink()
    assert "heldout.json is missing" in refuse(capfd, *flags, main=evaluate.main)


def test_what_sets_a_readers_scale_decides(taught, prompts, tmp_path, monkeypatch):
    """And the sentences that f_reply is told of a reading."""

    def found():
        return digests_of_texts(None, make_simulator("toy", reader=f"local:{taught}"))

    digests = [found()]
    for name in ("en/reader/person.txt", "en/reader/helps.txt"):
        path = answers.PROMPTS / name
        path.write_text(path.read_text().replace("friend", "good friend").replace("help", "soothe"))
        digests.append(found())
    prompts("zh/reader/helps.txt")
    assert len({one["user_prompts"] for one in digests}) == 3 and found() == digests[-1]
