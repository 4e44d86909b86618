"""What a report says, in which order: from the points of a folder to sections.

Knows nothing of how sections are written or figures drawn.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tilepipe.records import Status
from tilepipe.report.ablations import ABLATION_NOTE, ablation_grids
from tilepipe.report.bandwidth import bandwidth_figures
from tilepipe.report.imbalance import imbalance_figures
from tilepipe.report.overlap import overlap_figures
from tilepipe.report.peers import peer_figures
from tilepipe.report.points import Found
from tilepipe.report.shapes import Figure, Grid
from tilepipe.report.terms import breakdown_figures
from tilepipe.report.words import dates, warnings_of

__all__ = ["Part", "Report", "Section", "report_of"]

Row = dict[str, Any]
Make = Callable[[Found], Sequence[Figure | Grid]]

EXECUTORS = ("cuda", "host")
RUN = "python -m tilepipe.run"


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


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """One kind of figure; `needs` is empty where nobody misses it."""

    slug: str
    title: str
    make: Make
    needs: str
    executors: tuple[str, ...] = EXECUTORS
    note: str = ""


def _fused_kinds() -> list[_Kind]:
    kinds = []
    for operation, name in (
        ("dispatch_gemm", "dispatch → GEMM"),
        ("gemm_combine", "GEMM → combine"),
    ):
        needs = f"a point that ended ok: {RUN} +experiment={operation}"
        kinds += [
            _Kind(
                slug=f"{operation.replace('_', '-')}-fused",
                title=f"{name}: fused against unfused",
                make=partial(_of_points, overlap_figures, operation),
                needs=needs,
            ),
            _Kind(
                slug=f"{operation.replace('_', '-')}-terms",
                title=f"{name}: breakdown",
                make=partial(_of_terms, operation),
                needs=needs,
            ),
        ]
    return kinds


def _of_points(make: Callable[[pa.Table, str], Any], word: str, found: Found) -> Any:
    return make(found.points, word)


def _of_terms(operation: str, found: Found) -> Any:
    return breakdown_figures(found.terms, operation)


def _bandwidth_kinds() -> list[_Kind]:
    return [
        _Kind(
            slug=f"{operation}-bandwidth",
            title=f"{operation}: bandwidth against communication CTAs",
            make=partial(_of_points, bandwidth_figures, operation),
            needs=f"two or more values of kernel.num_comm_ctas: {RUN} +experiment={operation}",
            executors=("cuda",),
        )
        for operation in ("dispatch", "combine")
    ]


def _ablation_kinds() -> list[_Kind]:
    # Setting -> what it is called, the experiment that sweeps it, executors that have it.
    asked = {
        "order": ("order of sends", "dispatch_gemm_order", EXECUTORS),
        "granularity": ("granularity of flags", "dispatch_gemm_granularity", EXECUTORS),
        "home_granularity": ("when home may reduce", "", EXECUTORS),
        "flag_batch": ("rows a release fence", "dispatch_granularity", ("cuda",)),
        "num_loads": ("depth of copy simt", "dispatch_simt_depth", ("cuda",)),
        "num_stages": ("depth of copy tma", "dispatch_tma_depth", ("cuda",)),
        "layout": ("layout of received rows", "", EXECUTORS),
    }
    return [
        _Kind(
            slug=f"by-{setting}",
            title=f"by kernel.{setting}: {called}",
            make=partial(_of_points, ablation_grids, setting),
            needs=f"two or more values of kernel.{setting}: {RUN} +experiment={experiment}"
            if experiment
            else "",
            executors=executors,
            note=ABLATION_NOTE,
        )
        for setting, (called, experiment, executors) in asked.items()
    ]


KINDS = (
    *_bandwidth_kinds(),
    *_fused_kinds(),
    _Kind(
        slug="peers",
        title="grouped GEMM against its peers",
        make=lambda found: peer_figures(found.points),
        needs=f"two or more contenders: {RUN} +experiment=grouped_gemm",
    ),
    _Kind(
        slug="imbalance",
        title="time and imbalance by routing law",
        make=lambda found: imbalance_figures(found.points),
        needs=f"two or more laws: {RUN} +experiment=dispatch_gemm routing=uniform,zipf,hot_rank",
    ),
    *_ablation_kinds(),
)
_NO_POINTS = {
    "cuda": f"executor cuda: no point ended ok; needs an NVIDIA GPU (H100, H200): {RUN} "
    "+experiment=dispatch",
    "host": f"executor host: no point ended ok; needs no GPU: {RUN} +experiment=dispatch_gemm "
    "hardware=cpu",
}


def report_of(found: Found, *, title: str) -> Report:
    """The report of a folder's points; at least one point must have been read."""
    rows = found.points.to_pylist()
    sections, missing = [], []
    counts: dict[str, int] = {}
    for executor in EXECUTORS:
        ok = [r for r in rows if r["executor"] == executor and r["status"] == Status.ok.name]
        if not ok:
            missing.append(_NO_POINTS[executor])
            continue
        shown: set[str] = set()
        for machine in sorted({row["machine"] for row in ok}):
            parts = _parts(_only(found, executor, machine), executor, counts)
            shown |= {part.title for part in parts}
            sections.append(Section(title=f"Executor {executor}: {machine}", parts=tuple(parts)))
        missing += [
            f"executor {executor}, {kind.title}: needs {kind.needs}"
            for kind in KINDS
            if executor in kind.executors and kind.needs and kind.title not in shown
        ]
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


def _only(found: Found, executor: str, machine: str) -> Found:
    """Tables of one executor on one machine: no figure ever sees two."""

    def kept(table: pa.Table) -> pa.Table:
        return table.filter(
            pc.and_(
                pc.equal(table.column("executor"), executor),
                pc.equal(table.column("machine"), machine),
            )
        )

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
    if found.num_older:
        sentences.append(
            f"{_points(found.num_older)} of an older schema version: what was added since is empty."
        )
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
