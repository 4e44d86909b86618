"""Rank entries that fail, each in its own way; elastic finds them by name in a fresh process."""

import ctypes
import os
import signal
import sys
import time
import types
from pathlib import Path

from tilepipe.fabric.watch import PeerAborted, WatchdogTimeout
from tilepipe.launch.worker import Described, Job, Records, at_job_boundary, run_point
from tilepipe.records import RankRecord


def _record(rank: int) -> RankRecord:
    return RankRecord(rank=rank, samples=(), verdicts=(), counts={"num_tokens": 10 + rank})


def _on_rank_one(job: Job, act) -> Records:
    def body(job: Job, rank: int) -> Records:
        if rank == 1:
            act()
        else:
            time.sleep(job.get("others_wait_s", 0.0))
        return (_record(rank),)

    return at_job_boundary(job, body)


def returns(job: Job) -> Records:
    sys.stdout.write("a word from the rank\n")
    return _on_rank_one(job, lambda: None)


def raises_what_a_user_typed(job: Job) -> Records:
    def act():
        raise ValueError("workload.num_topk=8: the trace has 4; type workload.num_topk=4")

    return _on_rank_one(job, act)


def raises(job: Job) -> Records:
    def act():
        return [][3]

    return _on_rank_one(job, act)


def follows_another(job: Job) -> Records:
    """Rank 0 notices first that rank 1 gave up, and ends first."""

    def body(job: Job, rank: int) -> Records:
        if rank == 0:
            raise PeerAborted("rank 0 stopped because rank 1 gave up")
        raise WatchdogTimeout("rank 1 waited 1 s: role gate")

    return at_job_boundary(job, body)


def out_of_memory(job: Job) -> Records:
    def act():
        raise MemoryError("Unable to allocate 9 TiB")

    return _on_rank_one(job, act)


class OutOfMemoryError(RuntimeError):
    """Named as torch names what a GPU has no room for."""


class CompileError(Exception):
    """Named as the kernels name what does not compile."""


def out_of_gpu_memory(job: Job) -> Records:
    def act():
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 9 TiB")

    return _on_rank_one(job, act)


def does_not_compile(job: Job) -> Records:
    def act():
        raise CompileError("dispatch: ptxas found\nno registers")

    return _on_rank_one(job, act)


def on_one_gpu(job: Job) -> Records:
    """The entry itself, with a stand-in for the cuda executor."""
    stand_in = types.ModuleType("tilepipe.experiments.cuda.entry")
    stand_in.run_ranks = _all_ranks_last_first
    sys.modules[stand_in.__name__] = stand_in
    return at_job_boundary(job, run_point)


def _all_ranks_last_first(config) -> Records:
    counts = {"pid": os.getpid(), "env_rank": int(os.environ["RANK"])}
    ranks = range(config.launch.num_ranks)
    return tuple(
        RankRecord(rank=rank, samples=(), verdicts=(), counts=counts) for rank in reversed(ranks)
    )


def meets(job: Job) -> Records:
    """Ranks in processes of their own that meet through the launcher's store."""

    def body(job: Job, rank: int) -> Records:
        # Loads torch: only here.
        from tilepipe.fabric.nvshmem import meet_by_environment

        meeting = meet_by_environment(job["config"]["launch"]["num_ranks"], limit_s=20.0)
        assert meeting.rank == rank
        found = {
            "word": int(meeting.told_by_first(lambda: str(77 + rank))),
            "all_of_three": int(meeting.all_agree(True)),
            "all_but_rank_1": int(meeting.all_agree(rank != 1)),
            "left": int(meeting.leave(fine=True)),
        }
        return (RankRecord(rank=rank, samples=(), verdicts=(), counts=found),)

    return at_job_boundary(job, body)


def is_killed_by_nine_tokens(container):
    if container["workload"]["num_tokens"] == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return Described(container["workload"]["num_tokens"] << 20)


def describes_its_experts(config: dict) -> Described:
    """In place of worker.describe, in a process of its own."""
    return Described(config["workload"]["num_experts"] << 20)


def takes_seven_ctas(container):
    return Described(1 << 20, 7)


def dies_of_its_file(container):
    os.kill(os.getpid(), signal.SIGABRT)


def dies_by_segv(job: Job) -> Records:
    return _on_rank_one(job, lambda: ctypes.string_at(0))


def killed(job: Job) -> Records:
    return _on_rank_one(job, lambda: os.kill(os.getpid(), signal.SIGKILL))


def exits(job: Job) -> Records:
    def say_and_exit() -> None:
        os.write(2, b"the last word\n\n")
        os._exit(7)

    return _on_rank_one(job, say_and_exit)


def hangs(job: Job) -> Records:
    return _on_rank_one(job, lambda: time.sleep(600))


def writes_its_pid_and_hangs(job: Job) -> Records:
    def body(job: Job, rank: int) -> Records:
        Path(job["log_dir"], f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)
        return (_record(rank),)

    return at_job_boundary(job, body)


def interrupts_itself(job: Job) -> Records:
    def body(job: Job, rank: int) -> Records:
        os.kill(os.getpid(), signal.SIGINT)
        return (_record(rank),)

    return at_job_boundary(job, body)


def raises_a_key_error(container):
    raise KeyError("a fault")
