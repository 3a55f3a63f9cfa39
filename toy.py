"""toy.py - the embedded world: people with troubles, a scripted model behind the simulated user,
and a half-million-parameter policy with bad habits. It stands in for an LLM user and a 7B policy,
so that the whole of RLVER runs on a laptop, offline.

What is true here: a hidden need that shows in the user's words, an emotion that answers every
reply, a chain of prompts and parsed answers between the two, a policy that must find out what helps
whom. What is not: nobody is comforted. The English is a template grammar of a few hundred words,
and what the policy learns is *which kind of sentence helps which need*, said to the right person,
legibly, and never twice. The words themselves, those of the held-out users too, are planted by the
supervised training of the base policy; reinforcement learning only teaches it to act on what
it knows.

Run it alone to meet a few of these people:  python toy.py
"""

from support.answers import mark_in
from support.errors import BadModel
from support.flags import Parser
from support.toy_words import (
    ACTS,
    DETAILS,
    EVENTS,
    FEELING_WORDS,
    FEELINGS,
    HABITS,
    NAMES,
    NEEDS,
    PEOPLE,
    PERSON_WORDS,
    PERSONAS,
    join_parts,
)
from support.users import emotion_level

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# ----------------------------------------------------------------------------------------- profiles


def profiles(split, count=None, seed=0):
    """Users made by code, as dicts in the released JSONL format: 500 for training, any number held
    out (128 if not told). The needs take turns, so every eight profiles hold all eight. The scene
    tells all, the user's own wordings too: a simulated user knows nothing but its prompt."""
    rng = random.Random(f"{split} {seed}")
    usual_counts = {"train": 500, "heldout": 128}
    names_of_needs = list(NEEDS)
    made = []
    for i in range(count or usual_counts[split]):
        need = NEEDS[names_of_needs[i % len(NEEDS)]]
        made.append(profile(f"toy-{split}-{i:04d}", need, split, rng))
    return made


def profile(name, need, split, rng):
    """One user with the id `name` and the Need `need`; everything else is drawn with `rng`."""
    person = rng.choice(PEOPLE[split])
    event = rng.choice(EVENTS[split])
    feeling = rng.choice(FEELINGS[split])
    own_name = rng.choice(NAMES[split])
    details = rng.sample(DETAILS[split], 2)
    cues = rng.sample(need.cues[split], 3)
    group, traits = rng.choice(PERSONAS)
    persona = [
        f"* Name: {own_name}",
        f"* Age: {rng.randint(18, 60)}",
        f"* Character: {', '.join(traits)}",
        "* Speech: short, plain sentences",
    ]
    scene = [
        "## What happened",
        f"My {person} {event}. I feel {feeling}.",
        "",
        "## Details I may add",
        *[f"- {detail}" for detail in details],
        "",
        "## What I say when I open up",
        *[f"- {cue}" for cue in cues],
        "",
    ]
    return {
        "id": name,
        "player": "\n".join(persona),
        "scene": "\n".join(scene),
        "main_cha": group,
        "cha_group": traits,
        "task": need.theme,
    }


# ---------------------------------------------------------------------------------- reading a reply


def tokens_of(sentence):
    """Words, and every other sign on its own: what is not looked at could hold anything."""
    return re.findall(r"[a-z']+|[^\sa-z']", sentence.lower())


def split_sentences(text):
    """The sentences of a text: cut behind each full stop, question mark and exclamation mark."""
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.?!])\s+", text.strip())]
    return [sentence for sentence in sentences if sentence]


def abstract(tokens):
    """The tokens with <p> in place of each person and <f> in place of each feeling."""
    abstracted = []
    for token in tokens:
        if token in PERSON_WORDS:
            token = "<p>"
        elif token in FEELING_WORDS:
            token = "<f>"
        abstracted.append(token)
    return abstracted


@cache
def legal_sentences():
    """{tuple of abstract tokens: act} of all that can be said, whoever and whatever it is about."""
    acts = {}
    for name, act in ACTS.items():
        for parts in act.all_parts():
            example = join_parts(parts, "sister", "hurt")
            acts[tuple(abstract(tokens_of(example)))] = name
    return acts


@cache
def act_of(sentence):
    """The act of a sentence, or None if it is no sentence of this world.

    Only whole sentences count. Less would be a loophole that policies found: legal pairs of words
    allow loops ("the one step is the one step"), legal triples mash-ups of two sentences ("You are
    right and your sister."), a check of the whole reply's similarity allows tails of junk."""
    return legal_sentences().get(tuple(abstract(tokens_of(sentence))))


