"""Limits that settings have together, and those of a whole sweep.

Knows nothing of Hydra, torch or which GPU is present.
"""

import math
import re
from typing import Any

from tilepipe.config.choices import (
    Copy,
    Dtype,
    Fabric,
    Law,
    Operation,
    Order,
    Planner,
)
from tilepipe.config.limits import (
    FUSED_WARPS,
    MAX_LOOPBACK_RANKS,
    MAX_NVSHMEM_RANKS,
    MAX_PLANNED_EXPERTS,
    MAX_TOPK,
    PLANNED_ORDERS,
    SHARED_BYTES,
    WARPS_OF_SM,
    max_combine_warps,
    max_flag_batch,
    piece_bytes,
)
from tilepipe.config.placements import BalancedPlacement, ContiguousPlacement, FilePlacement
from tilepipe.config.refuse import require
from tilepipe.config.routings import AllLocalRouting
from tilepipe.config.running import LEAVE_OUT, check_running
from tilepipe.config.schemas import (
    SWEEP_KEYS,
    AllRemoteRouting,
    CommunicationKernel,
    Config,
    FusedKernel,
    GemmCombineKernel,
    GroupedGemmKernel,
    HotExpertRouting,
    HotRankRouting,
)
from tilepipe.config.tiles import check_tiles

__all__ = ["check_config", "check_same_sweep", "check_sweep"]


def check_sweep(container: dict[str, Any]) -> None:
    """Refuse root keys with which no point of a sweep could be run or kept."""
    name, rounds = container["name"], container["repetitions"]
    plain = re.fullmatch(r"\w[\w-]*", name) is not None
    require(plain, "name", name, "must be one word of letters, digits, _ and -: it names a folder")
    taken = ("logs", "report", "wrapped")
    require(name not in taken, "name", name, "has another use; take another name")
    require(1 <= rounds <= 1000, "repetitions", rounds, "must be in 1..1000")
    require(container["results_dir"] != "", "results_dir", "", "must name a folder")


def check_same_sweep(first: dict[str, Any], other: dict[str, Any]) -> None:
    """Refuse lists of values for keys of which a sweep has one."""
    for key in SWEEP_KEYS:
        allowed = f"a sweep has one value, and {first[key]} was typed too; start two sweeps"
        require(first[key] == other[key], key, other[key], allowed)


def check_config(config: Config) -> None:
    """Refuse settings that fit one by one but not together; needs neither a GPU nor a file."""
    _check_sizes(config)
    _check_placement(config)
    _check_experts(config)
    _check_executor(config)
    _check_gpu_keys(config)
    _check_kernels(config)
    check_tiles(config)
    check_running(config)


_ELEM_BYTES = {Dtype.bf16: 2}


def _check_sizes(config: Config) -> None:
    """Every row that is moved or multiplied starts at a multiple of 16 bytes."""
    workload = config.workload
    elem_bytes = _ELEM_BYTES[workload.dtype]
    keys = ["hidden"]
    if config.operation not in (Operation.dispatch, Operation.combine):
        # The first GEMM stores rows of 2 x intermediate, the second loads rows of intermediate.
        keys.append("intermediate")
    for key in keys:
        value = getattr(workload, key)
        halved = config.operation in (Operation.gemm_combine, Operation.moe_layer)
        doubled = key == "intermediate" and not halved
        row_bytes = value * elem_bytes * (2 if doubled else 1)
        step = 16 * value // math.gcd(16 * value, row_bytes)
        allowed = f"rows of {row_bytes} bytes are no multiple of 16; use a multiple of {step}"
        require(row_bytes % 16 == 0, f"workload.{key}", value, allowed)
    has_count = workload.num_tokens is not None or config.routing.law is Law.trace
    allowed = "only routing=trace brings a token count; type workload.num_tokens=N"
    require(has_count, "workload.num_tokens", workload.num_tokens, allowed)


