"""bfloat16 as its bits in uint16, which numpy has no type for.

Knows nothing of what the numbers mean.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["from_bits", "to_bits"]

_QUIET_NAN = np.uint16(0x7FC0)


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The float32 values of bf16 bits; exact."""
    wide = bits.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def to_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round float32 to bf16, nearest even (IEEE 754); every NaN becomes the quiet NaN 0x7FC0."""
    wide = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = wide >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += wide
    rounded >>= np.uint32(16)
    bits = rounded.astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        bits[nan] = _QUIET_NAN
    return bits
