"""Programs from which something is missing.

Knows nothing of what kernels are for.
"""

from dataclasses import replace

from tests.ptx.parse import Program

__all__ = ["find", "without"]


def find(program: Program, opcode: str) -> list[int]:
    """Places of the instructions whose names begin so."""
    named = enumerate(program.instructions)
    return [place for place, one in named if one.opcode.startswith(opcode)]


def without(program: Program, *places: int) -> Program:
    """A program that does nothing where these instructions stood."""
    instructions = list(program.instructions)
    for place in places:
        nothing = {"opcode": "nop", "operands": (), "guard": None}
        instructions[place] = replace(instructions[place], **nothing)
    return replace(program, instructions=tuple(instructions))
