"""Start the rank processes of one point and bring back what they hand over.

Knows nothing of results on disk; torch's elastic agent starts, watches and ends the processes.
"""

import contextlib
import errno
import json
import logging
import multiprocessing
import os
import shutil
import signal
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from tilepipe.config.choices import Fabric, Operation
from tilepipe.launch.limits import WallClockExceeded, wall_clock
from tilepipe.launch.worker import Entry, Job, Records, failure_paths, rank_main
from tilepipe.records import Point, Status

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
    entry: Entry = rank_main,
) -> Records:
    """Run `entry` in every process of a point and return what they hand over, by rank.

    Raises RanksFailed; what a signal handler raises ends the ranks too.
    """
    limit_threads()
    _start_forkserver()
    job = job_of(point, log_dir=log_dir, spill_dir=spill_dir)
    returned = _supervised(point, log_dir, entry, (job,))
    records = [record for held in returned.values() for record in held]
    return tuple(sorted(records, key=lambda record: record.rank))


def start_wrapped_ranks(point: Point, *, log_dir: Path, command: Sequence[str]) -> None:
    """Run a command as every process, RANK in its environment; raises as `start_ranks` does."""
    limit_threads()
    _supervised(point, log_dir, command[0], tuple(command[1:]))


def num_processes_of(point: Point) -> int:
    """One a rank; ranks that share a GPU share a process too, with RANK 0."""
    launch = point.config["launch"]
    return 1 if launch["fabric"] == Fabric.loopback.name else int(launch["num_ranks"])


def limit_threads() -> None:
    """Give every rank one BLAS thread, whatever the environment says."""
    os.environ.update(_THREADS)


def _start_forkserver() -> None:
    """Start the server that ranks are forked from, unless it runs; Ctrl-C does not reach it."""
    multiprocessing.set_forkserver_preload(_PRELOADED)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited by the server
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


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
    point: Point, log_dir: Path, entry: Entry | str, args: tuple[Any, ...]
) -> dict[int, Records]:
    """Start the ranks, watch them to their end, keep their logs, and say why they failed."""
    # Every failure becomes a row with its reason; the agent's own account of it is noise. Its
    # loggers take their level from here when torch is imported, which is here and not above: the
    # first point pays for torch, a dry look at the configuration does not.
    os.environ.setdefault("LOGLEVEL", "CRITICAL")
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    limit_s = float(point.config["launch"]["time_limit_s"])
    elastic_dir = log_dir / "elastic"
    try:
        with wall_clock(limit_s + _GRACE_S):
            launch = _elastic(num_processes_of(point), elastic_dir, entry)
            returned: dict[int, Records] = launch(*args)
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


def _elastic(num_processes: int, log_dir: Path, entry: Entry | str) -> Any:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed", "torch.multiprocessing.spawn", "torchelastic-events-null"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    log_dir.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        # None: the driver's own handlers raise, and the agent ends the ranks on its way out.
        signals_to_handle="",
        logs_specs=DefaultLogsSpecs(log_dir=str(log_dir), redirects=Std.ALL),
    )
    return elastic_launch(config, entry)


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
