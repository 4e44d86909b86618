"""What TMA and WGMMA see of the operands: shared layouts, global tensors, copy atoms, products.

Knows nothing of warps and tiles.
"""

import cutlass.cute as cute
import cutlass.utils as utils
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from tilepipe.kernels.gemm.choices import Clip, Major
from tilepipe.kernels.gemm.plan import (
    BLOCK_M,
    NUM_CONSUMERS,
    STAGED_COLUMNS,
    STAGING_BUFFERS,
    TILE_K,
    KernelPlan,
)

__all__ = [
    "atoms",
    "global_tensors",
    "make_tiled_mma",
    "part_of",
    "partition",
    "smem_layouts",
]


def smem_layouts(plan: KernelPlan):
    """Layouts of the rings of A and B and of the staging, 128-byte swizzled all three."""
    row = utils.LayoutEnum.ROW_MAJOR
    tile = (plan.tile_m, plan.tile_n, TILE_K)
    return (
        sm90.make_smem_layout_a(row, tile, BFloat16, plan.num_stages),
        sm90.make_smem_layout_b(_b_layout(plan), tile, BFloat16, plan.num_stages),
        sm90.make_smem_layout_epi(
            BFloat16, row, (BLOCK_M, STAGED_COLUMNS), NUM_CONSUMERS * STAGING_BUFFERS
        ),
    )


def _b_layout(plan: KernelPlan):
    by_k = plan.problem.b_major is Major.k
    return utils.LayoutEnum.ROW_MAJOR if by_k else utils.LayoutEnum.COL_MAJOR


def make_tiled_mma(plan: KernelPlan):
    return sm90.make_trivial_tiled_mma(
        BFloat16,
        BFloat16,
        utils.LayoutEnum.ROW_MAJOR.sm90_mma_major_mode(),
        _b_layout(plan).sm90_mma_major_mode(),
        Float32,
        (plan.groups_per_tile, 1, 1),
        tiler_mn=(BLOCK_M, plan.tile_n),
    )


def global_tensors(
    plan: KernelPlan,
    a,
    b,
    d,
    rows: Int32,
    *,
    num_ranks: int = 1,
    a_rank_pitch: int = 0,  # elements from one rank's tensor to the next one's
    d_rank_pitch: int = 0,
):
    """A, B, D as it lies in memory, and D as its stores see it.

    Of several ranks A and D have one mode more, the rank; B holds the experts of all.
    """
    n, k, experts = plan.problem.n, plan.problem.k, plan.problem.num_experts * num_ranks
    stride = (k, 1, n * k) if plan.problem.b_major is Major.k else (1, n, n * k)

    def tensor(pointer, shape, stride, rank_pitch):
        ranks, pitch = ((num_ranks,), (rank_pitch,)) if num_ranks > 1 else ((), ())
        return cute.make_tensor(
            pointer, cute.make_layout((*shape, *ranks), stride=(*stride, *pitch))
        )

    m_a = tensor(a, (rows, k), (plan.a_pitch, 1), a_rank_pitch)
    m_b = cute.make_tensor(b, cute.make_layout((n, k, experts), stride=stride))
    plain = tensor(d, (rows, plan.out_n), (plan.d_pitch, 1), d_rank_pitch)
    if plan.clip is not Clip.ragged:
        return m_a, m_b, plain, plain
    lower = cute.make_ptr(
        BFloat16,
        Int64(d.toint()) - BLOCK_M * plan.d_pitch * 2,
        cute.AddressSpace.gmem,
        assumed_align=16,
    )
    ragged = (BLOCK_M, plan.out_n, rows + BLOCK_M)
    return m_a, m_b, plain, tensor(lower, ragged, (plan.d_pitch, 1, plan.d_pitch), d_rank_pitch)


def atoms(plan: KernelPlan, layouts, m_a, m_b, m_d):
    """TMA atoms of A, B and D, each with its tensor."""
    _, _, layout_d = layouts
    part_m, part_n = plan.tile_m // plan.num_a_parts, plan.tile_n // plan.num_b_parts
    load = cpasync.CopyBulkTensorTileG2SOp()
    shared = cpasync.CopyBulkTensorTileG2SMulticastOp() if plan.cluster_m > 1 else load
    piece = (part_m, part_n, TILE_K)
    part_a = sm90.make_smem_layout_a(utils.LayoutEnum.ROW_MAJOR, piece, BFloat16, plan.num_stages)
    part_b = sm90.make_smem_layout_b(_b_layout(plan), piece, BFloat16, plan.num_stages)
    first = (None, None, 0)
    return (
        cpasync.make_tiled_tma_atom(load, m_a, cute.slice_(part_a, first), (part_m, TILE_K)),
        cpasync.make_tiled_tma_atom(shared, m_b, cute.slice_(part_b, first), (part_n, TILE_K)),
        cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(),
            m_d,
            cute.slice_(layout_d, first),
            (BLOCK_M, STAGED_COLUMNS),
        ),
    )


def partition(atom: cute.CopyAtom, shared: cute.Tensor, tile: cute.Tensor):
    """Shared and global side of a copy of one tile; modes behind the first two stay."""
    return cpasync.tma_partition(
        atom,
        0,
        cute.make_layout(1),
        cute.group_modes(shared, 0, 2),
        cute.group_modes(tile, 0, 2),
    )


def part_of(ring: cute.Tensor, part: int, rows: int, plan: KernelPlan) -> cute.Tensor:
    """A piece of the A or B tile: whole swizzle atoms, one piece behind the other."""
    return cute.local_tile(ring, (rows, TILE_K, plan.num_stages), (part, 0, 0))
