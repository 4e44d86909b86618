"""In which order the blocks of a tile are staged, and in which buffers.

Knows nothing of CuTe and barriers, and of where blocks go from there.
"""

from dataclasses import dataclass
from typing import Any

from tilepipe.kernels.gemm.plan import BLOCK_M, STAGED_COLUMNS, STAGING_BUFFERS, KernelPlan

__all__ = ["StagedBlock", "buffer_of", "staged_blocks", "turn_of"]


@dataclass(frozen=True)
class StagedBlock:
    """64 rows x 64 columns of a tile."""

    row: int  # of the tile, at which it begins
    column: int
    member: int  # warpgroup of the tile
    turn: int  # buffer of the warpgroup


def turn_of(plan: KernelPlan, i: int, part: int) -> int:
    """Which buffer of its warpgroup takes a part of block i.

    Buffers take turns through all blocks of a tile: a store gives its buffer back only once the
    next one has started, so the next one must not need it.
    """
    return (i * (plan.out_tile_n // STAGED_COLUMNS) + part) % STAGING_BUFFERS


def staged_blocks(plan: KernelPlan) -> tuple[StagedBlock, ...]:
    """The blocks of a tile in the order in which its warpgroups stage them."""
    return tuple(
        StagedBlock(
            row=(i * plan.groups_per_tile + member) * BLOCK_M,
            column=part * STAGED_COLUMNS,
            member=member,
            turn=turn_of(plan, i, part),
        )
        for i in range(plan.blocks_per_group)
        for part in range(plan.out_tile_n // STAGED_COLUMNS)
        for member in range(plan.groups_per_tile)
    )


def buffer_of(plan: KernelPlan, block: StagedBlock, count: Any) -> Any:
    """Buffer of a block of the count-th tile of a CTA."""
    group = count % 2 if plan.is_ping_pong else block.member
    return group * STAGING_BUFFERS + block.turn
