"""Which point of A is compared with which of B, and which have no counterpart.

Knows nothing of times.
"""

import json
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.identity import defining
from tilepipe.results.reading import StoredPoint

__all__ = ["Lone", "Pairing", "Side", "device_of", "pair", "settings_of", "side"]

Pair = tuple[StoredPoint, StoredPoint]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two things compared: one point per experiment, configuration and round."""

    label: str  # A or B
    points: tuple[StoredPoint, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Lone:
    """A point without counterpart, and how it differs from the nearest point of the other side."""

    label: str
    point: StoredPoint
    differing: dict[str, tuple[Any, Any]]  # key -> (its value, the other's); empty without other


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """All points of both sides, paired or alone."""

    pairs: list[Pair] = field(default_factory=list)
    lone: list[Lone] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def side(label: str, points: Sequence[StoredPoint], *, build_id: str | None) -> Side:
    """One point each of what may have been measured by several builds.

    Raises ValueError for a build that is not there.
    """
    builds = sorted({point.outcome.point.build_id for point in points})
    if build_id is not None:
        points = [point for point in points if point.outcome.point.build_id == build_id]
        if not points:
            raise ValueError(
                f"--build-{label.lower()} {build_id}: {label} has no such build, "
                f"name one of {', '.join(builds)}"
            )
    newest: dict[tuple[str, str, int], StoredPoint] = {}
    for point in sorted(points, key=lambda point: point.outcome.ended_utc):
        mine = point.outcome.point
        newest[mine.name, mine.config_id, mine.repetition] = point
    left = len(points) - len(newest)
    note = (
        f"{label} holds several builds ({', '.join(builds)}): the newest run of each point is "
        f"taken, {left} older ones are not; --build-{label.lower()} ID chooses"
    )
    return Side(label=label, points=tuple(newest.values()), notes=(note,) if left else ())


def pair(a: Side, b: Side, *, unlike: bool) -> Pairing:
    """Pair points of equal executor, configuration and round.

    First by config_id. Then by settings, leaving out keys that one side does not know at all: a
    version that adds a key gives every point another config_id. `unlike` also leaves out the
    hardware. Both want the counterpart to be the only one.
    """
    found = Pairing()
    left, right = list(a.points), list(b.points)
    _take(found, left, right, _by_id, unique=False)
    new_keys = _unknown_keys(a.points, b.points)
    before = len(found.pairs)
    _take(found, left, right, _by_settings(new_keys), unique=True)
    if len(found.pairs) > before:
        found.notes.append(_told_new_keys(found.pairs[before:], new_keys))
    if unlike:
        _take(found, left, right, _by_settings(new_keys, "hardware."), unique=True)
    for label, mine, others in (("A", left, b.points), ("B", right, a.points)):
        found.lone.extend(
            Lone(label=label, point=point, differing=differing)
            for point, differing in zip(mine, _nearest(mine, others), strict=True)
        )
    found.pairs.sort(key=lambda pair: _place(pair[0]))
    return found


def settings_of(point: StoredPoint) -> dict[str, Any]:
    """What defines the measurement: `group.key` -> value, and the round."""
    flat: dict[str, Any] = {}
    for group, value in defining(point.document["config"]).items():
        if isinstance(value, dict):
            flat |= {f"{group}.{key}": inner for key, inner in value.items()}
        else:
            flat[group] = value
    # A source is where the value beside it was read; another wording is no other setting.
    kept = {key: value for key, value in flat.items() if not key.endswith("_source")}
    return {**kept, "repetition": point.outcome.point.repetition}


def device_of(point: StoredPoint) -> str:
    """The machine in words: kinds of GPUs, or the CPU and its cores."""
    build = point.document["build"]
    if point.executor == "cuda":
        names = build.get("gpus")
        kinds = sorted({str(name) for name in names}) if isinstance(names, list) else []
        return ", ".join(kinds) or "an unknown GPU"
    cores = build.get("cores")
    return f"{build.get('cpu') or 'an unknown CPU'}{f' with {cores} cores' if cores else ''}"


def _take(
    found: Pairing,
    left: list[StoredPoint],
    right: list[StoredPoint],
    key: Callable[[StoredPoint], Hashable],
    *,
    unique: bool,
) -> None:
    """Move pairs of equal keys from left and right into found; those of equal name first."""
    for named in (True, False):
        mine, theirs = (
            [(key(point), point.executor, point.name if named else None) for point in points]
            for points in (left, right)
        )
        counts = Counter(mine), Counter(theirs)
        waiting: dict[Hashable, deque[int]] = {}
        for place, full in enumerate(theirs):
            waiting.setdefault(full, deque()).append(place)
        taken: tuple[set[int], set[int]] = set(), set()
        for place, full in enumerate(mine):
            if not waiting.get(full) or (unique and any(count[full] != 1 for count in counts)):
                continue
            there = waiting[full].popleft()
            found.pairs.append((left[place], right[there]))
            taken[0].add(place)
            taken[1].add(there)
        for points, gone in zip((left, right), taken, strict=True):
            points[:] = [point for place, point in enumerate(points) if place not in gone]


def _by_id(point: StoredPoint) -> Hashable:
    return point.outcome.point.config_id, point.outcome.point.repetition


def _by_settings(left_out: Mapping[str, str], *groups: str) -> Callable[[StoredPoint], Hashable]:
    def key(point: StoredPoint) -> Hashable:
        kept = {
            name: value
            for name, value in settings_of(point).items()
            if name not in left_out and not name.startswith(groups)
        }
        return json.dumps(kept, sort_keys=True, default=str)

    return key


def _unknown_keys(a: Iterable[StoredPoint], b: Iterable[StoredPoint]) -> dict[str, str]:
    """Key that the points of one side know and none of the other -> the side that knows it.

    Only of points of one operation and law: keys of a kernel that a side did not run are no news.
    """
    known: list[dict[tuple[Any, Any], set[str]]] = [{}, {}]
    for keys, points in zip(known, (a, b), strict=True):
        for point in points:
            settings = settings_of(point)
            kind = (settings.get("operation"), settings.get("routing.law"))
            keys.setdefault(kind, set()).update(settings)
    found: dict[str, str] = {}
    for kind in known[0].keys() & known[1].keys():
        found |= dict.fromkeys(known[0][kind] - known[1][kind], "A")
        found |= dict.fromkeys(known[1][kind] - known[0][kind], "B")
    return found


def _told_new_keys(pairs: Sequence[Pair], new_keys: Mapping[str, str]) -> str:
    seen: dict[str, set[str]] = {}
    for pair in pairs:
        for label, point in zip("AB", pair, strict=True):
            for key, value in settings_of(point).items():
                if new_keys.get(key) == label:
                    seen.setdefault(f"{key} only in {label}", set()).add(str(value))
    told = ", ".join(f"{key} ({', '.join(sorted(values))})" for key, values in sorted(seen.items()))
    return (
        f"{len(pairs)} points are paired although their config_ids differ: what differs is "
        f"{told or 'the wording of a source'}"
    )


def _nearest(
    points: Sequence[StoredPoint], others: Sequence[StoredPoint]
) -> Iterator[dict[str, tuple[Any, Any]]]:
    """For each point, in what the other that differs in the fewest settings differs: the first."""
    mine, theirs = ([settings_of(point) for point in side] for side in (points, others))
    if not theirs:
        yield from ({} for _ in mine)
        return
    keys = sorted({key for settings in (*mine, *theirs) for key in settings})
    codes = _codes([*mine, *theirs], keys)
    others_codes = codes[len(mine) :]
    for settings, code in zip(mine, codes[: len(mine)], strict=True):
        differs = others_codes != code
        nearest = int(np.count_nonzero(differs, axis=1).argmin())
        other = theirs[nearest]
        yield {
            key: (settings.get(key), other.get(key))
            for key, differ in zip(keys, differs[nearest], strict=True)
            if differ
        }


def _codes(
    rows: Sequence[Mapping[str, Any]], keys: Sequence[str]
) -> NDArray[np.int32]:  # (num_rows, num_keys)
    """A number for each value; equal values of one key have equal numbers, None what has none."""
    columns = []
    for key in keys:
        numbers: dict[Hashable, int] = {}
        values = (row.get(key) for row in rows)
        hashable = (v if isinstance(v, Hashable) else json.dumps(v, default=str) for v in values)
        columns.append([numbers.setdefault(value, len(numbers)) for value in hashable])
    return np.array(columns, np.int32).T


def _place(point: StoredPoint) -> tuple[str, str, int]:
    return point.name, point.outcome.point.config_id, point.outcome.point.repetition
