"""Whatever becomes of a rank, the driver learns its status, its sentence and its last lines."""

import multiprocessing
import os
import signal
import tempfile
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.launch import entries
from tilepipe.launch.ranks import RanksFailed, start_ranks
from tilepipe.records import Status
from tilepipe.stopping import Interrupted, Stopping

TWO = ("launch.num_ranks=2", "workload.num_experts=8")


def start(at, log_dir, entry, stopping=None):
    stopping = stopping or Stopping()
    return start_ranks(at, log_dir=log_dir, spill_dir=log_dir, stopping=stopping, entry=entry)


def fail(point, log_dir, entry, *words):
    with pytest.raises(RanksFailed) as failed:
        start(point(*TWO, *words), log_dir, entry)
    return failed.value


def test_records_come_back_by_rank_and_every_rank_leaves_one_log(point, log_dir):
    records = start(point(*TWO), log_dir, entries.returns)

    assert [(record.rank, record.counts) for record in records] == [
        (0, {"num_tokens": 10}),
        (1, {"num_tokens": 11}),
    ]
    assert sorted(path.name for path in log_dir.iterdir()) == ["rank0.log", "rank1.log"]
    assert "a word from the rank" in (log_dir / "rank1.log").read_text()


def test_a_rank_that_raises_leaves_its_traceback_in_its_log_once_and_nothing_elsewhere(
    point, log_dir, tmp_path, monkeypatch
):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    failed = fail(point, log_dir, entries.raises)

    log = (log_dir / "rank1.log").read_text()
    assert log.count("Traceback") == 1
    assert log.splitlines()[-1] == "IndexError: list index out of range"
    assert failed.log.splitlines()[-1] == "IndexError: list index out of range"
    assert list(temporary.glob("pytorch-*")) == []


def test_ranks_that_share_a_gpu_share_a_process_and_come_back_by_rank(point, log_dir):
    shared = point("hardware=h200_x1", "kernel=dispatch", "launch.num_ranks=4")

    records = start(shared, log_dir, entries.on_one_gpu)

    assert [record.rank for record in records] == [0, 1, 2, 3]
    assert len({record.counts["pid"] for record in records}) == 1
    assert {record.counts["env_rank"] for record in records} == {0}
    assert [path.name for path in log_dir.iterdir()] == ["rank0.log"]


@pytest.mark.parametrize(
    ("entry", "status", "reason"),
    [
        (
            entries.raises_what_a_user_typed,
            Status.runtime_error,
            "workload.num_topk=8: the trace has 4; type workload.num_topk=4",
        ),
        (entries.raises, Status.runtime_error, "rank 1: IndexError: list index out of range"),
        (entries.follows_another, Status.timeout, "rank 1 waited 1 s: role gate"),
        (entries.out_of_memory, Status.oom, "rank 1: MemoryError: Unable to allocate 9 TiB"),
        (
            entries.out_of_gpu_memory,
            Status.oom,
            "rank 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 9 TiB",
        ),
        (
            entries.does_not_compile,
            Status.compile_error,
            "rank 1: CompileError: dispatch: ptxas found no registers",
        ),
        (entries.dies_by_segv, Status.runtime_error, "rank 1 died by SIGSEGV; see logs/rank1.log"),
        (
            entries.killed,
            Status.oom,
            "rank 1 was killed by SIGKILL, most often because memory ran out",
        ),
        (
            entries.exits,
            Status.runtime_error,
            "rank 1 exited with code 7 after 'the last word'; see logs/rank1.log",
        ),
    ],
)
def test_a_rank_that_fails_is_told_by_status_and_sentence(point, log_dir, entry, status, reason):
    failure = fail(point, log_dir, entry)

    assert (failure.status, failure.reason) == (status, reason)


def test_a_rank_that_hangs_is_ended_at_its_limit_with_its_stack_in_the_log(point, log_dir):
    failure = fail(point, log_dir, entries.hangs, "launch.time_limit_s=2")

    assert failure.status is Status.timeout
    assert failure.reason == (
        "launch.time_limit_s=2: rank 1 had not ended; its stack is in logs/rank1.log"
    )
    assert "entries.py" in failure.log


def start_and_report(point, log_dir, ended):
    try:
        stopping = Stopping()
        with stopping.listening():
            start(point, log_dir, entries.writes_its_pid_and_hangs, stopping)
    except Interrupted as error:
        ended.write_text(str(error))


@pytest.mark.parametrize(
    ("sent", "told"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGKILL, "")]
)
def test_no_rank_outlives_its_driver(point, log_dir, tmp_path, sent, told):
    ended = tmp_path / "ended"
    driver = multiprocessing.get_context("spawn").Process(
        target=start_and_report, args=(point(*TWO), log_dir, ended)
    )
    driver.start()
    wait_until(lambda: len(list(log_dir.glob("pid-*"))) == 2)
    pids = [int(path.read_text()) for path in log_dir.glob("pid-*")]

    os.kill(driver.pid, sent)

    # The driver is not waited for yet: as a zombie it counts as ended.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    driver.join(20)
    assert (ended.read_text() if ended.exists() else "") == told


def asks_while_ranks_are_started(monkeypatch):
    """SIGINT between the start of one rank and that of the next; what was begun, by process."""
    begun, real = [], forkserver.connect_to_new_process

    def asked(fds):
        connected = real(fds)
        begun.append(connected)
        signal.raise_signal(signal.SIGINT)
        return connected

    monkeypatch.setattr(forkserver, "connect_to_new_process", asked)
    return begun


def test_a_signal_between_the_starts_of_two_ranks_leaves_neither(point, log_dir, monkeypatch):
    # A handler that raised there left the first rank to itself, waiting for the second, and this
    # process waiting for the first.
    begun = asks_while_ranks_are_started(monkeypatch)
    stopping = Stopping()

    with stopping.listening(), pytest.raises(Interrupted, match="SIGINT"):
        start(point(*TWO), log_dir, entries.writes_its_pid_and_hangs, stopping)

    assert len(begun) == 2
    assert multiprocessing.active_children() == []


def test_a_signal_while_the_server_of_ranks_starts_is_not_lost(point, log_dir, monkeypatch):
    real, stopping = forkserver.ensure_running, Stopping()

    def asked():
        signal.raise_signal(signal.SIGINT)
        real()

    monkeypatch.setattr(forkserver, "ensure_running", asked)

    with stopping.listening(), pytest.raises(Interrupted, match="SIGINT"):
        start(point(*TWO), log_dir, entries.writes_its_pid_and_hangs, stopping)


def test_ranks_are_deaf_to_what_a_terminal_sends_to_all_processes(point, log_dir):
    records = start(point(*TWO), log_dir, entries.interrupts_itself)

    assert [record.rank for record in records] == [0, 1]


def wait_until(reached, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.05)
