"""Recorded launches as pictures: of every point that has one.

Knows nothing of how they are drawn.
"""

from dataclasses import replace
from typing import Any

from tilepipe.report.groups import (
    OWN,
    WORLD,
    Group,
    grouped,
    joined,
    label,
    main_rows,
    ok_rows,
    titled,
    varying,
)
from tilepipe.report.points import Found
from tilepipe.report.shapes import Grid, TimelineFigure
from tilepipe.report.words import amount, caption, time_unit
from tilepipe.results.reading import StoredPoint
from tilepipe.results.recording import Recording, recording_of
from tilepipe.results.sms import role_times, sm_spans
from tilepipe.results.spans import by_lane, lane_times

__all__ = ["timeline_figures"]

Row = dict[str, Any]

_NOTE = (
    "One launch, recorded after the timed ones; arrows lead from what ended the longest waits to "
    "what it let begin"
)


def timeline_figures(found: Found) -> list[TimelineFigure]:
    """The recorded launch of each point that has one, by settings."""
    rows = [row for row in main_rows(ok_rows(found.points)) if row["folder"] in found.recorded]
    return [
        _figure(group, row, found.recorded[row["folder"]])
        for group in grouped(rows, WORLD)
        for row in group.rows
    ]


def _figure(group: Group, row: Row, point: StoredPoint) -> TimelineFigure:
    assert point.timeline is not None, "chosen by having one"
    recording = recording_of(point.outcome, point.document, point.timeline)
    # An SM is a lane: its warps are too many for a page.
    recording = replace(recording, spans={r: sm_spans(s) for r, s in recording.spans.items()})
    own = label(row, varying(group.rows, OWN))
    return TimelineFigure(
        slug="",
        title=joined(titled("one recorded launch", group), own),
        # One launch has no interval.
        caption=caption([row], kinds=[None], note=_NOTE),
        recording=recording,
        numbers=_numbers(recording),
    )


def _numbers(recording: Recording) -> Grid:
    """Where the time of each lane went; a row adds up to the launch of its rank. Of a GPU where the
    time of its SMs went, by what they were there for, on the average."""
    lanes = [
        (rank, lane, spans)
        for rank, found in sorted(recording.spans.items())
        for lane, spans in by_lane(found).items()
    ]
    if recording.point.executor != "host":
        return _roles(recording)
    times = [lane_times(spans) for _, _, spans in lanes]
    unit, divisor = time_unit(total.length_ns for total in times)
    rows = []
    for (rank, lane, spans), total in zip(lanes, times, strict=True):
        parts = (total.busy_ns, total.wait_ns, total.copy_ns, total.idle_ns)
        longest = max((span.lateness_ns or 0 for span in spans), default=0)
        told = (amount(part / divisor) for part in (*parts, longest))
        rows.append((f"rank {rank} {lane}", *told))
    heads = ("busy", "wait", "copy", "idle", "longest wait")
    return Grid(title="", head=("lane", *(f"{head}, {unit}" for head in heads)), rows=tuple(rows))


def _roles(recording: Recording) -> Grid:
    """A row adds up to the launch."""
    found = [
        (rank, role, told)
        for rank, spans in sorted(recording.spans.items())
        for role, told in role_times(spans).items()
    ]
    unit, divisor = time_unit(told.times.length_ns // told.num_sms for _, _, told in found)
    rows = []
    for rank, role, told in found:
        times = told.times
        parts = (times.busy_ns, times.wait_ns, times.copy_ns, times.idle_ns)
        means = (amount(part / told.num_sms / divisor) for part in parts)
        rows.append((f"rank {rank}, {told.num_sms} SMs, {role}", *means))
    heads = ("busy", "wait", "copy", "idle")
    return Grid(
        title="", head=("mean of SMs", *(f"{head}, {unit}" for head in heads)), rows=tuple(rows)
    )
