"""support/results.py - what runs and evaluations leave: the lines of result files, written and read,
with the settings of their evaluations; logs of dialogues, read. (evaluate.py scores and compares
the results; SAGE's files are read by tools/sage.py.)

A recorded dialogue has one form in files and one in memory, both of them dicts.

A `line` is what stands in a result file: SAGE's keys, with what is ours under "rlver". A message of
the assistant has the user's feeling at this reply; the next message is the user's answer:

    {"id": "p7", "emo_point": 48, "task": "...", "need": "...", "target": "eq", ...,
     "history": [{"role": "user", "content": "Well.", "emotion-point": 40},
                 {"role": "assistant", "content": "Go on.",
                  "rlver": {"thought": "", "change": 8, "emotion": 48, "analysis": "{...}"}}],
     "rlver": {"policy": ..., "simulator": ..., "start": 40, "ended": "turn_limit", ...}}

A `dialogue` is what programs compute with. `parse_line` makes it of a line of a result file, and
`recorded_dialogues` also of a line of a run's dialogues.jsonl, which has "reward", not "final":

    {"profile_id": "p7", "first_line": "Well.", "start": 40, "final": 48, "ended": "turn_limit",
     "turns": [{"reply": "Go on.", "thought": "", "change": 8, "emotion": 48, "analysis": "{...}",
                "user": None}], ...}
"""

from support.answers import read_answer
from support.command_line import print_folded, scripted_notice
from support.errors import BadInput
from support.files import cut_unfinished_line, parse_json, read_jsonl, size_of
from support.needs import need_of

import re

from emotion import TRAINING, emotion_level, scale_in_words

# the groups of personas in the released files, and our names for them
PERSONA_GROUPS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}
# The purpose of a profile, by its `target`. (The first is to confide a trouble, and the purpose of
# a profile without a target; the others are small talk.)
PURPOSE_LABELS = {
    "eq": "heart-to-heart",
    "target": "chat with an aim",
    "no-target": "chat without aim",
}

# What a line keeps of its user's profile, under SAGE's keys and ours. A line of an earlier version
# has no "first_talk", one of SAGE's neither "need" nor "traits".
KEPT = "player scene topic task need target character traits first_talk".split()

# ------------------------------------------------------------------------- the lines of result files


def line_of_result(episode, user, settings, schema):
    """The line of the result file for an Episode (rollout.py). settings: of the evaluation; schema:
    of the answers to f_emo."""
    profile = user.profile
    history = [{"role": "user", "content": episode.first_line, "emotion-point": settings["start"]}]
    # The user has a thought for each line that its model made. The first line is one of these,
    # unless the profile brings its own; SAGE's format has no place for the thought behind it.
    thoughts = user.thoughts if profile.first_talk else user.thoughts[1:]
    for i, turn in enumerate(episode.turns):
        keys = ("thought", "change", "emotion", "analysis")
        ours = {key: getattr(turn, key) for key in keys}
        history.append({"role": "assistant", "content": turn.reply, "rlver": ours})
        if turn.user is not None:  # only the last reply may have no answer
            history.append(message_of_user(turn, thoughts[i], schema))
    keys = ("player", "scene", "topic", "task", "need", "target")
    return {
        "id": profile.id,
        "emo_point": episode.emotion,
        "emo_state": emotion_level(episode.emotion),
        **{key: getattr(profile, key) for key in keys},
        "character": profile.main_cha,
        "history": history,
        "rlver": {
            **settings,
            "ended": episode.ended,
            "traits": profile.cha_group,
            "first_talk": profile.first_talk,
            "cut": episode.cut,
        },
    }


def message_of_user(turn, thought, schema):
    """The message of the history for the user's answer in a turn. thought: the one behind it."""
    analysis = analysis_in(turn.analysis, schema)
    return {
        "role": "user",
        "content": turn.user,
        "thinking": thought,
        "emotion-point": turn.emotion,
        "planning": {
            "activity": analysis["activity"],
            "TargetCompletion": analysis["target_completion"],
            "content": analysis["content"],
            "analyse": analysis["analysis"],
            "change": turn.change,
        },
    }


