"""SMs of a recorded launch as wholes, and what their spans say of a breakdown's terms."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.results.spans import lane
from tilepipe.records import Interval, SpanKind, SpanRole
from tilepipe.results.sms import (
    Loss,
    agreement,
    late_loss,
    late_ns,
    role_times,
    sm_spans,
    tail_loss,
    tail_ns,
)
from tilepipe.results.spans import lane_times

COMPUTE, COMMUNICATION = SpanRole.compute, SpanRole.communication


def told(spans):
    """Lane, kind, start and end in microseconds of the launch."""
    return [
        (s.lane, s.kind.name, (s.start_ns - 1000) / 1e3, (s.end_ns - 1000) / 1e3) for s in spans
    ]


def multiplying(sm, *, ready_us=30):
    """Warp 0 waits for rows and issues loads; warp 4 multiplies twice."""
    loads = [
        ("wait", 0, ready_us, {"m_tile": 3, "lateness_ns": ready_us * 1000}),
        ("copy", ready_us, ready_us + 10, {"m_tile": 3}),
        ("wait", ready_us + 10, ready_us + 20, {"m_tile": 4, "lateness_ns": 10_000}),
        ("copy", ready_us + 20, ready_us + 25, {"m_tile": 4}),
    ]
    tiles = [
        ("tile", ready_us + 5, ready_us + 15, {"m_tile": 3}),
        ("tile", ready_us + 22, ready_us + 50, {"m_tile": 4}),
    ]
    return [*lane(f"{sm}.0", COMPUTE, *loads), *lane(f"{sm}.4", COMPUTE, *tiles)]


def test_an_sm_does_what_the_busiest_of_its_warps_does():
    assert told(sm_spans(multiplying(7))) == [
        ("7", "wait", 0, 30),
        ("7", "copy", 30, 35),
        ("7", "tile", 35, 45),
        # Of ten microseconds of waiting five lie under a tile.
        ("7", "wait", 45, 50),
        ("7", "copy", 50, 52),
        ("7", "tile", 52, 80),
        ("7", "idle", 80, 100),
    ]


def test_a_wait_is_no_later_than_it_shows():
    waits = [s for s in sm_spans(multiplying(7)) if s.kind is SpanKind.wait]

    assert [wait.lateness_ns for wait in waits] == [30_000, 5_000]


def test_lanes_of_one_warp_and_of_threads_stay_as_they_are():
    spans = [*lane("12", COMPUTE, ("tile", 1, 2, {})), *lane("sender", COMMUNICATION)]

    assert sm_spans(spans) == tuple(spans)


def test_of_equals_the_one_that_began_first_is_not_cut_up():
    spans = [
        *lane("1.0", COMMUNICATION, ("send", 0, 40, {"ticket": 1})),
        *lane("1.1", COMMUNICATION, ("send", 10, 20, {"ticket": 2}), ("send", 20, 60, {})),
    ]

    assert told(sm_spans(spans)) == [
        ("1", "send", 0, 40),
        ("1", "send", 40, 60),
        ("1", "idle", 60, 100),
    ]


laps = st.lists(
    st.tuples(
        st.sampled_from(["send", "wait", "tile", "copy"]), st.integers(1, 9), st.integers(0, 4)
    ),
    max_size=6,
)


@given(warps=st.lists(laps, min_size=2, max_size=4))
@settings(max_examples=60, deadline=None)
def test_shares_of_an_sm_add_up_to_the_launch_and_no_wait_hides_work(warps):
    spans = []
    for number, found in enumerate(warps):
        at, placed = 0, []
        for kind, length, pause in found:
            placed.append((kind, at + pause, at + pause + length, {}))
            at += pause + length
        spans += lane(f"3.{number}", COMPUTE, *placed)

    merged = sm_spans(spans)

    assert lane_times(merged).length_ns == 100_000
    assert all(a.end_ns == b.start_ns for a, b in pairwise(merged))
    # All wait for rows to multiply.
    most = ("tile", "wait", "send", "copy", "idle")
    for span in merged:
        at = (span.start_ns + span.end_ns) / 2
        under = {s.kind.name for s in spans if s.start_ns <= at < s.end_ns}
        assert span.kind.name == min(under, key=most.index)


def test_rows_come_late_by_what_sms_that_multiply_wait_on_the_average():
    sends = lane("2.0", COMMUNICATION, ("send", 0, 90, {"m_tile": 4, "peer": 0, "num_rows": 1}))
    spans = [*multiplying(0), *multiplying(1, ready_us=10), *sends]

    # 30 + 5 us on one, 10 + 5 us on the other; the SM that only sends is none of them.
    assert late_ns({0: spans}) == 25_000
    assert late_ns({0: sends}) == 0


def test_rows_come_late_though_a_warp_beside_the_tiles_sends():
    beside = lane("0.3", COMMUNICATION, ("send", 0, 100, {"m_tile": 9, "peer": 0, "num_rows": 1}))
    spans = [*multiplying(0), *beside]

    assert late_ns({0: spans}) == 35_000
    (sm,) = role_times(spans).values()
    assert sm.by_kind[SpanKind.wait] == 35_000


def test_who_waits_for_tokens_beside_one_that_pushes_is_said_to_push():
    push = lane("0.1", COMMUNICATION, ("send", 0, 60, {"m_tile": 9}))
    wait = lane("0.2", COMPUTE, ("wait", 0, 60, {"deadline": 5, "lateness_ns": 60_000}))

    assert told(sm_spans([*push, *wait]))[0] == ("0", "send", 0, 60)


def test_of_several_ranks_the_one_whose_tiles_end_last_counts():
    slow = [("wait", 0, 1, {"m_tile": 3}), ("tile", 1, 99, {"m_tile": 3})]
    spans = {0: multiplying(0), 1: multiplying(0, ready_us=10)}

    assert late_ns(spans) == 35_000
    assert late_ns({**spans, 2: lane("0", COMPUTE, *slow)}) == 1_000
    # One that multiplies nothing ends no launch.
    assert late_ns({**spans, 2: lane("0", COMPUTE, ("send", 0, 99, {"m_tile": 3}))}) == 35_000


def test_the_tail_is_from_the_last_tile_to_the_last_token_less_the_lag_of_a_push():
    tiles = [("tile", 3 * n, 3 * n + 3, {"m_tile": n, "chunk": 0}) for n in range(20)]
    # Pieces go home 4 us behind their tiles, the last but one 6 us.
    sends = [
        ("send", 3 * n + 6, 3 * n + 7 + 2 * (n == 18), {"m_tile": n, "chunk": 0}) for n in range(19)
    ]
    spans = [
        *lane("0.4", COMPUTE, *tiles, ("reduce", 62, 88, {})),
        *lane("1.4", COMMUNICATION, *sends, ("reduce", 70, 95, {})),
    ]

    assert tail_ns({0: spans}) == 95_000 - 60_000 - 6_000
    # The last tile and the last token of all ranks count, as the launch is theirs.
    late = lane("2.4", COMPUTE, ("tile", 60, 80, {"m_tile": 0, "chunk": 0}))
    assert tail_ns({0: spans, 1: late}) == 95_000 - 80_000 - 6_000


def test_whole_rows_lag_behind_the_last_of_their_tiles():
    tiles = [("tile", 5 * n, 5 * n + 5, {"m_tile": 0, "chunk": n}) for n in range(4)]
    spans = [
        *lane("0.4", COMPUTE, *tiles, ("reduce", 40, 90, {})),
        *lane("1.4", COMMUNICATION, ("send", 21, 32, {"m_tile": 0})),
    ]

    assert tail_ns({0: spans}) == 90_000 - 20_000 - 12_000


def test_a_launch_that_reduces_nothing_has_no_tail():
    assert tail_ns({0: multiplying(0)}) == 0


def test_rows_that_come_late_cost_waits_and_tiles_that_take_longer():
    sends = lane("2.0", COMMUNICATION, ("send", 0, 40, {"m_tile": 4, "peer": 0, "num_rows": 1}))
    spans = [*multiplying(0), *multiplying(1, ready_us=10), *sends]
    # Nobody waits, and two tiles that took 38 us together take 2 us less.
    tiles = [("tile", 5, 15, {"m_tile": 3}), ("tile", 15, 41, {"m_tile": 4})]
    beside = [*lane("0.4", COMPUTE, *tiles), *lane("1.4", COMPUTE, *tiles), *sends]

    # 30 + 5 us on one, 10 + 5 us on the other, and 2 us on both; the SM that only sends is neither.
    lost = late_loss({0: spans}, {0: beside})
    assert lost == Loss(waits_ns=25_000, tiles_ns=2_000, behind_ns=0)
    assert lost.all_ns == 27_000
    assert late_loss({0: beside}, {0: spans}).all_ns == -27_000
    assert late_loss({0: sends}, {0: sends}).all_ns == 0


def test_waits_cost_nothing_while_the_other_launch_still_moves_rows():
    fused = multiplying(0)  # 80 us, of which 35 are waits and 38 tiles
    tiles = [("tile", 0, 38, {"m_tile": 3})]
    sends = lane("1.0", COMMUNICATION, ("send", 0, 60, {"m_tile": 4, "peer": 0, "num_rows": 1}))

    assert late_loss({0: fused}, {0: lane("0.4", COMPUTE, *tiles)}).all_ns == 35_000
    # Its tiles end at 38 us, it itself with its last row at 60.
    beside = [*lane("0.4", COMPUTE, *tiles), *sends]
    lost = late_loss({0: [*fused, *sends]}, {0: beside})
    assert (lost.all_ns, lost.behind_ns) == (35_000 - 22_000, -22_000)


def test_the_rank_whose_tiles_end_last_may_be_another_in_each_launch():
    fused = {0: multiplying(0), 1: multiplying(0, ready_us=10)}
    beside = {0: multiplying(0, ready_us=5), 1: multiplying(0, ready_us=10)}

    # Rank 0 waits for 30 + 5 us, rank 1 beside for 10 + 5; rank 0 itself has lost 25.
    assert late_loss(fused, beside).all_ns == 20_000


def homeward(*, last_us, sent_us=None, reduced_us=None):
    """An SM that multiplies until `last_us` and reduces, and one that pushes."""
    done = [("tile", 0, 40, {"m_tile": 0}), ("tile", 40, last_us, {"m_tile": 1})]
    if reduced_us is not None:
        done.append(("reduce", last_us + 2, reduced_us, {}))
    spans = lane("0.4", COMPUTE, *done)
    if sent_us is not None:
        spans += lane("1.4", COMMUNICATION, ("send", 45, sent_us, {"m_tile": 1}))
    return spans


def test_the_tail_costs_what_follows_the_last_tile_more_than_without_a_reduction():
    fused = homeward(last_us=60, sent_us=80, reduced_us=95)
    pushing, sending = homeward(last_us=58, sent_us=64), homeward(last_us=58)

    lost = tail_loss({0: fused}, {0: pushing})
    assert lost == Loss(waits_ns=0, tiles_ns=2_000, behind_ns=35_000 - 6_000)
    assert lost.all_ns == 95_000 - 64_000
    assert tail_loss({0: fused}, {0: sending}).behind_ns == 35_000
    # The last tile and the last token of all ranks count, as the launch is theirs.
    late = homeward(last_us=80)
    lost = tail_loss({0: fused, 1: late}, {0: pushing, 1: pushing})
    assert lost == Loss(waits_ns=0, tiles_ns=22_000, behind_ns=15_000 - 6_000)
    assert tail_loss({0: multiplying(0)}, {0: pushing}).all_ns == 0


def test_times_of_roles_tell_what_sms_were_there_for():
    both = lane("5.0", COMMUNICATION, ("send", 0, 50, {}))
    both += lane("5.4", COMPUTE, ("tile", 50, 100, {}))
    spans = [*multiplying(0), *multiplying(1), *both, *lane("6", COMMUNICATION, ("send", 0, 9, {}))]

    found = role_times(spans)

    assert {name: role.num_sms for name, role in found.items()} == {
        "both": 1,
        "communication": 1,
        "compute": 2,
    }
    assert found["compute"].times.wait_ns == 2 * 35_000
    assert found["both"].by_kind == {SpanKind.send: 50_000, SpanKind.tile: 50_000}
    assert found["communication"].times.idle_ns == 91_000


@pytest.mark.parametrize(
    ("stamped", "holds"), [(46_000, True), (76_000, True), (77_000, False), (14_000, False)]
)
def test_stamps_and_breakdown_agree_within_a_hundredth_or_the_interval(stamped, holds):
    measured = Interval(value=50_000, low=40_000, high=55_000)

    found = agreement("late", stamped, measured, fused_ns=2_600_000)

    assert found.allowed == 26_000
    assert found.holds is holds


def test_agreement_is_told_in_a_sentence():
    measured = Interval(value=50_000, low=10_000, high=55_000)

    assert str(agreement("tail", 46_000, measured, fused_ns=1)) == (
        "tail: 46.0 us by stamps, 50.0 us [10.0, 55.0] by the breakdown: 4.0 us apart, "
        "40.0 us allowed: they agree"
    )
    assert str(agreement("tail", 146_000, measured, fused_ns=1)).endswith(
        ": 96.0 us apart, 40.0 us allowed: they do not agree"
    )
