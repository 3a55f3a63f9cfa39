"""Loopholes in the toy's scorer. A policy finds every hole in a scorer, so these tests are holes
that policies found, each closed; the weak scorer, which has them all, shows that they are real. The
last test searches for a fixed reply that would do without listening."""

from players.users import make_simulator

import asyncio
import random

import numpy as np
import pytest

from emotion import NEEDS, TRAINING
from people import toy_profiles
from rollout import converse
from scripted import Agent
from simulator import User
from toy import world
from toy.words import ACTS, FEELING_WORDS, FEELINGS, PEOPLE, PERSON_WORDS, join_parts
from toy.world import SECONDARY, act_of, read_scene, score_reply
from toy_replies import change, sentences


def test_an_example_by_hand():
    """Someone hurt by a sister wants to be told that it was not their fault. One sentence does it.
    What policies made of it: half of another sentence (each three words of it are legal), a word
    more, the same once more, a sentence for every need, two of them without a full stop."""
    good = "You are right in this."
    assert change(good, "side") == 8
    assert change("You are right and your sister.", "side") == -7
    assert change("You are right in this this.", "side") == -7
    assert change(f"{good} {good}", "side") == -5
    listening, advice = "I am here, let it all out.", "Maybe you could pick a calm evening."
    assert change(f"{good} {listening} {advice}", "side") == -6
    assert change(f"{listening[:-1]} maybe you could pick a calm evening.", "listen") == -7


# ---------------------------------------------------------------------------------------- loopholes


def is_legal(text):
    """Is this a sentence of the grammar? Looked up here, and not by the code under test."""
    return tuple(world.abstract(world.tokens_of(text))) in world.legal_sentences()


def tampered(text, rng):
    """What policies make of a good sentence: word for word nearly the same, so any similarity check
    lets it through."""
    words, end = text[:-1].split(), text[-1]
    i, j = rng.randrange(len(words)), rng.randrange(len(words) - 1)
    for changed in (
        words[:i] + words[i + 1 :],  # one word less
        words[:i] + [words[i]] + words[i:],  # one twice
        words[:j] + [words[j + 1], words[j]] + words[j + 2 :],  # two swapped
        words[:i] + ["zebra"] + words[i:],  # one too many
        words + ["and", "and", "so"],  # a junk tail
    ):
        yield " ".join(changed) + end
    yield text[:-1]  # no end


def test_a_sentence_with_a_word_out_of_place_is_not_understood():
    """Junk tails beat a check of the whole reply's similarity. Every word has to be in its
    place."""
    rng = random.Random(0)
    tried = 0
    for act in NEEDS:
        for text in rng.sample(sentences(act), 20):
            assert change(text, act) >= 8
            for new in tampered(text, rng):
                # "You are right today": a word less, and legal
                if not is_legal(new):
                    assert change(new, act) < 0, new
                    tried += 1
    assert tried > 800


@pytest.mark.parametrize("junk", [" 123", " ###", " 你好", "\u2014", "\x01"])
def test_signs_that_are_no_words_are_seen_too(junk):
    """A tokenizer knows more than letters. A judge that reads only [a-z] lets digits, symbols and
    Chinese ride along unseen, and a policy is rewarded for gibberish."""
    for act in NEEDS:
        text = sentences(act)[0]
        for new in (junk + text, text.replace(" ", junk + " ", 1), text + junk):
            assert change(new, act) < 0, repr(new)


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
        assert change(" ".join(sentences(need)[:4]), need) < 0  # nor a lecture
    assert change("", "listen") < 0 and change(" \n", "listen") < 0


def test_the_wrong_person_or_feeling_hurts():
    """ "Your sister" to somebody whose boss shouted: without this check a policy learns one name
    and says it to all."""
    for act in NEEDS:
        for sign, words, right in (("<P>", PERSON_WORDS, "sister"), ("<F>", FEELING_WORDS, "hurt")):
            parts = next(p for p in ACTS[act].all_parts() if sign in "".join(p))
            for word in words:
                person, feeling = (word, "hurt") if sign == "<P>" else ("sister", word)
                moved = change(join_parts(parts, person, feeling), act)
                assert moved == 10 if word == right else moved < 0, (act, word)


