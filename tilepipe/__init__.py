"""MoE expert-parallel communication, measured and explained.

Knows nothing; imports nothing that takes time, so that every entry point starts fast.
"""

import os
import sys

__version__ = "0.1.0"

# Python is about to run a module of this package as a program (`-m`), or runs the installed command
# (which processes that it starts are told to be, too): what ends it while it loads what it needs is
# told in a sentence.
_command = os.path.basename(sys.argv[0] if sys.argv else "")
if _command == "-m" or (_command == "tilepipe" and "--multiprocessing-fork" not in sys.orig_argv):
    from tilepipe.stopping import end_when_asked
    from tilepipe.streams import mend_standard_streams

    mend_standard_streams()
    end_when_asked()
