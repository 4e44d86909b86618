"""Bounded waits between rank processes: a limit, an abort word, one sentence when it ends.

Knows nothing of what is waited for.
"""

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["THREAD_LOOK_S", "PeerAborted", "Watch", "WatchdogTimeout"]

# A thread that sleeps until another one of its process wakes it looks for peers that gave up, and
# at its limit, this often.
THREAD_LOOK_S = 0.05

# A sleeping wait gives the interpreter lock and the core away; the first naps are short because a
# row is often only microseconds out. Each look costs some 30 us of a core that others compute on,
# so naps grow to where that is a few percent; the longest also bounds how late a wait may notice.
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 500e-6


class WatchdogTimeout(RuntimeError):
    """A wait reached its limit; the message names rank, role, what was expected and seen."""


class PeerAborted(RuntimeError):
    """Another rank gave up first; its own error is the one to read."""


class Watch:
    """Waits of one rank. `abort` is its row of single-writer words, one per peer."""

    def __init__(
        self,
        rank: int,
        abort: NDArray[np.int64],  # (num_ranks,) nonzero once that peer has given up
        limit_s: float,
        *,
        give_up: Callable[[], None],  # tells all peers; called when a wait reaches its limit
    ) -> None:
        self._rank = rank
        self._give_up = give_up
        self._abort = abort
        self._limit_s = limit_s

    def until(
        self,
        ready: Callable[[], bool],
        describe: Callable[[], str],
        *,
        limit: tuple[str, float] | None = None,  # another key and its seconds
        sleep: Callable[[float], object] = time.sleep,
    ) -> bool:
        """Return once `ready()` is true: whether the first look found it otherwise.

        Raises WatchdogTimeout or PeerAborted where it does not become true.
        `describe()` is called at the limit only; it says what was awaited and what was seen.
        `sleep` may return early where another thread can tell that something has changed.
        """
        if ready():
            return False
        key, limit_s = limit or ("launch.watchdog_ms", self._limit_s)
        deadline = time.monotonic() + limit_s
        nap = _FIRST_NAP_S
        while True:
            sleep(nap)
            if ready():
                return True
            self.check_peers()
            if time.monotonic() > deadline:
                self._give_up()
                raise WatchdogTimeout(
                    f"rank {self._rank} waited {limit_s:g} s ({key}): {describe()}"
                )
            nap = min(2 * nap, _LONGEST_NAP_S)

    def check_peers(self) -> None:
        """Raise PeerAborted when a peer has given up."""
        gone = np.flatnonzero(self._abort)
        if len(gone):
            raise PeerAborted(f"rank {self._rank} stopped because rank {gone[0]} gave up")
