"""Talk to a policy, watch it talk with a user, or talk with the user in its place. What you see is
one dialogue and not a measurement: evaluate.py tells over many users whether a policy is good.

    python -m tools.chat runs/NAME                                 you are the one who has troubles
    python -m tools.chat --as-policy                               you reply to user number 0
    python -m tools.chat runs/NAME --show --seed 7                 watch it talk with user number 7
"""

from support.errors import BadInput
from support.results import hidden_need, scale_of_settings
from support.settings import WIDTH, Parser, fold, made_by_rule

import asyncio
import secrets
import sys
import textwrap

from evaluate import (
    BENCHMARK,
    FLOOR,
    add_policy_flags,
    add_user_flags,
    load_policy,
    who_talks,
)
from simulator import (
    User,
    load_profiles,
    make_simulator,
    need_profiles,
    read_analysis,
    refuse_foreign,
    toy_profiles,
)
from toy import world


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.chat",
        description="Talk to a policy, watch it talk with a simulated user, or talk with the user "
        "in its place. The flags about users and about the start of the dialogue are for --show "
        "and --as-policy.",
    )
    parser.add_argument(
        "policy",
        help="a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL",
        nargs="?",
        metavar="POLICY",
    )
    parser.add_argument(
        "--as-policy",
        help="type the replies to user number --seed yourself: the analysis, the emotion and the "
        "answer are printed",
        action="store_true",
    )
    parser.add_argument(
        "--show",
        help="do not talk yourself: watch the policy talk with user number --seed",
        action="store_true",
    )
    add_policy_flags(parser)
    add_user_flags(parser)
    return parser


def run(args):
    """Talk, or show. Returns the exit code; raises RunError."""
    if bool(args.policy) == args.as_policy:
        raise BadInput("name a POLICY, or --as-policy to be the policy yourself")
    if args.as_policy:
        return as_policy(args)
    return show(args) if args.show else chat(args)


# --------------------------------------------------------------------------------------- talk to it


def chat(args):
    """A terminal chat with the policy: you are the one who has troubles. Thoughts are dimmed."""
    policy = load_policy(args.policy, args)
    agent = policy.make_agent(secrets.randbits(32))  # a seed: every chat is another one
    print(f"You talk to {policy.label}. An empty line, exit, quit or Ctrl-D ends.")
    is_toy = policy.run_settings.get("model", args.policy) == "toy"
    if is_toy:
        print(
            "It knows a few hundred words; try:\n"
            "    My sister forgot my birthday. I feel hurt. Nobody knows how it feels."
        )
    with asyncio.Runner() as runner:
        while not ends_the_talk(line := ask_line("you> ")):
            if is_toy:
                print_unknown_words(line)
            reply = runner.run(agent.reply(line))
            if reply is None:
                print("(its context is full)")
                break
            if reply.thought:
                print(dimmed(f"({reply.thought})"))
            if reply.malformed:
                print(f"it>  (malformed) {reply.text}")
                break
            print(f"it>  {reply.visible}")
    return 0


def ends_the_talk(line):
    """Does a line that was typed say that the talk is over?"""
    return line.strip().lower() in ("", "exit", "quit")


def print_unknown_words(text):
    """Print the words of a typed text that are not in the toy's world."""
    unknown = world.unknown_words(text)
    if unknown:
        print(f"    (words that the toy does not know: {', '.join(unknown)})")


def ask_line(prompt):
    """A line from the terminal; "" at its end (Ctrl-D)."""
    try:
        return input(prompt).strip()
    except EOFError:
        print()
        return ""


def dimmed(text):
    """`text` in grey, on a terminal."""
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


# ----------------------------------------------------------------------------------- in its place


