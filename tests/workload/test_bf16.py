"""bf16 bits: every pattern there and back, and rounding where it is decided."""

import math
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.workload import bf16

ALL_BITS = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
IS_NAN = ((ALL_BITS & 0x7F80) == 0x7F80) & ((ALL_BITS & 0x007F) != 0)


def bits_of(word):
    """to_bits of the float32 with this bit pattern."""
    return int(bf16.to_bits(np.array([word], np.uint32).view(np.float32))[0])


def test_every_bit_pattern_survives_the_way_to_float32_and_back():
    back = bf16.to_bits(bf16.from_bits(ALL_BITS))

    np.testing.assert_array_equal(back[~IS_NAN], ALL_BITS[~IS_NAN])
    assert back.dtype == np.uint16
    assert set(back[IS_NAN].tolist()) == {0x7FC0}
    assert int(IS_NAN.sum()) == 2 * 127


@pytest.mark.parametrize(
    ("bits", "value"),
    [
        (0x0000, 0.0),
        (0x3F80, 1.0),
        (0xC000, -2.0),
        (0x4049, 3.140625),
        (0x7F7F, (2 - 2**-7) * 2.0**127),  # largest finite
        (0x0080, 2.0**-126),  # smallest normal
        (0x0001, 2.0**-133),  # smallest subnormal
        (0x7F80, math.inf),
        (0xFF80, -math.inf),
    ],
)
def test_from_bits_gives_the_value_that_the_format_defines(bits, value):
    out = bf16.from_bits(np.array([bits], np.uint16))

    assert out.dtype == np.float32
    assert out.tolist() == [value]


def test_the_sign_of_zero_is_kept():
    assert bf16.to_bits(np.array([0.0, -0.0], np.float32)).tolist() == [0x0000, 0x8000]
    assert np.signbit(bf16.from_bits(np.array([0, 0x8000], np.uint16))).tolist() == [False, True]


@pytest.mark.parametrize(
    ("word", "bits"),
    [
        (0x3F808000, 0x3F80),  # half way above an even number: down
        (0x3F818000, 0x3F82),  # half way above an odd number: up
        (0xBF808000, 0xBF80),  # the same below zero
        (0xBF818000, 0xBF82),
        (0x3F808001, 0x3F81),  # just past half way: up
        (0x3F807FFF, 0x3F80),  # just short of it: down
        (0x3FFF8000, 0x4000),  # up into the next binade
        (0x00008000, 0x0000),  # half the smallest subnormal: to the even zero
        (0x00008001, 0x0001),
        (0x007F8000, 0x0080),  # subnormal up to the smallest normal
        (0x7F7F7FFF, 0x7F7F),  # largest that stays finite
        (0x7F7F8000, 0x7F80),  # half way past the largest: infinity
        (0xFF7F8000, 0xFF80),
        (0x7F800000, 0x7F80),
        (0xFF800000, 0xFF80),
    ],
)
def test_to_bits_rounds_to_nearest_even(word, bits):
    assert bits_of(word) == bits


@pytest.mark.parametrize(
    "word", [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF]
)
def test_every_nan_becomes_the_quiet_nan(word):
    # 0x7F800001 would round to infinity, 0xFFFFFFFF would wrap to 0.
    assert bits_of(word) == 0x7FC0


def test_a_nan_leaves_its_neighbours_alone():
    values = np.array([[1.0, math.nan], [-3.0, math.inf]], np.float32)

    assert bf16.to_bits(values).tolist() == [[0x3F80, 0x7FC0], [0xC040, 0x7F80]]


@given(value=st.floats(width=32, allow_nan=False))
def test_no_bf16_number_is_nearer_than_the_rounded_one(value):
    word = struct.unpack("<I", struct.pack("<f", value))[0]
    bits = bits_of(word)

    if math.isinf(value):
        assert bits == word >> 16
        return
    # The magnitudes around the value; the step past the largest finite one stands for infinity.
    low = word >> 16 & 0x7FFF
    magnitudes = [_magnitude(low), _magnitude(low + 1)]
    distances = [abs(abs(value) - magnitude) for magnitude in magnitudes]
    chosen = (bits & 0x7FFF) - low
    assert bits >> 15 == word >> 31
    assert chosen in (0, 1)
    assert distances[chosen] <= distances[1 - chosen]
    if distances[0] == distances[1]:
        assert bits % 2 == 0


def _magnitude(bits):
    """Value of 15 magnitude bits in double precision, infinity as the number that would follow."""
    exponent, mantissa = bits >> 7, bits & 0x7F
    if exponent == 0:
        return math.ldexp(mantissa, -133)
    return math.ldexp(128 + mantissa, exponent - 134)


def test_to_bits_takes_a_transposed_view_as_it_is_indexed():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)

    bits = bf16.to_bits(values.T)

    assert bits.tolist() == bf16.to_bits(np.ascontiguousarray(values.T)).tolist()
    assert bf16.from_bits(bits).tolist() == values.T.tolist()


def test_neither_way_touches_its_input():
    values, bits = np.array([1.5, math.nan], np.float32), np.array([0x3FC0, 0x7FC1], np.uint16)

    bf16.to_bits(values)
    bf16.from_bits(bits)

    assert values[0] == 1.5
    assert bits.tolist() == [0x3FC0, 0x7FC1]
