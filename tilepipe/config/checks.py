"""Limits that settings have together, and those of a whole sweep.

Knows nothing of Hydra, torch or which GPU is present.
"""

import math
import re
from typing import Any

from tilepipe.config.choices import (
    L2,
    Baseline,
    Copy,
    Fabric,
    Law,
    Operation,
    Planner,
    Regime,
)
from tilepipe.config.chunks import check_chunks
from tilepipe.config.device_checks import check_kernels
from tilepipe.config.limits import (
    ELEM_BYTES,
    MAX_LOOPBACK_RANKS,
    MAX_NVSHMEM_RANKS,
)
from tilepipe.config.placements import BalancedPlacement, ContiguousPlacement, FilePlacement
from tilepipe.config.refuse import require
from tilepipe.config.routings import AllLocalRouting
from tilepipe.config.schemas import (
    SWEEP_KEYS,
    AllRemoteRouting,
    Config,
    FusedKernel,
    GroupedGemmKernel,
    HomeKernel,
    HotExpertRouting,
    HotRankRouting,
)
from tilepipe.config.tiles import check_tiles

__all__ = ["check_config", "check_same_sweep", "check_sweep"]

# File systems take 255, and what is half-written has a longer name.
_MOST_NAME_BYTES = 200


def check_sweep(container: dict[str, Any]) -> None:
    """Refuse root keys with which no point of a sweep could be run or kept."""
    name, rounds = container["name"], container["repetitions"]
    plain = re.fullmatch(r"\w[\w-]*", name) is not None
    require(plain, "name", name, "must be one word of letters, digits, _ and -: it names a folder")
    short = len(name.encode()) <= _MOST_NAME_BYTES
    require(short, "name", name, f"must be of at most {_MOST_NAME_BYTES} bytes: it names a folder")
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
    check_kernels(config)
    check_tiles(config)
    _check_pace(config)
    _check_measure(config)
    _check_baselines(config)
    _check_wrap(config)


def _check_sizes(config: Config) -> None:
    """Every row that is moved or multiplied starts at a multiple of 16 bytes."""
    workload = config.workload
    elem_bytes = ELEM_BYTES[workload.dtype]
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


def _check_wrap(config: Config) -> None:
    """Inside this process there is room for one rank, or for all that one GPU holds."""
    num_ranks, fabric = config.launch.num_ranks, config.launch.fabric
    if config.launch.wrap == "inline" and fabric is not Fabric.loopback:
        require(num_ranks == 1, "launch.num_ranks", num_ranks, "launch.wrap=inline runs one rank")
    named = config.launch.wrap is None or config.launch.wrap.strip() != ""
    require(named, "launch.wrap", config.launch.wrap, "type a command, inline, or null")


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
_LEAVE_OUT = "leave the key out, or choose hardware with a GPU"
_ON_HOST = "leave the key out, or type hardware=cpu"


def _check_gpu_keys(config: Config) -> None:
    """How CTAs move rows is chosen for a GPU, and for nothing else."""
    kernel = config.kernel
    on_host = config.launch.fabric is Fabric.host
    if isinstance(kernel, GroupedGemmKernel):
        _check_gemm_keys(kernel, config.hardware.num_sms, on_host=on_host)
        return
    allowed = f"the host executor plans with NumPy; {_LEAVE_OUT}"
    by_numpy = kernel.planner is Planner.numpy
    require(by_numpy or not on_host, "kernel.planner", kernel.planner, allowed)
    fused = {"roles": "CTAs"} if isinstance(kernel, FusedKernel) else {}
    if isinstance(kernel, HomeKernel):
        fused |= {"push": "CTAs that push", "walk": "second order of tiles"}
        check_chunks(config, kernel)
    for key, lacked in (_GPU_KEYS | fused).items():
        value = getattr(kernel, key)
        if on_host:
            allowed = f"the host executor has no {lacked}; {_LEAVE_OUT}"
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
            allowed = f"the host executor has no {lacked}; {_LEAVE_OUT}"
            require(getattr(kernel, key) is None, f"kernel.{key}", getattr(kernel, key), allowed)
    elif kernel.num_gemm_ctas is not None and num_sms is not None:
        allowed = f"one runs on each SM, and there are {num_sms}; use at most {num_sms}"
        fits = kernel.num_gemm_ctas <= num_sms
        require(fits, "kernel.num_gemm_ctas", kernel.num_gemm_ctas, allowed)


