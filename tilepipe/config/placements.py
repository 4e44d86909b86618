"""Typed settings of each way to place experts on ranks.

Knows nothing of Hydra, numpy or how a placement is computed or read.
"""

from dataclasses import dataclass

from tilepipe.config.choices import PlacementRule, Replica
from tilepipe.config.refuse import NOT_TYPED, require, require_own

__all__ = [
    "PLACEMENTS",
    "BalancedPlacement",
    "ContiguousPlacement",
    "FilePlacement",
    "Placement",
    "RoundRobinPlacement",
]


@dataclass(kw_only=True)
class _Placement:
    """What every placement has."""

    rule: PlacementRule  # fixed by the option

    def __post_init__(self) -> None:
        require_own(self, "placement", "rule")


@dataclass(kw_only=True)
class ContiguousPlacement(_Placement):
    """Expert e on rank e // experts per rank."""

    rule: PlacementRule = PlacementRule.contiguous


@dataclass(kw_only=True)
class RoundRobinPlacement(_Placement):
    """Expert e on rank e % ranks."""

    rule: PlacementRule = PlacementRule.round_robin


@dataclass(kw_only=True)
class FilePlacement(_Placement):
    """The expert of each physical expert, read from a file."""

    rule: PlacementRule = PlacementRule.file
    path: str = NOT_TYPED
    layer: int | None = None  # row of the map; null: it has one
    replica: Replica = Replica.spread

    def __post_init__(self) -> None:
        super().__post_init__()
        named = self.path not in ("", NOT_TYPED)
        require(named, "placement.path", self.path, "placement=file needs placement.path=FILE")
        counted = self.layer is None or self.layer >= 0
        require(counted, "placement.layer", self.layer, "must be 0 or more, or null")


@dataclass(kw_only=True)
class BalancedPlacement(_Placement):
    """Made for the rows that the point's own routing gives each expert."""

    rule: PlacementRule = PlacementRule.balanced
    num_redundant: int  # physical experts beyond one an expert
    replica: Replica = Replica.spread

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.num_redundant
        require(count >= 0, "placement.num_redundant", count, "must be 0 or more")


Placement = ContiguousPlacement | RoundRobinPlacement | FilePlacement | BalancedPlacement

PLACEMENTS: dict[PlacementRule, type[Placement]] = {
    PlacementRule.contiguous: ContiguousPlacement,
    PlacementRule.round_robin: RoundRobinPlacement,
    PlacementRule.file: FilePlacement,
    PlacementRule.balanced: BalancedPlacement,
}