def as_policy(args):
    """A talk with a user whose replies you type. It ends where the benchmark's dialogues end, or
    with an empty line."""
    name = args.simulator or "toy"
    simulator = make_simulator(
        name,
        args.lang or "en",
        args.difficulty or "vanilla",
        temperature=args.simulator_temperature,
    )
    if not args.profiles:
        need_profiles(name)
    people = load_profiles(args.profiles) if args.profiles else toy_profiles("heldout")
    refuse_foreign(name, people)
    profile = people[args.seed % len(people)]
    user = ShownUser(simulator, profile, args.start)
    print(f"\n{profile.player}\n")
    print(f"You are their friend: {args.max_turns} replies. An empty line, exit or quit ends it.")
    if name.startswith("toy"):
        print(
            "This user knows the toy's sentences only; python -m toy.world prints some that help."
        )
    with asyncio.Runner() as runner:
        runner.run(simulator.check())
        line = runner.run(user.open())
        if profile.first_talk:
            user.show(f"user    {line}")
        for turn in range(1, args.max_turns + 1):
            reply = ask_line("you> ")
            if ends_the_talk(reply):
                break
            if name.startswith("toy"):
                print_unknown_words(reply)
            runner.run(user.feel(reply))
            if user.emotion >= 100 or user.emotion <= FLOOR or turn == args.max_turns:
                break
            _, goodbye = runner.run(user.answer())
            if goodbye:
                break
    scale = scale_of_settings({"start": args.start, "max_turns": args.max_turns})
    print(f"final emotion {user.emotion} ({scale})")
    print(fold(hidden_need(profile)))
    return 0


# ------------------------------------------------------------------------------------ watch it talk

INDENT = 26  # columns of the bar and the emotion in front of a line


def show(args):
    """One dialogue before your eyes: the emotion as a bar, thought and analysis dimmed."""
    policy, simulator, users, settings = who_talks(args, args.policy)
    profile = users[args.seed % len(users)]
    user = ShownUser(simulator, profile, args.start, name=f"show {profile.id}")
    seed = [args.seed, BENCHMARK, 0]  # of the first dialogue of evaluate.py
    agent = ShownAgent(policy.make_agent(seed), user)
    print(f"{policy.label}\n\n{profile.player}\n")
    episode = asyncio.run(talk(agent, user, args.max_turns))
    scale = scale_of_settings(settings)
    print(f"ended by {episode.ended}, final emotion {episode.emotion} ({scale})")
    print(fold(hidden_need(profile)))
    by_rule = made_by_rule(settings["simulator"])
    if by_rule:
        print(fold(by_rule))
    return 0


async def talk(agent, user, max_turns):
    """The dialogue of a ShownAgent with a ShownUser, from its first line. Returns the Episode."""
    from rlver import converse  # here and not above: rlver.py loads torch

    await user.simulator.check()
    first_line = await user.open()
    if user.profile.first_talk:  # else it was made by the reply hop, and was shown there
        user.show(f"user    {first_line}")
    return await converse(agent, user, first_line, max_turns, floor=FLOOR)


class ShownUser(User):
    """A user who is watched: each step of its prompt chain is printed as it happens."""

    def show(self, text, hidden=""):
        """Print a line with the user's emotion as a bar before it, and above it what the other side
        does not see."""
        for line in hidden.splitlines():
            print(dimmed(line))
        print(f"{'#' * round(self.emotion / 5):-<20} {self.emotion:3}  {text}")

    async def answer(self):
        """As simulator.User.answer."""
        line, goodbye = await super().answer()
        self.show(f"user    {line}")
        return line, goodbye

    async def feel(self, reply):
        """As simulator.User.feel. What the answer says of the reply and of the feeling is shown."""
        analysis, change = await super().feel(reply)
        answer = read_analysis(analysis)
        sentences = " ".join(answer[key] for key in ("content", "activity", "analysis"))
        text = fold(f"felt: {sentences} ({change:+d})", WIDTH - INDENT)
        self.show(f"({change:+d})", textwrap.indent(text, " " * INDENT))
        return analysis, change


class ShownAgent:
    """An agent that is watched: what it says is shown by its ShownUser."""

    def __init__(self, agent, user):
        self.agent, self.user = agent, user

    @property
    def segments(self):
        """As policy.Agent.segments."""
        return self.agent.segments

    async def reply(self, line):
        """As policy.Agent.reply."""
        reply = await self.agent.reply(line)
        if reply:
            text = reply.text if reply.malformed else reply.visible
            self.user.show(f"policy  {text}", textwrap.indent(reply.thought, " " * INDENT))
        return reply


if __name__ == "__main__":
    sys.exit(main())
