"""Tracks of made-up launches, as kernels would have left them."""

import numpy as np

from tilepipe.kernels.track import ITEM_BITS, NO_ITEM, NUM_TRACKS, ROWS_BITS, Event

__all__ = ["STEP_NS", "begun", "words_of_laps"]

STEP_NS = 1024


def words_of_laps(
    tracks,  # (CTA, warp) -> laps: event, end in ns, item, part, rows; begun by Event.begin
    *,
    num_ctas,
    room=64,
    mhz=1755,
    step=STEP_NS,
    timer_origin=0,
    clock_origin=0,
    made=None,  # heads that say something else
):
    """(num_ctas, NUM_TRACKS, 1 + room, 4); every SM's clock began elsewhere."""
    words = np.zeros((num_ctas, NUM_TRACKS, 1 + room, 4), np.int64)
    for (cta, warp), laps in tracks.items():
        words[cta, warp, 0, 0] = (made or {}).get((cta, warp), len(laps))
        for number, (event, end_ns, item, part, rows) in enumerate(laps[:room], start=1):
            sm = tracks[cta, warp][0][2]
            timer = timer_origin + end_ns // step * step
            clock = clock_origin + 977 * sm + end_ns * mhz // 1000
            what = NO_ITEM if item is None else item
            words[cta, warp, number] = (
                *(clock, timer),
                *(int(event) << ITEM_BITS | what, part << ROWS_BITS | rows),
            )
    return (words & 0xFFFFFFFF).astype(np.uint32).view(np.int32)


def begun(sm, at_ns=0):
    """The first record of a warp."""
    return (Event.begin, at_ns, sm, 0, 0)
