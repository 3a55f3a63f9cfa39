"""scripted.py - an agent that says by heart what a test wants said."""

from rollout import Reply, Segment


class Agent:
    """The policy's side of one dialogue, by heart: texts or Replies, in order; None, or the end of
    them: no room in the context."""

    def __init__(self, replies):
        self.replies, self.heard, self.segments = iter(replies), [], []
        self.cut = 0

    async def reply(self, line):
        self.heard.append(line)
        said = next(self.replies, None)
        self.segments.append(Segment([1]))
        if said is not None:
            self.segments.append(Segment([2, 3], log_probs=[-1.0, -1.0]))
        return Reply(said, "", said) if isinstance(said, str) else said
