"""Combine: rows are pushed home first, then tokens are reduced as they complete.

Knows nothing of the GEMM. A row finds its home in `row_home`, which dispatch has stored beside it.
A token is the weighted sum of its valid slots: FP32, in slot order, product and sum rounded apart,
one rounding to bf16 at the end, so the result is the same bits in whatever order rows come.
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.flags import must_raise, raise_owed
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    shared_table,
    word,
)
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.reduction import (
    add_column,
    columns_of,
    fetch_column,
    ring_bytes,
    stages_of,
    units_of,
)
from tilepipe.kernels.semaphore import Scope, load_relaxed, wait_at_least
from tilepipe.kernels.simt import copy_row
from tilepipe.kernels.watchdog import abort_word, give_up
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS

__all__ = ["combine_entry", "push_rows", "reduce_tokens", "wait_home"]


@cute.jit
def push_rows(
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    row_cost_ns: Int64,  # time that a row takes on a paced link
    latency_ns: Int64,  # of a paced link
):
    """Push rows home until none is left to claim. Called by all lanes of a warp; never waits for
    a peer, so no two ranks can wait for each other."""
    num_returns = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_returns)]

    # Three claims ahead: the row here has its way home, the next its place, the third its claim.
    # Addresses are looked up where they are used: with 32 warps no register is spare.
    here = cute.arch.shuffle_sync(_claim(table, rank, lane), 0)
    coming = cute.arch.shuffle_sync(_claim(table, rank, lane), 0)
    later = cute.arch.shuffle_sync(_claim(table, rank, lane), 0)
    row = _returning(table, rank, here, num_returns)
    coming_row = _returning(table, rank, coming, num_returns)
    home = _home(table, rank, row)
    flag, due, num_owed = Int64(0), Int64(0), Int32(0)
    alive = abort_word(table, rank) == 0
    while alive and here < num_returns:
        claimed = _claim(table, rank, lane)
        stop = abort_word(table, rank)  # looked at only once the row is stored
        later_row = _returning(table, rank, later, num_returns)
        coming_home = _home(table, rank, coming_row)
        peer, token, slot = _unpack(home)
        if cutlass.const_expr(constants.paced):
            due = wait_for_link(table, rank, peer, lane, constants, row_cost_ns) + latency_ns
        if lane == num_owed:
            if cutlass.const_expr(constants.by_rank):
                flag = address(table, peer, Slot.rank_ready) + Int64(rank) * 4
            else:
                flag = address(table, peer, Slot.token_ready) + Int64(token) * 4
        num_owed += 1
        home_row = Int64(token) * constants.num_topk + slot
        copy_row(
            address(table, rank, Slot.y) + Int64(row) * constants.row_bytes,
            address(table, peer, Slot.home_y) + home_row * constants.row_bytes,
            lane,
            constants.row_bytes,
            constants.num_loads,
        )
        if must_raise(num_owed, due, constants):
            if cutlass.const_expr(constants.paced):
                sleep_until(due)
            alive = cute.arch.vote_all_sync(stop == 0)
            if alive:
                raise_owed(flag, num_owed, lane, Int32(constants.num_chunks), False)
            num_owed = Int32(0)
        here, row, home = coming, coming_row, coming_home
        coming, coming_row = later, later_row
        later = cute.arch.shuffle_sync(claimed, 0)
    if alive and num_owed > 0:
        if cutlass.const_expr(constants.paced):
            sleep_until(due)
        raise_owed(flag, num_owed, lane, Int32(constants.num_chunks), False)


def _claim(table: cute.Pointer, rank: Int32, lane: Int32) -> Int32:
    return claim_for_warp(word(address(table, rank, Slot.words), Word.push_queue), lane)


def _returning(table: cute.Pointer, rank: Int32, place: Int32, num_returns: Int32) -> Int32:
    """Receive row at a place of the sending order; of the last one where it is past the end."""
    place = cutlass.max(cutlass.min(place, num_returns - 1), 0)
    return buffer(address(table, rank, Slot.returns), Int32)[place]


def _home(table: cute.Pointer, rank: Int32, row: Int32) -> Int64:
    return buffer(address(table, rank, Slot.row_home), Int64)[row]


def _unpack(home: Int64) -> tuple[Int32, Int32, Int32]:
    """Source rank, token and slot of a `row_home` word."""
    rank = Int32(home >> (TOKEN_BITS + SLOT_BITS))
    return rank, Int32(home >> SLOT_BITS), Int32(home) & ((1 << SLOT_BITS) - 1)


@cute.jit
def reduce_tokens(
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,  # shared memory of this warp, ring_bytes of it
    constants: cutlass.Constexpr,
    out: cutlass.Constexpr,  # slot of the output
    waiting: cutlass.Constexpr,  # False: all rows are known to be home
    limit_ns: Int64,
):
    """Reduce tokens of `rank`, in their order, each once its rows are home. All lanes call it.

    A warp claims units: some columns of one token. Copies run `stages - 1` columns ahead of the
    sums, across the seam between one unit and the next.
    """
    words = address(table, rank, Slot.words)
    pieces, columns, stages = units_of(constants), columns_of(constants), stages_of(constants)
    num_units = buffer(words, Int32)[int(Word.num_tokens)] * pieces
    queue = word(words, Word.reduce_queue)
    rows, target = address(table, rank, Slot.home_y), address(table, rank, out)
    stage_bytes = constants.num_topk * LANES * VECTOR_BYTES
    alive = cutlass.Boolean(True)
    if cutlass.const_expr(waiting and constants.by_rank):
        alive = _wait_ranks(table, rank, lane, constants, limit_ns)
    by_token = waiting and not constants.by_rank

    here = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    coming = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    expert, weight = _slots(table, rank, here // pieces, lane, constants)
    if cutlass.const_expr(by_token):
        if alive and here < num_units:
            came = _wait_token(table, rank, here // pieces, constants, limit_ns)
            alive = cute.arch.vote_all_sync(came)
    for column in cutlass.range_constexpr(stages - 1):
        if alive and here < num_units:
            fetch_column(
                rows,
                ring + column * stage_bytes,
                here // pieces,
                here % pieces * columns + column,
                lane,
                expert,
                constants,
            )
        cute.arch.cp_async_commit_group()
    filled = Int32(stages - 1)  # stage that is filled next
    drained = Int32(0)  # stage that is summed next
    while alive and here < num_units:
        claimed = claim_for_warp(queue, lane)
        next_expert, next_weight = _slots(table, rank, coming // pieces, lane, constants)
        for column in cutlass.range(columns, unroll=1):
            ahead = column + (stages - 1)
            unit, of_unit, in_unit = here, expert, ahead
            if ahead >= columns:
                unit, of_unit, in_unit = coming, next_expert, ahead - columns
            if cutlass.const_expr(by_token):
                if in_unit == 0 and alive and unit < num_units:
                    came = _wait_token(table, rank, unit // pieces, constants, limit_ns)
                    alive = cute.arch.vote_all_sync(came)
            if alive and unit < num_units:
                fetch_column(
                    rows,
                    ring + filled * stage_bytes,
                    unit // pieces,
                    unit % pieces * columns + in_unit,
                    lane,
                    of_unit,
                    constants,
                )
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(stages - 1)
            add_column(
                target,
                ring + drained * stage_bytes,
                here // pieces,
                here % pieces * columns + column,
                lane,
                weight,
                constants,
            )
            filled = filled + 1 if filled + 1 < stages else Int32(0)
            drained = drained + 1 if drained + 1 < stages else Int32(0)
        here, expert, weight = coming, next_expert, next_weight
        coming = cute.arch.shuffle_sync(claimed, 0)
    cute.arch.cp_async_wait_group(0)


@cute.jit
def _slots(
    table: cute.Pointer, rank: Int32, token: Int32, lane: Int32, constants: cutlass.Constexpr
) -> tuple[Int32, Float32]:
    """Expert and weight of slot `lane` of a token; -1 and 0 for none, and past the last token."""
    expert, weight = Int32(-1), Float32(0)
    num_tokens = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tokens)]
    if lane < constants.num_topk and token < num_tokens:
        place = token * constants.num_topk + lane
        expert = buffer(address(table, rank, Slot.topk_idx), Int32)[place]
        if expert >= 0:
            weight = buffer(address(table, rank, Slot.topk_weights), Float32)[place]
    return expert, weight


@cute.jit
def _wait_token(
    table: cute.Pointer, rank: Int32, token: Int32, constants: cutlass.Constexpr, limit_ns: Int64
) -> cutlass.Boolean:
    epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
    expected = buffer(address(table, rank, Slot.token_expected), Int32)[token]
    counter = element(address(table, rank, Slot.token_ready), token, Int32)
    return _wait(table, rank, counter, expected, Role.reduce, token, epoch, constants, limit_ns)


@cute.jit
def _wait_ranks(
    table: cute.Pointer, rank: Int32, lane: Int32, constants: cutlass.Constexpr, limit_ns: Int64
) -> cutlass.Boolean:
    """Wait until every source rank has pushed what it owes: lane i watches rank i."""
    epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
    alive = cutlass.Boolean(True)
    if lane < constants.num_ranks:
        expected = buffer(address(table, rank, Slot.rank_expected), Int32)[lane]
        counter = element(address(table, rank, Slot.rank_ready), lane, Int32)
        alive = _wait(
            table, rank, counter, expected, Role.reduce_rank, lane, epoch, constants, limit_ns
        )
    return cute.arch.vote_all_sync(alive)


@cute.jit
def _wait(
    table: cute.Pointer,
    rank: Int32,
    counter: cute.Pointer,
    expected: Int32,
    role: cutlass.Constexpr,
    item: Int32,
    epoch: Int32,
    constants: cutlass.Constexpr,
    limit_ns: Int64,
) -> cutlass.Boolean:
    abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
    came = wait_at_least(counter, expected, abort, limit_ns, Scope.sys, False)
    if not came:
        seen = load_relaxed(counter, Int32, Scope.sys)
        give_up(table, rank, constants.num_ranks, role, item, Int32(-1), epoch, expected, seen)
    return came


@cute.jit
def wait_home(
    table: cute.Pointer,
    rank: Int32,
    warp: Int32,  # of all warps of the rank
    num_warps: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Return once the tokens, or ranks, that this warp watches over are home; reduces nothing."""
    if cutlass.const_expr(constants.by_rank):
        _wait_ranks(table, rank, lane, constants, limit_ns)
    else:
        num_tokens = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tokens)]
        first = warp * LANES + lane
        for token in cutlass.range(first, num_tokens, num_warps * LANES, unroll=1):
            _wait_token(table, rank, token, constants, limit_ns)


def combine_entry(constants: Constants, *, push: bool, reduce: bool):
    """Host function of combine (both), of its pushes alone, or of its reduction alone.

    Pushes alone end once everything is home; a reduction alone waits for nothing.
    """

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
        if cutlass.const_expr(push):
            push_rows(table, rank, lane, constants, row_cost_ns, latency_ns)
        if cutlass.const_expr(reduce):
            out = Slot.out if push else Slot.reduced
            own = ring_bytes(constants)
            rings = memory.allocate_array(Int32, constants.num_warps * own // 4, byte_alignment=128)
            ring = Int32(rings.toint()) + warp * own
            reduce_tokens(table, rank, lane, ring, constants, out, push, limit_ns)
        else:
            wait_home(
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
