"""What a group puts into memory before a launch, on the CPU: the Plan, in place, or a refusal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as given_settings

torch = pytest.importorskip("torch")

from tests.schedule.cases import cases, draw_choices, landed  # noqa: E402
from tests.schedule.test_plan import returns_of  # noqa: E402
from tilepipe.config.choices import HomeGranularity, Layout, Order  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.layout import count_rows  # noqa: E402
from tilepipe.schedule.packed import pack_returns, pack_sends, pack_tiles  # noqa: E402
from tilepipe.schedule.plan import plan_home  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402
from tilepipe.workload.routing import Routing  # noqa: E402

SETTINGS = PlanSettings(num_ranks=2, num_experts=8, num_topk=2, tile_m=16)


def routing_of(topk_idx, num_experts, seed=0):
    rng = np.random.default_rng(seed)
    return Routing(
        topk_idx=tuple(topk_idx),
        topk_weights=tuple(rng.random(ids.shape).astype(np.float32) for ids in topk_idx),
        num_experts=num_experts,
    )


def drawn(tokens, settings=SETTINGS, seed=0):
    rng = np.random.default_rng(seed)
    ids = [draw_choices(rng, count, settings) for count in tokens]
    return routing_of(ids, settings.num_experts, seed)


def group_of(settings, *, max_tokens, num_tokens, **sizes):
    return DeviceGroup(
        settings,
        Shape(max_tokens=max_tokens, num_tokens=num_tokens, dispatch_hidden=8, **sizes),
        Knobs(num_ctas=1),
        watchdog_s=1.0,
        device=torch.device("cpu"),
    )


def front(group, rank, slot, count):
    return group.tensor(rank, slot)[:count].tolist()


def words(group, rank):
    block = group.tensor(rank, Slot.words).tolist()
    return {word.name: block[word] for word in Word}


@given(case=cases())
@given_settings(max_examples=40, deadline=None)
def test_every_rank_gets_the_plan_of_the_launch(case):
    settings, tokens = case.settings, [len(ids) for ids in case.topk_idx]
    routing = routing_of(case.topk_idx, settings.num_experts)
    group = group_of(settings, max_tokens=max(tokens), num_tokens=sum(tokens))

    group.set_routing(routing, epoch=case.epoch)

    plans = case.plans()
    received = landed(plans)
    for rank, plan in enumerate(plans):
        sends, tiles = pack_sends(plan, settings), pack_tiles(plan.layout)
        expected, home = plan.readiness.expected, plan_home(case.topk_idx[rank], settings)
        # Homes found by following tickets row by row.
        returns = pack_returns(returns_of(plan, received[rank], case))
        uploaded = {
            Slot.sends: sends,
            Slot.tiles: tiles,
            Slot.ready_expected: expected,
            Slot.rows_to: count_rows(case.topk_idx[rank], settings.num_experts),
            Slot.returns: returns,
            Slot.topk_idx: case.topk_idx[rank],
            Slot.topk_weights: routing.topk_weights[rank],
            Slot.token_expected: home.token_expected,
            Slot.rank_expected: home.rank_expected,
        }
        for slot, values in uploaded.items():
            assert front(group, rank, slot, len(values)) == values.tolist(), slot
        counted = {
            "num_sends": len(sends),
            "num_tiles": len(tiles),
            "num_counters": len(expected),
            "num_returns": len(returns),
            "num_tokens": tokens[rank],
        }
        found = words(group, rank)
        assert {name: found[name] for name in counted} == counted
        assert (found["epoch"], found["mismatch"], found["send_queue"]) == (0, 0, 0)
        assert found["max_counters"] == len(group.tensor(rank, Slot.ready))
        assert found["max_tokens"] == len(group.tensor(rank, Slot.token_ready))


def test_another_routing_is_planned_in_the_same_memory():
    group = group_of(SETTINGS, max_tokens=40, num_tokens=80)
    group.set_routing(drawn([40, 40]))
    table = group.heap.table.clone()

    group.set_routing(drawn([3, 17], seed=1))

    assert group.heap.table.equal(table)
    for rank, plan in enumerate(group.plans):
        sends = pack_sends(plan, SETTINGS)
        assert front(group, rank, Slot.sends, len(sends)) == sends.tolist()
        assert words(group, rank)["num_sends"] == len(sends) == 2 * (3, 17)[rank]


def test_a_routing_that_would_overflow_is_refused_before_anything_is_uploaded():
    settings = PlanSettings(num_ranks=2, num_experts=8, num_topk=2, layout=Layout.packed)
    group = group_of(settings, max_tokens=8, num_tokens=16, capacity_factor=1.0)
    group.set_routing(drawn([4, 4], settings))
    before = [group.tensor(rank, Slot.sends).clone() for rank in range(2)]
    hot = routing_of([np.tile(np.array([[0, 1]], np.int32), (8, 1))] * 2, 8)

    with pytest.raises(
        ValueError, match="capacity_factor gives 16 receive rows a rank, but rank 0"
    ):
        group.set_routing(hot)

    assert all(group.tensor(rank, Slot.sends).equal(before[rank]) for rank in range(2))


def test_more_slots_than_a_warp_has_lanes_are_refused():
    settings = PlanSettings(num_ranks=1, num_experts=64, num_topk=33)

    with pytest.raises(ValueError, match=r"workload.num_topk=33: kernels hold at most 32 slots"):
        group_of(settings, max_tokens=1, num_tokens=1)


@pytest.mark.parametrize("order", list(Order))
def test_a_plan_is_made_anew_where_the_order_depends_on_the_launch(order):
    settings = PlanSettings(num_ranks=2, num_experts=8, num_topk=2, tile_m=16, order=order)
    group = group_of(settings, max_tokens=64, num_tokens=128)
    group.launcher.launch = lambda name: None  # nothing runs here
    group.set_routing(drawn([64, 64], settings))
    first = group.tensor(0, Slot.sends).clone()

    group.open(exchange=True)
    group.refresh_plan()

    assert group.tensor(0, Slot.sends).equal(first) == (order is not Order.random)


def test_ranks_of_one_group_carry_one_fingerprint_and_other_settings_another():
    by_token = group_of(SETTINGS, max_tokens=4, num_tokens=8)
    settings = PlanSettings(
        num_ranks=2, num_experts=8, num_topk=2, tile_m=16, home_granularity=HomeGranularity.rank
    )
    others = [
        group_of(settings, max_tokens=4, num_tokens=8),
        group_of(SETTINGS, max_tokens=4, num_tokens=7),
    ]

    own = {words(by_token, rank)["fingerprint"] for rank in range(2)}

    assert len(own) == 1
    assert not own & {words(group, 0)["fingerprint"] for group in others}


def test_a_rank_with_another_fingerprint_is_told_once_the_launch_has_ended():
    group = group_of(SETTINGS, max_tokens=4, num_tokens=8)
    group.check()

    group.tensor(1, Slot.words)[int(Word.mismatch)] = 1

    with pytest.raises(ValueError, match="rank 0 runs with other plan settings than rank 1: start"):
        group.check()


@pytest.mark.parametrize(
    ("exchange", "preset", "name"),
    [
        (False, False, "open"),
        (True, False, "open_exchange"),
        (False, True, "open_preset"),
        (True, True, "open_exchange_preset"),
    ],
)
def test_a_launch_is_opened_by_the_gate_that_was_asked_for(exchange, preset, name):
    group = group_of(SETTINGS, max_tokens=4, num_tokens=8)
    launched = []
    group.launcher.launch = launched.append

    group.open(exchange=exchange, preset=preset)

    assert launched == [name]


def test_a_plan_that_differs_from_numpys_is_told_by_buffer_and_word():
    group = group_of(SETTINGS, max_tokens=9, num_tokens=16)
    group.set_routing(drawn([9, 7]), epoch=1)
    untouched = [group.plan_differences(rank, returns_epoch=1) for rank in group.ranks]

    group.tensor(1, Slot.sends)[3, 2] += 1
    group.tensor(1, Slot.returns)[0] += 1
    group.tensor(1, Slot.words)[Word.num_tiles] += 1

    assert untouched == [[], []]
    assert group.plan_differences(0, returns_epoch=1) == []
    assert group.plan_differences(1) == ["num_tiles", "sends"]
    assert group.plan_differences(1, returns_epoch=1) == ["num_tiles", "sends", "returns"]
