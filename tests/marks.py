"""marks.py - what tests' own models need: to answer in the form that a prompt asks for."""

from support.answers import mark_in

import re

HEADER = re.compile(
    r"^([ \t*#>_\[(-]*(?:\d{1,2}[.)] ?)?[*_]*)"
    r"([A-Za-z][A-Za-z0-9 ]*|[\u4e00-\u9fff 0-9]{2,7})([*_\])]*[:：])",
    re.M,
)


def sign(text, mark):
    """`text` with `mark` in every header and every <Strategy> tag, and the last line."""
    text = HEADER.sub(rf"\g<1>\g<2> {mark}\g<3>", text)
    text = re.sub(r"<(/?Strategy)>", rf"<\g<1> {mark}>", text)
    return f"{text}\nEnd {mark}"


def signed(prompt, text):
    """`text`, signed as `prompt` asks; as it is where the prompt asks for no mark, or the text is
    signed already."""
    mark = mark_in(prompt)
    return sign(text, mark) if mark and mark not in text else text
