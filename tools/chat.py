"""Talk to a policy, watch it talk with a user, or talk with the user in its place. One dialogue is
not a measurement: evaluate.py measures over many users whether a policy is good. (The toy knows a
few hundred words: "My sister forgot my birthday. I feel hurt.")

    python -m tools.chat runs/NAME                                 you are the user
    python -m tools.chat --as-policy                               you reply to user number 0
    python -m tools.chat runs/NAME --show --seed 7                 watch it talk with user number 7
"""

from players.check import check
from players.policies import add_flags_of_talk, find_weights, load_both_sides, load_policy
from support.command_line import SCRIPTED, WIDTH, Parser, fold, refuse_nesting, scripted_notice
from support.errors import BadInput, harmless
from support.needs import hidden_need
from support.results import analysis_in

import asyncio
import secrets
from dataclasses import replace
from textwrap import indent

from emotion import BENCHMARK, scale_in_words
from rollout import SEEDS, converse, read_reply
from simulator import EMOTION_SCHEMA

INDENT = 26 * " "  # of what the other side does not see


def say(*words):
    """Print words, which may be a model's."""
    print(harmless(" ".join(words)))


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.chat",
        description="Talk to a policy, watch it talk with a user, or talk with the user yourself.",
    )
    add = parser.add_argument
    text = "a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL"
    add("policy", help=text, nargs="?", metavar="POLICY")
    text = "reply to user number --seed yourself (python -m toy.world prints sentences)"
    add("--as-policy", help=text, action="store_true")
    text = "watch the policy talk with user number --seed"
    add("--show", help=text, action="store_true")
    add_flags_of_talk(parser)
    return parser


def run(args):
    """Talk, or show. Returns the exit code; raises RunError."""
    if bool(args.policy) == args.as_policy:
        raise BadInput("name a POLICY, or --as-policy to be the policy yourself")
    refuse_nesting()
    return chat(args) if args.policy and not args.show else show(args)


def chat(args):
    """A terminal chat with the policy, in which you are the user."""
    policy = load_policy(find_weights(args.policy, args.step), args)
    seed = secrets.randbits(32)  # every chat has another one
    agent = ShownAgent(policy.make_agent(seed=seed), "it> ")
    say(f"You talk to {policy.label}. An empty line ends the chat.")
    with asyncio.Runner() as runner:
        while line := ask_line():
            reply = runner.run(agent.reply(line))
            if reply is None or reply.malformed:
                break
    return 0


def ask_line():
    """A line from the terminal; "" at its end (Ctrl-D)."""
    try:
        return input("you> ").strip()
    except EOFError:
        print()
        return ""


def show(args):
    """Show one dialogue as it happens: the emotion as a bar, and what the user felt."""
    # With --as-policy a policy is loaded, too, but it says nothing.
    policy, simulator, profiles, settings = load_both_sides(args, args.policy or "toy")
    profile = profiles[args.seed % len(profiles)]
    user = ShownUser(simulator.user(profile, args.start, f"show {profile.id}"))
    if args.as_policy:
        agent = ShownAgent()
        say(f"You are the policy: up to {args.max_turns} replies. An empty line ends the chat.")
        if settings["simulator"] in SCRIPTED:
            say("The user follows sentences of the toy only; python -m toy.world prints some.")
    else:
        seed = [args.seed, SEEDS["benchmark"], 0]  # 0: as of the first user of evaluate.py
        agent = ShownAgent(policy.make_agent(seed=seed), "policy ")
        say(policy.label)
    notice = scripted_notice(settings["simulator"], settings["reader"])
    say(f"{fold(notice)}\n\n{profile.player}\n")

    async def talk():
        await check(simulator)
        first_line = await user.open()
        return await converse(agent, user, first_line, replace(BENCHMARK, max_turns=args.max_turns))

    episode = asyncio.run(talk())
    scale = scale_in_words(settings["start"], settings["max_turns"])
    end = "you" if args.as_policy and episode.ended == "context" else episode.ended
    say(f"ended by {end}, final emotion {episode.emotion} ({scale})")
    say(fold(hidden_need(profile)))
    return 0


class ShownUser:
    """A simulator.User who is watched: what it feels and says is printed as it happens."""

    def __init__(self, user):
        self.user = user

    def __getattr__(self, name):
        return getattr(self.user, name)  # what is not printed

    async def open(self):
        """Open the dialogue. Returns the line."""
        return self.show(await self.user.open())

    async def answer(self):
        """Say the next line. Returns (line, goodbye)."""
        line, goodbye = await self.user.answer()
        return self.show(line), goodbye

    def show(self, line):
        """Print a line with the user's emotion as a bar before it. Returns the line."""
        say(f"{'#' * round(self.emotion / 5):-<20} {self.emotion:3}  user    {line}")
        return line

    async def feel(self, reply):
        """Feel a reply, and print what the user thinks of it. Returns (text, change)."""
        text, change = await self.user.feel(reply)
        answer = analysis_in(text, EMOTION_SCHEMA)
        sentences = " ".join(answer[key] for key in ("content", "activity", "analysis")).strip()
        say(indent(fold(f"felt: {sentences} ({change:+d})", WIDTH - len(INDENT)), INDENT))
        return text, change


class ShownAgent:
    """The policy's side of a dialogue: an agent that is watched or, without an agent, you."""

    segments, cut = (), 0  # what `converse` records of an agent; it is not used here

    def __init__(self, agent=None, name=""):
        self.agent, self.name = agent, name

    async def reply(self, line):
        """Reply to a line. Returns a Reply, or None at the end of the dialogue: the context is full,
        or you have typed an empty line."""
        if not self.agent:
            text = ask_line()
            return read_reply(text, think=False) if text else None
        reply = await self.agent.reply(line)
        if reply is None:
            say("(its context is full)")
        else:
            if reply.thought:
                say(indent(reply.thought, INDENT))
            say(self.name, "(malformed) " + reply.text if reply.malformed else reply.visible)
        return reply


if __name__ == "__main__":
    raise SystemExit(main())
