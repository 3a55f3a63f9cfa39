"""support/answers.py - reading what a model was asked to write: its mark, its sections, its values.

A user's model is told what the policy said, and a judge is asked to quote it. So an answer holds
words of the policy, and no look at the words tells a quotation from the model's own: a filter that
takes them apart by likeness can be made to take away a loss. What tells them apart is a *mark*,
four letters that every prompt asks for behind each header of its form and in a last line:

    Content kqvt: ...
    Change kqvt: -3
    End kqvt

The mark follows from the prompt, which the policy never sees. A header without it is text; all
behind the line End is dropped before anything else is looked at. docs/marks.md says more.
"""

import functools
import hashlib
import json
import re
from typing import NamedTuple

LONGEST_ANSWER = 20_000  # characters; what has not ended by then is no answer
MARK_LETTERS = "bcdfghjkmnpqrstvwxz"  # no vowels, so no words; none that is taken for another


class Unreadable(ValueError):
    """An answer that cannot be read. complaint: which line of prompts/*/complaints.txt the model is
    told when it is asked again; no word of the answer goes into it."""

    def __init__(self, complaint, message):
        super().__init__(message)
        self.complaint = complaint


# --------------------------------------------------------------------------------------- the mark


def mark_of(template, values, unreadable=0):
    """The mark of a prompt: four letters, from the SHA-256 of its text, its values and the number
    of unreadable answers to it before.

    The same question has the same mark, so a log answers it again. Letters that a value spells
    somewhere, as a policy that guesses would, are passed over."""
    said = json.dumps(values, ensure_ascii=False).casefold()
    seed = json.dumps([template, values, unreadable], ensure_ascii=False)
    for _ in range(1000):  # the first one is free, nearly always
        numbers = hashlib.sha256(seed.encode("utf-8", "surrogatepass"))
        mark = "".join(MARK_LETTERS[n % len(MARK_LETTERS)] for n in numbers.digest()[:4])
        if mark not in said:
            break
        seed = numbers.hexdigest()
    return mark


def is_mark(value):
    """Is this four letters that could be a mark? (In a file of somebody else's anything may be.)"""
    return isinstance(value, str) and re.fullmatch(f"[{MARK_LETTERS}]{{4}}", value) is not None


def mark_in(prompt):
    """The mark that a rendered prompt asks for, as a model finds it: in the last line of the form.
    "" if the prompt asks for none."""
    lines = re.findall(rf"^End ([{MARK_LETTERS}]{{4}})$", prompt, re.M)
    return lines[-1] if lines else ""


# What Markdown, quotation and other scripts put around a header; the same for the line End.
IN_FRONT = ' \t\u00a0\u3000\ufeff*#>_[](){}-`•"“”'
NUMBER = r"(?:\d{1,2} ?[.):、．] ?)?[ *_`\[(（【<]*"  # "5. ", "**5.** "
BETWEEN = r"[ \t\u00a0*_`\[(（【<]+"  # between a header's name and its mark
BEHIND = r"[ \t\u00a0*_`\])）】>]*"  # behind the mark


@functools.cache
def header_pattern(words, signed):
    """How a header line looks whose name is one of the pattern `words`, with a mark (in group 1) or
    without; group 2 is its colon. Compiled once: the mark is not part of it."""
    mark = rf"{BETWEEN}([a-z]{{4}})" if signed else "()"
    return re.compile(rf"{NUMBER}(?:{words}){mark}{BEHIND}([:：]|$)", re.I)


def before_end(text, mark):
    """What stands before the line `End <mark>`. Raises Unreadable if there is no such line: the
    answer was cut, or is not in the form.

    What follows the line is not looked at, however long, so a cut there does no harm."""
    end = end_of(text, mark)
    if end is None:
        raise Unreadable("end", f"no line 'End {mark}'")
    if end > LONGEST_ANSWER:
        raise Unreadable("long", f"an answer of {end} characters")
    return text[:end]


def end_of(text, mark):
    """Where the first line `End <mark>` of an answer starts, or None."""
    start = 0
    for line in text.split("\n"):
        body = line.lstrip(IN_FRONT).rstrip(' \t\r.。:："”')
        end = header_pattern("End:?：?", True).match(body)
        if end and end.end() == len(body) and end.group(1).casefold() == mark:
            return start
        start += len(line) + 1
    return None


# ------------------------------------------------------------------------------------ the sections


