r"""models/chat_format.py - a model's chat template, cut into pieces of token ids.

A dialogue grows by one message at a time, and a sampled token must never be encoded again. But a
template renders only whole dialogues, as text. So one dummy dialogue is rendered and cut at its
messages. After that, prompts are put together from the ids of the pieces and the ids of the
messages, and the template is no longer needed.

A dialogue of two turns in ChatML. The pieces are in brackets, the messages are not:

    head       [<|im_start|>system\nBe warm.<|im_end|>\n<|im_start|>user\n]
               My sister forgot my birthday.
    ask        [<|im_end|>\n<|im_start|>assistant\n]
               Tell me more.
    stop_id    [<|im_end|>]
    after      [\n<|im_start|>user\n]
               It was last Monday.
    ask        [<|im_end|>\n<|im_start|>assistant\n]
    opening    [<think>\n]

The second reply is sampled after that. Most templates have no opening.

From top to bottom: the cutting; what is put around each message; what refuses a tokenizer or a
template.
"""

from support.errors import BadModel

import itertools
import json
import os
import re

from tokenizers import Tokenizer

BYTE_LEVEL = "a model with a byte-level tokenizer (Qwen, Llama 3, SmolLM2, GLM-4)"
# What both sides say in a dialogue that is only rendered (`ChatFormat.check_pieces`).
DUMMY_TEXTS = 3 * (
    "My sister forgot my birthday.",
    "It was last Monday.",
    'She wrote: "5 < 6 & 7"',
    "I waited.\n\n# Then *I* waited." * 50,
)


