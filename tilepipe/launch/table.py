"""What a sweep shows on the screen: a line a point, then tables.

Knows nothing of files; the same numbers, with their intervals, stand in the Parquet files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from tilepipe.records import Interval, Outcome, Point, Status
from tilepipe.results.pointfile import command_of
from tilepipe.results.summary import reduce_series, slowest_rank, summary_rows

__all__ = [
    "breakdown_table",
    "figures_table",
    "progress_line",
    "reasons_table",
    "times_table",
    "told",
]

# Column of summary.parquet -> its heading; a column is shown where points differ in it.
_AXES = {
    "repetition": "round",
    "hardware": "hardware",
    "num_ranks": "ranks",
    "num_tokens_total": "tokens",
    "hidden": "hidden",
    "intermediate": "interm.",
    "num_experts": "experts",
    "num_topk": "topk",
    "law": "routing",
    "routing_seed": "seed",
    "routing_layer": "layer",
    "order": "order",
    "granularity": "gran.",
    "home_granularity": "home",
    "layout": "layout",
    "copy": "copy",
    "num_comm_ctas": "CTAs",
    "tile_m": "tile_m",
    "tile_n": "tile_n",
    "capacity_factor": "capacity",
}
# In the order of the columns.
_CONTENDERS = {
    "fused": "fused",
    "sequential": "seq.",
    "dispatch": "dispatch",
    "combine": "combine",
    "push": "push",
    "reduce": "reduce",
    "gemm_all": "gemm",
    "gemm_flags": "gemm flags",
    "gemm_publish": "gemm publ.",
    "gemm_contended": "gemm cont.",
    "blas_per_expert": "BLAS",
}
# Terms whose names are longer than their numbers.
_TERMS = {"contention": "conten-\ntion", "publish_tax": "publ. tax"}
_NUMBER_WIDTH = 7
# Shown even where all points agree: without it no line says how large the point was.
_ALWAYS = ("num_tokens_total",)
# Of the point's own contender.
_FIGURES = {
    "logical_gbps": "logical GB/s",
    "wire_gbps": "wire GB/s",
    "tflops": "TFLOP/s",
    "efficiency": "effic.",
    "speedup": "speed-up",
}
_IMBALANCE = {"expert_max_over_mean": "expert", "rank_max_over_mean": "rank"}
# The contender whose figures stand in the table: the fused form where there is one.
_MAIN = {"dispatch_gemm": "fused", "gemm_combine": "fused", "grouped_gemm": "gemm_all"}


def told(point: Point) -> str:
    """A point in the words that compose it again."""
    words = command_of(point).partition("tilepipe.run")[2].strip() or point.name
    return f"{words} (repetition {point.repetition})" if point.repetition else words


def progress_line(outcome: Outcome, *, number: int, total: int, reused: bool) -> str:
    """One line when a point has ended."""
    how = f"{outcome.status.name}, reused" if reused else outcome.status.name
    said = told(outcome.point)
    if outcome.status is not Status.ok:
        said = f"{outcome.reason} ({said})"
    return f"[{number}/{total}] {how}: {said}"


def reasons_table(outcomes: Sequence[Outcome]) -> Table:
    """Points that are not ok, and why."""
    table = Table(title="points that are not ok", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("status", "point", "reason"):
        table.add_column(heading, overflow="fold")
    alike: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.status is not Status.ok:
            key = (outcome.status.name, outcome.reason)
            alike.setdefault(key, []).append(told(outcome.point))
    for (status, reason), points in alike.items():
        which = points[0] if len(points) == 1 else f"{len(points)} points"
        table.add_row(status, Text(which), Text(reason))
    return table


def times_table(outcomes: Sequence[Outcome], *, narrow: bool) -> Table:
    """One row per point: each contender's time without plan, and how far its interval reaches.

    Where it is narrow the reach is left out; it stands in summary.parquet.
    """
    firsts = [summary_rows([outcome])[0] for outcome in outcomes]
    series = [slowest_rank(outcome.records) for outcome in outcomes]
    contenders = [name for name in _CONTENDERS if any((name, "stage") in found for found in series)]
    table, axes = _table("ms without plan, median of the slowest rank", firsts)
    all_ok = all(row["status"] == Status.ok.name for row in firsts)
    if not all_ok:
        table.add_column("status")
    for name in contenders:
        table.add_column(_CONTENDERS[name], justify="right", min_width=_NUMBER_WIDTH)
    for row, found in zip(firsts, series, strict=True):
        table.add_row(
            *(_cell(row[axis]) for axis in axes),
            *([] if all_ok else [row["status"]]),
            *(_time(found.get((name, "stage")), narrow=narrow) for name in contenders),
        )
    return table


def figures_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per point: rates and overlap of its own contender, and imbalance of the routing."""
    mains = [_main_row(summary_rows([outcome])) for outcome in outcomes]
    figures = [key for key in _FIGURES if any(row[key] is not None for row in mains)]
    table, axes = _table("figures; ~: may be 1; expert, rank: max/mean rows", mains)
    for key in figures:
        table.add_column(_FIGURES[key], justify="right")
    for heading in _IMBALANCE.values():
        table.add_column(heading, justify="right")
    for row in mains:
        spans_one = (row["speedup_low"] or 2.0) <= 1 <= (row["speedup_high"] or 2.0)
        cells = [
            _number(row[key]) + ("~" if key == "speedup" and spans_one else "")
            for key in (*figures, *_IMBALANCE)
        ]
        table.add_row(*(_cell(row[axis]) for axis in axes), *cells)
    return table