class Section(NamedTuple):
    """A header of an answer and what stands below it."""

    name: str  # the key of the header
    line: str  # the rest of the header's own line: there a deciding value stands, alone
    text: str  # that line and all lines up to the next header


def find_sections(text, names, mark):
    """The sections of an answer, in order, as Sections. names: {key: pattern of the header}.

    A header stands at a line's start and ends in a colon; numbers ("5. Change kqvt:") and Markdown
    around it are forgiven. With a mark the mark belongs to it, a header that ends its line needs no
    colon, and all behind the line End is dropped first (Unreadable without one). mark "": for
    writers' texts and for old files, which are read for their text and never for a score; there a
    line without a colon has to be a Markdown heading."""
    if mark:
        text = before_end(text, mark)
    headers, start = [], 0  # of each header (key, where it, where its text starts)
    for line in text.split("\n"):
        body = line.lstrip(IN_FRONT).rstrip()
        for key, words in names.items():
            header = header_pattern(words, bool(mark)).match(body)
            if not header or header.group(1).casefold() != mark:
                continue
            is_heading = mark or "#" in line[: len(line) - len(line.lstrip(IN_FRONT))]
            if header.group(2) or is_heading:
                headers.append((key, start, body[header.end() :].lstrip("*_` ")))
                break
        start += len(line) + 1
    ends = [start for _, start, _ in headers[1:]] + [len(text)]
    sections = []
    for (key, start, rest), end in zip(headers, ends):
        below = text[start:end].partition("\n")[2]
        sections.append(Section(key, rest, f"{rest}\n{below}".strip()))
    return sections


def marked_sections(text, names, mark, deciding=()):
    """{key: text} of an answer in which every header of `names` stands with the mark, before a line
    End. Of the headers in `deciding`, which hold a value, the text is that value as `peel` has it,
    alone on their own line: what follows the line is ignored.

    Raises Unreadable if a header or the line End is missing, or a header stands there twice with
    different texts. (The same twice is meant.)"""
    found = {}
    for section in find_sections(text, names, mark):
        content = peel(section.line) if section.name in deciding else section.text
        if found.setdefault(section.name, content) != content:
            raise Unreadable("twice", f"two sections {section.name}, which differ")
    for name in names:
        if name not in found:
            raise Unreadable("header", f"no section {name} with its mark")
    return {name: found[name] for name in names}


def unmarked_sections(text, names):
    """{key: text} of an answer without marks: of a writer of users, of SAGE's files, of earlier
    runs. It is read for its text, and never for a score. Raises Unreadable if a section is missing.

    The last section is taken from its last header, and the others are matched backwards from
    there."""
    sections = find_sections(text, names, "")
    found, before = {}, len(sections)
    for key in reversed(names):
        places = [i for i in range(before) if sections[i].name == key]
        if not places:
            raise Unreadable("header", f"no section {key}")
        before = places[-1]
        found[key] = sections[before].text
    return dict(reversed(found.items()))


# -------------------------------------------------------------------------------------- the values

WRAPPERS = " \t*_`\"'“”‘’«»「」『』()[]{}（）【】"  # Markdown, quotation marks, brackets
# Each minus and plus that Unicode has, as the keyboard's: a lost minus would make a loss a gain.
SIGNS = {
    ord(sign): plain
    for signs, plain in (("＋﹢⁺₊➕", "+"), ("－−﹣⁻₋➖˗‐‑‒–—―", "-"))
    for sign in signs
} | str.maketrans("０１２３４５６７８９／．", "0123456789/.")


def peel(line):
    """The value on a header's own line, without Markdown, quotation marks, brackets and a final
    stop around it, its signs and digits as the keyboard has them."""
    value = line.strip(WRAPPERS)
    if value.endswith((".", "。", "．")):
        value = value[:-1].strip(WRAPPERS)
    return value.translate(SIGNS)


def whole_number(line, out_of):
    """The whole number, of three digits at most, that stands alone on a line, as an int: "4", "-3",
    "+5.0", "4/5" where the scale ends at `out_of`. Raises Unreadable for all else.

    Nothing is searched for in a sentence: "+10? No, -3" means -3, and "not +3" nothing at all."""
    match = re.fullmatch(rf"([+-]? ?\d{{1,3}})(?:\.0)?(?: ?/ ?{out_of})?", peel(line))
    if match is None:
        raise Unreadable("value", f"no whole number alone on its line: {line[:60]!r}")
    return int(match.group(1).replace(" ", ""))