# --------------------------------------------------------------------------------------- what helps

# Besides its own act each need has a second one, which helps a little. So payoffs are near a
# permutation: one kind of reply helps most with a need, another one a little, and all else does
# harm. If one kind paid for several needs, every policy would end there and stop at about 45.
SECONDARY = {
    "analyse": "explain",
    "advise": "analyse",
    "explain": "reflect",
    "reflect": "praise",
    "praise": "side",
    "listen": "empathise",
    "empathise": "listen",
    "side": "advise",
}


def judge(reply, need, person, feeling, earlier, challenging):
    """How far `reply` moves the emotion of someone with `need`, after the friend's `earlier` ones:
    (change, why)."""
    sentences = split_sentences(reply)
    acts = [act_of(sentence) for sentence in sentences]
    words = set(tokens_of(reply))
    if not sentences:
        return -10, "there is only silence"
    if None in acts or len(sentences) > 3:
        return -7, "I cannot follow that"
    if (words & PERSON_WORDS) - {person} or (words & FEELING_WORDS) - {feeling}:
        return -8, "that is not about me: the wrong person, or a feeling I do not have"
    if is_repeated(sentences, earlier):
        return -5, "I have heard that before, word for word"
    if len(set(acts)) > 2:
        return -6, "that is everything at once"
    is_concrete = bool(words & {person, feeling})
    payoffs = [payoff(act, need, is_concrete, challenging) for act in set(acts)]
    mean = sum(payoffs) / len(payoffs)
    if mean >= 7:
        why = "that is what I needed"
    elif mean < 0:
        why = "that is not what I needed"
    else:
        why = "that helps a bit"
    return round(mean), why


def payoff(act, need, is_concrete, challenging):
    """What one act does for a need, if nothing else is wrong with the reply. Words about the user's
    own person or feeling help more; a challenging user is not helped by the second-best act."""
    if act == need:
        return 10 if is_concrete else 8
    if act == SECONDARY[need] and not challenging:
        return 3
    return -6 if act in HABITS else -4


def is_repeated(sentences, earlier):
    """Is one of the sentences said twice, or was it said in an earlier reply? They are compared as
    tokens, because capitals or spaces make no new sentence."""
    heard = [tokens_of(sentence) for reply in earlier for sentence in split_sentences(reply)]
    for sentence in sentences:
        tokens = tokens_of(sentence)
        if tokens in heard:
            return True
        heard.append(tokens)
    return False


def judge_weakly(reply):
    """The scorer of the reward-hacking lesson: it counts the different words that somebody, some
    day, found comforting. Not whether they help *this* need, make sense together, or are new. Try
    it (`--simulator toy-weak`): the emotion climbs, and the replies become heaps of everything."""
    bodies = [body for act in NEEDS for body in ACTS[act].bodies]
    warm = {word for body in bodies for word in tokens_of(body) if len(word) > 4}
    return min(10, 3 * len(warm & set(tokens_of(reply))) - 8)


# -------------------------------------------------------------------------------- the scripted user


class NotOfThisWorld(ValueError):
    """A profile that the scripted user cannot play."""


@dataclass(frozen=True)
class Scene:
    """What the scripted user knows of a profile, all of it read from the profile's text."""

    story: str  # what happened and how it feels: the user's first line
    person: str
    feeling: str
    details: list  # what a guarded user says first
    cues: list  # what shows the need
    need: str  # a key of NEEDS


def read_scene(scene, task):
    """Read a profile's background and hidden theme as a Scene. Raises NotOfThisWorld."""
    story = re.search(r"My (\w+) [^\n]*?\. I feel (\w+)\.", scene)
    need = need_of(task)
    details = listed_under("Details I may add", scene)
    cues = listed_under("What I say when I open up", scene)
    if not (story and need and details and cues):
        raise NotOfThisWorld(
            "the scripted user can only play the profiles of toy.py; for others, "
            "choose a real --simulator"
        )
    return Scene(story.group(), story.group(1), story.group(2), details, cues, need)


def need_of(theme):
    """The name of the need with this hidden theme, or None."""
    for name, need in NEEDS.items():
        if need.theme == theme:
            return name
    return None


