"""Inputs that users of such kernels have stumbled over, alone and in a pairwise cover.

Every operation runs on each: gate, one timed launch of every contender, gate again. The gate's own
strength is shown by the negative controls in test_controls.py.
"""

import pytest

from tests.experiments.groups import make_config, measure_group, random_routing, wrong_verdicts
from tests.experiments.pairwise import pairwise
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Operation, Order

# Tokens of rank r of n.
TOKENS = {
    "none_on_one": lambda r, n: 0 if r == 0 else 33,
    "none": lambda r, n: 0,
    "1": lambda r, n: 1,
    "127": lambda r, n: 127,
    "129": lambda r, n: 129,
    "4095": lambda r, n: 4095,
    "other_on_each": lambda r, n: 7 + 29 * r,
}
PLAIN = {
    "tokens": "127",
    "kind": "uniform",
    "hidden": 64,
    "num_experts": 8,
    "num_topk": 2,
    "num_ranks": 2,
    "tile_m": 128,
    "order": Order.edf,
    "granularity": Granularity.tile,
    "home_granularity": HomeGranularity.token,
    "layout": Layout.padded,
}
ALONE = [
    *({"tokens": name} for name in TOKENS),
    {"kind": "one_expert"},
    {"kind": "masked"},
    {"hidden": 2880, "tile_m": 16},
    *({"num_experts": count, "tile_m": 16} for count in (160, 384, 512)),
    {"num_topk": 1},
    {"num_topk": 6},
    {"num_topk": 16, "num_experts": 160, "tile_m": 16},
    {"num_ranks": 1},
    {"num_ranks": 3, "num_experts": 384, "tile_m": 16},
    {"num_ranks": 8},
]
AXES = {
    "tokens": list(TOKENS),
    "kind": ["uniform", "one_expert", "masked"],
    # 320 divides by what 2880 divides by, a ninth of the work; 2880 itself runs alone.
    "hidden": [64, 320],
    "num_experts": [8, 160, 384, 512],
    "num_topk": [1, 2, 6, 16],
    "num_ranks": [1, 2, 3],  # 8 alone
    "tile_m": [16, 128],
    "order": list(Order),
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
    "layout": list(Layout),
}


def allowed(case):
    if case["num_experts"] % case["num_ranks"] or case["num_topk"] > case["num_experts"]:
        return False
    tokens = [TOKENS[case["tokens"]](r, case["num_ranks"]) for r in range(case["num_ranks"])]
    moved = sum(tokens) * case["num_topk"] * case["hidden"]
    reserved = case["num_experts"] // case["num_ranks"] * case["tile_m"] * case["hidden"]
    capacity = max(tokens) * case["num_ranks"] ** 2 * case["num_topk"] * case["hidden"]
    rows = sum(tokens) * case["num_topk"]  # each a copy of its own on the host
    weights = case["num_experts"] * case["hidden"]
    small = moved < 12e6 and reserved < 12e6 and capacity < 60e6 and weights < 1.2e6
    return small and rows < 12e3


def run_case(case):
    num_ranks = case["num_ranks"]
    routing = random_routing(
        [TOKENS[case["tokens"]](rank, num_ranks) for rank in range(num_ranks)],
        num_experts=case["num_experts"],
        num_topk=case["num_topk"],
        kind=case["kind"],
    )
    kernel = {
        key: case[key] for key in ("tile_m", "order", "granularity", "home_granularity", "layout")
    }
    configs = [
        make_config(operation, routing, hidden=case["hidden"], tile_n=32, **kernel)
        for operation in Operation
    ]
    for config, records in zip(configs, measure_group(configs, routing), strict=True):
        assert wrong_verdicts(records) == [], config.operation
        stages = {(verdict.contender, verdict.stage) for verdict in records[0].verdicts}
        assert {stage for _, stage in stages} == {"before", "after"}, config.operation
        rows = sum(int((ids >= 0).sum()) for ids in routing.topk_idx)
        assert sum(record.counts["recv_rows"] for record in records) == rows


@pytest.mark.parametrize("change", ALONE, ids=lambda change: "-".join(map(str, change.values())))
def test_every_operation_equals_the_oracle_on_one_unusual_input(change):
    run_case({**PLAIN, **change})


COVER = pairwise(AXES, allowed)


def test_the_cover_holds_every_value_of_every_axis():
    assert {name: {case[name] for case in COVER} for name in AXES} == {
        name: set(values) for name, values in AXES.items()
    }


@pytest.mark.parametrize("number", range(len(COVER)))
def test_every_operation_equals_the_oracle_in_a_pairwise_cover(number):
    run_case(COVER[number])
