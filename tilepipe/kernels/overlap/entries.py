"""Host function around a fused kernel: the arguments of a launch, and how its clusters are dealt.

Knows nothing of what CTAs of either role do; the kernel's body is given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tilepipe.kernels.gemm.grouped_sm90 import (
    NUM_THREADS,
    Operands,
    Place,
    Shared,
    allocate,
    init_barriers,
)
from tilepipe.kernels.gemm.operands import atoms, global_tensors, make_tiled_mma, smem_layouts
from tilepipe.kernels.memory import shared_table
from tilepipe.kernels.overlap.operands import operands_of_rank
from tilepipe.kernels.overlap.plan import OverlapPlan
from tilepipe.kernels.stamps import begin_tape, end_tape

__all__ = ["Seat", "fused_entry"]


@dataclass(frozen=True)
class Seat:
    """Where a thread of a fused launch is, and what its CTA has been given."""

    plan: OverlapPlan
    place: Place  # of the rank that the CTA works for
    thread: Any
    turn: Any  # number of the cluster among those of its rank: the first, if any, communicate
    num_comm_clusters: Any  # of each rank
    num_gemm_clusters: Any
    pace: tuple[Any, Any]  # nanoseconds of what is moved at once on a paced link, and its latency
    memory: Any  # what is left of shared memory
    shared: Shared  # of the GEMM
    products: Any
    sending: Any  # table by which communication finds its way
    operands: Callable[[], Operands]

    def near_table(self) -> Any:
        """The table of communication in shared memory; a barrier of the CTA must follow."""
        num_ranks, rank = self.plan.constants.num_ranks, self.place.rank
        return shared_table(self.sending, rank, self.memory, num_ranks, self.thread, NUM_THREADS)


def fused_entry(plan: OverlapPlan, body: Callable[[Seat], None]) -> Any:
    """Clusters of all ranks of this process, dealt in turn, the GEMM's shared memory laid out.

    Each thread calls `body(seat)`, behind the set-up of the GEMM's barriers but before anybody may
    use them: the body has barriers of its own to add, and then meets all of the cluster.
    """
    gemm = plan.gemm

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        sending: cute.Pointer,
        first_rank: Int32,
        num_comm_clusters: Int32,  # of each rank
        num_gemm_clusters: Int32,
        cost_ns: Int64,
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
        b_descriptor: Int64,
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
        tape = begin_tape(plan.num_stamps, memory, workspace, warp=warp, lane=lane)
        given = (tma_a, m_a, tma_b, m_b, tma_d, m_d, plain_d, scale)
        given += (workspace, b_descriptor)
        body(
            Seat(
                plan=plan,
                place=Place(
                    *(gemm, table, rank, plan.constants.num_ranks, limit_ns, warp, lane, cta),
                    tape=tape,
                ),
                thread=thread,
                turn=turn,
                num_comm_clusters=num_comm_clusters,
                num_gemm_clusters=num_gemm_clusters,
                pace=(cost_ns, latency_ns),
                memory=memory,
                shared=shared,
                products=products,
                sending=sending,
                operands=lambda: operands_of_rank(plan, local, *given),
            )
        )
        end_tape(tape)

    @cute.jit
    def host(
        table: cute.Pointer,
        sending: cute.Pointer,
        first_rank: Int32,
        num_comm_ctas: Int32,  # of each rank
        num_gemm_ctas: Int32,
        cost_ns: Int64,  # of what is moved at once on a paced link
        latency_ns: Int64,  # of a paced link
        limit_ns: Int64,  # of one wait
        a: cute.Pointer,  # (rows, k) of the first rank
        b: cute.Pointer,  # (experts of all ranks of the launch, n, k)
        d: cute.Pointer,  # (rows, out_n) of the first rank
        scale: cute.Pointer,
        workspace: cute.Pointer,
        b_descriptor: cute.Pointer,  # 128 bytes; not read but with KernelPlan.widens_b
        rows: Int32,  # that A and D of a rank have room for
        stream: cuda.CUstream,
    ):
        m_a, m_b, plain_d, m_d = global_tensors(
            *(gemm, a, b, d, rows),
            num_ranks=plan.num_launch_ranks,
            a_rank_pitch=plan.a_rank_pitch,
            d_rank_pitch=plan.d_rank_pitch,
        )
        layouts = smem_layouts(gemm)
        (tma_a, t_a), (tma_b, t_b), (tma_d, t_d) = atoms(gemm, layouts, m_a, m_b, m_d)
        cluster_m = plan.cluster_m
        kernel(
            *(table, sending, first_rank, num_comm_ctas // cluster_m, num_gemm_ctas // cluster_m),
            *(cost_ns, latency_ns, limit_ns),
            *(tma_a, t_a, tma_b, t_b, tma_d, t_d, plain_d),
            *(scale, Int64(workspace.toint()), Int64(b_descriptor.toint())),
            *(make_tiled_mma(gemm), *layouts),
        ).launch(
            grid=[plan.num_launch_ranks * (num_comm_ctas + num_gemm_ctas), 1, 1],
            block=[NUM_THREADS, 1, 1],
            cluster=[cluster_m, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    return host
