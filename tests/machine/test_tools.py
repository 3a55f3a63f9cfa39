"""The folder of tools as a whole: the list of them, their help, and what a table looks like."""

import subprocess
import sys

from conftest import ROOT
from tools.__main__ import HERE, first_sentence, tools
from tools.dialogues import cell, show_table


def test_all_tools_are_listed_from_their_files():
    """Each with the first sentence of its docstring. Nothing heavy is imported for it: the answer
    comes at once, and where torch is missing too."""
    code = "import runpy, sys; sys.argv = ['tools']\n"
    code += "try: runpy.run_module('tools', run_name='__main__')\n"
    code += "except SystemExit as end: assert not end.code\n"
    code += "assert not {'torch', 'numpy', 'tools.asking'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    listed = {line.split()[0]: line for line in lines if line and line[0].isalpha()}
    assert set(listed) >= set(tools()) and "asking" not in listed and len(listed) <= 15
    assert max(map(len, lines)) <= 100
    assert listed["blind"].endswith("if they do not know which is which?")


def test_a_tool_is_a_file_that_defines_main(tmp_path, monkeypatch):
    """Whoever adds a file adds a line."""
    assert set(tools()) == {
        path.stem
        for path in HERE.glob("[a-z]*.py")
        if "\ndef main(" in path.read_text(encoding="utf-8")
    }
    assert first_sentence("tools/x.py - how much (RLVER 3.3, 4)\nof it. And\n\nmore.") == (
        "how much (RLVER 3.3, 4) of it."
    )


def test_tables_are_printed_and_kept(capsys):
    """Floats with two digits, nothing as a dash, columns as wide as their names."""
    assert [cell(value) for value in (None, 0.256, 3, "x")] == ["-", "0.26", "3", "x"]
    show_table("title", ["a", "a long name of it"], {"row": [1.5, None]}, "how to read it")
    assert capsys.readouterr().out.split("\n") == [
        "",
        "title",
        "            a  a long name of it",
        "row      1.50                  -",
        "how to read it",
        "",
    ]
