"""Copies under way of one launch: `cp.async`, bulk copies both ways, and their barriers.

Knows nothing of instructions. A copy may be done as soon as it was started or not before somebody
waits for it: dice decide, step by step, so that a wait that is missing shows. Until a copy has
been done nobody may read where it goes, nor write where a bulk store still reads.
"""

from dataclasses import dataclass
from random import Random

import numpy as np

from tests.ptx.grid import Grid
from tests.ptx.memory import Fault
from tests.ptx.races import View

__all__ = ["Copies"]


@dataclass(eq=False)
class _Copy:
    lane: int
    group: int  # of its lane, counted from 0; bulk loads belong to none
    target: int
    source: int
    size: int  # bytes that are read
    room: int  # bytes that are written, the rest are zero
    barrier: int | None = None  # bulk loads
    bulk: bool = False
    to_shared: bool = True
    held: np.ndarray | None = None  # what a bulk store has read


@dataclass(eq=False)
class _Barrier:
    count: int
    pending: int
    phase: int = 0
    bytes: int = 0  # expected and not there
    coming: np.ndarray | None = None  # what lanes that have arrived in this phase tell
    told: np.ndarray | None = None  # what those of the latest phase have told


class Copies:
    """What has been started and is not done."""

    def __init__(self, grid: Grid, dice: Random, races: View | None) -> None:
        self.grid, self.dice, self.races = grid, dice, races
        self._pending: list[_Copy] = []
        self._committed = {bulk: np.zeros(grid.num_lanes, int) for bulk in (False, True)}
        self._barriers: dict[tuple[int, int], _Barrier] = {}

    # Starts.

    def start(
        self, lanes: np.ndarray, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray
    ) -> None:
        """16 bytes a lane to shared memory, of which `sizes` are read and the rest zero."""
        for lane, target, source, size in zip(
            lanes.tolist(), targets.tolist(), sources.tolist(), sizes.tolist(), strict=True
        ):
            if source % 16 or size > 16:
                raise Fault(f"{size} bytes from {source:#x} for 16, aligned")
            place, _ = self._shared(lane, target, 16)
            self.grid.shared.forget(place)
            if self.races is not None and size:
                self.races.read_range(lane, source, size, bulk=False)
                self.races.write_shared(np.array([lane]), np.array([place.start]), 16)
            self._add(_Copy(lane, self._group(lane, False), target, source, size, 16))

    def load_bulk(self, lane: int, target: int, source: int, size: int, barrier: int) -> None:
        """Global to shared memory; the barrier hears of the bytes."""
        self._check_bulk(target, source, size)
        self._barrier(lane, barrier)
        place, _ = self._shared(lane, target, size)
        cta = self.grid.cta_of[lane]
        for copy in self._pending:
            if copy.bulk and not copy.to_shared and copy.held is None:
                begin, end = copy.source, copy.source + copy.size
                if self.grid.cta_of[copy.lane] == cta and begin < target + size and target < end:
                    raise Fault("a bulk load goes where a bulk store still reads")
        self.grid.shared.forget(place)
        self.grid.memory.bytes_at(source, size)
        if self.races is not None:
            self.races.read_range(lane, source, size, bulk=True)
            self.races.write_shared(np.array([lane]), np.array([place.start]), size)
        self._add(_Copy(lane, -1, target, source, size, size, barrier, bulk=True))

    def store_bulk(self, lane: int, target: int, source: int, size: int) -> None:
        """Shared to global memory, part of the lane's open group."""
        self._check_bulk(target, source, size)
        place, _ = self._shared(lane, source, size)
        if not self.grid.shared.is_known(place):
            raise Fault("a bulk store reads shared memory that nobody has written")
        self.grid.memory.bytes_at(target, size)
        copy = _Copy(lane, self._group(lane, True), target, source, size, size, bulk=True)
        copy.to_shared = False
        if self.races is not None:
            one, start = np.array([lane]), np.array([place.start])
            self.races.read_shared(one, start, size, bulk=True)
            self.races.write_later(lane, copy.group, target, size)
        self._add(copy)

    def _check_bulk(self, target: int, source: int, size: int) -> None:
        if target % 16 or source % 16 or size % 16 or not size:
            raise Fault(f"a bulk copy of {size} bytes from {source:#x} to {target:#x}: not by 16")

    def _add(self, copy: _Copy) -> None:
        self._pending.append(copy)
        if self.dice.random() < 0.3:
            self._advance(copy)

    # Ends.

    def commit(self, lanes: np.ndarray, *, bulk: bool) -> None:
        self._committed[bulk][lanes] += 1

    def wait(self, lanes: np.ndarray, count: int, *, bulk: bool, read: bool) -> None:
        """All but the latest `count` groups of each lane are done, or with `read` have read."""
        chosen, committed = set(lanes.tolist()), self._committed[bulk]
        for copy in list(self._pending):
            mine = copy.bulk == bulk and copy.lane in chosen and copy.group >= 0
            if mine and copy.group < committed[copy.lane] - count:
                self._finish(copy, read=read)
        if bulk and not read and self.races is not None:
            for lane in lanes.tolist():
                self.races.written(lane, int(committed[lane]) - count)

    def progress(self) -> None:
        """Some copies get on; called now and then."""
        for copy in list(self._pending):
            if copy.bulk and self.dice.random() < 0.2:
                self._advance(copy)

    def end(self) -> None:
        """All lanes have ended; refuses copies to or from shared memory that is gone."""
        for copy in list(self._pending):
            if copy.to_shared or copy.held is None:
                raise Fault(
                    f"lane {copy.lane} has ended while a copy of {copy.size} bytes uses the CTA's "
                    "shared memory"
                )
            self._finish(copy, read=False)
        if self.races is not None:
            self.races.end()

    def _advance(self, copy: _Copy) -> None:
        if not copy.to_shared and copy.held is None:
            self._finish(copy, read=True)
        elif copy.bulk or self.dice.random() < 0.5:
            self._finish(copy, read=False)

    def _finish(self, copy: _Copy, *, read: bool) -> None:
        grid = self.grid
        if copy.to_shared:
            values = np.zeros(copy.room, np.uint8)
            values[: copy.size] = grid.memory.bytes_at(copy.source, copy.size)
            place, _ = self._shared(copy.lane, copy.target, copy.room)
            grid.shared.learn(place, values)
            if copy.barrier is not None:
                self._arrive(copy.lane, copy.barrier, num_bytes=copy.size)
        else:
            if copy.held is None:
                _, values = self._shared(copy.lane, copy.source, copy.size)
                copy.held = values.copy()
            if read:
                return
            grid.memory.bytes_at(copy.target, copy.size)[:] = copy.held
        self._pending.remove(copy)

    # Barriers.

    def init_barrier(self, lane: int, address: int, count: int) -> None:
        place, _ = self._shared(lane, address, 8)
        key = (int(self.grid.cta_of[lane]), address)
        if key in self._barriers:
            raise Fault("a barrier is set up while it is one")
        if self.races is not None:
            self.races.write_shared(np.array([lane]), np.array([place.start]), 8)
        self._barriers[key] = _Barrier(count, count)

    def drop_barrier(self, lane: int, address: int) -> None:
        self._barrier(lane, address)
        del self._barriers[int(self.grid.cta_of[lane]), address]

    def expect(self, lane: int, address: int, num_bytes: int) -> None:
        """Arrive, and expect bytes in this phase."""
        barrier = self._barrier(lane, address)
        barrier.bytes += num_bytes
        if self.races is not None:
            barrier.coming = self.races.arrive(lane, barrier.coming)
        self._arrive(lane, address, arrivals=1)

    def has_passed(self, lane: int, address: int, parity: int) -> bool:
        """Whether the phase of that parity is over; waiting may be what lets it pass."""
        cta = self.grid.cta_of[lane]
        for copy in list(self._pending):
            mine = copy.barrier == address and self.grid.cta_of[copy.lane] == cta
            if mine and self.dice.random() < 0.5:
                self._advance(copy)
        barrier = self._barrier(lane, address)
        passed = barrier.phase % 2 != parity
        if passed and self.races is not None and barrier.told is not None:
            self.races.pass_barrier(lane, barrier.told)
        return passed

    def _arrive(self, lane: int, address: int, *, arrivals: int = 0, num_bytes: int = 0) -> None:
        barrier = self._barrier(lane, address)
        barrier.pending -= arrivals
        barrier.bytes -= num_bytes
        if barrier.pending < 0 or barrier.bytes < 0:
            raise Fault("a barrier sees more than it expects")
        if barrier.pending == barrier.bytes == 0:
            barrier.phase += 1
            barrier.pending = barrier.count
            barrier.told, barrier.coming = barrier.coming, None

    def _barrier(self, lane: int, address: int) -> _Barrier:
        key = (int(self.grid.cta_of[lane]), address)
        if key not in self._barriers:
            raise Fault(f"no barrier has been set up at {address} of shared memory")
        if self.races is not None:
            place, _ = self._shared(lane, address, 8)
            self.races.read_shared(np.array([lane]), np.array([place.start]), 8)
        return self._barriers[key]

    def _group(self, lane: int, bulk: bool) -> int:
        return int(self._committed[bulk][lane])

    def _shared(self, lane: int, address: int, size: int) -> tuple[slice, np.ndarray]:
        cta = int(self.grid.cta_of[lane])
        return self.grid.shared.bytes_at(cta, address, size, align=min(size, 16))
