"""What the assembler made of a kernel, as nvdisasm of the package nvidia-cuda-nvdisasm tells it."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import distribution

_ATTRIBUTE = r"EIATTR_{}\n(?:.*\n)*?.*index@.*\n.*\.word\s+(0x[0-9a-f]+)"
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)")


@dataclass(frozen=True)
class MachineCode:
    """Code of a cubin's only kernel."""

    num_registers: int  # of a thread
    frame_bytes: int  # of a thread: spills and arrays that found no register
    opcodes: tuple[str, ...]  # in order, with their modifiers


def disassemble(cubin: bytes) -> MachineCode:
    """Read a cubin that holds one kernel."""
    package = distribution("nvidia-cuda-nvdisasm")
    (tool,) = (path for path in package.files or () if path.stem == "nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(package.locate_file(tool)), "--no-dataflow", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, frame = (
        re.findall(_ATTRIBUTE.format(name), text) for name in ("REGCOUNT", "FRAME_SIZE")
    )
    assert len(registers) == len(frame) == 1, "not one kernel"
    return MachineCode(
        num_registers=int(registers[0], 16),
        frame_bytes=int(frame[0], 16),
        opcodes=tuple(_INSTRUCTION.findall(text)),
    )
