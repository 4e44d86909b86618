"""The JSON of a timeline as an importer reads it."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.results.chrome_trace import read, to_ns
from tests.results.spans import lane, recording, sms, two_ranks
from tilepipe.records import SpanKind, SpanRole
from tilepipe.results.traceevents import _us, trace_json


@given(st.integers(0, 10**13))
def test_a_time_comes_back_to_the_nanosecond_when_an_importer_cuts_it_off(time_ns):
    assert to_ns(_us(time_ns)) == time_ns


def test_ranks_are_processes_and_lanes_are_threads(make_point):
    trace = read(trace_json(recording(make_point(), two_ranks())))

    assert trace.processes == {1: "rank 0", 2: "rank 1"}
    assert trace.threads == {1: "computing", 2: "sender", 3: "computing", 4: "sender"}
    assert [s.name for s in trace.slices[2, 3]] == [
        "wait m 0",
        "copy m 0",
        "tile m 0 n 0",
        "tile m 0 n 1",
    ]
    assert [(s.start_ns, s.end_ns) for s in trace.slices[2, 3]][:2] == [
        (3000, 43_000),
        (43_000, 45_000),
    ]


def test_args_say_what_a_span_knows_and_leave_out_what_it_does_not(make_point):
    trace = read(trace_json(recording(make_point(), two_ranks())))

    wait, copy, *_ = trace.slices[2, 3]
    assert wait.args == {"share": "wait", "expert": 1, "m_tile": 0, "lateness_ns": 40_000}
    assert copy.args == {"share": "copy", "expert": 1, "m_tile": 0, "num_rows": 16}


def test_the_last_send_into_a_tile_flows_to_the_first_work_on_it(make_point):
    trace = read(trace_json(recording(make_point(), two_ranks())))

    told = [(a.name, a.start_ns, b.name, b.start_ns) for a, b in trace.flows]
    assert told == [
        ("send to 0 m 0", 2000, "tile m 0 n 0", 3000),
        ("send to 1 m 0", 3000, "copy m 0", 43_000),
    ]


def test_a_tile_flows_to_the_first_push_of_what_it_completes(make_point):
    tile = {"m_tile": 0, "chunk": 0, "expert": 0}
    spans = lane(
        "computing",
        SpanRole.compute,
        ("tile", 0, 10, {**tile, "n_tile": 0}),
        ("tile", 10, 20, {**tile, "n_tile": 1}),
        ("tile", 20, 30, {"m_tile": 1, "chunk": 0, "n_tile": 0}),
    )
    push = {"peer": 0, "m_tile": 0, "chunk": 0, "expert": 0}
    # The push has begun to look before the tile's own end: its flow may not end before it starts.
    spans += lane(
        "sender",
        SpanRole.communication,
        ("send", 9, 25, {**push, "ticket": 0}),
        ("send", 25, 30, {**push, "ticket": 1}),
    )
    point = replace(make_point(), operation="gemm_combine")

    trace = read(trace_json(recording(point, {0: tuple(spans)})))

    told = [(a.name, b.args["ticket"]) for a, b in trace.flows]
    assert told == [("tile m 0 n 1", 0)]


def test_a_flow_keeps_to_its_own_slice_where_clocks_are_too_coarse_to_part_two(make_point):
    send = {"peer": 0, "m_tile": 0, "expert": 0}
    spans = lane(
        "sender",
        SpanRole.communication,
        ("send", 5, 5, {**send, "ticket": 0}),
        ("send", 5, 9, {**send, "m_tile": 1, "ticket": 1}),
    )
    spans += lane("computing", SpanRole.compute, ("tile", 9, 12, {"m_tile": 0, "n_tile": 0}))

    trace = read(trace_json(recording(make_point(), {0: tuple(spans)})))

    assert [source.args["ticket"] for source, _ in trace.flows] == [0]


def test_one_rank_and_a_window_show_less_and_no_flow_without_both_ends(make_point):
    whole = recording(make_point(), two_ranks())

    one = read(trace_json(whole, ranks=[1]))
    window = read(trace_json(whole, window_us=(44, 50)))

    assert one.processes == {2: "rank 1"}
    assert one.flows == []
    shown = [s.name for track in window.slices.values() for s in track]
    assert sorted(shown) == ["copy m 0", "tile m 0 n 0", "tile m 0 n 0"]
    assert window.flows == []


def test_lanes_of_a_gpu_are_named_and_ordered_by_their_number(make_point):
    trace = read(trace_json(recording(make_point(), sms(12))))

    assert list(trace.threads.values()) == [f"SM {sm}" for sm in range(12)]


_KINDS = st.sampled_from(sorted(set(SpanKind) - {SpanKind.idle}, key=lambda kind: kind.name))


@given(st.lists(st.tuples(_KINDS, st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_whatever_a_lane_did_an_importer_reads_every_slice(make_point, laps):
    told, at_us = [], 0.0
    for kind, gap_ns, length_ns in laps:
        start_us = at_us + gap_ns / 1000
        at_us = start_us + length_ns / 1000
        told.append((kind.name, start_us, at_us, {"m_tile": 0, "n_tile": 0, "chunk": 0, "peer": 0}))
    spans = lane("computing", SpanRole.compute, *told)

    trace = read(trace_json(recording(make_point(), {0: tuple(spans)})))

    assert sum(map(len, trace.slices.values())) == len(laps)
