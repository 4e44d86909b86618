"""Queues of work that warps claim one by one.

Knows nothing of what is claimed.
"""

import cutlass.cute as cute
from cutlass import Int32

from tilepipe.kernels.semaphore import Scope, claim

__all__ = ["claim_for_warp"]


@cute.jit
def claim_for_warp(queue: cute.Pointer, lane: Int32) -> Int32:
    """Claim one place of a queue for the warp; only lane 0 holds it.

    The others get it by a shuffle, as late as they need it: until then the claim is on its way.
    """
    place = Int32(0)
    if lane == 0:
        place = claim(queue, Int32(1), Scope.gpu)
    return place
