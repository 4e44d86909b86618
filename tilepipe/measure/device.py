"""Time launches on a CUDA stream so that the host's own pace never lies inside a window.

Knows nothing of operations.

Contract. A window is a pair of events around launches. Should the device come to the first event
before the host has enqueued the launches behind it, the window holds the host's launch time. So a
spinning kernel holds the stream while the host enqueues, and afterwards that is verified: with t0
the host's time before the event ahead of the spin, the window opened at t0 + spin or later, spin
being the time between the events around it. Whatever was enqueued by then, the device never waited
for. A window for which that does not hold is thrown away, and taken again behind a spin twice as
long. Launches must therefore bear repetition.

Ranks in several processes come to their windows each in its own time. Behind the spin `meet` lets
the device wait for all of them, so that no window holds the time by which its rank was early; and
whether a window is thrown away they decide together, since all or none of them launch again.

Two events with nothing between them are 1.2 us apart, which every window holds; a chain does not
(H200, 2026-11).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch

__all__ = ["Chain", "CudaStream", "DeviceTimer", "L2Flush", "Part", "Stream"]

# What the window of this name holds, and what enqueues it.
Part = tuple[str, Callable[[], None]]

# About 300 us at 2 GHz: ten launches and their events.
_SPIN_CYCLES = 600_000
# Of the L2 cache: its replacement is not known to be strictly by age.
_FLUSH_SIZES = 4
# 256 times that is 77 ms, in which no launch fails to be enqueued.
_MAX_DOUBLINGS = 8
# Windows in a row that a quarter of the spin would have covered, after which it is halved: one
# stall of the host shall not lengthen every launch that follows.
_NUM_CALM = 32


class Stream(Protocol):
    """What the timer asks of a device, on one stream and in its order."""

    def mark(self) -> Any:
        """Enqueue an event."""

    def spin(self, cycles: int) -> None:
        """Enqueue a kernel that takes that many cycles."""

    def elapsed_ns(self, first: Any, last: Any) -> int:
        """Device time between two marks; waits for the second."""

    def drain(self) -> None:
        """Wait until the device has nothing left to do."""

    def now_ns(self) -> int:
        """The host's monotonic clock."""


@dataclass(frozen=True)
class CudaStream:
    """A stream of torch, of the current device."""

    stream: torch.cuda.Stream

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream)
        return event

    def spin(self, cycles: int) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    def elapsed_ns(self, first: torch.cuda.Event, last: torch.cuda.Event) -> int:
        last.synchronize()
        elapsed_ms: float = first.elapsed_time(last)
        return round(elapsed_ms * 1e6)

    def drain(self) -> None:
        torch.cuda.synchronize(self.stream.device)

    def now_ns(self) -> int:
        return time.monotonic_ns()


class L2Flush:
    """Pushes everything else out of the L2 cache: reads several times its size.

    Reads, since lines that a flush has written would have to leave for memory inside the window: a
    reduction of 0.14 ms took 0.17 ms behind a flush by writes (H200).
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        l2_bytes = torch.cuda.get_device_properties(stream.device).L2_cache_size
        self._stream = stream
        num_words = _FLUSH_SIZES * l2_bytes // 4
        self._words = torch.zeros(num_words, dtype=torch.int32, device=stream.device)
        self._sum = torch.empty((), dtype=torch.int64, device=stream.device)

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            torch.sum(self._words, dim=0, out=self._sum)


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Launches back to back."""

    start_ns: int  # on the host's monotonic clock, when enqueueing began
    period_ns: int  # device time over number of repetitions
    host_bound: bool  # the device has waited for the host: the period is the host's


