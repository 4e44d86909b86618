"""Rows whose every value tells launch, source rank, token and column, and weights made alike.

Any rank can write down any row without asking, so a wrong route or a stale row never passes.
"""

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload import bf16

__all__ = ["WEIGHTS_LAUNCH", "expert_weights", "row_bits", "weight_scale"]

# Launch number reserved for weights; launches of a run count from 1.
WEIGHTS_LAUNCH = 0

# Rows hashed at a time: their scratch stays in cache, 1.7 times faster than all at once.
_BLOCK_ROWS = 32

# 256 values, -2 to 127/64 in steps of 1/64: exact in bf16 (8 significant bits).
_VALUES = bf16.to_bits(((np.arange(256) - 128) / 64).astype(np.float32))


def _mix(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Finaliser of MurmurHash3 (Appleby, public domain), in place."""
    state ^= state >> np.uint32(16)
    state *= np.uint32(0x85EBCA6B)
    state ^= state >> np.uint32(13)
    state *= np.uint32(0xC2B2AE35)
    state ^= state >> np.uint32(16)
    return state


def row_bits(
    launch: int,
    rank: NDArray[np.int64] | int,  # scalar or (num_rows,)
    token: NDArray[np.int64],  # (num_rows,)
    num_columns: int,
    *,
    slot: NDArray[np.int64] | int = 0,  # rows of one token that differ by top-k slot
) -> NDArray[np.uint16]:  # (num_rows, num_columns) bf16 bits
    """Rows of a launch: a hash of (launch, rank, slot, token, column) picks one of 256 values."""
    seed = np.full(len(token), 0x9E3779B9, np.uint32)
    for word in (launch, rank, slot, token):
        seed = _mix(seed ^ np.asarray(word).astype(np.uint32))
    column = _mix(np.arange(1, num_columns + 1, dtype=np.uint32))
    bits = np.empty((len(seed), num_columns), np.uint16)
    for start in range(0, len(seed), _BLOCK_ROWS):
        state = seed[start : start + _BLOCK_ROWS, None] ^ column[None, :]
        state *= np.uint32(0x9E3779B1)
        state ^= state >> np.uint32(15)
        state *= np.uint32(0x85EBCA77)
        state >>= np.uint32(24)
        np.take(_VALUES, state, out=bits[start : start + _BLOCK_ROWS], mode="clip")
    return bits


def expert_weights(
    expert: int,  # number in the whole group, never that of a physical expert
    num_n: int,
    num_k: int,
) -> NDArray[np.float32]:  # (num_n, num_k), exact in bf16
    """Weight of one expert, `B[expert]` of a grouped GEMM; uniform in -2 .. 2 over sqrt(num_k)."""
    bits = row_bits(WEIGHTS_LAUNCH, expert, np.arange(num_n), num_k)
    return bf16.from_bits(bits) * np.float32(weight_scale(num_k))


def weight_scale(num_k: int) -> float:
    """What `row_bits` are multiplied by to become weights.

    A power of two, so that every value stays exact in bf16 and outputs of a GEMM over `row_bits`
    stay near 1.
    """
    return float(2.0 ** -np.floor(np.log2(num_k) / 2))
