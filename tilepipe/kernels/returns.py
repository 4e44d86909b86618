"""The way back planned on the device: which received row goes home when, as NumPy plans it.

Knows nothing of rows' contents beyond `row_home`, which dispatch has stored beside them, and of the
counts that the exchange before it has left. `schedule.plan.plan_returns` is the specification.

Segments are pairs of local expert and source rank, in the order of the rows. Inside a pair rows go
by token, so the first tokens of its runs rise: who goes before a run is found by one search a pair,
which the lanes of a warp share. Some CTAs a rank share the runs.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Layout, Order
from tilepipe.fabric.table import Slot, Stamp, Word
from tilepipe.kernels.entries import rank_entry
from tilepipe.kernels.memory import LANES, shared_table
from tilepipe.kernels.plan_constants import PlanConstants
from tilepipe.kernels.scan import exclusive_scan, exclusive_scans
from tilepipe.kernels.team import all_meet, arrive, lead, member_of
from tilepipe.kernels.tickets import (
    TICKET_BITS,
    Segments,
    ceil_div,
    cut_segment,
    pieces_before,
    rows_before,
    rows_before_by_hash,
    run_of,
    segment_table,
    ticket_of,
    turn_of,
)
from tilepipe.kernels.watchdog import leave_last_stamp, leave_stamp
from tilepipe.schedule.packed import SLOT_BITS
from tilepipe.schedule.settings import TICKET_ROWS

__all__ = ["plan_returns", "returns_entry"]

_NUM_SCANS = 3


@dataclass(frozen=True)
class _Pairs(Segments):
    """Segments of the way back, and where the rows of each local expert begin."""

    first_row: cute.Tensor  # (num_experts_per_rank + 1,) receive row
    homes: Any  # (rows,) way home of each


@cute.jit
def _lay_out(member: cutlass.Constexpr, pairs: cutlass.Constexpr, sums: cute.Tensor):
    """Prefix sums over local experts and over pairs, from the counts of the latest exchange."""
    plan, settings, thread = member.plan, member.plan.settings, member.thread
    local, num_ranks, tile_m = settings.num_experts_per_rank, settings.num_ranks, settings.tile_m
    counts, first_row = member.at(Slot.counts, Int32), pairs.first_row
    own_rows, before_rows, sent_rows = pairs.own, pairs.before, pairs.sent
    tickets, runs = pairs.tickets, pairs.runs
    for pair in cutlass.range(thread, settings.num_experts, plan.num_threads, unroll=1):
        expert, home = pair // num_ranks, pair % num_ranks
        own, before, rows = Int32(0), Int32(0), Int32(0)
        for source in cutlass.range_constexpr(num_ranks):
            sent = counts[source * settings.num_experts + member.rank * local + expert]
            if home > source:
                before += sent
            if home == source:
                own = sent
            rows += sent
        own_rows[pair], before_rows[pair], sent_rows[pair] = own, before, own
        tickets[pair], runs[pair] = cut_segment(own, before, tile_m)
        if cutlass.const_expr(settings.layout is Layout.padded):
            rows = ceil_div(rows, tile_m) * tile_m
        if home == 0:
            first_row[expert] = rows
    cute.arch.sync_threads()
    scanned = (sent_rows, tickets, runs)
    exclusive_scans(scanned, settings.num_experts, thread, sums, plan.num_threads)
    exclusive_scans((first_row,), local, thread, sums, plan.num_threads)


@cute.jit
def _row_of(pair: Int32, within: Int32, pairs: cutlass.Constexpr, plan: cutlass.Constexpr) -> Int32:
    """Receive row of a row of a pair."""
    return pairs.first_row[pair // plan.settings.num_ranks] + pairs.before[pair] + within


@cute.jit
def _token_of(
    pair: Int32, within: Int32, pairs: cutlass.Constexpr, plan: cutlass.Constexpr
) -> Int32:
    """Token of a row of a pair at its source."""
    return Int32(pairs.homes[_row_of(pair, within, pairs, plan)] >> SLOT_BITS)


@cute.jit
def _runs_before(
    pair: Int32,
    bound: Int32,
    pairs: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Int32:
    """Runs of a pair whose first token is below the bound."""
    low, high = Int32(0), pairs.runs[pair + 1] - pairs.runs[pair]
    while low < high:
        middle = (low + high) // 2
        row = rows_before(pair, middle, pairs, plan.settings.tile_m)
        if _token_of(pair, row, pairs, plan) < bound:
            low = middle + 1
        else:
            high = middle
    return low


def _warp_sums(first: Int32, second: Int32) -> tuple[Int32, Int32]:
    return cute.arch.warp_reduction_sum(first), cute.arch.warp_reduction_sum(second)


@cute.jit
def _before_in_queue(
    pair: Int32, run: Int32, token: Int32, member: cutlass.Constexpr, pairs: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Tickets and rows to the same home of runs that go before one: by first token, ties as they
    come. Called by a warp."""
    plan, settings = member.plan, member.plan.settings
    num_ranks, tile_m = settings.num_ranks, settings.tile_m
    tickets, rows = Int32(0), Int32(0)
    for expert in cutlass.range(
        member.thread % LANES, settings.num_experts_per_rank, LANES, unroll=1
    ):
        other = expert * num_ranks + pair % num_ranks
        runs = run
        if other != pair:
            bound = token
            if other < pair:
                bound += 1
            runs = _runs_before(other, bound, pairs, plan)
        tickets += pieces_before(other, runs, pairs, tile_m)
        rows += rows_before(other, runs, pairs, tile_m)
    return _warp_sums(tickets, rows)


