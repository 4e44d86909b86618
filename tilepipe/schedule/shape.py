"""Sizes that decide how much memory a group of ranks reserves.

Knows nothing of arrays, executors and launches.
"""

from dataclasses import dataclass

from tilepipe.schedule.layout import row_capacity
from tilepipe.schedule.settings import PlanSettings

__all__ = ["Shape", "capacity_of"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that decide what is allocated, equal on all ranks; 0 where an operation has no use."""

    max_tokens: int  # of any rank
    num_tokens: int  # of the whole group
    dispatch_hidden: int = 0  # elements of a dispatched row
    home_hidden: int = 0  # elements of a row that returns
    tile_n: int = 256
    capacity_factor: float | None = None
    spare: bool = False  # keep spare buffers for communication that must not be read

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What the names of the buffers end with, the ones in use first."""
        return ("", "_spare") if self.spare else ("",)


def capacity_of(settings: PlanSettings, shape: Shape) -> int:
    """Receive rows that each rank has room for."""
    return row_capacity(
        settings, num_tokens=shape.num_tokens, capacity_factor=shape.capacity_factor
    )
