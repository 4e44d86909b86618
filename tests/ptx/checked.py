"""Interpreted groups whose launches are checked in every word that they may write."""

from collections.abc import Sequence
from typing import Any

from tests.gpu.groups import CheckedGroup
from tests.ptx.group import InterpretedGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

__all__ = ["CheckedRun"]


class CheckedRun(CheckedGroup):
    """As on a GPU, on the CPU."""

    def __init__(
        self,
        settings: PlanSettings,
        knobs: Knobs,
        routings: Sequence[Routing],  # all that will come: they decide what is reserved
        *,
        hidden: int,
        **chosen: Any,  # of InterpretedGroup
    ) -> None:
        tokens = [[len(ids) for ids in routing.topk_idx] for routing in routings]
        self.hidden = hidden
        self.group = InterpretedGroup(
            settings,
            Shape(
                max_tokens=max(map(max, tokens)),
                num_tokens=max(map(sum, tokens)),
                dispatch_hidden=hidden,
                home_hidden=hidden,
            ),
            knobs,
            **chosen,
        )
        self.num_launches = 0
