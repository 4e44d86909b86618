"""Whole groups of ranks that measure operations of one configuration, in forked processes."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.host.ranks import Failed, run_ranks
from tilepipe.config import placements, schemas
from tilepipe.config.choices import Baseline, Fabric, Operation, Resume
from tilepipe.config.schemas import Config
from tilepipe.experiments import entry, setting
from tilepipe.fabric.host import HeapPlace
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.records import RankRecord
from tilepipe.workload import payload
from tilepipe.workload.routing import Routing

KERNELS = {
    Operation.dispatch: schemas.DispatchKernel,
    Operation.combine: schemas.CombineKernel,
    Operation.grouped_gemm: schemas.GroupedGemmKernel,
    Operation.dispatch_gemm: schemas.DispatchGemmKernel,
    Operation.gemm_combine: schemas.GemmCombineKernel,
    Operation.moe_layer: schemas.MoeLayerKernel,
}
_COMMUNICATION = ("order", "granularity", "capacity_factor")


def make_config(
    operation: Operation,
    routing: Routing,
    *,
    hidden: int = 64,
    intermediate: int = 32,
    num_warmups: int = 0,
    num_iters: int = 1,
    watchdog_ms: int = 20_000,
    placement: placements.Placement | None = None,
    baselines: Sequence[Baseline] = (),
    **kernel: Any,
) -> Config:
    """A configuration whose routing is given, not drawn; see `measure_group`."""
    if operation is Operation.grouped_gemm:
        kernel = {key: value for key, value in kernel.items() if key not in _COMMUNICATION}
    if operation not in (Operation.combine, Operation.gemm_combine, Operation.moe_layer):
        kernel.pop("home_granularity", None)
    num_ranks = len(routing.topk_idx)
    return Config(
        name="test",
        operation=operation,
        hardware=schemas.Hardware(
            name="cpu",
            gpu=None,
            num_gpus=0,
            num_ranks=num_ranks,
            fabric=Fabric.host,
            num_sms=None,
            num_sms_source=None,
            link_gbps=None,
            link_gbps_source=None,
            hbm_gbps=None,
            hbm_gbps_source=None,
            bf16_tflops=None,
            bf16_tflops_source=None,
        ),
        kernel=KERNELS[operation](**kernel),
        workload=schemas.Workload(
            num_tokens=max(len(ids) for ids in routing.topk_idx),
            hidden=hidden,
            intermediate=intermediate,
            num_experts=routing.num_experts,
            num_topk=routing.topk_idx[0].shape[1],
        ),
        routing=schemas.UniformRouting(),
        placement=placement or placements.ContiguousPlacement(),
        measure=schemas.Measure(
            num_warmups=num_warmups, num_iters=num_iters, baselines=list(baselines)
        ),
        launch=schemas.Launch(
            num_ranks=num_ranks, fabric=Fabric.host, watchdog_ms=watchdog_ms, time_limit_s=120.0
        ),
        results_dir="unused",
        resume=Resume.none,
        dry_run=False,
        fail_fast=False,
        repetitions=1,
    )


def measure_group(
    configs: Sequence[Config], routing: Routing, *, delays: Sequence[Delays] = ()
) -> list[list[RankRecord]]:
    """Records by configuration, then rank; every configuration runs with `routing`."""
    num_ranks = len(routing.topk_idx)
    per_rank = run_ranks(num_ranks, _measure_all, configs, routing, list(delays), limit_s=240)
    failures = [result.text for result in per_rank if isinstance(result, Failed)]
    assert not failures, failures[0]
    return [list(records) for records in zip(*per_rank, strict=True)]


def _measure_all(
    rank: int,
    place: HeapPlace,
    configs: Sequence[Config],
    routing: Routing,
    delays: Sequence[Delays],
) -> list[RankRecord]:
    # This process only. Operations, and the oracle at both gates, multiply by the same weights.
    setting.draw = lambda *_, **__: routing
    payload.expert_weights = cache(_read_only_weights)
    records = []
    for number, config in enumerate(configs):
        own_place = HeapPlace(token=f"{place.token}-{number}", shm_dir=place.shm_dir)
        own_delays = delays[rank] if delays else NO_DELAYS
        records.append(entry.run_rank(config, rank=rank, place=own_place, delays=own_delays))
    return records


def _read_only_weights(
    expert: int, num_n: int, num_k: int, make: Callable[..., Any] = payload.expert_weights
) -> Any:
    weights = make(expert, num_n, num_k)
    weights.setflags(write=False)
    return weights


def wrong_verdicts(records: Sequence[RankRecord]) -> list[str]:
    return [
        f"rank {record.rank} {verdict.contender} {verdict.stage}: {verdict.detail}"
        for record in records
        for verdict in record.verdicts
        if not verdict.passed
    ]


def random_routing(
    tokens: Sequence[int],
    *,
    num_experts: int,
    num_topk: int,
    kind: str = "uniform",
    seed: int = 0,
) -> Routing:
    """uniform; one_expert: slot 0 of every token takes expert 0; masked: half the slots dropped."""
    rng = np.random.default_rng(seed)
    topk_idx, topk_weights = [], []
    for count in tokens:
        ids = np.argsort(rng.random((count, num_experts)), axis=1)[:, :num_topk].astype(np.int32)
        if kind == "one_expert":
            ids[ids == 0] = ids[:, :1].repeat(num_topk, axis=1)[ids == 0]
            ids[:, 0] = 0
        if kind == "masked":
            ids[rng.random(ids.shape) < 0.5] = -1
        topk_idx.append(ids)
        weights = rng.random(ids.shape).astype(np.float32) + np.float32(0.1)
        topk_weights.append(np.where(ids >= 0, weights, np.float32(0)))
    return Routing(
        topk_idx=tuple(topk_idx), topk_weights=tuple(topk_weights), num_experts=num_experts
    )
