"""A captured CUDA graph of dispatch and combine replays with other routing and other payload."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.experiments.groups import random_routing  # noqa: E402
from tests.gpu.groups import CheckedGroup  # noqa: E402
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Order  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402

NUM_REPLAYS = 100
NUM_RANKS, NUM_EXPERTS, NUM_TOPK = 4, 16, 4


def routing_of(number):
    """Tokens go up and down, now and then a rank has none; every third one drops slots."""
    tokens = [(number * (rank + 1) * 7) % 97 if (number + rank) % 5 else 0 for rank in range(4)]
    kind = ("uniform", "one_expert", "masked")[number % 3]
    return random_routing(
        tokens, num_experts=NUM_EXPERTS, num_topk=NUM_TOPK, kind=kind, seed=number
    )


@pytest.mark.parametrize(
    ("copy", "granularity", "home_granularity", "order"),
    [
        (Copy.simt, Granularity.tile, HomeGranularity.token, Order.edf),
        (Copy.tma, Granularity.tile, HomeGranularity.token, Order.edf),
        (Copy.simt, Granularity.token, HomeGranularity.rank, Order.random),
        (Copy.tma, Granularity.token, HomeGranularity.rank, Order.random),
        (Copy.simt, Granularity.expert, HomeGranularity.token, Order.token),
    ],
)
def test_a_captured_launch_replays_with_other_routing_and_payload(
    copy, granularity, home_granularity, order
):
    settings = PlanSettings(
        num_ranks=NUM_RANKS,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        tile_m=16,
        granularity=granularity,
        home_granularity=home_granularity,
        order=order,
    )
    routings = [routing_of(number) for number in range(NUM_REPLAYS + 1)]
    checked = CheckedGroup(
        settings, Knobs(num_ctas=3, copy=copy, num_warps=8), routings, hidden=256
    )
    group, graph = checked.group, torch.cuda.CUDAGraph()
    # The launches before the capture load the code.
    checked.prepare(routings[0], payload=0)
    assert checked.dispatch() == []
    assert checked.combine() == []

    with torch.cuda.graph(graph):
        group.open(exchange=True)
        group.dispatch()
        group.open(exchange=False)
        group.combine()

    for number, routing in enumerate(routings[1:], 1):
        checked.prepare(routing, payload=number)
        graph.replay()
        group.synchronize()
        checked.num_launches += 2
        assert checked.wrong_rows() == [], f"replay {number}"
        assert checked.wrong_after_combine() == [], f"replay {number}"
