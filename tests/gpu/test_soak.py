"""A hundred launches in one kernel, on named combinations; and what happens with a rule broken."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import numpy as np  # noqa: E402

from tests.gpu.soak import ROW_BYTES, Delay, Soak  # noqa: E402
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Layout, Order  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels import flags, protocol  # noqa: E402
from tilepipe.kernels.constants import Constants  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402
from tilepipe.workload.routing import Routing  # noqa: E402

LAUNCHES = 100
TOPK = 4
EXPERTS = 16
MOST = 96  # tokens of a rank
LIMIT_S = 2.0


def tokens_rising_and_falling(number, rank):
    """Thresholds go up, then down: a counter that was not zeroed is soon seen."""
    return 1 + (7 * number) % MOST if number % 20 < 10 else MOST - (5 * number) % MOST


def tokens_with_empty_ranks(number, rank):
    return 0 if (number + rank) % 3 == 0 else 1 + (11 * number + 5 * rank) % MOST


def tokens_all_on_one(number, rank):
    return MOST if rank == number % 2 else 0


def routing(number, *, num_ranks, tokens, hot=False):
    rng = np.random.default_rng(number)
    topk_idx, topk_weights = [], []
    for rank in range(num_ranks):
        count = tokens(number, rank)
        ids = np.argsort(rng.random((count, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
        if hot:  # experts of one rank only, another one each launch
            local = EXPERTS // num_ranks
            ids = (number % num_ranks) * local + np.argsort(rng.random((count, local)), axis=1)
            ids = np.pad(ids[:, :TOPK], ((0, 0), (0, max(0, TOPK - local))), constant_values=-1)
            ids = ids.astype(np.int32)
        ids[rng.random(ids.shape) < 0.1] = -1
        topk_idx.append(ids)
        topk_weights.append(np.ones(ids.shape, np.float32))
    return Routing(topk_idx=tuple(topk_idx), topk_weights=tuple(topk_weights), num_experts=EXPERTS)


COMBINATIONS = {
    "rising_falling": {"tokens": tokens_rising_and_falling},
    "empty_ranks": {"tokens": tokens_with_empty_ranks},
    "one_sender": {"tokens": tokens_all_on_one, "num_ranks": 2},
    "hot_rank": {"hot": True},
    "late_rank": {"delay": Delay(rank=1, entry_us=60), "tokens": tokens_rising_and_falling},
    "late_sender": {"delay": Delay(rank=2, send_us=60), "tokens": tokens_rising_and_falling},
    "slow_reader": {"delay": Delay(rank=0, read_us=60), "tokens": tokens_rising_and_falling},
    "token": {"granularity": Granularity.token, "delay": Delay(rank=1, read_us=40)},
    "expert": {"granularity": Granularity.expert, "tokens": tokens_with_empty_ranks},
    "by_rank": {"home_granularity": HomeGranularity.rank, "tokens": tokens_with_empty_ranks},
    "packed_random": {"layout": Layout.packed, "order": Order.random, "flag_batch": 32},
    "eight_ranks": {
        "num_ranks": 8,
        "tokens": tokens_with_empty_ranks,
        "delay": Delay(rank=5, entry_us=30, read_us=30),
    },
    "bulk_rising_falling": {"copy": Copy.tma, "tokens": tokens_rising_and_falling},
    "bulk_token_slow_reader": {
        "copy": Copy.tma,
        "num_stages": 6,
        "flag_batch": 32,
        "granularity": Granularity.token,
        "tokens": tokens_with_empty_ranks,
        "delay": Delay(rank=1, read_us=40),
    },
}


def soak(
    *,
    num_ranks=4,
    tokens=lambda number, rank: MOST,
    hot=False,
    delay=Delay(),  # noqa: B008  frozen
    flag_batch=1,
    copy=Copy.simt,
    num_stages=2,
    num_launches=LAUNCHES,
    **chosen,
):
    """Words received wrong and words come home wrong; raises where a wait reached its limit."""
    settings = PlanSettings(
        num_ranks=num_ranks, num_experts=EXPERTS, num_topk=TOPK, tile_m=16, **chosen
    )
    shape = Shape(
        max_tokens=MOST,
        num_tokens=MOST * num_ranks,
        dispatch_hidden=ROW_BYTES // 2,
        home_hidden=ROW_BYTES // 2,
    )
    group = DeviceGroup(settings, shape, Knobs(num_ctas=2), watchdog_s=LIMIT_S)
    routings = [
        routing(number, num_ranks=num_ranks, tokens=tokens, hot=hot)
        for number in range(num_launches)
    ]
    constants = Constants(
        num_ranks=num_ranks,
        num_experts_per_rank=EXPERTS // num_ranks,
        num_topk=TOPK,
        row_bytes=ROW_BYTES,
        granularity=settings.granularity,
        by_rank=settings.home_granularity is HomeGranularity.rank,
        copy=copy,
        num_warps=4,
        num_loads=1,
        num_stages=num_stages,
        flag_batch=flag_batch,
    )
    wrong = Soak(group, routings).run(constants, delay=delay, limit_ns=int(LIMIT_S * 1e9))
    group.heap.check(limit_s=LIMIT_S)
    return wrong


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_hundred_launches_move_every_row_of_their_own(name):
    assert soak(**COMBINATIONS[name]) == (0, 0)


def outcome(**chosen):
    """How a soak ends that may be wrong: number of wrong words, or the sentence of a wait."""
    try:
        return sum(soak(num_launches=40, **chosen))
    except WatchdogTimeout as error:
        return str(error)


def test_without_the_gate_rows_of_another_launch_are_found(monkeypatch):
    """The control of the soak: it must see what the gate prevents."""
    monkeypatch.setattr(protocol, "pass_gate", lambda *arguments: None)

    found = outcome(delay=Delay(rank=0, read_us=60), tokens=tokens_rising_and_falling, num_ranks=2)

    assert found != 0, "a launch ran ahead of its readers and nothing noticed"


def test_without_zeroing_thresholds_of_another_launch_are_found(monkeypatch):
    monkeypatch.setattr(protocol, "zero_counters", lambda *arguments: None)

    found = outcome(delay=Delay(rank=0, send_us=60), tokens=tokens_rising_and_falling, num_ranks=2)

    assert found != 0, "counts of an earlier launch let a consumer read before its rows came"


def test_flags_without_a_release(monkeypatch, record_testsuite_property):
    """Whether a missing release fence is seen on one GPU; recorded, either way is possible."""
    monkeypatch.setattr(flags, "release_fence", lambda scope: None)

    found = outcome(tokens=tokens_rising_and_falling, num_ranks=8, flag_batch=4)

    record_testsuite_property("release_dropped", found)
