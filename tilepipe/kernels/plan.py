"""The Plan made on the device, for every rank of a launch: what NumPy's makes, bit for bit.

Knows nothing of rows' contents and of who executes the Plan. `schedule/plan.py` is the readable
specification; this is what a layer would run, and its exchange of counts is the launch gate.

One CTA a rank. A warp owns a stretch of the (token, slot) list and counts experts in it; counts are
exchanged, and from everybody's follow, by prefix sums over experts, where every row lands, in which
ticket it travels and where that ticket stands in the order. A second walk over the list writes each
row's words at its place. No sort is needed: tickets of one destination are in the order of their
deadlines as they come, and the other orders count who goes before.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Granularity, Layout, Order
from tilepipe.fabric.table import Slot, Stamp, Word
from tilepipe.kernels.entries import rank_entry
from tilepipe.kernels.memory import (
    LANES,
    VECTOR_BYTES,
    address,
    buffer,
    element,
    store_words,
)
from tilepipe.kernels.protocol import open_launch
from tilepipe.kernels.scan import exclusive_scan, last_at_most, sum_of
from tilepipe.kernels.semaphore import Scope, set_relaxed
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

__all__ = ["make_plan", "plan_entry"]

_WARPS = PLAN_THREADS // LANES


@dataclass(frozen=True)
class _Experts(Segments):
    """Segments of dispatch, one an expert, and where their rows land."""

    total: cute.Tensor  # rows of all ranks
    rows: cute.Tensor  # receive rows of all lower experts
    tiles: cute.Tensor  # M tiles of all lower experts


@cute.jit
def _count_own(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    histogram: cute.Tensor,  # (_WARPS, num_experts): afterwards rows of lower warps
    own: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """Count the rows of this rank, warp by warp and in all; keep them where the gate sends them."""
    num_experts, num_topk = plan.settings.num_experts, plan.settings.num_topk
    lane, warp = thread % LANES, thread // LANES
    words = buffer(address(table, rank, Slot.words), Int32)
    ids = buffer(address(table, rank, Slot.topk_idx), Int32)
    num_slots = words[int(Word.num_tokens)] * num_topk
    for i in cutlass.range(thread, _WARPS * num_experts, PLAN_THREADS, unroll=1):
        histogram[i] = Int32(0)
    if thread == 0:
        words[int(Word.bad_expert)] = Int32(0)
    cute.arch.sync_threads()
    per_warp = ceil_div(ceil_div(num_slots, LANES), _WARPS)  # groups of a warp's width
    for group in cutlass.range(warp * per_warp, (warp + 1) * per_warp, unroll=1):
        place = group * LANES + lane
        expert = Int32(-1)
        if place < num_slots:
            expert = ids[place]
            if expert < -1 or expert >= num_experts:
                words[int(Word.bad_expert)] = place + 1
                expert = Int32(-1)
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        if expert >= 0 and (same & _lanes_below(lane)) == 0:
            cell = warp * num_experts + expert
            histogram[cell] = histogram[cell] + Int32(cute.arch.popc(same))
    cute.arch.sync_threads()
    rows_to = buffer(address(table, rank, Slot.rows_to), Int32)
    for expert in cutlass.range(thread, num_experts, PLAN_THREADS, unroll=1):
        rows = Int32(0)
        for w in cutlass.range(_WARPS, unroll=1):
            here = histogram[w * num_experts + expert]
            histogram[w * num_experts + expert] = rows
            rows += here
        own[expert] = rows
        rows_to[expert] = rows
    cute.arch.sync_threads()


def _lanes_below(lane: Int32) -> Uint32:
    return (Uint32(1) << Uint32(lane)) - Uint32(1)


@cute.jit
def _lay_out(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    experts: cutlass.Constexpr,
    sums: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """Prefix sums over experts, from everybody's counts."""
    settings = plan.settings
    num_experts, tile_m = settings.num_experts, settings.tile_m
    counts = buffer(address(table, rank, Slot.counts), Int32)
    own, before, total = experts.own, experts.before, experts.total
    rows, tiles, tickets, runs = experts.rows, experts.tiles, experts.tickets, experts.runs
    for expert in cutlass.range(thread, num_experts, PLAN_THREADS, unroll=1):
        lower, all_rows = Int32(0), Int32(0)
        for source in cutlass.range_constexpr(settings.num_ranks):
            sent = counts[source * num_experts + expert]
            if source < rank:
                lower += sent
            all_rows += sent
        before[expert], total[expert] = lower, all_rows
        num_tiles = ceil_div(all_rows, tile_m)
        tiles[expert] = num_tiles
        if cutlass.const_expr(settings.layout is Layout.padded):
            rows[expert] = num_tiles * tile_m
        else:
            rows[expert] = all_rows
        tickets[expert], runs[expert] = cut_segment(own[expert], lower, tile_m)
    cute.arch.sync_threads()
    for which in cutlass.range_constexpr(4):
        values = (rows, tiles, tickets, runs)[which]
        all_together = exclusive_scan(values, Int32(num_experts), thread, sums, PLAN_THREADS)
        if thread == 0:
            values[num_experts] = all_together
    cute.arch.sync_threads()


