"""Ranks in processes of their own, on the CPU: where buffers lie, how all end whatever one does."""

import logging
import os
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from tests.fabric.nvshmem_stand_in import StandIn, with_heaps  # noqa: E402
from tests.kernels.test_group import SETTINGS, drawn  # noqa: E402
from tilepipe.fabric.device_heap import device_bytes  # noqa: E402
from tilepipe.fabric.nvshmem import NvshmemHeap, meet_by_environment  # noqa: E402
from tilepipe.fabric.table import NUM_SLOTS, Slot, Word  # noqa: E402
from tilepipe.fabric.watch import PeerAborted, WatchdogTimeout  # noqa: E402
from tilepipe.kernels.buffers import buffer_specs  # noqa: E402
from tilepipe.kernels.group import DeviceGroup  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

SHAPE = Shape(max_tokens=9, num_tokens=18, dispatch_hidden=64, home_hidden=96, spare=True)
SPECS = buffer_specs(SETTINGS, SHAPE)
STORED_INTO = [slot for slot in Slot if slot <= Slot.links]
RANKS = 2


@pytest.fixture
def stand_in(monkeypatch):
    return StandIn(RANKS).install(monkeypatch)


def addresses(heap):
    (rank,) = heap.ranks
    # An empty tensor has no address.
    held = [slot for slot in SPECS if SPECS[slot].num_bytes]
    return {slot: heap.tensor(rank, slot).data_ptr() for slot in held}


def test_the_table_leads_to_own_buffers_and_to_those_of_peers_that_are_stored_into(stand_in):
    def look(heap, rank):
        assert not any(heap.tensor(rank, slot).any() for slot in SPECS)
        return rank, heap.ranks, heap.table.clone(), addresses(heap)

    found = with_heaps(RANKS, SPECS, look)

    everybodys = {rank: own for rank, _, _, own in found}
    for rank, ranks, table, own in found:
        assert ranks == range(rank, rank + 1)
        assert (table.shape, table.dtype) == ((RANKS, NUM_SLOTS), torch.int64)
        for slot in own:
            assert table[rank, slot] == own[slot]
            theirs = everybodys[1 - rank][slot] if slot in STORED_INTO else 0
            assert table[1 - rank, slot] == theirs
        assert table[rank, Slot.record] != 0
        assert table[1 - rank, Slot.record] == 0


def test_symmetric_memory_is_one_piece_and_buffers_begin_on_lines(stand_in):
    (first, *_) = with_heaps(
        RANKS, SPECS, lambda heap, rank: (heap.rank_bytes, addresses(heap), SPECS)
    )

    rank_bytes, own, _ = first
    symmetric = device_bytes({slot: SPECS[slot] for slot in STORED_INTO})
    base = own[Slot.recv_x]
    assert rank_bytes == device_bytes(SPECS)
    assert len(stand_in.memory[0]) == symmetric
    for slot in STORED_INTO:
        assert (own[slot] - base) % 1024 == 0
        assert base <= own[slot] <= own[slot] + SPECS[slot].num_bytes <= base + symmetric


def test_nvshmem_starts_by_one_id_without_multicast_and_with_room_for_all(stand_in):
    environment = with_heaps(RANKS, SPECS, lambda heap, rank: dict(os.environ))[0]

    assert stand_in.inits == dict.fromkeys(range(RANKS), ("the id of this group", RANKS, "uid"))
    assert environment["NVSHMEM_DISABLE_NVLS"] == environment["NVSHMEM_DISABLE_NCCL"] == "1"
    symmetric = device_bytes({slot: SPECS[slot] for slot in STORED_INTO})
    assert int(environment["NVSHMEM_SYMMETRIC_SIZE"]) > symmetric


def test_all_ranks_free_and_end_once(stand_in):
    def body(heap, rank):
        heap.close(failed=False)  # and once more behind it
        return "ended"

    assert with_heaps(RANKS, SPECS, body) == ["ended"] * RANKS
    for rank in range(RANKS):
        assert stand_in.calls_of(rank) == ["init", "tensor", "free", "finalize"]


def test_a_rank_alone_needs_no_launcher(monkeypatch):
    stand_in = StandIn(1).install(monkeypatch)

    meeting = meet_by_environment(1, limit_s=1.0)
    with NvshmemHeap(SPECS, meeting=meeting, device=torch.device("cpu")) as heap:
        heap.barrier()
        assert heap.all_agree(True)
        assert not heap.all_agree(False)
        assert heap.is_whole

    assert stand_in.calls_of(0) == ["init", "tensor", "free", "finalize"]


# Ranks that fail.


