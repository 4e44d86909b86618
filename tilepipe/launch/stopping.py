"""Turn the signals that ask this process to end into one exception, and hold them off a while.

Knows nothing of what is stopped.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "asking", "interruptible", "uninterrupted"]

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """The user, or the system, asked this process to end; names the signal."""


def asking() -> list[signal.Signals]:
    """Signals that ask this process to end; one that was ignored at its start stays so (nohup)."""
    return [number for number in _ASKING if signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the block at the first such signal; main thread only."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(signum).name)

    before = {number: signal.signal(number, stop) for number in asking()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep such signals waiting while the block stores what has been measured."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
