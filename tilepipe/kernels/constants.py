"""What a communication kernel is compiled for; equal constants, equal code.

Knows nothing of addresses or of how often a kernel runs.
"""

from dataclasses import dataclass

from tilepipe.config import limits
from tilepipe.config.choices import Copy, Granularity

__all__ = ["Constants"]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Sizes and choices that are fixed in a kernel."""

    num_ranks: int
    num_experts_per_rank: int
    num_topk: int
    row_bytes: int  # of a token row, a multiple of 16
    granularity: Granularity
    by_rank: bool = False  # home waits for whole source ranks instead of tokens
    num_chunks: int = 1  # pieces in which a row comes home
    num_parts: int = 1  # of a token that are waited for and reduced one by one
    copy: Copy = Copy.simt
    num_warps: int = 16  # of a CTA
    num_loads: int = 14  # SIMT: 16-byte loads that a lane has in flight
    num_stages: int = 3  # TMA: pieces of a row that a warp's ring holds
    stage_bytes: int = limits.STAGE_BYTES  # TMA: room of a stage
    flag_batch: int = 4  # rows of a warp whose flags share one release fence
    paced: bool = False  # links are throttled and flags delayed

    @property
    def num_pieces(self) -> int:
        """Pieces that a row is copied in, each of which fits a stage."""
        return limits.num_pieces(self.row_bytes, self.stage_bytes)

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece, a multiple of 16; the last one may be shorter."""
        return limits.piece_bytes(self.row_bytes, self.stage_bytes)

    @property
    def part_bytes(self) -> int:
        """Bytes of a part of a row."""
        assert self.row_bytes % (self.num_parts * 16) == 0, "parts of unlike size"
        return self.row_bytes // self.num_parts

    @property
    def num_experts(self) -> int:
        return self.num_experts_per_rank * self.num_ranks
