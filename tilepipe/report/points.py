"""All points below a folder as two Arrow tables. Knows nothing of figures or pages.

`POINTS` is the summary, one row per point and contender, with the time of the work (plan left out)
and its interval made anew from the samples, and with what a caption needs. `TERMS` is a breakdown,
one row per term, each with the columns of its point.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from tilepipe.config.choices import Regime
from tilepipe.records import Status
from tilepipe.results.breakdown import breakdown_interval_kind
from tilepipe.results.pointfile import command_of, is_changed
from tilepipe.results.reading import StoredPoint, read_results
from tilepipe.results.schema import SUMMARY
from tilepipe.results.summary import reduce_series, slowest_rank, summary_rows

__all__ = ["POINTS", "SETTINGS", "TERMS", "Found", "find_points"]

# What a row tells beside the settings of its point: results, and how the point went.
_NO_SETTINGS = {
    "schema_version",
    "config_id",
    "build_id",
    "status",
    "reason",
    "last_sweep",
    "started_utc",
    "ended_utc",
    "num_tokens_total",
    "sm_clock_mhz",
    "sm_clock_min_mhz",
    "sm_clock_max_mhz",
    "power_w",
    "temperature_c",
    "clock_reasons",
    "throttled",
}
_CAPTION_FIELDS = [
    ("machine", pa.string()),  # the GPU's name, with executor host the CPU's
    ("commit", pa.string()),
    ("dirty", pa.bool_()),  # sources that were not committed
    ("num_gpus", pa.int64()),
    ("link_gbps", pa.float64()),  # hardware's, one direction
    ("hbm_gbps", pa.float64()),
    ("folder", pa.string()),
    ("command", pa.string()),
]
_WORK_FIELDS = [
    ("work_ns", pa.int64()),  # median of stage; of e2e where no stage shows, as with chained
    ("work_low_ns", pa.int64()),
    ("work_high_ns", pa.int64()),
]
_TERM_FIELDS = [
    ("term", pa.string()),
    ("value_ns", pa.int64()),  # null where nothing was measured
    ("term_low_ns", pa.int64()),
    ("term_high_ns", pa.int64()),
    ("term_kind", pa.string()),
]
# Columns that set points apart, in the summary's order: points are grouped by them. Whatever a
# later schema adds before `contender` is one.
SETTINGS = (
    "machine",
    *(
        name
        for name in SUMMARY.names[: SUMMARY.names.index("contender")]
        if name not in _NO_SETTINGS
    ),
)
POINTS = pa.schema(
    [
        *(pa.field(f.name, f.type) for f in SUMMARY if f.name != "last_sweep"),
        *(pa.field(name, kind) for name, kind in [*_CAPTION_FIELDS, *_WORK_FIELDS]),
    ]
)
TERMS = pa.schema([*POINTS, *(pa.field(name, kind) for name, kind in _TERM_FIELDS)])


@dataclass(frozen=True, kw_only=True)
class Found:
    """Everything below a folder."""

    points: pa.Table  # schema POINTS
    terms: pa.Table  # schema TERMS
    faults: tuple[str, ...] = ()  # sentences: what could not be read
    notes: tuple[str, ...] = ()  # sentences: what a reader of the points must know
    num_replaced: int = 0  # points left out: one of the same settings ended later
    recorded: Mapping[str, StoredPoint] = field(default_factory=dict)  # by folder: has a timeline


def find_points(root: Path) -> Found:
    """Read every point below root, which must be a folder; of equal settings the last counts."""
    reading = read_results(root)
    faults, rows_of = list(reading.faults), []
    for point in reading.points:
        try:
            rows_of.append((point, _rows_of(point, root)))
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            faults.append(f"{point.folder}: {' '.join(str(error).split())}")
    latest = _latest(rows_of)
    return Found(
        points=_table(POINTS, [row for _, rows in latest for row in rows]),
        terms=_table(TERMS, [row for point, rows in latest for row in _terms_of(point, rows)]),
        faults=tuple(faults),
        # Whoever reads the report knows which folder it is of.
        notes=tuple(note.removeprefix(f"{root}: ") for note in reading.notes),
        num_replaced=len(rows_of) - len(latest),
        recorded={rows[0]["folder"]: point for point, rows in latest if point.timeline is not None},
    )


_Read = tuple[StoredPoint, list[dict[str, Any]]]


def _latest(read: list[_Read]) -> list[_Read]:
    """Of each setting the last point that ended ok, and the last other one if it came after."""
    done: dict[tuple[Any, ...], _Read] = {}
    failed: dict[tuple[Any, ...], _Read] = {}
    for entry in sorted(read, key=lambda entry: _ended(entry[1][0])):
        first = entry[1][0]
        settings = tuple(first[name] for name in SETTINGS)
        if first["status"] == Status.ok.name:
            done[settings] = entry
            failed.pop(settings, None)
        else:
            failed[settings] = entry
    chosen = {id(entry) for entry in (*done.values(), *failed.values())}
    return [entry for entry in read if id(entry) in chosen]


def _ended(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["ended_utc"] or "", row["folder"]


def _rows_of(point: StoredPoint, root: Path) -> list[dict[str, Any]]:
    outcome = point.outcome
    inside = point.folder.relative_to(root)
    facts = {**_facts(point), "folder": str(inside) if inside.parts else root.resolve().name}
    series = slowest_rank(outcome.records)
    rows = []
    for row in summary_rows([outcome]):
        row.pop("last_sweep", None)
        contender = row["contender"]
        part = next((p for p in ("stage", "e2e", "plan") if (contender, p) in series), None)
        if row["regime"] == Regime.chained.name and (contender, "e2e") in series:
            part = "e2e"  # back to back no launch shows where its plan ended
        work: dict[str, Any] = dict.fromkeys(name for name, _ in _WORK_FIELDS)
        if part is not None:
            found = reduce_series(series[contender, part])
            work = {
                "work_ns": found.median_ns,
                "work_low_ns": found.low_ns,
                "work_high_ns": found.high_ns,
            }
        rows.append({**row, **facts, **work})
    return rows


def _terms_of(point: StoredPoint, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    terms = point.outcome.terms
    if not terms:
        return []
    base = next((row for row in rows if row["contender"] == "fused"), rows[0])
    kind = breakdown_interval_kind(base["num_iters"] or 0)
    return [
        {
            **base,
            "term": term.term,
            "value_ns": None if term.interval is None else term.interval.value,
            "term_low_ns": None if term.interval is None else term.interval.low,
            "term_high_ns": None if term.interval is None else term.interval.high,
            "term_kind": None if term.interval is None else kind,
        }
        for term in terms
    ]


def _facts(stored: StoredPoint) -> dict[str, Any]:
    """What a caption says of a point, null where its file does not say it."""
    point = stored.outcome.point
    provenance = stored.document.get("provenance") or {}
    git = provenance.get("git") or {}
    hardware = point.config.get("hardware") or {}
    build = point.build
    if point.executor == "cuda":
        machine = ", ".join(sorted(set(build.get("gpus") or []))) or hardware.get("gpu")
    else:
        machine = build.get("cpu") or (provenance.get("host") or {}).get("cpu_model")
    return {
        "machine": machine or "unknown machine",
        "commit": git.get("commit"),
        "dirty": is_changed(git),
        "num_gpus": hardware.get("num_gpus"),
        "link_gbps": hardware.get("link_gbps"),
        "hbm_gbps": hardware.get("hbm_gbps"),
        "command": command_of(point),
    }


def _table(schema: pa.Schema, rows: list[dict[str, Any]]) -> pa.Table:
    arrays = [pa.array([row[f.name] for row in rows], type=f.type) for f in schema]
    return pa.Table.from_arrays(arrays, schema=schema)
