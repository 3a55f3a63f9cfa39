"""toy/words.py - the words of the toy's world (toy/world.py): who its people are, what troubles
them, what they say, and what can be said to them.

Most lists exist twice: "train" for the training users, "heldout" for the held-out users. The two
share no person, no event, no feeling and no wording of a need.

The starting policy is trained on sentences made of these words. After an edit of any word make it
again (python recipes/make_toy_policy.py); until then a test fails. The order of a list counts as well,
because words are drawn by their place in it.
"""

from dataclasses import dataclass
from itertools import product

from emotion import NEEDS


def lines(text):
    """The lines of a block of text, without indentation and without empty lines."""
    stripped = [line.strip() for line in text.split("\n")]
    return [line for line in stripped if line]


def splits(train, heldout):
    """{"train": list of lines, "heldout": list of lines}, of two blocks of text."""
    return {"train": lines(train), "heldout": lines(heldout)}


# ------------------------------------------------------------------------------ people and troubles

# Who hurt the user: "My sister forgot my birthday."
PEOPLE = splits(
    train="""
        sister
        brother
        boss
        roommate
        husband
        teacher
        neighbor
        father
        mother
        coworker
        partner
        friend
    """,
    heldout="""
        cousin
        coach
        landlord
        uncle
        wife
        manager
    """,
)

# What that person did.
EVENTS = splits(
    train="""
        forgot my birthday
        shouted at me in front of everyone
        read my diary
        sold my bike without asking
        stopped answering my calls
        laughed at my plan
        took credit for my work
        cancelled our trip
        told everyone my secret
        broke my guitar
        left me at the station
        lied about the money
    """,
    heldout="""
        threw away my letters
        missed my graduation
        gave my room to a stranger
        blamed me for the mistake
        ignored me at dinner
        copied my project
    """,
)

# How the user feels: "I feel hurt."
FEELINGS = splits(
    train="""
        hurt
        angry
        lonely
        ashamed
        anxious
        jealous
        tired
        lost
        guilty
        empty
    """,
    heldout="""
        bitter
        nervous
        homesick
        worthless
        numb
    """,
)

# Further facts of the story. A guarded user tells these before it shows its need.
DETAILS = splits(
    train="""
        It was last Monday.
        Nobody else saw it.
        We have not spoken since.
        I keep seeing it again.
        It was not the first time.
        I did not sleep after that.
    """,
    heldout="""
        It was on a cold morning.
        Two people were watching.
        I left without a word.
        My phone is silent now.
    """,
)

# The users' own names.
NAMES = splits(
    train="""
        Anna
        Ben
        Clara
        David
        Emma
        Felix
        Grace
        Henry
        Iris
        Jonas
    """,
    heldout="""
        Karl
        Lena
        Martin
        Nora
        Oscar
        Paula
    """,
)

# (main group of a persona, its traits)
PERSONAS = [
    ("negative", ["irritable", "suspicious", "vain"]),
    ("passive", ["anxious", "modest", "patient"]),
    ("avoidant", ["sensitive", "cautious", "tolerant"]),
]

PERSON_WORDS = set(PEOPLE["train"] + PEOPLE["heldout"])
FEELING_WORDS = set(FEELINGS["train"] + FEELINGS["heldout"])


# --------------------------------------------------------------------------------- the hidden needs

# What the policy's thoughts say behind "wants ", for each of NEEDS.
WORD_IN_THOUGHT = dict(
    zip(NEEDS, "analysis advice reasons growth praise ears empathy support".split())
)

# The lines in which users show a need: {need: {"train": [...], "heldout": [...]}}.
CUES = {
    "analyse": splits(
        train="""
            I want to see the whole picture.
            I need to sort the facts out.
            It is all tangled in my head.
            I want to look at it clearly.
            Help me untangle this.
        """,
        heldout="""
            I want to weigh all sides of it.
            My head can not put it in order.
            I need a clear view of it.
        """,
    ),
    "advise": splits(
        train="""
            I do not know what to do next.
            What should I do now?
            I need a way out of this.
            I need something I can try.
            How can I fix this?
        """,
        heldout="""
            I have no plan for tomorrow.
            Which step comes first?
            I need a way to mend this.
        """,
    ),
    "explain": splits(
        train="""
            Why would anyone act like that?
            I can not understand the reason.
            What were they thinking?
            I keep asking myself why.
            It makes no sense to me.
        """,
        heldout="""
            What goes on in a mind like that?
            I search for the reason every day.
            I would love to know why.
        """,
    ),
    "reflect": splits(
        train="""
            Maybe I should learn from this.
            I want to understand myself better.
            What does it say about me?
            I want to grow from it.
            I wonder about my own part.
        """,
        heldout="""
            I want to become wiser from it.
            Maybe there is a lesson in it.
            I look at my own part a lot.
        """,
    ),
    "praise": splits(
        train="""
            I tried so hard.
            Nobody noticed my effort.
            I really did my best.
            I worked so long on this.
            I stayed polite the whole time.
        """,
        heldout="""
            I gave it all my effort.
            I stayed calm and nobody saw it.
            I did so much for them.
        """,
    ),
    "listen": splits(
        train="""
            I just need to let it out.
            There is so much to tell.
            Nobody ever lets me finish.
            I have to talk about it.
            Can I just talk for a while?
        """,
        heldout="""
            I have kept it in so long.
            Please let me finish for once.
            I need to talk and talk.
        """,
    ),
    "empathise": splits(
        train="""
            Nobody knows how it feels.
            It hurts so deep inside.
            I cried the whole night.
            It is so heavy on my heart.
            No one feels this with me.
        """,
        heldout="""
            My heart is so heavy.
            I cried until morning.
            Nobody feels how deep it goes.
        """,
    ),
    "side": splits(
        train="""
            They say it was my fault.
            I am not the bad one here.
            Everyone blames me.
            I did not start this.
            Why am I the one to say sorry?
        """,
        heldout="""
            They all think I am the bad one.
            I never started it.
            And I should say sorry for that?
        """,
    ),
}


