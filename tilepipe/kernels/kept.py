"""Compile a kernel once: in a process, and on disk for the points of a sweep that come later.

Knows nothing of what a kernel does and how it is compiled.

A point runs in a fresh process, and most points of a sweep launch the same code. Compiling what a
point of dispatch -> GEMM launches takes a core 8 s, loading it 0.07 s. What is kept is found by its
arguments, by all sources of this package, by the compiler's version, Python's and the settings in
its environment: whatever differs is compiled anew.

Nothing is kept or found outside of `codes_kept`: tests that take a kernel apart by patching its
source in memory must never meet a whole one, and never leave a broken one behind.
"""

import ctypes
import hashlib
import logging
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tilepipe.kernels.compile import Code
from tilepipe.stopping import temporary_folder

__all__ = ["codes_kept", "default_folder", "kept", "load_code", "store_code"]

# What a folder may hold, codes of about 110 KB each. Those not asked for longest leave.
_MOST_BYTES = 256 * 2**20
# A process that compiles is done with its `.new-` folder after seconds; one this old was killed.
_GIVEN_UP_S = 24 * 3600.0
_CODE = re.compile(r"[0-9a-f]{64}")  # as `_key` names them; what is named otherwise is not ours
_HALF_MADE = re.compile(r"\.new-\w+")
_PACKAGE = Path(__file__).resolve().parents[1]
_COMPILER = "nvidia-cutlass-dsl"
_COMPILER_SETTINGS = "CUTE_DSL_"
_ARCH = "CUTE_DSL_ARCH"  # set when a process first compiles; every call names its own
_OBJECT, _PTX, _CUBIN, _DIGEST = "code.o", "code.ptx", "code.cubin", "digest"
_PREFIX = "tilepipe"  # of the symbols of an object

_folder: ContextVar[Path | None] = ContextVar("folder of kept codes", default=None)


def default_folder() -> Path:
    """Where codes of this user lie: below XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tilepipe" / "code"


@contextmanager
def codes_kept(folder: Path) -> Iterator[None]:
    """Within, what `kept` functions compile is kept in `folder`, and found there."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)


def kept(compiled: Callable[..., Code]) -> Callable[..., Code]:
    """Decorator of a function that compiles for its arguments, all of them plain values."""

    @cache
    @wraps(compiled)
    def found(*arguments: Any, **named: Any) -> Code:
        folder = _folder.get()
        if folder is None:
            return compiled(*arguments, **named)
        place = folder / _key(compiled.__qualname__, arguments, named)
        code = load_code(place)
        if code is None:
            code = compiled(*arguments, **named)
            store_code(place, code)
        return code

    return found


def load_code(place: Path) -> Code | None:
    """What `store_code` has left at a place; None where nothing lies, or something damaged."""
    try:
        names = (_OBJECT, _PTX, _CUBIN, _DIGEST)
        if not all((place / name).is_file() for name in names):  # a pipe would never end
            return None
        parts = {name: (place / name).read_bytes() for name in (_OBJECT, _PTX, _CUBIN)}
        if (place / _DIGEST).read_text(encoding="ascii") != _digest(*parts.values()):
            return None
    except (OSError, UnicodeDecodeError):
        return None
    with suppress(OSError):  # a folder that can only be read
        os.utime(place)  # asked for: not the next to leave
    import cutlass.cute as cute
    from cutlass.base_dsl.common import DSLRuntimeError

    _load_runtime()
    try:
        function = cute.runtime.load_module(str(place / _OBJECT))[_PREFIX]
    # Whole, and yet not what this library loads, or dropped meanwhile by another process.
    except (DSLRuntimeError, RuntimeError, OSError):
        return None
    return Code(function=function, ptx=parts[_PTX].decode(), cubin=parts[_CUBIN])


def store_code(place: Path, code: Code) -> None:
    """Keep a code at a place, whole or not at all; where that fails a line of the log says so.

    Of processes that store the same code at once the first one's stays.
    """
    from cutlass.base_dsl.common import DSLRuntimeError

    _load_runtime()
    try:
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with temporary_folder(".new-", beside=place.parent) as folder:
            made = folder / place.name
            made.mkdir()
            code.function.export_to_c(
                file_path=str(made), file_name=Path(_OBJECT).stem, function_prefix=_PREFIX
            )
            (made / _PTX).write_text(code.ptx, encoding="utf-8")
            (made / _CUBIN).write_bytes(code.cubin)
            parts = [(made / part).read_bytes() for part in (_OBJECT, _PTX, _CUBIN)]
            (made / _DIGEST).write_text(_digest(*parts), encoding="ascii")
            _move(made, place)
        _make_room(place.parent)
    except (OSError, DSLRuntimeError, RuntimeError) as error:
        logging.getLogger(__name__).info("%s: code is not kept: %s", place, error)


@cache
def _load_runtime() -> None:
    """Show objects what they call: CuTe DSL 4.8.1 does so where CUTE_DSL_ARCH was set early."""
    from cutlass.cute.runtime import find_runtime_libraries

    for path in find_runtime_libraries(enable_tvm_ffi=False):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def _move(made: Path, place: Path) -> None:
    """Put a whole code in its place, over a damaged one; not over that of another process."""
    if load_code(place) is None:
        shutil.rmtree(place, ignore_errors=True)
    try:
        made.rename(place)
    except OSError:
        if not place.is_dir():
            raise


def _make_room(folder: Path) -> None:
    """Drop codes until the rest is within bounds, and what killed processes have begun."""
    held = []
    for place in folder.iterdir():
        if place.is_symlink():
            continue
        with suppress(OSError):  # dropped by another process
            asked_s = place.stat().st_mtime
            if _CODE.fullmatch(place.name):
                held.append((asked_s, sum(file.stat().st_size for file in _files(place)), place))
            elif _HALF_MADE.fullmatch(place.name) and time.time() - asked_s > _GIVEN_UP_S:
                shutil.rmtree(place, ignore_errors=True)
    too_many = sum(num_bytes for _, num_bytes, _ in held) - _MOST_BYTES
    for _, num_bytes, place in sorted(held):
        if too_many <= 0:
            return
        # The digest first: without it no process takes the rest for a whole code.
        with suppress(OSError):  # dropped by another process, or holds what is not ours
            for file in _files(place):
                file.unlink()
            place.rmdir()
        too_many -= num_bytes


def _files(place: Path) -> list[Path]:
    """The digest, and what code is made of, a header for C included."""
    files = (place / _DIGEST, *sorted(place.glob(f"{Path(_OBJECT).stem}.*")))
    return [file for file in files if file.is_file()]


def _key(function: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> str:
    asked = f"{function}{arguments!r}{sorted(named.items())!r}"
    assert " at 0x" not in asked, f"arguments of {function} are told apart by address"
    settings = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(_COMPILER_SETTINGS) and name != _ARCH
    )
    return _digest(asked.encode(), repr(settings).encode(), _makers().encode())


@cache
def _makers() -> str:
    """All that turns arguments into code: sources, compiler, Python."""
    sources = [
        (str(path.relative_to(_PACKAGE)), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(_PACKAGE.rglob("*.py"))
    ]
    compilers = sorted(
        (found.name, found.version)
        for found in distributions()
        if found.name and found.name.replace("_", "-").startswith(_COMPILER)
    )
    return repr((sources, compilers, platform.python_version(), platform.machine()))


def _digest(*parts: bytes) -> str:
    told = b"".join(hashlib.sha256(part).digest() for part in parts)
    return hashlib.sha256(told).hexdigest()