class ChatFormat:
    """The chat template: cut once into pieces of ids, which are then put around every message.

        head      from the beginning to the user's first text
        ask       from a user's text to the reply to it
        opening   before a reply that is to be sampled; not before a past one
        close     white space before the stop token; mostly empty
        stop_id   sampled by the policy, so it is an action and is trained; any of `stop_ids`, which
                  include the model's own, ends a reply
        after     from the stop token to the user's next text; context, so it is never trained

    Some templates write more before a new reply than before a past one: `opening_text`
    ("<think>\\n" of models that always think), which later turns do not see. Others write more
    before a past reply: `past_reply_prefix` (a newline in GLM-4).

    The pieces are encoded with the tokens that were added to the vocabulary, messages without them:
    a user who types <|im_end|> or </think> has typed ten characters, or eight. A template may write
    something else in another process, such as today's date; `rendered` is its text in this one, to
    compare them by.

    system_prompt: "" for none. think: whether replies begin with a thought. template_args: further
    arguments of the template, as {"enable_thinking": False}. stop_ids: the tokens at which the
    model's generation_config stops, if it names any. Raises BadModel (`refuse_...`, below).
    """

    def __init__(self, tokenizer, system_prompt="", think=False, template_args=None, stop_ids=()):
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.template_args = template_args or {}
        # 1. Make the encoder of messages, without added tokens. `split_special_tokens` is not
        # enough: it leaves added tokens that are not special, such as </think> of Qwen3. And some
        # files ask for truncation or padding.
        refuse_python(tokenizer)
        parts = json.loads(tokenizer.backend_tokenizer.to_str())
        parts |= {"added_tokens": [], "truncation": None, "padding": None}
        self.plain = Tokenizer.from_str(json.dumps(parts))
        refuse_blanks(self.decode(self.text("My") + self.text("self is\n\nhere")))
        # 2. Cut a dummy dialogue of two turns at its messages.
        self.rendered = self.render("@@1@@", "@@2@@", "@@3@@")
        match = re.fullmatch("(.*?)@@1@@(.*?)@@2@@(.*?)@@3@@(.*)", self.rendered, re.DOTALL)
        refuse_hidden_messages(match, system_prompt)
        head, before_past_reply, after_reply, before_new_reply = match.groups()
        # 3. Before a reply: what both begin with, and what the template writes for one kind alone.
        ask = os.path.commonprefix([before_past_reply, before_new_reply])
        self.past_reply_prefix = before_past_reply[len(ask) :]
        self.opening_text = before_new_reply[len(ask) :]
        refuse_openings(self.past_reply_prefix, self.opening_text, think)
        self.head, self.ask, self.opening = map(self.encode, (head, ask, self.opening_text))
        # 4. After a reply: white space, its stop token, the way to the user's next text.
        tail = self.encode(after_reply)
        added_ids = tokenizer.added_tokens_decoder  # no message is encoded as one of these
        self.close = [*itertools.takewhile(lambda token_id: token_id not in added_ids, tail)]
        behind_close = tail[len(self.close) :]
        refuse_endless(self.decode(self.close), behind_close, self.decode(tail))
        self.stop_id, *self.after = behind_close
        self.stop_ids = {self.stop_id, *stop_ids}
        refuse_other_stop(self, stop_ids)
        # 5. Compare the pieces, put together, with the template's own text.
        self.check_pieces()

    # ------------------------------------------------------------------------------- cutting, once

    def render(self, *texts):
        """The template's own text of a dialogue, up to where the next reply begins. texts: of the
        user and of the policy by turns, the user's first. (An empty system prompt is no
        message.)"""
        roles = ["system"] + ["user", "assistant"] * len(texts)
        pairs = zip(roles, (self.system_prompt, *texts))
        messages = [{"role": role, "content": text} for role, text in pairs if text]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_args
            )
        except Exception as error:
            # a template may refuse anything, for example a system message
            raise BadModel(f"the chat template refuses a plain dialogue: {error}") from None

    def check_pieces(self):
        """Put a dialogue of twelve turns together from the pieces, and compare each of its prompts
        with the template's own text. A template may number the rounds, write a reminder from the
        third turn on, leave out early turns, or change long messages and signs. A shorter or
        simpler dialogue would not show it. Raises BadModel with the first difference."""
        texts, ids, write = [], [], self.first_prompt
        for text in DUMMY_TEXTS:  # said by the user, and then by the policy
            texts.append(text)
            ids += write(text)
            whole, pieces = self.encode(self.render(*texts)), ids + self.opening
            if pieces != whole:  # other ids may spell the same text
                whole, pieces = map(self.decode, (whole, pieces))
            if pieces != whole:
                i = max(0, len(os.path.commonprefix([whole, pieces])) - 20)
                raise BadModel(
                    "the chat template cannot be cut into pieces: it writes "
                    f"{whole[i : i + 40]!r}, its pieces give {pieces[i : i + 40]!r}"
                )
            texts.append(text)
            ids += self.past_reply(text)
            write = self.next_prompt

    # --------------------------------------------------------------- speaking, for every message

    def first_prompt(self, line):
        """Ids from the beginning to where the first reply is sampled, without the opening."""
        return self.head + self.text(line) + self.ask

    def next_prompt(self, line):
        """Ids from behind a reply's stop token to where the next reply is sampled, without the
        opening."""
        return self.after + self.text(line) + self.ask

    def past_reply(self, visible):
        """Ids of a reply as later turns see it, its stop token included."""
        return self.text(self.past_reply_prefix + visible) + self.close + [self.stop_id]

    def text(self, text):
        """Ids of a message: text only, and no added token, even if it spells one."""
        return self.plain.encode(text, add_special_tokens=False).ids

    def encode(self, text):
        """Ids of a text of the template, with its added tokens, but without those that the
        tokenizer would put around a text."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decode(self, ids):
        """The text of ids, special tokens shown."""
        return self.tokenizer.decode(
            ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )


# -------------------------------- what refuses a tokenizer or a chat template: each raises BadModel


def refuse_python(tokenizer):
    """Refuse a tokenizer that has no encoder of its own."""
    if not tokenizer.is_fast:
        raise BadModel(
            f"a {type(tokenizer).__name__} is written in Python, and has no tokenizer.json; take "
            f"{BYTE_LEVEL}"
        )


def refuse_blanks(text):
    """Refuse a tokenizer that changes a message by what stands before it. text: "My" and "self
    is\\n\\nhere", encoded one by one and decoded together. SentencePiece's tokenizers mostly put a
    blank before every text, also of a message in the middle of a prompt, where the template has
    none. One with a wrong split may lose all blanks. (Without tokenizer.json transformers makes up
    a vocabulary.)"""
    if text != "Myself is\n\nhere":
        raise BadModel(
            f"the tokenizer turns 'My' and 'self is\\n\\nhere' into {text!r}: tokenizer.json is "
            "missing or damaged, or it adds a blank in front of every text (SentencePiece: "
            "Llama 2, Mistral, Phi-3), so the tokens of a message depend on what stands before "
            f"it; take {BYTE_LEVEL}"
        )


def refuse_hidden_messages(match, system_prompt):
    """Refuse a template that does not show all messages, in their order. match: of the dummy
    dialogue, cut at them."""
    if not match or system_prompt.strip() not in match[1]:
        raise BadModel(
            "the chat template does not show every message as it is; this code "
            "cannot place the replies"
        )


def refuse_openings(past, new, think):
    """Refuse what a template writes before one kind of reply alone, but white space before a `past`
    one, or <think> (think mode) or <think></think> (direct mode) before a `new` one."""
    thought_at_most = re.fullmatch(r"\s*(<think>\s*(</think>\s*)?)?", new)
    if not thought_at_most or past.strip() or (past and new):
        raise BadModel(
            f"the chat template writes {past!r} only before a past reply and {new!r} only "
            "before a new one; this code needs one opening"
        )
    opening = new.strip()
    if opening and think == ("</think>" in opening):
        raise BadModel(
            f"the chat template opens every reply with {opening!r}; train it with --think if "
            "that begins a thought, and without if it is an empty one (--template-args)"
        )


def refuse_endless(close, behind_close, tail):
    """Refuse a template that writes other words than white space, `close`, before a reply's stop
    token, or that has none. tail: its text from the end of a reply to the next message."""
    if close.strip() or not behind_close:
        raise BadModel(
            f"the chat template ends a reply with {tail!r}, which does not begin "
            "with an added token; the policy could not learn to stop"
        )


def refuse_other_stop(chat, stop_ids):
    """Refuse a template that ends a reply with another token than the model's."""
    if stop_ids and chat.stop_id not in stop_ids:
        raise BadModel(
            f"the chat template ends a reply with {chat.decode([chat.stop_id])!r}, "
            "which is not among the tokens at which the model's generation_config "
            f"stops ({chat.decode(stop_ids)!r})"
        )
