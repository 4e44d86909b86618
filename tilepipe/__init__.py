"""MoE expert-parallel communication, measured and explained.

Knows nothing; imports nothing that takes time, so that every entry point starts fast.
"""

import sys

__version__ = "0.1.0"

# `-m`: Python is about to run a module of this package as a program. What ends it while it loads
# what it needs is told in a sentence too.
if sys.argv[:1] == ["-m"]:
    from tilepipe.stopping import end_when_asked

    end_when_asked()
