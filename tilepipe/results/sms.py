"""SMs of a recorded launch: what each did as a whole, and what its spans say of a breakdown.

Knows nothing of files, of how spans were stamped and of how they are drawn.

An SM whose warps work apart has a lane for each, `SM.WARP`. As a whole it does what the busiest of
them does: it multiplies where one of them does, sends where none multiplies and one sends, waits
where nobody does anything else. But it waits where tiles wait for rows, though a warp beside them
sends. So its spans follow each other like those of any lane.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from tilepipe.records import Interval, Span, SpanKind, SpanRole
from tilepipe.results.spans import LaneTimes, Spans, lane_times

__all__ = [
    "NO_LOSS",
    "Agreement",
    "Loss",
    "RoleTimes",
    "agreement",
    "late_loss",
    "late_ns",
    "role_times",
    "sm_spans",
    "tail_loss",
    "tail_ns",
]

# What an SM is said to do of all that its warps do at once: the first of these.
_RANK = {
    kind: place
    for place, kind in enumerate(
        (
            SpanKind.tile,
            SpanKind.reduce,
            SpanKind.send,
            SpanKind.copy,
            SpanKind.plan,
            SpanKind.gate,
            SpanKind.wait,
            SpanKind.idle,
        )
    )
}
# Kinds whose last span ends what a launch is for.
_WORK = (SpanKind.tile, SpanKind.send, SpanKind.reduce)


def _rank_of(span: Span) -> float:
    """Who waits for rows that are to be multiplied waits for a tile's, or for all that come first;
    for rows at home, for a token's."""
    waits = span.kind is SpanKind.wait and span.role is SpanRole.compute
    if waits and (span.m_tile is not None or span.deadline is None):
        return _RANK[SpanKind.send] - 0.5
    return _RANK[span.kind]


