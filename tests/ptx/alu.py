"""PTX instructions of registers alone, as Python text over NumPy arrays of lanes.

Knows nothing of memory, branches and of how lanes meet. In the text `s` is the stretch of lanes
that an instruction runs for and `m` is which of them are active, or True for all. Every register
is one array of all lanes, seen as `_u`nsigned, `_s`igned or `_f`loat.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.parse import Instruction, Operand

__all__ = ["HELPERS", "Namer", "statement"]

_UNITS = {"pred": np.bool_, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_VIEWS = {
    "u": {"16": np.uint16, "32": np.uint32, "64": np.uint64},
    "s": {"16": np.int16, "32": np.int32, "64": np.int64},
    "f": {"32": np.float32},
}
_WIDTH = {"p": "pred", "rs": "16", "r": "32", "rd": "64"}
_COMPARED = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}
_PLAIN = {
    "add": "add",
    "sub": "subtract",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "min": "minimum",
    "max": "maximum",
}
_SPECIAL = {
    "%tid.x": "tid",
    "%ctaid.x": "ctaid",
    "%nctaid.x": "nctaid",
    "%laneid": "laneid",
    "%smid": "smid",
}


class Namer:
    """Names of registers and constants in the text, and the arrays that they stand for."""

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self.values: dict[str, Any] = {}
        self._registers: dict[str, np.ndarray] = {}

    def register(self, name: str) -> np.ndarray:
        """All lanes of a register; unsigned, or bool for a predicate."""
        if name not in self._registers:
            kind = re.fullmatch(r"%([a-z]+)\d+", name)
            if kind is None:
                raise ValueError(f"{name} is no register")
            # A value that stands out: no register is read before it is written.
            held = np.zeros(self._num_lanes, _UNITS[_WIDTH[kind[1]]])
            if kind[1] != "p":
                held[:] = int("0x5AFE5AFE5AFE5AFE", 16) & int(np.iinfo(held.dtype).max)
            self._registers[name] = held
        return self._registers[name]

    def name(self, operand: Operand, kind: str, width: str) -> str:
        """An operand, read or written as a kind (u, s, f) of a width, in the text."""
        assert isinstance(operand, str), operand
        if operand.startswith("%"):
            array = self.register(operand)
            if array.dtype == np.bool_:
                view, text = array, operand[1:]
            else:
                own = str(array.dtype.itemsize * 8)
                view = array.view(_VIEWS[kind][own])
                text = f"{operand[1:]}_{kind}"
            self.values[text] = view
            return f"{text}[s]"
        return self._constant(operand, kind, width)

    def _constant(self, text: str, kind: str, width: str) -> str:
        if width == "pred":
            return str(bool(int(text)))
        dtype = _VIEWS[kind][width]
        if hexadecimal := re.fullmatch(r"0f([0-9A-F]{8})", text):
            bits = np.array(int(hexadecimal[1], 16), np.uint32)
            value = bits.view(np.float32) if kind == "f" else bits.astype(dtype)
        else:
            value = np.array(int(text, 0) & (2 ** int(width) - 1), _VIEWS["u"][width]).view(dtype)
        name = f"k_{kind}{width}_{text.replace('-', 'minus_')}"
        self.values[name] = value
        return name


def statement(instruction: Instruction, names: Namer) -> str | None:
    """The text of an instruction; None where it is more than registers."""
    if instruction.guard is not None:
        return None
    parts, operands = instruction.parts, instruction.operands
    if parts[0] == "mov":
        return _move(operands, parts[1], names)
    make = _MAKERS.get(parts[0])
    if make is None:
        return None
    return make(parts, operands, names)


def _type_of(part: str) -> tuple[str, str]:
    """Kind and width of a type such as s32; bits are unsigned."""
    if part == "pred":
        return "u", "pred"
    return {"b": "u", "u": "u", "s": "s", "f": "f"}[part[0]], part[1:]


def _simple(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[-1])
    target, a, b = (names.name(operand, kind, width) for operand in operands)
    if parts[0] == "min" and "relu" in parts:
        return f"maximum(minimum({a}, {b}), 0, out={target}, where=m)"
    return f"{_PLAIN[parts[0]]}({a}, {b}, out={target}, where=m)"


def _product(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[-1])
    wide = parts[1] == "wide"
    if parts[:2] == ["mul", "hi"]:
        return _high_product(kind, int(width), operands, names)
    if not (wide or parts[1] == "lo" or kind == "f"):
        raise ValueError(f"{'.'.join(parts)} is not known")
    # A low half is the same for both signs, and unsigned products wrap around without a word.
    kind = "u" if parts[1] == "lo" else kind
    result = str(2 * int(width)) if wide else width
    target = names.name(operands[0], kind, result)
    a, b = (names.name(operand, kind, width) for operand in operands[1:3])
    as_type = f", dtype={'int' if kind == 's' else 'uint'}{result}" if wide else ""
    if parts[0] == "mul":
        return f"multiply({a}, {b}, out={target}, where=m{as_type})"
    c = names.name(operands[3], kind, result)
    return f"add(multiply({a}, {b}{as_type}), {c}, out={target}, where=m)"


def _high_product(kind: str, width: int, operands: tuple[Operand, ...], names: Namer) -> str:
    if width > 32:
        raise ValueError(f"the upper half of a product of {width} bits is not known")
    target, a, b = (names.name(operand, kind, str(width)) for operand in operands)
    wide = f"multiply({a}, {b}, dtype={'int' if kind == 's' else 'uint'}64)"
    return f"copyto({target}, {wide} >> {width}, where=m, casting='unsafe')"


def _shift(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[1])
    target, a = (names.name(operand, kind, width) for operand in operands[:2])
    amount = names.name(operands[2], "u", "32")
    function = "left_shift" if parts[0] == "shl" else "right_shift"
    as_type = f"{'int' if kind == 's' else 'uint'}{width}"
    # NumPy gives 0, or copies of the sign, for amounts of the width and more: as PTX.
    amount = f"minimum({amount}, {width}).astype({as_type})"
    return f"{function}({a}, {amount}, out={target}, where=m)"


def _invert(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[1])
    target, a = (names.name(operand, kind, width) for operand in operands)
    return f"{'logical_not' if width == 'pred' else 'invert'}({a}, out={target}, where=m)"


def _compare(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[2])
    target = names.name(operands[0], "u", "pred")
    a, b = (names.name(operand, kind, width) for operand in operands[1:])
    return f"{_COMPARED[parts[1]]}({a}, {b}, out={target}, where=m)"


def _select(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[1])
    target, a, b = (names.name(operand, kind, width) for operand in operands[:3])
    chosen = names.name(operands[3], "u", "pred")
    return f"copyto({target}, choose({chosen}, {a}, {b}), where=m)"


def _move(operands: tuple[Operand, ...], type_name: str, names: Namer) -> str | None:
    target, source = operands
    if isinstance(target, tuple):
        held = names.name(source, "u", "64")
        halves = [
            f"copyto({names.name(str(part), 'u', '32')}, {held} >> {32 * place}, "
            "where=m, casting='unsafe')"
            for place, part in enumerate(target)
            if part != "_"
        ]
        return "; ".join(halves)
    kind, width = _type_of(type_name)
    kind = "u" if kind == "f" else kind  # bits are bits
    if isinstance(source, tuple):
        low, high = (names.name(str(part), "u", "32") for part in source)
        text = f"{low} | left_shift({high}, 32, dtype=uint64)"
    elif source in _SPECIAL:
        text = f"{_SPECIAL[source]}[s]"
    elif source.startswith(("%r", "%p")) or re.fullmatch(r"-?\d\w*", source):
        text = names.name(source, kind, width)
    else:
        return None  # a clock or an address
    return f"copyto({names.name(target, kind, width)}, {text}, where=m)"


def _convert(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    if parts[1:] == ["rn", "bf16x2", "f32"]:
        target = names.name(operands[0], "u", "32")
        high, low = (names.name(operand, "f", "32") for operand in operands[1:])
        return f"copyto({target}, two_bf16({high}, {low}), where=m)"
    (kind, width), (from_kind, from_width) = map(_type_of, parts[1:])
    source = names.name(operands[1], from_kind, from_width)
    if from_width == "8":
        source = f"{source}.astype({'int' if from_kind == 's' else 'uint'}8)"
    if width == "8":  # kept in 16 bits
        source = f"{source}.astype({'int' if kind == 's' else 'uint'}8)"
    target = names.name(operands[0], kind, width)
    return f"copyto({target}, {source}, where=m, casting='unsafe')"


def _unary(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[1])
    target = names.name(operands[0], "u" if parts[0] == "popc" else kind, width)
    source = names.name(operands[1], kind, width)
    function = {"abs": "absolute", "neg": "negative", "popc": "bitwise_count"}[parts[0]]
    return f"copyto({target}, {function}({source}), where=m, casting='unsafe')"


def _approximate(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    """Where the hardware is off by some 2^-22, the nearest float; one that is no normal is 0."""
    assert parts[1:] == ["approx", "ftz", "f32"], parts
    target, source = (names.name(operand, "f", "32") for operand in operands)
    return f"copyto({target}, {parts[0]}_of({source}), where=m)"


def _divide(parts: list[str], operands: tuple[Operand, ...], names: Namer) -> str:
    kind, width = _type_of(parts[1])
    target, a, b = (names.name(operand, kind, width) for operand in operands)
    function = "remainder_of" if parts[0] == "rem" else "quotient_of"
    return f"copyto({target}, {function}({a}, {b}, m), where=m)"


_MAKERS: dict[str, Callable[[list[str], tuple[Operand, ...], Namer], str]] = {
    **dict.fromkeys(_PLAIN, _simple),
    **dict.fromkeys(("mul", "mad"), _product),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("abs", "neg", "popc"), _unary),
    **dict.fromkeys(("div", "rem"), _divide),
    **dict.fromkeys(("ex2", "rcp"), _approximate),
    "not": _invert,
    "setp": _compare,
    "selp": _select,
    "cvt": _convert,
}


def _remainder_of(a: np.ndarray, b: np.ndarray, m: Any) -> np.ndarray:
    """Towards zero; lanes that are not active may hold anything."""
    b = np.where(m, b, 1).astype(a.dtype)
    return np.fmod(a, b)


def _quotient_of(a: np.ndarray, b: np.ndarray, m: Any) -> np.ndarray:
    b = np.where(m, b, 1).astype(a.dtype)
    return (a - np.fmod(a, b)) // b


def _flushed(value: np.ndarray) -> np.ndarray:
    tiny = np.finfo(np.float32).tiny
    return np.where(np.abs(value) < tiny, np.float32(0), value.astype(np.float32))


def _power_of_two(value: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # lanes that are not active may hold anything
        return _flushed(np.exp2(value))


def _reciprocal(value: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return _flushed(np.float32(1) / value)


def _bf16_bits(value: np.ndarray) -> np.ndarray:
    """Upper half of a float, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(value).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(value), 0x7FFF, rounded).astype(np.uint32)


def _two_bf16(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (_bf16_bits(high) << 16) | _bf16_bits(low)


HELPERS: dict[str, Any] = {
    name: getattr(np, name)
    for name in (
        *_PLAIN.values(),
        *_COMPARED.values(),
        *("multiply", "left_shift", "right_shift", "invert", "logical_not", "copyto"),
        *("absolute", "negative", "bitwise_count"),
        *("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    )
} | {
    "choose": np.where,
    "remainder_of": _remainder_of,
    "quotient_of": _quotient_of,
    "two_bf16": _two_bf16,
    "ex2_of": _power_of_two,
    "rcp_of": _reciprocal,
}
