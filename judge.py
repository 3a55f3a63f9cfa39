"""judge.py - a curve that rises says that the reward rose. What changed, what did it earn, and does
the score mean anything? (RLVER 3.3-3.6 and appendices C-E; SAGE 3, 4.2)

    python judge.py capabilities FILE...    five dimensions, 1 to 5; two files: paired
    python judge.py needs FILE...           how clearly users show what they need
    python judge.py validity FILE...        two questionnaires against the final emotion
    python judge.py strategies FILE...      24 codes: uses, gain, repetition; over a log's steps
    python judge.py acceptance FILE         how many replies lift the emotion; to other users, too

FILE is a result file, ours or SAGE's, or a run's dialogues.jsonl. A judge is one more prompt chain
(prompts/en/judge) over any model. docs/judging.md says what the numbers are not.
"""
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
from simulator import EMOTION_SECTIONS, Simulator, as_json
from support import judged
from support.llm import CallLog, digest
from support.results import intention_of, recorded_dialogues
from support.rundir import read_json, write_json
from support.settings import BadInput, Parser, SimulatorFailed, natural, not_negative, positive

simulator.PLACEHOLDERS.update(judged.PROMPTS)


# ------------------------------------------------------------------------------------- who is asked

def paid(name):
    """The log of calls in results/, read again: nothing is paid for twice."""
    path = Path("results") / f"{name}-calls.jsonl"
    path.parent.mkdir(exist_ok=True)
    return CallLog(path, path if path.exists() else None)


class Judge(Simulator):
    """A judge, asked as the simulated user is: bounded retries, a log of calls, answers in parts.
    An unreadable answer is asked again, and then missing and counted."""

    def __init__(self, args):
        model, log = toy.ScriptedJudge(), None
        if args.judge and not args.plan:
            if not re.match(r"openai:.+@https?://\S|local:.", args.judge):
                raise BadInput(f"--judge {args.judge}: openai:MODEL@URL or local:DIR is needed")
            model = simulator.make_simulator(args.judge, args.lang, timeout=300,
                                             temperature=args.temperature).model
            log = paid("judge")
        super().__init__(model, args.lang, "vanilla", args.retries, 0.4, 16, log)
        self.repeats, self.prompts = args.repeats, {
            name: simulator.load_prompt(name, args.lang, "judge") for name in judged.PROMPTS}

    def key(self, prompt, repeat, answered):
        """As a user's, but for the repeat: else three repeats at temperature 0 would be one."""
        return digest(self.model.name, self.model.temperature, prompt, repeat, answered)

    async def put(self, name, cases):
        """Put prompt `name` to the judge for each of `cases`, `repeats` times. Returns one answer a
        question: its case, what the answer depends on, and under "found" what was read, None where
        nothing could be. Raises BadInput if that is all of a file."""
        async def one(case, repeat):
            answer = {k: v for k, v in case.items() if k != "slots"} | {
                "judge": self.model.name, "prompt": digest(self.prompts[name])[:8],
                "temperature": self.model.temperature, "repeat": repeat, "found": None}
            with contextlib.suppress(SimulatorFailed):
                _, answer["found"] = await self.ask(name, case["slots"], lambda text: (
                    judged.read_answer(name, text),), repeat)
            bar.update()
            return answer
        with tqdm(total=len(cases) * self.repeats, desc=name, leave=False) as bar:
            answers = await asyncio.gather(*[one(case, repeat) for case in cases
                                             for repeat in range(self.repeats)])
        for path in {a["file"] for a in answers} - {a["file"] for a in answers if a["found"]}:
            raise BadInput(f"{path}: no answer of judge {self.model.name} to prompt {name!r} could "
                           f"be read; {self.last_failure}")
        return answers


@cache
def read(path):
    """The dialogues of a file, as `recorded_dialogues` has them, with what a judge may see: replies
    without thoughts, none malformed. Also of each its "task", "intention", "final" emotion and
    "user", the simulator. Raises BadInput."""
    config, found = read_json(Path(path).parent / "config.json"), []
    people = {p.id: {"profile": p, "task": p.task, "intention": intention_of(p.task, p.need)[0]}
              for p in simulator.people_of(config.get("profiles") or ())}
    for number, d in enumerate(recorded_dialogues(path), 1):
        if "task" not in d and d["profile_id"] not in people:
            raise BadInput(f"{path}: user {d['profile_id']!r} is not among the run's profiles")
        turns = [{**t, "reply": said.rpartition("</think>")[2].partition("<think>")[0].strip()}
                 for t in d["turns"] for said in [t["reply"]]
                 if t["emotion"] is not None or d.get("ended") != "malformed"]
        # a log has many dialogues of one profile
        found += [{"user": f"simulator {config.get('simulator', '?')}", "step": None, "split": "",
                   "id": f"{d['profile_id']}, line {number}", **people.get(d["profile_id"], {}),
                   **d, "turns": turns, "final": round(100 * d["reward"])}]
    if not any(d["turns"] for d in found):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return found


