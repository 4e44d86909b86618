"""The arrays that kernels read hold the Plan row by row: nothing lost, nothing reordered."""

import numpy as np
from hypothesis import given, settings

from tests.schedule.cases import cases, landed, sent_rows, ticket_rows, tile_rows
from tests.schedule.test_plan import plans_of_toy, returns_of
from tilepipe.config.choices import Granularity
from tilepipe.schedule.packed import SLOT_BITS, pack_returns, pack_sends, pack_tiles
from tilepipe.schedule.plan import make_plan
from tilepipe.schedule.settings import PlanSettings


def assert_for_kernels(array, shape):
    """As a kernel reads it: int32, row after row."""
    assert (array.dtype, array.shape) == (np.int32, shape)
    assert array.flags.c_contiguous


def counter_at(plans, settings, sent, expert):
    """The counter that a row raises at its receiver, found by looking for its tile there."""
    if settings.granularity is Granularity.expert:
        return expert - sent.peer * settings.num_experts_per_rank
    (tile,) = (
        tile for tile, rows in enumerate(tile_rows(plans[sent.peer].layout)) if sent.row in rows
    )
    return tile


def test_packed_arrays_of_a_small_case_by_hand():
    first, second = plans_of_toy()
    by_expert = plans_of_toy(granularity=Granularity.expert)
    toy = PlanSettings(num_ranks=2, num_experts=4, num_topk=2)

    # token, peer << 16 | slot, row there, counter there; see the sends in test_plan
    one = 1 << SLOT_BITS
    assert pack_sends(first, toy).tolist() == [
        [0, one, 0, 0],
        [1, one | 1, 1, 0],
        [1, 0, 0, 0],
        [2, one | 1, 2, 1],
    ]
    assert pack_sends(second, toy).tolist() == [[0, one | 1, 3, 1], [1, one, 4, 2]]
    assert pack_tiles(second.layout).tolist() == [[0, 2], [2, 2], [4, 1]]
    expert_settings = PlanSettings(
        num_ranks=2, num_experts=4, num_topk=2, granularity=Granularity.expert
    )
    counters = [pack_sends(plan, expert_settings)[:, 3].tolist() for plan in by_expert]
    assert counters == [[1, 1, 0, 1], [1, 1]]  # expert 3 is the second one of rank 1


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_every_routed_row_is_packed_once_as_its_ticket_says_in_sending_order(case):
    wanted = case.settings
    plans = case.plans()

    for plan in plans:
        packed = pack_sends(plan, wanted)

        assert_for_kernels(packed, (plan.num_sent, 4))
        ids = case.topk_idx[plan.rank]
        expected = [
            [
                *(sent.token, sent.peer << SLOT_BITS | sent.slot, sent.row),
                counter_at(plans, wanted, sent, int(ids[sent.token, sent.slot])),
            ]
            for sent in sent_rows(plan)
        ]
        assert packed.tolist() == expected
        token, slot = packed[:, 0], packed[:, 1] & ((1 << SLOT_BITS) - 1)
        sent = sorted(zip(token.tolist(), slot.tolist(), strict=True))
        assert sent == [(int(t), int(s)) for t, s in np.argwhere(ids >= 0)]


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_packed_rows_raise_every_counter_to_what_its_waiter_expects(case):
    plans = case.plans()
    raised = [np.zeros(len(plan.readiness.expected), np.int64) for plan in plans]

    for plan in plans:
        for _, peer_slot, _, counter in pack_sends(plan, case.settings).tolist():
            raised[peer_slot >> SLOT_BITS][counter] += 1

    assert [rows.tolist() for rows in raised] == [
        plan.readiness.expected.tolist() for plan in plans
    ]


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_returns_are_every_received_row_once_in_the_order_of_their_tickets(case):
    plans = case.plans()
    received = landed(plans)

    for plan in plans:
        tickets = returns_of(plan, received[plan.rank], case)
        packed = pack_returns(tickets)

        assert_for_kernels(packed, (plan.layout.num_rows,))
        assert packed.tolist() == [
            ticket["first_row"] + offset
            for ticket in ticket_rows(tickets)
            for offset in range(ticket["num_rows"])
        ]
        assert sorted(packed.tolist()) == sorted(received[plan.rank])


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_tiles_are_packed_in_hand_out_order(case):
    for plan in case.plans():
        packed = pack_tiles(plan.layout)

        assert_for_kernels(packed, (plan.layout.num_tiles, 2))
        assert [range(first, first + valid) for first, valid in packed.tolist()] == tile_rows(
            plan.layout
        )


def test_a_plan_without_rows_packs_to_arrays_without_rows():
    wanted = PlanSettings(num_ranks=2, num_experts=4, num_topk=2)

    for plan in make_plan([np.zeros((0, 2), np.int32), np.full((3, 2), -1, np.int32)], wanted):
        assert_for_kernels(pack_sends(plan, wanted), (0, 4))
        assert_for_kernels(pack_tiles(plan.layout), (0, 2))
        assert_for_kernels(pack_returns(plan.tickets), (0,))


def test_the_last_rank_and_slot_fit_beside_each_other():
    wanted = PlanSettings(num_ranks=8, num_experts=256, num_topk=32)
    ids = np.full((1, 32), -1, np.int32)
    ids[0, 31] = 255

    plans = make_plan([ids, *[np.zeros((0, 32), np.int32)] * 7], wanted)

    assert pack_sends(plans[0], wanted).tolist() == [[0, 7 << SLOT_BITS | 31, 0, 0]]
