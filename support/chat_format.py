"""support/chat_format.py - the chat template of a model, cut into pieces.

A dialogue grows by one message at a time, and no token that was sampled may ever be encoded again.
So the template is rendered once, with dummy messages, and cut; after that token ids are put
together from its pieces and from the ids of what was said.
"""

from support.errors import BadModel

import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

from tqdm import tqdm


class Blanks(NamedTuple):
    """How blanks are kept right where pieces are encoded one by one and glued together.

    Some tokenizers (SentencePiece: Llama 2, Mistral, Yi) put a blank in front of whatever they
    encode, so that each piece would gain one in the middle of the dialogue. What is encoded behind
    a newline, which is then cut off, gains none."""

    blank_with_user: bool  # a blank between scaffold and user text is encoded with the text
    scaffold_behind_newline: bool
    user_behind_newline: bool
    reply_behind_newline: bool


# Every piece by itself: byte-level tokenizers (Qwen, Llama 3, GLM-4, DeepSeek), which add nothing.
PLAIN = Blanks(False, False, False, False)
# The token in front of a reply takes the blank behind it (Mistral 0.3's special [/INST]).
REPLY_INSIDE = Blanks(False, False, False, True)
# The same for the user's text, where only this one would gain a blank (GLM-4 over SentencePiece,
# Mistral 0.3 with a system prompt).
USER_INSIDE = Blanks(False, False, True, False)
# "[INST] My": " My" is one token, where "[INST] " and "My" would be three (Mistral 0.3).
BLANK_WITH_USER = Blanks(True, False, False, False)
# A blank in front of every piece, none of them wanted (Llama 2, Mistral 0.1, Yi, TinyLlama, Vicuna,
# Phi-3).
ALL_INSIDE = Blanks(True, True, True, True)
# In the order in which they are tried. The templates of tests/textbook/test_templates.py over the
# tokenizers there, each with each, need these five and no other.
WAYS = (PLAIN, REPLY_INSIDE, USER_INSIDE, BLANK_WITH_USER, ALL_INSIDE)


class Ending(NamedTuple):
    """What follows a reply, in ids."""

    close: list  # blanks in front of the stop token, mostly none
    stop_id: int
    after: list  # what stands between the stop token and the user's next line


@dataclass
class Pieces:
    """The template's pieces in ids, but for the two leads, which are encoded with a user's text."""

    blanks: Blanks
    head: list
    first_lead: str  # in front of the user's first text: a blank or nothing
    next_lead: str  # in front of the user's later texts
    ask: list
    opening: list
    ending: Ending


