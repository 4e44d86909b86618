"""A whole layer on the host: its bits whatever overlaps, and that the gate sees what is wrong."""

import json

import numpy as np
import pytest

from tests.experiments.groups import make_config, measure_group, random_routing, wrong_verdicts
from tests.experiments.pairwise import pairwise
from tests.host.ranks import Failed, run_ranks
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Operation, Order
from tilepipe.config.schemas import TraceRouting
from tilepipe.experiments import entry, oracle, setting
from tilepipe.experiments.moe_layer import MoeLayer
from tilepipe.experiments.session import Session
from tilepipe.fabric.host import HeapPlace
from tilepipe.host import combine, dispatch, gemm, protocol
from tilepipe.host.delays import Delays
from tilepipe.reference import moe
from tilepipe.workload import bf16, payload
from tilepipe.workload.routing import draw

AXES = {
    "order": list(Order),
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
    "layout": list(Layout),
}
COVER = pairwise(AXES, lambda case: True)
# N tiles of both GEMMs that are not full, and a row home in two chunks.
SIZES = {"hidden": 3600, "intermediate": 40, "tile_m": 16, "tile_n": 48}
ROUTING = random_routing([40, 40], num_experts=4, num_topk=2)


def tokens_of_all(rank, place, configs, routing):
    """Tokens that both forms leave, by configuration; those of the first one pass the gate."""
    setting.draw = lambda *_, **__: routing
    found = []
    for number, config in enumerate(configs):
        own = HeapPlace(token=f"{place.token}-{number}", shm_dir=place.shm_dir)
        session = Session(config, MoeLayer.memory(config), rank=rank, place=own)
        trial = MoeLayer(session)
        for contender in MoeLayer.checked:
            trial.prepare(contender, 1)
            trial.poison(contender)
            session.host.heap.barrier()
            trial.run(contender)
            for verdict in trial.check(contender, 1, "before") if number == 0 else ():
                assert verdict.passed, verdict.detail
            found.append(trial._out[contender].copy())
        session.host.close()
    return found


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_tokens_have_the_same_bits_in_every_order_and_granularity_fused_or_not(num_ranks):
    tokens = [33, 0, 21, 7][:num_ranks]
    routing = random_routing(tokens, num_experts=4, num_topk=3, kind="masked")
    configs = [make_config(Operation.moe_layer, routing, **SIZES, **case) for case in COVER]

    per_rank = run_ranks(num_ranks, tokens_of_all, configs, routing, limit_s=240)

    assert not [result.text for result in per_rank if isinstance(result, Failed)]
    for rank, found in enumerate(per_rank):
        assert len(found) == 2 * len(COVER) >= 20
        assert found[0].shape == (tokens[rank], 3600)
        assert all(np.array_equal(found[0], other) for other in found)


def test_tokens_are_what_numpy_makes_of_the_whole_group_at_once():
    routing = random_routing([9, 17], num_experts=4, num_topk=2)
    hidden, intermediate = 64, 40
    config = make_config(Operation.moe_layer, routing, hidden=hidden, intermediate=intermediate)

    per_rank = run_ranks(2, tokens_of_all, [config], routing)

    assert not [result.text for result in per_rank if isinstance(result, Failed)]
    ids, weights = routing.topk_idx, routing.topk_weights
    x = [
        bf16.from_bits(payload.row_bits(1, rank, np.arange(len(own)), hidden))
        for rank, own in enumerate(ids)
    ]
    rows = moe.dispatch(x, ids, num_experts=4)
    first = [payload.expert_weights(e, 2 * intermediate, hidden) for e in range(4)]
    second = [payload.expert_weights(e, hidden, intermediate) for e in range(4)]
    products = moe.grouped_gemm(rows, first)
    activated = [moe.swiglu(*np.split(product, 2, axis=1)) for product in products]
    want = moe.combine_expert_rows(moe.grouped_gemm(activated, second), ids, weights)
    for found, wanted in zip(per_rank, want, strict=True):
        # Of roundings to bf16 there are three in a row: h, what travels, the sum.
        assert np.abs(bf16.from_bits(found[0]) - wanted).max() < 0.02 * np.abs(wanted).max()


def test_recorded_routing_goes_through_the_layer(tmp_path):
    path = tmp_path / "trace.jsonl"
    chosen = np.random.default_rng(3).permuted(np.tile(np.arange(8), (90, 1)), axis=1)[:, :2]
    path.write_text(
        "".join(
            json.dumps({"layer": 5, "token": token, "topk_ids": ids}) + "\n"
            for token, ids in enumerate(chosen.tolist())
        )
    )
    routing = draw(
        TraceRouting(path=str(path), layer=5),
        num_ranks=2,
        num_tokens=None,
        num_experts=8,
        num_topk=2,
    )
    config = make_config(Operation.moe_layer, routing, tile_m=16, tile_n=32)

    (records,) = measure_group([config], routing)

    assert wrong_verdicts(records) == []
    assert sum(record.counts["sent_rows"] for record in records) == 180
    assert records[0].counts["flops"] == 2 * 180 * (64 * 64 + 64 * 32)


