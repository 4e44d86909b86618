"""Check a results folder: `python -m tilepipe.validate DIR`. Runs wherever pyarrow runs.

Knows nothing of how points are run; sees files only.

One line per fault, `path: fault`; a line for each older version that points are of; last line
`N points valid, M faults`. Ends 0 only with at least one valid point and no fault. DIR may be the
results folder, an experiment's or a point's.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tilepipe.records import Outcome
from tilepipe.results.accounting import FORMULA_SINCE
from tilepipe.results.check import (
    examine_point,
    is_set_aside,
    is_temporary,
    read_table,
)
from tilepipe.results.folders import CUT_SHORT, folder_fault, is_point
from tilepipe.results.schema import SCHEMA_VERSION, SUMMARY
from tilepipe.results.store import REPORT_FOLDER, UNDER_WAY, WRAPPED_FOLDER
from tilepipe.results.summary import summary_rows
from tilepipe.results.versions import of_version
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["Report", "main", "validate"]

ALLOWED_BESIDE = (".gitignore",)
# Part of a row that the point folders do not tell.
_NOT_OF_THE_POINT = {"last_sweep"}


@dataclass(kw_only=True)
class Report:
    """What a walk found; faults start with the path below the folder asked for."""

    num_valid: int = 0
    older: Counter[int] = field(default_factory=Counter)  # version -> valid points of it
    faults: list[str] = field(default_factory=list)


def validate(root: Path) -> Report:
    """Check everything below root, which must be a folder."""
    report = Report()
    if is_point(root.resolve()):
        _check_point(root.resolve(), root.resolve().parent, report)
    else:
        _walk(root, root, report)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command: 0 sound, 1 faults or no point, 2 no such folder."""
    parser = argparse.ArgumentParser(prog="python -m tilepipe.validate", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="results folder to check")
    root: Path = parser.parse_args(arguments).folder
    unreadable = folder_fault(root)
    if unreadable is not None:
        print(unreadable, file=sys.stderr)
        return 2
    report = validate(root)
    for fault in report.faults:
        print(fault.encode("ascii", "backslashreplace").decode())
    if report.num_valid == 0:
        print(f"{root}: holds no valid point: name a folder in which points have run")
    for version, count in sorted(report.older.items()):
        print(
            f"{count} points are of schema version {version}: valid as such, but not reused by a "
            f"run, which writes version {SCHEMA_VERSION}"
        )
    print(f"{report.num_valid} points valid, {len(report.faults)} faults")
    return 0 if report.num_valid and not report.faults else 1


def _walk(folder: Path, root: Path, report: Report) -> None:
    outcomes: dict[str, Outcome] = {}
    for path in sorted(folder.iterdir()):
        where = path.relative_to(root)
        if path.name == WRAPPED_FOLDER and path.parent == root:
            continue  # what tools wrote: no measurements
        if path.name == REPORT_FOLDER and (path / "report.md").is_file():
            continue  # made of the points that are checked here
        if path.is_symlink() or not path.is_dir():
            _check_file(path, where, report)
        elif not os.access(path, os.R_OK | os.X_OK):
            report.faults.append(f"{where}: cannot be read: Permission denied")
        elif path.suffix == UNDER_WAY:
            report.faults.append(f"{where}: {CUT_SHORT}")
        elif is_point(path):
            outcome = _check_point(path, root, report)
            if outcome is not None and not is_set_aside(path):
                outcomes[path.name] = outcome
        elif not any(path.iterdir()):
            report.faults.append(
                f"{where}: empty folder, left by a run that was cut short: delete it"
            )
        else:
            _walk(path, root, report)
    summary = folder / "summary.parquet"
    if summary.is_file():
        report.faults += [
            f"{summary.relative_to(root)}: {fault}" for fault in _summary_faults(summary, outcomes)
        ]


def _check_file(path: Path, where: Path, report: Report) -> None:
    if is_temporary(path):
        report.faults.append(f"{where}: half-written file of a run that was cut short: delete it")
    elif path.name != "summary.parquet" and path.name not in ALLOWED_BESIDE:
        report.faults.append(f"{where}: does not belong into a results folder")


def _check_point(folder: Path, root: Path, report: Report) -> Outcome | None:
    """The outcome of a valid point. A run that was cut short and set aside claims nothing."""
    if is_set_aside(folder) and not (folder / "point.json").exists():
        return None
    stored, faults = examine_point(folder)
    report.faults += [f"{folder.relative_to(root)}/{fault}" for fault in faults]
    if stored is None or faults:
        return None
    report.num_valid += 1
    if stored.version < SCHEMA_VERSION:
        report.older[stored.version] += 1
    return stored.outcome


def _summary_faults(path: Path, outcomes: dict[str, Outcome]) -> list[str]:
    """The summary is a function of the point folders beside it: compute it again and compare."""
    table, faults = read_table(path, SUMMARY)
    if table is None:
        return [fault.removeprefix("summary.parquet: ") for fault in faults]
    rows = table.to_pylist()
    version = rows[0]["schema_version"] if rows else SCHEMA_VERSION
    remade = {name for name, since in FORMULA_SINCE.items() if version < since}
    left_out = _NOT_OF_THE_POINT | remade
    columns = [name for name in of_version(SUMMARY, version).names if name not in left_out]
    found = {_key(row): row for row in rows}
    if len(found) != len(rows):
        faults.append(f"{len(rows)} rows for {len(found)} points and contenders, want one each")
    made = summary_rows(outcomes.values())
    want = {_key(row): {**row, "schema_version": version} for row in made}
    faults += [f"row {_spell(key)} has no valid point folder" for key in found if key not in want]
    faults += [
        f"row {_spell(key)} is missing: the next run of this experiment writes it"
        for key in want
        if key not in found
    ]
    for key in found.keys() & want.keys():
        for column in columns:
            if found[key][column] != want[key][column]:
                faults.append(
                    f"row {_spell(key)}: {column} is {found[key][column]}, "
                    f"the point folder gives {want[key][column]}"
                )
    return sorted(faults)


def _key(row: dict[str, object]) -> tuple[object, ...]:
    return row["config_id"], row["build_id"], row["contender"], row["repetition"]


def _spell(key: tuple[object, ...]) -> str:
    repetition = f" repetition {key[3]}" if key[3] else ""
    return f"{key[0]}-{key[1]} {key[2] or 'without contender'}{repetition}"


if __name__ == "__main__":
    leave(heard_out(main))
