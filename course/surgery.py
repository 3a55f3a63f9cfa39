"""surgery.py - find a function in a module's text, cut it out, and put another one in.

The scripts of the project carry no markers: a function is found by its name (`gae`, `Agent.reply`)
with `ast`, and what is cut out of it are whole lines of text, so that comments and layout stay as
they are. A file that is graded is written anew from its tree: lines that are indented by tabs would
not fit into ours, and those of a string would be moved.
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

# Before and after a statement of a student's: keep the values of our names, and give them back.
KEEP = "__ours__ = {{name: value for name, value in globals().items() if name in {names}}}"
GIVE_BACK = "globals().update(__ours__)"


def transplant(source, theirs, names):
    """Our file with the functions `names` of a student's file, and with what is new at its top level.

    Nothing else of the file is taken: what a student did to another function, or to a constant of
    ours, must not count in this exercise. Returns the new source. Raises BadInput where a function
    is missing, and SyntaxError where the file does not parse.
    """
    their_tree = ast.parse(theirs)
    their_names = set().union(*map(names_bound, their_tree.body))
    for name in names:
        node = find(their_tree, name)
        if node is None and name not in their_names:
            raise BadInput(f"{name} is not there")
        if "." in name:
            source = put(source, name, ast.unparse(node))
    ours = ast.parse(source).body
    docstring = ast.unparse(ours[0])

    def rank(text):
        return text != docstring, not text.startswith("from __future__ ")

    return "\n".join(sorted(merge(ours, their_tree.body, names), key=rank))


def merge(ours, theirs, names):
    """The statements of our file without the functions `names`, and those of a student's file that
    are new, as texts. Both keep their order: one that is also in our file, or binds a name of it,
    comes behind what is there.

    Left out is what is the same in both, another form of a function or class of ours, and an import
    of names that our file has, too. Each other statement runs, of whatever kind it is, and then our
    names have our values again.
    """
    # a function of `names` stands where it does in their file
    texts = ["" if getattr(node, "name", None) in names else ast.unparse(node) for node in ours]
    places = {}  # of a statement's text, and of each name that it binds
    for place, (text, node) in enumerate(zip(texts, ours)):
        places |= dict.fromkeys({text, *names_bound(node)}, place)
    our_names = set().union(*map(names_bound, ours)).difference(names)
    keep = KEEP.format(names=sorted(our_names))
    merged, done = [], 0
    for node in theirs:
        text = ast.unparse(node)
        keys = {text} & places.keys() or names_bound(node) & places.keys()
        place = max((places[key] + 1 for key in keys), default=0)
        merged += texts[done:place]
        done = max(done, place)
        # of a function or class, or of an import: `import a.b` loads b, also where we have a. Any
        # other statement is new.
        bound = {getattr(node, "name", None)}
        if isinstance(node, IMPORTS):
            bound = {alias.asname or alias.name for alias in node.names}
        if text in places or bound <= our_names:
            continue
        if isinstance(node, FUNCTIONS) and not node.decorator_list:
            merged.append(text)
            continue
        merged += [keep, text, GIVE_BACK]
        # once more what may have been changed in its place: a list, a table
        merged += [
            texts[at] for at in range(done) if isinstance(ours[at], (ast.Assign, ast.AnnAssign))
        ]
    return merged + texts[done:]


# -------------------------------------------------------------------------------------- names, bound


def imported_name(alias):
    """The name that one part of an import binds: `b` of `import a as b`, `a` of `import a.b`."""
    return (alias.asname or alias.name).split(".")[0]


def names_bound(node):
    """The names that a top-level statement of any kind binds, by Python's own symbol table. Those of
    a demo are none: it does not run where a file is imported."""
    if ast.unparse(node).startswith("if __name__ == '__main__':"):
        return set()
    table = symtable.symtable(ast.unparse(node), "statement", "exec")
    return {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
