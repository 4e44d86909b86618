"""Where the time of a fused launch goes: from a terms table to stacked bars.

Knows nothing of how bars are drawn.
"""

from collections.abc import Sequence
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
from tilepipe.report.overlap import MAX_ROWS
from tilepipe.report.shapes import BarFigure, Bars, Grid, Value
from tilepipe.report.words import NULL, caption, scaled, time_unit, told_value
from tilepipe.results.schema import TERMS

__all__ = ["breakdown_figures"]

Row = dict[str, Any]

# Terms of the two forms that stand for each other share a colour.
_COLORS = {
    "plan": 0,
    "gemm_all": 1,
    "sm_tax": 2,
    "sync_tax": 3,
    "publish_tax": 3,
    "contention": 4,
    "late": 5,
    "tail": 5,
    # Of a layer.
    "dispatch_gemm": 1,
    "swiglu": 2,
    "gemm_combine": 3,
    "joined": 5,
}
_NOTE = (
    "Terms add up to e2e, the black mark; a negative one is drawn to the left of 0. "
    "Each term has its own whisker, from where the term starts"
)


def breakdown_figures(terms: pa.Table, operation: str) -> list[BarFigure]:
    """A bar a point, its terms one after the other."""
    rows = [row for row in ok_rows(terms) if row["operation"] == operation]
    figures = []
    for group in grouped(rows, WORLD):
        for part in chunked(group, limit=MAX_ROWS, columns=OWN, cut=OWN):
            figures.append(_figure(part))
    return figures


def _figure(group: Group) -> BarFigure:
    points = grouped(group.rows, OWN)
    by_term = [{row["term"]: row for row in point.rows} for point in points]
    firsts = [point.rows[0] for point in points]
    unit, divisor = time_unit(row["value_ns"] for row in group.rows)
    names = [name for name in TERMS if name != "e2e" and any(name in found for found in by_term)]
    parts = tuple(
        Bars(
            label=name,
            color=_COLORS.get(name, len(_COLORS)),
            values=tuple(_value(found.get(name), divisor) for found in by_term),
        )
        for name in names
    )
    totals = tuple(_value(found["e2e"], divisor) for found in by_term)
    assert all(total is not None for total in totals), "a breakdown without e2e"
    missing = [part.label for part in parts if not any(part.values)]
    note = f"{_NOTE}. Not measured: {', '.join(missing)}" if missing else _NOTE
    told = varying(firsts, OWN) or ["num_tokens"]
    labels = tuple(label(row, told) for row in firsts)
    return BarFigure(
        slug="",
        title=titled("where the time of a fused launch goes", group),
        caption=caption(group.rows, kinds=[row["term_kind"] for row in group.rows], note=note),
        rows=labels,
        x_label=unit,
        parts=tuple(part for part in parts if any(part.values)),
        totals=tuple(total for total in totals if total is not None),
        numbers=_numbers(labels, totals, parts, unit),
    )


def _value(row: Row | None, divisor: float) -> Value | None:
    if row is None or row["value_ns"] is None:
        return None
    return scaled(row["value_ns"], row["term_low_ns"], row["term_high_ns"], divisor)


def _numbers(
    labels: Sequence[str], totals: Sequence[Value | None], parts: Sequence[Bars], unit: str
) -> Grid:
    cells = [
        (labels[place], told_value(totals[place]), *(_term(part.values[place]) for part in parts))
        for place in range(len(labels))
    ]
    return Grid(
        title="",
        head=("point", f"e2e, {unit}", *(part.label for part in parts)),
        rows=tuple(cells),
        note="~: the interval holds 0.",
    )


def _term(value: Value | None) -> str:
    if value is None:
        return NULL
    return told_value(value, mark="~" if value.low <= 0 <= value.high else "")
