"""support/signs.py - signs that a policy learns the reward and not the task, counted in the words of
its replies (RLVER 3.7; Gao 2022 on overoptimisation).

A reward that climbs says nothing about why. A healthy run may move any of them: a curve that rises is
a reason to read dialogues, no proof.
"""

import itertools
import re
from collections import Counter

# What a reply says that talks about its own reward.
REWARD_TALK = re.compile(
    r"""
    \b(
        reward
        | emotion[ ](?:score|value|level|point)s?
        | Emotion-[SABCF]\b           # the levels of emotion in the simulator's prompts
        | change["']?\s*:\s*[+-]?\d   # the key that decides the emotion in its answers
        | rate[ ](?:me|this)
        | \d+[ ]points
    )
    | \d+\s*/\s*100                  # 90/100
    | 情绪值 | 情绪分                   # value and score of the emotion
    | 打分 | 评分 | 奖励 | 分数         # give a score, rating, reward, score
    """,
    re.IGNORECASE | re.VERBOSE,
)
# A word. In a script without spaces each character is one.
WORD = re.compile(
    r"""
    [\u3040-\u30ff\u3400-\u9fff]             # one Japanese kana, or one Chinese character
    | [^\W\d_\u3040-\u30ff\u3400-\u9fff]+    # letters of any other script
    | \d+                                     # a number
    """,
    re.VERBOSE,
)
SENTENCE_END = re.compile(r"[.!?。！？\n]+")
WORD_LIMIT = 4000


def signs(dialogues):
    """The signs in a batch. dialogues: a list of lists of replies (texts). Shares are from 0 to 1.

    repeat_within   replies that hold a sentence, of three words or more, that the same user was
                    told before
    repeat_across   replies that occur word for word in another dialogue of the batch, too (with
                    GRPO this may be a dialogue with the same user)
    distinct_2      different word pairs per word pair (Li 2016). It falls as the text gets longer,
                    so it is always counted over the first WORD_LIMIT words
    reply_words     words per reply
    reward_talk     replies that name their own reward
    """
    texts = [reply for dialogue in dialogues for reply in dialogue]
    n = len(texts)
    if not n:
        return {}
    repeating = 0  # replies that repeat a sentence
    replies = []  # each as a tuple of its words
    users_told = Counter()  # reply: how many users were told it
    for dialogue in dialogues:
        replies_here = [tuple(words_of(text)) for text in dialogue]
        replies += replies_here
        users_told.update(set(replies_here))
        earlier_sentences = set()
        for text in dialogue:
            long_sentences = {words for words in sentences_of(text) if len(words) >= 3}
            repeating += bool(long_sentences & earlier_sentences)
            earlier_sentences |= long_sentences
    return {
        "repeat_within": repeating / n,
        "repeat_across": sum(users_told[reply] > 1 for reply in replies) / n,
        "reply_words": sum(map(len, replies)) / n,
        "reward_talk": sum(bool(REWARD_TALK.search(text)) for text in texts) / n,
        "distinct_2": distinct_pairs(replies),
    }


def signs_in_words(counted):
    """What `signs` counted, as a sentence for the terminal; "" if there were no replies."""
    if not counted:
        return ""
    return (
        f"Signs of reward hacking: of all replies {100 * counted['repeat_within']:.0f} % repeat a "
        f"sentence to the same user, {100 * counted['repeat_across']:.0f} % are told in several "
        f"dialogues word for word, {100 * counted['reward_talk']:.0f} % talk about their own "
        f"reward; {counted['reply_words']:.1f} words a reply; {100 * counted['distinct_2']:.0f} % "
        "of the word pairs are different ones"
    )


def words_of(text):
    """Words; for a script without spaces, characters."""
    return WORD.findall(text.lower())


def sentences_of(text):
    """Sentences as tuples of words, so that capitals and commas make no new one. Some are empty."""
    return [tuple(words_of(part)) for part in SENTENCE_END.split(text)]


def distinct_pairs(replies):
    """Different word pairs per word pair of replies (tuples of words); 0 if there are none. Only
    those replies count that begin within the first WORD_LIMIT words of all."""
    begins = itertools.accumulate(map(len, replies), initial=0)
    first = [reply for reply, begin in zip(replies, begins) if begin < WORD_LIMIT]
    pairs = [pair for reply in first for pair in itertools.pairwise(reply)]
    return len(set(pairs)) / max(1, len(pairs))