def test_nothing_helps_twice():
    """Repeated word for word, now or later, a sentence does harm: or the best line of a policy
    would be its only one. Another dress, capitals or spaces or more signs, does not make it a
    new one."""
    for act in NEEDS:
        text, other = sentences(act)[0], sentences(act)[1]
        assert change(other, act, [text]) == change(other, act) >= 8
        assert change(f"{text} {text}", act) < 0
        for again in (text, text.upper(), text.replace(" ", "  "), f"{other} {text}"):
            assert change(again, act, ["Hm.", f"{sentences(act)[2]} {text}"]) < 0, repr(again)


def test_the_weak_scorer_falls_for_all_of_it():
    """The lesson of --simulator toy-weak: it counts warm words, so salad of any kind beats every
    sentence, as often as one likes. What it pays for, the judge punishes."""
    for profile in toy_profiles("heldout", 8):
        # not even words for their own need
        other = SECONDARY[read_scene(profile.scene, profile.task).need]
        salad = " ".join([*ACTS[other].bodies, *ACTS[SECONDARY[other]].bodies])
        for reply in (salad, salad + " 123 zebra zebra", salad.upper()):
            fooled, strict = (User(make_simulator(name), profile) for name in ("toy-weak", "toy"))
            for _ in range(2):
                asyncio.run(fooled.feel(reply))
            asyncio.run(strict.feel(reply))
            assert fooled.emotion == 50 and strict.emotion < 30


# ----------------------------------------------------------------------------------- no fixed reply


def candidates(rng):
    """Replies that know nothing of the user: every sentence without a name in it, some with a
    name, some pairs, some nonsense."""
    every_parts = [parts for act in ACTS.values() for parts in act.all_parts()]
    said = [join_parts(p, "sister", "hurt") for p in every_parts if "<" not in "".join(p)]
    for person, feeling in zip(PEOPLE["train"], FEELINGS["train"]):
        said += [world.random_sentence(act, person, feeling, rng) for act in ACTS]
    pairs = [" ".join(rng.sample(said, 2)) for _ in range(70)]
    return list(dict.fromkeys([*said, *pairs, "", "Yes.", "I see."]))


def greedy(replies, people, turns=8):
    """The best fixed sequence that a greedy search finds on `people`, by the rules: stop at 0 and
    100, goodbye below 10."""
    scenes = [read_scene(p.scene, p.task) for p in people]
    emotion, chosen = np.full(len(people), 30), []

    def move(reply, scene):
        return score_reply(reply, scene.need, scene.person, scene.feeling, chosen, False)[0]

    for _ in range(turns):
        # [replies, people]
        moves = np.array([[move(reply, scene) for scene in scenes] for reply in replies])
        still = (emotion >= 10) & (emotion < 100)
        after = np.where(still, np.clip(emotion + np.clip(moves, -10, 10), 0, 100), emotion)
        best = int(after.mean(1).argmax())
        chosen.append(replies[best])
        emotion = after[best]
    return chosen, emotion.mean()


def held_out_score(replies, difficulty="vanilla"):
    """Mean final emotion of all held-out users, to each of whom `replies` are said, through the
    whole chain."""
    simulator = make_simulator("toy", difficulty=difficulty)

    def end(profile):
        return asyncio.run(
            converse(Agent(replies), User(simulator, profile), "Hm.", TRAINING)
        ).emotion

    return np.mean([end(profile) for profile in toy_profiles("heldout")])


@pytest.mark.slow
def test_no_fixed_reply_wins():
    """If a policy could score without listening, it would learn just that. The best single reply,
    said eight times, and the best fixed sequence of eight, both searched for among some hundreds on
    training users, leave held-out users about where they began."""
    rng = random.Random(0)
    replies, people = candidates(rng), toy_profiles("train", 16)
    assert len(replies) > 500 and {act_of(r) for r in replies} >= set(ACTS)
    sequence, on_training = greedy(replies, people)
    single = max(replies, key=lambda r: greedy([r], people)[1])
    assert on_training <= 40
    for fixed in (sequence, [single] * 8):
        assert held_out_score(fixed) <= 40, fixed
        assert held_out_score(fixed, "challenging") <= 40, fixed
