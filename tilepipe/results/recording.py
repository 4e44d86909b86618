"""Find and read the recorded launch of a stored point.

Knows nothing of how it is shown. Whatever keeps it from being read is one sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tilepipe.records import BreakdownTerm, Outcome, Point, Span, Status
from tilepipe.results.check import TIMELINE_FILE, examine_point
from tilepipe.results.folders import CUT_SHORT, folder_fault, is_point
from tilepipe.results.pointfile import command_of, is_changed
from tilepipe.results.store import UNDER_WAY, point_folders
from tilepipe.results.tables import spans_by_rank

__all__ = ["Recording", "point_folder", "read_recording", "recording_of"]


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded launch and what is needed to name it."""

    point: Point
    spans: Mapping[int, tuple[Span, ...]]  # by rank
    ended_utc: str
    device: str  # GPU or CPU in words
    commit: str | None  # short; `+` where sources were changed; None without a checkout
    terms: tuple[BreakdownTerm, ...] = ()  # of the point's breakdown

    @property
    def start_ns(self) -> int:
        """When the first rank began."""
        return min(found[0].start_ns for found in self.spans.values())

    @property
    def end_ns(self) -> int:
        """When the last rank ended."""
        return max(span.end_ns for found in self.spans.values() for span in found)

    @property
    def granularity(self) -> str:
        return str(self.point.config["kernel"].get("granularity"))


def point_folder(folder: Path) -> Path:
    """The folder itself where it is a point's, or the only point of an experiment's folder.

    Raises ValueError where it is neither.
    """
    fault = folder_fault(folder, "a point's, as in outputs/NAME/ID")
    if fault is not None:
        raise ValueError(fault)
    if is_point(folder):
        return folder
    found = point_folders(folder)
    if len(found) == 1:
        return found[0]
    if not found:
        raise ValueError(f"{folder}: holds no point that ended: name a point's folder")
    recorded = [path for path in found if (path / TIMELINE_FILE).is_file()]
    example = (recorded or found)[0].name
    raise ValueError(f"{folder}: holds {len(found)} points: name one of them, as in {example}")


def read_recording(folder: Path) -> Recording:
    """The recording in a point's folder, wherever it was moved to, of this or an older version.

    Raises ValueError for a point that has none, or that is not sound.
    """
    if folder.suffix == UNDER_WAY or not (folder / "point.json").is_file():
        raise ValueError(f"{folder}: {CUT_SHORT}")
    stored, faults = examine_point(folder, anywhere=True)
    if stored is None or faults:
        raise ValueError(f"{folder}/{faults[0]}: run the point again with resume=none")
    outcome = stored.outcome
    if outcome.status is not Status.ok:
        status = outcome.status.name
        raise ValueError(f"{folder}: the point ended {status}, so no launch was recorded")
    if stored.timeline is None:
        raise ValueError(f"{folder}: no launch was recorded: {_remedy(outcome.point)}")
    return recording_of(outcome, stored.document, stored.timeline)


def recording_of(outcome: Outcome, document: Mapping[str, Any], timeline: pa.Table) -> Recording:
    """The recording of a sound point, from its point.json and its table of spans."""
    return Recording(
        point=outcome.point,
        spans=spans_by_rank(timeline),
        ended_utc=outcome.ended_utc,
        device=_device(outcome.point),
        commit=_commit(document["provenance"]),
        terms=outcome.terms,
    )


def _remedy(point: Point) -> str:
    if point.executor != "host" and point.operation not in ("dispatch_gemm", "gemm_combine"):
        return "on a GPU only dispatch_gemm and gemm_combine record one; type hardware=cpu"
    others = (word for word in point.overrides if not word.startswith("measure.timeline="))
    wanted = replace(point, overrides=(*others, "measure.timeline=true"))
    return f"type {command_of(wanted)}"


def _device(point: Point) -> str:
    if point.executor == "host":
        return f"{point.build.get('cpu')}, {point.build.get('cores')} cores"
    gpus = point.build.get("gpus") or ["unknown GPU"]
    return ", ".join(f"{gpus.count(name)} x {name}" for name in sorted(set(gpus)))


def _commit(provenance: Mapping[str, Any]) -> str | None:
    git = provenance.get("git") or {}
    commit = git.get("commit")
    return f"{commit[:8]}{'+' if is_changed(git) else ''}" if commit else None