def sm_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The spans of one rank with one lane for each SM; lanes without a warp stay as they are."""
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane.partition(".")[0]].append(span)
    whole: list[Span] = []
    for lane, found in lanes.items():
        apart = len({span.lane for span in found}) > 1
        whole += _merged(found, lane) if apart else found
    return tuple(whole)


def _merged(spans: Sequence[Span], lane: str) -> Iterator[Span]:
    """One lane out of several of equal length."""
    coming = sorted(spans, key=lambda span: span.start_ns)
    times = sorted({time for span in spans for time in (span.start_ns, span.end_ns)})
    there: list[tuple[float, int, int]] = []
    taken = 0
    last: tuple[Span, int] | None = None  # the span under way, and when it began
    for time in times[:-1]:
        while taken < len(coming) and coming[taken].start_ns <= time:
            span = coming[taken]
            # Of equals the one that began first stays, so that none is cut up by the others.
            heappush(there, (_rank_of(span), span.start_ns, taken))
            taken += 1
        while coming[there[0][2]].end_ns <= time:
            heappop(there)
        top = coming[there[0][2]]
        if last is None or last[0] is not top:
            if last is not None:
                yield _piece(last[0], last[1], time, lane)
            last = top, time
    if last is not None:
        yield _piece(last[0], last[1], times[-1], lane)


def _piece(span: Span, start_ns: int, end_ns: int, lane: str) -> Span:
    """A span as far as it shows; a wait is no later than that."""
    late = span.lateness_ns
    late = None if late is None else min(late, end_ns - start_ns)
    return replace(span, lane=lane, start_ns=start_ns, end_ns=end_ns, lateness_ns=late)


@dataclass(frozen=True, kw_only=True)
class RoleTimes:
    """Where the time of the SMs of one role went, all together."""

    num_sms: int
    times: LaneTimes
    by_kind: Mapping[SpanKind, int]  # ns


def role_times(spans: Iterable[Span]) -> dict[str, RoleTimes]:
    """By what SMs were there for: `compute`, `communication`, or `both`, in turn or at once."""
    lanes: defaultdict[str, list[Span]] = defaultdict(list)
    for span in sm_spans(spans):
        lanes[span.lane].append(span)
    groups: defaultdict[str, list[Span]] = defaultdict(list)
    counts: defaultdict[str, int] = defaultdict(int)
    for found in lanes.values():
        roles = {span.role for span in found if span.kind is not SpanKind.idle}
        roles -= {SpanRole.plan}
        name = "both" if len(roles) > 1 else next(iter(roles), found[0].role).name
        counts[name] += 1
        groups[name] += found
    told = {}
    for name, found in sorted(groups.items()):
        by_kind: defaultdict[SpanKind, int] = defaultdict(int)
        for span in found:
            by_kind[span.kind] += span.end_ns - span.start_ns
        told[name] = RoleTimes(num_sms=counts[name], times=lane_times(found), by_kind=dict(by_kind))
    return told


def late_ns(spans: Spans) -> int:
    """Dispatch -> GEMM: how much longer a launch takes since rows come late, by its spans.

    The time for which an SM that multiplies does nothing but wait for rows, averaged over those
    SMs: tiles are handed out late, so what one of them loses all make good. Of the rank whose tiles
    end last, since the launch takes as long as that; 0 where nothing is multiplied.
    """
    waits_ns, _ = _multiplying_ns(_last_rank(spans))
    return waits_ns


def tail_ns(spans: Spans) -> int:
    """GEMM -> combine: from the last tile of all ranks to their last reduced token, less what a
    push lags behind its tile; 0 where nothing is reduced.

    The launch that a breakdown takes off ends with its last push, or with its last tile where the
    GEMM sends, whatever is left to reduce. That lag is the median over the last tenth of pieces; of
    the last push itself it would be longer, since tokens are being reduced beside it.
    """
    tiles = [s.end_ns for found in spans.values() for s in found if s.kind is SpanKind.tile]
    reduced = [s.end_ns for found in spans.values() for s in found if s.kind is SpanKind.reduce]
    if not tiles or not reduced:
        return 0
    return max(0, max(reduced) - max(tiles) - _push_lag_ns(spans))


def _push_lag_ns(spans: Spans) -> int:
    """From the last tile of a piece to its last push, of the pieces that are done last."""
    made: defaultdict[tuple[int, int | None, int | None], int] = defaultdict(int)
    pushed: defaultdict[tuple[int, int | None, int | None], int] = defaultdict(int)
    for rank, found in spans.items():
        for span in found:
            if span.kind is SpanKind.tile:
                # Whole rows are told without a chunk.
                for chunk in (span.chunk, None):
                    key = rank, span.m_tile, chunk
                    made[key] = max(made[key], span.end_ns)
            elif span.kind is SpanKind.send and span.m_tile is not None:
                key = rank, span.m_tile, span.chunk
                pushed[key] = max(pushed[key], span.end_ns)
    last_first = sorted((made[key], end_ns - made[key]) for key, end_ns in pushed.items())[::-1]
    lags = sorted(lag_ns for _, lag_ns in last_first[: -(-len(last_first) // 10)])
    return max(0, lags[len(lags) // 2]) if lags else 0


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How much longer a launch takes than another, by spans of both; parts may be negative."""

    waits_ns: int  # of SMs that multiply, for rows
    tiles_ns: int  # of those SMs, or how much later the last of all tiles ends
    behind_ns: int  # from there to the last row or token

    @property
    def all_ns(self) -> int:
        return self.waits_ns + self.tiles_ns + self.behind_ns


NO_LOSS = Loss(waits_ns=0, tiles_ns=0, behind_ns=0)


def late_loss(fused: Spans, beside: Spans) -> Loss:
    """Dispatch -> GEMM: what a launch loses since rows come late, by its spans and those of a
    launch beside the same communication whose rows were there.

    What an SM that multiplies takes for doing nothing but wait for rows, and for its tiles, means
    of those SMs: tiles are handed out late, so what one of them loses all make good; and SMs that
    have waited begin tiles apart from those that share operands with them, so that tiles take
    longer. In either launch of the rank whose tiles end last: the launch takes as long as that.
    And what either goes on moving rows behind its last tile: while the other launch does, waits
    cost nothing. 0 where neither multiplies anything.
    """
    (waits_ns, tiles_ns), (other_waits_ns, other_tiles_ns) = (
        _multiplying_ns(_last_rank(spans)) for spans in (fused, beside)
    )
    return Loss(
        waits_ns=waits_ns - other_waits_ns,
        tiles_ns=tiles_ns - other_tiles_ns,
        behind_ns=_behind_tiles_ns(fused) - _behind_tiles_ns(beside),
    )


