"""python -m tools - which tools there are, one line each.

A tool is a file of this folder that defines `main`; the other files are what several tools share.
Its line is the first sentence of its docstring, which is read without importing the file: nothing
heavy is loaded for a list.
"""

import ast
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent


def tools():
    """{name: first sentence of its docstring} of the tools in this folder, by name."""
    sentences = {}
    for path in sorted(HERE.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if "main" in functions and not path.name.startswith("__"):
            sentences[path.stem] = first_sentence(ast.get_docstring(tree) or "")
    return sentences


def first_sentence(docstring):
    """The first sentence of a docstring, in one line, without the "tools/NAME.py - " before it."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    paragraph = re.sub(r"^tools/\w+\.py - ", "", paragraph)
    return re.split(r"(?<=[.?!]) ", paragraph, maxsplit=1)[0]


def print_list():
    """Print the name of each tool and its sentence. Returns the exit code."""
    sentence_of = tools()
    width = max(map(len, sentence_of))
    for name, sentence in sentence_of.items():
        print(f"{name:{width}}  {sentence[:1].upper()}{sentence[1:]}")
    print("\npython -m tools.NAME --help tells more.")
    return 0


if __name__ == "__main__":
    sys.exit(print_list())
