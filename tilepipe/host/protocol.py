"""The launch gate between rank processes: epoch, mailbox, zeroing.

Rules 1 to 7 of the launch protocol, checked exhaustively by the model in tests/protocol. Knows
nothing of rows.

Launch n of a rank begins after all its readers of launch n-1 have ended (the caller joins them).
It zeroes the rank's counters, then publishes `epoch << 32 | count` words to every peer, then waits
until the words of every rank carry this epoch. So no row and no flag of launch n is stored anywhere
before every receiver has finished n-1 and zeroed. Words alternate between two mailbox halves: a
rank that receives nothing may be one launch ahead, and must not overwrite counts still being read.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.fabric.host import ArraySpec, HostHeap

__all__ = ["LaunchGate", "gate_specs"]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)


def gate_specs(num_ranks: int, num_experts: int) -> dict[str, ArraySpec]:
    """Symmetric words of the gate; the last mailbox column carries the fingerprint."""
    return {
        "mailbox": ArraySpec(shape=(2, num_ranks, num_experts + 1), dtype=np.uint64),
        "gate_ready": ArraySpec(shape=(num_ranks,), dtype=np.int64),
    }


class LaunchGate:
    """Opens launches of one rank, one after the other."""

    def __init__(self, heap: HostHeap, *, fingerprint: int) -> None:
        """`fingerprint`: 32-bit hash of plan settings and layout, equal on all ranks."""
        self._heap = heap
        self._mailboxes = heap.arrays("mailbox")
        self._ready = heap.arrays("gate_ready")
        self._fingerprint = fingerprint
        self.epoch = 0

    def exchange(
        self,
        rows_to: NDArray[np.int32],  # (num_experts,) rows that this rank sends to each expert
        counters: Sequence[NDArray[Any]],  # launch counters of this rank, zeroed here
    ) -> NDArray[np.int32]:  # (num_ranks, num_experts)
        """Open a launch and return everybody's counts.

        Raises ValueError when a rank runs with other settings.
        """
        epoch = self._begin(counters)
        rank, half = self._heap.rank, epoch & 1
        words = np.append(rows_to.astype(np.uint64), np.uint64(self._fingerprint))
        words |= np.uint64(epoch) << _SHIFT
        for mailbox in self._mailboxes:
            # Single writer of row [half, rank]: this rank. Whole aligned 8-byte words; each one
            # carries its epoch, so a reader never takes a word of another launch.
            mailbox[half, rank] = words
        own = self._mailboxes[rank][half]
        self._heap.watch.until(
            lambda: bool((own >> _SHIFT == epoch).all()),
            lambda: (
                f"role gate, epoch {epoch}: no counts from ranks "
                f"{np.flatnonzero((own >> _SHIFT != epoch).any(axis=1)).tolist()}"
            ),
        )
        self._check_fingerprints(own[:, -1] & _LOW)
        counts: NDArray[np.int32] = (own[:, :-1] & _LOW).astype(np.int32)
        return counts

    def reopen(self, counters: Sequence[NDArray[Any]]) -> None:
        """Open a launch whose plan is known from an earlier exchange (rule 5)."""
        epoch = self._begin(counters)
        rank = self._heap.rank
        for words in self._ready:
            words[rank] = epoch  # single writer: this rank; monotone
        own = self._ready[rank]
        self._heap.watch.until(
            lambda: bool((own >= epoch).all()),
            lambda: (
                f"role gate, epoch {epoch}: ranks {np.flatnonzero(own < epoch).tolist()} "
                "are not ready"
            ),
        )

    def _begin(self, counters: Sequence[NDArray[Any]]) -> int:
        for words in counters:
            words[...] = 0
        self.epoch += 1
        return self.epoch

    def _check_fingerprints(self, seen: NDArray[np.uint64]) -> None:
        other = np.flatnonzero(seen != self._fingerprint)
        if len(other):
            raise ValueError(
                f"rank {other[0]} runs with other plan settings than rank {self._heap.rank}: start "
                "all ranks from one configuration"
            )
