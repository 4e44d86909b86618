"""Which points of a sweep count as done, and why others that look alike do not.

Knows nothing of how points run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilepipe.config.choices import Resume
from tilepipe.config.identity import defining
from tilepipe.records import Outcome, Point, Status
from tilepipe.results.check import TIMELINE_FILE, load_point
from tilepipe.results.store import stored_documents

__all__ = ["in_order", "reusable", "stale_because"]


def in_order(points: Sequence[Point], *, repetitions: int) -> list[Point]:
    """Each distinct point once a repetition; every repetition begins one point later.

    So no point is always measured first, or always after the same other one.
    """
    first: dict[tuple[str, str], Point] = {}
    for point in points:
        key = point.name, point.folder
        # Equal but for the timeline: the one that records it serves both.
        if key not in first or (_records(vars(point)) and not _records(vars(first[key]))):
            first[key] = point
    distinct = list(first.values())
    rounds = []
    for repetition in range(repetitions):
        start = repetition % max(1, len(distinct))
        turned = distinct[start:] + distinct[:start]
        rounds += [replace(point, repetition=repetition) for point in turned]
    return rounds


def reusable(results_dir: Path, point: Point, resume: Resume) -> Outcome | None:
    """The stored outcome of the same point by the same build, if it may stand for a new run."""
    folder = results_dir / point.name / point.folder
    if resume is Resume.none or not (folder / "point.json").is_file():
        return None
    outcome, faults = load_point(folder)
    if outcome is None or faults:
        return None
    if resume is Resume.ok and outcome.status is not Status.ok:
        return None
    if (
        _records(vars(point))
        and outcome.status is Status.ok
        and not (folder / TIMELINE_FILE).is_file()
    ):
        return None
    return outcome


def stale_because(results_dir: Path, points: Iterable[Point]) -> list[str]:
    """What has changed since equal points were measured that are not reused; sorted phrases."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        by_name.setdefault(point.name, []).append(point)
    changes: set[str] = set()
    for name, mine in by_name.items():
        documents = stored_documents(results_dir / name)
        for point in mine:
            changes |= _changes(point, documents)
    return sorted(changes)


def _changes(point: Point, documents: Sequence[Mapping[str, Any]]) -> set[str]:
    alike = [found for found in documents if found.get("config_id") == point.config_id]
    same_build = [found for found in alike if found.get("build_id") == point.build_id]
    if same_build:
        bare = any(
            found.get("status") == Status.ok.name and not _records(found) for found in same_build
        )
        return {"no timeline was recorded"} if bare and _records(vars(point)) else set()
    if alike:
        latest = max(alike, key=lambda found: str(found.get("ended_utc")))
        return set(_differences(latest.get("build", {}), point.build))
    config = defining(point.config)
    same = [found for found in documents if defining(found.get("config", {})) == config]
    files = [point.config.get(group, {}).get("path") for group in ("routing", "placement")]
    paths = " or ".join(path for path in files if path)
    return {f"{paths} has other content"} if same and paths else set()


def _records(described: Mapping[str, Any]) -> bool:
    """Whether a point, or the document of one, asks for a timeline."""
    return bool(described.get("config", {}).get("measure", {}).get("timeline"))


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Build facts that differ, in words: sources by package, libraries by version, the machine."""
    found = []
    for group, value in now.items():
        old = before.get(group)
        if old == value:
            continue
        if group == "sources" and isinstance(old, dict):
            names = [name for name in sorted({*old, *value}) if old.get(name) != value.get(name)]
            found += [f"sources of tilepipe/{name} changed" for name in names]
        elif group == "versions" and isinstance(old, dict):
            names = [name for name in sorted({*old, *value}) if old.get(name) != value.get(name)]
            found += [f"{name} {old.get(name)} -> {value.get(name)}" for name in names]
        else:
            found.append(f"{group} changed")
    return found
