"""The Plan made on the device, for every rank of a launch: what NumPy's makes, bit for bit.

Knows nothing of rows' contents and of who executes the Plan. `schedule/plan.py` is the readable
specification; this is what a layer would run, and its exchange of counts is the launch gate.

Some CTAs a rank, each with a stretch of tokens; a warp owns a part of the stretch's (token, slot)
list. Two walks over the list, several groups of it under way at once. The first counts experts and
keeps, for every slot, how many of its warp came before it. Counts are added up over the CTAs and
exchanged; from everybody's follow, by prefix sums over experts, where every row lands, in which
ticket it travels and where that ticket begins in the sending order. The second walk writes each
row's words at its place.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Granularity, Layout, Order
from tilepipe.fabric.table import Slot, Stamp, Word
from tilepipe.kernels.counting import AHEAD, count_own, gather_counts, groups_of, tokens_of
from tilepipe.kernels.entries import rank_entry
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    element,
    shared_table,
    store_words,
)
from tilepipe.kernels.orders import Experts, start_by_token, start_tickets
from tilepipe.kernels.plan_constants import PlanConstants
from tilepipe.kernels.scan import exclusive_scans
from tilepipe.kernels.semaphore import Scope, set_relaxed
from tilepipe.kernels.team import all_meet, arrive, lead, member_of
from tilepipe.kernels.thresholds import write_home_waits, write_waits
from tilepipe.kernels.tickets import TICKET_BITS, ceil_div, cut_segment, piece_row, segment_table
from tilepipe.kernels.watchdog import leave_last_stamp, leave_stamp
from tilepipe.schedule.packed import SLOT_BITS
from tilepipe.schedule.settings import TICKET_ROWS

__all__ = ["make_plan", "plan_entry"]

_NUM_SCANS = 5


@cute.jit
def _lay_out(
    member: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    own_counts: cute.Tensor,
    sums: cute.Tensor,
):
    """Prefix sums over experts, from everybody's counts."""
    plan, settings, thread = member.plan, member.plan.settings, member.thread
    num_experts, local, tile_m = (
        settings.num_experts,
        settings.num_experts_per_rank,
        settings.tile_m,
    )
    counts = member.at(Slot.counts, Int32)
    rows, tiles, tickets, runs = experts.rows, experts.tiles, experts.tickets, experts.runs
    own_rows, before, total, sent = experts.own, experts.before, experts.total, experts.sent
    earlier_rows, landing = experts.earlier, experts.landing
    for expert in cutlass.range(thread, num_experts, plan.num_threads, unroll=1):
        own, earlier, lower, all_rows = Int32(0), Int32(0), Int32(0), Int32(0)
        for other in cutlass.range_constexpr(plan.num_ctas):
            found = own_counts[other * (num_experts + 1) + expert]
            if member.number > other:
                earlier += found
            own += found
        for source in cutlass.range_constexpr(settings.num_ranks):
            found = counts[source * num_experts + expert]
            if member.rank > source:
                lower += found
            all_rows += found
        own_rows[expert], sent[expert], earlier_rows[expert] = own, own, earlier
        before[expert], total[expert] = lower, all_rows
        num_tiles = ceil_div(all_rows, tile_m)
        tiles[expert] = num_tiles
        if cutlass.const_expr(settings.layout is Layout.padded):
            rows[expert] = num_tiles * tile_m
        else:
            rows[expert] = all_rows
        tickets[expert], runs[expert] = cut_segment(own, lower, tile_m)
    cute.arch.sync_threads()
    scanned = (rows, tiles, tickets, runs, sent)
    exclusive_scans(scanned, num_experts, thread, sums, plan.num_threads)
    for expert in cutlass.range(thread, num_experts, plan.num_threads, unroll=1):
        first = expert // local * local
        landing[expert] = rows[expert] - rows[first] + before[expert]
    cute.arch.sync_threads()


@cute.jit
def _fits(member: cutlass.Constexpr, experts: cutlass.Constexpr) -> Boolean:
    """Whether every rank has room for what it receives; all members of all ranks agree."""
    settings, capacity, rows = member.plan.settings, member.plan.capacity, experts.rows
    local = settings.num_experts_per_rank
    worst, most = Int32(0), Int32(-1)
    for peer in cutlass.range_constexpr(settings.num_ranks):
        extent = rows[(peer + 1) * local] - rows[peer * local]
        if extent > most:
            worst, most = Int32(peer), extent
    if member.first == 0:
        words = member.at(Slot.words, Int32)
        words[int(Word.overflow_rank)] = worst
        words[int(Word.overflow_rows)] = most if most > capacity else Int32(0)
        if most > capacity:
            # Every rank stops by itself: all have found the same.
            abort = element(address(member.table, member.rank, Slot.abort), Int32(0), Int32)
            set_relaxed(abort, Int32(1), Scope.sys)
    return most <= capacity


