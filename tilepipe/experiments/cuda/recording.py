"""Record a fused launch on the GPU: stamped launches and others in turn, after all that is timed.

Knows nothing of what a launch does and of how stamps lie in memory.

What stamping costs is measured, not assumed: stamped launches take turns with the same launch
without stamps. Spans are those of the stamped launch whose time is the median of all of them; what
stamps say of a breakdown's term is the median over several.
"""

from dataclasses import dataclass
from functools import partial
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
from tilepipe.results.sms import late_ns, tail_ns

__all__ = ["FIRST_ROOM", "Recordable", "Recorded", "Taken", "record", "take", "told"]

CONTENDER = "fused"
_NUM_PAIRS = 15
# Of those, the stamped ones nearest to their median from which terms are read.
_NUM_READ = 3
FIRST_ROOM, _MAX_ROOM = 1 << 11, 1 << 15  # stamps of a warp


@runtime_checkable
class Recordable(Protocol):
    """A trial whose contender `fused` can leave stamps."""

    session: CudaSession

    def prepare(self, contender: str, launch: int) -> None:
        """Write the inputs of a launch on all own ranks; outside every window."""

    def fused(self, num_stamps: int) -> BoundLaunch:
        """The launch of `fused`, whose warps have room for so many stamps each; 0: leave none."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What the recorded launch of the ranks of this process has left."""

    spans: dict[int, tuple[Span, ...]]  # by rank
    counts: dict[int, dict[str, int]]  # by rank, ns; see `record`


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

    bound: BoundLaunch
    unstamped_ns: list[int]  # of the kernels, by events
    runs: list[_Run]


def record(trial: Recordable, launch: int) -> Recorded:
    """Take launches and tell what they have left; raises what `take` raises."""
    return told(take(trial, launch))


def take(trial: Recordable, launch: int, *, num_pairs: int = _NUM_PAIRS) -> Taken:
    """Launch `fused` with stamps and without, in turn; the part that needs the GPU.

    Leaves outputs of a stamped launch behind, to be checked. Raises RuntimeError where no track
    has room for the stamps of its warp.
    """
    bound, unstamped = _with_room(trial, launch), trial.fused(0)
    plain, runs = [], []
    for left in reversed(range(num_pairs)):
        for stamps in (left % 2 == 1, left % 2 == 0):  # at last with stamps
            if stamps:
                runs.append(_run(trial, bound, launch))
            else:
                plain.append(_time(trial, unstamped, launch)[1])
    return Taken(bound=bound, unstamped_ns=plain, runs=runs)


def told(taken: Taken) -> Recorded:
    """Spans of `fused`, and counts of each rank: unstamped_ns and stamped_ns, medians of launches
    in turn; recorded_ns of the launch that the spans are of, all three by events; and what stamps
    say of the term `late` (dispatch_gemm) or `tail` (gemm_combine), stamped_late_ns or
    stamped_tail_ns."""
    bound, plain, runs = taken.bound, taken.unstamped_ns, taken.runs
    stage_ns = np.array([run.stage_ns for run in runs])
    middle = int(integer_median(stage_ns))
    nearest = sorted(runs, key=lambda run: abs(run.stage_ns - middle))[:_NUM_READ]
    homewards = isinstance(bound.plan, HomePlan)
    term, of_spans = ("tail", tail_ns) if homewards else ("late", late_ns)
    read = [spans_of_launch(run.words, bound, run.known, base_ns=run.start_ns) for run in nearest]
    counts = {
        "unstamped_ns": int(integer_median(np.array(plain))),
        "stamped_ns": middle,
        "recorded_ns": nearest[0].stage_ns,
        f"stamped_{term}_ns": int(integer_median(np.array([of_spans(spans) for spans in read]))),
    }
    return Recorded(spans=read[0], counts={rank: dict(counts) for rank in read[0]})


def _with_room(trial: Recordable, launch: int) -> BoundLaunch:
    """A stamped launch whose tracks have had room for all stamps, with as much again to spare."""
    room = FIRST_ROOM
    while room <= _MAX_ROOM:
        bound = trial.fused(room)
        _time(trial, bound, launch)
        most = most_stamps(bound)
        if 2 * most <= room:
            return bound
        room = 1 << (2 * most - 1).bit_length()
    raise RuntimeError(
        f"measure.timeline=true: a warp leaves more than {_MAX_ROOM // 2} stamps; lower "
        "workload.num_tokens, or raise kernel.num_comm_ctas"
    )


def _time(trial: Recordable, bound: BoundLaunch, launch: int) -> tuple[int, int]:
    """Start and time of the kernel of one launch, opened and checked like any other."""
    session = trial.session
    group = session.group
    group.refresh_plan()
    trial.prepare(CONTENDER, launch)
    if bound.tracks is not None:
        clear_tracks(bound)
    group.heap.barrier()
    opening = partial(group.open, exchange=not isinstance(bound.plan, HomePlan))
    windows = session.timer.measure([("plan", opening), ("stage", bound)])
    group.check()
    return windows["start_ns"] + windows["plan"], windows["stage"]


def _run(trial: Recordable, bound: BoundLaunch, launch: int) -> _Run:
    start_ns, stage_ns = _time(trial, bound, launch)
    group = trial.session.group
    return _Run(
        start_ns=start_ns,
        stage_ns=stage_ns,
        words=words_of(bound),
        known={rank: known_of(group, bound, rank) for rank in group.ranks},
    )
