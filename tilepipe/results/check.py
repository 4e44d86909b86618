"""Say what is wrong with a stored point, so that only sound ones are reused or shown.

Knows nothing of how points are run. Reads whatever it finds and never raises for its content.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tilepipe.measure.stats import integer_median
from tilepipe.records import Outcome, Status
from tilepipe.results.accounting import as_today
from tilepipe.results.breakdown import terms_error
from tilepipe.results.columns import allowed_words
from tilepipe.results.pointfile import document_faults, outcome_of, upgraded
from tilepipe.results.schema import BREAKDOWN, POINT_FIGURES, SAMPLES, SCHEMA_VERSION, TIMELINE
from tilepipe.results.spans import span_faults
from tilepipe.results.summary import point_keys, slowest_rank
from tilepipe.results.tables import samples_by_rank, stored_terms, summary_table, to_parquet
from tilepipe.results.versions import filled, of_version, schema_faults, version_of

__all__ = [
    "POINT_FILES",
    "TIMELINE_FILE",
    "Stored",
    "examine_point",
    "is_set_aside",
    "is_temporary",
    "load_point",
    "point_faults",
    "read_table",
]

POINT_FILES = ("samples.parquet", "breakdown.parquet", "point.json")
TIMELINE_FILE = "timeline.parquet"
# What a point folder may hold besides: a recorded launch, and what is drawn from it.
_MAY_HOLD = (TIMELINE_FILE, "timeline.json", "timeline.svg")
_SET_ASIDE = re.compile(r"\.\d+$")  # what open_point_folder adds to an older folder's name
_IDS = ("name", "config_id", "build_id", "repetition", "operation", "executor")


def is_set_aside(folder: Path) -> bool:
    """A folder renamed to make room for a newer run of the same point."""
    return _SET_ASIDE.search(folder.name) is not None


def is_temporary(path: Path) -> bool:
    """A file whose writing was cut short."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


@dataclass(frozen=True, kw_only=True)
class Stored:
    """All that a point folder holds, with today's columns and keys."""

    version: int  # of the schemas that it was written with
    outcome: Outcome
    document: dict[str, Any]  # point.json, provenance included
    samples: pa.Table  # columns of SAMPLES; no rows where not ok
    breakdown: pa.Table  # columns of BREAKDOWN; no rows where there is none
    timeline: pa.Table | None  # columns of TIMELINE; None where no launch was recorded


def point_faults(folder: Path) -> list[str]:
    """All that keeps a point from being reused, `file: fault` each; empty for a sound one."""
    return load_point(folder)[1]


def load_point(folder: Path) -> tuple[Outcome | None, list[str]]:
    """The stored outcome, None where it cannot be read, and all that is wrong with the folder.

    For those who go on measuring: a point of another version counts as wrong. Spans are checked,
    not brought along.
    """
    stored, faults = examine_point(folder)
    if stored is None:
        return None, faults
    if stored.version != SCHEMA_VERSION:
        faults.append(f"point.json: schema_version is {stored.version}, want {SCHEMA_VERSION}")
    return stored.outcome, faults


def examine_point(folder: Path, *, anywhere: bool = False) -> tuple[Stored | None, list[str]]:
    """What the folder holds, None where that cannot be read, and all that is wrong with it.

    Accepts older versions. `anywhere` forgives what does not touch the content: a folder that was
    renamed or moved, and files beside those of the point.
    """
    try:
        faults = [] if anywhere else _entry_faults(folder)
        stored, found = _examine(folder, anywhere=anywhere)
    # Content that no check foresaw: numbers or names past what Python's own types take.
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return None, [f"point.json or a table: cannot be read: {_one_line(error)}"]
    except OSError as error:
        return None, [f"cannot be read: {_one_line(error)}"]
    return stored, faults + found


def _examine(folder: Path, *, anywhere: bool) -> tuple[Stored | None, list[str]]:
    if not (folder / "point.json").is_file():
        return None, ["point.json: missing, so the point never ended"]
    document, faults = _read_document(folder / "point.json")
    version = None if document is None else document["schema_version"]
    samples, found = read_table(folder / "samples.parquet", SAMPLES, want_version=version)
    faults += found
    breakdown, found = read_table(folder / "breakdown.parquet", BREAKDOWN, want_version=version)
    faults += found
    if document is None or samples is None or breakdown is None:
        return None, faults
    tables = {"samples.parquet": samples, "breakdown.parquet": breakdown}
    timeline = None
    if (folder / TIMELINE_FILE).exists():
        timeline, found = _read_timeline(folder / TIMELINE_FILE, document)
        faults += found
        tables |= {} if timeline is None else {TIMELINE_FILE: timeline}
    faults += _identity_faults(document, tables)
    if not anywhere:
        faults += _place_faults(folder, document)
    outcome = outcome_of(document, samples=samples_by_rank(samples), terms=stored_terms(breakdown))
    outcome = as_today(outcome, document["schema_version"])
    faults += _word_faults(outcome)
    if not faults:
        faults += _outcome_faults(outcome, samples)
    if not faults and document["schema_version"] == SCHEMA_VERSION:
        faults += _setting_faults(outcome, samples)  # older ones told some settings otherwise
    stored = Stored(
        version=document["schema_version"],
        outcome=outcome,
        document=document,
        samples=samples,
        breakdown=breakdown,
        timeline=timeline,
    )
    return stored, faults


