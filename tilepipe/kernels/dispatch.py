"""Dispatch: rows are pushed to their experts in plan order, and all that come here waited for.

Knows nothing of GEMM and combine. Counters count rows, so any warp of any CTA may take any row.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.entries import communication_entry
from tilepipe.kernels.memory import LANES, address, buffer, element
from tilepipe.kernels.move import move_rows
from tilepipe.kernels.watchdog import wait_or_give_up

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
    if cutlass.const_expr(constants.granularity is Granularity.token):
        tiles = buffer(address(table, rank, Slot.tiles), Int32)
        flags = address(table, rank, Slot.row_flag)
        for tile in cutlass.range(warp, words[int(Word.num_tiles)], num_warps, unroll=1):
            first, valid = tiles[2 * tile], tiles[2 * tile + 1]
            for i in cutlass.range(lane, valid, LANES, unroll=1):
                flag = element(flags, first + i, Int32)
                wait_or_give_up(
                    table,
                    rank,
                    flag,
                    epoch,
                    Role.receive_row,
                    first + i,
                    epoch,
                    constants.num_ranks,
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
            wait_or_give_up(
                table,
                rank,
                seen,
                rows,
                Role.receive,
                counter,
                epoch,
                constants.num_ranks,
                limit_ns,
            )


def dispatch_entry(constants: Constants):
    """Host function of dispatch alone: sends of all ranks of this process, then their waits."""

    def body(table, rank, lane, warp, num_warps, ring, barriers, cost_ns, latency_ns, limit_ns):
        way = (ring, barriers, constants, cost_ns, latency_ns, limit_ns)
        move_rows(Edge.dispatch, table, rank, lane, *way)
        wait_rows(table, rank, warp, num_warps, lane, constants, limit_ns)

    return communication_entry(constants, body, moves=True, reduces=False)
