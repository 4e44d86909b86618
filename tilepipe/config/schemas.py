"""Typed settings a user may choose, one dataclass per Hydra option, and their limits.

Knows nothing of Hydra, torch or which GPU is present.
"""

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar, cast

from tilepipe.config import choices
from tilepipe.config.choices import (
    L2,
    Baseline,
    Dtype,
    Fabric,
    Law,
    Operation,
    PlacementRule,
    Regime,
    Resume,
)
from tilepipe.config.kernels import (
    KERNELS,
    CombineKernel,
    CommunicationKernel,
    DispatchGemmKernel,
    DispatchKernel,
    FusedKernel,
    GemmCombineKernel,
    GroupedGemmKernel,
    HomeKernel,
    Kernel,
    MoeLayerKernel,
)
from tilepipe.config.placements import PLACEMENTS, Placement
from tilepipe.config.refuse import require
from tilepipe.config.routings import (
    ROUTINGS,
    AllRemoteRouting,
    CountsRouting,
    HotExpertRouting,
    HotRankRouting,
    Routing,
    TraceRouting,
    UniformRouting,
)

__all__ = [
    "KERNELS",
    "SWEEP_KEYS",
    "AllRemoteRouting",
    "CombineKernel",
    "CommunicationKernel",
    "Config",
    "CountsRouting",
    "DispatchGemmKernel",
    "DispatchKernel",
    "FusedKernel",
    "GemmCombineKernel",
    "GroupedGemmKernel",
    "Hardware",
    "HomeKernel",
    "HotExpertRouting",
    "HotRankRouting",
    "Kernel",
    "Launch",
    "Measure",
    "MoeLayerKernel",
    "Routing",
    "TraceRouting",
    "UniformRouting",
    "Workload",
    "config_from_dict",
]


@dataclass(kw_only=True)
class Hardware:
    """The machine a point is for; null where it is read from the device later."""

    name: str
    gpu: str | None
    num_gpus: int
    num_ranks: int  # ranks when launch.num_ranks is not typed
    fabric: Fabric
    num_sms: int | None
    num_sms_source: str | None
    link_gbps: float | None  # 1e9 bytes/s, one GPU, one direction
    link_gbps_source: str | None
    hbm_gbps: float | None  # 1e9 bytes/s
    hbm_gbps_source: str | None
    bf16_tflops: float | None  # dense
    bf16_tflops_source: str | None
    # Measured, 1e9 bytes/s where no other unit is named: what kernel.num_comm_ctas=auto goes by.
    simt_cta_gbps: float | None = None  # rows that one CTA moves, the chip otherwise idle
    simt_cta_gbps_source: str | None = None
    tma_cta_gbps: float | None = None
    tma_cta_gbps_source: str | None = None
    beside_gemm_share: float | None = None  # of those rates, what is left beside a GEMM
    beside_gemm_share_source: str | None = None
    beside_gemm_gbps: float | None = None  # rows that ever more CTAs would move beside a GEMM
    beside_gemm_gbps_source: str | None = None
    reached_link_gbps: float | None = None  # by a plain copy of rows, one GPU, one direction
    reached_link_gbps_source: str | None = None
    reached_tflops: float | None = None  # by our grouped GEMM on all SMs, rows of padding counted
    reached_tflops_source: str | None = None

    def __post_init__(self) -> None:
        require(self.num_gpus >= 0, "hardware.num_gpus", self.num_gpus, "must be 0 or more")
        require(self.num_ranks >= 1, "hardware.num_ranks", self.num_ranks, "must be 1 or more")
        share, allowed = self.beside_gemm_share, "must be above 0 and at most 1, or null"
        require(share is None or 0 < share <= 1, "hardware.beside_gemm_share", share, allowed)
        for source_key in [key.name for key in fields(self) if key.name.endswith("_source")]:
            key = source_key.removesuffix("_source")
            value, source = getattr(self, key), getattr(self, source_key)
            positive = value is None or (value > 0 and math.isfinite(value))
            require(positive, f"hardware.{key}", value, "must be above 0, or null")
            sourced = value is None or bool(source)
            require(sourced, f"hardware.{key}_source", source, f"say where {key} comes from")


