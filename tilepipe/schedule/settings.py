"""What a Plan depends on beside the routing.

Knows nothing of configuration files; an experiment fills it in.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order, Push, Walk

__all__ = [
    "MIN_CHUNK_BYTES",
    "TICKET_ROWS",
    "PlanSettings",
    "home_chunks_of",
    "num_chunks_of",
]

# A communication CTA takes this many rows of one run at a time.
TICKET_ROWS = 16

# Pieces of 3.5 KiB and more cross memory and link at full rate, 2 KiB pieces lose 14 % (H200).
MIN_CHUNK_BYTES = 3584
_MAX_SENT_CHUNKS = 4


def num_chunks_of(row_bytes: int, tile_bytes: int) -> int:
    """N chunks of one row of GEMM -> combine: as many as keep each at MIN_CHUNK_BYTES or more.

    A chunk is whole N tiles, `tile_bytes` each but for the last, so the smallest one decides.
    """
    num_n_tiles = -(-row_bytes // tile_bytes)
    for num_chunks in range(min(row_bytes // MIN_CHUNK_BYTES, num_n_tiles), 1, -1):
        ends = [-(-chunk * num_n_tiles // num_chunks) for chunk in range(num_chunks + 1)]
        edges = [min(end * tile_bytes, row_bytes) for end in ends]
        if min(b - a for a, b in pairwise(edges)) >= MIN_CHUNK_BYTES:
            return num_chunks
    return 1


def home_chunks_of(row_bytes: int, tile_bytes: int, *, push: Push | None) -> int:
    """Chunks of a row where nobody has chosen a number.

    Tiles that are sent as they are have equal chunks, up to 4: each more lets more of the reduction
    run beside the GEMM and reads A once more. Of 14 336 bytes 2 and 4 chunks were equally fast, 7
    of 2 KiB 3 % slower, 14 of 1 KiB 11 % (H200, 2026-11).
    """
    if push is not Push.epilogue:
        return num_chunks_of(row_bytes, tile_bytes)
    if row_bytes % tile_bytes:
        return 1
    fitting = (
        count
        for count in range(_MAX_SENT_CHUNKS, 1, -1)
        if row_bytes // tile_bytes % count == 0 and row_bytes // count >= MIN_CHUNK_BYTES
    )
    return next(fitting, 1)


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Constants that every rank of a launch must share."""

    num_ranks: int
    num_experts: int  # whole group, a multiple of num_ranks
    num_topk: int
    tile_m: int = 128
    num_n_tiles: int = 1  # output tiles of the GEMM along N
    # Pieces of a row's N tiles that the GEMM completes one after the other: what GEMM -> combine
    # pushes at a time; equal to num_n_tiles where nothing waits for a chunk.
    num_chunks: int = 1
    raster_m: int = 8  # M tiles that share the B tiles held in L2
    walk: Walk = Walk.expert  # of GEMM -> combine
    layout: Layout = Layout.padded
    granularity: Granularity = Granularity.tile
    home_granularity: HomeGranularity = HomeGranularity.token
    order: Order = Order.edf
    seed: int = 0
    # num_n_tiles and num_chunks of the second GEMM, where an operation has two; see `homeward`.
    second_gemm: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.num_experts % self.num_ranks:
            raise ValueError(
                f"workload.num_experts={self.num_experts}: not divisible by "
                f"launch.num_ranks={self.num_ranks}; choose a divisor of it"
            )
        assert 1 <= self.num_chunks <= self.num_n_tiles

    @property
    def num_experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def homeward(self) -> "PlanSettings":
        """Settings of the GEMM whose rows go home: of the second one, where there are two."""
        if self.second_gemm is None:
            return self
        num_n_tiles, num_chunks = self.second_gemm
        return replace(self, num_n_tiles=num_n_tiles, num_chunks=num_chunks, second_gemm=None)

    @property
    def num_parts(self) -> int:
        """Parts of a token that GEMM -> combine reduces one by one: chunks that are early."""
        return self.homeward.num_chunks if self.walk is Walk.chunk else 1

    def chunk_of_n_tile(self, n_tile: int) -> int:
        """The chunk that output tile column `n_tile` belongs to; sizes differ by at most one."""
        return n_tile * self.num_chunks // self.num_n_tiles
