"""Symmetric memory of ranks that share one process and one GPU: one allocation, sliced.

Knows nothing of kernels and plans. It proves neither system-scope ordering nor link bandwidth: a
peer's memory is this GPU's own.
"""

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.table import NUM_SLOTS, RECORD_FIELDS, Role, Slot
from tilepipe.fabric.watch import WatchdogTimeout

__all__ = ["MAX_RANKS", "LoopbackHeap", "loopback_bytes"]

MAX_RANKS = 8
# Bulk copies want rows at 128 bytes; lines of L2 are as long.
_ALIGN = 1024
# Looks at a launch under way, and the time beyond all limits after which it counts as hung.
_LOOK_S = 200e-6
_GRACE_S = 5.0


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def loopback_bytes(specs: Mapping[Slot, ArraySpec]) -> int:
    """Device memory that each rank takes."""
    return sum(_aligned(spec.num_bytes) for spec in specs.values())


class LoopbackHeap:
    """Buffers of all ranks and the table that leads kernels to them."""

    def __init__(
        self, specs: Mapping[Slot, ArraySpec], *, num_ranks: int, device: torch.device
    ) -> None:
        """Reserve zeroed memory for every rank; raises torch.OutOfMemoryError."""
        assert 1 <= num_ranks <= MAX_RANKS
        assert Slot.record not in specs, "records lie in host memory"
        self.num_ranks, self.device = num_ranks, device
        self.rank_bytes = loopback_bytes(specs)
        self._memory = torch.zeros(num_ranks * self.rank_bytes, dtype=torch.uint8, device=device)
        self._records = torch.zeros(
            (num_ranks, len(RECORD_FIELDS)), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._tensors: dict[tuple[int, Slot], torch.Tensor] = {}
        table = np.zeros((num_ranks, NUM_SLOTS), np.int64)
        for rank in range(num_ranks):
            place = rank * self.rank_bytes
            for slot, spec in specs.items():
                part = self._memory[place : place + spec.num_bytes]
                dtype = getattr(torch, np.dtype(spec.dtype).name)
                self._tensors[rank, slot] = part.view(dtype).view(spec.shape)
                table[rank, slot] = self._memory.data_ptr() + place
                place += _aligned(spec.num_bytes)
            table[rank, Slot.record] = self._records[rank].data_ptr()
        self.table = torch.from_numpy(table).to(device)

    def tensor(self, rank: int, slot: Slot) -> torch.Tensor:
        """A buffer of a rank, as its spec says."""
        return self._tensors[rank, slot]

    def fill(self, rank: int, slot: Slot, values: np.ndarray) -> None:
        """Write the front of a buffer; raises ValueError where it has no room."""
        target = self.tensor(rank, slot)
        if values.shape[1:] != target.shape[1:] or len(values) > len(target):
            raise ValueError(f"{slot.name} holds {tuple(target.shape)}, got {values.shape}")
        if len(values):
            target[: len(values)].copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def wait(self, done: Callable[[], bool], *, limit_s: float) -> None:
        """Return once `done()`; raise WatchdogTimeout for a rank that gave up, or a hung launch.

        `limit_s` is that of one wait of the launch. Its waits are bounded on the device, so a
        launch that ends says by itself what went wrong; one that does not is given up here.
        """
        deadline = time.monotonic() + 2 * limit_s + _GRACE_S
        while not done():
            if time.monotonic() > deadline:
                self.check(limit_s=limit_s)
                raise WatchdogTimeout(
                    f"a launch has not ended {2 * limit_s + _GRACE_S:g} s after it began "
                    f"(launch.watchdog_ms={limit_s * 1e3:g} for one wait), and no wait reached its "
                    "limit: a kernel hangs"
                )
            time.sleep(_LOOK_S)
        self.check(limit_s=limit_s)

    def check(self, *, limit_s: float) -> None:
        """Raise WatchdogTimeout when a rank has given up; the first one of all is named."""
        records = self._records.numpy()
        raised = np.flatnonzero(records[:, RECORD_FIELDS.index("raised")])
        if not len(raised):
            return
        rank = min(raised, key=lambda rank: records[rank, RECORD_FIELDS.index("time_ns")])
        fields = dict(zip(RECORD_FIELDS, records[rank].tolist(), strict=True))
        raise WatchdogTimeout(_sentence(int(rank), fields, limit_s))


def _sentence(rank: int, record: Mapping[str, int], limit_s: float) -> str:
    role, item = Role(record["role"]), record["item"]
    expected, seen = record["expected"], record["seen"]
    waited = f"rank {rank} waited {limit_s:g} s (launch.watchdog_ms): "
    match role:
        case Role.gate:
            what = f"role gate: rank {item} has opened launch {seen}, not {expected}"
        case Role.receive:
            what = f"role receive, counter {item}: expected {expected} rows, seen {seen}"
        case Role.receive_row:
            what = f"role receive, row {item}: its flag is of launch {seen}, not {expected}"
        case Role.reduce:
            what = f"role reduce, token {item}: expected {expected} rows x chunks, seen {seen}"
        case Role.reduce_rank:
            what = f"role reduce, rank {item}: expected {expected} rows x chunks, seen {seen}"
    return f"{waited}{what}; epoch {record['epoch']}"
