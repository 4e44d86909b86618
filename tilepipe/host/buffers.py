"""The symmetric arrays of the host executor, by role.

Knows nothing of threads and launches. Every counter is one single-writer word per source rank; the
waiter sums them, so no rank ever needs an atomic addition.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity
from tilepipe.fabric.host import ArraySpec, HostHeap
from tilepipe.schedule.layout import tile_capacity
from tilepipe.schedule.plan import HomePlan
from tilepipe.schedule.settings import PlanSettings

__all__ = [
    "DispatchTarget",
    "HomeTarget",
    "dispatch_specs",
    "home_specs",
    "pack_home",
    "unpack_home",
]

_SLOT_BITS, _TOKEN_BITS = 16, 32


def pack_home(
    rank: int, token: NDArray[np.int32], slot: NDArray[np.int32]
) -> NDArray[np.uint64]:  # (num_rows,)
    """The 8 bytes that tell a row's way back: source rank, token, top-k slot."""
    high = np.uint64(rank << (_TOKEN_BITS + _SLOT_BITS))
    return high | (token.astype(np.uint64) << np.uint64(_SLOT_BITS)) | slot.astype(np.uint64)


def unpack_home(
    words: NDArray[np.uint64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Source rank, token and slot of `row_home` words."""
    signed = words.astype(np.int64)
    rank = signed >> (_TOKEN_BITS + _SLOT_BITS)
    token = (signed >> _SLOT_BITS) & ((1 << _TOKEN_BITS) - 1)
    return rank, token, signed & ((1 << _SLOT_BITS) - 1)


def dispatch_specs(
    settings: PlanSettings,
    *,
    rows: int,  # receive rows of every rank
    hidden: int,  # 0: rows carry no payload, only their way home
    suffix: str = "",
) -> dict[str, ArraySpec]:
    """Arrays that dispatch stores into."""
    ranks = settings.num_ranks
    specs = {
        "recv_x": ArraySpec(shape=(rows, hidden), dtype=np.uint16),
        "row_home": ArraySpec(shape=(rows,), dtype=np.uint64),
        "row_flag": ArraySpec(shape=(rows,), dtype=np.int64),
        "tile_ready": ArraySpec(shape=(tile_capacity(settings, rows), ranks), dtype=np.int64),
        "expert_ready": ArraySpec(shape=(settings.num_experts_per_rank, ranks), dtype=np.int64),
    }
    return {name + suffix: spec for name, spec in specs.items()}


def home_specs(
    settings: PlanSettings,
    *,
    max_tokens: int,  # of any rank
    hidden: int,
    suffix: str = "",
) -> dict[str, ArraySpec]:
    """Arrays that combine stores into: a row for every (token, slot) and its counters."""
    ranks = settings.num_ranks
    specs = {
        "home_y": ArraySpec(shape=(max_tokens * settings.num_topk, hidden), dtype=np.uint16),
        "token_ready": ArraySpec(shape=(max_tokens, ranks), dtype=np.int64),
        "rank_ready": ArraySpec(shape=(ranks,), dtype=np.int64),
    }
    return {name + suffix: spec for name, spec in specs.items()}


class DispatchTarget:
    """Receive side of dispatch on every rank; `x[r]` is the buffer of rank r."""

    def __init__(self, heap: HostHeap, granularity: Granularity, suffix: str = "") -> None:
        self.rank = heap.rank
        self.granularity = granularity
        self.x = heap.arrays("recv_x" + suffix)
        self.row_home = heap.arrays("row_home" + suffix)
        self.row_flag = heap.arrays("row_flag" + suffix)
        self._ready = {
            Granularity.tile: heap.arrays("tile_ready" + suffix),
            Granularity.expert: heap.arrays("expert_ready" + suffix),
        }

    def counters(self) -> list[NDArray[Any]]:
        """Launch counters of this rank, zeroed at every launch; row flags never are."""
        return [words[self.rank] for words in self._ready.values()]

    def ready(self) -> NDArray[np.int64]:  # (num_counters, num_ranks)
        """Counters of this rank at the granularity in use; not for granularity token."""
        return self._ready[self.granularity][self.rank]

    def raise_ready(
        self, peer: int, *, first_row: int, num_rows: int, tile: int, local_expert: int, epoch: int
    ) -> None:
        """Publish rows that have been stored at `peer`. x86-64 keeps the stores in order."""
        match self.granularity:
            case Granularity.token:
                self.row_flag[peer][first_row : first_row + num_rows] = epoch
            case Granularity.tile:
                self._ready[Granularity.tile][peer][tile, self.rank] += num_rows
            case Granularity.expert:
                self._ready[Granularity.expert][peer][local_expert, self.rank] += num_rows


class HomeTarget:
    """Home side of combine on every rank."""

    def __init__(self, heap: HostHeap, suffix: str = "") -> None:
        self.rank = heap.rank
        self.y = heap.arrays("home_y" + suffix)
        self.token_ready = heap.arrays("token_ready" + suffix)
        self.rank_ready = heap.arrays("rank_ready" + suffix)

    def counters(self) -> list[NDArray[Any]]:
        """Launch counters of this rank, zeroed at every launch."""
        return [self.token_ready[self.rank], self.rank_ready[self.rank]]

    def preset(self, home: HomePlan) -> None:
        """Write thresholds where counters would grow, so that no wait ever blocks (rule 6)."""
        expected = home.token_expected
        self.token_ready[self.rank][: len(expected), self.rank] = expected
        self.rank_ready[self.rank][...] = home.rank_expected
