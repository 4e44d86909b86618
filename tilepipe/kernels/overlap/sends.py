"""Send tiles home out of the memory in which they are staged: push=epilogue.

Knows nothing of who multiplies and who reduces. Rows are written once, at home, and never read
back; whoever sends waits for no rank.

Stores. A warp stages 16 rows x 64 columns of its sums and takes them up again itself, eight lanes a
row, so every store of a warp is four whole lines of 128 bytes, in L2 and on a link; nobody has to
be waited for but the lanes of the warp. Where its rows belong it looks up before it multiplies.

Telling. The store warp, which has nothing to store, waits for all warps of the tile, releases, and
counts its rows. Whoever completes a chunk of an M tile, on whichever CTA, tells the homes of its
rows: a flag per row and chunk, not per tile. A CTA releases before it counts, and who counts last
acquires before it tells, so flags cover the stores of all.

Not chosen: a warp that sends what others have staged, with the buffers and barriers of stores by
TMA. Between its loads and its stores lie latencies, and a warpgroup cannot stage its third block of
four before the first is gone: 1.22 x `gemm_all` at 116 SMs, where the GEMM alone takes 1.09 (H200,
2026-11, 32 768 x 2048 x 7168). Bulk copies of rows need them unswizzled, with gaps against bank
conflicts, and that does not fit beside four stages of operands.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.fabric.table import Slot
from tilepipe.kernels.edges import token_flag
from tilepipe.kernels.gemm.epilogue import stage_words, staged_byte
from tilepipe.kernels.gemm.plan import BLOCK_M
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    load_shared_words,
    store_words,
)
from tilepipe.kernels.overlap.home import HomePlan
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.semaphore import Scope, add_relaxed, claim, release_fence
from tilepipe.kernels.watchdog import abort_word
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = ["Sender"]

_ROWS_OF_WARP = 16  # of a block
# Vectors of a row of a staged block, each a lane's; rows that a warp takes at once.
_PIECES = 8
_ROWS_AT_ONCE = LANES // _PIECES
_ROUNDS = _ROWS_OF_WARP // _ROWS_AT_ONCE
_ELEMENTS = VECTOR_BYTES // 2


@dataclass(frozen=True)
class Sender:
    """What the roles of a GEMM call in place of storing."""

    plan: HomePlan
    table: Any  # by which rows find home
    pace: tuple[Any, Any]  # time that a row of a tile takes on a paced link, its latency

    def find_rows(self, place: Any, first_row: Int32, valid: Int32) -> list[list[Int64]]:
        """Addresses at home of the rows that this lane will store, block by block of its
        warpgroup, whose first row is `first_row`; 0: there is no such row."""
        gemm = self.plan.gemm
        apart = BLOCK_M * gemm.groups_per_tile
        own = place.warp % 4 * _ROWS_OF_WARP + place.lane // _PIECES
        return [
            [
                _target_of(
                    *(self.plan, self.table, place.rank, first_row),
                    *(own + (i * apart + step * _ROWS_AT_ONCE), valid),
                )
                for step in range(_ROUNDS)
            ]
            for i in range(gemm.blocks_per_group)
        ]

    def send_block(
        self,
        words: cute.Tensor,  # 16 words: 64 columns of two row halves
        staged: Int32,  # shared memory of the block's buffer
        targets: list[Int64],
        column: Int32,  # of the row, at which the block begins
        warp: Int32,  # of the warpgroup
        lane: Int32,
    ) -> None:
        """Store a warp's rows of a block at home."""
        _send_block(self.plan, words, staged, targets, column, warp, lane)

    def tell(
        self, place: Any, first_row: Int32, valid: Int32, n_tile: Int32, m_tile: Int32
    ) -> None:
        """Count the rows of a tile, which all warps have sent; tell homes of those complete."""
        if self.plan.constants.paced:
            _wait_for_links(
                *(self.plan, self.table, place.rank, place.lane, self.pace, first_row, valid)
            )
        _tell(self.plan, self.table, place.rank, place.lane, valid, n_tile, m_tile)


def _peer_of(home: Int64) -> Int32:
    return Int32(home >> (TOKEN_BITS + SLOT_BITS))


