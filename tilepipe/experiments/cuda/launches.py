"""Launches of a fused trial's contenders, one after the other behind the gate.

Knows nothing of what they launch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch

from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.fabric.table import Slot
from tilepipe.measure.device import Part

__all__ = ["Homeward", "Launched"]


class Launched(ABC):
    """Contenders that are an opening and the launches behind it."""

    session: CudaSession
    _launches: Mapping[str, Sequence[Callable[[], None]]]  # by contender

    @abstractmethod
    def opening(self, contender: str) -> Callable[[], None]:
        """Opens the launch of a contender."""

    def run(self, contender: str) -> None:
        for _, launch in self._parts(contender):
            launch()

    def _parts(self, contender: str) -> list[Part]:
        launches = self._launches[contender]

        def stage() -> None:
            for launch in launches:
                launch()

        return [("plan", self.opening(contender)), ("stage", stage)]


class Homeward(Launched):
    """Those whose rows go home: what they leave are tokens."""

    @staticmethod
    def _output(contender: str) -> Slot:
        return Slot.out if contender == "fused" else Slot.reduced

    def tokens_of(self, contender: str, rank: int) -> torch.Tensor:  # (num_tokens, hidden) bf16
        """What the latest run of a contender has left on a rank."""
        # Of the tokens that the rank has: there is room for those of the rank with the most.
        num_tokens = len(self.session.routing.topk_idx[rank])
        out = self.session.group.tensor(rank, self._output(contender))[:num_tokens]
        return out.view(torch.bfloat16)
