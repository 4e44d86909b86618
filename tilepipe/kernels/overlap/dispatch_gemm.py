"""Dispatch and grouped GEMM in one launch: rows are pushed, and multiplied once they have come.

Knows nothing of plans, of torch and of who has opened the launch.

Roles go by cluster, but for Roles.beside. Clusters of a rank are dealt in turn, the first of them
communicate: their warps claim rows in plan order and push them. The others are the persistent
grouped GEMM: the warp that hands out a tile, in clusters the one that loads it, waits for the
tile's rows and acquires them, and the one that loads fences the async proxy before the tile's first
load. Nobody who pushes ever waits for a peer, so rows always come.

Roles.switch: a communication CTA whose sends are out takes tiles like the others. Shared memory is
the same for both lives: stages of communication lie where operands will. Sends are out once their
bulk copies have completed, and the barrier of the CTA lies between them and the first load. Where
ranks share the GPU it joins in step with the others (OverlapPlan.joins, `joining.py`).

Roles.beside: no CTA communicates. The warps that load, hand out and store tiles are three of four;
the fourth pushes rows while the others multiply, 6 loads of 16 bytes a lane in flight, and has all
of the launch for its share. Shared memory is full, so it copies through registers, for which those
that multiply leave it 16 more a thread. It passes no gate: rows that others wait for may be its.

OverlapPlan.opens: all CTAs push the rows that GEMMs begin with, at the rate of the whole chip,
before they take their roles. OverlapPlan.gates: CTAs of the GEMM begin together.

One H200, 32 768 rows over 32 experts, K 7168, N 4096, loopback with one rank, copy=tma, granularity
tile, times by that of the GEMM alone on all SMs (2.39 ms; benchmarks/overlap_times.py, 2026-11):

    communication CTAs                        4      6      8     12     16     24
    fixed                                 1.310  1.103  1.098  1.108  1.120  1.180
    fixed, gates                          1.306  1.091  1.095  1.104  1.120  1.180
    fixed, opens                          1.281  1.073  1.080  1.092  1.115  1.175
    fixed, opens and gates                1.280  1.070  1.082  1.091  1.114  1.175
    switch                                1.311  1.093  1.076  1.071  1.061  1.069
    switch, opens and gates               1.237  1.062  1.060  1.054  1.059  1.066
    fixed, no waits at all (a bound)      1.219  1.062  1.073  1.083  1.105  1.168

beside, opens and gates: 1.040, where switch with 8 and 12 CTAs takes 1.056 (2.32 ms;
benchmarks/beside_tiles.py, another GPU).

`sending` is the table by which communication finds its way; with a table of spare buffers rows and
flags go where nobody looks, but for a look at when the GEMM may begin.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Copy, Roles
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels import bulk, simt
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.gemm.barriers import meet_all
from tilepipe.kernels.gemm.grouped_sm90 import (
    HAND_OUT_WARP,
    IDLE_WARP,
    NUM_THREADS,
    REGISTERS,
    work_on_tiles,
)
from tilepipe.kernels.memory import LANES, address, buffer, element, word
from tilepipe.kernels.move import move_rows
from tilepipe.kernels.overlap.entries import fused_entry
from tilepipe.kernels.overlap.joining import join_in_step
from tilepipe.kernels.overlap.plan import OverlapPlan
from tilepipe.kernels.stamps import Event, lap
from tilepipe.kernels.watchdog import wait_or_give_up

__all__ = ["dispatch_gemm_entry"]

# Of a warp that pushes beside the GEMM: loads that a lane has in flight, and rows whose flags share
# a fence, at most.
_BESIDE_LOADS, _BESIDE_BATCH = 6, 4
_BESIDE_REGISTERS = 56, 224  # of a thread that loads and of one that multiplies
# Number of the hardware's barrier at which those meet who begin together; the GEMM has those below.
_BEGUN = 12


@cute.jit
def _push_all(
    edge: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    warp: Int32,
    lane: Int32,
    ring: Int32,
    barriers: Int32,
    row_cost_ns: Int64,
    latency_ns: Int64,
    limit_ns: Int64,
    tape: cutlass.Constexpr,
):
    """Push rows of the rank until none is left. Called by all warps; some have no ring."""
    if warp < plan.constants.num_warps:
        move_rows(
            *(edge, table, rank, lane, ring, barriers, plan.constants),
            *(row_cost_ns, latency_ns, limit_ns, tape),
        )


@cute.jit
def _ring_barriers(
    memory: cutlass.Constexpr, constants: cutlass.Constexpr, warp: Int32, lane: Int32
) -> Int32:
    """Barriers of a warp's stages, set up; a fence and a barrier of the CTA must follow."""
    words = memory.allocate_array(
        Int64, constants.num_warps * constants.num_stages, byte_alignment=128
    )
    own = Int32(words.toint()) + warp * (constants.num_stages * bulk.BARRIER_BYTES)
    if warp < constants.num_warps:
        bulk.init_ring(own, lane, constants)
    return own


