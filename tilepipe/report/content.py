"""What a report says, in which order: from the points of a folder to sections.

Knows nothing of how sections are written or figures drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tilepipe.records import Status
from tilepipe.report.kinds import EXECUTORS, KINDS, missing_of
from tilepipe.report.points import Found
from tilepipe.report.shapes import Figure, Grid
from tilepipe.report.words import dates, warnings_of

__all__ = ["Part", "Report", "Section", "report_of"]

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Figures or tables of one kind."""

    title: str
    items: tuple[Figure | Grid, ...]
    note: str = ""  # holds for all of them


@dataclass(frozen=True, kw_only=True)
class Section:
    """All that one executor on one machine gave."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """A report before it is written; empty parts are left out by whoever writes it."""

    title: str
    intro: tuple[str, ...]
    overview: Grid
    warnings: tuple[str, ...]
    sections: tuple[Section, ...]
    failed: Grid | None
    missing: tuple[str, ...]  # figures that are not shown, and what they need
    faults: tuple[str, ...]  # folders that could not be read


def report_of(found: Found, *, title: str) -> Report:
    """The report of a folder's points; at least one point must have been read."""
    rows = found.points.to_pylist()
    sections, missing = [], []
    counts: dict[str, int] = {}
    for executor in EXECUTORS:
        ok = [r for r in rows if r["executor"] == executor and r["status"] == Status.ok.name]
        shown: set[str] = set()
        for machine in sorted({row["machine"] for row in ok}):
            parts = _parts(_only(found, executor, machine=machine), executor, counts)
            shown |= {part.title for part in parts}
            if parts:
                title = f"Executor {executor}: {machine}"
                sections.append(Section(title=title, parts=tuple(parts)))
        missing += missing_of(_only(found, executor), executor, shown)
    return Report(
        title=title,
        intro=tuple(_intro(found, rows)),
        overview=_overview(rows),
        warnings=tuple(warnings_of(rows)),
        sections=tuple(sections),
        failed=_failed(rows),
        missing=tuple(missing),
        faults=found.faults,
    )


def _parts(found: Found, executor: str, counts: dict[str, int]) -> list[Part]:
    parts = []
    for kind in KINDS:
        items: list[Figure | Grid] = []
        for item in kind.make(found) if executor in kind.executors else ():
            if not isinstance(item, Grid):
                name = f"{executor}-{kind.slug}"
                counts[name] = counts.get(name, 0) + 1
                item = replace(item, slug=f"{name}-{counts[name]}")
            items.append(item)
        if items:
            parts.append(Part(title=kind.title, items=tuple(items), note=kind.note))
    return parts


def _only(found: Found, executor: str, machine: str | None = None) -> Found:
    """Tables of one executor, and on one machine: no figure ever sees two."""

    def kept(table: pa.Table) -> pa.Table:
        wanted = pc.equal(table.column("executor"), executor)
        if machine is not None:
            wanted = pc.and_(wanted, pc.equal(table.column("machine"), machine))
        return table.filter(wanted)

    return replace(found, points=kept(found.points), terms=kept(found.terms))


def _intro(found: Found, rows: Sequence[Row]) -> list[str]:
    statuses = {row["folder"]: row["status"] for row in rows}
    counted = {word: list(statuses.values()).count(word) for word in Status.__members__}
    told = ", ".join(f"{count} {word}" for word, count in counted.items() if count)
    sentences = [f"{_points(len(statuses))}: {told}."]
    if found.faults:
        sentences.append(
            f"{len(found.faults)} faults keep other files from being shown: see below."
        )
    sentences += [f"{note[0].upper()}{note[1:]}." for note in found.notes]
    if found.num_replaced:
        sentences.append(
            f"{_points(found.num_replaced)} left out: one of the same settings ended later."
        )
    sentences.append(
        "Times are those of the slowest rank in each iteration, then the median. "
        "Executors are never mixed in a figure or table."
    )
    return sentences


def _points(count: int) -> str:
    return "1 point" if count == 1 else f"{count} points"


def _overview(rows: Sequence[Row]) -> Grid:
    lines: dict[tuple[str, str, str, str], dict[str, Row]] = {}
    for row in rows:
        key = (row["executor"], row["machine"], row["name"], row["operation"])
        lines.setdefault(key, {})[row["folder"]] = row
    cells: list[tuple[str, ...]] = []
    for key in sorted(lines):
        points = lines[key].values()
        num_ok = sum(point["status"] == Status.ok.name for point in points)
        cells.append((*key, str(len(points)), str(num_ok), dates(list(points))))
    return Grid(
        title="What there is",
        head=("executor", "machine", "experiment", "operation", "points", "ok", "dates"),
        rows=tuple(cells),
    )


def _failed(rows: Sequence[Row]) -> Grid | None:
    """Points that are not ok, alike ones in one line."""
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    for row in rows:
        if row["status"] != Status.ok.name:
            group = (row["executor"], row["name"], row["status"], row["reason"])
            alike.setdefault(group, []).append(row["command"])
    if not alike:
        return None
    return Grid(
        title="Points that are not ok",
        head=("executor", "experiment", "status", "points", "reason", "first of them"),
        rows=tuple(
            (executor, name, status, str(len(commands)), reason, min(commands))
            for (executor, name, status, reason), commands in sorted(alike.items())
        ),
    )
