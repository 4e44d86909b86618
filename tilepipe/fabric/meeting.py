"""Where the processes of a group meet on the host: barriers, votes, a word of the first to all.

Knows nothing of devices and of how processes were started. Rests on a store of keys and values that
all of them reach, torch's, and on nothing but single steps of it: each wait also looks whether a
peer has failed, so nobody waits for a process that will not come, as in a collective one would.
"""

import time
from collections.abc import Callable
from typing import Protocol

from tilepipe.fabric.watch import PeerAborted

__all__ = ["Meeting", "Store"]

# Each look asks the store, which takes some 50 us; a barrier is met about as soon as the last rank
# is there.
_FIRST_NAP_S = 20e-6
_LONGEST_NAP_S = 500e-6
# A process whose device works looks for peers that have failed no more often than this.
_LOOK_S = 0.05
# Ranks that end because another one has failed are given so long to end together with it.
_LEAVE_S = 10.0


class Store(Protocol):
    """What is asked of torch.distributed.Store."""

    def add(self, key: str, amount: int, /) -> int: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def set(self, key: str, value: str, /) -> None: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


class Meeting:
    """One process of a group; all of them call the same methods in the same order."""

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        num_ranks: int,
        limit_s: float,  # launch.time_limit_s, of each wait
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._store = store
        self._limit_s = limit_s
        self._num_barriers = self._num_votes = self._num_words = 0
        self._next_look_s = 0.0

    def barrier(self) -> None:
        """Return once every rank has come as often as this one.

        Raises PeerAborted when a peer has failed, TimeoutError when one does not come.
        """
        self._num_barriers += 1
        before = (self._num_barriers - 1) * self.num_ranks
        # One counter for all barriers: nobody comes to the next one before all are here.
        if self._store.add("barrier", 1) - before < self.num_ranks:
            self._until(
                lambda: self._store.add("barrier", 0) - before >= self.num_ranks,
                f"barrier {self._num_barriers} of {self.num_ranks} ranks",
            )

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        self._num_votes += 1
        refusal = f"vote {self._num_votes} refused"
        if not yes:
            self._store.add(refusal, 1)
        self.barrier()
        return not self._store.check([refusal])

    def told_by_first(self, make: Callable[[], str]) -> str:
        """What rank 0 makes, on every rank."""
        self._num_words += 1
        key = f"word {self._num_words}"
        if self.rank == 0:
            self._store.set(key, make())
        else:
            self._until(lambda: self._store.check([key]), f"{key} of rank 0")
        return self._store.get(key).decode()

    def fail(self) -> None:
        """Tell all peers that this rank gives up."""
        self._store.add("failed", 1)

    def check_peers(self) -> None:
        """Raise PeerAborted when a peer has failed; may be called as often as one likes."""
        if time.monotonic() >= self._next_look_s:
            self._next_look_s = time.monotonic() + _LOOK_S
            if self._failed():
                raise PeerAborted(f"rank {self.rank} stopped because another rank gave up")

    def leave(self, *, fine: bool) -> bool:
        """Wait for all ranks to leave; whether all have, each of them fine. The last call.

        All get the same answer; after True collective calls may follow. Where a rank has failed,
        those that do not leave soon after are not waited for.
        """
        if not fine:
            self._store.add("broken", 1)
        deadline, hurried = time.monotonic() + self._limit_s, False
        together = self._store.add("left", 1) == self.num_ranks
        while not together and time.monotonic() < deadline:
            if not hurried and self._failed():
                deadline, hurried = min(deadline, time.monotonic() + _LEAVE_S), True
            time.sleep(_LONGEST_NAP_S)
            together = self._store.add("left", 0) == self.num_ranks
        # Who gives up waiting and who comes last may do so at once: the first word counts.
        word = self._store.compare_set("end", "", "together" if together else "apart")
        return word == b"together" and not self._store.check(["broken"])

    def _failed(self) -> bool:
        return self._store.check(["failed"])

    def _until(self, ready: Callable[[], bool], what: str) -> None:
        deadline, nap = time.monotonic() + self._limit_s, _FIRST_NAP_S
        while not ready():
            self.check_peers()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {self._limit_s:g} s (launch.time_limit_s) for "
                    f"{what}: a rank has not come; see its log"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)
