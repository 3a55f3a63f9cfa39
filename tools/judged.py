"""tools/judged.py - the names of the five capabilities and of the scripted judge, and the radar of
what a judge scored.
"""

# The five capabilities (RLVER E.3), by the names that they have in files.
CAPABILITIES = {
    "ED": "empathic depth",
    "CI": "core insight",
    "SC": "solution crafting",
    "DG": "dialogue guidance",
    "SA": "style adaptability",
}

# The name of the judge that is a script (tools/scripted.py), and what must stand beside its scores.
SCRIPTED_JUDGE = "scripted"
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."


def radar_of(judgements):
    """What the page draws of judged capabilities: [{"label", "values": {capability: 1 to 5},
    "judge": who judged, in words}], each capability with its full name."""
    scores = judgements.get("capabilities", {})
    answers = scores.get("answers") or [{}]
    judge = judged_by(answers[0].get("judge"))
    radar = []
    for file, table in scores.get("tables", {}).items():
        means = {CAPABILITIES[code]: numbers["mean"] for code, numbers in table.items()}
        radar.append({"label": file, "values": means, "judge": judge})
    return radar


def judged_by(judge):
    """Who gave the scores, in words: the name of a model, or that they were made by rule."""
    if judge == SCRIPTED_JUDGE:
        return MACHINERY_ONLY
    return f"Judged by {judge or 'a model'}."
