"""What every operation sets up on a rank of the host executor.

Knows nothing of any one operation, of oracles, files and tables.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Operation
from tilepipe.config.schemas import (
    CombineKernel,
    Config,
    GemmCombineKernel,
    GroupedGemmKernel,
)
from tilepipe.fabric.host import HeapPlace
from tilepipe.host.delays import NO_DELAYS, Delays
from tilepipe.host.gemm import GroupedGemm
from tilepipe.host.launch import Stamps
from tilepipe.host.memory import Shape
from tilepipe.host.rank import HostRank
from tilepipe.schedule.layout import count_rows, first_rows
from tilepipe.schedule.settings import PlanSettings, num_chunks_of
from tilepipe.workload import payload, shapes
from tilepipe.workload.routing import Routing, draw

__all__ = [
    "GATE_LAUNCH",
    "Components",
    "Memory",
    "Session",
    "computing_stage",
    "plan_settings",
    "routing_of",
    "shape_of",
    "whole_launch",
]

# Payload number of the launches before timing; timed ones count on from it.
GATE_LAUNCH = 1

_BF16_BYTES = 2

# Component of a launch -> (start_ns, duration_ns).
Components = dict[str, tuple[int, int]]


def plan_settings(config: Config) -> PlanSettings:
    """The plan settings that a configuration asks for."""
    kernel, workload = config.kernel, config.workload
    gemm = shapes.gemm_shape(workload, config.operation)
    num_n_tiles = -(-gemm.n // kernel.tile_n) if gemm else 1
    num_chunks = num_n_tiles
    if config.operation is Operation.gemm_combine:
        num_chunks = num_chunks_of(workload.hidden * _BF16_BYTES, kernel.tile_n * _BF16_BYTES)
    chosen: dict[str, Any] = {}
    if not isinstance(kernel, GroupedGemmKernel):
        chosen |= {"granularity": kernel.granularity, "order": kernel.order}
    if isinstance(kernel, CombineKernel | GemmCombineKernel):
        chosen |= {"home_granularity": kernel.home_granularity}
    return PlanSettings(
        num_ranks=config.launch.num_ranks,
        num_experts=workload.num_experts,
        num_topk=workload.num_topk,
        tile_m=kernel.tile_m,
        num_n_tiles=num_n_tiles,
        num_chunks=num_chunks,
        layout=kernel.layout,
        seed=config.routing.seed,
        **chosen,
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What an operation stores at its peers; 0 where it has no use for a part."""

    dispatch_hidden: int = 0  # elements of a dispatched row
    home_hidden: int = 0  # elements of a row that returns
    spare: bool = False  # a second set, for communication that must not be read


def routing_of(config: Config) -> Routing:
    """The routing that a configuration asks for; raises what `draw` raises."""
    return draw(
        config.routing,
        num_ranks=config.launch.num_ranks,
        num_tokens=config.workload.num_tokens,
        num_experts=config.workload.num_experts,
        num_topk=config.workload.num_topk,
    )


def shape_of(config: Config, routing: Routing, memory: Memory) -> Shape:
    """Sizes of the symmetric memory, equal on all ranks."""
    kernel, tokens = config.kernel, [len(ids) for ids in routing.topk_idx]
    return Shape(
        max_tokens=max(tokens),
        num_tokens=sum(tokens),
        dispatch_hidden=memory.dispatch_hidden,
        home_hidden=memory.home_hidden,
        tile_n=kernel.tile_n,
        capacity_factor=None if isinstance(kernel, GroupedGemmKernel) else kernel.capacity_factor,
        spare=memory.spare,
    )


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
        """Draw the routing and meet the peers; raises what `draw` and `HostRank` raise."""
        launch = config.launch
        self.config, self.rank = config, rank
        self.routing = routing_of(config)
        self.settings = plan_settings(config)
        self.host = HostRank(
            place,
            rank=rank,
            settings=self.settings,
            shape=shape_of(config, self.routing, memory),
            watchdog_s=launch.watchdog_ms / 1e3,
            start_limit_s=launch.time_limit_s,
        )
        self.host.delays = delays
        # Rows from source rank to expert, of all ranks.
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
        where, rank, token, slot = self.host.received_homes()
        rows[where] = payload.row_bits(launch, rank, token, rows.shape[1], slot=slot)

    def gemm(self) -> GroupedGemm:
        """The grouped GEMM over this rank's experts."""
        shape = shapes.gemm_shape(self.config.workload, self.config.operation)
        assert shape is not None, "an operation without a GEMM"
        num_local = self.settings.num_experts_per_rank
        experts = range(self.rank * num_local, (self.rank + 1) * num_local)
        return GroupedGemm(
            [payload.expert_weights(expert, shape.n, shape.k) for expert in experts],
            tile_n=self.config.kernel.tile_n,
        )

    def receive_buffer(self, columns: int) -> NDArray[np.uint16]:
        """Private rows beside the receive rows in use, (extent, columns) bf16 bits."""
        return np.empty((self.extent, columns), np.uint16)

    def home_buffer(self, columns: int) -> NDArray[np.uint16]:
        """One row per token of this rank, (num_tokens, columns) bf16 bits."""
        return np.empty((self.num_tokens, columns), np.uint16)

    def counts(self) -> dict[str, int]:
        """What the plan and the routing say of this point; totals are over all ranks."""
        plan, routing = self.host.current_plan, self.routing
        row_bytes = shapes.row_bytes(self.config.workload)
        rows = self._rows_between.sum(axis=0, dtype=np.int64)
        counts = {
            "num_tokens": self.num_tokens,
            "sent_rows": plan.num_sent,
            "recv_rows": plan.layout.num_rows,
            "num_tiles": plan.layout.num_tiles,
            "num_tickets": len(plan.tickets),
            "heap_bytes": self.host.heap.num_bytes,
            "all_rows": int(rows.sum()),
            "max_expert_rows": int(rows.max(initial=0)),
            "max_rank_rows": int(rows.reshape(self.settings.num_ranks, -1).sum(axis=1).max()),
            "logical_bytes": shapes.logical_bytes(routing, row_bytes=row_bytes).total_bytes,
            "dedup_bytes": shapes.dedup_bytes(routing, row_bytes=row_bytes).total_bytes,
            "wire_bytes": shapes.wire_bytes(routing, row_bytes=row_bytes).total_bytes,
        }
        shape = shapes.gemm_shape(self.config.workload, self.config.operation)
        if shape is not None:
            counts["flops"] = shapes.grouped_gemm_flops(int(rows.sum()), shape)
        return counts


def whole_launch(stamps: Stamps) -> Components:
    """Components of a launch that is an operation of its own, plan included."""
    return {
        "e2e": (stamps.start_ns, stamps.end_ns - stamps.start_ns),
        "plan": (stamps.start_ns, stamps.planned_ns - stamps.start_ns),
    }


def computing_stage(stamps: Stamps) -> Components:
    """The computing thread alone: what the GEMM takes, whatever runs beside it."""
    return {"stage": (stamps.planned_ns, stamps.computed_ns - stamps.planned_ns)}