def test_a_rank_that_fails_stops_kernels_and_hosts_of_its_peers_and_all_end(stand_in):
    words = {}

    def body(heap, rank):
        words[rank] = heap.tensor(rank, Slot.abort)
        if rank == 1:
            raise IndexError("rank 1 alone")
        heap.barrier()

    waiting, failed = with_heaps(RANKS, SPECS, body)

    assert isinstance(failed, IndexError)
    assert isinstance(waiting, PeerAborted)
    assert [int(words[rank]) for rank in range(RANKS)] == [1, 1]
    for rank in range(RANKS):
        assert stand_in.calls_of(rank)[-2:] == ["free", "finalize"]


def test_a_host_whose_launch_does_not_end_hears_that_a_peer_has_failed(stand_in):
    def body(heap, rank):
        if rank == 1:
            raise IndexError("rank 1 alone")
        heap.wait(lambda: False, limit_s=100.0)

    waiting, _ = with_heaps(RANKS, SPECS, body)

    assert isinstance(waiting, PeerAborted)


@pytest.mark.parametrize("fails", [False, True])
def test_where_a_gpu_answers_no_more_nobody_makes_collective_calls(
    stand_in, monkeypatch, caplog, fails
):
    dead = threading.local()
    monkeypatch.setattr(NvshmemHeap, "_is_idle", lambda heap: not hasattr(dead, "here"))

    def body(heap, rank):
        if rank == 1:
            dead.here = True
            if fails:
                raise WatchdogTimeout("a kernel hangs")
        return "through"

    with caplog.at_level(logging.WARNING):
        found = with_heaps(RANKS, SPECS, body)

    assert isinstance(found[1], WatchdogTimeout) == fails
    assert found[0] == "through"
    for rank in range(RANKS):
        assert stand_in.calls_of(rank) == ["init", "tensor"]
    told = sorted(record.message for record in caplog.records)
    assert told == [
        "NVSHMEM is not finalized: a rank has ended alone, or its GPU answers no more",
        "NVSHMEM is not finalized: cpu is not idle, or answers no more",
    ]


def test_a_failure_to_end_is_told_but_hides_no_earlier_one(monkeypatch, caplog):
    StandIn(RANKS, ends=False).install(monkeypatch)

    def body(heap, rank):
        if rank == 1:
            raise IndexError("rank 1 alone")
        return "through"

    ended, failed = with_heaps(RANKS, SPECS, body)

    assert (type(ended).__name__, str(ended)) == ("NVSHMEMError", "Status code 7")
    assert str(failed) == "rank 1 alone"
    assert "NVSHMEM could not be finalized" in caplog.text


def test_a_launch_that_a_peer_has_stopped_is_told_as_the_peers(stand_in):
    def body(heap, rank):
        heap.check(limit_s=1.0)
        heap.check_peers()
        heap.tensor(rank, Slot.abort).fill_(1)
        heap.check(limit_s=1.0)  # has no record of its own
        with pytest.raises(PeerAborted, match=rf"^rank {rank} stopped because another rank gave"):
            heap.check_peers()

    assert with_heaps(RANKS, SPECS, body) == [None] * RANKS


# What NVSHMEM lacks.

STEP = (
    r"python -m pip install 'tilepipe\[cu13\]', or type launch.fabric=loopback to let the ranks "
    r"share one GPU$"
)


def refused(kind):
    """What every rank says that cannot open its heap."""
    errors = with_heaps(RANKS, SPECS, lambda heap, rank: None)
    assert [type(error) for error in errors] == [kind] * RANKS
    return errors


def test_without_the_package_the_next_step_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvshmem", None)

    for error in refused(ValueError):
        with pytest.raises(
            ValueError, match=r"^launch.fabric=nvshmem: nvshmem4py is missing .*" + STEP
        ):
            raise error


@pytest.mark.parametrize("version", ["0.3.9", "0.5.0", "1.0"])
def test_a_version_that_we_do_not_know_is_refused(monkeypatch, version):
    stand_in = StandIn(RANKS, version=version).install(monkeypatch)

    sentence = (
        rf"^launch.fabric=nvshmem: nvshmem4py {version} is installed, and this version needs "
        rf">=0.4,<0.5; {STEP}"
    )
    for error in refused(ValueError):
        with pytest.raises(ValueError, match=sentence):
            raise error
    assert stand_in.calls == []


@pytest.mark.parametrize("version", ["0.4", "0.4.1", "0.4.2.dev1"])
def test_versions_in_the_window_are_taken(monkeypatch, version):
    StandIn(RANKS, version=version).install(monkeypatch)

    assert with_heaps(RANKS, SPECS, lambda heap, rank: "open") == ["open"] * RANKS


