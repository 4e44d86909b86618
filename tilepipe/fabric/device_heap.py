"""Memory of the ranks of one process on one GPU, and the table by which kernels find all ranks'.

Knows nothing of kernels and plans, nor of where the memory comes from that peers store into.
"""

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import numpy as np
import torch

from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.table import NUM_SLOTS, RECORD_FIELDS, Role, Slot
from tilepipe.fabric.watch import WatchdogTimeout

__all__ = ["DeviceHeap", "device_bytes"]

# Bulk copies want rows at 128 bytes; lines of L2 are as long.
_ALIGN = 1024
# Looks at a launch under way, and the time beyond all limits after which it counts as hung.
_LOOK_S = 200e-6
_GRACE_S = 5.0


def device_bytes(specs: Mapping[Slot, ArraySpec]) -> int:
    """Device memory that each rank takes for these buffers."""
    return sum(_aligned(spec.num_bytes) for spec in specs.values())


class DeviceHeap:
    """Buffers of the ranks of this process; a subclass reserves them and knows the peers."""

    table: torch.Tensor  # (num_ranks, NUM_SLOTS) int64 addresses; 0 where this process has none

    def __init__(
        self, *, num_ranks: int, ranks: range, rank_bytes: int, device: torch.device
    ) -> None:
        self.num_ranks, self.device = num_ranks, device
        self.ranks = ranks  # those of this process
        self.rank_bytes = rank_bytes
        self._records = torch.zeros(
            (len(ranks), len(RECORD_FIELDS)), dtype=torch.int64, pin_memory=device.type == "cuda"
        )
        self._tensors: dict[tuple[int, Slot], torch.Tensor] = {}
        self._addresses = np.zeros((num_ranks, NUM_SLOTS), np.int64)
        for place, rank in enumerate(ranks):
            self._addresses[rank, Slot.record] = self._records[place].data_ptr()

    @property
    def is_whole(self) -> bool:
        """Whether one launch of this process holds all ranks."""
        return len(self.ranks) == self.num_ranks

    def _lay_out(self, rank: int, specs: Mapping[Slot, ArraySpec], memory: torch.Tensor) -> None:
        """Cut the buffers of an own rank from the front of `memory`, bytes that are all zero."""
        assert Slot.record not in specs, "records lie in host memory"
        for slot, place in _places(specs).items():
            spec = specs[slot]
            dtype = getattr(torch, np.dtype(spec.dtype).name)
            part = memory[place : place + spec.num_bytes]
            self._tensors[rank, slot] = part.view(dtype).view(spec.shape)
        self._note(rank, specs, memory.data_ptr())

    def _note(self, rank: int, specs: Mapping[Slot, ArraySpec], address: int) -> None:
        """Where the buffers of a rank lie that begin at `address`."""
        for slot, place in _places(specs).items():
            self._addresses[rank, slot] = address + place

    def _publish_table(self) -> None:
        self.table = torch.from_numpy(self._addresses).to(self.device)

    def tensor(self, rank: int, slot: Slot) -> torch.Tensor:
        """A buffer of an own rank, as its spec says."""
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
        while not self._is_over(done, limit_s):
            self.look_for_peers()
            if time.monotonic() > deadline:
                self.check(limit_s=limit_s)
                raise WatchdogTimeout(
                    f"a launch has not ended {2 * limit_s + _GRACE_S:g} s after it began "
                    f"(launch.watchdog_ms={limit_s * 1e3:g} for one wait), and no wait reached its "
                    "limit: a kernel hangs"
                )
            time.sleep(_LOOK_S)
        self.check(limit_s=limit_s)

    def _is_over(self, done: Callable[[], bool], limit_s: float) -> bool:
        """`done()`; of a launch that has trapped the record says more than its error."""
        try:
            return done()
        except RuntimeError:
            self.check(limit_s=limit_s)
            raise

    def check(self, *, limit_s: float) -> None:
        """Raise WatchdogTimeout when an own rank has given up; the first one of all is named."""
        records = self._records.numpy()
        raised = np.flatnonzero(records[:, RECORD_FIELDS.index("raised")])
        if not len(raised):
            return
        place = min(raised, key=lambda place: records[place, RECORD_FIELDS.index("time_ns")])
        fields = dict(zip(RECORD_FIELDS, records[place].tolist(), strict=True))
        raise WatchdogTimeout(_sentence(self.ranks[int(place)], fields, limit_s))

    # Peers in other processes; where there are none, these do nothing.

    def look_for_peers(self) -> None:
        """Raise PeerAborted when a peer's process has failed; asks nothing of the device."""

    def check_peers(self) -> None:
        """Raise PeerAborted when a launch has ended because a peer gave up; the device is idle."""

    def barrier(self) -> None:
        """Return once every process has come as often as this one."""

    def all_agree(self, yes: bool) -> bool:
        """Whether every process says yes; all are asked equally often."""
        return yes

    def close(self, *, failed: bool) -> None:
        """Give the memory back, together with all peers; nothing may be asked of it any more."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(failed=kind is not None)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN


def _places(specs: Mapping[Slot, ArraySpec]) -> dict[Slot, int]:
    """Where each buffer begins."""
    places, end = {}, 0
    for slot, spec in specs.items():
        places[slot] = end
        end += _aligned(spec.num_bytes)
    return places


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
        case Role.gemm_receive:
            what = f"role gemm_receive, counter {item}: expected {expected} rows, seen {seen}"
        case Role.gemm_receive_row:
            what = (
                f"role gemm_receive_row, row {item}: its flag is of launch {seen}, not {expected}"
            )
        case Role.push_stored:
            what = f"role push, M tile {item}: expected {expected} rows x N tiles, seen {seen}"
        case Role.gemm_pipeline:
            what = f"role gemm_pipeline: barrier {item} of a CTA did not end phase {expected}"
        case Role.reduce:
            what = f"role reduce, token {item}: expected {expected} rows x chunks, seen {seen}"
        case Role.reduce_rank:
            what = f"role reduce, rank {item}: expected {expected} rows x chunks, seen {seen}"
        case Role.plan:
            what = f"role plan: CTA {item} of the rank has ended round {seen}, not {expected}"
    return f"{waited}{what}; epoch {record['epoch']}"