def read_table(
    path: Path, schema: pa.Schema, *, want_version: int | None = None
) -> tuple[pa.Table | None, list[str]]:
    """A Parquet file as today's table, None where that cannot be had, and `file: fault` each.

    Columns that its version had not are null; `schema_version` stays what was stored.
    """
    if not path.is_file():
        return None, [f"{path.name}: missing"]
    try:
        # From memory: a file cut short under a memory map would end the process.
        content = pa.BufferReader(path.read_bytes())
        table = pq.ParquetFile(content, page_checksum_verification=True).read()
        table.validate(full=True)
    except UnicodeDecodeError:
        return None, [f"{path.name}: cannot be read: a column's name or text is no UTF-8"]
    except (OSError, ValueError, pa.ArrowException) as error:
        return None, [f"{path.name}: cannot be read: {_one_line(error)}"]
    faults = schema_faults(table.schema, schema)
    version = version_of(table.schema)
    if not faults and want_version not in (None, version):
        faults = [f"schema_version is {version}, point.json has {want_version}"]
    if not faults and version is not None:
        faults = _value_faults(table, of_version(schema, version))
        strange = sorted(set(pc.unique(table.column("schema_version")).to_pylist()) - {version})
        if strange:
            faults.append(f"column schema_version holds {strange}, want {version}")
    named = [f"{path.name}: {fault}" for fault in faults]
    return (None if named else filled(table, schema)), named


def _entry_faults(folder: Path) -> list[str]:
    faults = []
    for path in sorted(folder.iterdir()):
        if path.name == "logs" and path.is_dir():
            continue
        if is_temporary(path):
            faults.append(f"{path.name}: half-written file of a run that was cut short")
        elif path.name not in (*POINT_FILES, *_MAY_HOLD):
            faults.append(f"{path.name}: does not belong into a point folder")
    return faults


