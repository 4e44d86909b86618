"""Reduction by one warp beside a GEMM: through registers, as shared memory has no room left.

Knows nothing of the GEMM. Units, their queue, their order and what each waits for are those of
`reduce_tokens`, so warps of both kinds may take from one queue; the sums are the same bits.

A warp holds the unit that it sums and, only from the first column of it on, the next one: what it
holds when everything is home is what the others wait for in the end. It has time: between two looks
at what is not home yet it sleeps, since a warp of every SM looks.

One H200, GEMM -> combine of 32 768 x 2048 x 7168 in 4 chunks, times by that of 8 CTAs that reduce
(1373 us), by registers of a thread that reduces and loads that it has in flight (2026-11):

    registers, loads    40, 4    56, 8    72, 8    88, 16
                        1.018    0.983    0.971     1.002

With 40 the compiler keeps two or three loads in flight; with 16, two columns at once, tiles take
longer than the rows that they bring. Having L2 fetch the rows of the next unit ahead changes
nothing with 72, nor does a sleep of 100 or 1000 ns.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from tilepipe.config.limits import COLUMN_BYTES
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.combine import slots_of, token_at, wait_token
from tilepipe.kernels.memory import (
    VECTOR_BYTES,
    address,
    buffer,
    store_words,
    word,
)
from tilepipe.kernels.queue import claim_for_warp
from tilepipe.kernels.reduction import (
    columns_of,
    num_units_of,
    product,
    two_bf16,
    two_floats,
    unit_at,
    units_of,
)
from tilepipe.kernels.stamps import Event, lap

__all__ = ["reduce_beside"]

# Loads that a lane has in flight, and its rest between two looks.
NUM_LOADS, REST_NS = 8, 300
_WORDS = VECTOR_BYTES // 4


@cute.jit
def reduce_beside(
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    constants: cutlass.Constexpr,
    out: cutlass.Constexpr,  # slot of the output
    limit_ns: Int64,
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
    num_parts: cutlass.Constexpr = None,  # of a token that are reduced, the first ones; None: all
    order: cutlass.Constexpr = None,  # slot that lists tokens in their order; None: by number
):
    """As `reduce_tokens(waiting=True)`. All lanes of a warp call it."""
    assert not constants.by_rank, "units complete token by token"
    at_once = max(1, NUM_LOADS // constants.num_topk)  # columns
    columns = columns_of(constants)
    steps = -(-columns // at_once)
    words = address(table, rank, Slot.words)
    num_tokens = buffer(words, Int32)[int(Word.num_tokens)]
    num_units = num_units_of(constants, num_tokens, num_parts)
    num_tokens = cutlass.max(num_tokens, 1)  # divided by
    queue = word(words, Word.reduce_queue)
    rows, target = address(table, rank, Slot.home_y), address(table, rank, out)
    here = cute.arch.shuffle_sync(claim_for_warp(queue, lane), 0)
    first = unit_at(constants, here, num_tokens)
    token = token_at(table, rank, first.token, num_tokens, order)
    expert, weight = slots_of(table, rank, token, lane, constants, side_by_side=True)
    alive = Boolean(True)
    if here < num_units:
        came = wait_token(
            *(table, rank, token, first.part, constants, limit_ns, tape), rest_ns=REST_NS
        )
        alive = cute.arch.vote_all_sync(came)
    while alive and here < num_units:
        claimed = claim_for_warp(queue, lane)
        own = unit_at(constants, here, num_tokens)
        end = own.end
        if cutlass.const_expr(columns % at_once):  # the last step would reach into the next unit
            end = cutlass.min(end, own.begin + columns * COLUMN_BYTES)
        source = rows + Int64(token) * (constants.num_topk * constants.row_bytes)
        sink = target + Int64(token) * constants.row_bytes
        if expert < 0:
            weight = Float32(0)
        coming, next_token = here, token
        next_expert, next_weight = expert, weight
        # What a later step looks up is on its way while the steps before it sum.
        for step in cutlass.range(steps, unroll=1):
            _add_columns(
                *(source, sink, own.begin + step * (at_once * COLUMN_BYTES), end),
                *(lane, expert, weight, constants),
            )
            if step == 0:
                coming = cute.arch.shuffle_sync(claimed, 0)
                place = unit_at(constants, coming, num_tokens).token
                next_token = token_at(table, rank, place, num_tokens, order)
            if step == min(1, steps - 1):
                next_expert, next_weight = slots_of(
                    *(table, rank, next_token, lane, constants), side_by_side=True
                )
        of_part = own.part * units_of(constants) + here % units_of(constants)
        lap(tape, Event.reduce, token, of_part)
        here, token, expert, weight = coming, next_token, next_expert, next_weight
        if here < num_units:
            part = unit_at(constants, here, num_tokens).part
            came = wait_token(
                *(table, rank, token, part, constants, limit_ns, tape), rest_ns=REST_NS
            )
            alive = cute.arch.vote_all_sync(came)


@cute.jit
def _add_columns(
    source: Int64,  # address of the token's rows
    sink: Int64,  # and of its sum
    begin: Int32,  # byte of the row at which the first column begins
    end: Int32,  # and the one before which the last ends
    lane: Int32,
    expert: Int32,  # of slot `lane`; negative: dropped
    weight: Float32,  # of slot `lane`; 0 where dropped
    constants: cutlass.Constexpr,
):
    """Sum columns over the slots as `add_column` does: in slot order, a dropped one adds +0."""
    num_topk, row_bytes = constants.num_topk, constants.row_bytes
    at_once = max(1, NUM_LOADS // num_topk)
    place = begin + lane * VECTOR_BYTES
    source += place
    sums = [[Float32(0)] * (2 * _WORDS) for _ in range(at_once)]
    batch = min(NUM_LOADS, num_topk)
    for base in cutlass.range_constexpr(0, num_topk, batch):
        slots = range(base, min(base + batch, num_topk))
        kept = [cute.arch.shuffle_sync(expert, slot) >= 0 for slot in slots]
        held = [
            [
                _load_if(
                    source + (slot * row_bytes + i * COLUMN_BYTES),
                    Boolean(kept[slot - base] and place + i * COLUMN_BYTES < end),
                )
                for slot in slots
            ]
            for i in range(at_once)
        ]
        for slot in cutlass.range_constexpr(base, min(base + batch, num_topk)):
            factor = cute.arch.shuffle_sync(weight, slot)
            for i in cutlass.range_constexpr(at_once):
                for k in cutlass.range_constexpr(_WORDS):
                    low, high = two_floats(held[i][slot - base][k])
                    sums[i][2 * k] = sums[i][2 * k] + product(factor, low)
                    sums[i][2 * k + 1] = sums[i][2 * k + 1] + product(factor, high)
    for i in cutlass.range_constexpr(at_once):
        if place + i * COLUMN_BYTES < end:
            store_words(
                sink + place + i * COLUMN_BYTES,
                [two_bf16(sums[i][2 * k], sums[i][2 * k + 1]) for k in range(_WORDS)],
            )


@dsl_user_op
def _load_if(source: Int64, there: Boolean, *, loc=None, ip=None) -> tuple[Int32, ...]:
    """Four words that will not be read again; zeros where they are not `there`.

    Written as an instruction: the compiler moves loads of its own down between the sums.
    """
    four = llvm.StructType.get_literal([Int32.mlir_type] * 4)
    zero = Int32(0).ir_value(loc=loc, ip=ip)
    words = llvm.inline_asm(
        four,
        [source.ir_value(loc=loc, ip=ip), there.ir_value(loc=loc, ip=ip), *[zero] * 4],
        "@$5 ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,b,0,1,2,3",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return tuple(
        Int32(llvm.extractvalue(Int32.mlir_type, words, [i], loc=loc, ip=ip)) for i in range(4)
    )
