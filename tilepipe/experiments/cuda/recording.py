"""Record a fused launch on the GPU: stamped launches and others in turn, after all that is timed.

Knows nothing of what a launch does and of how stamps lie in memory.

What stamping costs is measured, not assumed: stamped launches take turns with the same launch
without stamps. What stamps say of a breakdown's last term is said as the breakdown says it, beside
the launch that the term is taken from: stamped launches of that take turns, too. Spans are those of
the stamped launch whose time is the median of all of them; a term is the median over several.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.kernels.overlap.home import HomePlan
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.kernels.overlap.stamped import (
    clear_tracks,
    known_of,
    most_stamps,
    spans_of_launch,
    words_of,
)
from tilepipe.kernels.spans import Stamped
from tilepipe.measure.stats import integer_median
from tilepipe.records import Span
from tilepipe.results.sms import NO_LOSS, Loss, late_loss, late_ns, tail_loss, tail_ns

__all__ = ["FIRST_ROOM", "Recordable", "Recorded", "Taken", "record", "take", "told"]

FUSED, BESIDE = "fused", "gemm_contended"
_NUM_PAIRS = 15
# Of those, the stamped ones nearest to their median from which terms are read.
_NUM_READ = 3
FIRST_ROOM, _MAX_ROOM = 1 << 11, 1 << 15  # stamps of a warp


@runtime_checkable
class Recordable(Protocol):
    """A trial whose contenders `fused` and `gemm_contended` can leave stamps."""

    session: CudaSession

    def prepare(self, contender: str, launch: int) -> None:
        """Write the inputs of a launch on all own ranks; outside every window."""

    def opening(self, contender: str) -> Callable[[], None]:
        """Opens a launch of a contender."""

    def stamped(self, contender: str, num_stamps: int) -> BoundLaunch:
        """The launch of a contender, whose warps have room for so many stamps each; 0: leave
        none."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the recorded launch of the ranks of this process has left."""

    spans: dict[int, tuple[Span, ...]]  # by rank
    counts: dict[int, dict[str, int]]  # by rank, ns; see `record`
    loss: Loss = NO_LOSS  # beside `gemm_contended`, the median of those that were read


@dataclass(frozen=True, kw_only=True)
class _Run:
    """One stamped launch."""

    start_ns: int  # of the kernel, on the host's monotonic clock
    stage_ns: int  # of the kernel, by events
    words: NDArray[np.int32]  # tracks
    known: dict[int, Stamped]  # by rank


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Launches with stamps and without, done, with nothing read yet."""

    bound: dict[str, BoundLaunch]  # by contender
    unstamped_ns: list[int]  # of the kernels of `fused`, by events
    runs: dict[str, list[_Run]]


def record(trial: Recordable, launch: int) -> Recorded:
    """Take launches and tell what they have left; raises what `take` raises."""
    return told(take(trial, launch))


def take(trial: Recordable, launch: int, *, num_pairs: int = _NUM_PAIRS) -> Taken:
    """Launch `fused` with stamps and without, and `gemm_contended` with, in turn; the part that
    needs the GPU.

    Leaves outputs of a stamped launch of `fused` behind, to be checked. Raises RuntimeError where
    no track has room for the stamps of its warp.
    """
    bound = {contender: _with_room(trial, contender, launch) for contender in (BESIDE, FUSED)}
    unstamped = trial.stamped(FUSED, 0)
    plain: list[int] = []
    runs: dict[str, list[_Run]] = {contender: [] for contender in bound}
    for left in reversed(range(num_pairs)):
        runs[BESIDE].append(_run(trial, BESIDE, bound[BESIDE], launch))
        for stamps in (left % 2 == 1, left % 2 == 0):  # at last with stamps
            if stamps:
                runs[FUSED].append(_run(trial, FUSED, bound[FUSED], launch))
            else:
                plain.append(_time(trial, FUSED, unstamped, launch)[1])
    return Taken(bound=bound, unstamped_ns=plain, runs=runs)


def told(taken: Taken) -> Recorded:
    """Spans of `fused`, and counts of each rank: unstamped_ns and stamped_ns, medians of launches
    in turn; recorded_ns of the launch that the spans are of, all three by events; and what stamps
    say of the term `late` (dispatch_gemm) or `tail` (gemm_combine): stamped_late_ns or
    stamped_tail_ns, of `fused` alone, and stamped_late_loss_ns or stamped_tail_loss_ns, beside
    `gemm_contended`."""
    homewards = isinstance(taken.bound[FUSED].plan, HomePlan)
    term, alone, loss = ("tail", tail_ns, tail_loss) if homewards else ("late", late_ns, late_loss)
    nearest = {contender: _nearest(runs) for contender, runs in taken.runs.items()}
    read = {
        contender: [
            spans_of_launch(run.words, taken.bound[contender], run.known, base_ns=run.start_ns)
            for run in runs
        ]
        for contender, runs in nearest.items()
    }
    losses = [loss(*pair) for pair in zip(read[FUSED], read[BESIDE], strict=True)]
    middle = sorted(losses, key=lambda lost: lost.all_ns)[len(losses) // 2]
    counts = {
        "unstamped_ns": _median(taken.unstamped_ns),
        "stamped_ns": _median([run.stage_ns for run in taken.runs[FUSED]]),
        "recorded_ns": nearest[FUSED][0].stage_ns,
        f"stamped_{term}_ns": _median([alone(spans) for spans in read[FUSED]]),
        f"stamped_{term}_loss_ns": middle.all_ns,
    }
    spans = read[FUSED][0]
    return Recorded(spans=spans, counts={rank: dict(counts) for rank in spans}, loss=middle)


def _median(values: Sequence[int]) -> int:
    return int(integer_median(np.array(values)))


def _nearest(runs: Sequence[_Run]) -> list[_Run]:
    """Those whose times are nearest to the median, the nearest first."""
    middle = _median([run.stage_ns for run in runs])
    return sorted(runs, key=lambda run: abs(run.stage_ns - middle))[:_NUM_READ]


def _with_room(trial: Recordable, contender: str, launch: int) -> BoundLaunch:
    """A stamped launch whose tracks have had room for all stamps, with as much again to spare."""
    room = FIRST_ROOM
    while room <= _MAX_ROOM:
        bound = trial.stamped(contender, room)
        _time(trial, contender, bound, launch)
        most = most_stamps(bound)
        if 2 * most <= room:
            return bound
        room = 1 << (2 * most - 1).bit_length()
    raise RuntimeError(
        f"measure.timeline=true: a warp leaves more than {_MAX_ROOM // 2} stamps; lower "
        "workload.num_tokens, or raise kernel.num_comm_ctas"
    )


def _time(trial: Recordable, contender: str, bound: BoundLaunch, launch: int) -> tuple[int, int]:
    """Start and time of the kernel of one launch, opened and checked like any other."""
    session = trial.session
    group = session.group
    group.refresh_plan()
    trial.prepare(contender, launch)
    if bound.tracks is not None:
        clear_tracks(bound)
    group.heap.barrier()
    windows = session.timer.measure([("plan", trial.opening(contender)), ("stage", bound)])
    group.check()
    return windows["start_ns"] + windows["plan"], windows["stage"]


def _run(trial: Recordable, contender: str, bound: BoundLaunch, launch: int) -> _Run:
    start_ns, stage_ns = _time(trial, contender, bound, launch)
    group = trial.session.group
    return _Run(
        start_ns=start_ns,
        stage_ns=stage_ns,
        words=words_of(bound),
        known={rank: known_of(group, bound, rank) for rank in group.ranks},
    )
