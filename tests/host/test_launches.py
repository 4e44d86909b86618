"""Launch after launch on the same memory, with thresholds that rise and fall and ranks that lag."""

import numpy as np
import pytest

from tests.experiments.groups import random_routing
from tests.host.ranks import Failed, host_rank, run_ranks
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order
from tilepipe.experiments.oracle import Oracle
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Form
from tilepipe.measure.gate import BF16_POISON, poison
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload import payload
from tilepipe.workload.placement import assign, contiguous

NUM_LAUNCHES = 100
RANKS, EXPERTS, TOPK, HIDDEN, WIDTH, MAX_TOKENS = 3, 6, 2, 64, 64, 40
LAGS = (
    NO_DELAYS,
    Delays(entry_ms=2),
    Delays(mid_send_ms=2),
    Delays(last_read_ms=2),
)


def routing_of(launch):
    """Token counts that jump up and down; now and then nobody sends to some rank, or at all."""
    rng = np.random.default_rng(launch)
    tokens = rng.integers(0, MAX_TOKENS + 1, RANKS) * rng.integers(0, 2, RANKS)
    kind = ("uniform", "one_expert", "masked")[launch % 3]
    routing = random_routing(
        tokens.tolist(), num_experts=EXPERTS, num_topk=TOPK, kind=kind, seed=launch
    )
    if launch % 5 == 0:  # rank 1 owns experts 2 and 3: it receives nothing
        for ids in routing.topk_idx:
            ids[(ids == 2) | (ids == 3)] = -1
    return routing


def lag_of(launch, rank):
    return LAGS[launch % len(LAGS)] if rank == launch % RANKS else NO_DELAYS


def soak(rank, place, settings):
    shape = Shape(
        max_tokens=MAX_TOKENS,
        num_tokens=RANKS * MAX_TOKENS,
        dispatch_hidden=HIDDEN,
        home_hidden=WIDTH,
        tile_n=16,
        spare=True,
    )
    host = host_rank(rank, place, settings, shape)
    num_local = EXPERTS // RANKS
    experts = range(rank * num_local, (rank + 1) * num_local)
    weights = [payload.expert_weights(expert, WIDTH, HIDDEN) for expert in experts]
    gemm = GroupedGemm(weights, tile_n=16)
    d = np.empty((host.capacity, WIDTH), np.uint16)
    a = np.empty((host.capacity, HIDDEN), np.uint16)
    wrong = []
    for launch in range(1, NUM_LAUNCHES + 1):
        routing = routing_of(launch)
        oracle = Oracle(assign(contiguous(EXPERTS, RANKS), routing), rank=rank)
        host.set_routing(routing.topk_idx[rank], routing.topk_weights[rank])
        host.delays = lag_of(launch, rank)
        x = payload.row_bits(launch, rank, np.arange(len(routing.topk_idx[rank])), HIDDEN)
        poison(host.recv_x)
        poison(d)
        # No barrier: a rank may be a whole launch ahead, only the gate holds it back.
        form = Form.gemm_contended if launch % 7 == 0 else Form.fused
        if form is Form.gemm_contended:
            host.dispatch(x)
        host.dispatch_gemm(x, gemm, d, form)
        layout = host.current_plan.layout
        told = {"contender": form.name, "stage": "before"}
        verdicts = [
            oracle.check_dispatched(launch, host.recv_x, layout, **told),
            oracle.check_gemm(launch, d, layout, num_k=HIDDEN, **told),
        ]
        rows, source, token, slot = host.received_homes()
        a[rows] = payload.row_bits(launch, source, token, HIDDEN, slot=slot)
        out = np.full((len(x), WIDTH), BF16_POISON, np.uint16)
        host.gemm_combine(a, gemm, d, out, Form.fused)
        verdicts.append(oracle.check_gemm_combined(launch, out, num_k=HIDDEN, **told))
        wrong += [f"launch {launch}: {v.detail}" for v in verdicts if not v.passed]
    return wrong, host.gate.epoch


