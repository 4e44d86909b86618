"""Weights and tuning of the GEMM of an operation that overlaps it with communication.

Knows nothing of launches and contenders.
"""

from collections.abc import Sequence

import torch

from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.kernels.gemm.defaults import tuning_of_tile
from tilepipe.kernels.overlap.group import Layer
from tilepipe.workload.payload import WEIGHTS_LAUNCH, weight_scale
from tilepipe.workload.shapes import GemmShape, gemm_shapes

__all__ = ["expert_weights", "layers_of", "own_weights"]


def expert_weights(
    experts: Sequence[int], n: int, k: int, device: torch.device
) -> torch.Tensor:  # (experts, n, k) bf16
    """Weights of these experts, as the oracle makes them."""
    weights = torch.empty(len(experts), n, k, dtype=torch.bfloat16, device=device)
    columns = torch.arange(n, device=device)
    for weight, expert in zip(weights, experts, strict=True):
        fill_rows(weight, WEIGHTS_LAUNCH, expert, columns)
    weights *= weight_scale(k)
    return weights


def own_weights(session: CudaSession, shape: GemmShape) -> torch.Tensor:  # (experts, n, k) bf16
    """Weights of the experts of all ranks of this process."""
    on_rank = session.placed.placement.experts_on
    experts = [expert for rank in session.ranks for expert in on_rank(rank).tolist()]
    return expert_weights(experts, shape.n, shape.k, session.device)


def layers_of(session: CudaSession) -> tuple[Layer, ...]:
    """Weights of the experts of all ranks of this process, tiles as the configuration has them.

    One for each GEMM of the operation.
    """
    config, device = session.config, session.device
    tuning = tuning_of_tile(config.kernel.tile_m, config.kernel.tile_n)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return tuple(
        Layer(
            own_weights(session, shape),
            tuning,
            num_sms,
            is_second=number > 0,
        )
        for number, shape in enumerate(gemm_shapes(config.workload, config.operation))
    )