def breakdown_table(outcomes: Sequence[Outcome]) -> Table:
    """Terms of the fused contender; a row's terms add up to its e2e."""
    timed = [outcome for outcome in outcomes if outcome.terms]
    firsts = [summary_rows([outcome])[0] for outcome in timed]
    names = _in_order(term.term for outcome in timed for term in outcome.terms)
    table, axes = _table("breakdown of fused, ms; ~: may be 0", firsts)
    for name in names:
        heading = _TERMS.get(name, name.replace("_", " "))
        table.add_column(heading, justify="right", min_width=_NUMBER_WIDTH)
    for outcome, row in zip(timed, firsts, strict=True):
        values = {term.term: term.interval for term in outcome.terms}
        cells = [_term(values.get(name)) for name in names]
        table.add_row(*(_cell(row[axis]) for axis in axes), *cells)
    return table


def _table(what: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Table, list[str]]:
    """An empty table with a column for each axis in which the points differ."""
    # No more than two spaces between columns: a sweep's tables fit into 80 columns.
    table = Table(
        title=_title(rows, what),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    axes = _shown_axes(rows)
    for axis in axes:
        table.add_column(_AXES[axis], justify="right", no_wrap=True)
    return table, axes


def _main_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = _MAIN.get(rows[0]["operation"], rows[0]["operation"])
    return next((row for row in rows if row["contender"] == wanted), rows[0])


def _title(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    executors = ", ".join(sorted({row["executor"] for row in rows}))
    ranks = ", ".join(str(count) for count in sorted({row["num_ranks"] for row in rows}))
    return f"{rows[0]['name']}, executor {executors}, ranks {ranks}: {what}"


def _shown_axes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [axis for axis in _AXES if axis in _ALWAYS or len({row[axis] for row in rows}) > 1]


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _time(series: NDArray[np.int64] | None, *, narrow: bool) -> str:
    """Median, and the larger half of its interval in percent."""
    if series is None:
        return "-"
    found = reduce_series(series)
    if narrow:
        return _ms(found.median_ns)
    reach = max(found.high_ns - found.median_ns, found.median_ns - found.low_ns)
    percent = f" ±{100 * reach / found.median_ns:.0f}%" if found.median_ns > 0 else ""
    return _ms(found.median_ns) + percent


def _term(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return _ms(interval.value) + ("~" if interval.low <= 0 <= interval.high else "")


def _ms(value_ns: int | None) -> str:
    return "-" if value_ns is None else f"{value_ns / 1e6:.2f}"
