"""surgery.py - find a function in a module's text, cut it out, and put another one in.

The scripts of the project carry no markers: a function is found by its name (`gae`, `Agent.reply`)
with `ast`, and what is cut out of it are whole lines of text, so that comments and layout stay as
they are. What is taken from a student's file is written anew from its tree: lines that are indented
by tabs would not fit into ours, and those of a string would be moved.
"""

from support.errors import BadInput

import ast
import re
import symtable
import textwrap

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


# ------------------------------------------------------------------------- one function of a module


def find(tree, name):
    """The node of the function or method `name` ("gae", "Agent.reply") in a module's tree, or None.
    If a name is defined twice, the last definition counts, as it does for Python."""
    node = tree
    for part in name.split("."):
        named = [inner for inner in node.body if getattr(inner, "name", None) == part]
        if not named:
            return None
        node = named[-1]
    return node if isinstance(node, FUNCTIONS) else None


def lines_of(node):
    """The lines of a node, decorators included, as a slice of the list of all lines."""
    first = (getattr(node, "decorator_list", None) or [node])[0]
    return slice(first.lineno - 1, node.end_lineno)


def text_of(source, node):
    """The text of a node, decorators included, moved to the left margin."""
    return moved_left(source.split("\n")[lines_of(node)], node.col_offset)


def moved_left(lines, columns):
    """The lines as one text, with up to `columns` spaces removed in front of each. (textwrap.dedent
    would not move a method in which one comment starts in column 0.)"""
    margin = f"^ {{,{columns}}}"
    return "\n".join(re.sub(margin, "", line) for line in lines)


def put(source, name, text):
    """`source` with the function `name` replaced by `text`, indented as the old function is. (Lines
    inside a multi-line string of a method are indented too.)"""
    node = find(ast.parse(source), name)
    lines = source.split("\n")
    lines[lines_of(node)] = textwrap.indent(text, " " * node.col_offset).split("\n")
    return "\n".join(lines)


def stub(source, name, message):
    """The text of a stub for the function `name`: its decorators, signature and docstring, and in
    place of its body a NotImplementedError with `message`."""
    node = find(ast.parse(source), name)
    lines = source.split("\n")
    first_statement = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    # the number of the last line that stays: the docstring's, or the one above the body
    last_kept = first_statement.end_lineno if has_docstring else first_statement.lineno - 1
    # a comment between the signature and the first statement may give the answer away
    while lines[last_kept - 1].strip().startswith("#"):
        last_kept -= 1
    head = moved_left(lines[lines_of(node).start : last_kept], node.col_offset)
    return head + f"\n    raise NotImplementedError({message!r})"


# -------------------------------------------------------------------- a student's file and our file

# Around each statement of a student's: what our names have, and that they have it again.
SAVE = "__ours__ = {{name: value for name, value in globals().items() if name in {names}}}"
BACK = "globals().update(__ours__)"


def transplant(source, theirs, names):
    """Our file with the functions `names` of a student's file, and with what is new at its top level.

    What is new stays in its order, of whatever kind it is. It comes after the statements of ours
    that it came after: a statement stands for one of ours that is the same or binds a name of it.
    What our file binds has our values, whatever a student did to it: their version of another
    function or class is left out, and each other statement is followed by BACK. Returns the new
    source. Raises BadInput where a function is missing, and SyntaxError where the file does not
    parse.
    """
    their_tree = ast.parse(theirs)
    for name in names:
        node = find(their_tree, name)
        if node is None:
            raise BadInput(f"{name} is not there")
        if "." in name:
            source = put(source, name, ast.unparse(node))
    our_tree = ast.parse(source)
    ours = our_tree.body
    # a function of `names` is not here, but where it stands in their file
    texts = ["" if getattr(node, "name", None) in names else ast.unparse(node) for node in ours]
    constants = [text for text, node in zip(texts, ours) if isinstance(node, ast.Assign)]
    places = {}  # of a statement's text, and of each name that it binds
    for place, (text, node) in enumerate(zip(texts, ours)):
        places |= dict.fromkeys({text, *names_bound(node)}, place)
    kept = set().union(*map(names_bound, ours)).difference(names)
    first = int(ast.get_docstring(our_tree) is not None)
    merged, done = texts[:first], first
    for node in their_tree.body:
        text = ast.unparse(node)
        keys = {text} & places.keys() or names_bound(node) & places.keys()
        place = max((places[key] + 1 for key in keys), default=0)
        merged += texts[done:place]
        done = max(done, place)
        if text not in places and getattr(node, "name", None) not in kept:
            merged += [SAVE.format(names=sorted(kept)), text, BACK]
            # a list may have been changed, too
            merged += [text for text in constants if text in texts[:done]]
    merged += texts[done:]
    merged[first:] = sorted(merged[first:], key=lambda text: not text.startswith("from __future__ "))
    return "\n".join(merged)


# -------------------------------------------------------------------------------------- names, bound


def imported_name(alias):
    """The name that one part of an import binds: `b` of `import a as b`, `a` of `import a.b`."""
    return (alias.asname or alias.name).split(".")[0]


def names_bound(node):
    """The names that a top-level statement of any kind binds, by Python's own symbol table."""
    table = symtable.symtable(ast.unparse(node), "statement", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
