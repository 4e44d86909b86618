"""Payload rows: the same everywhere, different wherever they must be, and exact in bf16."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilepipe.workload import bf16, payload


def rows(launch, rank, token, num_columns=64, slot=0):
    return payload.row_bits(launch, rank, np.asarray(token, np.int64), num_columns, slot=slot)


def test_rows_are_pinned():
    assert rows(1, 0, [0, 1], 4).tolist() == [
        [16378, 15920, 49016, 16358],
        [48512, 16072, 16342, 49038],
    ]
    assert rows(7, 3, [5], 4, slot=2).tolist() == [[48704, 49082, 16176, 49092]]
    assert bf16.from_bits(rows(1, 0, [0], 4)).tolist() == [[1.953125, 0.171875, -0.96875, 1.796875]]


def test_weights_are_pinned():
    assert payload.expert_weights(2, 2, 4).tolist() == [
        [0.34375, -0.859375, -0.6953125, 0.53125],
        [-0.5703125, 0.71875, -0.8828125, -0.4296875],
    ]


@given(
    launch=st.integers(1, 2**31),
    rank=st.integers(0, 7),
    slot=st.integers(0, 15),
    first=st.integers(0, 2**24),
    num_columns=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_a_row_depends_on_its_name_alone(launch, rank, slot, first, num_columns):
    tokens = np.arange(first, first + 5)

    block = rows(launch, rank, tokens, num_columns, slot=slot)

    assert block.shape == (5, num_columns)
    assert block.dtype == np.uint16
    one = rows(launch, rank, [first + 3], num_columns, slot=slot)
    assert block[3].tolist() == one[0].tolist()
    # A wider row begins with the narrower one; rank and slot may come one a row.
    wide = rows(launch, np.full(5, rank), tokens, num_columns + 9, slot=np.full(5, slot))
    assert block.tolist() == wide[:, :num_columns].tolist()


def test_rows_differ_over_launch_rank_slot_and_token():
    names = itertools.product(range(1, 6), range(8), range(4))
    seen = {
        row.tobytes()
        for launch, rank, slot in names
        for row in rows(launch, rank, np.arange(100), 16, slot=slot)
    }

    assert len(seen) == 5 * 8 * 4 * 100


@given(
    word=st.sampled_from(["launch", "rank", "token", "slot"]),
    values=st.lists(st.integers(0, 5000), min_size=2, max_size=2, unique=True),
)
@settings(max_examples=100, deadline=None)
def test_a_change_of_one_word_changes_nearly_every_value(word, values):
    name = {"launch": 3, "rank": 1, "token": 17, "slot": 0}

    one, other = (
        rows(changed["launch"], changed["rank"], [changed["token"]], 512, slot=changed["slot"])
        for changed in ({**name, word: value} for value in values)
    )

    # One value in 256 agrees by chance: 2 of 512 expected, 16 is past ten sigma.
    assert (one == other).sum() <= 16


def test_words_do_not_stand_in_for_one_another():
    swapped = [rows(1, 2, [3], slot=4), rows(2, 1, [3], slot=4), rows(1, 4, [3], slot=2)]
    swapped += [rows(1, 3, [2], slot=4), rows(1, 2, [4], slot=3)]

    assert len({row.tobytes() for row in swapped}) == 5


def test_values_are_the_256_steps_from_minus_2_and_all_occur_alike():
    bits = rows(1, 0, np.arange(1024), 1024)

    values, counts = np.unique(bf16.from_bits(bits), return_counts=True)
    assert values.tolist() == [step / 64 for step in range(-128, 128)]
    # 4096 of each expected, sigma 64.
    assert counts.min() > 4096 - 6 * 64
    assert counts.max() < 4096 + 6 * 64


@pytest.mark.parametrize("axis", [0, 1])
def test_no_row_and_no_column_leans_to_one_side(axis):
    values = bf16.from_bits(rows(2, 5, np.arange(512), 512))

    means = values.mean(axis=axis)

    # Standard deviation 1.155 a value, 0.051 a mean of 512; the middle of the range is -1/128.
    assert abs(values.mean() + 1 / 128) < 0.015
    assert np.abs(means + 1 / 128).max() < 6 * 0.051


def test_neighbours_do_not_go_together():
    values = bf16.from_bits(rows(2, 5, np.arange(512), 512))

    down = np.corrcoef(values[:-1].reshape(-1), values[1:].reshape(-1))[0, 1]
    along = np.corrcoef(values[:, :-1].reshape(-1), values[:, 1:].reshape(-1))[0, 1]

    # Sigma of a correlation over 261 632 pairs is 0.002.
    assert abs(down) < 0.012
    assert abs(along) < 0.012


def test_no_rows_and_no_columns_have_their_shape():
    assert rows(1, 0, []).shape == (0, 64)
    assert rows(1, 0, [1, 2], 0).shape == (2, 0)


@pytest.mark.parametrize("num_k", [1, 3, 64, 2048, 2880, 7168])
def test_expert_weights_are_exact_in_bf16_and_scaled_by_a_power_of_two(num_k):
    weights = payload.expert_weights(5, 16, num_k)

    assert weights.shape == (16, num_k)
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(bf16.from_bits(bf16.to_bits(weights)), weights)
    scale = 2.0 ** -math.floor(math.log2(num_k) / 2)
    bits = rows(payload.WEIGHTS_LAUNCH, 5, np.arange(16), num_k)
    np.testing.assert_array_equal(weights / scale, bf16.from_bits(bits))
    assert 1 / math.sqrt(num_k) <= scale < 2 / math.sqrt(num_k)


def test_experts_have_weights_of_their_own():
    first, second = (payload.expert_weights(expert, 32, 32) for expert in (0, 1))

    assert (first == second).mean() < 0.03


def test_a_product_of_payload_and_weights_stays_near_one():
    x = bf16.from_bits(rows(1, 0, np.arange(64), 2048))
    b = payload.expert_weights(0, 64, 2048)

    out = x @ b.T

    # Each factor has variance 4/3; the scale makes up for all of num_k or half of it.
    assert 1.2 < out.std() < 2.1
    assert np.abs(out).max() < 12
