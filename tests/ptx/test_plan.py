"""The plan kernels on the CPU against NumPy's Plan, bit for bit, over launches in one memory."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from tests.kernels.plan_cases import PLAIN, draw, settings_of  # noqa: E402
from tests.ptx.faults import (  # noqa: E402
    find,
    looking_again,
    looking_late,
    without,
    without_order,
)
from tests.ptx.group import InterpretedGroup, program_of  # noqa: E402
from tests.ptx.memory import Fault  # noqa: E402
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order  # noqa: E402
from tilepipe.kernels.launcher import Knobs, plan_constants_of  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

# CTAs of a rank and threads of each are few: the race finder compares every two lanes.
CASES = [
    {
        "order": Order.edf,
        "kinds": ("uniform", "one_expert"),
        "team": (3, 32),
        "num_ranks": 2,
        "granularity": Granularity.tile,
        "num_topk": 3,
    },
    {
        "order": Order.edf_list,
        "kinds": ("masked", "ragged"),
        "team": (2, 32),
        "num_ranks": 3,
        "granularity": Granularity.token,
        "layout": Layout.padded,
        "num_n_tiles": 16,
    },
    {
        "order": Order.expert,
        "kinds": ("ragged", "one_expert"),
        "team": (4, 64),
        "num_ranks": 1,
        "granularity": Granularity.expert,
        "home_granularity": HomeGranularity.rank,
        "num_topk": 1,
    },
    {
        "order": Order.token,
        "kinds": ("uniform", "masked"),
        "team": (3, 64),
        "num_ranks": 1,
        "granularity": Granularity.tile,
        "layout": Layout.padded,
        "tile_m": 48,
        "tokens": 150,
    },
    {
        "order": Order.random,
        "kinds": ("one_expert", "uniform"),
        "team": (1, 128),
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
        races=True,
        plans_on_device=True,
        plan_changes=dict(zip(("num_ctas", "num_threads"), case["team"], strict=True)),
    )
    for launch, kind in enumerate(case["kinds"]):
        group.set_routing(draw({**case, "kind": kind}, launch))
        group.open(exchange=True)
        group.dispatch()
        group.open(exchange=False)
        group.synchronize()
        for rank in group.ranks:
            assert group.plan_differences(rank, returns_epoch=2 * launch + 2) == [], kind


def test_every_acquire_and_fence_between_ctas_that_plan_together_is_missed():
    case = {**PLAIN, "num_ranks": 1, "tokens": 16, "kind": "uniform"}
    settings, shape = settings_of(case), Shape(max_tokens=16, num_tokens=16)
    team = {"num_ctas": 3, "num_threads": 32}
    program = program_of("plan", replace(plan_constants_of(settings, shape), **team))
    fences, looks = (find(program, kind) for kind in ("fence.acq_rel.gpu", "ld.acquire.gpu"))
    late, again = looking_late(program), looking_again(program)

    def plan_with(plan):
        group = InterpretedGroup(
            settings,
            shape,
            Knobs(num_ctas=1, num_warps=1),
            races=True,
            plans_on_device=True,
            plan_changes=team,
            programs={"plan": plan},
        )
        group.set_routing(draw(case, 1))
        group.open(exchange=True)
        group.synchronize()

    # Three releases, and the waits for them; who waits is late, or is not, where dice say so.
    assert (len(fences), len(looks)) == (6, 3)
    for sound in (program, late, again):
        plan_with(sound)
    faulty = [without(late, fence) for fence in fences]
    for one in (*faulty, *(without_order(again, look) for look in looks)):
        with pytest.raises(Fault, match=r"a race: (scratch|counts) of rank 0"):
            plan_with(one)
