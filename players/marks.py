"""players/marks.py - marks of a chat template in what a server has sent: it should have taken them
out.

    I am here.<|im_end|>            <|im_end|>: an end token was sent as text
    <thinking>hm</thinking> Hi.     <thinking>: a thought was not taken out
    [INST] Hi.                      [INST]
    Write `<|im_end|>` there.       none: it is quoted
    a < b, and I <3 you [sic]       none
"""

import re

# What a reply may quote, with a mark in it. Each is taken out before marks are looked for.
QUOTED = re.compile(
    r"""(?xsm)
    (`{3,}|~{3,}).*?(?:\1|\Z)       # a block of code
    | (`{1,2})[^\n]*?\2            # code in a line
    | <code>.*?</code>
    | ^[ ]*>[^\n]*                 # a line behind ">"
    | "[^"\n]*"                    # what stands in quotation marks, of any language
    | “[^”]*” | „[^“”]*[“”] | ‘[^’\n]*’
    | «[^»]*» | 「[^」]*」
    | (?<!\w)'[^'\n]*'(?!\w)       # 'so', but not the apostrophes of "don't, can't"
    | (?<=.)<s>.*?</s>             # <s>words that are struck out</s>, with others before them,
    | <s>.*?</s>(?=.)              # or behind them: else <s> and </s> are marks
    """
)
# Marks that chat templates put around a thought, and between and behind messages. (The tags <think>
# and </think> are read by rollout.read_reply.)
MARKS = re.compile(
    r"""(?x)
    <[|｜]/?(?![_.:-]+[|｜>])[\w▁:.-]{2,}[|｜]?>               # <|im_end|>, <|channel>, <｜end▁of｜>; no face
    | </?\w{2,}[|｜]>                                     # <channel|>
    | \[[|]\w{4,}[|]\]                                   # [|user|]
    | </?(?!think>)(?i:(?:\w+[:_])?                       # <thinking>, </seed:think>, but not <think>
      (?:think(?:ing)?|thoughts?|reasoning))>
    | ◁/?think▷                                           # ◁think▷
    | \[/?(?:THINK|INST)\]                                # [INST]
    | <(?:start|end)_of_(?:turn|utterance)>               # <end_of_turn>
    | assistantfinal                                      # what is left of <|start|>assistant<|channel|>final
    | \A(?:<s>|<bos>)                                     # at the beginning alone
    | (?:</s>|<eos>|<pad>|<eot>|\[EOS\])\Z                # at the end alone
    """
)


def mark_in(reply):
    """The first mark of a chat template in a reply, but for quotations; "" if there is none."""
    found = MARKS.search(QUOTED.sub("_", reply.strip()))
    return found[0] if found else ""
