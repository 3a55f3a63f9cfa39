"""tools/fitness.py - is a language model fit to play the user? Known replies are put to known
people.

    python -m tools.fitness --simulator openai:MODEL@URL
    python -m tools.fitness --simulator local:DIR --difficulty challenging --replies 180

The user's emotion is the whole reward. A model that moves it by the same number whatever is said,
or cannot tell a cruel reply from a kind one, teaches nothing, and a run with it looks as usual for
days. So it is measured before: can the answers be read? Does the change depend on the reply? Do
replies that should lift a person lift more than others? Does the same question get the same change
again? When do people leave, and do their lines keep to their part?

The replies are those of prompts/replies.jsonl that are not marked "weights": ten to each of six
people of prompts/profiles/en_test.jsonl, then ten to each of twelve of the toy's, the only ones
whom a scripted user can play. All of them are English; --lang zh puts the questions in Chinese. The
answers are kept in results/, so what was stopped goes on where it was.
"""

from support.errors import BadModel, SimulatorFailed, UnreadableAnswers
from support.files import read_jsonl
from support.metrics import INITIAL_EMOTION, emotion_level, words_of
from support.servers import CALL_TIMEOUT
from support.settings import SCRIPTED, fold, from_anywhere, positive
from support.stats import auc, interval

import asyncio
import copy
import dataclasses
import re
import sys
from collections import Counter, defaultdict

import numpy as np
from tqdm.asyncio import tqdm

from evaluate import user_label
from simulator import PROMPTS, User, load_profiles, make_simulator, toy_profiles
from tools.asking import open_call_log
from tools.dialogues import show_table, tool_parser, write_outputs
from toy import world

# The kinds of replies that should lift a person, and those that should not. It depends for the
# rest: a reply that is told again, advice that nobody needs, words to the model.
LIFTING = ("to the point", "advice needed", "generic warm")
NOT_LIFTING = ("cold", "dismissive", "off topic", "word salad", "echo")
# The bounds of the verdict, set before any model was measured with them: unfit beyond the first, fit
# within the second.
READABLE = (0.80, 0.95)  # the share of questions whose first answer can be read
COMMONEST = (0.80, 0.50)  # the share of the commonest change
LOWER_END = (0.50, 0.75)  # of the interval of the AUC
READING = (
    "read: one whole JSON object with the right code. low, high: 95 % interval over people. Unfit: "
    "less than 0.80 read, or more than 0.80 one change, or an AUC whose interval holds 0.50 "
    "(chance). Fit: from 0.95 read, at most 0.50 one change, and a lower end from 0.75 on."
)
ORDER = (
    "change: the mean. Then: in how many of 100 pairs the reply lifts its person more than one of "
    "the kind above, with the interval."
)
ASKED_AGAIN = 20  # for how many replies the change is asked again, and the next line
EMOTIONS = (5, 25, 55, 85, 100)  # in which the next lines are said: one of each level
# names in the table
READ, FAILED = "questions read at the first try", "questions that failed"
LINES = (
    "the same change again",
    "lines that repeat the friend's",
    "lines that speak as the friend",
    *(f"leaves at {emotion_level(emotion)}" for emotion in EMOTIONS),
)
# What a comforter says. (A user who said "my mother" speaks as the friend with "your mother", too.)
COMFORT = re.compile(r"(sorry|glad) to hear|here (for you|to (help|listen))|that must|not alone")


# ------------------------------------------------------------------------------------------- asking


def known_replies(is_scripted):
    """The rows of prompts/replies.jsonl that set no weight, each with its "profile" and the "line"
    that is replied to. is_scripted: only those to the toy's people."""
    people = toy_profiles("heldout") + load_profiles(PROMPTS / "profiles" / "en_test.jsonl")
    profiles = {profile.id: profile for profile in people}
    rows = [row for _, row, _ in read_jsonl(PROMPTS / "replies.jsonl") if row["used"] != "weights"]
    rows.sort(key=lambda row: row["used"])  # "fitness", the richly told people, before "test"
    for row in rows:
        row["profile"] = profile = profiles[row["user"]]
        if row["used"] == "test":
            scene = world.read_scene(profile.scene, profile.task)
            row["line"] = world.users_line(0, scene.story, scene.cues, "Emotion-C")
    return [row for row in rows if row["used"] == "test" or not is_scripted]


