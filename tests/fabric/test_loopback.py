"""Memory of ranks that share a process, on the CPU: where buffers lie, what records say."""

import ctypes
import time
from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tilepipe.config.choices import Layout  # noqa: E402
from tilepipe.fabric import device_heap  # noqa: E402
from tilepipe.fabric.device_heap import device_bytes  # noqa: E402
from tilepipe.fabric.host import ArraySpec  # noqa: E402
from tilepipe.fabric.loopback import LoopbackHeap  # noqa: E402
from tilepipe.fabric.table import NUM_SLOTS, RECORD_FIELDS, Role, Slot  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.buffers import buffer_specs  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402
from tilepipe.schedule.shape import Shape  # noqa: E402

CPU = torch.device("cpu")
SPECS = {
    Slot.recv_x: ArraySpec(shape=(5, 7), dtype=np.int16),
    Slot.row_home: ArraySpec(shape=(5,), dtype=np.int64),
    Slot.home_y: ArraySpec(shape=(3, 0), dtype=np.int16),
    Slot.topk_weights: ArraySpec(shape=(4, 2), dtype=np.float32),
}
# Both halves; nothing comes home; nothing is dispatched; nobody has a token.
REAL = {
    "both": (8, Shape(max_tokens=9, num_tokens=72, dispatch_hidden=64, home_hidden=96)),
    "dispatch": (4, Shape(max_tokens=33, num_tokens=40, dispatch_hidden=2880)),
    "combine": (2, Shape(max_tokens=127, num_tokens=200, home_hidden=72)),
    "no_tokens": (1, Shape(max_tokens=0, num_tokens=0, dispatch_hidden=8, home_hidden=8)),
}


def heap_of(num_ranks=3, specs=SPECS):
    return LoopbackHeap(specs, num_ranks=num_ranks, device=CPU)


def real_specs(name):
    num_ranks, shape = REAL[name]
    settings = PlanSettings(
        num_ranks=num_ranks, num_experts=16, num_topk=2, tile_m=16, layout=Layout.padded
    )
    return num_ranks, buffer_specs(settings, shape)


@pytest.mark.parametrize("name", REAL)
def test_the_table_holds_the_address_of_every_buffer(name):
    num_ranks, specs = real_specs(name)

    heap = heap_of(num_ranks, specs)

    assert (heap.table.shape, heap.table.dtype) == ((num_ranks, NUM_SLOTS), torch.int64)
    assert len(specs) + 1 == NUM_SLOTS, "a slot that no buffer fills"
    for rank in range(num_ranks):
        for slot, spec in specs.items():
            tensor = heap.tensor(rank, slot)
            assert (tuple(tensor.shape), tensor.element_size()) == (
                spec.shape,
                np.dtype(spec.dtype).itemsize,
            )
            if tensor.numel():
                assert heap.table[rank, slot] == tensor.data_ptr()


@pytest.mark.parametrize("name", REAL)
def test_no_two_buffers_share_a_byte_and_each_begins_on_a_line(name):
    num_ranks, specs = real_specs(name)
    heap = heap_of(num_ranks, specs)
    assert not any(heap.tensor(rank, slot).any() for rank in range(num_ranks) for slot in specs)
    spans = sorted(
        (int(heap.table[rank, slot]), spec.num_bytes)
        for rank in range(num_ranks)
        for slot, spec in specs.items()
        if spec.num_bytes
    )

    first = spans[0][0]
    assert {(begin - first) % 1024 for begin, _ in spans} == {0}
    for (begin, num_bytes), (after, _) in pairwise(spans):
        assert begin + num_bytes <= after
    assert spans[-1][0] + spans[-1][1] <= first + num_ranks * heap.rank_bytes


def test_bytes_of_a_rank_are_whole_lines_of_every_buffer():
    # 70, 40, 0 and 32 bytes
    assert device_bytes(SPECS) == 3 * 1024
    assert heap_of().rank_bytes == 3 * 1024
    assert device_bytes({Slot.x: ArraySpec(shape=(1025,), dtype=np.int32)}) == 5 * 1024


def test_what_one_rank_stores_is_in_no_other_buffer():
    heap = heap_of()
    names = [(rank, slot) for rank in range(3) for slot in SPECS]
    for number, (rank, slot) in enumerate(names):
        heap.tensor(rank, slot).fill_(number + 1)

    for number, (rank, slot) in enumerate(names):
        assert set(heap.tensor(rank, slot).flatten().tolist()) <= {number + 1}


def test_fill_writes_the_front_of_a_buffer_and_leaves_the_rest():
    heap = heap_of()
    heap.tensor(1, Slot.row_home).fill_(-1)

    heap.fill(1, Slot.row_home, np.array([7, 8], np.int32))
    heap.fill(1, Slot.topk_weights, np.arange(8, dtype=np.float64).reshape(2, 4).T)
    heap.fill(2, Slot.recv_x, np.zeros((0, 7), np.int16))

    assert heap.tensor(1, Slot.row_home).tolist() == [7, 8, -1, -1, -1]
    assert heap.tensor(1, Slot.topk_weights).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert not heap.tensor(2, Slot.recv_x).any()


