"""Turn outcomes into Arrow tables and back. Knows nothing of files, folders or reductions.

Every table is built against its explicit schema: an inferred one pins a column without values to
type null and drops keys that its first row lacks.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tilepipe.records import BreakdownTerm, Interval, Outcome, Sample, Span, SpanKind, SpanRole
from tilepipe.results.breakdown import breakdown_interval_kind
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SUMMARY, TIMELINE
from tilepipe.results.summary import identity, point_keys, slowest_rank, summary_rows

__all__ = [
    "breakdown_table",
    "samples_by_rank",
    "samples_table",
    "spans_by_rank",
    "stored_terms",
    "summary_table",
    "timeline_table",
    "to_parquet",
]

_SPAN_FIELDS = tuple(field.name for field in fields(Span))


def samples_table(outcome: Outcome) -> pa.Table:
    """One row per rank, contender, component and iteration, in the order they were taken."""
    rows = [
        (record.rank, record.counts.get("num_tokens"), sample)
        for record in outcome.records
        for sample in record.samples
    ]
    varying: dict[str, list[Any]] = {
        "contender": [sample.contender for _, _, sample in rows],
        "component": [sample.component for _, _, sample in rows],
        "rank": [rank for rank, _, _ in rows],
        "iteration": [sample.iteration for _, _, sample in rows],
        "start_ns": [sample.start_ns for _, _, sample in rows],
        "duration_ns": [sample.duration_ns for _, _, sample in rows],
        "num_tokens": [num_tokens for _, num_tokens, _ in rows],
    }
    constant = {**identity(outcome.point), **point_keys(outcome.point, outcome.records)}
    return _table(SAMPLES, {**{k: [v] * len(rows) for k, v in constant.items()}, **varying})


def samples_by_rank(table: pa.Table) -> dict[int, tuple[Sample, ...]]:
    """The samples of each rank that has any, in stored order."""
    names = ("rank", "contender", "component", "iteration", "start_ns", "duration_ns")
    columns = [table.column(name).to_pylist() for name in names]
    by_rank: dict[int, list[Sample]] = {}
    for rank, contender, component, iteration, start_ns, duration_ns in zip(*columns, strict=True):
        by_rank.setdefault(rank, []).append(
            Sample(
                contender=contender,
                component=component,
                iteration=iteration,
                start_ns=start_ns,
                duration_ns=duration_ns,
            )
        )
    return {rank: tuple(samples) for rank, samples in by_rank.items()}


def breakdown_table(outcome: Outcome) -> pa.Table:
    """One row per term; no rows where the operation has no breakdown."""
    num_iters = max((len(series) for series in slowest_rank(outcome.records).values()), default=0)
    terms = outcome.terms
    intervals = [term.interval for term in terms]
    columns: dict[str, list[Any]] = {
        **{key: [value] * len(terms) for key, value in identity(outcome.point).items()},
        "term": [term.term for term in terms],
        "value_ns": [None if i is None else i.value for i in intervals],
        "low_ns": [None if i is None else i.low for i in intervals],
        "high_ns": [None if i is None else i.high for i in intervals],
        "interval_kind": [
            None if i is None else breakdown_interval_kind(num_iters) for i in intervals
        ],
        "stamped_ns": [term.stamped_ns for term in terms],
        "stamped_loss_ns": [term.stamped_loss_ns for term in terms],
    }
    return _table(BREAKDOWN, columns)


def stored_terms(table: pa.Table) -> tuple[BreakdownTerm, ...]:
    """The terms of one point in stored order."""
    names = ("term", "value_ns", "low_ns", "high_ns", "stamped_ns", "stamped_loss_ns")
    columns = [table.column(name).to_pylist() for name in names]
    return tuple(
        BreakdownTerm(
            term=term,
            interval=None if value is None else Interval(value=value, low=low, high=high),
            stamped_ns=stamped_ns,
            stamped_loss_ns=loss_ns,
        )
        for term, value, low, high, stamped_ns, loss_ns in zip(*columns, strict=True)
    )


def timeline_table(outcome: Outcome) -> pa.Table:
    """One row per span, rank by rank and lane by lane, in time order."""
    rows = [(record.rank, span) for record in outcome.records for span in record.spans]
    constant = {key: [value] * len(rows) for key, value in identity(outcome.point).items()}
    columns: dict[str, list[Any]] = {
        **{name: [getattr(span, name) for _, span in rows] for name in _SPAN_FIELDS},
        "role": [span.role.name for _, span in rows],
        "kind": [span.kind.name for _, span in rows],
        "rank": [rank for rank, _ in rows],
    }
    return _table(TIMELINE, {**constant, **columns})


def spans_by_rank(table: pa.Table) -> dict[int, tuple[Span, ...]]:
    """The spans of each rank, in stored order."""
    columns = [table.column(name).to_pylist() for name in _SPAN_FIELDS]
    by_rank: dict[int, list[Span]] = {}
    for rank, *values in zip(table.column("rank").to_pylist(), *columns, strict=True):
        told = dict(zip(_SPAN_FIELDS, values, strict=True))
        told |= {"role": SpanRole[told["role"]], "kind": SpanKind[told["kind"]]}
        by_rank.setdefault(rank, []).append(Span(**told))
    return {rank: tuple(spans) for rank, spans in sorted(by_rank.items())}


def summary_table(outcomes: Iterable[Outcome], *, last_sweep: Container[str]) -> pa.Table:
    """Rows of the outcomes; `last_sweep` holds the point folders of the sweep just run."""
    kept = [
        {**row, "last_sweep": outcome.point.folder in last_sweep}
        for outcome in outcomes
        for row in summary_rows([outcome])
    ]
    for row in kept:
        assert set(row) == set(SUMMARY.names), set(row) ^ set(SUMMARY.names)
    return _table(SUMMARY, {name: [row[name] for row in kept] for name in SUMMARY.names})


def to_parquet(table: pa.Table) -> bytes:
    """The file's content, so that writing it can be all or nothing."""
    sink = pa.BufferOutputStream()
    # Checksums let a reader tell a flipped bit from a number.
    pq.write_table(table, sink, write_page_checksum=True)
    return bytes(sink.getvalue())


def _table(schema: pa.Schema, columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    assert set(columns) == set(schema.names), set(columns) ^ set(schema.names)
    arrays = [_array(columns[field.name], field) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], field: pa.Field) -> pa.Array:
    try:
        return pa.array(values, type=field.type)
    except (OverflowError, pa.ArrowException) as error:
        strange = " ".join(str(error).split())
        raise ValueError(f"column {field.name} takes {field.type}: {strange}") from error
