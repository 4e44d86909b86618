"""Symmetric memory of ranks that share one process and one GPU: one allocation, sliced.

Knows nothing of kernels and plans. It proves neither system-scope ordering nor link bandwidth: a
peer's memory is this GPU's own.
"""

from collections.abc import Mapping

import torch

from tilepipe.config.limits import MAX_LOOPBACK_RANKS
from tilepipe.fabric.device_heap import DeviceHeap, device_bytes
from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.table import Slot

__all__ = ["LoopbackHeap"]


class LoopbackHeap(DeviceHeap):
    """Buffers of all ranks; nobody else is there to meet."""

    def __init__(
        self, specs: Mapping[Slot, ArraySpec], *, num_ranks: int, device: torch.device
    ) -> None:
        """Reserve zeroed memory for every rank; raises torch.OutOfMemoryError."""
        assert 1 <= num_ranks <= MAX_LOOPBACK_RANKS
        rank_bytes = device_bytes(specs)
        super().__init__(
            num_ranks=num_ranks, ranks=range(num_ranks), rank_bytes=rank_bytes, device=device
        )
        self._memory = torch.zeros(num_ranks * rank_bytes, dtype=torch.uint8, device=device)
        for rank in range(num_ranks):
            self._lay_out(rank, specs, self._memory[rank * rank_bytes :])
        self._publish_table()
