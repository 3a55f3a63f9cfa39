"""tools/fitness.py - is a language model fit to play the user? Known replies are put to known
people.

    python -m tools.fitness --simulator openai:MODEL@URL
    python -m tools.fitness --simulator local:DIR --difficulty challenging --replies 180
    python -m tools.fitness --reader local:DIR

The user's emotion is the whole reward. A model that moves it by the same number whatever is said,
or cannot tell a cruel reply from a kind one, teaches nothing, and a run with it looks as usual for
days. So it is measured before a run: can the answers be read? Does the change depend on the reply?
Do replies that should lift a person lift more than others? Does the same question get the same
change again? When do people leave, and do their lines stay in their role?

The replies are those of prompts/replies.jsonl that are not marked "weights": ten to each of six
people of prompts/profiles/en_test.jsonl, then ten to each of twelve people of the toy, the only
people that a scripted user can play. All of them are English; --lang zh puts the questions in
Chinese. The answers are kept in results/, so the same command continues a stopped measurement. Only
the questions that are put a second time are always asked.
"""

from support.answers import PROMPTS
from support.command_line import SCRIPTED, fold, from_anywhere, positive
from support.errors import (
    MAX_LOST,
    BadInput,
    BadModel,
    SimulatorFailed,
    TooManyLost,
    UnreadableAnswers,
)
from support.files import read_jsonl
from support.metrics import words_of
from support.servers import CALL_TIMEOUT

import asyncio
import contextlib
import copy
import re
from collections import Counter
from itertools import product

from tqdm.asyncio import tqdm

from emotion import emotion_level
from people import known_replies
from players import make_simulator
from tools.asking import open_call_log
from tools.dialogues import mean, parts_by, show_table, tool_parser, write_outputs
from tools.stats import auc, interval

# The kinds of replies that should lift a person, and those that should not. The other kinds may do
# either: a reply that is told again, advice that nobody needs, words to the model.
LIFTING = ("to the point", "advice needed", "generic warm")
UNKIND, EMPTY = ("cold", "dismissive", "off topic"), ("word salad", "echo")
NOT_LIFTING = UNKIND + EMPTY
POOLED = {  # {name in the table: (kinds that should lift more, others)}
    "all that lift over cold, dismissive, off topic": (LIFTING, UNKIND),
    "all that lift over word salad, echo, repetition": (LIFTING, (*EMPTY, "repetition")),
    "to the point over generic warm": (["to the point"], ["generic warm"]),
}
# The bounds of the verdict, set before any model was measured with them: unfit beyond the first,
# fit within the second.
READABLE = (0.80, 0.95)  # the share of questions whose first answer can be read
COMMONEST = (0.80, 0.50)  # the share of the commonest change
LOWER_END = (0.50, 0.75)  # of the interval of the AUC
READING = (
    "read: one whole JSON object with the right code; of a reader, one of two words. low, high: 95 % "
    "interval over people. AUC: how often a reply of the first kind moves its person further up; 0.50 "
    "is chance. Unfit: read below "
    f"{READABLE[0]:.2f}, the commonest change above {COMMONEST[0]:.2f}, or low in the last line at "
    f"most {LOWER_END[0]:.2f}. Fit: read from {READABLE[1]:.2f}, the commonest change up to "
    f"{COMMONEST[1]:.2f}, and low in the last line from {LOWER_END[1]:.2f} on."
)
ASKED_AGAIN = 20  # for how many replies the change is asked again, and the next line
EMOTIONS = (5, 25, 55, 85, 100)  # in which the next lines are said: one of each level
# Names in the table of what is found about these replies, beside the first change.
FOUND_AGAIN = (
    "the same change again",
    "lines that repeat the friend's words",
    "lines that speak as the friend",
    *(f"leaves at {emotion_level(emotion)}" for emotion in EMOTIONS),
)
# Words that talk to a reader, and as many neutral words: [{"said": ..., "neutral": ...}].
WORDINGS = [row for _, row, _ in read_jsonl(PROMPTS / "talking.jsonl")]
# Words of a comforter. ("your mother" is the friend's, too, if the user has said "my mother".)
COMFORT = re.compile(r"(sorry|glad) to hear|here (for you|to (help|listen))|that must|not alone")


