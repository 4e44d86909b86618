"""From what the ranks of a point measured to its breakdown and figures.

Knows nothing of files; which contender stands for which stage is said here and nowhere else.
"""

from collections.abc import Sequence
from dataclasses import replace

from tilepipe.measure.stats import integer_median
from tilepipe.records import BreakdownTerm, Outcome, Point, RankRecord
from tilepipe.results.breakdown import (
    Way,
    bound_mark,
    breakdown_terms,
    lower_bound_ns,
    overlap_figures,
    speedup_figures,
    way_of,
)
from tilepipe.results.summary import (
    Series,
    comm_ctas_of,
    rate_figures,
    reduce_series,
    slowest_rank,
)

__all__ = ["COMMUNICATION", "FORMULA_SINCE", "MAIN", "account", "as_today", "efficiency_mark"]

# operation -> name of a breakdown's series -> (contender, component) that measured it
_SERIES = {
    "dispatch_gemm": {
        "e2e": ("fused", "e2e"),
        "plan": ("fused", "plan"),
        "gemm_all": ("gemm_all", "stage"),
        "gemm_split": ("gemm_split", "stage"),
        "gemm_flags": ("gemm_flags", "stage"),
        "gemm_contended": ("gemm_contended", "stage"),
    },
    "gemm_combine": {
        "e2e": ("fused", "e2e"),
        "plan": ("fused", "plan"),
        "gemm_all": ("gemm_all", "stage"),
        "gemm_split": ("gemm_split", "stage"),
        "gemm_publish": ("gemm_publish", "stage"),
        "gemm_contended": ("gemm_contended", "stage"),
    },
    "moe_layer": {
        "e2e": ("fused", "e2e"),
        "plan": ("fused", "plan"),
        "dispatch_gemm": ("dispatch_gemm", "stage"),
        "swiglu": ("swiglu", "stage"),
        "gemm_combine": ("gemm_combine", "stage"),
    },
}
# Operation -> contender whose time is that of the communication.
COMMUNICATION = {"dispatch_gemm": "dispatch", "gemm_combine": "push"}
# Operation -> the contender that it is about, where that has another name.
MAIN = {
    **dict.fromkeys(("dispatch_gemm", "gemm_combine", "moe_layer"), "fused"),
    "grouped_gemm": "gemm_all",
}
# Figure, as a summary calls it -> version from which on it is made as it is today. Before 7 the
# bound of dispatch_gemm did not know of CTAs that join the GEMM.
FORMULA_SINCE = {"efficiency": 7}
_EFFICIENCY = "fused/efficiency"
# Contenders whose time is that of moving rows; the others multiply, the fused ones do both.
_MOVING = ("dispatch", "combine", "push", "torch_dispatch", "torch_combine")
_MULTIPLYING = (
    *("gemm_all", "gemm_split", "blas_per_expert", "fused", "sequential"),
    *("torch_sequential", "torch_layer", "torch_grouped_mm", "quack", "cublas_dense"),
)


def account(
    point: Point, records: Sequence[RankRecord]
) -> tuple[tuple[BreakdownTerm, ...], dict[str, float]]:
    """Terms of the breakdown (none where the operation has none) and figures of a point.

    Without samples only the figures of routing and bytes are there.
    """
    figures = _point_figures(point, records)
    series = slowest_rank(records)
    if not series:
        return (), figures
    terms: tuple[BreakdownTerm, ...] = ()
    if point.operation in _SERIES:
        keys = _SERIES[point.operation].items()
        # The host gives no SMs away, so it has no gemm_split.
        named = {name: series[key] for name, key in keys if name != "gemm_split" or key in series}
        counts = records[0].counts
        terms = tuple(
            replace(
                term,
                stamped_ns=counts.get(f"stamped_{term.term}_ns"),
                stamped_loss_ns=counts.get(f"stamped_{term.term}_loss_ns"),
            )
            for term in breakdown_terms(point.operation, named)
        )
        if counts.get("unstamped_ns"):
            figures["fused/stamping_cost"] = counts["stamped_ns"] / counts["unstamped_ns"]
        if records[0].counts["all_rows"]:  # without rows there is nothing to overlap
            figures |= _overlap(point.operation, series, _way(point))
    return terms, figures | _rates(point, records, series)


