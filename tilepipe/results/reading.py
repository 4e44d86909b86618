"""Read stored points to show or compare them: all that is sound, a sentence for the rest.

Knows nothing of how points are run or of what is made of them. Never raises for what it finds.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from tilepipe.records import Status
from tilepipe.results.check import POINT_FILES, Stored, examine_point, is_set_aside, read_table
from tilepipe.results.folders import folder_fault
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SCHEMA_VERSION, SUMMARY, TIMELINE
from tilepipe.results.store import UNDER_WAY, WRAPPED_FOLDER
from tilepipe.results.tables import summary_table
from tilepipe.results.versions import ADDED_IN

__all__ = ["Reading", "StoredPoint", "read_results"]

# Of the columns that an older version had not.
_TOLD_COLUMNS = 3
_Marked = dict[tuple[str, str, int], bool]  # config_id, build_id, repetition -> in the last sweep


@dataclass(frozen=True, kw_only=True)
class StoredPoint(Stored):
    """A sound point, whatever version wrote it, with the columns and keys of this one."""

    folder: Path
    summary: pa.Table  # columns of SUMMARY; one row a contender, or one without where not ok

    @property
    def name(self) -> str:
        """Experiment that the point belongs to."""
        return self.outcome.point.name

    @property
    def executor(self) -> str:
        """host or cuda."""
        return self.outcome.point.executor

    @property
    def is_ok(self) -> bool:
        """Whether it has times."""
        return self.outcome.status is Status.ok


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a folder holds; `faults` and `notes` are sentences that start with a path."""

    points: tuple[StoredPoint, ...]  # by folder
    faults: tuple[str, ...] = ()  # what could not be read; the rest was
    notes: tuple[str, ...] = ()  # what whoever shows the points must know

    @property
    def summary(self) -> pa.Table:
        """Rows of all points. Tables of several executors may be listed, never compared."""
        return _joined([point.summary for point in self.points], SUMMARY)

    @property
    def breakdown(self) -> pa.Table:
        """Terms of all points that have any."""
        return _joined([point.breakdown for point in self.points], BREAKDOWN)

    @property
    def samples(self) -> pa.Table:
        """Every sample of every point that is ok."""
        return _joined([point.samples for point in self.points], SAMPLES)

    @property
    def timeline(self) -> pa.Table:
        """Every span of every launch that was recorded."""
        recorded = (point.timeline for point in self.points)
        return _joined([table for table in recorded if table is not None], TIMELINE)


def read_results(folder: Path) -> Reading:
    """Points of a results folder, an experiment's or a point's own, wherever it was moved to.

    Points that a newer run set aside are left out, unless the folder is one of them. A folder that
    cannot be read at all, or holds no point, gives no points and one fault.
    """
    fault = folder_fault(folder)
    if fault is not None:
        return Reading(points=(), faults=(fault,))
    points: list[StoredPoint] = []
    faults: list[str] = []
    marked: dict[Path, _Marked] = {}
    for found in _point_folders(folder, faults):
        if found.parent not in marked:
            marked[found.parent] = {} if found == folder else _last_sweep(found.parent, faults)
        point, said = _read_point(found, marked[found.parent])
        faults += said
        points += [] if point is None else [point]
    if not points and not faults:
        faults.append(f"{folder}: holds no points: name a folder in which points have run")
    return Reading(points=tuple(points), faults=tuple(faults), notes=tuple(_notes(folder, points)))


def _point_folders(folder: Path, faults: list[str]) -> Iterator[Path]:
    if any((folder / name).exists() for name in POINT_FILES):
        yield folder
        return

    def told(error: OSError) -> None:
        faults.append(f"{error.filename}: cannot be read: {error.strerror}")

    for place, below, files in os.walk(folder, onerror=told):
        found = Path(place)
        # In place: os.walk goes down what is left, in this order.
        below.sort()
        if found == folder and WRAPPED_FOLDER in below:
            below.remove(WRAPPED_FOLDER)
        if set(files) & set(POINT_FILES):
            below.clear()
            if not is_set_aside(found) and found.suffix != UNDER_WAY:
                yield found


def _read_point(folder: Path, marked: _Marked) -> tuple[StoredPoint | None, list[str]]:
    stored, faults = examine_point(folder, anywhere=True)
    if stored is None or faults:
        return None, [f"{folder}/{fault}" for fault in faults]
    point = stored.outcome.point
    in_last_sweep = marked.get((point.config_id, point.build_id, point.repetition), False)
    return StoredPoint(
        **vars(stored),
        folder=folder,
        summary=_of_version(
            summary_table([stored.outcome], last_sweep=[point.folder] if in_last_sweep else ()),
            stored.version,
        ),
    ), []


def _of_version(table: pa.Table, version: int) -> pa.Table:
    """Rows made now, of what that version wrote: they say so, as those of the other tables do."""
    place = SUMMARY.get_field_index("schema_version")
    column = pa.array([version] * table.num_rows, pa.int32())
    return table.set_column(place, SUMMARY.field(place), column)


def _last_sweep(name_dir: Path, faults: list[str]) -> _Marked:
    """Ids of the points that the summary beside them marks; everything else is in the points."""
    path = name_dir / "summary.parquet"
    if not path.is_file():
        return {}
    table, found = read_table(path, SUMMARY)
    faults += [f"{name_dir}/{fault}" for fault in found]
    return {
        (row["config_id"], row["build_id"], row["repetition"]): row["last_sweep"]
        for row in ([] if table is None else table.to_pylist())
    }


def _notes(folder: Path, points: Sequence[StoredPoint]) -> list[str]:
    notes = []
    for version, count in sorted(Counter(point.version for point in points).items()):
        if version < SCHEMA_VERSION:
            later = sorted(name for name, added in ADDED_IN.items() if added > version)
            told = f"{', '.join(later[:_TOLD_COLUMNS])}"
            more = f" and {len(later) - _TOLD_COLUMNS} more" if later[_TOLD_COLUMNS:] else ""
            null = f", columns {told}{more} are null" if later else ""
            notes.append(f"{folder}: {count} points are of schema version {version}{null}")
    executors = Counter(point.executor for point in points)
    if len(executors) > 1:
        told = " and ".join(f"{count} of executor {name}" for name, count in executors.items())
        notes.append(f"{folder}: holds {told} points: they are never compared with each other")
    if points and not any(point.is_ok for point in points):
        counts = Counter(point.outcome.status.name for point in points)
        told = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        notes.append(f"{folder}: no point is ok ({told}), so there are no times")
    return notes


def _joined(tables: Sequence[pa.Table], schema: pa.Schema) -> pa.Table:
    return pa.concat_tables([schema.empty_table(), *tables])
