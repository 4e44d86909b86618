"""The oracle against cases counted by hand, and against itself: what goes out comes back."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepipe.reference import moe


def f32(values):
    return np.array(values, np.float32)


def i32(values):
    return np.array(values, np.int32)


def test_dispatch_orders_rows_by_rank_then_token():
    x = [f32([[0], [1]]), f32([[2], [3], [4]])]  # value counts tokens over both ranks
    topk_idx = [i32([[0, 1], [1, -1]]), i32([[1, 0], [-1, -1], [0, 1]])]

    rows = moe.dispatch(x, topk_idx, num_experts=3)

    assert [r[:, 0].tolist() for r in rows] == [[0, 2, 4], [0, 1, 2, 4], []]
    assert [r.shape for r in rows] == [(3, 1), (4, 1), (0, 1)]


def test_dispatch_moves_rows_bit_by_bit_whatever_their_type():
    x = [np.array([[0x7FC1, 0x8000], [0xFFFF, 1]], np.uint16)]

    (rows,) = moe.dispatch(x, [i32([[0], [0]])], num_experts=1)

    assert rows.dtype == np.uint16
    assert rows.tolist() == x[0].tolist()


@pytest.mark.parametrize("bad", [-2, 3])
def test_dispatch_refuses_an_id_out_of_range_with_one_sentence(bad):
    low, high = min(bad, 0), max(bad, 2)
    sentence = f"topk_idx spans {low}..{high}, but num_experts=3: allowed is -1..2"

    with pytest.raises(ValueError, match=re.escape(sentence) + "$"):
        moe.dispatch([f32([[1], [2]])], [i32([[0, bad], [2, 1]])], num_experts=3)


def test_dispatch_of_a_rank_without_tokens_adds_nothing():
    x = [np.zeros((0, 1), np.float32), f32([[7]])]

    rows = moe.dispatch(x, [np.zeros((0, 2), np.int32), i32([[1, -1]])], num_experts=2)

    assert [r[:, 0].tolist() for r in rows] == [[], [7]]


def test_grouped_gemm_multiplies_each_expert_by_its_own_weight():
    rows = [f32([[1, 2], [3, 4]]), np.zeros((0, 2), np.float32), f32([[5, 6]])]
    weights = [f32([[1, 0], [0, 1], [1, 1]]), f32([[9, 9]] * 3), f32([[2, 0], [0, 0.5], [-1, 1]])]

    out = moe.grouped_gemm(rows, weights)

    assert [r.tolist() for r in out] == [[[1, 2, 3], [3, 4, 7]], [], [[10, 3, 1]]]
    assert {r.dtype for r in out} == {np.dtype(np.float32)}


def test_combine_sums_weighted_slots_by_hand():
    rows = f32([[[1, 2], [10, 20]], [[3, 4], [30, 40]]])
    topk_weights = f32([[0.5, 0.25], [2, -1]])

    out = moe.combine(rows, i32([[0, 1], [1, 0]]), topk_weights)

    assert out.tolist() == [[3, 6], [-24, -32]]
    assert out.dtype == np.float32


@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_combine_skips_a_dropped_slot_whatever_its_row_and_weight_hold(rubbish):
    rows = f32([[[1, 2], [rubbish] * 2], [[rubbish] * 2] * 2, [[rubbish] * 2, [3, 4]]])
    topk_weights = f32([[0.5, rubbish], [0, 0], [0, 2]])

    out = moe.combine(rows, i32([[4, -1], [-1, -1], [-1, 0]]), topk_weights)

    assert out.tolist() == [[0.5, 1], [0, 0], [6, 8]]


def test_combine_adds_in_slot_order_in_32_bits():
    # 1 is lost beside 1e8, but not after 1e8 - 1e8: each order of slots has a sum of its own.
    big, ids, ones = 1e8, i32([[0, 1, 2]]), f32([[1, 1, 1]])

    sums = [
        moe.combine(f32([[[value] for value in values]]), ids, ones)[0, 0]
        for values in ([big, 1, -big], [big, -big, 1], [1, big, -big])
    ]

    assert sums == [0, 1, 0]


def test_combine_order_is_that_of_slots_not_of_experts():
    # By expert number the second token would add 1 to 1e8 and lose it.
    rows, ones = f32([[[1e8], [-1e8], [1]]] * 2), f32([[1, 1, 1]] * 2)

    sums = moe.combine(rows, i32([[0, 1, 2], [0, 2, 1]]), ones)

    assert sums.tolist() == [[1], [1]]


def test_combine_rounds_the_product_before_it_adds():
    # (1 + e)(1 - e) = 1 - e**2 rounds to 1; a fused multiply-add would leave -e**2 after 1 - 1.
    eps = 2.0**-13
    rows, weights = f32([[[-1], [1 + eps]]]), f32([[1, 1 - eps]])

    out = moe.combine(rows, i32([[0, 1]]), weights)

    assert out[0, 0] == 0


def test_combine_expert_rows_by_hand():
    # In dispatch's order expert 0 has token 1 of rank 0 and token 0 of rank 1, expert 1 has tokens
    # 0 and 1 of rank 0.
    rows = [f32([[1], [2]]), f32([[10], [20]])]
    topk_idx = [i32([[1, -1], [1, 0]]), i32([[-1, 0], [-1, -1]])]
    topk_weights = [f32([[2, 5], [3, 4]]), f32([[5, 0.5], [5, 5]])]

    home = moe.combine_expert_rows(rows, topk_idx, topk_weights)

    assert [h[:, 0].tolist() for h in home] == [[20, 64], [1, 0]]


@st.composite
def routings(draw):
    """Ragged ranks with distinct experts a token and dropped slots."""
    num_experts = draw(st.integers(1, 9))
    num_topk = draw(st.integers(1, min(num_experts, 4)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    topk_idx = []
    for num_tokens in draw(st.lists(st.integers(0, 20), min_size=1, max_size=4)):
        ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :num_topk]
        ids[rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.4, 1.0]))] = -1
        topk_idx.append(ids.astype(np.int32))
    return topk_idx, num_experts, rng


@given(routing=routings())
@settings(max_examples=150, deadline=None)
def test_combining_what_was_dispatched_weighs_each_token_by_its_valid_slots(routing):
    # Small integers: exact in float32, so the order of the sum cannot hide an error.
    topk_idx, num_experts, rng = routing
    x = [rng.integers(-50, 50, (len(ids), 3)).astype(np.float32) for ids in topk_idx]
    weights = [rng.integers(-8, 8, ids.shape).astype(np.float32) for ids in topk_idx]

    rows = moe.dispatch(x, topk_idx, num_experts=num_experts)
    home = moe.combine_expert_rows(rows, topk_idx, weights)

    for out, inputs, ids, weight in zip(home, x, topk_idx, weights, strict=True):
        total = np.where(ids >= 0, weight, 0).sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(out, total * inputs)


@given(routing=routings())
@settings(max_examples=100, deadline=None)
def test_a_layer_is_the_weighted_sum_of_each_expert_applied_to_the_token(routing):
    topk_idx, num_experts, rng = routing
    x = [rng.integers(-4, 5, (len(ids), 3)).astype(np.float32) for ids in topk_idx]
    weights = [rng.integers(1, 4, ids.shape).astype(np.float32) for ids in topk_idx]
    experts = [rng.integers(-3, 4, (2, 3)).astype(np.float32) for _ in range(num_experts)]

    rows = moe.grouped_gemm(moe.dispatch(x, topk_idx, num_experts=num_experts), experts)
    home = moe.combine_expert_rows(rows, topk_idx, weights)

    for rank, ids in enumerate(topk_idx):
        for token, slots in enumerate(ids.tolist()):
            want = np.zeros(2)
            for slot, expert in enumerate(slots):
                if expert >= 0:
                    want += weights[rank][token, slot] * (experts[expert] @ x[rank][token])
            assert home[rank][token].tolist() == want.tolist()
