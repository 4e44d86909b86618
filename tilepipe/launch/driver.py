"""Run points one after the other and leave a row for each, whatever happens to it.

Knows nothing of Hydra and never imports an operation.
"""

import contextlib
import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tilepipe.baselines.asked import left_out
from tilepipe.config.checks import check_same_sweep, check_sweep
from tilepipe.config.choices import Resume
from tilepipe.launch.describing import Describing
from tilepipe.launch.dry import dry_table
from tilepipe.launch.preflight import missing_hardware, refusal
from tilepipe.launch.ranks import RanksFailed, limit_threads, start_ranks
from tilepipe.launch.reuse import in_order, reusable, stale_because
from tilepipe.launch.screen import Screen
from tilepipe.launch.worker import Entry, rank_main
from tilepipe.launch.wrapped import check_tool, run_wrapped, wrapped_folder
from tilepipe.records import Outcome, Point, RankRecord, Status
from tilepipe.results.accounting import account
from tilepipe.results.files import StoreError, check_can_enter, check_results_dir
from tilepipe.results.provenance import provenance, utc_now
from tilepipe.results.store import (
    FolderBusy,
    claim_folder,
    clear_cut_short,
    write_outcome,
    write_summary,
)
from tilepipe.stopping import EXIT_STOPPED, Interrupted, Stopping

__all__ = ["run_points"]

_GOOD = (Status.ok, Status.unsupported, Status.skipped)
_EXIT_NOT_RUN = 2
# Seconds between looks at a point that another run is measuring.
_BUSY_LOOK_S = 1.0


@dataclass
class _Sweep:
    """One sweep under way."""

    points: list[Point]  # in the order of the run
    results_dir: Path
    resume: Resume
    fail_fast: bool
    entry: Entry
    facts: Mapping[str, Any]
    screen: Screen
    done: Mapping[tuple[str, str], Outcome]  # there before the sweep began, by name and folder
    stopping: Stopping
    describing: Describing
    outcomes: list[Outcome] = field(default_factory=list)
    measured: list[Outcome] = field(default_factory=list)  # wrapped ones are not among them


def run_points(
    points: Sequence[Point],
    *,
    results_dir: Path,
    announcement: str = "",
    entry: Entry = rank_main,
) -> int:
    """Run, store and show `points`; the exit code of the program.

    0: every point is ok, or unsupported or skipped for want of hardware. 1: some point is not.
    2: nothing could be run. 130: interrupted; what was measured is stored.
    """
    stopping = Stopping()
    with stopping.listening():
        try:
            with contextlib.closing(Describing(stopping)) as describing:
                return _run_points(points, results_dir, announcement, entry, stopping, describing)
        except Interrupted as error:
            Screen(0).say_error(f"stopped by {error}: nothing was run")
            return EXIT_STOPPED


def _run_points(
    points: Sequence[Point],
    results_dir: Path,
    announcement: str,
    entry: Entry,
    stopping: Stopping,
    describing: Describing,
) -> int:
    keys = points[0].config
    resume = Resume[keys["resume"]]
    try:
        for point in points:
            check_sweep(point.config)
            check_same_sweep(points[0].config, point.config)
        for wrap in sorted({str(point.config["launch"]["wrap"] or "") for point in points}):
            check_tool(wrap)
        check_results_dir(results_dir)
        for name in sorted({point.name for point in points}):
            check_can_enter(results_dir / name)
    except (StoreError, ValueError) as error:
        Screen(0).say_error(str(error))
        return _EXIT_NOT_RUN
    listed = in_order(points, repetitions=int(keys["repetitions"]))
    screen = Screen(len(listed))
    for name in sorted({point.name for point in listed}):
        clear_cut_short(results_dir / name)
    done = {
        (point.name, point.folder): stored
        for point in listed
        if not refusal(point) and (stored := reusable(results_dir, point, resume)) is not None
    }
    stopping.check()
    twice = len(points) - len(listed) // int(keys["repetitions"])
    if twice:
        announcement += f"; {twice} left out that measure the same as others of the list"
    screen.say(_first_line(announcement, listed, done, results_dir))
    if keys["dry_run"]:
        table, wrong = dry_table(listed, describing, results_dir=results_dir, resume=resume)
        screen.show(table)
        return int(bool(wrong))
    limit_threads()  # before provenance tells what ranks get
    sweep = _Sweep(
        points=listed,
        results_dir=results_dir,
        resume=resume,
        fail_fast=bool(keys["fail_fast"]),
        entry=entry,
        facts=provenance(sys.argv),
        screen=screen,
        done=done,
        stopping=stopping,
        describing=describing,
    )
    return _run_to_the_end(sweep)


def _run_to_the_end(sweep: _Sweep) -> int:
    """Run all points; whatever ends the sweep, what was measured is summed up and shown."""
    try:
        with sweep.screen.progress():
            code = _run_all(sweep)
    except Interrupted as error:
        total = len(sweep.points)
        sweep.screen.say_error(
            f"stopped by {error}: {total - len(sweep.outcomes)} of {total} points did not run; "
            "type the same again to go on"
        )
        sweep.stopping.told = True
        code = EXIT_STOPPED
    finally:
        unwritten = _finish(sweep)
    code = unwritten or code
    return code or int(any(outcome.status not in _GOOD for outcome in sweep.outcomes))


