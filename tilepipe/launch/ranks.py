"""Start the rank processes of one point and bring back what they hand over.

Knows nothing of results on disk; torch's elastic agent starts, watches and ends the processes.
"""

import contextlib
import errno
import json
import multiprocessing
import os
import shutil
import signal
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tilepipe.config.choices import Fabric, Operation
from tilepipe.launch.limits import WallClockExceeded, wall_clock
from tilepipe.launch.worker import Entry, Job, Records, failure_paths, rank_main
from tilepipe.records import Point, Status
from tilepipe.stopping import Stopping, out_of_the_terminals_reach

__all__ = [
    "RanksFailed",
    "job_of",
    "limit_threads",
    "num_processes_of",
    "start_ranks",
    "start_wrapped_ranks",
]

# Seconds that ranks get to end by themselves at their limit, before the agent ends them.
_GRACE_S = 30.0
_LOG_LINES = 12
# One BLAS thread a rank: ranks share the cores, and results must not depend on how many there are.
_THREADS = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

# Ranks are forked from a server that has imported these once and holds neither threads nor CUDA:
# 0.4 s a point of 4 ranks, where fresh interpreters took 3.5 s (two cores, 2026-11).
_PRELOADED = [
    "torch.distributed.elastic.multiprocessing.api",
    "tilepipe.launch.collect",
    "tilepipe.config.register",
    "tilepipe.launch.worker",
    *(f"tilepipe.experiments.{operation.name}" for operation in Operation),
]


# Name of an exception class, or of one it derives from -> how the point ended.
_STATUS_OF_KIND = {
    "MemoryError": Status.oom,
    "OutOfMemoryError": Status.oom,  # torch's, of a GPU
    "HeapFull": Status.oom,
    "WatchdogTimeout": Status.timeout,
    "TimeoutError": Status.timeout,
    "CompileError": Status.compile_error,
}


@dataclass
class RanksFailed(Exception):
    """A point that did not end well: `reason` in one sentence, `log` a rank's last lines."""

    status: Status
    reason: str
    log: str


def start_ranks(
    point: Point,
    *,
    log_dir: Path,
    spill_dir: Path,  # takes symmetric memory that /dev/shm has no room for
    stopping: Stopping,
    entry: Entry = rank_main,
) -> Records:
    """Run `entry` in every process of a point and return what they hand over, by rank.

    Raises RanksFailed, and Interrupted where this process is asked to end: no rank is left then.
    """
    limit_threads()
    _start_forkserver()
    job = job_of(point, log_dir=log_dir, spill_dir=spill_dir)
    returned = _supervised(point, log_dir, entry, (job,), stopping)
    records = [record for held in returned.values() for record in held]
    return tuple(sorted(records, key=lambda record: record.rank))


def start_wrapped_ranks(
    point: Point, *, log_dir: Path, command: Sequence[str], stopping: Stopping
) -> None:
    """Run a command as every process, RANK in its environment; raises as `start_ranks` does."""
    limit_threads()
    _supervised(point, log_dir, command[0], tuple(command[1:]), stopping)


def num_processes_of(point: Point) -> int:
    """One a rank; ranks that share a GPU share a process too, with RANK 0."""
    launch = point.config["launch"]
    return 1 if launch["fabric"] == Fabric.loopback.name else int(launch["num_ranks"])


def limit_threads() -> None:
    """Give every rank one BLAS thread, whatever the environment says."""
    os.environ.update(_THREADS)


