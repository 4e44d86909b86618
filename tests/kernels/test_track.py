"""Stamps become laps on one clock: no time leaves the step that was read, order is kept."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.tracks import STEP_NS, begun, words_of_laps
from tilepipe.kernels.track import (
    NO_ITEM,
    NUM_TRACKS,
    RECORD_BYTES,
    Event,
    Lap,
    first_tick,
    read_tracks,
    timer_step_ns,
    track_bytes,
)


def laps_of(*ends_ns, event=Event.tile):
    return [
        (event, end_ns, number, number + 1, number + 2) for number, end_ns in enumerate(ends_ns)
    ]


def test_laps_say_what_was_done_between_two_records():
    words = words_of_laps(
        {
            (0, 4): [begun(17), *laps_of(10_000, 30_000), (Event.end, 50_000, None, 0, 0)],
            (2, 0): [begun(5, 20_000), (Event.wait, 40_000, 3, 1, 128)],
        },
        num_ctas=3,
        step=1,
    )

    (first, second), lost = read_tracks(words)

    assert lost == 0
    assert (first.cta, first.warp, first.sm) == (0, 4, 17)
    assert (second.cta, second.warp, second.sm) == (2, 0, 5)
    assert first.laps == (
        Lap(Event.tile, 0, 10_000, 0, 1, 2),
        Lap(Event.tile, 10_000, 30_000, 1, 2, 3),
        Lap(Event.end, 30_000, 50_000, NO_ITEM, 0, 0),
    )
    assert second.laps == (Lap(Event.wait, 20_000, 40_000, 3, 1, 128),)
    assert (second.start_ns, second.end_ns) == (20_000, 40_000)


@pytest.mark.parametrize("name", ["timer_origin", "clock_origin"])
def test_counters_that_wrap_during_a_launch_change_nothing(name):
    tracks = {(0, w): [begun(1), *laps_of(*range(9_000 + w, 900_000, 7_001))] for w in (0, 4)}

    plain, _ = read_tracks(words_of_laps(tracks, num_ctas=1, room=256))
    wrapped, _ = read_tracks(
        words_of_laps(tracks, num_ctas=1, room=256, **{name: 2**32 - 5 * 1024})
    )

    assert wrapped == plain


def test_times_between_two_steps_of_the_timer_come_from_the_clock_of_the_sm():
    ends_ns = np.arange(1_000, 2_000_000, 3_333)
    track = {(0, 0): [begun(3), *laps_of(*ends_ns.tolist())]}

    ((found,), _) = read_tracks(words_of_laps(track, num_ctas=1, room=1024))

    told = np.array([lap.end_ns - lap.start_ns for lap in found.laps[1:]])
    # Steps of 1024 ns; a line through 600 readings is nearer by far.
    assert np.abs(told - 3_333).max() < 40


def test_two_sms_are_told_apart_by_the_timer_alone():
    ends_ns = list(range(5_000, 1_000_000, 4_801))
    tracks = {(sm, 0): [begun(sm), *laps_of(*ends_ns)] for sm in range(4)}

    found, _ = read_tracks(words_of_laps(tracks, num_ctas=4, room=512))

    ends = np.array([[lap.end_ns for lap in track.laps] for track in found])
    assert np.ptp(ends, axis=0).max() < STEP_NS // 8


def test_a_clock_that_changes_on_the_way_keeps_every_time_within_its_step():
    ends_ns = np.arange(1_000, 3_000_000, 2_801)
    slow = ends_ns * 1_980 // 1_000
    slow[500:] = slow[500] + (ends_ns[500:] - ends_ns[500]) * 1_300 // 1_000

    found = first_tick(slow, ends_ns // STEP_NS * STEP_NS, STEP_NS)

    assert np.abs(found - ends_ns).max() <= STEP_NS
    assert (np.diff(found) >= 0).all()


@given(
    gaps_ns=st.lists(st.integers(0, 20_000), min_size=1, max_size=60),
    mhz=st.integers(300, 2_000),
    step=st.sampled_from([1, 32, 1_000, 1_024]),
)
@settings(max_examples=60, deadline=None)
def test_order_is_kept_and_every_time_lies_in_the_step_that_was_read(gaps_ns, mhz, step):
    true_ns = np.cumsum(gaps_ns)
    timer = true_ns // step * step

    found = first_tick(true_ns * mhz // 1_000, timer, step)

    assert ((found >= timer) & (found <= timer + step - 1)).all()
    assert (np.diff(found) >= 0).all()
    assert (np.abs(found - true_ns) < step).all()


def test_a_step_is_the_least_distance_of_two_readings():
    assert timer_step_ns(np.array([0, 3_072, 1_024, 1_024])) == 1_024
    assert timer_step_ns(np.array([7, 7])) == 1


def test_tracks_without_room_are_left_out_and_what_they_lack_is_counted():
    tracks = {(0, 0): [begun(1), *laps_of(5, 6)], (0, 1): [begun(1), *laps_of(*range(9, 20))]}

    found, lost = read_tracks(words_of_laps(tracks, num_ctas=1, room=4))

    assert [track.warp for track in found] == [0]
    assert lost == 8


def test_a_launch_without_stamps_has_no_tracks():
    assert read_tracks(np.zeros((2, NUM_TRACKS, 9, 4), np.int32)) == ([], 0)


def test_a_track_is_as_long_as_its_records_and_a_head():
    assert track_bytes(7) == 8 * RECORD_BYTES
