"""support/chat_format.py - the chat template of a model, cut into pieces.

A dialogue grows by one message at a time, and no token that was sampled may ever be encoded again.
But a template renders only whole dialogues, as text. So one dummy dialogue is rendered and cut at
its messages. After that, prompts are put together from the ids of the pieces and the ids of the
messages, and the template is no longer needed.
"""

from support.errors import BadModel

import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from tqdm import tqdm

# ------------------------------------------------------------------------------------------- pieces


@dataclass
class Pieces:
    r"""What the template writes around the messages, in ids.

    A dialogue of two turns in ChatML. The pieces are in brackets, what people say is not:

        head             [<|im_start|>system\nBe warm.<|im_end|>\n<|im_start|>user\n]
                         My sister forgot my birthday.
        ask              [<|im_end|>\n<|im_start|>assistant\n]
                         Tell me more.
        ending.stop_id   [<|im_end|>]
        ending.after     [\n<|im_start|>user\n]
                         It was last Monday.
        ask              [<|im_end|>\n<|im_start|>assistant\n]
        opening          [<think>\n]

    The second reply is sampled behind that. Most templates have no opening.
    """

    head: list  # from the beginning to the user's first text
    ask: list  # from a user's text to the reply to it
    opening: list  # in front of a reply that is to be sampled; not in front of a past one
    ending: "Ending"  # what follows a reply
    blanks: "Blanks"  # how messages and pieces are encoded, so that no blank is gained or lost
    first_blank: str  # " " if it is encoded with the user's first text and not with `head`, or ""
    later_blank: str  # the same for the user's later texts and `ending.after`


class Ending(NamedTuple):
    """What follows a reply, in ids."""

    close: list  # blanks in front of the stop token; mostly none, as in the dialogue above
    stop_id: int  # sampled by the policy, hence an action, hence trained
    after: list  # from the stop token to the user's next text; context, hence never trained


# ------------------------------------------------------------------------------ blanks at the seams
#
# Some tokenizers (SentencePiece: Llama 2, Mistral, Yi) put a blank in front of every text that they
# encode: "My" becomes the token "_My", where "_" is the blank. Behind the piece "[INST] " that
# blank is there twice. The remedy is to encode "\nMy" and to cut the ids of the newline off: behind
# a newline, "My" gains no blank.
#
# Where the remedy is needed depends on tokenizer and template. So `choose_pieces` tries five ways.


class Blanks(NamedTuple):
    """Which parts of a dialogue are encoded behind a newline, which is then cut off."""

    scaffold_behind_newline: bool = False  # the pieces, but for `head`
    user_behind_newline: bool = False
    reply_behind_newline: bool = False
    # A blank at the end of the piece in front of a user's text is encoded with that text.
    blank_with_user: bool = False


# Byte-level tokenizers (Qwen, Llama 3, GLM-4, DeepSeek), which add no blank.
NOTHING_BEHIND_NEWLINE = Blanks()
# Only a past reply would gain a blank (Mistral 0.3, behind its special token [/INST]).
REPLY_BEHIND_NEWLINE = Blanks(reply_behind_newline=True)
# Only the user's text would gain a blank (GLM-4 over SentencePiece, Mistral 0.3 with a system
# prompt).
USER_BEHIND_NEWLINE = Blanks(user_behind_newline=True)
# In "[INST] My", " My" is one token, while "[INST] " and "My" would be three (Mistral 0.3).
BLANK_WITH_USER = Blanks(blank_with_user=True)
# Every piece and every text would gain a blank (Llama 2, Mistral 0.1, Yi, TinyLlama, Vicuna,
# Phi-3).
ALL_BEHIND_NEWLINE = Blanks(
    scaffold_behind_newline=True,
    user_behind_newline=True,
    reply_behind_newline=True,
    blank_with_user=True,
)
# In the order in which they are tried. The templates of tests/textbook/test_templates.py, each over
# each of the tokenizers there, need no other.
WAYS = (
    NOTHING_BEHIND_NEWLINE,
    REPLY_BEHIND_NEWLINE,
    USER_BEHIND_NEWLINE,
    BLANK_WITH_USER,
    ALL_BEHIND_NEWLINE,
)


# ---------------------------------------------------------------------------------- the chat format


class Scaffold(NamedTuple):
    """The template's own text around the messages of a dialogue."""

    head: str  # up to the user's first text
    before_past_reply: str  # from a user's text to a reply that is already there
    after_reply: str  # from a reply to the user's next text
    before_new_reply: str  # from a user's text to a reply that is to be sampled


