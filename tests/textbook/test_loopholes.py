"""Loopholes in the toy's scorer. A policy finds every hole in a scorer, so these tests are holes
that policies found, each closed; the weak scorer, which has them all, shows that they are real. The
last test searches for a fixed reply that would do without listening."""

import asyncio
import functools
import random
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

from policy import Reply
from rlver import converse
from simulator import Simulator, User, make_simulator, toy_profiles
from toy import world
from toy.words import ACTS, FEELING_WORDS, FEELINGS, NEEDS, PEOPLE, PERSON_WORDS, join_parts
from toy.world import SECONDARY, act_of, judge, read_scene, split_sentences
from toy_replies import change, sentences


def test_an_example_by_hand():
    """Someone hurt by a sister wants to be told that it was not their fault. One sentence does it.
    What policies made of it: half of another sentence, a word more, the same once more, a sentence
    for every need."""
    good = "You are right in this."
    assert change(good, "side") == 8
    assert change("You are right and your sister.", "side") == -7
    assert change("You are right in this this.", "side") == -7
    assert change(f"{good} {good}", "side") == -5
    listening, advice = "I am here, let it all out.", "Maybe you could pick a calm evening."
    assert change(f"{good} {listening} {advice}", "side") == -6


# ---------------------------------------------------------------------------------------- loopholes


def is_legal(text):
    """Is this a sentence of the grammar? Looked up here, and not by the code under test."""
    return tuple(world.abstract(world.tokens_of(text))) in world.legal_sentences()


def tampered(text, rng):
    """What policies make of a good sentence: word for word nearly the same, so any similarity check
    lets it through."""
    words, end = text[:-1].split(), text[-1]
    i, j = rng.randrange(len(words)), rng.randrange(len(words) - 1)
    yield words[:i] + words[i + 1 :], end  # one word less
    yield words[:i] + [words[i]] + words[i:], end  # one twice
    yield words[:j] + [words[j + 1], words[j]] + words[j + 2 :], end  # two swapped
    yield words[:i] + ["zebra"] + words[i:], end  # one too many
    yield words, ""  # no end
    yield words + ["and", "and", "so"], end  # a junk tail
    yield words, end + " thing thing"
    yield words, end + " Zebra."
    yield words + words, end


def test_a_sentence_with_a_word_out_of_place_is_not_understood():
    """Junk tails beat a check of the whole reply's similarity. Every word has to be in its
    place."""
    rng = random.Random(0)
    tried = 0
    for act in NEEDS:
        for text in rng.sample(sentences(act), 20):
            assert change(text, act) >= 8
            for words, end in tampered(text, rng):
                new = " ".join(words) + end
                # "You are right today": a word less, and legal
                if not is_legal(new):
                    assert change(new, act) < 0, new
                    tried += 1
    assert tried > 1000


@pytest.mark.parametrize("junk", [" 123", " ###", " 你好", " 😀", "\u2014", " %d", "\x01", "*"])
def test_signs_that_are_no_words_are_seen_too(junk):
    """A tokenizer knows more than letters. A judge that reads only [a-z] lets digits, symbols and
    Chinese ride along unseen, and a policy is rewarded for gibberish."""
    for act in NEEDS:
        text = sentences(act)[0]
        for new in (
            text[:-1] + junk + text[-1],
            junk + text,
            text.replace(" ", junk + " ", 1),
            text + junk,
        ):
            assert change(new, act) < 0, repr(new)


def test_a_mash_up_of_two_templates_is_not_understood():
    """Legal pieces of two acts in one sentence: where legality is asked of all acts together, "Take
    your time, set one clear limit" serves two needs at once."""
    rng, tried = random.Random(0), 0
    for a, b in product(NEEDS, NEEDS):
        for _ in range(6 * (a != b)):
            one, other = ACTS[a].draw_parts(rng), ACTS[b].draw_parts(rng)
            for mixed in (
                [one[0], other[1], other[2]],
                [one[0], one[1], other[2]],
                [one[0], other[1], one[2]],
            ):
                text = join_parts(mixed, "sister", "hurt")
                if not is_legal(text):
                    assert change(text, a) < 0 and change(text, b) < 0, text
                    tried += 1
            # no full stop between: one sentence of two acts
            joined = (
                join_parts(one, "sister", "hurt")[:-1] + " " + join_parts(other, "sister", "hurt")
            )
            assert change(joined, a) < 0 and change(joined, b) < 0, joined
    assert tried > 500