def _check_pace(config: Config) -> None:
    """Between GPUs the link itself sets the rate."""
    rate, delay = config.launch.pace_gbps, config.launch.pace_latency_ns
    if config.launch.fabric is not Fabric.loopback:
        allowed = "only ranks that share a GPU are throttled; type launch.fabric=loopback too"
        if config.launch.fabric is Fabric.host:
            allowed = f"the host executor has no links to throttle; {_LEAVE_OUT}"
        require(rate is None, "launch.pace_gbps", rate, allowed)
        require(delay == 0, "launch.pace_latency_ns", delay, allowed)


def _check_baselines(config: Config) -> None:
    """What a baseline needs of a point."""
    names = f"[{','.join(baseline.name for baseline in config.measure.baselines)}]"
    if not config.measure.baselines:
        return
    drop = "type measure.baselines=[]"
    allowed = f"grouped_gemm moves no rows and has contenders of its own; {drop}"
    require(config.operation is not Operation.grouped_gemm, "measure.baselines", names, allowed)
    if Baseline.torch in config.measure.baselines and config.launch.fabric is not Fabric.host:
        allowed = (
            f"torch waits for the device in each launch; type measure.regime=isolated, or {drop}"
        )
        require(config.measure.regime is Regime.isolated, "measure.baselines", names, allowed)
        apart = config.launch.num_ranks <= config.hardware.num_gpus
        allowed = f"NCCL takes one rank a GPU, hardware.num_gpus={config.hardware.num_gpus}; {drop}"
        nvshmem = config.launch.fabric is Fabric.nvshmem
        require(apart or not nvshmem, "measure.baselines", names, allowed)


def _check_measure(config: Config) -> None:
    """How launches follow each other, what the L2 cache holds, and when iterations end."""
    measure = config.measure
    most, interval, l2, regime = measure.max_iters, measure.interval, measure.l2, measure.regime
    allowed = "needs measure.{}; type both, or both as null"
    alone = most is None or interval is not None
    require(alone, "measure.max_iters", most, allowed.format("interval"))
    alone = interval is None or most is not None
    require(alone, "measure.interval", interval, allowed.format("max_iters"))
    isolated = regime is Regime.isolated
    if config.launch.fabric is Fabric.host:
        allowed = f"the host executor has no L2 cache to flush; {_LEAVE_OUT}"
        require(l2 is None, "measure.l2", l2, allowed)
        allowed = f"the host executor has isolated launches only; {_LEAVE_OUT}"
        require(isolated, "measure.regime", regime, allowed)
    else:
        require(
            l2 is not None, "measure.l2", l2, "null is for the host executor; type cold or warm"
        )
        allowed = "measure.l2=cold would flush inside the period; type measure.l2=warm too"
        require(isolated or l2 is L2.warm, "measure.regime", regime, allowed)
        allowed = (
            "launches back to back do not show where a plan ends, which a breakdown takes off; "
            "type measure.regime=isolated, or kernel=dispatch, combine or grouped_gemm"
        )
        broken_down = isinstance(config.kernel, FusedKernel)
        require(isolated or not broken_down, "measure.regime", regime, allowed)
        fused = config.operation in (Operation.dispatch_gemm, Operation.gemm_combine)
        allowed = f"on a GPU only dispatch_gemm and gemm_combine record one; {_ON_HOST}"
        require(fused or not measure.timeline, "measure.timeline", measure.timeline, allowed)
        one_clock = config.launch.fabric is Fabric.loopback
        allowed = "GPUs have a clock each; type launch.fabric=loopback, or leave the key out"
        require(one_clock or not measure.timeline, "measure.timeline", measure.timeline, allowed)
