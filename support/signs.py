"""support/signs.py - signs that a policy learns the reward and not the task, counted in the words
of its replies (RLVER 3.7; Gao 2022 on overoptimisation).

A reward that climbs says nothing about why. These numbers look at the replies instead, in every
batch of training and in every evaluation: does the policy repeat itself, does everybody hear the
same, do its replies grow or lose their variety, does it talk about its own score? A healthy run may
move any of them: a curve that rises is a reason to read dialogues, no proof.
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
        | change\s*:\s*[+-]?\d        # the line that decides the emotion in its answers
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

# ----------------------------------------------------------------------------- counted in the words


def signs(dialogues, word_limit=4000):
    """The signs in a batch. dialogues: a list of lists of replies (texts). Shares are from 0 to 1.

    repeat_within   replies that hold a sentence, of three words or more, that the same user was
                    told before
    repeat_across   replies that occur word for word in another dialogue of the batch, too (with
                    GRPO this may be a dialogue with the same user)
    distinct_1..3   different n-grams per n-gram (Li 2016). It falls as the text gets longer, so it
                    is always counted over the first `word_limit` words
    reply_words     words per reply
    reward_talk     replies that name their own reward
    """
    texts = [reply for dialogue in dialogues for reply in dialogue]
    if not texts:
        return {}
    repeating = 0  # replies that repeat a sentence
    replies = []  # each as a tuple of its words
    users_told = Counter()  # reply: how many users were told it
    for dialogue in dialogues:
        earlier_sentences, different_replies = set(), set()
        for text in dialogue:
            sentences = sentences_of(text)
            long_sentences = {sentence for sentence in sentences if len(sentence) >= 3}
            if long_sentences & earlier_sentences:
                repeating += 1
            earlier_sentences |= long_sentences
            reply = tuple(itertools.chain(*sentences))
            replies.append(reply)
            different_replies.add(reply)
        users_told.update(different_replies)
    result = {
        "repeat_within": repeating / len(texts),
        "repeat_across": sum(users_told[reply] > 1 for reply in replies) / len(texts),
        "reply_words": sum(map(len, replies)) / len(texts),
        "reward_talk": sum(bool(REWARD_TALK.search(text)) for text in texts) / len(texts),
    }
    first_replies = first_words(replies, word_limit)
    for n in (1, 2, 3):
        result[f"distinct_{n}"] = distinct(first_replies, n)
    return result


def signs_in_words(counted):
    """What `signs` counted, as a sentence for the terminal; "" if there were no replies."""
    if not counted:
        return ""
    percent = {key: f"{100 * value:.0f} %" for key, value in counted.items()}
    variety = [f"{counted[f'distinct_{n}']:.2f}" for n in (1, 2, 3)]
    return (
        f"Signs of reward hacking: of all replies {percent['repeat_within']} repeat a sentence to "
        f"the same user, {percent['repeat_across']} are told in several dialogues word for word, "
        f"{percent['reward_talk']} talk about their own reward; {counted['reply_words']:.1f} words "
        f"a reply; share of distinct words {variety[0]}, of word pairs {variety[1]}, of word "
        f"triples {variety[2]}"
    )


def words_of(text):
    """Words; for a script without spaces, characters."""
    return WORD.findall(text.lower())


def sentences_of(text):
    """Sentences as tuples of words, so that capitals and commas make no new one."""
    sentences = [tuple(words_of(part)) for part in SENTENCE_END.split(text)]
    return [words for words in sentences if words]


def first_words(replies, word_limit):
    """The first of the replies (tuples of words): those that begin within the first `word_limit`
    words of all."""
    begins = itertools.accumulate(map(len, replies), initial=0)
    return [reply for reply, begin in zip(replies, begins) if begin < word_limit]


def distinct(replies, n):
    """Different n-grams per n-gram of replies (tuples of words); 0 if there are none."""
    grams = []
    for reply in replies:
        shifted = [reply[i:] for i in range(n)]
        grams += zip(*shifted)
    return len(set(grams)) / max(1, len(grams))
