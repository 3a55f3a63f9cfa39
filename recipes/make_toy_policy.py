"""recipes/make_toy_policy.py - the toy's starting policies, half a million parameters each: a corpus
of dialogues, and supervised training on it. Nothing imports this program: its results, toy/policy/,
are in the repository.

    python recipes/make_toy_policy.py        makes both policies anew, in some minutes

The corpus teaches the words, also those of the held-out users, and bad habits. Reinforcement
learning has to find which sentence helps which user.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from models.chat_format import ChatFormat
from support.command_line import Parser

import hashlib
import json
import random
import shutil
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from emotion import NEEDS, emotion_level
from policy import Policy, pack
from rollout import Episode, Segment
from toy.words import ACTS, CUES, FEELING_WORDS, PERSON_WORDS, WORD_IN_THOUGHT
from toy.world import (
    GUARDED_LINES,
    POLICY,
    mode_of,
    profiles,
    random_sentence,
    read_scene,
    users_line,
)

# --------------------------------------------------------------------------------------- the corpus


def corpus_dialogue(rng, good):
    """A dialogue for the supervised training of the base policy: [(user's line, thought, reply)].

    Besides the bad habits it teaches two skills: thoughts that mostly name the user's need, and
    replies that mostly name the right person and feeling. `good` is the share of the replies that
    help on purpose. Some of the others help by chance, so that one reply in four helps. Words of
    held-out users are as frequent as those of training users."""
    split = rng.choice(["train", "heldout"])
    # Of this profile only the story and the details are used. Its need is always the first of NEEDS
    # (the needs take turns, and it is a list of one), so need and cues are drawn here.
    [profile] = profiles(split, count=1, seed=rng.random())
    scene = read_scene(profile["scene"], profile["task"])
    need = rng.choice(list(NEEDS))
    cues = rng.sample(CUES[need][split], 3)
    is_guarded = rng.random() < 0.25
    emotion, turns = 30, []
    for lines_said in range(rng.randint(3, 8)):
        level = emotion_level(emotion)
        if level in ("Emotion-F", "Emotion-S"):
            break
        is_hidden = is_guarded and lines_said < GUARDED_LINES
        topics = scene.details if is_hidden else cues
        line = users_line(lines_said, scene.story, topics, level)
        helps = rng.random() < good and not is_hidden
        reply = corpus_reply(need if helps else None, scene, rng)
        guess = need
        if is_hidden or rng.random() < 0.1:
            guess = rng.choice(list(NEEDS))
        thought = f"{scene.feeling}, {scene.person}, wants {WORD_IN_THOUGHT[guess]}"
        turns.append((line, thought, reply))
        # the policy learns lines of all levels, so the emotion need not follow from the reply
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
    reply = random_sentence(act, person, feeling, rng)
    if rng.random() < 0.1:
        second_act = rng.choice(list(ACTS))
        reply += " " + random_sentence(second_act, scene.person, scene.feeling, rng)
    return reply


# ---------------------------------------------------------------------------------- the base policy

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
# One special token opens a message, one ends it. (A template as wordy as ChatML would cost a sixth
# of the toy's tokens.)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Recipe:
    """How the starting policy of a mode is trained.

    Muon on the matrices (it learns this corpus in a third of AdamW's steps), AdamW on the rest;
    small batches, many steps."""

    steps: int
    good: float  # the share of the corpus's replies that help on purpose, see `corpus_dialogue`
    batch_size: int = 4
    lr_matrices: float = 0.006
    lr_others: float = 0.01
    warmup: int = 30
    max_grad_norm: float = 1.0
    # A model this small leaves a thousandth of its probability to nonsense at each of a dialogue's
    # 200 tokens. So after training its logits are multiplied by this, which lowers the temperature.
    cooling: float = 1.2


# One policy per mode: with thinking and direct dialogues mixed, a model of this size often forgets
# to think. Without thoughts nothing names the need, so the direct policy needs more steps.
RECIPES = {
    "think": Recipe(steps=1300, good=0.17),
    "direct": Recipe(steps=2400, good=0.2),
}


def digest_of_recipe(think):
    """A hash of what the recipe of a mode yields: 2,000 dialogues, drawn as the corpus is, the
    model, the optimizers' settings, the chat template. Comments and layout are not in it. A test
    compares it with the digest beside the shipped policy. It does not notice an edit of `sft` or of
    the tokenizer: make the policies again after one."""
    recipe, rng = RECIPES[mode_of(think)], rng_of_corpus(think)
    dialogues = [corpus_dialogue(rng, recipe.good) for _ in range(2000)]
    yields = json.dumps([dialogues, MODEL, vars(recipe), CHAT_TEMPLATE])
    return hashlib.sha256(yields.encode()).hexdigest()[:16]


def rng_of_corpus(think):
    """The generator that draws the corpus of a mode, at its first dialogue."""
    # the text is the seed; changing it changes the corpus
    return random.Random(f"school {think}")


def ship():
    """Make both starting policies anew in toy/policy/, and note the digests of their recipes."""
    (POLICY / "recipe.json").unlink(missing_ok=True)
    digests = {}
    for think in (True, False):
        mode = mode_of(think)
        shutil.rmtree(POLICY / mode, ignore_errors=True)
        sft(POLICY / mode, think)
        digests[mode] = digest_of_recipe(think)
    (POLICY / "recipe.json").write_text(json.dumps(digests, indent=2) + "\n")


# ------------------------------------------------------------------------------------- its training


def sft(directory, think):
    """Supervised training of a starting policy on the corpus, through the same chat format, packing
    and forward pass as RL, into `directory`. It uses one thread, because the number of threads
    changes the order of sums, their last bits and so the result."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    recipe, rng = RECIPES[mode_of(think)], rng_of_corpus(think)
    tokenizer = make_tokenizer(texts_for_vocabulary(rng))
    chat = ChatFormat(tokenizer)
    model = new_model(tokenizer.pad_token_id, chat.stop_id)
    policy = Policy(model)
    optimizers = optimizers_of(model, recipe)
    bar = tqdm(range(recipe.steps), desc="making the toy policy", unit="step")
    for step in bar:
        # The learning rates rise to their peak in the first steps, and fall to 2 % of it.
        warmup = min(1, (step + 1) / recipe.warmup)
        decay = max(0.02, 1 - step / recipe.steps)
        for optimizer, peak in optimizers.items():
            optimizer.param_groups[0]["lr"] = peak * warmup * decay
        dialogues = [corpus_dialogue(rng, recipe.good) for _ in range(recipe.batch_size)]
        batch = pack([corpus_episode(turns, chat, think) for turns in dialogues])
        log_probs = policy(batch)[0]
        loss = -log_probs.sum() / batch.action_mask.sum()  # the mean over the trained tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    # The logits are a linear function of the last norm's output, so this multiplies them.
    model.model.norm.weight.data *= recipe.cooling
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    torch.set_num_threads(threads)


def texts_for_vocabulary(rng):
    """Lines, thoughts and replies of 1,500 dialogues, from which the tokenizer gets its entries."""
    texts = []
    for _ in range(1500):
        turns = corpus_dialogue(rng, good=0.17)
        for line, thought, reply in turns:
            texts += [line, thought, reply]
    return texts


PAD_TOKEN = "<|endoftext|>"  # the name that Qwen2 wants
STOP_TOKEN = "<|end|>"
ROLE_TOKENS = ["<|user|>", "<|assistant|>", "<|system|>"]
THINK_TAGS = ["<think>", "</think>"]


def make_tokenizer(texts):
    """A byte-level BPE of 1,024 entries. The think tags are single tokens, but not special."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"] - len(THINK_TAGS),  # which are added below
        special_tokens=[PAD_TOKEN, STOP_TOKEN, *ROLE_TOKENS],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD_TOKEN,
        eos_token=STOP_TOKEN,
        additional_special_tokens=ROLE_TOKENS,
    )
    tokenizer.add_tokens(THINK_TAGS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def new_model(pad_token_id, stop_id):
    """An untrained model of the toy's size, always with the same weights."""
    config = Qwen2Config(
        **MODEL, pad_token_id=pad_token_id, bos_token_id=None, eos_token_id=stop_id
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config)


def optimizers_of(model, recipe):
    """{optimizer: its peak learning rate}: Muon for the matrices, AdamW for the embedding and the
    vectors."""
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, weight_decay=0.0)
    return {muon: recipe.lr_matrices, adamw: recipe.lr_others}


def corpus_episode(turns, chat, think):
    """The Episode that the policy would have made of a corpus dialogue. turns: as
    `corpus_dialogue` has them; chat: a ChatFormat."""
    episode = Episode("corpus", 0, "")
    for turn, (line, thought, reply) in enumerate(turns):
        prompt = chat.next_prompt(line) if turn else chat.first_prompt(line)
        visible = chat.text(reply) + [chat.stop_id]
        episode.segments.append(Segment(prompt))
        if think:
            reply_ids = chat.text(f"<think>{thought}</think>{reply}") + [chat.stop_id]
            branch = turn + 1
        else:
            reply_ids, branch = visible, 0
        # A segment with log-probs is trained. Their values, the engine's, are not read here.
        log_probs = [0.0] * len(reply_ids)
        episode.segments.append(Segment(reply_ids, branch=branch, log_probs=log_probs))
        if think:  # what later turns see of this one
            episode.segments.append(Segment(visible))
    return episode


if __name__ == "__main__":
    Parser(
        description="Trains both starting policies of the toy again, into toy/policy/."
    ).parse_args()
    ship()
