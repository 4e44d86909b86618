"""Limits to measure against, and GPU benchmarks of single parts."""

import sys

# As the package's own programs: what ends one while it loads what it needs is told in a sentence.
if sys.argv[:1] == ["-m"]:
    from tilepipe.stopping import end_when_asked

    end_when_asked()