class DeviceTimer:
    """Windows in device time; what a first launch has to load is for warm-ups to load."""

    def __init__(
        self,
        stream: Stream,
        *,
        flush: Callable[[], None] | None = None,
        meet: Callable[[], None] | None = None,
        agree: Callable[[bool], bool] = bool,
    ) -> None:
        """`flush` enqueues what shall run ahead of every window, `meet` what waits for all ranks,
        on the same stream. `agree` makes of this process's yes or no that of all."""
        self._stream = stream
        self._flush, self._meet, self._agree = flush, meet, agree
        self._doublings = 0
        self._num_calm = 0
        self.num_repeated = 0  # windows thrown away because the host was late

    @property
    def spin_cycles(self) -> int:
        return _SPIN_CYCLES << self._doublings

    def measure(self, parts: Sequence[Part]) -> dict[str, int]:
        """Device time of each part, in ns, of one run of all on an idle device.

        `start_ns` beside them is the host's monotonic clock when enqueueing began; what flushes
        and spins comes before the window. Raises RuntimeError when the host is too slow for any
        spin.
        """
        assert "start_ns" not in dict(parts), "the name of another entry"
        while True:
            self._stream.drain()
            if self._flush is not None:
                self._flush()
            start_ns, ahead, opened = self._open()
            marks = [opened]
            for _, launch in parts:
                launch()
                marks.append(self._stream.mark())
            host_ns = self._stream.now_ns() - start_ns
            spin_ns, *parts_ns = self._between([ahead, *marks])
            if self._covered(spin_ns, host_ns):
                names = [name for name, _ in parts]
                return {"start_ns": start_ns, **dict(zip(names, parts_ns, strict=True))}
            if not self._double():
                raise RuntimeError(
                    f"the host took {host_ns / 1e6:.1f} ms to enqueue one launch, longer than the "
                    f"{spin_ns / 1e6:.1f} ms for which the device was kept busy: something else "
                    "uses the CPU, or the launch waits for the device; end that and run again"
                )

    def measure_waiting(self, launch: Callable[[], None]) -> tuple[int, int]:
        """Start, as in `measure`, and device time of a launch in which the host waits for the
        device: what the device then waits for the host is part of it."""
        self._stream.drain()
        if self._flush is not None:
            self._flush()
        start_ns, _, opened = self._open()
        launch()
        return start_ns, self._stream.elapsed_ns(opened, self._stream.mark())

    def measure_chained(self, parts: Sequence[Part], length: int) -> Chain:
        """Period of `length` repetitions of all parts that follow each other at once.

        No events between them. `host_bound` tells that the host fell behind, for a while at least,
        under the longest spin.
        """
        assert self._flush is None, "a flush would lie inside the period"
        assert length > 0
        while True:
            self._stream.drain()
            start_ns, ahead, opened = self._open()
            enqueued_ns = []
            for _ in range(length):
                for _, launch in parts:
                    launch()
                enqueued_ns.append(self._stream.now_ns() - start_ns)
            closed = self._stream.mark()
            enqueued_ns[-1] = self._stream.now_ns() - start_ns
            spin_ns, total_ns = self._between([ahead, opened, closed])
            covered = self._covered(spin_ns, _head_start(enqueued_ns, total_ns))
            if covered or not self._double():
                return Chain(
                    start_ns=start_ns,
                    period_ns=round(total_ns / length),
                    host_bound=not covered,
                )

    def _open(self) -> tuple[int, Any, Any]:
        """Hold the stream: host time, the mark ahead of the spin and the one behind it, and behind
        the ranks' meeting."""
        start_ns = self._stream.now_ns()
        ahead = self._stream.mark()
        self._stream.spin(self.spin_cycles)
        if self._meet is not None:
            self._meet()
        return start_ns, ahead, self._stream.mark()

    def _between(self, marks: Sequence[Any]) -> list[int]:
        return [self._stream.elapsed_ns(first, last) for first, last in pairwise(marks)]

    def _covered(self, spin_ns: int, host_ns: int) -> bool:
        """Whether the host was ahead, on all ranks; shortens a spin that has long been more than
        enough, on all alike."""
        if not self._agree(host_ns <= spin_ns):
            return False
        self._num_calm = self._num_calm + 1 if self._agree(4 * host_ns < spin_ns) else 0
        if self._num_calm == _NUM_CALM:
            self._num_calm = 0
            self._doublings = max(self._doublings - 1, 0)
        return True

    def _double(self) -> bool:
        """Spin longer from now on; False where that is at its limit."""
        self._num_calm = 0
        if self._doublings == _MAX_DOUBLINGS:
            return False
        self._doublings += 1
        self.num_repeated += 1
        return True


def _head_start(
    enqueued_ns: Sequence[int],  # when each repetition was, the last one with the mark behind it
    total_ns: int,  # device time of all
) -> int:
    """How long the device must have been held for each repetition to be there before its turn.

    Taken as even, turns come total_ns / length apart. Had the device waited for repetition k, that
    turn would seem to be later by k / length of the wait, which is less than all of it: so a wait
    always shows.
    """
    length = len(enqueued_ns)
    return max(there_ns - turn * total_ns // length for turn, there_ns in enumerate(enqueued_ns))
