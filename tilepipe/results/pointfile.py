"""What point.json holds: everything of an outcome but its samples and terms.

Knows nothing of files or tables. Strict JSON: an error that is not finite becomes a word.
"""

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np

from tilepipe.records import (
    BreakdownTerm,
    Clocks,
    Outcome,
    Point,
    RankRecord,
    Sample,
    Status,
    Verdict,
)
from tilepipe.results.schema import POINT_FIGURES, SCHEMA_VERSION
from tilepipe.results.versions import version_fault

__all__ = [
    "KEYS",
    "command_of",
    "document_faults",
    "document_of",
    "is_changed",
    "kept",
    "outcome_of",
    "to_json",
    "upgraded",
]

_HASH_OF_NOTHING = "e3b0c44298fc1c14"
# Key -> type of its value; `ranks` holds one entry per rank record.
KEYS: dict[str, type] = {
    "schema_version": int,
    "name": str,
    "operation": str,
    "executor": str,
    "config_id": str,
    "build_id": str,
    "build": dict,
    "repetition": int,
    "status": str,
    "reason": str,
    "command": str,
    "started_utc": str,
    "ended_utc": str,
    "figures": dict,
    "left_out": list,
    "ranks": list,
    "choices": dict,
    "overrides": list,
    "config": dict,
    "provenance": dict,
}
_RANK_KEYS: dict[str, type] = {"rank": int, "counts": dict, "verdicts": list, "clocks": object}
# Key of the document, or `ranks/` and key of a rank's entry -> the version that brought it, and
# what an older document is read as. Keys not named here are of version 1.
_ADDED_IN: dict[str, tuple[int, Any]] = {"ranks/clocks": (2, None), "left_out": (3, [])}
_CLOCKS_KEYS: dict[str, type] = {
    "sm_mhz": int,
    "sm_mhz_min": int,
    "sm_mhz_max": int,
    "power_w_max": float,
    "temperature_c_max": int,
    "reasons": list,
    "num_samples": int,
}
_VERDICT_KEYS: dict[str, type] = {
    "contender": str,
    "stage": str,
    "passed": bool,
    "num_values": int,
    "num_wrong": int,
    "max_error": object,
    "detail": str,
}


def kept(outcome: Outcome) -> Outcome:
    """The part of an outcome that may be stored: a point that is not ok keeps no time."""
    if outcome.status is Status.ok:
        return outcome
    return replace(
        outcome,
        records=tuple(replace(record, samples=(), spans=()) for record in outcome.records),
        terms=(),
        figures={key: value for key, value in outcome.figures.items() if key in POINT_FIGURES},
    )


def command_of(point: Point) -> str:
    """The one command that composes and runs this point again."""
    return " ".join(["python -m tilepipe.run", *(shlex.quote(word) for word in point.overrides)])


def is_changed(git: Mapping[str, Any]) -> bool:
    """Whether sources had changes that were in no commit; `git` as in a file's provenance.

    Some call a checkout dirty for new files beside its sources; their hash is that of nothing.
    """
    return bool(git.get("dirty")) and git.get("diff_hash") != _HASH_OF_NOTHING


