"""What one setting does while all others stay: from a points table to tables.

Knows nothing of figures.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tilepipe.report.groups import (
    OWN,
    WORLD,
    Group,
    grouped,
    label,
    main_rows,
    ok_rows,
    spell,
    titled,
    varying,
)
from tilepipe.report.shapes import Grid, Value
from tilepipe.report.words import caption, time_unit, told_value, work

__all__ = ["ABLATION_NOTE", "ablation_grids", "best_of"]

Row = dict[str, Any]

ABLATION_NOTE = (
    "Times without plan, in brackets their intervals. Points ran one after the other, not "
    "interleaved: a difference is a hint, not a comparison. Bold: its interval ends "
    "before all others of its line begin."
)


def ablation_grids(points: pa.Table, setting: str) -> list[Grid]:
    """A table an experiment: a column for each value of the setting, a line for each of the rest.

    Only lines with two values or more; bold marks a best that intervals set apart.
    """
    rows = [row for row in main_rows(ok_rows(points)) if row[setting] is not None]
    held = [name for name in OWN if name != setting]
    grids = []
    for group in grouped(rows, WORLD):
        lines = [part for part in grouped(group.rows, held) if len(part.rows) > 1]
        if lines:
            grids.append(_grid(group, lines, setting))
    return grids


def best_of(values: Sequence[Value | None]) -> int | None:
    """Place of the value whose interval ends before every other's begins; None where none does."""
    for place, value in enumerate(values):
        others = [other for i, other in enumerate(values) if other is not None and i != place]
        if value is not None and others and all(value.high < other.low for other in others):
            return place
    return None


def _grid(group: Group, lines: Sequence[Group], setting: str) -> Grid:
    rows = [row for line in lines for row in line.rows]
    unit, divisor = time_unit(row["work_ns"] for row in rows)
    options = [part.rows[0][setting] for part in grouped(rows, [setting])]
    told = varying([line.rows[0] for line in lines], [name for name in OWN if name != setting])
    cells, best = [], set()
    for place, line in enumerate(lines):
        by_option = {row[setting]: work(row, divisor) for row in line.rows}
        values = [by_option.get(option) for option in options]
        found = best_of(values)
        if found is not None:
            best.add((place, 1 + found))
        first = line.rows[0]
        cells.append((label(first, told) or "all", *(told_value(value) for value in values)))
    return Grid(
        title=titled(f"{group.rows[0]['contender']} by {setting}, {unit}", group),
        head=("settings", *(spell(setting, option) for option in options)),
        rows=tuple(cells),
        note=caption(rows),
        best=frozenset(best),
    )
