"""Prefix sums and searches of one CTA.

Knows nothing of what is summed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tilepipe.kernels.memory import LANES

__all__ = ["exclusive_scan", "last_at_most", "sum_of"]


@cute.jit
def exclusive_scan(
    values: cute.Tensor,  # (count,) Int32, replaced by the sums of all values before
    count: Int32,
    thread: Int32,
    sums: cute.Tensor,  # (32,) Int32 of shared memory
    num_threads: cutlass.Constexpr,
) -> Int32:
    """Sum all values; returns the total to every thread. Called by all threads of a CTA.

    What was written before the call must lie behind a CTA barrier; what is written here does.
    """
    lane, warp = thread % LANES, thread // LANES
    each = (count + (num_threads - 1)) // num_threads
    begin = thread * each
    end = cutlass.min(begin + each, count)
    own = Int32(0)
    for i in cutlass.range(begin, end, unroll=1):
        own += values[i]
    upto = _warp_scan(own, lane)
    if lane == LANES - 1:
        sums[warp] = upto
    cute.arch.sync_threads()
    if warp == 0:
        of_warp = Int32(0)
        if lane < num_threads // LANES:
            of_warp = sums[lane]
        sums[lane] = _warp_scan(of_warp, lane)
    cute.arch.sync_threads()
    running = upto - own
    if warp > 0:
        running += sums[warp - 1]
    total = sums[num_threads // LANES - 1]
    for i in cutlass.range(begin, end, unroll=1):
        value = values[i]
        values[i] = running
        running += value
    cute.arch.sync_threads()
    return total


@cute.jit
def _warp_scan(value: Int32, lane: Int32) -> Int32:
    """Sum of the values of all lanes up to this one."""
    for step in cutlass.range_constexpr(5):
        distance = 1 << step
        lower = cute.arch.shuffle_sync_up(value, distance, mask_and_clamp=0)
        if lane >= distance:
            value += lower
    return value


@cute.jit
def last_at_most(prefix: cute.Tensor, count: Int32, value: Int32) -> Int32:
    """Largest i < count with prefix[i] <= value, in a `prefix` that does not fall."""
    low, high = Int32(0), count
    while high - low > 1:
        middle = (low + high) // 2
        if prefix[middle] <= value:
            low = middle
        else:
            high = middle
    return low


@cute.jit
def sum_of(values: cute.Tensor, begin: Int32, end: Int32, lane: Int32) -> Int32:
    """Sum of a stretch of values, on every lane. Called by all lanes of a warp."""
    own = Int32(0)
    for i in cutlass.range(begin + lane, end, LANES, unroll=1):
        own += values[i]
    return cute.arch.shuffle_sync(_warp_scan(own, lane), LANES - 1)
