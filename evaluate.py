"""evaluate.py - how good is this model, is it better than that one, why, and may the user that says
so be trusted? (SAGE; RLVER 3)

    python evaluate.py                                      the newest run against the users that it
                                                            never saw
    python evaluate.py --policy P --simulator S --profiles FILE
    python evaluate.py --score FILE...                      tables of result files, ours or SAGE's
                                                            released ones; no model needed
    python evaluate.py --compare A B                        paired on the users that both met
    python evaluate.py --consistency FILE                   replay recorded dialogues: do they get
                                                            the same scores again?
    python evaluate.py --chat RUN                           talk to the model yourself

The Sentient Benchmark starts at emotion 40, has up to 10 replies, and stops at 100 or below 10.
Numbers compare only within one simulator: with another model behind the same users, SAGE saw the
same dialogues shift by 20 points (SAGE appendix B).
"""
import asyncio
import glob
import json
import os
import re
import sys
from pathlib import Path

import numpy as np

from simulator import (User, load_profiles, load_prompt, make_simulator, move_emotion,
                       parse_emotion, refuse_foreign, replay, toy_profiles)
from support.llm import ServerModel, ask_with_retries
from support.report import report_of_results
from support.results import comparison_key, describe, read_results, recorded_dialogues
from support.rundir import checkpoints, read_json, write_json
from support.settings import BadInput, Parser, RunError, SimulatorFailed, number, split_name
from support.signs import INITIAL_EMOTION, emotion_level, score_summary, signs

# the floor: the highest emotion that ends a dialogue
BENCHMARK = dict(start=INITIAL_EMOTION["benchmark"], max_turns=10, floor=9)

# ----------------------------------------------------------------------------- the benchmark itself

