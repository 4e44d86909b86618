"""Fused against unfused: from a points table to markers.

Knows nothing of how markers are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from tilepipe.report.groups import (
    OWN,
    WORLD,
    Group,
    chunked,
    grouped,
    label,
    ok_rows,
    titled,
    varying,
)
from tilepipe.report.shapes import DotFigure, DotPanel, Dots, Grid, Value
from tilepipe.report.words import NULL, caption, scaled, time_unit, told_value, work
from tilepipe.results.accounting import COMMUNICATION
from tilepipe.results.breakdown import bound_mark, lower_bound_ns, way_of

__all__ = ["MAX_ROWS", "bound_ns", "overlap_figures"]

Row = dict[str, Any]
Point = dict[str, Row]  # contender -> row

MAX_ROWS = 16
# The operation that is measured against the sum of its parts.
LAYER = "moe_layer"
_PARTS = ("dispatch_gemm", "swiglu", "gemm_combine")
_BOUND = {
    "dispatch_gemm": "lower bound of GEMM beside dispatch",
    "gemm_combine": "lower bound max(GEMM, push) + what of reduce none can hide",
    LAYER: "its parts: dispatch → GEMM, SwiGLU, GEMM → combine",
}
_BOUND_NOTE = "The lower bound is made of medians of the parts alone, so it has no interval"
_EFFICIENCY_NOTE = (
    " efficiency: lower bound over fused; ~: by the intervals of the times it may be 1; !: it is "
    "above 1, so the parts were slower alone."
)
_PARTS_NOTE = "Parts are medians of launches of their own, added up, so they have no interval"
_BEST_NOTE = "Of several CTA counts the one with the lowest fused time is shown"


def overlap_figures(points: pa.Table, operation: str) -> list[DotFigure]:
    """Fused, sequential and lower bound of each point, its best CTA count where there are more.

    Of a layer the sum of its parts in place of a bound.
    """
    rows = [row for row in ok_rows(points) if row["operation"] == operation]
    by_folder: dict[str, Point] = {}
    for row in rows:
        by_folder.setdefault(row["folder"], {})[row["contender"]] = row
    parts = _PARTS if operation == LAYER else ("gemm_all", COMMUNICATION[operation])
    needed = {"fused", "sequential", *parts}
    fused = [point["fused"] for point in by_folder.values() if needed <= set(point)]
    figures = []
    for group in grouped(fused, WORLD):
        best = _best(group)
        cut = [name for name in OWN if name != "num_comm_ctas"]
        for part in chunked(best, limit=MAX_ROWS, columns=OWN, cut=cut):
            figures.append(_figure(part, by_folder, operation, len(group.rows) > len(best.rows)))
    return figures


def bound_ns(point: Mapping[str, Row], operation: str, *, of: str = "work_ns") -> int:
    """The bound that `efficiency` is made with, `lower_bound_ns`; `of`: which column.

    Of a layer the sum of its parts.
    """
    if operation == LAYER:
        return sum(int(point[name][of]) for name in _PARTS)
    gemm = point.get("gemm_split", point["gemm_all"])
    reduce = int(point["reduce"][of]) if "reduce" in point else 0
    way = way_of(point["fused"])
    comm_ns, whole_ns = point[COMMUNICATION[operation]][of], point["gemm_all"][of]
    return lower_bound_ns(gemm[of], comm_ns, reduce, way, whole_ns=whole_ns)


def _efficiency_mark(point: Mapping[str, Row], operation: str) -> str:
    low_ns, high_ns = (bound_ns(point, operation, of=f"work_{end}_ns") for end in ("low", "high"))
    fused = point["fused"]
    return bound_mark(
        bound_ns=(low_ns, high_ns), fused_ns=(fused["work_low_ns"], fused["work_high_ns"])
    )


def _best(group: Group) -> Group:
    """Of points that differ in their CTA count only, the one with the lowest fused time."""
    columns = [name for name in OWN if name != "num_comm_ctas"]
    parts = grouped(group.rows, columns)
    rows = tuple(min(part.rows, key=lambda row: row["work_ns"]) for part in parts)
    return Group(title=group.title, rows=rows)


def _figure(
    group: Group, by_folder: Mapping[str, Point], operation: str, is_best: bool
) -> DotFigure:
    points = [by_folder[row["folder"]] for row in group.rows]
    bounds_ns = [bound_ns(point, operation) for point in points]
    times_ns = [point[name]["work_ns"] for point in points for name in ("fused", "sequential")]
    marks = None
    if operation != LAYER:
        marks = [_efficiency_mark(point, operation) for point in points]
    unit, divisor = time_unit([*times_ns, *bounds_ns])
    told = varying(group.rows, OWN) or ["num_tokens"]
    dots = (
        *(
            Dots(label=name, values=tuple(work(point[name], divisor) for point in points))
            for name in ("fused", "sequential")
        ),
        Dots(
            label=_BOUND[operation],
            values=tuple(scaled(ns, ns, ns, divisor) for ns in bounds_ns),
        ),
    )
    note = _PARTS_NOTE if operation == LAYER else _BOUND_NOTE
    note = f"{note}. {_BEST_NOTE}" if is_best else note
    return DotFigure(
        slug="",
        title=titled("fused against unfused", group),
        caption=caption(group.rows, note=f"Times without plan. {note}"),
        rows=tuple(label(row, told) for row in group.rows),
        panels=(DotPanel(x_label=unit, dots=dots),),
        numbers=_numbers(group.rows, told, dots, unit, marks=marks),
    )


def _numbers(
    rows: Sequence[Row],
    told: Sequence[str],
    dots: Sequence[Dots],
    unit: str,
    *,
    marks: Sequence[str] | None,  # of each row's efficiency; None: of a layer, which has none
) -> Grid:
    cells = []
    is_layer = marks is None
    for place, row in enumerate(rows):
        fused, _, parts = (series.values[place] for series in dots)
        times = [told_value(series.values[place]) for series in dots]
        share = row["efficiency"]
        if is_layer and fused is not None and parts is not None and parts.value > 0:
            share = fused.value / parts.value
        mark = marks[place] if marks is not None and share is not None else ""
        cells.append((label(row, told), *times, _speedup(row), _share(share, is_layer) + mark))
    heads = ("its parts", "fused over parts") if is_layer else ("lower bound", "efficiency")
    meaning = "" if is_layer else _EFFICIENCY_NOTE
    return Grid(
        title="",
        head=(
            "point",
            *(f"{word}, {unit}" for word in ("fused", "sequential", heads[0])),
            "speed-up (interval)",
            heads[1],
        ),
        rows=tuple(cells),
        note=f"speed-up: sequential over fused, pair by pair; ~: its interval holds 1.{meaning}",
    )


def _speedup(row: Row) -> str:
    if row["speedup"] is None:
        return NULL
    value = Value(value=row["speedup"], low=row["speedup_low"], high=row["speedup_high"])
    unsure = "~" if value.low <= 1 <= value.high else ""
    return f"{value.value:.2f}{unsure} ({value.low:.2f} to {value.high:.2f})"


def _share(value: float | None, is_layer: bool) -> str:
    """Of a layer with a third digit: its bar is a few percent away from 1."""
    return NULL if value is None else f"{value:.{3 if is_layer else 2}f}"
