"""The embedded world. A policy finds every hole in a scorer, so most of these tests are holes that
policies found, each closed; the weak scorer, which has them all, shows that they are real. Tests go
by the rules of toy.py, not by its present wording."""

from support.loading import load_model

import asyncio
import functools
import random
import re
from collections import Counter
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import policy
import toy
from policy import Reply
from rlver import converse
from simulator import Profile, Simulator, User, make_simulator, toy_profiles
from toy import (
    ACTS,
    HABITS,
    NEEDS,
    SECONDARY,
    NotOfThisWorld,
    Recipe,
    act_of,
    judge,
    read_scene,
    split_sentences,
)


def said(parts, person="sister", feeling="hurt"):
    return "{} {}{}".format(*parts).replace("<P>", person).replace("<F>", feeling)


def sentences(act, person="sister", feeling="hurt"):
    """All sentences of an act."""
    return [said(parts, person, feeling) for parts in product(*ACTS[act])]


def change(reply, need="analyse", earlier=(), challenging=False):
    """How far `reply` moves a user who is hurt by a sister."""
    return judge(reply, need, "sister", "hurt", list(earlier), challenging)[0]


def splits():
    return {split: toy.profiles(split) for split in ("train", "heldout")}


HAND = Profile(
    "by-hand",
    "* Name: Zoe",
    "## What happened\nMy boss ate my cake. I feel angry.\n\n"
    "## Details I may add\n- It was blue.\n- It was mine.\n\n"
    "## What I say when I open up\n- Cue one.\n- Cue two.\n- Cue three.\n",
    "passive",
    [],
    NEEDS["advise"][0],
)


# ----------------------------------------------------------------------------------------- profiles


def test_profiles_are_made_by_code_and_always_the_same():
    """500 and 128 as in the paper's split, the eight needs in balance: a lopsided set would let one
    kind of reply win."""
    for split, rows in splits().items():
        size = {"train": 500, "heldout": 128}[split]
        assert len(rows) == size == len({row["id"] for row in rows})
        assert (
            rows == toy.profiles(split)
            and rows[:40] == toy.profiles(split, 40)
            and rows != toy.profiles(split, seed=1)
        )
        counts = Counter(read_scene(row["scene"], row["task"])[-1] for row in rows)
        assert set(counts) == set(NEEDS) and max(counts.values()) - min(counts.values()) <= 1
        assert [vars(p) for p in toy_profiles(split, 8)] == [
            {**row, "topic": "", "first_talk": "", "need": "", "target": "eq"} for row in rows[:8]
        ]


def test_held_out_users_share_nothing_with_training_users():
    """Otherwise "held out" would measure memory. Person, event, feeling, name, details, and the
    wording of the need: all new."""
    found = {}
    for split, rows in splits().items():
        read = [(read_scene(row["scene"], row["task"]), row) for row in rows]
        found[split] = [
            {person for (_, person, *_), _ in read},
            {feeling for (_, _, feeling, *_), _ in read},
            {re.sub(r"^My \w+ | I feel .*", "", story) for (story, *_), _ in read},
            {d for (*_, details, _, _), _ in read for d in details},
            {c for (*_, cues, _), _ in read for c in cues},
            {re.search("Name: (.*)", row["player"]).group(1) for _, row in read},
        ]
        assert all(len(words) > 3 for words in found[split])
    for train, heldout in zip(found["train"], found["heldout"], strict=True):
        assert not train & heldout
    lines = [cue for need in NEEDS for words in NEEDS[need][2].values() for cue in words]
    assert len(set(lines)) == len(lines)  # and a cue tells one need from all others


# -------------------------------------------------------------------------------- the scripted user


def test_the_scripted_model_reads_its_prompt_and_nothing_else(monkeypatch):
    """It stands where an LLM would. If it knew the generator, the chain of prompts and parsers
    would be decoration. Here a profile written by hand, with a story and cues that no list holds,
    is played all the same, and always alike."""
    monkeypatch.setattr(toy, "profiles", None)
    monkeypatch.setattr(toy, "NAMES", None)
    lines = []
    for _ in range(2):
        user = User(make_simulator("toy"), HAND)
        heard = [asyncio.run(user.answer())]
        for reply, moved in (
            (said([p[0] for p in ACTS["advise"]], "boss", "angry"), {8, 10}),
            ("My, what a cake!", {-7}),
        ):
            text, change, _ = asyncio.run(user.feel(reply))
            heard += [text, asyncio.run(user.answer())]
            assert change in moved
        assert (
            heard[0] == "My boss ate my cake. I feel angry. Cue one."
            and "Cue two." in heard[2]
            and "Cue three." in heard[4]
        )
        lines.append((heard, user.emotion))
    assert lines[0] == lines[1]


