"""The tools: questions that are asked after a run.

    ability      can the model still do what it could before training?
    blind        which of two policies do people prefer, if they do not know which is which?
    chat         talk to a policy, watch it talk, or talk with a user in its place
    fitness      may a language model play the user?
    judge        what does a language model say about the dialogues?
    lens         what did one update do to every word?
    profiles     write profiles, or look for overlaps in files of them
    replay       may the user who gives the reward be trusted?
    report       what did a run learn, and which of several runs is better?
    sage         what are scores by SAGE's rule, of its released files and of ours?
    strategies   which of 24 strategies do replies use, and where do they place a policy?

python -m tools.NAME --help tells more.
"""

print(__doc__.strip())
