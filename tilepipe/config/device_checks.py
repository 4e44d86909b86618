"""What the kernels of a GPU can hold, and by what they plan: limits of their settings.

Knows nothing of Hydra, torch or which GPU is present.
"""

from tilepipe.config.choices import (
    Copy,
    Fabric,
    HomeGranularity,
    Operation,
    Order,
    Planner,
    Push,
    Roles,
)
from tilepipe.config.limits import (
    ELEM_BYTES,
    FUSED_WARPS,
    MAX_PLANNED_EXPERTS,
    MAX_TOPK,
    PLANNED_ORDERS,
    SHARED_BYTES,
    WARPS_OF_SM,
    max_combine_warps,
    max_flag_batch,
    piece_bytes,
)
from tilepipe.config.refuse import require
from tilepipe.config.schemas import (
    CommunicationKernel,
    Config,
    FusedKernel,
    GemmCombineKernel,
    GroupedGemmKernel,
    HomeKernel,
)

__all__ = ["check_kernels"]


def check_kernels(config: Config) -> None:
    """What the kernels of a GPU hold of a token and of a CTA."""
    kernel, num_topk = config.kernel, config.workload.num_topk
    if config.launch.fabric is Fabric.host or isinstance(kernel, GroupedGemmKernel):
        return
    allowed = f"kernels hold at most {MAX_TOPK} slots of a token; lower it, or type hardware=cpu"
    require(num_topk <= MAX_TOPK, "workload.num_topk", num_topk, allowed)
    if isinstance(kernel, FusedKernel):
        _check_fused(kernel)
    if kernel.num_comm_ctas == "auto":
        _check_auto(config, kernel)
    if config.operation is Operation.combine:
        warps, most = kernel.num_comm_warps, max_combine_warps(num_topk)
        allowed = (
            f"combine with workload.num_topk={num_topk} has registers and shared memory for {most} "
            f"warps; use at most {most}"
        )
        require(warps is None or warps <= most, "kernel.num_comm_warps", warps, allowed)
    if kernel.planner is Planner.device:
        _check_planned(kernel.order, config.workload.num_experts)
    _check_residency(config, kernel)
    if kernel.copy is Copy.tma:
        _check_bulk(config, kernel)


def _check_auto(config: Config, kernel: CommunicationKernel) -> None:
    """What the number of communication CTAs is chosen by."""
    allowed = f"{config.operation.name} alone has no best count to find; type counts to sweep"
    require(isinstance(kernel, FusedKernel), "kernel.num_comm_ctas", "auto", allowed)
    if isinstance(kernel, FusedKernel) and kernel.roles is Roles.beside:
        return  # none are there to choose
    assert kernel.copy is not None, "null is refused on a GPU"
    hardware = config.hardware
    needed = [f"{kernel.copy.name}_cta_gbps", "beside_gemm_share", "beside_gemm_gbps"]
    needed += ["hbm_gbps", "reached_tflops"]
    if config.launch.fabric is Fabric.nvshmem:
        needed.append("reached_link_gbps")
    missing = [f"hardware.{key}" for key in needed if getattr(hardware, key) is None]
    allowed = (
        f"it is chosen by {', '.join(missing)}, which hardware={hardware.name} does not tell; "
        "type them and their sources, or counts to sweep"
    )
    require(not missing, "kernel.num_comm_ctas", "auto", allowed)


def _check_planned(order: Order, num_experts: int) -> None:
    """What the kernel that makes the Plan knows."""
    allowed = "the plan kernel has no such order; type kernel.planner=numpy"
    require(order.name in PLANNED_ORDERS, "kernel.order", order.name, allowed)
    allowed = (
        f"the plan kernel counts at most {MAX_PLANNED_EXPERTS} experts; lower it, or type "
        "kernel.planner=numpy"
    )
    require(num_experts <= MAX_PLANNED_EXPERTS, "workload.num_experts", num_experts, allowed)


