"""How much symmetric memory a rank of the host executor reserves, and for what.

Knows nothing of launches.
"""

from dataclasses import dataclass

from tilepipe.fabric.host import ArraySpec, heap_bytes
from tilepipe.host.buffers import dispatch_specs, home_specs
from tilepipe.host.protocol import gate_specs
from tilepipe.schedule.layout import row_capacity
from tilepipe.schedule.settings import PlanSettings

__all__ = ["Shape", "capacity_of", "specs_of", "symmetric_bytes"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes that decide what is allocated, equal on all ranks; 0 where an operation has no use."""

    max_tokens: int  # of any rank
    num_tokens: int  # of the whole group
    dispatch_hidden: int = 0  # elements of a dispatched row
    home_hidden: int = 0  # elements of a row that returns
    tile_n: int = 256
    capacity_factor: float | None = None
    spare: bool = False  # keep spare buffers for Form.gemm_contended

    @property
    def suffixes(self) -> tuple[str, ...]:
        """What the names of the buffers end with, the ones in use first."""
        return ("", "_spare") if self.spare else ("",)


def symmetric_bytes(settings: PlanSettings, shape: Shape) -> int:
    """Bytes that each rank reserves."""
    return heap_bytes(specs_of(settings, shape), settings.num_ranks)


def capacity_of(settings: PlanSettings, shape: Shape) -> int:
    """Receive rows that each rank has room for."""
    return row_capacity(
        settings, num_tokens=shape.num_tokens, capacity_factor=shape.capacity_factor
    )


def specs_of(settings: PlanSettings, shape: Shape) -> dict[str, ArraySpec]:
    """All symmetric arrays of a rank."""
    rows = capacity_of(settings, shape)
    specs = gate_specs(settings.num_ranks, settings.num_experts)
    for suffix in shape.suffixes:
        specs |= dispatch_specs(settings, rows=rows, hidden=shape.dispatch_hidden, suffix=suffix)
        specs |= home_specs(
            settings, max_tokens=shape.max_tokens, hidden=shape.home_hidden, suffix=suffix
        )
    return specs
