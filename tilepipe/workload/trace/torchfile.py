"""Tensors in files of `torch.save`, read without torch and without running what a file says.

Knows nothing of what a tensor means.

A file is a zip archive: `data.pkl` describes the object, and one stored member per storage holds
its bytes. The description is a pickle, which may name any function to call; this reader knows the
few names that tensors, plain containers and numbers need, and refuses every other one unseen. The
zip form is what torch writes since 1.6 (read here as 2.13 writes it).
"""

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.refusals import Refusal, refusal
from tilepipe.workload.trace.stored import BROKEN

__all__ = ["Tensor", "open_torch"]

# torch's names of storages -> element type; recordings are integers.
_STORAGES = {
    "ByteStorage": "<u1",
    "CharStorage": "<i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
}
_RESAVE = "load it where it was recorded and store its arrays with numpy.savez"


@dataclass(frozen=True)
class Tensor:
    """A tensor that stays in the file until it is read."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements
    offset: int  # elements
    dtype: np.dtype[Any]
    archive: zipfile.ZipFile
    member: str

    def read(self) -> NDArray[Any]:  # shape
        """Its values; EOFError where the storage is too short for them."""
        span = sum(
            (size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)
        )
        num_elements = 0 if 0 in self.shape else span + 1
        with self.archive.open(self.member) as file:
            file.seek(self.offset * self.dtype.itemsize)
            content = file.read(num_elements * self.dtype.itemsize)
        if len(content) < num_elements * self.dtype.itemsize:
            raise EOFError("a storage ends too early")
        flat = np.frombuffer(content, self.dtype)
        strides = [stride * self.dtype.itemsize for stride in self.strides]
        return np.lib.stride_tricks.as_strided(flat, self.shape, strides, writeable=False)


@contextmanager
def open_torch(path: str) -> Iterator[Any]:
    """The saved object, tensors as `Tensor`; refuses what holds anything but plain data."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            described = [name for name in names if name.rpartition("/")[2] == "data.pkl"]
            if len(described) != 1:
                raise refusal(path, "is an archive without data.pkl, not of torch.save", _RESAVE)
            prefix = described[0].removesuffix("data.pkl")
            order = f"{prefix}byteorder"
            if order in names and archive.read(order) != b"little":
                raise refusal(path, "was written on a big-endian machine", _RESAVE)
            with archive.open(described[0]) as file:
                yield _Unpickler(path, file, archive, prefix).load()
    except Refusal:
        raise
    except (*BROKEN, pickle.UnpicklingError, IndexError):
        found = "no file of torch.save in its zip form, or cut short"
        raise refusal(path, found, f"record it again, or {_RESAVE}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, path: str, file: IO[bytes], archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(file)
        self._path, self._archive, self._prefix = path, archive, prefix

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and name in _STORAGES:
            return np.dtype(_STORAGES[name])
        raise refusal(self._path, f"asks to load {module}.{name}, which is no plain data", _RESAVE)

    def persistent_load(self, pid: Any) -> "_Storage":
        kind, dtype, key = pid[0], pid[1], pid[2]
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("no storage")
        return _Storage(dtype, self._archive, f"{self._prefix}data/{key}")


@dataclass(frozen=True)
class _Storage:
    dtype: np.dtype[Any]
    archive: zipfile.ZipFile
    member: str


def _rebuild(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> Tensor:
    """What torch's function of this name is given; the rest concerns gradients."""
    numbers = (offset, *shape, *strides)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise pickle.UnpicklingError("no shape")
    if len(shape) != len(strides) or not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("no tensor")
    return Tensor(
        tuple(shape), tuple(strides), offset, storage.dtype, storage.archive, storage.member
    )
