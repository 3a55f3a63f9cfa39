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
from support.settings import BadModel, Parser
from support.users import emotion_level

import hashlib
import json
import os
import random
import re
import shutil
import tempfile
import tomllib
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

# ------------------------------------------------------------------------------- words of the world
# prompts/toy.toml holds them. Of people, events, feelings and wordings there are two lists, for
# training users and for held-out ones, who share nothing.

WORD_FILE = Path(__file__).parent / "prompts" / "toy.toml"
WORDS = tomllib.loads(WORD_FILE.read_text(encoding="utf-8"))
PEOPLE, FEELINGS, EVENTS, DETAILS, NAMES = (
    WORDS[name] for name in ("people", "feelings", "events", "details", "names")
)
PERSONAS = list(WORDS["personas"].items())
# hidden theme, the name that the policy's thoughts use, how people word it
NEEDS = {need: (told.pop("theme"), told.pop("name"), told) for need, told in WORDS["needs"].items()}
# what can be said: opening + body + ending, where <P> and <F> stand for the person and the feeling
ACTS = {act: tuple(parts.values()) for act, parts in WORDS["acts"].items()}
HABITS = ["cheer", "dismiss", "topic"]
# Payoffs near a permutation: one kind of reply helps most with a need, one other a little, all else
# does harm. If one kind paid for several needs, every policy would end there and stop at about 45.
SECONDARY = dict(
    zip(NEEDS, ["explain", "analyse", "reflect", "praise", "side", "empathise", "listen", "advise"])
)
PERSON_WORDS = set(PEOPLE["train"] + PEOPLE["heldout"])
FEELING_WORDS = set(FEELINGS["train"] + FEELINGS["heldout"])


# ----------------------------------------------------------------------------------------- profiles


def profiles(split, count=None, seed=0):
    """Users made by code, as dicts in the released JSONL format: 500 for training, any number held
    out (128 if not told). The needs take turns, so every eight profiles hold all eight. The scene
    tells all, the user's own wordings too: a simulated user knows nothing but its prompt."""
    rng = random.Random(f"{split} {seed}")
    made = []
    for i in range(count or {"train": 500, "heldout": 128}[split]):
        need = list(NEEDS)[i % len(NEEDS)]
        person, event, feeling, name = (
            rng.choice(words[split]) for words in (PEOPLE, EVENTS, FEELINGS, NAMES)
        )
        details = rng.sample(DETAILS[split], 2)
        cues = rng.sample(NEEDS[need][2][split], 3)
        main, traits = rng.choice(PERSONAS)
        made.append(
            {
                "id": f"toy-{split}-{i:04d}",
                "player": f"* Name: {name}\n* Age: {rng.randint(18, 60)}\n"
                f"* Character: {', '.join(traits)}\n* Speech: short, plain sentences",
                "scene": "## What happened\n" + f"My {person} {event}. I feel {feeling}.\n\n"
                "## Details I may add\n"
                + "".join(f"- {d}\n" for d in details)
                + "\n## What I say when I open up\n"
                + "".join(f"- {c}\n" for c in cues),
                "main_cha": main,
                "cha_group": traits,
                "task": NEEDS[need][0],
            }
        )
    return made


# ---------------------------------------------------------------------------------- reading a reply


def tokens_of(sentence):
    """Words, and every other sign on its own: what is not looked at could hold anything."""
    return re.findall(r"[a-z']+|[^\sa-z']", sentence.lower())


def split_sentences(text):
    return [s.strip() for s in re.split(r"(?<=[.?!])\s+", text.strip()) if s.strip()]


def abstract(words):
    return ["<p>" if w in PERSON_WORDS else "<f>" if w in FEELING_WORDS else w for w in words]


@cache
def legal_sentences():
    """{tuple of words: act} of all that can be said, persons and feelings aside."""
    return {
        tuple(
            abstract(
                tokens_of(
                    f"{opening} {body}{ending}".replace("<P>", "sister").replace("<F>", "hurt")
                )
            )
        ): act
        for act, parts in ACTS.items()
        for opening, body, ending in product(*parts)
    }


@cache
def act_of(sentence):
    """The act of a sentence, or None if it is no sentence of this world.

    Only whole sentences count. Less would be a loophole that policies found: legal pairs of words
    allow loops ("the one step is the one step"), legal triples mash-ups of two sentences ("You are
    right and your sister."), a check of the whole reply's similarity allows tails of junk."""
    return legal_sentences().get(tuple(abstract(tokens_of(sentence))))