@cute.jit
def _before_in_list(
    pair: Int32, run: Int32, token: Int32, member: cutlass.Constexpr, pairs: cutlass.Constexpr
) -> Int32:
    """Rows to all homes of runs that go before one: by first token, ties from rank + 1 on. Called
    by a warp."""
    plan, settings = member.plan, member.plan.settings
    num_ranks, rows = settings.num_ranks, Int32(0)
    turn = turn_of(pair % num_ranks, member.rank, num_ranks)
    for other in cutlass.range(member.thread % LANES, settings.num_experts, LANES, unroll=1):
        runs = run
        if other != pair:
            its_turn = turn_of(other % num_ranks, member.rank, num_ranks)
            bound = token
            if its_turn < turn or (its_turn == turn and other < pair):
                bound += 1
            runs = _runs_before(other, bound, pairs, plan)
        rows += rows_before(other, runs, pairs, settings.tile_m)
    return cute.arch.warp_reduction_sum(rows)


@cute.jit
def _write_runs(member: cutlass.Constexpr, pairs: cutlass.Constexpr):
    """Orders in which the tickets of a run stay together: run by run, a warp each."""
    plan, settings, lane = member.plan, member.plan.settings, member.thread % LANES
    returns = member.at(Slot.returns, Int32)
    epoch = member.at(Slot.words, Int32)[int(Word.epoch)]
    for number in cutlass.range(
        member.first // LANES, pairs.runs[settings.num_experts], member.step // LANES, unroll=1
    ):
        pair, run, row, num_rows = run_of(number, pairs, plan)
        start = pairs.sent[pair] + row
        if cutlass.const_expr(settings.order is Order.edf_list):
            token = _token_of(pair, row, pairs, plan)
            start = _before_in_list(pair, run, token, member, pairs)
        if cutlass.const_expr(settings.order is Order.random):
            start = rows_before_by_hash(number, epoch, lane, pairs, plan)
        first = _row_of(pair, row, pairs, plan)
        for i in cutlass.range(lane, num_rows, LANES, unroll=1):
            returns[start + i] = first + i