def ngrams(words, n):
    padded = ["^"] * (n - 1) + list(words) + ["$"]
    return list(zip(*(padded[i:] for i in range(n))))


@pytest.mark.slow
def test_only_whole_sentences_are_understood():
    """ "One step is the one step is the one step" ended a prototype at learning rate 3e-3: each
    pair of its words is legal. Triples let 129 sentences pass that nobody would say, "You are
    right and your sister." for one. So whatever pairs and triples of one act's words can be walked
    through, by way of many random walks, is understood only if it is one of its sentences."""
    rng, refused = random.Random(0), set()
    for act in ACTS:
        legal = {tuple(world.abstract(world.tokens_of(text))) for text in sentences(act)}
        for n in (2, 3):
            after = {}
            for words in sorted(legal):
                for *state, word in ngrams(words, n):
                    after.setdefault(tuple(state), []).append(word)
            for _ in range(2000):
                words = ["^"] * (n - 1)
                while words[-1] != "$" and len(words) < 25:
                    words.append(rng.choice(after[tuple(words[-(n - 1) :])]))
                walk = tuple(w for w in words if w not in "^$")
                text = " ".join(walk).replace("<p>", "sister").replace("<f>", "hurt")
                assert act_of(text) == (act if walk in legal else None), text
                refused |= {walk} - legal
    assert len(refused) > 500
    assert change("You are right and your sister.", "side") == -7
    assert act_of("") is None


def test_no_sentence_has_two_kinds():
    """What helps whom would depend on the order of a table."""
    assert len(world.legal_sentences()) == sum(len(sentences(act)) for act in ACTS)


def test_all_at_once_is_no_comfort():
    """A shotgun reply, a sentence for every need, would always hit. Two kinds share their effect, a
    third spoils it."""
    one = {act: sentences(act)[0] for act in ACTS}
    for need in NEEDS:
        others = [act for act in NEEDS if act not in (need, SECONDARY[need])]
        assert change(f"{one[need]} {one[others[0]]}", need) < change(one[need], need) / 2
        assert change(f"{one[need]} {one[others[0]]} {one[others[1]]}", need) < 0
        assert change(" ".join(one[act] for act in NEEDS), need) < 0
        assert change(" ".join(sentences(need)[:4]), need) < 0  # nor a lecture
        assert change(" ".join(sentences(need)[:2]), need) <= change(sentences(need)[0], need)
    assert change("", "listen") < 0 and change(" \n", "listen") < 0


def test_the_wrong_person_or_feeling_hurts():
    """ "Your sister" to somebody whose boss shouted: without this check a policy learns one name
    and says it to all."""
    for act in NEEDS:
        naming_the_person = next(p for p in ACTS[act].all_parts() if "<P>" in "".join(p))
        for person in PERSON_WORDS:
            reply = join_parts(naming_the_person, person, "hurt")
            is_right = change(reply, act) == 10 if person == "sister" else change(reply, act) < 0
            assert is_right, reply
        naming_the_feeling = next(p for p in ACTS[act].all_parts() if "<F>" in "".join(p))
        for feeling in FEELING_WORDS:
            reply = join_parts(naming_the_feeling, "sister", feeling)
            is_right = change(reply, act) == 10 if feeling == "hurt" else change(reply, act) < 0
            assert is_right, reply


def test_nothing_helps_twice():
    """Repeated word for word, now or later, a sentence does harm: or the best line of a policy
    would be its only one. Another dress, capitals or spaces or more signs, does not make it a
    new one."""
    for act in NEEDS:
        text, other = sentences(act)[0], sentences(act)[1]
        assert change(other, act, [text]) == change(other, act) >= 8
        assert change(f"{text} {text}", act) < 0
        for again in (
            text,
            text.upper(),
            text.lower(),
            text.replace(" ", "  "),
            f"{other} {text}",
            f" {text}\n",
        ):
            assert change(again, act, ["Hm.", f"{sentences(act)[2]} {text}"]) < 0, repr(again)


