"""The plan of a launch: rows find their slots, thresholds add up, equal inputs give equal plans."""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from tests.schedule.cases import (
    assert_same,
    cases,
    draw_choices,
    landed,
    sent_rows,
    ticket_rows,
    tile_rows,
)
from tilepipe.config.choices import Granularity, Layout, Order
from tilepipe.reference import moe
from tilepipe.schedule.layout import count_rows
from tilepipe.schedule.plan import make_plan, make_rank_plan, plan_home, plan_returns
from tilepipe.schedule.sends import cut_tickets
from tilepipe.schedule.settings import TICKET_ROWS, PlanSettings

# Two ranks, experts 0 1 | 2 3, tiles of 2 rows. Rank 0 sends tokens 0 1 2 to expert 3 and token 1
# to expert 0; rank 1 sends tokens 0 1 to expert 3.
TOY = PlanSettings(
    num_ranks=2,
    num_experts=4,
    num_topk=2,
    tile_m=2,
    layout=Layout.packed,
    num_n_tiles=3,
    num_chunks=3,
)
TOY_IDX = (np.array([[3, -1], [0, 3], [-1, 3]], np.int32), np.array([[-1, 3], [3, -1]], np.int32))


def plans_of_toy(**changes):
    return make_plan(TOY_IDX, replace(TOY, **changes))


def test_plan_of_a_small_case_by_hand():
    first, second = plans_of_toy()

    assert first.row_token.tolist() == [1, 0, 1, 2]
    assert first.row_slot.tolist() == [0, 0, 1, 1]
    assert second.row_token.tolist() == [0, 1]
    assert second.row_slot.tolist() == [1, 0]
    fields = ("peer", "first_row", "source_start", "num_rows", "tile", "expert", "deadline", "run")
    sends = [
        [tuple(ticket[name] for name in fields) for ticket in ticket_rows(plan.tickets)]
        for plan in (first, second)
    ]
    # rank 0 begins with rank 1; its third row of expert 3 shares a tile with rank 1's first
    assert sends[0] == [
        (1, 0, 1, 2, 0, 3, 0, 1),
        (0, 0, 0, 1, 0, 0, 0, 0),
        (1, 2, 3, 1, 1, 3, 1, 2),
    ]
    assert sends[1] == [(1, 3, 0, 1, 1, 3, 1, 0), (1, 4, 1, 1, 2, 3, 2, 1)]
    assert first.layout.tiles.tolist() == [[0, 0, 1]]
    assert second.layout.tiles.tolist() == [[1, 0, 2], [1, 2, 2], [1, 4, 1]]
    assert second.handout.tolist() == [[m, n] for n in range(3) for m in range(3)]


