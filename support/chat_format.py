"""support/chat_format.py - the chat template of a model, cut into pieces.

A dialogue grows by one message at a time, and no token that was sampled may ever be encoded again.
So the template is rendered once, with dummy messages, and cut; after that token ids are put
together from its pieces and from the ids of what was said.
"""

from support.settings import BadModel

import itertools
import os
import re
import sys

from tqdm import tqdm


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
        cut = re.fullmatch(
            "(.*?)@@1@@(.*?)@@2@@(.*?)@@3@@(.*)", self.render("@@1@@", "@@2@@", "@@3@@"), re.DOTALL
        )
        if not cut or system_prompt.strip() not in cut[1]:
            raise BadModel(
                "the chat template does not show every message as it is; this code "
                "cannot place the replies"
            )
        head, past, after_reply, now = cut.groups()  # `past` opens an earlier reply, `now` a new
        common = min(past, now, key=len)
        self.lead, self.opens = past[len(common) :], now[len(common) :]
        if (
            not (past.startswith(common) and now.startswith(common))
            or self.lead.strip()
            or not re.fullmatch(r"\s*(<think>\s*(</think>\s*)?)?", self.opens)
        ):
            raise BadModel(
                f"the chat template opens a first reply with {past!r} and a later one "
                f"with {now!r}; this code needs one opening"
            )
        if self.opens.strip() and think != ("</think>" not in self.opens):
            raise BadModel(
                f"the chat template opens every reply with {self.opens.strip()!r}; "
                + (
                    "leave out --think, or change its --template-args"
                    if think
                    else "train it with --think"
                )
            )
        self.place_pieces(head, common, after_reply)
        if stop_ids and self.stop_id not in stop_ids:
            raise BadModel(
                f"the chat template ends a reply with {self.decode([self.stop_id])!r}, "
                "which is not among the tokens at which the model's generation_config "
                f"stops ({', '.join(repr(self.decode([i])) for i in stop_ids)})"
            )

    def render(self, *said):
        """The template's own text of a dialogue, up to where the next reply begins."""
        messages = [{"role": "system", "content": self.system_prompt}] * bool(self.system_prompt)
        messages += [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)
        ]
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

        The question is one of blanks. Some tokenizers (Llama 2, Mistral, Yi) put one in front of
        whatever they encode, so that each piece would gain one in the middle of the dialogue. What
        is encoded behind a newline, which is then cut off, gains none. And " My" is one token where
        "[INST] " and "My" are three. What is right for scaffold, user and reply hangs on tokenizer
        and template, so all ways are tried, the plain one first.
        """
        said = "My sister forgot my birthday.", "Tell me more.", "It was last Monday."
        own, glued = self.encode(self.render(*said), False), []

        def differences(way):
            blank, *self.behind_newline = way
            first, later = (piece.removesuffix(" " * blank) for piece in (head, after_reply))
            self.user_leads = head[len(first) :], after_reply[len(later) :]
            self.head = self.encode(first, False)
            self.ask, self.opening = self.scaffold(ask), self.scaffold(self.opens)
            self.close, self.stop_id, self.after = self.find_stop(self.scaffold(later))
            glued[:] = (
                self.first_prompt(said[0])
                + self.past_reply(said[1])
                + self.next_prompt(said[2])
                + self.opening
            )
            return self.decode(glued) != self.decode(own), glued != own

        if differences(min(itertools.product((False, True), repeat=4), key=differences))[0]:
            own, glued = self.decode(own), self.decode(glued)
            i = len(os.path.commonprefix([own, glued]))
            raise BadModel(
                "the chat template cannot be cut into pieces: it writes "
                f"{own[max(0, i - 20) : i + 20]!r}, its pieces give "
                f"{glued[max(0, i - 20) : i + 20]!r}"
            )

    def find_stop(self, tail):
        """Cut what follows a reply into (blanks, its stop token, the ids behind that)."""
        specials = set(self.tokenizer.all_special_ids) | {
            i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special
        }
        special = [i for i, t in enumerate(tail) if t in specials]
        if not special:
            raise BadModel(
                "the chat template ends a reply without a special token; the policy "
                "could not learn to stop"
            )
        if self.decode(tail[: special[0]]).strip():
            raise BadModel(
                f"the chat template puts {self.decode(tail[: special[0]])!r} between a "
                "reply and its end; not supported"
            )
        return tail[: special[0]], tail[special[0]], tail[special[0] + 1 :]

    def encode(self, text, behind_newline, **how):
        """Ids of a text; `behind_newline`: as they are in the middle of a longer one."""
        ids = lambda t: self.tokenizer(t, add_special_tokens=False, **how)["input_ids"]
        if behind_newline:
            newline, both = ids("\n"), ids("\n" + text)
            if both[: len(newline)] == newline:
                return both[len(newline) :]
        return ids(text)

    def scaffold(self, text):
        """Ids of a piece of the template: what spells a special token is one."""
        return self.encode(text, self.behind_newline[0])

    def text(self, text, reply=False):
        """Ids of what somebody said: text only, whatever it spells."""
        return self.encode(text, self.behind_newline[2 if reply else 1], split_special_tokens=True)

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
        return self.text(self.lead + visible, reply=True) + self.close + [self.stop_id]

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
        return self.head + self.text(self.user_leads[0] + line) + self.ask

    def next_prompt(self, line):
        """Ids from behind a reply's stop token to where the next one is sampled."""
        return self.after + self.text(self.user_leads[1] + line) + self.ask