@pytest.mark.parametrize(
    ("slot", "shape", "sentence"),
    [
        (Slot.row_home, (6,), r"row_home holds \(5,\), got \(6,\)"),
        (Slot.recv_x, (5, 8), r"recv_x holds \(5, 7\), got \(5, 8\)"),
        (Slot.topk_weights, (8,), r"topk_weights holds \(4, 2\), got \(8,\)"),
    ],
)
def test_fill_refuses_what_has_no_room(slot, shape, sentence):
    with pytest.raises(ValueError, match=sentence):
        heap_of().fill(0, slot, np.zeros(shape, np.int16))


def give_up(heap, rank, **fields):
    """Write the record of a rank as its kernel does: to the address that the table holds."""
    record = (ctypes.c_int64 * len(RECORD_FIELDS)).from_address(int(heap.table[rank, Slot.record]))
    values = {"raised": 1, "expert": -1, "time_ns": 1} | fields
    for place, name in enumerate(RECORD_FIELDS):
        record[place] = values[name]


SENTENCES = {
    Role.gate: "role gate: rank 5 has opened launch 3, not 7",
    Role.receive: "role receive, counter 5: expected 7 rows, seen 3",
    Role.receive_row: "role receive, row 5: its flag is of launch 3, not 7",
    Role.gemm_receive: "role gemm_receive, counter 5: expected 7 rows, seen 3",
    Role.gemm_receive_row: "role gemm_receive_row, row 5: its flag is of launch 3, not 7",
    Role.push_stored: "role push, M tile 5: expected 7 rows x N tiles, seen 3",
    Role.gemm_pipeline: "role gemm_pipeline: barrier 5 of a CTA did not end phase 7",
    Role.reduce: "role reduce, token 5: expected 7 rows x chunks, seen 3",
    Role.reduce_rank: "role reduce, rank 5: expected 7 rows x chunks, seen 3",
    Role.plan: "role plan: CTA 5 of the rank has ended round 3, not 7",
}


@pytest.mark.parametrize("role", Role)
def test_a_rank_that_gave_up_says_in_one_sentence_what_it_waited_for(role):
    heap = heap_of()
    heap.check(limit_s=0.25)
    give_up(heap, 2, role=role, item=5, epoch=9, expected=7, seen=3)

    with pytest.raises(WatchdogTimeout) as caught:
        heap.check(limit_s=0.25)

    assert str(caught.value) == (
        f"rank 2 waited 0.25 s (launch.watchdog_ms): {SENTENCES[role]}; epoch 9"
    )


def test_of_several_ranks_that_gave_up_the_first_one_is_named():
    heap = heap_of()
    for rank, time_ns in enumerate((300, 100, 200)):
        give_up(
            heap, rank, role=Role.receive, item=rank, epoch=1, expected=2, seen=0, time_ns=time_ns
        )

    with pytest.raises(WatchdogTimeout, match=r"rank 1 waited 2 s .* counter 1:"):
        heap.check(limit_s=2)


def test_waiting_looks_until_the_launch_has_ended():
    looks = iter([False, False, True])

    heap_of().wait(lambda: next(looks), limit_s=1)

    assert next(looks, "all looks taken") == "all looks taken"


def test_a_launch_that_ended_in_a_wait_that_reached_its_limit_is_told():
    heap = heap_of()
    give_up(heap, 0, role=Role.gate, item=1, epoch=4, expected=4, seen=3)

    with pytest.raises(WatchdogTimeout, match="rank 1 has opened launch 3, not 4"):
        heap.wait(lambda: True, limit_s=1)


def test_a_launch_that_never_ends_is_given_up(monkeypatch):
    monkeypatch.setattr(device_heap, "_GRACE_S", 0.08)
    begin = time.monotonic()

    with pytest.raises(WatchdogTimeout) as caught:
        heap_of().wait(lambda: False, limit_s=0.01)

    assert 0.1 <= time.monotonic() - begin < 2
    assert str(caught.value) == (
        "a launch has not ended 0.1 s after it began (launch.watchdog_ms=10 for one wait), and no "
        "wait reached its limit: a kernel hangs"
    )


def test_a_launch_that_never_ends_is_told_by_its_record_where_there_is_one(monkeypatch):
    monkeypatch.setattr(device_heap, "_GRACE_S", 0.02)
    heap = heap_of()
    give_up(heap, 1, role=Role.reduce, item=12, epoch=2, expected=8, seen=7)

    with pytest.raises(WatchdogTimeout, match=r"rank 1 waited 0\.01 s .* token 12: expected 8"):
        heap.wait(lambda: False, limit_s=0.01)


def test_a_launch_that_has_trapped_is_told_by_its_record_where_there_is_one():
    def trapped():
        raise RuntimeError("unspecified launch failure")

    heap = heap_of()
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        heap.wait(trapped, limit_s=1)
    give_up(heap, 1, role=Role.reduce, item=12, epoch=2, expected=8, seen=7)

    with pytest.raises(WatchdogTimeout, match="token 12: expected 8"):
        heap.wait(trapped, limit_s=1)