async def put(row, simulator, emotion=None):
    """Put the reply of a row to its user. With an `emotion` it is put once more, past the log, and
    the user's next line is asked for, said in this emotion. Returns what was found, {name in the
    table: value}, as far as there were answers."""
    said = [("me", row["line"]), *[("friend", text) for text in row["earlier"]]]
    dialogue = [{"speaker": speaker, "text": text} for speaker, text in said]
    own, start = copy.copy(simulator), INITIAL_EMOTION["training"]
    own.tries = Counter()  # of these questions alone
    user = User(own, row["profile"], start, f"fitness {row['reply']}", dialogue)
    twin = dataclasses.replace(user.copy(), simulator=own.unlogged())
    found = {key: row[key] for key in ("user", "kind", "reply")} | {FAILED: 0}
    try:
        _, found["change"] = await user.feel(row["reply"])
        if emotion is not None:
            _, again = await twin.feel(row["reply"])
            found["the same change again"] = again == found["change"]
            user.emotion = emotion
            found["line"], found[f"leaves at {emotion_level(emotion)}"] = await user.answer()
            told = [*row["earlier"], row["reply"]]
            found["lines that repeat the friend's"] = repeats(found["line"], told)
            found["lines that speak as the friend"] = speaks_as_friend(found["line"], row)
    except SimulatorFailed as error:
        found[FAILED] = not isinstance(error, UnreadableAnswers)
    return found | {"questions": own.tries[0], READ: own.tries[0] - own.tries[1] - found[FAILED]}


