"""What else differs between the two sides: build, libraries, machine, clocks.

Knows nothing of times or of how points were paired.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilepipe.results.pointfile import is_changed
from tilepipe.results.reading import StoredPoint

__all__ = ["Fact", "differing_facts"]

# Of a GPU, in provenance: what is a property of it, not of the moment.
_OF_A_GPU = (
    *("name", "uuid", "compute_capability", "memory_bytes", "max_sm_clock_mhz"),
    *("power_limit_mw", "mig_enabled"),
)
# Columns of the summary that say under which conditions a point was timed.
_CONDITIONS = ("sm_clock_mhz", "clock_reasons", "throttled")


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A fact that differs, with every value that points of a side have for it, in words."""

    fact: str
    a: tuple[str, ...]
    b: tuple[str, ...]


def differing_facts(a: Sequence[StoredPoint], b: Sequence[StoredPoint]) -> list[Fact]:
    """Facts whose values differ between the sides, in a fixed order: the build first."""
    sides = (_values(a), _values(b))
    names = dict.fromkeys([*sides[0], *sides[1]])
    facts = [Fact(fact=name, a=_told(sides[0], name), b=_told(sides[1], name)) for name in names]
    return [fact for fact in facts if fact.a != fact.b]


def _values(points: Iterable[StoredPoint]) -> dict[str, set[str]]:
    values: dict[str, set[str]] = {}
    for point in points:
        for name, value in {**_facts(point), **_conditions(point)}.items():
            values.setdefault(name, set()).add("none" if value is None else str(value))
    return values


def _told(values: Mapping[str, set[str]], name: str) -> tuple[str, ...]:
    return tuple(sorted(values.get(name, ())))


def _facts(point: StoredPoint) -> dict[str, Any]:
    document = point.document
    build, known = document["build"], document["provenance"]
    git, gpu = _mapping(known, "git"), _mapping(known, "gpu")
    cards = gpu.get("gpus")
    facts = {
        "build_id": document["build_id"],
        "commit": git.get("commit"),
        # Equal hashes are equal sources; a clean checkout has none.
        "uncommitted changes": git.get("diff_hash") if is_changed(git) else None,
        "tilepipe": known.get("tilepipe"),
        "schema version": point.version,
    }
    facts |= {f"sources of {k}": str(v)[:12] for k, v in _mapping(build, "sources").items()}
    facts |= {"python": known.get("python")}
    facts |= {**_mapping(build, "versions"), **_mapping(known, "packages")}
    facts |= {f"GPU {key}": gpu.get(key) for key in ("driver", "cuda_driver")}
    for card in cards if isinstance(cards, list) else ():
        if isinstance(card, dict):
            facts |= {f"GPU {key}": card.get(key) for key in _OF_A_GPU}
    facts |= {f"host {key}": value for key, value in _mapping(known, "host").items()}
    facts |= {"cores usable": build.get("cores")}
    facts |= {f"environment {k}": v for k, v in _mapping(known, "environment").items()}
    return facts


def _conditions(point: StoredPoint) -> dict[str, Any]:
    rows = point.summary.select(_CONDITIONS).to_pylist()
    return rows[0] if rows and rows[0]["sm_clock_mhz"] is not None else {}


def _mapping(holder: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = holder.get(key)
    return value if isinstance(value, dict) else {}