def listed_under(title, scene):
    """The items of the list below the heading `title`; [] if there is no such heading."""
    _, _, below = f"\n{scene}\n## ".partition(f"\n## {title}\n")
    section = below.split("\n## ")[0]
    return re.findall(r"^- (.*)$", section, re.M)


def tags_of(prompt):
    """{tag: text} of the <tag>text</tag> in a prompt."""
    return dict(re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", prompt, re.S))


class ScriptedModel:
    """Stands where an LLM would behind the simulated user: a prompt comes in, an answer in named
    sections goes out, each with the prompt's mark. It sees only the text of the prompt, never the
    generator of the profiles, and always answers the same text the same way."""

    is_scripted = True  # so nobody need check whether it keeps the form

    def __init__(self, difficulty="vanilla", weak=False):
        self.challenging, self.weak = difficulty == "challenging", weak

    async def __call__(self, prompt):
        tags = tags_of(prompt)
        scene = read_scene(tags["background"], tags["hidden_theme"])
        dialogue, mark = json.loads(tags["dialogue"]), mark_in(prompt)
        if "emotion_level" in tags:
            return self.answer(scene, dialogue, tags["emotion_level"], mark)
        return self.feel(scene, dialogue, mark)

    def answer(self, scene, dialogue, level, mark):
        """The hop f_reply: the user's next line."""
        lines_said = sum(message["speaker"] == "me" for message in dialogue)
        is_guarded = self.challenging and lines_said < 2
        topics = scene.details if is_guarded else scene.cues
        line = users_line(lines_said, scene.story, topics, level)
        return (
            f"Thinking {mark}: my state is {level}, so that is how I sound.\n"
            f"Origin {mark}: {line}\nChange {mark}: nothing to change.\n"
            f"Response {mark}: {line}\nEnd {mark}"
        )

    def feel(self, scene, dialogue, mark):
        """The hop f_emo: how far the friend's last reply moves the emotion, and why."""
        *earlier, reply = [m["text"] for m in dialogue if m["speaker"] == "friend"]
        if self.weak:
            change, why = judge_weakly(reply), "I listen for a few words"
        else:
            change, why = judge(
                reply, scene.need, scene.person, scene.feeling, earlier, self.challenging
            )
        target = "Reason" if self.challenging else "TargetCompletion"
        is_met = "yes" if change >= 7 else "not yet"
        effect = "lifted" if change > 0 else "let down"
        return (
            f"Content {mark}: my friend said something about me and my {scene.person}.\n"
            f"{target} {mark}: {is_met}.\n"
            f"Activity {mark}: I think: {why}.\n"
            f"Analyse {mark}: I am {scene.feeling}, and {effect} by this.\n"
            f"Change {mark}: {change:+d}\n"
            f"End {mark}"
        )


# How a user begins a line, by its emotion. At Emotion-F it leaves.
OPENINGS = {
    "Emotion-S": "Thank you.",
    "Emotion-A": "Yes, that helps.",
    "Emotion-B": "Go on.",
    "Emotion-C": "Hm.",
}


def users_line(lines_said, story, topics, level):
    """What the user says when it has said `lines_said` lines so far. It goes through the list
    `topics` in order: its cues, or of a guarded user, which keeps the need back until its third
    line, its details."""
    if level == "Emotion-F":
        return "This does not help me. Goodbye."
    opening = OPENINGS[level] if lines_said else story
    return f"{opening} {topics[lines_said % len(topics)]}"


# --------------------------------------------------------------------------- other scripted models


class ScriptedWriter:
    """Stands where an LLM would that writes users (tools/profiles.py), with the templates and words
    of the file `path`. Readable, playable by the scripted user, and nobody you will ever meet."""

    is_scripted = True

    def __init__(self, path):
        pieces = re.split(r"^\[(.+)\]\n", path.read_text(encoding="utf-8"), flags=re.M)
        titles, texts = pieces[1::2], pieces[2::2]
        self.blocks = dict(zip(titles, texts))
        self.talker = ScriptedModel()

    async def __call__(self, prompt):
        tags = tags_of(prompt)
        if "hidden_theme" in tags:  # the first line
            return await self.talker(prompt)
        words = self.words_for(tags)
        rng = random.Random(prompt)
        shuffled = {name: rng.sample(choices, len(choices)) for name, choices in words.items()}
        template = self.blocks["a persona" if "type" in tags else "a scene"]
        text = template.replace("<P>", shuffled["person"][0])
        # each {{name}} takes another one of its words
        return re.sub(r"\{\{(.+?)\}\}", lambda match: shuffled[match.group(1)].pop(), text)

    def words_for(self, tags):
        """{name of a placeholder: the lines it can be filled with}, for the tags of a prompt."""
        need = need_of(tags.get("theme")) or "side"
        texts = {**self.blocks, **tags}
        words = {name: text.strip().split("\n") for name, text in texts.items()}
        words["person"] = PEOPLE["train"] + PEOPLE["heldout"]
        words["event"] = EVENTS["train"] + EVENTS["heldout"]
        words["feeling"] = FEELINGS["train"] + FEELINGS["heldout"]
        words["detail"] = DETAILS["train"] + DETAILS["heldout"]
        words["cue"] = NEEDS[need].cues["train"] + NEEDS[need].cues["heldout"]
        words["age"] = [str(age) for age in range(16, 76)]
        words["raises"] = words[f"raises {need}"]
        return words


class ScriptedJudge:
    """Stands where a model would, in the toy's world: it reads the same prompt and fills in the
    form at its end, by how many sentences are of a kind that somebody needs. It has no opinion."""

    name, temperature, is_scripted = "scripted", 0.0, True

    async def __call__(self, prompt):
        body, _, form = prompt.rpartition("\n---\n")
        tags = tags_of(body)
        share = self.share_of_good(tags)
        fills = {
            "1-5": 1 + round(4 * share),
            "0-10": round(10 * share),
            "A-F": "FEDCBA"[round(5 * share)],
            "-1 to 1": 0,
            "codes": "none",
            "reply": in_other_words(json.loads(tags.get("reply", '""'))),
        }
        return re.sub(r"\[([^\]]*)\]", lambda match: str(fills.get(match[1], "scripted")), form)

    def share_of_good(self, tags):
        """The share, from 0 to 1, of the policy's sentences that serve any need, and of the
        reactions in the record that were good ones."""
        replies = json.loads(tags.get("dialogue", "[]"))[1::2]
        sentences = [s for message in replies for s in split_sentences(message["text"])]
        reactions = re.findall("lifted|let down", tags.get("record", ""))
        good = [act_of(sentence) in NEEDS for sentence in sentences]
        good += [reaction == "lifted" for reaction in reactions]
        return sum(good) / max(1, len(good))


def in_other_words(reply):
    """The same sentences, each with another opening where the grammar has one for it."""
    reworded = []
    for sentence in split_sentences(reply):
        act = act_of(sentence)
        openings = ACTS[act].openings if act else []
        used = next((opening for opening in openings if sentence.startswith(f"{opening} ")), "")
        others = [opening for opening in openings if used and opening != used] or [used]
        reworded.append(random.Random(sentence).choice(others) + sentence.removeprefix(used))
    return " ".join(reworded)


# ---------------------------------------------------------------------------------- the base policy


def sentence(act, person, feeling, rng):
    """A random sentence of the act named `act`, about this person and this feeling."""
    return join_parts(ACTS[act].draw_parts(rng), person, feeling)


def corpus(rng, good=0.17):
    """A dialogue for the base policy's supervised training: [(user's line, thought, reply)].

    Planted under the bad habits: the thought mostly names what the user needs, the reply mostly
    names the right person and feeling, and one time in four it does what helps (`good`, and what
    falls to it by chance). Held-out words occur here as training words do."""
    split = rng.choice(["train", "heldout"])
    row = profiles(split, 1, seed=rng.random())[0]
    need = rng.choice(list(NEEDS))  # not the profile's own, which is always the first
    scene = read_scene(row["scene"], row["task"])
    cues = rng.sample(NEEDS[need].cues[split], 3)
    is_guarded = rng.random() < 0.25
    emotion, turns = 30, []
    for lines_said in range(rng.randint(3, 8)):
        level = emotion_level(emotion)
        if level in ("Emotion-F", "Emotion-S"):
            break
        is_hidden = is_guarded and lines_said < 2
        helps = rng.random() < good and not is_hidden
        reply = corpus_reply(need if helps else None, scene, rng)
        guess = rng.choice(list(NEEDS)) if is_hidden or rng.random() < 0.1 else need
        line = users_line(lines_said, scene.story, scene.details if is_hidden else cues, level)
        thought = f"{scene.feeling}, {scene.person}, wants {NEEDS[guess].name}"
        turns.append((line, thought, reply))
        emotion = min(100, max(0, emotion + rng.choice([-5, 3, 5, 10])))
    return turns


def corpus_reply(act, scene, rng):
    """A reply of the corpus: a sentence of the act named `act`, of any act if it is None, mostly
    about the right person and feeling, and sometimes a second sentence of any act."""
    act = act or rng.choice(list(ACTS))
    right_person = rng.random() < 0.93
    person = scene.person if right_person else rng.choice(sorted(PERSON_WORDS))
    right_feeling = rng.random() < 0.93
    feeling = scene.feeling if right_feeling else rng.choice(sorted(FEELING_WORDS))
    reply = sentence(act, person, feeling, rng)
    if rng.random() < 0.1:
        second_act = rng.choice(list(ACTS))
        reply += " " + sentence(second_act, scene.person, scene.feeling, rng)
    return reply


# One special token opens a message, one ends it. (A template as wordy as ChatML would cost a sixth
# of the toy's tokens.)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(texts):
    """A byte-level BPE of 1,024 entries. The think tags are single tokens, but not special."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    # the first under the name that Qwen2 wants
    special = ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1022,
        special_tokens=special,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=special[0],
        eos_token="<|end|>",
        additional_special_tokens=special[2:],
    )
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def corpus_episode(turns, chat, think):
    """Lay a corpus dialogue out as the Episode that the policy would have made of it."""
    from policy import Episode, Segment

    episode = Episode("corpus", 0, "")
    for turn, (line, thought, reply) in enumerate(turns):
        prompt = chat.next_prompt(line) if turn else chat.first_prompt(line)
        visible = chat.text(reply) + [chat.stop_id]
        sampled = visible
        if think:
            sampled = chat.text(f"<think>{thought}</think>{reply}") + [chat.stop_id]
        branch = turn + 1 if think else 0
        episode.segments.append(Segment(prompt))
        episode.segments.append(Segment(sampled, branch=branch, log_probs=[0.0] * len(sampled)))
        if think:  # what later turns see of this one
            episode.segments.append(Segment(visible))
    return episode


SHIPPED = Path(__file__).parent / "toy_policy"  # think/, direct/ and recipe.json
MODEL = dict(
    vocab_size=1024,
    hidden_size=128,
    intermediate_size=320,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    initializer_range=0.05,
    tie_word_embeddings=True,
)


@dataclass(frozen=True)
class Recipe:
    """How the starting policy of a mode is trained.

    Muon on the matrices (it learns this corpus in a third of AdamW's steps), AdamW on the rest;
    small batches, many steps."""

    steps: int
    good: float  # of `corpus`
    batch_size: int = 4
    lr_matrices: float = 0.006
    lr_others: float = 0.01
    warmup: int = 30
    max_grad_norm: float = 1.0
    # A model this small leaves a thousandth of its probability to nonsense at each of a dialogue's
    # 200 tokens. So it is made cooler for good: its logits times this.
    cooling: float = 1.2


# One policy per mode: with thinking and direct dialogues mixed, a model of this size often forgets
# to think. Without thoughts nothing names the need, so the direct one takes longer to know it.
RECIPES = {"think": Recipe(1300, 0.17), "direct": Recipe(2400, 0.2)}


def school(think):
    """The rng that a mode's corpus is drawn with, from its first dialogue on."""
    return random.Random(f"school {think}")


def digest_of_recipe(think):
    """A hash of what the recipe of a mode yields: the first 2,000 dialogues of its corpus, the
    model, the optimizers' settings, the chat template. Comments and layout are not in it."""
    recipe, rng = RECIPES["think" if think else "direct"], school(think)
    dialogues = [corpus(rng, recipe.good) for _ in range(2000)]
    yields = json.dumps([dialogues, MODEL, vars(recipe), CHAT_TEMPLATE])
    return hashlib.sha256(yields.encode()).hexdigest()[:16]


def base_policy(think, quiet=False):
    """The directory of the starting policy of a mode: the one in toy_policy/, which everybody has.

    Where the recipe was edited since that one was made, a new one is made (a minute or two) and
    kept in $RLVER_CACHE, else in .cache/ beside this file, under the recipe's hash."""
    mode = "think" if think else "direct"
    recipe, shipped = digest_of_recipe(think), SHIPPED / "recipe.json"
    if shipped.is_file() and json.loads(shipped.read_text()).get(mode) == recipe:
        return SHIPPED / mode
    root = Path(os.environ.get("RLVER_CACHE") or Path(__file__).parent / ".cache")
    place = root / f"toy-{mode}-{recipe}"
    if not place.is_dir():
        if not quiet:
            print(
                f"toy_policy/{mode} is not of the recipe in toy.py, which has been edited: a "
                f"starting policy of this recipe is made and kept in {place}"
            )
        try:
            make_policy(place, think, quiet)
        except OSError as error:
            raise BadModel(
                f"the toy policy is kept in {root} (RLVER_CACHE says where), which "
                f"cannot be made: {error.strerror}"
            ) from None
    return place


def make_policy(place, think, quiet=False):
    """Train the starting policy of a mode into the directory `place`: beside it, then renamed, so
    that nobody ever finds half a policy. Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        sft(Path(scratch) / "policy", think, quiet)
        with suppress(OSError):  # somebody else was faster: theirs is the same
            os.rename(Path(scratch) / "policy", place)


def ship():
    """Make both starting policies anew in toy_policy/, and note the recipes that they are of."""
    (SHIPPED / "recipe.json").unlink(missing_ok=True)
    for think, mode in ((True, "think"), (False, "direct")):
        shutil.rmtree(SHIPPED / mode, ignore_errors=True)
        make_policy(SHIPPED / mode, think)
    recipes = {"think": digest_of_recipe(True), "direct": digest_of_recipe(False)}
    (SHIPPED / "recipe.json").write_text(json.dumps(recipes, indent=2) + "\n")


def sft(place, think, quiet=False):
    """Supervised training of a starting policy on the corpus, through the same chat format, packing
    and forward pass as RL, into the directory `place`. With one thread: the number of threads
    changes the order of sums, so the last bits, so what is learned."""
    from support.chat_format import ChatFormat

    import torch
    from tqdm import tqdm

    from policy import Policy, pack

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recipe, rng = RECIPES["think" if think else "direct"], school(think)
    texts = [text for _ in range(1500) for turn in corpus(rng) for text in turn]
    tokenizer = make_tokenizer(texts)
    chat = ChatFormat(tokenizer)
    model = new_model(tokenizer.pad_token_id, chat.stop_id)
    policy = Policy(model)
    learning_rates = optimizers_of(model, recipe)
    bar = tqdm(range(recipe.steps), desc="making the toy policy", unit="step", disable=quiet)
    for step in bar:
        warmup = min(1, (step + 1) / recipe.warmup)
        decay = max(0.02, 1 - step / recipe.steps)
        for optimizer, learning_rate in learning_rates.items():
            optimizer.param_groups[0]["lr"] = learning_rate * warmup * decay
        dialogues = [corpus(rng, recipe.good) for _ in range(recipe.batch_size)]
        batch = pack([corpus_episode(turns, chat, think) for turns in dialogues])
        log_probs = policy(batch)[0]
        loss = -log_probs.sum() / batch.action_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in learning_rates:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    model.model.norm.weight.data *= recipe.cooling  # the last norm: what it gains, logits gain
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    torch.set_num_threads(threads)


def new_model(pad_token_id, stop_id):
    """An untrained model of the toy's size, always with the same weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        **MODEL, pad_token_id=pad_token_id, bos_token_id=None, eos_token_id=stop_id
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def optimizers_of(model, recipe):
    """{optimizer: its highest learning rate}: Muon for the matrices, AdamW for the embedding and
    the vectors."""
    import torch

    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, weight_decay=0.0)
    return {muon: recipe.lr_matrices, adamw: recipe.lr_others}


if __name__ == "__main__":
    parser = Parser(
        description="Prints eight held-out users of the toy: their need, what they "
        "tell, and a reply that helps."
    )
    parser.add_argument(
        "--make-policy",
        action="store_true",
        help="instead, train both starting policies anew into toy_policy/ (some minutes)",
    )
    if parser.parse_args().make_policy:
        ship()
        raise SystemExit
    for row in profiles("heldout", 8):
        scene = read_scene(row["scene"], row["task"])
        helpful = sentence(scene.need, scene.person, scene.feeling, random.Random(0))
        print(f"{row['id']}  {scene.need:<9}  {scene.story} {scene.cues[0]}")
        print(f"{'':17}helps:  {helpful}\n")
