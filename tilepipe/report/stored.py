"""Read the points of a folder, of this schema version or an older one.

Knows nothing of figures. Never raises for what it finds. A point of this version must be sound, as
for reuse; of an older one every file must say what a table needs, what was added since is empty.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tilepipe.records import Outcome
from tilepipe.results.check import POINT_FILES, is_set_aside, load_point
from tilepipe.results.pointfile import KEYS, document_faults, outcome_of
from tilepipe.results.schema import CONTENDER_FIGURES, POINT_FIGURES, SCHEMA_VERSION
from tilepipe.results.store import UNDER_WAY, WRAPPED_FOLDER
from tilepipe.results.tables import samples_by_rank, stored_terms

__all__ = ["Reading", "StoredPoint", "read_results"]

_SAMPLES = ("rank", "contender", "component", "iteration", "start_ns", "duration_ns")
_TERMS = ("term", "value_ns", "low_ns", "high_ns")
_NEW_RANK_KEYS: dict[str, Any] = {"counts": {}, "verdicts": [], "clocks": None}


@dataclass(frozen=True, kw_only=True)
class StoredPoint:
    """A point that can be shown, whatever version wrote it."""

    folder: Path
    version: int  # of the schemas that it was written with
    document: Mapping[str, Any]  # point.json, provenance included
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a folder holds; a fault is a sentence that starts with a path."""

    points: tuple[StoredPoint, ...]  # by folder
    faults: tuple[str, ...] = ()  # what could not be read; the rest was


def read_results(folder: Path) -> Reading:
    """Points of a results folder, an experiment's or a point's own; set-aside ones are left out."""
    points, faults = [], []
    for found in sorted(_point_folders(folder)):
        try:
            point, said = _read_point(found)
        # Content that no check foresaw: numbers or names past what Python's own types take.
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            point, said = None, [f"point.json or a table: cannot be read: {_one_line(error)}"]
        except OSError as error:
            point, said = None, [f"cannot be read: {_one_line(error)}"]
        faults += [f"{found}/{fault}" for fault in said]
        points += [] if point is None else [point]
    return Reading(points=tuple(points), faults=tuple(faults))


def _point_folders(folder: Path) -> Iterator[Path]:
    # Known by what they hold, so that a cut-short one is seen too.
    if any((folder / name).exists() for name in (*POINT_FILES, "logs")):
        yield folder
        return
    for path in folder.iterdir():
        skipped = path.name == WRAPPED_FOLDER or path.suffix == UNDER_WAY or is_set_aside(path)
        if path.is_dir() and not path.is_symlink() and not skipped:
            yield from _point_folders(path)


def _read_point(folder: Path) -> tuple[StoredPoint | None, list[str]]:
    path = folder / "point.json"
    if not path.is_file():
        return None, ["point.json: missing, so the point never ended"]
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        return None, ["point.json: is no JSON object"]
    version = document.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        return None, [f"point.json: schema_version is {version!r}, want a number from 1"]
    if version > SCHEMA_VERSION:
        fault = f"point.json: schema_version is {version}, want {SCHEMA_VERSION} or older"
        return None, [f"{fault}: a newer TilePipe wrote it, read it with that one"]
    outcome, faults = load_point(folder) if version == SCHEMA_VERSION else _older(folder, document)
    if outcome is None or faults:
        return None, faults
    return StoredPoint(folder=folder, version=version, document=document, outcome=outcome), []


def _older(folder: Path, document: dict[str, Any]) -> tuple[Outcome | None, list[str]]:
    """Columns keep their meaning from version to version, so those that are there can be shown."""
    upgraded = _upgraded(document)
    faults = [f"point.json: {fault}" for fault in document_faults(upgraded)]
    samples, found = _columns(folder / "samples.parquet", _SAMPLES)
    faults += found
    terms, found = _columns(folder / "breakdown.parquet", _TERMS)
    faults += found
    if faults or samples is None or terms is None:
        return None, faults
    return outcome_of(upgraded, samples=samples_by_rank(samples), terms=stored_terms(terms)), []


def _upgraded(document: dict[str, Any]) -> dict[str, Any]:
    """The document as this version would have it: what was added is empty, what went is gone."""
    filled = {key: document.get(key, kind()) for key, kind in KEYS.items()}
    filled["schema_version"] = SCHEMA_VERSION
    filled["figures"] = {
        key: value
        for key, value in filled["figures"].items()
        if key in POINT_FIGURES or key.rpartition("/")[2] in CONTENDER_FIGURES
    }
    filled["ranks"] = [{**_NEW_RANK_KEYS, **entry} for entry in filled["ranks"]]
    return filled


def _columns(path: Path, names: tuple[str, ...]) -> tuple[pa.Table | None, list[str]]:
    """These columns of a Parquet file, and why they cannot be had."""
    if not path.is_file():
        return None, [f"{path.name}: missing"]
    try:
        # From memory: a file cut short under a memory map would end the process.
        table = pq.ParquetFile(pa.BufferReader(path.read_bytes())).read()
    except (OSError, ValueError, pa.ArrowException) as error:
        return None, [f"{path.name}: cannot be read: {_one_line(error)}"]
    missing = [name for name in names if name not in table.column_names]
    if missing:
        return None, [f"{path.name}: columns {missing} are missing"]
    return table.select(names), []


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
