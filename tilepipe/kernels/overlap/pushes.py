"""Push rows home as the GEMM stores them: a group of rows of a unit a warp at a time.

Knows nothing of who multiplies and who reduces. A warp claims groups in the order of the units,
waits for what its unit needs, and moves the pieces of its rows. It waits for this rank's GEMM
alone, which waits for nobody, so no two ranks can wait for each other.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from tilepipe.config.choices import Copy
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.edges import token_flag
from tilepipe.kernels.gemm.barriers import Item, await_phase
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    load_vector,
    load_words,
    shuffle_wide,
    store_vector,
    word,
)
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.semaphore import (
    Scope,
    acquire_fence,
    add_relaxed,
    load_relaxed,
    release_bulk_fence,
    release_fence,
    wait_telling,
)
from tilepipe.kernels.simt import copy_row
from tilepipe.kernels.stamps import Event, lap, moment
from tilepipe.kernels.watchdog import abort_word, give_up
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = ["push_stored"]

_UNIT_BYTES = 16
_STEP = LANES * VECTOR_BYTES


@cute.jit
def push_stored(
    plan: cutlass.Constexpr,  # HomePlan
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,  # shared memory of this warp, by bulk copies
    barrier: cute.Pointer,  # of the loads into it
    pace: cutlass.Constexpr,  # time that a piece takes on a paced link, its latency
    limit_ns: Int64,
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
):
    """Push until no group is left to claim. Called by all lanes of a warp."""
    words = address(table, rank, Slot.words)
    num_places = buffer(words, Int32)[int(Word.num_units)] * plan.num_groups
    queue = word(words, Word.push_queue)
    tiles = buffer(address(table, rank, Slot.tiles), Int32)
    units = address(table, rank, Slot.push_units)
    phase = Int32(0)
    place = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    alive = cute.arch.vote_all_sync(abort_word(table, rank) == 0)
    while alive and place < num_places:
        coming = claim_for_warp(queue, lane)
        tile, chunk, first_wait, num_wait = load_words(
            units + Int64(place // plan.num_groups) * _UNIT_BYTES
        )
        begin = place % plan.num_groups * plan.group_rows
        first, valid = tiles[2 * tile] + begin, tiles[2 * tile + 1] - begin
        count = cutlass.min(valid, plan.group_rows)
        if count > 0:
            asked = moment(tape)
            came, late = _wait_stored(
                *(plan, table, rank, lane, chunk, first_wait, num_wait, limit_ns)
            )
            if cutlass.const_expr(tape is not None):
                if late:
                    lap(tape, Event.look, at=asked)
                    lap(tape, Event.wait, place, 1)
            alive = cute.arch.vote_all_sync(came)
            if alive:
                _push_group(
                    *(plan, table, rank, lane, ring, barrier, phase),
                    *(first, count, chunk, pace, limit_ns),
                )
                phase = phase ^ 1
            lap(tape, Event.send, place, 0, count)
        place = cute.arch.shuffle_sync(coming, 0)


@cute.jit
def _wait_stored(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    chunk: Int32,
    first: Int32,
    num_tiles: Int32,
    limit_ns: Int64,
) -> tuple[Boolean, Boolean]:
    """Wait until tiles are stored, in one chunk or in all, counters dealt to lanes; and whether a
    first look of this lane did not find them so.

    Stored on this GPU by TMA or plain stores of other CTAs: scope gpu. Each lane acquires what it
    has seen; the barrier and another fence order that before what any lane reads or copies.
    """
    gemm = plan.gemm
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    tiles = buffer(address(table, rank, Slot.tiles), Int32)
    stored = address(table, rank, Slot.tile_stored)
    one_chunk = plan.num_pieces > 1
    per_tile = 1 if one_chunk else gemm.num_chunks
    by_bulk = plan.constants.copy is Copy.tma
    came, late = Boolean(True), Boolean(False)
    for i in cutlass.range(lane, num_tiles * per_tile, LANES, unroll=1):
        tile = first + i // per_tile
        part = chunk if one_chunk else i % per_tile
        ends = ((part + 1) * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
        width = ends - (part * gemm.num_n_tiles + gemm.num_chunks - 1) // gemm.num_chunks
        expected = tiles[2 * tile + 1] * width
        counter = element(stored, tile * gemm.num_chunks + part, Int32)
        here, waited = wait_telling(counter, expected, abort, limit_ns, Scope.gpu, by_bulk)
        late = late or waited
        if not here:
            epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
            give_up(
                *(table, rank, plan.constants.num_ranks, Role.push_stored, tile, part),
                *(epoch, expected, load_relaxed(counter, Int32, Scope.gpu)),
            )
        came = came and here
    cute.arch.sync_warp()
    acquire_fence(Scope.gpu, by_bulk)
    return came, late


@cute.jit
def _push_group(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,
    barrier: cute.Pointer,
    phase: Int32,
    first: Int32,  # receive row
    count: Int32,  # rows, no more than lanes
    chunk: Int32,
    pace: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Move one piece of each row, then tell homes. Lane i knows the way of row i."""
    constants = plan.constants
    target, flag, peer = Int64(0), Int64(0), Int32(0)
    if lane < count:
        home = buffer(address(table, rank, Slot.row_home), Int64)[first + lane]
        peer, token = Int32(home >> (TOKEN_BITS + SLOT_BITS)), Int32(home >> SLOT_BITS)
        slot = Int32(home) & ((1 << SLOT_BITS) - 1)
        row = Int64(token) * constants.num_topk + slot
        target = address(table, peer, Slot.home_y) + row * constants.row_bytes
        target += Int64(chunk) * plan.piece_bytes
        if cutlass.const_expr(constants.by_rank):
            flag = address(table, peer, Slot.rank_ready) + Int64(rank) * 4
        else:
            flag = token_flag(constants, table, rank, peer, token, chunk)
    source = address(table, rank, Slot.y) + Int64(first) * constants.row_bytes
    source += Int64(chunk) * plan.piece_bytes
    due = Int64(0)
    if cutlass.const_expr(constants.paced):
        for i in cutlass.range(count, unroll=1):
            to = cute.arch.shuffle_sync(peer, i)
            due = cutlass.max(due, wait_for_link(table, rank, to, lane, constants, *pace))
    if cutlass.const_expr(constants.copy is Copy.tma):
        _copy_in_bulk(
            *(plan, table, rank, lane, ring, barrier, phase, source, target, count, limit_ns)
        )
    else:
        _copy_by_lanes(plan, lane, source, target, count)
    if cutlass.const_expr(constants.paced):
        sleep_until(table, rank, due)
    cute.arch.sync_warp()
    if cutlass.const_expr(constants.copy is Copy.tma):
        release_bulk_fence(Scope.sys)
    else:
        release_fence(Scope.sys)
    if lane < count and abort_word(table, rank) == 0:
        add_relaxed(element(flag, Int32(0), Int32), Int32(plan.share), Scope.sys)


