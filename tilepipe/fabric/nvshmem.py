"""Symmetric memory of ranks in processes of their own whose GPUs store into each other: NVSHMEM.

Knows nothing of kernels and plans. What peers store into lies in one symmetric allocation, which
NVSHMEM maps into every process: kernels reach a peer by plain stores to those addresses, so nothing
of NVSHMEM runs on the device. Its calls that start, reserve, free and end are collective: a rank
that has failed alone makes none of them and ends without.

Seen with nvshmem4py 0.4.1 over NVSHMEM 3.4.5 (H200, 2026-11): 1, 2 and 8 processes on one GPU,
which then take turns, and one on each of two GPUs.
"""

import importlib
import logging
import os
import pickle
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from tilepipe.fabric.device_heap import DeviceHeap, device_bytes
from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.meeting import Meeting
from tilepipe.fabric.table import Slot
from tilepipe.fabric.watch import PeerAborted

__all__ = ["NvshmemHeap", "meet_by_environment"]

_LOG = logging.getLogger(__name__)

_VERSIONS = ((0, 4), (0, 5))  # of nvshmem4py: from the first, below the second
# Beside our allocation NVSHMEM keeps words of its own in the symmetric heap.
_HEADROOM_BYTES = 256 * 2**20
_ALIGN = 128  # bulk copies; NVSHMEM gives 512
# After all waits of a launch were told to stop.
_IDLE_S = 5.0


def meet_by_environment(num_ranks: int, *, limit_s: float) -> Meeting:
    """The meeting of all ranks that one launcher has started, by what it has left in RANK,
    WORLD_SIZE, MASTER_ADDR and MASTER_PORT; a rank alone needs none of them."""
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    if num_ranks == 1:
        return Meeting(HashStore(), rank=0, num_ranks=1, limit_s=limit_s)
    store, rank, size = next(rendezvous("env://"))
    assert size == num_ranks, f"{size} processes for {num_ranks} ranks"
    return Meeting(store, rank=rank, num_ranks=num_ranks, limit_s=limit_s)


