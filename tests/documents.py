"""documents.py - what the tests of the documents share: the README, the pages of docs/, and what
stands in backticks there."""

import re

from conftest import ROOT

# {path from the root: text}
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
README = PAGES["README.md"]
# the modules of the project, by the names that an import says
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for folder in (ROOT, ROOT / "support", ROOT / "tools", ROOT / "toy")
    for path in folder.glob("[a-z]*.py")
}


def quoted(text):
    """What stands in `backticks`, outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.S | re.M))
