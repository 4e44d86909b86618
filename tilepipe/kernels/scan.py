"""Prefix sums and searches of one CTA.

Knows nothing of what is summed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tilepipe.kernels.memory import LANES

__all__ = ["exclusive_scan", "exclusive_scans", "last_at_most", "sum_of"]


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
def exclusive_scans(
    columns: cutlass.Constexpr,  # each (count + 1,) Int32: the total comes behind the last
    count: cutlass.Constexpr,
    thread: Int32,
    sums: cute.Tensor,  # (columns x 32,) Int32 of shared memory
    num_threads: cutlass.Constexpr,
):
    """As `exclusive_scan` of several columns, all at once."""
    lane, warp, num_warps = thread % LANES, thread // LANES, num_threads // LANES
    each = -(-count // num_threads)
    begin = thread * each
    end = cutlass.min(begin + each, count)
    own, upto = [], []
    for which in cutlass.range_constexpr(len(columns)):
        value = Int32(0)
        for i in cutlass.range(begin, end, unroll=1):
            value += columns[which][i]
        own.append(value)
        upto.append(_warp_scan(value, lane))
    if lane == LANES - 1:
        for which in cutlass.range_constexpr(len(columns)):
            sums[which * LANES + warp] = upto[which]
    cute.arch.sync_threads()
    for which in cutlass.range(warp, len(columns), num_warps, unroll=1):
        of_warp = Int32(0)
        if lane < num_warps:
            of_warp = sums[which * LANES + lane]
        sums[which * LANES + lane] = _warp_scan(of_warp, lane)
    cute.arch.sync_threads()
    for which in cutlass.range_constexpr(len(columns)):
        running = upto[which] - own[which]
        if warp > 0:
            running += sums[which * LANES + warp - 1]
        for i in cutlass.range(begin, end, unroll=1):
            value = columns[which][i]
            columns[which][i] = running
            running += value
        if thread == 0:
            columns[which][count] = sums[which * LANES + num_warps - 1]
    cute.arch.sync_threads()


@cute.jit
def last_at_most(
    prefix: cute.Tensor, first: Int32, count: cutlass.Constexpr, value: Int32
) -> Int32:
    """Largest i in first..first + count - 1 with prefix[i] <= value, of a `prefix` that does not
    fall and begins there with at most `value`. No branch, so searches of one thread overlap."""
    found = Int32(first)
    step = 1 << max(count - 1, 0).bit_length()
    for _ in cutlass.range_constexpr(step.bit_length() - 1):
        step //= 2
        probe = cutlass.min(found + step, first + (count - 1))
        there = prefix[probe]
        if there <= value:
            found = probe
    return found


@cute.jit
def sum_of(values: cute.Tensor, begin: Int32, end: Int32, lane: Int32) -> Int32:
    """Sum of a stretch of values, on every lane. Called by all lanes of a warp."""
    own = Int32(0)
    for i in cutlass.range(begin + lane, end, LANES, unroll=1):
        own += values[i]
    return cute.arch.warp_reduction_sum(own)
