"""Operands of one rank out of those of all ranks of a launch, as TMA sees them.

Knows nothing of roles. With several ranks a tensor has one mode more, the rank; its coordinate is
fixed for a CTA, so the roles of the GEMM see the tensors of a rank alone.
"""

import cutlass.cute as cute
from cutlass import Int64

from tilepipe.kernels.gemm.choices import Clip
from tilepipe.kernels.gemm.grouped_sm90 import Operands
from tilepipe.kernels.overlap.plan import OverlapPlan

__all__ = ["operands_of_rank"]


def operands_of_rank(
    plan: OverlapPlan,
    local,
    tma_a,
    m_a,
    tma_b,
    m_b,
    tma_d,
    m_d,
    plain_d,
    scale,
    workspace,
    b_descriptor,
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
    return Operands(
        *(tma_a, m_a, tma_b, m_b, tma_d, m_d, d_address, plain_d, scale, workspace),
        b_descriptor if plan.gemm.widens_b else None,
    )