def _check_experts(config: Config) -> None:
    """A token finds enough distinct experts where its law looks for them."""
    workload, routing, num_ranks = config.workload, config.routing, config.launch.num_ranks
    num_experts, num_topk = workload.num_experts, workload.num_topk
    allowed = f"must be at most workload.num_experts={num_experts}"
    require(num_topk <= num_experts, "workload.num_topk", num_topk, allowed)
    num_local = num_experts // num_ranks
    if isinstance(routing, AllLocalRouting):
        allowed = f"routing=all_local finds {num_local} experts on a rank; lower it to that"
        require(num_topk <= num_local, "workload.num_topk", num_topk, allowed)
    if isinstance(routing, AllRemoteRouting):
        allowed = "routing=all_remote needs 2 or more ranks"
        require(num_ranks >= 2, "launch.num_ranks", num_ranks, allowed)
        num_remote = num_experts - num_local
        allowed = f"routing=all_remote finds {num_remote} experts on other ranks; lower it to that"
        require(num_topk <= num_remote, "workload.num_topk", num_topk, allowed)
    if isinstance(routing, HotExpertRouting):
        hot, allowed = routing.hot_expert, f"must be in 0..{num_experts - 1}"
        require(0 <= hot < num_experts, "routing.hot_expert", hot, allowed)
    if isinstance(routing, HotRankRouting):
        hot, allowed = routing.hot_rank, f"must be in 0..{num_ranks - 1}"
        require(0 <= hot < num_ranks, "routing.hot_rank", hot, allowed)


def _check_placement(config: Config) -> None:
    """Every rank holds as many physical experts as the others, and laws by rank know their rank."""
    placement, law, num_ranks = config.placement, config.routing.law, config.launch.num_ranks
    num_experts = config.workload.num_experts
    # A file may leave physical experts unused, and balanced may have more than there are experts.
    if not isinstance(placement, FilePlacement | BalancedPlacement) or law in _LAWS_BY_RANK:
        allowed = f"must be a multiple of launch.num_ranks={num_ranks}"
        require(num_experts % num_ranks == 0, "workload.num_experts", num_experts, allowed)
    if isinstance(placement, BalancedPlacement):
        count, most = placement.num_redundant, num_experts * num_ranks
        least = -num_experts % num_ranks
        allowed = (
            f"with workload.num_experts={num_experts} it is no multiple of "
            f"launch.num_ranks={num_ranks}; use {least}, {least + num_ranks} and so on"
        )
        divides = (num_experts + count) % num_ranks == 0
        require(divides, "placement.num_redundant", count, allowed)
        allowed = f"must be at most workload.num_experts x launch.num_ranks = {most}"
        require(count <= most, "placement.num_redundant", count, allowed)
    known = law not in _LAWS_THAT_PROMISE or isinstance(placement, ContiguousPlacement)
    allowed = f"routing={law.name} knows where experts live by placement=contiguous; type that"
    require(known, "placement", placement.rule, allowed)


# Laws that know an expert's rank, which is that of placement=contiguous.
_LAWS_BY_RANK = (Law.hot_rank, Law.all_local, Law.all_remote)
# Those among them whose name would be false under any other placement.
_LAWS_THAT_PROMISE = (Law.all_local, Law.all_remote)


# Fabric -> most ranks, and why.
_MAX_RANKS = {
    Fabric.loopback: (MAX_LOOPBACK_RANKS, "its ranks share one GPU"),
    Fabric.nvshmem: (MAX_NVSHMEM_RANKS, "a lane of a warp watches each rank"),
}


def _check_executor(config: Config) -> None:
    """The host executor goes with hardware without GPUs."""
    fabric, hardware, num_ranks = config.launch.fabric, config.hardware, config.launch.num_ranks
    if hardware.num_gpus == 0:
        allowed = f"hardware={hardware.name} has no GPU; use host, or choose another hardware"
        require(fabric is Fabric.host, "launch.fabric", fabric, allowed)
    else:
        allowed = f"hardware={hardware.name} has GPUs; use another fabric, or type hardware=cpu"
        require(fabric is not Fabric.host, "launch.fabric", fabric, allowed)
    if fabric in _MAX_RANKS:
        most, why = _MAX_RANKS[fabric]
        allowed = f"launch.fabric={fabric.name} takes 1..{most}: {why}"
        require(num_ranks <= most, "launch.num_ranks", num_ranks, allowed)


