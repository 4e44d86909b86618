"""Copy backend of ordinary loads and stores: a warp moves a row, 16 bytes a lane and access.

Knows nothing of which edge the rows belong to. What decides the rate is bytes in flight:
`num_loads` loads of each lane are issued before the first of their stores. A warp works on three
rows: one that it copies, one whose place is known and whose way is loading, one that it claims; so
no latency of a claim or a look-up is seen while rows are large.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.edges import (
    Edge,
    count_of,
    first_of,
    flag_value,
    has_single_writers,
    note_beside,
    place_in_order,
    queue_of,
    second_of,
    way_of,
)
from tilepipe.kernels.flags import must_raise, raise_owed
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    load_vector,
    store_vector,
    word,
)
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.stamps import Event, lap
from tilepipe.kernels.watchdog import abort_word

__all__ = ["copy_row", "move_rows"]

_STEP = LANES * VECTOR_BYTES


@cute.jit
def move_rows(
    edge: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    row_cost_ns: Int64,  # time that a row takes on a paced link
    latency_ns: Int64,  # of a paced link
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
):
    """Push rows of `rank` until none is left to claim. Called by all lanes of a warp; never waits
    for a peer, so no two ranks can wait for each other.

    Addresses are looked up where they are used: with 32 warps no register is spare.
    """
    words = buffer(address(table, rank, Slot.words), Int32)
    count = words[int(count_of(edge))]
    value = flag_value(edge, constants, words[int(Word.epoch)])
    single_writer = has_single_writers(edge, constants)
    here = cute.arch.shuffle_sync(_claim(edge, table, rank, lane), 0)
    coming = cute.arch.shuffle_sync(_claim(edge, table, rank, lane), 0)
    later = cute.arch.shuffle_sync(_claim(edge, table, rank, lane), 0)
    a, b, c, d = first_of(edge, table, rank, here, count)
    second = second_of(edge, table, rank, a)
    next_a, next_b, next_c, next_d = first_of(edge, table, rank, coming, count)
    flag, due, num_owed = Int64(0), Int64(0), Int32(0)
    alive = cute.arch.vote_all_sync(abort_word(table, rank) == 0)
    while alive and here < count:
        claimed = _claim(edge, table, rank, lane)
        stop = abort_word(table, rank)  # looked at only once the row is stored
        following = first_of(edge, table, rank, later, count)
        next_second = second_of(edge, table, rank, next_a)
        way = way_of(edge, constants, table, rank, (a, b, c, d), second)
        if cutlass.const_expr(constants.paced):
            crossed = wait_for_link(table, rank, way.peer, lane, constants, row_cost_ns, latency_ns)
            due = cutlass.max(due, crossed)
        # Order among the stores of a row is free: all of them precede its flag.
        if lane == 0:
            note_beside(edge, table, rank, (a, b, c, d))
        if lane == num_owed:
            flag = way.flag
        num_owed += 1
        copy_row(way.source, way.target, lane, constants.row_bytes, constants.num_loads)
        if must_raise(num_owed, due, constants):
            if cutlass.const_expr(constants.paced):
                sleep_until(table, rank, due)
            alive = cute.arch.vote_all_sync(stop == 0)
            if alive:
                raise_owed(flag, num_owed, lane, value, single_writer)
            num_owed = Int32(0)
        lap(tape, Event.send, here, place_in_order(edge), 1)
        here, coming = coming, later
        a, b, c, d = next_a, next_b, next_c, next_d
        second = next_second
        next_a, next_b, next_c, next_d = following
        later = cute.arch.shuffle_sync(claimed, 0)
    if alive and num_owed > 0:
        if cutlass.const_expr(constants.paced):
            sleep_until(table, rank, due)
        raise_owed(flag, num_owed, lane, value, single_writer)
    lap(tape, Event.send)


def _claim(edge: Edge, table: cute.Pointer, rank: Int32, lane: Int32) -> Int32:
    return claim_for_warp(word(address(table, rank, Slot.words), queue_of(edge)), lane)


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
