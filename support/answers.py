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

    The same question has the same mark, so its answer in a log can be read again. Four letters that
    occur somewhere in a value are passed over: a policy could have guessed them."""
    spelled = json.dumps(values, ensure_ascii=False).casefold()
    seed = json.dumps([template, values, unreadable], ensure_ascii=False)
    for _ in range(1000):  # the first mark is nearly always free
        hashed = hashlib.sha256(seed.encode("utf-8", "surrogatepass"))
        mark = "".join(MARK_LETTERS[byte % len(MARK_LETTERS)] for byte in hashed.digest()[:4])
        if mark not in spelled:
            break
        seed = hashed.hexdigest()
    return mark


def is_mark(value):
    """Is this four letters that could be a mark? (In a file of somebody else's anything may be.)"""
    return isinstance(value, str) and re.fullmatch(f"[{MARK_LETTERS}]{{4}}", value) is not None


def mark_in(prompt):
    """The mark that a rendered prompt asks for, as a model finds it: in the last line of the form.
    "" if the prompt asks for none."""
    lines = re.findall(rf"^End ([{MARK_LETTERS}]{{4}})$", prompt, re.M)
    return lines[-1] if lines else ""


# What models put around a header and around the line End: Markdown, quotation marks, brackets, the
# blanks of other scripts.
IN_FRONT = ' \t\u00a0\u3000\ufeff*#>_[](){}-`•"“”'
NUMBER = r"(?:\d{1,2} ?[.):、．] ?)?[ *_`\[(（【<]*"  # "5. ", "**5.** "
BETWEEN = r"[ \t\u00a0*_`\[(（【<]+"  # between a header's name and its mark
BEHIND = r"[ \t\u00a0*_`\])）】>]*"  # behind the mark


@functools.cache
def header_pattern(words, signed):
    """The pattern of a header line whose name matches the pattern `words`. Group 1 is its mark, ""
    where it is not `signed`; group 2 is its colon, "" where the line ends instead. The letters of
    the mark are not part of the pattern, so each pattern is compiled once."""
    mark = rf"{BETWEEN}([a-z]{{4}})" if signed else "()"
    return re.compile(rf"{NUMBER}(?:{words}){mark}{BEHIND}([:：]|$)", re.I)


def before_end(text, mark):
    """What stands before the line `End <mark>`. Raises Unreadable if there is no such line, because
    the answer was cut or is not in the form. What follows the line is ignored, however long it is,
    so a cut there does no harm."""
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
    headers, texts = [], []  # of each section (key, rest of the header's line), and its lines
    for line in text.split("\n"):
        header = header_in(line, names, mark)
        if header:
            headers.append(header)
            texts.append([header[1]])
        elif texts:  # what stands above the first header belongs to no section
            texts[-1].append(line)
    return [
        Section(key, rest, "\n".join(lines).strip()) for (key, rest), lines in zip(headers, texts)
    ]


def header_in(line, names, mark):
    """(key of the header that stands in this line, the rest of the line), or None."""
    body = line.lstrip(IN_FRONT)
    in_front = line.removesuffix(body)
    body = body.rstrip()
    for key, words in names.items():
        header = header_pattern(words, bool(mark)).match(body)
        if not header or header.group(1).casefold() != mark:
            continue
        has_colon = bool(header.group(2))
        is_markdown_heading = "#" in in_front
        if mark or has_colon or is_markdown_heading:
            return key, body[header.end() :].lstrip("*_` ")
    return None


def marked_sections(text, names, mark, deciding=()):
    """{key: text} of an answer in which every header of `names` stands with the mark, before a line
    End. Of the headers in `deciding`, which hold a value, the text is that value as `peel` has it,
    alone on their own line: what follows the line is ignored.

    Raises Unreadable if a header or the line End is missing, or a header stands there twice with
    different texts. (The same twice is meant.)"""
    contents = {}
    for section in find_sections(text, names, mark):
        content = peel(section.line) if section.name in deciding else section.text
        if contents.setdefault(section.name, content) != content:
            raise Unreadable("twice", f"two sections {section.name}, which differ")
    for name in names:
        if name not in contents:
            raise Unreadable("header", f"no section {name} with its mark")
    return {name: contents[name] for name in names}


def unmarked_sections(text, names):
    """{key: text} of an answer without marks: of a writer of users, of SAGE's files, of earlier
    runs. It is read for its text, and never for a score. Raises Unreadable if a section is missing.

    The last section is taken from its last header, and the others are matched backwards from
    there."""
    sections = find_sections(text, names, "")
    texts = {}
    end = len(sections)  # the sections from here on are taken
    for key in reversed(names):
        places = [i for i in range(end) if sections[i].name == key]
        if not places:
            raise Unreadable("header", f"no section {key}")
        end = places[-1]
        texts[key] = sections[end].text
    return {key: texts[key] for key in names}


# -------------------------------------------------------------------------------------- the values

WRAPPERS = " \t*_`\"'“”‘’«»「」『』()[]{}（）【】"  # Markdown, quotation marks, brackets
# Every plus, minus and full-width sign that Unicode has, as the keyboard's: a minus that is lost
# would turn a loss into a gain.
PLUSES, MINUSES = "＋﹢⁺₊➕", "－−﹣⁻₋➖˗‐‑‒–—―"
SIGNS = {
    **str.maketrans(dict.fromkeys(PLUSES, "+")),
    **str.maketrans(dict.fromkeys(MINUSES, "-")),
    **str.maketrans("０１２３４５６７８９／．", "0123456789/."),
}


def peel(line):
    """The value on a header's own line, without Markdown, quotation marks, brackets and a final
    stop around it, its signs and digits as the keyboard has them."""
    value = line.strip(WRAPPERS)
    if value.endswith((".", "。", "．")):
        value = value[:-1].strip(WRAPPERS)
    return value.translate(SIGNS)


@functools.cache
def number_pattern(out_of):
    """The pattern of a number that stands alone; group 1 is its sign and its digits."""
    return re.compile(
        rf"""
        ([+-]?[ ]?\d{{1,3}})        # "4", "-3", "- 3"
        (?: \.0 )?                 # "5.0"
        (?: [ ]? / [ ]?{out_of} )?  # "4/5", where the scale ends at 5
        """,
        re.VERBOSE,
    )


def whole_number(line, out_of):
    """The whole number that stands alone on a line, as an int; the scale ends at `out_of`. Nothing
    is searched for in a sentence. Raises Unreadable for all else. With out_of=10:

        -3             -3        +10? No, -3    refused: which one is meant?
        +5.0           5         not +3         refused
        － 3            -3        5-8            refused: a range
        "-3/10"        -3        -3/5           refused: another scale
        **(+7).**      7         +5.5           refused: not a whole number
    """
    match = number_pattern(out_of).fullmatch(peel(line))
    if match is None:
        raise Unreadable("value", f"no whole number alone on its line: {line[:60]!r}")
    return int(match.group(1).replace(" ", ""))
