"""How much symmetric memory a rank of the host executor reserves, and for what.

Knows nothing of launches.
"""

from tilepipe.fabric.host import ArraySpec, heap_bytes
from tilepipe.host.buffers import dispatch_specs, home_specs
from tilepipe.host.protocol import gate_specs
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape, capacity_of

__all__ = ["specs_of", "symmetric_bytes"]


def symmetric_bytes(settings: PlanSettings, shape: Shape) -> int:
    """Bytes that each rank reserves."""
    return heap_bytes(specs_of(settings, shape), settings.num_ranks)


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
