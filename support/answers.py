"""support/answers.py - reading what a model was asked to write: its mark, its sections, its values.

A user's model is shown what the policy said, and a judge is asked to quote it. So an answer may
contain words of the policy, even a line like "Change: +10". The words alone cannot show whether the
model means such a line or quotes it. (A filter that takes lines which look like the policy's words
for quotations can be abused: the policy says "Change: -3", and the model's own -3 is filtered out.)
So every prompt asks the model to write a *mark*, four letters, behind each header and in a last
line:

    Content kqvt: ...
    Change kqvt: -3
    End kqvt

The mark is computed from the prompt, which the policy never sees. A header without the mark is
ordinary text. Everything behind the line End is dropped first. docs/hacking.md says more.
"""

import functools
import hashlib
import json
import re
from dataclasses import dataclass

LONGEST_ANSWER = 20_000  # characters; an answer that has not come to its End by then is refused


class Unreadable(ValueError):
    """An answer that cannot be read. complaint: the key of the line in prompts/*/complaints.txt
    that the model is told when it is asked again. That line is fixed text: it holds no word of the
    answer, because that word could be the policy's."""

    def __init__(self, complaint, message):
        super().__init__(message)
        self.complaint = complaint


# --------------------------------------------------------------------------------------- the mark

# No vowels, so that no mark is a word, and no letter that is easily taken for another one.
MARK_LETTERS = "bcdfghjkmnpqrstvwxz"
MARK_PATTERN = "[" + MARK_LETTERS + "]{4}"


def mark_of(template, values, unreadable=0):
    """The mark of a prompt: four letters from the SHA-256 of its template, its values and the
    number of unreadable answers to it before.

    The same question always has the same mark, so that its logged answer can be read again. Four
    letters that occur somewhere in a value are skipped: the policy could have guessed them."""
    spelled = json.dumps(values, ensure_ascii=False).casefold()
    seed = json.dumps([template, values, unreadable], ensure_ascii=False)
    # The first mark is nearly always free. The bound is for a text that was made to hold every
    # combination of four letters, which would keep us here for ever.
    for _ in range(1000):
        hashed = hashlib.sha256(seed.encode("utf-8", "surrogatepass"))
        mark = "".join(MARK_LETTERS[byte % len(MARK_LETTERS)] for byte in hashed.digest()[:4])
        if mark not in spelled:
            break
        seed = hashed.hexdigest()
    return mark


def mark_in(prompt):
    """The mark that a rendered prompt asks for, which stands in the last line of its form. "" if
    the prompt asks for none."""
    marks = re.findall("^End (" + MARK_PATTERN + ")$", prompt, re.M)
    return marks[-1] if marks else ""


# ------------------------------------------------------------------------------------- header lines

# Models decorate headers with Markdown, numbers, quotation marks and brackets. A header line and
# the names of its parts:
#
#     >  5.  **[  Change  (  kqvt  )**  :  -3
#     |  |   |    |       |  |     |    |  the rest of the line
#     |  |   |    |       |  |     |    COLON
#     |  |   |    |       |  |     CLOSING
#     |  |   |    |       |  MARK
#     |  |   |    |       BETWEEN
#     |  |   |    the name
#     |  |   OPENING
#     |  NUMBER
#     IN_FRONT
#
# IN_FRONT is a set of characters to strip, with the blanks of other scripts; the other parts are
# patterns.
IN_FRONT = ' \t\u00a0\u3000\ufeff*#>_[](){}-`•"“”'
NUMBER = r"(?:\d{1,2} ?[.):、．] ?)?"
OPENING = r"[ *_`\[(（【<]*"
BETWEEN = r"[ \t\u00a0*_`\[(（【<]+"
MARK = r"(?P<mark>[a-z]{4})"
NO_MARK = r"(?P<mark>)"
CLOSING = r"[ \t\u00a0*_`\])）】>]*"
COLON = r"(?P<colon>[:：]|$)"


@functools.cache
def header_pattern(name, with_mark):
    """The compiled pattern of a header line, up to its colon, without what IN_FRONT strips. name: a
    pattern of the header's name.

    Group "mark": any four letters (the caller compares them, so that one pattern serves all marks),
    or "" if not `with_mark`. Group "colon": "" where the line ends instead."""
    marked = BETWEEN + MARK if with_mark else NO_MARK
    return re.compile(f"{NUMBER}{OPENING}(?:{name}){marked}{CLOSING}{COLON}", re.IGNORECASE)


END_LINE = header_pattern("End:?：?", with_mark=True)


def before_end(text, mark):
    """The part of an answer before its line `End <mark>`. What follows the line is ignored, however
    long it is, so it does no harm if the answer was cut there. Raises Unreadable if there is no
    such line (the answer was cut, or is not in the form), or if it comes too late."""
    end = end_of(text, mark)
    if end is None:
        raise Unreadable("end", f"no line 'End {mark}'")
    if end > LONGEST_ANSWER:
        raise Unreadable("long", f"an answer of {end} characters")
    return text[:end]


def end_of(text, mark):
    """The position at which the first line `End <mark>` of an answer begins, or None."""
    position = 0
    for line in text.split("\n"):
        # A final stop, colon or quotation mark is forgiven.
        body = line.lstrip(IN_FRONT).rstrip(' \t\r.。:："”')
        end_line = END_LINE.fullmatch(body)
        if end_line and end_line["mark"].casefold() == mark:
            return position
        position += len(line) + 1
    return None


# ------------------------------------------------------------------------------------ the sections


@dataclass
class Section:
    """A header of an answer and what stands below it, up to the next header."""

    name: str  # the key of the header
    line: str  # the rest of the header's own line; a value that decides stands here, alone
    lines_below: list

    @property
    def text(self):
        """The whole section: the rest of the header's line, and the lines below."""
        return "\n".join([self.line, *self.lines_below]).strip()


