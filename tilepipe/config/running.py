"""Limits of how a point is measured, paced and launched, as a whole.

Knows nothing of Hydra, torch, kernels or which GPU is present.
"""

from tilepipe.config.choices import L2, Baseline, Fabric, Operation, Regime
from tilepipe.config.refuse import require
from tilepipe.config.schemas import Config

__all__ = ["LEAVE_OUT", "check_running"]

# The next step where the host executor lacks what was typed.
LEAVE_OUT = "leave the key out, or choose hardware with a GPU"
_ON_HOST = "leave the key out, or type hardware=cpu"


def check_running(config: Config) -> None:
    """Refuse settings that fit one by one but not together; needs neither a GPU nor a file."""
    _check_pace(config)
    _check_measure(config)
    _check_baselines(config)
    _check_wrap(config)


def _check_pace(config: Config) -> None:
    """Between GPUs the link itself sets the rate."""
    rate, delay = config.launch.pace_gbps, config.launch.pace_latency_ns
    if config.launch.fabric is not Fabric.loopback:
        allowed = "only ranks that share a GPU are throttled; type launch.fabric=loopback too"
        if config.launch.fabric is Fabric.host:
            allowed = f"the host executor has no links to throttle; {LEAVE_OUT}"
        require(rate is None, "launch.pace_gbps", rate, allowed)
        require(delay == 0, "launch.pace_latency_ns", delay, allowed)


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
        allowed = f"the host executor has no L2 cache to flush; {LEAVE_OUT}"
        require(l2 is None, "measure.l2", l2, allowed)
        allowed = f"the host executor has isolated launches only; {LEAVE_OUT}"
        require(isolated, "measure.regime", regime, allowed)
    else:
        require(
            l2 is not None, "measure.l2", l2, "null is for the host executor; type cold or warm"
        )
        allowed = "measure.l2=cold would flush inside the period; type measure.l2=warm too"
        require(isolated or l2 is L2.warm, "measure.regime", regime, allowed)
        fused = config.operation in (Operation.dispatch_gemm, Operation.gemm_combine)
        allowed = f"on a GPU only dispatch_gemm and gemm_combine record one; {_ON_HOST}"
        require(fused or not measure.timeline, "measure.timeline", measure.timeline, allowed)
        one_clock = config.launch.fabric is Fabric.loopback
        allowed = "GPUs have a clock each; type launch.fabric=loopback, or leave the key out"
        require(one_clock or not measure.timeline, "measure.timeline", measure.timeline, allowed)


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


def _check_wrap(config: Config) -> None:
    """Inside this process there is room for one rank, or for all that one GPU holds."""
    num_ranks, fabric = config.launch.num_ranks, config.launch.fabric
    if config.launch.wrap == "inline" and fabric is not Fabric.loopback:
        require(num_ranks == 1, "launch.num_ranks", num_ranks, "launch.wrap=inline runs one rank")
    named = config.launch.wrap is None or config.launch.wrap.strip() != ""
    require(named, "launch.wrap", config.launch.wrap, "type a command, inline, or null")