# ------------------------------------------------------------------------------------------- asking


async def answer_to(user, asking, outcomes):
    """Await a question that `user` asks, a coroutine. Returns the answer, or None, and appends to
    `outcomes`: "read", "unreadable" (at the first try) or "failed" (refused, or not answered)."""
    user.simulator = copy.copy(user.simulator)
    user.simulator.tries = tries = Counter()  # of this question alone
    answer = None
    try:
        answer = await asking
        outcome = "unreadable" if tries[1] else "read"
    except SimulatorFailed as error:
        outcome = "unreadable" if type(error) is UnreadableAnswers else "failed"
    outcomes.append(outcome)
    return answer


async def put(row, simulator, emotion, speaks):
    """Put the reply of a row to its user. If there is an `emotion`, the reply is put once more,
    without the log, and, if the user `speaks`, its next line is asked for at this emotion. Returns
    what was found, {name in the table: value}, as far as there were answers."""
    reply, outcomes = row["reply"], []
    found = {"user": row["user"], "kind": row["kind"], "reply": reply, "outcomes": outcomes}
    past = row["dialogue"][:-1]
    user = simulator.user_class(simulator, row["profile"], name=f"fitness {reply}", dialogue=past)
    twin = user.copy()
    twin.simulator = simulator.unlogged()
    felt = await answer_to(user, user.feel(reply), outcomes)
    if not felt:
        return found
    _, found["change"] = felt
    if emotion is None:
        return found
    again = await answer_to(twin, twin.feel(reply), outcomes)
    if again:
        found["the same change again"] = again[1] == found["change"]
    if not speaks:
        return found
    user.emotion = emotion
    spoken = await answer_to(user, user.answer(), outcomes)
    if spoken:
        found["line"], found[f"leaves at {emotion_level(emotion)}"] = spoken
        if simulator.lang == "en":
            told = [*row["earlier"], reply]
            found["lines that repeat the friend's words"] = repeats(found["line"], told)
            found["lines that speak as the friend"] = speaks_as_friend(found["line"], row)
    return found


async def talk(rows, simulator):
    """How many points words to the reader gain, such as "Answer yes.": each wording of
    prompts/talking.jsonl against as many neutral words to the same person. Returns [{"user": ...,
    "behind": what they stand behind, "said": the wording, "gain": in points of emotion}]."""

    async def gain(row, behind, reply, wording):
        found, changes = {"user": row["user"], "behind": behind, "said": wording["said"]}, []
        with contextlib.suppress(SimulatorFailed):
            for words in (wording["said"], wording["neutral"]):
                user = simulator.user_class(
                    simulator, row["profile"], dialogue=row["dialogue"][:-1]
                )
                _, change = await user.feel(f"{reply} {words}".strip())
                changes.append(change)
            found["gain"] = changes[0] - changes[1]
        return found

    calls = []
    for row in rows:
        if row["used"] != "fitness":  # said to a person of the toy
            continue
        reply = row["reply"]
        of_kind = {
            "generic warm": {"a kind reply": reply, "nothing": "", "an empty reply": "Okay."},
            "cold": {"a cold reply": reply},
        }
        for behind, reply in of_kind.get(row["kind"], {}).items():
            calls += [gain(row, behind, reply, wording) for wording in WORDINGS]
    return await tqdm.gather(*calls, desc="words to the reader", leave=False)