def _first_line(
    announcement: str,
    listed: Sequence[Point],
    done: Mapping[tuple[str, str], Outcome],
    results_dir: Path,
) -> str:
    """What will be run, what is there already, and why points measured before are not."""
    fresh = [point for point in listed if (point.name, point.folder) not in done]
    parts = [announcement] if announcement else []
    if done:
        parts.append(f"{len(done)} of {len(listed)} reused (resume=none runs them again)")
    stale = stale_because(results_dir, fresh)
    if stale:
        parts.append(f"measured before, but not reused: {', '.join(stale)}")
    return "; ".join(parts) or f"{len(listed)} points"


def _run_all(sweep: _Sweep) -> int:
    waiting = deque(sweep.points)
    num_busy = 0  # points in a row that another run is measuring
    while waiting:
        sweep.stopping.check()
        point = waiting.popleft()
        if num_busy > len(waiting):
            time.sleep(_BUSY_LOOK_S)
        try:
            outcome, reused = _one(sweep, point)
        except FolderBusy:
            # The other run may end with the very result that is wanted: look again later.
            waiting.append(point)
            num_busy += 1
            continue
        except StoreError as error:
            left = len(waiting) + 1
            sweep.screen.say_error(
                f"{error}; {left} of {len(sweep.points)} points are not stored, earlier ones are"
            )
            return 1
        num_busy = 0
        sweep.outcomes.append(outcome)
        sweep.screen.ended(outcome, reused=reused)
        if sweep.fail_fast and outcome.status not in _GOOD and waiting:
            sweep.screen.say_error(f"fail_fast=true: {len(waiting)} points did not run")
            return 1
    return 0


def _storable(value: Any) -> Any:
    """A config without the numbers that no table holds; the reason of a refused point has them."""
    if isinstance(value, dict):
        return {key: _storable(part) for key, part in value.items()}
    unbounded = isinstance(value, int) and abs(value) >= 2**63
    endless = isinstance(value, float) and not math.isfinite(value)
    return None if unbounded or endless else value


def _one(sweep: _Sweep, point: Point) -> tuple[Outcome, bool]:
    """The outcome of one point, and whether it was there already."""
    fault = _fault(point)
    if point.config["launch"]["wrap"] is not None:
        if fault is not None:
            return fault, False
        outcome = run_wrapped(point, results_dir=sweep.results_dir, stopping=sweep.stopping)
        sweep.screen.say(f"wrapped: {wrapped_folder(sweep.results_dir, point)}")
        return outcome, False
    # A value that is refused is refused, whatever an earlier run with others has left.
    stored = None if fault else sweep.done.get((point.name, point.folder))
    if stored is None and not fault:
        # Another run may have measured it since this one began.
        stored = reusable(sweep.results_dir, point, sweep.resume)
    if stored is not None:
        sweep.measured.append(stored)
        return stored, True
    # Nothing asks here whether to go on: a point that was measured is not thrown away.
    with claim_folder(sweep.results_dir, point) as folder:
        started = utc_now()
        outcome = fault or _run(sweep, point, folder)
        outcome = replace(outcome, started_utc=started, ended_utc=utc_now())
        write_outcome(folder, outcome, sweep.facts)
    outcome = _without_spans(outcome)  # stored: a sweep need not keep them all
    sweep.measured.append(outcome)
    return outcome, False


def _without_spans(outcome: Outcome) -> Outcome:
    return replace(outcome, records=tuple(replace(r, spans=()) for r in outcome.records))


def _run(sweep: _Sweep, point: Point, folder: Path) -> Outcome:
    log_dir = folder / "logs"
    if found := sweep.describing.fault(point):
        status, reason = found
        return Outcome(point=point, status=status, reason=reason)
    try:
        records = start_ranks(
            point,
            log_dir=log_dir,
            spill_dir=sweep.results_dir,
            stopping=sweep.stopping,
            entry=sweep.entry,
        )
    except RanksFailed as failure:
        if failure.log:
            with contextlib.suppress(OSError):  # a full disk is told where results are stored
                (log_dir / "first_failure.log").write_text(failure.log + "\n")
        return Outcome(point=point, status=failure.status, reason=failure.reason)
    return _judged(point, records)


def _fault(point: Point) -> Outcome | None:
    """The outcome of a point that cannot be run at all."""
    if reason := refusal(point):
        refused = replace(point, config=_storable(point.config))
        return Outcome(point=refused, status=Status.refused, reason=reason)
    if reason := missing_hardware(point):
        return Outcome(point=point, status=Status.skipped, reason=reason)
    return None


def _judged(point: Point, records: tuple[RankRecord, ...]) -> Outcome:
    wrong = [
        (record.rank, verdict)
        for record in records
        for verdict in record.verdicts
        if not verdict.passed
    ]
    if not wrong:
        terms, figures = account(point, records)
        return Outcome(
            point=point,
            status=Status.ok,
            reason="",
            records=records,
            terms=terms,
            figures=figures,
            left_out=left_out(
                point.config["measure"]["baselines"], point.operation, executor=point.executor
            ),
        )
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


def _finish(sweep: _Sweep) -> int:
    """Summary files and tables; 1 when a summary could not be written."""
    code = 0
    for name in sorted({outcome.point.name for outcome in sweep.measured}):
        mine = [outcome for outcome in sweep.measured if outcome.point.name == name]
        try:
            path = write_summary(sweep.results_dir / name, mine)
        except StoreError as error:
            sweep.screen.say_error(str(error))
            code = 1
            continue
        sweep.screen.show_results(mine, path)
    return code
