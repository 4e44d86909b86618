"""Grouped GEMM and combine in one launch: some CTAs multiply, the others bring home what is stored.

Knows nothing of plans, of torch and of who has opened the launch.

The GEMM tells of every output tile behind its stores. Communication CTAs push rows as their tiles
are told of and, with all pushes out, reduce the tokens of their own rank as those complete.
Roles.switch: so do the warps of a GEMM CTA that have multiplied, once it finds no tile. Tokens
complete late, when the last experts are done: by then those CTAs are free.

Shared memory. Rings of the warps that push and reduce lie where the operands are; a GEMM CTA has
done with them when all its multiplying warps have met. What it has staged to be stored is left
alone.

`sending` is the table by which rows find home; with a table of spare buffers nobody sees them.
"""

from functools import partial
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Copy, Roles
from tilepipe.fabric.table import Slot
from tilepipe.kernels.combine import reduce_tokens
from tilepipe.kernels.gemm.barriers import meet_all
from tilepipe.kernels.gemm.grouped_sm90 import (
    NUM_THREADS,
    Place,
    allocate,
    init_barriers,
    work_on_tiles,
)
from tilepipe.kernels.gemm.operands import atoms, make_tiled_mma, smem_layouts
from tilepipe.kernels.memory import LANES, shared_table
from tilepipe.kernels.overlap.home import REDUCING_WARPS, RING_BYTES, HomePlan
from tilepipe.kernels.overlap.operands import host_tensors, operands_of_rank
from tilepipe.kernels.overlap.pushes import push_stored

__all__ = ["gemm_combine_entry"]

_NUM_WARPS = NUM_THREADS // LANES
# The first warp that multiplies, and the first that has a ring.
_FIRST = _NUM_WARPS - REDUCING_WARPS
# Number of the hardware's barrier at which the warps that multiply meet; the GEMM has those below.
_MULTIPLIED = 12


def _reduce(plan: HomePlan, table, rank, lane, ring, limit_ns) -> None:
    """Reduce tokens as they complete; by warps that have a ring."""
    if plan.reduces:
        reduce_tokens(table, rank, lane, ring, plan.reduction, Slot.out, True, limit_ns)


def _reduce_behind(plan: HomePlan, table, rank, lane, ring, limit_ns) -> None:
    """The same in a CTA that has multiplied: no warp of it reads operands any more."""
    cute.arch.barrier(barrier_id=_MULTIPLIED, number_of_threads=REDUCING_WARPS * LANES)
    _reduce(plan, table, rank, lane, ring, limit_ns)


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
):
    """Push what is stored, then reduce. Called by all warps of a communication CTA."""
    if warp >= _NUM_WARPS - plan.constants.num_warps:
        push_stored(plan, table, rank, lane, ring, barrier, pace, limit_ns)
    if warp >= _FIRST:
        _reduce(plan, table, rank, lane, ring, limit_ns)


def gemm_combine_entry(plan: HomePlan) -> Any:
    """Host function of the fused launch, of all ranks of this process."""
    gemm, constants = plan.gemm, plan.constants

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        sending: cute.Pointer,
        first_rank: Int32,
        num_comm_clusters: Int32,  # of each rank
        num_gemm_clusters: Int32,
        piece_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
        tma_a: cute.CopyAtom,
        m_a: cute.Tensor,
        tma_b: cute.CopyAtom,
        m_b: cute.Tensor,
        tma_d: cute.CopyAtom,
        m_d: cute.Tensor,
        plain_d: cute.Tensor,
        scale: cute.Pointer,
        workspace: Int64,
        products: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_d: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = Int32(0)
        if cutlass.const_expr(plan.cluster_m > 1):
            cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        cluster = block // plan.cluster_m
        local, turn = cluster % plan.num_launch_ranks, cluster // plan.num_launch_ranks
        rank = first_rank + local
        if warp == 0:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        memory = SmemAllocator()
        shared = allocate(memory, gemm, (layout_a, layout_b, layout_d))
        init_barriers(shared, gemm, thread)
        barriers = memory.allocate_array(Int64, REDUCING_WARPS, byte_alignment=128)
        own = cutlass.max(warp - _FIRST, 0)  # of the warps with a ring
        if cutlass.const_expr(constants.copy is Copy.tma):
            if thread < REDUCING_WARPS:
                cute.arch.mbarrier_init(barriers + thread, 1)
            cute.arch.mbarrier_init_fence()
        near = shared_table(sending, memory, constants.num_ranks, thread, NUM_THREADS)
        meet_all(plan.cluster_m)
        ring = Int32(shared.a.iterator.toint()) + own * RING_BYTES
        if turn < num_comm_clusters:
            _bring_home(
                *(plan, near, rank, warp, lane, ring, barriers + own),
                *((piece_cost_ns, latency_ns), limit_ns),
            )
        else:
            place = Place(gemm, table, rank, constants.num_ranks, limit_ns, warp, lane, cta)
            operands = operands_of_rank(
                *(plan, local, tma_a, m_a, tma_b, m_b, tma_d, m_d, plain_d, scale, workspace)
            )
            finish = None
            if cutlass.const_expr(plan.roles is Roles.switch):
                finish = partial(_reduce_behind, plan, near, rank, lane, ring, limit_ns)
            work_on_tiles(place, shared, operands, products, num_gemm_clusters, finish)

    @cute.jit
    def host(
        table: cute.Pointer,
        sending: cute.Pointer,
        first_rank: Int32,
        num_comm_ctas: Int32,  # of each rank
        num_gemm_ctas: Int32,
        piece_cost_ns: Int64,  # of a piece of a row on a paced link
        latency_ns: Int64,  # of a paced link
        limit_ns: Int64,  # of one wait
        a: cute.Pointer,  # (rows, k) of the first rank
        b: cute.Pointer,  # (experts of all ranks of the launch, n, k)
        d: cute.Pointer,  # (rows, n) of the first rank
        scale: cute.Pointer,
        workspace: cute.Pointer,
        rows: Int32,  # that A and D of a rank have room for
        stream: cuda.CUstream,
    ):
        m_a, m_b, plain_d, m_d = host_tensors(plan, a, b, d, rows)
        layouts = smem_layouts(gemm)
        (tma_a, t_a), (tma_b, t_b), (tma_d, t_d) = atoms(gemm, layouts, m_a, m_b, m_d)
        cluster_m = plan.cluster_m
        kernel(
            *(table, sending, first_rank, num_comm_ctas // cluster_m, num_gemm_ctas // cluster_m),
            *(piece_cost_ns, latency_ns, limit_ns),
            *(tma_a, t_a, tma_b, t_b, tma_d, t_d, plain_d),
            *(scale, Int64(workspace.toint()), make_tiled_mma(gemm), *layouts),
        ).launch(
            grid=[plan.num_launch_ranks * (num_comm_ctas + num_gemm_ctas), 1, 1],
            block=[NUM_THREADS, 1, 1],
            cluster=[cluster_m, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    return host
