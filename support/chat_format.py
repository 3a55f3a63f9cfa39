r"""support/chat_format.py - the chat template of a model, cut into pieces.

A dialogue grows by one message at a time, and no token that was sampled may ever be encoded again.
But a template renders only whole dialogues, as text. So one dummy dialogue is rendered and cut at
its messages. After that, prompts are put together from the ids of the pieces and the ids of the
messages, and the template is no longer needed.

A dialogue of two turns in ChatML. The pieces are in brackets, what people say is not:

    head       [<|im_start|>system\nBe warm.<|im_end|>\n<|im_start|>user\n]
               My sister forgot my birthday.
    ask        [<|im_end|>\n<|im_start|>assistant\n]
               Tell me more.
    stop_id    [<|im_end|>]
    after      [\n<|im_start|>user\n]
               It was last Monday.
    ask        [<|im_end|>\n<|im_start|>assistant\n]
    opening    [<think>\n]

The second reply is sampled behind that. Most templates have no opening.
"""

from support.errors import BadModel

import os
import re
import sys

from tqdm import tqdm


class ChatFormat:
    """The chat template: cut once into pieces of ids, which are then put around every message.

        head      from the beginning to the user's first text
        ask       from a user's text to the reply to it
        opening   in front of a reply that is to be sampled; not in front of a past one
        close     white space in front of the stop token; mostly none
        stop_id   sampled by the policy, hence an action, hence trained
        after     from the stop token to the user's next text; context, hence never trained

    Some templates write more in front of a reply that is to be sampled than in front of one that is
    past: `opening_text` ("<think>\\n" of models that always think), which later turns do not see.
    Others write more in front of a past reply: `past_reply_prefix` (a newline in GLM-4).

    The pieces are encoded with special tokens, what people say without: a user who types <|im_end|>
    has typed ten characters. Once they are cut, a dialogue of two turns is glued together from them
    and compared with the template's own.

    system_prompt: "" for none. think: whether replies begin with a thought. template_args: further
    arguments of the template, as {"enable_thinking": False}. stop_ids: the tokens at which the
    model's generation_config stops, if it names any. Raises BadModel for a tokenizer whose texts
    cannot be put together, and for a template that cannot be cut, or that does not suit `think` or
    `stop_ids`.
    """

    def __init__(self, tokenizer, system_prompt="", think=False, template_args=None, stop_ids=()):
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.template_args = template_args or {}
        self.warned_of_thoughts = False
        self.check_tokenizer()
        head, before_past_reply, after_reply, before_new_reply = self.split_template()
        ask = os.path.commonprefix([before_past_reply, before_new_reply])  # what both begin with
        self.past_reply_prefix = before_past_reply[len(ask) :]
        self.opening_text = before_new_reply[len(ask) :]
        self.check_openings(before_past_reply, before_new_reply, think)
        self.head, self.ask = self.encode(head), self.encode(ask)
        self.opening = self.encode(self.opening_text)
        self.close, self.stop_id, self.after = self.find_stop(self.encode(after_reply), stop_ids)
        self.check_pieces()

    # ------------------------------------------------------------------------------- cutting, once

    def check_tokenizer(self):
        """Raise BadModel for a tokenizer that puts a blank in front of every text it encodes, as
        SentencePiece's mostly do. In front of a message that stands behind something else, this
        blank would be one that the template does not write."""
        if self.decode(self.text("My") + self.text("self")) != "Myself":
            raise BadModel(
                "the tokenizer adds a blank in front of every text (SentencePiece: Llama 2, "
                "Mistral, Phi-3), so the tokens of a message depend on what stands before it; "
                "take a model with a byte-level tokenizer (Qwen, Llama 3, SmolLM2, GLM-4)"
            )

    def split_template(self):
        """The template's own text around the messages of a dummy dialogue: up to the user's first
        text, from there to a past reply, from there to the user's next text, and from there to a
        reply that is to be sampled. Raises BadModel."""
        text = self.render("@@1@@", "@@2@@", "@@3@@")
        match = re.fullmatch("(.*?)@@1@@(.*?)@@2@@(.*?)@@3@@(.*)", text, re.DOTALL)
        if not match or self.system_prompt.strip() not in match[1]:
            raise BadModel(
                "the chat template does not show every message as it is; this code "
                "cannot place the replies"
            )
        return match.groups()

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

    def check_openings(self, before_past_reply, before_new_reply, think):
        """Raise BadModel unless the template opens past and new replies alike. One of the two may
        have something more: a past one white space, a new one <think> in think mode, or
        <think></think> in direct mode."""
        both_have_more = self.past_reply_prefix and self.opening_text
        thought_at_most = re.fullmatch(r"\s*(<think>\s*(</think>\s*)?)?", self.opening_text)
        if both_have_more or self.past_reply_prefix.strip() or not thought_at_most:
            raise BadModel(
                f"the chat template opens a first reply with {before_past_reply!r} and a "
                f"later one with {before_new_reply!r}; this code needs one opening"
            )
        opening = self.opening_text.strip()
        begins_a_thought = "</think>" not in opening
        if opening and think != begins_a_thought:
            advice = "train it with --think"
            if think:
                advice = "leave out --think, or change its --template-args"
            raise BadModel(f"the chat template opens every reply with {opening!r}; {advice}")

    def find_stop(self, tail, stop_ids):
        """Find the stop token in the ids that follow a reply. Returns (close, stop_id, after).
        Raises BadModel if there is none, if more than white space stands in front of it, or if the
        model does not stop at it."""
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
        if stop_ids and tail[at] not in stop_ids:
            raise BadModel(
                f"the chat template ends a reply with {self.decode([tail[at]])!r}, "
                "which is not among the tokens at which the model's generation_config "
                f"stops ({', '.join(repr(self.decode([i])) for i in stop_ids)})"
            )
        return tail[:at], tail[at], tail[at + 1 :]

    def check_pieces(self):
        """Glue a dialogue of two turns together, and raise BadModel with the first difference if
        its text is not the template's own."""
        texts = ("My sister forgot my birthday.", "Tell me more.", "It was last Monday.")
        first_line, reply, next_line = texts
        wanted = self.decode(self.encode(self.render(*texts)))
        glued = self.decode(
            self.first_prompt(first_line)
            + self.past_reply(reply)
            + self.next_prompt(next_line)
            + self.opening
        )
        if glued != wanted:
            i = len(os.path.commonprefix([wanted, glued]))
            raise BadModel(
                "the chat template cannot be cut into pieces: it writes "
                f"{wanted[max(0, i - 20) : i + 20]!r}, its pieces give "
                f"{glued[max(0, i - 20) : i + 20]!r}"
            )

    # --------------------------------------------------------------- speaking, for every message

    def first_prompt(self, line):
        """Ids from the beginning to where the first reply is sampled, but for the opening."""
        return self.head + self.text(line) + self.ask

    def next_prompt(self, line):
        """Ids from behind a reply's stop token to where the next one is sampled, but for the
        opening."""
        return self.after + self.text(line) + self.ask

    def past_reply(self, visible):
        """Ids of a reply as later turns see it, its stop token included."""
        return self.text(self.past_reply_prefix + visible) + self.close + [self.stop_id]

    def text(self, text):
        """Ids of what somebody said: text only, and no special token, even if it spells one."""
        return self.encode(text, split_special_tokens=True)

    def encode(self, text, **options):
        """Ids of a text, in which special tokens are special, without any that the tokenizer would
        add. options: further arguments of the tokenizer."""
        return self.tokenizer(text, add_special_tokens=False, **options)["input_ids"]

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
