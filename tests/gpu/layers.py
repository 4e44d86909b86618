"""Whole layers on one GPU, fused and unfused, whose tokens are checked in every value.

Imported only where there is a GPU. Knows nothing of timing and of configurations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tests.gpu.cases import Choice, group_of, num_sms_of, queue_faults, tokens_of
from tilepipe.config.choices import (
    Roles,
)
from tilepipe.experiments.cuda.layer import expert_weights
from tilepipe.experiments.cuda.layer_oracle import LayerOracle
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.overlap.group import (
    Layer,
    ctas_alone,
    ctas_beside,
    fused_launch,
    gemm_launch,
    upload_layer,
)
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home
from tilepipe.workload.routing import Routing


@dataclass(frozen=True, kw_only=True)
class ChosenLayer(Choice):
    """A case of a whole layer; the rest follows."""

    hidden: int = 512
    intermediate: int = 256
    roles: Roles = Roles.switch


class LayerCase:
    """A group, both weights of its experts and all between, for several routings in a row."""

    def __init__(self, chosen: ChosenLayer, routings: Sequence[Routing]) -> None:
        self.chosen = chosen
        tile_n = chosen.tuning.tile_n
        num_first = -(-2 * chosen.intermediate // tile_n)
        self.group = group_of(
            chosen,
            routings,
            num_n_tiles=num_first,
            num_chunks=num_first,
            second_gemm=(-(-chosen.hidden // tile_n), chosen.num_chunks),
            dispatch_hidden=chosen.hidden,
            home_hidden=chosen.hidden,
        )
        self._bind()

    def _bind(self) -> None:
        chosen, group = self.chosen, self.group
        experts, device = range(chosen.num_experts), group.device
        sizes = (2 * chosen.intermediate, chosen.hidden), (chosen.hidden, chosen.intermediate)
        num_sms = num_sms_of(chosen, device)
        self.first, self.second = (
            Layer(expert_weights(experts, n, k, device), chosen.tuning, num_sms, is_second=second)
            for (n, k), second in zip(sizes, (False, True), strict=True)
        )
        self.first = replace(self.first, epilogue=Epilogue.swiglu_concatenated)
        rows = len(group.tensor(0, Slot.recv_x))
        self.h = torch.empty(
            chosen.num_ranks, rows, chosen.intermediate, dtype=torch.bfloat16, device=device
        )
        together, alone = chosen.roles is not Roles.fixed, ctas_alone(group, self.first)
        self.fused = [
            fused_launch(
                *(group, self.first, self.h),
                roles=chosen.roles,
                opens=together,
                gates=together,
            ),
            fused_home_launch(*(group, self.second, self.h), roles=chosen.roles, push=chosen.push),
        ]
        self.unfused = [
            group.dispatch,
            gemm_launch(group, self.first, self.h, num_gemm_ctas=alone),
            gemm_home_launch(group, self.second, self.h, num_gemm_ctas=alone),
            group.push,
            group.reduce,
        ]

    def prepare(self, routing: Routing, payload: int) -> None:
        """Plan the next launches and write what they move."""
        self.routing, self.payload = routing, payload
        group = self.group
        group.set_routing(routing)
        beside = ctas_beside(group, self.first)
        upload_layer(group, self.first, num_gemm_ctas=beside)
        # Other halves than the first GEMM's: each has a list of its own.
        upload_home(group, self.second, num_gemm_ctas=ctas_alone(group, self.second))
        for rank in group.ranks:
            tokens = torch.arange(len(routing.topk_idx[rank]), device=group.device)
            fill_rows(group.tensor(rank, Slot.x), payload, rank, tokens)

    def poison(self) -> None:
        poison(self.h)
        for rank in self.group.ranks:
            for slot in (Slot.recv_x, Slot.row_home, Slot.y, Slot.home_y, Slot.out, Slot.reduced):
                poison(self.group.tensor(rank, slot))

    def run(self, launches: Sequence[Callable[[], None]]) -> None:
        """Open, on poisoned memory, and launch what follows behind the one gate."""
        self.poison()
        self.group.open(exchange=True)
        for launch in launches:
            launch()
        self.group.synchronize()

    def tokens(self, slot: Slot) -> list[torch.Tensor]:
        """Bits of the tokens of every rank."""
        return tokens_of(self.group, self.routing, slot)

    def wrong(self, slot: Slot = Slot.out) -> list[str]:
        """Of tokens that the latest launch must have left."""
        faults = []
        for rank, out in zip(self.group.ranks, self.tokens(slot), strict=True):
            oracle = LayerOracle(
                self.routing,
                rank=rank,
                experts=range(self.chosen.num_experts),
                intermediate=self.chosen.intermediate,
                device=self.group.device,
            )
            told = {"contender": "fused", "stage": "before"}
            verdict = oracle.check(self.payload, out.view(torch.bfloat16), **told)
            faults += [f"rank {rank} tokens: {verdict.detail}"] * (not verdict.passed)
            faults += queue_faults(self.group, rank)
        return faults
