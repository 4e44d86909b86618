"""What the spans of a recorded launch add up to, what they must obey, and what waited for what.

Knows nothing of files, of how spans were stamped and of how they are drawn.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from tilepipe.records import Span, SpanKind

__all__ = [
    "SHARES",
    "SPAN_KINDS",
    "STAMPED_LOSS",
    "STAMPED_TERM",
    "STAMPED_WINDOW",
    "LaneTimes",
    "Spans",
    "by_lane",
    "lane_times",
    "longest_waits",
    "span_faults",
    "unblocking",
]

SPAN_KINDS = {
    "gate": "counters zeroed and ready words exchanged, until those of every rank are here",
    "plan": "the Plan is made, or unpacked",
    "send": "rows of one ticket are stored at a peer and their flag is raised",
    "wait": "from the first look at a flag to the one that finds it raised; for a token on a GPU, "
    "from behind that look",
    "copy": "rows of an M tile are read, before its first output tile",
    "tile": "one output tile is multiplied and stored, flags that it raises included",
    "reduce": "tokens whose rows are home are summed",
    "idle": "the rest: nothing was there to do",
}
STAMPED_TERM = (
    "late, tail by stamps in kernels: time for which an SM that multiplies only waits for rows, "
    "mean over those SMs of the rank whose tiles end last (versions before 7: that loses most); "
    "from the last tile to the last token, less the lag of a push; null but for points recorded on "
    "a GPU"
)
STAMPED_LOSS = (
    "late, tail by stamps in kernels, of fused less gemm_contended: what an SM that multiplies "
    "takes for tiles and for waiting for rows, mean over those SMs of the rank whose tiles end "
    "last, and what is sent behind them; when the last tile ends, and what comes behind it "
    "(versions before 7: the rank that loses most; only what comes behind); null but for points "
    "recorded on a GPU"
)
STAMPED_WINDOW = "behind the barrier of stamped launches: median of several, slowest rank"
# Kind of a span -> the share of its lane that it counts to.
SHARES = {
    SpanKind.gate: "wait",
    SpanKind.plan: "busy",
    SpanKind.send: "copy",
    SpanKind.wait: "wait",
    SpanKind.copy: "copy",
    SpanKind.tile: "busy",
    SpanKind.reduce: "busy",
    SpanKind.idle: "idle",
}

Spans = Mapping[int, Sequence[Span]]  # by rank


@dataclass(frozen=True, kw_only=True)
class LaneTimes:
    """Where the time of one lane went; the four add up to its length, to the nanosecond."""

    busy_ns: int = 0
    wait_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0

    @property
    def length_ns(self) -> int:
        return self.busy_ns + self.wait_ns + self.copy_ns + self.idle_ns


def by_lane(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Spans of one rank by lane; lanes that are numbers by number, others as they come."""
    found: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.lane].append(span)
    return dict(sorted(found.items(), key=lambda lane: _numbers(lane[0])))


def _numbers(lane: str) -> tuple[int, ...]:
    """`17` and `17.3` as numbers: SM, and warp of it."""
    parts = lane.split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def lane_times(spans: Iterable[Span]) -> LaneTimes:
    """What the spans of one lane add up to."""
    totals = dict.fromkeys(("busy_ns", "wait_ns", "copy_ns", "idle_ns"), 0)
    for span in spans:
        totals[f"{SHARES[span.kind]}_ns"] += span.end_ns - span.start_ns
    return LaneTimes(**totals)


def longest_waits(spans: Spans, number: int) -> list[tuple[int, Span]]:
    """Rank and span of the waits in which most time went, longest first."""
    waits = [(rank, span) for rank, found in spans.items() for span in found if span.lateness_ns]
    waits.sort(key=lambda wait: (-(wait[1].lateness_ns or 0), wait[0], wait[1].start_ns))
    return waits[:number]


