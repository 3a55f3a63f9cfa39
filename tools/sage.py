"""tools/sage.py - scores by SAGE's rule, of the result files that SAGE released and of ours.

    python -m tools.sage FILE... [--json OUT]

evaluate.py scores every reply. SAGE's own loop ends before it scores the last reply that it allows:
of ten replies nine are scored. Only by this rule can the scores of both kinds of files be compared.
For three policies or more, each with two simulators, the ranks of the policies are compared, too.
The other tools read both kinds of files with `read_any_results` and `read_any_dialogues`.

A line of SAGE's differs from one of ours (support/results.py) in two things: it has no "rlver", and
the feeling at a reply stands in the user's answer, so the last reply has none. `as_ours` moves it:

    SAGE's  {"id": "p7", "emo_point": 48, "task": "...", "history": [
                {"role": "user", "content": "Well.", "emotion-point": 40},
                {"role": "assistant", "content": "Go on."},
                {"role": "user", "content": "Yes.", "emotion-point": 48, "planning": {...}},
                {"role": "assistant", "content": "Never scored."}]}
    ours    of the first reply   "rlver": {"change": 8, "emotion": 48, "analysis": {...}, ...}
            of the second one    "rlver": {"change": None, "emotion": None, "analysis": None, ...}
            of the line itself   "rlver": {"simulator": "...", "start": 40, "max_turns": 10, ...}
"""

from support import results
from support.command_line import Parser, print_folded
from support.files import refuse_overwriting, write_json

from pathlib import Path

from emotion import BENCHMARK
from evaluate import print_score, tables_of
from tools.correlations import spearman

# -------------------------------------------------------------------------------- reading the files


def read_any_results(path):
    """The dialogues in a result file, ours or SAGE's (`support.results.read_results`)."""
    # the released files do not say what played the user: their directory does
    folders = [part for part in Path(path).resolve().parts if part.endswith("_based_simulator")]
    made_by = {
        "policy": Path(path).name,
        "simulator": "".join(folders) or "unknown",
        "start": BENCHMARK.start,
        "max_turns": BENCHMARK.max_turns,
    }

    def parse(line):
        ours = line if "rlver" in line else as_ours(line, made_by)
        return {**results.parse_line(ours), "raw": line}

    return results.read_results(path, parse)


def as_ours(line, made_by):
    """A line of SAGE's as evaluate.py would have written it, with `made_by` as its settings. The
    changes are computed from the emotions; the analysis stays an object."""
    before, history = made_by["start"], []
    for message, follower in zip(line["history"], [*line["history"][1:], {}]):
        if message["role"] == "assistant":
            emotion = follower.get("emotion-point")
            change = None if emotion is None else emotion - before
            before += change or 0
            record = {"change": change, "emotion": emotion}
            record |= {"thought": None, "analysis": follower.get("planning")}
            message = {**message, "rlver": record}
        history.append(message)
    return {**line, "history": history, "rlver": made_by}


def read_any_dialogues(path):
    """The dialogues of a run's log or of a result file, ours or SAGE's."""
    return results.recorded_dialogues(path, read_any_results)


# ------------------------------------------------------------------------------------------- scores


def score(path):
    """The tables of one file, as `evaluate.score` returns them, by SAGE's rule. Raises BadInput."""
    rows = read_any_results(path)
    results.refuse_mixed(rows, path)
    for row in rows:
        turns = row["turns"]
        is_full = len(turns) == row["made_by"]["max_turns"]
        if is_full and turns[-1]["emotion"] is not None:  # None: not scored, or malformed
            row["final"] = [row["start"], *results.emotions_of(turns)][-2]
    tables = tables_of(rows, path) | {"rule": "sage"}
    if "rlver" not in rows[0]["raw"]:
        tables["by_whom"] = f"a SAGE result file, simulator {tables['simulator']}"
    return tables


def print_ranks(all_tables):
    """Print how similarly two simulators rank the policies: Spearman's rho of their scores. Print
    nothing unless there are three policies or more, each with a score by both simulators.
    all_tables: of each file."""
    scores = {(tables["simulator"], tables["policy"]): tables["score"] for tables in all_tables}
    simulators, policies = (sorted(set(names)) for names in zip(*scores))
    if len(simulators) != 2 or len(policies) < 3 or len(scores) != 2 * len(policies):
        return
    rho = spearman(*[[scores[who, policy] for policy in policies] for who in simulators])
    print_folded(
        f"\nranks of {len(policies)} policies, {' and '.join(simulators)}: rho = {rho:.2f}"
    )


def run(args):
    """Print the tables, and write them where --json says. Returns the exit code."""
    refuse_overwriting({"--json": args.json}, args.files)
    all_tables = [score(path) for path in args.files]
    for tables in all_tables:
        print_score(tables)
    print("rule 'sage': as in SAGE, the last reply of a full-length dialogue is not scored")
    print_ranks(all_tables)
    if args.json:
        write_json(args.json, all_tables[0] if len(all_tables) == 1 else all_tables)
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = Parser(
        prog="python -m tools.sage",
        description="Print the scores of result files, SAGE's or ours, by SAGE's rule: the last "
        "reply of a dialogue of full length is not scored.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a result file")
    parser.add_argument(
        "--json",
        metavar="OUT",
        help="write the tables to OUT, too: an object for one FILE, a list for several",
    )
    return parser.run(run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