class ChatFormat:
    """The chat template, cut once into the pieces that stand between the messages.

    A template renders whole dialogues; a dialogue that grows by one message at a time needs only
    what comes between two messages. So one dummy dialogue is rendered and cut at its contents. With
    ChatML ("." marks where a text goes):

        head   <|im_start|>system\n . <|im_end|>\n<|im_start|>user\n
        ask    <|im_end|>\n<|im_start|>assistant\n    after what the user said; the reply is
                                                      sampled behind it
        stop   <|im_end|>                             sampled by the policy, hence an action,
                                                      hence trained
        after  \n<|im_start|>user\n                  behind the stop token: context, never
                                                      sampled, never trained

    Some templates open a reply that is to be sampled otherwise than one that is past. What only the
    former has is `opening` ("<think>\n" of models that always think), which later turns do not see;
    what only the latter has is `lead` (a newline in GLM-4), and stands before a visible reply.

    The scaffold is encoded with special tokens, what people say without: a user who types
    <|im_end|> has typed ten characters. At the end a dialogue of two turns is glued together and
    compared with the template's own.

    think: whether replies begin with a thought. template_args: for the template, as
    {"enable_thinking": False}. stop_ids: at which the model says that it stops, if it says so.
    Raises BadModel for a template that cannot be cut.
    """

    def __init__(self, tokenizer, system_prompt="", think=False, template_args=None, stop_ids=()):
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.template_args, self.told_of_thoughts = template_args or {}, False
        # `past` opens an earlier reply, `now` one that is to be sampled
        head, past, after_reply, now = self.split_template()
        ask = min(past, now, key=len)  # what both have in common
        self.lead, self.opens = past[len(ask) :], now[len(ask) :]
        one_opening = past.startswith(ask) and now.startswith(ask)
        begins_a_thought_at_most = re.fullmatch(r"\s*(<think>\s*(</think>\s*)?)?", self.opens)
        if not one_opening or self.lead.strip() or not begins_a_thought_at_most:
            raise BadModel(
                f"the chat template opens a first reply with {past!r} and a later one "
                f"with {now!r}; this code needs one opening"
            )
        opens_a_thought = "</think>" not in self.opens
        if self.opens.strip() and think != opens_a_thought:
            advice = (
                "leave out --think, or change its --template-args"
                if think
                else "train it with --think"
            )
            raise BadModel(
                f"the chat template opens every reply with {self.opens.strip()!r}; {advice}"
            )
        self.place_pieces(head, ask, after_reply)
        self.opening, self.stop_id = self.pieces.opening, self.pieces.ending.stop_id
        if stop_ids and self.stop_id not in stop_ids:
            raise BadModel(
                f"the chat template ends a reply with {self.decode([self.stop_id])!r}, "
                "which is not among the tokens at which the model's generation_config "
                f"stops ({', '.join(repr(self.decode([i])) for i in stop_ids)})"
            )

    def split_template(self):
        """A dummy dialogue in the template's own text, cut at its contents into four: up to the
        user's text, from there to a reply that is past, from there to the user's next text, and
        from there to a reply that is to be sampled. Raises BadModel."""
        text = self.render("@@1@@", "@@2@@", "@@3@@")
        match = re.fullmatch("(.*?)@@1@@(.*?)@@2@@(.*?)@@3@@(.*)", text, re.DOTALL)
        if not match or self.system_prompt.strip() not in match[1]:
            raise BadModel(
                "the chat template does not show every message as it is; this code "
                "cannot place the replies"
            )
        return match.groups()

    def render(self, *texts):
        """The template's own text of a dialogue, up to where the next reply begins. texts: the
        user's first, the reply to it, and so on in turns."""
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

    def place_pieces(self, head, ask, after_reply):
        """Encode the pieces so that they give the template's dialogue when they are glued together:
        if possible in its ids, else in its text. Raises BadModel with the first difference.

        Which way of keeping blanks is right depends on tokenizer and template, so all are tried,
        the plain one first.
        """
        texts = "My sister forgot my birthday.", "Tell me more.", "It was last Monday."
        wanted = self.encode(self.render(*texts), behind_newline=False)
        same_text = None  # the first pieces that give the template's text, but in other ids
        for blanks in WAYS:
            self.pieces = self.cut(blanks, head, ask, after_reply)
            glued = self.glue(*texts)
            if glued == wanted:
                return
            if same_text is None and self.decode(glued) == self.decode(wanted):
                same_text = self.pieces
        if same_text is None:
            self.pieces = self.cut(PLAIN, head, ask, after_reply)
            self.refuse_to_cut(self.decode(wanted), self.decode(self.glue(*texts)))
        self.pieces = same_text

    def cut(self, blanks, head, ask, after_reply):
        """The Pieces of the template, encoded in one of the WAYS."""

        def ids(text):
            return self.encode(text, blanks.scaffold_behind_newline)

        kept = " " if blanks.blank_with_user else ""  # what the user's text takes from the scaffold
        first, later = head.removesuffix(kept), after_reply.removesuffix(kept)
        return Pieces(
            blanks=blanks,
            head=self.encode(first, behind_newline=False),
            first_lead=head[len(first) :],
            next_lead=after_reply[len(later) :],
            ask=ids(ask),
            opening=ids(self.opens),
            ending=self.find_stop(ids(later)),
        )

    def glue(self, first_line, reply, next_line):
        """Ids of a dialogue of two turns, up to where the second reply begins."""
        return (
            self.first_prompt(first_line)
            + self.past_reply(reply)
            + self.next_prompt(next_line)
            + self.pieces.opening
        )

    def refuse_to_cut(self, wanted, glued):
        """Raise BadModel with the first difference between two texts."""
        i = len(os.path.commonprefix([wanted, glued]))
        raise BadModel(
            "the chat template cannot be cut into pieces: it writes "
            f"{wanted[max(0, i - 20) : i + 20]!r}, its pieces give "
            f"{glued[max(0, i - 20) : i + 20]!r}"
        )

    def find_stop(self, tail):
        """Find the stop token in the ids that follow a reply. Returns an Ending; raises BadModel
        where there is none, or something else in front of it."""
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

    def encode(self, text, behind_newline, **options):
        """Ids of a text; `behind_newline`: as they are in the middle of a longer one. What spells a
        special token is one."""

        def ids(t):
            return self.tokenizer(t, add_special_tokens=False, **options)["input_ids"]

        if behind_newline:
            newline, both = ids("\n"), ids("\n" + text)
            if both[: len(newline)] == newline:
                return both[len(newline) :]
        return ids(text)

    def text(self, text, reply=False):
        """Ids of what a user, or the policy (`reply`), said: text only, whatever it spells."""
        blanks = self.pieces.blanks
        behind_newline = blanks.reply_behind_newline if reply else blanks.user_behind_newline
        return self.encode(text, behind_newline, split_special_tokens=True)

    def refuse_to_keep(self):
        """Raise BadModel if the template drops earlier thoughts, or shows them otherwise: with
        --history-thoughts keep the policy would learn from a history that nobody else gives it."""
        if "<think>@</think>@@" not in self.render("a", "<think>@</think>@@", "b"):
            raise BadModel(
                "--history-thoughts keep: the chat template does not show an earlier "
                "<think>...</think> as it was; leave it out"
            )

    def past_reply(self, visible):
        """Ids of a reply as later turns see it, its stop token included."""
        ending = self.pieces.ending
        return self.text(self.lead + visible, reply=True) + ending.close + [ending.stop_id]

    def decode(self, ids):
        """The text of ids, special tokens shown."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    def tell_of_thoughts(self):
        """Say once that there are thoughts in direct mode, and what can be done."""
        if not self.told_of_thoughts:
            tqdm.write(
                "the policy thinks although it was not asked to; its thoughts are taken out "
                "of what the user is told (stray_thoughts in the metrics). Train it with "
                "--think, or turn them off by its template's own switch, for example: "
                "--template-args '{\"enable_thinking\": false}'",
                file=sys.stderr,
            )
        self.told_of_thoughts = True

    def first_prompt(self, line):
        """Ids from the beginning to where the first reply is sampled."""
        user = self.text(self.pieces.first_lead + line)
        return self.pieces.head + user + self.pieces.ask

    def next_prompt(self, line):
        """Ids from behind a reply's stop token to where the next one is sampled."""
        user = self.text(self.pieces.next_lead + line)
        return self.pieces.ending.after + user + self.pieces.ask
