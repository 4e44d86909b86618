"""A comparison as plain JSON values. Knows nothing of the screen."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

from tilepipe.compare.comparison import Comparison, Row, Shift
from tilepipe.compare.pairs import Side, device_of
from tilepipe.records import Interval

__all__ = ["document_of"]

FORMAT_VERSION = 1


def document_of(
    found: Comparison, a: Side, b: Side, *, tolerance: float, faults: Sequence[str]
) -> dict[str, Any]:
    """Everything that the tables show, and what they leave out, times in integer ns."""
    return {
        "format": "tilepipe.compare",
        "format_version": FORMAT_VERSION,
        "tolerance": tolerance,
        "sides": {side.label: _side(side) for side in (a, b)},
        "num_pairs": found.num_pairs,
        "counts": found.counts,
        "only_in": [
            {
                "side": lone.label,
                "name": lone.point.name,
                "config_id": lone.point.outcome.point.config_id,
                "repetition": lone.point.outcome.point.repetition,
                "differing": {
                    key: {"own": _finite(own), "nearest": _finite(other)}
                    for key, (own, other) in lone.differing.items()
                },
            }
            for lone in found.lone
        ],
        "facts": [{"fact": f.fact, "A": list(f.a), "B": list(f.b)} for f in found.facts],
        "verdicts": [_row(row) for row in found.rows],
        "breakdown": [_shift(shift) for shift in found.shifts],
        "not_judged": [
            {
                "name": each.name,
                "config_id": each.config_id,
                "repetition": each.repetition,
                "contender": each.contender,
                "reason": each.reason,
                "is_loss": each.is_loss,
            }
            for each in found.unjudged
        ],
        "notes": found.notes,
        "faults": list(faults),
    }


def _side(side: Side) -> dict[str, Any]:
    outcomes = [point.outcome for point in side.points]
    return {
        "num_points": len(side.points),
        "builds": sorted({outcome.point.build_id for outcome in outcomes}),
        "executors": sorted({point.executor for point in side.points}),
        "devices": sorted({device_of(point) for point in side.points}),
        "started_utc": min((outcome.started_utc for outcome in outcomes), default=""),
        "ended_utc": max((outcome.ended_utc for outcome in outcomes), default=""),
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "config_id": row.config_id,
        "executor": row.executor,
        "rounds": list(row.rounds),
        "contender": row.contender,
        "component": row.component,
        "num_iters": {"A": row.num_iters[0], "B": row.num_iters[1]},
        "median_ns": {"A": row.a_ns, "B": row.b_ns},
        "ratio": row.ratio.value,
        "low": row.ratio.low,
        "high": row.ratio.high,
        "method": row.ratio.method,
        "reason": row.ratio.reason,
        "verdict": row.verdict.name,
        "settings": {key: _finite(value) for key, value in row.settings.items()},
    }


def _shift(shift: Shift) -> dict[str, Any]:
    return {
        "name": shift.name,
        "config_id": shift.config_id,
        "rounds": list(shift.rounds),
        "term": shift.term,
        "value_ns": {"A": shift.a_ns, "B": shift.b_ns},
        "difference": _interval(shift.difference),
    }


def _interval(interval: Interval | None) -> dict[str, int] | None:
    if interval is None:
        return None
    return {"value_ns": interval.value, "low_ns": interval.low, "high_ns": interval.high}


def _finite(value: Any) -> Any:
    """A setting as it is; JSON has no infinity, so that one is a word."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value
