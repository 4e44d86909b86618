"""Compile a fused launch, bind it to the tensors of a group, launch it.

Knows nothing of routing, of oracles and of who opens the launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.config.choices import Roles
from tilepipe.kernels.compile import Code, compile_code
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.grouped_sm90 import NUM_THREADS
from tilepipe.kernels.gemm.launch import wide_descriptor
from tilepipe.kernels.gemm.plan import DESCRIPTOR_BYTES, KernelPlan
from tilepipe.kernels.kept import kept
from tilepipe.kernels.move import warp_bytes
from tilepipe.kernels.overlap.dispatch_gemm import dispatch_gemm_entry
from tilepipe.kernels.overlap.gemm_combine import gemm_combine_entry
from tilepipe.kernels.overlap.home import HomePlan
from tilepipe.kernels.overlap.plan import OverlapPlan, Split, plan_overlap
from tilepipe.kernels.residency import Residency, residency_of
from tilepipe.kernels.track import NUM_TRACKS, RECORD_BYTES

__all__ = ["BoundLaunch", "FusedLaunch", "compile_overlap", "make_plan"]


def make_plan(
    gemm: KernelPlan,
    constants: Constants,
    *,
    roles: Roles,
    opens: bool = False,
    gates: bool = False,
    joins: bool = True,
    num_launch_ranks: int = 1,
    a_rank_pitch: int = 0,
    d_rank_pitch: int = 0,
) -> OverlapPlan:
    """The plan of dispatch -> GEMM; raises ValueError for what does not fit together."""
    return plan_overlap(
        gemm,
        constants,
        roles=roles,
        opens=opens,
        gates=gates,
        joins=joins,
        ring_bytes=warp_bytes(constants, moves=True, reduces=False),
        num_launch_ranks=num_launch_ranks,
        a_rank_pitch=a_rank_pitch,
        d_rank_pitch=d_rank_pitch,
    )


def _pointer(dtype: Any, address: int, align: int) -> Any:
    return make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


@kept
def compile_overlap(plan: OverlapPlan | HomePlan) -> Code:
    """Compile for stand-in arguments, once in a process; needs no GPU."""
    return compile_code(
        gemm_combine_entry(plan) if isinstance(plan, HomePlan) else dispatch_gemm_entry(plan),
        (
            *(_pointer(Int64, 0, 16), _pointer(Int64, 0, 16)),
            *(Int32(0), Int32(1), Int32(1), Int64(0), Int64(0), Int64(1)),
            *(_pointer(BFloat16, 0, 16) for _ in range(3)),
            *(_pointer(Float32, 0, 4), _pointer(Int64, 0, 128), _pointer(Int64, 0, 128)),
            *(Int32(1), make_fake_stream()),
        ),
    )


@dataclass(frozen=True, kw_only=True)
class BoundLaunch:
    """A launch on torch's current stream, with the memory that it reads and writes."""

    plan: OverlapPlan | HomePlan
    run: Callable[[], None]
    # (CTAs, NUM_TRACKS, 1 + records, 4) int32, see track.py; None: it leaves no stamps
    tracks: torch.Tensor | None

    def __call__(self) -> None:
        self.run()


class FusedLaunch:
    """The kernel of one plan and one split, loaded on the current device."""

    def __init__(
        self,
        plan: OverlapPlan | HomePlan,
        split: Split,
        *,
        limit_ns: int,  # of one wait
        pace_gbps: float | None = None,
        pace_latency_ns: int = 0,
    ) -> None:
        """Raises ValueError where the CTAs of all roles would not be resident at once."""
        self.plan, self.split = plan, split
        code = compile_overlap(plan)
        self.residency: Residency = residency_of(
            code,
            num_threads=NUM_THREADS,
            dynamic_bytes=plan.smem_bytes,
            cluster_size=plan.cluster_m,
        )
        wanted, most = plan.num_launch_ranks * split.num_ctas, self.residency.max_ctas
        if self.residency.max_clusters is not None:
            most = self.residency.max_clusters * plan.cluster_m
        if wanted > most:
            raise ValueError(
                f"kernel.num_comm_ctas={split.num_comm_ctas}: {wanted} CTAs of a launch must run "
                f"at once, in clusters of {plan.cluster_m}, and this GPU holds {most}; plan for "
                f"{most} SMs"
            )
        moved = plan.moved_bytes if isinstance(plan, HomePlan) else plan.constants.row_bytes
        cost_ns = 0.0 if pace_gbps is None else moved / pace_gbps
        self._pace = (Int64(round(cost_ns)), Int64(pace_latency_ns), Int64(limit_ns))
        self._function = code.function.to(torch.cuda.current_device())

    def bind(
        self,
        table: torch.Tensor,  # (num_ranks, slots) int64 addresses
        sending: torch.Tensor,  # the same, or one whose rows and flags nobody looks at
        *,
        first_rank: int,
        a: torch.Tensor,  # (rows, k) bf16 of the first rank
        b: torch.Tensor,  # (experts of all ranks of the launch, n, k) bf16
        d: torch.Tensor,  # (rows, out_n) bf16 of the first rank
    ) -> BoundLaunch:
        """A launch on torch's current stream. The tensors must outlive it.

        Stamps lie behind the descriptors; whoever reads them zeroes them before a launch.
        """
        plan, split = self.plan, self.split
        num_ctas = plan.num_launch_ranks * split.num_ctas
        records = 1 + plan.num_stamps if plan.num_stamps else 0
        tracks_bytes = num_ctas * NUM_TRACKS * records * RECORD_BYTES
        size = num_ctas * DESCRIPTOR_BYTES + tracks_bytes
        workspace = torch.zeros(size, dtype=torch.uint8, device=a.device)
        tracks = None
        if records:
            words = workspace[num_ctas * DESCRIPTOR_BYTES :].view(torch.int32)
            tracks = words.view(num_ctas, NUM_TRACKS, records, RECORD_BYTES // 4)
        b_descriptor = workspace
        if plan.gemm.widens_b:
            b_descriptor = wide_descriptor(plan.gemm, b)
        kept = (table, sending, a, b, d, workspace, b_descriptor)
        arguments = (
            *(_pointer(Int64, tensor.data_ptr(), 16) for tensor in (table, sending)),
            *(Int32(first_rank), Int32(split.num_comm_ctas), Int32(split.num_gemm_ctas)),
            *self._pace,
            *(_pointer(BFloat16, tensor.data_ptr(), 16) for tensor in (a, b, d)),
            _pointer(Float32, 0, 4),
            *(_pointer(Int64, slot.data_ptr(), 128) for slot in (workspace, b_descriptor)),
            Int32(len(a)),
        )

        def launch() -> None:
            assert kept, "memory that the launch reads and writes"
            self._function(*arguments, cuda.CUstream(torch.cuda.current_stream().cuda_stream))

        return BoundLaunch(plan=plan, run=launch, tracks=tracks)
