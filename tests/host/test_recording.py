"""Recorded launches of real ranks: what their spans must add up to, whatever order they ran in."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest

from tests.experiments.groups import make_config, measure_group, random_routing
from tests.host.ranks import Failed, host_rank, run_ranks
from tilepipe.config.choices import Granularity, HomeGranularity, Operation, Order
from tilepipe.fabric.host import HeapPlace
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Form
from tilepipe.records import Point, SpanKind, SpanRole
from tilepipe.results.accounting import account
from tilepipe.results.spans import by_lane, lane_times
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload import payload

EXPERTS, TOPK, HIDDEN, TOKENS = 8, 2, 64, 24
ROUTINGS = ("uniform", "one_expert", "masked")
CASES = list(product(Order, Granularity))


class Recorded:
    """A launch of one rank: its spans, and the plan that they must agree with."""

    def __init__(self, host, launch):
        stamps = []
        self.spans = host.record(lambda: stamps.append(launch()))
        (self.stamps,) = stamps
        self.plan, self.tickets, self.settings = host.current_plan, host._tickets, host.settings

    def of(self, kind, lane=None):
        return [s for s in self.spans if s.kind is kind and lane in (None, s.lane)]


def record_both(rank, place, settings, routing, delays=NO_DELAYS):
    """One recorded launch of dispatch -> GEMM, one of GEMM -> combine."""
    ranks = settings.num_ranks
    shape = Shape(
        max_tokens=TOKENS,
        num_tokens=ranks * TOKENS,
        dispatch_hidden=HIDDEN,
        home_hidden=HIDDEN,
        tile_n=16,
    )
    ids, weights = routing.topk_idx[rank], routing.topk_weights[rank]
    host = host_rank(rank, place, settings, shape, topk_idx=ids, topk_weights=weights)
    local = range(rank * EXPERTS // ranks, (rank + 1) * EXPERTS // ranks)
    gemm = GroupedGemm([payload.expert_weights(e, HIDDEN, HIDDEN) for e in local], tile_n=16)
    y = np.empty((host.capacity, HIDDEN), np.uint16)
    a, out = np.zeros_like(y), np.empty((TOKENS, HIDDEN), np.uint16)
    x = payload.row_bits(1, rank, np.arange(TOKENS), HIDDEN)
    host.dispatch(x)
    host.delays = delays
    there = Recorded(host, lambda: host.dispatch_gemm(x, gemm, y, Form.fused))
    back = Recorded(host, lambda: host.gemm_combine(a, gemm, y, out, Form.fused))
    host.close()
    return there, back


def settings_of(ranks, order=Order.edf, granularity=Granularity.tile, **changes):
    return PlanSettings(
        num_ranks=ranks,
        num_experts=EXPERTS,
        num_topk=TOPK,
        tile_m=16,
        num_n_tiles=4,
        num_chunks=2,
        raster_m=2,
        order=order,
        granularity=granularity,
        **changes,
    )


def record_all(rank, place, ranks):
    found = []
    for number, (order, granularity) in enumerate(CASES):
        home = HomeGranularity.rank if number % 4 == 3 else HomeGranularity.token
        settings = settings_of(ranks, order, granularity, home_granularity=home)
        routing = routing_of(ranks, ROUTINGS[number % 3])
        own = HeapPlace(token=f"{place.token}-{number}", shm_dir=place.shm_dir)
        found.append(record_both(rank, own, settings, routing))
    return found


def routing_of(ranks, kind="uniform"):
    return random_routing([TOKENS] * ranks, num_experts=EXPERTS, num_topk=TOPK, kind=kind, seed=3)


@pytest.fixture(scope="module", params=[1, 2, 4])
def launches(request):
    """Both launches of every case: `[case][operation][rank]`."""
    per_rank = run_ranks(request.param, record_all, request.param)
    failures = [result.text for result in per_rank if isinstance(result, Failed)]
    assert not failures, failures[0]
    return [list(zip(*of_case, strict=True)) for of_case in zip(*per_rank, strict=True)]


def each(launches):
    return [one for case in launches for operation in case for one in operation]


def test_every_tile_of_the_plan_is_there_once_and_in_hand_out_order(launches):
    for one in each(launches):
        tiles = one.of(SpanKind.tile)

        assert [(s.m_tile, s.n_tile) for s in tiles] == list(map(tuple, one.plan.handout.tolist()))
        assert [s.deadline for s in tiles] == list(range(len(tiles)))
        assert [s.num_rows for s in tiles] == one.plan.layout.tiles[
            [s.m_tile for s in tiles], 2
        ].tolist()
        first = one.plan.rank * one.settings.num_experts_per_rank
        assert [s.expert - first for s in tiles] == one.plan.layout.tiles[
            [s.m_tile for s in tiles], 0
        ].tolist()


def test_every_ticket_is_sent_once(launches):
    for case in launches:
        for one in case[0]:
            sends = one.of(SpanKind.send)
            assert [s.ticket for s in sends] == list(range(len(one.tickets)))
            for name in ("peer", "num_rows", "expert", "deadline"):
                assert [getattr(s, name) for s in sends] == getattr(one.tickets, name).tolist()
            assert [s.m_tile for s in sends] == one.tickets.tile.tolist()
        for one in case[1]:
            # In pieces: chunks with granularity tile, rows with token.
            share = {s.ticket: 0 for s in one.of(SpanKind.send)}
            pieces = Counter((s.ticket, s.chunk) for s in one.of(SpanKind.send))
            for span in one.of(SpanKind.send):
                share[span.ticket] += span.num_rows * (2 if span.chunk is None else 1)
            assert share == {n: 2 * r for n, r in enumerate(one.tickets.num_rows.tolist())}
            if one.settings.granularity is not Granularity.token:
                assert set(pieces.values()) <= {1}


def test_a_lane_has_neither_gap_nor_overlap_and_its_shares_add_up_to_the_launch(launches):
    for one in each(launches):
        lanes = by_lane(one.spans)
        assert list(lanes) == ["computing", "sender"]
        for spans in lanes.values():
            assert spans[0].start_ns == one.stamps.start_ns
            assert spans[-1].end_ns == one.stamps.end_ns
            assert all(a.end_ns == b.start_ns for a, b in pairwise(spans))
            assert all(s.end_ns >= s.start_ns for s in spans)
            times = lane_times(spans)
            assert times.length_ns == one.stamps.end_ns - one.stamps.start_ns
            assert min(times.busy_ns, times.wait_ns, times.copy_ns, times.idle_ns) >= 0


def test_gate_and_plan_are_the_planned_part_of_the_launch(launches):
    for one in each(launches):
        opening = [s for s in by_lane(one.spans)["computing"] if s.role is SpanRole.plan]

        assert [s.kind for s in opening] == [SpanKind.gate, SpanKind.plan]
        # Two readings of the clock, one after the other, on a machine that may do others' work.
        assert 0 <= one.stamps.planned_ns - opening[-1].end_ns < 50_000_000


def test_a_tile_is_asked_for_once_and_its_lateness_is_its_wait(launches):
    for case in launches:
        for one in case[0]:
            waits = {s.m_tile: s for s in one.of(SpanKind.wait, "computing")}
            copies = {s.m_tile: s for s in one.of(SpanKind.copy)}
            assert sorted(waits) == sorted(copies) == list(range(one.plan.layout.num_tiles))
            assert len(one.of(SpanKind.wait)) == len(waits)
            assert all(waits[m].end_ns == copies[m].start_ns for m in waits)
        for one in (*case[0], *case[1]):
            for span in one.spans:
                late = span.lateness_ns
                assert late is None or span.kind is SpanKind.wait
                assert late in (None, span.end_ns - span.start_ns)


def test_nothing_is_read_before_its_last_row_was_on_its_way(launches):
    for (order, granularity), case in zip(CASES, launches, strict=True):
        latest = {}
        for one in case[0]:
            for s in one.of(SpanKind.send):
                unit = s.expert if granularity is Granularity.expert else s.m_tile
                key = s.peer, unit
                latest[key] = max(latest.get(key, 0), s.start_ns)
        for one in case[0]:
            for s in one.of(SpanKind.copy):
                unit = s.expert if granularity is Granularity.expert else s.m_tile
                assert s.start_ns >= latest[one.plan.rank, unit], (order, granularity)


def test_no_row_leaves_for_home_before_its_tiles_have_begun(launches):
    for case in launches:
        for one in case[1]:
            begun = {(s.m_tile, s.n_tile): s.start_ns for s in one.of(SpanKind.tile)}
            for s in one.of(SpanKind.send):
                chunk = range(4) if s.chunk is None else range(2 * s.chunk, 2 * s.chunk + 2)
                assert s.end_ns >= max(begun[s.m_tile, n] for n in chunk)


def test_tokens_are_summed_once_each(launches):
    for case in launches:
        for one in case[1]:
            assert sum(s.num_rows for s in one.of(SpanKind.reduce)) == TOKENS


def test_a_launch_that_is_not_recorded_leaves_nothing_behind():
    def body(rank, place):
        there, back = record_both(rank, place, settings_of(2), routing_of(2))
        return len(there.spans), len(back.spans)

    assert all(min(counts) > 20 for counts in run_ranks(2, body))


# Long beside what a busy machine takes from a thread now and then.
DELAY_MS, ONCE_MS = 10.0, 80.0


@pytest.mark.parametrize(
    ("operation", "delays", "lane", "kind", "times"),
    [
        (0, Delays(entry_ms=ONCE_MS), "computing", SpanKind.gate, lambda one: ONCE_MS / DELAY_MS),
        (0, Delays(send_ms=DELAY_MS), "sender", SpanKind.send, lambda one: len(one.tickets)),
        (0, Delays(mid_send_ms=ONCE_MS), "sender", SpanKind.send, lambda one: ONCE_MS / DELAY_MS),
        (0, Delays(check_ms=DELAY_MS), "computing", SpanKind.wait, lambda one: num_tiles(one)),
        (0, Delays(gemm_ms=DELAY_MS), "computing", SpanKind.tile, lambda one: num_tiles(one)),
        (0, Delays(contended_ms=DELAY_MS), "computing", SpanKind.tile, lambda one: num_tiles(one)),
        (
            0,
            Delays(last_read_ms=ONCE_MS),
            "computing",
            SpanKind.copy,
            lambda one: ONCE_MS / DELAY_MS,
        ),
        (1, Delays(send_ms=DELAY_MS), "sender", SpanKind.send, lambda one: len(one.tickets)),
        (1, Delays(publish_ms=DELAY_MS), "computing", SpanKind.tile, lambda one: num_tiles(one)),
        (
            1,
            Delays(last_read_ms=ONCE_MS),
            "computing",
            SpanKind.reduce,
            lambda one: ONCE_MS / DELAY_MS,
        ),
    ],
)
def test_a_delay_shows_in_its_own_lane_and_kind(operation, delays, lane, kind, times):
    # One N chunk a row would hide in the other: expert sends whole tickets.
    settings = settings_of(1, granularity=Granularity.expert)

    (launched,) = run_ranks(1, record_both, settings, routing_of(1), delays)

    one = launched[operation]
    spent_ms = Counter()
    for span in one.spans:
        spent_ms[span.lane, span.kind] += (span.end_ns - span.start_ns) / 1e6
    expected_ms = DELAY_MS * times(one)
    assert expected_ms <= spent_ms[lane, kind] < 2 * expected_ms
    busy = {SpanKind.gate, SpanKind.plan, SpanKind.send, SpanKind.copy, SpanKind.tile}
    for other in busy - {kind}:
        assert spent_ms[lane, other] < expected_ms / 2, (other, spent_ms)


def num_tiles(one):
    return one.plan.layout.num_tiles


@pytest.mark.parametrize(
    ("operation", "term"), [(Operation.dispatch_gemm, "late"), (Operation.gemm_combine, "tail")]
)
def test_what_a_timeline_shows_as_late_agrees_with_the_breakdown(operation, term):
    """With sends so slow that nothing else counts; else a rest of medians proves little."""
    routing = random_routing([16] * 2, num_experts=16, num_topk=1)
    config = make_config(operation, routing, num_iters=3)
    config.measure.timeline = True

    (records,) = measure_group([config], routing, delays=[Delays(send_ms=10)] * 2)

    terms, _ = account(_point(operation), records)
    (told,) = [t.interval.value for t in terms if t.term == term]
    slowest = max(records, key=lambda record: _length(record.spans))
    tiles = [s for s in slowest.spans if s.kind is SpanKind.tile]
    if term == "late":
        shown = sum(s.lateness_ns or 0 for s in slowest.spans if s.lane == "computing")
    else:
        shown = slowest.spans[0].start_ns + _length(slowest.spans) - tiles[-1].end_ns
    assert shown > 50_000_000
    assert shown == pytest.approx(told, rel=0.25)


def _length(spans):
    return max(span.end_ns - spans[0].start_ns for span in spans)


def _point(operation):
    return Point(
        name="test",
        operation=operation.name,
        executor="host",
        config={"workload": {"num_experts": 16}},
        choices={},
        overrides=(),
        config_id="",
        build_id="",
    )


def test_every_operation_has_a_timeline_and_its_samples_are_as_many_without_it():
    routing = routing_of(2)
    configs = [make_config(operation, routing, tile_m=16, tile_n=16) for operation in Operation]
    for config in configs:
        config.measure.timeline = True
    bare = make_config(Operation.dispatch, routing, tile_m=16, tile_n=16)

    *recorded, without = measure_group([*configs, bare], routing)

    for config, records in zip(configs, recorded, strict=True):
        assert all(record.spans for record in records), config.operation
    assert all(record.spans == () for record in without)
    assert [len(r.samples) for r in without] == [len(r.samples) for r in recorded[0]]
