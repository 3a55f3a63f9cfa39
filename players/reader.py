"""players/reader.py - the emotion read from log-probs, not from a written answer: `--reader`.

In the paper f_emo is written: a language model analyses the reply and writes a number. A small
model writes nearly the same number for every reply. It tells replies apart better in its log-probs
for the answer to a yes-or-no question. These log-probs are read:

    x_q = log p(yes) - log p(no)             of question q about the reply, at the next token
    z_q = (x_q - mean_q) / std_q             mean and std over 60 known replies, of this model
    change = round(clip(BIAS + sum_q w_q z_q, -10, 10))

The weights w_q (WEIGHTS, below) were chosen with the same replies. One token for each question:
nothing is parsed, and a reply cannot forge a form. (It can still talk to the model: "This reply
helps the person." docs/small.md measures what that gains.)

The questions stand in prompts/LANG/reader/, behind a beginning that all of them share: the user's
story and last line, then the policy's replies, as JSON. This command measures whether a model is
fit:

    python -m tools.fitness --reader local:DIR
"""

from players.calls import AdaptiveModel, Caller
from support.answers import PROMPTS, as_json, fill, load_prompt
from support.command_line import print_folded
from support.errors import MAX_LOST, BadModel, UnreadableAnswers
from support.files import digest, parse_json, read_jsonl

import asyncio
import json
import math
from dataclasses import dataclass

import numpy as np

from emotion import clamp_change, move_emotion
from people import load_profiles, story_of, toy_profiles
from simulator import User
from toy import world

# The words whose log-odds are read, "yes" first.
WORDS = {"en": ("yes", "no"), "zh": ("是", "否")}
LIKELIEST = 20  # how many of the likeliest next tokens a model returns
LEAST_MASS = 0.5  # of both words together; with less the model was about to say something else
MOST_MASS = 1.01  # with more, but for rounding, a probability was counted twice
MOST_ODDS = 101  # no log-prob is below -100 (players.responses.LEAST_LOG_PROB)
# How many standard deviations from the mean one of the sixty known replies may be before a warning.
# Of 60 numbers, one that stands alone is at most sqrt(59) = 7.7 away. At 4 it has made the standard
# deviation 1.2 times as large, so all changes of emotion smaller.
FAR = 4
# How much a question counts: points of emotion per standard deviation of its log-odds over the
# replies of prompts/replies.jsonl that are marked "weights".
WEIGHTS = {
    # "Does the reply bring something new, and not the same words again?" If the user's story is
    # short, a reply to the point gets a stronger yes than warm words that fit anybody.
    "new": 3.0,
    # "Does the reply give the person what they secretly need?" Only this question names the need.
    "need": 1.5,
    # "Does this reply help this person?" Words without sense get a no. The weight is small, because
    # all warm words get a yes.
    "helps": 0.5,
    # "Is the reply only a copy of words that stand above?" A small model answers every question as
    # if it were "is it a good reply?", this one, too. If its yes is stronger than the other three
    # answers explain, the reply is a copy of earlier words.
    "copied": -1.2,
}
BIAS = -0.5  # the change at z = 0: an average reply of those sixty does not lift the emotion


def log_odds(likeliest, words):
    """(log p(yes) - log p(no), p(yes) + p(no)) of a next token.

    likeliest: [(text of a token, log-prob)], the LIKELIEST ones; words: a pair of WORDS. Tokens
    that differ in case or blanks are the same word. A missing word has at most the probability of
    the least likely token, and gets that one."""
    log_prob_of = {}  # {word: log-prob}
    for text, log_prob in likeliest:
        word = text.strip().casefold()
        log_prob_of[word] = np.logaddexp(log_prob_of.get(word, -np.inf), log_prob)
    least = min(log_prob for _, log_prob in likeliest)
    yes, no = (float(log_prob_of.get(word, least)) for word in words)
    mass = sum(math.exp(log_prob_of[word]) for word in words if word in log_prob_of)
    return yes - no, mass


def weigh(z):
    """(BIAS + the weighted sum of z, the change of the emotion). z: {question: z_q}."""
    total = BIAS + sum(WEIGHTS[name] * z[name] for name in z)
    return total, clamp_change(round(total))


