"""Programs from which something is missing, or whose waits go one way only.

Knows nothing of what kernels are for, but how they wait: a first look that acquires, and a branch
over the late way, which polls and fences (tests/kernels/waits.py).
"""

from dataclasses import replace
from typing import Any

from tests.ptx.parse import Program

__all__ = ["find", "looking_again", "looking_late", "spoiled", "without", "without_order"]


def find(program: Program, opcode: str) -> list[int]:
    """Places of the instructions whose names begin so."""
    named = enumerate(program.instructions)
    return [place for place, one in named if one.opcode.startswith(opcode)]


def without(program: Program, *places: int) -> Program:
    """A program that does nothing where these instructions stood."""
    nothing = {"opcode": "nop", "operands": (), "guard": None}
    return _changed(program, dict.fromkeys(places, nothing))


def spoiled(program: Program, place: int) -> Program:
    """A program without this instruction; of an acquiring load, without its order alone."""
    acquires = program.instructions[place].opcode.startswith("ld.acquire")
    return (without_order if acquires else without)(program, place)


def without_order(program: Program, place: int) -> Program:
    """A program whose acquiring load at this place is a relaxed one."""
    opcode = program.instructions[place].opcode
    assert opcode.startswith("ld.acquire."), opcode
    return _changed(program, {place: {"opcode": opcode.replace("acquire", "relaxed")}})


def looking_late(program: Program) -> Program:
    """A program whose first looks find nothing: every wait polls, and a fence alone acquires."""
    changes: dict[int, dict[str, Any]] = {}
    for place in find(program, "ld.acquire"):
        look = program.instructions[place]
        width = look.parts[-1]
        lowest = str(-(2 ** (int(width[1:]) - 1)))
        changes[place] = {"opcode": f"mov.{width}", "operands": (look.operands[0], lowest)}
    return _changed(program, changes)


def looking_again(program: Program) -> Program:
    """A program that repeats its first looks until they find what they wait for: none fences."""
    changes: dict[int, dict[str, Any]] = {}
    labels = dict(program.labels)
    for place in find(program, "ld.acquire"):
        seen = program.instructions[place].operands[0]
        compared, found = (
            next(after for after in find(program, name) if after > place)
            for name in ("setp.ge", "bra")
        )
        (is_there, *compares), branch = (
            program.instructions[compared].operands,
            program.instructions[found],
        )
        assert (compares[0], branch.guard, branch.guard_is_negated) == (seen, is_there, False)
        labels[f"$again_{place}"] = place
        back = {"opcode": "bra", "operands": (f"$again_{place}",), "guard": None}
        changes[found + 1] = back
    return replace(_changed(program, changes), labels=labels)


def _changed(program: Program, changes: dict[int, dict[str, Any]]) -> Program:
    instructions = list(program.instructions)
    for place, change in changes.items():
        instructions[place] = replace(instructions[place], **change)
    return replace(program, instructions=tuple(instructions))