@cute.jit
def _begin_together(
    place: cutlass.Constexpr, sending: cute.Pointer, num_idle_warps: cutlass.Constexpr = 0
):
    """Wait for the rows of all tiles that the GEMM begins with. Called by all that multiply.

    CTAs that share operands of an expert stay side by side as they began: what one has loaded lies
    in L2 for the next. Every tile's rows are still waited for. Rows are looked for where they are
    sent, so that a launch whose rows go elsewhere begins like one that reads them.
    """
    table, rank = place.table, place.rank
    if place.warp == 0:
        words = buffer(address(table, rank, Slot.words), Int32)
        ready, expected = (
            address(sending, rank, Slot.ready),
            address(table, rank, Slot.ready_expected),
        )
        for tile in cutlass.range(place.lane, words[int(Word.num_first_tiles)], LANES, unroll=1):
            wait_or_give_up(
                *(table, rank, element(ready, tile, Int32), buffer(expected, Int32)[tile]),
                *(Role.gemm_receive, tile, words[int(Word.epoch)]),
                *(place.num_ranks, place.limit_ns),
            )
        lap(place.tape, Event.wait)
    if cutlass.const_expr(num_idle_warps == 0):
        cute.arch.sync_threads()
    else:
        num_threads = NUM_THREADS - num_idle_warps * LANES
        cute.arch.barrier(barrier_id=_BEGUN, number_of_threads=num_threads)
    lap(place.tape, Event.stand)


@cute.jit
def _join(place: cutlass.Constexpr, turn: Int32, num_joining: Int32, num_clusters: Int32):
    """Hold a cluster that has pushed back until it joins the others in step."""
    plan, words = place.plan, address(place.table, place.rank, Slot.words)
    num_tickets = buffer(words, Int32)[int(plan.tiles_word)] * plan.num_n_tiles
    join_in_step(
        *(word(words, Word.gemm_queue), num_tickets, turn, num_joining, num_clusters),
        *(plan.tuning.raster_m, plan.num_k_tiles),
    )
    cute.arch.sync_warp()
    lap(place.tape, Event.stand)


@cute.jit
def _multiply(
    plan: cutlass.Constexpr,
    seat: cutlass.Constexpr,
    sending: cute.Pointer,
    operands: cutlass.Constexpr,
    num_clusters: Int32,
    beside: cutlass.Constexpr = None,  # what the idle warp does meanwhile
):
    """Take tiles until none is left. Called by all threads of a CTA, which may have pushed."""
    place = seat.place
    if cutlass.const_expr(plan.opens or plan.roles is Roles.switch):
        # Operands will lie where rows have been on their way.
        meet_all(plan.cluster_m)
        lap(place.tape, Event.stand)
    if cutlass.const_expr(plan.gates):
        if cutlass.const_expr(beside is None):
            _begin_together(place, sending)
        # Rows of first tiles may be among the rest of some rank: who pushes passes no gate.
        elif place.warp != IDLE_WARP:
            _begin_together(place, sending, 1)
    if cutlass.const_expr(plan.joins):
        pushed = seat.turn < seat.num_comm_clusters
        if pushed and place.warp == HAND_OUT_WARP and place.cta == 0:
            _join(place, seat.turn, seat.num_comm_clusters, num_clusters)
    work_on_tiles(
        *(place, seat.shared, operands, seat.products, num_clusters),
        beside=beside,
        registers=REGISTERS if beside is None else _BESIDE_REGISTERS,
    )


@cute.jit
def _push_beside(
    edge: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    place: cutlass.Constexpr,
    sending: cute.Pointer,
    pace: cutlass.Constexpr,
):
    """Push rows of the rank until none is left, beside those that multiply. Called by one warp."""
    own = replace(
        plan.constants,
        copy=Copy.simt,
        num_loads=_BESIDE_LOADS,
        flag_batch=min(plan.constants.flag_batch, _BESIDE_BATCH),
    )
    simt.move_rows(edge, sending, place.rank, place.lane, own, *pace, place.tape)


def dispatch_gemm_entry(plan: OverlapPlan) -> Any:
    """Host function of the fused launch, of all ranks of this process."""
    constants = plan.constants
    by_bulk = constants.copy is Copy.tma

    @cute.jit
    def body(seat: cutlass.Constexpr):
        place, shared, memory = seat.place, seat.shared, seat.memory
        rank, warp, lane = place.rank, place.warp, place.lane
        pushes = seat.turn < seat.num_comm_clusters
        ring = Int32(shared.a.iterator.toint()) + warp * plan.ring_bytes
        own_barriers = opening_barriers = Int32(0)
        beside = None
        if cutlass.const_expr(by_bulk):
            own_barriers = _ring_barriers(memory, constants, warp, lane)
            if cutlass.const_expr(plan.opens):
                # Phases begin with the barriers, so each of two rounds of pushes has its own.
                opening_barriers = _ring_barriers(memory, constants, warp, lane)
            cute.arch.mbarrier_init_fence()
        near = seat.near_table()
        meet_all(plan.cluster_m)
        operands = seat.operands()
        way = (plan, near, rank, warp, lane, ring)
        limits = (*seat.pace, place.limit_ns, place.tape)
        if cutlass.const_expr(plan.opens):
            _push_all(Edge.opening, *way, opening_barriers, *limits)
        edge = Edge.rest if plan.opens else Edge.dispatch
        num_clusters = seat.num_gemm_clusters
        if cutlass.const_expr(plan.roles is Roles.beside):
            beside = partial(_push_beside, edge, plan, place, near, seat.pace)
        else:
            if pushes:
                _push_all(edge, *way, own_barriers, *limits)
        if cutlass.const_expr(plan.roles is Roles.switch):
            num_clusters += seat.num_comm_clusters
        if cutlass.const_expr(plan.roles is not Roles.fixed):
            _multiply(plan, seat, near, operands, num_clusters, beside)
        else:
            if not pushes:
                _multiply(plan, seat, near, operands, num_clusters)

    return fused_entry(plan, body)
