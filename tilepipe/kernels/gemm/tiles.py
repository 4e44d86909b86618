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
    "num_to_cut",
    "pack_cluster_tiles",
    "place_of_ticket",
    "places_of_tickets",
]

# Words of a record: two vectors of 16 bytes.
RECORD_WORDS = 8


class TileWord(IntEnum):
    """Words of the record of a cluster tile: up to `cluster_m` M tiles of one expert.

    Of a tile that is handed over inside a CTA the same, but for `n_tile` in place of
    `group_place`, and `late`.
    """

    first_row = 0
    valid = 1  # rows of the expert from there on, cluster_m x tile_m at most; below 0: no tile left
    expert = 2
    group_place = 3  # place among the cluster tiles that walk along N together
    n_tile = 3
    group_size = 4  # how many walk together
    m_tile = 5  # number of the first M tile, counted by the Plan
    group_end = 6  # row behind the last one of the expert
    late = 7  # 1: its rows had to be waited for; only with KernelPlan.waits_ahead


def pack_cluster_tiles(
    layout: ReceiveLayout,
    *,
    tile_m: int,
    cluster_m: int,
    raster_m: int,  # cluster tiles
    plan_tile_m: int,  # of the Plan, by which M tiles are counted
    num_cut: int = 0,  # cluster tiles at the end that are handed out in halves
    walk: Walk = Walk.expert,  # chunk: all are one group
) -> NDArray[np.int32]:  # (num_cluster_tiles, RECORD_WORDS)
    """Records of all cluster tiles of a rank, in hand-out order."""
    rows = layout.expert_rows.astype(np.int64)
    height = tile_m * cluster_m
    expert, above = _starts(rows, height)
    # Those from the first half on walk along N by themselves: else whole ones would end with them.
    first_cut = len(expert)
    if num_cut:
        expert, above, first_cut = _halved(expert, above, rows, height // 2, num_cut)
    alike = 2 * expert + (np.arange(len(expert)) >= first_cut)
    if walk is Walk.chunk:
        alike, raster_m = np.zeros_like(expert), max(len(expert), 1)
    _, first_of, size_of = np.unique(alike, return_index=True, return_counts=True)
    within = np.arange(len(expert)) - np.repeat(first_of, size_of)
    num_alike = np.repeat(size_of, size_of)
    # A tile ends where the next one of its expert begins, or with the expert.
    ends = rows[expert]
    goes_on = np.flatnonzero(expert[:-1] == expert[1:])
    ends[goes_on] = above[goes_on + 1]
    place = within % raster_m
    records = np.zeros((len(expert), RECORD_WORDS), np.int32)
    first = layout.expert_first_row[:-1].astype(np.int64)[expert]
    records[:, TileWord.first_row] = first + above
    records[:, TileWord.valid] = ends - above
    records[:, TileWord.expert] = expert
    records[:, TileWord.group_place] = place
    records[:, TileWord.group_size] = np.minimum(num_alike - (within - place), raster_m)
    records[:, TileWord.m_tile] = layout.expert_first_tile[:-1][expert] + above // plan_tile_m
    records[:, TileWord.group_end] = first + rows[expert]
    return records


def _starts(
    rows: NDArray[np.int64], height: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:  # both (num_cluster_tiles,)
    """Expert of every cluster tile, and rows of the expert above it."""
    tiles_of = -(-rows // height)
    expert = np.repeat(np.arange(len(rows)), tiles_of)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(tiles_of) - tiles_of, tiles_of)
    return expert, within * height


def _halved(
    expert: NDArray[np.int64],
    above: NDArray[np.int64],
    rows: NDArray[np.int64],
    half: int,
    num_cut: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64], int]:
    """The same, the last `num_cut` tiles that have more than half of their rows in two; and the
    number of the first half."""
    full = np.flatnonzero(rows[expert] - above > half)
    cut = full[max(len(full) - num_cut, 0) :]
    return (
        np.insert(expert, cut + 1, expert[cut]),
        np.insert(above, cut + 1, above[cut] + half),
        int(cut[0]) if len(cut) else len(expert),
    )


def num_to_cut(
    layout: ReceiveLayout,
    *,
    tile_m: int,
    raster_m: int,
    num_n_tiles: int,
    num_chunks: int,
    num_clusters: int,
) -> int:
    """Tiles to be handed out in halves so that a launch ends first: the fewest that do.

    A tile of at most half its rows takes half its time. Where all are whole, launches are rounds
    of all clusters and a rest, which as whole tiles takes a round, too; where some are short,
    clusters go apart by half a tile, and whole tiles at the end leave some idle. So what comes of
    each number is counted.
    """
    best, least = 0, 0
    for num_cut in range(-(-num_clusters // (2 * num_n_tiles)) + 1):
        records = pack_cluster_tiles(
            layout,
            tile_m=tile_m,
            cluster_m=1,
            raster_m=raster_m,
            plan_tile_m=tile_m,
            num_cut=num_cut,
        )
        halves = _halves_in_order(
            records, tile_m // 2, num_n_tiles=num_n_tiles, num_chunks=num_chunks
        )
        time = _time_of(halves, num_clusters)
        if num_cut == 0 or time < least:
            best, least = num_cut, time
        if least == -(-int(halves.sum()) // num_clusters):
            break
    return best


def _halves_in_order(
    records: NDArray[np.int32], half: int, *, num_n_tiles: int, num_chunks: int
) -> NDArray[np.int64]:  # (num_cluster_tiles x num_n_tiles,)
    """Halves of a tile, 1 or 2, that each ticket's takes."""
    tickets = np.arange(len(records) * num_n_tiles)
    there = places_of_tickets(records, tickets, num_n_tiles=num_n_tiles, num_chunks=num_chunks)
    return 1 + (records[there.cluster_tile, TileWord.valid].astype(np.int64) > half)


def _time_of(halves: NDArray[np.int64], num_clusters: int) -> int:
    """Halves of a tile until the last is done, each given to the next free of equal clusters."""
    time = at = busy = 0
    free = num_clusters
    while at < len(halves):
        taken = halves[at : at + free]
        long = int(np.count_nonzero(taken == 2))
        at, time = at + free, time + 1
        free, busy = free - long + busy, long
    return time + (busy > 0)


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


def places_of_tickets(
    records: NDArray[np.int32],  # (num_cluster_tiles, RECORD_WORDS)
    tickets: NDArray[np.int64],
    *,
    num_n_tiles: int,
    num_chunks: int,
) -> TicketPlace:
    """The output tiles that many tickets stand for, an array of each word."""
    own = records[tickets // num_n_tiles].astype(np.int64)
    return place_of_ticket(
        *(tickets, own[:, TileWord.group_place], own[:, TileWord.group_size]),
        num_n_tiles=num_n_tiles,
        num_chunks=num_chunks,
    )