def unblocking(
    spans: Spans, *, operation: str, granularity: str
) -> list[tuple[tuple[int, Span], tuple[int, Span]]]:
    """Who let whom begin: rank and span of either, in the order in which the latter began.

    Dispatch -> GEMM: the last send into what a tile waits for, and the first work on it. GEMM ->
    combine: the last tile of what is pushed at a time, and the first push of it. With granularity
    expert that is once an expert; else once an M tile, or once a chunk of it. A layer is both, one
    after the other.
    """
    if operation == "moe_layer":
        halves = zip(_halves(spans), ("dispatch_gemm", "gemm_combine"), strict=True)
        return [
            pair
            for half, name in halves
            for pair in unblocking(half, operation=name, granularity=granularity)
        ]
    homewards = operation == "gemm_combine"

    def unit(span: Span) -> tuple[int | None, ...]:
        if granularity == "expert":
            return (span.expert,)
        return (span.m_tile, span.chunk) if homewards else (span.m_tile,)

    work, sends = [], []
    for rank, found in spans.items():
        for span in found:
            if span.kind is SpanKind.tile or (span.kind is SpanKind.copy and not homewards):
                work.append(((rank, *unit(span)), (rank, span)))
            elif span.kind is SpanKind.send:
                at = rank if homewards else span.peer
                sends.append(((at, *unit(span)), (rank, span)))
    causes, effects = (work, sends) if homewards else (sends, work)
    last = dict(sorted(causes, key=lambda cause: cause[1][1].end_ns))
    first = dict(sorted(effects, key=lambda effect: effect[1][1].start_ns, reverse=True))
    pairs = [(last[key], first[key]) for key in first.keys() & last.keys()]
    return sorted(pairs, key=lambda pair: (pair[1][1].start_ns, pair[1][0]))


def _halves(spans: Spans) -> tuple[Spans, Spans]:
    """Spans of the halves of a layer: the second one of a rank begins with its last `plan`."""
    border = {
        rank: max(span.start_ns for span in found if span.kind is SpanKind.plan)
        for rank, found in spans.items()
    }
    first, second = (
        {
            rank: [span for span in found if (span.start_ns >= border[rank]) is late]
            for rank, found in spans.items()
        }
        for late in (False, True)
    )
    return first, second


def span_faults(table: pa.Table, *, num_ranks: int) -> list[str]:
    """What spans of a launch break of the laws that bind them, one sentence each."""
    rank, start, end = (table.column(name).to_numpy() for name in ("rank", "start_ns", "end_ns"))
    found = np.unique(rank).tolist()
    if found != list(range(num_ranks)):
        return [f"ranks are {found}, point.json has 0..{num_ranks - 1}"]
    lane = np.unique(table.column("lane").to_numpy(zero_copy_only=False), return_inverse=True)[1]
    begins = np.r_[True, (np.diff(rank) != 0) | (np.diff(lane) != 0)]
    faults = []
    if len({(r, w) for r, w in zip(rank[begins], lane[begins], strict=True)}) != begins.sum():
        faults.append("spans of a lane do not lie together")
    backwards = np.flatnonzero(end < start)
    apart = np.flatnonzero(~begins[1:] & (start[1:] != end[:-1]))
    if len(backwards):
        faults.append(f"span {backwards[0]} ends before it starts")
    if len(apart):
        faults.append(
            f"span {apart[0] + 1} does not start where the one before it in its lane ends"
        )
    ends = np.r_[begins[1:], True]
    for which, times in (("start", start[begins]), ("end", end[ends])):
        uneven = [r for r in found if len(np.unique(times[rank[begins] == r])) > 1]
        if uneven:
            faults.append(f"lanes of rank {uneven[0]} {which} at different times")
    late = table.column("lateness_ns").to_numpy(zero_copy_only=False)
    if np.any((late < 0) | (late > end - start)):
        faults.append("a lateness is below 0 or longer than its wait")
    return faults
