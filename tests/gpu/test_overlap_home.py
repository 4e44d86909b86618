"""GEMM -> combine in one launch, on a device: every token, and the same bits as unfused."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.gpu.overlaps import Chosen, HomeCase  # noqa: E402
from tests.gpu.test_overlap import name_of, routings_of  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Push,
    Roles,
    StoreMode,
    Walk,
)
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.gemm.choices import Consumers  # noqa: E402
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402
from tilepipe.kernels.overlap.group import spare_table  # noqa: E402
from tilepipe.kernels.overlap.home import Reduces  # noqa: E402
from tilepipe.kernels.overlap.home_group import fused_home_launch  # noqa: E402
from tilepipe.measure.gate import BF16_POISON  # noqa: E402

# K 256, N 1024: four N tiles.
PLAIN = {"n": 1024, "roles": Roles.switch}
PING_PONG = GemmTuning(tile_m=128, tile_n=128, consumers=Consumers.ping_pong, num_stages=6)
# Sent by the epilogue, chunk after chunk of all experts.
SENT = {"push": Push.epilogue, "walk": Walk.chunk, "num_chunks": 4}
ALONE = [
    {},
    {"copy": Copy.simt},
    {"num_chunks": 4},
    {"num_chunks": 2, "copy": Copy.simt},
    {"roles": Roles.fixed},
    {"granularity": Granularity.token},
    {"granularity": Granularity.expert, "copy": Copy.simt},
    {"home_granularity": HomeGranularity.rank, "num_ranks": 2},
    {"num_ranks": 4, "num_chunks": 4},
    {"num_ranks": 8, "copy": Copy.simt},
    {"layout": Layout.packed, "num_chunks": 4, "num_ranks": 2},
    {"tuning": GemmTuning(cluster_m=2), "num_chunks": 2, "num_ranks": 2},
    {"tuning": GemmTuning(store=StoreMode.direct), "num_chunks": 4},
    # Columns that are no multiple of a tile.
    {"n": 1000},
    {"n": 1000, "push": Push.epilogue},
    {"push": Push.epilogue},
    {"push": Push.epilogue, "num_chunks": 4, "num_ranks": 2},
    {"push": Push.epilogue, "num_chunks": 2, "walk": Walk.chunk, "num_ranks": 4},
    {"push": Push.epilogue, "num_chunks": 4, "walk": Walk.chunk, "num_ranks": 8},
    {"push": Push.epilogue, "num_chunks": 4, "layout": Layout.packed, "walk": Walk.chunk},
    {"push": Push.epilogue, "tuning": GemmTuning(cluster_m=2), "num_chunks": 2, "num_ranks": 2},
    {"push": Push.epilogue, "tuning": PING_PONG, "num_chunks": 4, "num_ranks": 2},
    {**SENT, "roles": Roles.beside},
    {**SENT, "roles": Roles.beside, "num_ranks": 8, "copy": Copy.simt},
    {**SENT, "roles": Roles.beside, "num_topk": 8, "num_experts": 16, "num_ranks": 2},
    {**SENT, "roles": Roles.beside, "tuning": PING_PONG, "num_topk": 3, "n": 3072},
    {"push": Push.epilogue, "roles": Roles.beside, "n": 1000},
    {
        "push": Push.epilogue,
        "roles": Roles.beside,
        "tuning": GemmTuning(cluster_m=2),
        "num_chunks": 2,
        "num_ranks": 2,
    },
    {"walk": Walk.chunk, "num_chunks": 4},
    {"walk": Walk.chunk, "num_chunks": 2, "copy": Copy.simt, "num_ranks": 2},
]
AXES = {
    "num_ranks": [1, 2, 4, 8],
    "copy": list(Copy),
    "granularity": list(Granularity),
    "layout": list(Layout),
    "roles": list(Roles),
    "num_chunks": [1, 2, 4],
    "home_granularity": list(HomeGranularity),
    "push": list(Push),
    "walk": list(Walk),
    "kind": ["uniform", "one_expert", "masked"],
}


def fits(case):
    """Chunks that go home one by one, or are early, are told of one by one."""
    by_chunk = case["push"] is Push.epilogue or case["walk"] is Walk.chunk
    if case["roles"] is Roles.beside and (
        case["push"] is Push.ctas or case["home_granularity"] is HomeGranularity.rank
    ):
        return False
    return case["granularity"] is Granularity.tile or not by_chunk


CASES = [*ALONE, *pairwise(AXES, fits)]


def chosen_of(case):
    return Chosen(**{**PLAIN, **{key: value for key, value in case.items() if key != "kind"}})


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_right_and_the_same_bits_as_unfused_launch_after_launch(case):
    chosen = chosen_of(case)
    routings = routings_of(chosen, case.get("kind", "uniform"))
    home = HomeCase(chosen, routings)

    for number, routing in enumerate(routings, start=1):
        home.prepare(routing, number)
        assert home.run() == []
        fused = home.outputs()
        for own, other in zip(fused, home.run_unfused(), strict=True):
            assert torch.equal(own, other)


@pytest.mark.parametrize(
    "case",
    [*({"copy": copy} for copy in Copy), SENT, {**SENT, "roles": Roles.beside}],
    ids=name_of,
)
def test_tokens_wait_for_rows_that_come_home_late(case):
    chosen = chosen_of({**case, "pace_gbps": 2.0, "pace_latency_ns": 20_000, "num_ranks": 2})
    (routing,) = routings_of(chosen, count=1)
    home = HomeCase(chosen, [routing])

    home.prepare(routing, 1)

    assert home.run() == []


HUNDREDS = {
    "four_chunks": {"num_chunks": 4},
    "eight_ranks_simt": {"num_ranks": 8, "copy": Copy.simt},
    "by_rank_fixed": {
        "num_ranks": 4,
        "home_granularity": HomeGranularity.rank,
        "roles": Roles.fixed,
        "num_chunks": 2,
    },
    "expert_packed_simt": {
        "granularity": Granularity.expert,
        "layout": Layout.packed,
        "copy": Copy.simt,
        "num_ranks": 2,
    },
    "paced_token": {
        "granularity": Granularity.token,
        "num_ranks": 4,
        "pace_gbps": 20.0,
        "pace_latency_ns": 2_000,
    },
    "sent": SENT,
    "sent_four_ranks": {**SENT, "num_ranks": 4},
}


@pytest.mark.parametrize("name", HUNDREDS)
def test_a_hundred_launches_of_changing_routing_stay_right(name):
    chosen = chosen_of(HUNDREDS[name])
    kinds = ("uniform", "one_expert", "masked")
    routings = [routing for kind in kinds for routing in routings_of(chosen, kind)]
    home = HomeCase(chosen, routings)

    for number in range(100):
        home.prepare(routings[number % len(routings)], number + 1)
        assert home.run() == [], f"launch {number}"


@pytest.mark.parametrize("reduces", [Reduces.beside, Reduces.none])
@pytest.mark.parametrize(
    "case",
    [*({"copy": copy} for copy in Copy), SENT, {**SENT, "roles": Roles.beside}],
    ids=name_of,
)
def test_rows_that_are_pushed_aside_change_nothing_at_home(case, reduces):
    chosen = chosen_of({"num_chunks": 4, **case, "num_ranks": 2})
    (routing,) = routings_of(chosen, count=1)
    home = HomeCase(chosen, [routing])
    home.prepare(routing, 1)
    beside = fused_home_launch(
        *(home.group, home.layer, home.a),
        reduces=reduces,
        push=chosen.push,
        sending=spare_table(home.group.heap),
    )

    for _ in range(3):
        home.poison()
        home.group.open(exchange=False)
        beside()
        home.group.synchronize()

    for rank in home.group.ranks:
        for slot in (Slot.home_y, Slot.out):
            bits = home.group.tensor(rank, slot).view(torch.int16)
            assert bool((bits == BF16_POISON).all())
        assert not home.group.tensor(rank, Slot.token_ready).any()


@pytest.mark.parametrize("case", [{}, SENT], ids=name_of)
def test_a_tile_that_nobody_stores_ends_in_a_sentence(case):
    chosen = chosen_of({"watchdog_s": 0.3, **case})
    (routing,) = routings_of(chosen, count=1)
    home = HomeCase(chosen, [routing])
    home.prepare(routing, 1)
    home.group.tensor(0, Slot.words)[int(Word.num_gemm_tiles)] -= 1

    with pytest.raises(WatchdogTimeout, match=r"role (push, M tile|reduce, token) \d+: expected"):
        home.run()
