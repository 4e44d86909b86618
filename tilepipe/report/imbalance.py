"""Time and imbalance by routing law: from a points table to markers.

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
    main_rows,
    ok_rows,
    titled,
    varying,
)
from tilepipe.report.overlap import MAX_ROWS
from tilepipe.report.shapes import DotFigure, DotPanel, Dots, Grid, Value
from tilepipe.report.words import amount, caption, time_unit, told_value, work

__all__ = ["imbalance_figures"]

Row = dict[str, Any]

_ROUTING = tuple(name for name in OWN if name == "law" or name.startswith("routing_"))
_OTHERS = tuple(name for name in OWN if name not in _ROUTING)


def imbalance_figures(points: pa.Table) -> list[DotFigure]:
    """Per routing law the time of what the operation is about and the fullest rank over the mean.

    Only settings under which two laws or more were measured.
    """
    rows = main_rows(ok_rows(points))
    figures = []
    for group in grouped(rows, WORLD):
        kept = [
            row
            for part in grouped(group.rows, _OTHERS)
            if len({row["law"] for row in part.rows}) > 1
            for row in part.rows
        ]
        if not kept:
            continue
        whole = Group(title=group.title, rows=tuple(kept))
        figures += [
            _figure(part) for part in chunked(whole, limit=MAX_ROWS, columns=OWN, cut=_OTHERS)
        ]
    return figures


def _figure(group: Group) -> DotFigure:
    rows = group.rows
    unit, divisor = time_unit(row["work_ns"] for row in rows)
    contender = rows[0]["contender"]
    told = [*varying(rows, _ROUTING), *varying(rows, _OTHERS)]
    labels = tuple(label(row, told) for row in rows)
    time = Dots(label=f"{contender}, {unit}", values=tuple(work(row, divisor) for row in rows))
    ratio = Dots(
        label="fullest rank over mean",
        values=tuple(_exact(row["rank_max_over_mean"]) for row in rows),
    )
    return DotFigure(
        slug="",
        title=titled("time and imbalance by routing law", group),
        caption=caption(rows, note="Times without plan; imbalance is counted, not measured"),
        rows=labels,
        panels=(
            DotPanel(x_label=time.label, dots=(time,)),
            DotPanel(x_label=ratio.label, dots=(ratio,)),
        ),
        numbers=Grid(
            title="",
            head=("routing", time.label, "fullest rank over mean", "fullest expert over mean"),
            rows=tuple(
                (
                    labels[i],
                    told_value(time.values[i]),
                    amount(row["rank_max_over_mean"]),
                    amount(row["expert_max_over_mean"]),
                )
                for i, row in enumerate(rows)
            ),
        ),
    )


def _exact(value: float | None) -> Value | None:
    return None if value is None else Value(value=value, low=value, high=value)
