"""Captured CUDA graphs of both fused launches replay with other routing: the bits of eager ones."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.gpu.overlaps import Chosen, FusedCase, HomeCase  # noqa: E402
from tests.gpu.test_overlap import name_of, routings_of  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Push,
    Roles,
    Walk,
)

NUM_ROUNDS = 4  # through all routings
KINDS = ("uniform", "one_expert", "masked")
OUT_CASES = [
    {"num_ranks": 4},
    {"num_ranks": 2, "copy": Copy.simt, "granularity": Granularity.token},
    {"num_ranks": 4, "roles": Roles.switch, "opens": True, "gates": True},
    {"num_ranks": 2, "roles": Roles.beside, "opens": True, "gates": True},
    {"granularity": Granularity.expert, "layout": Layout.packed, "copy": Copy.simt},
]
HOME_CASES = [
    {"num_ranks": 4, "num_chunks": 2, "roles": Roles.switch},
    {"num_ranks": 2, "copy": Copy.simt, "home_granularity": HomeGranularity.rank},
    {"granularity": Granularity.token, "layout": Layout.packed, "roles": Roles.switch},
    {
        "num_ranks": 2,
        "num_chunks": 2,
        "push": Push.epilogue,
        "walk": Walk.chunk,
        "roles": Roles.beside,
    },
]


def captured(case, *, exchange):
    """A graph of opening and launching; what was launched before has loaded the code."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.group.open(exchange=exchange)
        case.launch()
    return graph


def bits(case):
    """Outputs of the latest launch as one list of tensors."""
    found = case.outputs()
    return found if isinstance(found, list) else [torch.from_numpy(found)]


def replays_are_eager_launches(case, routings, *, exchange):
    case.prepare(routings[0], 1)
    assert case.run() == []
    graph = captured(case, exchange=exchange)
    for number in range(NUM_ROUNDS * len(routings)):
        routing, payload = routings[number % len(routings)], number + 2
        case.prepare(routing, payload)
        assert case.run() == [], f"launch {number}, eager"
        eager = bits(case)

        case.prepare(routing, payload)
        if not exchange:
            case.poison()
        graph.replay()
        case.group.synchronize()

        assert case.wrong() == [], f"launch {number}, replayed"
        assert all(map(torch.equal, eager, bits(case))), f"launch {number}"


@pytest.mark.parametrize("case", OUT_CASES, ids=name_of)
def test_replays_of_dispatch_gemm_are_eager_launches_bit_for_bit(case):
    chosen = Chosen(**case)
    routings = [routing for kind in KINDS for routing in routings_of(chosen, kind)]

    replays_are_eager_launches(FusedCase(chosen, routings), routings, exchange=True)


@pytest.mark.parametrize("case", HOME_CASES, ids=name_of)
def test_replays_of_gemm_combine_are_eager_launches_bit_for_bit(case):
    chosen = Chosen(n=1024, **case)
    routings = [routing for kind in KINDS for routing in routings_of(chosen, kind)]

    replays_are_eager_launches(HomeCase(chosen, routings), routings, exchange=False)
