"""Dispatch: every warp claims rows in plan order, pushes them to their experts and raises flags.

Knows nothing of GEMM and combine. A warp works on a pipeline of three rows: one that it copies, one
whose descriptor is on its way, one that it is claiming; so no latency of a claim or a descriptor is
seen while rows are large. Counters count rows, so any warp of any CTA may take any row.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.flags import must_raise, raise_owed
from tilepipe.kernels.memory import LANES, address, buffer, element, load_words, shared_table, word
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.semaphore import Scope, load_relaxed, wait_at_least
from tilepipe.kernels.simt import copy_row
from tilepipe.kernels.watchdog import abort_word, give_up
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = ["dispatch_entry", "send_rows", "wait_rows"]

_SEND_BYTES = 16


@cute.jit
def send_rows(
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    row_cost_ns: Int64,  # time that a row takes on a paced link
    latency_ns: Int64,  # of a paced link
):
    """Push rows of `rank` until none is left to claim. Called by all lanes of a warp."""
    words = address(table, rank, Slot.words)
    num_sends = buffer(words, Int32)[int(Word.num_sends)]
    epoch = buffer(words, Int32)[int(Word.epoch)]
    per_row_flag = constants.granularity is Granularity.token
    value = epoch if per_row_flag else Int32(1)

    # Addresses are looked up where they are used: with 32 warps no register is spare.
    here = cute.arch.shuffle_sync(_claim(table, rank, lane), 0)
    coming = cute.arch.shuffle_sync(_claim(table, rank, lane), 0)
    token, peer_slot, row, counter = _descriptor(table, rank, here, num_sends)
    flag, due, num_owed = Int64(0), Int64(0), Int32(0)
    alive = abort_word(table, rank) == 0
    while alive and here < num_sends:
        claimed = _claim(table, rank, lane)
        stop = abort_word(table, rank)  # looked at only once the row is stored
        following = _descriptor(table, rank, coming, num_sends)
        peer, slot = peer_slot >> SLOT_BITS, peer_slot & ((1 << SLOT_BITS) - 1)
        if cutlass.const_expr(constants.paced):
            due = wait_for_link(table, rank, peer, lane, constants, row_cost_ns) + latency_ns
        # Order among the stores of a row is free: all of them precede its flag.
        if lane == 0:
            home = (Int64(rank) << (TOKEN_BITS + SLOT_BITS)) | (Int64(token) << SLOT_BITS) | slot
            buffer(address(table, peer, Slot.row_home), Int64)[row] = home
        if lane == num_owed:
            if cutlass.const_expr(per_row_flag):
                flag = address(table, peer, Slot.row_flag) + Int64(row) * 4
            else:
                flag = address(table, peer, Slot.ready) + Int64(counter) * 4
        num_owed += 1
        copy_row(
            address(table, rank, Slot.x) + Int64(token) * constants.row_bytes,
            address(table, peer, Slot.recv_x) + Int64(row) * constants.row_bytes,
            lane,
            constants.row_bytes,
            constants.num_loads,
        )
        if must_raise(num_owed, due, constants):
            if cutlass.const_expr(constants.paced):
                sleep_until(due)
            alive = cute.arch.vote_all_sync(stop == 0)
            if alive:
                raise_owed(flag, num_owed, lane, value, per_row_flag)
            num_owed = Int32(0)
        here = coming
        token, peer_slot, row, counter = following
        coming = cute.arch.shuffle_sync(claimed, 0)
    if alive and num_owed > 0:
        if cutlass.const_expr(constants.paced):
            sleep_until(due)
        raise_owed(flag, num_owed, lane, value, per_row_flag)


def _claim(table: cute.Pointer, rank: Int32, lane: Int32) -> Int32:
    return claim_for_warp(word(address(table, rank, Slot.words), Word.send_queue), lane)


def _descriptor(
    table: cute.Pointer, rank: Int32, place: Int32, num_sends: Int32
) -> tuple[Int32, ...]:
    """The four words of a row to send; of the last one where `place` is past the end."""
    place = cutlass.max(cutlass.min(place, num_sends - 1), 0)
    return load_words(address(table, rank, Slot.sends) + Int64(place) * _SEND_BYTES)


@cute.jit
def wait_rows(
    table: cute.Pointer,
    rank: Int32,
    warp: Int32,  # of all warps of the rank
    num_warps: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Return once the rows that this warp watches over are here. Only with all sends out.

    Warps share the counters, or with granularity token the tiles, among themselves.
    """
    words = buffer(address(table, rank, Slot.words), Int32)
    epoch = words[int(Word.epoch)]
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    if cutlass.const_expr(constants.granularity is Granularity.token):
        tiles = buffer(address(table, rank, Slot.tiles), Int32)
        flags = address(table, rank, Slot.row_flag)
        for tile in cutlass.range(warp, words[int(Word.num_tiles)], num_warps, unroll=1):
            first, valid = tiles[2 * tile], tiles[2 * tile + 1]
            for i in cutlass.range(lane, valid, LANES, unroll=1):
                flag = element(flags, first + i, Int32)
                _wait(
                    table,
                    rank,
                    flag,
                    epoch,
                    Role.receive_row,
                    first + i,
                    abort,
                    constants,
                    epoch,
                    limit_ns,
                )
    else:
        ready, expected = (
            address(table, rank, Slot.ready),
            address(table, rank, Slot.ready_expected),
        )
        num_counters = words[int(Word.num_counters)]
        first = warp * LANES + lane
        for counter in cutlass.range(first, num_counters, num_warps * LANES, unroll=1):
            rows = buffer(expected, Int32)[counter]
            seen = element(ready, counter, Int32)
            _wait(
                table,
                rank,
                seen,
                rows,
                Role.receive,
                counter,
                abort,
                constants,
                epoch,
                limit_ns,
            )


@cute.jit
def _wait(
    table: cute.Pointer,
    rank: Int32,
    counter: cute.Pointer,
    expected: Int32,
    role: cutlass.Constexpr,
    item: Int32,
    abort: cute.Pointer,
    constants: cutlass.Constexpr,
    epoch: Int32,
    limit_ns: Int64,
):
    if not wait_at_least(counter, expected, abort, limit_ns, Scope.sys, False):
        seen = load_relaxed(counter, Int32, Scope.sys)
        give_up(table, rank, constants.num_ranks, role, item, Int32(-1), epoch, expected, seen)


def dispatch_entry(constants: Constants):
    """Host function of dispatch alone: sends of all ranks of this process, then their waits."""

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,
        row_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
    ):
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = SmemAllocator()
        num_threads = constants.num_warps * LANES
        table = shared_table(table, memory, constants.num_ranks, thread, num_threads)
        rank = first_rank + cta % num_ranks
        send_rows(table, rank, lane, constants, row_cost_ns, latency_ns)
        wait_rows(
            table,
            rank,
            (cta // num_ranks) * constants.num_warps + warp,
            num_ctas * constants.num_warps,
            lane,
            constants,
            limit_ns,
        )

    @cute.jit
    def host(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,  # of each rank
        row_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ):
        kernel(table, first_rank, num_ranks, num_ctas, row_cost_ns, latency_ns, limit_ns).launch(
            grid=[num_ranks * num_ctas, 1, 1],
            block=[constants.num_warps * LANES, 1, 1],
            min_blocks_per_mp=1,  # all registers that so many threads leave: none may spill
            stream=stream,
        )

    return host
