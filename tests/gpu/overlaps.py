"""Fused launches on one GPU whose rows, products and surroundings are checked in every value.

Imported only where there is a GPU. Knows nothing of timing and of configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tests.gpu.cases import Choice, group_of, num_sms_of, queue_faults, tokens_of
from tilepipe.config.choices import (
    Layout,
    Roles,
)
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.plan import BLOCK_M
from tilepipe.kernels.overlap.group import (
    Layer,
    ctas_alone,
    ctas_beside,
    fused_launch,
    spare_table,
    upload_layer,
)
from tilepipe.kernels.overlap.home_group import (
    fused_home_launch,
    gemm_home_launch,
    upload_home,
)
from tilepipe.measure.gate import BF16_POISON
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS
from tilepipe.workload.payload import WEIGHTS_LAUNCH, weight_scale
from tilepipe.workload.routing import Routing


@dataclass(frozen=True, kw_only=True)
class Chosen(Choice):
    """A case of one GEMM; the rest follows."""

    hidden: int = 256
    n: int = 512
    roles: Roles = Roles.fixed
    opens: bool = False
    gates: bool = False
    num_stamps: int = 0


def layer_of(chosen: Chosen, device: torch.device) -> Layer:
    """Weights of all experts."""
    weights = torch.empty(
        chosen.num_experts, chosen.n, chosen.hidden, dtype=torch.bfloat16, device=device
    )
    columns = torch.arange(chosen.n, device=device)
    for expert in range(chosen.num_experts):
        fill_rows(weights[expert], WEIGHTS_LAUNCH, expert, columns)
    weights *= weight_scale(chosen.hidden)
    return Layer(weights, chosen.tuning, num_sms_of(chosen, device))


class FusedCase:
    """A group, its layer and a poisoned output, for several routings one after the other."""

    def __init__(self, chosen: Chosen, routings: Sequence[Routing], *, wait: bool = True) -> None:
        self.chosen = chosen
        num_n_tiles = -(-chosen.n // chosen.tuning.tile_n)
        self.group = group_of(
            chosen,
            routings,
            num_n_tiles=num_n_tiles,
            num_chunks=num_n_tiles,
            dispatch_hidden=chosen.hidden,
            spare=True,
        )
        device = self.group.device
        self._num_local = chosen.num_experts // chosen.num_ranks
        self.layer = layer_of(chosen, device)
        rows = len(self.group.tensor(0, Slot.recv_x))
        self.out = torch.empty(
            chosen.num_ranks, rows, chosen.n, dtype=torch.bfloat16, device=device
        )
        self.launch = self._bound(wait=wait)

    def prepare(self, routing: Routing, payload: int) -> None:
        """Plan the next launch, write what it moves, poison what it writes."""
        self.routing, self.payload = routing, payload
        self.group.set_routing(routing)
        upload_layer(self.group, self.layer, num_gemm_ctas=ctas_beside(self.group, self.layer))
        poison(self.out)
        for rank in self.group.ranks:
            poison(self.group.tensor(rank, Slot.recv_x))
            poison(self.group.tensor(rank, Slot.row_home))
            tokens = torch.arange(len(routing.topk_idx[rank]), device=self.group.device)
            fill_rows(self.group.tensor(rank, Slot.x), payload, rank, tokens)

    def run(self) -> list[str]:
        """Open and launch; returns what is not as it must be."""
        self.group.open(exchange=True)
        self.launch()
        self.group.synchronize()
        return self.wrong()

    def spare_launch(self):
        """The launch whose rows go where nobody looks."""
        return self._bound(sending=spare_table(self.group.heap))

    def _bound(self, **how):
        chosen = self.chosen
        return fused_launch(
            *(self.group, self.layer, self.out),
            roles=chosen.roles,
            opens=chosen.opens,
            gates=chosen.gates,
            num_stamps=chosen.num_stamps,
            **how,
        )

    def wrong(self) -> list[str]:
        """Of rows, ways home, products and gaps that the latest launch must have left."""
        faults = []
        for rank in self.group.ranks:
            oracle = DeviceOracle(self.routing, rank=rank, device=self.group.device)
            layout, told = self.group.plans[rank].layout, {"contender": "fused", "stage": "before"}
            verdicts = [
                oracle.check_dispatched(
                    self.payload, self.group.tensor(rank, Slot.recv_x), layout, **told
                ),
                oracle.check_homes(self.group.tensor(rank, Slot.row_home), layout, **told),
                self._products(oracle, rank),
            ]
            faults += [
                f"rank {rank} {name}: {verdict.detail}"
                for name, verdict in zip(("rows", "homes", "products"), verdicts, strict=True)
                if not verdict.passed
            ]
            faults += self._gaps(rank)
            faults += queue_faults(self.group, rank)
        return faults

    def _products(self, oracle: DeviceOracle, rank: int):
        layout = self.group.plans[rank].layout
        return oracle.check_products(
            self.payload,
            self.out[rank],
            [int(first) for first in layout.expert_first_row[:-1]],
            experts=range(rank * self._num_local, (rank + 1) * self._num_local),
            num_k=self.chosen.hidden,
            contender="fused",
            stage="before",
        )

    def _gaps(self, rank: int) -> list[str]:
        """Output rows of nobody; where whole blocks are stored, but for those of the last one."""
        layout = self.group.plans[rank].layout
        gap = torch.ones(self.out.shape[1], dtype=torch.bool)
        height = BLOCK_M if self.chosen.layout is Layout.padded else 1
        for first, count in zip(
            layout.expert_first_row[:-1].tolist(), layout.expert_rows.tolist(), strict=True
        ):
            gap[first : first + -(-count // height) * height] = False
        touched = self.out[rank].view(torch.int16)[gap.to(self.out.device)] != BF16_POISON
        count = int(torch.count_nonzero(touched))
        return [f"rank {rank}: {count} values of no row are written"] * (count > 0)

    def outputs(self) -> np.ndarray:
        """Bits of all rows that hold something, rank after rank."""
        parts = []
        for rank in self.group.ranks:
            _, held = self.group.plans[rank].layout.held_rows()
            rows = torch.from_numpy(held).to(self.out.device)
            parts.append(self.out[rank].view(torch.int16)[rows].cpu().numpy())
        return np.concatenate(parts)


class HomeCase:
    """GEMM -> combine of a group, for several routings one after the other."""

    def __init__(self, chosen: Chosen, routings: Sequence[Routing]) -> None:
        self.chosen = chosen
        self.group = group_of(
            chosen,
            routings,
            num_n_tiles=-(-chosen.n // chosen.tuning.tile_n),
            num_chunks=chosen.num_chunks,
            home_hidden=chosen.n,
            spare=True,
        )
        self.layer = layer_of(chosen, self.group.device)
        rows = len(self.group.tensor(0, Slot.y))
        self.a = torch.empty(
            chosen.num_ranks, rows, chosen.hidden, dtype=torch.bfloat16, device=self.group.device
        )
        self.launch = fused_home_launch(
            *(self.group, self.layer, self.a),
            roles=chosen.roles,
            push=chosen.push,
            num_stamps=chosen.num_stamps,
        )
        self.multiply = gemm_home_launch(
            self.group, self.layer, self.a, num_gemm_ctas=ctas_alone(self.group, self.layer)
        )

    def prepare(self, routing: Routing, payload: int) -> None:
        """Plan the next launches, let rows know home, write what is multiplied, poison the rest."""
        self.routing, self.payload = routing, payload
        group = self.group
        group.set_routing(routing)
        num_ctas = ctas_beside(group, self.layer)
        upload_home(group, self.layer, num_gemm_ctas=num_ctas)
        group.open(exchange=True)
        group.dispatch()
        group.synchronize()
        poison(self.a)
        for rank in group.ranks:
            _, held = group.plans[rank].layout.held_rows()
            rows = torch.from_numpy(held).to(group.device)
            homes = group.tensor(rank, Slot.row_home)[rows]
            fill_rows(
                self.a[rank],
                payload,
                homes >> (TOKEN_BITS + SLOT_BITS),
                (homes >> SLOT_BITS) & ((1 << TOKEN_BITS) - 1),
                slot=homes & ((1 << SLOT_BITS) - 1),
                row_idx=rows,
            )

    def poison(self) -> None:
        for rank in self.group.ranks:
            for slot in (Slot.y, Slot.home_y, Slot.out):
                poison(self.group.tensor(rank, slot))

    def run(self) -> list[str]:
        """Open and launch; returns what is not as it must be."""
        self.poison()
        self.group.open(exchange=False)
        self.launch()
        self.group.synchronize()
        return self.wrong()

    def run_unfused(self) -> list[torch.Tensor]:
        """Outputs of the GEMM, then combine, by launches of their own."""
        self.poison()
        self.multiply()
        self.group.open(exchange=False)
        self.group.combine()
        self.group.synchronize()
        return self.outputs()

    def outputs(self) -> list[torch.Tensor]:
        """Bits of the tokens of every rank."""
        return tokens_of(self.group, self.routing, Slot.out)

    def wrong(self) -> list[str]:
        """Of tokens that the latest launch must have left."""
        faults = []
        for rank, out in zip(self.group.ranks, self.outputs(), strict=True):
            oracle = DeviceOracle(self.routing, rank=rank, device=self.group.device)
            verdict = oracle.check_gemm_combined(
                self.payload,
                out.view(torch.bfloat16),
                experts=range(self.chosen.num_experts),
                num_k=self.chosen.hidden,
                contender="fused",
                stage="before",
            )
            faults += [f"rank {rank} tokens: {verdict.detail}"] * (not verdict.passed)
            faults += queue_faults(self.group, rank)
        return faults
