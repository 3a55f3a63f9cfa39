"""tools/strategies.py - which of 24 strategies replies use, and what those replies earned (RLVER
3.6; SAGE Table 5).

    python -m tools.strategies runs/NAME/dialogues.jsonl
    python -m tools.strategies results/after.jsonl --judge openai:MODEL@URL

uses: replies per dialogue that use a strategy, of those that could be read; gain: the mean change
of the emotion over n such replies; asked: where the hidden need asks for it. SSRR: how alike the
strategies of neighbouring replies are, 0 to 1. misnamed: a code beside another code's name; the
code counts. Of a training log, uses and gains over its steps are shown too. On the toy its grammar
tells the strategies, exactly, and no judge is asked, unless --judge names one.

A gain is not what the strategy causes: a reply with three strategies counts for all three. And this
SSRR is not SAGE's, whose scores and scale are not published.
"""

from support.answers import Unreadable, before_end
from support.strategies import CODES, GROUPS, steps_of, strategies_of, toy_codes

import asyncio
import re
import sys
from unicodedata import normalize

import toy
from tools.judge import (
    Judge,
    Tables,
    add_files,
    add_judge_flags,
    are_of_toy,
    cell,
    check_files,
    load_dialogues,
    load_question,
    load_template,
    made_by,
    make_cases,
    make_parser,
    need_model,
    print_plan,
    reply_slots,
    write_outputs,
)

READING = (
    "\nuses: replies per dialogue; gain: mean change of the emotion over n replies: what goes with "
    "it,\nnot what it causes; asked: where the need asks for it"
)


async def strategies(args):
    """Tag each reply of each file, and show what is counted. Returns the exit code."""
    check_files(args, least=1)
    need_model("judge", args)
    asked = bool(args.judge) or not are_of_toy(args.files)
    question = strategies_question(args.lang)
    cases = [case for path in args.files for case in cases_of(path)] if asked else []
    judge = Judge(args)
    if args.plan:
        print_plan(judge, [(question, cases)])
        return 0
    answers = None
    if asked:
        await judge.check(question)
        answers = await judge.ask_all(question, cases)
    tables = Tables()
    result = {
        "answers": {"strategies": answers} if asked else {},
        "files": {path: count_strategies(path, answers, tables) for path in args.files},
    }
    write_outputs(args, "strategies", result, tables)
    return 0


def count_strategies(path, answers, tables):
    """What is counted in one file, shown in `tables`: `strategies_of` it, with its tags, the same
    over the steps of a log, and how many answers of the judge are missing or misname a code."""
    tagged = tagged_dialogues(path, answers)
    counts = strategies_of(tagged)
    steps = steps_of(tagged)
    given = [answer["found"] for answer in answers or () if answer["file"] == path]
    missing = given.count(None)
    misnamed = sum(answer["misnamed"] for answer in given if answer)

    source = made_by(answers) if answers else "Exact tags, by the grammar of the toy. "
    tables.show(
        f"strategies, {path}",
        ["uses", "gain", "n", "gain asked", "n asked"],
        {name: list(usage.values()) for name, usage in counts["strategies"].items() if usage["n"]},
        f"{source}missing {missing}, misnamed {misnamed}, SSRR {cell(counts['ssrr'])}.{READING}",
    )
    if len(steps) > 1:
        for what in ("uses", "gain"):
            rows = {
                step: [counted["strategies"][name][what] for name in GROUPS]
                for step, counted in steps.items()
            }
            tables.show(f"{what}, steps up to", list(GROUPS), rows, "")
    return {**counts, "missing": missing, "misnamed": misnamed, "steps": steps, "tagged": tagged}


def tagged_dialogues(path, answers):
    """The dialogues of a file with the strategies of each reply, as support/strategies.py wants
    them: by a judge's `answers`, or, None, by the toy's grammar."""
    codes_of = {}  # of each reply that the judge could tag
    for answer in answers or ():
        if answer["file"] == path and answer["found"]:
            codes_of[answer["id"], answer["part"]] = answer["found"]["codes"]
    tagged = []
    for dialogue in load_dialogues(path):
        replies = []
        for i, turn in enumerate(dialogue["turns"]):
            if answers is None:
                codes = toy_codes(turn["reply"], toy)
            else:
                codes = codes_of.get((dialogue["id"], i))
            replies.append([codes, turn["change"]])
        facts = {key: dialogue[key] for key in ("id", "intention", "step", "split")}
        tagged.append({**facts, "replies": replies})
    return tagged


