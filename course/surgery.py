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
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)
ADDITIONS = (*FUNCTIONS, *IMPORTS, ast.ClassDef, ast.Assign, ast.AnnAssign)


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


def transplant(source, theirs, names):
    """Put the functions `names` of a student's file into ours, with the helpers and imports that
    they use and ours lacks.

    Nothing else of the file is taken: what a student did to another function, or at the top level,
    must not count in this exercise. Returns the new source. Raises BadInput where a function is
    missing, and SyntaxError where the file does not parse.
    """
    our_tree = ast.parse(source)
    their_tree = ast.parse(theirs)
    function_texts = {}
    for name in names:
        node = find(their_tree, name)
        if node is None:
            raise BadInput(f"{name} is not there")
        function_texts[name] = ast.unparse(node)

    our_names = set().union(*map(names_bound, our_tree.body))
    helpers = needed(additions(their_tree, our_names), function_texts.values())
    # helpers stand above the function, or the class, that uses them
    top_name = names[0].split(".")[0]
    top_node = next(node for node in our_tree.body if getattr(node, "name", None) == top_name)
    source = insert_before(source, top_node, [helper.text for helper in helpers])
    for name, function_text in function_texts.items():
        source = put(source, name, function_text)
    return source


def insert_before(source, node, texts):
    """`source` with each of the top-level `texts`, and two empty lines, in front of `node`."""
    lines = source.split("\n")
    first = lines_of(node).start
    lines[first:first] = [text + "\n\n" for text in texts]
    return "\n".join(lines)


class Addition(NamedTuple):
    """A top-level statement of a student's file that ours lacks."""

    names: set  # the names that it binds
    text: str


def additions(tree, our_names):
    """The imports, functions, classes and assignments of a student's file that bind none of the
    names in our file. An import of several names is reduced to the new ones."""
    new = []
    for node in tree.body:
        if isinstance(node, IMPORTS):
            node.names = [alias for alias in node.names if imported_name(alias) not in our_names]
        bound = names_bound(node)
        if isinstance(node, ADDITIONS) and bound and not bound & our_names:
            new.append(Addition(bound, ast.unparse(node)))
    return new


def needed(candidates, function_texts):
    """The additions that the functions use, and those that these use in turn, in the order of
    the file."""
    wanted = set().union(*map(globals_read, function_texts))
    chosen = []
    while True:
        more = [new for new in candidates if new not in chosen and new.names & wanted]
        if not more:
            return [new for new in candidates if new in chosen]
        chosen += more
        wanted |= set().union(*(globals_read(new.text) for new in more))


# ---------------------------------------------------------------------------- names, bound and read


def imported_name(alias):
    """The name that one part of an import binds: `b` of `import a as b`, `a` of `import a.b`."""
    return (alias.asname or alias.name).split(".")[0]


def names_bound(node):
    """The names that a top-level statement binds: imports, defines or assigns."""
    if isinstance(node, IMPORTS):
        return {imported_name(alias) for alias in node.names}
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    # `a = b = 1` has targets, `a: int = 1` one target; of any other statement look at all of it
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    inner_nodes = [inner for target in targets for inner in ast.walk(target)]
    return {
        inner.id
        for inner in inner_nodes
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def globals_read(text):
    """The names that a piece of code reads from its module, by Python's own symbol table. Arguments
    and local variables are not among them."""
    names = set()
    tables = [symtable.symtable(text, "student", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            from_module = symbol.is_global() or table.get_type() == "module"
            if symbol.is_declared_global() or (symbol.is_referenced() and from_module):
                names.add(symbol.get_name())
    return names
