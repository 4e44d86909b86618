"""What a sweep shows on the screen: a line a point, then tables.

Knows nothing of files; the same numbers, with their intervals, stand in the Parquet files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tilepipe.records import Outcome, Point, Status
from tilepipe.results.pointfile import command_of
from tilepipe.results.summary import summary_rows

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
    "granularity": "granul.",
    "home_granularity": "home",
    "layout": "layout",
    "copy": "copy",
    "num_comm_ctas": "CTAs",
    "tile_m": "tile_m",
    "tile_n": "tile_n",
    "capacity_factor": "capacity",
}
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
    line = f"[{number}/{total}] {how}: {told(outcome.point)}"
    return line if outcome.status is Status.ok else f"{line}: {outcome.reason}"


def reasons_table(outcomes: Sequence[Outcome]) -> Table:
    """Points that are not ok, and why."""
    table = Table(title="points that are not ok", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("status", "point", "reason"):
        table.add_column(heading, overflow="fold")
    for outcome in outcomes:
        if outcome.status is not Status.ok:
            table.add_row(outcome.status.name, Text(told(outcome.point)), Text(outcome.reason))
    return table


def times_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per point: median time of each contender."""
    by_point = [summary_rows([outcome]) for outcome in outcomes]
    firsts = [rows[0] for rows in by_point]
    contenders = _in_order(row["contender"] for rows in by_point for row in rows)
    table, axes = _table("median of the slowest rank, ms", firsts)
    all_ok = all(row["status"] == Status.ok.name for row in firsts)
    if not all_ok:
        table.add_column("status")
    for name in contenders:
        table.add_column(name.replace("_", " "), justify="right")
    for rows in by_point:
        times = {row["contender"]: row["median_ns"] for row in rows}
        table.add_row(
            *(_cell(rows[0][axis]) for axis in axes),
            *([] if all_ok else [rows[0]["status"]]),
            *(_ms(times.get(name)) for name in contenders),
        )
    return table


def figures_table(outcomes: Sequence[Outcome]) -> Table:
    """One row per point: rates and overlap of its own contender, and imbalance of the routing."""
    mains = [_main_row(summary_rows([outcome])) for outcome in outcomes]
    figures = [key for key in _FIGURES if any(row[key] is not None for row in mains)]
    table, axes = _table("figures; imbalance is max/mean rows", mains)
    for key in figures:
        table.add_column(_FIGURES[key], justify="right")
    for heading in _IMBALANCE.values():
        table.add_column(heading, justify="right")
    for row in mains:
        table.add_row(
            *(_cell(row[axis]) for axis in axes),
            *(_number(row[key]) for key in (*figures, *_IMBALANCE)),
        )
    return table


def breakdown_table(outcomes: Sequence[Outcome]) -> Table:
    """Terms of the fused contender; a row's terms add up to its e2e."""
    timed = [outcome for outcome in outcomes if outcome.terms]
    firsts = [summary_rows([outcome])[0] for outcome in timed]
    names = _in_order(term.term for outcome in timed for term in outcome.terms)
    table, axes = _table("breakdown of fused, ms: e2e is the sum of the others", firsts)
    for name in names:
        table.add_column(name.replace("_", " "), justify="right")
    for outcome, row in zip(timed, firsts, strict=True):
        values = {term.term: term.interval for term in outcome.terms}
        cells = [
            _ms(None if (found := values.get(name)) is None else found.value) for name in names
        ]
        table.add_row(*(_cell(row[axis]) for axis in axes), *cells)
    return table


def _table(what: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Table, list[str]]:
    """An empty table with a column for each axis in which the points differ."""
    table = Table(title=_title(rows, what), title_justify="left", box=box.SIMPLE_HEAD)
    axes = _shown_axes(rows)
    for axis in axes:
        table.add_column(_AXES[axis], justify="right")
    return table, axes


def _main_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = _MAIN.get(rows[0]["operation"], rows[0]["operation"])
    return next((row for row in rows if row["contender"] == wanted), rows[0])


def _title(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    executors = ", ".join(sorted({row["executor"] for row in rows}))
    ranks = ", ".join(str(count) for count in sorted({row["num_ranks"] for row in rows}))
    return f"{rows[0]['name']} (executor {executors}, ranks {ranks}): {what}"


def _shown_axes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [axis for axis in _AXES if axis in _ALWAYS or len({row[axis] for row in rows}) > 1]


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ms(value_ns: int | None) -> str:
    return "-" if value_ns is None else f"{value_ns / 1e6:.2f}"