def _start_forkserver() -> None:
    """Start the server that ranks are forked from, unless it runs; this process ends them."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    warnings = os.environ.get("PYTHONWARNINGS")
    # Ended at once, this process leaves semaphores to a tracker that would speak of them.
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (warnings, "ignore:resource_tracker")))
    try:
        with out_of_the_terminals_reach():
            forkserver.ensure_running()
    finally:
        if warnings is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = warnings


def job_of(point: Point, *, log_dir: Path, spill_dir: Path) -> Job:
    """What every rank of a point is told."""
    return {
        "config": point.config,
        "log_dir": str(log_dir),
        "heap_token": uuid.uuid4().hex,
        "shm_dir": "/dev/shm",
        "spill_dir": str(spill_dir),
        "time_limit_s": float(point.config["launch"]["time_limit_s"]),
        "driver_pid": os.getpid(),
    }


def _supervised(
    point: Point, log_dir: Path, entry: Entry | str, args: tuple[Any, ...], stopping: Stopping
) -> dict[int, Records]:
    """Start the ranks, watch them to their end, keep their logs, and say why they failed."""
    # Every failure becomes a row with its reason; the agent's own account of it is noise. Its
    # loggers take their level from here when torch is imported, which is here and not above: the
    # first point pays for torch, a dry look at the configuration does not.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    # The agent would put handlers of its own in place of those that are here.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    from tilepipe.launch.agent import ChildFailedError, run_ranks

    limit_s = float(point.config["launch"]["time_limit_s"])
    elastic_dir = log_dir / "elastic"
    try:
        with _asked_first(stopping), wall_clock(limit_s + _GRACE_S):
            returned: dict[int, Records] = run_ranks(
                entry,
                args,
                num_processes=num_processes_of(point),
                log_dir=elastic_dir,
                stopping=stopping,
            )
    except WallClockExceeded:
        reason = f"launch.time_limit_s={limit_s:g}: the point did not end in time and was stopped"
        raise RanksFailed(Status.timeout, reason, "") from None
    except OSError as error:
        reason = f"ranks could not be started: {error}; see that /dev/shm and TMPDIR have room"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENOMEM)
        raise RanksFailed(Status.oom if full else Status.runtime_error, reason, "") from None
    except ChildFailedError as error:
        _keep_logs(elastic_dir, log_dir)
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        first = error.get_first_failure()[0]
        raise _explain(log_dir, exits, first, limit_s) from None
    finally:
        _keep_logs(elastic_dir, log_dir)
    return returned


@contextlib.contextmanager
def _asked_first(stopping: Stopping) -> Iterator[None]:
    """What asks this process to end may reach ranks or their server too: no failure of theirs."""
    with stopping.broken_off():
        try:
            yield
        except BaseException:
            stopping.check()
            raise


def _keep_logs(elastic_dir: Path, log_dir: Path) -> None:
    """One log a rank in place of the agent's tree; a second call finds nothing to do."""
    for stdout in sorted(elastic_dir.glob("*/attempt_0/*/stdout.log")):
        with contextlib.suppress(OSError):  # a full disk is told where results are stored
            text = stdout.read_text(errors="replace")
            text += stdout.with_name("stderr.log").read_text(errors="replace")
            (log_dir / f"rank{stdout.parent.name}.log").write_text(text)
    shutil.rmtree(elastic_dir, ignore_errors=True)


def _explain(log_dir: Path, exits: dict[int, int], first: int, limit_s: float) -> RanksFailed:
    """The failure that came first; ranks that merely followed another are passed over."""
    failures = _failures(log_dir)
    causes = {rank: f for rank, f in failures.items() if "PeerAborted" not in f["kinds"]}
    if causes:
        rank = min(causes, key=lambda rank: int(causes[rank]["time_ns"]))
        failure = causes[rank]
        log = _last_lines(str(failure["traceback"]).splitlines())
        return RanksFailed(_status_of(failure["kinds"]), _sentence(rank, failure), log)
    lines = _log_of(log_dir, first)
    log = _last_lines(lines)
    if any(line.startswith("Timeout (") for line in lines):
        reason = (
            f"launch.time_limit_s={limit_s:g}: rank {first} had not ended; its stack is in "
            f"logs/rank{first}.log"
        )
        return RanksFailed(Status.timeout, reason, log)
    code = exits[first]
    if code == -signal.SIGKILL:
        reason = f"rank {first} was killed by SIGKILL, most often because memory ran out"
        return RanksFailed(Status.oom, reason, log)
    if code < 0:
        how = f"died by {signal.Signals(-code).name}"
    else:
        spoken = [line.strip() for line in lines if line.strip()]
        how = f"exited with code {code}" + (f" after {spoken[-1]!r}" if spoken else "")
    reason = f"rank {first} {how}; see logs/rank{first}.log"
    return RanksFailed(Status.runtime_error, reason, log)


def _failures(log_dir: Path) -> dict[int, dict[str, Any]]:
    """What ranks that raised have written; one that was ended while writing tells nothing."""
    found = {}
    for path in sorted(failure_paths(log_dir)):
        with contextlib.suppress(json.JSONDecodeError):
            failure = json.loads(path.read_text(encoding="utf-8"))
            found[int(failure["rank"])] = failure
    return found


def _status_of(kinds: Sequence[str]) -> Status:
    found = (status for kind, status in _STATUS_OF_KIND.items() if kind in kinds)
    return next(found, Status.runtime_error)


def _sentence(rank: int, failure: dict[str, Any]) -> str:
    """What a user typed is told as it is; anything else names the rank and the kind of error."""
    message = " ".join(str(failure["message"]).split()) or "no message"
    spoken = ("ValueError", "HeapFull", "WatchdogTimeout", "TimeoutError")
    if set(spoken) & set(failure["kinds"]):
        return message.removeprefix("[Errno 28] ")
    return f"rank {rank}: {failure['kinds'][0]}: {message}"


def _log_of(log_dir: Path, rank: int) -> list[str]:
    path = log_dir / f"rank{rank}.log"
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _last_lines(lines: Sequence[str]) -> str:
    return "\n".join(lines[-_LOG_LINES:])