@cute.jit
def _copy_by_lanes(
    plan: cutlass.Constexpr, lane: Int32, source: Int64, target: Int64, count: Int32
):
    """Copy a piece of each row, two rows at once where both fit a lane's loads."""
    row_bytes, piece_bytes = plan.constants.row_bytes, plan.piece_bytes
    num_loads = plan.constants.num_loads
    steps, rest = divmod(piece_bytes, _STEP)
    row = Int32(0)
    if cutlass.const_expr(rest == 0 and 2 * steps <= num_loads):
        at = Int64(lane) * VECTOR_BYTES
        while row + 1 < count:
            pair = [source + Int64(row + i) * row_bytes + at for i in range(2)]
            goals = [shuffle_wide(target, row + i) + at for i in range(2)]
            values = [load_vector(begin + step * _STEP) for begin in pair for step in range(steps)]
            for i in cutlass.range_constexpr(2):
                for step in cutlass.range_constexpr(steps):
                    store_vector(goals[i] + step * _STEP, values[i * steps + step])
            row += 2
    while row < count:
        copy_row(
            source + Int64(row) * row_bytes, shuffle_wide(target, row), lane, piece_bytes, num_loads
        )
        row += 1


@cute.jit
def _copy_in_bulk(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,
    barrier: cute.Pointer,
    phase: Int32,
    source: Int64,
    target: Int64,
    count: Int32,
    limit_ns: Int64,
):
    """Load a piece of each row into the ring, store all; returns once they have arrived.

    While this warp waits, the others of its CTA move their groups.
    """
    piece_bytes = plan.piece_bytes
    if lane == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * piece_bytes)
        for row in cutlass.range(count, unroll=1):
            cute.arch.inline_ptx(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
                read_only_args=[
                    ring + row * piece_bytes,
                    source + Int64(row) * plan.constants.row_bytes,
                    Int32(piece_bytes),
                    Int32(barrier.toint()),
                ],
            )
    cute.arch.sync_warp()
    await_phase(
        *(barrier, phase, Item.full, table, rank, plan.constants.num_ranks, limit_ns),
    )
    for row in cutlass.range(count, unroll=1):
        goal = shuffle_wide(target, row)
        if lane == 0:
            cute.arch.inline_ptx(
                "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
                read_only_args=[goal, ring + row * piece_bytes, Int32(piece_bytes)],
            )
    if lane == 0:
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.sync_warp()
