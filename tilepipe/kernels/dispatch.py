"""Dispatch: rows are pushed to their experts in plan order, and all that come here waited for.

Knows nothing of GEMM and combine. Counters count rows, so any warp of any CTA may take any row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.memory import LANES, address, buffer, element, shared_table
from tilepipe.kernels.move import move_rows, warp_memory
from tilepipe.kernels.semaphore import Scope, load_relaxed, wait_at_least
from tilepipe.kernels.watchdog import give_up

__all__ = ["dispatch_entry", "wait_rows"]


@cute.jit
def wait_rows(
    table: cute.Pointer,
    rank: Int32,
    warp: Int32,  # of all warps of the rank
    num_warps: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Return once the rows that this warp watches over are here. Only with all sends out.

    Warps share the counters, or with granularity token the tiles, among themselves.
    """
    words = buffer(address(table, rank, Slot.words), Int32)
    epoch = words[int(Word.epoch)]
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    if cutlass.const_expr(constants.granularity is Granularity.token):
        tiles = buffer(address(table, rank, Slot.tiles), Int32)
        flags = address(table, rank, Slot.row_flag)
        for tile in cutlass.range(warp, words[int(Word.num_tiles)], num_warps, unroll=1):
            first, valid = tiles[2 * tile], tiles[2 * tile + 1]
            for i in cutlass.range(lane, valid, LANES, unroll=1):
                flag = element(flags, first + i, Int32)
                _wait(
                    table,
                    rank,
                    flag,
                    epoch,
                    Role.receive_row,
                    first + i,
                    abort,
                    constants,
                    epoch,
                    limit_ns,
                )
    else:
        ready, expected = (
            address(table, rank, Slot.ready),
            address(table, rank, Slot.ready_expected),
        )
        num_counters = words[int(Word.num_counters)]
        first = warp * LANES + lane
        for counter in cutlass.range(first, num_counters, num_warps * LANES, unroll=1):
            rows = buffer(expected, Int32)[counter]
            seen = element(ready, counter, Int32)
            _wait(
                table,
                rank,
                seen,
                rows,
                Role.receive,
                counter,
                abort,
                constants,
                epoch,
                limit_ns,
            )


@cute.jit
def _wait(
    table: cute.Pointer,
    rank: Int32,
    counter: cute.Pointer,
    expected: Int32,
    role: cutlass.Constexpr,
    item: Int32,
    abort: cute.Pointer,
    constants: cutlass.Constexpr,
    epoch: Int32,
    limit_ns: Int64,
):
    if not wait_at_least(counter, expected, abort, limit_ns, Scope.sys, False):
        seen = load_relaxed(counter, Int32, Scope.sys)
        give_up(table, rank, constants.num_ranks, role, item, Int32(-1), epoch, expected, seen)


def dispatch_entry(constants: Constants):
    """Host function of dispatch alone: sends of all ranks of this process, then their waits."""

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,
        row_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
    ):
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = SmemAllocator()
        num_threads = constants.num_warps * LANES
        table = shared_table(table, memory, constants.num_ranks, thread, num_threads)
        ring, barriers = warp_memory(memory, warp, lane, constants, moves=True, reduces=False)
        rank = first_rank + cta % num_ranks
        move_rows(
            Edge.dispatch,
            table,
            rank,
            lane,
            ring,
            barriers,
            constants,
            row_cost_ns,
            latency_ns,
            limit_ns,
        )
        wait_rows(
            table,
            rank,
            (cta // num_ranks) * constants.num_warps + warp,
            num_ctas * constants.num_warps,
            lane,
            constants,
            limit_ns,
        )

    @cute.jit
    def host(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,  # of each rank
        row_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ):
        kernel(table, first_rank, num_ranks, num_ctas, row_cost_ns, latency_ns, limit_ns).launch(
            grid=[num_ranks * num_ctas, 1, 1],
            block=[constants.num_warps * LANES, 1, 1],
            min_blocks_per_mp=1,  # all registers that so many threads leave: none may spill
            stream=stream,
        )

    return host
