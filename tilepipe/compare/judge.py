"""Whether one series of times is slower than another: a ratio, its interval, a word.

Knows nothing of points, files or what was timed.

The figure is the ratio B/A of medians. Its 95 % interval joins the two medians' intervals on the
log scale by the square root of their squared reaches (MOVER), so that it needs no assumption on
the distribution, no random numbers, and swapping A and B or scaling both changes nothing but signs.
Each median's interval is that of order statistics, widened by what iterations tell of each other:
with tau the sum of autocorrelations of "above the median", n iterations count as n / tau. A drift
inside a run thus widens its interval instead of passing for a difference. What varies from run to
run no iteration of one run can tell: from three rounds a side the interval is Student's, over the
rounds' log ratios.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import exp, hypot, log, log1p, sqrt
from statistics import fmean, stdev

import numpy as np
from numpy.typing import NDArray

from tilepipe.measure.stats import MIN_VALUES_FOR_INTERVAL, median_interval

__all__ = [
    "MIN_ROUNDS",
    "Ratio",
    "Verdict",
    "dependence",
    "judge",
    "over_rounds",
    "ratio",
    "ratio_over_rounds",
]

MIN_ROUNDS = 3
# Two-sided 95 % points of Student's t with 2 to 30 degrees of freedom; more take the last.
_STUDENT = (
    *(4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145),
    *(2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052),
    *(2.048, 2.045, 2.042),
)


class Verdict(Enum):
    """What the interval of B/A says of B, given the tolerance."""

    SAME = "SAME"  # all of the interval lies within the tolerance
    FASTER = "FASTER"  # all of it lies below
    SLOWER = "SLOWER"  # all of it lies above
    AMBIGUOUS = "AMBIGUOUS"  # it straddles an end, or there is none


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """B/A as logarithms; low and high are None where `reason` says why there is no interval."""

    method: str  # same_samples, order95, rounds95, none
    log_value: float | None
    log_low: float | None = None
    log_high: float | None = None
    reason: str = ""

    @property
    def value(self) -> float | None:
        """B/A of medians; over rounds the geometric mean of their ratios."""
        return _exp(self.log_value)

    @property
    def low(self) -> float | None:
        """Lower end of the 95 % interval."""
        return _exp(self.log_low)

    @property
    def high(self) -> float | None:
        """Upper end of the 95 % interval."""
        return _exp(self.log_high)


@dataclass(frozen=True, kw_only=True)
class _Middle:
    """Logarithm of a median and of two values that enclose it."""

    value: float
    low: float
    high: float


def judge(found: Ratio, *, tolerance: float) -> Verdict:
    """The verdict; B within a factor of 1 + tolerance of A, either way, is the same."""
    if found.log_low is None or found.log_high is None:
        return Verdict.AMBIGUOUS
    band = log1p(tolerance)
    if found.log_low > band:
        return Verdict.SLOWER
    if found.log_high < -band:
        return Verdict.FASTER
    inside = -band <= found.log_low and found.log_high <= band
    return Verdict.SAME if inside else Verdict.AMBIGUOUS


def ratio(
    a_ns: NDArray[np.int64],  # (num_iters of A,), in the order they were taken
    b_ns: NDArray[np.int64],  # (num_iters of B,)
) -> Ratio:
    """Ratio of the medians of two runs, with its interval where the iterations give one."""
    if min(a_ns.min(), b_ns.min()) <= 0:
        return Ratio(method="none", log_value=None, reason="a time of 0 ns has no ratio")
    log_value = _log_median(b_ns) - _log_median(a_ns)
    if np.array_equal(a_ns, b_ns):
        return Ratio(method="same_samples", log_value=0.0, log_low=0.0, log_high=0.0)
    few = [
        f"{side} has {len(series)}"
        for side, series in (("A", a_ns), ("B", b_ns))
        if len(series) < MIN_VALUES_FOR_INTERVAL
    ]
    if few:
        reason = f"an interval needs {MIN_VALUES_FOR_INTERVAL} iterations, {' and '.join(few)}"
        return Ratio(method="none", log_value=log_value, reason=reason)
    a, b = _middle(a_ns), _middle(b_ns)
    if a is None or b is None:
        side = "A" if a is None else "B"
        reason = f"{side} drifts: its iterations tell too much of each other for an interval"
        return Ratio(method="none", log_value=log_value, reason=reason)
    return Ratio(
        method="order95",
        log_value=log_value,
        log_low=log_value - hypot(b.value - b.low, a.high - a.value),
        log_high=log_value + hypot(b.high - b.value, a.value - a.low),
    )


def ratio_over_rounds(rounds: Sequence[Ratio]) -> Ratio:
    """Of at least MIN_ROUNDS pairs of runs: what differs from run to run is in the interval."""
    logs = [found.log_value for found in rounds if found.log_value is not None]
    if len(logs) < len(rounds):
        return Ratio(method="none", log_value=None, reason="a time of 0 ns has no ratio")
    assert len(logs) >= MIN_ROUNDS
    if all(found.method == "same_samples" for found in rounds):
        return Ratio(method="same_samples", log_value=0.0, log_low=0.0, log_high=0.0)
    middle, reach = over_rounds(logs)
    return Ratio(
        method="rounds95", log_value=middle, log_low=middle - reach, log_high=middle + reach
    )


def over_rounds(values: Sequence[float]) -> tuple[float, float]:
    """Mean of at least MIN_ROUNDS values, and the reach of its 95 % interval to either side."""
    place = min(len(values) - MIN_ROUNDS, len(_STUDENT) - 1)
    return fmean(values), _STUDENT[place] * stdev(values) / sqrt(len(values))


def dependence(values: NDArray[np.int64]) -> float:
    """How many iterations tell as much as one that is independent; 1 where all are, or drawn so.

    Sum of the autocorrelations of the sign about the median, over the initial positive sequence
    of pairs of lags (Geyer): below it is noise.
    """
    signs = np.sign(values - np.median(values))
    signs -= signs.mean()
    total = float(signs @ signs)
    if total == 0:
        return 1.0
    num_values = len(signs)
    at_lag = [float(signs[k:] @ signs[: num_values - k]) / total for k in range(num_values)]
    tau = -1.0
    for even, odd in zip(at_lag[::2], at_lag[1::2], strict=False):
        if even + odd <= 0:
            break
        tau += 2 * (even + odd)
    return max(1.0, tau)


def _middle(values: NDArray[np.int64]) -> _Middle | None:
    """Median with its interval, widened by dependence; None where it leaves the values seen."""
    num_values = len(values)
    centre = (num_values + 1) / 2
    # Of the numbers 1 to n the interval's lower end is the place it is found at.
    place = median_interval(np.arange(1, num_values + 1)).low
    # As much closer to the ends as a median of n / tau values is less certain.
    place = int(centre - (centre - place) * sqrt(dependence(values)) + 1e-9)
    if place < 1:
        return None
    ordered = np.sort(values)
    return _Middle(
        value=_log_median(values),
        low=log(ordered[place - 1]),
        high=log(ordered[num_values - place]),
    )


def _log_median(values: NDArray[np.int64]) -> float:
    return log(np.median(values))


def _exp(value: float | None) -> float | None:
    return None if value is None else exp(value)