def document_of(outcome: Outcome, provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Content of point.json, keys as in KEYS."""
    point = outcome.point
    return {
        "schema_version": SCHEMA_VERSION,
        "name": point.name,
        "operation": point.operation,
        "executor": point.executor,
        "config_id": point.config_id,
        "build_id": point.build_id,
        "build": point.build,
        "repetition": point.repetition,
        "status": outcome.status.name,
        "reason": outcome.reason,
        "command": command_of(point),
        "started_utc": outcome.started_utc,
        "ended_utc": outcome.ended_utc,
        "figures": outcome.figures,
        "left_out": list(outcome.left_out),
        "ranks": [
            {
                "rank": record.rank,
                "counts": record.counts,
                "verdicts": [_verdict_document(verdict) for verdict in record.verdicts],
                "clocks": None if record.clocks is None else vars(record.clocks),
            }
            for record in outcome.records
        ],
        "choices": point.choices,
        "overrides": list(point.overrides),
        "config": point.config,
        "provenance": dict(provenance),
    }


def to_json(document: Mapping[str, Any]) -> bytes:
    """UTF-8, indented, no NaN; the config must be a plain container, enums by name."""
    text = json.dumps(document, indent=2, allow_nan=False, default=_plain, ensure_ascii=False)
    return (text + "\n").encode()


def outcome_of(
    document: Mapping[str, Any],  # free of faults
    *,
    samples: Mapping[int, tuple[Sample, ...]],  # by rank
    terms: tuple[BreakdownTerm, ...],
) -> Outcome:
    """The outcome that was stored; config values are what JSON made of them."""
    point = Point(
        **{key: document[key] for key in ("name", "operation", "executor", "config_id")},
        build_id=document["build_id"],
        build=document["build"],
        repetition=document["repetition"],
        config=document["config"],
        choices=document["choices"],
        overrides=tuple(document["overrides"]),
    )
    return Outcome(
        point=point,
        status=Status[document["status"]],
        reason=document["reason"],
        records=tuple(
            RankRecord(
                rank=entry["rank"],
                samples=samples.get(entry["rank"], ()),
                verdicts=tuple(
                    Verdict(**{**verdict, "max_error": float(verdict["max_error"])})
                    for verdict in entry["verdicts"]
                ),
                counts=entry["counts"],
                clocks=_clocks_of(entry["clocks"]),
            )
            for entry in document["ranks"]
        ),
        terms=terms,
        figures=document["figures"],
        left_out=tuple(document["left_out"]),
        started_utc=document["started_utc"],
        ended_utc=document["ended_utc"],
    )


def document_faults(document: Any) -> list[str]:
    """What keeps `outcome_of` from reading the document, one sentence each."""
    if not isinstance(document, dict):
        return ["is no JSON object"]
    fault = version_fault(document.get("schema_version"))
    if fault is not None:
        return [fault]
    version: int = document["schema_version"]
    faults = _key_faults(document, _keys_of(version, KEYS, ""), "")
    if faults:
        return faults
    if document["status"] not in Status.__members__:
        faults.append(f"status is {document['status']}, want one of {list(Status.__members__)}")
    for key, value in document["figures"].items():
        if not _is_number(value) or not math.isfinite(value):
            faults.append(f"figure {key} is {value!r}, want a finite number")
    for key in ("overrides", "left_out"):
        if not all(isinstance(word, str) for word in document.get(key, ())):
            faults.append(f"{key} holds something else than words")
    for entry in document["ranks"]:
        faults += _rank_faults(entry, version)
    return faults + _inner_faults(document)


def _inner_faults(document: Mapping[str, Any]) -> list[str]:
    """What lies a step below a key and is shown by itself."""
    faults = []
    git, gpus = document["provenance"].get("git"), document["build"].get("gpus")
    if git is not None and not isinstance(git, dict):
        faults.append(f"provenance key git is {git!r}, want an object or null")
    elif git and not isinstance(git.get("commit"), str | None):
        faults.append(f"provenance key git/commit is {git['commit']!r}, want a word or null")
    if gpus is not None and not (isinstance(gpus, list) and all(isinstance(g, str) for g in gpus)):
        faults.append(f"build key gpus is {gpus!r}, want a list of words or null")
    operation = document["config"].get("operation", "")
    if not isinstance(operation, str):
        faults.append(f"config key operation is {operation!r}, want a word")
    return faults


def upgraded(document: Mapping[str, Any]) -> dict[str, Any]:
    """A document free of faults with today's keys, those of later versions filled in.

    `schema_version` stays what was stored.
    """
    later = {
        key: value
        for key, (version, value) in _ADDED_IN.items()
        if version > document["schema_version"]
    }
    of_ranks = {k.removeprefix("ranks/"): v for k, v in later.items() if k.startswith("ranks/")}
    of_point = {k: v for k, v in later.items() if not k.startswith("ranks/")}
    ranks = [{**of_ranks, **entry} for entry in document["ranks"]]
    return {**of_point, **document, "ranks": ranks}


def _keys_of(version: int, keys: Mapping[str, type], below: str) -> dict[str, type]:
    return {
        key: kind
        for key, kind in keys.items()
        if _ADDED_IN.get(f"{below}{key}", (1, None))[0] <= version
    }


def _verdict_document(verdict: Verdict) -> dict[str, Any]:
    error = float(verdict.max_error)
    # JSON has no infinity; float() reads these words back.
    return {**vars(verdict), "max_error": error if math.isfinite(error) else str(error)}


def _clocks_of(stored: Mapping[str, Any] | None) -> Clocks | None:
    return None if stored is None else Clocks(**{**stored, "reasons": tuple(stored["reasons"])})


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{value!r} has no place in point.json")


def _key_faults(values: Mapping[str, Any], keys: Mapping[str, type], where: str) -> list[str]:
    faults = [f"{where}key {key} is missing" for key in keys if key not in values]
    faults += [f"{where}key {key} is unknown" for key in values if key not in keys]
    for key, kind in keys.items():
        # A bool is an int to Python, not to us.
        if key in values and (
            not isinstance(values[key], kind) or (kind is int and isinstance(values[key], bool))
        ):
            faults.append(f"{where}key {key} is {values[key]!r}, want {kind.__name__}")
    return faults


def _rank_faults(entry: Any, version: int) -> list[str]:
    if not isinstance(entry, dict):
        return ["ranks holds something else than objects"]
    faults = _key_faults(entry, _keys_of(version, _RANK_KEYS, "ranks/"), "ranks: ")
    if faults:
        return faults
    where = f"rank {entry['rank']}: "
    for name, count in entry["counts"].items():
        if not isinstance(count, int) or isinstance(count, bool):
            faults.append(f"{where}count {name} is {count!r}, want int")
    if entry.get("clocks") is not None:
        faults += _clock_faults(entry["clocks"], where)
    for verdict in entry["verdicts"]:
        if not isinstance(verdict, dict):
            faults.append(f"{where}verdicts holds something else than objects")
            continue
        faults += _key_faults(verdict, _VERDICT_KEYS, f"{where}verdict ")
        count = verdict.get("num_wrong")
        if isinstance(count, int) and (count < 0 or verdict.get("passed") is not (count == 0)):
            faults.append(f"{where}verdict has num_wrong {count}, passed {verdict.get('passed')}")
        error = verdict.get("max_error")
        if not _is_number(error) and error not in ("nan", "inf", "-inf"):
            faults.append(f"{where}verdict max_error is {error!r}, want a number, inf or nan")
    return faults


def _clock_faults(stored: Any, where: str) -> list[str]:
    if not isinstance(stored, dict):
        return [f"{where}clocks is {stored!r}, want an object or null"]
    faults = _key_faults(stored, _CLOCKS_KEYS, f"{where}clocks ")
    if faults:
        return faults
    if not all(isinstance(word, str) for word in stored["reasons"]):
        faults.append(f"{where}clocks key reasons holds something else than words")
    if not math.isfinite(stored["power_w_max"]):
        faults.append(f"{where}clocks key power_w_max is {stored['power_w_max']}, want a number")
    return faults


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
