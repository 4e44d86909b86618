"""Typed settings of kernels, one dataclass per option of the group, and their limits.

Knows nothing of Hydra, torch or which GPU is present.
"""

import math
from dataclasses import dataclass

from tilepipe.config.choices import (
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Operation,
    Order,
    Planner,
    Push,
    Roles,
    StoreMode,
    Walk,
)
from tilepipe.config.refuse import require, require_own

__all__ = [
    "KERNELS",
    "CombineKernel",
    "CommunicationKernel",
    "DispatchGemmKernel",
    "DispatchKernel",
    "FusedKernel",
    "GemmCombineKernel",
    "GroupedGemmKernel",
    "HomeKernel",
    "Kernel",
    "MoeLayerKernel",
]


@dataclass(kw_only=True)
class _GemmTiles:
    """Where received rows lie and how the GEMM cuts them."""

    operation: Operation  # fixed by the option
    layout: Layout = Layout.padded
    tile_m: int = 128  # rows of an M tile
    tile_n: int = 256  # columns of an N tile

    def __post_init__(self) -> None:
        require_own(self, "kernel", "operation")
        allowed = "must be a multiple of 16 in 16..1024"
        for key, value in (("tile_m", self.tile_m), ("tile_n", self.tile_n)):
            require(16 <= value <= 1024 and value % 16 == 0, f"kernel.{key}", value, allowed)


@dataclass(kw_only=True)
class CommunicationKernel(_GemmTiles):
    """How rows travel: what dispatch and combine have in common."""

    copy: Copy | None = None  # null: the host executor has no copies
    num_comm_ctas: int | str | None = None  # a count, auto, or null: the host executor has no CTAs
    # Null on the host executor, as the two above.
    num_comm_warps: int | None = None  # warps of a communication CTA
    num_loads: int | None = None  # 16-byte loads that a lane has in flight; null but for copy=simt
    num_stages: int | None = None  # pieces of a row that a warp's ring holds; null but for copy=tma
    stage_bytes: int | None = None  # room of a stage, into which wider rows are split; as above
    flag_batch: int | None = None  # rows of one warp whose flags share one release fence
    planner: Planner = Planner.numpy
    order: Order = Order.edf
    granularity: Granularity = Granularity.tile
    # Receive rows = factor x mean rows per rank; null: enough for the worst case.
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        ctas, factor = self.num_comm_ctas, self.capacity_factor
        least = 0 if isinstance(self, FusedKernel) else 1  # roles=beside needs none
        counted = ctas is None or ctas == "auto" or (type(ctas) is int and ctas >= least)
        allowed = f"must be {least} or more, auto, or null"
        require(counted, "kernel.num_comm_ctas", ctas, allowed)
        most = {"num_comm_warps": 32, "num_loads": 16, "num_stages": 14, "flag_batch": 32}
        for key, largest in most.items():
            count = getattr(self, key)
            fits = count is None or 1 <= count <= largest
            require(fits, f"kernel.{key}", count, f"must be in 1..{largest}, or null")
        room = self.stage_bytes
        fits = room is None or (512 <= room <= 65_536 and room % 16 == 0)
        require(fits, "kernel.stage_bytes", room, "must be a multiple of 16 in 512..65536, or null")
        finite = factor is None or (factor > 0 and math.isfinite(factor))
        require(finite, "kernel.capacity_factor", factor, "must be above 0, or null")


@dataclass(kw_only=True)
class DispatchKernel(CommunicationKernel):
    """Dispatch alone, the GEMM held out."""

    operation: Operation = Operation.dispatch


@dataclass(kw_only=True)
class CombineKernel(CommunicationKernel):
    """Combine alone, the GEMM held out."""

    operation: Operation = Operation.combine
    home_granularity: HomeGranularity = HomeGranularity.token


@dataclass(kw_only=True)
class GroupedGemmKernel(_GemmTiles):
    """The first GEMM alone, its rows already there."""

    operation: Operation = Operation.grouped_gemm
    store: StoreMode | None = None  # null: the one that was measured to be faster
    num_gemm_ctas: int | None = None  # null: one each SM

    def __post_init__(self) -> None:
        super().__post_init__()
        ctas = self.num_gemm_ctas
        counted = ctas is None or ctas >= 1
        require(counted, "kernel.num_gemm_ctas", ctas, "must be 1 or more, or null")


@dataclass(kw_only=True)
class FusedKernel(CommunicationKernel):
    """Communication and a GEMM in one launch."""

    roles: Roles | None = None  # null: the host executor has no CTAs to give roles to


@dataclass(kw_only=True)
class DispatchGemmKernel(FusedKernel):
    """Dispatch and the first GEMM, fused."""

    operation: Operation = Operation.dispatch_gemm


@dataclass(kw_only=True)
class HomeKernel(FusedKernel):
    """A GEMM whose rows go home in its own launch."""

    home_granularity: HomeGranularity = HomeGranularity.token
    push: Push | None = None  # null: the host executor has no CTAs that could push
    walk: Walk | None = None  # null: the host executor takes tiles expert after expert
    num_chunks: int | None = None  # pieces along N; null: as many as are 3.5 KiB or more


@dataclass(kw_only=True)
class GemmCombineKernel(HomeKernel):
    """The second GEMM and combine, fused."""

    operation: Operation = Operation.gemm_combine


@dataclass(kw_only=True)
class MoeLayerKernel(HomeKernel):
    """Dispatch, both GEMMs, SwiGLU between them and combine: two fused launches in a row."""

    operation: Operation = Operation.moe_layer


Kernel = (
    DispatchKernel
    | CombineKernel
    | GroupedGemmKernel
    | DispatchGemmKernel
    | GemmCombineKernel
    | MoeLayerKernel
)

KERNELS: dict[Operation, type[Kernel]] = {
    Operation.dispatch: DispatchKernel,
    Operation.combine: CombineKernel,
    Operation.grouped_gemm: GroupedGemmKernel,
    Operation.dispatch_gemm: DispatchGemmKernel,
    Operation.gemm_combine: GemmCombineKernel,
    Operation.moe_layer: MoeLayerKernel,
}
