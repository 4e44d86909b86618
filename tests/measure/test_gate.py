"""The correctness gate: what it lets pass, what it refuses and what it says."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tilepipe.measure.gate import (
    BF16_POISON,
    TOLERANCES,
    activation_deviation,
    compare_close,
    compare_exact,
    poison,
)

NAMED = {"contender": "fused", "stage": "before"}
DTYPES = [np.uint16, np.int16, np.int32, np.int64, np.uint32, np.float32]


def round_to_bf16(values):
    """Nearest even, by bits; only for finite values."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return rounded.astype(np.uint32).view(np.float32)


def bf16_matrix(generator, rows, columns):
    return round_to_bf16(generator.standard_normal((rows, columns)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_left_in_an_output_fails_the_exact_comparison(dtype):
    got = np.zeros((3, 4), dtype)
    poison(got)
    want = np.zeros((3, 4), dtype)
    got[:2] = want[:2]

    verdict = compare_exact(got, want, **NAMED)

    assert (verdict.passed, verdict.num_values, verdict.num_wrong) == (False, 12, 4)
    assert "the first at [2, 0]" in verdict.detail
    assert "never written" in verdict.detail


def test_bf16_poison_is_a_nan():
    array = np.zeros(1, np.uint16)
    poison(array)

    as_float = (array.astype(np.uint32) << 16).view(np.float32)

    assert array[0] == BF16_POISON == 0x7FC1
    assert np.isnan(as_float[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_oracle_that_holds_poison_is_our_own_fault(dtype):
    want = np.zeros(2, dtype)
    poison(want)

    with pytest.raises(AssertionError, match="the oracle holds"):
        compare_exact(want.copy(), want, **NAMED)


@given(
    hnp.arrays(np.uint16, hnp.array_shapes(max_dims=3, min_side=0), elements=st.integers(0, 9)),
    st.data(),
)
def test_exact_comparison_counts_the_values_that_differ(want, data):
    got = data.draw(hnp.arrays(np.uint16, want.shape, elements=st.integers(0, 9)))

    verdict = compare_exact(got, want, **NAMED)

    differences = np.abs(got.astype(int) - want.astype(int))
    assert verdict.num_wrong == np.count_nonzero(differences)
    assert verdict.passed == (verdict.num_wrong == 0) == (verdict.detail == "")
    assert verdict.max_error == differences.max(initial=0)
    assert verdict.num_values == want.size


def test_exact_comparison_of_floats_looks_at_bits():
    verdict = compare_exact(np.array([0.0, 1.0], "f4"), np.array([-0.0, 1.0], "f4"), **NAMED)

    assert (verdict.passed, verdict.num_wrong) == (False, 1)


def test_extremes_of_an_integer_type_differ_by_its_whole_span():
    verdict = compare_exact(
        np.array([2**63 - 1], np.int64), np.array([-(2**63) + 1], np.int64), **NAMED
    )

    assert verdict.max_error == float(2**64 - 2)


def test_the_first_difference_is_told_in_words():
    verdict = compare_exact(
        np.array([[1, 2], [3, 0x3F80]], np.uint16), np.array([[1, 2], [4, 5]], np.uint16), **NAMED
    )

    assert verdict.detail == ("2 of 4 values differ, the first at [1, 0]: got 0x0003, want 0x0004")


def test_rows_too_many_are_a_wrong_result():
    exact = compare_exact(np.zeros((3, 2), np.uint16), np.zeros((2, 2), np.uint16), **NAMED)
    close = compare_close(
        np.zeros((0, 2), np.float32),
        np.zeros((2, 2), np.float32),
        TOLERANCES["bf16"],
        num_terms=1,
        abs_sum=0.0,
        **NAMED,
    )

    assert (exact.passed, exact.detail) == (False, "got shape (3, 2), want (2, 2)")
    assert (close.passed, close.detail) == (False, "got shape (0, 2), want (2, 2)")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_close_comparison_refuses_what_is_no_number_whatever_the_bound(value):
    want = np.ones(5, np.float32)
    got = want.copy()
    got[3] = value

    verdict = compare_close(got, want, TOLERANCES["bf16"], num_terms=4, abs_sum=1e30, **NAMED)

    assert (verdict.passed, verdict.num_wrong) == (False, 1)
    assert math.isinf(verdict.max_error)


@given(st.integers(0, 2**32), st.sampled_from([1, 16, 128, 2880]))
def test_sums_in_any_order_rounded_to_bf16_pass(seed, num_terms):
    generator = np.random.Generator(np.random.PCG64(seed))
    a = bf16_matrix(generator, 4, num_terms)
    b = bf16_matrix(generator, num_terms, 8)
    backwards = sum(
        (np.outer(a[:, k], b[k]) for k in reversed(range(num_terms))), np.zeros((4, 8), np.float32)
    )

    verdict = compare_close(
        round_to_bf16(backwards),
        a @ b,
        TOLERANCES["bf16"],
        num_terms=num_terms,
        abs_sum=np.abs(a) @ np.abs(b),
        **NAMED,
    )

    assert verdict.passed, verdict.detail


@given(st.integers(0, 2**32), st.integers(0, 127))
def test_a_product_left_out_or_taken_twice_is_refused(seed, dropped):
    generator = np.random.Generator(np.random.PCG64(seed))
    # Values of either sign, none near 0: each product is at least a hundredth of the sum of all.
    a = bf16_matrix(generator, 1, 128) % 1 + 1
    b = round_to_bf16(np.sign(generator.random((128, 1)) - 0.5)).astype(np.float32)
    want = a @ b
    got = want - a[:, dropped : dropped + 1] * b[dropped]

    verdict = compare_close(
        round_to_bf16(got),
        want,
        TOLERANCES["bf16"],
        num_terms=128,
        abs_sum=np.abs(a) @ np.abs(b),
        **NAMED,
    )

    assert not verdict.passed


def test_a_sum_that_cancels_is_judged_by_what_was_added_up():
    # 2^24 + 1 is 2^24 in FP32: the order decides whether the ones survive.
    a = np.array([[2.0**12, 1.0, 1.0, -(2.0**12)]], np.float32)
    b = np.array([[2.0**12], [1.0], [1.0], [2.0**12]], np.float32)
    verdicts = [
        compare_close(
            np.array([[got]], np.float32),
            np.array([[2.0]], np.float32),
            TOLERANCES["bf16"],
            num_terms=4,
            abs_sum=np.abs(a) @ np.abs(b),
            **NAMED,
        )
        for got in (0.0, 2.0, 18.0, 18.2)
    ]

    # The bound is 4 x 2^-23 x (2^25 + 2) = 16, and 2^-8 of 18 for the rounding.
    assert [verdict.passed for verdict in verdicts] == [True, True, True, False]


def test_integers_are_poisoned_with_the_value_that_no_row_index_has():
    signed, unsigned = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    poison(signed)
    poison(unsigned)

    assert (signed[0], unsigned[0]) == (-(2**31), 2**32 - 1)


def test_nothing_to_compare_passes_and_says_how_many_values_that_was():
    verdict = compare_exact(np.zeros((0, 8), np.uint16), np.zeros((0, 8), np.uint16), **NAMED)

    assert (verdict.passed, verdict.num_values, verdict.max_error) == (True, 0, 0.0)


@pytest.mark.parametrize("num_roundings", [1, 4])
def test_roundings_between_two_products_stay_within_their_deviation_and_near_it(num_roundings):
    generator = np.random.default_rng(num_roundings)
    gate, up = generator.standard_normal((2, 64, 512), dtype=np.float32)
    second = bf16_matrix(generator, 96, 512)
    silu = gate / (1 + np.exp(-gate))
    exact = (silu * up) @ second.T
    if num_roundings == 4:
        gate, up = round_to_bf16(gate), round_to_bf16(up)
        silu = round_to_bf16(gate / (1 + np.exp(-gate)))

    off = np.abs(round_to_bf16(silu * up) @ second.T - exact)

    size = np.linalg.norm(gate * up, axis=1)[:, None] * np.abs(second).max(axis=1)
    worst = float((off / (activation_deviation(num_roundings) * size)).max())
    assert 0.02 < worst < 0.5
    # Of a value the layer's tolerance is a few percent, not a multiple.
    assert activation_deviation(num_roundings) * np.median(size) < np.sqrt(np.mean(exact**2))