@cute.jit
def _target_of(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    first_row: Int32,
    row: Int32,
    valid: Int32,
) -> Int64:
    """Address at home of a row of a tile, told by what dispatch has left beside it."""
    target = Int64(0)
    if row < valid:
        home = buffer(address(table, rank, Slot.row_home), Int64)[first_row + row]
        slot = Int32(home) & ((1 << SLOT_BITS) - 1)
        at_home = Int64(Int32(home >> SLOT_BITS)) * plan.constants.num_topk + slot
        target = address(table, _peer_of(home), Slot.home_y) + at_home * plan.constants.row_bytes
    return target


@cute.jit
def _send_block(
    plan: cutlass.Constexpr,
    words: cute.Tensor,
    staged: Int32,
    targets: cutlass.Constexpr,
    column: Int32,
    warp: Int32,
    lane: Int32,
):
    gemm = plan.gemm
    piece = lane % _PIECES
    within = column + piece * _ELEMENTS
    here = True
    if cutlass.const_expr(gemm.out_n % gemm.out_tile_n):
        here = within < gemm.out_n
    # Buffers take turns, and a warp's own lanes meet here once a block: who still reads the other
    # buffer has been met before anybody writes it again.
    stage_words(words, staged, warp, lane)
    cute.arch.sync_warp()
    first = warp * _ROWS_OF_WARP + lane // _PIECES
    held = [
        load_shared_words(staged + staged_byte(first + i * _ROWS_AT_ONCE, piece * _ELEMENTS))
        for i in range(_ROUNDS)
    ]
    for i in cutlass.range_constexpr(_ROUNDS):
        if here and targets[i] != 0:
            store_words(targets[i] + Int64(within) * 2, held[i])


@cute.jit
def _wait_for_links(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    pace: cutlass.Constexpr,
    first_row: Int32,
    valid: Int32,
):
    """Return once the rows of a tile would be across paced links."""
    cost_ns, latency_ns = pace
    homes = buffer(address(table, rank, Slot.row_home), Int64)
    due = Int64(0)
    for peer in cutlass.range(plan.constants.num_ranks, unroll=1):
        own = Int32(0)
        for row in cutlass.range(lane, valid, LANES, unroll=1):
            if _peer_of(homes[first_row + row]) == peer:
                own += 1
        num_rows = cute.arch.warp_reduction_sum(own)
        if num_rows > 0:
            crossed = wait_for_link(
                *(table, rank, peer, lane, plan.constants),
                *(cost_ns * num_rows, latency_ns),
            )
            due = cutlass.max(due, crossed)
    sleep_until(table, rank, due)


@cute.jit
def _tell(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    valid: Int32,
    n_tile: Int32,
    m_tile: Int32,
):
    """Counted on this GPU: scope gpu. Homes are on any, so what precedes is released at scope sys;
    the barrier at which this warp has met all that sent joins their stores to the release."""
    gemm, constants = plan.gemm, plan.constants
    chunk = n_tile * gemm.num_chunks // gemm.num_n_tiles
    begin = (chunk * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
    end = ((chunk + 1) * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
    tiles = buffer(address(table, rank, Slot.tiles), Int32)
    first, rows = tiles[2 * m_tile], tiles[2 * m_tile + 1]
    stop = abort_word(table, rank)
    release_fence(Scope.sys)
    counted = Int32(0)
    if lane == 0:
        stored = address(table, rank, Slot.tile_stored)
        counted = claim(element(stored, m_tile * gemm.num_chunks + chunk, Int32), valid, Scope.gpu)
    counted = cute.arch.shuffle_sync(counted, 0) + valid
    cute.arch.sync_warp()
    if counted == rows * (end - begin) and cute.arch.vote_all_sync(stop == 0):
        # Acquires what other CTAs have released, and releases it with what this one has sent.
        release_fence(Scope.sys)
        for row in cutlass.range(lane, rows, LANES, unroll=1):
            home = buffer(address(table, rank, Slot.row_home), Int64)[first + row]
            peer, token = _peer_of(home), Int32(home >> SLOT_BITS)
            flag = Int64(0)
            if cutlass.const_expr(constants.by_rank):
                flag = address(table, peer, Slot.rank_ready) + Int64(rank) * 4
            else:
                flag = token_flag(constants, table, rank, peer, token, chunk)
            add_relaxed(element(flag, Int32(0), Int32), Int32(plan.share), Scope.sys)
