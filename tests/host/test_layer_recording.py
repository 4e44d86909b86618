"""A recorded layer of real ranks: both halves in one record, gapless, in hand-out order."""

import numpy as np
import pytest

from tests.experiments.groups import random_routing
from tests.host.ranks import Failed, run_ranks
from tilepipe.config.choices import Granularity
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Form
from tilepipe.host.layer import HostLayer
from tilepipe.records import SpanKind
from tilepipe.results.spans import by_lane, lane_times, unblocking
from tilepipe.schedule.plan import homeward_plan
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload import payload

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS = 4, 128, 48, 24


def record_layer(rank, place, settings, routing):
    """Spans of a layer, its stamps, and the hand-outs of both its GEMMs."""
    host = HostLayer(
        place,
        rank=rank,
        settings=settings,
        shape=Shape(
            max_tokens=TOKENS,
            num_tokens=settings.num_ranks * TOKENS,
            dispatch_hidden=HIDDEN,
            home_hidden=HIDDEN,
            tile_n=32,
        ),
        watchdog_s=20,
        start_limit_s=20,
    )
    host.set_routing(routing.topk_idx[rank], routing.topk_weights[rank])
    num_local = EXPERTS // settings.num_ranks
    local = range(rank * num_local, (rank + 1) * num_local)
    sizes = ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    gemms = tuple(
        GroupedGemm([payload.expert_weights(e, n, k) for e in local], tile_n=32, gated=not number)
        for number, (n, k) in enumerate(sizes)
    )
    h = np.zeros((host.capacity, INTERMEDIATE), np.uint16)
    y = np.zeros((host.capacity, HIDDEN), np.uint16)
    out = np.zeros((TOKENS, HIDDEN), np.uint16)
    x = payload.row_bits(1, rank, np.arange(TOKENS), HIDDEN)
    stamps = []

    def launch():
        stamps.append(host.moe_layer(x, gemms, h, y, out, Form.fused))

    launch()
    spans = host.record(launch)
    home = homeward_plan(host.current_plan, settings)
    host.close()
    return spans, stamps[-1], host.current_plan.handout, home.handout


@pytest.fixture(scope="module", params=[(1, Granularity.tile), (2, Granularity.expert)])
def recorded(request):
    num_ranks, granularity = request.param
    settings = PlanSettings(
        num_ranks=num_ranks,
        num_experts=EXPERTS,
        num_topk=2,
        tile_m=16,
        num_n_tiles=3,
        num_chunks=3,
        second_gemm=(4, 2),
        granularity=granularity,
    )
    routing = random_routing([TOKENS] * num_ranks, num_experts=EXPERTS, num_topk=2)
    per_rank = run_ranks(num_ranks, record_layer, settings, routing)
    assert not [result.text for result in per_rank if isinstance(result, Failed)]
    return granularity, per_rank


def test_both_gemms_are_there_tile_by_tile_one_after_the_other(recorded):
    for spans, _, first, second in recorded[1]:
        tiles = [(s.m_tile, s.n_tile) for s in spans if s.kind is SpanKind.tile]

        assert tiles == [*map(tuple, first.tolist()), *map(tuple, second.tolist())]
        assert not np.array_equal(first, second)


def test_lanes_are_gapless_from_the_start_of_the_layer_to_its_end(recorded):
    for spans, stamps, _, _ in recorded[1]:
        lanes = by_lane(spans)
        assert list(lanes) == ["computing", "sender"]
        assert [s for found in lanes.values() for s in found] == list(spans)
        for found in lanes.values():
            ends = [stamps.start_ns, *(s.end_ns for s in found)]
            assert [s.start_ns for s in found] == ends[:-1]
            assert ends[-1] == stamps.end_ns
            assert lane_times(found).length_ns == stamps.end_ns - stamps.start_ns


def test_rows_are_sent_there_and_home_and_each_tile_is_let_begin(recorded):
    granularity, per_rank = recorded
    spans = {rank: result[0] for rank, result in enumerate(per_rank)}
    rows = 2 * TOKENS
    sent = [
        sum(s.num_rows for s in found if s.kind is SpanKind.send and s.chunk is None)
        for found in spans.values()
    ]
    pieces = [
        sum(s.num_rows for s in found if s.kind is SpanKind.send and s.chunk is not None)
        for found in spans.values()
    ]

    if granularity is Granularity.tile:
        assert (sent, pieces) == ([rows], [2 * rows])
    else:
        assert sum(sent) == 2 * 2 * rows
        assert sum(pieces) == 0
    pairs = unblocking(spans, operation="moe_layer", granularity=granularity.name)
    kinds = [(cause.kind.name, effect.kind.name) for (_, cause), (_, effect) in pairs]
    homeward = kinds.count(("tile", "send"))
    assert 0 < homeward < len(kinds)
    assert set(kinds[:-homeward]) == {("send", "copy")}
