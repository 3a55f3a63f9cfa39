"""judge.py - a curve that rises says that the reward rose. What changed, what did it earn, and does
the score mean anything? (RLVER 3.3-3.7 and appendices C-E; SAGE 3, 4.2)

    python judge.py capabilities FILE...      five dimensions, 1 to 5; two files: after minus before
    python judge.py strategies FILE...        24 codes: uses, gain, repetition; over a log's steps
    python judge.py coordinate FILE FILE...   all files placed in one call; and a counted place
    python judge.py acceptance FILE           how many replies lift the emotion; to other users, too
    python judge.py table3                    policies of either user, measured with either
    python judge.py needs FILE...             how clearly users show what they need
    python judge.py validity FILE...          questionnaires, other words, two simulators
    python judge.py blind A B --out SHEET     a sheet for people; blind --read SHEET... reads it

FILE is a result file, ours or SAGE's, or a run's dialogues.jsonl. A judge is one more prompt chain
(prompts/en/judge) over any model. docs/judging.md says what the numbers are not.
"""

from support import judged, raters, stats
from support.answers import before_end, unmarked_sections
from support.llm import CallLog, digest
from support.report import radar_of, write_report
from support.results import intention_of, recorded_dialogues
from support.rundir import profile_files, read_json, refuse_overwriting, write_json
from support.settings import BadInput, Parser, SimulatorFailed, split_name

import asyncio
import contextlib
import re
import sys
from functools import cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

import simulator
import toy
from simulator import CHECK, EMOTION_HEADERS, Simulator, as_json

simulator.PLACEHOLDERS.update(judged.PROMPTS)


# ------------------------------------------------------------------------------------- who is asked


def paid(name):
    """The log of calls in results/, read again: nothing is paid for twice."""
    path = Path("results") / f"{name}-calls.jsonl"
    path.parent.mkdir(exist_ok=True)
    return CallLog(path, path if path.exists() else None)


# What `Judge.check` asks about: something for every placeholder of every prompt.
EXAMPLE = {
    "dialogue": as_json(
        [
            {"speaker": "user", "text": "My bus was late again."},
            {"speaker": "assistant", "text": CHECK},
        ]
    ),
    "line": as_json("My bus was late again."),
    "reply": as_json(CHECK),
    "need": "You want to be listened to.",
    "thought": as_json(f"My friend said: {CHECK}"),
    "record": as_json([[f"My friend said: {CHECK}", "It does me good to be asked."]]),
    "outcome": "success",
    "reasons": as_json(["It asked."]),
}


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, answers in parts.
    An unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        model, log = toy.ScriptedJudge(), None
        if args.judge and not args.plan:
            if not re.match(r"openai:.+@https?://\S|local:.", args.judge):
                raise BadInput(f"--judge {args.judge}: openai:MODEL@URL or local:DIR is needed")
            model = simulator.make_simulator(
                args.judge, args.lang, timeout=300, flag="--judge", temperature=args.temperature
            ).model
            log = paid("judge")
        super().__init__(model, args.lang, "vanilla", args.retries, 0.4, 16, log)
        self.repeats, self.prompts = (
            args.repeats,
            {name: simulator.load_prompt(name, args.lang, "judge") for name in judged.PROMPTS},
        )
        self.names = dict(
            re.findall(r"^\(([A-G]-\d)\) ([^:：\n]+)", self.prompts["strategies"], re.M)
        )  # of the 24 codes

    def key(self, prompt, repeat, unreadable):
        """As a user's, but for the repeat: else three repeats at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, unreadable)

    async def check(self, name):
        """One question before anything is paid for, `name` about an example: can this judge keep
        the form? Raises SimulatorRefused, BadInput or TooManyLost, as a user's `check`."""
        read = lambda text, mark: (judged.read_answer(name, text, mark, self.names),)
        await self.pass_check(self.unlogged().ask(name, EXAMPLE, read, 0))

    async def put_cases(self, name, cases):
        """Put prompt `name` to the judge for each of `cases`, `repeats` times where answers have a
        mean. Returns one answer a question: its case, what the answer depends on, and under "found"
        what was read, None where nothing could be. Raises BadInput if that is all of a file."""
        repeats = 1 if name in judged.FORMS["once"] else self.repeats

        async def one(case, repeat):
            answer = {k: v for k, v in case.items() if k not in ("slots", "names")} | {
                "judge": self.model.name,
                "prompt": digest(self.prompts[name])[:8],
                "temperature": self.model.temperature,
                "repeat": repeat,
                "found": None,
            }
            with contextlib.suppress(SimulatorFailed):
                *_, answer["found"] = await self.ask(
                    name,
                    case["slots"],
                    lambda text, mark: (
                        judged.read_answer(name, text, mark, case.get("names", self.names)),
                    ),
                    repeat,
                )
            return answer

        answers = await together(
            one, [(case, repeat) for case in cases for repeat in range(repeats)], name
        )
        for path in {a["file"] for a in answers} - {a["file"] for a in answers if a["found"]}:
            raise BadInput(
                f"{path}: no answer of judge {self.model.name} to prompt {name!r} could "
                f"be read; {self.last_failure}"
            )
        return answers