def open_policy(name, think, lang, max_tokens, context):
    """Whoever is to be measured. Returns (description, make_agent(seed)). name: a run directory, a
    model directory or name, or openai:MODEL@URL. Raises BadInput or BadModel."""
    from engine import TorchEngine
    from policy import Agent, ChatFormat, best_device, load_model
    kind, model, url = split_name(name)
    if kind == "openai":
        if not model or not url.startswith("http"):
            raise BadInput(f"--policy {name}: openai:MODEL@URL is needed")
        server = ServerModel(model, url, temperature=1.0, max_tokens=max_tokens or 2048)
        system = load_prompt("policy_think" if think else "policy_direct", lang)
        return {"policy": f"openai:{model}",
                "think": think}, lambda seed: ServerAgent(server, system, think)
    config = read_json(Path(name) / "config.json")
    # a model directory has a config.json too
    run, found = (config, checkpoints(name)) if "algo" in config else ({}, [])
    if run:
        if (not found
                or not json.loads((found[-1] / "state.json").read_text(encoding="utf-8"))["step"]):
            raise BadInput(f"--policy {name}: this run never finished a step; there is nothing to "
                           "be measured but where it started")
        think, lang = run["think"], run["lang"]
    model, tokenizer = load_model(found[-1] if found else name, best_device(), flag="--policy")
    prompt = "policy_think" if think else "policy_direct"
    system = "" if run.get("model") == "toy" else load_prompt(prompt, lang)
    chat = ChatFormat(tokenizer, system)
    temperature = run.get("temperature", 1.0)
    engine = TorchEngine(model, chat.stop_id, temperature)
    limits = dict(max_tokens=max_tokens or run.get("max_tokens", 2048),
                  context=context or run.get("context") or model.config.max_position_embeddings)
    return ({"policy": str(name) + (f"/{found[-1].name}" if found else ""), "think": think},
            lambda seed: Agent(engine, chat, think=think, seed=seed, **limits))


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it answers, but shows no tokens. Fit for
    measuring, not for training."""

    def __init__(self, server, system, think, retries=8):
        self.server, self.think, self.retries, self.segments = server, think, retries, []
        self.messages = [{"role": "system", "content": system}]

    async def reply(self, line):
        """As policy.Agent.reply, but for the tokens."""
        from policy import Reply, split_thought
        self.messages.append({"role": "user", "content": line})
        text, = await ask_with_retries("a reply of the policy's server",
                                       lambda _: self.server.chat(self.messages), lambda text: (),
                                       self.retries)
        thought, visible, malformed = (split_thought(text) if self.think
                                       else ("", text.strip(), False))
        # thoughts are not in the history that later turns see
        self.messages.append({"role": "assistant", "content": visible})
        return Reply(text, visible, thought, malformed)


def result_of(profile, episode, user, start, max_turns, made_by):
    """One dialogue in the format of SAGE's released result files, with what is ours under
    "rlver"."""
    history = [{"role": "user", "content": episode.first_line, "emotion-point": start}]
    thinking = iter(user.thoughts)
    for turn in episode.turns:
        own = {key: turn[key] for key in ("thought", "change", "emotion", "analysis")}
        history.append({"role": "assistant", "content": turn["reply"], "rlver": own})
        if turn["user"] is not None:
            sections, _ = parse_emotion(turn["analysis"])
            planning = {"activity": sections["Activity"], "TargetCompletion":
                        sections.get("TargetCompletion", sections.get("Reason")),
                        "content": sections["Content"], "analyse": sections["Analyse"],
                        "change": turn["change"]}
            history.append({"role": "user", "content": turn["user"], "thinking": next(thinking, ""),
                            "emotion-point": turn["emotion"], "planning": planning})
    return {"id": profile.id, "emo_point": episode.emotion,
            "emo_state": emotion_level(episode.emotion), "player": profile.player,
            "scene": profile.scene, "character": profile.main_cha, "topic": profile.topic,
            "task": profile.task, "history": history,
            "rlver": {**made_by, "ended": episode.ended, "start": start, "max_turns": max_turns,
                      "traits": profile.cha_group}}


def benchmark(args):
    """Hold the dialogues that FILE does not hold yet, appending each as it ends. Returns the path
    of the results."""
    from tqdm import tqdm
    from rlver import converse
    name = args.policy or newest_run()
    run = read_json(Path(name) / "config.json")
    lang, difficulty = (args.lang or run.get("lang", "en"),
                        args.difficulty or run.get("difficulty", "vanilla"))
    simulator_name = args.simulator or "toy"
    people = load_profiles(args.profiles) if args.profiles else toy_profiles("heldout")
    refuse_foreign(simulator_name, people)
    people = people[:args.limit]
    simulator = make_simulator(simulator_name, lang, difficulty,
                               temperature=args.simulator_temperature)
    who, make_agent = open_policy(name, args.think, args.lang or "en",
                                  args.max_tokens, args.context)
    made_by = {**who, "simulator": user_label(simulator_name), "difficulty": difficulty,
               "lang": lang, "start": args.start, "max_turns": args.max_turns, "seed": args.seed}
    default = (Path(name) / "benchmark.jsonl" if Path(name).is_dir()
               else Path("results") / (re.sub(r"\W+", "-", who["policy"]) + ".jsonl"))
    path = Path(args.out or default)
    done = set()
    if path.exists():
        rows, problems = read_results(path)
        for row in rows:
            if {key: row["made_by"].get(key) for key in made_by} != made_by:
                raise BadInput(f"--out {path}: holds results of {describe(row['made_by'])}; choose "
                               "another file, or remove it")
        done = {row["id"] for row in rows}
        keep_whole_lines(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    todo = [(i, p) for i, p in enumerate(people) if p.id not in done]
    bar = tqdm(total=len(people), initial=len(people) - len(todo), desc="benchmark",
               unit="dialogue")
    lost = []

    async def one(i, profile, file):
        user = User(simulator, profile, args.start, f"benchmark {profile.id}")
        try:
            line = profile.first_talk or await user.answer()
            if profile.first_talk:
                user.dialogue.append({"speaker": "me", "text": line})
            user.thoughts.clear()
            episode = await converse(make_agent([args.seed, 3, i]), user, line, args.max_turns,
                                     floor=BENCHMARK["floor"])
            file.write(json.dumps(result_of(profile, episode, user, args.start, args.max_turns,
                                            made_by), ensure_ascii=False) + "\n")
            file.flush()
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    async def all_of_them():
        with open(path, "a", encoding="utf-8") as file:
            await asyncio.gather(*[one(i, profile, file) for i, profile in todo])
    asyncio.run(all_of_them())
    bar.close()
    for profile_id, error in lost:
        print(f"evaluate.py: {profile_id} is missing: {error}; run the same command again "
              "to fill it in", file=sys.stderr)
    return path


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def newest_run():
    """The directory of the newest finished run in runs/."""
    runs = sorted((p.parent for p in Path("runs").glob("*/summary.json")),
                  key=lambda p: p.stat().st_mtime)
    if not runs:
        raise BadInput("no finished run in runs/; name a policy with --policy, or make one with: "
                       "python rlver.py --algo grpo --think")
    return str(runs[-1])


def keep_whole_lines(path):
    """Cut off what a stopped evaluation left of its last line."""
    data = path.read_bytes()
    os.truncate(path, data.rfind(b"\n") + 1)


# --------------------------------------------------------------------------- scores of result files

def final_of(row, rule):
    """The final emotion by a rule: "every" scores every reply; "sage", as SAGE's own loop, leaves
    the last of a full number of replies unscored (ten replies, nine of them scored). SAGE's files
    hold only that; ours hold both."""
    limit = row["made_by"].get("max_turns")
    if (rule == "sage" and limit and len(row["replies"]) == limit
            and row["ended"] in ("turn_limit", "emotion_max", "emotion_min")):
        return (row["emotions"][-2] if len(row["emotions"]) > 1
                else row["made_by"].get("start", row["final"]))
    return row["final"]


def rule_of(rows, asked):
    """The rule that a table can be made by. SAGE's own files know only theirs."""
    if any(not row["made_by"] for row in rows):
        if asked == "every":
            raise BadInput("--rule every: SAGE's files do not score a tenth reply; only --rule "
                           "sage can be had from them")
        return "sage"
    return asked or "every"


