"""The plan kernels on the CPU against NumPy's Plan, bit for bit, over launches in one memory."""

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.plan_cases import PLAIN, draw, settings_of  # noqa: E402
from tests.ptx.group import InterpretedGroup  # noqa: E402
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# A CTA has 1024 lanes: of more than two CTAs the race finder would compare too many.
MOST_RANKS_WITH_RACES = 2
CASES = [
    {
        "order": Order.edf,
        "kinds": ("uniform", "one_expert"),
        "num_ranks": 2,
        "granularity": Granularity.tile,
        "num_topk": 3,
    },
    {
        "order": Order.edf_list,
        "kinds": ("masked", "ragged"),
        "num_ranks": 4,
        "granularity": Granularity.token,
        "layout": Layout.padded,
        "num_n_tiles": 16,
    },
    {
        "order": Order.expert,
        "kinds": ("ragged", "one_expert"),
        "num_ranks": 1,
        "granularity": Granularity.expert,
        "home_granularity": HomeGranularity.rank,
        "num_topk": 1,
    },
    {
        "order": Order.token,
        "kinds": ("uniform", "masked"),
        "num_ranks": 1,
        "granularity": Granularity.tile,
        "layout": Layout.padded,
        "tile_m": 48,
        "tokens": 150,
    },
    {
        "order": Order.random,
        "kinds": ("one_expert", "uniform"),
        "num_ranks": 1,
        "granularity": Granularity.expert,
        "home_granularity": HomeGranularity.rank,
        "experts_per_rank": 3,
    },
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["order"].name)
def test_the_plan_kernels_make_the_plan_that_numpy_makes_without_a_race(case):
    case = {**PLAIN, "tokens": 40, **case}
    most = case["tokens"]
    group = InterpretedGroup(
        settings_of(case),
        Shape(max_tokens=most, num_tokens=most * case["num_ranks"]),
        Knobs(num_ctas=1, num_warps=1),
        races=case["num_ranks"] <= MOST_RANKS_WITH_RACES,
        plans_on_device=True,
    )
    for launch, kind in enumerate(case["kinds"]):
        group.set_routing(draw({**case, "kind": kind}, launch))
        group.open(exchange=True)
        group.dispatch()
        group.open(exchange=False)
        group.synchronize()
        for rank in group.ranks:
            assert group.plan_differences(rank, returns_epoch=2 * launch + 2) == [], kind