def messages_of(d, turns=None):
    """[{"speaker", "text"}] of a dialogue; with `turns`, up to the user's line after so many."""
    said = [d["first_line"]] + [x for t in d["turns"][:turns] for x in (t["reply"], t["user"])]
    return [{"speaker": ("user", "assistant")[i % 2], "text": x} for i, x in enumerate(said) if x]


def questions(prompt, path):
    """What `prompt` asks about a file: [{"file", "id", "part" (of the dialogue), "replies" (of it),
    "final", "slots": what stands in the placeholders}]. Raises BadInput if that is nothing."""
    def slots_of(d):
        turns = d["turns"]
        if prompt == "strategies":
            return [{"dialogue": as_json(said := messages_of(d, i)), "reply": as_json(t["reply"]),
                     "line": as_json(said[-1]["text"])} for i, t in enumerate(turns)]
        if prompt == "needs":
            return [{"need": d["task"], "thought": as_json(t["analysis"]),
                     "line": as_json(t["user"])} for t in turns if t["user"]]
        if prompt == "blri":        # the user's own record of each round, as SAGE has it
            rounds = []
            for t in turns:
                with contextlib.suppress(ValueError):       # a record of other sections
                    felt = simulator.parse_sections(t["analysis"] or "", EMOTION_SECTIONS)
                    rounds.append([felt["Activity"], felt["Analyse"]])
            return [{"record": as_json(rounds)}] * bool(rounds)
        return [{"dialogue": as_json(messages_of(d))}] * bool(turns)     # malformed at once: none
    found = [{"file": path, "id": d["id"], "part": part, "replies": len(d["turns"]),
              "final": d["final"], "slots": slots}
             for d in read(path) for part, slots in enumerate(slots_of(d))]
    if not found:
        raise BadInput(f"{path}: nothing in it that {prompt} could be asked about")
    return found


# ----------------------------------------------------------------------- commands: (args, answers)