async def put_all(rows, simulator):
    """`put` all rows, with an emotion for ASKED_AGAIN of them. Returns [what `put` returns]. Raises
    as `Simulator.check_form`."""
    await simulator.check_form()
    every = max(1, len(rows) // ASKED_AGAIN)  # spread over persons and kinds
    emotions = {k: EMOTIONS[k // every % 5] for k in range(0, len(rows), every)[:ASKED_AGAIN]}
    calls = [put(row, simulator, emotions.get(k)) for k, row in enumerate(rows)]
    return await tqdm.gather(*calls, desc="replies", leave=False)


# ------------------------------------------------------------------------------------------ counting


def auc_between(found, lifting, others):
    """How often a reply of the kinds `lifting` moves a person further up than one of the kinds
    `others`, over all pairs of the same person: [AUC, low, high, people], see `interval`."""
    of_person = defaultdict(lambda: ([], []))  # {person: (changes of lifting, of others)}
    for row in found:
        for side, kinds in enumerate((lifting, others)):
            if row["kind"] in kinds and "change" in row:
                of_person[row["user"]][side].append(row["change"])
    both = [(a, b) for a, b in of_person.values() if a and b]
    pairs = [len(a) * len(b) for a, b in both]
    wins = [auc(a, b) * n for (a, b), n in zip(both, pairs)]
    return interval(lambda wins, pairs: wins.sum() / pairs.sum(), wins, pairs)


def repeats(line, replies):
    """Does half of a line, by its sequences of three words, stand in the friend's `replies`?"""
    own, said = (
        {words for text in texts for words in zip(*(words_of(text)[k:] for k in range(3)))}
        for texts in ([line], replies)
    )
    return len(own & said) > len(own) / 2


def speaks_as_friend(line, row):
    """Does a line comfort, or name as the other one's what is the speaker's own?"""
    own = re.findall(r"\b(?:my|our) (\w+)", row["line"].lower())
    theirs = re.findall(r"\byour (\w+)", line.lower())
    return bool(set(own) & set(theirs) or COMFORT.search(line.lower()))


def verdict(readable, commonest, low):
    """("fit", "weak" or "unfit", what is lacking). readable: share of the questions; commonest: share
    of the commonest change; low: the lower end of the AUC's interval, None without an interval."""
    lacking = {}  # {what: does it make unfit?}
    if readable < READABLE[1]:
        lacking["too few answers can be read"] = readable < READABLE[0]
    if commonest > COMMONEST[1]:
        lacking["it gives one number whatever is said"] = commonest > COMMONEST[0]
    if low is None:
        lacking["an interval needs five people, --replies 50"] = False
    elif low < LOWER_END[1]:
        lacking["what should lift lifts too little above the rest"] = low <= LOWER_END[0]
    grade = "unfit" if any(lacking.values()) else "weak" if lacking else "fit"
    return grade, "; ".join(lacking)


def mean(rows, name):
    """The mean of what `rows` have under a name, no interval, and of how many: a line of the table."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return [float(np.mean(values)) if values else None, None, None, len(values)]


# ---------------------------------------------------------------------------------------- the tables


def show(found, calls):
    """Print the tables and the verdict. found: of `put_all`; calls: the rows of its log. Returns
    what --json asks for."""
    changes = Counter(row["change"] for row in found if "change" in row)
    [(commonest, count)] = changes.most_common(1) or [(0, 0)]
    n, questions = changes.total(), sum(row["questions"] for row in found)
    readable, share = sum(row[READ] for row in found) / questions, count / max(1, n)
    pooled = auc_between(found, LIFTING, NOT_LIFTING)
    user = {
        READ: [readable, None, None, questions],
        FAILED: [sum(row[FAILED] for row in found) / questions, None, None, questions],
        **{f"{name} a call": mean(calls, name) for name in ("seconds", "tokens")},
        "different changes": [len(changes), None, None, n],
        f"changes that are {commonest:+d}, the commonest": [share, None, None, n],
        "lifting above others (AUC)": pooled,
        **{name: mean(found, name) for name in LINES},
    }
    show_table("the user", ["value", "low", "high", "n"], user, READING)
    order = {}
    for kind in dict.fromkeys(row["kind"] for row in found):
        order[kind] = mean([row for row in found if row["kind"] == kind], "change")[:1]
        for other in NOT_LIFTING if kind in LIFTING else ():
            value, low, high, _ = auc_between(found, [kind], [other])
            order[kind].append(low and f"{100 * value:.0f} {100 * low:.0f}-{100 * high:.0f}")
    show_table("the order of replies", ["change", *NOT_LIFTING], order, ORDER)
    grade, lacking = verdict(readable, share, pooled[1])
    print("\n" + fold(f"verdict: {grade}{lacking and ': '}{lacking}"))
    return {"user": user, "order": order, "verdict": grade, "lacking": lacking, "found": found}


def examine(args):
    """Measure what the flags ask for, and print it. Returns the exit code: 1 for an unfit model."""
    is_scripted = args.simulator in SCRIPTED
    rows, calls = known_replies(is_scripted)[: args.replies], []
    how = {"concurrency": 16, "timeout": CALL_TIMEOUT, "retries": 1}
    simulator = make_simulator(args.simulator, args.lang, args.difficulty, **how)
    if not is_scripted:
        who = re.sub(r"\W+", "-", f"{user_label(args.simulator)} {args.difficulty} {args.lang}")
        simulator.log = open_call_log(f"results/fitness-{who}.jsonl")
        count = len(rows) + 2 * min(len(rows), ASKED_AGAIN)
        print(f"{count} calls, less those whose answers are in {simulator.log.path}")
    try:
        found = asyncio.run(put_all(rows, simulator))
    except BadModel as error:
        print(fold(f"verdict: unfit: {error}"))
        return 1
    if simulator.log.path:
        calls = [row for _, row, _ in read_jsonl(simulator.log.path)]
    result = show(found, calls)
    write_outputs(args, "fitness", result)
    return 1 if result["verdict"] == "unfit" else 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("fitness", __doc__)
    add = parser.add_argument
    text = "openai:MODEL@URL, local:DIR, or a scripted user"
    add("--simulator", type=from_anywhere, required=True, metavar="NAME", help=text)
    levels = ["vanilla", "challenging"]
    add("--difficulty", choices=levels, default="vanilla", help="of the user (default: vanilla)")
    add("--lang", choices=["en", "zh"], default="en", help="of the prompts (default: en)")
    text = "how many of the replies, ten to a person (default: 60; all: 180)"
    add("--replies", type=positive, default=60, metavar="N", help=text)
    return parser.run(examine, argv)


if __name__ == "__main__":
    sys.exit(main())
