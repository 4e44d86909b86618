"""Medians and their 95 % intervals, exact where order statistics allow it.

Knows nothing of ranks, contenders or files; sees plain arrays.

The interval of a median needs no assumption on the distribution: with B ~ Binomial(n, 1/2) the
l-th smallest and l-th largest of n values cover the median with probability 1 - 2 P(B < l).
Below six values even the whole range covers less than 95 %: then the range is given and said so.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MIN_VALUES_FOR_INTERVAL",
    "MedianInterval",
    "RatioInterval",
    "bootstrap_medians",
    "integer_median",
    "median_interval",
    "paired_ratio",
    "resample_idx",
]

MIN_VALUES_FOR_INTERVAL = 6  # 2 x (1/2)^5 > 0.05 >= 2 x (1/2)^6


@dataclass(frozen=True, kw_only=True)
class MedianInterval:
    """A median in the unit of its values, and two of the values that enclose it."""

    value: int
    low: int
    high: int
    coverage: float  # exact probability that low..high holds the true median
    is_range: bool  # fewer than six values: low..high is all there is, covering less than 95 %


@dataclass(frozen=True, kw_only=True)
class RatioInterval:
    """The median of ratios taken pair by pair."""

    value: float
    low: float
    high: float
    num_pairs: int
    is_range: bool


@lru_cache(maxsize=64)
def _enclosing_place(num_values: int) -> tuple[int, float]:
    """Largest 1-based place l whose l-th smallest and largest cover 95 %, and that coverage."""
    if num_values < MIN_VALUES_FOR_INTERVAL:
        return 1, 1 - 2 / 2**num_values
    # Exact integers: at n = 5 000 the terms are past what a float can hold.
    place, tail, ways = 0, 0, 1  # ways = n over place
    while (tail + ways) * 40 <= 2**num_values:
        tail += ways
        ways = ways * (num_values - place) // (place + 1)
        place += 1
    return place, 1 - 2 * (tail / 2**num_values)


def integer_median(values: NDArray[np.int64], axis: int = -1) -> NDArray[np.int64]:
    """Median in integers; of an even count the mean of the middle two, rounded down."""
    num_values = values.shape[axis]
    assert num_values > 0, "a median needs values"
    low, high = (num_values - 1) // 2, num_values // 2
    ordered = np.partition(values, sorted({low, high}), axis=axis)
    below = np.take(ordered, low, axis=axis)
    above = np.take(ordered, high, axis=axis)
    # below + (above - below) // 2 cannot overflow where below + above could.
    return np.asarray(below + (above - below) // 2, dtype=np.int64)


def median_interval(values: NDArray[np.int64]) -> MedianInterval:
    """Median of at least one value with its distribution-free 95 % interval."""
    assert values.ndim == 1
    ordered = np.sort(values)
    place, coverage = _enclosing_place(len(ordered))
    return MedianInterval(
        value=int(integer_median(ordered)),
        low=int(ordered[place - 1]),
        high=int(ordered[len(ordered) - place]),
        coverage=coverage,
        is_range=len(ordered) < MIN_VALUES_FOR_INTERVAL,
    )


def paired_ratio(
    numerator: NDArray[np.int64],  # (num_pairs,), > 0
    denominator: NDArray[np.int64],  # (num_pairs,), > 0
) -> RatioInterval:
    """Median of numerator / denominator of each pair; drift that hits both cancels."""
    assert numerator.shape == denominator.shape
    assert numerator.min() > 0
    assert denominator.min() > 0
    ratios = np.sort(numerator / denominator)
    place, _ = _enclosing_place(len(ratios))
    return RatioInterval(
        value=float(np.median(ratios)),
        low=float(ratios[place - 1]),
        high=float(ratios[len(ratios) - place]),
        num_pairs=len(ratios),
        is_range=len(ratios) < MIN_VALUES_FOR_INTERVAL,
    )


def resample_idx(num_values: int, *, num_resamples: int, seed: int) -> NDArray[np.int64]:
    """(num_resamples, num_values) positions drawn with replacement; equal seeds, equal draws.

    One result serves every series of a pair: that is what keeps resamples paired.
    """
    generator = np.random.Generator(np.random.PCG64(seed))
    return generator.integers(0, num_values, size=(num_resamples, num_values), dtype=np.int64)


def bootstrap_medians(
    values: NDArray[np.int64],  # (num_values,)
    idx: NDArray[np.int64],  # (num_resamples, num_values), from resample_idx
) -> NDArray[np.int64]:  # (num_resamples,)
    """The integer median of each resample."""
    return integer_median(values[idx], axis=1)
