"""Torch's layer as a further contender of a whole layer on the GPU.

Knows nothing of how torch moves rows; see `beside` for who joins its group and for windows: `plan`
is torch's route, `stage` permute, both `grouped_mm`, SwiGLU between them and the way back.
"""

import torch

from tilepipe.baselines.asked import ROUNDINGS
from tilepipe.baselines.collective import Collective
from tilepipe.experiments.cuda.beside import BesideTorch
from tilepipe.experiments.cuda.moe_layer import CudaMoeLayer
from tilepipe.experiments.cuda.trial import Gated
from tilepipe.measure.device import Part
from tilepipe.records import Verdict

__all__ = ["BesideTorchLayer"]


class BesideTorchLayer(BesideTorch):
    """The trial of a layer with torch's contender last; both have the same weights in memory."""

    def __init__(self, trial: Gated, collective: Collective | None) -> None:
        assert isinstance(trial, CudaMoeLayer), "another operation"
        self._own = trial
        super().__init__(trial, collective)

    def _weights(self) -> torch.Tensor:  # (experts here, n, k) bf16
        return self._own.first.weights

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        if contender != self._name:
            return self._own.check(contender, rank, launch, stage)
        out, told = self._layer.out[self._tokens[rank]], {"contender": contender, "stage": stage}
        return [self._own.oracle(rank).check(launch, out, num_roundings=ROUNDINGS, **told)]

    def _steps(self) -> list[Part]:
        """What follows the route."""
        layer, route, weights = self._layer, self._route, self._topk_weights
        second = self._own.second.weights

        def send() -> None:
            layer.dispatch(route, self._inputs)

        def multiply() -> None:
            self._product = layer.apply_experts(route, layer.received, second)

        def bring_home() -> None:
            layer.bring_home(route, self._product)

        def add_up() -> None:
            layer.add_up(weights)

        return [
            *(("moved", send), ("multiplied", multiply)),
            *(("returned", bring_home), ("added", add_up)),
        ]
