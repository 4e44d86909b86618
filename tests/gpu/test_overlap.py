"""Dispatch -> GEMM in one launch, on a device: every row and product, and that waits are needed."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from dataclasses import replace  # noqa: E402

import numpy as np  # noqa: E402

from tests.experiments.groups import random_routing  # noqa: E402
from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.gpu.overlaps import Chosen, FusedCase  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    Layout,
    Order,
    Roles,
    StoreMode,
)
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.gemm.choices import Clip, Consumers  # noqa: E402
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402

NUM_LAUNCHES = 3
# So slow that no row of a tile has come when the GEMM could begin with it.
SLOW = {"pace_gbps": 0.5, "pace_latency_ns": 20_000}
ALONE = [
    {},
    {"copy": Copy.simt},
    {"granularity": Granularity.expert},
    {"granularity": Granularity.token},
    {"roles": Roles.switch},
    {"roles": Roles.switch, "copy": Copy.simt},
    {"num_ranks": 2},
    {"num_ranks": 4, "copy": Copy.simt},
    {"num_ranks": 8},
    {"layout": Layout.packed},
    {"layout": Layout.packed, "num_ranks": 4},
    {"tuning": GemmTuning(cluster_m=2)},
    {"tuning": GemmTuning(cluster_m=2), "roles": Roles.switch, "num_ranks": 2},
    {"tuning": GemmTuning(store=StoreMode.direct), "num_ranks": 2},
    {"tuning": GemmTuning(clip=Clip.per_group), "layout": Layout.packed},
    {"tuning": GemmTuning(consumers=Consumers.ping_pong, tile_n=128), "layout": Layout.packed},
    # Rows in pieces, K and N that are no multiple of a tile.
    {"hidden": 7176, "n": 264},
    {"num_ranks": 8, "num_ctas": 8, "roles": Roles.switch},
    {"num_ranks": 4, "num_ctas": 3, "roles": Roles.switch, "opens": True, "gates": True},
    {"num_ranks": 8, "num_ctas": 9, "roles": Roles.switch, "opens": True, "gates": True},
    {"opens": True},
    {"opens": True, "copy": Copy.simt, "num_ranks": 2},
    {"opens": True, "gates": True, "roles": Roles.switch},
    {"opens": True, "gates": True, "num_ranks": 4, "tuning": GemmTuning(cluster_m=2)},
    {"gates": True, "order": Order.random},
    {"roles": Roles.beside},
    {"roles": Roles.beside, "opens": True, "gates": True},
    # Rows of the first tiles are among the last that are sent, on some rank or on all.
    {"roles": Roles.beside, "gates": True, "order": Order.random},
    {"roles": Roles.beside, "opens": True, "gates": True, "order": Order.random, "num_ranks": 8},
    {"roles": Roles.beside, "copy": Copy.simt, "tuning": GemmTuning(cluster_m=2), "num_ranks": 2},
    {"roles": Roles.beside, "hidden": 7176, "n": 264, "opens": True, "gates": True},
    {
        "roles": Roles.beside,
        "tuning": GemmTuning(consumers=Consumers.ping_pong, tile_n=192),
        "layout": Layout.packed,
    },
]
AXES = {
    "num_ranks": [1, 2, 4, 8],
    "copy": list(Copy),
    "granularity": list(Granularity),
    "order": list(Order),
    "layout": list(Layout),
    "roles": list(Roles),
    "opens": [False, True],
    "gates": [False, True],
    "kind": ["uniform", "one_expert", "masked"],
}
CASES = [*ALONE, *pairwise(AXES, lambda case: True)]


def name_of(case):
    def told(value):
        if isinstance(value, GemmTuning):
            plain = GemmTuning()
            parts = ["cluster"] * (value.cluster_m > 1)
            parts += [
                told(getattr(value, key))
                for key in ("store", "clip", "consumers")
                if getattr(value, key) != getattr(plain, key)
            ]
            return "_".join(parts)
        return str(getattr(value, "name", value))

    said = {key: key if value is True else told(value) for key, value in case.items()}
    return "-".join(word for key, word in said.items() if case[key] is not False) or "plain"


def routings_of(chosen, kind="uniform", count=NUM_LAUNCHES):
    """Other numbers of tokens on every rank in every launch; the second has an idle rank."""
    tokens = [
        [(127 * (rank + 1) + 211 * number) % 600 for rank in range(chosen.num_ranks)]
        for number in range(count)
    ]
    if count > 1:
        tokens[1][0] = 0 if chosen.num_ranks > 1 else 1
    return [
        random_routing(
            counts,
            num_experts=chosen.num_experts,
            num_topk=chosen.num_topk,
            kind=kind,
            seed=number,
        )
        for number, counts in enumerate(tokens)
    ]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_rows_and_products_are_right_launch_after_launch(case):
    kind = case.get("kind", "uniform")
    chosen = Chosen(**{key: value for key, value in case.items() if key != "kind"})
    routings = routings_of(chosen, kind)
    fused = FusedCase(chosen, routings)

    for number, routing in enumerate(routings, start=1):
        fused.prepare(routing, number)
        assert fused.run() == []


@pytest.mark.parametrize("granularity", list(Granularity))
@pytest.mark.parametrize(
    "how",
    [*({"copy": copy} for copy in Copy), {"roles": Roles.beside, "opens": True, "gates": True}],
    ids=name_of,
)
def test_products_wait_for_rows_that_come_late(how, granularity):
    chosen = Chosen(granularity=granularity, **how, **SLOW)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing])

    fused.prepare(routing, 1)

    assert fused.run() == []


@pytest.mark.parametrize("roles", [Roles.fixed, Roles.beside])
@pytest.mark.parametrize("order", [Order.edf, Order.random])
def test_without_waits_products_are_of_rows_that_had_not_come(order, roles):
    chosen = Chosen(order=order, roles=roles, **SLOW)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing], wait=False)

    fused.prepare(routing, 1)
    faults = fused.run()

    assert any("products" in fault for fault in faults), faults
    assert not any("rows:" in fault or "homes" in fault for fault in faults), faults


def test_products_are_the_same_bits_whatever_the_order_and_the_copy():
    found = []
    for copy in Copy:
        for order in (Order.edf, Order.random, Order.token):
            chosen = Chosen(copy=copy, order=order, num_ranks=2)
            (routing,) = routings_of(chosen, count=1)
            fused = FusedCase(chosen, [routing])
            fused.prepare(routing, 1)
            assert fused.run() == []
            found.append(fused.outputs())

    assert all(np.array_equal(found[0], other) for other in found[1:])


HUNDREDS = {
    "two_ranks": {"num_ranks": 2},
    "eight_ranks_simt_switch": {"num_ranks": 8, "copy": Copy.simt, "roles": Roles.switch},
    "token_random": {"num_ranks": 4, "granularity": Granularity.token, "order": Order.random},
    "expert_switch_packed": {
        "granularity": Granularity.expert,
        "roles": Roles.switch,
        "layout": Layout.packed,
    },
    "opens_and_gates": {"opens": True, "gates": True, "roles": Roles.switch, "num_ranks": 4},
    "cluster_simt": {"tuning": GemmTuning(cluster_m=2), "copy": Copy.simt, "num_ranks": 2},
    "paced": {"num_ranks": 4, "pace_gbps": 20.0, "pace_latency_ns": 2_000, "roles": Roles.switch},
}


@pytest.mark.parametrize("name", HUNDREDS)
def test_a_hundred_launches_of_changing_routing_stay_right(name):
    chosen = Chosen(**HUNDREDS[name])
    kinds = ("uniform", "one_expert", "masked")
    routings = [routing for kind in kinds for routing in routings_of(chosen, kind)]
    fused = FusedCase(chosen, routings)

    for number in range(100):
        fused.prepare(routings[number % len(routings)], number + 1)
        assert fused.run() == [], f"launch {number}"


def test_flags_that_are_set_let_the_gemm_run_beside_rows_that_nobody_reads():
    chosen = Chosen(**SLOW)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing])
    fused.prepare(routing, 1)
    assert fused.run() == []
    beside = fused.spare_launch()

    # Rows of the launch before are still there, and others are sent elsewhere.
    fused.out.zero_()
    fused.group.open(exchange=True, preset=True)
    beside()
    fused.group.synchronize()

    assert [fault for fault in fused.wrong() if "products" in fault or "rows:" in fault] == []


@pytest.mark.parametrize("granularity", list(Granularity))
def test_rows_that_never_come_end_in_a_sentence(granularity):
    chosen = Chosen(num_ranks=2, granularity=granularity, watchdog_s=0.3)
    (routing,) = routings_of(replace(chosen, num_ranks=2), count=1)
    fused = FusedCase(chosen, [routing])
    fused.prepare(routing, 1)
    fused.group.tensor(1, Slot.words)[int(Word.num_sends)] = 0

    with pytest.raises(WatchdogTimeout, match=r"role gemm_receive(_row)?, (counter|row) \d+: "):
        fused.run()