@dataclass(kw_only=True)
class Workload:
    """Sizes of one MoE layer and of the batch that goes through it."""

    num_tokens: int | None  # per rank; null only with routing=trace: as many as the trace holds
    hidden: int
    intermediate: int  # the first GEMM's N is gate + up = 2 x this, the second's K is this
    num_experts: int  # of the whole group
    num_topk: int
    dtype: Dtype = Dtype.bf16

    def __post_init__(self) -> None:
        tokens = self.num_tokens
        counted = tokens is None or tokens >= 0
        require(counted, "workload.num_tokens", tokens, "must be 0 or more, or null with a trace")
        for key in ("hidden", "intermediate", "num_experts", "num_topk"):
            value = getattr(self, key)
            require(value >= 1, f"workload.{key}", value, "must be 1 or more")


@dataclass(kw_only=True)
class Measure:
    """How often a point runs; the correctness gate comes before and after."""

    num_warmups: int
    num_iters: int
    l2: L2 | None = None  # null: the host executor has no such cache
    regime: Regime = Regime.isolated
    # Iterations go on past num_iters until every contender's 95 % interval reaches at most this
    # share of its median to either side, or there are max_iters; null and null: num_iters exactly.
    max_iters: int | None = None
    interval: float | None = None
    baselines: list[Baseline] = field(default_factory=list)  # measured beside our contenders
    timeline: bool = False  # record one more launch, stamp by stamp, once all is timed

    def __post_init__(self) -> None:
        require(self.num_warmups >= 0, "measure.num_warmups", self.num_warmups, "must be 0 or more")
        require(self.num_iters >= 1, "measure.num_iters", self.num_iters, "must be 1 or more")
        most, interval = self.max_iters, self.interval
        allowed = f"must be at least measure.num_iters={self.num_iters}; raise it, or type null"
        require(most is None or most >= self.num_iters, "measure.max_iters", most, allowed)
        share = interval is None or 0 < interval < 1
        require(share, "measure.interval", interval, "must be above 0 and below 1, or null")
        once = len(set(self.baselines)) == len(self.baselines)
        names = ",".join(baseline.name for baseline in self.baselines)
        require(once, "measure.baselines", f"[{names}]", "must name each baseline once")


@dataclass(kw_only=True)
class Launch:
    """How ranks are started and when they are given up."""

    num_ranks: int
    fabric: Fabric
    watchdog_ms: int  # one wait inside a launch
    time_limit_s: float  # the whole point
    # fabric=loopback: 1e9 bytes/s that each rank may send, and receive; null: not throttled.
    pace_gbps: float | None = None
    pace_latency_ns: int = 0  # fabric=loopback: delay of a flag behind its rows
    # A command that starts each rank, {dir} and {rank} filled in; inline: this process; null: none.
    wrap: str | None = None

    def __post_init__(self) -> None:
        require(self.num_ranks >= 1, "launch.num_ranks", self.num_ranks, "must be 1 or more")
        require(self.watchdog_ms >= 1, "launch.watchdog_ms", self.watchdog_ms, "must be 1 or more")
        limit = self.time_limit_s
        require(0 < limit <= 1e6, "launch.time_limit_s", limit, "must be above 0, at most 1e6")
        rate, delay = self.pace_gbps, self.pace_latency_ns
        paced = rate is None or 0.1 <= rate <= 10_000
        require(paced, "launch.pace_gbps", rate, "must be in 0.1..10000, or null")
        fits = 0 <= delay <= 1_000_000
        require(fits, "launch.pace_latency_ns", delay, "must be in 0..1000000")