def score(path, rule=None, anyway=False):
    """Every table of one result file, as a dict. Raises BadInput for a file without a usable line,
    or with several simulators in it."""
    rows, problems = read_results(path)
    if not rows:
        raise BadInput(f"{problems[0]} (and not one of {len(problems)} lines can be used)")
    users = sorted({comparison_key(row) for row in rows})
    if len(users) > 1 and not anyway:
        raise BadInput(f"{path}: results of {len(users)} simulators or settings "
                       f"({'; '.join(users)}) cannot be averaged; their scores do not compare. "
                       "--anyway does it all the same")
    rule = rule_of(rows, rule)
    finals = [final_of(row, rule) for row in rows]
    replies = [reply for row in rows for reply in row["replies"]]
    by = {name: {value: score_summary([f for f, row in zip(finals, rows) if row[name] == value])
                 for value in sorted({row[name] for row in rows})}
          for name in ("intention", "kind", "group")}
    return {"file": str(path), "by_whom": describe(rows[0]["made_by"]),
            "rule": rule, **score_summary(finals),
            "malformed": 100 * sum(row["ended"] == "malformed" for row in rows) / len(rows),
            "turns": len(replies) / len(rows), "length": sum(map(len, replies))
            / max(1, len(replies)), "by": by, "signs": signs([row["replies"] for row in rows]),
            "unusable": len(problems), "problems": problems}


def print_score(result):
    """One file's tables on the terminal."""
    print(f"\n{result['file']}: {result['by_whom']}\nrule {result['rule']!r}: " + (
        "every reply is scored" if result["rule"] == "every"
        else "as SAGE, the last of a full number of replies is not scored"))
    print(f"{'':<24}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    rows = [("all", result)] + [(f"{name}: {value}", numbers)
                                for name in ("kind", "intention", "group")
                                for value, numbers in result["by"][name].items()]
    for name, s in rows:
        print(f"{name:<24}{s['score']:>8.1f}{s['stderr']:>8.1f}{s['success']:>8.1f}%"
              f"{s['failure']:>8.1f}%{s['n']:>6}")
    shown = ", ".join(f"{key} {value:.2f}" for key, value in result["signs"].items())
    print(f"{result['turns']:.1f} replies a dialogue, {result['length']:.0f} characters a reply, "
          f"{result['malformed']:.1f} % malformed\n{shown}")
    if result["unusable"]:
        print(f"{result['unusable']} lines could not be used; they are named below and not in any "
              "number above")


# -------------------------------------------------------------------------------------- comparisons

def seeds_of(name):
    """The result files that a side of --compare names: a file, several with commas between, or a
    pattern."""
    return [path for part in name.split(",") for path in (sorted(glob.glob(part)) or [part])]


