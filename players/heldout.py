"""players/heldout.py - whom a run has held out, so that it is measured with the same users later.

A run keeps them in heldout.json, and a checkpoint in its rlver.json: {"ids": [...], "profiles":
[...]}. An earlier version kept only the ids.
"""

from support.errors import BadInput
from support.files import read_json

from people import Profile, load_profiles, profiles_of_run


def profiles_in(kept):
    """The Profiles in what a run has kept, [] if there are none."""
    return [Profile(**row) for row in kept.get("profiles", ())]


def heldout_as_begun(out, heldout):
    """The profiles that the run in `out` has held out since it began. heldout: those that its files
    hold out now, which a new run takes. Raises BadInput if the ids are not the same: then profiles
    to train on would be held out, and the other way round."""
    kept, ids = read_json(out / "heldout.json"), [profile.id for profile in heldout]
    if kept.get("ids", ids) != ids:
        raise BadInput(
            f"{out}: the profiles have changed since the run began, or an earlier version began it, "
            "so other users would be held out; start a new run"
        )
    return profiles_in(kept) or heldout


def heldout_of_run(out, settings):
    """The profiles that the run in `out` with these `settings` held out, to measure it afterwards:

        --profiles       kept           returned
        none             -              the toy's held-out users
        files            the profiles   these, even if the files were edited
        files            the ids        the profiles of the files that have these ids
        two files        nothing        those of the second (a copied checkpoint of an earlier version)

    Raises BadInput for one file and nothing kept, and for ids that the files do not have."""
    paths = settings["profiles"]
    kept = paths and (settings.get("heldout") or read_json(out / "heldout.json"))
    if kept:
        return profiles_in(kept) or profiles_with(kept["ids"], paths, out)
    if paths and len(paths) == 1:
        raise BadInput(f"{out}: heldout.json is missing: whom did it hold out? Name --profiles")
    return profiles_of_run(paths, settings["eval_size"])[1]


def profiles_with(ids, paths, out):
    """The profiles with these `ids` in the files `paths` of the run in `out`. Raises BadInput."""
    in_files = {profile.id: profile for path in paths for profile in load_profiles(path)}
    missing = [id_ for id_ in ids if id_ not in in_files]
    if missing:
        raise BadInput(
            f"{out}: held-out users of this run are not in {' '.join(paths)} any more: "
            f"{', '.join(missing[:5])}; name users with --profiles"
        )
    return [in_files[id_] for id_ in ids]