def test_plan_arrays_have_the_types_that_a_device_maker_must_match():
    plan = plans_of_toy()[0]

    tickets = plan.tickets
    narrow = (
        *(tickets.peer, tickets.first_row, tickets.source_start, tickets.num_rows, tickets.tile),
        *(tickets.expert, tickets.run, plan.row_token, plan.row_slot, plan.handout),
        *(plan.layout.tiles, plan.layout.expert_rows, plan.layout.expert_first_row),
        *(plan.layout.expert_first_tile, plan.readiness.counter_of_tile),
    )
    assert {array.dtype for array in narrow} == {np.dtype(np.int32)}
    assert tickets.deadline.dtype == plan.readiness.expected.dtype == np.int64


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_every_routed_row_has_one_slot_in_the_order_of_the_reference(case):
    wanted, num_local = case.settings, case.settings.num_experts_per_rank

    plans = case.plans()

    received = landed(plans)
    # Rows that carry nothing but their name: dispatch of the reference says where each belongs.
    names = [
        np.array([[rank, token] for token in range(len(ids))], np.int64).reshape(-1, 2)
        for rank, ids in enumerate(case.topk_idx)
    ]
    expected = moe.dispatch(names, case.topk_idx, num_experts=wanted.num_experts)
    for expert in range(wanted.num_experts):
        owner, local = divmod(expert, num_local)
        layout = plans[owner].layout
        first, num_rows = layout.expert_first_row[local], layout.expert_rows[local]
        here = [received[owner].pop(row) for row in range(first, first + num_rows)]
        assert [[sent.source, sent.token] for sent in here] == expected[expert].tolist()
        for sent in here:
            assert case.topk_idx[sent.source][sent.token, sent.slot] == expert
    assert received == [{} for _ in plans], "rows that belong nowhere"


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_tickets_stay_in_one_tile_of_one_expert_and_cut_runs_into_full_pieces(case):
    num_local = case.settings.num_experts_per_rank

    plans = case.plans()

    for plan in plans:
        runs: dict[int, list[dict[str, int]]] = {}
        for ticket in ticket_rows(plan.tickets):
            runs.setdefault(ticket["run"], []).append(ticket)
            target = plans[ticket["peer"]].layout
            expert, first, valid = target.tiles[ticket["tile"]].tolist()
            assert ticket["expert"] == ticket["peer"] * num_local + expert
            assert first <= ticket["first_row"]
            assert ticket["first_row"] + ticket["num_rows"] <= first + valid
        assert sorted(runs) == list(range(len(runs)))
        # A run is all that this rank sends into a tile, so no tile has two.
        assert len({(run[0]["peer"], run[0]["tile"]) for run in runs.values()}) == len(runs)
        for pieces in runs.values():
            assert len({(piece["peer"], piece["tile"]) for piece in pieces}) == 1
            sizes = [piece["num_rows"] for piece in pieces]
            assert all(size == TICKET_ROWS for size in sizes[:-1])
            assert 1 <= sizes[-1] <= TICKET_ROWS
            for before, piece in itertools.pairwise(pieces):
                assert piece["first_row"] == before["first_row"] + TICKET_ROWS
                assert piece["source_start"] == before["source_start"] + TICKET_ROWS


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(1, [1]), (16, [16]), (17, [16, 1]), (48, [16] * 3), (50, [16] * 3 + [2])],
)
def test_a_run_is_cut_into_tickets_of_16_rows(num_rows, sizes):
    # One expert, one tile: the whole routing is one run.
    settings = PlanSettings(num_ranks=1, num_experts=1, num_topk=1, tile_m=64)

    (plan,) = make_plan([np.zeros((num_rows, 1), np.int32)], settings)

    assert plan.tickets.num_rows.tolist() == sizes
    assert set(plan.tickets.run.tolist()) == {0}


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_every_counter_is_raised_to_exactly_what_its_waiter_expects(case):
    num_local = case.settings.num_experts_per_rank
    by_tile = case.plans(replace(case.settings, granularity=Granularity.tile))
    by_expert = case.plans(replace(case.settings, granularity=Granularity.expert))

    raised_tiles = [np.zeros(len(plan.readiness.expected), np.int64) for plan in by_tile]
    raised_experts = [np.zeros(len(plan.readiness.expected), np.int64) for plan in by_expert]
    for tiles_plan, experts_plan in zip(by_tile, by_expert, strict=True):
        for ticket in ticket_rows(tiles_plan.tickets):
            raised_tiles[ticket["peer"]][ticket["tile"]] += ticket["num_rows"]
        for ticket in ticket_rows(experts_plan.tickets):
            raised_experts[ticket["peer"]][ticket["expert"] % num_local] += ticket["num_rows"]

    for rank, plan in enumerate(by_tile):
        layout, ready = plan.layout, plan.readiness
        assert ready.expected.tolist() == raised_tiles[rank].tolist() == layout.tiles[:, 2].tolist()
        assert ready.counter_of_tile.tolist() == list(range(layout.num_tiles))
    for rank, plan in enumerate(by_expert):
        layout, ready = plan.layout, plan.readiness
        assert ready.expected.tolist() == raised_experts[rank].tolist()
        assert ready.expected.tolist() == layout.expert_rows.tolist()
        assert ready.counter_of_tile.tolist() == layout.tiles[:, 0].tolist()


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_no_row_is_lost_between_routing_tickets_and_tiles(case):
    plans = case.plans()

    routed = [int((ids >= 0).sum()) for ids in case.topk_idx]
    assert [plan.num_sent for plan in plans] == routed
    assert [int(plan.tickets.num_rows.sum()) for plan in plans] == routed
    assert sum(plan.layout.num_rows for plan in plans) == sum(routed)
    for plan, received in zip(plans, landed(plans), strict=True):
        assert sorted(received) == sorted(row for rows in tile_rows(plan.layout) for row in rows)


