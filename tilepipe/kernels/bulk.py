"""Rows through shared memory by bulk copies: the primitives of the TMA backend.

Knows nothing of plans. One lane of a warp, always lane 0, issues, waits and publishes: bulk groups
belong to the thread that has committed them.
"""

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from tilepipe.kernels.semaphore import now_ns

__all__ = ["bulk_load", "bulk_store", "commit_store", "init_barrier", "wait_load"]

# Tries between two looks at the clock; a try sleeps in hardware for a while.
_TRIES_PER_LOOK = 64


def init_barrier(barrier: Int32) -> None:
    """Make a barrier of one arrival; a fence and a CTA barrier must follow."""
    cute.arch.mbarrier_init(_shared(barrier), 1)


def bulk_load(source: Int64, stage: Int32, barrier: Int32, num_bytes: int) -> None:
    """Start copying to a stage; the barrier completes its phase when all bytes are there."""
    cute.arch.mbarrier_arrive_and_expect_tx(_shared(barrier), num_bytes)
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[stage, source, Int32(num_bytes), barrier],
    )


@cute.jit
def wait_load(barrier: Int32, phase: Int32, limit_ns: Int64) -> Boolean:
    """Wait for a phase of a stage's barrier; False after `limit_ns`."""
    done = cute.arch.mbarrier_try_wait(_shared(barrier), phase)
    if not done:
        begin = now_ns()
        alive = Boolean(True)
        while alive and not done:
            tries = Int32(0)
            while tries < _TRIES_PER_LOOK and not done:
                done = cute.arch.mbarrier_try_wait(_shared(barrier), phase)
                tries += 1
            alive = now_ns() - begin < limit_ns
    return done


def bulk_store(stage: Int32, target: Int64, num_bytes: int) -> None:
    """Start copying from a stage."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, stage, Int32(num_bytes)],
    )


def commit_store() -> None:
    """Close a group: all stores that this thread has started since the last one."""
    cute.arch.cp_async_bulk_commit_group()


def _shared(address: Int32) -> cute.Pointer:
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)
