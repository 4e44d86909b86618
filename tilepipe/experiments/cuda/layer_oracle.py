"""What a whole layer must have made of its tokens, in FP32 on the device that holds them.

As `experiments.oracle`, from routing and payload alone; knows nothing of plans, kernels or anything
that a kernel has written. The tolerance is that of `measure.gate`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tilepipe.experiments.cuda.payload import row_bits
from tilepipe.experiments.cuda.products import compare_bounded, exact_product
from tilepipe.measure.gate import TOLERANCES, activation_deviation
from tilepipe.records import Verdict
from tilepipe.workload.payload import WEIGHTS_LAUNCH, weight_scale
from tilepipe.workload.routing import Routing

__all__ = ["LayerOracle"]

_TOLERANCE = TOLERANCES["bf16"]


class LayerOracle:
    """Expected tokens of one rank."""

    def __init__(
        self,
        routing: Routing,  # of physical experts
        *,
        rank: int,
        experts: Sequence[int],  # whose weights each physical expert of the group holds
        intermediate: int,
        device: torch.device | str,
    ) -> None:
        self._rank, self._experts, self._intermediate = rank, experts, intermediate
        self._device = torch.device(device)
        self._topk_idx = routing.topk_idx[rank]
        self._topk_weights = self._moved(routing.topk_weights[rank])

    def check(
        self,
        launch: int,
        out: torch.Tensor,  # (num_tokens, hidden) bf16
        *,
        num_roundings: int = 1,  # of a value between the products; see measure.gate
        contender: str,
        stage: str,
    ) -> Verdict:
        """Dispatched rows times the first weight of their expert, SwiGLU, times the second, summed
        with the weights of their slots."""
        total = torch.zeros(out.shape, dtype=torch.float32, device=self._device)
        bound = torch.zeros_like(total)
        for physical, number in enumerate(self._experts):
            token, slot = (self._moved(part) for part in np.nonzero(self._topk_idx == physical))
            if not len(token):
                continue
            rows, error = self._rows(launch, token, number, out.shape[1], num_roundings)
            weight = self._topk_weights[token, slot, None]
            total.index_add_(0, token, weight * rows)
            error += _TOLERANCE.rounding * (rows.abs() + error)
            bound.index_add_(0, token, weight * error)
        bound += _TOLERANCE.rounding * (total.abs() + bound)
        return compare_bounded(out, total, bound, contender=contender, stage=stage)

    def _rows(
        self, launch: int, token: torch.Tensor, expert: int, hidden: int, num_roundings: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # (len(token), hidden) float32 each
        """What an expert makes of some tokens, and how far each value may be off."""
        num_k = self._intermediate
        x = row_bits(launch, self._rank, token, hidden).view(torch.bfloat16).float()
        gate, up = exact_product(x, self._weights(expert, 2 * num_k, hidden)).chunk(2, dim=1)
        activated = torch.nn.functional.silu(gate) * up
        second = self._weights(expert, hidden, num_k)
        rows = exact_product(activated, second)
        error = torch.outer(
            torch.linalg.vector_norm(activated, dim=1), torch.linalg.vector_norm(second, dim=1)
        )
        error *= _TOLERANCE.per_term * num_k
        deviation = torch.linalg.vector_norm(gate * up, dim=1) * activation_deviation(num_roundings)
        error += torch.outer(deviation, second.abs().amax(dim=1))
        return rows, error

    def _weights(self, expert: int, n: int, k: int) -> torch.Tensor:  # (n, k) float32
        columns = torch.arange(n, device=self._device)
        bits = row_bits(WEIGHTS_LAUNCH, expert, columns, k)
        return bits.view(torch.bfloat16).float() * weight_scale(k)

    def _moved(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
