"""A recorded launch as Chrome trace events, for Perfetto and chrome://tracing.

Knows nothing of files. What importers ask for, as Perfetto's reads it (2026-11):

- Complete events of a thread nest or lie apart; one that overlaps another in part is dropped. Spans
  of a lane follow each other, so nothing ever nests.
- Times are microseconds, multiplied by 1000 and cut off: see `_us`.
- A flow event belongs to the slice that is open on its thread when it comes, so it stands behind
  that slice in the file and carries a time inside it; `bp: e` makes the end of a flow do the same.
- Process 0 and thread 0 are the idle task of a kernel: ranks and lanes count from 1, threads
  through all ranks.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tilepipe.records import Span, SpanKind
from tilepipe.results.recording import Recording
from tilepipe.results.spans import SHARES, by_lane, unblocking

__all__ = ["trace_json"]

_NUMBERS = (
    "expert",
    "m_tile",
    "n_tile",
    "chunk",
    "peer",
    "ticket",
    "num_rows",
    "deadline",
    "lateness_ns",
)
Event = dict[str, Any]


def trace_json(
    recording: Recording,
    *,
    ranks: Sequence[int] | None = None,  # None: all
    window_us: tuple[float, float] | None = None,  # spans that touch it; None: all
) -> bytes:
    """The launch as JSON, an event a line; time 0 is when the first rank began."""
    kept = sorted(recording.spans if ranks is None else ranks)
    threads = _threads(recording, kept)
    events = [*_names(threads), *_timed(recording, threads, window_us)]
    lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
    point = recording.point
    about = {
        "name": point.name,
        "operation": point.operation,
        "executor": point.executor,
        "config_id": point.config_id,
        "build_id": point.build_id,
        "device": recording.device,
        "commit": recording.commit,
        "ended_utc": recording.ended_utc,
        "start_ns": recording.start_ns,
    }
    # displayTimeUnit first: an importer may look for it only there.
    head = f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":[\n'
    return f"{head}{lines}\n]}}\n".encode()


def _threads(recording: Recording, ranks: Sequence[int]) -> dict[tuple[int, str], tuple[int, int]]:
    """(rank, lane) -> process and thread."""
    lanes = [(rank, lane) for rank in ranks for lane in by_lane(recording.spans[rank])]
    return {(rank, lane): (rank + 1, tid) for tid, (rank, lane) in enumerate(lanes, start=1)}


def _names(threads: dict[tuple[int, str], tuple[int, int]]) -> Iterator[Event]:
    """What processes and threads are called, and in which order they are shown."""
    seen = set()
    for (rank, lane), (pid, tid) in threads.items():
        whole = {"ph": "M", "pid": pid, "tid": tid}
        if pid not in seen:
            seen.add(pid)
            yield {**whole, "name": "process_name", "args": {"name": f"rank {rank}"}}
            yield {**whole, "name": "process_sort_index", "args": {"sort_index": rank}}
        label = f"SM {lane}" if lane[0].isdecimal() else lane
        yield {**whole, "name": "thread_name", "args": {"name": label}}
        yield {**whole, "name": "thread_sort_index", "args": {"sort_index": tid}}


def _timed(
    recording: Recording,
    threads: dict[tuple[int, str], tuple[int, int]],
    window_us: tuple[float, float] | None,
) -> list[Event]:
    """Slices and flows by time, a slice before the flows that begin or end in it."""
    zero_ns = recording.start_ns
    from_us, until_us = window_us or (0.0, float("inf"))

    def shown(rank: int, span: Span) -> bool:
        touches = (
            span.end_ns - zero_ns >= from_us * 1e3 and span.start_ns - zero_ns <= until_us * 1e3
        )
        return (rank, span.lane) in threads and touches and span.kind is not SpanKind.idle

    # Time, number of the slice, and more than 0 for a flow: what begins at one time stays in order.
    timed: list[tuple[tuple[int, int, int], Event]] = []
    number_of: dict[int, int] = {}
    for rank, spans in recording.spans.items():
        for span in spans:
            if shown(rank, span):
                pid, tid = threads[rank, span.lane]
                number_of[id(span)] = len(number_of)
                at = span.start_ns, number_of[id(span)], 0
                timed.append((at, _slice(span, zero_ns, pid=pid, tid=tid)))
    pairs = unblocking(
        recording.spans,
        operation=recording.point.operation,
        granularity=recording.granularity,
    )
    for number, (cause, effect) in enumerate(pairs, start=1):
        # Clocks that differ a little may show an effect before its cause: no arrow goes back.
        if shown(*cause) and shown(*effect) and cause[1].start_ns <= effect[1].end_ns:
            begin, end = _flow(number, cause, effect, zero_ns, threads)
            places = number_of[id(cause[1])], number_of[id(effect[1])]
            timed.append(((begin[0], places[0], 1), begin[1]))
            timed.append(((end[0], max(places), 2), end[1]))
    timed.sort(key=lambda entry: entry[0])
    return [event for _, event in timed]


def _slice(span: Span, zero_ns: int, *, pid: int, tid: int) -> Event:
    told = {name: getattr(span, name) for name in _NUMBERS}
    return {
        "ph": "X",
        "name": _title(span),
        "cat": span.role.name,
        "pid": pid,
        "tid": tid,
        "ts": _us(span.start_ns - zero_ns),
        "dur": _us(span.end_ns - span.start_ns),
        "args": {
            "share": SHARES[span.kind],
            **{name: value for name, value in told.items() if value is not None},
        },
    }


def _title(span: Span) -> str:
    """Kind, then what tells this one apart: viewers colour by the word and leave out numbers."""
    marks = {"m": span.m_tile, "n": span.n_tile, "to": span.peer}
    if span.kind is SpanKind.send:
        marks = {"to": span.peer, "m": span.m_tile}
    return " ".join([span.kind.name, *(f"{k} {v}" for k, v in marks.items() if v is not None)])


def _flow(
    number: int,
    cause: tuple[int, Span],
    effect: tuple[int, Span],
    zero_ns: int,
    threads: dict[tuple[int, str], tuple[int, int]],
) -> Iterator[tuple[int, Event]]:
    """An arrow from the slice that let another begin; its end never comes before its start."""
    (_, sent), (_, begun) = cause, effect
    at_ns = max(sent.start_ns, begun.start_ns)
    for phase, (rank, span), time_ns in (("s", cause, sent.start_ns), ("f", effect, at_ns)):
        pid, tid = threads[rank, span.lane]
        event = {"ph": phase, "id": number, "name": "unblocks", "cat": "unblocks", "pid": pid}
        event |= {"tid": tid, "ts": _us(time_ns - zero_ns)}
        yield time_ns, event | ({"bp": "e"} if phase == "f" else {})


def _us(time_ns: int) -> float:
    """Microseconds that an importer turns back into these nanoseconds.

    It multiplies by 1000 and cuts off, so a value that floats hold a hair too small would come a
    nanosecond early, and its slice would overlap its neighbour; a tenth of a nanosecond more
    prevents that.
    """
    time_us = time_ns / 1e3
    return time_us if int(time_us * 1e3) == time_ns else round(time_us + 1e-4, 4)