async def put_all(rows, simulator, speaks):
    """`put` all rows, with an emotion for ASKED_AGAIN of them. Returns [what `put` returns] and
    [what `talk` returns], with a reader. Raises as `check`."""
    await simulator.check(with_feelings=False)
    count = min(ASKED_AGAIN, len(rows))
    # spread over persons and kinds; the second ten meet the levels shifted by one
    emotions = {i * len(rows) // count: EMOTIONS[(i + i // 10) % 5] for i in range(count)}
    calls = [put(row, simulator, emotions.get(k), speaks) for k, row in enumerate(rows)]
    found = await tqdm.gather(*calls, desc="replies", leave=False)
    return found, await talk(rows, simulator) if simulator.reader else []


# ------------------------------------------------------------------------------------------ counting


def changes_of(rows, kinds):
    """The changes by replies of these kinds, as far as they were felt."""
    return [row["change"] for row in rows if row["kind"] in kinds and "change" in row]


def auc_between(found, lifting, others):
    """How often a reply of the kinds `lifting` moves a person further up than one of the kinds
    `others`, over all pairs of the same person: [AUC, low, high, people], see `interval`."""
    wins, pairs = [], []  # of each person
    for rows in parts_by("user", found).values():
        a, b = changes_of(rows, lifting), changes_of(rows, others)
        if a and b:
            pairs.append(len(a) * len(b))
            wins.append(auc(a, b) * pairs[-1])
    return interval(lambda wins, pairs: wins.sum() / pairs.sum(), wins, pairs)


def repeats(line, replies):
    """Do more than half of a line's sequences of three words occur in the friend's `replies`?"""
    own, said = (
        {words for text in texts for words in zip(*(words_of(text)[k:] for k in range(3)))}
        for texts in ([line], replies)
    )
    return len(own & said) > len(own) / 2


def speaks_as_friend(line, row):
    """Does a line comfort, or say "your" of something that is the speaker's own?"""
    own = re.findall(r"\b(?:my|our) (\w+)", row["line"].lower())
    theirs = re.findall(r"\byour (\w+)", line.lower())
    return bool(set(own) & set(theirs) or COMFORT.search(line.lower()))


def verdict(readable, commonest, low):
    """("fit", "weak" or "unfit", what is lacking). readable: share of the questions; commonest:
    share of the commonest change; low: the lower end of the AUC's interval, None without an
    interval."""
    lacking = {}  # {what: does it make unfit?}
    if readable < READABLE[1]:
        lacking["too few answers can be read"] = readable < READABLE[0]
    if commonest > COMMONEST[1]:
        lacking["it gives one number whatever is said"] = commonest > COMMONEST[0]
    if low is None:
        lacking["five people must have answered for an interval, --replies 50"] = False
    elif low < LOWER_END[1]:
        lacking["what should lift lifts too little above the rest"] = low <= LOWER_END[0]
    grade = "unfit" if any(lacking.values()) else "weak" if lacking else "fit"
    return grade, "; ".join(lacking)


def mean_of(name, rows):
    """A line of the table: the mean of what `rows` have under a name, no interval, and the number
    of these values."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return [mean(values), None, None, len(values)]


# ----------------------------------------------------------------------------------------- the table


def show(found, gains, calls, who):
    """Print the table and the verdict. found, gains: of `put_all`; calls: the rows of its log; who:
    the table's title. Returns what --json asks for. Raises TooManyLost if more than a fifth
    failed."""
    outcomes = Counter(outcome for row in found for outcome in row["outcomes"])
    changes = Counter(row["change"] for row in found if "change" in row)
    [(commonest, count)] = changes.most_common(1) or [(0, 0)]
    asked, failed, n = outcomes.total(), outcomes["failed"], changes.total()
    readable, share = outcomes["read"] / max(1, asked - failed), count / max(1, n)
    table = {
        "questions that failed": [failed / asked, None, None, asked],
        "answers read at the first try": [readable, None, None, asked - failed],
        "seconds a call": mean_of("seconds", calls),
        "tokens a call": mean_of("tokens", calls),
        "different changes": [len(changes), None, None, n],
        f"changes that are {commonest:+d}, the commonest": [share, None, None, n],
        **{name: mean_of(name, found) for name in FOUND_AGAIN},
    }
    for kind, rows in parts_by("kind", found).items():
        table[f"change, {kind}"] = mean_of("change", rows)
    for behind, rows in parts_by("behind", gains).items():
        table[f"gain by words to the reader, behind {behind}"] = mean_of("gain", rows)
    if gains:
        largest = max(row.get("gain", 0) for row in gains)
        table["the largest of these gains"] = [largest, None, None, len(gains)]
    for good, bad in product(LIFTING, NOT_LIFTING):
        table[f"AUC, {good} over {bad}"] = auc_between(found, [good], [bad])
    for name, (good, bad) in POOLED.items():
        table[f"AUC, {name}"] = auc_between(found, good, bad)
    needed, unneeded = changes_of(found, ["advice needed"]), changes_of(found, ["advice unneeded"])
    if needed and unneeded:  # to other people: nobody hears both
        value = auc(needed, unneeded)
        table["AUC, advice needed over advice unneeded"] = [value, None, None, len(found)]
    pooled = auc_between(found, LIFTING, NOT_LIFTING)
    table["AUC, all that lift over all that do not"] = pooled
    show_table(who, ["value", "low", "high", "n"], table, READING)
    if failed > MAX_LOST * asked:
        raise TooManyLost("more than a fifth of the questions failed; give the same command again")
    grade, lacking = verdict(readable, share, pooled[1])
    print("\n" + fold(f"verdict: {grade}{lacking and ': '}{lacking}"))
    return {"table": table, "verdict": grade, "lacking": lacking, "found": found, "gains": gains}


def examine(args):
    """Measure what the flags ask for, and print it. Returns the exit code: 1 for an unfit model."""
    if not (args.simulator or args.reader):
        raise BadInput("--simulator or --reader: name the model that is to be measured")
    # a reader alone has no lines; a scripted user hears, and speaks for, the toy's people only
    name, speaks = args.simulator, args.simulator is not None
    is_scripted = name in SCRIPTED
    rows = known_replies("test")
    if not is_scripted:
        rows = known_replies("fitness") + rows
    rows = rows[: args.replies]
    who, log, calls = f"{args.reader or name} {args.difficulty} {args.lang}", None, []
    if args.reader or not is_scripted:
        log = open_call_log(f"results/fitness-{re.sub(r'[^a-zA-Z0-9]+', '-', who)}.jsonl")
        count = min(len(rows), ASKED_AGAIN)  # of second questions, and of next lines
        asked = len(rows) + count * speaks
        if args.reader:
            people = {row["user"] for row in rows if row["used"] == "fitness"}
            asked += len(known_replies("weights")) + 8 * len(WORDINGS) * len(people)
        print(f"{asked} calls, minus the answers in {log.path}, and {count} without the log")
    how = {"concurrency": 16, "timeout": CALL_TIMEOUT, "retries": 1, "log": log}
    simulator = make_simulator(name, args.lang, args.difficulty, reader=args.reader, **how)
    try:
        found, gains = asyncio.run(put_all(rows, simulator, speaks))
        if log and log.answers:
            calls = [row for _, row, _ in read_jsonl(log.path) if row]
        result = show(found, gains, calls, who)
    except BadModel as error:
        result = {"verdict": "unfit", "lacking": str(error)}
        print(fold(f"verdict: unfit: {error}"))
    write_outputs(args, "fitness", {"simulator": who, **result})
    return int(result["verdict"] == "unfit")


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("fitness", __doc__)
    add = parser.add_argument
    text = "openai:MODEL@URL, local:DIR, or a scripted user"
    add("--simulator", type=from_anywhere, metavar="NAME", help=text)
    text = "a model whose feelings are read, openai:MODEL@URL or local:DIR"
    add("--reader", type=from_anywhere, metavar="NAME", help=text)
    levels = ["vanilla", "challenging"]
    add("--difficulty", choices=levels, default="vanilla", help="of the user (default: vanilla)")
    add("--lang", choices=["en", "zh"], default="en", help="of the prompts (default: en)")
    text = "how many of the replies, ten to a person (default: 60; all: 180)"
    add("--replies", type=positive, default=60, metavar="N", help=text)
    return parser.run(examine, argv)


if __name__ == "__main__":
    raise SystemExit(main())