def as_today(outcome: Outcome, version: int) -> Outcome:
    """A stored outcome with the figure that older versions made by another formula made anew: from
    its samples, and only where all that it is made of is there."""
    way = _way(outcome.point)
    is_today = version >= FORMULA_SINCE["efficiency"] or _EFFICIENCY not in outcome.figures
    if is_today or not way.joins:  # any other bound is as it was
        return outcome
    series = slowest_rank(outcome.records)
    made_of = [(name, "stage") for name in ("fused", "gemm_split", "gemm_all", "dispatch")]
    if not all(key in series for key in made_of):
        return outcome
    fused_ns, split_ns, whole_ns, comm_ns = (int(integer_median(series[key])) for key in made_of)
    if min(fused_ns, split_ns, whole_ns, comm_ns) <= 0:  # damaged, as whoever checks it will say
        return outcome
    bound_ns = lower_bound_ns(split_ns, comm_ns, way=way, whole_ns=whole_ns)
    return replace(outcome, figures=dict(outcome.figures) | {_EFFICIENCY: bound_ns / fused_ns})


def _point_figures(point: Point, records: Sequence[RankRecord]) -> dict[str, float]:
    counts = records[0].counts
    names = ("logical_bytes", "dedup_bytes", "wire_bytes", "dedup_wire_bytes", "flops")
    figures = {name: float(counts[name]) for name in names if name in counts}
    rows = counts["all_rows"]
    if rows:
        num_experts = int(point.config["workload"]["num_experts"])
        figures["expert_max_over_mean"] = counts["max_expert_rows"] * num_experts / rows
        figures["rank_max_over_mean"] = counts["max_rank_rows"] * len(records) / rows
        per_physical = rows / counts["num_physical"]
        figures["physical_max_over_mean"] = counts["max_physical_rows"] / per_physical
    return figures


def _way(point: Point) -> Way:
    kernel, workload = (point.config.get(group) or {} for group in ("kernel", "workload"))
    known = {"operation": point.operation, "hidden": workload.get("hidden")}
    return way_of({**kernel, **known})


def _overlap(operation: str, series: Series, way: Way) -> dict[str, float]:
    if operation not in COMMUNICATION:  # two launches: no one bound is theirs
        times = {name: series[name, "stage"] for name in ("fused", "sequential")}
        return speedup_figures("fused", **times)
    reduce = series.get(("reduce", "stage"))
    return overlap_figures(
        "fused",
        fused=series["fused", "stage"],
        sequential=series["sequential", "stage"],
        gemm_all=series["gemm_all", "stage"],
        gemm_split=series.get(("gemm_split", "stage")),
        comm=series[COMMUNICATION[operation], "stage"],
        reduce_ns=0 if reduce is None else int(integer_median(reduce)),
        way=way,
    )


def efficiency_mark(operation: str, series: Series, way: Way | None = None) -> str:
    """`bound_mark` of the efficiency of a point; nothing where it has none."""
    if operation not in COMMUNICATION or ("fused", "stage") not in series:
        return ""
    gemm = "gemm_split" if ("gemm_split", "stage") in series else "gemm_all"
    found = {
        name: reduce_series(series[name, "stage"])
        for name in ("fused", gemm, "gemm_all", COMMUNICATION[operation], "reduce")
        if (name, "stage") in series
    }
    ends = {name: (times.low_ns, times.high_ns) for name, times in found.items()}
    comm, reduce = ends[COMMUNICATION[operation]], ends.get("reduce", (0, 0))
    wholes = ends.get("gemm_all", (None, None))
    low_ns, high_ns = (
        lower_bound_ns(ends[gemm][i], comm[i], reduce[i], way, whole_ns=wholes[i]) for i in range(2)
    )
    return bound_mark(bound_ns=(low_ns, high_ns), fused_ns=ends["fused"])


