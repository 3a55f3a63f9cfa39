"""tools/dialogues.py - recorded dialogues as tools and judges see them. It is no tool itself.

`load_dialogues` reads a result file, of evaluate.py or of SAGE, or a run's dialogues.jsonl, and
leaves out all that a judge must not see: thoughts, and malformed replies, which were never sent.
"""

from players.heldout import profiles_in
from support.errors import BadInput
from support.files import read_json
from support.results import same_users
from support.rundir import checkpoints

from functools import cache
from pathlib import Path
from types import SimpleNamespace

from people import Profile, load_profiles, toy_profiles
from tools.sage import read_any_dialogues


class Dialogue(SimpleNamespace):
    """One recorded dialogue:

    id          names the dialogue within its file
    profile_id  names its user; a log has many dialogues with one user
    first_line  the user's first line
    turns       [{"reply" (without its thought), "user" (the line after it), "analysis", "change",
                "emotion"}]; the last three are None for a reply that got no emotion
    start       the emotion before the first reply
    final       the score: the emotion at the end, or 0 if the dialogue ended malformed
    task        the hidden need, in words
    made_by     the settings: who played the user ("simulator", as the flag names it) ...; of a
                result file its own, else those of the config.json beside it
    profile     the user's profile; of a result file only what its line holds
    person      the same as a dict, to compare users by (support.results.same_users)
    """


@cache
def load_dialogues(path):
    """The Dialogues of a file, in its order. Raises BadInput."""
    out = Path(path).parent
    config = read_json(out / "config.json")
    # those held out as the run has kept them: its files may have been edited since
    heldout = profiles_in(read_json(out / "heldout.json"))
    of_files = profiles_of_log(config.get("profiles"))
    profiles = {profile.id: profile for profile in [*of_files, *heldout]}
    # the state of a run says by which prompts the users of its log were played
    [state] = [read_json(newest / "state.json") for newest in checkpoints(out)[-1:]] or [{}]
    dialogues = []
    for number, row in enumerate(read_any_dialogues(path), 1):
        if "raw" in row:  # a line of a result file, which has the profile in it
            profile = profile_in(row["raw"])
            row["id"] = profile.id
        else:  # a line of a log, which has its id alone
            profile = profiles.get(row["profile_id"])
            if profile is None:
                raise BadInput(f"{path}: user {row['profile_id']!r} is not among the profiles")
            row |= {"id": f"{profile.id}, line {number}", "task": profile.task}
            ours = {"character": profile.main_cha, "traits": profile.cha_group}
            row["person"] = vars(profile) | ours
            row["made_by"] = {"user_prompts": state.get("user_prompts")}
        row |= {"turns": visible_turns(row), "profile": profile}
        row["made_by"] = config | row.get("made_by", {})
        dialogues.append(Dialogue(**row))
    if not any(dialogue.turns for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def profiles_of_log(paths):
    """The profiles of all users whom a run's log may have. paths: the files of its --profiles."""
    if paths:
        return sum(map(load_profiles, paths), [])
    # A toy run may have held out more than the usual 128 (--eval-size). User i is the same for any
    # number of users, so 1000 users include those of any usual run.
    return toy_profiles("heldout", 1000) + toy_profiles("train")


def profile_in(raw):
    """The Profile in `raw`, a line of a result file, as far as a simulator needs it."""
    texts = {name: raw.get(name) or "" for name in ("id", "player", "scene", "task", "need")}
    return Profile(**texts, main_cha="", cha_group=[], target=raw.get("target") or "eq")


def visible_turns(row):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in row["turns"]:
        *_, after_thought = turn["reply"].rpartition("</think>")
        reply, *_ = after_thought.partition("<think>")
        turns.append(turn | {"reply": reply.strip()})
    if row.get("ended") == "malformed":
        turns.pop()
    return turns


def messages_of(dialogue, turns=None):
    """[{"speaker", "text"}] of a Dialogue, or of its first `turns` turns. It ends with the line
    that the user said after the last of them, if there is one."""
    messages = [("user", dialogue.first_line)]
    for turn in dialogue.turns[:turns]:
        messages += [("assistant", turn["reply"]), ("user", turn["user"])]
    return [{"speaker": speaker, "text": text} for speaker, text in messages if text]


def common_users(tool, files):
    """The ids of the users who are the same in both files. tool: its name, for messages. Raises
    BadInput (`support.results.same_users`)."""
    return same_users([[*map(vars, load_dialogues(path))] for path in files], f"tools.{tool}")
