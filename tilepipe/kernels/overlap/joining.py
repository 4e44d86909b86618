"""When a CTA that has sent its rows begins with tiles: in step with those that multiply.

Knows nothing of rows, of tiles and of who has sent what.

CTAs of a rank that claim tiles together share operands: `raster_m` of them read the same B tile,
and every one of them the A tile that another reads for the next column. What one has loaded lies in
L2 for the others as long as they are within some K steps of it. Who begins in between reads for
itself until the launch ends. Where one rank has the GPU L2 makes up for that; where eight share it,
each with weights of its own, memory is what they wait for.

So who joins waits for the others' next claim, which tells that their tiles have ended. And where
the CTAs of a rank take whole columns of a raster group in a round, and enough of them join, so many
stay back for a round that the next one begins with a column. All of this is time lost by few: it is
given up after about three tiles, and order and answers are those of tickets, whoever claims them
when.

One H200, dispatch -> GEMM, copy=simt, 4096 tokens over all ranks, times by those of joining at once
(`python -m benchmarks.comm_ctas OUT.csv --at-once --iters 16`, interleaved, 2026-11-30; launches of
eight ranks take the one or the other of two times, 3 % apart):

    communication CTAs of a rank     2     4     6     8    10    12    14    16    20
    8 ranks, 16 SMs each         1.027 0.997 1.044 1.021 0.928 0.927 0.947
    4 ranks, 33 SMs each         0.993 0.997 0.992 1.002 0.988 0.991 1.000 0.971 0.981

There 2 to 6 of eight ranks stayed back, too, though that is too few to end a round with a column;
where nobody stayed back 1 to 6 took 0.995, 0.991, 0.997, 0.965, 0.977 and 0.993 of joining at once
(24 interleaved launches, another run), so nobody does now. No count of eight ranks is further above
its neighbours than 1.04 of the line through them; joining at once 7 CTAs are 1.10. One rank takes
0.999 to 1.003, two take 1.000 to 1.004: they join at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from tilepipe.kernels.semaphore import Scope, load_relaxed, now_ns, rest

__all__ = ["join_in_step"]

_LOOK_NS = 200  # between looks at the queue
# By K tiles of an output tile, each about 700 ns: how long who joins waits at most, and until all
# that are in step have claimed once one of them has. With K 7168 246 and 20 us.
_LIMIT_NS, _ROUND_NS = 2_200, 180


@cute.jit
def join_in_step(
    queue: cute.Pointer,  # next ticket of the rank
    num_tickets: Int32,
    turn: Int32,  # of this cluster among those that join
    num_joining: Int32,  # clusters
    num_clusters: Int32,  # that will take tiles, these included
    raster_m: cutlass.Constexpr,  # tickets of a column of a raster group
    num_k_tiles: cutlass.Constexpr,  # of an output tile
):
    """Return when tiles of the others end, or when none is left or it takes too long.

    Called by the warp that will claim; orders nothing.
    """
    limit_ns, round_ns = num_k_tiles * _LIMIT_NS, num_k_tiles * _ROUND_NS
    begin, joins = now_ns(), Boolean(False)
    while not joins:
        seen = load_relaxed(queue, Int32, Scope.gpu)
        over = Int32(0)  # tickets by which a round of all would end within a column
        # As many clusters stay back for a round: up to all but one of a column.
        if num_clusters % raster_m == 0 and num_joining >= raster_m - 1:
            over = seen % raster_m
        joins = turn < num_joining - over
        now, goes_on = seen, Boolean(True)
        while now == seen and goes_on:
            rest(_LOOK_NS)
            now = load_relaxed(queue, Int32, Scope.gpu)
            goes_on = now < num_tickets and now_ns() - begin < limit_ns
        if not goes_on:
            joins = Boolean(True)
        if not joins:
            rest(round_ns)
