"""The launch gate on the device: epoch, zeroing, mailbox.

Knows nothing of rows. Rules 1 to 7 of the launch protocol (tests/protocol holds its model), one CTA
a rank. It runs after every reader of the launch before, which stream order gives.

1. The epoch of the rank goes up by one: it is a device word, so that a captured graph replays.
2. All counters and queues of the rank are zeroed, then the rank publishes to every peer: with an
   exchange its counts as `epoch << 32 | count` into half `epoch & 1` of their mailbox, without one
   the epoch into `gate_ready`.
3. It waits until the words of every rank carry this epoch. No row and no flag of this launch is
   stored anywhere before that.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.entries import rank_entry
from tilepipe.kernels.memory import address, buffer, element
from tilepipe.kernels.semaphore import (
    Scope,
    load_relaxed,
    now_ns,
    release_fence,
    set_relaxed,
    wait_at_least,
)
from tilepipe.kernels.watchdog import give_up

__all__ = ["GATE_THREADS", "gate_entry", "open_launch", "pass_gate", "zero_counters"]

GATE_THREADS = 512
_QUEUES = (Word.send_queue, Word.first_queue, Word.push_queue, Word.reduce_queue)
_LOW_WORD = (1 << 32) - 1


@cute.jit
def open_launch(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    num_threads: cutlass.Constexpr,
    constants: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    preset: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Open the next launch of `rank`. Called by all threads of one CTA, no other CTA of it runs."""
    words = address(table, rank, Slot.words)
    epoch = buffer(words, Int32)[int(Word.epoch)] + 1
    cute.arch.sync_threads()  # everybody has read the old epoch
    if thread == 0:
        buffer(words, Int32)[int(Word.epoch)] = epoch
    zero_counters(table, rank, thread, num_threads, constants, preset)
    if cutlass.const_expr(preset and constants.granularity is Granularity.token):
        _set_row_flags(table, rank, thread, num_threads, epoch)
    cute.arch.sync_threads()
    release_fence(Scope.sys)
    if cutlass.const_expr(exchange):
        _send_counts(table, rank, thread, num_threads, constants, epoch)
    else:
        for peer in cutlass.range(thread, constants.num_ranks, num_threads, unroll=1):
            ready = element(address(table, peer, Slot.gate_ready), rank, Int32)
            set_relaxed(ready, epoch, Scope.sys)
    pass_gate(table, rank, thread, num_threads, constants, exchange, epoch, limit_ns)


@cute.jit
def zero_counters(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    num_threads: cutlass.Constexpr,
    constants: cutlass.Constexpr,
    preset: cutlass.Constexpr,
):
    """Zero all launch counters of `rank`; with `preset` write thresholds, so that nothing waits."""
    words = buffer(address(table, rank, Slot.words), Int32)
    for name in cutlass.range_constexpr(len(_QUEUES)):
        if thread == name:
            words[int(_QUEUES[name])] = Int32(0)
    max_counters, max_tokens = words[int(Word.max_counters)], words[int(Word.max_tokens)]
    counters = (
        (Slot.ready, Slot.ready_expected, max_counters, max_counters),
        # What a whole token waits for is enough for each of its parts.
        (Slot.token_ready, Slot.token_expected, words[int(Word.max_parts)], max_tokens),
        (Slot.rank_ready, Slot.rank_expected, *[Int32(constants.num_ranks)] * 2),
    )
    for place in cutlass.range_constexpr(len(counters)):
        slot, threshold, count, num_expected = counters[place]
        counter = buffer(address(table, rank, slot), Int32)
        expected = buffer(address(table, rank, threshold), Int32)
        for i in cutlass.range(thread, count, num_threads, unroll=1):
            if cutlass.const_expr(preset):
                counter[i] = expected[i % num_expected]
            else:
                counter[i] = Int32(0)
    stored = buffer(address(table, rank, Slot.tile_stored), Int32)
    for i in cutlass.range(thread, words[int(Word.max_stored)], num_threads, unroll=1):
        stored[i] = Int32(0)
    if cutlass.const_expr(constants.paced):
        links = buffer(address(table, rank, Slot.links), Int64)
        if thread < 2:
            links[thread] = now_ns()