@given(case=cases())
@settings(max_examples=60, deadline=None)
def test_equal_inputs_give_equal_plans_and_a_rank_needs_only_its_own_routing(case):
    before = [ids.copy() for ids in case.topk_idx]

    plans = case.plans()

    again = make_plan([ids.copy() for ids in case.topk_idx], case.settings, epoch=case.epoch)
    counts = np.stack([count_rows(ids, case.settings.num_experts) for ids in case.topk_idx])
    for rank, plan in enumerate(plans):
        alone = make_rank_plan(rank, before[rank], counts, case.settings, epoch=case.epoch)
        assert_same(plan, again[rank])
        assert_same(plan, alone)
        assert_same(case.topk_idx[rank], before[rank])


def test_one_rank_group_without_any_row_has_an_empty_plan():
    settings = PlanSettings(num_ranks=2, num_experts=4, num_topk=2)

    plans = make_plan([np.zeros((0, 2), np.int32), np.full((3, 2), -1, np.int32)], settings)

    for plan in plans:
        assert (plan.num_sent, len(plan.tickets), len(plan.handout)) == (0, 0, 0)
        assert (plan.layout.num_tiles, plan.layout.extent) == (0, 0)


def test_expert_numbers_past_16_bits_keep_their_order():
    # A 16-bit sort key would wrap: 40 000 to below 0, 70 000 to below 40 000.
    settings = PlanSettings(num_ranks=1, num_experts=80_000, num_topk=1, order=Order.expert)
    ids = np.array([[70_000], [40_000], [5], [70_000], [32_768]], np.int32)

    (plan,) = make_plan([ids], settings)

    assert plan.row_token.tolist() == [2, 4, 1, 0, 3]
    assert plan.tickets.expert.tolist() == [5, 32_768, 40_000, 70_000]
    assert plan.tickets.num_rows.tolist() == [1, 1, 1, 2]


def test_routing_of_another_topk_than_the_settings_say_is_caught():
    settings = PlanSettings(num_ranks=1, num_experts=4, num_topk=3)

    with pytest.raises(AssertionError, match=r"\(5, 2\) for topk 3"):
        make_plan([np.zeros((5, 2), np.int32)], settings)


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_returns_carry_every_received_row_home_once(case):
    plans = case.plans()
    received = landed(plans)
    came_home: list[set[tuple[int, int]]] = [set() for _ in plans]

    for plan in plans:
        rows = received[plan.rank]
        tickets = returns_of(plan, rows, case)

        done = set()
        for ticket in ticket_rows(tickets):
            first, num_rows = ticket["first_row"], ticket["num_rows"]
            assert 1 <= num_rows <= TICKET_ROWS
            assert ticket["source_start"] == first
            expert, tile_first, valid = plan.layout.tiles[ticket["tile"]].tolist()
            assert tile_first <= first
            assert first + num_rows <= tile_first + valid
            num_local = case.settings.num_experts_per_rank
            assert ticket["expert"] == plan.rank * num_local + expert
            for row in range(first, first + num_rows):
                assert ticket["peer"] == rows[row].source
                assert row not in done
                done.add(row)
                came_home[ticket["peer"]].add((rows[row].token, rows[row].slot))
        assert done == set(rows)
    for ids, home in zip(case.topk_idx, came_home, strict=True):
        token, slot = np.nonzero(ids >= 0)
        assert home == set(zip(token.tolist(), slot.tolist(), strict=True))


