"""Turn the signals that ask this process to end into one exception, once, and remember them.

Knows nothing of what is stopped.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["Interrupted", "Stopping"]

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The one that ends this process whatever it holds.
_LAST = 3


class Interrupted(Exception):
    """The user, or the system, asked this process to end; names the signal."""


class Stopping:
    """What this process has been asked for while it listens.

    The first signal raises Interrupted, or waits while something is held; the second changes
    nothing, so that what the first set off comes to its end; the third ends the process.
    Handlers, not a signal mask: a mask holds for one thread, and the system may choose another.
    """

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._held = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen during the block, main thread only; what was ignored before stays so (nohup)."""
        numbers = [n for n in _ASKING if signal.getsignal(n) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a signal waiting for the next `check`, but for what is `heard` in the block."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Let a signal end this part of what is held."""
        before, self._held = self._held, False
        try:
            self.check()
            yield
        finally:
            self._held = before

    def hold(self) -> None:
        """Raise nothing any more; what follows ends by itself."""
        self._held = True

    def check(self) -> None:
        """Raise what has waited, or was raised and taken by a library for a failure of its own."""
        if self._asked and not self._held:
            raise Interrupted(signal.Signals(self._asked[0]).name)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        self._asked.append(signum)
        if len(self._asked) == 1:
            self.check()
        if len(self._asked) >= _LAST:
            signal.signal(signum, signal.SIG_DFL)
            signal.raise_signal(signum)
