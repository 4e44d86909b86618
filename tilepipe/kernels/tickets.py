"""Tickets of one rank's rows on the device: how segments of rows are cut, and in which order sent.

Knows nothing of where rows lie and of what a deadline is. A segment is the rows that share an
expert and both ends; tickets are numbered segment by segment, as they come. Everything a ticket
needs to know of the others follows from prefix sums over segments: no list is ever sorted.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from tilepipe.config.choices import Granularity
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.scan import exclusive_scan, last_at_most
from tilepipe.schedule.settings import TICKET_ROWS, PlanSettings

__all__ = [
    "PLAN_THREADS",
    "PlanConstants",
    "Segments",
    "bin_tickets",
    "ceil_div",
    "cut_segment",
    "hash_runs",
    "head_of",
    "pieces_before",
    "place_by_hash",
    "place_by_token",
    "segment_table",
    "ticket_of",
    "turn_of",
]

PLAN_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class PlanConstants:
    """What the plan kernel is compiled for."""

    settings: PlanSettings
    capacity: int  # receive rows of every rank
    max_tickets: int  # room for tickets of one rank
    max_runs: int
    max_tokens: int  # of any rank

    @property
    def gate(self) -> Constants:
        """What the gate inside it is compiled for."""
        return Constants(
            num_ranks=self.settings.num_ranks,
            num_experts_per_rank=self.settings.num_experts_per_rank,
            num_topk=1,
            row_bytes=0,
            granularity=Granularity.tile,
        )


@dataclass(frozen=True)
class Segments:
    """One word a segment, in shared memory; the prefix sums have the total behind the last."""

    own: cute.Tensor  # rows
    before: cute.Tensor  # rows of the same expert that come first, from lower ranks
    tickets: cute.Tensor  # tickets of all lower segments
    runs: cute.Tensor  # runs of all lower segments


def segment_table(memory, num_segments: int, num_columns: int) -> list[cute.Tensor]:
    """Columns of one word a segment and one behind the last."""
    return [
        cute.make_tensor(
            memory.allocate_array(Int32, num_segments + 1, byte_alignment=16),
            cute.make_layout(num_segments + 1),
        )
        for _ in range(num_columns)
    ]


def ceil_div(amount, unit: int):
    """Units that hold an amount."""
    return (amount + (unit - 1)) // unit


def head_of(own: Int32, before: Int32, tile_m: int) -> Int32:
    """Rows in the tile that a segment shares with the one before; the rest has tiles of its own."""
    return cutlass.min(own, tile_m - before % tile_m)


def cut_segment(own: Int32, before: Int32, tile_m: int) -> tuple[Int32, Int32]:
    """Tickets and runs of a segment."""
    head = head_of(own, before, tile_m)
    rest = own - head
    tickets = (
        ceil_div(head, TICKET_ROWS)
        + rest // tile_m * -(-tile_m // TICKET_ROWS)
        + ceil_div(rest % tile_m, TICKET_ROWS)
    )
    return tickets, cutlass.min(own, 1) + ceil_div(rest, tile_m)


@cute.jit
def ticket_of(
    ticket: Int32, segments: cutlass.Constexpr, plan: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32, Int32]:
    """Segment, run of that segment, first row of the segment's, and number of rows of a ticket."""
    own, before, tickets = segments.own, segments.before, segments.tickets
    tile_m = plan.settings.tile_m
    per_tile = -(-tile_m // TICKET_ROWS)
    segment = last_at_most(tickets, Int32(plan.settings.num_experts), ticket)
    head = head_of(own[segment], before[segment], tile_m)
    piece = ticket - tickets[segment]
    in_head = ceil_div(head, TICKET_ROWS)
    run, row, end = Int32(0), piece * TICKET_ROWS, head
    if piece >= in_head:
        piece = piece - in_head
        run = 1 + piece // per_tile
        row = head + (run - 1) * tile_m + piece % per_tile * TICKET_ROWS
        end = cutlass.min(own[segment], head + run * tile_m)
    return segment, run, row, cutlass.min(end - row, TICKET_ROWS)


@cute.jit
def pieces_before(
    segment: Int32, run: Int32, segments: cutlass.Constexpr, plan: cutlass.Constexpr
) -> Int32:
    """Tickets of the segment's runs before this one; of all runs where there are no more."""
    tile_m = plan.settings.tile_m
    pieces = Int32(0)
    if run > 0:
        head = head_of(segments.own[segment], segments.before[segment], tile_m)
        in_runs = ceil_div(head, TICKET_ROWS) + (run - 1) * -(-tile_m // TICKET_ROWS)
        all_pieces = segments.tickets[segment + 1] - segments.tickets[segment]
        pieces = cutlass.min(in_runs, all_pieces)
    return pieces


def turn_of(peer, rank: Int32, num_ranks: int):
    """When a peer is served: rank + 1 first, the rank itself last."""
    return (peer + (2 * num_ranks - 1) - rank) % num_ranks


@cute.jit
def _hash_run(run: Int32, epoch: Int32, plan: cutlass.Constexpr) -> Uint32:
    """`schedule.sends.hash32(seed, epoch, run)`."""
    state = Uint32(0x9E3779B9)
    words = (Uint32(plan.settings.seed & 0xFFFFFFFF), Uint32(epoch), Uint32(run))
    for place in cutlass.range_constexpr(3):
        state = state ^ words[place]
        state = (state ^ (state >> Uint32(16))) * Uint32(0x85EBCA6B)
        state = (state ^ (state >> Uint32(13))) * Uint32(0xC2B2AE35)
        state = state ^ (state >> Uint32(16))
    return state


@cute.jit
def hash_runs(
    thread: Int32,
    epoch: Int32,
    segments: cutlass.Constexpr,
    keys: cute.Tensor,  # (runs,) hash of each
    sizes: cute.Tensor,  # (runs,) tickets of each
    plan: cutlass.Constexpr,
):
    """Keys and sizes of all runs, found by the first ticket of each."""
    settings = plan.settings
    num_tickets = segments.tickets[settings.num_experts]
    for run in cutlass.range(thread, segments.runs[settings.num_experts], PLAN_THREADS, unroll=1):
        keys[run] = Int32(_hash_run(run, epoch, plan))
        sizes[run] = Int32(0)
    cute.arch.sync_threads()
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        segment, run, _, _ = ticket_of(ticket, segments, plan)
        cute.arch.atomic_add(sizes.iterator + (segments.runs[segment] + run), Int32(1))
    cute.arch.sync_threads()


@cute.jit
def place_by_hash(
    ticket: Int32,
    run: Int32,  # of all runs
    keys: cute.Tensor,
    sizes: cute.Tensor,
    first_ticket: Int32,  # of the run
    num_runs: Int32,
) -> Int32:
    """Runs by hash, ties as they come: tickets of all runs that stand before this one's."""
    key = Uint32(keys[run])
    place = ticket - first_ticket
    for other in cutlass.range(num_runs, unroll=4):
        its_key = Uint32(keys[other])
        if its_key < key or (its_key == key and other < run):
            place += sizes[other]
    return place


@cute.jit
def place_by_token(
    ticket: Int32,
    token: Int32,
    bins: cute.Tensor,  # (tokens + 1,) tickets whose first token is lower
    members: cute.Tensor,  # (tickets,) tickets by bin, inside one as they came
) -> Int32:
    """Tickets by their first token, ties as they come."""
    place = bins[token]
    for i in cutlass.range(bins[token], bins[token + 1], unroll=1):
        if members[i] < ticket:
            place += 1
    return place


@cute.jit
def bin_tickets(
    thread: Int32,
    num_tickets: Int32,
    num_tokens: Int32,
    scratch: cute.Tensor,
    sums: cute.Tensor,
    plan: cutlass.Constexpr,
):
    """Tickets by the bin of their first token; tokens lie behind two words a ticket."""
    tokens = cute.make_tensor(
        scratch.iterator + 2 * plan.max_tickets, cute.make_layout(plan.max_tickets)
    )
    members = cute.make_tensor(
        scratch.iterator + 3 * plan.max_tickets, cute.make_layout(plan.max_tickets)
    )
    bins = cute.make_tensor(
        scratch.iterator + 4 * plan.max_tickets, cute.make_layout(plan.max_tokens + 1)
    )
    for token in cutlass.range(thread, num_tokens + 1, PLAN_THREADS, unroll=1):
        bins[token] = Int32(0)
    cute.arch.sync_threads()
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        # Its turn in its bin, which says nothing of the order: `place_by_token` compares.
        scratch[plan.max_tickets + ticket] = cute.arch.atomic_add(
            bins.iterator + tokens[ticket], Int32(1)
        )
    cute.arch.sync_threads()
    exclusive_scan(bins, num_tokens + 1, thread, sums, PLAN_THREADS)
    for ticket in cutlass.range(thread, num_tickets, PLAN_THREADS, unroll=1):
        members[bins[tokens[ticket]] + scratch[plan.max_tickets + ticket]] = ticket
    cute.arch.sync_threads()
