"""Reduce samples to table numbers. Never sees a file.

The time of an iteration is that of its slowest rank; everything else is taken over iterations.
A point gives one row per contender, of its e2e window or, for a stage run alone, that one.
A point that is not ok gives one row without contender and times.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.measure.stats import integer_median, median_interval
from tilepipe.records import Outcome, Point, RankRecord, Status
from tilepipe.results.schema import (
    CONTENDER_FIGURES,
    PLACEMENT_KEYS,
    POINT_FIGURES,
    ROUTING_KEYS,
    SCHEMA_VERSION,
    SUMMARY,
)

__all__ = [
    "Reduced",
    "comm_ctas_of",
    "identity",
    "point_keys",
    "rate_figures",
    "reduce_series",
    "slowest_rank",
    "summary_rows",
]

Series = dict[tuple[str, str], NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """One series of slowest-rank times as table numbers; names are columns of the summary."""

    num_iters: int
    median_ns: int
    low_ns: int
    high_ns: int
    interval_kind: str
    p10_ns: int
    p90_ns: int
    min_ns: int
    spread: float | None  # None where the median is 0


def slowest_rank(records: Iterable[RankRecord]) -> Series:
    """(contender, component) -> time of the slowest rank in each iteration, in their order.

    A whole launch has samples of e2e and plan; its stage is slowest e2e minus slowest plan of the
    same iteration, so that stage and plan add up to e2e although different ranks may be slowest.
    """
    taken: dict[tuple[str, str], dict[int, dict[int, int]]] = {}
    ranks: set[int] = set()
    for record in records:
        ranks.add(record.rank)
        for sample in record.samples:
            by_iteration = taken.setdefault((sample.contender, sample.component), {})
            by_rank = by_iteration.setdefault(sample.iteration, {})
            if record.rank in by_rank:
                raise ValueError(
                    f"rank {record.rank} has two samples of {sample.contender} "
                    f"{sample.component} iteration {sample.iteration}: want one"
                )
            by_rank[record.rank] = sample.duration_ns
    for (contender, component), by_iteration in taken.items():
        for iteration, by_rank in by_iteration.items():
            if set(by_rank) != ranks:
                raise ValueError(
                    f"{contender} {component} iteration {iteration} lacks ranks "
                    f"{sorted(ranks - set(by_rank))}: the slowest rank is not known"
                )
    series = {
        key: np.array(
            [max(by_iteration[iteration].values()) for iteration in sorted(by_iteration)],
            dtype=np.int64,
        )
        for key, by_iteration in taken.items()
    }
    for contender, component in list(series):
        if component == "plan" and (contender, "e2e") in series:
            series[contender, "stage"] = series[contender, "e2e"] - series[contender, "plan"]
    return dict(sorted(series.items()))


def reduce_series(series: NDArray[np.int64]) -> Reduced:
    """Median with interval, percentiles and spread of at least one value; drops nothing."""
    middle = median_interval(series)
    # inverted_cdf gives a value that was measured, hence an integer.
    p10_ns, p90_ns = np.percentile(series, [10, 90], method="inverted_cdf").astype(np.int64)
    return Reduced(
        num_iters=len(series),
        median_ns=middle.value,
        low_ns=middle.low,
        high_ns=middle.high,
        interval_kind="range" if middle.is_range else "order95",
        p10_ns=int(p10_ns),
        p90_ns=int(p90_ns),
        min_ns=int(series.min()),
        spread=float(p90_ns - p10_ns) / middle.value if middle.value else None,
    )


def rate_figures(
    contender: str,
    *,
    median_ns: int,  # of component stage: a rate belongs to the work, not to its plan
    num_ranks: int,
    all_ranks: Mapping[str, int],  # logical_bytes, dedup_bytes, wire_bytes or flops -> amount
) -> dict[str, float]:
    """Bandwidths and TFLOP/s per rank, as figures of the contender; empty for a time of 0."""
    if median_ns == 0:
        return {}
    figures = {}
    for name, amount in all_ranks.items():
        # flop/ns is 1e9 flop/s, a thousandth of the unit; byte/ns is 1e9 byte/s, the unit.
        rate, unit = (
            ("tflops", 1e3) if name == "flops" else (f"{name.removesuffix('_bytes')}_gbps", 1.0)
        )
        assert rate in CONTENDER_FIGURES, f"{name} has no rate"
        figures[f"{contender}/{rate}"] = amount / num_ranks / median_ns / unit
    return figures


def identity(point: Point) -> dict[str, Any]:
    """The columns that every table starts with."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": point.name,
        "config_id": point.config_id,
        "build_id": point.build_id,
        "repetition": point.repetition,
        "operation": point.operation,
        "executor": point.executor,
    }


def comm_ctas_of(point: Point, records: Sequence[RankRecord]) -> int | None:
    """CTAs that communicated: as typed, or as found where auto was typed and something ran."""
    typed = _group(point, "kernel").get("num_comm_ctas")
    found = records[0].counts.get("num_comm_ctas") if records and typed == "auto" else typed
    return found if isinstance(found, int) else None


