"""write_tour.py - writes tour.ipynb, the notebook of the tour, from the plain script tour.py.

    python course/write_tour.py

A notebook is JSON, which is hard to read and to compare. So the tour is written in tour.py: a line
"# %%" begins a cell of code, and a line "# %% [markdown]" begins a cell of text, written as
comments. Editors such as VS Code know these marks and can run the script cell by cell, too. The
notebook is kept without outputs, because its readers should answer the questions before they run a
cell.
"""

from patches import HERE
from support.command_line import Parser
from support.files import write_json

import re

SCRIPT = HERE / "tour.py"
NOTEBOOK = HERE / "tour.ipynb"


def notebook_of(script):
    """The notebook (nbformat 4.5, a dict) of a script's text. What stands before the first mark is
    no cell."""
    # the text between the marks, behind each mark "" or " [markdown]"
    pieces = re.split(r"^# %%( \[markdown\])?\n", script, flags=re.MULTILINE)
    marks, bodies = pieces[1::2], pieces[2::2]
    cells = [
        cell_of(number, text.strip("\n"), is_text=bool(mark))
        for number, (mark, text) in enumerate(zip(marks, bodies))
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": kernel},
        "cells": cells,
    }


def cell_of(number, text, is_text):
    """One cell. A text loses the "# " in front of its lines; code is kept as it is."""
    if is_text:
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    cell = {
        "cell_type": "markdown" if is_text else "code",
        "id": f"cell-{number:02d}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    if not is_text:
        cell.update(execution_count=None, outputs=[])
    return cell


if __name__ == "__main__":
    Parser(description="Writes course/tour.ipynb from course/tour.py.").parse_args()
    write_json(NOTEBOOK, notebook_of(SCRIPT.read_text(encoding="utf-8")))
    print(f"wrote {NOTEBOOK}")
