"""What GEMM -> combine is compiled for, and in which order stored tiles go home.

Knows nothing of CuTe and torch.

A unit is what is waited for and then pushed: with granularity tile a chunk of an M tile's columns,
which its N tiles complete back to back; with token the whole rows of an M tile; with expert the
same, once all tiles of the expert are stored. Units are taken up in the order in which tiles are
handed out. The GEMM completes them in that order but for one round of tiles, and waits for nobody,
so whoever waits for a unit waits for at most that; a queue of completed units would save no more.
"""

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Copy, Granularity, Push, Roles, Walk
from tilepipe.config.limits import FUSED_WARPS, SHARED_BYTES
from tilepipe.fabric.table import near_table_bytes
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.plan import BESIDE_RINGS_BYTES, KernelPlan
from tilepipe.kernels.gemm.tiles import TileWord, places_of_tickets
from tilepipe.schedule.layout import ReceiveLayout

__all__ = [
    "REDUCING_WARPS",
    "RING_BYTES",
    "HomePlan",
    "Reduces",
    "home_gemm_bytes",
    "order_units",
    "plan_home_launch",
]

# The warps that multiply, or move rows in bulk; each has a ring, in which it later reduces.
REDUCING_WARPS = 8
# Of each: all of them lie where the GEMM keeps its operands, not what it has staged to be stored.
RING_BYTES = 24_576
_MAX_GROUP_ROWS = 16
_ALIGN = 128


class Reduces(Enum):
    """Which tokens a launch adds up."""

    all = "all"
    # Parts of them that are home while others are multiplied, as far as one gets until then: what
    # the reduction costs the GEMM, without what is left to do behind it.
    beside = "beside"
    none = "none"  # rows are pushed and nobody looks at them


