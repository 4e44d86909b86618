"""Which tuning the grouped GEMM takes for a shape: one small table.

Knows nothing of CuTe and torch. The times are of `benchmarks/gemm_peers.py`, 32 experts with equal
rows (H200, 2026-11). Clusters of two were never ahead: 17 to 24 % behind with 128 rows an expert,
where one of two CTAs has no rows, 1 to 2 % with 1024.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tilepipe.config.choices import StoreMode
from tilepipe.kernels.gemm.choices import Consumers
from tilepipe.kernels.gemm.plan import BLOCK_M, MAX_SUMS, GemmTuning

__all__ = ["DEFAULTS", "Default", "default_tuning", "tuning_of_tile"]


@dataclass(frozen=True, kw_only=True)
class Default:
    """The tuning of shapes with so many rows an expert that has any, or more."""

    rows_per_expert: int
    most_rows: int | None = None  # an expert; None: any number
    most_k: int | None = None  # None: any
    is_full: bool = False  # only where next to no block of a tile of 128 rows is empty
    tuning: GemmTuning
    why: str


# M tiles that walk along N together where nothing waits for rows: 1 % ahead of 8 at 32 768 rows by
# zipf's law and K 2048, within 0.5 % of it on eight other shapes. Fused launches open with the rows
# of those tiles, twice as many of them, and keep 8.
_RASTER_ALONE = 16

# The first that fits is taken.
DEFAULTS = (
    Default(
        rows_per_expert=128,
        most_rows=255,
        most_k=2048,
        is_full=True,
        tuning=GemmTuning(tile_m=128, tile_n=128, consumers=Consumers.ping_pong),
        why="full tiles, a short K: 249 and 253 us on two GPUs where 128 x 256 takes 252 and 256 "
        "(4096 x 2048 x 7168); by zipf's law, where blocks are empty, 305 against 291",
    ),
    Default(
        rows_per_expert=64,
        tuning=GemmTuning(tile_m=128, tile_n=256, raster_m=_RASTER_ALONE),
        why="most products a byte: first or within 1 % of it on nine shapes, uniform and zipf",
    ),
    Default(
        rows_per_expert=0,
        tuning=GemmTuning(tile_m=64, tile_n=256, consumers=Consumers.ping_pong),
        why="skinny experts: 455 us, the next 460 (1024 x 7168 x 4096)",
    ),
)


# Share of the blocks of all tiles that hold rows, from which on tiles count as full.
_FULL = 0.97


def default_tuning(counts: Sequence[int], *, k: int) -> GemmTuning:
    """The tuning for so many rows of each expert."""
    filled = [count for count in counts if count > 0]
    mean = sum(filled) / max(len(filled), 1)
    num_blocks = sum(-(-count // BLOCK_M) for count in filled)
    is_full = num_blocks >= _FULL * sum(2 * -(-count // (2 * BLOCK_M)) for count in filled)
    for default in DEFAULTS:
        few = default.most_rows is None or mean <= default.most_rows
        short = default.most_k is None or k <= default.most_k
        full = is_full or not default.is_full
        if mean >= default.rows_per_expert and few and short and full:
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