@cute.jit
def _slot_of_ticket(
    within: Int32, expert: Int32, experts: cutlass.Constexpr, tile_m: cutlass.Constexpr
) -> tuple[Int32, Int32]:
    """Ticket of a row of this rank, and the row's place in it."""
    before, per_tile = experts.before[expert], -(-tile_m // TICKET_ROWS)
    row, piece = within, Int32(0)
    past = (before + within) // tile_m - before // tile_m  # tiles behind the first one
    if past > 0:
        row = (before + within) % tile_m
        piece = ceil_div(tile_m - before % tile_m, TICKET_ROWS) + (past - 1) * per_tile
    return experts.tickets[expert] + piece + row // TICKET_ROWS, row % TICKET_ROWS


@cute.jit
def _walk_batch(
    member: cutlass.Constexpr,
    place: Int32,  # of this lane's first slot
    end: Int32,
    experts: cutlass.Constexpr,
    tensors: cutlass.Constexpr,  # ids, histogram, ranks, starts or firsts
    writing: cutlass.Constexpr,  # else only where tickets begin is kept
):
    """Every row of some groups of slots finds its ticket, and its place in the sending order."""
    settings, ids, histogram, ranks, told = member.plan.settings, *tensors
    num_experts, warp = settings.num_experts, member.thread // LANES
    found, within, positions = [], [], []
    for ahead in cutlass.range_constexpr(AHEAD):
        expert, rank_in_warp = Int32(-1), Int32(0)
        if place + ahead * LANES < end:
            expert = ids[place + ahead * LANES]
            rank_in_warp = ranks[place + ahead * LANES]
        if expert >= num_experts:
            expert = Int32(-1)
        found.append(expert)
        within.append(rank_in_warp)
    for ahead in cutlass.range_constexpr(AHEAD):
        # No branch but around the loads of all groups, which so are under way at once.
        expert = cutlass.max(found[ahead], 0)
        within[ahead] += histogram[warp * num_experts + expert] + experts.earlier[expert]
        if cutlass.const_expr(writing):
            is_row = found[ahead] >= 0
            positions.append(_position_of(is_row, expert, within[ahead], experts, told, settings))
    for ahead in cutlass.range_constexpr(AHEAD):
        expert, slot = found[ahead], place + ahead * LANES
        if cutlass.const_expr(writing):
            if expert >= 0:
                _write_row(member, slot, expert, within[ahead], positions[ahead], experts)
        elif slot < end:
            _tell_first(member, slot, expert, within[ahead], experts, told)


@cute.jit
def _position_of(
    is_row: Boolean,  # else nothing may be read for it
    expert: Int32,
    within: Int32,  # row of this rank's to the expert
    experts: cutlass.Constexpr,
    starts: cute.Tensor,
    settings: cutlass.Constexpr,
) -> Int32:
    """Place of a row in the sending order."""
    if cutlass.const_expr(settings.order is Order.expert):
        return experts.sent[expert] + within
    ticket, offset = _slot_of_ticket(within, expert, experts, settings.tile_m)
    start = Int32(0)
    if is_row:
        start = starts[ticket]
    return start + offset


@cute.jit
def _write_row(
    member: cutlass.Constexpr,
    slot: Int32,
    expert: Int32,
    within: Int32,
    position: Int32,
    experts: cutlass.Constexpr,
):
    settings, num_topk = member.plan.settings, member.plan.settings.num_topk
    local, tile_m = settings.num_experts_per_rank, settings.tile_m
    row = experts.landing[expert] + within
    if cutlass.const_expr(settings.granularity is Granularity.expert):
        counter = expert % local
    elif cutlass.const_expr(settings.layout is Layout.padded):
        counter = row // tile_m
    else:
        counter = experts.tiles[expert] - experts.tiles[expert // local * local]
        counter += (experts.before[expert] + within) // tile_m
    store_words(
        address(member.table, member.rank, Slot.sends) + Int64(position) * VECTOR_BYTES,
        [slot // num_topk, expert // local << SLOT_BITS | slot % num_topk, row, counter],
    )


@cute.jit
def _tell_first(
    member: cutlass.Constexpr,
    slot: Int32,
    expert: Int32,  # -1: none
    within: Int32,
    experts: cutlass.Constexpr,
    firsts: cute.Tensor,
):
    tile_m, told = member.plan.settings.tile_m, Int32(0)
    if expert >= 0:
        ticket, offset = _slot_of_ticket(within, expert, experts, tile_m)
        if offset == 0:
            _, row, end = piece_row(expert, ticket - experts.tickets[expert], experts, tile_m)
            told = ticket << TICKET_BITS | (end - row)
    firsts[slot] = told


@cute.jit
def _walk(
    member: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    histogram: cute.Tensor,
    told: cute.Tensor,
    writing: cutlass.Constexpr,
):
    ranks = member.part(member.plan.plan_parts, "ranks")
    ids = member.at(Slot.topk_idx, Int32)
    place, end, num_batches = groups_of(member, tokens)
    for batch in cutlass.range(num_batches, unroll=1):
        _walk_batch(
            member,
            place + batch * (AHEAD * LANES),
            end,
            experts,
            (ids, histogram, ranks, told),
            writing,
        )


@cute.jit
def _write_plan(
    member: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    experts: cutlass.Constexpr,
    histogram: cute.Tensor,
    sums: cute.Tensor,
):
    """Behind the gate, where all fits: order all tickets, then write rows and thresholds."""
    plan, order, number = member.plan, member.plan.settings.order, 2
    starts = member.part(plan.plan_parts, "starts")
    alive = Boolean(True)
    if cutlass.const_expr(order is Order.token):
        firsts = member.part(plan.plan_parts, "firsts")
        _walk(member, tokens, experts, histogram, firsts, False)
        alive = start_by_token(member, firsts, tokens, starts, sums, number)
        number += 1
    elif cutlass.const_expr(order is not Order.expert):
        epoch = member.at(Slot.words, Int32)[int(Word.epoch)]
        start_tickets(member, experts, starts, epoch)
    if alive:
        if cutlass.const_expr(order is not Order.expert):
            arrive(member, number)
        write_waits(member, experts)
        if cutlass.const_expr(order is not Order.expert):
            alive = all_meet(member, number)
        if alive:
            member.stamp(Stamp.plan_ordered)
            _walk(member, tokens, experts, histogram, starts, True)


@cute.jit
def make_plan(member: cutlass.Constexpr, memory: cutlass.Constexpr):
    """Open a launch and plan it. Called by all threads of all members of a rank."""
    plan, settings = member.plan, member.plan.settings
    size = plan.num_warps * settings.num_experts
    histogram = cute.make_tensor(
        memory.allocate_array(Int32, size, byte_alignment=16), cute.make_layout(size)
    )
    sums, bad = (
        cute.make_tensor(
            memory.allocate_array(Int32, length, byte_alignment=16), cute.make_layout(length)
        )
        for length in (_NUM_SCANS * LANES, 4)
    )
    experts = Experts(*segment_table(memory, settings.num_experts, 10))
    counts = member.part(plan.plan_parts, "counts")
    tokens = tokens_of(member)
    count_own(member, tokens, histogram, bad, counts, member.part(plan.plan_parts, "ranks"))
    member.stamp(Stamp.plan_counted)
    if member.number > 0:
        arrive(member, 1)
    write_home_waits(member)
    if lead(member, lambda: gather_counts(member, counts), True):
        member.stamp(Stamp.plan_opened)
        _lay_out(member, experts, counts, sums)
        member.stamp(Stamp.plan_laid_out)
        if _fits(member, experts):
            _write_plan(member, tokens, experts, histogram, sums)


def plan_entry(plan: PlanConstants):
    """Host function that opens and plans a launch on all ranks of this process."""

    def body(table, rank, number, thread, limit_ns):
        leave_stamp(table, rank, number * plan.num_threads + thread, Stamp.plan_entry)
        memory = SmemAllocator()
        near = shared_table(table, rank, memory, plan.settings.num_ranks, thread, plan.num_threads)
        member = member_of(near, rank, number, thread, memory, plan, limit_ns)
        make_plan(member, memory)
        cute.arch.sync_threads()
        leave_last_stamp(near, rank, thread, Stamp.plan_exit)

    return rank_entry(plan.num_threads, body, num_ctas=plan.num_ctas)
