"""python -m tools: the list of the tools."""

import subprocess
import sys

from conftest import ROOT


def test_the_list_has_every_tool():
    """A tool is a file of tools/ that defines `main`."""
    done = subprocess.run([sys.executable, "-m", "tools"], cwd=ROOT, capture_output=True, text=True)
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")]
    files = sorted((ROOT / "tools").glob("*.py"))
    assert listed == [path.stem for path in files if "\ndef main(" in path.read_text()]