@cute.jit
def _write_ticket_rows(member: cutlass.Constexpr, first: Int32, num_rows: Int32, start: Int32):
    """Write the rows of tickets, one of each lane. Called by a warp."""
    lane, returns = member.thread % LANES, member.at(Slot.returns, Int32)
    within = lane % TICKET_ROWS
    for pair in cutlass.range_constexpr(LANES * TICKET_ROWS // LANES):
        source = pair * (LANES // TICKET_ROWS) + lane // TICKET_ROWS
        its_first = cute.arch.shuffle_sync(first, source)
        its_rows = cute.arch.shuffle_sync(num_rows, source)
        its_start = cute.arch.shuffle_sync(start, source)
        if within < its_rows:
            returns[its_start + within] = its_first + within


@cute.jit
def _queue_lengths(member: cutlass.Constexpr, pairs: cutlass.Constexpr, queues: cutlass.Constexpr):
    """Tickets and rows to each home; behind them all tickets to lower homes."""
    settings, lane = member.plan.settings, member.thread % LANES
    num_ranks, tickets, sent = settings.num_ranks, pairs.tickets, pairs.sent
    lengths, rows, begins = queues
    for home in cutlass.range(member.thread // LANES, num_ranks, member.plan.num_warps, unroll=1):
        length, held = Int32(0), Int32(0)
        for expert in cutlass.range(lane, settings.num_experts_per_rank, LANES, unroll=1):
            pair = expert * num_ranks + home
            length += tickets[pair + 1] - tickets[pair]
            held += sent[pair + 1] - sent[pair]
        length, held = _warp_sums(length, held)
        if lane == 0:
            lengths[home], rows[home] = length, held
    cute.arch.sync_threads()
    if member.thread < num_ranks:
        begin = Int32(0)
        for home in cutlass.range_constexpr(num_ranks):
            if member.thread > home:
                begin += lengths[home]
        begins[member.thread] = begin
    cute.arch.sync_threads()


@cute.jit
def _write_in_turn(member: cutlass.Constexpr, pairs: cutlass.Constexpr, queues: cutlass.Constexpr):
    """Queues by deadline, all served ticket by ticket, from rank + 1 on."""
    plan, settings, lane = member.plan, member.plan.settings, member.thread % LANES
    num_ranks, tile_m = settings.num_ranks, settings.tile_m
    lengths, all_rows, begins = queues
    queue_rows = member.part(plan.returns_parts, "queue_rows")
    run_places = member.part(plan.returns_parts, "run_places")
    for number in cutlass.range(
        member.first // LANES, pairs.runs[settings.num_experts], member.step // LANES, unroll=1
    ):
        pair, run, row, num_rows = run_of(number, pairs, plan)
        token = _token_of(pair, row, pairs, plan)
        place, rows = _before_in_queue(pair, run, token, member, pairs)
        if lane == 0:
            run_places[number] = place
        first = begins[pair % num_ranks] + place
        for i in cutlass.range(lane, ceil_div(num_rows, TICKET_ROWS), LANES, unroll=1):
            queue_rows[first + i] = rows + i * TICKET_ROWS
    arrive(member, 2)
    if all_meet(member, 2):
        num_tickets = pairs.tickets[settings.num_experts]
        for base in cutlass.range(member.first - lane, num_tickets, member.step, unroll=1):
            first, num_rows, start = Int32(0), Int32(0), Int32(0)
            ticket = base + lane
            if ticket < num_tickets:
                pair, run, row, num_rows = ticket_of(ticket, pairs, plan)
                first = _row_of(pair, row, pairs, plan)
                in_queue = run_places[pairs.runs[pair] + run] - pairs.tickets[pair]
                in_queue += ticket - pieces_before(pair, run, pairs, tile_m)
                turn = turn_of(pair % num_ranks, member.rank, num_ranks)
                for home in cutlass.range_constexpr(num_ranks):
                    served = in_queue
                    if turn_of(home, member.rank, num_ranks) < turn:
                        served += 1
                    rows = all_rows[home]
                    if served < lengths[home]:
                        rows = queue_rows[begins[home] + served]
                    start += rows
            _write_ticket_rows(member, first, num_rows, start)


@cute.jit
def _bin_tickets(member: cutlass.Constexpr, pairs: cutlass.Constexpr, sums: cute.Tensor) -> Boolean:
    """Tickets by the bin of their first token, with the rows of each bin; four rounds."""
    plan, parts = member.plan, member.plan.returns_parts
    tokens, turns = member.part(parts, "tokens"), member.part(parts, "turns")
    members = member.part(parts, "members")
    bins, bin_rows = member.part(parts, "bins"), member.part(parts, "bin_rows")
    num_tickets = pairs.tickets[plan.settings.num_experts]
    for token in cutlass.range(member.first, plan.max_tokens + 1, member.step, unroll=1):
        bins[token] = Int32(0)
        bin_rows[token] = Int32(0)
    arrive(member, 2)
    alive = all_meet(member, 2)
    if alive:
        for ticket in cutlass.range(member.first, num_tickets, member.step, unroll=1):
            pair, _, row, num_rows = ticket_of(ticket, pairs, plan)
            token = _token_of(pair, row, pairs, plan)
            tokens[ticket] = token
            # Its turn in its bin, which says nothing of the order: tickets are compared.
            turns[ticket] = cute.arch.atomic_add(bins.iterator + token, Int32(1))
            cute.arch.atomic_add(bin_rows.iterator + token, num_rows)
        arrive(member, 3)
        alive = all_meet(member, 3)
    if alive:
        if member.number == 0:
            for which in cutlass.range_constexpr(2):
                exclusive_scan(
                    (bins, bin_rows)[which],
                    Int32(plan.max_tokens + 1),
                    member.thread,
                    sums,
                    plan.num_threads,
                )
        arrive(member, 4)
        alive = all_meet(member, 4)
    if alive:
        for ticket in cutlass.range(member.first, num_tickets, member.step, unroll=1):
            _, _, _, num_rows = ticket_of(ticket, pairs, plan)
            place = bins[tokens[ticket]] + turns[ticket]
            members[place] = ticket << TICKET_BITS | num_rows
        arrive(member, 5)
        alive = all_meet(member, 5)
    return alive


@cute.jit
def _write_by_token(member: cutlass.Constexpr, pairs: cutlass.Constexpr):
    """Tickets by their first token, ties as they come."""
    plan, parts, lane = member.plan, member.plan.returns_parts, member.thread % LANES
    tokens, members = member.part(parts, "tokens"), member.part(parts, "members")
    bins, bin_rows = member.part(parts, "bins"), member.part(parts, "bin_rows")
    num_tickets = pairs.tickets[plan.settings.num_experts]
    for base in cutlass.range(member.first - lane, num_tickets, member.step, unroll=1):
        first, num_rows, start = Int32(0), Int32(0), Int32(0)
        ticket = base + lane
        if ticket < num_tickets:
            pair, _, row, num_rows = ticket_of(ticket, pairs, plan)
            first = _row_of(pair, row, pairs, plan)
            token = tokens[ticket]
            start = bin_rows[token]
            for i in cutlass.range(bins[token], bins[token + 1], unroll=1):
                if members[i] >> TICKET_BITS < ticket:
                    start += members[i] % (1 << TICKET_BITS)
        _write_ticket_rows(member, first, num_rows, start)


@cute.jit
def plan_returns(member: cutlass.Constexpr, memory: cutlass.Constexpr):
    """Open a launch and order the way back of all rows that the latest dispatch has brought.

    Called by all threads of all members of a rank.
    """
    settings = member.plan.settings
    columns = segment_table(memory, settings.num_experts, 5)
    (first_row,) = segment_table(memory, settings.num_experts_per_rank, 1)
    pairs = _Pairs(*columns, first_row, member.at(Slot.row_home, Int64))
    (sums,) = segment_table(memory, _NUM_SCANS * LANES, 1)
    queues = segment_table(memory, settings.num_ranks, 3)
    if member.number > 0:
        arrive(member, 1)
    if lead(member, None, False):
        member.stamp(Stamp.returns_opened)
        _lay_out(member, pairs, sums)
        member.stamp(Stamp.returns_laid_out)
        if cutlass.const_expr(settings.order is Order.edf):
            _queue_lengths(member, pairs, queues)
            _write_in_turn(member, pairs, queues)
        elif cutlass.const_expr(settings.order is Order.token):
            if _bin_tickets(member, pairs, sums):
                _write_by_token(member, pairs)
        else:
            _write_runs(member, pairs)


def returns_entry(plan: PlanConstants):
    """Host function that opens a launch without an exchange and plans the way back."""

    def body(table, rank, number, thread, limit_ns):
        leave_stamp(table, rank, number * plan.num_threads + thread, Stamp.returns_entry)
        memory = SmemAllocator()
        near = shared_table(table, rank, memory, plan.settings.num_ranks, thread, plan.num_threads)
        member = member_of(near, rank, number, thread, memory, plan, limit_ns)
        plan_returns(member, memory)
        cute.arch.sync_threads()
        leave_last_stamp(near, rank, thread, Stamp.returns_exit)

    return rank_entry(plan.num_threads, body, num_ctas=plan.num_ctas)
