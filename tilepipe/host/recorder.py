"""Stamps of one launch: what each of a rank's two threads did, one clock reading a piece of work.

Knows nothing of plans: it keeps numbers, and `host/spans.py` says what they stand for.

A lap ends what its thread has done since the lap before, so a lane has neither gaps nor overlaps.
Each lane has one writer, its thread, and its room is reserved beforehand. A launch that is not
recorded runs with NO_LANES, whose laps do nothing.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tilepipe.records import SpanKind

__all__ = ["NO_LANES", "Lane", "Lanes", "Lap", "NoLane"]


class Lap(NamedTuple):
    """One piece of work as it was stamped; -1 where a number has no meaning for it."""

    kind: SpanKind
    start_ns: int
    end_ns: int
    item: int  # send: ticket; wait, copy, tile: M tile, or a unit of the queue; reduce: first token
    part: int  # tile: N tile; send: chunk; wait: 1 where the first look found nothing
    num_rows: int


class NoLane:
    """A lane that nobody records."""

    def lap(self, kind: SpanKind, item: int = -1, part: int = -1, num_rows: int = -1) -> None:
        """Nothing."""


class Lane(NoLane):
    """Laps of one thread in one launch."""

    def __init__(self, capacity: int) -> None:
        # Views: storing a number through one takes half the time of an ndarray's.
        self._end, self._item, self._part, self._rows = (
            np.zeros(capacity, np.int64).data for _ in range(4)
        )
        self._kind = [SpanKind.idle] * capacity
        self._count = 0

    def lap(self, kind: SpanKind, item: int = -1, part: int = -1, num_rows: int = -1) -> None:
        """End a piece of work now."""
        at = self._count
        self._end[at] = time.monotonic_ns()
        self._kind[at] = kind
        self._item[at] = item
        self._part[at] = part
        self._rows[at] = num_rows
        self._count = at + 1

    def laps(self, start_ns: int) -> Iterator[Lap]:
        """What was done since the launch began, in time order."""
        last_ns = start_ns
        for at in range(self._count):
            end_ns, numbers = self._end[at], (self._item[at], self._part[at], self._rows[at])
            yield Lap(self._kind[at], last_ns, end_ns, *numbers)
            last_ns = end_ns


@dataclass(frozen=True)
class Lanes:
    """The two threads of a rank."""

    computing: NoLane = field(default_factory=NoLane)
    sender: NoLane = field(default_factory=NoLane)


NO_LANES = Lanes()
