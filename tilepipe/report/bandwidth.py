"""Bandwidth against communication CTAs: from a points table to lines.

Knows nothing of how lines are drawn. Executor cuda only: the host has no CTAs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tilepipe.config.choices import Copy, Fabric
from tilepipe.report.groups import (
    OF_A_COPY,
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
from tilepipe.report.shapes import Grid, Level, Line, LineFigure
from tilepipe.report.words import amount, caption, rate, time_unit, told_value, work

__all__ = ["bandwidth_figures", "copies_of", "has_links"]

Row = dict[str, Any]

MAX_LINES = 8
# Settings that a line stands for; the others are the same all over a figure.
_OF_A_LINE = ("num_tokens", "copy", *OF_A_COPY)
_NOMINAL = "The limit is the data sheet's"
_PACED = "Paced rows are arithmetic on a real run, no measurement of a link"
_COPIES = [copy.name for copy in Copy]


@dataclass(frozen=True, kw_only=True)
class _Basis:
    """Which bytes a figure counts, and the limit that counts the same."""

    column: str
    axis: str
    levels: tuple[Level, ...]
    note: str = ""


def bandwidth_figures(points: pa.Table, operation: str) -> list[LineFigure]:
    """A figure for each contender that communicates on the CTAs of its row, one line a copy and
    token count; only where there are two CTA counts or more."""
    rows = _rows(points, operation)
    held = [name for name in OWN if name not in (*_OF_A_LINE, "num_comm_ctas")]
    figures = []
    for contender in sorted({row["contender"] for row in rows}):
        of_one = [row for row in rows if row["contender"] == contender]
        for group in grouped(of_one, [*WORLD, *held]):
            for part in chunked(group, limit=MAX_LINES, columns=_OF_A_LINE, cut=_OF_A_LINE):
                if len({row["num_comm_ctas"] for row in part.rows}) > 1:
                    figures.append(_figure(part, contender))
    return figures


def copies_of(points: pa.Table, operation: str) -> set[str]:
    """Copies that the figures of these points tell of."""
    return {row["copy"] for row in _rows(points, operation)}


def has_links(points: pa.Table, operation: str) -> bool:
    """Whether rows of a point crossed a link."""
    return any(_crosses(row) and row["wire_gbps"] for row in _rows(points, operation))


def _rows(points: pa.Table, operation: str) -> list[Row]:
    return [
        row
        for row in ok_rows(points)
        if row["executor"] == "cuda"
        and row["operation"] == operation
        and row["num_comm_ctas"] is not None
        # The reduction runs on all SMs whatever the row says.
        and row["contender"] in (operation, "push")
        and row["logical_gbps"] is not None
    ]


def _crosses(row: Row) -> bool:
    """Whether every rank has a GPU of its own."""
    return (
        row["fabric"] == Fabric.nvshmem.name
        and row["num_gpus"] is not None
        and 1 < row["num_ranks"] <= row["num_gpus"]
    )


def _figure(group: Group, contender: str) -> LineFigure:
    basis = _basis(group.rows)
    told = varying(group.rows, _OF_A_LINE) or ["num_tokens", "copy"]
    parts = grouped(group.rows, _OF_A_LINE)
    # Lines that differ in their copy only share a colour.
    colored_by = [name for name in told if name != "copy"]
    colors: dict[tuple[Any, ...], int] = {}
    lines = []
    for part in parts:
        look = tuple(part.rows[0][name] for name in colored_by)
        rows = sorted(part.rows, key=lambda row: row["num_comm_ctas"])
        lines.append(
            Line(
                label=label(rows[0], told),
                x=tuple(float(row["num_comm_ctas"]) for row in rows),
                y=tuple(rate(row, basis.column) for row in rows),
                color=colors.setdefault(look, len(colors)),
                dash=_COPIES.index(rows[0]["copy"]) if rows[0]["copy"] in _COPIES else 0,
            )
        )
    what = "bandwidth" if contender == group.rows[0]["operation"] else f"bandwidth of {contender}"
    return LineFigure(
        slug="",
        title=titled(f"{what} against communication CTAs", group),
        caption=caption(
            group.rows, note=". ".join(filter(None, [basis.note, _beyond(group.rows)]))
        ),
        x_label="communication CTAs",
        y_label=basis.axis,
        lines=tuple(lines),
        levels=basis.levels,
        numbers=_numbers(group.rows, basis),
    )


def _basis(rows: Sequence[Row]) -> _Basis:
    """The bytes that the limit at hand counts: a link's where rows cross one, else the memory's."""
    first = rows[0]
    has_wire = all(row["wire_gbps"] for row in rows)
    if first["pace_gbps"] is not None:
        paced = Level(label=f"pace, {first['pace_gbps']:g} GB/s", value=first["pace_gbps"])
        # With one rank all rows are paced, though none of them crosses a link.
        column = "wire_gbps" if has_wire else "logical_gbps"
        return _Basis(
            column=column, axis=f"GB/s a rank, {column[:-5]}_bytes", levels=(paced,), note=_PACED
        )
    if _crosses(first) and has_wire:
        return _Basis(
            column="wire_gbps",
            axis="GB/s a rank, wire_bytes",
            levels=_level("link, one direction", first["link_gbps"]),
            note=". ".join(filter(None, [_NOMINAL, _saved(rows)])),
        )
    if all(row["memory_gbps"] is not None for row in rows):
        return _Basis(
            column="memory_gbps",
            axis="GB/s of one GPU, bytes read and written",
            levels=_level("memory", first["hbm_gbps"]),
            note=_NOMINAL,
        )
    return _Basis(column="logical_gbps", axis="GB/s a rank, logical_bytes", levels=())


def _saved(rows: Sequence[Row]) -> str:
    """What sending a token once to each rank would spare the link; nothing of older records."""
    shares = {
        round(100 * (1 - row["dedup_wire_bytes"] / row["wire_bytes"]))
        for row in rows
        if row["dedup_wire_bytes"] is not None
    }
    if not shares:
        return ""
    least, most = min(shares), max(shares)
    told = f"{least} %" if least == most else f"{least} to {most} %"
    return f"One copy of a token for each rank would put {told} fewer bytes on it"


def _beyond(rows: Sequence[Row]) -> str:
    """Why a rate of logical_bytes in the table may be above a link's, if one is."""
    link_gbps = rows[0]["link_gbps"]
    if link_gbps is None or all(row["logical_gbps"] <= link_gbps for row in rows):
        return ""
    return (
        "Logical rates count a row once for each of its experts, also where it crosses no link, so "
        f"they may be above the link's {amount(link_gbps)} GB/s"
    )


