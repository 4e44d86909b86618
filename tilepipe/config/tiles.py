"""Tiles that the grouped GEMM of a GPU has code for, so that others are refused in time.

Knows nothing of that GEMM; the kernel's own plan refuses the same ones, which a test compares.
"""

from collections.abc import Iterable

from tilepipe.config.choices import Fabric, Operation
from tilepipe.config.refuse import require
from tilepipe.config.schemas import Config

__all__ = ["GEMM_TILES", "check_tiles"]

# Rows of a tile -> columns that it may have. One warpgroup takes blocks of 64 rows, two take 128;
# a thread holds 192 sums, and shared memory two stages.
GEMM_TILES = {
    64: (64, 128, 192, 256),
    128: (64, 128, 192, 256),
    192: (64, 128),
    256: (64, 128, 192),
    320: (64,),
    384: (64, 128),
    512: (64,),
    640: (64,),
}
# Gate and up lie side by side in a tile: pieces of 64 columns of each.
_GATED_STEP = 128
_WITHOUT_GEMM = (Operation.dispatch, Operation.combine)


def check_tiles(config: Config) -> None:
    """Refuse a tile that no kernel has; without a GEMM, and on the host, every tile will do."""
    if config.launch.fabric is Fabric.host or config.operation in _WITHOUT_GEMM:
        return
    step = _GATED_STEP if config.operation is Operation.moe_layer else 1
    tiles = {
        rows: held
        for rows, columns in GEMM_TILES.items()
        if (held := [count for count in columns if count % step == 0])
    }
    tile_m, tile_n = config.kernel.tile_m, config.kernel.tile_n
    allowed = f"a GPU has tiles of {_listed(tiles)} rows; use one of them, or type hardware=cpu"
    require(tile_m in tiles, "kernel.tile_m", tile_m, allowed)
    allowed = (
        f"with kernel.tile_m={tile_m} a GPU has tiles of {_listed(tiles[tile_m])} columns; use one "
        "of them, or type hardware=cpu"
    )
    require(tile_n in tiles[tile_m], "kernel.tile_n", tile_n, allowed)


def _listed(numbers: Iterable[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
