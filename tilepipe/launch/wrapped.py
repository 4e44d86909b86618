"""Run a point under a profiler, a sanitizer or a debugger: one iteration, no time stored.

Knows nothing of any tool; `launch.wrap` is a command with {dir} and {rank}, or the word inline.
"""

import ctypes
import json
import os
import shlex
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

from tilepipe.launch.ranks import RanksFailed, job_of, num_processes_of, start_wrapped_ranks
from tilepipe.launch.worker import Job, Records, rank_main, run_point
from tilepipe.records import Outcome, Point, Status
from tilepipe.results.store import WRAPPED_FOLDER, hold_folder
from tilepipe.stopping import Interrupted, Stopping

__all__ = ["check_tool", "run_wrapped", "wrapped_folder"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def wrapped_folder(results_dir: Path, point: Point) -> Path:
    """Where the tool writes: beside the results, since nothing here is a measurement."""
    return results_dir / WRAPPED_FOLDER / point.name / point.folder


def run_wrapped(point: Point, *, results_dir: Path, stopping: Stopping) -> Outcome:
    """Run every rank once under the tool; the outcome carries verdicts, never a time."""
    folder = wrapped_folder(results_dir, point)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    with hold_folder(folder):
        return _run_in(folder, point, results_dir, stopping)


def _run_in(folder: Path, point: Point, results_dir: Path, stopping: Stopping) -> Outcome:
    few = {"num_warmups": 0, "num_iters": 1, "max_iters": None, "interval": None}
    config = {**point.config, "measure": {**point.config["measure"], **few}}
    once = replace(point, config=config)
    job = job_of(once, log_dir=folder / "logs", spill_dir=results_dir)
    if config["launch"]["wrap"] == "inline":
        # No boundary here: what is raised belongs to the debugger, and so does Ctrl-C.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return _ended(point, _passed(run_point(job, 0)))
        except KeyboardInterrupt:
            raise Interrupted(signal.SIGINT.name) from None
        finally:
            signal.signal(signal.SIGINT, before)
    job_file = folder / "job.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    for old in folder.glob("passed-*"):
        old.unlink()
    command = [sys.executable, "-m", "tilepipe.launch.wrapped", "start", str(job_file)]
    try:
        start_wrapped_ranks(once, log_dir=folder / "logs", command=command, stopping=stopping)
    except RanksFailed as failure:
        return Outcome(point=point, status=failure.status, reason=failure.reason)
    passed = [path.read_text() == "True" for path in folder.glob("passed-*")]
    if len(passed) < num_processes_of(point):
        reason = f"launch.wrap: the tool ended without running every rank; see {folder}/logs"
        return Outcome(point=point, status=Status.runtime_error, reason=reason)
    return _ended(point, all(passed))


def check_tool(wrap: str) -> None:
    """Raise ValueError for a `launch.wrap` that cannot be started; none and inline can."""
    if not wrap.strip() or wrap == "inline":
        return
    try:
        words = shlex.split(wrap.format(dir="dir", rank="0"))
    except (ValueError, KeyError, IndexError) as error:
        known = isinstance(error, ValueError)
        wrong = str(error) if known else "a name in braces that means nothing"
        allowed = "quote it for a shell, with {dir} and {rank} only"
        raise ValueError(f"launch.wrap={wrap}: {wrong}; {allowed}") from None
    if shutil.which(words[0]) is None:
        raise ValueError(
            f"launch.wrap={wrap}: {words[0]} was not found; install it or name its path"
        )


def _ended(point: Point, passed: bool) -> Outcome:
    status = Status.ok if passed else Status.incorrect
    return Outcome(point=point, status=status, reason="" if passed else "an output is wrong")


def _passed(records: Records) -> bool:
    return all(verdict.passed for record in records for verdict in record.verdicts)


def _start_tool(job_file: Path) -> None:
    """Become the tool, which starts the rank: it sees one process and gets its exit code."""
    job: Job = json.loads(job_file.read_text(encoding="utf-8"))
    places = {"dir": str(job_file.parent), "rank": os.environ["RANK"]}
    tool = shlex.split(job["config"]["launch"]["wrap"].format(**places))
    rank = [sys.executable, "-m", "tilepipe.launch.wrapped", "rank", str(job_file)]
    # Linux: the tool ends with the process that started it, however that came.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.execvp(tool[0], [*tool, *rank])


def _run_rank(job_file: Path) -> None:
    passed = _passed(rank_main(json.loads(job_file.read_text(encoding="utf-8"))))
    (job_file.parent / f"passed-{os.environ['RANK']}").write_text(str(passed))


if __name__ == "__main__":
    {"start": _start_tool, "rank": _run_rank}[sys.argv[1]](Path(sys.argv[2]))
