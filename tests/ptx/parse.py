"""The text of one PTX kernel as instructions and labels. Knows nothing of what they do."""

import re
from dataclasses import dataclass

__all__ = ["Instruction", "Operand", "Program", "parse"]

# A register, a number or a name; a vector of those; or an address and what is added to it.
Operand = str | tuple[str, ...] | tuple[str, int]

_ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)(.*?)\{(.*)\}", re.DOTALL)
_PARAM = re.compile(r"\.param \.[usb](\d+)[^,]*?(\w+_param_\d+)")
_INSTRUCTION = re.compile(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
_PLACE = re.compile(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\d+))?\s*\]")


@dataclass(frozen=True)
class Instruction:
    """One instruction as written."""

    opcode: str  # with its modifiers
    operands: tuple[Operand, ...]
    guard: str | None  # predicate register
    guard_is_negated: bool
    line: int  # of the text
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode, cut at its dots."""
        return self.opcode.split(".")


@dataclass(frozen=True)
class Program:
    """One kernel."""

    name: str
    params: tuple[tuple[str, int], ...]  # name and bytes
    num_threads: int  # of a CTA
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]  # first instruction behind each


def parse(ptx: str) -> Program:
    """The one kernel of a text; raises ValueError for a line that is none of what is known."""
    text = re.sub(r"//[^\n]*", "", ptx)
    (found,) = _ENTRY.finditer(text)
    name, params, heading, body = found.groups()
    threads = re.search(r"\.reqntid (\d+)", heading)
    if threads is None:
        raise ValueError(f"{name} does not say how many threads a CTA has")
    first_line = text[: found.start(4)].count("\n") + 1
    instructions, labels = _body(body, first_line)
    return Program(
        name=name,
        params=tuple((param, int(bits) // 8) for bits, param in _PARAM.findall(params)),
        num_threads=int(threads[1]),
        instructions=tuple(instructions),
        labels=labels,
    )


def _body(body: str, first_line: int) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, raw in enumerate(body.split("\n"), first_line):
        line = raw.strip()
        if label := re.match(r"(\$\w+):", line):
            labels[label[1]] = len(instructions)
            line = line[label.end() :].strip()
        if not line or line.startswith("."):  # registers, pragmas
            continue
        if not line.endswith(";"):
            raise ValueError(f"line {number} is not understood: {line}")
        instructions.append(_instruction(line[:-1], number))
    return instructions, labels


def _instruction(line: str, number: int) -> Instruction:
    found = _INSTRUCTION.fullmatch(line)
    if found is None:
        raise ValueError(f"line {number} is not understood: {line}")
    negated, guard, opcode, rest = found.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s{}\[\]]+", rest)
    return Instruction(
        opcode=opcode,
        operands=tuple(map(_operand, operands)),
        guard=guard,
        guard_is_negated=bool(negated),
        line=number,
        text=line,
    )


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(part.strip() for part in text[1:-1].split(","))
    if place := _PLACE.fullmatch(text):
        return place[1], int(place[2] or 0)
    return text