def _level(name: str, limit_gbps: float | None) -> tuple[Level, ...]:
    if limit_gbps is None:
        return ()
    return (Level(label=f"{name}, {amount(limit_gbps)} GB/s", value=limit_gbps),)


def _numbers(rows: Sequence[Row], basis: _Basis) -> Grid:
    told = varying(rows, _OF_A_LINE)
    unit, divisor = time_unit(row["work_ns"] for row in rows)
    limit = basis.levels[0].value if basis.levels else None
    shown = ["logical_gbps"] if basis.column == "logical_gbps" else ["logical_gbps", basis.column]
    share = [] if limit is None else ["share of limit"]
    cells = []
    for row in rows:
        rates = [amount(row[column]) for column in shown]
        part = [] if limit is None else [f"{row[basis.column] / limit:.3f}"]
        time = told_value(work(row, divisor))
        cells.append(
            (
                *(str(row[name]) if row[name] is not None else "" for name in told),
                str(row["num_comm_ctas"]),
                time,
                *rates,
                *part,
                amount(row["gbps_per_cta"]),
            )
        )
    heads = [f"GB/s {column.removesuffix('_gbps')}" for column in shown]
    return Grid(
        title="",
        head=(*told, "CTAs", f"time, {unit}", *heads, *share, "GB/s logical a CTA"),
        rows=tuple(cells),
    )
