"""The warp of a grouped GEMM that stores what the others have staged, and tells of it.

Knows nothing of products and of who hands tiles out.

Publishing costs the multiplying warps nothing: this warp waits for its stores to complete, then
releases, while they are in the next tile.
"""

import cutlass
import cutlass.cute as cute
import cutlass.utils as utils
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.barriers import Named, arrive_named, meet_named
from tilepipe.kernels.gemm.choices import Clip
from tilepipe.kernels.gemm.operands import partition
from tilepipe.kernels.gemm.plan import (
    BLOCK_M,
    DESCRIPTOR_BYTES,
    NUM_CONSUMERS,
    STAGED_COLUMNS,
    STAGING_BUFFERS,
)
from tilepipe.kernels.gemm.roles import read_record, take_record
from tilepipe.kernels.memory import address, element
from tilepipe.kernels.semaphore import Scope, add_relaxed, release_bulk_fence, release_fence
from tilepipe.kernels.watchdog import abort_word

__all__ = ["descriptor_pointer", "store_tiles"]


@cute.jit
def _patch_descriptor(operands: cutlass.Constexpr, descriptor: cute.Pointer, group_end: Int32):
    """End the CTA's own output descriptor with the rows of an expert. Called by the store warp,
    which alone uses it."""
    # Drain: no store may still read what is about to change.
    cute.arch.cp_async_bulk_wait_group(0, read=False)
    cute.arch.sync_warp()
    rows = cute.make_tensor(
        operands.plain_d.iterator,
        cute.make_layout((group_end, operands.plain_d.shape[1]), stride=operands.plain_d.stride),
    )
    cpasync.update_tma_descriptor(operands.tma_d, rows, descriptor)
    cute.arch.sync_warp()
    cpasync.fence_tma_desc_release()
    cpasync.fence_tma_desc_acquire(descriptor)


@cute.jit
def _store_block(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    descriptor: cutlass.Constexpr,
    buffer_idx: Int32,
    row: Int32,
    num_rows: Int32,
    column: Int32,
):
    """Start storing a staged block, as many of its rows as exist where the descriptor clips."""
    plan = place.plan
    out = operands.d
    if cutlass.const_expr(plan.clip is Clip.ragged):
        # Dimension 0 has one block's rows and ends with it; the base lies one block lower.
        there = cutlass.min(num_rows, BLOCK_M)
        out = cute.domain_offset((BLOCK_M - there, column), out[None, None, row + there])
    else:
        out = cute.domain_offset((row, column), out)
    from_s, to_g = partition(
        operands.tma_d, shared.d, cute.local_tile(out, (BLOCK_M, STAGED_COLUMNS), (0, 0))
    )
    if cutlass.const_expr(plan.clip is Clip.per_group):
        generic = descriptor_pointer(Int64(descriptor.toint()), cute.AddressSpace.generic)
        cute.copy(operands.tma_d, from_s[None, buffer_idx], to_g, tma_desc_ptr=generic)
    else:
        cute.copy(operands.tma_d, from_s[None, buffer_idx], to_g)
    cute.arch.cp_async_bulk_commit_group()


