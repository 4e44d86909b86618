"""Many launches inside one kernel: ranks drift as far apart as the protocol lets them.

Launches of one stream follow each other whole, so between them nothing could race. Here every rank
is a group of CTAs that runs launch after launch by itself (gate, sends, waits, a check of every
row, then combine the same way), held together by nothing but the launch protocol.
"""

from dataclasses import dataclass, field

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import numpy as np
import torch
from cutlass import Boolean, Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Copy
from tilepipe.fabric.table import NUM_SLOTS, Slot, Word
from tilepipe.kernels import bulk, combine, dispatch, protocol
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.memory import LANES, address, buffer, element
from tilepipe.kernels.move import move_rows, warp_memory
from tilepipe.kernels.pace import sleep_until
from tilepipe.kernels.semaphore import Scope, load_relaxed, now_ns, publish_add, wait_at_least

ROW_WORDS = 64  # of a test row, 32 bits each
ROW_BYTES = ROW_WORDS * 4
NUM_CTAS = 2  # of a rank


@dataclass(frozen=True, kw_only=True)
class Delay:
    """Microseconds that one rank sleeps in every launch."""

    rank: int = 0
    entry_us: int = 0  # before it opens a launch
    send_us: int = 0  # before it sends its first row
    read_us: int = 0  # between its rows and their check: a slow reader


@cute.jit
def _rank_barrier(words: cute.Pointer, count: Int32, thread: Int32, abort: cute.Pointer, limit):
    """All CTAs of a rank meet; `count` is what the word holds once they have."""
    cute.arch.sync_threads()
    if thread == 0:
        publish_add(words, Int32(1), Scope.gpu)
        wait_at_least(words, count, abort, limit, Scope.gpu, False)
    cute.arch.sync_threads()


