"""Grouped GEMM on the host: output tiles in hand-out order, FP32 products of bf16 values.

Knows nothing of flags; whoever calls says what to do before a tile's first read and after a store.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from tilepipe.host.recorder import NoLane
from tilepipe.records import SpanKind
from tilepipe.schedule.plan import RankPlan
from tilepipe.workload import bf16

__all__ = ["GroupedGemm", "swiglu"]


def swiglu(gate: NDArray[np.float32], up: NDArray[np.float32]) -> NDArray[np.float32]:  # as both
    """silu(gate) x up, silu(x) being x / (1 + exp(-x))."""
    # A gate far below 0 is divided by infinity; of gaps in a layout anything may come.
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(gate / (np.float32(1) + np.exp(-gate)) * up, np.float32)


class GroupedGemm:
    """Weights of one rank's experts and the tile loop over them."""

    def __init__(
        self,
        weights: Sequence[NDArray[np.float32]],  # per local expert (N, K), values exact in bf16
        *,
        tile_n: int,
        gated: bool = False,  # the first half of a weight's rows makes gate, the second up
    ) -> None:
        self._weights, self._gated = weights, gated
        self._tile_n = tile_n

    def run(
        self,
        plan: RankPlan,
        a: NDArray[np.uint16],  # (rows, K) bf16 bits, grouped by expert
        out: NDArray[np.uint16],  # (rows, N) bf16 bits; gated: (rows, N / 2), SwiGLU of both
        *,
        before_tile: Callable[[int], None] | None = None,
        after_read: Callable[[int], None] | None = None,
        after_store: Callable[[int, int], None] | None = None,
        lane: NoLane | None = None,
    ) -> None:
        """Compute every output tile once.

        `before_tile(m_tile)` runs before the first read of an M tile's rows, `after_read(m_tile)`
        after it, `after_store(m_tile, n_tile)` after each stored output tile. Fused and unfused
        callers share tile shape and K order, so their outputs are equal bit for bit.
        """
        lane = lane or NoLane()
        staged: dict[int, NDArray[np.float32]] = {}
        last_visit = {int(m): place for place, (m, _) in enumerate(plan.handout)}
        tiles = plan.layout.tiles.tolist()
        for place, (m_tile, n_tile) in enumerate(plan.handout.tolist()):
            expert, first, valid = tiles[m_tile]
            if m_tile not in staged:
                if before_tile is not None:
                    before_tile(m_tile)
                staged[m_tile] = bf16.from_bits(a[first : first + valid])
                lane.lap(SpanKind.copy, m_tile, num_rows=valid)
                if after_read is not None:
                    after_read(m_tile)
            columns, values = self._tile(staged[m_tile], self._weights[expert], n_tile)
            out[first : first + valid, columns] = bf16.to_bits(values)
            if after_store is not None:
                after_store(m_tile, n_tile)
            lane.lap(SpanKind.tile, m_tile, n_tile, valid)
            if last_visit[m_tile] == place:
                del staged[m_tile]

    def _tile(
        self, rows: NDArray[np.float32], weight: NDArray[np.float32], n_tile: int
    ) -> tuple[slice, NDArray[np.float32]]:
        """Output columns of an N tile, and what the rows have there."""
        width = self._tile_n // 2 if self._gated else self._tile_n
        columns = slice(n_tile * width, (n_tile + 1) * width)
        if not self._gated:
            return columns, rows @ weight[columns].T
        gates, ups = np.split(weight, 2)
        return columns, swiglu(rows @ gates[columns].T, rows @ ups[columns].T)

    def run_per_expert(
        self,
        plan: RankPlan,
        a: NDArray[np.uint16],  # (rows, K) bf16 bits, grouped by expert
        out: NDArray[np.uint16],  # (rows, N) bf16 bits
    ) -> None:
        """One product an expert, as large as they come: what a BLAS does without tiles."""
        layout = plan.layout
        for expert, num_rows in enumerate(layout.expert_rows.tolist()):
            first = int(layout.expert_first_row[expert])
            rows = slice(first, first + num_rows)
            out[rows] = bf16.to_bits(bf16.from_bits(a[rows]) @ self._weights[expert].T)
