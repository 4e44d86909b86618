"""Rank entries that fail, each in its own way; elastic finds them by name in a fresh process."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from tilepipe.fabric.watch import PeerAborted, WatchdogTimeout
from tilepipe.launch.worker import Job, at_job_boundary
from tilepipe.records import RankRecord


def _record(rank: int) -> RankRecord:
    return RankRecord(rank=rank, samples=(), verdicts=(), counts={"num_tokens": 10 + rank})


def _on_rank_one(job: Job, act) -> RankRecord:
    def body(job: Job, rank: int) -> RankRecord:
        if rank == 1:
            act()
        else:
            time.sleep(job.get("others_wait_s", 0.0))
        return _record(rank)

    return at_job_boundary(job, body)


def returns(job: Job) -> RankRecord:
    sys.stdout.write("a word from the rank\n")
    return _on_rank_one(job, lambda: None)


def raises_what_a_user_typed(job: Job) -> RankRecord:
    def act():
        raise ValueError("workload.num_topk=8: the trace has 4; type workload.num_topk=4")

    return _on_rank_one(job, act)


def raises(job: Job) -> RankRecord:
    def act():
        return [][3]

    return _on_rank_one(job, act)


def follows_another(job: Job) -> RankRecord:
    """Rank 0 notices first that rank 1 gave up, and ends first."""

    def body(job: Job, rank: int) -> RankRecord:
        if rank == 0:
            raise PeerAborted("rank 0 stopped because rank 1 gave up")
        raise WatchdogTimeout("rank 1 waited 1 s: role gate")

    return at_job_boundary(job, body)


def out_of_memory(job: Job) -> RankRecord:
    def act():
        raise MemoryError("Unable to allocate 9 TiB")

    return _on_rank_one(job, act)


def dies_by_segv(job: Job) -> RankRecord:
    return _on_rank_one(job, lambda: ctypes.string_at(0))


def killed(job: Job) -> RankRecord:
    return _on_rank_one(job, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits(job: Job) -> RankRecord:
    return _on_rank_one(job, lambda: os._exit(7))


def hangs(job: Job) -> RankRecord:
    return _on_rank_one(job, lambda: time.sleep(600))


def writes_its_pid_and_hangs(job: Job) -> RankRecord:
    def body(job: Job, rank: int) -> RankRecord:
        Path(job["log_dir"], f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)
        return _record(rank)

    return at_job_boundary(job, body)