async def together(work, jobs, title):
    """`work`, a coroutine function, for the arguments of each of `jobs`, side by side behind a
    progress bar. Returns the results. (Not coroutines: Ctrl-C would leave those that have not begun
    to complain that nobody awaited them.)"""
    with tqdm(total=len(jobs), desc=title, leave=False) as bar:

        async def one(arguments):
            found = await work(*arguments)
            bar.update()
            return found

        return await asyncio.gather(*map(one, jobs))


@cache
def read(path):
    """The dialogues of a file, as `recorded_dialogues` has them, with what a judge may see: replies
    without thoughts, none malformed. Also of each its "task", "intention", "final" emotion and
    "user", the simulator's name. Raises BadInput."""
    config, found = read_json(Path(path).parent / "config.json"), []
    names = profile_files(Path(path).parent, config.get("profiles"))
    people = {
        p.id: {
            "profile": p,
            "task": p.task,
            **dict(zip(("intention", "kind"), intention_of(p.task, p.need))),
        }
        for p in simulator.people_of(names)
    }
    for number, d in enumerate(recorded_dialogues(path), 1):
        if "task" not in d and d["profile_id"] not in people:
            raise BadInput(f"{path}: user {d['profile_id']!r} is not among the run's profiles")
        turns = [
            {**t, "reply": said.rpartition("</think>")[2].partition("<think>")[0].strip()}
            for t in d["turns"]
            for said in [t["reply"]]
            if t["emotion"] is not None or d.get("ended") != "malformed"
        ]
        kind, model, _ = split_name(
            d.get("made_by", {}).get("simulator")
            or d.get("simulator")
            or config.get("simulator", "?")
        )
        # a log has many dialogues of one profile
        found += [
            {
                "step": None,
                "split": "",
                "id": f"{d['profile_id']}, line {number}",
                **people.get(d["profile_id"], {}),
                **d,
                "turns": turns,
                "user": model or kind,
                "final": round(100 * d["reward"]),
            }
        ]
    if not any(d["turns"] for d in found):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return found


def sections_of(turn):
    """{name: text} of the analysis behind a turn's change. Files of SAGE and of earlier runs have
    no mark, so they are read without. Raises ValueError."""
    if turn.get("mark"):
        return simulator.parse_emotion(turn["analysis"], turn["mark"])[0]
    return unmarked_sections(turn["analysis"] or "", EMOTION_HEADERS)


def own_words(turn):
    """The analysis behind a turn's change, without what may stand behind its End."""
    return before_end(turn["analysis"], turn["mark"]) if turn.get("mark") else turn["analysis"]