def _read_document(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        return None, [f"{path.name}: cannot be read: {_one_line(error)}"]
    faults = [f"{path.name}: {fault}" for fault in document_faults(document)]
    return (None if faults else upgraded(document)), faults


def _value_faults(table: pa.Table, schema: pa.Schema) -> list[str]:
    faults = []
    for field in schema:
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            faults.append(f"column {field.name} holds {column.null_count} nulls, want none")
        words = allowed_words(field)
        strange = sorted(set(pc.unique(column).to_pylist()) - {None, *words}) if words else []
        if strange:
            faults.append(f"column {field.name} holds {strange}, allowed are {list(words)}")
    return faults


def _setting_faults(outcome: Outcome, samples: pa.Table) -> list[str]:
    """Settings that stand beside every sample are those of point.json."""
    faults = []
    for name, want in point_keys(outcome.point, outcome.records).items():
        found = pc.unique(samples.column(name)).to_pylist()
        if found not in ([], [want]):
            faults.append(f"samples.parquet: column {name} holds {found}, point.json has {want!r}")
    return faults


def _read_timeline(path: Path, document: dict[str, Any]) -> tuple[pa.Table | None, list[str]]:
    table, faults = read_table(path, TIMELINE, want_version=document["schema_version"])
    if table is None:
        return None, faults
    status = document["status"]
    if status != Status.ok.name:
        return table, [f"{TIMELINE_FILE}: status {status}, but a timeline is kept"]
    found = span_faults(table, num_ranks=len(document["ranks"]))
    return table, [f"{TIMELINE_FILE}: {fault}" for fault in found]


def _place_faults(folder: Path, document: dict[str, Any]) -> list[str]:
    faults = []
    named = outcome_of(document, samples={}, terms=()).point.folder
    if _SET_ASIDE.sub("", folder.name) != named:
        faults.append(f"point.json: ids give folder {named}, it lies in {folder.name}")
    parent = folder.resolve().parent.name
    if document["name"] != parent:
        faults.append(f"point.json: name is {document['name']}, it lies below {parent}")
    return faults


def _identity_faults(document: dict[str, Any], tables: dict[str, pa.Table]) -> list[str]:
    faults = []
    for file, table in tables.items():
        for key in _IDS:
            strange = sorted(set(pc.unique(table.column(key)).to_pylist()) - {document[key]})
            if strange:
                faults.append(f"{file}: {key} is {strange}, point.json has {document[key]}")
    ranks = [entry["rank"] for entry in document["ranks"]]
    if len(set(ranks)) != len(ranks):
        faults.append(f"point.json: ranks are {ranks}, want each once")
    measured = pc.unique(tables["samples.parquet"].column("rank")).to_pylist()
    unknown = sorted(set(measured) - set(ranks))
    if unknown:
        faults.append(f"samples.parquet: ranks {unknown} are not in point.json")
    return faults


def _outcome_faults(outcome: Outcome, samples: pa.Table) -> list[str]:
    """The rules that tie status, reason, verdicts and times to each other."""
    faults = _ok_faults(outcome) if outcome.status is Status.ok else _failure_faults(outcome)
    if faults:
        return faults
    try:
        to_parquet(summary_table([outcome], last_sweep=()))
    except (ValueError, TypeError, OverflowError) as error:
        return [f"point.json: gives no row of the summary: {_one_line(error)}"]
    return _time_faults(outcome, samples) if outcome.status is Status.ok else []


def _failure_faults(outcome: Outcome) -> list[str]:
    faults = []
    status = outcome.status.name
    if not outcome.reason:
        faults.append(f"point.json: status {status} without a reason")
    if outcome.terms or any(record.samples for record in outcome.records):
        faults.append(f"samples.parquet: status {status}, but times are kept")
    timed = sorted(set(outcome.figures) - set(POINT_FIGURES))
    if timed:
        faults.append(f"point.json: status {status}, but figures {timed} are kept")
    return faults


def _ok_faults(outcome: Outcome) -> list[str]:
    faults = []
    if outcome.reason:
        faults.append(f"point.json: status ok with a reason: {outcome.reason}")
    num_failed = sum(not v.passed for record in outcome.records for v in record.verdicts)
    if num_failed:
        faults.append(f"point.json: status ok, but {num_failed} comparisons failed")
    if not any(record.verdicts for record in outcome.records):
        faults.append("point.json: status ok, but nothing was compared with the oracle")
    if not any(record.samples for record in outcome.records):
        faults.append("samples.parquet: status ok, but nothing was measured")
    try:
        slowest_rank(outcome.records)
    except ValueError as error:
        faults.append(f"samples.parquet: {_one_line(error)}")
    return faults


def _word_faults(outcome: Outcome) -> list[str]:
    faults = []
    for key in ("operation", "executor"):
        words = allowed_words(SAMPLES.field(key))
        if getattr(outcome.point, key) not in words:
            faults.append(
                f"point.json: {key} is {getattr(outcome.point, key)}, allowed are {list(words)}"
            )
    stages = {v.stage for record in outcome.records for v in record.verdicts}
    if not stages <= {"before", "after"}:
        faults.append(f"point.json: verdict stages are {sorted(stages)}, want before or after")
    return faults


def _time_faults(outcome: Outcome, samples: pa.Table) -> list[str]:
    shortest = pc.min(samples.column("duration_ns")).as_py()
    if shortest < 0:
        return [f"samples.parquet: a duration is {shortest} ns, want 0 or more"]
    ranks = {record.rank for record in outcome.records}
    num_ranks = set(pc.unique(samples.column("num_ranks")).to_pylist())
    if num_ranks != {len(ranks)} or ranks != set(range(len(ranks))):
        return [f"samples.parquet: num_ranks is {sorted(num_ranks)}, ranks are {sorted(ranks)}"]
    if not outcome.terms:
        return []
    error_text = terms_error(outcome.terms)
    if error_text is not None:
        return [f"breakdown.parquet: {error_text}"]
    faults = [
        f"breakdown.parquet: term {term.term} is {i.value} ns outside {i.low}..{i.high} ns"
        for term in outcome.terms
        if (i := term.interval) is not None and not i.low <= i.value <= i.high
    ]
    series = slowest_rank(outcome.records)
    medians = {int(integer_median(times)) for (_, part), times in series.items() if part == "e2e"}
    total = next(term.interval for term in outcome.terms if term.term == "e2e")
    if total is not None and total.value not in medians:
        faults.append(
            f"breakdown.parquet: e2e is {total.value} ns, samples give {sorted(medians)} ns"
        )
    return faults


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
