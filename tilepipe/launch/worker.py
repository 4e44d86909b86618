"""Entry of a rank process.

Knows no operation by import: it loads the one that its point names.
"""

import faulthandler
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tilepipe.config.choices import Fabric
from tilepipe.config.schemas import Config, config_from_dict
from tilepipe.fabric.host import HeapPlace
from tilepipe.fabric.watch import PeerAborted
from tilepipe.records import RankRecord

__all__ = [
    "Described",
    "Entry",
    "Job",
    "Records",
    "at_job_boundary",
    "describe",
    "end_with",
    "failure_paths",
    "rank_main",
    "run_point",
]

# What a rank is told: config (resolved container), log_dir, heap_token, shm_dir, spill_dir,
# time_limit_s, driver_pid; plain values, since it travels to a fresh process.
Job = dict[str, Any]

# What a process hands back: a record of each rank that it held.
Records = tuple[RankRecord, ...]
Entry = Callable[[Job], Records]

# Threads of one rank hand the interpreter over after this long at the latest. Python's 5 ms would
# make a computing thread wait for a whole tile's worth of sends.
_SWITCH_INTERVAL_S = 50e-6
_FOLLOWER_WAIT_S = 2.0
_DRIVER_LOOK_S = 0.5


def failure_paths(log_dir: Path) -> list[Path]:
    """Files in which ranks that raised say why."""
    return list(log_dir.glob("failure-*.json"))


def rank_main(job: Job) -> Records:
    """Run the point of `job` on the ranks that this process holds."""
    return at_job_boundary(job, run_point)


def at_job_boundary(job: Job, body: Callable[[Job, int], Records]) -> Records:
    """Run `body(job, rank)` under the point's time limit.

    A failure is written to the log folder before it ends the process with code 1, so that the
    driver learns its kind and sentence whatever becomes of the other ranks.
    """
    rank = int(os.environ["RANK"])
    # What is typed at a terminal is for the driver, which ends this process with SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.dump_traceback_later(job["time_limit_s"], exit=True)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    end_with(job["driver_pid"])
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(message)s")
    try:
        records = body(job, rank)
    # The job boundary: whatever a point raises becomes its row.
    except Exception as error:
        failure = {
            "rank": rank,
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "message": str(error),
            "time_ns": time.time_ns(),
            "traceback": traceback.format_exc(),
        }
        path = Path(job["log_dir"], f"failure-{rank}.json")
        path.write_text(json.dumps(failure), encoding="utf-8")
        traceback.print_exc()
        if isinstance(error, PeerAborted):
            # The first rank to end takes the others with it: the one that gave up must be heard.
            time.sleep(_FOLLOWER_WAIT_S)
        # Of an exception torch would keep a file of its own, which nobody removes.
        raise SystemExit(1) from error
    faulthandler.cancel_dump_traceback_later()
    return records


def end_with(driver_pid: int) -> None:
    """End this process soon after the driver's end, however that came."""

    def watch() -> None:
        while _lives(driver_pid):
            time.sleep(_DRIVER_LOOK_S)
        os._exit(1)

    threading.Thread(target=watch, name="driver-watch", daemon=True).start()


def _lives(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet (Z) has."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def run_point(job: Job, rank: int) -> Records:
    """Run the point of `job`, on the host as rank `rank`; a failure is raised as it is."""
    config = config_from_dict(job["config"])
    if config.launch.fabric is not Fabric.host:
        records: Records = _entry(config).run_ranks(config)
        return records
    place = HeapPlace(
        token=job["heap_token"],
        shm_dir=Path(job["shm_dir"]),
        spill_dir=Path(job["spill_dir"]),
    )
    record: RankRecord = _entry(config).run_rank(config, rank=rank, place=place)
    return (record,)


class Described(NamedTuple):
    """What a point's ranks would find out before their first launch."""

    num_bytes: int  # of symmetric memory that each of them reserves
    num_comm_ctas: int | None = None  # where `auto` was typed and the hardware file tells enough


def describe(container: dict[str, Any]) -> Described:
    """What can be said of a point without running it; raises as the point would."""
    config = config_from_dict(container)
    entry = _entry(config)
    on_host = config.launch.fabric is Fabric.host
    return Described(
        num_bytes=entry.symmetric_bytes_of(config),
        num_comm_ctas=None if on_host else entry.planned_comm_ctas(config),
    )


def _entry(config: Config) -> Any:
    # By name: the process that starts ranks imports this module, but never an experiment.
    on_host = config.launch.fabric is Fabric.host
    return importlib.import_module(f"tilepipe.experiments.{'' if on_host else 'cuda.'}entry")