@given(case=cases())
@settings(max_examples=120, deadline=None)
def test_home_thresholds_are_what_the_returns_of_all_ranks_push(case):
    plans, num_chunks = case.plans(), case.settings.num_chunks
    received = landed(plans)
    tokens = [np.zeros(len(ids), np.int64) for ids in case.topk_idx]
    sources = np.zeros((len(plans), len(plans)), np.int64)  # home, rank that pushes
    for plan in plans:
        for ticket in ticket_rows(returns_of(plan, received[plan.rank], case)):
            home, first = ticket["peer"], ticket["first_row"]
            sources[home, plan.rank] += ticket["num_rows"] * num_chunks
            for row in range(first, first + ticket["num_rows"]):
                tokens[home][received[plan.rank][row].token] += num_chunks

    for rank, ids in enumerate(case.topk_idx):
        home_plan = plan_home(ids, case.settings)

        assert home_plan.token_expected.tolist() == tokens[rank].tolist()
        assert home_plan.rank_expected.tolist() == sources[rank].tolist()
        assert home_plan.by_rank is (case.settings.home_granularity.name == "rank")


@given(case=cases())
@settings(max_examples=80, deadline=None)
def test_returns_are_one_run_for_each_home_of_a_tile_due_at_its_first_token(case):
    plans = case.plans()
    received = landed(plans)

    for plan in plans:
        rows = received[plan.rank]
        tickets = ticket_rows(returns_of(plan, rows, case))

        starts: dict[int, dict[str, int]] = {}
        for ticket in tickets:
            old = starts.setdefault(ticket["run"], ticket)
            assert (old["peer"], old["tile"], old["deadline"]) == (
                *(ticket["peer"], ticket["tile"], ticket["deadline"]),
            )
        assert len({(ticket["peer"], ticket["tile"]) for ticket in starts.values()}) == len(starts)
        for ticket in starts.values():
            # Tickets of a run keep their order, so the first one met holds its first row.
            in_tile = tile_rows(plan.layout)[ticket["tile"]]
            mine = [rows[row].token for row in in_tile if rows[row].source == ticket["peer"]]
            assert ticket["deadline"] == min(mine) == rows[ticket["first_row"]].token


def returns_of(plan, rows, case):
    """Returns of one rank; gaps of the padded layout hold rubbish, as they do in memory."""
    row_rank = np.full(plan.layout.extent, -12345, np.int32)
    row_token = np.full(plan.layout.extent, 2**30, np.int32)
    for row, sent in rows.items():
        row_rank[row], row_token[row] = sent.source, sent.token
    return plan_returns(plan.layout, row_rank, row_token, case.settings, epoch=case.epoch)


def test_home_thresholds_by_hand():
    settings = replace(TOY, num_chunks=3)

    home = plan_home(TOY_IDX[0], settings)

    # tokens with 1, 2 and 1 valid slots; one row to rank 0, three to rank 1; three chunks each
    assert home.token_expected.tolist() == [3, 6, 3]
    assert home.rank_expected.tolist() == [3, 9]
    assert home.by_rank is False


def test_sent_rows_of_the_same_token_differ_in_slot():
    plan = plans_of_toy()[0]

    rows = [(sent.token, sent.slot) for sent in sent_rows(plan)]

    assert sorted(rows) == [(0, 0), (1, 0), (1, 1), (2, 1)]


def test_cut_tickets_of_no_runs_is_empty():
    settings = PlanSettings(num_ranks=1, num_experts=1, num_topk=1)
    (plan,) = make_plan([np.full((1, 1), -1, np.int32)], settings)

    tickets = cut_tickets(plan.tickets)

    assert len(tickets) == 0


BIG = PlanSettings(num_ranks=8, num_experts=256, num_topk=8, num_n_tiles=16, num_chunks=16)


@pytest.fixture(scope="module")
def big_routing():
    rng = np.random.default_rng(0)
    return [draw_choices(rng, 16_384, BIG) for _ in range(8)]


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("layout", Layout)
def test_plans_of_eight_ranks_with_16384_tokens_each_take_less_than_two_seconds(
    big_routing, layout, order
):
    wanted = replace(BIG, layout=layout, order=order)

    start_s = time.process_time()  # not the clock: others may hold the core for a while
    plans = make_plan(big_routing, wanted)
    taken_s = time.process_time() - start_s

    assert taken_s < 2.0
    assert [plan.num_sent for plan in plans] == [16_384 * 8] * 8
    assert sum(plan.layout.num_rows for plan in plans) == 8 * 16_384 * 8
