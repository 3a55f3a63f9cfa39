"""exercises.py - what the tests of the course share: its exercises, and the text of a function."""

from patches import exercises

import ast

from conftest import ROOT
from surgery import find, text_of

ALL = exercises()
NANO = exercises("nano")
FUNCTIONS = [(name, e["file"], function) for name, e in ALL.items() for function in e["functions"]]


def source(file):
    return (ROOT / file).read_text("utf-8")


def written(text, name):
    """The text of a function in a module's text."""
    return text_of(text, find(ast.parse(text), name))