class ChatFormat:
    """The chat template: cut once into `Pieces`, which are then put around every message.

    Some templates write more in front of a reply that is to be sampled than in front of one that is
    past: `opening_text` ("<think>\\n" of models that always think), which later turns do not see.
    Others write more in front of a past reply: `past_reply_prefix` (a newline in GLM-4).

    The pieces are encoded with special tokens, what people say without: a user who types <|im_end|>
    has typed ten characters. Once they are cut, a dialogue of two turns is glued together from them
    and compared with the template's own.

    system_prompt: "" for none. think: whether replies begin with a thought. template_args: further
    arguments of the template, as {"enable_thinking": False}. stop_ids: the tokens at which the
    model's generation_config stops, if it names any. Raises BadModel for a template that cannot be
    cut, or that does not suit `think` or `stop_ids`.
    """

    def __init__(self, tokenizer, system_prompt="", think=False, template_args=None, stop_ids=()):
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.template_args = template_args or {}
        self.warned_of_thoughts = False
        scaffold = self.split_template()
        openings = [scaffold.before_past_reply, scaffold.before_new_reply]
        ask = os.path.commonprefix(openings)  # what both begin with
        self.past_reply_prefix = scaffold.before_past_reply[len(ask) :]
        self.opening_text = scaffold.before_new_reply[len(ask) :]
        self.check_openings(scaffold)
        self.check_think(think)
        self.pieces = self.choose_pieces(scaffold, ask)
        self.opening = self.pieces.opening  # the ids of opening_text
        self.stop_id = self.pieces.ending.stop_id
        self.check_stop_id(stop_ids)

    # ------------------------------------------------------------------------------- cutting, once

    def split_template(self):
        """The Scaffold of a dummy dialogue. Raises BadModel."""
        text = self.render("@@1@@", "@@2@@", "@@3@@")
        match = re.fullmatch("(.*?)@@1@@(.*?)@@2@@(.*?)@@3@@(.*)", text, re.DOTALL)
        if not match or self.system_prompt.strip() not in match[1]:
            raise BadModel(
                "the chat template does not show every message as it is; this code "
                "cannot place the replies"
            )
        return Scaffold(*match.groups())

    def render(self, *texts):
        """The template's own text of a dialogue, up to where the next reply begins. texts: of the
        user and of the policy by turns, the user's first."""
        messages = []
        if self.system_prompt:
            messages.append({"role": "system", "content": self.system_prompt})
        for i, text in enumerate(texts):
            messages.append({"role": ("user", "assistant")[i % 2], "content": text})
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_args
            )
        except Exception as error:
            # a template may refuse whatever it likes, a system message for one
            raise BadModel(f"the chat template refuses a plain dialogue: {error}") from None

    def check_openings(self, scaffold):
        """Raise BadModel unless the template opens past and new replies alike. One of the two may
        have something more: a past one white space, a new one <think> or <think></think>."""
        both_have_more = self.past_reply_prefix and self.opening_text
        thought_at_most = re.fullmatch(r"\s*(<think>\s*(</think>\s*)?)?", self.opening_text)
        if both_have_more or self.past_reply_prefix.strip() or not thought_at_most:
            raise BadModel(
                f"the chat template opens a first reply with {scaffold.before_past_reply!r} and a "
                f"later one with {scaffold.before_new_reply!r}; this code needs one opening"
            )

    def check_think(self, think):
        """Raise BadModel if the opening begins a thought in direct mode, or ends it in think
        mode."""
        if not self.opening_text.strip():
            return
        begins_a_thought = "</think>" not in self.opening_text
        if think == begins_a_thought:
            return
        advice = "train it with --think"
        if think:
            advice = "leave out --think, or change its --template-args"
        raise BadModel(
            f"the chat template opens every reply with {self.opening_text.strip()!r}; {advice}"
        )

    def choose_pieces(self, scaffold, ask):
        """The Pieces that give the template's own dialogue when they are glued together: if
        possible its ids, else its text. Raises BadModel with the first difference."""
        texts = ("My sister forgot my birthday.", "Tell me more.", "It was last Monday.")
        wanted = self.encode(self.render(*texts), behind_newline=False)
        same_text = None  # the first pieces that give the template's text, but in other ids
        for blanks in WAYS:
            pieces = self.cut(blanks, scaffold, ask)
            glued = self.glue(pieces, *texts)
            if glued == wanted:
                return pieces
            if same_text is None and self.decode(glued) == self.decode(wanted):
                same_text = pieces
        if same_text is None:
            pieces = self.cut(NOTHING_BEHIND_NEWLINE, scaffold, ask)
            glued = self.glue(pieces, *texts)
            raise_first_difference(self.decode(wanted), self.decode(glued))
        return same_text

    def cut(self, blanks, scaffold, ask):
        """The template's Pieces, encoded as `blanks`, one of the WAYS, says."""
        head, after_reply = scaffold.head, scaffold.after_reply
        first_blank = later_blank = ""
        if blanks.blank_with_user:
            head, first_blank = split_blank(head)
            after_reply, later_blank = split_blank(after_reply)
        behind_newline = blanks.scaffold_behind_newline
        return Pieces(
            head=self.encode(head, behind_newline=False),
            ask=self.encode(ask, behind_newline),
            opening=self.encode(self.opening_text, behind_newline),
            ending=self.find_stop(self.encode(after_reply, behind_newline)),
            blanks=blanks,
            first_blank=first_blank,
            later_blank=later_blank,
        )

    def find_stop(self, tail):
        """Find the stop token in the ids that follow a reply. Returns an Ending. Raises BadModel if
        there is none, or if more than blanks stand in front of it."""
        added = self.tokenizer.added_tokens_decoder
        special_ids = set(self.tokenizer.all_special_ids)
        special_ids |= {i for i, token in added.items() if token.special}
        at = next((i for i, token_id in enumerate(tail) if token_id in special_ids), None)
        if at is None:
            raise BadModel(
                "the chat template ends a reply without a special token; the policy "
                "could not learn to stop"
            )
        if self.decode(tail[:at]).strip():
            raise BadModel(
                f"the chat template puts {self.decode(tail[:at])!r} between a "
                "reply and its end; not supported"
            )
        return Ending(close=tail[:at], stop_id=tail[at], after=tail[at + 1 :])

    def glue(self, pieces, first_line, reply, next_line):
        """Ids of a dialogue of two turns, up to where the second reply is sampled."""
        blanks, ending = pieces.blanks, pieces.ending
        first_text = pieces.first_blank + first_line
        past_text = self.past_reply_prefix + reply
        next_text = pieces.later_blank + next_line
        return (
            pieces.head
            + self.encode_text(first_text, blanks.user_behind_newline)
            + pieces.ask
            + self.encode_text(past_text, blanks.reply_behind_newline)
            + ending.close
            + [ending.stop_id]
            + ending.after
            + self.encode_text(next_text, blanks.user_behind_newline)
            + pieces.ask
            + pieces.opening
        )

    def check_stop_id(self, stop_ids):
        """Raise BadModel if the model does not stop at the template's stop token."""
        if stop_ids and self.stop_id not in stop_ids:
            raise BadModel(
                f"the chat template ends a reply with {self.decode([self.stop_id])!r}, "
                "which is not among the tokens at which the model's generation_config "
                f"stops ({', '.join(repr(self.decode([i])) for i in stop_ids)})"
            )

    # --------------------------------------------------------------- speaking, for every message

    def first_prompt(self, line):
        """Ids from the beginning to where the first reply is sampled, but for the opening."""
        user = self.text(self.pieces.first_blank + line)
        return self.pieces.head + user + self.pieces.ask

    def next_prompt(self, line):
        """Ids from behind a reply's stop token to where the next one is sampled, but for the
        opening."""
        user = self.text(self.pieces.later_blank + line)
        return self.pieces.ending.after + user + self.pieces.ask

    def past_reply(self, visible):
        """Ids of a reply as later turns see it, its stop token included."""
        ending = self.pieces.ending
        reply = self.text(self.past_reply_prefix + visible, reply=True)
        return reply + ending.close + [ending.stop_id]

    def text(self, text, reply=False):
        """Ids of what a user, or the policy (`reply`), said."""
        blanks = self.pieces.blanks
        behind_newline = blanks.reply_behind_newline if reply else blanks.user_behind_newline
        return self.encode_text(text, behind_newline)

    def decode(self, ids):
        """The text of ids, special tokens shown."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def warn_of_stray_thoughts(self):
        """Warn once that the policy thinks in direct mode, and say what can be done."""
        if not self.warned_of_thoughts:
            tqdm.write(
                "the policy thinks although it was not asked to; its thoughts are taken out "
                "of what the user is told (stray_thoughts in the metrics). Train it with "
                "--think, or turn them off by its template's own switch, for example: "
                "--template-args '{\"enable_thinking\": false}'",
                file=sys.stderr,
            )
        self.warned_of_thoughts = True

    # ------------------------------------------------------------------------------ text into ids

    def encode_text(self, text, behind_newline):
        """Ids of a text that was said. It is text only: no special token, even if it spells one."""
        return self.encode(text, behind_newline, split_special_tokens=True)

    def encode(self, text, behind_newline, **options):
        """Ids of a text, in which special tokens are special, without any that the tokenizer would
        add. options: further arguments of the tokenizer.

        behind_newline: encode it behind a newline and cut that off (see `Blanks`). Where the
        newline has become one token with the text, it cannot be cut off, and the text is encoded
        alone."""

        def ids(t):
            return self.tokenizer(t, add_special_tokens=False, **options)["input_ids"]

        if behind_newline:
            newline, both = ids("\n"), ids("\n" + text)
            if both[: len(newline)] == newline:
                return both[len(newline) :]
        return ids(text)


def split_blank(text):
    """("[INST]", " ") for "[INST] "; a text that does not end in a blank, and ""."""
    if text.endswith(" "):
        return text[:-1], " "
    return text, ""


def raise_first_difference(wanted, glued):
    """Raise BadModel with the first difference between the template's text and that of its
    pieces."""
    i = len(os.path.commonprefix([wanted, glued]))
    raise BadModel(
        "the chat template cannot be cut into pieces: it writes "
        f"{wanted[max(0, i - 20) : i + 20]!r}, its pieces give "
        f"{glued[max(0, i - 20) : i + 20]!r}"
    )
