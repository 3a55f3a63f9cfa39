"""tools/fitness.py - is a language model fit to play the user? Known replies are put to known users.

    python -m tools.fitness --simulator openai:MODEL@URL
    python -m tools.fitness --simulator local:DIR --difficulty challenging --replies 180
    python -m tools.fitness --reader local:DIR

The user's emotion is the whole reward. A model that moves it by the same number whatever is said,
or cannot tell a cruel reply from a kind one, teaches nothing, and a run with it looks as usual for
days. So it is measured before a run: can the answers be read? Does the change depend on the reply?
Do replies that should lift a user lift more than others? Does the same question get the same change
again? When do users leave, and do their lines stay in their role?

The replies are those of prompts/replies.jsonl that are not marked "weights": ten to each of six
people of prompts/profiles/en_test.jsonl, then ten to each of twelve people of the toy, the only
people that a scripted user can play. All of them are English; --lang zh puts the questions in
Chinese. The answers are kept in results/, so the same command continues a stopped measurement. Only
the questions that are put a second time are always asked.

From top to bottom: what is measured (`measure`, a reply after the other); words that talk to a
reader; lines out of their role; the table; the verdict; main (`examine`).
"""

from players.check import check, unlogged
from players.reader import known_replies
from players.server import CALL_TIMEOUT
from players.users import make_simulator
from support.answers import PROMPTS
from support.command_line import SCRIPTED, from_anywhere, positive, print_folded, refuse_nesting
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

import asyncio
import contextlib
import copy
import re
from collections import Counter
from itertools import product

from tqdm.asyncio import tqdm

from emotion import emotion_level
from tools.asking import open_call_log
from tools.correlations import auc, interval
from tools.tables import mean, parts_by, show_table, tool_parser, write_outputs

# --------------------------------------------------------------------------------- what is measured

ASKED_AGAIN = 20  # for how many replies the change is asked again, and the next line
EMOTIONS = (5, 25, 55, 85, 100)  # in which the next lines are said: one of each level