def compare(a, b, rule=None, draws=10_000):
    """Is A better than B? Paired on the users that all files of both sides hold.

    a, b: lists of result files, one per seed. The difference of a user is that of its means over
    seeds. The interval is the 2.5 to 97.5 percentile of a bootstrap over users, and over the seeds
    of each side where there are several (a difference between two single runs says nothing about
    two methods). p: sign flips of the users' differences, two-sided; it takes the seeds as
    given."""
    sides, keys, unusable = [], set(), []
    for files in (a, b):
        tables = []
        for path in files:
            rows, problems = read_results(path)
            if not rows:
                raise BadInput(problems[0])
            keys |= {comparison_key(row) for row in rows}
            unusable += problems
            found = rule_of(rows, rule)
            tables.append({row["id"]: final_of(row, found) for row in rows})
        sides.append(tables)
    if len(keys) > 1:
        raise BadInput("--compare: results of different simulators or settings "
                       f"({'; '.join(sorted(keys))}) do not compare")
    common = sorted(set.intersection(*[set(t) for tables in sides for t in tables]))
    if len(common) < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    # [seeds, users]
    x, y = (np.array([[t[i] for i in common] for t in tables], dtype=float) for tables in sides)
    rng = np.random.default_rng(0)
    difference = (x.mean(0) - y.mean(0))
    n = len(common)
    boot = np.empty(draws)
    for k in range(draws):
        users = rng.integers(n, size=n)
        one, two = (z[rng.integers(len(z), size=len(z))] if len(z) > 1 else z for z in (x, y))
        boot[k] = one[:, users].mean() - two[:, users].mean()
    low, high = np.percentile(boot, [2.5, 97.5])
    flips = (rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1) @ difference / n
    p = (1 + np.sum(np.abs(flips) >= abs(difference.mean()) - 1e-9)) / (1 + draws)
    mean = float(difference.mean())
    if low <= 0 <= high:
        sentence = f"no difference can be told at n = {n}"
    else:
        better, size = ("A", (mean, low, high)) if mean > 0 else ("B", (-mean, -high, -low))
        sentence = f"{better} is better by {size[0]:.1f}, {size[1]:.1f} to {size[2]:.1f}"
    return {"a": a, "b": b, "score_a": float(x.mean()), "score_b": float(y.mean()),
            "difference": mean, "interval": [float(low), float(high)], "p": float(p), "n": n,
            "seeds": [len(x), len(y)], "sentence": sentence, "problems": unusable}


# ------------------------------------------------------------------------- may the user be trusted?

def consistency(path, simulator, profiles, times=1):
    """Replay recorded dialogues through `simulator`, `times` times: how often are emotion, its sign
    and the final score the same, and is every reward in the log the one that its dialogue earned?
    path: a run's dialogues.jsonl, or a result file of ours.

    Returns {"turns", "emotion", "sign", "final" (shares), "dialogues", "found": [what is not as
    recorded, by line and turn], "scores": for each evaluation in a log, by its step, the mean final
    emotion [as recorded, again]}: with another simulator than the recorded one that tells how the
    same replies do with another user."""

    async def all_of_them():
        counts, found, scores = np.zeros(5), [], {}
        dialogues = list(recorded_dialogues(path))
        for number, dialogue in enumerate(dialogues, 1):
            if dialogue["profile_id"] not in profiles:
                raise BadInput(f"{path}, line {number}: profile {dialogue['profile_id']!r} is "
                               "unknown; name its file with --profiles")
        users = lambda d: [replay(d, User(simulator, profiles[d["profile_id"]], d["start"],
                                          f"replay {k}")) for k in range(times)]
        # all at once: a server takes its time
        replayed = await asyncio.gather(*[asyncio.gather(*users(d)) for d in dialogues])
        for number, (dialogue, goes) in enumerate(zip(dialogues, replayed), 1):
            turns = [t for t in dialogue["turns"] if t["emotion"] is not None]
            recorded, start = [t["emotion"] for t in turns], dialogue["start"]
            problem = arithmetic(dialogue, turns)
            for again in goes:
                before = list(zip([start] + recorded, recorded)), list(zip([start] + again, again))
                counts += [len(recorded), sum(x == y for x, y in zip(recorded, again)),
                           sum(np.sign(b - a) == np.sign(d - c) for (a, b), (c, d) in zip(*before)),
                           1, recorded[-1:] == again[-1:]]
                differs = next((k for k, (x, y) in enumerate(zip(recorded, again), 1) if x != y),
                               None)
                if differs and not problem:
                    problem = (f"turn {differs}: emotion {recorded[differs - 1]} as recorded, "
                               f"{again[differs - 1]} again")
            if problem:
                found.append(f"line {number}, {dialogue['profile_id']}, {problem}")
            if dialogue.get("split") == "heldout":
                malformed = dialogue["ended"] == "malformed"
                finals = [0 if malformed or not e else e[-1] for e in (recorded, again)]
                scores.setdefault(dialogue["step"], []).append(finals)
        return counts, found, {step: [sum(column) / len(pairs) for column in zip(*pairs)]
                               for step, pairs in scores.items()}
    counts, found, scores = asyncio.run(all_of_them())
    turns, same, sign, dialogues, final = counts
    return {"turns": int(turns), "emotion": same / max(1, turns), "sign": sign / max(1, turns),
            "dialogues": int(dialogues), "final": final / max(1, dialogues), "found": found,
            "scores": scores}


