"""Sending orders: what each one promises, checked against a second way of saying it."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedule.cases import assert_same, cases, landed, ticket_rows
from tilepipe.config.choices import Layout, Order
from tilepipe.schedule.plan import make_plan, plan_returns
from tilepipe.schedule.sends import hash32
from tilepipe.schedule.settings import PlanSettings

MASK = 0xFFFFFFFF


def ordered(case, order):
    """Tickets of every rank in an order."""
    return [ticket_rows(plan.tickets) for plan in case.plans(replace(case.settings, order=order))]


def canonical(tickets):
    """Tickets sorted by run and piece."""
    return sorted(tickets, key=lambda ticket: (ticket["run"], ticket["first_row"]))


def served_in_turn(tickets, *, rank, num_ranks):
    """Earliest deadline first as a player would deal it: a queue a peer, one ticket from each."""
    queues = [deque() for _ in range(num_ranks)]
    for ticket in sorted(canonical(tickets), key=lambda ticket: ticket["deadline"]):
        queues[ticket["peer"]].append(ticket)
    dealt = []
    while any(queues):
        for step in range(num_ranks):
            queue = queues[(rank + 1 + step) % num_ranks]
            if queue:
                dealt.append(queue.popleft())
    return dealt


def fmix32(state):
    """MurmurHash3's finaliser in plain integers."""
    state ^= state >> 16
    state = state * 0x85EBCA6B & MASK
    state ^= state >> 13
    state = state * 0xC2B2AE35 & MASK
    return state ^ state >> 16


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_every_order_is_a_permutation_of_the_same_tickets(case):
    by_order = {order: ordered(case, order) for order in Order}

    for rank in range(case.settings.num_ranks):
        expected = canonical(by_order[Order.expert][rank])
        for order in Order:
            assert canonical(by_order[order][rank]) == expected


@given(case=cases(), order=st.sampled_from(Order))
@settings(max_examples=80, deadline=None)
def test_tickets_of_a_run_keep_their_order_among_themselves(case, order):
    for tickets in ordered(case, order):
        last_row: dict[int, int] = {}
        for ticket in tickets:
            assert ticket["first_row"] > last_row.get(ticket["run"], -1)
            last_row[ticket["run"]] = ticket["first_row"]


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_a_deadline_is_the_first_position_at_which_the_receiver_hands_out_the_tile(case):
    plans = case.plans()

    first_use = []
    for plan in plans:
        positions: dict[int, int] = {}
        for position, (m_tile, _) in enumerate(plan.handout.tolist()):
            positions.setdefault(m_tile, position)
        first_use.append(positions)
    for plan in plans:
        for ticket in ticket_rows(plan.tickets):
            assert ticket["deadline"] == first_use[ticket["peer"]][ticket["tile"]]


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_edf_never_sends_a_row_after_one_of_a_later_deadline_to_the_same_rank(case):
    for tickets in ordered(case, Order.edf):
        latest: dict[int, int] = {}
        for ticket in tickets:
            assert ticket["deadline"] >= latest.get(ticket["peer"], 0)
            latest[ticket["peer"]] = ticket["deadline"]


@given(case=cases())
@settings(max_examples=100, deadline=None)
def test_edf_serves_all_peers_in_turn_beginning_with_the_next_rank(case):
    num_ranks = case.settings.num_ranks

    for rank, tickets in enumerate(ordered(case, Order.edf)):
        assert tickets == served_in_turn(tickets, rank=rank, num_ranks=num_ranks)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_edf_list_is_one_list_by_deadline_whose_ties_begin_with_the_next_rank(case):
    num_ranks = case.settings.num_ranks

    for rank, tickets in enumerate(ordered(case, Order.edf_list)):
        keys = [
            (ticket["deadline"], (ticket["peer"] - rank - 1) % num_ranks, ticket["run"])
            for ticket in tickets
        ]
        assert keys == sorted(keys)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_expert_order_goes_by_expert_then_tile(case):
    for tickets in ordered(case, Order.expert):
        keys = [(ticket["expert"], ticket["tile"], ticket["first_row"]) for ticket in tickets]
        assert keys == sorted(keys)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_token_order_goes_by_the_first_token_of_a_ticket_then_expert(case):
    for plan in case.plans(replace(case.settings, order=Order.token)):
        keys = list(
            zip(
                plan.row_token[plan.tickets.source_start].tolist(),
                plan.tickets.expert.tolist(),
                strict=True,
            )
        )
        assert keys == sorted(keys)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_random_order_goes_by_the_hash_of_seed_epoch_and_run_alone(case):
    for tickets in ordered(case, Order.random):
        keys = []
        for ticket in tickets:
            state = 0x9E3779B9
            for word in (case.settings.seed, case.epoch, ticket["run"]):
                state = fmix32(state ^ word & MASK)
            keys.append((state, ticket["run"], ticket["first_row"]))
        assert keys == sorted(keys)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_seed_and_epoch_move_nothing_but_the_random_order(case):
    for order in set(Order) - {Order.random}:
        wanted = replace(case.settings, order=order)
        other = make_plan(
            case.topk_idx, replace(wanted, seed=case.settings.seed + 1), epoch=case.epoch + 1
        )
        for plan, moved in zip(case.plans(wanted), other, strict=True):
            assert_same(plan, moved)


