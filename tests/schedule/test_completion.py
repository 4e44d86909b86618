"""When tokens are complete at home, as the plan foresees it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.schedule.cases import cases, sent_rows, tile_rows
from tilepipe.schedule.completion import order_tokens
from tilepipe.schedule.plan import make_plan
from tilepipe.schedule.settings import PlanSettings


def turns_of(case, num_parts):
    """Of every rank's tokens the turn of the last tile that holds a row of theirs, row by row."""
    plans = case.plans()
    places = [tile_rows(plan.layout) for plan in plans]
    turns = [np.zeros(len(ids), int) for ids in case.topk_idx]
    for plan in plans:
        for sent in sent_rows(plan):
            tiles = places[sent.peer]
            (tile,) = [number for number, rows in enumerate(tiles) if sent.row in rows]
            turn = (num_parts - 1) * len(tiles) + tile + 1
            turns[plan.rank][sent.token] = max(turns[plan.rank][sent.token], turn)
    return plans, turns


@given(case=cases(), num_parts=st.integers(1, 7))
def test_tokens_come_by_the_turn_of_their_last_tile_and_each_once(case, num_parts):
    plans, turns = turns_of(case, num_parts)
    num_tiles = [plan.layout.num_tiles for plan in plans]

    orders = [
        order_tokens(plan, num_tiles, num_tokens=len(own), num_parts=num_parts)
        for plan, own in zip(plans, turns, strict=True)
    ]

    for order, own in zip(orders, turns, strict=True):
        assert sorted(order) == list(range(len(own)))
        assert sorted(order, key=lambda token: (own[token], token)) == order.tolist()


def test_a_token_of_the_first_tile_goes_before_one_that_needs_a_late_expert_anywhere():
    settings = PlanSettings(
        num_ranks=2, num_experts=4, num_topk=2, tile_m=2, num_n_tiles=4, num_chunks=4
    )
    # Experts 0 1 | 2 3; token 2 of rank 0 has no rows, and token 1 those that come first.
    topk_idx = (np.array([[0, 3], [0, 2], [-1, -1]], np.int32), np.array([[1, 2]], np.int32))
    plans = make_plan(topk_idx, settings)

    orders = [
        order_tokens(plan, [2, 2], num_tokens=len(ids), num_parts=4)
        for plan, ids in zip(plans, topk_idx, strict=True)
    ]

    assert [order.tolist() for order in orders] == [[2, 1, 0], [0]]
