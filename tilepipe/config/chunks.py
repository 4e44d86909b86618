"""Chunks in which rows leave a GEMM and go home: how many there can be, and what needs them.

Knows nothing of Hydra and of which GPU is present.
"""

from tilepipe.config.choices import Granularity, Push, Walk
from tilepipe.config.refuse import require
from tilepipe.config.schemas import Config, HomeKernel

__all__ = ["check_chunks"]


def check_chunks(config: Config, kernel: HomeKernel) -> None:
    """Pieces in which rows are made and go home."""
    hidden, chunks = config.workload.hidden, kernel.num_chunks
    tiles = -(-hidden // kernel.tile_n)
    cut = f"workload.hidden={hidden} in tiles of {kernel.tile_n} columns has {tiles}"
    allowed = f"{cut}; choose 1..{tiles}, or null" if tiles > 1 else f"{cut}; choose 1, or null"
    require(chunks is None or 1 <= chunks <= tiles, "kernel.num_chunks", chunks, allowed)
    for key, value, one_by_one in (
        ("push", kernel.push, kernel.push is Push.epilogue),
        ("walk", kernel.walk, kernel.walk is Walk.chunk),
    ):
        granularity = kernel.granularity
        allowed = (
            f"chunks of rows go home one by one, and kernel.granularity={granularity.name} waits "
            "for whole rows; type kernel.granularity=tile, or another kernel." + key
        )
        by_chunk = not one_by_one or granularity is Granularity.tile
        require(by_chunk, f"kernel.{key}", value, allowed)