@cute.jit
def _count_wrong(rows: Int64, expected: Int64, num_rows: Int32, warp, num_warps, lane, errors):
    """Compare every word of every row with the one value that the row is to hold; -1: skip."""
    values = buffer(expected, Int32)
    for row in cutlass.range(warp, num_rows, num_warps, unroll=1):
        want = values[row]
        if want != -1:
            words = buffer(rows + Int64(row) * ROW_BYTES, Int32)
            wrong = Int32(0)
            for i in cutlass.range_constexpr(ROW_WORDS // LANES):
                if words[i * LANES + lane] != want:
                    wrong += 1
            if wrong > 0:
                cute.arch.atomic_add(errors, wrong)


def soak_entry(constants: Constants, num_launches: int, *, delay: Delay):
    """`num_launches` of dispatch and combine on all ranks, every received row checked."""

    @cute.kernel
    def kernel(
        tables: cute.Pointer,  # (num_launches, num_ranks, NUM_SLOTS) addresses
        expected: cute.Pointer,  # (num_launches, num_ranks, 4): received, its rows, home, its rows
        meetings: cute.Pointer,  # (num_ranks, 32) int32
        errors: cute.Pointer,  # (2,) int32: words received wrong, words come home wrong
        limit_ns: Int64,
    ):
        num_ranks = constants.num_ranks
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        lane, own_warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank, part = cta % num_ranks, cta // num_ranks
        warp, num_warps = part * constants.num_warps + own_warp, NUM_CTAS * constants.num_warps
        memory = SmemAllocator()
        ring, barriers = warp_memory(memory, own_warp, lane, constants, moves=True, reduces=False)
        met = Int32(0)
        meeting = meetings + rank * 32
        wanted = cute.make_tensor(expected, cute.make_layout(1 << 20))
        alive = Boolean(True)
        launch = Int32(0)
        while alive and launch < num_launches:
            table = tables + launch * (num_ranks * NUM_SLOTS)
            abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
            own = (launch * num_ranks + rank) * 4
            for operation in cutlass.range_constexpr(2):
                exchange = operation == 0
                if part == 0:
                    _sleep(table, rank, delay.rank, delay.entry_us)
                    protocol.open_launch(
                        table,
                        rank,
                        thread,
                        constants.num_warps * LANES,
                        constants,
                        exchange,
                        False,
                        limit_ns,
                    )
                met += NUM_CTAS
                _rank_barrier(meeting, met, thread, abort, limit_ns)
                _sleep(table, rank, delay.rank, delay.send_us)
                if cutlass.const_expr(exchange):
                    _move(Edge.dispatch, table, rank, lane, constants, ring, barriers, limit_ns)
                    dispatch.wait_rows(table, rank, warp, num_warps, lane, constants, limit_ns)
                else:
                    _move(Edge.home, table, rank, lane, constants, ring, barriers, limit_ns)
                    combine.wait_home(table, rank, warp, num_warps, lane, constants, limit_ns)
                met += NUM_CTAS
                _rank_barrier(meeting, met, thread, abort, limit_ns)
                if part == 0:
                    _sleep(table, rank, delay.rank, delay.read_us)
                alive = load_relaxed(abort, Int32, Scope.sys) == 0
                if alive:
                    slot = Slot.recv_x if exchange else Slot.home_y
                    _count_wrong(
                        address(table, rank, slot),
                        wanted[own + 2 * operation],
                        Int32(wanted[own + 2 * operation + 1]),
                        warp,
                        num_warps,
                        lane,
                        errors + operation,
                    )
                met += NUM_CTAS
                _rank_barrier(meeting, met, thread, abort, limit_ns)
            launch += 1

    @cute.jit
    def host(
        tables: cute.Pointer,
        expected: cute.Pointer,
        meetings: cute.Pointer,
        errors: cute.Pointer,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ):
        kernel(tables, expected, meetings, errors, limit_ns).launch(
            grid=[constants.num_ranks * NUM_CTAS, 1, 1],
            block=[constants.num_warps * LANES, 1, 1],
            stream=stream,
        )

    return host


@cute.jit
def _move(
    edge: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    ring: Int32,
    barriers: Int32,
    limit_ns: Int64,
):
    zero = Int64(0)
    if cutlass.const_expr(constants.copy is Copy.tma):
        _rearm(barriers, lane, constants)
    move_rows(edge, table, rank, lane, ring, barriers, constants, zero, zero, limit_ns)


@cute.jit
def _rearm(barriers: Int32, lane: Int32, constants: cutlass.Constexpr):
    """Barriers of a ring in the phase that its loop expects, which one loop leaves in any."""
    if lane < constants.num_stages:
        cute.arch.inline_ptx(
            "mbarrier.inval.shared::cta.b64 [{$r0}];",
            read_only_args=[barriers + lane * bulk.BARRIER_BYTES],
        )
    bulk.init_ring(barriers, lane, constants)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_warp()


@cute.jit
def _sleep(
    table: cute.Pointer,
    rank: Int32,
    delayed: cutlass.Constexpr,
    microseconds: cutlass.Constexpr,
):
    if cutlass.const_expr(microseconds > 0):  # noqa: SIM102  the other is known on the device only
        if rank == delayed:
            sleep_until(table, rank, now_ns() + microseconds * 1000)


@dataclass
class Soak:
    """Tables, plans and expected rows of a sequence of launches on one group's memory."""

    group: object  # DeviceGroup, whose symmetric memory and plans are used
    routings: list  # of each launch
    kept: list = field(default_factory=list)  # tensors that tables point to

    def run(self, constants: Constants, *, delay: Delay, limit_ns: int):
        """Run all launches; returns (words received wrong, words come home wrong)."""
        tables, expected = self._tables()
        device = self.group.device
        meetings = torch.zeros(constants.num_ranks * 32, dtype=torch.int32, device=device)
        errors = torch.zeros(2, dtype=torch.int32, device=device)
        arguments = (
            _pointer(tables, Int64),
            _pointer(expected, Int64),
            _pointer(meetings, Int32),
            _pointer(errors, Int32),
            Int64(limit_ns),
            cuda.CUstream(torch.cuda.current_stream().cuda_stream),
        )
        entry = soak_entry(constants, len(self.routings), delay=delay)
        cute.compile(entry, *arguments)(*arguments)
        torch.cuda.synchronize()
        return tuple(errors.tolist())

    def _tables(self):
        tables, expected = [], []
        for number, routing in enumerate(self.routings):
            self.group.set_routing(routing, epoch=2 * number + 1)
            rows, wanted = self._launch(number, routing)
            tables.append(rows)
            expected.append(wanted)
        return torch.stack(tables), self._kept(torch.tensor(expected, device=self.group.device))

    def _launch(self, number, routing):
        """The table of one launch, its private buffers copied, and what every rank must receive."""
        group = self.group
        table = group.heap.table.clone()
        wanted = []
        for rank in group.ranks:
            for slot in PRIVATE:
                table[rank, slot] = self._kept(group.tensor(rank, slot).clone()).data_ptr()
            words = self._kept(group.tensor(rank, Slot.words).clone())
            words[int(Word.epoch)] = 2 * number  # dispatch and combine are a launch each
            table[rank, Slot.words] = words.data_ptr()
            received, home = self._payload(number, routing, rank, table)
            wanted.append(
                [received.data_ptr(), len(received), home.data_ptr(), len(home)],
            )
        return table, wanted

    def _payload(self, number, routing, rank, table):
        """Rows to send and to bring home of a launch, and the values that must come."""
        group, device = self.group, self.group.device
        tokens = np.arange(len(routing.topk_idx[rank]))
        x = np.repeat(_value(number, rank, tokens)[:, None], ROW_WORDS, 1).astype(np.int32)
        table[rank, Slot.x] = self._kept(torch.tensor(x, device=device)).data_ptr()
        layout = group.plans[rank].layout
        received = np.full(layout.extent, -1, np.int64)
        y = np.zeros((layout.extent, ROW_WORDS), np.int32)
        for row, source, token, slot in _homes(group, rank):
            received[row] = _value(number, source, token)
            y[row] = _value(number, source, token, slot + 1)
        table[rank, Slot.y] = self._kept(torch.tensor(y, device=device)).data_ptr()
        home = np.full(routing.topk_idx[rank].shape, -1, np.int64)
        token, slot = np.nonzero(routing.topk_idx[rank] >= 0)
        home[token, slot] = _value(number, rank, token, slot + 1)
        return (
            self._kept(torch.tensor(received.astype(np.int32), device=device)),
            self._kept(torch.tensor(home.reshape(-1).astype(np.int32), device=device)),
        )

    def _kept(self, tensor):
        self.kept.append(tensor)
        return tensor


# Buffers whose content is one launch's plan.
PRIVATE = (
    Slot.sends,
    Slot.tiles,
    Slot.ready_expected,
    Slot.rows_to,
    Slot.counts,
    Slot.returns,
    Slot.topk_idx,
    Slot.topk_weights,
    Slot.token_expected,
    Slot.rank_expected,
)


def _value(launch, rank, token, slot=0):
    """What every word of a row holds: its launch, source, token and slot."""
    return (launch + 1) << 22 | rank << 19 | np.asarray(token) << 4 | slot


def _homes(group, rank):
    """Receive row, source rank, token and slot of every row that a rank receives."""
    for plan in group.plans:
        tickets = plan.tickets
        for number in np.flatnonzero(tickets.peer == rank):
            for i in range(int(tickets.num_rows[number])):
                source = int(tickets.source_start[number]) + i
                yield (
                    int(tickets.first_row[number]) + i,
                    plan.rank,
                    int(plan.row_token[source]),
                    int(plan.row_slot[source]),
                )


def _pointer(tensor, dtype):
    return make_ptr(dtype, tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