def test_the_scripted_model_plays_no_profile_of_another_world():
    """A real profile has no such scene; a scripted user that improvised would hand out meaningless
    rewards for days."""
    foreign = [
        ("今天老师批评了我。", HAND.task),
        (HAND.scene, "你希望对方用心倾听你的情绪宣泄"),
        (HAND.scene.replace(" I feel angry.", ""), HAND.task),
        (HAND.scene.split("\n## What I say")[0], HAND.task),
        (re.sub(r"- Cue.*\n", "", HAND.scene), HAND.task),
    ]
    for scene, task in foreign:
        user = User(make_simulator("toy"), Profile(**{**vars(HAND), "scene": scene, "task": task}))
        with pytest.raises(NotOfThisWorld):
            asyncio.run(user.answer())


def test_a_guarded_user_opens_up_at_the_third_line():
    """SAGE's challenging user does not hint at the need at first: cues come from its third line on.
    A vanilla user's first line has one."""
    for difficulty, first in (("vanilla", 0), ("challenging", 2)):
        for profile in toy_profiles("heldout", 16):
            user = User(make_simulator("toy", difficulty=difficulty), profile, emotion=50)
            *_, details, cues, _ = read_scene(profile.scene, profile.task)
            lines = [asyncio.run(user.answer()) for _ in range(4)]
            for n, line in enumerate(lines):
                assert any(cue in line for cue in cues) == (n >= first) and any(
                    d in line for d in details
                ) == (n < first)
            assert lines[0].startswith("My ") and len(set(lines)) == 4


def test_a_user_below_ten_says_goodbye():
    """SAGE: at Emotion-F the user leaves. The line must be one that ends the dialogue."""
    for difficulty in ("vanilla", "challenging"):
        for emotion in (9, 10):
            line = asyncio.run(
                User(make_simulator("toy", difficulty=difficulty), HAND, emotion=emotion).answer()
            )
            assert line.endswith("Goodbye.") == (emotion < 10)


# --------------------------------------------------------------------------------------- what helps


@pytest.mark.parametrize("act", ACTS)
def test_every_sentence_is_known_and_helps_its_own_need(act):
    """All sentences of the act, with persons and feelings of both splits in turn: each is
    recognised as its act and no other, lifts the need that it serves by 10 if it names the person
    or the feeling and by 8 if not, the neighbouring need by 3 if the user is not exacting, and
    lowers all others. A sentence that failed would punish the right reply."""
    people, feelings = sorted(toy.PERSON_WORDS), sorted(toy.FEELING_WORDS)
    for i, parts in enumerate(product(*ACTS[act])):
        person, feeling = people[i % len(people)], feelings[i % len(feelings)]
        text = said(parts, person, feeling)
        assert act_of(text) == act, text
        for need in NEEDS:
            vanilla, exacting = (
                judge(text, need, person, feeling, [], challenging)[0]
                for challenging in (False, True)
            )
            if act == need:
                assert vanilla == exacting == (10 if "<" in "".join(parts) else 8), text
            else:
                assert vanilla == 3 if act == SECONDARY[need] else vanilla < 0, text
                assert exacting < 0


def test_payoffs_are_near_a_permutation():
    """If one kind of reply paid for several needs, every policy would end there and stop at about
    45, with nothing left to learn."""
    for challenging in (False, True):
        pays = {
            act: [change(sentences(act)[0], need, (), challenging) for need in NEEDS]
            for act in ACTS
        }
        for act, changes in pays.items():
            assert sum(c > 0 for c in changes) <= (0 if act in HABITS else 1 if challenging else 2)
            assert sum(c >= 8 for c in changes) == (act not in HABITS)
            assert sum(changes) < 0  # said to everybody, it does harm