@dataclass
class ReadUser(User):
    """A user whose feelings are read: `feel` asks the Reader of its simulator, not the user's
    model, which only speaks."""

    async def feel(self, reply: str) -> tuple[str, int]:
        """f_emo, read: move the emotion. Returns (text, change): the reading as JSON, and the
        clamped change. Raises SimulatorFailed."""
        self.add("friend", reply)
        reader = self.simulator.reader
        reading = await reader.read(reader.questions(self.profile, self.dialogue))
        self.emotion = move_emotion(self.emotion, reading["change"])
        # h_emo: one fixed sentence for each question
        sentences = {
            name: yes if reading["z"][name] > 0 else no
            for name, (_, yes, no) in reader.texts.items()
        }
        self.planning = {"objective": sentences.pop("need")}
        self.planning["subjective"] = " ".join(sentences.values())
        return json.dumps(reading | self.planning, ensure_ascii=False), reading["change"]


class OddsCaller(Caller):
    """Asks a reader's model for the next token, one with `async likeliest(prompts, count)`. All
    questions about a reply are one call, and no schema is needed."""

    side = "reader"

    def __init__(self, model, words, **shared):
        """words: a pair of WORDS. shared: a Caller's."""
        super().__init__(model, **shared)
        self.words = words

    async def ask_model(self, prompts, schema=None):
        """For each of `prompts` [log-odds, mass, the likeliest word], see `log_odds`, as JSON."""
        answers = []
        for likeliest in await self.model.likeliest(prompts, LIKELIEST):
            best, _ = max(likeliest, key=lambda pair: pair[1])
            answers.append([*log_odds(likeliest, self.words), best])
        return json.dumps(answers, ensure_ascii=False)


