"""Talk to a policy, watch it talk with a user, or talk with the user in its place. What you see is
one dialogue and not a measurement: evaluate.py tells over many users whether a policy is good.

    python -m tools.chat runs/NAME                                 you are the one who has troubles
    python -m tools.chat --as-policy                               you reply to user number 0
    python -m tools.chat runs/NAME --show --seed 7                 watch it talk with user number 7
"""

from support.errors import BadInput
from support.results import hidden_need, scale_of_settings
from support.settings import WIDTH, Parser, fold, scripted_notice

import asyncio
import secrets
import sys
import textwrap

from evaluate import BENCHMARK, FLOOR, add_policy_flags, add_user_flags, load_policy, who_talks
from simulator import User, read_analysis
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
    add = parser.add_argument
    text = "a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL"
    add("policy", help=text, nargs="?", metavar="POLICY")
    text = "type the replies to user number --seed yourself, and see analysis and emotion"
    add("--as-policy", help=text, action="store_true")
    text = "do not talk yourself: watch the policy talk with user number --seed"
    add("--show", help=text, action="store_true")
    add_policy_flags(parser)
    add_user_flags(parser)
    return parser


def run(args):
    """Talk, or show. Returns the exit code; raises RunError."""
    if bool(args.policy) == args.as_policy:
        raise BadInput("name a POLICY, or --as-policy to be the policy yourself")
    return show(args) if args.show or args.as_policy else chat(args)


# --------------------------------------------------------------------------------------- talk to it


def chat(args):
    """A terminal chat with the policy: you are the one who has troubles. Thoughts are dimmed."""
    policy = load_policy(args.policy, args)
    agent = policy.make_agent(secrets.randbits(32))  # a seed: every chat is another one
    print(f"You talk to {policy.label}. An empty line ends.")
    is_toy = policy.run_settings.get("model", args.policy) == "toy"
    if is_toy:
        print(
            "It knows a few hundred words; try:\n"
            "    My sister forgot my birthday. I feel hurt. Nobody knows how it feels."
        )
    with asyncio.Runner() as runner:
        while line := ask_line("you> ", is_toy):
            reply = runner.run(agent.reply(line))
            if reply is None:
                print("(its context is full)")
                break
            if reply.thought:
                print(dimmed(f"({reply.thought})"))
            print(f"it>  {'(malformed) ' + reply.text if reply.malformed else reply.visible}")
            if reply.malformed:
                break
    return 0


def ask_line(prompt, is_toy):
    """A line from the terminal; "" at its end (Ctrl-D). The toy does not know every word: the other
    words are printed."""
    try:
        line = input(prompt).strip()
    except EOFError:
        print()
        return ""
    unknown = world.unknown_words(line) if is_toy else ()
    if unknown:
        print(f"    (words that the toy does not know: {', '.join(unknown)})")
    return line


def dimmed(text):
    """`text` in grey, on a terminal."""
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


# ------------------------------------------------------------------- watch it talk, or in its place

INDENT = 26  # columns of the bar and the emotion in front of a line


def show(args):
    """One dialogue before your eyes: the emotion as a bar, thought and analysis dimmed."""
    # With --as-policy a policy is loaded, too, and says nothing.
    policy, simulator, users, settings = who_talks(args, args.policy or "toy")
    profile = users[args.seed % len(users)]
    user = ShownUser(simulator, profile, args.start, name=f"show {profile.id}")
    if args.as_policy:
        agent = TypingAgent(is_toy=settings["simulator"].startswith("toy"))
        print(f"You are their friend: {args.max_turns} replies. An empty line ends.")
        if agent.is_toy:
            print("This user knows the toy's sentences only; python -m toy.world prints some.")
    else:
        seed = [args.seed, BENCHMARK, 0]  # of the first dialogue of evaluate.py
        agent = ShownAgent(policy.make_agent(seed), user)
        print(policy.label)
    print(f"\n{profile.player}\n")
    episode = asyncio.run(talk(agent, user, args.max_turns))
    # an empty line leaves no reply, as a full context does
    ended = "you" if args.as_policy and episode.ended == "context" else episode.ended
    scale = scale_of_settings(settings)
    print(f"ended by {ended}, final emotion {episode.emotion} ({scale})")
    print(fold(hidden_need(profile)))
    notice = scripted_notice(settings["simulator"])
    if notice:
        print(fold(notice))
    return 0


async def talk(agent, user, max_turns):
    """The dialogue of an agent with a ShownUser, from its first line. Returns the Episode."""
    from rlver import converse  # here and not above: rlver.py loads torch

    await user.simulator.check()
    first_line = await user.open()
    if user.profile.first_talk:  # else `answer` made it, and has shown it
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
        self.segments = agent.segments

    async def reply(self, line):
        """As policy.Agent.reply."""
        reply = await self.agent.reply(line)
        if reply:
            text = reply.text if reply.malformed else reply.visible
            self.user.show(f"policy  {text}", textwrap.indent(reply.thought, " " * INDENT))
        return reply


class TypingAgent:
    """You, in the place of a policy."""

    def __init__(self, is_toy):
        self.is_toy, self.segments = is_toy, []

    async def reply(self, line):
        """As policy.Agent.reply: what is typed, or None for an empty line."""
        from policy import Reply  # here and not above: policy.py loads torch

        text = ask_line("you> ", self.is_toy)
        return Reply(text, text, "", malformed=False) if text else None


if __name__ == "__main__":
    sys.exit(main())