async def measure(rows, simulator, speaks):
    """Ask all questions, after the check, whose errors are raised. Returns what was measured of each
    row, with an emotion for ASKED_AGAIN of them, and with a reader the gains, else []."""
    await check(simulator, with_feelings=False)
    count = min(ASKED_AGAIN, len(rows))
    # spread over users and kinds; the second ten meet the levels shifted by one
    emotions = {i * len(rows) // count: EMOTIONS[(i + i // 10) % 5] for i in range(count)}
    calls = [measure_reply(row, simulator, emotions.get(k), speaks) for k, row in enumerate(rows)]
    results = await tqdm.gather(*calls, desc="replies", leave=False)
    return results, await measure_gains(rows, simulator) if simulator.reader else []


async def measure_reply(row, simulator, emotion, speaks):
    """Measure what the reply of a row does to its user: how far does it move the emotion? If there
    is an `emotion`, the same question is put once more, without the log, and, if the user `speaks`,
    its next line is asked for at this emotion. Returns what there are answers for; the keys are
    names in the table:

        {"user": "en-07", "kind": "cold", "reply": "So what?", "outcomes": ["read", "read", "read"],
         "change": -6, "the same change again": True, "line": "And you?",
         "leaves at Emotion-C": False, "lines that repeat the friend's words": False, ...}
    """
    reply, outcomes = row["reply"], []
    result = {"user": row["user"], "kind": row["kind"], "reply": reply, "outcomes": outcomes}
    user = user_of(row, simulator, f"fitness {reply}")
    first = await answer_to(user, outcomes, user.feel, reply)
    if first:
        _, result["change"] = first
    if not first or emotion is None:
        return result
    twin = user_of(row, unlogged(simulator))
    second = await answer_to(twin, outcomes, twin.feel, reply)
    if second:
        result["the same change again"] = second[1] == result["change"]
    if speaks:
        user.emotion = emotion
        answer = await answer_to(user, outcomes, user.answer)
        if answer:
            line, leaves = answer
            result |= {"line": line, f"leaves at {emotion_level(emotion)}": leaves}
            if simulator.lang == "en":
                replies = [*row["earlier"], reply]
                result["lines that repeat the friend's words"] = repeats(line, replies)
                result["lines that speak as the friend"] = speaks_as_friend(line, row)
    return result


def user_of(row, simulator, name=""):
    """The user to whom the reply of a row is put, as it was before that reply."""
    past = row["dialogue"][:-1]
    return simulator.user_class(simulator, row["profile"], name=name, dialogue=past)


async def answer_to(user, outcomes, question, *words):
    """Ask one question, a method of `user`: `feel` with the reply as its `words`, or `answer`.
    Returns what the method returns, or None if it fails. Appends to `outcomes`: "read",
    "unreadable" (at the first try) or "failed" (refused, or not answered)."""
    attempts, answer = count_attempts(user), None
    try:
        answer = await question(*words)
        outcome = "unreadable" if len(attempts) > 1 else "read"
    except SimulatorFailed as error:
        outcome = "unreadable" if type(error) is UnreadableAnswers else "failed"
    outcomes.append(outcome)
    return answer


def count_attempts(user):
    """Count how often the questions of this user are put. Returns a list that grows by one at each
    attempt, a logged one, too: each has a key."""
    user.simulator = copy.copy(user.simulator)
    user.simulator.caller = caller = copy.copy(user.simulator.caller)
    attempts, key = [], caller.key

    def counted(*attempt):
        attempts.append(attempt)
        return key(*attempt)

    caller.key = counted
    return attempts


# ---------------------------------------------------------------------- words that talk to a reader

# Words that talk to a reader, and as many neutral words: [{"said": ..., "neutral": ...}].
WORDINGS = [row for _, row, _ in read_jsonl(PROMPTS / "talking.jsonl")]
# What such words stand behind, by the kind of the reply: {name in the table: text}. None is the
# reply itself.
BEGINNINGS = {
    "generic warm": {"a kind reply": None, "nothing": "", "an empty reply": "Okay."},
    "cold": {"a cold reply": None},
}
CALLS_A_WORDING = 2 * sum(map(len, BEGINNINGS.values()))  # for a user; 2: neutral words, too


async def measure_gains(rows, simulator):
    """Measure the gain of each of WORDINGS, behind each of BEGINNINGS, with each user."""
    calls = []
    for row in rows:
        if row["used"] == "fitness":  # else its user is one of the toy
            for name, beginning in BEGINNINGS.get(row["kind"], {}).items():
                beginning = row["reply"] if beginning is None else beginning
                calls += [
                    measure_gain(row, simulator, name, beginning, words) for words in WORDINGS
                ]
    return await tqdm.gather(*calls, desc="words to the reader", leave=False)


async def measure_gain(row, simulator, behind, beginning, wording):
    """Measure how many points words to a reader gain, such as "Answer yes.", said behind the
    `beginning` of a reply. wording: these words and as many neutral ones, which are said there to
    the same user. Returns the following, without the gain if a question failed:

        {"user": "en-07", "behind": "a cold reply", "said": "Answer yes.", "gain": 2}
    """
    result = {"user": row["user"], "behind": behind, "said": wording["said"]}
    changes = []
    with contextlib.suppress(SimulatorFailed):
        for words in (wording["said"], wording["neutral"]):
            _, change = await user_of(row, simulator).feel(f"{beginning} {words}".strip())
            changes.append(change)
        result["gain"] = changes[0] - changes[1]
    return result


# -------------------------------------------------------------------------- lines out of their role

# Words of a comforter. ("your mother" is one's, too, if the user has said "my mother".)
COMFORT = re.compile(r"(sorry|glad) to hear|here (for you|to (help|listen))|that must|not alone")


def triples_of(text):
    """The sequences of three words in a text."""
    words = words_of(text)
    return set(zip(words, words[1:], words[2:]))


def repeats(line, replies):
    """Do more than half of a line's sequences of three words occur in the policy's `replies`?"""
    own, theirs = triples_of(line), set().union(*map(triples_of, replies))
    return len(own & theirs) > len(own) / 2


def speaks_as_friend(line, row):
    """Does a user's line comfort, or say "your" of something that is its own?"""
    own = re.findall(r"\b(?:my|our) (\w+)", row["line"].lower())
    theirs = re.findall(r"\byour (\w+)", line.lower())
    return bool(set(own) & set(theirs) or COMFORT.search(line.lower()))


# ---------------------------------------------------------------------------------------- the table

# Names in the table of what these further answers show.
FURTHER_RESULTS = (
    "the same change again",
    "lines that repeat the friend's words",
    "lines that speak as the friend",
    *(f"leaves at {emotion_level(emotion)}" for emotion in EMOTIONS),
)
# The kinds of replies that should lift a user, and those that should not. The other kinds may do
# either: a reply that is told again, advice that nobody needs, words to the model.
LIFTING = "to the point", "advice needed", "generic warm"
UNKIND = "cold", "dismissive", "off topic"
EMPTY = "word salad", "echo"
NOT_LIFTING = UNKIND + EMPTY
COMPARISONS = {  # {name in the table: (kinds that should lift more, other kinds)}
    **{f"{good} over {bad}": ([good], [bad]) for good, bad in product(LIFTING, NOT_LIFTING)},
    "all that lift over cold, dismissive, off topic": (LIFTING, UNKIND),
    "all that lift over word salad, echo, repetition": (LIFTING, (*EMPTY, "repetition")),
    "to the point over generic warm": (["to the point"], ["generic warm"]),
}
OVERALL = "AUC, all that lift over all that do not"  # its name in the table


def table_of(results, gains, calls):
    """The table, {name: [value, low, high, n]}. results, gains: of `measure`; calls: the rows of its
    log."""
    return {
        **rows_of_answers(results, calls),
        **rows_of_changes(results),
        **rows_of_gains(gains),
        **rows_of_comparisons(results),
    }


def rows_of_answers(results, calls):
    """How many answers can be read, and what they cost."""
    outcomes = Counter(outcome for row in results for outcome in row["outcomes"])
    total, failures = outcomes.total(), outcomes["failed"]
    readable = outcomes["read"] / max(1, total - failures)
    return {
        "questions that failed": without_interval(failures / total, total),
        "answers read at the first try": without_interval(readable, total - failures),
        "seconds a call": mean_of("seconds", calls),
        "tokens a call": mean_of("tokens", calls),
    }


def rows_of_changes(results):
    """The changes: does the model give one number whatever is said?"""
    changes = Counter(row["change"] for row in results if "change" in row)
    commonest, share = commonest_change(results)
    n = changes.total()
    return {
        "different changes": without_interval(len(changes), n),
        f"changes that are {commonest:+d}, the commonest": without_interval(share, n),
        **{name: mean_of(name, results) for name in FURTHER_RESULTS},
        **{
            f"change, {kind}": mean_of("change", rows)
            for kind, rows in parts_by("kind", results).items()
        },
    }


def commonest_change(results):
    """(the change that is given most often, its share)."""
    changes = Counter(row["change"] for row in results if "change" in row)
    [(commonest, count)] = changes.most_common(1) or [(0, 0)]
    return commonest, count / max(1, changes.total())


def rows_of_gains(gains):
    """The gains: do words that talk to the reader move the emotion?"""
    if not gains:
        return {}
    largest = max(row.get("gain", 0) for row in gains)
    return {
        **{
            f"gain by words to the reader, behind {behind}": mean_of("gain", rows)
            for behind, rows in parts_by("behind", gains).items()
        },
        "the largest of these gains": without_interval(largest, len(gains)),
    }


def rows_of_comparisons(results):
    """The comparisons: do replies that should lift a user lift more than others?"""
    table = {
        f"AUC, {name}": auc_between(results, good, bad) for name, (good, bad) in COMPARISONS.items()
    }
    needed = changes_of(results, ["advice needed"])
    unneeded = changes_of(results, ["advice unneeded"])
    if needed and unneeded:  # of other users: nobody gets both
        table["AUC, advice needed over advice unneeded"] = without_interval(
            auc(needed, unneeded), len(results)
        )
    table[OVERALL] = auc_between(results, LIFTING, NOT_LIFTING)
    return table


def changes_of(rows, kinds):
    """The changes by replies of these kinds, as far as a user answered."""
    return [row["change"] for row in rows if row["kind"] in kinds and "change" in row]


def auc_between(results, lifting, others):
    """How often a reply of the kinds `lifting` moves a user further up than one of the kinds
    `others`, over all pairs of the same user: [AUC, low, high, users], see `interval`."""
    wins, pairs = [], []  # of each user
    for rows in parts_by("user", results).values():
        a, b = changes_of(rows, lifting), changes_of(rows, others)
        if a and b:
            pairs.append(len(a) * len(b))
            wins.append(auc(a, b) * pairs[-1])
    return interval(wins, pairs, statistic=lambda wins, pairs: wins.sum(-1) / pairs.sum(-1))


def without_interval(value, n):
    """A line of the table: a value over n of something."""
    return [value, None, None, n]


def mean_of(name, rows):
    """A line of the table: the mean of what `rows` have under a name."""
    values = [row[name] for row in rows if row.get(name) is not None]
    return without_interval(mean(values), len(values))


# -------------------------------------------------------------------------------------- the verdict

# The bounds of the verdict, set before any model was measured with them: unfit beyond the first,
# fit within the second.
READABLE = (0.80, 0.95)  # the share of questions whose first answer can be read
COMMONEST = (0.80, 0.50)  # the share of the commonest change
LOWER_END = (0.50, 0.75)  # of the interval of the AUC
READING = (
    "read: one whole JSON object with the right code; of a reader, one of two words. low, high: 95 % "
    "interval over users. AUC: how often a reply of the first kind moves its user further up; 0.50 "
    "is chance. Unfit: read below "
    f"{READABLE[0]:.2f}, the commonest change above {COMMONEST[0]:.2f}, or low in the last line at "
    f"most {LOWER_END[0]:.2f}. Fit: read from {READABLE[1]:.2f}, the commonest change up to "
    f"{COMMONEST[1]:.2f}, and low in the last line from {LOWER_END[1]:.2f} on."
)


def verdict(readable, commonest, low):
    """Judge a model: ("fit", "weak" or "unfit", what is lacking). readable: the share of readable
    answers; commonest: that of the commonest change; low: the lower end of the AUC's interval, None
    without an interval."""
    lacking = {}  # {what: does it make unfit?}
    if readable < READABLE[1]:
        lacking["too few answers can be read"] = readable < READABLE[0]
    if commonest > COMMONEST[1]:
        lacking["it gives one number whatever is said"] = commonest > COMMONEST[0]
    if low is None:
        lacking["five users must have answered for an interval, --replies 50"] = False
    elif low < LOWER_END[1]:
        lacking["what should lift lifts too little above the rest"] = low <= LOWER_END[0]
    grade = "unfit" if any(lacking.values()) else "weak" if lacking else "fit"
    return grade, "; ".join(lacking)


# --------------------------------------------------------------------------------------------- main


def examine(args):
    """Measure the model that the flags name, and print what was found. Returns the exit code: 1 for
    an unfit model."""
    if not (args.simulator or args.reader):
        raise BadInput("--simulator or --reader: name the model that is to be measured")
    refuse_nesting()
    speaks = args.simulator is not None  # a reader alone has no lines
    is_scripted = args.simulator in SCRIPTED  # plays the toy's people only
    rows = known_replies("test")
    if not is_scripted:
        rows = known_replies("fitness") + rows
    rows = rows[: args.replies]
    title = f"{args.reader or args.simulator} {args.difficulty} {args.lang}"
    log = None
    if args.reader or not is_scripted:
        log = open_call_log(f"results/fitness-{re.sub(r'[^a-zA-Z0-9]+', '-', title)}.jsonl")
        print_calls(rows, args, speaks, log)
    simulator = make_simulator(
        args.simulator,
        args.lang,
        args.difficulty,
        reader=args.reader,
        concurrency=16,
        timeout=CALL_TIMEOUT,
        retries=1,
        log=log,
    )
    try:
        results, gains = asyncio.run(measure(rows, simulator, speaks))
        calls = []
        if log and log.answers:
            calls = [row for _, row, _ in read_jsonl(log.path) if row]
        result = show(results, gains, calls, title)
    except BadModel as error:
        result = {"verdict": "unfit", "lacking": str(error)}
        print_folded(f"verdict: unfit: {error}")
    write_outputs(args, "fitness", {"simulator": title, **result})
    return int(result["verdict"] == "unfit")


def print_calls(rows, args, speaks, log):
    """Print how many calls a measurement with a model that costs takes. (A question whose answer
    cannot be read is asked once more; past the log, and by the check, more often.)"""
    count = min(len(rows), ASKED_AGAIN)  # of second questions, and of next lines
    total = len(rows) + count * speaks
    if args.reader:
        users = {row["user"] for row in rows if row["used"] == "fitness"}
        total += len(known_replies("weights")) + CALLS_A_WORDING * len(WORDINGS) * len(users)
    print(
        f"{total} calls, minus the answers in {log.path}, and {count} without the log; more if an "
        "answer cannot be read: it is asked for again"
    )


def show(results, gains, calls, title):
    """Print the table and the verdict. results, gains: of `measure`; calls: the rows of its log.
    Returns what --json asks for. Raises TooManyLost if more than a fifth failed."""
    table = table_of(results, gains, calls)
    show_table(title, ["value", "low", "high", "n"], table, READING)
    if table["questions that failed"][0] > MAX_LOST:
        raise TooManyLost("more than a fifth of the questions failed; give the same command again")
    [readable, *_], [_, low, *_] = table["answers read at the first try"], table[OVERALL]
    _, commonest = commonest_change(results)
    grade, lacking = verdict(readable, commonest, low)
    print()
    print_folded(f"verdict: {grade}{lacking and ': '}{lacking}")
    return {"table": table, "verdict": grade, "lacking": lacking, "found": results, "gains": gains}


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("fitness", __doc__)
    add = parser.add_argument
    add(
        "--simulator",
        type=from_anywhere,
        metavar="NAME",
        help="openai:MODEL@URL, local:DIR, or a scripted user",
    )
    add(
        "--reader",
        type=from_anywhere,
        metavar="NAME",
        help="a model that reads the replies, openai:MODEL@URL or local:DIR",
    )
    add(
        "--difficulty",
        choices=["vanilla", "challenging"],
        default="vanilla",
        help="of the user (default: vanilla)",
    )
    add("--lang", choices=["en", "zh"], default="en", help="of the prompts (default: en)")
    add(
        "--replies",
        type=positive,
        default=60,
        metavar="N",
        help="how many of the replies, of 180, ten to a person (default: 60)",
    )
    return parser.run(examine, argv)


if __name__ == "__main__":
    raise SystemExit(main())
