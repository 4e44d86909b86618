"""Which tuning the grouped GEMM takes for a shape: one small table.

Knows nothing of CuTe and torch. The times are of `benchmarks/gemm_peers.py`, 32 experts with equal
rows (H200, 2026-11). Clusters of two were never ahead: 17 to 24 % behind with 128 rows an expert,
where one of two CTAs has no rows, 1 to 2 % with 1024.
"""

from dataclasses import dataclass

from tilepipe.config.choices import StoreMode
from tilepipe.kernels.gemm.choices import Consumers
from tilepipe.kernels.gemm.plan import MAX_SUMS, GemmTuning

__all__ = ["DEFAULTS", "Default", "default_tuning", "tuning_of_tile"]


@dataclass(frozen=True, kw_only=True)
class Default:
    """The tuning of shapes with so many rows an expert that has any, or more, and so long a K."""

    rows_per_expert: int
    k: int
    tuning: GemmTuning
    why: str


# M tiles that walk along N together where nothing waits for rows: 1 % ahead of 8 at 32 768 rows by
# zipf's law and K 2048, within 0.5 % of it on eight other shapes. Fused launches open with the rows
# of those tiles, twice as many of them, and keep 8.
_RASTER_ALONE = 16

# The first that fits is taken.
DEFAULTS = (
    Default(
        rows_per_expert=64,
        k=0,
        tuning=GemmTuning(tile_m=128, tile_n=256, raster_m=_RASTER_ALONE),
        why="most products a byte: first or within 1 % of it on nine shapes, uniform and zipf",
    ),
    Default(
        rows_per_expert=0,
        k=0,
        tuning=GemmTuning(tile_m=64, tile_n=256, consumers=Consumers.ping_pong),
        why="skinny experts: 455 us, the next 460 (1024 x 7168 x 4096)",
    ),
)


def default_tuning(*, num_rows: int, num_filled_experts: int, k: int) -> GemmTuning:
    """The tuning for `num_rows` rows of all experts that have any."""
    mean = num_rows / max(num_filled_experts, 1)
    for default in DEFAULTS:
        if mean >= default.rows_per_expert and k >= default.k:
            return default.tuning
    raise AssertionError("the last default fits every shape")


def tuning_of_tile(
    tile_m: int, tile_n: int, *, store: StoreMode | None = None, alone: bool = False
) -> GemmTuning:
    """The tuning of a tile that was chosen; `store` None: by TMA, which was faster everywhere.

    Ping-pong wherever one warpgroup can hold the tile. `alone`: no fused launch takes it.
    """
    fits_one = tile_m * tile_n // 128 <= MAX_SUMS
    return GemmTuning(
        tile_m=tile_m,
        tile_n=tile_n,
        consumers=Consumers.ping_pong if fits_one else Consumers.cooperative,
        store=store or StoreMode.tma,
        raster_m=_RASTER_ALONE if alone else GemmTuning.raster_m,
    )