@cute.jit
def _fits(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    experts: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Boolean:
    """Whether every rank has room for what it receives; every rank finds the same answer."""
    settings = plan.settings
    local, rows = settings.num_experts_per_rank, experts.rows
    worst, most = Int32(0), Int32(-1)
    for peer in cutlass.range_constexpr(settings.num_ranks):
        extent = rows[(peer + 1) * local] - rows[peer * local]
        if extent > most:
            worst, most = Int32(peer), extent
    if thread == 0:
        words = buffer(address(table, rank, Slot.words), Int32)
        words[int(Word.overflow_rank)] = worst
        words[int(Word.overflow_rows)] = most if most > plan.capacity else Int32(0)
    return most <= plan.capacity


@cute.jit
def _deadline(
    expert: Int32, row: Int32, experts: cutlass.Constexpr, plan: cutlass.Constexpr
) -> Int32:
    """Hand-out position of the first output tile that reads the row."""
    settings = plan.settings
    local, tiles, before = settings.num_experts_per_rank, experts.tiles, experts.before
    lead = sum(settings.chunk_of_n_tile(n) == 0 for n in range(settings.num_n_tiles))
    within = (before[expert] + row) // settings.tile_m
    tile = tiles[expert] - tiles[expert // local * local] + within
    group = tile - within % settings.raster_m
    return group * settings.num_n_tiles + (tile - group) * lead


@cute.jit
def _place_edf(
    ticket: Int32,
    expert: Int32,
    rank: Int32,
    experts: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Int32:
    """All queues served ticket by ticket, from rank + 1 on: who is served before this one."""
    settings = plan.settings
    local, num_ranks, tickets = settings.num_experts_per_rank, settings.num_ranks, experts.tickets
    peer = expert // local
    in_queue = ticket - tickets[peer * local]
    turn = turn_of(peer, rank, num_ranks)
    place = Int32(0)
    for other in cutlass.range_constexpr(num_ranks):
        length = tickets[(other + 1) * local] - tickets[other * local]
        served = in_queue
        if turn_of(other, rank, num_ranks) < turn:
            served += 1
        place += cutlass.min(length, served)
    return place


@cute.jit
def _place_edf_list(
    ticket: Int32,
    expert: Int32,
    row: Int32,
    rank: Int32,
    experts: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Int32:
    """One list by deadline, ties from rank + 1 on: who stands before this one in each queue."""
    settings = plan.settings
    local, num_ranks, tickets = settings.num_experts_per_rank, settings.num_ranks, experts.tickets
    peer = expert // local
    turn = turn_of(peer, rank, num_ranks)
    deadline = _deadline(expert, row, experts, plan)
    place = ticket - tickets[peer * local]
    for other in cutlass.range_constexpr(num_ranks):
        if peer != other:
            first = tickets[other * local]
            low, high = first, tickets[(other + 1) * local]
            earlier_turn = turn_of(other, rank, num_ranks) < turn
            while low < high:
                middle = (low + high) // 2
                there, _, its_row, _ = ticket_of(middle, experts, plan)
                its_deadline = _deadline(there, its_row, experts, plan)
                if its_deadline < deadline or (its_deadline == deadline and earlier_turn):
                    low = middle + 1
                else:
                    high = middle
            place += low - first
    return place


@cute.jit
def _each_row(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    histogram: cute.Tensor,  # (_WARPS, num_experts) rows of lower warps; grows by this warp's
    experts: cutlass.Constexpr,
    scratch: cute.Tensor,
    writing: cutlass.Constexpr,  # else only each ticket's first token is kept
    plan: cutlass.Constexpr,
):
    """Walk over the list again: every row finds its ticket, and its place in the sending order."""
    settings = plan.settings
    num_experts, num_topk, tile_m = settings.num_experts, settings.num_topk, settings.tile_m
    local, per_tile = settings.num_experts_per_rank, -(-settings.tile_m // TICKET_ROWS)
    lane, warp = thread % LANES, thread // LANES
    own, before, tickets = experts.own, experts.before, experts.tickets
    rows, tiles = experts.rows, experts.tiles
    ids = buffer(address(table, rank, Slot.topk_idx), Int32)
    sends = address(table, rank, Slot.sends)
    num_slots = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tokens)] * num_topk
    per_warp = ceil_div(ceil_div(num_slots, LANES), _WARPS)
    for group in cutlass.range(warp * per_warp, (warp + 1) * per_warp, unroll=1):
        place = group * LANES + lane
        expert = Int32(-1)
        if place < num_slots:
            expert = ids[place]
            if expert >= num_experts:
                expert = Int32(-1)
        same = cute.arch.match_sync(0xFFFFFFFF, expert)
        lower = Int32(cute.arch.popc(same & _lanes_below(lane)))
        if expert >= 0:
            within = histogram[warp * num_experts + expert] + lower
            head = head_of(own[expert], before[expert], tile_m)
            piece, offset = within // TICKET_ROWS, within % TICKET_ROWS
            if within >= head:
                past = within - head
                piece = (
                    ceil_div(head, TICKET_ROWS)
                    + past // tile_m * per_tile
                    + past % tile_m // TICKET_ROWS
                )
                offset = past % tile_m % TICKET_ROWS
            ticket = tickets[expert] + piece
            token = place // num_topk
            if cutlass.const_expr(writing):
                first = expert // local * local
                there = before[expert] + within
                counter = tiles[expert] - tiles[first] + there // tile_m
                if cutlass.const_expr(settings.granularity is Granularity.expert):
                    counter = expert - first
                store_words(
                    sends + Int64(scratch[ticket] + offset) * VECTOR_BYTES,
                    [
                        token,
                        expert // local << SLOT_BITS | place % num_topk,
                        rows[expert] - rows[first] + there,
                        counter,
                    ],
                )
            elif offset == 0:
                scratch[2 * plan.max_tickets + ticket] = token
        cute.arch.sync_warp()
        if expert >= 0 and lower == 0:
            cell = warp * num_experts + expert
            histogram[cell] = histogram[cell] + Int32(cute.arch.popc(same))
        cute.arch.sync_warp()


@cute.jit
def _rewind(thread: Int32, histogram: cute.Tensor, plan: cutlass.Constexpr):
    """Undo what a walk has added: each warp's end is the next one's beginning."""
    num_experts = plan.settings.num_experts
    cute.arch.sync_threads()
    for expert in cutlass.range(thread, num_experts, PLAN_THREADS, unroll=1):
        for w in cutlass.range(_WARPS - 1, unroll=1):
            here = _WARPS - 1 - w
            histogram[here * num_experts + expert] = histogram[(here - 1) * num_experts + expert]
        histogram[expert] = Int32(0)
    cute.arch.sync_threads()


@cute.jit
def _order_tickets(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    histogram: cute.Tensor,
    experts: cutlass.Constexpr,
    sums: cute.Tensor,
    scratch: cute.Tensor,  # afterwards: where the rows of each ticket begin in the sending order
    epoch: Int32,
    plan: cutlass.Constexpr,
):
    """Give every ticket its place, then every ticket's rows theirs."""
    settings, most = plan.settings, plan.max_tickets
    num_tickets = experts.tickets[settings.num_experts]
    num_tokens = buffer(address(table, rank, Slot.words), Int32)[int(Word.num_tokens)]
    starts = cute.make_tensor(scratch.iterator + most, cute.make_layout(most))
    tokens = cute.make_tensor(scratch.iterator + 2 * most, cute.make_layout(most))
    members = cute.make_tensor(scratch.iterator + 3 * most, cute.make_layout(most))
    bins = cute.make_tensor(scratch.iterator + 4 * most, cute.make_layout(plan.max_tokens + 1))
    keys = cute.make_tensor(scratch.iterator + 2 * most, cute.make_layout(plan.max_runs))
    sizes = cute.make_tensor(
        scratch.iterator + (2 * most + plan.max_runs), cute.make_layout(plan.max_runs)
    )
    if cutlass.const_expr(settings.order is Order.token):
        _each_row(table, rank, thread, histogram, experts, scratch, False, plan)
        _rewind(thread, histogram, plan)
        bin_tickets(thread, num_tickets, num_tokens, scratch, sums, plan)
    if cutlass.const_expr(settings.order is Order.random):
        hash_runs(thread, epoch, experts, keys, sizes, plan)
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        expert, run, row, num_rows = ticket_of(ticket, experts, plan)
        place = ticket
        if cutlass.const_expr(settings.order is Order.edf):
            place = _place_edf(ticket, expert, rank, experts, plan)
        if cutlass.const_expr(settings.order is Order.edf_list):
            place = _place_edf_list(ticket, expert, row, rank, experts, plan)
        if cutlass.const_expr(settings.order is Order.token):
            place = place_by_token(ticket, tokens[ticket], bins, members)
        if cutlass.const_expr(settings.order is Order.random):
            pieces = pieces_before(expert, run, experts, plan)
            place = place_by_hash(
                ticket,
                experts.runs[expert] + run,
                keys,
                sizes,
                experts.tickets[expert] + pieces,
                experts.runs[settings.num_experts],
            )
        scratch[ticket] = place
        starts[place] = num_rows
    cute.arch.sync_threads()
    exclusive_scan(starts, num_tickets, thread, sums, PLAN_THREADS)
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        scratch[ticket] = starts[scratch[ticket]]
    cute.arch.sync_threads()


@cute.jit
def _write_waits(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    experts: cutlass.Constexpr,
    plan: cutlass.Constexpr,
):
    """Tiles of this rank, what its consumer waits for, and what home waits for."""
    settings = plan.settings
    local, tile_m, num_topk = settings.num_experts_per_rank, settings.tile_m, settings.num_topk
    words = buffer(address(table, rank, Slot.words), Int32)
    tile_rows = buffer(address(table, rank, Slot.tiles), Int32)
    expected = buffer(address(table, rank, Slot.ready_expected), Int32)
    at_home = buffer(address(table, rank, Slot.token_expected), Int32)
    of_rank = buffer(address(table, rank, Slot.rank_expected), Int32)
    ids = buffer(address(table, rank, Slot.topk_idx), Int32)
    tiles, rows, total, own = experts.tiles, experts.rows, experts.total, experts.own
    first = rank * local
    num_tiles = tiles[first + local] - tiles[first]
    per_expert = settings.granularity is Granularity.expert
    for tile in cutlass.range(thread, num_tiles, PLAN_THREADS, unroll=1):
        expert = last_at_most(tiles, Int32(settings.num_experts), tiles[first] + tile)
        done = (tiles[first] + tile - tiles[expert]) * tile_m
        valid = cutlass.min(total[expert] - done, tile_m)
        tile_rows[2 * tile] = rows[expert] - rows[first] + done
        tile_rows[2 * tile + 1] = valid
        if cutlass.const_expr(not per_expert):
            expected[tile] = valid
    if cutlass.const_expr(per_expert):
        for i in cutlass.range(thread, local, PLAN_THREADS, unroll=1):
            expected[i] = total[first + i]
    for token in cutlass.range(thread, words[int(Word.num_tokens)], PLAN_THREADS, unroll=1):
        kept = Int32(0)
        for slot in cutlass.range_constexpr(num_topk):
            if ids[token * num_topk + slot] >= 0:
                kept += settings.num_chunks
        at_home[token] = kept
    if thread < settings.num_ranks:
        owed = Int32(0)
        for i in cutlass.range(local, unroll=1):
            owed += own[thread * local + i]
        of_rank[thread] = owed * settings.num_chunks
    lane, warp = thread % LANES, thread // LANES
    if warp == 0:
        sent = sum_of(own, Int32(0), Int32(settings.num_experts), lane)
        received = sum_of(total, first, first + local, lane)
        if lane == 0:
            words[int(Word.num_sends)] = sent
            words[int(Word.num_tiles)] = num_tiles
            words[int(Word.num_counters)] = Int32(local) if per_expert else num_tiles
            words[int(Word.num_returns)] = received


@cute.jit
def make_plan(
    table: cute.Pointer,
    rank: Int32,
    thread: Int32,
    memory: cutlass.Constexpr,
    plan: cutlass.Constexpr,
    limit_ns: Int64,
):
    """Open a launch and plan it. Called by all threads of one CTA, the rank's only one."""
    settings = plan.settings
    size = _WARPS * settings.num_experts
    histogram = cute.make_tensor(
        memory.allocate_array(Int32, size, byte_alignment=16), cute.make_layout(size)
    )
    sums = cute.make_tensor(
        memory.allocate_array(Int32, LANES, byte_alignment=16), cute.make_layout(LANES)
    )
    columns = segment_table(memory, settings.num_experts, 7)
    experts = _Experts(*columns)
    scratch = buffer(address(table, rank, Slot.scratch), Int32)
    _count_own(table, rank, thread, histogram, experts.own, plan)
    open_launch(table, rank, thread, PLAN_THREADS, plan.gate, True, False, limit_ns)
    cute.arch.sync_threads()
    if abort_word(table, rank) == 0:
        _lay_out(table, rank, thread, experts, sums, plan)
        fits = _fits(table, rank, thread, experts, plan)
        if fits:
            epoch = buffer(address(table, rank, Slot.words), Int32)[int(Word.epoch)]
            _order_tickets(table, rank, thread, histogram, experts, sums, scratch, epoch, plan)
            _each_row(table, rank, thread, histogram, experts, scratch, True, plan)
            _write_waits(table, rank, thread, experts, plan)
        elif thread == 0:
            # Every rank stops by itself: all have found the same.
            abort = element(address(table, rank, Slot.abort), Int32(0), Int32)
            set_relaxed(abort, Int32(1), Scope.sys)


def plan_entry(plan: PlanConstants):
    """Host function that opens and plans a launch on all ranks of this process, one CTA each."""

    def body(table, rank, thread, limit_ns):
        leave_stamp(table, rank, thread, Stamp.plan_entry)
        make_plan(table, rank, thread, SmemAllocator(), plan, limit_ns)
        cute.arch.sync_threads()
        leave_stamp(table, rank, thread, Stamp.plan_exit)

    return rank_entry(PLAN_THREADS, body)