@cute.jit
def store_tiles(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    send: cutlass.Constexpr = None,
):
    """Store what consumers stage, and tell of every tile once it lies in memory.

    Of tiles that others have stored or sent it tells alone, and then takes the record: nobody gets
    two tiles ahead.
    """
    plan = place.plan
    by_tma = plan.stores_by_tma
    descriptor = None
    if cutlass.const_expr(plan.clip is Clip.per_group):
        cta, _, _ = cute.arch.block_idx()
        at = operands.workspace + Int64(cta) * DESCRIPTOR_BYTES
        descriptor = descriptor_pointer(at)
        if place.lane == 0:
            cpasync.copy_tensormap(operands.tma_d, descriptor)
        cute.arch.sync_warp()
    if cutlass.const_expr(by_tma):
        for i in cutlass.range_constexpr(NUM_CONSUMERS * STAGING_BUFFERS):
            arrive_named(int(Named.read) + i)
    known_end = Int32(-1)
    count = Int32(0)
    more = Boolean(True)
    while more:
        more, first_row, valid, _, n_tile, m_tile, group_end = read_record(place, shared, count)
        if more:
            if cutlass.const_expr(by_tma):
                take_record(place, shared, count)
            if valid > 0:
                if cutlass.const_expr(plan.clip is Clip.per_group):
                    if group_end != known_end:
                        _patch_descriptor(operands, descriptor, group_end)
                        known_end = group_end
                if cutlass.const_expr(by_tma):
                    _store_tile(
                        *(place, shared, operands, descriptor),
                        *(count, first_row, valid, n_tile),
                    )
                elif cutlass.const_expr(plan.is_ping_pong):
                    meet_named(int(Named.written) + plan.told_at(count % 2, count))
                else:
                    for group in cutlass.range_constexpr(NUM_CONSUMERS):
                        meet_named(int(Named.written) + plan.told_at(group, count))
                if cutlass.const_expr(send is not None):
                    send.tell(place, first_row, valid, n_tile, m_tile)
                elif cutlass.const_expr(plan.problem.publish):
                    _publish(place, valid, n_tile, m_tile)
            if cutlass.const_expr(not by_tma):
                take_record(place, shared, count)
        count += 1
    if cutlass.const_expr(by_tma):
        cute.arch.cp_async_bulk_wait_group(0, read=False)


@cute.jit
def _store_tile(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    descriptor: cutlass.Constexpr,
    count: Int32,
    first_row: Int32,
    valid: Int32,
    n_tile: Int32,
):
    """Store the blocks of a tile in the order in which its warpgroups stage them."""
    plan = place.plan
    pending = Int32(-1)  # buffer that a store may still read
    for i in cutlass.range_constexpr(plan.blocks_per_group):
        for part in cutlass.range_constexpr(plan.out_tile_n // STAGED_COLUMNS):
            for member in cutlass.range_constexpr(plan.groups_per_tile):
                group = count % 2 if plan.is_ping_pong else Int32(member)
                block = i * plan.groups_per_tile + member
                num_rows = valid - block * BLOCK_M
                if num_rows > 0:
                    buffer_idx = group * STAGING_BUFFERS + plan.turn_of(i, part)
                    meet_named(int(Named.written) + buffer_idx)
                    _store_block(
                        *(place, shared, operands, descriptor, buffer_idx),
                        first_row + block * BLOCK_M,
                        num_rows,
                        n_tile * plan.out_tile_n + part * STAGED_COLUMNS,
                    )
                    if pending >= 0:
                        # All but the store just started have read their buffers.
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                        arrive_named(int(Named.read) + pending)
                    pending = buffer_idx
    cute.arch.cp_async_bulk_wait_group(0, read=True)
    arrive_named(int(Named.read) + pending)


@cute.jit
def _publish(place: cutlass.Constexpr, valid: Int32, n_tile: Int32, m_tile: Int32):
    """Add the rows of a tile to the counter of its M tile and chunk, once they lie in memory.

    Read on this GPU: scope gpu. By TMA the elected lane, which has issued the stores, publishes;
    with direct stores any lane may, the barrier having joined all threads that stored.
    """
    plan = place.plan
    chunk = n_tile * plan.num_chunks // plan.num_n_tiles
    stored = element(
        address(place.table, place.rank, Slot.tile_stored),
        m_tile * plan.num_chunks + chunk,
        Int32,
    )
    if cutlass.const_expr(plan.stores_by_tma):
        cute.arch.cp_async_bulk_wait_group(0, read=False)
    alive = abort_word(place.table, place.rank) == 0
    if cute.arch.vote_all_sync(alive):
        with cute.arch.elect_one():
            if cutlass.const_expr(plan.stores_by_tma):
                release_bulk_fence(Scope.gpu)
            else:
                release_fence(Scope.gpu)
            add_relaxed(stored, valid, Scope.gpu)


def descriptor_pointer(at: Int64, space=cute.AddressSpace.gmem) -> cute.Pointer:
    """A descriptor in memory."""
    slot = cute.make_ptr(Int64, at, cute.AddressSpace.gmem, assumed_align=DESCRIPTOR_BYTES)
    manager = utils.TensorMapManager(utils.TensorMapUpdateMode.GMEM, DESCRIPTOR_BYTES)
    return manager.get_tensormap_ptr(slot, space)