@dataclass(frozen=True, kw_only=True)
class HomePlan:
    """Everything that is fixed in a fused kernel; the split is not, one code serves all."""

    gemm: KernelPlan  # of one rank; its number of CTAs says nothing here
    constants: Constants  # of rows that go home
    reduction: Constants
    roles: Roles
    reduces: Reduces
    num_launch_ranks: int
    a_rank_pitch: int  # elements from one rank's A to the next one's
    d_rank_pitch: int
    num_pieces: int  # of a row that go home one by one
    piece_bytes: int
    group_rows: int  # pieces that a warp moves at a time
    smem_bytes: int
    num_stamps: int = 0  # that a warp has room for; 0: none is left

    @property
    def cluster_m(self) -> int:
        return self.gemm.cluster_m

    @property
    def push(self) -> Push:
        """Who brings rows home."""
        return Push.epilogue if self.gemm.problem.sends else Push.ctas

    @property
    def num_reduced_parts(self) -> int:
        """Parts of each token that the launch adds up, the first ones."""
        if self.reduces is Reduces.all:
            return self.constants.num_parts
        # Who pushes reduces behind its pushes, and ranks are home as a whole: nothing is beside.
        apart = self.push is Push.epilogue and not self.constants.by_rank
        return self.constants.num_parts - 1 if self.reduces is Reduces.beside and apart else 0

    @property
    def stops_reducing(self) -> bool:
        """Whether reducing ends with the tiles, whatever is left."""
        return self.reduces is Reduces.beside and self.num_reduced_parts > 0

    @property
    def share(self) -> int:
        """Chunks of a row by which a piece that has come home raises its counter."""
        return self.constants.num_chunks // self.num_pieces

    @property
    def moved_bytes(self) -> int:
        """Bytes of a row that go home at once."""
        by_tile = self.gemm.problem.n // self.gemm.num_n_tiles * 2
        return by_tile if self.push is Push.epilogue else self.piece_bytes

    @property
    def num_groups(self) -> int:
        """Groups of a unit; of a tile that is not full the last ones are empty."""
        return -(-self.gemm.tile_m // self.group_rows)


def plan_home_launch(
    gemm: KernelPlan,
    constants: Constants,
    *,
    roles: Roles,
    reduces: Reduces = Reduces.all,
    num_launch_ranks: int = 1,
    a_rank_pitch: int = 0,
    d_rank_pitch: int = 0,
) -> HomePlan:
    """Decide the rest, or raise ValueError with one sentence that says what to change."""
    by_bulk = constants.copy is Copy.tma
    most = REDUCING_WARPS if by_bulk else FUSED_WARPS
    if constants.num_warps > most:
        raise ValueError(
            f"kernel.num_comm_warps={constants.num_warps}: CTAs of GEMM -> combine move rows with "
            f"at most {most} warps by copy={constants.copy.value}; lower it"
        )
    by_chunk = constants.granularity is Granularity.tile
    num_pieces = gemm.num_chunks if by_chunk else 1
    _check_ways(gemm, constants)
    if roles is Roles.beside:
        _check_beside(gemm, constants)
    if gemm.num_n_tiles % num_pieces or gemm.problem.n % gemm.tile_n * (num_pieces > 1):
        raise ValueError(
            f"num_chunks={num_pieces}: {gemm.problem.n} columns in tiles of {gemm.tile_n} are no "
            "pieces of one size; type kernel.granularity=token, which moves whole rows"
        )
    piece_bytes = constants.row_bytes // num_pieces
    room = gemm.num_stages * gemm.stage_bytes
    if REDUCING_WARPS * RING_BYTES > room:
        raise ValueError(
            f"num_stages={gemm.num_stages}: the GEMM's operands take {room} bytes, and tokens are "
            f"reduced in {REDUCING_WARPS * RING_BYTES} there; choose more stages or a larger tile"
        )
    group_rows = min(_MAX_GROUP_ROWS, RING_BYTES // piece_bytes) if by_bulk else _MAX_GROUP_ROWS
    if not group_rows and not gemm.problem.sends:
        raise ValueError(
            f"workload.hidden: pieces of {piece_bytes} bytes do not fit a warp's ring of "
            f"{RING_BYTES}; type kernel.copy=simt, or kernel.granularity=tile"
        )
    own = room + gemm.staging_bytes + _beside_bytes(constants.num_ranks)
    if own > SHARED_BYTES:
        raise ValueError(
            f"num_stages={gemm.num_stages}: a fused CTA needs {own} bytes of shared memory, and an "
            f"SM has {SHARED_BYTES}; plan the GEMM with home_gemm_bytes"
        )
    return HomePlan(
        gemm=replace(gemm, num_gemm_ctas=gemm.cluster_m, workspace_bytes=0),
        constants=constants,
        reduction=replace(constants, num_warps=REDUCING_WARPS),
        roles=roles,
        reduces=reduces,
        num_launch_ranks=num_launch_ranks,
        a_rank_pitch=a_rank_pitch if num_launch_ranks > 1 else 0,
        d_rank_pitch=d_rank_pitch if num_launch_ranks > 1 else 0,
        num_pieces=num_pieces,
        piece_bytes=piece_bytes,
        group_rows=max(group_rows, 1),
        smem_bytes=own,
    )


def _beside_bytes(num_ranks: int) -> int:
    """Shared memory beside operands and staging: barriers of both roles, records, addresses."""
    return 3 * _ALIGN + -(-near_table_bytes(num_ranks) // _ALIGN) * _ALIGN


def home_gemm_bytes(num_ranks: int) -> int:
    """Shared memory to plan the GEMM for, so that all else fits beside it."""
    return SHARED_BYTES - max(0, _beside_bytes(num_ranks) - BESIDE_RINGS_BYTES)


def _check_beside(gemm: KernelPlan, constants: Constants) -> None:
    """Refuse what a warp beside the tiles does not do: bring rows home, wait for ranks."""
    if not gemm.problem.sends:
        raise ValueError(
            "kernel.roles=beside: no CTA would bring rows home with kernel.push=ctas; type "
            "kernel.push=epilogue, or kernel.roles=switch"
        )
    if constants.by_rank:
        raise ValueError(
            "kernel.roles=beside: tokens are reduced as they complete, and with "
            "kernel.home_granularity=rank none does; type kernel.home_granularity=token, or "
            "kernel.roles=switch"
        )


def _check_ways(gemm: KernelPlan, constants: Constants) -> None:
    """Refuse ways home that the granularity does not go with."""
    for key, value, by_chunk in (
        ("push", Push.epilogue.value, gemm.problem.sends),
        ("walk", Walk.chunk.value, gemm.tuning.walk is Walk.chunk),
    ):
        if by_chunk and constants.granularity is not Granularity.tile:
            raise ValueError(
                f"kernel.{key}={value}: chunks go home one by one, and "
                f"kernel.granularity={constants.granularity.value} waits for whole rows; type "
                f"kernel.granularity=tile, or another kernel.{key}"
            )


def order_units(
    records: NDArray[np.int32],  # (num_cluster_tiles, RECORD_WORDS), in hand-out order
    layout: ReceiveLayout,
    gemm: KernelPlan,
    granularity: Granularity,
) -> NDArray[np.int32]:  # (num_units, 4): M tile, chunk, first tile to wait for, how many
    """Units by the place of their last output tile in the hand-out."""
    last = _last_tickets(records, layout.num_tiles, gemm)
    if granularity is Granularity.tile:
        tiles, chunks = np.unravel_index(np.argsort(last, axis=None, kind="stable"), last.shape)
        units = (tiles, chunks, tiles, np.ones_like(tiles))
        return np.stack(units, axis=1).astype(np.int32)
    tiles = np.argsort(last.max(axis=1, initial=-1), kind="stable")
    first, number = tiles, np.ones_like(tiles)
    if granularity is Granularity.expert:
        expert = layout.tiles[tiles, 0]
        first = layout.expert_first_tile[expert]
        number = layout.expert_first_tile[expert + 1] - first
    return np.stack((tiles, np.zeros_like(tiles), first, number), axis=1).astype(np.int32)


def _last_tickets(
    records: NDArray[np.int32], num_m_tiles: int, gemm: KernelPlan
) -> NDArray[np.int64]:  # (num_m_tiles, num_chunks)
    """The place in the hand-out of the last output tile of each chunk of an M tile."""
    num_n, num_chunks = gemm.num_n_tiles, gemm.num_chunks
    tickets = np.arange(len(records) * num_n)
    there = places_of_tickets(records, tickets, num_n_tiles=num_n, num_chunks=num_chunks)
    record = records[there.cluster_tile]
    chunk = there.n_tile * num_chunks // num_n
    last = np.full((num_m_tiles, num_chunks), -1, np.int64)
    for above in range(gemm.cluster_m):
        there_are = record[:, TileWord.valid] > above * gemm.tile_m
        place = record[there_are, TileWord.m_tile] + above, chunk[there_are]
        np.maximum.at(last, place, tickets[there_are])
    return last