def arithmetic(dialogue, turns):
    """What in a dialogue's own numbers does not add up, or None: each emotion is the one before
    plus the change, clamped; the reward is the last emotion / 100, or 0 if malformed."""
    emotion = dialogue["start"]
    for k, turn in enumerate(turns, 1):
        if (turn.get("change") is not None
                and move_emotion(emotion, turn["change"]) != turn["emotion"]):
            return (f"turn {k}: {emotion} and a change of {turn['change']:+d} do not give "
                    f"{turn['emotion']}")
        emotion = turn["emotion"]
    reward = 0 if dialogue.get("ended") == "malformed" else emotion / 100
    if abs(dialogue.get("reward", reward) - reward) > 1e-9:
        return f"reward {dialogue['reward']} as recorded, {reward} by its last emotion"
    return None


# --------------------------------------------------------------------------------------- talk to it

def chat(name, think, lang, max_tokens, context):
    """A terminal chat with the policy: you are the one who has troubles. Thoughts are dimmed."""
    import secrets
    who, make_agent = open_policy(name, think, lang, max_tokens, context)
    agent = make_agent(secrets.randbits(32))
    dim, plain = ("\033[2m", "\033[0m") if sys.stdout.isatty() else ("", "")
    print(f"You talk to {who['policy']}. An empty line ends.")
    if read_json(Path(name) / "config.json").get("model") == "toy":
        print("It knows a few hundred words; try: My sister forgot my birthday. I feel hurt. "
              "Nobody knows how it feels.")
    with asyncio.Runner() as runner:
        while (line := input("you> ").strip()):
            reply = runner.run(agent.reply(line))
            if reply is None:
                print("(its context is full)")
                break
            if reply.thought:
                print(f"{dim}({reply.thought}){plain}")
            print(f"it>  {reply.visible if not reply.malformed else '(malformed) ' + reply.text}")
            if reply.malformed:
                break


# --------------------------------------------------------------------------------------------- main

