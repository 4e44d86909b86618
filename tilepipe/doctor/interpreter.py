"""Is this Python one that TilePipe runs on?

Knows nothing of the rest of TilePipe, so that it can be asked by a Python that cannot load it.
"""

import sys

from tilepipe.doctor.fact import Fact, State

__all__ = ["python_fact"]

_FIRST, _LAST = (3, 11), (3, 13)


def python_fact(version: tuple[int, int, int], prefix: str = sys.prefix) -> Fact:
    """`version` against the range of pyproject.toml."""
    spelled = ".".join(str(part) for part in version)
    allowed = ".".join(map(str, _FIRST)) + " to " + ".".join(map(str, _LAST))
    if _FIRST <= version[:2] <= _LAST:
        return Fact("python", "version", State.ok, f"{spelled} in {prefix}")
    why = (
        "every released Hydra 1.3 fails in argparse from 3.14 on"
        if version[:2] > _LAST
        else "its language and library are too old"
    )
    return Fact(
        "python",
        "version",
        State.missing,
        f"{spelled}, but TilePipe needs {allowed}: {why}",
        "make clean, then make run PYTHON=python3.13 (or another of them)",
    )