@given(case=cases())
@settings(max_examples=200, deadline=None)
def test_with_one_rank_edf_and_expert_coincide(case):
    alone = replace(case.settings, num_ranks=1)

    edf, by_expert = (
        make_plan(case.topk_idx[:1], replace(alone, order=order), epoch=case.epoch)
        for order in (Order.edf, Order.expert)
    )

    assert_same(edf, by_expert)


@given(case=cases(), order=st.sampled_from(Order))
@settings(max_examples=80, deadline=None)
def test_returns_follow_the_same_orders(case, order):
    wanted = replace(case.settings, order=order)
    plans = case.plans(wanted)
    for plan, rows in zip(plans, landed(plans), strict=True):
        row_rank = np.zeros(plan.layout.extent, np.int32)
        row_token = np.zeros(plan.layout.extent, np.int32)
        for row, sent in rows.items():
            row_rank[row], row_token[row] = sent.source, sent.token

        tickets = ticket_rows(
            plan_returns(plan.layout, row_rank, row_token, wanted, epoch=case.epoch)
        )

        turn = [(ticket["peer"] - plan.rank - 1) % wanted.num_ranks for ticket in tickets]
        match order:
            case Order.edf:
                dealt = served_in_turn(tickets, rank=plan.rank, num_ranks=wanted.num_ranks)
                assert tickets == dealt
                continue
            case Order.edf_list:
                keys = [(t["deadline"], n) for t, n in zip(tickets, turn, strict=True)]
            case Order.expert:
                keys = [(t["expert"], t["tile"]) for t in tickets]
            case Order.token:
                keys = [(int(row_token[t["first_row"]]), t["expert"]) for t in tickets]
            case Order.random:
                keys = [int(hash32(wanted.seed, case.epoch, np.asarray(t["run"]))) for t in tickets]
        assert keys == sorted(keys)


def test_hash32_ends_every_word_with_the_finaliser_of_murmur3():
    # fmix32(1) = 0x514E28B7 is MurmurHash3_x86_32 of no bytes with seed 1, a published test vector.
    assert int(hash32(0x9E3779B9 ^ 1)) == 0x514E28B7
    assert int(hash32(0x9E3779B9)) == 0


def test_hash32_is_pinned():
    assert hash32(0, 1, np.arange(4)).tolist() == [4162723709, 202132762, 277015506, 791021818]
    assert hash32(7, 2, np.arange(2)).dtype == np.uint32
    assert int(hash32(2**31, MASK, np.asarray(5))) == 4236848215


@given(words=st.lists(st.integers(0, 2**80), min_size=1, max_size=4))
def test_hash32_is_what_32_bit_integer_arithmetic_gives(words):
    state = 0x9E3779B9
    for word in words:
        state = fmix32(state ^ word & MASK)

    assert int(hash32(*words)) == state


def test_a_seed_past_64_bits_still_gives_a_random_order():
    settings = PlanSettings(num_ranks=1, num_experts=8, num_topk=2, order=Order.random, seed=2**64)
    ids = np.array([[0, 1], [2, 3], [4, 5]], np.int32)

    wide, narrow = make_plan([ids], settings), make_plan([ids], replace(settings, seed=0))

    assert_same(wide, narrow)


# Two ranks, two experts each, tiles of 16 rows; rank 0 has 40, 20 and 30 rows for experts 0, 1, 2.
SMALL = PlanSettings(num_ranks=2, num_experts=4, num_topk=1, tile_m=16, layout=Layout.padded)
SMALL_IDX = (
    np.repeat(np.array([0, 1, 2], np.int32), [40, 20, 30])[:, None],
    np.array([[3]], np.int32),
)


@pytest.mark.parametrize(
    ("order", "epoch", "tiles"),
    [
        # tiles by "peer:tile"; the queue of rank 1 is served first and ends early
        (Order.edf, 1, "1:0 0:0 1:1 0:1 0:2 0:3 0:4"),
        (Order.edf_list, 1, "1:0 0:0 1:1 0:1 0:2 0:3 0:4"),
        (Order.expert, 1, "0:0 0:1 0:2 0:3 0:4 1:0 1:1"),
        (Order.token, 1, "0:0 0:1 0:2 0:3 0:4 1:0 1:1"),
        (Order.random, 1, "1:1 0:1 0:2 0:3 1:0 0:4 0:0"),
        (Order.random, 2, "0:4 1:0 0:0 0:2 1:1 0:1 0:3"),
    ],
)
def test_orders_of_a_small_case_are_pinned(order, epoch, tiles):
    plan = make_plan(SMALL_IDX, replace(SMALL, order=order), epoch=epoch)[0]

    seen = [f"{ticket['peer']}:{ticket['tile']}" for ticket in ticket_rows(plan.tickets)]
    assert " ".join(seen) == tiles


def test_edf_deals_tickets_where_edf_list_lets_a_long_run_go_first():
    # One tile of 64 rows at each peer: 48 rows for rank 1 and 32 for rank 0 are due at once.
    settings = PlanSettings(num_ranks=2, num_experts=2, num_topk=1, tile_m=64)
    ids = [np.repeat(np.array([0, 1], np.int32), [32, 48])[:, None], np.zeros((0, 1), np.int32)]

    edf, edf_list = (
        make_plan(ids, replace(settings, order=order))[0].tickets.peer.tolist()
        for order in (Order.edf, Order.edf_list)
    )

    assert edf == [1, 0, 1, 0, 1]
    assert edf_list == [1, 1, 1, 0, 0]
