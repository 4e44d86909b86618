"""How often a comparison is wrong: verdicts on resampled real times, where the truth is known.

    python -m benchmarks.verdicts results/h200_x1

Prints shares of verdicts for B's times scaled by a known factor (drawn one by one, and in blocks
that keep what neighbours tell of each other), how often the interval holds the truth where
iterations depend on each other, and what separate processes say of equal work.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import combinations
from math import hypot, log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.program import run
from tilepipe.compare.judge import Ratio, Verdict, dependence, judge, ratio
from tilepipe.measure.stats import median_interval
from tilepipe.results.reading import read_results
from tilepipe.results.summary import slowest_rank

SEED = 20_261_129
TOLERANCE = 0.01
DRAWS = 100  # pairs drawn a series and factor
BLOCK = 5
FACTORS = (1.0, 1.005, 1.01, 1.015, 1.02, 1.03, 1.05)
SYNTHETIC_PAIRS = 2_000
SYNTHETIC_SPREAD = 0.02  # of one iteration, log-normal

Times = NDArray[np.int64]
Draw = Callable[[Times, np.random.Generator], Times]


def real_series(folder: Path) -> dict[tuple[str, str, str], Times]:
    """(experiment, config_id, contender) -> slowest-rank times of its whole launch or stage."""
    found = {}
    for point in read_results(folder).points:
        if point.is_ok:
            series = slowest_rank(point.outcome.records)
            for contender in sorted({name for name, _ in series}):
                part = next(p for p in ("e2e", "stage", "plan") if (contender, p) in series)
                key = (point.name, point.outcome.point.config_id, contender)
                found[key] = series[contender, part]
    return found


def one_by_one(times: Times, generator: np.random.Generator) -> Times:
    return generator.choice(times, len(times))


def in_blocks(times: Times, generator: np.random.Generator) -> Times:
    starts = generator.integers(0, len(times), -(-len(times) // BLOCK))
    idx = (starts[:, None] + np.arange(BLOCK)).ravel()[: len(times)]
    return times[idx % len(times)]


def shares(verdicts: list[Verdict]) -> str:
    return "  ".join(f"{v.name} {verdicts.count(v) / len(verdicts):7.2%}" for v in Verdict)


def resampled(series: list[Times], draw: Draw) -> Iterator[str]:
    generator = np.random.default_rng(SEED)
    for factor in FACTORS:
        verdicts = []
        for times in series:
            for _ in range(DRAWS):
                a, b = draw(times, generator), draw(times, generator)
                scaled = np.rint(b * factor).astype(np.int64)
                verdicts.append(judge(ratio(a, scaled), tolerance=TOLERANCE))
        yield f"  B = A x {factor:<5}  {shares(verdicts)}"


def autoregressive(share: float, count: int, generator: np.random.Generator) -> Times:
    """Log-normal times about 1 ms of which each keeps `share` of the deviation before it."""
    steps = generator.normal(size=count + 100)
    walk = np.empty_like(steps)
    walk[0] = steps[0]
    for place in range(1, len(steps)):
        walk[place] = share * walk[place - 1] + np.sqrt(1 - share**2) * steps[place]
    return np.rint(1e6 * np.exp(SYNTHETIC_SPREAD * walk[100:])).astype(np.int64)


def unwidened(a_ns: Times, b_ns: Times) -> Ratio:
    """As judged, but as if no iteration told anything of the next."""
    a, b = median_interval(a_ns), median_interval(b_ns)
    value = log(b.value / a.value)
    return Ratio(
        method="order95",
        log_value=value,
        log_low=value - hypot(log(b.value / b.low), log(a.high / a.value)),
        log_high=value + hypot(log(b.high / b.value), log(a.value / a.low)),
    )


def dependent() -> Iterator[str]:
    generator = np.random.default_rng(SEED)
    for count in (30, 100):
        for share in (0.0, 0.5, 0.8):
            held, wrong, none = [0, 0], [0, 0], 0
            for _ in range(SYNTHETIC_PAIRS):
                a, b = (autoregressive(share, count, generator) for _ in range(2))
                for place, found in enumerate((ratio(a, b), unwidened(a, b))):
                    if found.log_low is None or found.log_high is None:
                        none += 1
                        continue
                    held[place] += found.log_low <= 0 <= found.log_high
                    verdict = judge(found, tolerance=TOLERANCE)
                    wrong[place] += verdict in (Verdict.FASTER, Verdict.SLOWER)
            judged = SYNTHETIC_PAIRS - none
            yield (
                f"  {count:3} iterations, share {share}: interval holds 1 in "
                f"{held[0] / judged:.1%} (not widened {held[1] / SYNTHETIC_PAIRS:.1%}), "
                f"wrongly different {wrong[0] / SYNTHETIC_PAIRS:.2%} "
                f"(not widened {wrong[1] / SYNTHETIC_PAIRS:.2%}), no interval "
                f"{none / SYNTHETIC_PAIRS:.1%}"
            )


def processes(folder: Path) -> Iterator[str]:
    """The reduction of combine runs on all SMs whatever its point's CTAs and copy: equal work in
    the processes of all points of as many tokens."""
    alike: dict[int, list[Times]] = {}
    for point in read_results(folder).points:
        if point.is_ok and point.outcome.point.operation == "combine":
            found = slowest_rank(point.outcome.records).get(("reduce", "stage"))
            if found is not None:
                tokens = point.outcome.point.config["workload"]["num_tokens"]
                alike.setdefault(tokens, []).append(found)
    pairs = [ratio(a, b) for each in alike.values() for a, b in combinations(each, 2)]
    if pairs:
        values = [found.value for found in pairs if found.value is not None]
        verdicts = [judge(found, tolerance=TOLERANCE) for found in pairs]
        yield f"  {len(pairs)} pairs, ratios {min(values):.4f}..{max(values):.4f}"
        yield f"  {shares(verdicts)}"


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m benchmarks.verdicts RESULTS_DIR\n")
        return 2
    series = real_series(Path(sys.argv[1]))
    if not series:
        sys.stderr.write(f"{sys.argv[1]}: holds no point with times\n")
        return 2
    times = list(series.values())
    taus = np.percentile([dependence(each) for each in times], [50, 90, 100])
    lines = [
        f"{len(times)} series of {min(map(len, times))} to {max(map(len, times))} iterations, "
        f"tolerance {TOLERANCE:.0%}, {DRAWS} pairs a series; dependence median {taus[0]:.2f}, "
        f"90th percentile {taus[1]:.2f}, largest {taus[2]:.2f}",
        "drawn one by one",
        *resampled(times, one_by_one),
        f"drawn in blocks of {BLOCK}",
        *resampled(times, in_blocks),
        f"made up, spread {SYNTHETIC_SPREAD:.0%}, each keeping a share of the deviation before it",
        *dependent(),
        "one reduction in several processes",
        *processes(Path(sys.argv[1])),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
