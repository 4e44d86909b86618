"""Wall-clock limit of a block in the main thread.

Knows nothing of what runs in it.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["WallClockExceeded", "wall_clock"]


class WallClockExceeded(Exception):
    """The block ran longer than it may."""


@contextmanager
def wall_clock(limit_s: float) -> Iterator[None]:
    """Raise WallClockExceeded in the block after `limit_s` seconds; main thread only."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise WallClockExceeded(f"{limit_s:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