# Kernel keys that have a meaning on a GPU only -> what the host executor lacks.
_GPU_KEYS = {
    "copy": "copies",
    "num_comm_ctas": "CTAs",
    "num_comm_warps": "warps",
    "num_loads": "loads in flight",
    "num_stages": "stages",
    "stage_bytes": "stages",
    "flag_batch": "release fences to share",
}
# Keys that only some copies take -> those copies.
_COPIES_OF = {
    "num_loads": (Copy.simt,),
    "num_stages": (Copy.tma,),
    "stage_bytes": (Copy.tma,),
}


def _check_gpu_keys(config: Config) -> None:
    """How CTAs move rows is chosen for a GPU, and for nothing else."""
    kernel = config.kernel
    on_host = config.launch.fabric is Fabric.host
    if isinstance(kernel, GroupedGemmKernel):
        _check_gemm_keys(kernel, config.hardware.num_sms, on_host=on_host)
        return
    allowed = f"the host executor plans with NumPy; {LEAVE_OUT}"
    by_numpy = kernel.planner is Planner.numpy
    require(by_numpy or not on_host, "kernel.planner", kernel.planner, allowed)
    fused = {"roles": "CTAs"} if isinstance(kernel, FusedKernel) else {}
    for key, lacked in (_GPU_KEYS | fused).items():
        value = getattr(kernel, key)
        if on_host:
            allowed = f"the host executor has no {lacked}; {LEAVE_OUT}"
            require(value is None, f"kernel.{key}", value, allowed)
        elif kernel.copy not in _COPIES_OF.get(key, (kernel.copy,)):
            own = " or ".join(copy.name for copy in _COPIES_OF[key])
            allowed = f"only kernel.copy={own} takes it; leave the key out, or type that copy"
            require(value is None, f"kernel.{key}", value, allowed)
        else:
            allowed = "null is for the host executor; leave the key out, or type hardware=cpu"
            require(value is not None, f"kernel.{key}", value, allowed)


def _check_gemm_keys(kernel: GroupedGemmKernel, num_sms: int | None, *, on_host: bool) -> None:
    """How CTAs store a product, and how many of them there are."""
    if on_host:
        for key, lacked in (("store", "ways of storing"), ("num_gemm_ctas", "CTAs")):
            allowed = f"the host executor has no {lacked}; {LEAVE_OUT}"
            require(getattr(kernel, key) is None, f"kernel.{key}", getattr(kernel, key), allowed)
    elif kernel.num_gemm_ctas is not None and num_sms is not None:
        allowed = f"one runs on each SM, and there are {num_sms}; use at most {num_sms}"
        fits = kernel.num_gemm_ctas <= num_sms
        require(fits, "kernel.num_gemm_ctas", kernel.num_gemm_ctas, allowed)


def _check_kernels(config: Config) -> None:
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
    assert kernel.copy is not None, "null is refused on a GPU"
    hardware = config.hardware
    needed = [f"{kernel.copy.name}_cta_gbps", "beside_gemm_share", "hbm_gbps", "reached_tflops"]
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
    if isinstance(kernel, GemmCombineKernel):
        allowed = "rows go home as the GEMM stores them; leave the key out"
        require(kernel.order is Order.edf, "kernel.order", kernel.order, allowed)


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
    stage_bytes = piece_bytes(config.workload.hidden * _ELEM_BYTES[config.workload.dtype], room)
    needed = warps * stages * stage_bytes
    allowed = (
        f"{warps} warps x that many stages of {stage_bytes} bytes need {needed} bytes of shared "
        f"memory, and an SM has {SHARED_BYTES}; lower it, kernel.stage_bytes or "
        "kernel.num_comm_warps"
    )
    require(needed <= SHARED_BYTES, "kernel.num_stages", stages, allowed)