# With something broken on purpose the gate must not pass.


def with_gate_and_up_in_each_others_place():
    made = gemm.swiglu
    gemm.swiglu = lambda gate, up: made(up, gate)
    return Delays()


def without_swiglu():
    gemm.swiglu = lambda gate, up: gate
    return Delays()


def with_one_row_of_h_lost():
    made = gemm.GroupedGemm.run

    def run(self, plan, a, out, **kwargs):
        made(self, plan, a, out, **kwargs)
        if self._gated:
            out[int(plan.layout.tiles[0, 1])] = 0

    gemm.GroupedGemm.run = run
    return Delays()


def without_waits_for_rows():
    dispatch.Arrivals.wait_tile = lambda self, tile: None
    return Delays(send_ms=2)


def without_waits_for_tokens():
    combine._complete = lambda target, home: np.ones(len(home.token_expected), bool)
    return Delays(send_ms=2)


def without_zeroing():
    protocol.LaunchGate._begin = lambda self, counters: (
        setattr(self, "epoch", self.epoch + 1) or self.epoch
    )
    return Delays(send_ms=2)


def broken(rank, place, config, break_it):
    setting.draw = lambda *_, **__: ROUTING
    return entry.run_rank(config, rank=rank, place=place, delays=break_it())


def wrong(break_it):
    config = make_config(Operation.moe_layer, ROUTING, tile_m=16, tile_n=16, num_iters=2)
    results = run_ranks(2, broken, config, break_it)
    assert not [result.text for result in results if isinstance(result, Failed)]
    return wrong_verdicts(results), [len(result.samples) for result in results]


@pytest.mark.parametrize(
    "break_it",
    [
        with_gate_and_up_in_each_others_place,
        without_swiglu,
        with_one_row_of_h_lost,
        without_waits_for_tokens,
    ],
)
def test_a_broken_layer_is_incorrect_and_nothing_is_timed(break_it):
    found, samples = wrong(break_it)

    assert any(" fused before: " in sentence for sentence in found)
    assert samples == [0, 0]


def test_a_layer_that_does_not_wait_for_rows_is_incorrect_or_never_comes_home():
    config = make_config(
        Operation.moe_layer, ROUTING, tile_m=16, tile_n=16, num_iters=2, watchdog_ms=1500
    )

    results = run_ranks(2, broken, config, without_waits_for_rows)

    # Rows that have not come do not know their way home either.
    failed = [result.text for result in results if isinstance(result, Failed)]
    if failed:
        assert any("role reduce" in text for text in failed)
    else:
        assert any(" fused before: " in sentence for sentence in wrong_verdicts(results))


def test_counters_that_one_gate_does_not_zero_for_both_halves_are_found():
    found, _ = wrong(without_zeroing)

    assert found


def test_without_anything_broken_the_same_set_up_is_correct():
    found, samples = wrong(lambda: Delays(send_ms=2))

    assert found == []
    # e2e and plan of two forms, stages of three parts.
    assert samples == [14, 14]


# A rank that is ahead.


def test_rows_go_home_to_a_rank_that_still_dispatches():
    routing = random_routing([64, 64], num_experts=4, num_topk=2)
    config = make_config(Operation.moe_layer, routing, tile_m=16, tile_n=32, num_iters=2)

    # One rank takes long for each tile; rows of its tokens come home from the other meanwhile.
    delays = [Delays(), Delays(gemm_ms=10)]
    (records,) = measure_group([config], routing, delays=delays)

    assert wrong_verdicts(records) == []


def test_the_oracle_does_not_ask_the_executor_what_silu_is():
    assert "swiglu" not in vars(oracle)
    assert moe.swiglu is not gemm.swiglu
    gate = np.array([-200.0, -1.0, 0.0, 2.0, 200.0], np.float32)
    with np.errstate(over="raise"):
        activated = moe.swiglu(gate, np.full(5, 3, np.float32))
    want = [0.0, -3 / (1 + np.exp(1)), 0.0, 6 / (1 + np.exp(-2)), 600.0]
    assert activated.tolist() == pytest.approx(want, rel=1e-6)
    assert gemm.swiglu(gate, np.full(5, 3, np.float32)).tolist() == pytest.approx(want, rel=1e-6)