# ------------------------------------------------------------------------------------ the replies


@dataclass(frozen=True)
class Act:
    """A kind of reply, and all of its sentences: "OPENING BODYENDING" for each opening, body and
    ending. In all three, <P> stands for the person and <F> for the feeling."""

    openings: list
    bodies: list
    endings: list

    def all_parts(self):
        """The (opening, body, ending) of every sentence."""
        return product(self.openings, self.bodies, self.endings)

    def draw_parts(self, rng):
        """The (opening, body, ending) of one sentence at random."""
        opening = rng.choice(self.openings)
        body = rng.choice(self.bodies)
        ending = rng.choice(self.endings)
        return opening, body, ending


def make_act(openings, bodies, endings):
    """An Act. openings, bodies: blocks of lines. endings: a list, because an ending may begin with
    a space (" here."), which `lines` would strip."""
    return Act(lines(openings), lines(bodies), endings)


def join_parts(parts, person, feeling):
    """The sentence of (opening, body, ending), about this person and this feeling."""
    opening, body, ending = parts
    sentence = f"{opening} {body}{ending}"
    sentence = sentence.replace("<P>", person)
    return sentence.replace("<F>", feeling)


# Each of these eight acts serves one need and has its name.
ACTS = {}

ACTS["analyse"] = make_act(
    openings="""
        Looking at it calmly,
        Taking it apart,
        Seen from above,
        Step by step,
        If we sort it,
    """,
    bodies="""
        there are two problems
        facts and feelings are mixed
        trust is one part
        the pattern counts most
        your <P> is one half
        being <F> is one half
    """,
    endings=[".", " here.", " as I see it."],
)

ACTS["advise"] = make_act(
    openings="""
        Maybe you could
        Next you can
        It may help to
        My advice is to
        Tomorrow you could
    """,
    bodies="""
        tell your <P> one thing
        write down your wishes
        ask for ten minutes
        pick a calm evening
        set one clear limit
        say that you are <F>
    """,
    endings=[".", " first.", " before you decide."],
)

ACTS["explain"] = make_act(
    openings="""
        Perhaps your <P>
        I guess your <P>
        It seems your <P>
        Deep down your <P>
        That day your <P>
    """,
    bodies="""
        was afraid of looking weak
        did not know how to ask
        carried too much
        never learned to apologise
        wanted to stay in control
        thought silence was safer
    """,
    endings=[".", " back then.", " and left you <F>."],
)

ACTS["reflect"] = make_act(
    openings="""
        What could this teach you about
        What do you notice about
        What would you change in
        What does feeling <F> show about
        What does your <P> show about
    """,
    bodies="""
        your limits
        the way you ask
        your old habits
        your own wishes
        who you become
        what you need
    """,
    endings=["?", " these days?", " over time?"],
)

ACTS["praise"] = make_act(
    openings="""
        It took courage to
        I admire how you could
        Not many people would
        You did well to
        It was strong to
    """,
    bodies="""
        stay kind to your <P>
        admit you are <F>
        keep going all week
        hold your temper
        tell the truth
        think before answering
    """,
    endings=[".", " through all that.", " without help."],
)

ACTS["listen"] = make_act(
    openings="""
        I am here,
        Take your time,
        I am all ears,
        No rush,
        Go on,
    """,
    bodies="""
        tell me about your <P>
        let it all out
        say whatever comes
        start wherever you like
        I want the whole story
        tell me why you are <F>
    """,
    endings=[".", " right now.", " at your own pace."],
)

ACTS["empathise"] = make_act(
    openings="""
        You must be so <F>
        No wonder you are <F>
        I feel how <F> you are
        Anyone would be <F>
        Of course you are <F>
    """,
    bodies="""
        deep inside
        after what your <P> did
        when night comes
        each time it returns
        and alone with it
        with every breath
    """,
    endings=[".", " and it aches.", " for so long."],
)

ACTS["side"] = make_act(
    openings="""
        You did nothing wrong
        None of this is your fault
        You are right
        The blame is not yours
        I take your side
    """,
    bodies="""
        in this
        against your <P>
        from start to end
        though it left you <F>
        and your <P> knows it
        today
    """,
    endings=[".", " no doubt.", ", I mean it."],
)

# The other three acts are bad habits, which serve no need.
HABITS = ["cheer", "dismiss", "topic"]

ACTS["cheer"] = make_act(
    openings="""
        Cheer up,
        Come on,
        Do not worry,
    """,
    bodies="""
        it will be fine
        others have it worse
        tomorrow is a new day
    """,
    endings=[".", " you will see."],
)

ACTS["dismiss"] = make_act(
    openings="""
        You think too much
        Just forget it
        It is no big thing
    """,
    bodies="""
        and move on
        and relax
        and smile a bit
    """,
    endings=[".", " for once."],
)

ACTS["topic"] = make_act(
    openings="""
        By the way,
        Anyway,
        So,
    """,
    bodies="""
        did you see the game
        what was for lunch
        have you heard the song
    """,
    endings=["?", " last night?"],
)
