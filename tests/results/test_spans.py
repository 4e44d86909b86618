"""The laws that spans of a launch obey, and what they add up to."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.results.spans import lane, layer_of_two_ranks, two_ranks
from tilepipe.records import Span, SpanKind, SpanRole, with_idle
from tilepipe.results.spans import (
    SHARES,
    LaneTimes,
    by_lane,
    lane_times,
    longest_waits,
    span_faults,
    unblocking,
)
from tilepipe.results.tables import spans_by_rank, timeline_table


def table_of(make_outcome, spans):
    outcome = make_outcome()
    records = [replace(r, spans=tuple(spans.get(r.rank, ()))) for r in outcome.records]
    return timeline_table(replace(outcome, records=tuple(records)))


def test_spans_survive_their_table(make_outcome):
    spans = two_ranks()

    assert spans_by_rank(table_of(make_outcome, spans)) == spans


def test_sound_spans_have_no_fault(make_outcome):
    assert span_faults(table_of(make_outcome, two_ranks()), num_ranks=2) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            lambda spans: spans.pop(1),
            "ranks are [0], point.json has 0..1",
        ),
        (
            lambda spans: spans.update({0: spans[0][:2] + spans[0][3:]}),
            "span 2 does not start where the one before it in its lane ends",
        ),
        (
            lambda spans: spans.update({0: (*spans[0][1:], spans[0][0])}),
            "spans of a lane do not lie together",
        ),
        (
            lambda spans: spans.update({1: spans[1][:-1]}),
            "lanes of rank 1 end at different times",
        ),
        (
            lambda spans: spans.update({0: (replace(spans[0][0], lateness_ns=-1), *spans[0][1:])}),
            "a lateness is below 0 or longer than its wait",
        ),
    ],
)
def test_a_broken_law_is_one_sentence(make_outcome, change, fault):
    spans = two_ranks()
    change(spans)

    assert fault in span_faults(table_of(make_outcome, spans), num_ranks=2)


def test_every_kind_counts_to_one_share():
    assert set(SHARES) == set(SpanKind)
    assert set(SHARES.values()) == {"busy", "wait", "copy", "idle"}


def test_shares_of_a_lane_are_added_by_kind():
    (computing, sender) = by_lane(two_ranks()[0]).values()

    assert lane_times(computing) == LaneTimes(
        busy_ns=88_500, wait_ns=1500, copy_ns=0, idle_ns=10_000
    )
    assert lane_times(sender) == LaneTimes(busy_ns=0, wait_ns=0, copy_ns=40_750, idle_ns=59_250)
    assert lane_times(sender).length_ns == 100_000


@given(st.lists(st.integers(0, 1000), max_size=30), st.integers(0, 1000), st.data())
def test_a_lane_filled_with_idle_is_gapless_and_as_long_as_the_launch(steps, rest, data):
    kinds = st.sampled_from(SpanKind)
    spans, at = [], 7
    for number, step in enumerate(steps):
        if number % 2:
            kind = data.draw(kinds)
            told = {"lane": "0", "role": SpanRole.compute, "kind": kind}
            spans.append(Span(**told, start_ns=at, end_ns=at + step))
        at += step

    whole = with_idle(spans, lane="0", role=SpanRole.compute, start_ns=7, end_ns=at + rest)

    assert [s for s in whole if s in spans] == spans
    assert lane_times(whole).length_ns == at + rest - 7
    assert all(a.end_ns == b.start_ns for a, b in pairwise(whole))


def test_lanes_that_are_numbers_come_by_number():
    names = ["10", "2", "2.10", "2.9"]
    spans = [s for name in names for s in lane(name, SpanRole.compute)]

    assert list(by_lane(spans)) == ["2", "2.9", "2.10", "10"]


def test_the_longest_wait_comes_first_and_looks_that_found_all_ready_are_none():
    found = longest_waits(two_ranks(), 5)

    assert [(rank, span.lateness_ns) for rank, span in found] == [(1, 40_000)]


@pytest.mark.parametrize("granularity", ["tile", "token"])
def test_the_send_that_ended_last_lets_a_tile_begin(granularity):
    pairs = unblocking(two_ranks(), operation="dispatch_gemm", granularity=granularity)

    told = [(r, s.ticket, at, e.kind.name) for (r, s), (at, e) in pairs]
    assert told == [(0, 0, 0, "tile"), (0, 1, 1, "copy")]


def test_a_layer_has_the_pairs_of_both_halves_the_second_begins_with_its_own_plan():
    spans = layer_of_two_ranks()

    pairs = unblocking(spans, operation="moe_layer", granularity="tile")

    first = unblocking(two_ranks(), operation="dispatch_gemm", granularity="tile")
    assert pairs[: len(first)] == first
    assert [(r, s.kind.name, at, e.ticket) for (r, s), (at, e) in pairs[len(first) :]] == [
        (0, "tile", 0, 7),
        (1, "tile", 1, 7),
    ]


def test_with_granularity_expert_the_first_tile_of_an_expert_is_let_begin():
    spans = two_ranks()
    later = [replace(s, m_tile=1) for s in spans[1] if s.kind is SpanKind.copy]
    spans[1] = (*spans[1], *[replace(s, start_ns=s.end_ns) for s in later])

    pairs = unblocking(spans, operation="dispatch_gemm", granularity="expert")

    assert [(e.m_tile, e.kind.name) for _, (at, e) in pairs if at == 1] == [(0, "copy")]
