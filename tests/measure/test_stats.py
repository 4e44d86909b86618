"""Medians, their intervals and paired resampling."""

from fractions import Fraction
from itertools import product
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.measure.stats import (
    bootstrap_medians,
    integer_median,
    median_interval,
    paired_ratio,
    resample_idx,
)

# Times are never negative, but differences of times are; both up to where int64 ends.
TIMES = st.one_of(
    st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=60),
    st.lists(st.integers(-(2**62), 2**62 - 1), min_size=1, max_size=60),
)


@given(TIMES)
def test_integer_median_is_the_middle_rounded_down(values):
    ordered = sorted(values)
    middle = ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]

    assert int(integer_median(np.array(values))) == middle // 2


@given(TIMES, st.randoms())
def test_median_interval_encloses_the_median_and_forgets_the_order(values, random):
    shuffled = random.sample(values, len(values))

    found = median_interval(np.array(values))

    assert found == median_interval(np.array(shuffled))
    assert found.low <= found.value <= found.high
    assert {found.low, found.high} <= set(values)
    assert found.is_range == (len(values) < 6)


@pytest.mark.parametrize(
    ("num_values", "low_place"),
    # Places of the sign test at 5 %, two-sided, as its tables list them.
    [(6, 1), (8, 1), (9, 2), (10, 2), (20, 6), (30, 10), (50, 18), (100, 40)],
)
def test_median_interval_takes_the_places_of_the_published_tables(num_values, low_place):
    values = np.arange(1, num_values + 1) * 10

    found = median_interval(values)

    assert (found.low, found.high) == (10 * low_place, 10 * (num_values + 1 - low_place))
    missed = Fraction(2 * sum(comb(num_values, k) for k in range(low_place)), 2**num_values)
    assert found.coverage == pytest.approx(float(1 - missed), abs=1e-12)
    assert found.coverage >= 0.95


@pytest.mark.parametrize("num_values", [1, 2, 5])
def test_median_interval_of_few_values_is_their_range_and_says_so(num_values):
    found = median_interval(np.arange(num_values) + 7)

    assert (found.low, found.high, found.is_range) == (7, 6 + num_values, True)
    assert found.coverage == 1 - 2 * 0.5**num_values


def test_coverage_of_the_median_interval_is_what_counting_all_outcomes_gives():
    # Each of 8 values is above or below the true median 0: all 256 cases are equally likely.
    covered = [
        (found := median_interval(np.array(signs) * np.arange(1, 9))).low <= 0 <= found.high
        for signs in product((-1, 1), repeat=8)
    ]

    assert sum(covered) / len(covered) == median_interval(np.arange(8)).coverage


def test_places_stay_exact_where_floats_run_out():
    found = median_interval(np.arange(5000))

    # Normal approximation: 2500 -+ 1.96 x sqrt(5000) / 2 = 69.3 places either side.
    assert abs(found.low - 2430) <= 1
    assert found.low + found.high == 4999
    assert 0.95 <= found.coverage < 0.952


def test_paired_ratio_is_blind_to_drift_that_hits_both():
    drift = np.linspace(1, 9, 31)
    denominator = (drift * 1_000_000).astype(np.int64)

    found = paired_ratio(3 * denominator, denominator)

    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)
    assert (found.num_pairs, found.is_range) == (31, False)


def test_paired_ratio_takes_the_median_of_ratios_not_the_ratio_of_medians():
    found = paired_ratio(np.array([1, 10, 9]), np.array([1, 2, 3]))

    assert (found.value, found.low, found.high, found.is_range) == (3.0, 1.0, 5.0, True)


@given(st.integers(1, 40), st.integers(0, 2**32))
def test_equal_seeds_give_equal_resamples(num_values, seed):
    first = resample_idx(num_values, num_resamples=7, seed=seed)

    assert np.array_equal(first, resample_idx(num_values, num_resamples=7, seed=seed))
    assert first.shape == (7, num_values)
    assert first.min() >= 0
    assert first.max() < num_values


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=30))
def test_bootstrap_medians_are_the_median_of_each_resample(values):
    series = np.array(values)
    idx = resample_idx(len(values), num_resamples=20, seed=3)

    medians = bootstrap_medians(series, idx)

    assert medians.tolist() == [int(integer_median(series[row])) for row in idx]
