"""Copy backend of ordinary loads and stores: a warp moves a row, 16 bytes a lane and access.

Knows nothing of where rows come from. What decides the rate is bytes in flight: `num_loads` loads
of each lane are issued before the first of their stores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.kernels.memory import LANES, VECTOR_BYTES, load_vector, store_vector

__all__ = ["copy_row"]

_STEP = LANES * VECTOR_BYTES


@cute.jit
def copy_row(
    source: Int64,
    target: Int64,
    lane: Int32,
    row_bytes: cutlass.Constexpr,
    num_loads: cutlass.Constexpr,
):
    """Copy one row, a multiple of 16 bytes. Called by all lanes of a warp."""
    whole, rest = divmod(row_bytes // VECTOR_BYTES, LANES)
    source += Int64(lane) * VECTOR_BYTES
    target += Int64(lane) * VECTOR_BYTES
    for first in cutlass.range_constexpr(0, whole, num_loads):
        _copy_vectors(source + first * _STEP, target + first * _STEP, min(num_loads, whole - first))
    if cutlass.const_expr(rest > 0):
        if lane < rest:
            store_vector(target + whole * _STEP, load_vector(source + whole * _STEP))


def _copy_vectors(source: Int64, target: Int64, count: int) -> None:
    values = [load_vector(source + place * _STEP) for place in range(count)]
    for place, value in enumerate(values):
        store_vector(target + place * _STEP, value)
