"""Stamps of a launch as they lie in memory, and from there to laps on one clock.

Knows nothing of CuTe and torch, and of what an item stands for: `kernels/spans.py` says that.

A warp has a track: a head, then its records in the order in which they were made. A record ends
what its warp has done since the one before, so a warp's laps have neither gap nor overlap.

Two clocks. `%globaltimer` is one for the whole GPU but goes in steps (32 ns on an H200, a
microsecond on other GPUs); `%clock` goes by every cycle but counts for its SM alone. A record has
both: to read them costs 5 and 2 cycles. A line through the records of an SM tells the time between
steps, and no time leaves the step that was read, whatever the SM's clock has done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "AT_HOME",
    "ITEM_BITS",
    "NO_ITEM",
    "NUM_TRACKS",
    "RECORD_BYTES",
    "ROWS_BITS",
    "Event",
    "Lap",
    "Track",
    "first_tick",
    "read_tracks",
    "timer_step_ns",
    "track_bytes",
]

# Warps of a CTA of a fused launch.
NUM_TRACKS = 12
# Bit of a wait's part: for rows at home, else for rows to multiply or tiles to push. Bit 0 says
# that the first look did not find what was waited for.
AT_HOME = 2
# Words of a record: SM clock, timer (lower halves), event and item, part and rows.
RECORD_BYTES = 16
ITEM_BITS, ROWS_BITS = 27, 16
NO_ITEM = (1 << ITEM_BITS) - 1
_HALF = 1 << 31


@unique
class Event(IntEnum):
    """What a warp has done when it makes a record."""

    begin = 0  # nothing: its CTA has begun; item: number of the SM
    look = 1  # found out what to do next and where it lies
    send = 2  # moved rows; item: place in sending order, none: flags alone; part: place_in_order
    wait = 3  # waited for a flag, or for the warp that does; item: what for; part: see AT_HOME
    load = 4  # issued the loads of an output tile; item: M tile; part: N tile
    stand = 5  # waited for warps of its own CTA
    tile = 6  # multiplied an output tile and stored or staged it; item: M tile; part: N tile
    reduce = 7  # summed a piece of a token; item: token; part: piece
    end = 8  # nothing: it has ended


class Lap(NamedTuple):
    """What a warp has done from one record to the next, times in ns since the launch began."""

    event: Event
    start_ns: int
    end_ns: int
    item: int  # NO_ITEM: none
    part: int
    num_rows: int


@dataclass(frozen=True, kw_only=True)
class Track:
    """Laps of one warp of a launch."""

    cta: int  # of the launch
    warp: int  # of the CTA
    sm: int
    laps: tuple[Lap, ...]  # from the first record on, which is that of Event.begin

    @property
    def start_ns(self) -> int:
        return self.laps[0].start_ns if self.laps else 0

    @property
    def end_ns(self) -> int:
        return self.laps[-1].end_ns if self.laps else 0


def track_bytes(num_records: int) -> int:
    """Memory of one warp's track: its head is as long as a record."""
    return (1 + num_records) * RECORD_BYTES


def read_tracks(
    words: NDArray[np.int32],  # (num_ctas, NUM_TRACKS, 1 + records, 4); heads: records made
) -> tuple[list[Track], int]:
    """Tracks of all warps that have made records, and how many records found no room.

    Tracks without room for all are left out: what they lack nobody knows. Asserts that every warp
    began with Event.begin, where it did not abort.
    """
    made = words[:, :, 0, 0]
    room = words.shape[2] - 1
    lost = int(np.maximum(made - room, 0).sum())
    ctas, warps = np.nonzero((made > 0) & (made <= room))
    if not len(ctas):
        return [], lost
    records = [words[at][1 : 1 + made[at]] for at in zip(ctas, warps, strict=True)]
    assert all(record[0, 2] >> ITEM_BITS == Event.begin for record in records)
    sms = np.array([record[0, 2] & NO_ITEM for record in records])
    times = _times_ns(records, sms)
    tracks = [
        Track(cta=int(cta), warp=int(warp), sm=int(sm), laps=tuple(_laps(record, at)))
        for cta, warp, sm, record, at in zip(ctas, warps, sms, records, times, strict=True)
    ]
    return tracks, lost


def _laps(record: NDArray[np.int32], times_ns: NDArray[np.int64]) -> list[Lap]:
    events = (record[:, 2] >> ITEM_BITS) & 0xF
    items, parts = record[:, 2] & NO_ITEM, (record[:, 3] >> ROWS_BITS) & 0xFFFF
    rows = record[:, 3] & 0xFFFF
    columns = (column.tolist() for column in (events, times_ns, items, parts, rows))
    found, start_ns = [], int(times_ns[0])
    for event, end_ns, item, part, num_rows in zip(*columns, strict=True):
        found.append(Lap(Event(event), start_ns, end_ns, item, part, num_rows))
        start_ns = end_ns
    return found[1:]


def _times_ns(
    records: Sequence[NDArray[np.int32]],
    sms: NDArray[np.int64],  # of each
) -> list[NDArray[np.int64]]:
    """Nanoseconds since the first record of all, of each track's records."""
    sizes = [len(record) for record in records]
    clock = np.concatenate([record[:, 0] for record in records]).astype(np.int64)
    timer = np.concatenate([record[:, 1] for record in records]).astype(np.int64)
    sm = np.repeat(sms, sizes)
    timer = _apart(timer, timer[0])
    timer -= timer.min()
    step = timer_step_ns(timer)
    fine = np.empty(len(clock), np.float64)
    for number in np.unique(sms):
        here = sm == number
        fine[here] = first_tick(_apart(clock[here], clock[here][0]), timer[here], step)
    exact = np.rint(fine).astype(np.int64)
    exact -= exact.min()
    ends = np.cumsum(sizes)
    # Two records of a warp in one nanosecond are as they come.
    return [np.maximum.accumulate(part) for part in np.split(exact, ends[:-1])]


def _apart(counter: NDArray[np.int64], origin: int) -> NDArray[np.int64]:
    """Distances on a counter of 32 bits that has wrapped at most once, either way."""
    return (counter - origin + _HALF) % (2 * _HALF) - _HALF


def timer_step_ns(timer: NDArray[np.int64]) -> int:
    """Least distance of two different readings of the timer; 1 where there is one."""
    readings = np.unique(timer)
    return int(np.diff(readings).min()) if len(readings) > 1 else 1


def first_tick(
    clock: NDArray[np.int64],  # cycles of one SM
    timer: NDArray[np.int64],  # ns, in steps, read with each
    step: int,  # ns
) -> NDArray[np.float64]:
    """Moments of readings, ns on the timer: on a line through all, inside the step of each.

    Order by clock is kept; a reading and its moment differ by less than a step.
    """
    slope, offset = 0.0, float(timer.mean())
    spread = clock - clock.mean()
    if np.any(spread):
        # The timer shows the start of its step, half a step early on average.
        slope = float((spread * (timer - timer.mean())).sum() / (spread * spread).sum())
    line = offset + step / 2 + slope * spread
    return np.clip(line, timer, timer + step - 1)
