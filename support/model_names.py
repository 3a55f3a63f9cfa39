"""support/model_names.py - the names of models on the command line, in files and in messages."""

from support.errors import BadInput

import contextlib
import os
import re
from urllib.parse import urlsplit

# The --simulator names of scripted users, and what the scripts are. They cost nothing, log no
# calls, and can play only the people that were made for them.
SCRIPTED = {
    "toy": "a script. It knows a small grammar and cannot judge comfort",
    "toy-weak": "a script. It counts words and is made to be hacked",
}


def scripted_notice(simulator_name, reader=None):
    """A sentence that says that this user is scripted, or "". reader: what hears in its place."""
    if simulator_name not in SCRIPTED:
        return ""
    if reader:
        return f"The user {simulator_name} speaks by a script; what it feels is read from {reader}."
    return f"The user {simulator_name} is {SCRIPTED[simulator_name]}."


def split_name(name):
    """A --simulator value in its parts (kind, model, address): split at the first ":" and, for
    openai, the last "@". Raises BadInput."""
    kind, _, rest = name.partition(":")
    if kind != "openai":
        return kind, rest, ""
    model, _, url = rest.rpartition("@")
    with contextlib.suppress(ValueError):  # of a port, or an address in brackets
        if model and re.match(r"https?://[^\s/]", url) and urlsplit(url).port != 0:
            return kind, model, url
    raise BadInput(f"{name}: openai:MODEL@URL is needed, the URL with http:// or https://")


def from_anywhere(name):
    """A model's name. An existing directory becomes an absolute path: a run may be resumed, and its
    config.json read, from another directory. The model of a user follows "local:"."""
    place = name.removeprefix("local:")
    if name in SCRIPTED or not os.path.isdir(place):
        return name
    return name[: -len(place)] + os.path.abspath(place)
