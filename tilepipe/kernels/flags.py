"""Flags of rows that a warp has stored, raised in batches: one release fence for several rows.

Knows nothing of what a flag stands for. Lane i of a warp holds the address of the i-th flag that is
still owed. A fence orders what other lanes have stored because a warp barrier precedes it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.kernels.memory import LANES, element
from tilepipe.kernels.semaphore import Scope, add_relaxed, now_ns, release_fence, set_relaxed

__all__ = ["must_raise", "raise_owed"]


@cute.jit
def must_raise(num_owed: Int32, due_ns: Int64, constants: cutlass.Constexpr) -> cutlass.Boolean:
    """Whether a warp that owes flags raises them now.

    Over a paced link a flag is due some time after its row: the warp sends on until then, unless
    its lanes hold no more.
    """
    if cutlass.const_expr(constants.paced):
        # Lanes read the clock one by one: all must come to the same answer.
        crossed = cute.arch.vote_all_sync(now_ns() >= due_ns)
        return num_owed == LANES or (num_owed >= constants.flag_batch and crossed)
    return num_owed == constants.flag_batch


@cute.jit
def raise_owed(
    flag: Int64,  # of this lane: address of the flag that it owes
    num_owed: Int32,  # lanes below this owe one
    lane: Int32,
    value: Int32,  # what is added, or written where `single_writer`
    single_writer: cutlass.Constexpr,
):
    """Publish all rows whose flags are owed. Called by all lanes, behind all their stores."""
    cute.arch.sync_warp()
    release_fence(Scope.sys)
    if lane < num_owed:
        word = element(flag, Int32(0), Int32)
        if cutlass.const_expr(single_writer):
            set_relaxed(word, value, Scope.sys)
        else:
            add_relaxed(word, value, Scope.sys)
