"""kernel.num_comm_ctas=auto of a configuration, made a number before anything is launched.

Knows nothing of GPUs, launches and files; every process of a group comes to the same number.
"""

from dataclasses import replace

import numpy as np

from tilepipe.config.choices import Copy, Fabric, Operation, Roles
from tilepipe.config.schemas import Config, FusedKernel, HomeKernel
from tilepipe.experiments.setting import placed_routing, plan_settings
from tilepipe.kernels.gemm.defaults import tuning_of_tile
from tilepipe.kernels.gemm.plan import GemmTuning
from tilepipe.kernels.overlap.plan import FEWEST_JOIN
from tilepipe.schedule.comm_ctas import Rates, best_num_comm_ctas, work_of
from tilepipe.schedule.layout import count_rows
from tilepipe.workload.placement import Placed
from tilepipe.workload.shapes import gemm_shapes, row_bytes

__all__ = ["asks_for_comm_ctas", "planned_comm_ctas", "rates_of", "with_comm_ctas"]

_HALVES = (Operation.dispatch_gemm, Operation.gemm_combine)


def asks_for_comm_ctas(config: Config) -> bool:
    """Whether a number of communication CTAs is still to be found."""
    return isinstance(config.kernel, FusedKernel) and config.kernel.num_comm_ctas == "auto"


def planned_comm_ctas(config: Config) -> int | None:
    """The number that a configuration would be given on a GPU as its hardware file has it.

    None where none is asked for, or the file does not say how many SMs there are.
    """
    num_sms = config.hardware.num_sms
    if num_sms is None or not asks_for_comm_ctas(config):
        return None
    kernel = with_comm_ctas(config, placed_routing(config), num_sms=num_sms).kernel
    assert isinstance(kernel, FusedKernel)
    assert isinstance(kernel.num_comm_ctas, int)
    return kernel.num_comm_ctas


def with_comm_ctas(
    config: Config,  # which `check_config` has let pass
    placed: Placed,
    *,
    num_sms: int,  # of the GPU
) -> Config:
    """A configuration that asks for it with a number of communication CTAs.

    Raises what `best_num_comm_ctas` and `plan_settings` raise.
    """
    kernel = config.kernel
    assert isinstance(kernel, FusedKernel)
    assert kernel.roles is not None, "a key of the host executor"
    if kernel.roles is Roles.beside:  # whose CTAs all multiply
        return replace(config, kernel=replace(kernel, num_comm_ctas=0))
    routing, settings = placed.physical, plan_settings(config, placed)
    rates = rates_of(config, num_sms=num_sms)
    counts = np.stack([count_rows(ids, routing.num_experts) for ids in routing.topk_idx])
    # A layer's two launches have one number of CTAs.
    whole = config.operation is Operation.moe_layer
    launches = _HALVES if whole else (config.operation,)
    works = {
        launch: work_of(
            counts,
            settings.homeward if launch is Operation.gemm_combine else settings,
            operation=launch,
            num_sms=rates.num_sms,
            row_bytes=row_bytes(config.workload),
            tile_n=kernel.tile_n,
            num_k=shape.k,
            push=kernel.push if isinstance(kernel, HomeKernel) else None,
        )
        for launch, shape in zip(
            launches, gemm_shapes(config.workload, config.operation), strict=True
        )
    }
    count = best_num_comm_ctas(
        works,
        kernel.roles,
        rates=rates,
        cluster_m=tuning_of_tile(kernel.tile_m, kernel.tile_n).cluster_m,
    )
    return replace(config, kernel=replace(kernel, num_comm_ctas=count))


def rates_of(config: Config, *, num_sms: int) -> Rates:
    """What each rank of a configuration gets of its GPU, and of its link."""
    hardware, launch, kernel = config.hardware, config.launch, config.kernel
    assert isinstance(kernel, FusedKernel)
    by_bulk = kernel.copy is Copy.tma
    shares_gpu = launch.fabric is Fabric.loopback
    on_gpu = launch.num_ranks if shares_gpu else 1
    own_sms = num_sms // on_gpu
    reached_gbps = hardware.reached_link_gbps if launch.num_ranks > 1 else None
    return Rates(
        num_sms=own_sms,
        cta_gbps=_told(hardware.tma_cta_gbps if by_bulk else hardware.simt_cta_gbps),
        beside_gemm=_told(hardware.beside_gemm_share),
        shared_gbps=_told(hardware.beside_gemm_gbps) / on_gpu,
        memory_gbps=_told(hardware.hbm_gbps) / 2 / on_gpu,
        tflops=_told(hardware.reached_tflops) * own_sms / num_sms,
        link_gbps=launch.pace_gbps if shares_gpu else reached_gbps,
        column=GemmTuning.raster_m if on_gpu >= FEWEST_JOIN else None,
    )


def _told(rate: float | None) -> float:
    assert rate is not None, "check_config refuses hardware without"
    return rate
