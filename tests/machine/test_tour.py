"""The tour: the notebook is what its script says, it runs from top to bottom, and what it shows is
what its texts promise."""

import json
import re

import pytest

from conftest import ROOT
from write_tour import NOTEBOOK, SCRIPT, notebook_of


def test_the_notebook_is_up_to_date_and_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    script = SCRIPT.read_text("utf-8")
    assert notebook == notebook_of(script), "run python course/write_tour.py"
    assert all(not cell.get("outputs") for cell in notebook["cells"])


def test_files_and_functions_that_the_texts_name_exist():
    names = re.findall(r"`([\w/]+\.(?:py|md))`", SCRIPT.read_text("utf-8"))
    assert len(names) > 5
    for name in names:
        assert (ROOT / name).is_file(), name


# ------------------------------------------------------------------------------------- executed


@pytest.fixture(scope="module")
def printed():
    """What each executed cell of code printed, a list of texts; pictures are "<picture>"."""
    pytest.importorskip("ipykernel")
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    # a reader starts Jupyter in course/, or anywhere above it
    resources = {"metadata": {"path": str(ROOT / "course")}}
    # seconds for a cell; all of them take a minute on two quiet cores
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    return [
        "".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"
    ]


def text_of(output):
    """An output of a cell as text."""
    if output.output_type == "stream":
        return output.text
    return "<picture>" if "image/png" in output.data else output.data.get("text/plain", "")


def cell_with(printed, words):
    """The output that holds these words."""
    [output] = [output for output in printed if words in output]
    return output


@pytest.mark.slow
def test_the_second_reply_is_the_one_that_helps(printed):
    harm, help_ = re.findall(r"emotion 30 ([+-]\d+)", cell_with(printed, "target_completion"))
    assert int(harm) < 0 < int(help_)


@pytest.mark.slow
def test_advantages_by_hand_are_those_of_the_project(printed):
    for name in ("grpo.py", "ppo.py"):
        lines = [line for line in cell_with(printed, name).splitlines() if line]
        by_hand, from_project = [re.findall(r"-?\d+\.\d+", line) for line in lines]
        assert by_hand == from_project and len(by_hand) >= 4


@pytest.mark.slow
def test_six_steps_raise_the_emotion_and_are_drawn(printed):
    curve = [float(x) for x in re.findall(r"at the end (\S+)", cell_with(printed, "step  6"))]
    assert len(curve) == 6
    assert sum(curve[-3:]) > sum(curve[:3])
    assert "<picture>" in printed
    assert "AFTER" in cell_with(printed, "BEFORE")
    assert printed[-1].count("Dialogue") == 8
