"""Limits that settings have together, and those of a whole sweep.

Knows nothing of Hydra, torch or which GPU is present.
"""

import math
import re
from typing import Any

from tilepipe.config.choices import Dtype, Fabric, Law, Operation
from tilepipe.config.refuse import require
from tilepipe.config.schemas import (
    SWEEP_KEYS,
    AllLocalRouting,
    AllRemoteRouting,
    Config,
    GroupedGemmKernel,
    HotExpertRouting,
    HotRankRouting,
)

__all__ = ["check_config", "check_same_sweep", "check_sweep"]


def check_sweep(container: dict[str, Any]) -> None:
    """Refuse root keys with which no point of a sweep could be run or kept."""
    name, rounds = container["name"], container["repetitions"]
    plain = re.fullmatch(r"\w[\w-]*", name) is not None
    require(plain, "name", name, "must be one word of letters, digits, _ and -: it names a folder")
    require(name not in ("logs", "wrapped"), "name", name, "has another use; take another name")
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
    _check_experts(config)
    _check_executor(config)
    _check_wrap(config)


_ELEM_BYTES = {Dtype.bf16: 2}


def _check_sizes(config: Config) -> None:
    """Every row that is moved or multiplied starts at a multiple of 16 bytes."""
    workload = config.workload
    elem_bytes = _ELEM_BYTES[workload.dtype]
    keys = ["hidden"]
    if config.operation in (
        Operation.grouped_gemm,
        Operation.dispatch_gemm,
        Operation.gemm_combine,
    ):
        # The first GEMM stores rows of 2 x intermediate, the second loads rows of intermediate.
        keys.append("intermediate")
    for key in keys:
        value = getattr(workload, key)
        doubled = key == "intermediate" and config.operation is not Operation.gemm_combine
        row_bytes = value * elem_bytes * (2 if doubled else 1)
        step = 16 * value // math.gcd(16 * value, row_bytes)
        allowed = f"rows of {row_bytes} bytes are no multiple of 16; use a multiple of {step}"
        require(row_bytes % 16 == 0, f"workload.{key}", value, allowed)
    has_count = workload.num_tokens is not None or config.routing.law is Law.trace
    allowed = "only routing=trace brings a token count; type workload.num_tokens=N"
    require(has_count, "workload.num_tokens", workload.num_tokens, allowed)


def _check_experts(config: Config) -> None:
    """Experts divide over ranks, and a token finds enough distinct ones."""
    workload, routing, num_ranks = config.workload, config.routing, config.launch.num_ranks
    num_experts, num_topk = workload.num_experts, workload.num_topk
    allowed = f"must be a multiple of launch.num_ranks={num_ranks}"
    require(num_experts % num_ranks == 0, "workload.num_experts", num_experts, allowed)
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


def _check_wrap(config: Config) -> None:
    """Inside this process there is room for one rank."""
    num_ranks = config.launch.num_ranks
    if config.launch.wrap == "inline":
        require(num_ranks == 1, "launch.num_ranks", num_ranks, "launch.wrap=inline runs one rank")
    named = config.launch.wrap is None or config.launch.wrap.strip() != ""
    require(named, "launch.wrap", config.launch.wrap, "type a command, inline, or null")


def _check_executor(config: Config) -> None:
    """The host executor goes with hardware without GPUs, and has no copies or CTAs."""
    fabric, hardware, kernel = config.launch.fabric, config.hardware, config.kernel
    if hardware.num_gpus == 0:
        allowed = f"hardware={hardware.name} has no GPU; use host, or choose another hardware"
        require(fabric is Fabric.host, "launch.fabric", fabric, allowed)
    else:
        allowed = f"hardware={hardware.name} has GPUs; use another fabric, or type hardware=cpu"
        require(fabric is not Fabric.host, "launch.fabric", fabric, allowed)
    if fabric is Fabric.host and not isinstance(kernel, GroupedGemmKernel):
        allowed = "the host executor has no {}; leave the key out, or choose hardware with a GPU"
        require(kernel.copy is None, "kernel.copy", kernel.copy, allowed.format("copies"))
        ctas = kernel.num_comm_ctas
        require(ctas is None, "kernel.num_comm_ctas", ctas, allowed.format("CTAs"))
