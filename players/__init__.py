"""players/ - what plays the users, and how it is asked: which model plays them, a reader, models on
a server and in this process, one call, the questions before the first dialogue, the policy of an
evaluation. The programs, recipes and tools import it; it imports models/, simulator.py and what
stands below.
"""

import support  # noqa: F401 - it sets what torch reads when it is imported
