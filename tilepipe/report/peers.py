"""The grouped GEMM against its peers, and ours beside torch: from a points table to markers.

Knows nothing of how markers are drawn.
"""

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
from tilepipe.report.shapes import DotFigure, DotPanel, Dots, Grid
from tilepipe.report.words import caption, rate, time_unit, told_value, work
from tilepipe.results.accounting import MAIN

__all__ = ["baseline_figures", "peer_figures"]

Row = dict[str, Any]

OPERATION = "grouped_gemm"
_OF_TORCH = "torch_"
_INTERLEAVED = "Contenders of a point ran interleaved"


def peer_figures(points: pa.Table) -> list[DotFigure]:
    """Every contender of each point, in TFLOP/s where all have one, else in time."""
    rows = [row for row in ok_rows(points) if row["operation"] == OPERATION]
    return _figures(rows, "grouped GEMM against its peers", _INTERLEAVED, by_rate=True)


def baseline_figures(points: pa.Table, operation: str) -> list[DotFigure]:
    """What does the same as torch, and torch, of points that it was measured beside; in time."""
    rows = [row for row in ok_rows(points) if row["operation"] == operation]
    beside = {row["folder"] for row in rows if row["contender"].startswith(_OF_TORCH)}
    same = ("sequential", MAIN.get(operation, operation))
    rows = [
        row
        for row in rows
        if row["folder"] in beside
        and (row["contender"] in same or row["contender"].startswith(_OF_TORCH))
    ]
    note = f"Times without plan. {_INTERLEAVED}"
    return _figures(rows, "beside torch", note, by_rate=False)


def _figures(rows: list[Row], what: str, note: str, *, by_rate: bool) -> list[DotFigure]:
    figures = []
    for group in grouped(rows, WORLD):
        for part in chunked(group, limit=MAX_ROWS, columns=OWN, cut=OWN):
            if len({row["contender"] for row in part.rows}) > 1:
                figures.append(_figure(part, what, note, by_rate))
    return figures


def _figure(group: Group, what: str, note: str, by_rate: bool) -> DotFigure:
    points = [{row["contender"]: row for row in part.rows} for part in grouped(group.rows, OWN)]
    firsts = [next(iter(point.values())) for point in points]
    operation = firsts[0]["operation"]
    main = MAIN.get(operation, operation)
    contenders = sorted(
        {row["contender"] for row in group.rows}, key=lambda name: (name != main, name)
    )
    unit, divisor = time_unit(row["work_ns"] for row in group.rows)
    times = _series(points, contenders, lambda row: work(row, divisor))
    has_rates = by_rate and all(row["tflops"] is not None for row in group.rows)
    rates = _series(points, contenders, lambda row: rate(row, "tflops")) if has_rates else ()
    told = varying(firsts, OWN) or ["num_tokens"]
    labels = tuple(label(row, told) for row in firsts)
    return DotFigure(
        slug="",
        title=titled(what, group),
        caption=caption(group.rows, note=note),
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