def _last_rank(spans: Spans) -> Sequence[Span]:
    """Spans of the rank whose last tile ends last; none where nothing is multiplied."""
    ends = [
        (span.end_ns, -place, found)
        for place, found in enumerate(spans.values())
        for span in found
        if span.kind is SpanKind.tile
    ]
    return max(ends, key=lambda end: end[:2])[2] if ends else ()


def _multiplying_ns(spans: Sequence[Span]) -> tuple[int, int]:
    """Waits for rows that nothing hides, and tiles, of SMs that multiply: the means of those."""
    merged = sm_spans(spans)
    sms = {span.lane for span in merged if span.kind is SpanKind.tile}
    taken = {SpanKind.wait: 0, SpanKind.tile: 0}
    for span in merged:
        waits_to_send = span.kind is SpanKind.wait and span.role is not SpanRole.compute
        if span.lane in sms and span.kind in taken and not waits_to_send:
            taken[span.kind] += span.end_ns - span.start_ns
    waits_ns, tiles_ns = (round(ns / max(len(sms), 1)) for ns in taken.values())
    return waits_ns, tiles_ns


def tail_loss(fused: Spans, beside: Spans) -> Loss:
    """GEMM -> combine: how much longer a launch takes than one that reduces beside its tiles alone
    and ends with its last push, or with its last tile where the GEMM sends.

    What follows the last tile of all ranks, and how much later that ends since tokens are summed
    beside it. 0 where nothing is reduced.
    """
    if not any(span.kind is SpanKind.reduce for found in fused.values() for span in found):
        return NO_LOSS
    return Loss(
        waits_ns=0,
        tiles_ns=_tiles_end_ns(fused) - _tiles_end_ns(beside),
        behind_ns=_behind_tiles_ns(fused) - _behind_tiles_ns(beside),
    )


def _tiles_end_ns(spans: Spans) -> int:
    """From the beginning of a launch to the end of its last tile."""
    every = [span for found in spans.values() for span in found]
    ends = [span.end_ns for span in every if span.kind is SpanKind.tile]
    return max(ends) - min(span.start_ns for span in every) if ends else 0


def _behind_tiles_ns(spans: Spans) -> int:
    """From the last tile to the last row or token that is moved or summed."""
    every = [span for found in spans.values() for span in found]
    tiles = [span.end_ns for span in every if span.kind is SpanKind.tile]
    return max(span.end_ns for span in every if span.kind in _WORK) - max(tiles) if tiles else 0


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """A term of a breakdown beside what stamps say of it, ns."""

    term: str
    stamped: int
    measured: Interval
    allowed: int  # difference

    @property
    def holds(self) -> bool:
        return abs(self.stamped - self.measured.value) <= self.allowed

    def __str__(self) -> str:
        low, high = self.measured.low / 1e3, self.measured.high / 1e3
        return (
            f"{self.term}: {self.stamped / 1e3:.1f} us by stamps, "
            f"{self.measured.value / 1e3:.1f} us [{low:.1f}, {high:.1f}] by the breakdown: "
            f"{abs(self.stamped - self.measured.value) / 1e3:.1f} us apart, "
            f"{self.allowed / 1e3:.1f} us allowed: they {'agree' if self.holds else 'do not agree'}"
        )


def agreement(term: str, stamped: int, measured: Interval, *, fused_ns: int) -> Agreement:
    """Whether the two are as near as 1 % of the fused time or the term's interval, what is more."""
    reach = max(measured.high - measured.value, measured.value - measured.low)
    return Agreement(
        term=term, stamped=stamped, measured=measured, allowed=max(fused_ns // 100, reach)
    )
