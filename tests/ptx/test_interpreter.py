"""The interpreter by itself: what instructions compute, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ptx.machine import Launch, Machine
from tests.ptx.memory import Fault, Memory
from tests.ptx.parse import parse

LANES = 32
HEAD = """
.visible .entry one(.param .u64 one_param_0)
.reqntid 32
{
    ld.param.b64 %rd1, [one_param_0];
    mov.b32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd2, %rd1, %rd2;
"""
# Operands of lane i: word i and word 32 + i; the result goes to word 64 + i.
LOAD = "ld.global.b32 %r2, [%rd2];\nld.global.b32 %r3, [%rd2+128];"
STORE = "st.global.b32 [%rd2+256], %r4;\nret;"


def run(body, words):
    memory = Memory({"words": (words.ctypes.data, words.nbytes)})
    program = parse("\n".join([HEAD, body, "}"]))
    launch = Launch(
        name="one", program=program, arguments=(words.ctypes.data,), num_ctas=1, shared_bytes=0
    )
    Machine(memory).run([[launch]])


def signed(value):
    return (int(value) + 2**31) % 2**32 - 2**31


def towards_zero(a, b):
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


# An instruction, and what it makes of two unsigned words.
LAWS = {
    "add.s32 %r4, %r2, %r3;": lambda a, b: a + b,
    "sub.s32 %r4, %r2, %r3;": lambda a, b: a - b,
    "mul.lo.s32 %r4, %r2, %r3;": lambda a, b: a * b,
    "mul.hi.u32 %r4, %r2, %r3;": lambda a, b: a * b >> 32,
    "mul.hi.s32 %r4, %r2, %r3;": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32 %r4, %r2, %r3, %r2;": lambda a, b: a * b + a,
    "shl.b32 %r4, %r2, %r3;": lambda a, b: a << min(b, 32),
    "shr.u32 %r4, %r2, %r3;": lambda a, b: a >> min(b, 32),
    "shr.s32 %r4, %r2, %r3;": lambda a, b: signed(a) >> min(b, 32),
    "xor.b32 %r4, %r2, %r3;": lambda a, b: a ^ b,
    "min.s32 %r4, %r2, %r3;": lambda a, b: min(signed(a), signed(b)),
    "max.u32 %r4, %r2, %r3;": lambda a, b: max(a, b),
    "div.s32 %r4, %r2, %r3;": lambda a, b: towards_zero(signed(a), signed(b) or 1),
    "rem.s32 %r4, %r2, %r3;": lambda a, b: (
        signed(a) - towards_zero(signed(a), signed(b) or 1) * (signed(b) or 1)
    ),
    "popc.b32 %r4, %r2;": lambda a, b: a.bit_count(),
    "setp.lt.s32 %p1, %r2, %r3;\nselp.b32 %r4, %r2, %r3, %p1;": lambda a, b: (
        a if signed(a) < signed(b) else b
    ),
    "shfl.sync.bfly.b32 %r4, %r2, 0, 31, -1;": lambda a, b: a,
}
WORD = st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 40), st.integers(2**32 - 40, 2**32 - 1))


@pytest.mark.parametrize("text", LAWS, ids=lambda text: text.split()[0])
@settings(max_examples=5, deadline=None)
@given(values=st.lists(WORD, min_size=2 * LANES, max_size=2 * LANES))
def test_an_instruction_computes_what_integers_do(text, values):
    divides = text.startswith(("div", "rem"))
    operands = [value or 1 for value in values] if divides else values
    words = np.array([*operands, *[0] * LANES], np.uint32)
    run("\n".join([LOAD, text, STORE]), words)
    wanted = [
        LAWS[text](a, b) % 2**32 for a, b in zip(operands[:LANES], operands[LANES:], strict=True)
    ]
    assert words[2 * LANES :].tolist() == wanted


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("st.global.b32 [%rd2+260], %r1;\nret;", r"lie in no buffer; 384 bytes behind .* words"),
        ("st.global.b64 [%rd2+4], %rd1;\nret;", r"8 bytes at words\+4 are not aligned"),
        ("ld.shared.b32 %r2, [%r1];\nret;", r"4 bytes at -1024 of shared memory, which has 0"),
        (
            "setp.lt.u32 %p1, %r1, 16;\n@%p1 bra $half;\nbar.warp.sync -1;\n"
            "$half:\nbar.sync 0;\nret;",
            r"all lanes wait for each other",
        ),
    ],
)
def test_what_a_device_would_not_survive_is_a_fault(body, said):
    with pytest.raises(Fault, match=said):
        run(body, np.zeros(3 * LANES, np.uint32))


@pytest.mark.parametrize("text", ["brev.b32 %r2, %r1;", "shfl.sync.up.b32 %r2, %r1, 1, 7, -1;"])
def test_an_instruction_that_is_not_known_is_refused(text):
    with pytest.raises(ValueError, match="not known"):
        run(f"{text}\nret;", np.zeros(3 * LANES, np.uint32))
