"""A verdict follows from where the interval lies, and the interval from the times alone."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.compare.runs import TIMES
from tilepipe.compare.judge import (
    MIN_ROUNDS,
    Ratio,
    Verdict,
    dependence,
    judge,
    over_rounds,
    ratio,
    ratio_over_rounds,
)
from tilepipe.results.reading import read_results
from tilepipe.results.summary import slowest_rank

PUBLISHED = Path(__file__).resolve().parents[2] / "results" / "h200_x1"
OPPOSITE = {
    Verdict.SAME: Verdict.SAME,
    Verdict.AMBIGUOUS: Verdict.AMBIGUOUS,
    Verdict.FASTER: Verdict.SLOWER,
    Verdict.SLOWER: Verdict.FASTER,
}
STEADY = np.array(TIMES)


def series(low=1, high=10**9):
    return st.lists(st.integers(low, high), min_size=1, max_size=60).map(np.array)


def verdict(a, b, tolerance=0.01):
    return judge(ratio(a, b), tolerance=tolerance)


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (0.995, 1.005, Verdict.SAME),
        (0.9902, 1.0099, Verdict.SAME),
        (1.0, 1.011, Verdict.AMBIGUOUS),
        (0.98, 1.0, Verdict.AMBIGUOUS),
        (0.9, 1.1, Verdict.AMBIGUOUS),
        (1.0101, 1.2, Verdict.SLOWER),
        (0.9, 0.99, Verdict.FASTER),
        # 1 / 1.01 is the other end of the band, not 0.99.
        (0.9, 0.9905, Verdict.AMBIGUOUS),
    ],
)
def test_the_verdict_is_where_the_interval_lies(low, high, want):
    found = Ratio(method="order95", log_value=0.0, log_low=math.log(low), log_high=math.log(high))

    assert judge(found, tolerance=0.01) is want


def test_without_an_interval_nothing_is_claimed():
    assert judge(Ratio(method="none", log_value=1.0), tolerance=0.01) is Verdict.AMBIGUOUS


def test_known_shifts_get_their_verdicts():
    assert verdict(STEADY, STEADY) is Verdict.SAME
    assert verdict(STEADY, STEADY[::-1]) is Verdict.SAME
    assert verdict(STEADY, np.rint(STEADY * 1.03)) is Verdict.SLOWER
    assert verdict(STEADY, np.rint(STEADY * 0.97)) is Verdict.FASTER
    assert verdict(STEADY, np.rint(STEADY * 1.01)) is Verdict.AMBIGUOUS
    assert verdict(STEADY, np.rint(STEADY * 1.03), tolerance=0.05) is Verdict.SAME


def test_the_ratio_is_that_of_the_medians_inside_its_interval():
    found = ratio(STEADY, STEADY * 2)

    assert found.value == pytest.approx(2.0, rel=1e-12)
    assert 1.99 < found.low < 2.0 < found.high < 2.01


def test_one_doubled_sample_makes_nothing_slower():
    for place in range(len(STEADY)):
        spoilt = STEADY.copy()
        spoilt[place] *= 2

        assert verdict(STEADY, spoilt) is Verdict.SAME


@given(a=series(), b=series(), tolerance=st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_swapping_the_sides_inverts_the_verdict(a, b, tolerance):
    there, back = ratio(a, b), ratio(b, a)

    assert OPPOSITE[judge(there, tolerance=tolerance)] is judge(back, tolerance=tolerance)
    if there.log_low is not None:
        assert (back.log_low, back.log_high) == (-there.log_high, -there.log_low)


@given(a=series(high=10**6), b=series(high=10**6), factor=st.integers(2, 1000))
@settings(max_examples=100, deadline=None)
def test_scaling_both_sides_changes_nothing(a, b, factor):
    found, scaled = ratio(a, b), ratio(a * factor, b * factor)

    assert scaled.method == found.method
    assert scaled.log_value == pytest.approx(found.log_value, abs=1e-9)
    if found.log_low is not None:
        assert scaled.log_low == pytest.approx(found.log_low, abs=1e-9)
        assert scaled.log_high == pytest.approx(found.log_high, abs=1e-9)
        band = math.log1p(0.01)
        # Within a rounding error of an end of the band either word is right.
        assume(min(abs(abs(end) - band) for end in (found.log_low, found.log_high)) > 1e-9)
        assert judge(scaled, tolerance=0.01) is judge(found, tolerance=0.01)


@given(a=series(), b=series())
@settings(max_examples=100, deadline=None)
def test_the_value_lies_in_its_interval(a, b):
    found = ratio(a, b)

    if found.log_low is not None:
        assert found.log_low <= found.log_value <= found.log_high


def test_few_iterations_give_a_ratio_and_no_interval():
    found = ratio(STEADY[:3], STEADY[3:8])

    assert found.value is not None
    assert (found.low, found.reason) == (
        None,
        "an interval needs 6 iterations, A has 3 and B has 5",
    )


def test_a_time_of_nothing_has_no_ratio():
    found = ratio(np.array([0, *TIMES]), STEADY)

    assert (found.value, found.reason) == (None, "a time of 0 ns has no ratio")
    assert judge(found, tolerance=0.01) is Verdict.AMBIGUOUS


def test_a_drift_widens_the_interval_until_there_is_none():
    shuffled = np.random.default_rng(1).permutation(np.arange(1_000_000, 1_040_000, 1_000))
    drifting = np.sort(shuffled)

    calm, widened = ratio(STEADY, shuffled), ratio(STEADY, drifting)

    assert dependence(shuffled) < 2 < 10 < dependence(drifting)
    assert calm.high - calm.low < 0.02
    assert widened.low is None
    assert widened.reason == "B drifts: its iterations tell too much of each other for an interval"


def test_iterations_that_alternate_are_no_more_than_independent():
    assert dependence(np.array([1, 2] * 10)) == 1.0
    assert dependence(np.array([5] * 10)) == 1.0


def test_the_interval_holds_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(7)
    held = 0
    for _ in range(1_000):
        a, b = (1e6 * np.exp(0.02 * generator.normal(size=30)) for _ in range(2))
        found = ratio(a.astype(np.int64), b.astype(np.int64))
        held += found.log_low <= 0 <= found.log_high

    assert held / 1_000 >= 0.95


def rounds(*shifts):
    return [Ratio(method="order95", log_value=math.log(shift)) for shift in shifts]


def test_over_rounds_what_varies_between_runs_counts():
    steady = ratio_over_rounds(rounds(1.05, 1.051, 1.049))
    moving = ratio_over_rounds(rounds(1.05, 1.20, 0.95))

    assert judge(steady, tolerance=0.01) is Verdict.SLOWER
    assert judge(moving, tolerance=0.01) is Verdict.AMBIGUOUS
    assert steady.value == pytest.approx(1.05, rel=1e-4)
    assert moving.method == "rounds95"


def test_rounds_of_the_same_samples_are_the_same():
    same = [ratio(STEADY, STEADY)] * MIN_ROUNDS

    assert judge(ratio_over_rounds(same), tolerance=0.0) is Verdict.SAME


def test_a_round_without_ratio_leaves_none():
    found = ratio_over_rounds([*rounds(1.0, 1.0), Ratio(method="none", log_value=None)])

    assert (found.value, found.low) == (None, None)


@pytest.mark.parametrize("num_rounds", [3, 4, 7, 20, 31])
def test_the_interval_over_rounds_is_students(num_rounds):
    values = np.arange(num_rounds, dtype=float)
    middle, reach = over_rounds(list(values))
    freedom = num_rounds - 1

    point = reach / (values.std(ddof=1) / math.sqrt(num_rounds))

    assert middle == values.mean()
    # Student's density, integrated to that point.
    x = np.linspace(0, point, 20_001)
    scale = math.gamma((freedom + 1) / 2) / math.gamma(freedom / 2) / math.sqrt(freedom * math.pi)
    inside = 2 * np.trapezoid(scale * (1 + x**2 / freedom) ** (-(freedom + 1) / 2), x)
    assert inside == pytest.approx(0.95, abs=2e-4)


def series_of(points):
    found = []
    for point in points:
        series = slowest_rank(point.outcome.records)
        for contender in {name for name, _ in series}:
            part = next(p for p in ("e2e", "stage") if (contender, p) in series)
            found.append(series[contender, part])
    return found


@pytest.fixture(scope="module")
def published():
    """Every series of a published run, most of 30 iterations."""
    return series_of(read_results(PUBLISHED).points)


@pytest.fixture(scope="module")
def unthrottled():
    """Those whose clock nothing lowered."""
    return series_of(
        point
        for point in read_results(PUBLISHED).points
        if not any(record.clocks.throttled for record in point.outcome.records if record.clocks)
    )


def test_real_times_against_themselves_are_the_same(published):
    assert {verdict(times, times) for times in published} == {Verdict.SAME}


def test_real_times_that_take_three_percent_longer_are_slower(published, unthrottled):
    found, steady = (
        [verdict(times, np.rint(times * 1.03).astype(np.int64)) for times in part]
        for part in (published, unthrottled)
    )

    # A series that drifts, as a clock does that is lowered, may decide nothing, and says so.
    assert set(found) <= {Verdict.SLOWER, Verdict.AMBIGUOUS}
    assert steady.count(Verdict.SLOWER) >= 0.98 * len(steady)


def test_real_times_of_which_one_doubled_are_never_slower(published):
    for times in published:
        for place in range(0, len(times), 7):
            spoilt = times.copy()
            spoilt[place] *= 2

            assert verdict(times, spoilt) in (Verdict.SAME, Verdict.AMBIGUOUS)
