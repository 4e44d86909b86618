"""Compile a CuTe DSL entry for an architecture, with or without a GPU, and keep its code.

Knows nothing of what a kernel does.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilepipe.stopping import temporary_folder

__all__ = ["Code", "compile_code", "memory_instructions"]

_ELF = b"\x7fELF"


@dataclass(frozen=True, kw_only=True)
class Code:
    """What one entry became."""

    function: Any  # callable on a GPU host
    ptx: str
    cubin: bytes


def compile_code(entry: Any, arguments: Sequence[Any], *, arch: str = "sm_90a") -> Code:
    """Compile `entry` for stand-in `arguments` (fake tensors and pointers, symbolic sizes).

    The architecture is always given: without one CuTe DSL 4.8.1 silently builds for sm_100a where
    no driver answers. Raises what the DSL raises; asserts that code came out, since the DSL returns
    a path in place of code where its dump folder does not exist.
    """
    os.environ.setdefault("CUTE_DSL_ARCH", arch)  # read once, when cutlass is imported
    import cutlass.cute as cute

    with temporary_folder("tilepipe-code-") as folder:
        options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {folder}"
        function = cute.compile(entry, *arguments, options=options)
        ptx, cubin = function.__ptx__, function.__cubin__
    assert f".target {arch}" in ptx, f"PTX is not for {arch}"
    assert cubin[: len(_ELF)] == _ELF, "cubin is no ELF file"
    return Code(function=function, ptx=ptx, cubin=cubin)


def memory_instructions(ptx: str) -> list[str]:
    """Loads, stores, reductions, fences and barriers of a PTX text, in order, operands included."""
    lines = (line.strip() for line in ptx.splitlines())
    wanted = re.compile(
        r"(@!?%p\d+ )?(ld|st|red|atom|fence|bar|cp\.async|mbarrier)[.a-zA-Z0-9_:]*[\s;]"
    )
    return [line for line in lines if wanted.match(line) and ".param" not in line]