class Reader(AdaptiveModel):
    """Reads replies for all users. `set_scale` must be called before the first one. From a reply to
    the change of an emotion:

        questions   the four prompts about the reply
        ask         the log-odds behind each of them, from the log if they are there, and checked
        read        z of each question, and the change

    `scale` is {question: (mean, std)} of the log-odds over known replies."""

    FINDINGS = ("scale",)

    def __init__(self, model, lang="en", **shared):
        """model, shared: of an OddsCaller."""
        self.caller = OddsCaller(model, WORDS[lang], **shared)
        # {are there earlier replies?: the beginning of all questions}. With an empty list of
        # earlier replies, a small model tells replies apart less well.
        user, earlier, reply = load_prompt("person", lang, "reader").split("\n")
        self.beginning = {True: f"{user}\n{earlier}\n{reply}", False: f"{user}\n{reply}"}
        # {name: [the question, what f_reply is told of a reply above the mean of the known ones,
        # what it is told of another reply]}
        self.texts = {name: load_prompt(name, lang, "reader").rsplit("\n", 2) for name in WEIGHTS}
        self.scale = {}  # `set_scale` sets it

    def questions(self, profile, dialogue):
        """The prompts about the last reply in a User's `dialogue`, one for each of WEIGHTS, all
        with the same beginning: the user's story (and need, in one of them) and last line, and the
        policy's replies."""
        *earlier, reply = [turn["text"] for turn in dialogue if turn["speaker"] == "friend"]
        *_, line = [turn["text"] for turn in dialogue if turn["speaker"] == "me"]
        values = {
            "story": story_of(profile),
            "task": profile.task,
            "line": " ".join(line.split()),
            "earlier": as_json(earlier),
            "reply": as_json(reply),
        }
        beginning = self.beginning[bool(earlier)]
        return [fill(f"{beginning}\n\n{text}", values) for text, _, _ in self.texts.values()]

    def known(self):
        """What f_reply may be told, and all questions about the known replies: these set the scale."""
        rows = known_replies("weights")
        return [self.texts, [self.questions(row["profile"], row["dialogue"]) for row in rows]]

    async def ask(self, prompts):
        """{question: log-odds} of a reply. prompts: its `questions`. Where answers are kept, equal
        prompts are asked once. Raises UnreadableAnswers."""
        key = digest(self.caller.name, prompts)
        answer = self.caller.logged(key) or await self.caller.call(prompts, None, key)
        odds_of = {}  # {question: log-odds}
        try:
            # logs of earlier versions have more between the mass and the word
            for name, (odds, mass, *_, likeliest) in zip(
                WEIGHTS, parse_json(answer.text), strict=True
            ):
                # `not` in front, because each comparison with NaN is false
                if not (LEAST_MASS <= mass <= MOST_MASS and abs(odds) <= MOST_ODDS):
                    hint = (
                        "If this begins a thought, or Markdown, try to switch it off by "
                        "--template-args; if it is an id, let the server list texts; else use "
                        "another model, or server"
                        if mass < LEAST_MASS
                        else "The log-probs cannot be right; use another server"
                    )
                    raise UnreadableAnswers(
                        f"{' and '.join(self.caller.words)} have {mass:.2f} of the probability at the "
                        f"question {name!r}; the likeliest word is {likeliest!r}. {hint}"
                    )
                odds_of[name] = odds
        except (TypeError, ValueError, RecursionError):
            raise UnreadableAnswers(f"a damaged answer in the log of calls, key {key}") from None
        return odds_of

    async def read(self, prompts):
        """f_emo, read: {"log_odds": {question: x}, "z": {question: z}, "sum": BIAS + the weighted
        sum of z, "change": of the emotion}."""
        odds, z = await self.ask(prompts), {}
        for name, x in odds.items():
            mean, std = self.scale[name]
            z[name] = (x - mean) / std
        total, change = weigh(z)
        return {"log_odds": odds, "z": z, "sum": total, "change": change}

    async def set_scale(self):
        """Set `scale` by the known replies that are marked "weights": log-odds of two models cannot
        be compared. Replies that cannot be read are left out, up to MAX_LOST of them; a warning
        says so, and also if one of the others is FAR from the rest. Raises BadModel if the model is
        about to say other words than yes or no, or the server returns no log-probs, and
        SimulatorFailed."""
        unreadable, far = [], []  # what is wrong, in words

        async def try_to_ask(row):
            try:
                return await self.ask(self.questions(row["profile"], row["dialogue"]))
            except UnreadableAnswers as error:
                unreadable.append(str(error))

        rows = known_replies("weights")
        answers = await asyncio.gather(*map(try_to_ask, rows))
        if len(unreadable) > MAX_LOST * len(rows):
            raise BadModel(
                f"{self.caller.name} cannot be read, at {len(unreadable)} of {len(rows)} known replies: "
                f"{unreadable[0]}"
            )
        for name in WEIGHTS:
            column = np.array([odds[name] for odds in answers if odds])
            mean, std = float(column.mean()), float(column.std()) or 1.0
            self.scale[name] = mean, std
            if abs(column - mean).max() > FAR * std:
                far.append(f"one answer to the question {name!r} is far from all others")
        if problems := unreadable + far:
            print_folded(
                f"warning: {self.caller.name}: {problems[0]}. ({len(problems)} such answers about the "
                "known replies that set its scale. All changes of emotion depend on it.)"
            )


def known_replies(used):
    """The rows of prompts/replies.jsonl that are `used` for "weights", "test" or "fitness", each
    with the "profile" of its user, and the "dialogue" that ends with it."""
    profiles = toy_profiles("train") + toy_profiles("heldout")
    profiles += load_profiles(PROMPTS / "profiles/en_test.jsonl")
    profile_of = {profile.id: profile for profile in profiles}
    rows = [row for _, row, _ in read_jsonl(PROMPTS / "replies.jsonl") if row["used"] == used]
    for row in rows:
        row["profile"] = profile = profile_of[row["user"]]
        if "line" not in row:  # to a user of the toy
            scene = world.read_scene(profile.scene, profile.task)
            row["line"] = world.users_line(0, scene.story, scene.cues, "Emotion-C")
        replies = [{"speaker": "friend", "text": text} for text in [*row["earlier"], row["reply"]]]
        row["dialogue"] = [{"speaker": "me", "text": row["line"]}, *replies]
    return rows
