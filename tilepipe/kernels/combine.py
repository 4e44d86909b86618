"""Combine: rows are pushed home first, then tokens are reduced as they complete.

Knows nothing of the GEMM. A row finds its home in `row_home`, which dispatch has stored beside it.
A token is the weighted sum of its valid slots: FP32, in slot order, product and sum rounded apart,
one rounding to bf16 at the end, so the result is the same bits in whatever order rows come.
"""

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from tilepipe.config.limits import COLUMN_BYTES
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.entries import communication_entry
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    word,
)
from tilepipe.kernels.move import move_rows
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.reduction import (
    add_column,
    columns_of,
    fetch_column,
    num_units_of,
    stages_of,
    unit_at,
    units_of,
)
from tilepipe.kernels.stamps import Event, lap
from tilepipe.kernels.track import AT_HOME, NO_ITEM
from tilepipe.kernels.watchdog import wait_or_give_up, wait_telling_or_give_up

__all__ = ["combine_entry", "reduce_tokens", "slots_of", "token_at", "wait_home", "wait_token"]


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
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
    num_parts: cutlass.Constexpr = None,  # of a token that are reduced, the first ones; None: all
    order: cutlass.Constexpr = None,  # slot that lists tokens in their order; None: by number
):
    """Reduce tokens of `rank`, in their order, each once its rows are home; with parts, the same of
    part after part. All lanes call it.

    A warp claims units: some columns of one token. Copies run `stages - 1` columns ahead of the
    sums, across the seam between one unit and the next.
    """
    words = address(table, rank, Slot.words)
    columns, stages = columns_of(constants), stages_of(constants)
    num_tokens = buffer(words, Int32)[int(Word.num_tokens)]
    num_units = num_units_of(constants, num_tokens, num_parts)
    if cutlass.const_expr(constants.num_parts > 1):
        num_tokens = cutlass.max(num_tokens, 1)  # divided by
    queue = word(words, Word.reduce_queue)
    rows, target = address(table, rank, Slot.home_y), address(table, rank, out)
    stage_bytes = constants.num_topk * LANES * VECTOR_BYTES
    alive = cutlass.Boolean(True)
    if cutlass.const_expr(waiting and constants.by_rank):
        alive = _wait_ranks(table, rank, lane, constants, limit_ns)
        lap(tape, Event.wait, NO_ITEM, AT_HOME)
    by_token = waiting and not constants.by_rank

    here = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    coming = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    first = unit_at(constants, here, num_tokens)
    token = token_at(table, rank, first.token, num_tokens, order)
    expert, weight = slots_of(table, rank, token, lane, constants)
    if cutlass.const_expr(by_token):
        if alive and here < num_units:
            came = wait_token(table, rank, token, first.part, constants, limit_ns, tape)
            alive = cute.arch.vote_all_sync(came)
    for column in cutlass.range_constexpr(stages - 1):
        if alive and here < num_units:
            fetch_column(
                rows,
                ring + column * stage_bytes,
                token,
                first.begin + column * COLUMN_BYTES,
                first.end,
                lane,
                expert,
                constants,
            )
        cute.arch.cp_async_commit_group()
    filled = Int32(stages - 1)  # stage that is filled next
    drained = Int32(0)  # stage that is summed next
    while alive and here < num_units:
        claimed = claim_for_warp(queue, lane)
        own = unit_at(constants, here, num_tokens)
        following = unit_at(constants, coming, num_tokens)
        next_token = token_at(table, rank, following.token, num_tokens, order)
        next_expert, next_weight = slots_of(table, rank, next_token, lane, constants)
        for column in cutlass.range(columns, unroll=1):
            ahead = column + (stages - 1)
            unit, its_token, of_unit, in_unit = here, token, expert, ahead
            if ahead >= columns:
                unit, its_token, of_unit = coming, next_token, next_expert
                in_unit = ahead - columns
            fetched = unit_at(constants, unit, num_tokens)
            if cutlass.const_expr(by_token):
                if in_unit == 0 and alive and unit < num_units:
                    came = wait_token(
                        *(table, rank, its_token, fetched.part, constants, limit_ns, tape)
                    )
                    alive = cute.arch.vote_all_sync(came)
            if alive and unit < num_units:
                fetch_column(
                    rows,
                    ring + filled * stage_bytes,
                    its_token,
                    fetched.begin + in_unit * COLUMN_BYTES,
                    fetched.end,
                    lane,
                    of_unit,
                    constants,
                )
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(stages - 1)
            add_column(
                target,
                ring + drained * stage_bytes,
                token,
                own.begin + column * COLUMN_BYTES,
                own.end,
                lane,
                weight,
                constants,
            )
            filled = filled + 1 if filled + 1 < stages else Int32(0)
            drained = drained + 1 if drained + 1 < stages else Int32(0)
        of_part = own.part * units_of(constants) + here % units_of(constants)
        lap(tape, Event.reduce, token, of_part)
        here, token, expert, weight = coming, next_token, next_expert, next_weight
        coming = cute.arch.shuffle_sync(claimed, 0)
    cute.arch.cp_async_wait_group(0)


