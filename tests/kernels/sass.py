"""What the assembler made of a kernel: its cubin's attributes, and its instructions as nvdisasm of
the package nvidia-cuda-nvdisasm names them."""

import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import distribution
from itertools import pairwise

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")
# Attributes of `.nv.info` whose value is a kernel's number and a word; by how nvdisasm calls them.
_OF_KERNEL, _REGCOUNT, _FRAME_SIZE = 0x04, 0x2F, 0x11


@dataclass(frozen=True)
class MachineCode:
    """Code of a cubin's only kernel."""

    num_registers: int  # of a thread
    frame_bytes: int  # of a thread: spills and arrays that found no register
    opcodes: tuple[str, ...]  # in order, with their modifiers


def disassemble(cubin: bytes) -> MachineCode:
    """Read a cubin that holds one kernel."""
    return disassemble_all([cubin])[0]


def disassemble_all(cubins: Sequence[bytes]) -> list[MachineCode]:
    """Read several, each with one kernel, in the third of a second that nvdisasm takes for one."""
    texts, found = [], []
    for cubin in cubins:
        sections = dict(_sections(cubin))
        (text,) = (data for name, data in sections.items() if name.startswith(".text."))
        texts.append(text)
        found.append({_REGCOUNT: [], _FRAME_SIZE: []})
        for number, value in _attributes(sections[".nv.info"]):
            found[-1].setdefault(number, []).append(value)
    ends = [0]
    for text in texts:
        ends.append(ends[-1] + len(text))
    instructions = _instructions(b"".join(texts))
    codes = []
    for values, (start, end) in zip(found, pairwise(ends), strict=True):
        assert len(values[_REGCOUNT]) == len(values[_FRAME_SIZE]) == 1, "not one kernel"
        codes.append(
            MachineCode(
                num_registers=values[_REGCOUNT][0],
                frame_bytes=values[_FRAME_SIZE][0],
                opcodes=tuple(name for place, name in instructions if start <= place < end),
            )
        )
    return codes


def _instructions(text: bytes) -> list[tuple[int, str]]:
    """Place and name, modifiers included, of every instruction."""
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(text)
        file.flush()
        command = [_tool(), "--binary", "SM90a", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [(int(place, 16), name) for place, name in _INSTRUCTION.findall(shown)]


@cache
def _tool() -> str:
    package = distribution("nvidia-cuda-nvdisasm")
    (tool,) = (path for path in package.files or () if path.stem == "nvdisasm")
    return str(package.locate_file(tool))


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of every section of a 64-bit little-endian ELF file."""
    (first,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    # Name, type, flags, address, offset, bytes.
    headers = [struct.unpack_from("<IIQQQQ", elf, first + size * n) for n in range(count)]
    words = headers[names][4]
    for name, kind, _, _, offset, num_bytes in headers:
        begin = words + name
        held = b"" if kind == 8 else elf[offset : offset + num_bytes]  # 8: without content
        yield elf[begin : elf.index(b"\0", begin)].decode(), held


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """Number and value of attributes of kernels in `.nv.info`."""
    place = 0
    while place < len(info):
        form, number, size = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == _OF_KERNEL:
            if size == 8:
                yield number, struct.unpack_from("<II", info, place)[1]
            place += size
