"""The Plan made on the device against NumPy's, bit for bit, over several launches in one memory."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import numpy as np  # noqa: E402

from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.kernels.plan_cases import (  # noqa: E402
    AXES,
    PLAIN,
    allowed,
    draw,
    settings_of,
)
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

COVER = pairwise(AXES, allowed)


def group_of(case, **shape):
    settings = settings_of(case)
    sizes = Shape(
        max_tokens=case["tokens"], num_tokens=case["tokens"] * settings.num_ranks, **shape
    )
    return DeviceGroup(
        settings, sizes, Knobs(num_ctas=1, num_warps=4), watchdog_s=5.0, plans_on_device=True
    )


@pytest.mark.parametrize("number", range(len(COVER)))
def test_the_device_makes_the_plan_that_numpy_makes(number):
    case = COVER[number]
    group = group_of(case)
    for launch in range(3):
        routing = draw(case, 10 * number + launch)
        group.set_routing(routing)
        group.open(exchange=True)
        group.dispatch()
        group.open(exchange=False)
        group.synchronize()
        for rank in group.ranks:
            assert group.plan_differences(rank, returns_epoch=2 * launch + 2) == []


@pytest.mark.parametrize("number_of_tokens", [4096, 16_384])
def test_a_large_plan_is_the_same(number_of_tokens):
    case = {
        "num_ranks": 8,
        "experts_per_rank": 32,
        "num_topk": 8,
        "tile_m": 128,
        "num_n_tiles": 16,
        "layout": Layout.padded,
        "granularity": Granularity.tile,
        "home_granularity": HomeGranularity.token,
        "order": Order.edf,
        "tokens": number_of_tokens,
        "kind": "uniform",
    }
    group = group_of(case)
    routing = draw(case, 1)
    group.set_routing(routing)
    group.open(exchange=True)
    group.dispatch()
    group.open(exchange=False)
    group.synchronize()
    for rank in group.ranks:
        assert group.plan_differences(rank, returns_epoch=2) == []


def test_an_overflow_is_refused_by_every_rank_and_nothing_is_sent():
    group = group_of(PLAIN, dispatch_hidden=64, capacity_factor=1.0)
    routing = draw(PLAIN, 1)
    group.set_routing(draw({**PLAIN, "tokens": 0}, 1))  # the host refuses what would not fit
    everything = tuple(np.full_like(ids, 0) for ids in routing.topk_idx)
    for rank, ids in enumerate(everything):
        ids[:, 1] = 1
        group.heap.fill(rank, Slot.topk_idx, ids)
        group._set_words(rank, {Word.num_tokens: len(ids)})
        group.tensor(rank, Slot.recv_x).fill_(0x7FC1)
    group.open(exchange=True)
    group.dispatch()
    torch.cuda.synchronize()

    with pytest.raises(
        ValueError, match=r"gives 128 receive rows a rank, but rank 0 would receive 256"
    ):
        group.check()
    for rank in group.ranks:
        assert (group.tensor(rank, Slot.recv_x) == 0x7FC1).all()


def test_a_number_that_is_no_expert_is_named():
    group = group_of(PLAIN)
    group.set_routing(draw(PLAIN, 2))
    group.tensor(1, Slot.topk_idx)[5, 1] = 8
    group.open(exchange=True)
    torch.cuda.synchronize()

    with pytest.raises(ValueError, match=r"topk_idx of rank 1 holds 8: allowed is -1 .* 0\.\.7"):
        group.check()
