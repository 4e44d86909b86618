"""Throttle ranks that share one GPU to the rate of a link: token buckets on the device's clock.

Knows nothing of rows. Every rank has two words, the moments at which its egress and its ingress
are free again. Who wants to move bytes moves both words on by the time that those bytes take and
starts when the later of the two was free; what was not used in the last `_DEPTH_NS` may be used
later, no more.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.fabric.table import Slot
from tilepipe.kernels.memory import address, element
from tilepipe.kernels.semaphore import Scope, claim, now_ns, raise_to
from tilepipe.kernels.watchdog import abort_word

__all__ = ["EGRESS", "INGRESS", "sleep_until", "wait_for_link"]

EGRESS, INGRESS = 0, 1
_DEPTH_NS = 2_000


@cute.jit
def book_link(table: cute.Pointer, source: Int32, target: Int32, cost_ns: Int64) -> Int64:
    """Book `cost_ns` of both ends of the way from source to target; returns when it may start.

    Called by one lane, which tells the others. Between the two steps on a word others may book:
    each still gets an interval of its own.
    """
    now = now_ns()
    start = now
    ends = ((EGRESS, source), (INGRESS, target))
    for place in cutlass.range_constexpr(2):
        end, rank = ends[place]
        free = element(address(table, rank, Slot.links), Int32(end), Int64)
        raise_to(free, now - _DEPTH_NS, Scope.sys)
        booked = claim(free, cost_ns, Scope.sys)
        start = cutlass.max(start, booked)
    return start


@cute.jit
def wait_for_link(
    table: cute.Pointer,
    source: Int32,
    target: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    cost_ns: Int64,
    latency_ns: Int64,
) -> Int64:
    """Wait for the turn of one row on the link; returns when its flag may be raised, 0 for at once.

    All lanes call it. Rows that stay on their rank cross no link, except where one rank stands for
    a whole group.
    """
    due = Int64(0)
    if constants.num_ranks == 1 or source != target:
        booked = Int64(0)
        if lane == 0:
            booked = book_link(table, source, target, cost_ns)
        start = cute.arch.shuffle_sync(booked, 0)
        sleep_until(table, source, start)
        due = start + cost_ns + latency_ns
    return due


@cute.jit
def sleep_until(table: cute.Pointer, rank: Int32, moment_ns: Int64):
    """Return at that moment of the device's clock, or once the rank has been stopped."""
    stop = Int32(0)
    while stop == 0 and now_ns() < moment_ns:
        stop = abort_word(table, rank)