def messages_of(d, turns=None):
    """[{"speaker", "text"}] of a dialogue; with `turns`, up to the user's line after so many."""
    said = [d["first_line"]] + [x for t in d["turns"][:turns] for x in (t["reply"], t["user"])]
    return [{"speaker": ("user", "assistant")[i % 2], "text": x} for i, x in enumerate(said) if x]


def questions(prompt, path):
    """What `prompt` asks about a file: [{"file", "id", "part" (of the dialogue), "replies" (of it),
    "final", "slots": what stands in the placeholders}]. Raises BadInput if that is nothing."""

    def slots_of(d):
        turns = d["turns"]
        if prompt in ("strategies", "paraphrase"):
            return [
                {
                    "dialogue": as_json(said := messages_of(d, i)),
                    "reply": as_json(t["reply"]),
                    "line": as_json(said[-1]["text"]),
                }
                for i, t in enumerate(turns)
            ]
        if prompt == "needs":
            return [
                {"need": d["task"], "thought": as_json(own_words(t)), "line": as_json(t["user"])}
                for t in turns
                if t["user"]
            ]
        if prompt == "blri":  # the user's own record of each round, as SAGE has it
            rounds = []
            for t in turns:
                with contextlib.suppress(ValueError):  # a record of other sections
                    felt = sections_of(t)
                    rounds.append([felt["Activity"], felt["Analyse"]])
            return [{"record": as_json(rounds)}] * bool(rounds)
        slots = {"dialogue": as_json(messages_of(d))}
        if prompt == "reasons":
            ends = "success" if d["final"] >= 100 else "failure" if d["final"] <= 10 else ""
            return [slots | {"outcome": ends, "kind": d["kind"]}] * bool(turns and ends)
        return [slots] * bool(turns)  # malformed at once: none

    found = [
        {
            "file": path,
            "id": d["id"],
            "part": part,
            "replies": len(d["turns"]),
            "final": d["final"],
            "slots": slots,
        }
        for d in read(path)
        for part, slots in enumerate(slots_of(d))
    ]
    if prompt == "reasons":  # of either outcome five, for either kind of need (SAGE)
        groups = {}
        for q in found:
            groups.setdefault((q["slots"]["outcome"], q["slots"]["kind"]), []).append(q)
        found = [q for group in groups.values() for q in group[:5]]
    if not found:
        raise BadInput(
            f"{path}: nothing in it that {prompt} could be asked about"
            + (": no dialogue ends at 100, or at 10 and below" * (prompt == "reasons"))
        )
    return found


# ---------------------------------------------------------------- commands: (args, answers, judge)

HOW = judged.FORMS["readings"]  # to read a table
TABLES = []  # of this command, for --html


