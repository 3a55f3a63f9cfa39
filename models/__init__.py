"""models/ - what computes: a model from a directory and into one, what one rank trains and samples
with, its checkpoint, the two engines, adapters, shards, the chat template, the distance from the
start. The room players/, the programs and the tools import it; it imports policy.py and what stands
below.
"""

import support  # noqa: F401 - it sets what torch reads when it is imported