def parse_line(line):
    """The dialogue in a line of a result file:

        profile_id      the user's id
        final           the final emotion
        first_line      the user's first line
        turns           the policy's turns, a list of dicts: "reply", "user" (the line after it,
                        None at the end), "thought", "analysis", "change", "emotion"; a value that
                        the file does not hold is None
        start           the emotion at the start
        task            the hidden need, in words
        intention       its name, a key of emotion.NEEDS, or "other"
        kind            "rational", "emotional" or "other"
        purpose         the purpose of the profile, one of PURPOSE_LABELS
        group           of the persona: "negative", "passive", "avoidant" or another
        person          what the line keeps of the profile, {field: value}
        made_by         the settings of the evaluation
        ended           what ended the dialogue
        raw             the line itself

    Raises LookupError, TypeError, AttributeError or ValueError if the line is not a result."""
    final, history, task = line["emo_point"], line["history"], line["task"]
    if "rlver" not in line:
        raise ValueError("evaluate.py did not write it; SAGE's files: python -m tools.sage")
    made_by = line["rlver"]
    turns = [
        {"reply": message["content"], "user": follower.get("content"), **message["rlver"]}
        for message, follower in zip(history, [*history[1:], {}])
        if message["role"] == "assistant"
    ]
    for value in [final, *emotions_of(turns)]:
        if not 0 <= value <= 100:
            raise ValueError(f"emotion {value!r} is not in 0..100")
    intention, kind = need_of(task, line.get("need"))
    all_keys = made_by | line  # ours and SAGE's
    group = line.get("character") or "other"
    return {
        "profile_id": line["id"],
        "final": final,
        "first_line": history[0]["content"],
        "turns": turns,
        "start": made_by["start"],
        "task": task,
        "intention": intention,
        "kind": kind,
        "purpose": PURPOSE_LABELS[line.get("target") or "eq"],
        "group": PERSONA_GROUPS.get(group, group),
        "person": {key: all_keys[key] for key in KEPT if key in all_keys},
        "made_by": made_by,
        "ended": made_by.get("ended", ""),
        "raw": line,
    }


def read_results(path, parse=parse_line):
    """The dialogues in a result file. parse: makes a dialogue of a line (tools/sage.py has another
    one). Raises BadInput for a line that is not a result, and for a file without results."""
    dialogues = {}
    for number, line, problem in read_jsonl(path):
        try:
            if problem:
                raise ValueError(problem)
            dialogue = parse(line)
            user = dialogue["profile_id"]
            if user in dialogues:
                raise ValueError(f"id {user!r} stands in an earlier line already")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            lacks = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise BadInput(f"{path}, line {number}: no result: {lacks}") from None
        dialogues[user] = dialogue
    if not dialogues:
        raise BadInput(f"{path}: the file holds no result")
    return list(dialogues.values())


def emotions_of(turns):
    """The emotions after the replies that were scored."""
    return [turn["emotion"] for turn in turns if turn["emotion"] is not None]


def parts_of(dialogues):
    """The keys by which tables split these dialogues. The purpose is among them only if some user
    chats, because in most files no user does."""
    parts = ["kind", "intention", "group"]
    if any(dialogue["purpose"] != PURPOSE_LABELS["eq"] for dialogue in dialogues):
        parts.insert(0, "purpose")
    return parts


# --------------------------------------------------------------------- the settings in result files

# evaluate.py writes the settings that it measures with into each line of a result file, under
# "rlver"; in a dialogue they are "made_by". Not compared: "ended", "traits" and "cut" belong to one
# dialogue, "held_out" follows from the policy and its users; which parameters were "replaced",
# because a server refused them, and which models it "served", is known only after its first answer.
NOT_COMPARED = {"ended", "traits", "first_talk", "cut", "held_out", "replaced", "served"}
# Digests of texts that no other setting names, and what they are. Results of an earlier version lack
# some of them.
DIGESTS = {
    "chat_template": "the chat template's text (with the policy's prompt, perhaps today's date):",
    "user_prompts": "the text of the user's prompts:",
    "policy_prompt": "the text of the policy's prompt:",
}
# The settings that must be equal where scores are compared, and those of the policy's replies.
CONDITIONS = "simulator reader difficulty lang start max_turns world simulator_temperature".split()
POLICY_SETTINGS = ("think", "policy_lang", "temperature", "max_tokens", "context")


def differences(made_by, settings):
    """How the settings of a result, `made_by`, differ from other `settings`, in words; "" if they
    do not. A result of an earlier version passes where it lacks one of DIGESTS, or what a reader's
    chat template was told."""
    made_by = {key: settings.get(key) for key in (*DIGESTS, "reader_template_args")} | made_by
    return ", ".join(
        f"{DIGESTS.get(key, key)} {made_by.get(key)} there, {settings.get(key)} here"
        for key in {**settings, **made_by}
        if key not in NOT_COMPARED and made_by.get(key) != settings.get(key)
    )


def finished_users(path, settings):
    """The ids of the users whose dialogues the result file `path` holds. Half a line at its end is
    cut off. Who has answered there ("served") is added to `settings`, so that another name will be a
    second one. Raises BadInput if they were made with other settings, or if the file holds no
    results; then nothing is cut."""
    # The first bytes. A pipe or a device cannot be read twice, so it is not read, and refused.
    head = b"no file"
    if path.is_file():
        with open(path, "rb") as file:
            head = file.read(7)
    if not b'{"id": '.startswith(head):  # as `line_of_result` begins
        raise BadInput(f"{path}: holds no results; choose another --out")
    # All lines: the first ones may be of an earlier version, without digests.
    for _, line, _ in read_jsonl(path):
        made_by = line.get("rlver", {}) if line else settings  # None: half a line
        if others := differences(made_by, settings):
            raise BadInput(f"{path}: holds other results ({others}); move it, or use another --out")
        for side, names in settings.get("served", {}).items():
            of_line = made_by.get("served", {}).get(side, ())
            names += [name for name in of_line if name not in names]
    cut_unfinished_line(path)
    return {result["profile_id"] for result in read_results(path)} if size_of(path) else set()