class NvshmemHeap(DeviceHeap):
    """Buffers of the one rank of this process, and where those of its peers are mapped."""

    def __init__(
        self, specs: Mapping[Slot, ArraySpec], *, meeting: Meeting, device: torch.device
    ) -> None:
        """Reserve zeroed memory, on all ranks together; they return when each has mapped all.

        `device` is the current one. Raises ValueError without NVSHMEM, or where a peer's memory
        cannot be stored into, MemoryError, and PeerAborted when a peer has raised.
        """
        rank = meeting.rank
        super().__init__(
            num_ranks=meeting.num_ranks,
            ranks=range(rank, rank + 1),
            rank_bytes=device_bytes(specs),
            device=device,
        )
        self._meeting = meeting
        self._library: Any = None  # nvshmem.core, once it has started
        self._memory: torch.Tensor | None = None  # symmetric
        self._abort_words: list[torch.Tensor] = []  # of all ranks
        self._closed = False
        self._side = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._one = torch.ones(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        # Peers store into the first columns of the table.
        symmetric = {slot: spec for slot, spec in specs.items() if slot <= Slot.links}
        private = {slot: spec for slot, spec in specs.items() if slot > Slot.links}
        with ExitStack() as undo:
            undo.callback(self.close, failed=True)
            self._library = _started_library(meeting, device, device_bytes(symmetric))
            self._reserve(rank, symmetric)
            own = torch.zeros(device_bytes(private), dtype=torch.uint8, device=device)
            self._lay_out(rank, private, own)
            self._map_peers(rank, symmetric)
            self._publish_table()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            self.barrier()  # nobody stores into memory that its owner has yet to zero
            undo.pop_all()

    def _reserve(self, rank: int, symmetric: Mapping[Slot, ArraySpec]) -> None:
        num_bytes = device_bytes(symmetric)
        try:
            self._memory = self._library.tensor((num_bytes,), dtype=torch.uint8)
        except self._library.NvshmemError as error:
            raise MemoryError(
                f"{num_bytes / 2**20:.1f} MiB of symmetric memory ({error}); lower "
                "workload.num_tokens, or set a smaller kernel.capacity_factor"
            ) from None
        assert self._memory.data_ptr() % _ALIGN == 0, "bulk copies could not store here"
        self._memory.zero_()
        self._lay_out(rank, symmetric, self._memory)

    def _map_peers(self, rank: int, symmetric: Mapping[Slot, ArraySpec]) -> None:
        assert self._memory is not None
        for peer in range(self.num_ranks):
            if peer == rank:
                # Asked for its own mapping, nvshmem4py counts a user more and never frees.
                self._abort_words.append(self.tensor(rank, Slot.abort))
                continue
            try:
                theirs = self._library.get_peer_tensor(self._memory, peer)
            except self._library.NvshmemError as error:
                raise ValueError(
                    f"launch.fabric=nvshmem: rank {rank} on {self.device} cannot store into the "
                    f"memory of rank {peer} ({error}): their GPUs have no peer access; take GPUs "
                    "that are linked (`python -m tilepipe.doctor` tells), or type "
                    "launch.fabric=loopback to let the ranks share one"
                ) from None
            self._note(peer, symmetric, theirs.data_ptr())
            place = int(self._addresses[peer, Slot.abort]) - theirs.data_ptr()
            self._abort_words.append(theirs[place : place + 4].view(torch.int32))

    def look_for_peers(self) -> None:
        self._meeting.check_peers()

    def check_peers(self) -> None:
        (rank,) = self.ranks
        if int(self.tensor(rank, Slot.abort)):
            raise PeerAborted(f"rank {rank} stopped because another rank gave up")

    def barrier(self) -> None:
        self._meeting.barrier()

    def all_agree(self, yes: bool) -> bool:
        return self._meeting.all_agree(yes)

    def close(self, *, failed: bool) -> None:
        """End NVSHMEM together with all ranks, once; without it where one cannot, which is logged.

        After a failure of this rank, kernels of all ranks that wait are told to stop.
        """
        if self._closed:
            return
        self._closed = True
        if failed:
            self._stop_all()
        started = self._library is not None
        idle = self._is_idle()
        together = self._meeting.leave(fine=started and idle)
        if together:
            self._end_library(failed)
        elif started:
            why = "a rank has ended alone, or its GPU answers no more"
            if not idle:
                why = f"{self.device} is not idle, or answers no more"
            _LOG.warning("NVSHMEM is not finalized: %s", why)

    def _stop_all(self) -> None:
        self._meeting.fail()
        try:
            # By a copy engine, on a stream of its own: a waiting kernel may hold every SM.
            with torch.cuda.stream(self._side):
                for word in self._abort_words:
                    word.copy_(self._one, non_blocking=True)
        except RuntimeError:
            _LOG.warning("%s takes no word to stop its peers", self.device, exc_info=True)

    def _is_idle(self) -> bool:
        """Whether the device has ended all work, and would take more; waits for a while."""
        if self.device.type != "cuda":
            return True
        deadline = time.monotonic() + _IDLE_S
        try:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            while not done.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > deadline:
                    return False
                time.sleep(1e-3)
        except RuntimeError:  # a fault that ended the context
            return False
        return True

    def _end_library(self, failed: bool) -> None:
        self._abort_words.clear()
        self._tensors.clear()
        bindings = importlib.import_module("nvshmem.bindings.nvshmem")
        errors = (self._library.NvshmemError, bindings.NVSHMEMError, RuntimeError)
        try:
            if self._memory is not None:
                self._library.free_tensor(self._memory)
            self._library.finalize()
        except errors:
            if not failed:
                raise
            # What made this rank end is the error to tell.
            _LOG.warning("NVSHMEM could not be finalized", exc_info=True)
        self._memory = None


def _started_library(meeting: Meeting, device: torch.device, num_bytes: int) -> Any:
    """The module nvshmem.core, initialised on all ranks of the meeting."""
    os.environ.update(
        # Unset, NVSHMEM may use multicast of NVLink, and hold NCCL to be there for it.
        NVSHMEM_DISABLE_NVLS="1",
        NVSHMEM_DISABLE_NCCL="1",
        NVSHMEM_SYMMETRIC_SIZE=str(num_bytes + _HEADROOM_BYTES),
    )
    core = _library()
    from cuda.core import Device

    own = Device(device.index)
    own.set_current()
    told = meeting.told_by_first(lambda: pickle.dumps(core.get_unique_id()).hex())
    core.init(
        device=own,
        uid=pickle.loads(bytes.fromhex(told)),
        rank=meeting.rank,
        nranks=meeting.num_ranks,
        initializer_method="uid",
    )
    return core


def _library() -> Any:
    """The module nvshmem.core of a version that we know, its library found."""
    major = (torch.version.cuda or "13").partition(".")[0]
    step = (
        f"python -m pip install 'tilepipe[cu{major}]', or type launch.fabric=loopback to let the "
        "ranks share one GPU"
    )
    try:
        version = str(importlib.import_module("nvshmem").__version__)
    except ImportError as error:
        raise ValueError(
            f"launch.fabric=nvshmem: nvshmem4py is missing ({error}); {step}"
        ) from None
    low, high = _VERSIONS
    if not low <= tuple(map(int, re.findall(r"\d+", version)[:2])) < high:
        wanted = ">={}.{},<{}.{}".format(*low, *high)
        raise ValueError(
            f"launch.fabric=nvshmem: nvshmem4py {version} is installed, and this version needs "
            f"{wanted}; {step}"
        )
    try:
        core = importlib.import_module("nvshmem.core")
        importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvshmem_host")
    except (ImportError, RuntimeError) as error:
        raise ValueError(
            f"launch.fabric=nvshmem: nvshmem4py {version} finds no library of NVSHMEM ({error}); "
            f"{step}"
        ) from None
    return core
