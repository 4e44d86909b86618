"""What all roles of a grouped GEMM's CTA share: where a thread is, what it sees, records of tiles.

Knows nothing of what a role does.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tilepipe.kernels.gemm.barriers import Item, arrive, await_phase
from tilepipe.kernels.gemm.plan import NUM_CONSUMERS, KernelPlan
from tilepipe.kernels.gemm.tiles import RECORD_WORDS, TileWord
from tilepipe.kernels.memory import LANES

__all__ = [
    "HANDED",
    "NUM_THREADS",
    "THREADS_OF_GROUP",
    "WARPS_OF_GROUP",
    "Operands",
    "Place",
    "Shared",
    "late_of",
    "read_record",
    "take_record",
]

WARPS_OF_GROUP = 4
THREADS_OF_GROUP = WARPS_OF_GROUP * LANES
NUM_THREADS = THREADS_OF_GROUP * (1 + NUM_CONSUMERS)
# Records that are known at a time: the tile that is multiplied and the one that is loaded.
HANDED = 2


@dataclass(frozen=True)
class Place:
    """Where a thread is, and what every role needs."""

    plan: KernelPlan
    table: Any
    rank: Any
    num_ranks: int
    limit_ns: Any
    warp: Any  # of the CTA
    lane: Any
    cta: Any  # in the cluster
    tape: Any = None  # of the warp; None: it leaves no stamps

    def wait(self, barrier: Any, phase: Any, item: Item) -> None:
        await_phase(barrier, phase, item, self.table, self.rank, self.num_ranks, self.limit_ns)


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA."""

    a: Any  # (tile_m, TILE_K, stages)
    b: Any  # (tile_n, TILE_K, stages)
    d: Any  # (64, 64, warpgroup x buffers), with StoreMode.tma
    full: Any  # barriers of stages
    empty: Any
    handed: Any  # barriers of records
    taken: Any
    records: Any


@dataclass(frozen=True)
class Operands:
    """Global tensors as TMA sees them, with their atoms."""

    tma_a: Any
    a: Any
    tma_b: Any
    b: Any
    tma_d: Any
    d: Any
    d_address: Any
    plain_d: Any  # (rows, out_n): what a descriptor of a group is patched from
    scale: Any
    workspace: Any
    b_descriptor: Any = None  # address of the one that B is loaded by; None: that of `tma_b`


@cute.jit
def read_record(place: cutlass.Constexpr, shared: cutlass.Constexpr, count: Int32):
    """Wait for the record of the count-th tile of this CTA and read it, for this CTA's own rows."""
    plan = place.plan
    slot = count % HANDED
    place.wait(shared.handed + slot, count // HANDED % 2, Item.handed)
    if cutlass.const_expr(plan.cluster_m > 1):
        cute.arch.fence_acq_rel_cluster()
    record = cute.make_tensor(shared.records + slot * RECORD_WORDS, cute.make_layout(RECORD_WORDS))
    above = place.cta * plan.tile_m
    valid = record[int(TileWord.valid)]
    return (
        valid >= 0,
        record[int(TileWord.first_row)] + above,
        cutlass.min(valid - above, plan.tile_m),
        record[int(TileWord.expert)],
        record[int(TileWord.n_tile)],
        record[int(TileWord.m_tile)] + place.cta,
        record[int(TileWord.group_end)],
    )


@cute.jit
def late_of(shared: cutlass.Constexpr, count: Int32):
    """1 where the rows of a tile whose record has come were not there at the first look."""
    slot = shared.records + count % HANDED * RECORD_WORDS
    return cute.make_tensor(slot, cute.make_layout(RECORD_WORDS))[int(TileWord.late)]


@cute.jit
def take_record(place: cutlass.Constexpr, shared: cutlass.Constexpr, count: Int32):
    """Tell the scheduler, in the first CTA, that this warp has read the record."""
    cute.arch.sync_warp()
    if place.lane == 0:
        arrive(shared.taken + count % HANDED, Int32(0), place.plan.cluster_m > 1)