def make_parser():
    """The flags of evaluate.py."""
    parser = Parser(prog="evaluate.py",
                    description="Measure, compare, verify, and talk to a policy.")
    parser.add_argument("--policy", metavar="P", help="a run, a model directory or name, or "
                        "openai:MODEL@URL (default: the newest run)")
    parser.add_argument("--simulator", metavar="S", help="as in rlver.py (default: toy)")
    parser.add_argument("--profiles", metavar="FILE",
                        help="users as JSONL (default: the toy's held-out users)")
    parser.add_argument("--difficulty", choices=["vanilla", "challenging"],
                        help="(default: the run's own, else vanilla)")
    parser.add_argument("--lang", choices=["en", "zh"],
                        help="language of the prompts (default: the run's own, else en)")
    parser.add_argument("--think", action="store_true",
                        help="the policy thinks first (a run knows itself)")
    whole = lambda low: number(int, lambda x: x >= low, f"a whole number from {low}")
    parser.add_argument("--start",
                        type=number(int, lambda x: 0 <= x <= 100, "a number from 0 to 100"),
                        default=BENCHMARK["start"],
                        help="emotion at the start (default: 40; RLVER trains from 30)")
    parser.add_argument("--max-turns", type=whole(1), default=BENCHMARK["max_turns"],
                        help="replies, at most (default: 10)")
    parser.add_argument("--max-tokens", type=whole(1),
                        help="tokens of a reply (default: the run's own, else 2048)")
    parser.add_argument("--context", type=whole(1),
                        help="tokens of a dialogue (default: the model's)")
    parser.add_argument("--simulator-temperature",
                        type=number(float, lambda x: x >= 0, "a number from 0"), default=0.0,
                        help="(default: 0)")
    parser.add_argument("--limit", type=whole(1), help="only so many users")
    parser.add_argument("--seed", type=whole(0), default=0,
                        help="of the policy's sampling (default: 0)")
    parser.add_argument("--out", metavar="FILE",
                        help="result file; one that a stopped evaluation left is continued")
    parser.add_argument("--score", nargs="+", metavar="FILE",
                        help="tables of result files; no model is needed")
    parser.add_argument("--rule", choices=["every", "sage"],
                        help="score every reply, or as SAGE not the last of a full number "
                        "(default: every for our files; SAGE's own hold only theirs)")
    parser.add_argument("--anyway", action="store_true",
                        help="average results of different simulators")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two result files; for "
                        "several seeds, names with commas between, or patterns")
    parser.add_argument("--consistency", metavar="FILE",
                        help="replay the dialogues of a log or a result file")
    parser.add_argument("--times", type=whole(1), default=1,
                        help="how often to replay (default: 1)")
    parser.add_argument("--chat", metavar="RUN", help="talk to a policy")
    parser.add_argument("--json", metavar="FILE", help="write the tables here too")
    return parser


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except RunError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, EOFError):
        print("\nstopped; the same command goes on where it was", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"evaluate.py: {error}", file=sys.stderr)
        return 2


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    if args.chat:
        chat(args.chat, args.think, args.lang or "en", args.max_tokens, args.context)
        return 0
    if args.compare:
        result = compare(*map(seeds_of, args.compare), rule=args.rule)
        print(f"A {result['score_a']:.1f}, B {result['score_b']:.1f}, difference "
              f"{result['difference']:.1f} (95 % {result['interval'][0]:.1f} to "
              f"{result['interval'][1]:.1f}, p = {result['p']:.4f}, n = {result['n']}, "
              f"seeds {result['seeds'][0]} and {result['seeds'][1]}): {result['sentence']}")
        write(args.json, result)
        return complain(result["problems"])
    if args.consistency:
        if not Path(args.consistency).is_file():
            raise BadInput(f"--consistency {args.consistency}: no such file")
        # of a run; a result file says it in each line
        made_by = read_json(Path(args.consistency).parent / "config.json")
        with open(args.consistency, "rb") as file:
            first = file.readline()
        if b'"history"' in first:
            made_by = {**{"profiles": made_by.get("profiles")},
                       **json.loads(first).get("rlver", {})}
        name = args.simulator or made_by.get("simulator", "toy")
        settings = (args.lang or made_by.get("lang", "en"),
                    args.difficulty or made_by.get("difficulty", "vanilla"))
        recorded = (user_label(made_by.get("simulator", "toy")), made_by.get("lang", "en"),
                    made_by.get("difficulty", "vanilla"))
        other = (user_label(name), *settings) != recorded
        simulator = make_simulator(name, *settings, temperature=args.simulator_temperature)
        names = [args.profiles] if args.profiles else made_by.get("profiles") or []
        people = ([p for n in names for p in load_profiles(n)]
                  or toy_profiles("heldout", 1000) + toy_profiles("train"))
        result = consistency(args.consistency, simulator, {p.id: p for p in people}, args.times)
        print(f"{result['turns']} turns replayed: the same emotion in {100 * result['emotion']:.1f}"
              f" %, the same sign in {100 * result['sign']:.1f} %; {result['dialogues']} "
              f"dialogues: the same final score in {100 * result['final']:.1f} %")
        for step, (recorded, again) in result["scores"].items():
            print(f"held-out users, step {step}: score {recorded:.1f} as recorded, "
                  f"{again:.1f} again")
        if other:
            print("(another user than the one that was recorded: that numbers differ is no "
                  "fault of the log)")
            return write(args.json, result)
        for line in result["found"][:20]:
            print(f"not as recorded: {line}")
        if len(result["found"]) > 20:
            print(f"... and {len(result['found']) - 20} more")
        write(args.json, result)
        return 1 if result["found"] else 0
    files = args.score or [benchmark(args)]
    results = [score(path, args.rule, args.anyway) for path in files]
    for result in results:
        print_score(result)
    if not args.score:
        print(f"results: {files[0]}; to look at: {report_of_results(files[0], results[0])}")
    write(args.json, results[0] if len(results) == 1 else results)
    return complain([problem for result in results for problem in result["problems"]])


def complain(problems):
    """Name the lines that could not be used. Returns the exit code."""
    for problem in problems:
        print(f"evaluate.py: {problem}", file=sys.stderr)
    return 2 if problems else 0


def write(path, result):
    """Write `result` as JSON where --json says so. Returns the exit code 0."""
    if path:
        write_json(path, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
