"""Grouped GEMM and combine in one launch: rows are multiplied, brought home, and there added up.

Knows nothing of plans, of torch and of who has opened the launch.

The GEMM tells of every output tile behind its stores. Communication CTAs push rows as their tiles
are told of and, with all pushes out, reduce the tokens of their own rank as those complete.
Roles.switch: so do the warps of a GEMM CTA that have multiplied, once it finds no tile. Tokens
complete late, when the last experts are done: by then those CTAs are free. They are taken up in the
order in which the tiles of their rows are handed out, so that nobody waits for one that is late
while another is complete.

Roles.beside: no CTA communicates. Tiles send their own rows home, and the warp of every CTA that
the GEMM leaves idle reduces tokens meanwhile, out of registers (`reduce_beside.py`); behind the
tiles it goes on beside the warps that have multiplied.

Shared memory. Rings of the warps that push and reduce lie where the operands are; a GEMM CTA has
done with them when all its multiplying warps have met. What it has staged to be stored is left
alone.

`sending` is the table by which rows find home; with a table of spare buffers nobody sees them.
Reduces.beside: tokens are added up there as long as others are multiplied, and no longer.
"""

from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Copy, Push, Roles
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.combine import reduce_tokens
from tilepipe.kernels.gemm.barriers import meet_all
from tilepipe.kernels.gemm.grouped_sm90 import NUM_THREADS, REGISTERS, work_on_tiles
from tilepipe.kernels.memory import LANES, address, buffer, word
from tilepipe.kernels.overlap.entries import fused_entry
from tilepipe.kernels.overlap.home import REDUCING_WARPS, RING_BYTES, HomePlan, Reduces
from tilepipe.kernels.overlap.pushes import push_stored
from tilepipe.kernels.overlap.sends import Sender
from tilepipe.kernels.reduce_beside import reduce_beside
from tilepipe.kernels.reduction import num_units_of
from tilepipe.kernels.semaphore import Scope, raise_to
from tilepipe.kernels.stamps import Event, lap

__all__ = ["gemm_combine_entry"]

_NUM_WARPS = NUM_THREADS // LANES
# The first warp that multiplies, and the first that has a ring.
_FIRST = _NUM_WARPS - REDUCING_WARPS
# Number of the hardware's barrier at which the warps that multiply meet; the GEMM has those below.
_MULTIPLIED = 12
# Of a thread that loads and of one that multiplies, where the former may reduce beside tiles: eight
# loads of a lane in flight. The 128 sums of the tiles that leave room for rings leave these, too.
_BESIDE_REGISTERS = 72, 216


def _reduce(plan: HomePlan, table, rank, lane, ring, limit_ns, tape) -> None:
    """Reduce tokens as they complete; by warps that have a ring."""
    parts = plan.num_reduced_parts
    if parts:
        out = Slot.out if plan.reduces is Reduces.all else Slot.reduced
        how = (plan.reduction, out, True, limit_ns, tape, parts, Slot.reduce_order)
        reduce_tokens(table, rank, lane, ring, *how)


def _reduce_beside(plan: HomePlan, table, rank, lane, limit_ns, tape) -> None:
    """The same beside the tiles, by the warp that the GEMM leaves idle."""
    parts = plan.num_reduced_parts
    if parts:
        out = Slot.out if plan.reduces is Reduces.all else Slot.reduced
        how = (plan.reduction, out, limit_ns, tape, parts, Slot.reduce_order)
        reduce_beside(table, rank, lane, *how)


@cute.jit
def _stop_reducing(plan: cutlass.Constexpr, table: cute.Pointer, rank: Int32, lane: Int32):
    """Leave no token to claim; by a CTA that finds no tile, where reducing shall end with tiles."""
    if lane == 0:
        words = address(table, rank, Slot.words)
        num_tokens = buffer(words, Int32)[int(Word.num_tokens)]
        raise_to(
            word(words, Word.reduce_queue), num_units_of(plan.reduction, num_tokens), Scope.gpu
        )


def _reduce_behind(plan: HomePlan, table, rank, lane, ring, limit_ns, tape) -> None:
    """The same in a CTA that has multiplied: no warp of it reads operands any more."""
    cute.arch.barrier(barrier_id=_MULTIPLIED, number_of_threads=REDUCING_WARPS * LANES)
    lap(tape, Event.stand)
    _reduce(plan, table, rank, lane, ring, limit_ns, tape)


@cute.jit
def _bring_home(
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    warp: Int32,
    lane: Int32,
    ring: Int32,
    barrier: cute.Pointer,
    pace: cutlass.Constexpr,
    limit_ns: Int64,
    tape: cutlass.Constexpr,
):
    """Push what is stored, then reduce. Called by all warps of a communication CTA."""
    if cutlass.const_expr(plan.push is Push.ctas):
        if warp >= _NUM_WARPS - plan.constants.num_warps:
            push_stored(plan, table, rank, lane, ring, barrier, pace, limit_ns, tape)
    if warp >= _FIRST:
        _reduce(plan, table, rank, lane, ring, limit_ns, tape)


@cute.jit
def _multiply(plan: cutlass.Constexpr, seat: cutlass.Constexpr, near: cute.Pointer, ring: Int32):
    """Take tiles until none is left, and what is to be done beside and behind them. Called by all
    threads of a CTA."""
    place = seat.place
    own = (plan, near, place.rank, place.lane)
    finish = send = beside = None
    registers = REGISTERS
    if cutlass.const_expr(plan.stops_reducing):
        finish = partial(_stop_reducing, *own)
    elif cutlass.const_expr(plan.roles is not Roles.fixed):
        finish = partial(_reduce_behind, *own, ring, place.limit_ns, place.tape)
    if cutlass.const_expr(plan.push is Push.epilogue):
        send = Sender(plan, near, seat.pace)
    if cutlass.const_expr(plan.roles is Roles.beside):
        beside = partial(_reduce_beside, *own, place.limit_ns, place.tape)
        registers = _BESIDE_REGISTERS
    work_on_tiles(
        *(place, seat.shared, seat.operands(), seat.products),
        *(seat.num_gemm_clusters, finish, send, beside, registers),
    )


def gemm_combine_entry(plan: HomePlan) -> Any:
    """Host function of the fused launch, of all ranks of this process."""
    constants = plan.constants

    @cute.jit
    def body(seat: cutlass.Constexpr):
        place, memory, thread = seat.place, seat.memory, seat.thread
        rank, warp, lane, limit_ns = place.rank, place.warp, place.lane, place.limit_ns
        barriers = memory.allocate_array(Int64, REDUCING_WARPS, byte_alignment=128)
        own = cutlass.max(warp - _FIRST, 0)  # of the warps with a ring
        if cutlass.const_expr(constants.copy is Copy.tma):
            if thread < REDUCING_WARPS:
                cute.arch.mbarrier_init(barriers + thread, 1)
            cute.arch.mbarrier_init_fence()
        near = seat.near_table()
        meet_all(plan.cluster_m)
        ring = Int32(seat.shared.a.iterator.toint()) + own * RING_BYTES
        if cutlass.const_expr(plan.roles is Roles.beside):
            _multiply(plan, seat, near, ring)
        else:
            if seat.turn < seat.num_comm_clusters:
                _bring_home(
                    *(plan, near, rank, warp, lane, ring, barriers + own),
                    *(seat.pace, limit_ns, place.tape),
                )
            else:
                _multiply(plan, seat, near, ring)

    return fused_entry(plan, body)