def _rates(point: Point, records: Sequence[RankRecord], series: Series) -> dict[str, float]:
    counts = records[0].counts
    figures: dict[str, float] = {}
    for contender in sorted({name for name, _ in series}):
        # A rate belongs to the work: the plan is left out of its time wherever it shows.
        times = series.get((contender, "stage"), series.get((contender, "e2e")))
        if times is None:
            continue
        names: tuple[str, ...] = ()
        if contender in _MOVING:
            names = ("logical_bytes", "dedup_bytes", "wire_bytes")
        elif contender in _MULTIPLYING:
            names = ("flops",)
        median_ns = int(integer_median(times))
        figures |= rate_figures(
            contender,
            median_ns=median_ns,
            num_ranks=len(records),
            all_ranks={name: counts[name] for name in names},
        )
        if point.executor == "cuda" and median_ns:
            figures |= _shares(point, records, figures, contender)
            figures |= _memory(point, records, contender, median_ns)
    return figures


def _shares(
    point: Point, records: Sequence[RankRecord], figures: dict[str, float], contender: str
) -> dict[str, float]:
    """A contender's rates by what a GPU gives for them: CTAs, and a link where rows cross one."""
    found: dict[str, float] = {}
    logical_gbps, wire_gbps = (figures.get(f"{contender}/{n}_gbps") for n in ("logical", "wire"))
    num_ctas, num_ranks = comm_ctas_of(point, records), len(records)
    of_torch = contender.startswith("torch_")  # whose kernels take as many CTAs as they like
    if logical_gbps is not None and num_ctas and not of_torch:
        found[f"{contender}/gbps_per_cta"] = logical_gbps / num_ctas
    link_gbps = point.config["hardware"]["link_gbps"]
    if wire_gbps and link_gbps and _num_gpus(point, num_ranks) == num_ranks > 1:
        found[f"{contender}/link_share"] = wire_gbps / link_gbps
    return found


def _memory(
    point: Point, records: Sequence[RankRecord], contender: str, median_ns: int
) -> dict[str, float]:
    """Rate and share of a GPU's memory; nothing for a contender that multiplies."""
    num_bytes = _memory_bytes(contender, records)
    if num_bytes is None:
        return {}
    memory_gbps = num_bytes / _num_gpus(point, len(records)) / median_ns
    found = {f"{contender}/memory_gbps": memory_gbps}
    hbm_gbps = point.config["hardware"]["hbm_gbps"]
    if hbm_gbps and point.config["launch"]["fabric"] == "loopback":
        found[f"{contender}/memory_share"] = memory_gbps / hbm_gbps
    return found


def _num_gpus(point: Point, num_ranks: int) -> int:
    """GPUs that hold all ranks; with nvshmem several share one where there are too few."""
    if point.config["launch"]["fabric"] == "loopback":
        return 1
    return min(num_ranks, int(point.config["hardware"]["num_gpus"]))


def _memory_bytes(contender: str, records: Sequence[RankRecord]) -> int | None:
    """Payload bytes that all ranks together read and write; None where nothing is moved."""
    counts = records[0].counts
    logical_bytes, num_rows = counts["logical_bytes"], counts["all_rows"]
    if not num_rows:
        return None
    num_tokens = sum(record.counts["num_tokens"] for record in records)
    moved = 2 * logical_bytes  # each row is read at its source and written where it goes
    # Each row that came home is read again; each token gets one row.
    reduced = logical_bytes + num_tokens * (logical_bytes // num_rows)
    touched = {"dispatch": moved, "push": moved, "reduce": reduced, "combine": moved + reduced}
    # Of torch's contenders too: what the work needs, not the copies that they make on the way.
    return touched.get(contender.removeprefix("torch_"))