def point_keys(point: Point, records: Sequence[RankRecord]) -> dict[str, Any]:
    """Workload, routing and kernel columns; None for a key that this point does not have."""
    workload, kernel = _group(point, "workload"), _group(point, "kernel")
    # The host executor has neither: a default there says nothing of the measurement.
    on_gpu = point.executor == "cuda"
    measure, launch = (_group(point, group) if on_gpu else {} for group in ("measure", "launch"))
    return {
        "num_ranks": _group(point, "launch").get("num_ranks"),
        **{
            key: workload.get(key)
            for key in ("hidden", "intermediate", "num_experts", "num_topk", "dtype")
        },
        "law": _group(point, "routing").get("law"),
        "placement": _group(point, "placement").get("rule"),
        **{
            key: kernel.get(key)
            for key in ("order", "granularity", "home_granularity", "layout", "copy")
        },
        "num_comm_ctas": comm_ctas_of(point, records),
        **{
            key: kernel.get(key)
            for key in (
                *("num_comm_warps", "num_loads", "num_stages", "stage_bytes"),
                *("flag_batch", "roles", "push", "walk", "num_chunks"),
                *("planner", "tile_m", "tile_n", "store", "num_gemm_ctas"),
            )
        },
        **{key: measure.get(key) for key in ("l2", "regime")},
        **{key: launch.get(key) for key in ("pace_gbps", "pace_latency_ns")},
    }


def summary_rows(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row per point and contender, every column of the summary but `last_sweep` filled."""
    return [row for outcome in outcomes for row in _rows_of(outcome)]


def _group(point: Point, group: str) -> dict[str, Any]:
    values = point.config.get(group)
    return values if isinstance(values, dict) else {}


def _rows_of(outcome: Outcome) -> list[dict[str, Any]]:
    point_figures, contender_figures = _split_figures(outcome)
    empty = dict.fromkeys(SUMMARY.names)
    base = {**empty, **_settings(outcome), **point_figures}
    if outcome.status is not Status.ok:
        return [base]
    series = slowest_rank(outcome.records)
    contenders = sorted({contender for contender, _ in series})
    unknown = sorted(set(contender_figures) - set(contenders))
    if unknown:
        raise ValueError(f"figures name contenders {unknown}: those measured are {contenders}")
    rows = []
    for contender in contenders:
        component = next(c for c in ("e2e", "stage", "plan") if (contender, c) in series)
        apart = {
            f"{part}_ns": int(integer_median(series[contender, part]))
            for part in ("plan", "stage")
            if (contender, part) in series
        }
        rows.append(
            {
                **base,
                "contender": contender,
                "component": component,
                **vars(reduce_series(series[contender, component])),
                **apart,
                **contender_figures.get(contender, {}),
            }
        )
    return rows


def _settings(outcome: Outcome) -> dict[str, Any]:
    point = outcome.point
    routing, placement = _group(point, "routing"), _group(point, "placement")
    tokens = [record.counts.get("num_tokens") for record in outcome.records]
    known = [count for count in tokens if count is not None]
    return {
        **identity(point),
        "status": outcome.status.name,
        "reason": outcome.reason,
        "started_utc": outcome.started_utc or None,
        "ended_utc": outcome.ended_utc or None,
        "hardware": _group(point, "hardware").get("name"),
        "fabric": _group(point, "launch").get("fabric"),
        **point_keys(point, outcome.records),
        "num_tokens": _group(point, "workload").get("num_tokens"),
        "num_tokens_total": sum(known) if known and len(known) == len(tokens) else None,
        "capacity_factor": _group(point, "kernel").get("capacity_factor"),
        **{f"routing_{key}": routing.get(key) for key in ROUTING_KEYS},
        **{f"placement_{key}": placement.get(key) for key in PLACEMENT_KEYS},
        "num_redundant": _num_redundant(outcome),
        "num_warmups": _group(point, "measure").get("num_warmups"),
        **_clocks(outcome.records),
        "left_out": "; ".join(outcome.left_out) or None,
    }


def _num_redundant(outcome: Outcome) -> int | None:
    """As the Plan had it, which alone knows what a file held."""
    counted = [record.counts.get("num_physical") for record in outcome.records]
    if not counted or counted[0] is None:
        return None
    return counted[0] - int(_group(outcome.point, "workload")["num_experts"])


def _clocks(records: Iterable[RankRecord]) -> dict[str, Any]:
    """Conditions on the GPUs of all ranks; no key where no GPU was watched."""
    seen = [record.clocks for record in records if record.clocks is not None]
    if not seen:
        return {}
    return {
        "sm_clock_mhz": min(clocks.sm_mhz for clocks in seen),
        "sm_clock_min_mhz": min(clocks.sm_mhz_min for clocks in seen),
        "sm_clock_max_mhz": max(clocks.sm_mhz_max for clocks in seen),
        "power_w": max(clocks.power_w_max for clocks in seen),
        "temperature_c": max(clocks.temperature_c_max for clocks in seen),
        "clock_reasons": "+".join(sorted({word for clocks in seen for word in clocks.reasons})),
        "throttled": any(clocks.throttled for clocks in seen),
    }


def _split_figures(outcome: Outcome) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """Figures of the point and, by contender, those written `contender/figure`.

    Those of a contender come from times, so a point that is not ok keeps none.
    """
    of_point: dict[str, Any] = {}
    of_contender: dict[str, dict[str, float]] = {}
    for key, value in outcome.figures.items():
        if not isfinite(value):
            raise ValueError(f"figure {key} is {value}: leave out what was not measured")
        contender, _, figure = key.rpartition("/")
        if contender and figure in CONTENDER_FIGURES:
            of_contender.setdefault(contender, {})[figure] = value
        elif key in POINT_FIGURES:
            of_point[key] = value
        else:
            raise ValueError(
                f"figure {key} is unknown: of a point {sorted(POINT_FIGURES)}, "
                f"of a contender contender/{sorted(CONTENDER_FIGURES)}"
            )
    return of_point, of_contender
