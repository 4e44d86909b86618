"""Memory that interpreted kernels see: the process's own, by address, and that of CTAs.

Knows nothing of instructions. Every access lies inside one known buffer and is aligned, or raises
Fault; shared memory, and buffers that are asked for it, refuse reads of what nobody has written.
"""

import ctypes
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

__all__ = ["DYNAMIC_BASE", "Fault", "Memory", "Shared"]

# Where dynamic shared memory begins: as the device, below it lies what the system keeps.
DYNAMIC_BASE = 1024
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Fault(AssertionError):
    """What a device would have answered with an error, or, worse, with nothing."""


@dataclass(frozen=True)
class _Buffer:
    name: str
    begin: int
    end: int


class Memory:
    """Buffers of this process, which must outlive it."""

    def __init__(self, buffers: Mapping[str, tuple[int, int]]) -> None:
        """`buffers`: address and bytes by name."""
        kept = sorted((begin, size, name) for name, (begin, size) in buffers.items() if size)
        self._buffers = [_Buffer(name, begin, begin + size) for begin, size, name in kept]
        self._begins = np.array([b.begin for b in self._buffers], np.uint64)
        self._ends = np.array([b.end for b in self._buffers], np.uint64)
        self._starts = [b.begin for b in self._buffers]
        words = np.cumsum([0] + [(b.end - b.begin + 3) // 4 for b in self._buffers])
        self._first_word, self.num_words = words[:-1], int(words[-1])
        self.base = self._buffers[0].begin & ~15
        size = (self._buffers[-1].end - self.base + 15) & ~15
        bytes_ = np.frombuffer((ctypes.c_uint8 * size).from_address(self.base), np.uint8)
        self._units = {width: bytes_.view(unit) for width, unit in _UNITS.items()}

    def named(self, address: int) -> str:
        """The buffer that holds an address, and the place in it."""
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._buffers[place].end:
            return f"{address:#x}, which is in no buffer"
        buffer = self._buffers[place]
        return f"{buffer.name}+{address - buffer.begin}"

    def word_numbers(self, addresses: np.ndarray) -> np.ndarray:
        """Number of the 32-bit word at each address, counted over all buffers."""
        place = self._begins.searchsorted(addresses, "right") - 1
        return self._first_word[place] + ((addresses - self._begins[place]) // 4).astype(np.int64)

    def named_word(self, number: int) -> str:
        place = int(self._first_word.searchsorted(number, "right")) - 1
        return f"{self._buffers[place].name}+{4 * (number - int(self._first_word[place]))}"

    def check(self, addresses: np.ndarray, size: int) -> None:
        """Refuse accesses of `size` bytes that are not whole inside one buffer, or not aligned."""
        place = self._begins.searchsorted(addresses, "right")
        # Below the first buffer `place` is 0: the end of the last one then stands for none.
        bad = (place == 0) | (addresses > self._ends[place - 1] - np.uint64(size))
        if bad.any():
            self._refuse(int(addresses[bad][0]), size)
        if (addresses & np.uint64(size - 1)).any():
            (wrong,) = np.nonzero(addresses & np.uint64(size - 1))
            raise Fault(f"{size} bytes at {self.named(int(addresses[wrong[0]]))} are not aligned")

    def _refuse(self, address: int, size: int) -> None:
        nearest = bisect_right(self._starts, address) - 1
        before = self._buffers[max(nearest, 0)]
        raise Fault(
            f"{size} bytes at {address:#x} lie in no buffer; {address - before.begin} bytes behind "
            f"the beginning of {before.name}, which has {before.end - before.begin}"
        )

    def load(self, addresses: np.ndarray, width: int, count: int = 1) -> np.ndarray:
        """Values of `width` bytes, (lanes,) or (lanes, count)."""
        self.check(addresses, width * count)
        return self._units[width][self._places(addresses, width, count)]

    def store(self, addresses: np.ndarray, values: np.ndarray, width: int, count: int = 1) -> None:
        """As `load`, the other way; of lanes that write one place the last one stays."""
        self.check(addresses, width * count)
        self._units[width][self._places(addresses, width, count)] = values

    def bytes_at(self, address: int, size: int) -> np.ndarray:
        """Bytes of one buffer, in place."""
        place = bisect_right(self._starts, address) - 1
        if size and (place < 0 or address + size > self._buffers[place].end):
            self._refuse(address, size)
        begin = address - self.base
        return self._units[1][begin : begin + size]

    def _places(self, addresses: np.ndarray, width: int, count: int) -> np.ndarray:
        place = ((addresses - np.uint64(self.base)) // np.uint64(width)).astype(np.int64)
        return place if count == 1 else place[:, None] + np.arange(count)


class Shared:
    """Shared memory of all CTAs of a launch, one behind the other."""

    def __init__(self, num_ctas: int, size: int) -> None:
        """`size`: dynamic bytes of a CTA."""
        self.size = size
        self._stride = (size + 15) & ~15
        self.num_bytes = num_ctas * self._stride
        self._bytes = np.full(num_ctas * self._stride, 0xA5, np.uint8)
        self._known = np.zeros(num_ctas * self._stride, np.uint8)
        self._units = {width: self._bytes.view(unit) for width, unit in _UNITS.items()}
        self._written = {width: self._known.view(unit) for width, unit in _UNITS.items()}

    def check(self, ctas: np.ndarray, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes from the beginning of all, of accesses that lie inside and are aligned."""
        begin = addresses.astype(np.int64) - DYNAMIC_BASE
        bad = (begin < 0) | (begin + size > self.size)
        if bad.any():
            raise Fault(
                f"{size} bytes at {int(begin[bad][0])} of shared memory, which has {self.size}"
            )
        if (begin & (size - 1)).any():
            raise Fault(f"{size} bytes of shared memory are not aligned")
        return begin + ctas * self._stride

    def load(
        self, ctas: np.ndarray, addresses: np.ndarray, width: int, count: int = 1
    ) -> np.ndarray:
        """Values; of a vector some may be unknown: the compiler reads past the end of a column."""
        place = self._places(self.check(ctas, addresses, width * count), width, count)
        known = self._written[width][place] == np.iinfo(_UNITS[width]).max
        if not (known if count == 1 else known.any(1)).all():
            raise Fault("shared memory is read that nobody has written")
        return self._units[width][place]

    def store(
        self,
        ctas: np.ndarray,
        addresses: np.ndarray,
        values: np.ndarray,
        width: int,
        count: int = 1,
    ) -> None:
        place = self._places(self.check(ctas, addresses, width * count), width, count)
        self._units[width][place] = values
        self._written[width][place] = np.iinfo(_UNITS[width]).max

    def bytes_at(
        self, cta: int, address: int, size: int, *, align: int
    ) -> tuple[slice, np.ndarray]:
        """Where bytes lie, and the bytes, in place."""
        begin = address - DYNAMIC_BASE
        if begin < 0 or begin + size > self.size or begin % align:
            raise Fault(f"{size} bytes at {begin} of shared memory, which has {self.size}")
        begin += cta * self._stride
        return slice(begin, begin + size), self._bytes[begin : begin + size]

    def forget(self, place: slice) -> None:
        """From now on nobody may read these bytes until they are written."""
        self._known[place] = 0

    def learn(self, place: slice, values: np.ndarray) -> None:
        self._bytes[place] = values
        self._known[place] = 0xFF

    def is_known(self, place: slice) -> bool:
        return bool((self._known[place] == 0xFF).all())

    def _places(self, begin: np.ndarray, width: int, count: int) -> np.ndarray:
        place = begin // width
        return place if count == 1 else place[:, None] + np.arange(count)
