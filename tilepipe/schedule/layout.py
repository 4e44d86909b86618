"""Where every row lands: counts, expert-major receive layout, tiles and GEMM hand-out.

Knows nothing of sends and their order.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Layout
from tilepipe.schedule.settings import PlanSettings

__all__ = [
    "ReceiveLayout",
    "check_capacity",
    "count_rows",
    "first_rows",
    "least_capacity_factor",
    "make_handout",
    "make_layout",
    "overflow_sentence",
    "row_capacity",
    "tile_capacity",
]


def count_rows(
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk), -1 = dropped slot
    num_experts: int,
) -> NDArray[np.int32]:  # (num_experts,)
    """Rows that one source rank sends to each expert.

    Raises ValueError when an id lies outside -1 .. num_experts - 1.
    """
    ids = topk_idx.reshape(-1)
    if ids.size and (int(ids.min()) < -1 or int(ids.max()) >= num_experts):
        bad = int(ids.min()) if int(ids.min()) < -1 else int(ids.max())
        raise ValueError(
            f"topk_idx holds {bad}: allowed is -1 (dropped) or 0..{num_experts - 1}; "
            "correct the routing or workload.num_experts"
        )
    return np.bincount(ids[ids >= 0], minlength=num_experts).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class ReceiveLayout:
    """Receive rows of one rank: expert-major, inside an expert by (source rank, token)."""

    rank: int
    expert_rows: NDArray[np.int32]  # (num_experts_per_rank,) rows that arrive
    expert_first_row: NDArray[np.int32]  # (num_experts_per_rank + 1,) last one = extent
    tiles: NDArray[np.int32]  # (num_tiles, 3): local expert, first row, valid rows; hand-out order
    expert_first_tile: NDArray[np.int32]  # (num_experts_per_rank + 1,) prefix sum of tiles

    @property
    def num_rows(self) -> int:
        """Rows that arrive, gaps of the padded layout not counted."""
        return int(self.expert_rows.sum())

    @property
    def extent(self) -> int:
        """Rows from the first slot to the last, gaps counted."""
        return int(self.expert_first_row[-1])

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)

    def held_rows(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """M tile and receive row of every row that arrives, in hand-out order of the tiles."""
        first, valid = self.tiles[:, 1].astype(np.int64), self.tiles[:, 2].astype(np.int64)
        tile_of = np.repeat(np.arange(self.num_tiles, dtype=np.int64), valid)
        within = np.arange(len(tile_of)) - (np.cumsum(valid) - valid)[tile_of]
        return tile_of, first[tile_of] + within


def first_rows(
    counts: NDArray[np.int32],  # (num_ranks, num_experts): rows from source to expert
    settings: PlanSettings,
) -> NDArray[np.int64]:  # (num_ranks, num_experts_per_rank + 1)
    """First receive row of each expert on its rank; the last column is the rank's extent.

    64 bits: an extent past 2**31 must reach check_capacity as it is.
    """
    rows = counts.sum(axis=0, dtype=np.int64).reshape(settings.num_ranks, -1)
    if settings.layout is Layout.padded:
        rows = -(-rows // settings.tile_m) * settings.tile_m
    offsets = np.zeros((settings.num_ranks, rows.shape[1] + 1), np.int64)
    np.cumsum(rows, axis=1, out=offsets[:, 1:])
    return offsets


def make_layout(
    rank: int,
    counts: NDArray[np.int32],  # (num_ranks, num_experts)
    settings: PlanSettings,
) -> ReceiveLayout:
    """Receive layout of `rank` from the exchanged counts."""
    num_local = settings.num_experts_per_rank
    local = counts[:, rank * num_local : (rank + 1) * num_local]
    expert_rows = local.sum(axis=0, dtype=np.int32)
    expert_first_row = first_rows(counts, settings)[rank].astype(np.int32)
    tiles_of = -(-expert_rows // settings.tile_m)
    expert_first_tile = np.zeros(num_local + 1, np.int32)
    np.cumsum(tiles_of, out=expert_first_tile[1:])
    expert = np.repeat(np.arange(num_local, dtype=np.int32), tiles_of)
    within = np.arange(len(expert), dtype=np.int32) - expert_first_tile[expert]
    first = expert_first_row[expert] + within * settings.tile_m
    valid = np.minimum(expert_rows[expert] - within * settings.tile_m, settings.tile_m)
    return ReceiveLayout(
        rank=rank,
        expert_rows=expert_rows,
        expert_first_row=expert_first_row,
        tiles=np.stack([expert, first, valid], axis=1).astype(np.int32),
        expert_first_tile=expert_first_tile,
    )


def make_handout(
    layout: ReceiveLayout, settings: PlanSettings
) -> NDArray[np.int32]:  # (num_tiles * num_n_tiles, 2): M tile, N tile
    """Order in which output tiles are handed out.

    Up to `raster_m` M tiles of one expert form a group that walks along N together, so the B tiles
    of a chunk stay in cache for the group and its A rows for the walk. N tiles of one chunk of one
    M tile come back to back: a chunk can leave as soon as it is whole.
    """
    num_m, num_n = layout.num_tiles, settings.num_n_tiles
    expert = layout.tiles[:, 0]
    within = np.arange(num_m, dtype=np.int64) - layout.expert_first_tile[expert]
    m_tile = np.repeat(np.arange(num_m, dtype=np.int64), num_n)
    n_tile = np.tile(np.arange(num_n, dtype=np.int64), num_m)
    chunk = np.array([settings.chunk_of_n_tile(n) for n in range(num_n)])[n_tile]
    group = within // settings.raster_m
    order = np.lexsort((n_tile, m_tile, chunk, group[m_tile], expert[m_tile]))
    return np.stack([m_tile[order], n_tile[order]], axis=1).astype(np.int32)


def row_capacity(
    settings: PlanSettings,
    *,
    num_tokens: int,  # of the whole group
    capacity_factor: float | None,
) -> int:
    """Receive rows to reserve on every rank, equal on all ranks.

    Worst case: every token of every rank picks as many experts here as it can. With a factor: that
    multiple of the mean, num_tokens x num_topk / num_ranks. Both leave room for the padded layout.
    """
    num_local = settings.num_experts_per_rank
    rows = num_tokens * min(settings.num_topk, num_local)
    if capacity_factor is not None:
        # As typed, in decimals: a product of floats may come to lie past a whole row, or before it.
        typed = Fraction(str(capacity_factor))
        rows = min(rows, ceil(typed * num_tokens * settings.num_topk / settings.num_ranks))
    if settings.layout is Layout.padded:
        rows += num_local * (settings.tile_m - 1)
    return rows


def least_capacity_factor(
    settings: PlanSettings,
    *,
    num_tokens: int,  # of the whole group; some
    rows: int,  # extent of the fullest rank
) -> float:
    """The smallest factor of three decimals with which `row_capacity` holds that many rows."""
    gaps = settings.num_experts_per_rank * (settings.tile_m - 1)
    wanted = rows - (gaps if settings.layout is Layout.padded else 0)
    # Rows are rounded up: the factor must lead past one row less.
    least = (wanted - 1) * 1000 * settings.num_ranks // (num_tokens * settings.num_topk) + 1
    return max(1, least) / 1000


def tile_capacity(settings: PlanSettings, rows: int) -> int:
    """M tiles to reserve counters for when a rank holds at most `rows` receive rows."""
    return rows // settings.tile_m + settings.num_experts_per_rank


def check_capacity(
    counts: NDArray[np.int32],  # (num_ranks, num_experts)
    settings: PlanSettings,
    capacity: int,
) -> None:
    """Refuse counts that overflow some rank's receive rows; every rank finds the same answer.

    Raises ValueError before anything is sent.
    """
    extents = first_rows(counts, settings)[:, -1]
    worst = int(extents.argmax())
    if int(extents[worst]) > capacity:
        raise ValueError(overflow_sentence(capacity, worst, int(extents[worst])))


def overflow_sentence(capacity: int, rank: int, rows: int) -> str:
    """Why a launch is refused whose rows some rank has no room for."""
    return (
        f"kernel.capacity_factor gives {capacity} receive rows a rank, but rank {rank} would "
        f"receive {rows}; raise it, or type kernel.capacity_factor=null for the worst case"
    )