# ------------------------------------------------------------------------------ asking for the tags


def strategies_question(lang):
    """The strategies of one reply. A reply has its strategies, so it is asked about once."""
    placeholders = ["dialogue", "line", "reply"]
    names = names_of_codes(load_template("strategies", lang, placeholders))

    def read(text, mark):
        return read_strategies(text, names, mark)

    return load_question("strategies", lang, placeholders, read, repeated=False)


def names_of_codes(template):
    """{code: name} of the 24 strategies, as the prompt lists them: "(A-1) ask for facts: ..."."""
    return dict(re.findall(r"^\(([A-G]-\d)\) ([^:：\n]+)", template, re.M))


def cases_of(path):
    """Each reply of a file."""
    return make_cases(path, "strategies", reply_slots)


def read_strategies(text, names, mark):
    """{"codes": of a reply's strategies in order, "misnamed": how many bear another one's name}.
    names: {code: name}; where the two disagree the code wins. Only tags with the mark are read:
    <Strategy kqvt>...</Strategy kqvt>. Within a paragraph (one tag) B-2 excludes B-1, and B-3 both.
    Raises ValueError for an answer without the tag, and for a code that is none of the 24."""
    text = normalize("NFKC", before_end(text, mark))
    # What stands between an opening tag and the next one, or the end, up to the closing tag.
    opened = re.split(rf"<Strategy {mark}>", text, flags=re.I)[1:]
    codes, misnamed, says_none = [], 0, False
    for rest in opened:
        inside, closing, _ = re.split(rf"(</Strategy {mark}>|\Z)", rest, maxsplit=1, flags=re.I)
        if not closing:
            raise Unreadable("header", "a tag that is not closed with its mark")
        used, wrong_names = read_tag(inside, names)
        if "B-3" in used:
            excluded = {"B-1", "B-2"}
        else:
            excluded = {"B-1"} if "B-2" in used else set()
        codes += [code for code in used if code not in excluded]
        misnamed += wrong_names
        says_none = says_none or not used
    if not codes and not says_none:
        raise Unreadable("header", "no strategy in a tag with its mark")
    return {"codes": codes, "misnamed": misnamed}


def read_tag(inside, names):
    """([codes], how many bear another one's name) of the text of one tag: codes and names of the
    24, strung together in any way, or "none". Raises Unreadable for all else: in a sentence, or in
    a quotation, nothing is searched for."""
    # Longer names first: one may begin with another.
    ordered = sorted(names.values(), key=len, reverse=True)
    any_name = "|".join(re.escape(normalize("NFKC", name)) for name in ordered)
    token = re.compile(
        rf"(?P<name>(?i:{any_name}))|(?P<letter>[A-Z]) ?[-–—_]? ?(?P<number>\d+)"
        r"|(?P<word>[^\W\d_]+|\d+)"
    )
    used, misnamed, says_none = [], 0, False
    for match in token.finditer(inside):
        if match["letter"]:
            code = f"{match['letter']}-{match['number']}"
            if code not in CODES:
                raise Unreadable("value", f"{code[:20]!r} is no strategy; there are A-1 to G-2")
            used.append(code)
        elif match["name"]:
            right_name = normalize("NFKC", names[used[-1]]) if used else ""
            misnamed += match["name"].casefold() != right_name.casefold()
        elif match["word"].casefold() in ("none", "无"):
            says_none = True
        elif match["word"].casefold() not in ("and", "plus", "with", "和", "与", "及"):
            raise Unreadable("value", f"not a strategy by code and name: {inside[:60]!r}")
    if bool(used) == says_none:  # neither of the two, or both
        raise Unreadable("value", f"not a strategy by code and name: {inside[:60]!r}")
    return used, misnamed


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = make_parser("strategies", __doc__)
    add_files(parser)
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(strategies(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