def cell(value):
    """A value as a table has it."""
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def show(title, columns, rows, reading):
    """Print a table, {name: cells}, and how to read it."""
    TABLES.append(
        {
            "title": title,
            "columns": ["", *columns],
            "reading": reading,
            "rows": [[str(name), *map(cell, cells)] for name, cells in rows.items()],
        }
    )
    wide = max([len(str(name)) for name in rows], default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        print(
            f"{name!s:{wide}}"
            + "".join(f"  {cell(v):>{max(10, len(c))}}" for v, c in zip(cells, columns))
        )
    print(reading)


def whose(answers):
    """Whose answers these are, in words; two judges never stand in one table."""
    return (
        ", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
        + f", repeats {1 + answers[-1]['repeat']}. "
    )


async def questionnaires(args, answers, judge):
    """What is scored in each file; two files are also compared, dialogue by dialogue; and how far
    the score goes with the final emotion: within each file, and over three files or more."""
    result, columns, rows = {}, ["mean", "stderr", "spread", "missing", "n", "short"], {}
    other_words = answers.pop("paraphrase", None)
    for prompt, given in answers.items():
        tables = {
            path: judged.scale_table(
                [a for a in given if a["file"] == path], judged.FORMS[prompt].get("too_short", ())
            )
            for path in args.files
        }
        result[prompt] = {"answers": given, "tables": tables}
        finals, means = {(a["file"], a["id"]): a["final"] for a in given}, []
        for path, table in tables.items():
            show(
                f"{prompt}, {path}",
                columns,
                {item: [t[key] for key in columns] for item, t in table.items()},
                whose(given),
            )
            if "overall" in table:
                pairs = [(x, finals[path, i]) for i, x in table["overall"]["means"].items()]
                rows[f"{prompt}, {path}"] = stats.interval(stats.pearson, *np.transpose(pairs))
                means.append(np.mean(pairs, 0))
        if len(means) > 2:
            rows[f"{prompt}, over files"] = stats.interval(stats.pearson, *np.transpose(means))
        if len(tables) == 2:
            one, two = tables.values()
            result[prompt]["paired"] = {
                item: stats.interval(
                    np.mean,
                    [
                        two[item]["means"][i] - x
                        for i, x in t["means"].items()
                        if i in two[item]["means"]
                    ],
                )
                for item, t in one.items()
            }
            show(
                "after minus before: the second FILE minus the first, paired over dialogues",
                ["mean", "from", "to", "n"],
                result[prompt]["paired"],
                whose(given),
            )
    if "blri" in answers:
        show("correlation with the final emotion", ["r", "from", "to", "n"], rows, HOW["validity"])
    if other_words:
        result["paraphrase"] = await paraphrase(args, other_words)
    return result | {"correlations": rows}


def tagged(path, answers):
    """The dialogues of a file with the strategies of each reply, as support/judged.py wants them: a
    judge's `answers`, or, None, by the toy's grammar."""
    found = {(a["id"], a["part"]): a["found"] or {} for a in answers or () if a["file"] == path}
    codes = lambda d, i: (
        judged.toy_codes(d["turns"][i]["reply"], toy)
        if answers is None
        else found.get((d["id"], i), {}).get("codes")
    )
    return [
        {
            **{key: d[key] for key in ("id", "intention", "step", "split")},
            "replies": [[codes(d, i), t["change"]] for i, t in enumerate(d["turns"])],
        }
        for d in read(path)
    ]


async def strategies(args, answers, judge):
    """What was done, how often, and what it earned; by the judge, or by the toy's grammar."""
    given, result = answers.get("strategies"), {"answers": answers, "files": {}}
    for path in args.files:
        tags, found = tagged(path, given), [a["found"] for a in given or () if a["file"] == path]
        steps, told = (
            judged.steps_of(tags),
            judged.strategies_of(tags)
            | {"missing": found.count(None), "misnamed": sum(f["misnamed"] for f in found if f)},
        )
        result["files"][path] = told | {"steps": steps, "tagged": tags}
        show(
            f"strategies, {path}",
            ["uses", "gain", "n", "gain asked", "n asked"],
            {name: list(s.values()) for name, s in told["strategies"].items() if s["n"]},
            f"{whose(given) if given else 'Exact tags, by the grammar of the toy. '}missing "
            f"{told['missing']}, misnamed {told['misnamed']}, SSRR {cell(told['ssrr'])}."
            + HOW["strategies"],
        )
        for what in ("uses", "gain") if len(steps) > 1 else ():
            show(
                f"{what}, steps up to",
                list(judged.GROUPS),
                {
                    step: [told["strategies"][name][what] for name in judged.GROUPS]
                    for step, told in steps.items()
                },
                "",
            )
    return result


async def coordinate(args, answers, judge):
    """SAGE's social-cognition coordinate (4.2): reasons of success and failure, a character from
    them, the strategies; then one prompt places all files. Beside it two counted numbers."""
    models, rows, columns = [], {}, ["x", "spread", "y", "spread", "variety", "support"]
    for number, path in enumerate(args.files, 1):
        tags = tagged(path, answers.get("strategies"))
        used = [code for d in tags for codes, _ in d["replies"] for code in codes or ()]
        shares = [f"{c} {100 * used.count(c) / max(1, len(used)):.0f} %" for c in judged.CODES]
        reasons = as_json(
            [a["found"]["text"] for a in answers["reasons"] if a["file"] == path and a["found"]]
        )
        (answer,) = await judge.put_cases(
            "character", [{"file": path, "slots": {"reasons": reasons}}]
        )
        models.append(f"M{number}\n{as_json(answer['found']['text'])}\n{', '.join(shares)}")
        rows[path] = [judged.strategies_of(tags)[key] for key in ("variety", "support")]
    spots = [f"M{i} {axis}" for i in range(1, len(models) + 1) for axis in "XY"]
    # the lines of the form become part of the template: they bear the mark, as all headers do
    lines = "\n".join(f"{spot} {{{{mark}}}}: [-1 to 1]" for spot in spots)
    judge.prompts["place"] = judge.prompts["place"].replace("{{form}}", lines)
    given = await judge.put_cases(
        "place",
        [
            {
                "file": " ".join(args.files),
                "names": {spot.replace(" ", ""): spot for spot in spots},
                "slots": {"models": "\n\n".join(models)},
            }
        ],
    )
    points = [a["found"] for a in given if a["found"]]
    for number, path in enumerate(args.files, 1):
        x, y = ([p[f"M{number}{axis}"] for p in points] for axis in "XY")
        std = lambda z: float(np.std(z, ddof=1)) if z[1:] else None
        rows[path] = [float(np.mean(x)), std(x), float(np.mean(y)), std(y), *rows[path]]
    show(
        "coordinate",
        columns,
        rows,
        f"{whose(given)}{len(points)} of {len(given)} answers read." + HOW["coordinate"],
    )
    return {"placed": rows, "columns": columns, "answers": {**answers, "place": given}}


# ------------------------------------------------------------------ the same replies, to other ears


def scored(path):
    """[(dialogue, number of a turn, reply)] of the replies of a file that got an emotion."""
    replies = [
        (d, i, t["reply"])
        for d in read(path)
        for i, t in enumerate(d["turns"])
        if t["change"] is not None
    ]
    if not replies:
        raise BadInput(f"{path}: no reply in it got an emotion")
    return replies


async def acceptance(args, answers, judge):
    """How often a reply lifts the emotion, as recorded: as much the policy's doing as the user's
    (RLVER 3.4). With --difficulty also of users who all hear the same replies: {"all" or a group of
    strategies: [% accepted by each user, n]}. A group: where it is more than half of what a reply
    does."""
    recorded = [d["turns"][i]["change"] for path in args.files for d, i, _ in scored(path)]
    positive = 100 * sum(change > 0 for change in recorded) / len(recorded)
    print(f"{positive:.1f} % of {len(recorded)} replies lifted the emotion")
    result = {"positive": positive, "replies": len(recorded)}
    if not args.difficulty:
        return result
    path, rows, given = args.files[0], {}, answers.get("strategies")
    replies = scored(path)[: args.limit]
    changes = await heard(args, replies)
    tags = {d["id"]: [used for used, _ in d["replies"]] for d in tagged(path, given)}
    for name, codes in {"all": None, **judged.GROUPS}.items():
        shares = [
            [100.0 * (change > 0) for change in felt]
            for (d, i, _), felt in zip(replies, zip(*changes.values()))
            if None not in felt
            for used in [tags[d["id"]][i] or ()]
            if not codes or 2 * sum(code in codes for code in used) > len(used)
        ]
        rows |= {name: [*np.mean(shares, 0).tolist(), len(shares)]} if shares else {}
    missing = len(replies) - rows.get("all", [0])[-1]
    show(
        "accepted, % of the same replies",
        [*changes, "n"],
        rows,
        (whose(given) if given else "") + f"missing {missing}" + HOW["acceptance"],
    )
    return result | {"accepted": rows, "changes": changes, "missing": missing}


async def hear(user, d, turn, reply):
    """The change of a User who hears `reply` after the recorded dialogue before a turn, in the
    recorded emotion; None if it fails."""
    felt = [d["start"]] + [t["emotion"] for t in d["turns"][:turn] if t["emotion"] is not None]
    user.emotion, user.dialogue = (
        felt[-1],
        [
            {"speaker": "me" if m["speaker"] == "user" else "friend", "text": m["text"]}
            for m in messages_of(d, turn)
        ],
    )
    with contextlib.suppress(SimulatorFailed):
        return (await user.feel(reply))[1]


async def heard(args, replies):
    """What users of each difficulty feel who hear the same replies, each after its recorded past:
    {difficulty: [change, None where there is none]}. Raises BadInput if a user never answers."""
    file, user, changes = args.files[0], args.simulator or "toy", {}
    told = {"main_cha": "?", "cha_group": []}  # which a result file does not have
    people = {
        id: simulator.parse_profile({**told, **d["raw"]}, file) if "raw" in d else d["profile"]
        for id, d in {d["id"]: d for d, *_ in replies}.items()
    }
    simulator.refuse_foreign(user, people.values())
    log = None if user.startswith("toy") else paid("acceptance")
    for level in args.difficulty:
        one = simulator.make_simulator(user, args.lang, level, retries=args.retries, log=log)
        await one.check()
        changes[level] = await together(
            hear,
            [
                (simulator.User(one, people[d["id"]], name=f"{d['id']} {i}"), d, i, reply)
                for d, i, reply in replies
            ],
            level,
        )
        if changes[level].count(None) == len(replies):
            raise BadInput(
                f"{file}: no answer of the {level} user {user} could be read; {one.last_failure}"
            )
        del one  # a local model goes before the next one comes
    return changes


async def paraphrase(args, answers):
    """How far does the change of one user move when the same reply is put in other words?"""
    dialogues, sides = {d["id"]: d for d in read(args.files[0])}, []
    said = [(dialogues[a["id"]], a["part"], a["found"]["text"]) for a in answers if a["found"]]
    for replies in ([(d, i, d["turns"][i]["reply"]) for d, i, _ in said], said):
        sides.append(next(iter((await heard(args, replies)).values())))
    pairs = np.array([pair for pair in zip(*sides) if None not in pair], float).reshape(-1, 2)
    rows = {
        "moved": stats.interval(np.mean, abs(pairs[:, 0] - pairs[:, 1])),
        "same sign": stats.interval(np.mean, np.sign(pairs[:, 0]) == np.sign(pairs[:, 1])),
    }
    show(
        "the same reply in other words",
        ["mean", "from", "to", "n"],
        rows,
        whose(answers) + HOW["paraphrase"],
    )
    return rows


async def ranks(args, answers, judge):
    """The same policies under two simulators: are policies ranked alike, and their dialogues?"""
    sides, rows = {}, {}
    for path in args.files:
        first, *_ = read(path)
        name = first.get("made_by", {}).get("policy", Path(path).name)
        sides.setdefault(first["user"], {})[name] = {
            d["profile_id"]: d["final"] for d in read(path)
        }
        if first["split"]:
            raise BadInput(f"{path}: a run's log; ranks are of result files")
    common = sorted(set.intersection(*map(set, sides.values())))
    if len(sides) != 2 or not common:
        raise BadInput(
            f"{'; '.join(sides)}: files of one policy or more under two simulators are needed"
        )
    one, two = sides.values()
    if common[1:]:
        rows["over policies"] = stats.interval(
            stats.spearman,
            *([np.mean(list(side[name].values())) for name in common] for side in (one, two)),
        )
    for name in common:
        ids = sorted(set(one[name]) & set(two[name]))
        rows[name] = stats.interval(
            stats.spearman, *([side[name][i] for i in ids] for side in (one, two))
        )
    show(f"ranks, {' against '.join(sides)}", ["r", "from", "to", "n"], rows, HOW["ranks"])
    return {"ranks": rows}


async def table3(args, answers, judge):
    """RLVER's Table 3 on the toy: a policy trained with either user, measured with either."""
    out, levels, rows = Path(args.out or "runs/table3"), ("vanilla", "challenging"), {}
    for trained in levels:
        run, cells = out / trained, []
        go = (
            ["--resume", run]
            if (run / "config.json").exists()
            else ["--think", "--difficulty", trained, "--out", run]
        )
        steps = ["--steps", args.steps] * bool(args.steps)
        await python("rlver.py", *go, "--seed", args.seed, *steps)
        for measured in levels:
            file = f"{run}-{measured}.jsonl"
            await python(
                "evaluate.py",
                "--policy",
                run,
                "--difficulty",
                measured,
                "--out",
                file,
                "--limit",
                args.limit or 128,
            )
            cells += stats.interval(np.mean, [d["final"] for d in read(file)])[:3]
        rows[f"trained: {trained}"] = cells
    show("final emotion", [levels[0], "from", "to", levels[1], "from", "to"], rows, HOW["table3"])
    return {"table3": rows}


async def python(script, *flags):
    """Run another chapter, with the terminal. Raises BadInput if it does not end well."""
    done = await asyncio.create_subprocess_exec(
        sys.executable, Path(__file__).parent / script, *map(str, flags)
    )
    if await done.wait():
        raise BadInput(f"{script} stopped (above); when that is mended, the same command goes on")


async def blind(args, answers, judge):
    """A sheet of pairs for people who shall not know which is which; --read: what they say."""
    if args.read:
        files, rows = raters.read_sheets(args.read)
        show(
            f"{files[0]} against {files[1]}",
            ["wins", "from", "to", "pairs", "alpha", "p (Holm)"],
            rows,
            HOW["blind"],
        )
        return {"blind": rows}
    if len(args.files) != 2 or not args.out:
        raise BadInput("blind: two files and --out SHEET.csv are needed, or --read SHEET.csv...")
    one, two = ({d["profile_id"]: d for d in read(path)} for path in args.files)
    text = lambda d: "\n".join(f"{m['speaker'].upper()}: {m['text']}" for m in messages_of(d))
    told = lambda d: d["raw"] if "raw" in d else vars(d["profile"])
    pairs = [
        (
            i,
            "\n".join(told(one[i]).get(key, "") for key in ("player", "scene")),
            text(one[i]),
            text(two[i]),
        )
        for i in one
        if i in two
    ]
    return {"pairs": raters.write_sheet(args.out, args.files, pairs, args.seed, args.limit)}


# --------------------------------------------------------------------------------------------- main

# command: (who tells it, the prompts that are asked, files at least, flags that not all look at)
COMMANDS = {
    "capabilities": (questionnaires, ["capabilities"], 1, "judge plan"),
    "strategies": (strategies, ["strategies"], 1, "judge plan"),
    "coordinate": (coordinate, ["reasons", "strategies"], 2, "judge plan"),
    "acceptance": (acceptance, ["strategies"], 1, "counted difficulty judge limit plan simulator"),
    "table3": (table3, [], 0, "limit out steps"),
    "needs": (questionnaires, ["needs"], 1, "judge plan"),
    "validity": (
        questionnaires,
        ["blri", "utterance", "paraphrase"],
        1,
        "difficulty judge limit paraphrase plan simulator",
    ),
    "blind": (blind, [], 0, "limit out read"),
}


async def run(args):
    """The one command. Returns the exit code; raises RunError."""
    args.files, command = list(dict.fromkeys(args.files)), args.command
    refuse_overwriting(
        {
            "--json": args.json,
            "--html": args.html,
            "--out": None if command == "table3" else args.out,
        },
        [*args.files, *(args.read or ())],
    )
    TABLES.clear()
    tell, asks, least, flags = COMMANDS[command]
    for flag in sorted({flag for *_, own in COMMANDS.values() for flag in own.split()}):
        if getattr(args, flag) and flag not in flags.split():
            raise BadInput(f"--{flag} is not for {command}")
    if len(args.files) < least or args.files and (command == "table3" or args.read):
        raise BadInput(f"{command}: {f'{least} FILE or more' if least else 'no FILE'} wanted")
    users = {read(path)[0]["user"] for path in args.files}
    of_toy = all(user.startswith("toy") for user in users)
    if command == "validity" and len(users) > 1:
        tell, asks = ranks, []
    if args.simulator or args.paraphrase:  # who shall hear the replies
        args.difficulty = args.difficulty or ["vanilla", "challenging"][: 1 + (not args.paraphrase)]
    wanted = {
        "paraphrase": args.paraphrase,
        "strategies": (
            args.judge and args.difficulty if command == "acceptance" else args.judge or not of_toy
        ),
    }
    asks = [name for name in asks if wanted.get(name, True)]  # the toy's grammar tells itself
    args.repeats = args.repeats or (3 if command == "coordinate" else 1)
    if args.difficulty and (
        args.counted
        or (
            args.files[1:]
            if command == "acceptance"
            else not args.paraphrase or args.difficulty[1:] or tell is ranks
        )
    ):
        raise BadInput(
            "--difficulty and --simulator are for acceptance, of one FILE and without "
            "--counted, and for validity --paraphrase, with one difficulty and one user"
        )
    if args.judge and not asks or args.limit and least and not args.difficulty:
        raise BadInput(f"{command}: nobody is asked or hears what --judge or --limit could be for")
    lacks = (
        "simulator"
        if args.difficulty and not args.simulator
        else "judge"
        if asks and not args.judge
        else ""
    )
    if lacks and not (of_toy or args.plan):
        raise BadInput(
            f"--{lacks} is needed, openai:MODEL@URL or local:DIR: what is scripted "
            "understands the toy's files alone"
        )
    cases = {name: [q for path in args.files for q in questions(name, path)] for name in asks}
    if "paraphrase" in cases:  # of the first file, as many as are wanted
        cases["paraphrase"] = questions("paraphrase", args.files[0])[: args.limit]
    if command == "acceptance" and asks:  # what users do not hear needs no tags
        heard_of = {(d["id"], i) for d, i, _ in scored(args.files[0])[: args.limit]}
        cases["strategies"] = [q for q in cases["strategies"] if (q["id"], q["part"]) in heard_of]
    judge = Judge(args)
    if args.plan:
        sizes = [
            len(simulator.fill(judge.prompts[name], {**q["slots"], "mark": "", "form": ""}))
            for name in asks
            for q in cases[name] * (1 if name in judged.FORMS["once"] else args.repeats)
        ]
        calls = len(sizes) + (len(args.files) + args.repeats) * (command == "coordinate")
        told = (
            2 * len(cases["paraphrase"])
            if args.paraphrase
            else len(args.difficulty)
            and len(scored(args.files[0])[: args.limit]) * len(args.difficulty)
        )
        print(
            f"{calls:,} calls to the judge, about {sum(sizes) // 4:,} tokens to it and "
            f"{300 * calls:,} from it, but for what is asked again (estimate); {told:,} calls to "
            "users"
        )
        return 0
    if asks:
        await judge.check(asks[0])
    answers = {name: await judge.put_cases(name, cases[name]) for name in asks}
    result = await tell(args, answers, judge)
    if args.json:
        write_json(args.json, {"command": command, **result})
    if args.html:
        write_report(
            args.html,
            title=f"judge.py {command}",
            settings={},
            curves=[],
            evaluations=[],
            dialogues=[],
            tables=TABLES,
            radar=radar_of(result),
        )
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = Parser(prog="judge.py", description="What was learned? What is the score worth?")
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="result files, ours or SAGE's, or a run's dialogues.jsonl",
    )
    return parser.flags("judge").run(lambda args: asyncio.run(run(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