def refuse_mixed(dialogues, where):
    """Refuse dialogues that were made in different conditions (what played the user, by which
    prompts, the rules of the benchmark): their scores do not compare."""
    conditions = sorted({in_words(dialogue["made_by"], CONDITIONS) for dialogue in dialogues})
    if len(conditions) > 1:
        raise BadInput(
            f"{where}: results of {len(conditions)} simulators or settings do not compare "
            f"({'; '.join(conditions)})"
        )
    refuse_other_prompts(dialogues, where)


def refuse_other_prompts(dialogues, where):
    """Refuse dialogues if the user's prompts were edited between some of them."""
    prompts = {dialogue["made_by"].get("user_prompts") for dialogue in dialogues}
    if len(prompts - {None}) > 1:
        raise BadInput(
            f"{where}: the user's prompts were edited between these results, so they do not compare"
        )


def same_users(sides, where):
    """The ids of the users whom both lists of dialogues have, in the order of the first list. An id
    may be that of another profile in another file, so what both keep of it must be equal, too.
    Raises BadInput if that leaves fewer than two, or if the user's prompts were edited in
    between."""
    both = sum(sides, [])
    refuse_other_prompts(both, where)
    if not all(row["made_by"].get("user_prompts") for row in both):
        print_folded(
            f"{where}: some of these results do not say which prompts the user had (an earlier "
            "version wrote them, or SAGE); they are taken to be the same."
        )
    profiles, others = ({row["profile_id"]: row["person"] for row in rows} for rows in sides)
    common = [user for user in profiles if user in others]
    same = []
    for user in common:
        one, other = profiles[user], others[user]
        if all(one[key] == other[key] for key in one.keys() & other):
            same.append(user)
    if n := len(common) - len(same):
        text = f"{where}: {n} of {len(common)} ids in both files name other profiles in each"
        if len(same) < 2:
            raise BadInput(text)
        print_folded(f"warning: {text}; they are left out.")
    return same


def in_words(made_by, keys):
    """A result's settings under these keys, as far as it has them, in words."""
    return ", ".join(f"{key} {made_by[key]}" for key in keys if made_by.get(key) is not None)


def describe(made_by):
    """The policy and the user of a result, in words. The policy's settings are included, because
    the same weights may have been measured with several."""
    # A run's starting policy is named by its checkpoint-000000, a directory that is soon deleted.
    start = re.fullmatch("(.*)/checkpoint-0{6}", made_by["policy"])
    policy = f"the starting policy of {start[1]}" if start else f"policy {made_by['policy']}"
    return f"{policy} ({in_words(made_by, POLICY_SETTINGS)}) with user {made_by['simulator']}"


def what_scores_are(made_by):
    """What scores with these settings mean, in words: their scale, and whether the users are
    scripted."""
    scale = scale_in_words(made_by["start"], made_by["max_turns"])
    return (
        f"mean final emotion, {scale}. success: 100; failure: below 10. "
        f"{scripted_notice(made_by['simulator'], made_by.get('reader'))}"
    )


# ----------------------------------------------------------------- logged feelings, logged dialogues

# The answer to f_emo, as it is logged, is one of two JSON texts. `writing` is the whole answer of a
# user's model; `reading` is what players/reader.py makes of the log-odds of two words:
#
#     writing   {"content": "...", "target_completion": "...", "activity": "...", "analysis": "...",
#                "code": "kqvt", "change": 8}
#     reading   {"log_odds": {"need": 1.2, ...}, "z": {...}, "sum": 2.3, "change": 8,
#                "objective": "one sentence", "subjective": "the others"}


def analysis_in(text, schema):
    """What a logged answer to f_emo says, {key of the schema: value}. A reading has only the texts
    of two of the keys, and "" under the others. Raises Unreadable."""
    reading = reading_in(text)
    if not reading:
        return read_answer(text, schema)
    return dict.fromkeys(schema, "") | {
        "target_completion": reading["objective"],
        "analysis": reading["subjective"],
    }


def reading_in(text):
    """The object of a reading, or None for a writing, which has the code of its prompt, whatever
    else the model adds."""
    try:
        answer = parse_json(text)
    except ValueError:  # a writing may stand behind a thought, or in a fence
        return None
    is_reading = isinstance(answer, dict) and "log_odds" in answer and "code" not in answer
    return answer if is_reading else None


def recorded_dialogues(path, read=read_results):
    """The dialogues of a log (a run's dialogues.jsonl) or of a result file. A log has the final
    emotion as "reward", divided by 100, and may not say from which emotion a dialogue started: then
    it was the training's. read: what reads a result file."""
    with open(path, "rb") as file:
        is_result_file = b'"history"' in file.readline()
    if is_result_file:
        return read(path)
    dialogues = []
    needed = {"profile_id", "first_line", "turns", "reward"}
    for number, logged, problem in read_jsonl(path):
        if problem or needed - logged.keys():
            raise BadInput(f"{path}, line {number}: not a line of a run's dialogues.jsonl")
        dialogues.append(
            {"start": TRAINING.start, "final": round(100 * logged["reward"], 6), **logged}
        )
    return dialogues