@pytest.mark.parametrize(
    ("granularity", "home_granularity", "layout", "order"),
    [
        (Granularity.tile, HomeGranularity.token, Layout.padded, Order.edf),
        (Granularity.token, HomeGranularity.rank, Layout.packed, Order.random),
        (Granularity.expert, HomeGranularity.token, Layout.padded, Order.edf_list),
    ],
)
def test_a_hundred_launches_equal_the_oracle(granularity, home_granularity, layout, order):
    settings = PlanSettings(
        num_ranks=RANKS,
        num_experts=EXPERTS,
        num_topk=TOPK,
        tile_m=16,
        num_n_tiles=4,
        num_chunks=4,
        granularity=granularity,
        home_granularity=home_granularity,
        layout=layout,
        order=order,
    )

    results = run_ranks(RANKS, soak, settings)

    assert not [result.text for result in results if isinstance(result, Failed)]
    assert [wrong for wrong, _ in results] == [[], [], []]
    assert {epoch for _, epoch in results} == {2 * NUM_LAUNCHES + NUM_LAUNCHES // 7}


def fail_in_a_launch(rank, place, settings):
    host = host_rank(
        rank,
        place,
        settings,
        Shape(max_tokens=8, num_tokens=16, dispatch_hidden=HIDDEN),
        topk_idx=np.zeros((8, TOPK), np.int32) + np.arange(TOPK, dtype=np.int32),
        watchdog_s=30,
    )
    # No rows although the routing names some: the sending thread of rank 2 fails.
    host.dispatch(np.zeros((8 if rank < 2 else 0, HIDDEN), np.uint16))


def test_a_sender_that_fails_stops_all_ranks_and_its_own_error_is_told():
    settings = PlanSettings(num_ranks=RANKS, num_experts=EXPERTS, num_topk=TOPK)

    waiting, idle, failing = run_ranks(RANKS, fail_in_a_launch, settings, limit_s=20)

    assert (waiting.error, failing.error) == ("PeerAborted", "IndexError")
    assert "because rank 2 gave up" in waiting.text
    # Rank 1 awaits no rows: it may have ended before the failure.
    assert idle is None or "because rank 2 gave up" in idle.text


def leave_before_the_gate(rank, place, settings):
    host = host_rank(
        rank,
        place,
        settings,
        Shape(max_tokens=8, num_tokens=16, dispatch_hidden=HIDDEN),
        topk_idx=np.zeros((8, 1), np.int32),
        watchdog_s=0.3,
    )
    if rank != 1:
        host.dispatch(np.zeros((8, HIDDEN), np.uint16))


def test_a_wait_for_a_missing_rank_ends_with_a_sentence_that_names_it():
    settings = PlanSettings(num_ranks=2, num_experts=2, num_topk=1)

    late, absent = run_ranks(2, leave_before_the_gate, settings, limit_s=20)

    assert absent is None
    assert late.error == "WatchdogTimeout"
    assert late.text.splitlines()[0] == (
        "rank 0 waited 0.3 s (launch.watchdog_ms): role gate, epoch 1: no counts from ranks [1]"
    )


def other_settings(rank, place):
    settings = PlanSettings(
        num_ranks=2, num_experts=2, num_topk=1, order=(Order.edf, Order.token)[rank]
    )
    host = host_rank(
        rank,
        place,
        settings,
        Shape(max_tokens=8, num_tokens=16, dispatch_hidden=HIDDEN),
        topk_idx=np.zeros((8, 1), np.int32),
    )
    host.dispatch(np.zeros((8, HIDDEN), np.uint16))


def test_ranks_with_other_plan_settings_are_refused_at_the_gate():
    results = run_ranks(2, other_settings, limit_s=20)

    assert [result.error for result in results] == ["ValueError", "ValueError"]
    assert "rank 1 runs with other plan settings than rank 0" in results[0].text


def overflow(rank, place, settings):
    host = host_rank(
        rank,
        place,
        settings,
        Shape(max_tokens=8, num_tokens=16, dispatch_hidden=HIDDEN, capacity_factor=1.0),
        topk_idx=np.zeros((8, 1), np.int32),
    )
    host.dispatch(np.zeros((8, HIDDEN), np.uint16))


def test_an_overflow_is_refused_by_all_ranks_alike_before_anything_is_sent():
    settings = PlanSettings(num_ranks=2, num_experts=2, num_topk=1, layout=Layout.packed, tile_m=16)

    results = run_ranks(2, overflow, settings, limit_s=20)

    sentences = {result.text.splitlines()[0] for result in results}
    assert sentences == {
        "kernel.capacity_factor gives 8 receive rows a rank, but rank 0 would receive 16; raise "
        "it, or type kernel.capacity_factor=null for the worst case"
    }