def test_without_the_library_the_next_step_is_named(stand_in, monkeypatch):
    def missing(name):
        raise RuntimeError(f"Failure finding {name}")

    modules = sys.modules
    monkeypatch.setattr(modules["cuda.pathfinder"], "load_nvidia_dynamic_lib", missing)

    sentence = r"nvshmem4py 0.4.1 finds no library of NVSHMEM \(Failure finding nvshmem_host\); "
    for error in refused(ValueError):
        with pytest.raises(ValueError, match=sentence + STEP):
            raise error


def test_gpus_that_cannot_store_to_each_other_are_told(monkeypatch):
    stand_in = StandIn(RANKS, unreachable=[(0, 1)]).install(monkeypatch)

    cut_off, other = with_heaps(RANKS, SPECS, lambda heap, rank: None)

    sentence = (
        r"^launch.fabric=nvshmem: rank 0 on cpu cannot store into the memory of rank 1 "
        r"\(Failed to retrieve peer buffer\): their GPUs have no peer access; take GPUs that are "
    )
    with pytest.raises(ValueError, match=sentence):
        raise cut_off
    assert isinstance(other, PeerAborted)
    for rank in range(RANKS):
        assert stand_in.calls_of(rank) == ["init", "tensor", "free", "finalize"]


def test_a_device_without_room_is_out_of_memory(monkeypatch):
    stand_in = StandIn(RANKS, has_room=False).install(monkeypatch)

    for error in refused(MemoryError):
        with pytest.raises(MemoryError, match=r"MiB of symmetric memory .*lower workload.num_tok"):
            raise error
    assert stand_in.calls_of(0) == ["init", "finalize"]


# A group of them.


def test_every_process_plans_for_all_and_keeps_what_its_own_rank_needs(stand_in):
    tokens = [9, 5]
    routing = drawn(tokens)
    knobs = Knobs(num_ctas=1)
    whole = DeviceGroup(SETTINGS, SHAPE, knobs, watchdog_s=1.0, device=torch.device("cpu"))
    whole.set_routing(routing)

    def body(heap, rank):
        group = DeviceGroup(SETTINGS, SHAPE, knobs, watchdog_s=1.0, heap=heap)
        group.set_routing(routing)
        assert (group.ranks, len(group.plans)) == (range(rank, rank + 1), RANKS)
        assert [group.plans[r].num_sent for r in range(RANKS)] == [2 * n for n in tokens]
        for slot in SPECS:
            assert group.tensor(rank, slot).equal(whole.tensor(rank, slot)), slot
        with pytest.raises(KeyError):
            group.tensor(1 - rank, Slot.words)
        return "same"

    assert with_heaps(RANKS, SPECS, body) == ["same"] * RANKS


def test_other_settings_are_told_before_a_stop_that_follows_from_them(stand_in):
    def body(heap, rank):
        group = DeviceGroup(SETTINGS, SHAPE, Knobs(num_ctas=1), watchdog_s=1.0, heap=heap)
        group.tensor(rank, Slot.words)[int(Word.mismatch)] = 2 - rank
        group.tensor(rank, Slot.abort).fill_(1)
        group.check()

    errors = with_heaps(RANKS, SPECS, body)

    for rank, error in enumerate(errors):
        with pytest.raises(ValueError, match=f"^rank {1 - rank} runs with other plan settings"):
            raise error


def test_a_process_meets_its_peers_by_a_gate_and_counts_it_as_a_launch(stand_in):
    def body(heap, rank):
        group = DeviceGroup(SETTINGS, SHAPE, Knobs(num_ctas=1), watchdog_s=1.0, heap=heap)
        launched = []
        group.launcher.launch = launched.append
        group.meet()
        group.meet()
        return launched, group._epoch

    assert with_heaps(RANKS, SPECS, body) == [(["open", "open"], 2)] * RANKS


def test_no_rank_stores_before_its_peer_has_zeroed(stand_in, monkeypatch):
    through = threading.Event()

    def slow(shape, *, dtype):
        memory = stand_in.tensor(shape, dtype=dtype)
        if memory is stand_in.memory[1]:
            assert not through.wait(0.2), "rank 0 did not wait for rank 1"
        return memory

    monkeypatch.setattr(sys.modules["nvshmem.core"], "tensor", slow)

    def body(heap, rank):
        through.set()
        return int(stand_in.memory[1 - rank].count_nonzero())

    assert with_heaps(RANKS, SPECS, body) == [0] * RANKS
