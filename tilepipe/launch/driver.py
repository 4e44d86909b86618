"""Run points one after the other and leave a row for each, whatever happens to it.

Knows nothing of Hydra and never imports an operation.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tilepipe.config.schemas import check_config, config_from_dict
from tilepipe.launch.ranks import Interrupted, RanksFailed, start_ranks
from tilepipe.launch.table import breakdown_table, progress_line, summary_table
from tilepipe.records import Outcome, Point, RankRecord, Status
from tilepipe.results.accounting import account
from tilepipe.results.files import StoreError, check_results_dir
from tilepipe.results.provenance import provenance, utc_now
from tilepipe.results.store import hold_folder, open_point_folder, write_outcome, write_summary

__all__ = ["run_points"]

_GOOD = (Status.ok, Status.unsupported, Status.skipped)
_EXIT_INTERRUPTED = 130
_PIPED_WIDTH = 160


def run_points(points: Sequence[Point], *, results_dir: Path) -> int:
    """Run, store and show `points`; the exit code of the program.

    0: every point is ok, or unsupported or skipped for want of hardware. 1: some point is not.
    2: nothing could be run. 130: interrupted; what was measured is stored.
    """
    console, errors = _console(), Console(stderr=True)
    try:
        check_results_dir(results_dir)
    except StoreError as error:
        errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    facts = provenance(sys.argv)
    outcomes: list[Outcome] = []
    code = 0
    distinct = list({point.folder: point for point in points}.values())
    for number, point in enumerate(distinct, start=1):
        try:
            outcome = _run_and_store(point, results_dir, facts)
        except Interrupted as error:
            left = len(distinct) - len(outcomes)
            errors.print(f"stopped by {error}: {left} of {len(distinct)} points did not run")
            code = _EXIT_INTERRUPTED
            break
        except StoreError as error:
            left = len(distinct) - len(outcomes)
            errors.print(
                f"{error}; {left} of {len(distinct)} points are not stored, earlier ones are",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
            code = 1
            break
        outcomes.append(outcome)
        line = progress_line(outcome, number=number, total=len(distinct))
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    code = _finish(outcomes, results_dir, console, errors) or code
    return code or int(any(outcome.status not in _GOOD for outcome in outcomes))


def _console() -> Console:
    """The terminal; where output goes to a file or pipe, lines wide enough for the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def _run_and_store(point: Point, results_dir: Path, facts: Mapping[str, Any]) -> Outcome:
    folder = open_point_folder(results_dir, point)
    with hold_folder(folder):
        started = utc_now()
        outcome = _run(point, folder, spill_dir=results_dir)
        outcome = replace(outcome, started_utc=started, ended_utc=utc_now())
        write_outcome(folder, outcome, facts)
    return outcome


def _run(point: Point, folder: Path, *, spill_dir: Path) -> Outcome:
    try:
        check_config(config_from_dict(point.config))
    except ValueError as error:
        return Outcome(point=point, status=Status.runtime_error, reason=str(error))
    if point.executor != "host":
        return Outcome(point=point, status=Status.unsupported, reason=_no_kernels(point))
    try:
        records = start_ranks(point, log_dir=folder / "logs", spill_dir=spill_dir)
    except RanksFailed as failure:
        if failure.log:
            (folder / "logs" / "first_failure.log").write_text(failure.log + "\n")
        return Outcome(point=point, status=failure.status, reason=failure.reason)
    return _judged(point, records)


def _no_kernels(point: Point) -> str:
    hardware = point.config["hardware"]["name"]
    return (
        f"{point.operation} on hardware={hardware}: this version has no GPU kernels; type "
        "hardware=cpu to run it on the host executor"
    )


def _judged(point: Point, records: tuple[RankRecord, ...]) -> Outcome:
    wrong = [
        (record.rank, verdict)
        for record in records
        for verdict in record.verdicts
        if not verdict.passed
    ]
    if wrong:
        rank, verdict = wrong[0]
        reason = (
            f"{verdict.contender} on rank {rank} differs from the oracle {verdict.stage} timing: "
            f"{verdict.detail}"
        )
        bare = tuple(replace(record, samples=()) for record in records)
        _, figures = account(point, bare)
        return Outcome(
            point=point, status=Status.incorrect, reason=reason, records=bare, figures=figures
        )
    terms, figures = account(point, records)
    return Outcome(
        point=point,
        status=Status.ok,
        reason="",
        records=records,
        terms=terms,
        figures=figures,
    )


def _finish(
    outcomes: Sequence[Outcome], results_dir: Path, console: Console, errors: Console
) -> int:
    """Summary files and the table on the screen; 1 when a summary could not be written."""
    code = 0
    for name in sorted({outcome.point.name for outcome in outcomes}):
        mine = [outcome for outcome in outcomes if outcome.point.name == name]
        try:
            path = write_summary(results_dir / name, mine)
        except StoreError as error:
            errors.print(str(error), markup=False, highlight=False, soft_wrap=True)
            code = 1
        else:
            console.print(summary_table(mine))
            if any(outcome.terms for outcome in mine):
                console.print(breakdown_table(mine))
            console.print(f"results: {path}", markup=False, highlight=False, soft_wrap=True)
    return code
