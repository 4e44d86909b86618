"""The copy backend of a kernel: which loop moves rows, and the shared memory that it works in.

Knows nothing of who waits for the rows.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Copy
from tilepipe.fabric.table import near_table_bytes
from tilepipe.kernels import bulk, reduction, simt
from tilepipe.kernels.constants import Constants

__all__ = ["move_rows", "shared_bytes", "warp_bytes", "warp_memory"]

_ALIGN = 128


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def warp_bytes(constants: Constants, *, moves: bool, reduces: bool) -> int:
    """Shared memory of one warp's ring; moving and reducing take turns in it."""
    by_bulk = moves and constants.copy is Copy.tma
    return _aligned(
        max(
            bulk.ring_bytes(constants) if by_bulk else 0,
            reduction.ring_bytes(constants) if reduces else 0,
        )
    )


def shared_bytes(constants: Constants, *, moves: bool, reduces: bool) -> int:
    """Shared memory of a CTA: address table, rings and their barriers."""
    rings = constants.num_warps * warp_bytes(constants, moves=moves, reduces=reduces)
    by_bulk = moves and constants.copy is Copy.tma
    barriers = constants.num_warps * constants.num_stages * bulk.BARRIER_BYTES if by_bulk else 0
    return _aligned(near_table_bytes(constants.num_ranks)) + rings + _aligned(barriers)


def warp_memory(
    memory,  # allocator of the kernel's shared memory
    warp: Int32,
    lane: Int32,
    constants: Constants,
    *,
    moves: bool,
    reduces: bool,
) -> tuple[Int32, Int32]:
    """Addresses of a warp's ring and barriers, laid out and set up. Called by all threads."""
    own = warp_bytes(constants, moves=moves, reduces=reduces)
    ring = barriers = Int32(0)
    if own:
        rings = memory.allocate_array(Int32, constants.num_warps * own // 4, byte_alignment=_ALIGN)
        ring = Int32(rings.toint()) + warp * own
    if moves and constants.copy is Copy.tma:
        words = memory.allocate_array(
            Int64, constants.num_warps * constants.num_stages, byte_alignment=_ALIGN
        )
        barriers = Int32(words.toint()) + warp * (constants.num_stages * bulk.BARRIER_BYTES)
        bulk.init_ring(barriers, lane, constants)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
    return ring, barriers


@cute.jit
def move_rows(
    edge: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,
    barriers: Int32,
    constants: cutlass.Constexpr,
    row_cost_ns: Int64,  # time that a row takes on a paced link
    latency_ns: Int64,  # of a paced link
    limit_ns: Int64,
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
):
    """Push rows of `rank` until none is left to claim. Called by all lanes of a warp."""
    if cutlass.const_expr(constants.copy is Copy.tma):
        bulk.move_rows(
            edge,
            table,
            rank,
            lane,
            ring,
            barriers,
            constants,
            row_cost_ns,
            latency_ns,
            limit_ns,
            tape,
        )
    else:
        simt.move_rows(edge, table, rank, lane, constants, row_cost_ns, latency_ns, tape)
