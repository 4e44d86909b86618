"""Where each ticket of dispatch begins in the sending order: rows of all tickets before it.

Knows nothing of tokens but where the order goes by them, and writes no row. Queues and lists by
deadline need no sort: tickets to one destination come in the order of their deadlines.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from tilepipe.config.choices import Order
from tilepipe.kernels.memory import LANES
from tilepipe.kernels.scan import exclusive_scan, last_at_most
from tilepipe.kernels.team import all_meet, arrive
from tilepipe.kernels.tickets import (
    TICKET_BITS,
    Segments,
    ceil_div,
    piece_row,
    pieces_before,
    rows_before_by_hash,
    run_of,
    ticket_of,
    turn_of,
)
from tilepipe.schedule.settings import TICKET_ROWS

__all__ = ["Experts", "start_by_token", "start_tickets"]


@dataclass(frozen=True)
class Experts(Segments):
    """Segments of dispatch, one an expert, and where their rows land."""

    total: cute.Tensor  # rows of all ranks
    rows: cute.Tensor  # receive rows of all lower experts
    tiles: cute.Tensor  # M tiles of all lower experts
    landing: cute.Tensor  # receive row of this rank's first one, at its rank
    earlier: cute.Tensor  # rows that lower members send


@cute.jit
def start_tickets(
    member: cutlass.Constexpr, experts: cutlass.Constexpr, starts: cute.Tensor, epoch: Int32
):
    """Write the beginning of this member's share of tickets; orders by expert need none, and those
    by token have `start_by_token`."""
    plan, lane = member.plan, member.thread % LANES
    order, num_experts = plan.settings.order, plan.settings.num_experts
    if cutlass.const_expr(order in (Order.edf, Order.edf_list)):
        for ticket in cutlass.range(
            member.first, experts.tickets[num_experts], member.step, unroll=1
        ):
            if cutlass.const_expr(order is Order.edf):
                starts[ticket] = _start_in_turn(ticket, member, experts)
            else:
                starts[ticket] = _start_in_list(ticket, member, experts)
    if cutlass.const_expr(order is Order.random):
        for run in cutlass.range(
            member.first // LANES, experts.runs[num_experts], member.step // LANES, unroll=1
        ):
            start = rows_before_by_hash(run, epoch, lane, experts, plan)
            expert, within, _, num_rows = run_of(run, experts, plan)
            first = experts.tickets[expert]
            first += pieces_before(expert, within, experts, plan.settings.tile_m)
            for i in cutlass.range(lane, ceil_div(num_rows, TICKET_ROWS), LANES, unroll=1):
                starts[first + i] = start + i * TICKET_ROWS


@cute.jit
def _start_in_turn(ticket: Int32, member: cutlass.Constexpr, experts: cutlass.Constexpr) -> Int32:
    """All queues served ticket by ticket, from rank + 1 on: what of each is served before."""
    settings, tickets, sent = member.plan.settings, experts.tickets, experts.sent
    local, num_ranks = settings.num_experts_per_rank, settings.num_ranks
    peer = last_at_most(tickets, 0, settings.num_experts, ticket) // local
    in_queue = ticket - tickets[peer * local]
    turn, start = turn_of(peer, member.rank, num_ranks), Int32(0)
    for other in cutlass.range_constexpr(num_ranks):
        first = other * local
        served = in_queue
        if turn_of(other, member.rank, num_ranks) < turn:
            served += 1
        # The first ticket of the queue that is not served before, or its end.
        open_ticket = cutlass.min(tickets[first] + served, tickets[first + local])
        expert = last_at_most(tickets, first, local, open_ticket)
        _, row, _ = piece_row(expert, open_ticket - tickets[expert], experts, settings.tile_m)
        start += sent[expert] + row - sent[first]
    return start


@cute.jit
def _start_in_list(ticket: Int32, member: cutlass.Constexpr, experts: cutlass.Constexpr) -> Int32:
    """One list by deadline, ties from rank + 1 on: rows of each queue with earlier ones."""
    settings, sent = member.plan.settings, experts.sent
    local, num_ranks, tiles = settings.num_experts_per_rank, settings.num_ranks, experts.tiles
    expert, _, row, _ = ticket_of(ticket, experts, member.plan)
    peer = expert // local
    turn = turn_of(peer, member.rank, num_ranks)
    within = (experts.before[expert] + row) // settings.tile_m
    deadline = _deadline(tiles[expert] - tiles[peer * local], within, settings)
    start = sent[expert] + row - sent[peer * local]
    for other in cutlass.range_constexpr(num_ranks):
        bound = deadline
        if turn_of(other, member.rank, num_ranks) < turn:
            bound += 1
        if peer != other and bound > 0:
            start += _rows_due(Int32(other * local), bound, experts, settings)
    return start


def _lead(settings) -> int:
    """Output tiles of an M tile that are handed out before the next one of its raster group."""
    return sum(settings.chunk_of_n_tile(n) == 0 for n in range(settings.num_n_tiles))


def _deadline(first_tile: Int32, within: Int32, settings) -> Int32:
    """Hand-out position of the first output tile of an expert's M tile."""
    in_group = within % settings.raster_m
    return (first_tile + within - in_group) * settings.num_n_tiles + in_group * _lead(settings)


