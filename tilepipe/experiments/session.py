"""What every operation sets up on a rank of the host executor.

Knows nothing of any one operation, of oracles, files and tables.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Layout
from tilepipe.config.schemas import Config
from tilepipe.experiments.setting import (
    Components,
    Memory,
    counts_of,
    placed_routing,
    plan_settings,
    shape_of,
)
from tilepipe.fabric.host import HeapPlace
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Stamps
from tilepipe.host.layer import HostLayer
from tilepipe.schedule.layout import ReceiveLayout, count_rows, first_rows, make_layout
from tilepipe.workload import payload, shapes

__all__ = ["Session", "computing_stage", "whole_launch"]


class Session:
    """Routing, memory and weights of one rank, for the life of a point."""

    def __init__(
        self,
        config: Config,
        memory: Memory,
        *,
        rank: int,
        place: HeapPlace,
        delays: Delays = NO_DELAYS,
    ) -> None:
        """Draw and place the routing and meet the peers.

        Raises what `draw`, `place` and `HostLayer` raise.
        """
        launch = config.launch
        self.config, self.rank = config, rank
        self.placed = placed_routing(config)
        self.routing = self.placed.physical
        self.settings = plan_settings(config, self.placed)
        self.host = HostLayer(
            place,
            rank=rank,
            settings=self.settings,
            shape=shape_of(config, self.routing, memory),
            watchdog_s=launch.watchdog_ms / 1e3,
            start_limit_s=launch.time_limit_s,
        )
        self.host.delays = delays
        # Rows from source rank to physical expert, of all ranks.
        self._rows_between = np.stack(
            [count_rows(ids, self.settings.num_experts) for ids in self.routing.topk_idx]
        )
        # Receive rows that this rank uses; the symmetric buffers are larger, for any routing.
        self.extent = int(first_rows(self._rows_between, self.settings)[rank, -1])
        self.host.set_routing(self.topk_idx, self.topk_weights)

    @property
    def topk_idx(self) -> NDArray[np.int32]:  # (num_tokens, num_topk) of this rank
        return self.routing.topk_idx[self.rank]

    @property
    def topk_weights(self) -> NDArray[np.float32]:  # (num_tokens, num_topk)
        return self.routing.topk_weights[self.rank]

    @property
    def num_tokens(self) -> int:
        return len(self.topk_idx)

    def rows_to_send(self, launch: int, hidden: int) -> NDArray[np.uint16]:
        """Input rows of this rank in a launch, (num_tokens, hidden) bf16 bits."""
        return payload.row_bits(launch, self.rank, np.arange(self.num_tokens), hidden)

    def exchange_homes(self) -> None:
        """Dispatch rows without payload: afterwards every receive row knows its way home."""
        self.host.heap.barrier()
        self.host.dispatch(np.zeros((self.num_tokens, 0), np.uint16))

    def fill_received(self, launch: int, rows: NDArray[np.uint16]) -> None:
        """Write payload into receive rows, as if an expert had made it: told by home and slot."""
        where = self.host.received_homes()[0]
        rows[where] = self.received_rows(launch, rows.shape[1])

    def received_rows(self, launch: int, columns: int) -> NDArray[np.uint16]:
        """The same rows without gaps, by expert, source rank and token: (num_rows, columns)."""
        _, rank, token, slot = self.host.received_homes()
        return payload.row_bits(launch, rank, token, columns, slot=slot)

    def weights(self, number: int = 0) -> list[NDArray[np.float32]]:  # (N, K) each, exact in bf16
        """Weights of this rank's physical experts, of the operation's first or second GEMM."""
        shape = shapes.gemm_shapes(self.config.workload, self.config.operation)[number]
        held = self.placed.placement.experts_on(self.rank).tolist()
        # One array an expert, shared by its replicas here; no row meets those of expert -1.
        weights = {
            expert: payload.expert_weights(expert, shape.n, shape.k) for expert in sorted(set(held))
        }
        return [weights[expert] for expert in held]

    def gemm(self) -> GroupedGemm:
        """The grouped GEMM over this rank's physical experts."""
        return GroupedGemm(self.weights(), tile_n=self.config.kernel.tile_n)

    def packed_layout(self) -> ReceiveLayout:
        """Where rows lie that this rank receives, no gaps between experts."""
        packed = replace(self.settings, layout=Layout.packed)
        return make_layout(self.rank, self._rows_between, packed)

    def receive_buffer(self, columns: int) -> NDArray[np.uint16]:
        """Private rows beside the receive rows in use, (extent, columns) bf16 bits."""
        return np.empty((self.extent, columns), np.uint16)

    def home_buffer(self, columns: int) -> NDArray[np.uint16]:
        """One row per token of this rank, (num_tokens, columns) bf16 bits."""
        return np.empty((self.num_tokens, columns), np.uint16)

    def counts(self) -> dict[str, int]:
        """What the plan and the routing say of this point; totals are over all ranks."""
        return counts_of(
            self.config,
            self.placed,
            self._rows_between,
            self.host.current_plan,
            heap_bytes=self.host.heap.num_bytes,
        )


def whole_launch(stamps: Stamps) -> Components:
    """Components of a launch that is an operation of its own, plan included."""
    return {
        "e2e": (stamps.start_ns, stamps.end_ns - stamps.start_ns),
        "plan": (stamps.start_ns, stamps.planned_ns - stamps.start_ns),
    }


def computing_stage(stamps: Stamps) -> Components:
    """The computing thread alone: what the GEMM takes, whatever runs beside it."""
    return {"stage": (stamps.planned_ns, stamps.computed_ns - stamps.planned_ns)}
