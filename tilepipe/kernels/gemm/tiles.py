"""Cluster tiles and the order in which they are handed out: records, and where a ticket points.

Knows nothing of kernels and torch. `place_of_ticket` is written in operators that Python integers
and device integers share, so what tests run is what the device runs.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Walk
from tilepipe.schedule.layout import ReceiveLayout

__all__ = [
    "RECORD_WORDS",
    "TicketPlace",
    "TileWord",
    "counted_rows",
    "num_to_cut",
    "pack_cluster_tiles",
    "place_of_ticket",
]

# Words of a record: two vectors of 16 bytes.
RECORD_WORDS = 8


class TileWord(IntEnum):
    """Words of the record of a cluster tile: up to `cluster_m` M tiles of one expert.

    Of a tile that is handed over inside a CTA the same, but for `n_tile` in place of
    `group_place`.
    """

    first_row = 0
    valid = 1  # rows of the expert from there on, cluster_m x tile_m at most; below 0: no tile left
    expert = 2
    group_place = 3  # place among the cluster tiles that walk along N together
    n_tile = 3
    group_size = 4  # how many walk together
    m_tile = 5  # number of the first M tile, counted by the Plan
    group_end = 6  # row behind the last one of the expert
    columns = 7  # of an N tile: 0 all, 1 the first half, 2 the second


def pack_cluster_tiles(
    layout: ReceiveLayout,
    *,
    tile_m: int,
    cluster_m: int,
    raster_m: int,  # cluster tiles
    plan_tile_m: int,  # of the Plan, by which M tiles are counted
    num_cut: int = 0,  # cluster tiles at the end that are handed out in pieces
    by_rows: bool = True,
    in_quarters: bool = False,  # halves of their rows by halves of their columns; else rows alone
    walk: Walk = Walk.expert,  # chunk: all are one group
) -> NDArray[np.int32]:  # (num_cluster_tiles, RECORD_WORDS)
    """Records of all cluster tiles of a rank, in hand-out order."""
    rows = layout.expert_rows.astype(np.int64)
    expert, above = _starts(rows, tile_m * cluster_m)
    cut = _cut(
        expert,
        above,
        rows,
        tile_m * cluster_m,
        num_cut=num_cut,
        in_quarters=in_quarters,
        by_rows=by_rows,
    )
    expert, above = expert[cut.of], cut.above
    # Those from the first piece on walk along N by themselves: else whole ones would end with them.
    alike = 2 * expert + (np.arange(len(expert)) >= cut.first_piece)
    if walk is Walk.chunk:
        alike, raster_m = np.zeros_like(expert), max(len(expert), 1)
    _, first_of, size_of = np.unique(alike, return_index=True, return_counts=True)
    within = np.arange(len(expert)) - np.repeat(first_of, size_of)
    num_alike = np.repeat(size_of, size_of)
    place = within % raster_m
    records = np.zeros((len(expert), RECORD_WORDS), np.int32)
    first = layout.expert_first_row[:-1].astype(np.int64)[expert]
    records[:, TileWord.first_row] = first + above
    records[:, TileWord.valid] = cut.end - above
    records[:, TileWord.expert] = expert
    records[:, TileWord.group_place] = place
    records[:, TileWord.group_size] = np.minimum(num_alike - (within - place), raster_m)
    records[:, TileWord.m_tile] = layout.expert_first_tile[:-1][expert] + above // plan_tile_m
    records[:, TileWord.group_end] = first + rows[expert]
    records[:, TileWord.columns] = cut.columns
    return records


def _starts(
    rows: NDArray[np.int64], height: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # both (num_cluster_tiles,)
    """Expert of every cluster tile, and rows of the expert above it."""
    tiles_of = -(-rows // height)
    expert = np.repeat(np.arange(len(rows)), tiles_of)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    return expert, within * height


@dataclass(frozen=True)
class _Cut:
    """Cluster tiles, the last ones in pieces; an entry each."""

    of: NDArray[np.int64]  # whole one that it is, or a piece of
    above: NDArray[np.int64]  # rows of the expert above it
    end: NDArray[np.int64]  # rows of the expert down to its last one
    columns: NDArray[np.int64]  # TileWord.columns
    first_piece: int  # number of the first that is no whole one


def _cut(
    expert: NDArray[np.int64],
    above: NDArray[np.int64],
    rows: NDArray[np.int64],
    height: int,
    *,
    num_cut: int,
    in_quarters: bool,
    by_rows: bool,
) -> _Cut:
    """Cut the last `num_cut` tiles, by rows those with more than half of them."""
    end = np.minimum(above + height, rows[expert])
    is_full = end - above > height // 2
    is_cut = np.zeros(len(expert), bool)
    able = np.arange(len(expert)) if in_quarters else np.flatnonzero(is_full)
    is_cut[able[max(len(able) - num_cut, 0) :]] = True
    by_rows = 1 + (is_cut & is_full & by_rows)
    least = np.where(by_rows == 2, end - above - height // 2, end - above)
    by_columns = 1 + (is_cut & in_quarters & (least > 1))
    pieces = by_rows * by_columns
    of = np.repeat(np.arange(len(expert)), pieces)
    number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    lower, right = np.divmod(number, by_columns[of])
    above = above[of] + lower * (height // 2)
    is_upper = (by_rows[of] == 2) & (lower == 0)
    found = np.flatnonzero(pieces[of] > 1)
    return _Cut(
        of=of,
        above=above,
        end=np.where(is_upper, above + height // 2, end[of]),
        columns=np.where(by_columns[of] == 2, 1 + right, 0),
        first_piece=int(found[0]) if len(found) else len(of),
    )


def num_to_cut(
    layout: ReceiveLayout,
    *,
    tile_m: int,
    num_n_tiles: int,
    num_clusters: int,
) -> int:
    """Tiles to be handed out in halves so that the last round of a launch is half as long.

    A tile of at most half its rows takes half its time. In halves the launch fills whole rounds of
    all clusters and a rest. A rest of up to one half each takes a whole tile's time unless its
    tiles are halves; more than that needs the whole round anyway.
    """
    half = tile_m // 2
    expert, above = _starts(layout.expert_rows.astype(np.int64), tile_m)
    full = int(np.count_nonzero(layout.expert_rows[expert] - above > half))
    num_halves = (len(expert) + full) * num_n_tiles
    rest = num_halves % (2 * num_clusters)
    if not 0 < rest <= num_clusters:
        return 0
    return min(-(-rest // (2 * num_n_tiles)), full)


def counted_rows(valid: Any, columns: Any) -> Any:
    """Rows for which a tile counts: of two that share their rows by columns about half each.

    Together they count for all rows; so that each counts for some, lone rows are never shared.
    """
    return valid - (columns != 0) * ((valid + columns - 1) // 2)


@dataclass(frozen=True)
class TicketPlace:
    """The output tile that a ticket stands for."""

    cluster_tile: Any
    n_tile: Any


def place_of_ticket(
    ticket: Any,
    group_place: Any,  # of cluster tile ticket // num_n_tiles
    group_size: Any,  # of the same
    *,
    num_n_tiles: int,
    num_chunks: int,
) -> TicketPlace:
    """Cluster tile and N tile of a ticket below num_cluster_tiles x num_n_tiles.

    Every cluster tile has num_n_tiles tickets, so the tickets of a group lie together and the
    cluster tile ticket // num_n_tiles, though seldom the one meant, is one of its own. A group
    takes chunk after chunk along N, in a chunk cluster tile after cluster tile, of each the chunk's
    N tiles back to back.
    """
    own = ticket // num_n_tiles
    first = own - group_place
    within = ticket - first * num_n_tiles
    # Tickets of a chunk that begins at N tile s are s x size .. on: this N tile lies in the chunk.
    chunk = within // group_size * num_chunks // num_n_tiles
    start = (chunk * num_n_tiles + num_chunks - 1) // num_chunks
    width = ((chunk + 1) * num_n_tiles + num_chunks - 1) // num_chunks - start
    in_chunk = within - start * group_size
    return TicketPlace(cluster_tile=first + in_chunk // width, n_tile=start + in_chunk % width)
