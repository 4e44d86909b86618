"""The rows of `workload.payload`, bit for bit, made where they are needed.

Knows nothing of kernels. Runs on the device of its tensors, on the current stream.

uint32 arithmetic of NumPy is int32 here, whose products wrap around alike; a logical shift is an
arithmetic one with the copies of the sign masked away. The last two steps of the hash need no
table: the top byte with its first bit turned over is, read as a signed number, the value times 64.
7 kernels and 54 bytes of traffic a value, part of it in L2: 32768 rows of 7168 take 4.3 ms, at
given places 5.2 ms (H200, 2026-11).
"""

from collections.abc import Iterator

import torch

__all__ = ["fill_rows", "row_bits"]

# Values hashed at a time: their scratch, 10 bytes each, is 80 MiB.
_BLOCK_VALUES = 2**23

_SIGN = -(2**31)


def row_bits(
    launch: int,
    rank: torch.Tensor | int,  # scalar or (num_rows,)
    token: torch.Tensor,  # (num_rows,)
    num_columns: int,
    *,
    slot: torch.Tensor | int = 0,  # rows of one token that differ by top-k slot
) -> torch.Tensor:  # (num_rows, num_columns) int16: bf16 bits
    """As `workload.payload.row_bits`, on the device of `token`."""
    bits = torch.empty(len(token), num_columns, dtype=torch.int16, device=token.device)
    fill_rows(bits, launch, rank, token, slot=slot)
    return bits


def fill_rows(
    out: torch.Tensor,  # (num_out_rows, num_columns) bf16, or int16 for its bits
    launch: int,
    rank: torch.Tensor | int,  # scalar or (num_rows,)
    token: torch.Tensor,  # (num_rows,)
    *,
    slot: torch.Tensor | int = 0,  # scalar or (num_rows,)
    row_idx: torch.Tensor | None = None,  # (num_rows,) rows of `out`; None: the first num_rows
) -> None:
    """Write rows into a buffer that exists; its other rows stay as they are."""
    values = out.view(torch.bfloat16)
    num_columns = out.shape[1]
    seed = _seed(launch, rank, token, slot)
    column = _mix(torch.arange(1, num_columns + 1, dtype=torch.int32, device=out.device))
    for rows in _blocks(len(token), num_columns):
        state = _hash(seed[rows], column)
        # The last of the four bytes is the top one: CPU and GPU are little-endian.
        top = state.view(torch.int8)[:, 3::4]
        if row_idx is None:
            torch.mul(top, 1 / 64, out=values[rows])
        else:
            block = torch.empty(top.shape, dtype=torch.bfloat16, device=out.device)
            values.index_copy_(0, row_idx[rows].long(), torch.mul(top, 1 / 64, out=block))


def _seed(
    launch: int, rank: torch.Tensor | int, token: torch.Tensor, slot: torch.Tensor | int
) -> torch.Tensor:  # (num_rows,) int32
    # Numbers are mixed on the host; the first tensor takes the seed to its device.
    seed = torch.tensor(_signed(0x9E3779B9), dtype=torch.int32)
    for word in (launch, rank, slot, token):
        named = word.to(torch.int32) if isinstance(word, torch.Tensor) else _signed(word)
        seed = _mix(seed ^ named)
    return seed


def _hash(
    seed: torch.Tensor,  # (num_rows,) int32
    column: torch.Tensor,  # (num_columns,) int32
) -> torch.Tensor:  # (num_rows, num_columns) int32: the value times 64 in its top byte
    state = seed[:, None] ^ column[None, :]
    state *= _signed(0x9E3779B1)
    state ^= _shifted(state, 15)
    # One kernel: multiply, then add 2^31, which turns the first bit over.
    flip = torch.tensor(_SIGN, dtype=torch.int32)
    return torch.add(flip, state, alpha=_signed(0x85EBCA77), out=state)


def _mix(state: torch.Tensor) -> torch.Tensor:
    """Finaliser of MurmurHash3 (Appleby, public domain), in place on int32."""
    state ^= _shifted(state, 16)
    state *= _signed(0x85EBCA6B)
    state ^= _shifted(state, 13)
    state *= _signed(0xC2B2AE35)
    state ^= _shifted(state, 16)
    return state


def _shifted(state: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    shifted = state >> num_bits
    shifted &= (1 << (32 - num_bits)) - 1
    return shifted


def _signed(word: int) -> int:
    """The int32 of the low 32 bits."""
    return ((word & 0xFFFFFFFF) ^ 2**31) - 2**31


def _blocks(num_rows: int, num_columns: int) -> Iterator[slice]:
    num_block_rows = max(1, _BLOCK_VALUES // max(1, num_columns))
    for start in range(0, num_rows, num_block_rows):
        yield slice(start, min(start + num_block_rows, num_rows))
