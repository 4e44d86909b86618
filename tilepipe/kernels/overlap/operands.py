"""Operands of all ranks of a launch as TMA sees them, and those of one rank out of them.

Knows nothing of roles. With several ranks a tensor has one mode more, the rank; its coordinate is
fixed for a CTA, so the roles of the GEMM see the tensors of a rank alone.
"""

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64

from tilepipe.kernels.gemm.choices import Clip, Major
from tilepipe.kernels.gemm.grouped_sm90 import Operands
from tilepipe.kernels.gemm.operands import global_tensors
from tilepipe.kernels.gemm.plan import BLOCK_M
from tilepipe.kernels.overlap.plan import OverlapPlan

__all__ = ["host_tensors", "operands_of_rank"]


def host_tensors(
    plan: OverlapPlan, a: cute.Pointer, b: cute.Pointer, d: cute.Pointer, rows: Int32
) -> tuple[Any, Any, Any, Any]:
    """A, B, D as it lies in memory, and D as its stores see it; of all ranks of the launch."""
    gemm, ranks = plan.gemm, plan.num_launch_ranks
    if ranks == 1:
        return global_tensors(gemm, a, b, d, rows)
    n, k, experts = gemm.problem.n, gemm.problem.k, gemm.problem.num_experts * ranks
    stride = (k, 1, n * k) if gemm.problem.b_major is Major.k else (1, n, n * k)
    m_a = cute.make_tensor(
        a, cute.make_layout((rows, k, ranks), stride=(gemm.a_pitch, 1, plan.a_rank_pitch))
    )
    m_b = cute.make_tensor(b, cute.make_layout((n, k, experts), stride=stride))
    plain = cute.make_tensor(
        d, cute.make_layout((rows, gemm.out_n, ranks), stride=(gemm.d_pitch, 1, plan.d_rank_pitch))
    )
    if gemm.clip is not Clip.ragged:
        return m_a, m_b, plain, plain
    lower = cute.make_ptr(
        BFloat16,
        Int64(d.toint()) - BLOCK_M * gemm.d_pitch * 2,
        cute.AddressSpace.gmem,
        assumed_align=16,
    )
    ragged = cute.make_layout(
        (BLOCK_M, gemm.out_n, rows + BLOCK_M, ranks),
        stride=(gemm.d_pitch, 1, gemm.d_pitch, plan.d_rank_pitch),
    )
    return m_a, m_b, plain, cute.make_tensor(lower, ragged)


def operands_of_rank(
    plan: OverlapPlan, local, tma_a, m_a, tma_b, m_b, tma_d, m_d, plain_d, scale, workspace
) -> Operands:
    """What the roles of the GEMM take, for rank `local` of the launch. Traced into the kernel."""
    d_address = Int64(plain_d.iterator.toint())
    if plan.num_launch_ranks > 1:
        m_a = m_a[None, None, local]
        m_b = cute.domain_offset((0, 0, local * plan.gemm.problem.num_experts), m_b)
        ragged = plan.gemm.clip is Clip.ragged
        m_d = m_d[None, None, None, local] if ragged else m_d[None, None, local]
        plain_d = plain_d[None, None, local]
        d_address += Int64(local) * (plan.d_rank_pitch * 2)
    return Operands(tma_a, m_a, tma_b, m_b, tma_d, m_d, d_address, plain_d, scale, workspace)