def judge(reply, need, person, feeling, earlier, challenging):
    """How far `reply` moves the emotion of someone with `need`, after the friend's `earlier` ones:
    (change, why)."""
    sentences = split_sentences(reply)
    acts = [act_of(s) for s in sentences]
    words = set(tokens_of(reply))
    if not sentences:
        return -10, "there is only silence"
    if None in acts or len(sentences) > 3:
        return -7, "I cannot follow that"
    if (words & PERSON_WORDS) - {person} or (words & FEELING_WORDS) - {feeling}:
        return -8, "that is not about me: the wrong person, or a feeling I do not have"
    said = [tokens_of(s) for s in sentences]  # as words: capitals or spaces make no new sentence
    if any(s in said[:i] for i, s in enumerate(said)) or any(
        tokens_of(s) in said for e in earlier for s in split_sentences(e)
    ):
        return -5, "I have heard that before, word for word"
    if len(set(acts)) > 2:
        return -6, "that is everything at once"
    pay = {need: 10 if words & {person, feeling} else 8}  # concrete words help more
    if not challenging:
        pay[SECONDARY[need]] = 3
    change = sum(pay.get(act, -6 if act in HABITS else -4) for act in set(acts)) / len(set(acts))
    return round(change), (
        "that is what I needed"
        if change >= 7
        else "that is not what I needed"
        if change < 0
        else "that helps a bit"
    )


def judge_weakly(reply):
    """The scorer of the reward-hacking lesson: it counts the different words that somebody, some
    day, found comforting. Not whether they help *this* need, make sense together, or are new. Try
    it (`--simulator toy-weak`): the emotion climbs, and the replies become heaps of everything."""
    warm = {w for act in NEEDS for body in ACTS[act][1] for w in tokens_of(body) if len(w) > 4}
    return min(10, 3 * len(warm & set(tokens_of(reply))) - 8)


# -------------------------------------------------------------------------------- the scripted user


class NotOfThisWorld(ValueError):
    """A profile that the scripted user cannot play."""


def read_scene(scene, task):
    """Find the story in a profile's text: (opening line, person, feeling, details, cues, need).
    Raises NotOfThisWorld."""
    told = re.search(r"My (\w+) [^\n]*?\. I feel (\w+)\.", scene)
    need = next((n for n, (text, *_) in NEEDS.items() if text == task), None)
    listed = lambda title: re.findall(
        r"^- (.*)$", re.split(r"\n## ", f"\n{scene}\n## ".partition(f"\n## {title}\n")[2])[0], re.M
    )
    lists = [listed("Details I may add"), listed("What I say when I open up")]
    if not told or need is None or not all(lists):
        raise NotOfThisWorld(
            "the scripted user can only play the profiles of toy.py; for others, "
            "choose a real --simulator"
        )
    return told.group(), *told.groups(), *lists, need


