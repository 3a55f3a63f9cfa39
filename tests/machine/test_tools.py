"""python -m tools: the list of the tools."""

from several_ranks import ROOT, run
from tools.tables import cell, show_table


def test_the_list_has_every_tool():
    """A tool is a file of tools/ that defines `main`."""
    _, out, _ = run("-m", "tools")
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("    ")]
    files = sorted((ROOT / "tools").glob("*.py"))
    assert listed == [path.stem for path in files if "\ndef main(" in path.read_text()]


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
