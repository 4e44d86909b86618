"""Launches of interpreted kernels, one after the other in a stream, streams beside each other.

Between two launches of a stream the host may do something: a function in its place.

Knows nothing of what kernels are for. Dice decide which warps run next and for how long; equal
seeds give equal runs. The clock goes on with the instructions, so a wait that is bounded in time
ends here, too.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from tests.ptx.copies import Copies
from tests.ptx.grid import Grid
from tests.ptx.memory import Fault, Memory
from tests.ptx.operations import Operations
from tests.ptx.parse import Program
from tests.ptx.races import Races, View

__all__ = ["Launch", "Machine", "Pace", "Task"]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel and what it is started with."""

    name: str
    program: Program
    arguments: tuple[int, ...]
    num_ctas: int
    shared_bytes: int

    @property
    def num_lanes(self) -> int:
        return self.num_ctas * self.program.num_threads


Task = Launch | Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How lanes take turns."""

    together: float = 0.9  # how often all warps of a stretch that stand at one place run as one
    steps: int = 400  # at a time, at most
    apart: float = 0.0  # how often lanes of a warp that have parted run in another order
    step_ns: int = 20  # that a step of some warps takes
    limit: int = 50_000_000  # instructions after which a run counts as hung


class Machine:
    """A device."""

    def __init__(
        self, memory: Memory, *, seed: int = 0, pace: Pace | None = None, races: bool = False
    ) -> None:
        """`races`: look for accesses that nothing orders, which takes some times as long."""
        self.memory, self.pace, self.looks_for_races = memory, pace or Pace(), races
        self._races: Races | None = None
        self.dice = Random(seed)
        self.now_ns = 1_000_000
        self.num_instructions = 0  # of a group of warps at once
        self._running: dict[int, tuple[Grid, Copies]] = {}

    def run(self, streams: Sequence[Sequence[Task]]) -> None:
        """Run all launches, those of a stream one after the other; raises Fault."""
        waiting: list[Iterator[Task]] = [iter(stream) for stream in streams]
        self._running = {}
        if self.looks_for_races:
            widest = [
                max((one.num_lanes for one in stream if isinstance(one, Launch)), default=0)
                for stream in streams
            ]
            self._races = Races(self.memory, widest)
        for number, launches in enumerate(waiting):
            self._begin(number, launches)
        end = self.num_instructions + self.pace.limit
        while self._running:
            number = self.dice.choice(list(self._running))
            grid, copies = self._running[number]
            self._turn(grid)
            copies.progress()
            if grid.is_done:
                copies.end()
                del self._running[number]
                self._begin(number, waiting[number])
            if self.num_instructions > end:
                raise Fault(f"not done after {self.pace.limit} instructions:\n{self._where()}")

    def host_touches(self, stream: int, places: Sequence[tuple[int, int]], *, writes: bool) -> None:
        """The host, between two launches of a stream, reads or writes (address, bytes)."""
        if self._races is None:
            return
        view, lane = View(self._races, stream, 0, 0), np.zeros(1, int)
        for address, size in places:
            if writes:
                view.write(lane, np.array([address], np.uint64), size, False)
            else:
                view.read(lane, np.array([address], np.uint64), size, False)

    def _begin(self, number: int, tasks: Iterator[Task]) -> None:
        for task in tasks:
            if isinstance(task, Launch):
                self._start(number, task)
                return
            task()

    def _start(self, number: int, launch: Launch) -> None:
        grid = Grid(
            launch.name,
            launch.program,
            self.memory,
            launch.arguments,
            num_ctas=launch.num_ctas,
            shared_bytes=launch.shared_bytes,
        )
        if self._races is not None:
            grid.races = View(self._races, number, grid.num_lanes, grid.shared.num_bytes)
        copies = Copies(grid, self.dice, grid.races)
        grid.prepare(Operations(grid, copies, lambda: self.now_ns, grid.races).of)
        self._running[number] = grid, copies

    def _turn(self, grid: Grid) -> None:
        """Let some warps run for a while."""
        dice, counters = self.dice, grid.runnable()
        could = np.flatnonzero(counters < 2**31 - 1)
        if not len(could):
            raise Fault("all lanes wait for each other:\n" + "\n".join(grid.where()))
        warp = int(dice.choice(could))
        first, last = warp, warp + 1
        if dice.random() < self.pace.together:
            # The stretch of warps around it, so that those which lag behind catch up.
            if dice.random() < 0.5:
                first, last = int(could[0]), int(could[-1]) + 1
            else:
                same = np.flatnonzero(counters == counters[warp])
                first, last = int(same[0]), int(same[-1]) + 1
        steps = dice.randint(1, self.pace.steps)
        apart = dice.random() < self.pace.apart

        def front(places: np.ndarray) -> int:
            return int(dice.choice(places) if apart else places.min())

        before = grid.num_executed
        grid.run(slice(first, last), steps, front=front)
        self.num_instructions += grid.num_executed - before
        self.now_ns += self.pace.step_ns * (1 + grid.num_executed - before)

    def _where(self) -> str:
        lines = [line for grid, _ in self._running.values() for line in grid.where()]
        return "\n".join(lines[:20])
