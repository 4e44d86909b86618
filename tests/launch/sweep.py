"""A sweep of 12 points, some of which end badly, as a program of its own.

python -m tests.launch.sweep RESULTS_DIR [word ...]
"""

import ctypes
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tests.launch.points import compose_point
from tilepipe.config.identity import config_id
from tilepipe.launch.driver import run_points
from tilepipe.launch.worker import Job, Records, at_job_boundary, run_point
from tilepipe.records import Point

NUM_POINTS = 12
BASE = ("workload=tiny", "measure=quick", "launch.num_ranks=2")
HANGS = 8  # tokens of the point that waits for its limit


def ran_file(results_dir: Path) -> Path:
    """Where ranks say that a point ran: a line a time."""
    return results_dir.with_name(f"{results_dir.name}-ran.txt")


def raises():
    raise KeyError("a point that raises")


def out_of_memory():
    raise MemoryError("Unable to allocate")


# Tokens of a point -> what its rank 1 does.
BAD = {
    2: raises,
    4: lambda: ctypes.string_at(0),
    6: lambda: os._exit(9),
    HANGS: lambda: time.sleep(600),
    10: out_of_memory,
}
STATUSES = {
    **dict.fromkeys(range(1, NUM_POINTS + 1), "ok"),
    2: "runtime_error",
    4: "runtime_error",
    6: "runtime_error",
    HANGS: "timeout",
    10: "oom",
}


def entry(job: Job) -> Records:
    def body(job: Job, rank: int) -> Records:
        tokens = job["config"]["workload"]["num_tokens"]
        if rank == 0:
            with ran_file(Path(job["spill_dir"])).open("a") as ran:
                ran.write(f"{tokens}\n")
        if rank == 1 and tokens in BAD:
            BAD[tokens]()
        time.sleep(0.1)
        return run_point(job, rank)

    return at_job_boundary(job, body)


def points(*words: str) -> list[Point]:
    """Composed once: to compose each of them would take longer than to run it."""
    first = compose_point(*BASE, "workload.num_tokens=1", "launch.time_limit_s=60", *words)
    found = []
    for tokens in range(1, NUM_POINTS + 1):
        limit_s = 1.0 if tokens == HANGS else 60.0
        config = {
            **first.config,
            "workload": {**first.config["workload"], "num_tokens": tokens},
            "launch": {**first.config["launch"], "time_limit_s": limit_s},
        }
        typed = (f"workload.num_tokens={tokens}", f"launch.time_limit_s={limit_s:g}")
        overrides = (*BASE, *typed, *words)
        found.append(
            replace(first, config=config, config_id=config_id(config), overrides=overrides)
        )
    return found


if __name__ == "__main__":
    results_dir, *words = sys.argv[1:]
    sys.exit(run_points(points(*words), results_dir=Path(results_dir), entry=entry))
