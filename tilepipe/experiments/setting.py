"""What a configuration means for plan, memory and figures, on every executor.

Knows nothing of how an operation runs, of oracles, files and tables.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Planner, Walk
from tilepipe.config.limits import MAX_PLANNED_EXPERTS
from tilepipe.config.schemas import (
    CombineKernel,
    Config,
    GroupedGemmKernel,
    HomeKernel,
)
from tilepipe.schedule.layout import count_rows, first_rows, least_capacity_factor
from tilepipe.schedule.plan import RankPlan
from tilepipe.schedule.settings import PlanSettings, home_chunks_of
from tilepipe.schedule.shape import Shape, capacity_of
from tilepipe.workload import shapes
from tilepipe.workload.place import place
from tilepipe.workload.placement import Placed
from tilepipe.workload.routing import Routing, draw, rows_of_experts

__all__ = [
    "GATE_LAUNCH",
    "Components",
    "Memory",
    "counts_of",
    "placed_routing",
    "plan_settings",
    "reserved",
    "shape_of",
]

# Payload number of the launches before timing; timed ones count on from it.
GATE_LAUNCH = 1

_BF16_BYTES = 2

# Component of a launch -> (start_ns, duration_ns).
Components = dict[str, tuple[int, int]]


def plan_settings(config: Config, placed: Placed) -> PlanSettings:
    """The plan settings that a configuration asks for; experts of a Plan are physical experts.

    Raises ValueError for more of them than the plan kernel counts, where that makes the Plan.
    """
    kernel, workload = config.kernel, config.workload
    num_physical = placed.placement.num_physical
    gemms = shapes.gemm_shapes(workload, config.operation)
    num_n_tiles, *of_second = [-(-gemm.n // kernel.tile_n) for gemm in gemms] or [1]
    num_chunks = num_n_tiles
    chosen: dict[str, Any] = {}
    if isinstance(kernel, HomeKernel):
        sizes = (workload.hidden * _BF16_BYTES, kernel.tile_n * _BF16_BYTES)
        chosen["walk"] = kernel.walk or Walk.expert
        pieces = kernel.num_chunks or home_chunks_of(*sizes, push=kernel.push)
        if of_second:
            chosen["second_gemm"] = (of_second[0], pieces)
        else:
            num_chunks = pieces
    if not isinstance(kernel, GroupedGemmKernel):
        if kernel.planner is Planner.device and num_physical > MAX_PLANNED_EXPERTS:
            raise ValueError(
                f"kernel.planner=device: the plan kernel counts at most {MAX_PLANNED_EXPERTS} "
                f"physical experts, and the placement has {num_physical}; type "
                "kernel.planner=numpy, or place fewer"
            )
        chosen |= {"granularity": kernel.granularity, "order": kernel.order}
    if isinstance(kernel, CombineKernel | HomeKernel):
        chosen |= {"home_granularity": kernel.home_granularity}
    return PlanSettings(
        num_ranks=config.launch.num_ranks,
        num_experts=num_physical,
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


def placed_routing(config: Config) -> Placed:
    """The routing that a configuration asks for, placed; raises what `draw` and `place` raise."""
    drawn = draw(
        config.routing,
        num_ranks=config.launch.num_ranks,
        num_tokens=config.workload.num_tokens,
        num_experts=config.workload.num_experts,
        num_topk=config.workload.num_topk,
    )
    return place(config.placement, drawn)


def reserved(config: Config, memory: Memory) -> tuple[PlanSettings, Shape]:
    """What says how much memory each rank reserves.

    Raises what `draw` and `place` do, and ValueError where that is not enough.
    """
    placed = placed_routing(config)
    settings, shape = plan_settings(config, placed), shape_of(config, placed.physical, memory)
    _refuse_overflow(placed.physical, settings, shape)
    return settings, shape


def _refuse_overflow(routing: Routing, settings: PlanSettings, shape: Shape) -> None:
    """Raise ValueError where `kernel.capacity_factor` leaves a rank less room than its rows take.

    Every rank finds the same at its first launch, in the same words but for the least factor.
    """
    if shape.capacity_factor is None:
        return
    counts = np.stack([count_rows(ids, settings.num_experts) for ids in routing.topk_idx])
    extents = first_rows(counts, settings)[:, -1]
    worst, capacity = int(extents.argmax()), capacity_of(settings, shape)
    rows = int(extents[worst])
    if rows <= capacity:
        return
    least = least_capacity_factor(settings, num_tokens=shape.num_tokens, rows=rows)
    raise ValueError(
        f"kernel.capacity_factor={shape.capacity_factor:g}: gives {capacity} receive rows a rank, "
        f"and rank {worst} would receive {rows}; use at least {least:g}, or null for the worst case"
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


def counts_of(
    config: Config,
    placed: Placed,
    rows_between: NDArray[np.int32],  # (num_ranks, num_physical): rows from source rank
    plan: RankPlan,
    *,
    heap_bytes: int,
) -> dict[str, int]:
    """What plan and routing say of one rank of a point; totals are over all ranks."""
    row_bytes, routing = shapes.row_bytes(config.workload), placed.physical
    rows = rows_between.sum(axis=0, dtype=np.int64)
    num_ranks = len(rows_between)
    counts = {
        "num_tokens": len(routing.topk_idx[plan.rank]),
        "sent_rows": plan.num_sent,
        "recv_rows": plan.layout.num_rows,
        "num_tiles": plan.layout.num_tiles,
        "num_tickets": len(plan.tickets),
        "heap_bytes": heap_bytes,
        "all_rows": int(rows.sum()),
        "max_expert_rows": int(rows_of_experts(placed.logical).max(initial=0)),
        "num_physical": placed.placement.num_physical,
        "max_physical_rows": int(rows.max(initial=0)),
        "max_rank_rows": int(rows.reshape(num_ranks, -1).sum(axis=1).max()),
        "logical_bytes": shapes.logical_bytes(routing, row_bytes=row_bytes).total_bytes,
        "dedup_bytes": shapes.dedup_bytes(routing, row_bytes=row_bytes).total_bytes,
        "wire_bytes": shapes.wire_bytes(routing, row_bytes=row_bytes).total_bytes,
        "dedup_wire_bytes": shapes.dedup_wire_bytes(routing, row_bytes=row_bytes).total_bytes,
    }
    gemms = shapes.gemm_shapes(config.workload, config.operation)
    if gemms:
        counts["flops"] = sum(shapes.grouped_gemm_flops(int(rows.sum()), gemm) for gemm in gemms)
    return counts
