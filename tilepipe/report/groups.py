"""Which rows belong into one figure, and how their settings are spelled.

Knows nothing of what is drawn. Rows are those of a points table; everything is in a fixed order.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tilepipe.records import Status
from tilepipe.report.points import SETTINGS
from tilepipe.results.accounting import MAIN

__all__ = [
    "MODEL",
    "OF_A_COPY",
    "OWN",
    "WORLD",
    "Group",
    "chunked",
    "grouped",
    "joined",
    "label",
    "main_rows",
    "ok_rows",
    "owner_of",
    "spell",
    "titled",
    "varying",
]

Row = dict[str, Any]

# Times of models that differ in these lie far apart, on no common axis.
MODEL = ("hidden", "intermediate")
# Rows that differ in one of these are never drawn into one figure.
WORLD = (
    "machine",
    "executor",
    "name",
    "operation",
    "hardware",
    "fabric",
    "num_ranks",
    "dtype",
    "l2",
    "regime",
    "pace_gbps",
    "pace_latency_ns",
    "num_warmups",
    *MODEL,
)
# Settings that mean something for one copy only.
OF_A_COPY = ("num_comm_warps", "num_loads", "num_stages", "stage_bytes", "flag_batch")
# Not repeated in the titles of figures: the section and the caption say them.
_NOT_IN_TITLES = ("machine", "executor", "name", "operation", "hardware", "num_warmups")
# Settings by which rows of one figure may differ.
OWN = tuple(name for name in SETTINGS if name not in WORLD)
# Setting -> how a value of it is told; others as `setting value`.
_SPELLED = {
    "num_tokens": "{} tokens",
    "num_ranks": "{} ranks",
    "num_comm_ctas": "{} CTAs",
    "num_comm_warps": "{} warps",
    "num_loads": "{} loads",
    "num_stages": "{} stages",
    "stage_bytes": "{} bytes a stage",
    "flag_batch": "{} rows a fence",
    "planner": "plan by {}",
    "granularity": "flags by {}",
    "home_granularity": "home by {}",
    "repetition": "round {}",
    "num_experts": "{} experts",
    "num_topk": "top-{}",
    "num_redundant": "{} redundant",
    "l2": "L2 {}",
    "pace_gbps": "paced to {:g} GB/s",
    "pace_latency_ns": "flags {} ns late",
    "routing_layer": "layer {}",
}
_BARE = ("copy", "order", "law", "layout", "regime", "machine", "name", "hardware", "fabric")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that agree in everything but what the figure varies."""

    title: str  # settings in which it differs from others of its experiment; may be empty
    rows: tuple[Row, ...]


def ok_rows(points: pa.Table) -> list[Row]:
    """Rows with times, by settings."""
    rows = [row for row in points.to_pylist() if row["status"] == Status.ok.name]
    return sorted(rows, key=lambda row: (_place(row, SETTINGS), row["contender"]))


def main_rows(rows: Iterable[Row]) -> list[Row]:
    """Of each point the row of the contender that its operation is about."""
    return [row for row in rows if row["contender"] == MAIN.get(row["operation"], row["operation"])]


def grouped(rows: Sequence[Row], columns: Collection[str]) -> list[Group]:
    """Rows by equal values of these settings."""
    names = [name for name in SETTINGS if name in columns]
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in sorted(rows, key=lambda row: _place(row, names)):
        found.setdefault(tuple(row[name] for name in names), []).append(row)
    groups = []
    for group in found.values():
        siblings = [row for row in rows if row["name"] == group[0]["name"]]
        told = [name for name in varying(siblings, names) if name not in _NOT_IN_TITLES]
        groups.append(Group(title=label(group[0], told), rows=tuple(group)))
    return groups


def chunked(group: Group, *, limit: int, columns: Sequence[str], cut: Sequence[str]) -> list[Group]:
    """The group cut by a setting, then by more, until no part has over `limit` distinct rows.

    `columns` set the rows of a figure apart; it is cut by one of `cut`, the one with the fewest
    values first. What none of them can cut stays as it is.
    """
    size = len({_place(row, columns) for row in group.rows})
    names = varying(group.rows, cut)
    if size <= limit or not names:
        return [group]
    counts = {name: len({_key(row[name]) for row in group.rows}) for name in names}
    name = min(names, key=lambda name: counts[name])
    parts = []
    for part in grouped(group.rows, [name]):
        title = joined(group.title, part.title)
        rest = [other for other in cut if other != name]
        parts += chunked(Group(title=title, rows=part.rows), limit=limit, columns=columns, cut=rest)
    return parts


def varying(rows: Sequence[Row], columns: Iterable[str]) -> list[str]:
    """Those of the settings in which the rows differ.

    One that belongs to a copy or a law counts only where rows of one copy or law differ in it.
    """
    return [name for name in columns if _varies(rows, name)]


def owner_of(name: str) -> str | None:
    """The setting whose values alone give this one a meaning; None for one that always has one."""
    return "law" if name.startswith("routing_") else "copy" if name in OF_A_COPY else None


def _varies(rows: Sequence[Row], name: str) -> bool:
    owner = owner_of(name)
    if owner is None:
        return len({_key(row[name]) for row in rows}) > 1
    return len({(_key(row[owner]), _key(row[name])) for row in rows}) > len(
        {_key(row[owner]) for row in rows}
    )


def label(row: Row, columns: Iterable[str]) -> str:
    """The row's values of these settings, null ones left out."""
    return ", ".join(spell(name, row[name]) for name in columns if row[name] is not None)


def spell(setting: str, value: Any) -> str:
    """A value as a reader would say it."""
    if setting in _BARE:
        return str(value)
    if setting in _SPELLED:
        text = _SPELLED[setting].format(value)
        return re.sub(r"^1 (\w+)s\b", r"1 \1", text)
    return f"{setting.removeprefix('routing_').replace('_', ' ')} {value}"


def joined(*words: str) -> str:
    """Words with a comma between, empty ones left out."""
    return ", ".join(word for word in words if word)


def titled(what: str, group: Group) -> str:
    """A figure's title: what it shows, of which experiment, under which settings."""
    return joined(f"{group.rows[0]['name']}: {what}", group.title)


def _place(row: Row, columns: Iterable[str]) -> tuple[Any, ...]:
    return tuple(_key(row[name]) for name in columns)


def _key(value: Any) -> tuple[bool, Any]:
    """Sorts null last; two values of one setting are of one type."""
    return value is None, 0 if value is None else value
