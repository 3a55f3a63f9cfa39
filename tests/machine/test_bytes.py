"""Bytes, keys and files as the world has them: half a letter, a key with a newline, a tokenizer
that loses all text, a file that does not say who played the user. Each ended a run with a
traceback, or worse, did not end it."""

from support.errors import BadInput, BadModel
from support.files import read_jsonl, without_surrogates
from support.loading import load_model
from support.results import conditions_of, read_results
from support.servers import ServerModel

import asyncio
import json
import shutil

import pytest
from safetensors import safe_open

import evaluate
import models
import rlver
from conftest import make_tiny_model
from result_files import sage_line, write
from server import Loopback, completion
from simulator import REPLY_SCHEMA, load_profiles
from toy import world

SMALL = (
    "--steps 1 --batch-size 2 --group-size 2 --max-turns 2 --max-tokens 6 --eval-size 2"
).split()


def test_half_a_letter_is_replaced_where_text_enters(tmp_path):
    """A cut emoji is good JSON and no UTF-8: the log could not be written, nor the run resumed."""
    assert (
        without_surrogates("cut \ud83d here, whole \U0001f600")
        == "cut \ufffd here, whole \U0001f600"
    )
    body = json.dumps(completion("a cut smile \ud83d")).encode()
    with Loopback(reply=lambda request: (200, {}, body)) as server:
        text = asyncio.run(ServerModel("m", server.url)("Hello.", REPLY_SCHEMA))
    assert text == "a cut smile \ufffd" and text.encode()
    row = {**world.profiles("train", 1)[0], "player": "* Name: Ann \ud83d"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    assert load_profiles(tmp_path / "p.jsonl")[0].player == "* Name: Ann \ufffd"


def test_brackets_without_end_are_one_line(tmp_path):
    """Python's JSON reader counts brackets on its own stack, and gives up with a traceback."""
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 200_000 + '\n{"a": 1}\n')
    (_, row, problem), (_, good, none) = read_jsonl(path)
    assert row is None and "recursion" in problem and good == {"a": 1} and none is None
    with pytest.raises(BadInput, match="line 1: .*recursion"):
        load_profiles(path)


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(monkeypatch):
    """The HTTP library printed the whole header in its complaint."""
    monkeypatch.setenv("RLVER_API_KEY", "sk-sec\nret-2")
    with pytest.raises(BadInput, match=r"\$RLVER_API_KEY") as error:
        ServerModel("m", "http://127.0.0.1:9/v1")
    assert "ret-2" not in str(error.value)


def test_a_tokenizer_that_loses_the_text_is_refused(tiny_dir, tmp_path):
    """Without tokenizer.json transformers makes up a vocabulary of a few entries: every text was
    nothing, and the run ended with a score and exit code 0."""
    broken = shutil.copytree(tiny_dir, tmp_path / "model")
    data = json.loads((broken / "tokenizer.json").read_text())
    data["model"]["vocab"] = dict(list(data["model"]["vocab"].items())[:5])
    data["model"]["merges"] = []
    (broken / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(BadModel, match="turns 'My sister"):
        load_model(broken)
    (broken / "tokenizer.json").unlink()
    with pytest.raises(BadModel):
        load_model(broken)


@pytest.mark.slow
def test_a_tied_head_is_stored_once(tiny_tokenizer, tmp_path, monkeypatch):
    """What is gathered from shards of one tied tensor are two copies, and were two in the file."""
    gather = models.iter_full_weights

    def gather_copies(module):
        return ((name, weight.clone()) for name, weight in gather(module))

    monkeypatch.setattr(models, "iter_full_weights", gather_copies)
    tied, out = tmp_path / "tied", tmp_path / "out"
    for part in (make_tiny_model(tiny_tokenizer, tie_word_embeddings=True), tiny_tokenizer):
        part.save_pretrained(tied)
    assert rlver.main(["--model", str(tied), *SMALL, "--out", str(out)]) == 0
    place = out / "checkpoint-000001"
    with safe_open(place / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys() and "model.embed_tokens.weight" in file.keys()
    loaded, _ = load_model(place)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_the_directory_of_a_sage_file_names_its_simulator(tmp_path, capsys):
    """SAGE saw the same dialogues shift by 20 points between two of them; their files of both were
    compared, and B was better by 15.5."""
    places = [tmp_path / f"{name}_based_simulator" / "r.jsonl" for name in ("deepseek", "gpt4o")]
    for shift, place in enumerate(places):
        place.parent.mkdir()
        write(place, *[sage_line(i, [40 + 15 * shift]) for i in range(4)])
    rows, _ = read_results(places[0])
    assert conditions_of(rows[0]) == "simulator deepseek_based_simulator"
    assert evaluate.main(["--compare", *map(str, places)]) == 2
    assert "do not compare" in capsys.readouterr().err
    plain = write(tmp_path / "r.jsonl", *[sage_line(i, [40]) for i in range(4)])
    assert evaluate.main(["--score", str(plain)]) == 0
    assert "names no simulator" in capsys.readouterr().out
    assert evaluate.main(["--score", str(places[0])]) == 0
    assert "names no simulator" not in capsys.readouterr().out
