"""What a launch tells the host: moments, and a record of a wait that reached its limit.

Knows nothing of what was waited for. The first wait of a rank to give up stops all ranks.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.fabric.table import RECORD_FIELDS, Slot
from tilepipe.kernels.memory import address, buffer, element
from tilepipe.kernels.semaphore import (
    Scope,
    claim,
    load_relaxed,
    now_ns,
    publish_set,
    raise_to,
    set_relaxed,
    wait_telling,
)

__all__ = [
    "abort_word",
    "give_up",
    "leave_last_stamp",
    "leave_stamp",
    "wait_or_give_up",
    "wait_telling_or_give_up",
]


@cute.jit
def leave_stamp(table: cute.Pointer, rank: Int32, thread: Int32, stamp: cutlass.Constexpr):
    """Write the moment; called by all threads of a CTA, one of which writes."""
    if thread == 0:
        buffer(address(table, rank, Slot.stamps), Int64)[int(stamp)] = now_ns()


@cute.jit
def leave_last_stamp(table: cute.Pointer, rank: Int32, thread: Int32, stamp: cutlass.Constexpr):
    """As `leave_stamp` of several CTAs of a rank, the last of which counts."""
    if thread == 0:
        place = element(address(table, rank, Slot.stamps), Int32(int(stamp)), Int64)
        raise_to(place, now_ns(), Scope.gpu)


def abort_word(table: cute.Pointer, rank: Int32) -> Int32:
    """Nonzero once this rank or a peer has given up; whoever sees it publishes nothing more."""
    return load_relaxed(
        element(address(table, rank, Slot.abort), Int32(0), Int32), Int32, Scope.sys
    )


@cute.jit
def give_up(
    table: cute.Pointer,
    rank: Int32,
    num_ranks: cutlass.Constexpr,
    role: cutlass.Constexpr,
    item: Int32,
    expert: Int32,
    epoch: Int32,
    expected: Int32,
    seen: Int32,
):
    """Record a wait that reached its limit, unless this rank has stopped before; stop all peers.

    Called by the thread that waited. The first one of a rank writes the record, in host memory that
    the host reads once the launch has ended or is late.
    """
    own = element(address(table, rank, Slot.abort), Int32(0), Int32)
    if claim(own, Int32(1), Scope.sys) == 0:
        record = buffer(address(table, rank, Slot.record), Int64)
        fields = (Int32(int(role)), item, expert, epoch, expected, seen)
        for place in cutlass.range_constexpr(len(fields)):
            record[1 + place] = Int64(fields[place])
        record[RECORD_FIELDS.index("time_ns")] = now_ns()
        publish_set(
            element(address(table, rank, Slot.record), Int32(0), Int64), Int64(1), Scope.sys
        )
        for peer in cutlass.range_constexpr(num_ranks):
            if rank != peer:
                set_relaxed(
                    element(address(table, Int32(peer), Slot.abort), Int32(0), Int32),
                    Int32(1),
                    Scope.sys,
                )


@cute.jit
def wait_or_give_up(
    table: cute.Pointer,
    rank: Int32,
    counter: cute.Pointer,
    expected: Int32,
    role: cutlass.Constexpr,
    item: Int32,
    epoch: Int32,
    num_ranks: cutlass.Constexpr,
    limit_ns: Int64,
) -> cutlass.Boolean:
    """As `wait_telling_or_give_up`, but for the last."""
    way = (table, rank, counter, expected, role, item, epoch, num_ranks, limit_ns)
    came, _ = wait_telling_or_give_up(*way)
    return came


@cute.jit
def wait_telling_or_give_up(
    table: cute.Pointer,
    rank: Int32,
    counter: cute.Pointer,
    expected: Int32,
    role: cutlass.Constexpr,
    item: Int32,
    epoch: Int32,
    num_ranks: cutlass.Constexpr,
    limit_ns: Int64,
    rest_ns: cutlass.Constexpr = 0,
    on_late: cutlass.Constexpr = None,
) -> tuple[cutlass.Boolean, cutlass.Boolean]:
    """Wait for a counter or a flag of the own rank; at the limit, leave a record and stop all.

    True once it is there, and whether the first look did not find it so. What lanes do next must
    hang on a vote: each waits by itself.
    """
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    came, late = wait_telling(
        *(counter, expected, abort, limit_ns, Scope.sys, False), rest_ns=rest_ns, on_late=on_late
    )
    if not came:
        seen = load_relaxed(counter, Int32, Scope.sys)
        give_up(table, rank, num_ranks, role, item, Int32(-1), epoch, expected, seen)
    return came, late
