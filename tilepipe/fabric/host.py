"""Symmetric memory for rank processes of one host: a shared file per rank, mapped by every rank.

Knows nothing of rows, counters or the launch protocol. Single-writer words and payload rely on the
store order of x86-64 (loads are not reordered with loads, nor stores with stores); other processors
are refused.

A rank reserves its file with posix_fallocate, so that a full /dev/shm is found before a store can
die by SIGBUS, and moves to a file in the spill folder when there is no room. Files are unlinked as
soon as every rank has mapped them; while they have a name their owner holds a shared lock, and
whoever comes next removes the ones that nobody holds.
"""

import contextlib
import errno
import fcntl
import math
import mmap
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from tilepipe.fabric.watch import Watch

__all__ = ["ArraySpec", "HeapFull", "HeapPlace", "HostHeap", "heap_bytes", "remove_leftovers"]

_ALIGN = 4096
_PREFIX = "tilepipe-heap-"
_NO_ROOM = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.ENOENT,
    errno.EACCES,
    errno.EROFS,
    errno.EINVAL,
}


class HeapFull(OSError):
    """Neither shared memory nor the spill folder had room."""


@dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One symmetric array: same shape, dtype and offset on every rank, zero at first."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, kw_only=True)
class HeapPlace:
    """Where the files of one group of ranks go; equal on all ranks."""

    token: str  # names the group; unique among live groups
    shm_dir: Path = Path("/dev/shm")
    spill_dir: Path | None = None  # taken when shm_dir has no room

    def folders(self) -> list[Path]:
        return [folder for folder in (self.shm_dir, self.spill_dir) if folder is not None]

    def names(self, rank: int) -> list[Path]:
        """Every path that the file of `rank` may have."""
        return [folder / f"{_PREFIX}{self.token}-{rank}" for folder in self.folders()]


class HostHeap:
    """The symmetric arrays of a group of rank processes, seen from one rank."""

    def __init__(
        self,
        place: HeapPlace,
        *,
        rank: int,
        num_ranks: int,
        specs: Mapping[str, ArraySpec],
        watchdog_s: float,
        start_limit_s: float,
    ) -> None:
        """Create, exchange and map; returns when every rank has mapped every file.

        Raises HeapFull when there is no room, ValueError on a processor without x86-64 store order.
        """
        _require_store_order()
        self.rank, self.num_ranks = rank, num_ranks
        self._start_limit_s = start_limit_s
        self._offsets, self._size = _offsets({**_own_specs(num_ranks), **specs})
        for folder in place.folders():
            remove_leftovers(folder)
        own_path, own_fd = _reserve(place, rank, self._size)
        try:
            maps = [self._map_peer(place, peer) for peer in range(num_ranks)]
            self._maps = maps
            self.watch = Watch(rank, self.array(rank, "abort"), watchdog_s, give_up=self.abort)
            self.barrier()
        finally:
            own_path.unlink(missing_ok=True)
            os.close(own_fd)

    @property
    def num_bytes(self) -> int:
        """Bytes that each rank has reserved."""
        return self._size

    def array(self, rank: int, name: str) -> NDArray[Any]:
        """The array `name` in the memory of `rank`."""
        offset, spec = self._offsets[name]
        count = math.prod(spec.shape)
        flat = np.frombuffer(self._maps[rank], spec.dtype, count, offset)
        return flat.reshape(spec.shape)

    def arrays(self, name: str) -> list[NDArray[Any]]:
        """The array `name` of every rank, by rank."""
        return [self.array(rank, name) for rank in range(self.num_ranks)]

    def barrier(self) -> None:
        """Return once every rank has entered as often as this one."""
        own = self.array(self.rank, "barrier")
        target = int(own[self.rank]) + 1
        for words in self.arrays("barrier"):
            words[self.rank] = target  # single writer: this rank; each peer reads its own copy
        self.watch.until(
            lambda: bool((own >= target).all()),
            lambda: (
                f"barrier {target}: ranks {np.flatnonzero(own < target).tolist()} are not there"
            ),
            limit=("launch.time_limit_s", self._start_limit_s),
        )

    def all_agree(self, yes: bool) -> bool:
        """Whether every rank says yes."""
        return all(self.said_by_all(int(yes)))

    def said_by_all(self, word: int) -> list[int]:
        """What every rank says, by rank; a barrier on both sides, so words never mix."""
        for words in self.arrays("vote"):
            words[self.rank] = word
        self.barrier()
        said: list[int] = self.array(self.rank, "vote").tolist()
        self.barrier()
        return said

    def abort(self) -> None:
        """Tell every peer, and the other threads of this rank, that this rank gives up."""
        for words in self.arrays("abort"):
            words[self.rank] = 1

    def _map_peer(self, place: HeapPlace, peer: int) -> mmap.mmap:
        deadline = time.monotonic() + self._start_limit_s
        while True:
            for path in place.names(peer):
                with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
                    return mmap.mmap(file.fileno(), self._size)
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {self.rank} waited {self._start_limit_s:g} s for the shared memory of "
                    f"rank {peer}: that rank did not start; see its log"
                )
            time.sleep(0.002)


def heap_bytes(specs: Mapping[str, ArraySpec], num_ranks: int) -> int:
    """Bytes that each rank of a HostHeap with these arrays reserves."""
    return _offsets({**_own_specs(num_ranks), **specs})[1]


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove heap files of runs that are gone, and say which."""
    removed = []
    for path in sorted(folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while an owner lives
            path.unlink()
            removed.append(path)
    return removed


def _require_store_order() -> None:
    machine = platform.machine()
    if machine.lower() not in ("x86_64", "amd64"):
        raise ValueError(
            f"launch.fabric=host: this processor is {machine}, but flags and rows in shared memory "
            "rely on the store order of x86-64; run on such a machine or on GPUs"
        )


def _own_specs(num_ranks: int) -> dict[str, ArraySpec]:
    """Words of the heap itself: one writer a word, the rank whose number it has."""
    words = ArraySpec(shape=(num_ranks,), dtype=np.int64)
    return dict.fromkeys(("barrier", "abort", "vote"), words)


def _offsets(specs: Mapping[str, ArraySpec]) -> tuple[dict[str, tuple[int, ArraySpec]], int]:
    offsets, end = {}, 0
    for name, spec in specs.items():
        offsets[name] = (end, spec)
        end += -(-max(spec.num_bytes, 1) // _ALIGN) * _ALIGN
    return offsets, end


def _reserve(place: HeapPlace, rank: int, size: int) -> tuple[Path, int]:
    """Create this rank's file with all its blocks; the name appears only when it is whole."""
    failures = []
    for path in place.names(rank):
        try:
            return path, _create(path, size)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            failures.append(f"{path.parent} ({os.strerror(error.errno)})")
    raise HeapFull(
        errno.ENOSPC,
        f"rank {rank} needs {size / 2**20:.1f} MiB of shared memory and found no room in "
        f"{_listed(failures)}; free some, lower workload.num_tokens, or set a smaller "
        "kernel.capacity_factor",
    )


def _create(path: Path, size: int) -> int:
    fresh = path.with_name(f"{path.name}.new")
    while True:
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            # Somebody clearing left-overs may have taken the file before the lock was held.
            if os.fstat(fd).st_nlink == 0:
                os.close(fd)
                continue
            os.posix_fallocate(fd, 0, size)
            fresh.rename(path)
        except OSError:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        return fd


def _listed(items: Sequence[str]) -> str:
    return " and ".join(items)
