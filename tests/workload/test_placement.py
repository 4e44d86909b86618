"""Every placement covers the experts, and sends each choice to a holder of its expert."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepipe.config import placements
from tilepipe.config.choices import Replica
from tilepipe.workload import imbalance, place
from tilepipe.workload.balance import balanced
from tilepipe.workload.placement import Placement, assign, contiguous, round_robin
from tilepipe.workload.routing import Routing, rows_of_experts


def routing_of(topk_idx, num_experts):
    """Weights that tell rank, token and slot apart."""
    return Routing(
        topk_idx=tuple(np.array(ids, np.int32) for ids in topk_idx),
        topk_weights=tuple(
            np.arange(np.size(ids), dtype=np.float32).reshape(np.shape(ids)) for ids in topk_idx
        ),
        num_experts=num_experts,
    )


@st.composite
def routings(draw_value, *, divides=True):
    """Skewed, with dropped slots and ranks without tokens."""
    num_ranks = draw_value(st.sampled_from([1, 2, 3, 4, 8]))
    num_experts = num_ranks * draw_value(st.integers(1, 5))
    if not divides:
        num_experts = draw_value(st.integers(1, 5 * num_ranks))
    num_topk = draw_value(st.integers(1, min(num_experts, 6)))
    rng = np.random.default_rng(draw_value(st.integers(0, 2**32)))
    popularity = rng.random(num_experts) ** draw_value(st.sampled_from([0, 1, 6]))
    topk_idx = []
    for _ in range(num_ranks):
        keys = rng.random((draw_value(st.integers(0, 24)), num_experts)) / (popularity + 1e-9)
        ids = np.argsort(keys, axis=1)[:, :num_topk]
        ids[rng.random(ids.shape) < draw_value(st.sampled_from([0, 0.3, 1]))] = -1
        topk_idx.append(ids)
    return routing_of(topk_idx, num_experts)


@st.composite
def placed_cases(draw_value):
    """A routing in a placement of any rule, those of a file with unused physical experts."""
    rule = draw_value(st.sampled_from(["contiguous", "round_robin", "balanced", "map"]))
    routing = draw_value(routings(divides=rule in ("contiguous", "round_robin")))
    num_ranks, num_experts = len(routing.topk_idx), routing.num_experts
    replica = draw_value(st.sampled_from(list(Replica)))
    if rule == "contiguous":
        return assign(contiguous(num_experts, num_ranks), routing)
    if rule == "round_robin":
        return assign(round_robin(num_experts, num_ranks), routing)
    num_redundant = -num_experts % num_ranks + num_ranks * draw_value(st.integers(0, 3))
    if rule == "balanced":
        return balanced(routing, num_redundant=num_redundant, replica=replica)
    rng = np.random.default_rng(draw_value(st.integers(0, 2**32)))
    extra = rng.integers(-1, num_experts, num_redundant)
    expert_of = rng.permutation(np.concatenate([np.arange(num_experts), extra])).astype(np.int32)
    placement = Placement(
        expert_of=expert_of, num_experts=num_experts, num_ranks=num_ranks, replica=replica
    )
    return assign(placement, routing)


@given(placed=placed_cases())
@settings(max_examples=200, deadline=None)
def test_every_expert_is_held_and_every_rank_holds_as_many(placed):
    placement = placed.placement
    num_experts, num_ranks = placed.logical.num_experts, len(placed.logical.topk_idx)

    held = [placement.experts_on(rank).tolist() for rank in range(num_ranks)]

    together = list(chain.from_iterable(held))
    assert {len(experts) for experts in held} == {placement.num_local}
    assert together == placement.expert_of.tolist()
    assert set(range(num_experts)) <= set(together) <= set(range(-1, num_experts))
    assert placed.physical.num_experts == placement.num_physical == len(together)


@given(placed=placed_cases())
@settings(max_examples=200, deadline=None)
def test_every_choice_goes_to_one_holder_of_its_expert_and_keeps_its_weight(placed):
    expert_of = placed.placement.expert_of.tolist()

    for asked, sent in zip(placed.logical.topk_idx, placed.physical.topk_idx, strict=True):
        assert sent.shape == asked.shape
        assert sent.dtype == np.int32
        for asked_row, sent_row in zip(asked.tolist(), sent.tolist(), strict=True):
            assert [expert_of[p] if p >= 0 else -1 for p in sent_row] == asked_row
            valid = [p for p in sent_row if p >= 0]
            assert len(set(valid)) == len(valid)
    assert placed.physical.topk_weights is placed.logical.topk_weights


@given(placed=placed_cases())
@settings(max_examples=200, deadline=None)
def test_loads_of_replicas_add_up_to_the_load_of_their_expert(placed):
    loads = Counter()
    for physical, rows in enumerate(rows_of_experts(placed.physical).tolist()):
        loads[int(placed.placement.expert_of[physical])] += rows

    assert loads[-1] == 0
    asked = Counter(e for ids in placed.logical.topk_idx for e in ids.ravel().tolist() if e >= 0)
    assert {expert: loads[expert] for expert in asked} == dict(asked)
    assert sum(loads.values()) == sum(asked.values())


@given(placed=placed_cases())
@settings(max_examples=200, deadline=None)
def test_replicas_share_a_source_ranks_rows_evenly_and_its_own_come_first_if_local(placed):
    placement = placed.placement
    holders = {}
    for physical, expert in enumerate(placement.expert_of.tolist()):
        holders.setdefault(expert, []).append(physical)

    for rank, (asked, sent) in enumerate(
        zip(placed.logical.topk_idx, placed.physical.topk_idx, strict=True)
    ):
        rows = Counter(sent.ravel().tolist())
        for expert in set(asked.ravel().tolist()) - {-1}:
            allowed = holders[expert]
            own = [p for p in allowed if p // placement.num_local == rank]
            if placement.replica is Replica.local and own:
                allowed = own
            taken = [rows[p] for p in allowed]
            assert sum(taken) == np.count_nonzero(asked == expert)
            assert max(taken) - min(taken) <= 1


@given(placed=placed_cases(), num_tokens=st.integers(0, 24))
@settings(max_examples=100, deadline=None)
def test_what_a_row_takes_depends_on_no_later_token_and_on_no_other_rank(placed, num_tokens):
    shorter = routing_of(
        [ids[: num_tokens if rank else None] for rank, ids in enumerate(placed.logical.topk_idx)],
        placed.logical.num_experts,
    )

    again = assign(placed.placement, shorter)

    for rank, sent in enumerate(placed.physical.topk_idx):
        assert np.array_equal(again.physical.topk_idx[rank], sent[: num_tokens if rank else None])


def fullest_rank(placed):
    """Counted row by row, from nothing but ids and the number of physical experts of a rank."""
    num_local = placed.physical.num_experts // len(placed.physical.topk_idx)
    rows = Counter(
        physical // num_local
        for ids in placed.physical.topk_idx
        for physical in ids.ravel().tolist()
        if physical >= 0
    )
    return max(rows.values(), default=0)


@given(
    routing=routings(divides=False),
    rounds=st.integers(0, 3),
    replica=st.sampled_from(list(Replica)),
)
@settings(max_examples=300, deadline=None)
def test_balanced_is_never_less_even_than_contiguous_blocks(routing, rounds, replica):
    num_ranks = len(routing.topk_idx)
    num_redundant = -routing.num_experts % num_ranks + num_ranks * rounds

    placed = balanced(routing, num_redundant=num_redundant, replica=replica)

    blocks = assign(contiguous(routing.num_experts, num_ranks), routing)
    assert fullest_rank(placed) <= fullest_rank(blocks)
    again = balanced(routing, num_redundant=num_redundant, replica=replica)
    assert np.array_equal(placed.placement.expert_of, again.placement.expert_of)


def test_contiguous_and_round_robin_deal_experts_as_their_names_say():
    assert contiguous(6, 3).expert_of.tolist() == [0, 1, 2, 3, 4, 5]
    assert round_robin(6, 3).expert_of.tolist() == [0, 3, 1, 4, 2, 5]
    assert contiguous(5, 3).expert_of.tolist() == [0, 1, 2, 3, 4, -1]
    assert contiguous(3, 3, num_local=2).expert_of.tolist() == [0, -1, 1, -1, 2, -1]


def test_contiguous_leaves_a_routing_as_it_is():
    routing = routing_of([[[3, 0], [1, -1]], [[2, 3]]], 4)

    placed = assign(contiguous(4, 2), routing)

    assert [ids.tolist() for ids in placed.physical.topk_idx] == [[[3, 0], [1, -1]], [[2, 3]]]


def test_rows_of_a_replicated_expert_take_turns_that_begin_with_the_source_rank():
    routing = routing_of([[[0], [1], [0], [0]], [[0], [0], [1], [0]]], 2)
    held = np.array([0, 1, 0, -1], np.int32)

    spread = assign(Placement(expert_of=held, num_experts=2, num_ranks=2), routing)
    local = assign(
        Placement(expert_of=held, num_experts=2, num_ranks=2, replica=Replica.local), routing
    )

    # Expert 0 is held by physical experts 0, on rank 0, and 2, on rank 1.
    assert [ids.ravel().tolist() for ids in spread.physical.topk_idx] == [
        [0, 1, 2, 0],
        [2, 0, 1, 2],
    ]
    assert [ids.ravel().tolist() for ids in local.physical.topk_idx] == [[0, 1, 0, 0], [2, 2, 1, 2]]


def test_balanced_replicates_the_fullest_experts_and_packs_the_fullest_first():
    # Rows of experts 0..3: 12, 3, 2, 1.
    tokens = [[0]] * 12 + [[1]] * 3 + [[2]] * 2 + [[3]]
    routing = routing_of([tokens[::2], tokens[1::2]], 4)

    placed = balanced(routing, num_redundant=2, replica=Replica.spread)

    # 12 = 6 + 6, as many as ranks and no more, and 3 = 1.5 + 1.5. Packed: 6 | 6, 2 on the first of
    # equals, 1.5 and 1.5 on the other, which is still the emptier one, and 1 where there is room.
    assert placed.placement.expert_of.tolist() == [0, 2, 3, 0, 1, 1]
    assert fullest_rank(placed) == 9
    assert imbalance(placed.physical, 2).rank_max_over_mean == 1.0


def test_one_expert_that_takes_everything_is_spread_over_all_ranks():
    routing = routing_of([[[0]] * 8] * 4, 4)

    placed = balanced(routing, num_redundant=4, replica=Replica.spread)

    assert imbalance(assign(contiguous(4, 4), routing).physical, 4).rank_max_over_mean == 4.0
    assert imbalance(placed.physical, 4).rank_max_over_mean == 1.0


def test_balanced_falls_back_to_blocks_where_packing_is_less_even():
    # Four rows each. Packing gives replicas of experts 0 and 1 to both ranks, half the rows each;
    # but all of these rows come from rank 0, stay there, and meet expert 2's.
    routing = routing_of([[[0]] * 4 + [[1]] * 4, [[2]] * 4 + [[3]] * 4], 4)

    placed = balanced(routing, num_redundant=2, replica=Replica.local)

    assert placed.placement.expert_of.tolist() == [0, 1, -1, 2, 3, -1]
    assert fullest_rank(placed) == 8
    packed = Placement(
        expert_of=np.array([0, 1, 2, 0, 1, 3], np.int32),
        num_experts=4,
        num_ranks=2,
        replica=Replica.local,
    )
    assert fullest_rank(assign(packed, routing)) == 12


def test_an_expert_gets_no_more_replicas_than_there_are_ranks():
    routing = routing_of([[[0], [1]]] * 2, 2)

    placed = balanced(routing, num_redundant=4, replica=Replica.spread)

    assert placed.placement.expert_of.tolist() == [0, 1, -1, 0, 1, -1]


SETTINGS = {
    "contiguous": placements.ContiguousPlacement(),
    "round_robin": placements.RoundRobinPlacement(),
    "balanced": placements.BalancedPlacement(num_redundant=4),
    "balanced local": placements.BalancedPlacement(num_redundant=8, replica=Replica.local),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_choose_the_placement_of_their_name(name):
    rng = np.random.default_rng(0)
    ids = [np.argsort(rng.random((30, 8)), axis=1)[:, :2] for _ in range(4)]
    routing = routing_of(ids, 8)

    placed = place(SETTINGS[name], routing)

    made = {
        "contiguous": lambda: assign(contiguous(8, 4), routing),
        "round_robin": lambda: assign(round_robin(8, 4), routing),
        "balanced": lambda: balanced(routing, num_redundant=4, replica=Replica.spread),
        "balanced local": lambda: balanced(routing, num_redundant=8, replica=Replica.local),
    }[name]()
    assert placed.placement.expert_of.tolist() == made.placement.expert_of.tolist()
    for found, wanted in zip(placed.physical.topk_idx, made.physical.topk_idx, strict=True):
        assert np.array_equal(found, wanted)