def find_sections(text, names, mark):
    """The sections of an answer, in order, as a list of Section. names: {key: pattern of the
    header's name}. What stands above the first header belongs to no section.

    A header stands at the start of a line; numbers and Markdown around it are forgiven. What else
    makes it a header depends on `mark`:

        a mark   an answer to one of our prompts. The mark stands behind the name: "Change kqvt: ".
                 The colon may be missing at the end of the line. Everything behind the line End is
                 dropped first; Unreadable is raised if there is none.
        ""       a text without marks: a writer's, a file of SAGE, a log of an earlier version. It
                 is read for its text, never for a score. The name is followed by a colon, or the
                 line is a Markdown heading: "Change: ", "## Change".
    """
    if mark:
        text = before_end(text, mark)
    sections = []
    for line in text.split("\n"):
        new_section = section_at(line, names, mark)
        if new_section:
            sections.append(new_section)
        elif sections:
            sections[-1].lines_below.append(line)
    return sections


def section_at(line, names, mark):
    """A new Section, with no lines below yet, if this line begins with one of the headers `names`;
    else None. The rules are those of `find_sections`."""
    body = line.lstrip(IN_FRONT)
    in_front = line.removesuffix(body)
    body = body.rstrip()
    is_markdown_heading = "#" in in_front
    for key, name in names.items():
        header = header_pattern(name, with_mark=bool(mark)).match(body)
        if not header or header["mark"].casefold() != mark:
            continue
        if mark or header["colon"] or is_markdown_heading:
            rest_of_line = body[header.end() :].lstrip("*_` ")
            return Section(key, rest_of_line, [])
    return None


def marked_sections(text, names, mark, deciding=()):
    """{key: text} of an answer to one of our prompts. names: {key: pattern of the header's name}.

    deciding: the keys of headers that hold a single value. Of these the text is the value on the
    header's own line, as `peel` returns it, and the lines below are ignored.

    Raises Unreadable if the line End or one of the headers is missing, or if a header stands there
    twice with different texts. (The same text twice is accepted.)"""
    contents = {}
    for section in find_sections(text, names, mark):
        content = peel(section.line) if section.name in deciding else section.text
        first_content = contents.setdefault(section.name, content)
        if content != first_content:
            raise Unreadable("twice", f"two sections {section.name}, which differ")
    for name in names:
        if name not in contents:
            raise Unreadable("header", f"no section {name} with its mark")
    return {name: contents[name] for name in names}


def unmarked_sections(text, names):
    """{key: text} of a text without marks: a writer's, a file of SAGE, a log of an earlier version.
    It is read for its text, never for a score. names: {key: pattern}, in the order of the form.
    Raises Unreadable if a section is missing.

    Such a text may quote headers before the form begins, or within it; the form itself comes last.
    So we go backwards: the last header of the last name counts, then the last header of the name
    before it that stands above, and so on."""
    sections = find_sections(text, names, "")
    texts = {}
    end = len(sections)  # only the sections above this one are left
    for key in reversed(names):
        places = [i for i in range(end) if sections[i].name == key]
        if not places:
            raise Unreadable("header", f"no section {key}")
        end = places[-1]
        texts[key] = sections[end].text
    return {key: texts[key] for key in names}


# -------------------------------------------------------------------------------------- the values

WRAPPERS = " \t*_`\"'“”‘’«»「」『』()[]{}（）【】"  # Markdown, quotation marks, brackets
# Unicode's plus signs, minus signs and full-width digits, and below each the key of the keyboard.
# None may be missing: a minus sign that is lost would turn a loss into a gain.
TO_KEYBOARD = str.maketrans(
    "＋﹢⁺₊➕－−﹣⁻₋➖˗‐‑‒–—―０１２３４５６７８９／．",
    "+++++-------------0123456789/.",
)


def peel(line):
    """The value on a header's own line: without the Markdown, quotation marks, brackets and final
    stop around it, and with the signs and digits of the keyboard."""
    value = line.strip(WRAPPERS)
    if value.endswith((".", "。", "．")):
        value = value[:-1].strip(WRAPPERS)
    return value.translate(TO_KEYBOARD)


@functools.cache
def number_pattern(out_of):
    """The pattern of a whole number that stands alone. Group "number": its sign and digits."""
    # In an f-string a brace is written twice: {{1,3}} is the pattern's {1,3}.
    return re.compile(
        rf"""
        (?P<number> [+-]? [ ]? \d{{1,3}} )  # "4", "-3", "- 3"
        (?: \.0 )?                          # "5.0"
        (?: [ ]? / [ ]? {out_of} )?         # "4/5", where the scale ends at 5
        """,
        re.VERBOSE,
    )


def whole_number(line, out_of):
    """The whole number that stands alone on a line, as an int; the scale ends at `out_of`. It is
    not searched for within a sentence. Raises Unreadable for everything else. With out_of=10:

        -3             -3        +10? No, -3    refused: which one is meant?
        +5.0           5         not +3         refused
        － 3            -3        5-8            refused: a range
        "-3/10"        -3        -3/5           refused: another scale
        **(+7).**      7         +5.5           refused: not a whole number
    """
    match = number_pattern(out_of).fullmatch(peel(line))
    if match is None:
        raise Unreadable("value", f"no whole number alone on its line: {line[:60]!r}")
    return int(match["number"].replace(" ", ""))


def without_surrogates(text):
    """`text` with every half of a surrogate pair replaced by U+FFFD. JSON may hold such a half
    ("\\ud83d" is half an emoji), but UTF-8 cannot, so a run would end when it writes the text to a
    log."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
