"""A sweep that is interrupted, killed and started twice ends with every row, and nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from tests.launch.sweep import NUM_POINTS, STATUSES, ran_file
from tilepipe import validate

ROOT = Path(__file__).resolve().parents[2]


def start(results_dir, *words):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.launch.sweep", str(results_dir), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def statuses(results_dir):
    """Tokens of every stored point that was not set aside -> its status."""
    found = {}
    for path in results_dir.glob("tiny/*/point.json"):
        document = json.loads(path.read_text())
        if "." not in path.parent.name:
            found[document["config"]["workload"]["num_tokens"]] = document["status"]
    return found


def ran(results_dir):
    path = ran_file(results_dir)
    return Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter()


def wait_for(reached, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not reached():
        assert time.monotonic() < deadline, "not reached in time"
        time.sleep(0.05)


def processes_about(results_dir):
    """Live processes that were started with this results folder on their command line."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(results_dir) in words and entry.parent.name != str(os.getpid()):
            found.append(entry.parent.name)
    return found


def test_twelve_points_survive_what_happens_to_them_and_to_their_sweep(tmp_path):
    heaps_before = set(Path("/dev/shm").glob("tilepipe-heap-*"))
    first = start(tmp_path)
    wait_for(lambda: len(statuses(tmp_path)) >= 3)
    first.send_signal(signal.SIGINT)
    told = first.communicate(timeout=30)[0]
    after_interrupt = statuses(tmp_path)

    second = start(tmp_path)
    wait_for(lambda: len(statuses(tmp_path)) >= 7)
    second.kill()
    second.communicate(timeout=30)
    after_kill = statuses(tmp_path)
    wait_for(lambda: not processes_about(tmp_path))

    third = start(tmp_path)
    output = third.communicate(timeout=120)[0]

    assert first.returncode == 130
    assert "stopped by SIGINT" in told
    assert third.returncode == 1
    assert statuses(tmp_path) == STATUSES
    # What had ended ok was never run again.
    times = ran(tmp_path)
    stayed = {tokens for tokens, status in after_interrupt.items() if status == "ok"}
    stayed_later = {tokens for tokens, status in after_kill.items() if status == "ok"}
    assert stayed
    assert stayed < stayed_later
    assert {times[tokens] for tokens in stayed} == {1}
    assert f"{len(stayed_later)} of {NUM_POINTS} reused" in output.splitlines()[0]
    # The summary holds a row for every point; nothing is left behind.
    rows = pq.read_table(tmp_path / "tiny" / "summary.parquet").to_pylist()
    assert {row["num_tokens"]: row["status"] for row in rows} == STATUSES
    assert validate.main([str(tmp_path)]) == 0
    wait_for(lambda: not processes_about(tmp_path))
    # Those of tests that run beside this one go by themselves.
    heaps_left = set(Path("/dev/shm").glob("tilepipe-heap-*")) - heaps_before
    wait_for(lambda: not any(heap.exists() for heap in heaps_left))
    assert list(tmp_path.glob("tilepipe-heap-*")) == []

    fourth = start(tmp_path, "resume=any")
    output = fourth.communicate(timeout=60)[0]

    assert fourth.returncode == 1  # the failures are still failures
    assert f"{NUM_POINTS} of {NUM_POINTS} reused" in output.splitlines()[0]
    assert ran(tmp_path) == times

    again = start(tmp_path, "resume=none")
    wait_for(lambda: list(tmp_path.glob("tiny/*.new")))
    again.kill()
    again.communicate(timeout=30)
    wait_for(lambda: not processes_about(tmp_path))
    fifth = start(tmp_path, "resume=any")
    fifth.communicate(timeout=60)

    # What had been measured before the one that was killed under way is still there, and no more.
    assert list(tmp_path.glob("tiny/*.new")) == []
    assert statuses(tmp_path) == STATUSES
    assert validate.main([str(tmp_path)]) == 0


def test_two_sweeps_at_once_end_with_every_row_and_no_folder_written_by_both(tmp_path):
    sweeps = [start(tmp_path), start(tmp_path)]
    outputs = [sweep.communicate(timeout=180)[0] for sweep in sweeps]

    assert [sweep.returncode for sweep in sweeps] == [1, 1], outputs
    assert statuses(tmp_path) == STATUSES
    good = [tokens for tokens, status in STATUSES.items() if status == "ok"]
    assert {ran(tmp_path)[tokens] for tokens in good} == {1}
    assert validate.main([str(tmp_path)]) == 0


def test_a_sweep_that_was_told_to_ignore_hang_ups_does_so(tmp_path):
    sweep = subprocess.Popen(
        ["nohup", sys.executable, "-m", "tests.launch.sweep", str(tmp_path), "fail_fast=true"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: ran(tmp_path)[1] == 1)
    sweep.send_signal(signal.SIGHUP)

    output = sweep.communicate(timeout=60)[0]

    assert "stopped by" not in output
    assert statuses(tmp_path) == {1: "ok", 2: "runtime_error"}