@cute.jit
def token_at(
    table: cute.Pointer,
    rank: Int32,
    place: Int32,
    num_tokens: Int32,
    order: cutlass.Constexpr,
) -> Int32:
    """The token at a place of the order; past the last one the place itself, which is none."""
    token = place
    if cutlass.const_expr(order is not None):
        if place < num_tokens:
            token = buffer(address(table, rank, order), Int32)[place]
    return token


@cute.jit
def slots_of(
    table: cute.Pointer,
    rank: Int32,
    token: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    side_by_side: cutlass.Constexpr = False,  # load both at once: then no expert has any weight
) -> tuple[Int32, Float32]:
    """Expert and weight of slot `lane` of a token; -1 and 0 for none, and past the last token."""
    expert, weight = Int32(-1), Float32(0)
    num_tokens = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tokens)]
    if lane < constants.num_topk and token < num_tokens:
        place = token * constants.num_topk + lane
        expert = buffer(address(table, rank, Slot.topk_idx), Int32)[place]
        if side_by_side or expert >= 0:
            weight = buffer(address(table, rank, Slot.topk_weights), Float32)[place]
    return expert, weight


@cute.jit
def wait_token(
    table: cute.Pointer,
    rank: Int32,
    token: Int32,
    part: Int32,
    constants: cutlass.Constexpr,
    limit_ns: Int64,
    tape: cutlass.Constexpr = None,
    rest_ns: cutlass.Constexpr = 0,  # between polls
) -> cutlass.Boolean:
    words = buffer(address(table, rank, Slot.words), Int32)
    epoch = words[int(Word.epoch)]
    expected = buffer(address(table, rank, Slot.token_expected), Int32)[token]
    place = token
    if cutlass.const_expr(constants.num_parts > 1):
        expected = expected // constants.num_parts
        place = part * words[int(Word.max_tokens)] + token
    counter = element(address(table, rank, Slot.token_ready), place, Int32)
    # Of what is there at once no stamp is left: tokens are many.
    on_late = None if tape is None else partial(lap, tape, Event.reduce)
    came, late = wait_telling_or_give_up(
        table,
        rank,
        counter,
        expected,
        Role.reduce,
        token,
        epoch,
        constants.num_ranks,
        limit_ns,
        rest_ns,
        on_late,
    )
    if cutlass.const_expr(tape is not None):
        if late:
            lap(tape, Event.wait, token, AT_HOME | 1)
    return came


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
        alive = wait_or_give_up(
            table,
            rank,
            counter,
            expected,
            Role.reduce_rank,
            lane,
            epoch,
            constants.num_ranks,
            limit_ns,
        )
    came = cute.arch.vote_all_sync(alive)
    # A vote orders no memory, and each lane has acquired the rows of one rank alone.
    cute.arch.sync_warp()
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
            wait_token(table, rank, token, Int32(0), constants, limit_ns)


def combine_entry(constants: Constants, *, push: bool, reduce: bool):
    """Host function of combine (both), of its pushes alone, or of its reduction alone.

    Pushes alone end once everything is home; a reduction alone waits for nothing.
    """

    def body(table, rank, lane, warp, num_warps, ring, barriers, cost_ns, latency_ns, limit_ns):
        if push:
            way = (ring, barriers, constants, cost_ns, latency_ns, limit_ns)
            move_rows(Edge.home, table, rank, lane, *way)
        if reduce:
            out = Slot.out if push else Slot.reduced
            reduce_tokens(table, rank, lane, ring, constants, out, push, limit_ns)
        else:
            wait_home(table, rank, warp, num_warps, lane, constants, limit_ns)

    return communication_entry(constants, body, moves=push, reduces=reduce)
