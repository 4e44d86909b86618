"""The way back planned on the device: which received row goes home when, as NumPy plans it.

Knows nothing of rows' contents beyond `row_home`, which dispatch has stored beside them, and of the
counts that the exchange before it has left. `schedule.plan.plan_returns` is the specification.

Segments are pairs of local expert and source rank, in the order of the rows. Inside a pair rows go
by token, so the first tokens of its runs rise: who goes before a run is found by one search a pair.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Layout, Order
from tilepipe.fabric.table import Slot, Stamp, Word
from tilepipe.kernels.entries import rank_entry
from tilepipe.kernels.memory import LANES, address, buffer
from tilepipe.kernels.protocol import open_launch
from tilepipe.kernels.scan import exclusive_scan
from tilepipe.kernels.tickets import (
    PLAN_THREADS,
    PlanConstants,
    Segments,
    bin_tickets,
    ceil_div,
    cut_segment,
    hash_runs,
    head_of,
    pieces_before,
    place_by_hash,
    place_by_token,
    segment_table,
    ticket_of,
    turn_of,
)
from tilepipe.kernels.watchdog import abort_word, leave_stamp
from tilepipe.schedule.packed import SLOT_BITS
from tilepipe.schedule.settings import TICKET_ROWS

__all__ = ["plan_returns", "returns_entry"]

# Rows of a ticket are written by as many lanes.
_HALF_WARPS = PLAN_THREADS // TICKET_ROWS


@cute.jit
def _lay_out(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,  # (num_experts_per_rank + 1,) receive row where each expert begins
    sums: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """Prefix sums over local experts and over pairs, from the counts of the latest exchange."""
    settings = plan.settings
    local, num_ranks, tile_m = settings.num_experts_per_rank, settings.num_ranks, settings.tile_m
    counts = buffer(address(table, rank, Slot.counts), Int32)
    own, before, tickets, runs = pairs.own, pairs.before, pairs.tickets, pairs.runs
    for expert in cutlass.range(thread, local, PLAN_THREADS, unroll=1):
        rows = Int32(0)
        for source in cutlass.range_constexpr(num_ranks):
            sent = counts[source * settings.num_experts + rank * local + expert]
            pair = expert * num_ranks + source
            own[pair], before[pair] = sent, rows
            tickets[pair], runs[pair] = cut_segment(sent, rows, tile_m)
            rows += sent
        if cutlass.const_expr(settings.layout is Layout.padded):
            rows = ceil_div(rows, tile_m) * tile_m
        first_row[expert] = rows
    cute.arch.sync_threads()
    exclusive_scan(first_row, Int32(local), thread, sums, PLAN_THREADS)
    for which in cutlass.range_constexpr(2):
        values = (tickets, runs)[which]
        total = exclusive_scan(values, Int32(settings.num_experts), thread, sums, PLAN_THREADS)
        if thread == 0:
            values[settings.num_experts] = total
    cute.arch.sync_threads()


@cute.jit
def _run_row(
    pair: Int32,
    run: Int32,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,
    plan: cutlass.Constexpr,
) -> Int32:
    """Receive row with which a run of a pair begins."""
    before, own, tile_m = pairs.before, pairs.own, plan.settings.tile_m
    row = first_row[pair // plan.settings.num_ranks] + before[pair]
    if run > 0:
        row += head_of(own[pair], before[pair], tile_m) + (run - 1) * tile_m
    return row


@cute.jit
def _token_of(homes: cute.Tensor, row: Int32) -> Int32:
    """Token of a receive row at its source."""
    return Int32(homes[row] >> SLOT_BITS)


@cute.jit
def _runs_before(
    pair: Int32,
    token: Int32,
    ties: cutlass.Constexpr,  # runs of an equal first token stand before, too
    homes: cute.Tensor,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,
    plan: cutlass.Constexpr,
) -> Int32:
    """Runs of a pair whose first token is lower."""
    runs = pairs.runs
    low, high = Int32(0), runs[pair + 1] - runs[pair]
    while low < high:
        middle = (low + high) // 2
        its = _token_of(homes, _run_row(pair, middle, pairs, first_row, plan))
        if its < token or (ties and its == token):
            low = middle + 1
        else:
            high = middle
    return low


@cute.jit
def _tickets_before(
    pair: Int32,
    token: Int32,
    own_pair: Int32,
    earlier_turn: cutlass.Boolean,
    same_queue: cutlass.Boolean,
    homes: cute.Tensor,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,
    plan: cutlass.Constexpr,
) -> Int32:
    """Tickets of `pair` that stand before a run of `own_pair` with this first token.

    Ties go by turn, inside one queue as they come.
    """
    first = earlier_turn or (same_queue and pair < own_pair)
    number = Int32(0)
    if first:
        number = _runs_before(pair, token, True, homes, pairs, first_row, plan)
    else:
        number = _runs_before(pair, token, False, homes, pairs, first_row, plan)
    return pieces_before(pair, number, pairs, plan)


@cute.jit
def _place_in_queue(
    pair: Int32,
    token: Int32,
    homes: cute.Tensor,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,
    plan: cutlass.Constexpr,
) -> Int32:
    """Tickets to the same home whose runs have earlier first tokens."""
    num_ranks, local = plan.settings.num_ranks, plan.settings.num_experts_per_rank
    peer = pair % num_ranks
    place = Int32(0)
    for expert in cutlass.range(local, unroll=1):
        other = expert * num_ranks + peer
        if other != pair:
            place += _tickets_before(
                other,
                token,
                pair,
                cutlass.Boolean(False),
                cutlass.Boolean(True),
                homes,
                pairs,
                first_row,
                plan,
            )
    return place


@cute.jit
def _place_in_list(
    pair: Int32,
    token: Int32,
    rank: Int32,
    homes: cute.Tensor,
    pairs: cutlass.Constexpr,
    first_row: cute.Tensor,
    plan: cutlass.Constexpr,
) -> Int32:
    """Tickets to all homes whose runs have earlier first tokens, ties from rank + 1 on."""
    num_ranks = plan.settings.num_ranks
    peer = pair % num_ranks
    turn = turn_of(peer, rank, num_ranks)
    place = Int32(0)
    for other in cutlass.range(plan.settings.num_experts, unroll=1):
        if other != pair:
            home = other % num_ranks
            place += _tickets_before(
                other,
                token,
                pair,
                turn_of(home, rank, num_ranks) < turn,
                home == peer,
                homes,
                pairs,
                first_row,
                plan,
            )
    return place


@cute.jit
def _serve_in_turn(
    in_queue: Int32,
    pair: Int32,
    rank: Int32,
    lengths: cute.Tensor,  # (num_ranks,) tickets to each home
    plan: cutlass.Constexpr,
) -> Int32:
    """All queues served ticket by ticket, from rank + 1 on: who is served before this one."""
    num_ranks = plan.settings.num_ranks
    turn = turn_of(pair % num_ranks, rank, num_ranks)
    place = Int32(0)
    for other in cutlass.range_constexpr(num_ranks):
        served = in_queue
        if turn_of(other, rank, num_ranks) < turn:
            served += 1
        place += cutlass.min(lengths[other], served)
    return place


@cute.jit
def _queue_lengths(
    thread: Int32, pairs: cutlass.Constexpr, lengths: cute.Tensor, plan: cutlass.Constexpr
):
    settings = plan.settings
    tickets = pairs.tickets
    if thread < settings.num_ranks:
        length = Int32(0)
        for expert in cutlass.range(settings.num_experts_per_rank, unroll=1):
            pair = expert * settings.num_ranks + thread
            length += tickets[pair + 1] - tickets[pair]
        lengths[thread] = length
    cute.arch.sync_threads()


@cute.jit
def plan_returns(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    memory: cutlass.Constexpr,
    plan: cutlass.Constexpr,
):
    """Order the way back of all rows that the latest dispatch has brought to `rank`.

    Called by all threads of one CTA, behind the gate.
    """
    settings, most = plan.settings, plan.max_tickets
    pairs = Segments(*segment_table(memory, settings.num_experts, 4))
    (first_row,) = segment_table(memory, settings.num_experts_per_rank, 1)
    sums, lengths = segment_table(memory, LANES, 2)
    scratch = buffer(address(table, rank, Slot.scratch), Int32)
    homes = buffer(address(table, rank, Slot.row_home), Int64)
    returns = buffer(address(table, rank, Slot.returns), Int32)
    epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
    starts = cute.make_tensor(scratch.iterator + most, cute.make_layout(most))
    tokens = cute.make_tensor(scratch.iterator + 2 * most, cute.make_layout(most))
    members = cute.make_tensor(scratch.iterator + 3 * most, cute.make_layout(most))
    bins = cute.make_tensor(scratch.iterator + 4 * most, cute.make_layout(plan.max_tokens + 1))
    keys = cute.make_tensor(scratch.iterator + 2 * most, cute.make_layout(plan.max_runs))
    sizes = cute.make_tensor(
        scratch.iterator + (2 * most + plan.max_runs), cute.make_layout(plan.max_runs)
    )
    _lay_out(table, rank, thread, pairs, first_row, sums, plan)
    num_tickets = pairs.tickets[settings.num_experts]
    if cutlass.const_expr(settings.order is Order.edf):
        _queue_lengths(thread, pairs, lengths, plan)
    if cutlass.const_expr(settings.order is Order.token):
        for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
            pair, _, row, _ = ticket_of(ticket, pairs, plan)
            tokens[ticket] = _token_of(
                homes, _run_row(pair, Int32(0), pairs, first_row, plan) + row
            )
        cute.arch.sync_threads()
        bin_tickets(thread, num_tickets, Int32(plan.max_tokens), scratch, sums, plan)
    if cutlass.const_expr(settings.order is Order.random):
        hash_runs(thread, epoch, pairs, keys, sizes, plan)
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        pair, run, row, num_rows = ticket_of(ticket, pairs, plan)
        place = ticket
        if cutlass.const_expr(settings.order in (Order.edf, Order.edf_list)):
            token = _token_of(homes, _run_row(pair, run, pairs, first_row, plan))
            # Of its own pair all earlier tickets stand before it.
            place = ticket - pairs.tickets[pair]
            if cutlass.const_expr(settings.order is Order.edf):
                place += _place_in_queue(pair, token, homes, pairs, first_row, plan)
                place = _serve_in_turn(place, pair, rank, lengths, plan)
            else:
                place += _place_in_list(pair, token, rank, homes, pairs, first_row, plan)
        if cutlass.const_expr(settings.order is Order.token):
            place = place_by_token(ticket, tokens[ticket], bins, members)
        if cutlass.const_expr(settings.order is Order.random):
            first_ticket = pairs.tickets[pair] + pieces_before(pair, run, pairs, plan)
            num_runs = pairs.runs[settings.num_experts]
            place = place_by_hash(
                ticket, pairs.runs[pair] + run, keys, sizes, first_ticket, num_runs
            )
        scratch[ticket] = place
        starts[place] = num_rows
    cute.arch.sync_threads()
    exclusive_scan(starts, num_tickets, thread, sums, PLAN_THREADS)
    lane, half_warp = thread % TICKET_ROWS, thread // TICKET_ROWS
    for ticket in cutlass.range(half_warp, num_tickets, _HALF_WARPS, unroll=1):
        pair, _, row, num_rows = ticket_of(ticket, pairs, plan)
        if lane < num_rows:
            first = _run_row(pair, Int32(0), pairs, first_row, plan) + row
            returns[starts[scratch[ticket]] + lane] = first + lane


@cute.jit
def _open_and_plan(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    memory: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    limit_ns: Int64,
):
    open_launch(table, rank, thread, PLAN_THREADS, plan.gate, False, False, limit_ns)
    cute.arch.sync_threads()
    if abort_word(table, rank) == 0:
        plan_returns(table, rank, thread, memory, plan)


def returns_entry(plan: PlanConstants):
    """Host function that opens a launch without an exchange and plans the way back."""

    def body(table, rank, thread, limit_ns):
        leave_stamp(table, rank, thread, Stamp.returns_entry)
        _open_and_plan(table, rank, thread, SmemAllocator(), plan, limit_ns)
        cute.arch.sync_threads()
        leave_stamp(table, rank, thread, Stamp.returns_exit)

    return rank_entry(PLAN_THREADS, body)