@cute.jit
def _rows_due(
    first: Int32, bound: Int32, experts: cutlass.Constexpr, settings: cutlass.Constexpr
) -> Int32:
    """Rows of a queue whose deadline is below `bound` > 0: by tiles, whose deadlines rise."""
    tiles, group = experts.tiles, settings.raster_m * settings.num_n_tiles
    last_tile = ceil_div(bound, settings.num_n_tiles) - 1
    expert = last_at_most(tiles, first, settings.num_experts_per_rank, tiles[first] + last_tile)
    left = bound - (tiles[expert] - tiles[first]) * settings.num_n_tiles
    groups = (left - 1) // group
    tiles_due = groups * settings.raster_m + cutlass.min(
        settings.raster_m, ceil_div(left - groups * group, _lead(settings))
    )
    rows = tiles_due * settings.tile_m - experts.before[expert]
    rows = cutlass.max(0, cutlass.min(rows, experts.own[expert]))
    return experts.sent[expert] + rows - experts.sent[first]


@cute.jit
def start_by_token(
    member: cutlass.Constexpr,
    firsts: cute.Tensor,  # (slots,) ticket << TICKET_BITS | rows where one begins, else 0
    tokens: cutlass.Constexpr,  # first of this member and the one behind its last
    starts: cute.Tensor,
    sums: cute.Tensor,
    number: cutlass.Constexpr,  # of the round in which members tell their totals
) -> Boolean:
    """Tickets by their first token, ties as they come; False where the team has stopped."""
    plan, thread = member.plan, member.thread
    num_topk, threads = plan.settings.num_topk, plan.num_threads
    totals = member.part(plan.plan_parts, "totals")
    own_rows = member.part(plan.plan_parts, "token_rows")
    own_rows = cute.make_tensor(own_rows.iterator + tokens[0], own_rows.layout)
    count = tokens[1] - tokens[0]
    cute.arch.sync_threads()  # all firsts are there
    for i in cutlass.range(thread, count, threads, unroll=1):
        rows = Int32(0)
        for slot in cutlass.range_constexpr(num_topk):
            rows += firsts[(tokens[0] + i) * num_topk + slot] % (1 << TICKET_BITS)
        own_rows[i] = rows
    cute.arch.sync_threads()
    total = exclusive_scan(own_rows, cutlass.max(count, 0), thread, sums, threads)
    if thread == 0:
        totals[member.number] = total
    arrive(member, number)
    alive = all_meet(member, number)
    if alive:
        lower = Int32(0)
        for other in cutlass.range_constexpr(plan.num_ctas):
            if member.number > other:
                lower += totals[other]
        for i in cutlass.range(thread, count * num_topk, threads, unroll=1):
            token = tokens[0] + i // num_topk
            first = firsts[tokens[0] * num_topk + i]
            if first != 0:
                start = lower + own_rows[i // num_topk]
                for slot in cutlass.range_constexpr(num_topk):
                    other_first = firsts[token * num_topk + slot]
                    if other_first < first:
                        start += other_first % (1 << TICKET_BITS)
                starts[first >> TICKET_BITS] = start
    return alive