def _check_fused(kernel: FusedKernel) -> None:
    """What a CTA that may take either role holds, and who plans for it."""
    warps = kernel.num_comm_warps
    allowed = f"CTAs of a fused launch have {FUSED_WARPS} warps; use at most {FUSED_WARPS}"
    require(warps is None or warps <= FUSED_WARPS, "kernel.num_comm_warps", warps, allowed)
    allowed = "the tiles of the GEMM are planned by NumPy; leave the key out"
    require(kernel.planner is Planner.numpy, "kernel.planner", kernel.planner, allowed)
    if isinstance(kernel, HomeKernel) and kernel.roles is Roles.beside:
        _check_home_beside(kernel)
    _check_roles(kernel)
    if isinstance(kernel, GemmCombineKernel):
        allowed = "rows go home as the GEMM stores them; leave the key out"
        require(kernel.order is Order.edf, "kernel.order", kernel.order, allowed)


def _check_home_beside(kernel: HomeKernel) -> None:
    """What a warp beside the tiles does on the way home, and what it leaves to CTAs."""
    allowed = (
        "with kernel.roles=beside no CTA would bring rows home; type kernel.push=epilogue, which "
        "takes kernel.granularity=tile, or kernel.roles=switch kernel.num_comm_ctas=8"
    )
    require(kernel.push is Push.epilogue, "kernel.push", kernel.push, allowed)
    allowed = (
        "with kernel.roles=beside tokens are reduced as they complete; leave the key out, or type "
        "kernel.roles=switch kernel.num_comm_ctas=8"
    )
    by_token = kernel.home_granularity is HomeGranularity.token
    require(by_token, "kernel.home_granularity", kernel.home_granularity, allowed)


def _check_roles(kernel: FusedKernel) -> None:
    """With roles beside tiles no CTA communicates, with all others some do."""
    ctas, roles = kernel.num_comm_ctas, kernel.roles
    allowed = (
        "with kernel.roles=beside every CTA multiplies and none communicates alone; type "
        "kernel.num_comm_ctas=0, or leave kernel.roles out"
    )
    if roles is not Roles.beside:
        word = "" if roles is None else roles.name
        allowed = (
            f"with kernel.roles={word} some CTAs communicate; use 1 or more, or leave kernel.roles "
            "out"
        )
    fits = not isinstance(ctas, int) or (ctas == 0) == (roles is Roles.beside)
    require(fits, "kernel.num_comm_ctas", ctas, allowed)


def _check_residency(config: Config, kernel: CommunicationKernel) -> None:
    """CTAs of all ranks on a GPU run at once; the code's registers may allow fewer."""
    ctas, warps, num_sms = kernel.num_comm_ctas, kernel.num_comm_warps, config.hardware.num_sms
    if not isinstance(ctas, int) or warps is None or num_sms is None:
        return
    shared = config.launch.fabric is Fabric.loopback
    num_ranks = config.launch.num_ranks if shared else 1
    ranks = f" shared by {num_ranks} ranks" if num_ranks > 1 else ""
    if isinstance(kernel, FusedKernel):  # whose CTAs have an SM each
        most = num_sms // num_ranks - 1
        allowed = f"{num_sms} SMs{ranks} hold a CTA each, one the GEMM's; use at most {most}"
    else:
        most = num_sms * (WARPS_OF_SM // warps) // num_ranks
        allowed = (
            f"{num_sms} SMs{ranks} hold {most} CTAs of {warps} warps a rank; use at most {most}, "
            "or fewer kernel.num_comm_warps"
        )
    require(ctas <= most, "kernel.num_comm_ctas", ctas, allowed)


def _check_bulk(config: Config, kernel: CommunicationKernel) -> None:
    """What rings of bulk copies take of an SM, and what their warps can remember."""
    batch, stages, warps = kernel.flag_batch, kernel.num_stages, kernel.num_comm_warps
    room = kernel.stage_bytes
    if batch is None or stages is None or warps is None or room is None:
        return
    allowed = f"warps with kernel.num_stages={stages} remember {{0}} rows; use at most {{0}}"
    most = max_flag_batch(stages)
    require(batch <= most, "kernel.flag_batch", batch, allowed.format(most))
    stage_bytes = piece_bytes(config.workload.hidden * ELEM_BYTES[config.workload.dtype], room)
    needed = warps * stages * stage_bytes
    allowed = (
        f"{warps} warps x that many stages of {stage_bytes} bytes need {needed} bytes of shared "
        f"memory, and an SM has {SHARED_BYTES}; lower it, kernel.stage_bytes or "
        "kernel.num_comm_warps"
    )
    require(needed <= SHARED_BYTES, "kernel.num_stages", stages, allowed)