def show(title, columns, rows, reading):
    """Print a table, {name: cells}, and how to read it."""
    cell = lambda v: "-" if v is None else f"{v:.2f}" if isinstance(v, float) else str(v)
    wide = max([len(str(name)) for name in rows], default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        print(f"{name!s:{wide}}" + "".join(f"  {cell(v):>{max(10, len(c))}}"
                                           for v, c in zip(cells, columns)))
    print(reading)


def whose(answers):
    """Whose answers these are, in words; two judges never stand in one table."""
    return (", ".join(f"{key} {answers[0][key]}" for key in ("judge", "prompt", "temperature"))
            + f", repeats {1 + answers[-1]['repeat']}. ")


def questionnaires(args, answers):
    """What is scored in each file; two files are also compared, dialogue by dialogue; and how far
    the score goes with the final emotion."""
    result, columns, rows = {}, ["mean", "stderr", "spread", "missing", "n", "short"], {}
    for prompt, given in answers.items():
        tables = {path: judged.scale_table([a for a in given if a["file"] == path],
                                           judged.FORMS[prompt].get("too_short", ()))
                  for path in args.files}
        result[prompt] = {"answers": given, "tables": tables}
        finals = {(a["file"], a["id"]): a["final"] for a in given}
        for path, table in tables.items():
            show(f"{prompt}, {path}", columns, {item: [t[key] for key in columns]
                                                for item, t in table.items()}, whose(given))
            if "overall" in table:
                pairs = [(x, finals[path, i]) for i, x in table["overall"]["means"].items()]
                rows[f"{prompt}, {path}"] = judged.interval(
                    lambda x, y: np.corrcoef(x, y)[0, 1], *np.transpose(pairs))
        if len(tables) == 2:
            one, two = tables.values()
            result[prompt]["paired"] = {item: judged.interval(np.mean, [
                x - two[item]["means"][i] for i, x in t["means"].items() if i in two[item]["means"]
                ]) for item, t in one.items()}
            show("first minus second, paired over dialogues", ["mean", "from", "to", "n"],
                 result[prompt]["paired"], whose(given))
    if "blri" in answers:
        show("correlation with the final emotion", ["r", "from", "to", "n"], rows, "BLRI reads the "
             "analysis that made the emotion: its high correlation is nearly built in")
    return result | {"correlations": rows}


def strategies(args, answers):
    """What was done, how often, and what it earned; by the judge, or by the toy's grammar."""
    given, result = answers.get("strategies"), {"answers": answers, "files": {}}
    for path in args.files:
        found = {(a["id"], a["part"]): a["found"] for a in given or () if a["file"] == path}
        tags = [{**{key: d[key] for key in ("id", "intention", "step", "split")}, "replies": [
            [(found[d["id"], i] or {"codes": None})["codes"] if given
             else judged.toy_codes(t["reply"], toy), t["change"]]
            for i, t in enumerate(d["turns"])]} for d in read(path)]
        trained = [d for d in tags if d["split"] == "train"]
        steps = {step: judged.strategies_of([d for d in trained if d["step"] == step])
                 for step in sorted({d["step"] for d in trained})}
        told = judged.strategies_of(tags) | {"missing": list(found.values()).count(None)}
        result["files"][path] = told | {"steps": steps, "tagged": tags}
        show(f"strategies, {path}", ["uses", "gain", "n", "gain asked", "n asked"],
             {name: list(s.values()) for name, s in told["strategies"].items() if s["n"]},
             f"{whose(given) if given else 'Exact tags, by the grammar of the toy. '}"
             f"missing {told['missing']}, SSRR {told['ssrr'] or 0:.2f}.\nuses: replies per dialogue"
             "; gain: mean change of the emotion over n replies: what goes with it, not what\nit "
             "causes; asked: where the need asks for it")
        for what in ("uses", "gain") if len(steps) > 1 else ():
            show(f"{what} by training step", list(judged.GROUPS), {
                step: [steps[step]["strategies"][name][what] for name in judged.GROUPS]
                for step in list(steps)[::-max(1, len(steps) // 8)][::-1]}, "")
    return result


def scored(path):
    """[(dialogue, number of a turn)] of the replies of a file that got an emotion."""
    replies = [(d, i) for d in read(path) for i, t in enumerate(d["turns"])
               if t["change"] is not None]
    if not replies:
        raise BadInput(f"{path}: no reply in it got an emotion")
    return replies


def acceptance(args, answers):
    """How often a reply lifts the emotion, as recorded: as much the policy's doing as the user's
    (RLVER 3.4)."""
    changes = [d["turns"][i]["change"] for path in args.files for d, i in scored(path)]
    positive = 100 * sum(change > 0 for change in changes) / len(changes)
    print(f"{positive:.1f} % of {len(changes)} replies lifted the emotion")
    return {"positive": positive, "replies": len(changes)}


async def hear(user, d, turn):
    """The change of a User who hears the reply of one turn after the recorded dialogue before it,
    in the recorded emotion; None if it fails."""
    felt = [d["start"]] + [t["emotion"] for t in d["turns"][:turn] if t["emotion"] is not None]
    user.emotion, user.dialogue = felt[-1], [
        {"speaker": "me" if m["speaker"] == "user" else "friend", "text": m["text"]}
        for m in messages_of(d, turn)]
    with contextlib.suppress(SimulatorFailed):
        return (await user.feel(d["turns"][turn]["reply"]))[1]


async def heard(args, replies):
    """When users of each difficulty hear the same replies, each after its recorded past: {"all" or
    a group of strategies: [% accepted by each user, n]}. A group: where it is more than half of
    what a reply does. Raises BadInput if a user never answers."""
    file, user, rows, changes = args.files[0], args.simulator or "toy", {}, {}
    people = {id: simulator.parse_profile({"main_cha": "?", "cha_group": [], **d["raw"]}, file)
              if "raw" in d else d["profile"] for id, d in {d["id"]: d for d, _ in replies}.items()}
    simulator.refuse_foreign(user, people.values())
    log = None if user.startswith("toy") else paid("acceptance")
    for level in args.difficulty:
        one = simulator.make_simulator(user, args.lang, level, retries=args.retries, log=log)
        changes[level] = await asyncio.gather(*[
            hear(simulator.User(one, people[d["id"]], name=f"{d['id']} {i}"), d, i)
            for d, i in replies])
        if changes[level].count(None) == len(replies):
            raise BadInput(f"{file}: no answer of the {level} user {user} could be read; "
                           f"{one.last_failure}")
        del one                 # a local model goes before the next one comes
    tags = [judged.toy_codes(d["turns"][i]["reply"], toy) for d, i in replies]
    for name, codes in {"all": None, **judged.GROUPS}.items():
        shares = [[100.0 * (change > 0) for change in felt]
                  for used, felt in zip(tags, zip(*changes.values())) if None not in felt and (
                      not codes or 2 * sum(code in codes for code in used) > len(used))]
        rows |= {name: [*np.mean(shares, 0).tolist(), len(shares)]} if shares else {}
    missing = len(replies) - rows.get("all", [0])[-1]
    show("accepted, % of the same replies", [*changes, "n"], rows, f"missing {missing}; a group: "
         "where it is more than half of what a reply does; told of the toy's replies alone")
    return {"accepted": rows, "changes": changes, "missing": missing}


async def run(args):
    """The one command. Returns the exit code; raises RunError."""
    args.files = list(dict.fromkeys(args.files))
    args.repeats = 1 if args.command == "strategies" else args.repeats      # a tag has no mean
    of_toy = all(read(path)[0]["user"].startswith("simulator toy") for path in args.files)
    asks = {"validity": ["blri", "utterance"], "acceptance": []}.get(args.command, [args.command])
    if of_toy and not args.judge:
        asks = [name for name in asks if name != "strategies"]      # the toy's grammar tells
    if args.difficulty and (args.counted or args.command != "acceptance" or args.files[1:]):
        raise BadInput("--difficulty is for acceptance, of one FILE, and not for --counted")
    lacks = ("simulator" if args.difficulty and not args.simulator else
             "judge" if asks and not args.judge else "")
    if lacks and not (of_toy or args.plan):
        raise BadInput(f"--{lacks} is needed, openai:MODEL@URL or local:DIR: what is scripted "
                       "understands the toy's files alone")
    cases = {name: [q for path in args.files for q in questions(name, path)] for name in asks}
    judge = Judge(args)
    again = scored(args.files[0])[:args.limit] if args.difficulty else []
    if args.plan:
        sizes = [len(simulator.fill(judge.prompts[name], q["slots"]))
                 for name in asks for q in cases[name]] * args.repeats
        print(f"{len(sizes):,} calls to the judge, about {sum(sizes) // 4:,} tokens to it and "
              f"{300 * len(sizes):,} from it, but for what is asked again (estimate); "
              f"{len(again) * len(args.difficulty):,} calls to users")
        return 0
    tell = {"strategies": strategies, "acceptance": acceptance}.get(args.command, questionnaires)
    result = tell(args, {name: await judge.put(name, cases[name]) for name in asks})
    if again:
        result |= await heard(args, again)
    if args.json:
        write_json(args.json, {"command": args.command, **result})
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = Parser(prog="judge.py", description="Ask a judge what a policy learned and "
                    "what its score is worth.")
    parser.add_argument("command", choices=["capabilities", "needs", "validity", "strategies",
                                            "acceptance"])
    parser.add_argument("files", nargs="+", metavar="FILE",
                        help="result files, ours or SAGE's, or a run's dialogues.jsonl")
    parser.flags(
        judge="openai:MODEL@URL or local:DIR (the toy's files need none)",
        repeats=("how often all is asked", {"type": positive, "default": 1}),
        temperature=("of the judge", {"type": not_negative, "default": 0.0}),
        retries=("of one question", {"type": natural, "default": 4}),
        lang=("of the prompts", {"choices": ["en", "zh"], "default": "en"}),
        plan=("tell the calls and tokens, ask nobody", {"action": "store_true"}),
        json=("write everything here", {"metavar": "FILE"}),
        counted=("acceptance: as recorded alone, the default", {"action": "store_true"}),
        difficulty=("acceptance: of users who all hear the same replies, vanilla challenging",
                    {"nargs": "+", "choices": ["vanilla", "challenging"], "default": []}),
        simulator=("acceptance: their model, as in rlver.py (the toy's files need none)", {}),
        limit=("acceptance: only so many replies", {"type": positive}))
    return parser.run(lambda args: asyncio.run(run(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
