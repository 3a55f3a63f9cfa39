"""tools/checking_profiles.py - what is in a file of users, and what two files share: numbers that
can be counted, for `python -m tools.profiles --check`."""

from support.errors import BadInput
from support.results import PURPOSE_NAMES, intention_of

from collections import Counter

from simulator import load_profiles
from tools.writing import WRITTEN_DIALOGUE, alike, ngrams_of, squeeze


def print_check(paths):
    """Print what is in one file of users, or in two and shared. Returns the exit code. Raises
    BadInput."""
    if len(paths) > 2:
        raise BadInput("--check takes one file, or two: of training users and of test users")
    counts_of_files = count_files([load_profiles(path, "--check") for path in paths])
    titles = [*paths, f"of the users of {paths[-1]}"]
    for title, counts in zip(titles, counts_of_files):
        print(title)
        for what, number in counts.items():
            if isinstance(number, Counter):
                number = ", ".join(
                    f"{PURPOSE_NAMES.get(name, name)} {k}" for name, k in number.most_common()
                )
            print(f"    {what:<30}{number}")
    return 0


def count_files(files):
    """What files of users hold, each by itself, and what a second one shares with the first:
    [{what: number, or {value: number}}]. files: lists of Profile."""
    counts_of_files = [count_users(people) for people in files]
    if len(files) == 2:
        counts_of_files.append(shared_fields(*files))
    return counts_of_files


def count_users(people):
    """What a file of users holds: {what: number, or {value: number}}."""

    def times_theme(field):
        """How often each user's field says the hidden theme."""
        return [squeeze(getattr(p, field)).count(squeeze(p.task)) for p in people]

    def mean_length(field):
        """The mean number of characters of a field."""
        return round(sum(len(getattr(p, field)) for p in people) / len(people))

    intentions = [intention_of(p.task, p.need) for p in people]
    lines_of_dialogue = [len(WRITTEN_DIALOGUE.findall(p.scene)) for p in people]
    return {
        "users": len(people),
        "different personas": len({p.player for p in people}),
        "different scenes": len({p.scene for p in people}),
        "near-duplicate scenes": near_duplicates(people),
        "purposes": Counter(p.target for p in people),
        "needs": Counter(need for need, _ in intentions),
        "kinds": Counter(kind for _, kind in intentions),
        "groups": Counter(p.main_cha for p in people),
        "theme once in the scene": times_theme("scene").count(1),
        "theme in the persona": sum(times > 0 for times in times_theme("player")),
        "theme in the first line": sum(times > 0 for times in times_theme("first_talk")),
        "dialogue in the scene": sum(lines > 1 for lines in lines_of_dialogue),
        "characters, persona": mean_length("player"),
        "characters, scene": mean_length("scene"),
    }


def near_duplicates(people):
    """How many scenes are nearly one before them. N-grams that stand in more than a twentieth of
    the scenes are template text, and make nobody alike."""
    ngrams_of_scenes = [ngrams_of(p.scene) for p in people]
    scenes_with = Counter(ngram for ngrams in ngrams_of_scenes for ngram in ngrams)
    most = max(2, len(people) / 20)
    before, duplicates = {}, 0
    for p, ngrams in zip(people, ngrams_of_scenes):
        rare = {ngram for ngram in ngrams if scenes_with[ngram] <= most}
        if alike(rare, before) is not None:
            duplicates += 1
        before[p.id] = rare
    return duplicates


def shared_fields(first, second):
    """How many users of the second file have a field in common with one of the first."""
    counts = {}
    for field in ("id", "player", "scene", "topic"):
        known = {getattr(p, field) for p in first} - {""}
        counts[f"{field} is in the first file"] = sum(getattr(p, field) in known for p in second)
    return counts
