"""The grouped GEMM against its peers: from a points table to markers.

Knows nothing of how markers are drawn.
"""

from typing import Any

import pyarrow as pa

from tilepipe.report.groups import (
    MAIN,
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
from tilepipe.report.shapes import DotFigure, DotPanel, Dots, Grid
from tilepipe.report.words import caption, rate, time_unit, told_value, work

__all__ = ["peer_figures"]

Row = dict[str, Any]

OPERATION = "grouped_gemm"


def peer_figures(points: pa.Table) -> list[DotFigure]:
    """Every contender of each point, in TFLOP/s where all have one, else in time."""
    rows = [row for row in ok_rows(points) if row["operation"] == OPERATION]
    figures = []
    for group in grouped(rows, WORLD):
        for part in chunked(group, limit=MAX_ROWS, columns=OWN, cut=OWN):
            if len({row["contender"] for row in part.rows}) > 1:
                figures.append(_figure(part))
    return figures


def _figure(group: Group) -> DotFigure:
    points = [{row["contender"]: row for row in part.rows} for part in grouped(group.rows, OWN)]
    firsts = [next(iter(point.values())) for point in points]
    contenders = sorted(
        {row["contender"] for row in group.rows}, key=lambda name: (name != MAIN[OPERATION], name)
    )
    unit, divisor = time_unit(row["work_ns"] for row in group.rows)
    times = _series(points, contenders, lambda row: work(row, divisor))
    has_rates = all(row["tflops"] is not None for row in group.rows)
    rates = _series(points, contenders, lambda row: rate(row, "tflops")) if has_rates else ()
    told = varying(firsts, OWN) or ["num_tokens"]
    labels = tuple(label(row, told) for row in firsts)
    return DotFigure(
        slug="",
        title=titled("grouped GEMM against its peers", group),
        caption=caption(group.rows, note="Contenders of a point ran interleaved"),
        rows=labels,
        panels=(DotPanel(x_label="TFLOP/s a rank" if has_rates else unit, dots=rates or times),),
        numbers=Grid(
            title="",
            head=(
                "point",
                *(f"{series.label}, {unit}" for series in times),
                *(f"{series.label}, TFLOP/s" for series in rates),
            ),
            rows=tuple(
                (labels[i], *(told_value(series.values[i]) for series in (*times, *rates)))
                for i in range(len(points))
            ),
        ),
    )


def _series(points: list[dict[str, Row]], contenders: list[str], value: Any) -> tuple[Dots, ...]:
    return tuple(
        Dots(
            label=name,
            values=tuple(value(point[name]) if name in point else None for point in points),
        )
        for name in contenders
    )
