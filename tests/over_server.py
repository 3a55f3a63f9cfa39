"""over_server.py - what the tests of a simulated user over a model server share: a user there, and
a small run."""

import rlver
from runs import suited
from server import toy_people
from simulator import User, make_simulator, toy_profiles

ANN = toy_profiles("train", 1)[0]
SMALL = (
    "--steps 2 --batch-size 4 --group-size 2 --max-turns 2 --max-tokens 6 --eval-size 4 --lr 2e-3 "
    "--save-every 1"
).split()


def user_at(server, **settings):
    return User(make_simulator(f"openai:scripted@{server.url}", **settings), ANN)


def flags_of(model, url, out):
    """The flags of a small run."""
    flags = ["--model", model, "--simulator", f"openai:scripted@{url}", *SMALL]
    return [str(flag) for flag in (*flags, *toy_people(out.parent), "--out", out)]


def run(model, url, out, *flags):
    return rlver.main(suited([*flags_of(model, url, out), *flags]))
