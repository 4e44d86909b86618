"""Symmetric memory of rank processes: where it lies, what happens without room, what is left."""

import errno
import fcntl
import os
from pathlib import Path

import numpy as np

from tests.host.ranks import Failed, run_ranks
from tilepipe.fabric import host
from tilepipe.fabric.host import ArraySpec, HostHeap, remove_leftovers

MIB = 2**20


def open_heap(rank, place, num_ranks, num_bytes=4096, start_limit_s=5):
    return HostHeap(
        place,
        rank=rank,
        num_ranks=num_ranks,
        specs={"words": ArraySpec(shape=(num_bytes // 8,), dtype=np.int64)},
        watchdog_s=5,
        start_limit_s=start_limit_s,
    )


def write_to_all(rank, place):
    heap = open_heap(rank, place, 3)
    for words in heap.arrays("words"):
        words[rank] = 10 + rank
    heap.barrier()
    return heap.array(rank, "words")[:4].tolist(), heap.all_agree(True), heap.all_agree(rank != 1)


def test_every_rank_sees_what_its_peers_have_stored_and_how_they_vote(tmp_path):
    assert run_ranks(3, write_to_all, shm_dir=tmp_path) == [([10, 11, 12, 0], True, False)] * 3


def test_no_file_keeps_a_name_once_all_ranks_have_mapped_it(tmp_path):
    run_ranks(3, write_to_all, shm_dir=tmp_path)

    assert list(tmp_path.iterdir()) == []


def heap_in(rank, place, num_bytes):
    heap = open_heap(rank, place, 2, num_bytes)
    heap.arrays("words")[1 - rank][:] = rank + 1
    heap.barrier()
    return int(heap.array(rank, "words").sum())


def full_in(folder):
    """posix_fallocate as it answers on a full file system, for files below `folder`."""
    real = os.posix_fallocate

    def fallocate(fd, offset, length):
        if Path(os.readlink(f"/proc/self/fd/{fd}")).parent == folder:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    return fallocate


def test_without_room_in_shared_memory_the_spill_folder_is_taken(tmp_path, monkeypatch):
    shm, spill = tmp_path / "shm", tmp_path / "spill"
    shm.mkdir()
    spill.mkdir()
    monkeypatch.setattr(host.os, "posix_fallocate", full_in(shm))

    sums = run_ranks(2, heap_in, 4096, shm_dir=shm, spill_dir=spill)

    assert sums == [512 * 2, 512 * 1]
    assert [list(folder.iterdir()) for folder in (shm, spill)] == [[], []]


def test_without_room_anywhere_one_sentence_says_how_much_and_where(tmp_path, monkeypatch):
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(host.os, "posix_fallocate", full_in(shm))

    results = run_ranks(2, heap_in, 8 * MIB, shm_dir=shm, spill_dir=tmp_path / "absent")

    assert [result.error for result in results] == ["HeapFull", "HeapFull"]
    assert results[0].text.splitlines()[0] == (
        f"[Errno {errno.ENOSPC}] rank 0 needs 8.0 MiB of shared memory and found no room in {shm} "
        f"(No space left on device) and {tmp_path}/absent (No such file or directory); free some, "
        "lower workload.num_tokens, or set a smaller kernel.capacity_factor"
    )
    assert list(shm.iterdir()) == []


def test_a_small_shared_memory_file_system_is_found_full_before_a_store_can_fail(mounted, tmp_path):
    spill = tmp_path / "spill"
    spill.mkdir()

    sums = run_ranks(2, heap_in, 4 * MIB, shm_dir=mounted("1m"), spill_dir=spill)

    assert not [result for result in sums if isinstance(result, Failed)]
    assert sums == [MIB // 2 * 2, MIB // 2 * 1]


def test_left_overs_of_runs_that_are_gone_are_removed_and_those_of_living_ones_stay(tmp_path):
    dead, alive, other = (
        tmp_path / name for name in ("tilepipe-heap-a-0", "tilepipe-heap-b-0.new", "mine")
    )
    for path in (dead, alive, other):
        path.write_bytes(b"rows")

    with alive.open("rb") as owner:
        fcntl.flock(owner, fcntl.LOCK_SH)
        removed = remove_leftovers(tmp_path)

    assert removed == [dead]
    assert sorted(tmp_path.iterdir()) == [other, alive]


def alone(rank, place):
    if rank == 0:
        open_heap(rank, place, 2, start_limit_s=1)


def test_a_peer_that_never_starts_is_named(tmp_path):
    late, _ = run_ranks(2, alone, shm_dir=tmp_path)

    assert late.error == "TimeoutError"
    assert "rank 0 waited 1 s for the shared memory of rank 1" in late.text


def test_a_processor_with_another_store_order_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")

    (result,) = run_ranks(1, heap_in, 4096, shm_dir=tmp_path)

    assert result.error == "ValueError"
    assert "this processor is aarch64, but flags and rows in shared memory rely on" in result.text