@cute.jit
def _set_row_flags(
    table: cute.Pointer, rank: Int32, thread: Int32, num_threads: cutlass.Constexpr, epoch: Int32
):
    """The flags of all rows as if they had come in this launch; others are never zeroed."""
    tiles = buffer(address(table, rank, Slot.tiles), Int32)
    flags = buffer(address(table, rank, Slot.row_flag), Int32)
    for tile in cutlass.range(buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tiles)]):
        first, valid = tiles[2 * tile], tiles[2 * tile + 1]
        for i in cutlass.range(thread, valid, num_threads, unroll=1):
            flags[first + i] = epoch


@cute.jit
def _send_counts(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    num_threads: cutlass.Constexpr,
    constants: cutlass.Constexpr,
    epoch: Int32,
):
    num_words = constants.num_experts + 1
    rows_to = buffer(address(table, rank, Slot.rows_to), Int32)
    words = buffer(address(table, rank, Slot.words), Int32)
    mine = ((epoch & 1) * constants.num_ranks + rank) * num_words
    for i in cutlass.range(thread, constants.num_ranks * num_words, num_threads, unroll=1):
        peer, place = i // num_words, i % num_words
        count = words[int(Word.fingerprint)]
        if place < constants.num_experts:
            count = rows_to[place]
        carried = (Int64(epoch) << 32) | (Int64(count) & _LOW_WORD)
        box = element(address(table, peer, Slot.mailbox), mine + place, Int64)
        set_relaxed(box, carried, Scope.sys)


@cute.jit
def pass_gate(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    num_threads: cutlass.Constexpr,
    constants: cutlass.Constexpr,
    exchange: cutlass.Constexpr,
    epoch: Int32,
    limit_ns: Int64,
):
    """Wait until every rank has opened this launch; with an exchange, keep everybody's counts."""
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    if cutlass.const_expr(exchange):
        num_words = constants.num_experts + 1
        half = (epoch & 1) * (constants.num_ranks * num_words)
        own = address(table, rank, Slot.mailbox)
        counts = buffer(address(table, rank, Slot.counts), Int32)
        words = buffer(address(table, rank, Slot.words), Int32)
        for i in cutlass.range(thread, constants.num_ranks * num_words, num_threads, unroll=1):
            box = element(own, half + i, Int64)
            source, place = i // num_words, i % num_words
            if wait_at_least(
                box, Int64(epoch) << 32, abort, limit_ns, Scope.sys, False, dtype=Int64
            ):
                count = Int32(load_relaxed(box, Int64, Scope.sys) & _LOW_WORD)
                if place < constants.num_experts:
                    counts[source * constants.num_experts + place] = count
                elif count != words[int(Word.fingerprint)]:
                    words[int(Word.mismatch)] = source + 1
                    set_relaxed(abort, Int32(1), Scope.sys)  # nothing of this launch is sent
            else:
                seen = Int32(load_relaxed(box, Int64, Scope.sys) >> 32)
                give_up(
                    table, rank, constants.num_ranks, Role.gate, source, place, epoch, epoch, seen
                )
    else:
        for source in cutlass.range(thread, constants.num_ranks, num_threads, unroll=1):
            ready = element(address(table, rank, Slot.gate_ready), source, Int32)
            if not wait_at_least(ready, epoch, abort, limit_ns, Scope.sys, False):
                seen = load_relaxed(ready, Int32, Scope.sys)
                give_up(
                    table,
                    rank,
                    constants.num_ranks,
                    Role.gate,
                    source,
                    Int32(-1),
                    epoch,
                    epoch,
                    seen,
                )


def gate_entry(constants: Constants, *, exchange: bool, preset: bool = False):
    """Host function that opens a launch on all ranks of this process, one CTA each."""

    def body(table, rank, _number, thread, limit_ns):
        open_launch(table, rank, thread, GATE_THREADS, constants, exchange, preset, limit_ns)

    return rank_entry(GATE_THREADS, body)