# ---------------------------------------------------------------------------------------- loopholes


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
    legal = {tuple(toy.abstract(toy.tokens_of(text))) for act in ACTS for text in sentences(act)}
    tried = 0
    for act in NEEDS:
        for text in rng.sample(sentences(act), 20):
            assert change(text, act) >= 8
            for words, end in tampered(text, rng):
                new = " ".join(words) + end
                # "You are right today": a word less, and legal
                if tuple(toy.abstract(toy.tokens_of(new))) not in legal:
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
    legal = {tuple(toy.abstract(toy.tokens_of(text))) for act in ACTS for text in sentences(act)}
    rng, tried = random.Random(0), 0
    for a, b in product(NEEDS, NEEDS):
        for _ in range(6 * (a != b)):
            one, other = ([rng.choice(part) for part in ACTS[act]] for act in (a, b))
            for mixed in (
                [one[0], other[1], other[2]],
                [one[0], one[1], other[2]],
                [one[0], other[1], one[2]],
            ):
                text = said(mixed)
                if tuple(toy.abstract(toy.tokens_of(text))) not in legal:
                    assert change(text, a) < 0 and change(text, b) < 0, text
                    tried += 1
            # no full stop between: one sentence of two acts
            joined = said(one)[:-1] + " " + said(other)
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
        legal = {tuple(toy.abstract(toy.tokens_of(text))) for text in sentences(act)}
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
    assert len(toy.legal_sentences()) == sum(
        np.prod([len(part) for part in parts]) for parts in ACTS.values()
    )


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
        for mark, own, everyone in (
            ("<P>", "sister", toy.PERSON_WORDS),
            ("<F>", "hurt", toy.FEELING_WORDS),
        ):
            text = next(" ".join(p[:2]) + p[2] for p in product(*ACTS[act]) if mark in "".join(p))
            for word in everyone:
                reply = text.replace(mark, word).replace("<P>", "sister").replace("<F>", "hurt")
                assert (change(reply, act) == 10) == (word == own) and (change(reply, act) < 0) == (
                    word != own
                ), reply


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
    weak = Simulator(toy.ScriptedModel(weak=True))
    for profile in toy_profiles("heldout", 8):
        *_, need = read_scene(profile.scene, profile.task)
        # not even words for their own need
        others = [toy.SECONDARY[need], toy.SECONDARY[toy.SECONDARY[need]]]
        salad = " ".join(
            w for act in others for body in ACTS[act][1] for w in body.split() if w.isalpha()
        )
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
    plain = [
        said(parts) for act in ACTS for parts in product(*ACTS[act]) if "<" not in "".join(parts)
    ]
    people, feelings = toy.PEOPLE["train"], toy.FEELINGS["train"]
    named = [
        toy.sentence(act, rng.choice(people), rng.choice(feelings), rng)
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
    read = [read_scene(p.scene, p.task) for p in people]

    def score(reply, r, earlier):  # said once or seven times before: it is old
        return scored(reply, r[5], r[1], r[2], tuple(dict.fromkeys(earlier)))

    # [replies, people]
    fresh = np.array([[score(reply, r, []) for r in read] for reply in replies])
    emotion, chosen = np.full(len(people), 30), []
    for _ in range(turns):
        before = {s for reply in chosen for s in split_sentences(reply)}
        moves = np.array(
            [
                [score(reply, r, chosen) for r in read]
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


# ---------------------------------------------------------------------------------- the base policy


def test_the_base_policy_is_taught_all_the_words_and_not_the_use_of_them():
    """Supervised training plants the language, held-out words too: what is left for RL is which
    kind of sentence helps whom. Were the corpus already good at that, or not legible, RL could show
    nothing."""
    rng = random.Random(0)
    turns = [turn for _ in range(400) for turn in toy.corpus(rng)]
    heard, replies = " ".join(line for line, *_ in turns), [reply for *_, reply in turns]
    acts = [[act_of(s) for s in split_sentences(reply)] for reply in replies]
    assert all(act for found in acts for act in found)
    assert {found[0] for found in acts} == set(ACTS)
    words = {w for reply in replies for w in toy.tokens_of(reply)}
    assert words >= toy.PERSON_WORDS | toy.FEELING_WORDS
    assert all(cue in heard for need in NEEDS for cues in NEEDS[need][2].values() for cue in cues)
    assert "Goodbye" not in heard and not any("<" in thought for _, thought, _ in turns)


def test_what_is_shipped_is_of_the_recipe_that_is_shipped():
    """Else everybody would make their own again, and no two curves could be compared."""
    for think, mode in ((True, "think"), (False, "direct")):
        assert toy.base_policy(think) == toy.SHIPPED / mode
        model, tokenizer = load_model(toy.SHIPPED / mode)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert {key: getattr(model.config, key) for key in toy.MODEL} == toy.MODEL
        assert tokenizer.chat_template == toy.CHAT_TEMPLATE
    size = sum(path.stat().st_size for path in toy.SHIPPED.rglob("*") if path.is_file())
    assert size < 6_000_000


def test_the_digest_is_of_what_the_recipe_yields(monkeypatch):
    """An edit of a word, a number or the template asks for another policy; a comment does not."""
    digests = {toy.digest_of_recipe(True), toy.digest_of_recipe(False)}
    for change in (
        lambda patch: patch.setitem(toy.RECIPES, "think", Recipe(3, 0.17)),
        lambda patch: patch.setitem(toy.MODEL, "hidden_size", 64),
        lambda patch: patch.setattr(toy, "CHAT_TEMPLATE", toy.CHAT_TEMPLATE + " "),
        lambda patch: patch.setitem(toy.ACTS, "topic", (["So,"], ["what now"], ["?"])),
        lambda patch: patch.setattr(toy, "users_line", lambda *said: "Hm."),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            digests.add(toy.digest_of_recipe(True))
    assert len(digests) == 7
    assert toy.digest_of_recipe(True) in digests


@pytest.fixture
def edited(tmp_path, monkeypatch):
    """The recipe is edited, and training only leaves a mark. Returns the modes trained so far."""
    trained = []

    def sft(place, think, quiet=False):
        trained.append(think)
        place.mkdir()
        (place / "config.json").write_text(str(think))

    monkeypatch.setattr(toy, "sft", sft)
    monkeypatch.setattr(toy, "users_line", lambda *said: "Hm.")
    monkeypatch.setenv("RLVER_CACHE", str(tmp_path / "cache"))
    return trained


def test_an_edited_recipe_makes_a_policy_of_its_own_once(edited, monkeypatch, tmp_path, capsys):
    """A cache that outlives an edit trains on yesterday's policy, and one that two modes share
    forgets to think. What is shipped stays as it is, and a line says what happens."""
    think, direct = toy.base_policy(True), toy.base_policy(False)
    assert think.parent == direct.parent == tmp_path / "cache"
    assert "think" in think.name and "direct" in direct.name
    first, second = capsys.readouterr().out.splitlines()
    assert "toy_policy/think is not of the recipe" in first and str(think) in first
    assert toy.base_policy(True) == think and not capsys.readouterr().out
    monkeypatch.setattr(toy, "users_line", lambda *said: "Well.")
    assert toy.base_policy(True, quiet=True) != think and not capsys.readouterr().out
    assert edited == [True, False, True]
    assert len(list((tmp_path / "cache").iterdir())) == 3  # and no scratch is left


def test_what_is_missing_is_made(edited, monkeypatch, tmp_path):
    """As where somebody copied the scripts and nothing else."""
    monkeypatch.setattr(toy, "SHIPPED", tmp_path / "toy_policy")
    assert toy.base_policy(True, quiet=True).parent == tmp_path / "cache" and edited == [True]
    toy.ship()
    assert edited == [True, True, False]
    assert toy.base_policy(False) == tmp_path / "toy_policy" / "direct"


def test_half_a_base_policy_is_never_found(edited, tmp_path, monkeypatch):
    """Whoever stops the first run while the toy policy is being made must not find its ruins at the
    second."""

    def sft(place, think, quiet=False):
        place.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "sft", sft)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            toy.base_policy(True, quiet=True)
    assert not list((tmp_path / "cache").iterdir())


def test_a_policy_is_trained_with_one_thread(tmp_path, monkeypatch):
    """The same recipe then gives the same policy, whatever the machine's cores: seen in the number
    of threads while it is trained, which is put back behind it."""
    monkeypatch.setitem(toy.RECIPES, "direct", Recipe(2, 0.2))
    seen, pack = [], policy.pack
    monkeypatch.setattr(
        policy, "pack", lambda *rows: seen.append(torch.get_num_threads()) or pack(*rows)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        toy.sft(tmp_path / "p", False, quiet=True)
        assert seen == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    load_model(tmp_path / "p")
