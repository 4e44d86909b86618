"""Arrays that lie in files of NumPy or archives, read a few rows at a time.

Knows nothing of what an array means.

Never a memory map: mapped pages count as memory of the process. An array in column order is loaded
whole.
"""

import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from tilepipe.workload.trace.refusals import Refusal, refusal

__all__ = ["BROKEN", "Stored", "open_arrays", "stored"]

# What libraries raise for files that are no arrays, end too early or were damaged: NumPy parses a
# header as Python, and an archive may name a method that does not exist.
BROKEN = (
    *(AttributeError, EOFError, KeyError, OSError, OverflowError, RuntimeError, SyntaxError),
    *(TypeError, ValueError, lzma.LZMAError, struct.error, tokenize.TokenError),
    *(zipfile.BadZipFile, zlib.error),
)


@dataclass(frozen=True, eq=False)
class Stored:
    """An array in row-major order somewhere in an open file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    file: IO[bytes] | None = None
    base: int = 0  # offset of the array's first byte
    whole: NDArray[Any] | None = None  # an array that was loaded at once

    def rows(self, start: int, stop: int) -> NDArray[Any]:  # (stop - start, *shape[1:])
        """Elements start..stop of the first axis; EOFError where the file ends too early."""
        if self.file is None:
            assert self.whole is not None
            return self.whole[start:stop]
        row_bytes = self.dtype.itemsize * math.prod(self.shape[1:])
        self.file.seek(self.base + start * row_bytes)
        content = self.file.read((stop - start) * row_bytes)
        if len(content) < (stop - start) * row_bytes:
            raise EOFError("the array ends too early")
        return np.frombuffer(content, self.dtype).reshape(stop - start, *self.shape[1:])

    def layer(self, layer: int) -> "Stored":
        """Element `layer` of the first axis, itself an array."""
        if self.whole is not None:
            return replace(self, shape=self.shape[1:], whole=self.whole[layer])
        skipped = layer * self.dtype.itemsize * math.prod(self.shape[1:])
        return replace(self, shape=self.shape[1:], base=self.base + skipped)


def stored(file: IO[bytes], num_bytes: int) -> Stored:
    """The array of a `.npy` file of this many bytes; raises one of BROKEN."""
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"version {version} of the format")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, by_column, dtype = read(file)
    base = file.tell()
    if dtype.hasobject or base + dtype.itemsize * math.prod(shape) > num_bytes:
        raise ValueError("not numbers, or cut short")
    if by_column and len(shape) > 1:
        content = np.frombuffer(file.read(), dtype)
        whole = content.reshape(shape, order="F")
        return Stored(shape, dtype, whole=whole)
    return Stored(shape, dtype, file, base)


@contextmanager
def open_arrays(path: str) -> Iterator[dict[str, Stored]]:
    """Arrays of a `.npy`, under the name "", or of a `.npz`; refuses what is neither."""
    try:
        with open(path, "rb") as file, ExitStack() as stack:
            yield _arrays(file, stack)
    except Refusal:
        raise
    except BROKEN:
        raise refusal(path, "not an array file of numbers, or cut short") from None


def _arrays(file: IO[bytes], stack: ExitStack) -> dict[str, Stored]:
    is_archive = file.read(2) == b"PK"
    num_bytes = file.seek(0, 2)
    file.seek(0)
    if not is_archive:
        return {"": stored(file, num_bytes)}
    archive = stack.enter_context(zipfile.ZipFile(file))
    return {
        member.filename.removesuffix(".npy"): stored(
            stack.enter_context(archive.open(member)), member.file_size
        )
        for member in archive.infolist()
    }
