"""Wherever experts live, operations equal the oracle and tokens come home with the same bits."""

from collections import Counter

import numpy as np
import pytest

from tests.experiments.groups import make_config, measure_group, random_routing, wrong_verdicts
from tests.host.ranks import Failed, run_ranks
from tilepipe.config import placements
from tilepipe.config.choices import Operation, Replica
from tilepipe.experiments import setting
from tilepipe.experiments.combine import Combine
from tilepipe.experiments.dispatch import Dispatch
from tilepipe.experiments.gemm_combine import GemmCombine
from tilepipe.experiments.session import Session
from tilepipe.fabric.host import HeapPlace
from tilepipe.records import Point
from tilepipe.results.accounting import account
from tilepipe.schedule.shape import capacity_of
from tilepipe.workload import bf16, place

NUM_EXPERTS, NUM_RANKS = 8, 4
# 12 physical experts: of 0 on two ranks and of 5 on one, none held by the last of rank 2.
MAP = [0, 3, 1, 5, 7, 5, 2, 0, -1, 4, 6, 0]


def routing_of(kind):
    return random_routing([33, 0, 64, 7], num_experts=NUM_EXPERTS, num_topk=3, kind=kind)


@pytest.fixture
def settings_of(tmp_path):
    path = tmp_path / "map.npy"
    np.save(path, np.array(MAP))
    return {
        "contiguous": placements.ContiguousPlacement(),
        "round_robin": placements.RoundRobinPlacement(),
        "file": placements.FilePlacement(path=str(path)),
        "file local": placements.FilePlacement(path=str(path), replica=Replica.local),
        "balanced": placements.BalancedPlacement(num_redundant=4),
        "balanced, none redundant": placements.BalancedPlacement(num_redundant=0),
    }


def counted(placed):
    """Largest over mean, row by row: by expert, by rank, by physical expert."""
    num_physical = placed.placement.num_physical
    num_local = num_physical // NUM_RANKS
    experts, ranks, physical = Counter(), Counter(), Counter()
    for asked, sent in zip(placed.logical.topk_idx, placed.physical.topk_idx, strict=True):
        for expert, holder in zip(asked.ravel().tolist(), sent.ravel().tolist(), strict=True):
            if expert >= 0:
                experts[expert] += 1
                ranks[holder // num_local] += 1
                physical[holder] += 1
    rows = sum(experts.values())
    return {
        "expert_max_over_mean": max(experts.values()) / (rows / NUM_EXPERTS),
        "rank_max_over_mean": max(ranks.values()) / (rows / NUM_RANKS),
        "physical_max_over_mean": max(physical.values()) / (rows / num_physical),
    }


def point_of(config):
    return Point(
        name="test",
        operation=config.operation.name,
        executor="host",
        config={"workload": {"num_experts": NUM_EXPERTS}},
        choices={},
        overrides=(),
        config_id="c0ffee",
        build_id="b0b",
    )


@pytest.mark.parametrize("kind", ["one_expert", "masked"])
def test_every_operation_equals_the_oracle_and_tells_its_imbalance(kind, settings_of):
    routing = routing_of(kind)
    configs = [
        make_config(operation, routing, tile_m=16, tile_n=32, placement=placement)
        for placement in settings_of.values()
        for operation in Operation
    ]

    for config, records in zip(configs, measure_group(configs, routing), strict=True):
        assert wrong_verdicts(records) == [], (config.placement, config.operation)
        placed = place(config.placement, routing)
        _, figures = account(point_of(config), records)
        wanted = counted(placed)
        assert {key: figures[key] for key in wanted} == pytest.approx(wanted)
        rows = [np.count_nonzero(ids >= 0) for ids in routing.topk_idx]
        assert [record.counts["sent_rows"] for record in records] == rows
        assert sum(record.counts["recv_rows"] for record in records) == sum(rows)
        assert {record.counts["num_physical"] for record in records} == {
            placed.placement.num_physical
        }


def combined(rank, place, configs, routing):
    """What a rank's tokens become, by configuration."""
    setting.draw = lambda *_, **__: routing  # this process only
    kinds = {Operation.combine: Combine, Operation.gemm_combine: GemmCombine}
    outputs = []
    for number, config in enumerate(configs):
        kind, name = kinds[config.operation], "combine"
        own = HeapPlace(token=f"{place.token}-{number}", shm_dir=place.shm_dir)
        session = Session(config, kind.memory(config), rank=rank, place=own)
        trial = kind(session)
        if config.operation is Operation.gemm_combine:
            name = "fused"
        trial.prepare(name, 5)
        trial.poison(name)
        session.host.heap.barrier()
        trial.run(name)
        outputs.append((trial._out if name == "combine" else trial._out[name]).copy())
        session.host.close()
    return outputs


@pytest.mark.parametrize("operation", [Operation.combine, Operation.gemm_combine])
def test_tokens_come_home_alike_from_every_placement(operation, settings_of):
    routing = routing_of("one_expert")
    configs = [
        make_config(operation, routing, tile_m=16, tile_n=32, placement=placement)
        for placement in settings_of.values()
    ]

    per_rank = run_ranks(NUM_RANKS, combined, configs, routing, limit_s=60)

    assert not [result for result in per_rank if isinstance(result, Failed)]
    for contiguous, *others in per_rank:
        for found in others:
            if operation is Operation.combine:
                assert np.array_equal(found, contiguous)
            else:
                # A tile of another height may be summed in another order: one rounding apart.
                apart = np.abs(bf16.from_bits(found) - bf16.from_bits(contiguous))
                assert apart.max(initial=0) <= 2.0**-6


# Tokens of all ranks together; a token meets at most topk = 3 experts, and two on a rank with two.
NUM_TOKENS = 33 + 0 + 64 + 7


@pytest.mark.parametrize(
    ("name", "factor", "num_rows"),
    [
        ("contiguous", None, NUM_TOKENS * 2 + 2 * 15),
        ("file", None, NUM_TOKENS * 3 + 3 * 15),
        ("balanced", None, NUM_TOKENS * 3 + 3 * 15),
        ("balanced", 1.5, 117 + 3 * 15),  # 1.5 x 104 x 3 / 4
    ],
)
def test_a_rank_has_room_for_the_rows_of_its_physical_experts(name, factor, num_rows, settings_of):
    routing = routing_of("uniform")
    config = make_config(
        Operation.dispatch, routing, tile_m=16, placement=settings_of[name], capacity_factor=factor
    )
    placed = place(config.placement, routing)

    settings = setting.plan_settings(config, placed)
    shape = setting.shape_of(config, placed.physical, Dispatch.memory(config))

    assert capacity_of(settings, shape) == num_rows


def test_weights_belong_to_experts_not_to_the_places_that_hold_them(settings_of, monkeypatch):
    def by_place(self, rank):
        return np.arange(rank * self.num_local, (rank + 1) * self.num_local, dtype=np.int32)

    monkeypatch.setattr("tilepipe.workload.placement.Placement.experts_on", by_place)
    routing = routing_of("one_expert")
    config = make_config(
        Operation.gemm_combine, routing, tile_m=16, tile_n=32, placement=settings_of["file"]
    )

    (records,) = measure_group([config], routing)

    assert wrong_verdicts(records) != []
