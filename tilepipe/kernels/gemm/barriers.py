"""Barriers inside a CTA and a cluster: bounded waits for phases, arrivals, words handed over.

Knows nothing of tiles and sums. Barriers here order shared memory; words in global memory are the
business of semaphore.py.
"""

from enum import IntEnum, unique

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.fabric.table import Role
from tilepipe.kernels.memory import LANES
from tilepipe.kernels.semaphore import now_ns
from tilepipe.kernels.watchdog import give_up

__all__ = [
    "Item",
    "Named",
    "arrive",
    "arrive_named",
    "await_phase",
    "hand_word",
    "meet_all",
    "meet_named",
]

# Tries between two looks at the clock; a try sleeps in hardware for a while.
_TRIES_PER_LOOK = 64
# Of one wait inside a CTA, in units of one wait for rows: warps may wait for one that waits.
_LIMIT_FACTOR = 4


@unique
class Item(IntEnum):
    """Barriers that a record of the watchdog names."""

    full = 1  # consumers: operands of a stage have come
    empty = 2  # producer: a stage has been multiplied
    handed = 3  # readers: the next tile is known
    taken = 4  # scheduler: the record of the tile before last has been read


@unique
class Named(IntEnum):
    """Numbers of the hardware's barriers of a CTA; 0 is that of all threads."""

    written = 1  # + 2 x warpgroup + buffer: a block is staged
    read = 5  # + 2 x warpgroup + buffer: its buffer may be written again
    turn = 9  # + warpgroup: it may multiply; ping_pong alone


@cute.jit
def await_phase(
    barrier: cute.Pointer,
    phase: Int32,
    item: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    num_ranks: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Wait until a phase of a barrier is over. Called by whole warps.

    What is waited for here comes from this cluster, so beyond the limit the program is wrong: the
    wait leaves a record and traps.
    """
    done = cute.arch.mbarrier_try_wait(barrier, phase)
    if not done:
        begin = now_ns()
        while not done:
            tries = Int32(0)
            while tries < _TRIES_PER_LOOK and not done:
                done = cute.arch.mbarrier_try_wait(barrier, phase)
                tries += 1
            if not done and now_ns() - begin > _LIMIT_FACTOR * limit_ns:
                if cute.arch.lane_idx() == 0:
                    give_up(
                        table,
                        rank,
                        num_ranks,
                        Role.gemm_pipeline,
                        Int32(int(item)),
                        Int32(-1),
                        Int32(0),
                        phase,
                        Int32(0),
                    )
                cute.arch.sync_warp()
                cute.arch.inline_ptx("trap;")


@cute.jit
def arrive(barrier: cute.Pointer, cta: Int32, in_cluster: cutlass.Constexpr):
    """Arrive once, at the barrier of CTA `cta` of the cluster. Called by one lane."""
    if cutlass.const_expr(in_cluster):
        cute.arch.mbarrier_arrive(barrier, cta)
    else:
        cute.arch.mbarrier_arrive(barrier)


@cute.jit
def hand_word(slot: cute.Pointer, lane: Int32, word: Int32, cluster_m: cutlass.Constexpr):
    """Lane i writes word i % 8 of a record in shared memory of CTA i / 8. Called by a whole warp.

    The barrier of the warp and, in a cluster, the fence order it before the arrival that follows.
    """
    if lane < 8 * cluster_m:
        if cutlass.const_expr(cluster_m == 1):
            cute.make_tensor(slot, cute.make_layout(8))[lane] = word
        else:
            there = cute.arch.inline_ptx(
                "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Int32],
                read_only_args=[Int32(slot.toint()) + lane % 8 * 4, lane // 8],
            )
            cute.arch.inline_ptx(
                "st.shared::cluster.b32 [{$r0}], {$r1};", read_only_args=[there, word]
            )
    cute.arch.sync_warp()
    if cutlass.const_expr(cluster_m > 1):
        cute.arch.fence_acq_rel_cluster()


def meet_named(number, num_threads: int = 4 * LANES + LANES) -> None:
    """Wait for all threads of a named barrier. Called by whole warps."""
    cute.arch.barrier(barrier_id=number, number_of_threads=num_threads)


def arrive_named(number, num_threads: int = 4 * LANES + LANES) -> None:
    """Be counted at a named barrier without waiting. Called by whole warps."""
    cute.arch.barrier_arrive(barrier_id=number, number_of_threads=num_threads)


@cute.jit
def meet_all(cluster_m: cutlass.Constexpr):
    """Wait for all threads of the cluster."""
    if cutlass.const_expr(cluster_m > 1):
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
    else:
        cute.arch.sync_threads()