def test_the_weak_scorer_falls_for_all_of_it():
    """The lesson of --simulator toy-weak: it counts warm words, so salad of any kind beats every
    sentence. What it pays for, the judge punishes."""
    weak = Simulator(world.ScriptedModel(weak=True))
    for profile in toy_profiles("heldout", 8):
        need = read_scene(profile.scene, profile.task).need
        # not even words for their own need
        others = [SECONDARY[need], SECONDARY[SECONDARY[need]]]
        bodies = [body for act in others for body in ACTS[act].bodies]
        salad = " ".join(word for body in bodies for word in body.split() if word.isalpha())
        for reply in (salad, salad + " 123 zebra zebra", salad.upper()):
            changes = []
            for simulator in (weak, weak, make_simulator("toy")):
                user = User(simulator, profile)
                changes.append(asyncio.run(user.feel(reply))[1])
            assert changes[0] == changes[1] == 10 and changes[2] < 0
        user = User(weak, profile)
        for _ in range(2):  # and as often as one likes
            asyncio.run(user.feel(salad))
        assert user.emotion == 50


# ----------------------------------------------------------------------------------- no fixed reply


def candidates(rng):
    """Replies that know nothing of the user: every sentence without a name in it, some with names,
    some pairs, some nonsense."""
    every_parts = [parts for act in ACTS.values() for parts in act.all_parts()]
    plain = [join_parts(p, "sister", "hurt") for p in every_parts if "<" not in "".join(p)]
    people, feelings = PEOPLE["train"], FEELINGS["train"]
    named = [
        world.random_sentence(act, rng.choice(people), rng.choice(feelings), rng)
        for act in ACTS
        for _ in range(8)
    ]
    pairs = [" ".join(rng.sample(plain, 2)) for _ in range(150)]
    return list(dict.fromkeys(plain + named + pairs + ["", "Yes.", "I see."]))


@functools.cache
def scored(reply, need, person, feeling, earlier):
    return judge(reply, need, person, feeling, list(earlier), False)[0]


def greedy(replies, people, turns=8):
    """The best fixed sequence that a greedy search finds on `people`, by the rules: stop at 0 and
    100, goodbye below 10."""
    scenes = [read_scene(p.scene, p.task) for p in people]

    def score(reply, scene, earlier):  # said once or seven times before: it is old
        once = tuple(dict.fromkeys(earlier))
        return scored(reply, scene.need, scene.person, scene.feeling, once)

    # [replies, people]
    fresh = np.array([[score(reply, scene, []) for scene in scenes] for reply in replies])
    emotion, chosen = np.full(len(people), 30), []
    for _ in range(turns):
        before = {s for reply in chosen for s in split_sentences(reply)}
        moves = np.array(
            [
                [score(reply, scene, chosen) for scene in scenes]
                if before & set(split_sentences(reply))
                else fresh[i]
                for i, reply in enumerate(replies)
            ]
        )
        still = (emotion >= 10) & (emotion < 100)
        after = np.where(still, np.clip(emotion + np.clip(moves, -10, 10), 0, 100), emotion)
        best = int(after.mean(1).argmax())
        chosen.append(replies[best])
        emotion = after[best]
    return chosen, emotion.mean()


def held_out_score(replies, difficulty="vanilla"):
    """Mean final emotion of all held-out users, to each of whom `replies` are said, through the
    whole chain."""

    def agent():
        queue = iter(replies)

        async def reply(line):
            text = next(queue)
            return Reply(text, text, "", False)

        return SimpleNamespace(reply=reply, segments=[])

    simulator = make_simulator("toy", difficulty=difficulty)
    return np.mean(
        [
            asyncio.run(converse(agent(), User(simulator, p), "Hm.", 8)).emotion
            for p in toy_profiles("heldout")
        ]
    )


@pytest.mark.slow
def test_no_fixed_reply_wins():
    """If a policy could score without listening, it would learn just that. The best single reply,
    said eight times, and the best fixed sequence of eight, both searched for among some hundreds on
    training users, leave held-out users about where they began."""
    rng = random.Random(0)
    replies, people = candidates(rng), toy_profiles("train", 64)
    assert len(replies) > 500 and {act_of(r) for r in replies} >= set(ACTS)
    sequence, on_training = greedy(replies, people)
    single = max(replies, key=lambda r: greedy([r], people[:16])[1])
    assert on_training <= 40
    for fixed in (sequence, [single] * 8):
        assert held_out_score(fixed) <= 40, fixed
        assert held_out_score(fixed, "challenging") <= 40, fixed
