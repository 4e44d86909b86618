"""Whole layers on one GPU, fused and unfused, whose tokens are checked in every value.

Imported only where there is a GPU. Knows nothing of timing and of configurations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.gpu.overlaps import KNOBS
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Layout, Order, Roles
from tilepipe.experiments.cuda.layer import expert_weights
from tilepipe.experiments.cuda.layer_oracle import LayerOracle
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.gemm.plan import GemmTuning
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.kernels.overlap.group import (
    Layer,
    ctas_alone,
    ctas_beside,
    fused_launch,
    gemm_launch,
    upload_layer,
)
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing


@dataclass(frozen=True, kw_only=True)
class ChosenLayer:
    """What a case chooses; the rest follows."""

    num_ranks: int = 1
    num_experts: int = 8
    num_topk: int = 2
    hidden: int = 512
    intermediate: int = 256
    num_chunks: int = 1  # of a row on its way home
    copy: Copy = Copy.tma
    num_ctas: int = 4
    granularity: Granularity = Granularity.tile
    home_granularity: HomeGranularity = HomeGranularity.token
    order: Order = Order.edf
    layout: Layout = Layout.padded
    roles: Roles = Roles.switch
    tuning: GemmTuning = field(default_factory=GemmTuning)
    pace_gbps: float | None = None
    pace_latency_ns: int = 0
    num_sms: int | None = None  # None: all there are
    watchdog_s: float = 2.0


class LayerCase:
    """A group, both weights of its experts and all between, for several routings in a row."""

    def __init__(self, chosen: ChosenLayer, routings: Sequence[Routing]) -> None:
        tokens = [[len(ids) for ids in routing.topk_idx] for routing in routings]
        self.chosen = chosen
        tile_n = chosen.tuning.tile_n
        num_first = -(-2 * chosen.intermediate // tile_n)
        self.group = DeviceGroup(
            PlanSettings(
                num_ranks=chosen.num_ranks,
                num_experts=chosen.num_experts,
                num_topk=chosen.num_topk,
                tile_m=chosen.tuning.tile_m,
                num_n_tiles=num_first,
                num_chunks=num_first,
                second_gemm=(-(-chosen.hidden // tile_n), chosen.num_chunks),
                layout=chosen.layout,
                granularity=chosen.granularity,
                home_granularity=chosen.home_granularity,
                order=chosen.order,
            ),
            Shape(
                max_tokens=max(map(max, tokens)),
                num_tokens=max(map(sum, tokens)),
                dispatch_hidden=chosen.hidden,
                home_hidden=chosen.hidden,
                tile_n=tile_n,
            ),
            Knobs(
                num_ctas=chosen.num_ctas,
                copy=chosen.copy,
                pace_gbps=chosen.pace_gbps,
                pace_latency_ns=chosen.pace_latency_ns,
                **KNOBS[chosen.copy],
            ),
            watchdog_s=chosen.watchdog_s,
        )
        self._bind()

    def _bind(self) -> None:
        chosen, group = self.chosen, self.group
        experts, device = range(chosen.num_experts), group.device
        sizes = (2 * chosen.intermediate, chosen.hidden), (chosen.hidden, chosen.intermediate)
        num_sms = chosen.num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self.first, self.second = (
            Layer(expert_weights(experts, n, k, device), chosen.tuning, num_sms, is_second=second)
            for (n, k), second in zip(sizes, (False, True), strict=True)
        )
        self.first = replace(self.first, epilogue=Epilogue.swiglu_concatenated)
        rows = len(group.tensor(0, Slot.recv_x))
        self.h = torch.empty(
            chosen.num_ranks, rows, chosen.intermediate, dtype=torch.bfloat16, device=device
        )
        together, alone = chosen.roles is Roles.switch, ctas_alone(group, self.first)
        self.fused = [
            fused_launch(
                *(group, self.first, self.h),
                roles=chosen.roles,
                opens=together,
                gates=together,
            ),
            fused_home_launch(group, self.second, self.h, roles=chosen.roles),
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
        return [
            self.group.tensor(rank, slot)[: len(self.routing.topk_idx[rank])].clone()
            for rank in self.group.ranks
        ]

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
            queue = int(self.group.tensor(rank, Slot.words)[int(Word.gemm_queue)])
            faults += [f"rank {rank}: the queue of tiles is left at {queue}"] * (queue != 0)
        return faults
