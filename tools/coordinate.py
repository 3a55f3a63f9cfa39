"""tools/coordinate.py - where policies stand beside each other, from structured (x = -1) to creative
(1) and from solution (y = -1) to empathy (1), as a judge places them (SAGE 4.2, RLVER 3.7). It is
`python -m tools.strategies --coordinate`.

Three questions, each made of the answers to the one before:

    reasons     why did a dialogue succeed or fail? asked about dialogues of each file
    character   what do these reasons say of the policy of a file?
    place       where do all policies stand? one prompt has the characters, and how often each
                policy uses each strategy

Places of different prompts do not compare.
"""

from support.answers import as_json
from support.needs import need_of

from collections import Counter
from operator import itemgetter

from emotion import FAILURE_BELOW, SUCCESS
from tools.asking import ask, dialogue_slots, make_cases, source_of
from tools.tables import mean, parts_by, show_table, write_outputs

# Of an answer to each of the three questions.
REASONS = dict.fromkeys(("reasons", "code", "summary"), str)
CHARACTER = dict.fromkeys(("code", "social_distance", "professional_role", "personality"), str)
PLACE = dict.fromkeys("xy", range(-100, 101))  # in hundredths


def place_schema(models):
    """The schema of an answer with the places of these models, M1, M2, ..."""
    return {"comparison": str, "code": str, "places": dict.fromkeys(models, PLACE)}


def place_files(args, cases, shares, tags):
    """Ask the three questions, show, write and draw the places. Returns the exit code. --json gets
    {"placed": {file: [x, y, number of answers]}, "answers"}.

    cases: of `reason_cases`; shares: {file: how often its policy uses each strategy, in words};
    tags: the answers that say so, for --json."""
    # 1. The reasons, of each dialogue.
    reasons = ask(args, cases, "reasons", REASONS)
    # 2. The character, of each file.
    cases = []
    for path, rows in parts_by("file", reasons).items():
        notes = [row["found"] for row in rows if row["found"]]
        cases.append(({"file": path}, {"reasons": as_json(notes)}))
    characters = ask(args, cases, "character", CHARACTER)
    # 3. The places, of all files.
    models = {  # {name: what the judge is shown of it}
        f"M{number}": f"{as_json(row['found'])}\n{shares[row['file']]}"
        for number, row in enumerate(characters, 1)
    }
    descriptions = "\n\n".join(f"{name}\n{text}" for name, text in models.items())
    cases = [({"file": " ".join(args.files)}, {"models": descriptions})]
    schema, places_of = place_schema(models), itemgetter("places")
    answers = ask(args, cases, "place", schema, places_of, args.repeats)
    readable = [row["found"] for row in answers if row["found"]]
    places = {}
    for name, path in zip(models, args.files):
        x, y = (mean([answer[name][axis] / 100 for answer in readable]) for axis in "xy")
        places[path] = [x, y, len(readable)]
    show_table("coordinate", ["x", "y", "n"], places, source_of(answers))
    answers = {"reasons": reasons, "character": characters, "strategies": tags, "place": answers}
    write_outputs(args, "strategies coordinate", {"placed": places, "answers": answers})
    if args.picture:
        draw(places, args.picture)
    return 0


def reason_cases(files):
    """The cases of the dialogues whose outcome the judge explains: of each file the first five
    successes and the first five failures, for either kind of need."""
    cases, counts = [], Counter()
    for about, slots in make_cases(files, "reasons", outcome_slots):
        group = about["file"], slots["outcome"], slots["kind"]
        counts[group] += 1
        if counts[group] <= 5:
            cases.append((about, slots))
    return cases


def outcome_slots(dialogue):
    """The slots of a question about a dialogue that ended in success or in failure."""
    if FAILURE_BELOW <= dialogue.final < SUCCESS:
        return []
    outcome = "success" if dialogue.final >= SUCCESS else "failure"
    _, kind = need_of(dialogue.task, dialogue.profile.need)
    return [slots | {"outcome": outcome, "kind": kind} for slots in dialogue_slots(dialogue)]


def draw(places, picture):
    """Draw the places of the files, {file: [x, y, n]} (SAGE 4.2)."""
    from matplotlib.figure import Figure

    figure = Figure()
    axis = figure.add_subplot(
        xlim=(-1, 1), ylim=(-1, 1), xlabel="structured to creative", ylabel="solution to empathy"
    )
    for path, (x, y, _) in places.items():
        axis.scatter(x, y, label=path)
    figure.legend(loc="upper left")
    figure.savefig(picture)