@dataclass(kw_only=True)
class Config:
    """One point: everything that was chosen."""

    name: str
    operation: Operation
    hardware: Hardware
    kernel: Kernel
    workload: Workload
    routing: Routing
    placement: Placement
    measure: Measure
    launch: Launch
    results_dir: str
    resume: Resume
    dry_run: bool
    fail_fast: bool
    repetitions: int


# Root keys that say where and how a sweep runs: one value a sweep, no part of a measurement.
SWEEP_KEYS = ("results_dir", "resume", "dry_run", "fail_fast", "repetitions")


def config_from_dict(container: dict[str, Any]) -> Config:
    """Rebuild the dataclasses of a plain resolved container; ranges are checked again."""
    _require_keys(Config, "", container)
    operation = _member(Operation, "operation", container["operation"])
    fixed = _member(Operation, "kernel.operation", container["kernel"]["operation"])
    allowed = f"differs from kernel.operation={fixed.name}; type kernel=OPERATION, which sets both"
    require(operation is fixed, "operation", operation, allowed)
    law = _member(Law, "routing.law", container["routing"]["law"])
    rule = _member(PlacementRule, "placement.rule", container["placement"]["rule"])
    return Config(
        name=container["name"],
        operation=operation,
        hardware=_build(Hardware, "hardware", container),
        kernel=_build(KERNELS[operation], "kernel", container),
        workload=_build(Workload, "workload", container),
        routing=_build(ROUTINGS[law], "routing", container),
        placement=_build(PLACEMENTS[rule], "placement", container),
        measure=_build(Measure, "measure", container),
        launch=_build(Launch, "launch", container),
        results_dir=container["results_dir"],
        resume=_member(Resume, "resume", container["resume"]),
        dry_run=container["dry_run"],
        fail_fast=container["fail_fast"],
        repetitions=container["repetitions"],
    )


_Schema = TypeVar("_Schema")
_Choice = TypeVar("_Choice", bound=Enum)


def _member(choice: type[_Choice], key: str, name: str) -> _Choice:
    require(name in choice.__members__, key, name, f"choose one of {', '.join(choice.__members__)}")
    return choice[name]


def _require_keys(schema: type, prefix: str, values: dict[str, Any]) -> None:
    known = [field.name for field in fields(cast(Any, schema))]
    for key in sorted(values.keys() ^ set(known)):
        group = prefix[:-1]
        wrong = "unknown key" if key in values else "missing"
        # What a chosen option holds is never missing: its law, rule or operation was typed alone.
        chosen = f"; choose with {group}=NAME" if group and key in known else ""
        raise ValueError(
            f"{prefix}{key}: {wrong}; {group or 'the root'} has {', '.join(known)}{chosen}"
        )


def _build(schema: type[_Schema], group: str, container: dict[str, Any]) -> _Schema:
    """One group as its dataclass, enums by name; exactly the schema's keys are accepted."""
    values = dict(container[group])
    _require_keys(schema, f"{group}.", values)
    known = {field.name: field.type for field in fields(cast(Any, schema))}
    for key, declared in known.items():
        choice = next((kind for kind in _CHOICES if declared in (kind, kind | None)), None)
        if choice is not None and values[key] is not None:
            values[key] = _member(choice, f"{group}.{key}", values[key])
        if declared == list[Baseline]:
            values[key] = [_member(Baseline, f"{group}.{key}", name) for name in values[key]]
    for key, value in values.items():
        _require_storable(f"{group}.{key}", value)
    return schema(**values)


def _require_storable(key: str, value: object) -> None:
    """Numbers that every table can hold: counts of 31 bits, seeds of 63, nothing infinite."""
    if isinstance(value, float):
        require(math.isfinite(value), key, value, "must be a finite number")
        require(abs(value) <= 1e12, key, value, "must be at most 1e12 in size")
    if isinstance(value, int):
        largest = 2**63 - 1 if key.endswith(".seed") else 2**31 - 1
        require(abs(value) <= largest, key, value, f"must be at most {largest}")


_CHOICES = tuple(getattr(choices, name) for name in choices.__all__)
