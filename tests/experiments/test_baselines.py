"""Torch beside the host executor: its outputs pass the gate that ours pass, wrong ones do not."""

from itertools import chain

import pytest

torch = pytest.importorskip("torch")

from tests.experiments.groups import (  # noqa: E402
    make_config,
    measure_group,
    random_routing,
    wrong_verdicts,
)
from tests.host.ranks import Failed, run_ranks  # noqa: E402
from tilepipe.baselines.layer import TorchLayer  # noqa: E402
from tilepipe.config.choices import Baseline, Layout, Operation  # noqa: E402
from tilepipe.config.placements import BalancedPlacement  # noqa: E402
from tilepipe.experiments import entry, setting  # noqa: E402

CONTENDERS = {
    Operation.dispatch: "torch_dispatch",
    Operation.combine: "torch_combine",
    Operation.dispatch_gemm: "torch_sequential",
    Operation.gemm_combine: "torch_sequential",
    Operation.moe_layer: "torch_layer",
}
ROUTINGS = {
    "one_rank": random_routing([129], num_experts=8, num_topk=6),
    "one_rank_masked": random_routing([33], num_experts=4, num_topk=2, kind="masked"),
    "none_on_one": random_routing([0, 33], num_experts=8, num_topk=2),
    "none": random_routing([0, 0], num_experts=4, num_topk=2),
    "one_expert": random_routing([40, 127], num_experts=8, num_topk=2, kind="one_expert"),
    "masked": random_routing([7, 36, 65, 94], num_experts=160, num_topk=16, kind="masked"),
    "other_on_each": random_routing([129, 1, 0, 64], num_experts=8, num_topk=1),
}


def config_of(operation, routing, **kernel):
    return make_config(
        operation,
        routing,
        tile_m=16,
        tile_n=32,
        num_iters=2,
        baselines=[Baseline.torch],
        **kernel,
    )


@pytest.mark.parametrize("name", ROUTINGS)
def test_torch_equals_the_oracle_before_and_after_timing(name):
    routing = ROUTINGS[name]
    layouts = chain.from_iterable((Layout.padded, Layout.packed) for _ in CONTENDERS)
    configs = [config_of(operation, routing, layout=next(layouts)) for operation in CONTENDERS]

    groups = measure_group(configs, routing)

    for (operation, contender), records in zip(CONTENDERS.items(), groups, strict=True):
        assert wrong_verdicts(records) == [], operation
        for record in records:
            stages = [v.stage for v in record.verdicts if v.contender == contender]
            assert stages == ["before", "after"], operation


def test_torch_is_timed_as_often_as_our_own_and_combine_has_no_plan():
    routing = ROUTINGS["one_expert"]
    configs = [config_of(operation, routing) for operation in CONTENDERS]

    groups = measure_group(configs, routing)

    components = {
        operation: {
            (sample.component, sample.iteration)
            for sample in records[0].samples
            if sample.contender == CONTENDERS[operation]
        }
        for operation, records in zip(CONTENDERS, groups, strict=True)
    }
    whole = {("e2e", 0), ("e2e", 1), ("plan", 0), ("plan", 1)}
    stage = {("stage", 0), ("stage", 1)}
    assert components == {
        Operation.dispatch: whole,
        Operation.combine: stage,
        Operation.dispatch_gemm: whole,
        Operation.gemm_combine: stage,
        Operation.moe_layer: whole,
    }


def test_torch_equals_the_oracle_where_experts_have_replicas_and_physical_ones_are_unused():
    routing = random_routing([20, 9, 20], num_experts=5, num_topk=3, kind="one_expert")
    placement = BalancedPlacement(num_redundant=7)
    configs = [config_of(operation, routing, placement=placement) for operation in CONTENDERS]

    for records in measure_group(configs, routing):
        assert wrong_verdicts(records) == []


def without_arranging(rank, place, config, routing):
    setting.draw = lambda *_, **__: routing
    made = TorchLayer.make_route

    def unarranged(self, topk_idx):
        route = made(self, topk_idx)
        route.arrange.copy_(torch.arange(len(route.arrange)))
        return route

    TorchLayer.make_route = unarranged
    return entry.run_rank(config, rank=rank, place=place)


@pytest.mark.parametrize(
    "operation", [Operation.dispatch, Operation.dispatch_gemm, Operation.moe_layer]
)
def test_rows_left_in_the_order_in_which_they_came_fail_the_gate_and_nothing_is_timed(operation):
    routing = ROUTINGS["one_expert"]

    records = run_ranks(2, without_arranging, config_of(operation, routing), routing)

    assert not [result.text for result in records if isinstance(result, Failed)]
    wrong = {sentence.split()[2] for sentence in wrong_verdicts(records)}
    assert wrong == {CONTENDERS[operation]}
    assert [len(record.samples) for record in records] == [0, 0]
