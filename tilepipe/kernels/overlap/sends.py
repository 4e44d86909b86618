"""Send tiles home out of the memory in which they are staged: push=epilogue.

Knows nothing of who multiplies and who reduces. Two warps of a GEMM CTA, one for each warpgroup
that multiplies, do it in place of the one that stores: rows are written once, at home, and never
read back. They wait for no rank.

Stores. A staged block is 64 rows of 128 bytes, swizzled: eight lanes take a row, so every store of
a warp is four whole lines of 128 bytes, in L2 and on a link. A bulk copy of a row would need it
unswizzled, with a gap between rows against bank conflicts, and that does not fit beside four stages
of operands. A warpgroup cannot stage its third block of four before the first is on its way, so
what a warp takes for half a tile is time in which nothing is multiplied: hence two.

Telling. Who completes a chunk of an M tile, whichever CTA it is, tells the homes of its rows: one
counter of this GPU per chunk and one flag per row and chunk, not per tile. A CTA releases what it
has stored before it counts, and whoever counts last acquires before it tells, so the flags cover
the stores of all.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from tilepipe.fabric.table import Slot
from tilepipe.kernels.edges import token_flag
from tilepipe.kernels.gemm.barriers import Named, arrive_named, meet_named
from tilepipe.kernels.gemm.epilogue import block_address, staged_byte
from tilepipe.kernels.gemm.grouped_sm90 import read_record, take_record
from tilepipe.kernels.gemm.plan import BLOCK_M, STAGED_COLUMNS, STAGING_BUFFERS
from tilepipe.kernels.gemm.staging import turn_of
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    load_shared_words,
    store_words,
)
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.semaphore import Scope, add_relaxed, claim, release_fence
from tilepipe.kernels.watchdog import abort_word
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = ["send_tiles"]

# Vectors of a row of a staged block, each a lane's; rows that a warp takes at once.
_PIECES = 8
_ROWS_AT_ONCE = LANES // _PIECES
# Rounds whose loads are under way before the first of their stores.
_ROUNDS = 4
_ELEMENTS = VECTOR_BYTES // 2
# Of a word that says where a row belongs; above are those of the peer.
_PLACE_BITS = 25


@cute.jit
def send_tiles(
    plan: cutlass.Constexpr,  # HomePlan
    place: cutlass.Constexpr,  # in the GEMM
    shared: cutlass.Constexpr,  # of the GEMM
    table: cute.Pointer,
    pace: cutlass.Constexpr,  # time that a row of a tile takes on a paced link, its latency
    group: Int32,  # warpgroup that has staged what this warp sends
):
    """Send home what one warpgroup stages, until no tile is left. Called by all lanes of a warp."""
    gemm = plan.gemm
    for i in cutlass.range_constexpr(STAGING_BUFFERS):
        arrive_named(int(Named.read) + group * STAGING_BUFFERS + i)
    count = Int32(0)
    more = Boolean(True)
    while more:
        more, first_row, valid, _, n_tile, m_tile, _ = read_record(place, shared, count)
        if more:
            take_record(place, shared, count)
            # Rows of the tile above the first block of this warpgroup.
            above = Int32(0) if gemm.is_ping_pong else group * BLOCK_M
            mine = valid > above
            if cutlass.const_expr(gemm.is_ping_pong):
                mine = mine and count % 2 == group
            if mine:
                _send_tile(
                    *(plan, table, place.rank, place.lane, shared.d, pace),
                    *(group, first_row + above, valid - above, n_tile, m_tile),
                )
        count += 1


@cute.jit
def _send_tile(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    staged: cute.Tensor,  # blocks of all buffers
    pace: cutlass.Constexpr,
    group: Int32,
    first_row: Int32,  # receive row of the warpgroup's first block
    valid: Int32,  # rows of the tile from there on
    n_tile: Int32,
    m_tile: Int32,
):
    """Take the warpgroup's blocks of a tile, store their rows at home, count and tell."""
    gemm = plan.gemm
    apart = BLOCK_M * gemm.groups_per_tile  # rows from one block of the warpgroup to the next
    starts = [i * apart + half for i in range(gemm.blocks_per_group) for half in (0, LANES)]
    ways = [_way_of(plan, table, rank, first_row, Int32(start) + lane, valid) for start in starts]
    due = Int64(0)
    if cutlass.const_expr(plan.constants.paced):
        due = _wait_for_links(plan, table, rank, lane, ways, pace)
    sent = Int32(0)
    for i in cutlass.range_constexpr(gemm.blocks_per_group):
        if valid > i * apart:
            sent += cutlass.min(valid - i * apart, BLOCK_M)
            # Not unrolled: addresses of all blocks would be kept in registers, which are few.
            for part in cutlass.range(gemm.out_tile_n // STAGED_COLUMNS, unroll=1):
                buffer_idx = group * STAGING_BUFFERS + turn_of(gemm, i, part)
                meet_named(int(Named.written) + buffer_idx)
                _send_block(
                    *(plan, table, ways[2 * i : 2 * i + 2], lane),
                    block_address(staged, buffer_idx),
                    n_tile * gemm.out_tile_n + part * STAGED_COLUMNS,
                )
                arrive_named(int(Named.read) + buffer_idx)
    if cutlass.const_expr(plan.constants.paced):
        sleep_until(table, rank, due)
    _tell(plan, table, rank, lane, sent, n_tile, m_tile)


@cute.jit
def _way_of(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    first_row: Int32,
    row: Int32,
    valid: Int32,
) -> Int32:
    """Peer and place among its rows of a row of a tile, in one word; below 0: there is no such row.

    One register each, and few there are: addresses are made where they are used.
    """
    way = Int32(-1)
    if row < valid:
        home = buffer(address(table, rank, Slot.row_home), Int64)[first_row + row]
        slot = Int32(home) & ((1 << SLOT_BITS) - 1)
        place = Int32(home >> SLOT_BITS) * plan.constants.num_topk + slot
        way = (_peer_of(home) << _PLACE_BITS) | place
    return way


def _peer_of(home: Int64) -> Int32:
    return Int32(home >> (TOKEN_BITS + SLOT_BITS))


@cute.jit
def _wait_for_links(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ways: cutlass.Constexpr,
    pace: cutlass.Constexpr,
) -> Int64:
    """Wait for the turn of a tile's rows on paced links; returns when they are across."""
    cost_ns, latency_ns = pace
    due = Int64(0)
    for peer in cutlass.range(plan.constants.num_ranks, unroll=1):
        own = Int32(0)
        for i in cutlass.range_constexpr(len(ways)):
            if ways[i] >> _PLACE_BITS == peer:
                own += 1
        num_rows = cute.arch.warp_reduction_sum(own)
        if num_rows > 0:
            crossed = wait_for_link(
                *(table, rank, peer, lane, plan.constants),
                *(cost_ns * num_rows, latency_ns),
            )
            due = cutlass.max(due, crossed)
    return due


@cute.jit
def _send_block(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    ways: cutlass.Constexpr,  # of rows lane and 32 + lane of the block
    lane: Int32,
    block: Int32,  # shared memory
    column: Int32,  # of the row, at which the block begins
):
    """Store the rows of a block that exist."""
    gemm = plan.gemm
    piece = lane % _PIECES
    within = column + piece * _ELEMENTS
    here = True
    if cutlass.const_expr(gemm.out_n % gemm.out_tile_n):
        here = within < gemm.out_n
    for half in cutlass.range_constexpr(BLOCK_M // LANES):
        for begin in cutlass.range(0, LANES, _ROUNDS * _ROWS_AT_ONCE, unroll=1):
            rows = [begin + i * _ROWS_AT_ONCE + lane // _PIECES for i in range(_ROUNDS)]
            held = [
                load_shared_words(block + staged_byte(half * LANES + row, piece * _ELEMENTS))
                for row in rows
            ]
            for i in cutlass.range_constexpr(_ROUNDS):
                way = cute.arch.shuffle_sync(ways[half], rows[i])
                if here and way >= 0:
                    place = Int64(way & ((1 << _PLACE_BITS) - 1))
                    home = address(table, way >> _PLACE_BITS, Slot.home_y)
                    row_address = home + place * plan.constants.row_bytes
                    store_words(row_address + Int64(within) * 2, held[i])


@cute.jit
def _tell(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    sent: Int32,  # rows
    n_tile: Int32,
    m_tile: Int32,
):
    """Count rows that have been sent; if they complete a chunk of the M tile, tell all its homes.

    Counted on this GPU: scope gpu. Homes are on any, so what precedes is released at scope sys.
    """
    gemm, constants = plan.gemm, plan.constants
    chunk = n_tile * gemm.num_chunks // gemm.num_n_tiles
    begin = (chunk * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
    end = ((chunk + 1) * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
    tiles = buffer(address(table, rank, Slot.tiles), Int32)
    first, rows = tiles[2 * m_tile], tiles[2 * m_tile + 1]
    stop = abort_word(table, rank)
    cute.arch.sync_warp()
    release_fence(Scope.sys)
    counted = Int32(0)
    if lane == 0:
        stored = address(table, rank, Slot.tile_stored)
        counted = claim(element(stored, m_tile * gemm.num_chunks + chunk, Int32), sent, Scope.gpu)
    counted = cute.arch.shuffle_sync(counted, 0) + sent
    cute.arch.sync_warp()
    if counted == rows * (end - begin) and cute.arch.vote_all_sync(stop == 0):
        # Acquires what other CTAs have released, and releases it with what this one has stored.
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