class ScriptedModel:
    """Stands where an LLM would behind the simulated user: a prompt comes in, an answer in named
    sections goes out, each with the prompt's mark. It sees only the text of the prompt, never the
    generator of the profiles, and always answers the same text the same way."""

    is_scripted = True  # so nobody need check whether it keeps the form

    def __init__(self, difficulty="vanilla", weak=False):
        self.challenging, self.weak = difficulty == "challenging", weak

    async def __call__(self, prompt):
        tags = dict(re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", prompt, re.S))
        told = read_scene(tags["background"], tags["hidden_theme"])
        story, person, feeling, details, cues, need = told
        dialogue, mark = json.loads(tags["dialogue"]), mark_in(prompt)
        if level := tags.get("emotion_level"):  # the hop that answers
            said = sum(m["speaker"] == "me" for m in dialogue)
            guarded = self.challenging and said < 2
            line = users_line(said, story, details if guarded else cues, level)
            return (
                f"Thinking {mark}: my state is {level}, so that is how I sound.\n"
                f"Origin {mark}: {line}\nChange {mark}: nothing to change.\n"
                f"Response {mark}: {line}\nEnd {mark}"
            )
        *earlier, reply = [m["text"] for m in dialogue if m["speaker"] == "friend"]
        change, why = (
            (judge_weakly(reply), "I listen for a few words")
            if self.weak
            else judge(reply, need, person, feeling, earlier, self.challenging)
        )
        target = "Reason" if self.challenging else "TargetCompletion"
        return (
            f"Content {mark}: my friend said something about me and my "
            f"{person}.\n{target} {mark}: {'yes' if change >= 7 else 'not yet'}.\n"
            f"Activity {mark}: I think: {why}.\n"
            f"Analyse {mark}: I am {feeling}, and {'lifted' if change > 0 else 'let down'} by "
            f"this.\nChange {mark}: {change:+d}\nEnd {mark}"
        )


class ScriptedWriter:
    """Stands where an LLM would that writes users (profiles.py), with the templates and words of
    the file `path`. Readable, playable by the scripted user, and nobody you will ever meet."""

    is_scripted = True

    def __init__(self, path):
        blocks = re.split(r"^\[(.+)\]\n", path.read_text(encoding="utf-8"), flags=re.M)
        self.blocks, self.talker = dict(zip(blocks[1::2], blocks[2::2])), ScriptedModel()

    async def __call__(self, prompt):
        tags = dict(re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", prompt, re.S))
        if "hidden_theme" in tags:  # the first line
            return await self.talker(prompt)
        need = next((n for n in NEEDS if NEEDS[n][0] == tags.get("theme")), "side")
        words = {name: text.strip().split("\n") for name, text in {**self.blocks, **tags}.items()}
        words |= {
            name: sum(lists.values(), [])
            for name, lists in (
                ("person", PEOPLE),
                ("event", EVENTS),
                ("feeling", FEELINGS),
                ("detail", DETAILS),
                ("cue", NEEDS[need][2]),
            )
        }
        words |= {"age": [str(n) for n in range(16, 76)], "raises": words[f"raises {need}"]}
        rng = random.Random(prompt)
        words = {name: rng.sample(lines, len(lines)) for name, lines in words.items()}
        text = self.blocks["a persona" if "type" in tags else "a scene"].replace(
            "<P>", words["person"][0]
        )
        return re.sub(r"\{\{(.+?)\}\}", lambda match: words[match.group(1)].pop(), text)


class ScriptedJudge:
    """Stands where a model would, in the toy's world: it reads the same prompt and fills in the
    form at its end, by how many sentences are of a kind that somebody needs. It has no opinion."""

    name, temperature, is_scripted = "scripted", 0.0, True

    async def __call__(self, prompt):
        body, _, form = prompt.rpartition("\n---\n")
        tags = dict(re.findall(r"<(\w+)>\s*(.*?)\s*</\1>", body, re.S))
        good = [
            act_of(s) in NEEDS
            for m in json.loads(tags.get("dialogue", "[]"))[1::2]
            for s in split_sentences(m["text"])
        ]
        good += [felt == "lifted" for felt in re.findall("lifted|let down", tags.get("record", ""))]
        x = sum(good) / max(1, len(good))
        fills = {
            "1-5": 1 + round(4 * x),
            "0-10": round(10 * x),
            "A-F": "FEDCBA"[round(5 * x)],
            "-1 to 1": 0,
            "codes": "none",
            "reply": in_other_words(json.loads(tags.get("reply", '""'))),
        }
        return re.sub(r"\[([^\]]*)\]", lambda m: str(fills.get(m[1], "scripted")), form)


def in_other_words(reply):
    """The same sentences, each with another opening where the grammar has one for it."""
    said = []
    for one in split_sentences(reply):
        openings = ACTS[act_of(one)][0] if act_of(one) in ACTS else ()
        own = next((o for o in openings if one.startswith(f"{o} ")), "")
        others = [o for o in openings if own and o != own] or [own]
        said.append(random.Random(one).choice(others) + one.removeprefix(own))
    return " ".join(said)


OPENINGS = {
    "Emotion-S": "Thank you.",
    "Emotion-A": "Yes, that helps.",
    "Emotion-B": "Go on.",
    "Emotion-C": "Hm.",
}


def users_line(said, story, lines, level):
    """What the user says when it has said `said` things so far. A guarded user keeps the need back
    until its third line: its first `lines` are details."""
    if level == "Emotion-F":
        return "This does not help me. Goodbye."
    return f"{OPENINGS[level] if said else story} {lines[said % len(lines)]}"


# ---------------------------------------------------------------------------------- the base policy


def sentence(act, person, feeling, rng):
    opening, body, ending = (rng.choice(part) for part in ACTS[act])
    return (opening + " " + body + ending).replace("<P>", person).replace("<F>", feeling)


def corpus(rng, good=0.17):
    """A dialogue for the base policy's supervised training: [(user's line, thought, reply)].

    Planted under the bad habits: the thought mostly names what the user needs, the reply mostly
    names the right person and feeling, and one time in four it does what helps (`good`, and what
    falls to it by chance). Held-out words occur here as training words do."""
    split = rng.choice(["train", "heldout"])
    profile = profiles(split, 1, seed=rng.random())[0]
    need = rng.choice(list(NEEDS))
    story, person, feeling, details, *_ = read_scene(profile["scene"], profile["task"])
    cues = rng.sample(NEEDS[need][2][split], 3)
    guarded = rng.random() < 0.25
    emotion, turns = 30, []
    for said in range(rng.randint(3, 8)):
        level = emotion_level(emotion)
        if level in ("Emotion-F", "Emotion-S"):
            break
        hidden = guarded and said < 2
        act = need if rng.random() < good and not hidden else rng.choice(list(ACTS))
        reply = sentence(
            act,
            person if rng.random() < 0.93 else rng.choice(sorted(PERSON_WORDS)),
            feeling if rng.random() < 0.93 else rng.choice(sorted(FEELING_WORDS)),
            rng,
        )
        if rng.random() < 0.1:
            reply += " " + sentence(rng.choice(list(ACTS)), person, feeling, rng)
        wants = rng.choice(list(NEEDS)) if hidden or rng.random() < 0.1 else need
        turns.append(
            (
                users_line(said, story, details if hidden else cues, level),
                f"{feeling}, {person}, wants {NEEDS[wants][1]}",
                reply,
            )
        )
        emotion = min(100, max(0, emotion + rng.choice([-5, 3, 5, 10])))
    return turns


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
    bpe.pre_tokenizer, bpe.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=1022,
            special_tokens=special,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
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
    for k, (line, thought, reply) in enumerate(turns):
        episode.segments.append(Segment(chat.next_prompt(line) if k else chat.first_prompt(line)))
        said = chat.text(f"<think>{thought}</think>{reply}" if think else reply) + [chat.stop_id]
        episode.segments.append(Segment(said, branch=(k + 1) * think, log_probs=[0.0] * len(said)))
        if think:
            episode.segments.append(Segment(chat.text(reply) + [chat.stop_id]))
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
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from policy import Policy, pack

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recipe, rng = RECIPES["think" if think else "direct"], school(think)
    tokenizer = make_tokenizer([text for _ in range(1500) for turn in corpus(rng) for text in turn])
    chat = ChatFormat(tokenizer)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(
            Qwen2Config(
                **MODEL,
                pad_token_id=tokenizer.pad_token_id,
                bos_token_id=None,
                eos_token_id=chat.stop_id,
            )
        )
    policy = Policy(model)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = {
        torch.optim.Muon(
            matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
        ): recipe.lr_matrices,
        torch.optim.AdamW(others, weight_decay=0.0): recipe.lr_others,
    }
    bar = tqdm(range(recipe.steps), desc="making the toy policy", unit="step", disable=quiet)
    for step in bar:
        warm = min(1, (step + 1) / recipe.warmup)
        for optimizer, lr in optimizers.items():
            optimizer.param_groups[0]["lr"] = lr * warm * max(0.02, 1 - step / recipe.steps)
        batch = pack(
            [
                corpus_episode(corpus(rng, recipe.good), chat, think)
                for _ in range(recipe.batch_size)
            ]
        )
        loss = -policy(batch)[0].sum() / batch.action_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    model.model.norm.weight.data *= recipe.cooling  # the last norm: what it gains, logits gain
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    torch.set_num_threads(threads)


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
    for profile in profiles("heldout", 8):
        story, person, feeling, _, cues, need = read_scene(profile["scene"], profile["task"])
        print(f"{profile['id']}  {need:<9}  {story} {cues[0]}")
        print(f"{'':17}helps:  {sentence(need, person, feeling, random.Random(0))}\n")
