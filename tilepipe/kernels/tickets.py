"""Tickets of one rank's rows on the device: how segments of rows are cut, and where pieces lie.

Knows nothing of where rows lie and of what a deadline is. A segment is the rows that share an
expert and both ends; runs and tickets are numbered segment by segment, as they come. Everything a
ticket needs to know of the others follows from prefix sums over segments: no list is ever sorted.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from tilepipe.kernels.memory import LANES
from tilepipe.kernels.scan import last_at_most
from tilepipe.schedule.settings import TICKET_ROWS

__all__ = [
    "TICKET_BITS",
    "Segments",
    "ceil_div",
    "cut_segment",
    "hash_run",
    "head_of",
    "piece_row",
    "pieces_before",
    "rows_before",
    "rows_before_by_hash",
    "run_of",
    "segment_table",
    "ticket_of",
    "turn_of",
]

# Of a word that holds a ticket and its rows, those below the ticket.
TICKET_BITS = TICKET_ROWS.bit_length()


@dataclass(frozen=True)
class Segments:
    """One word a segment, in shared memory; the prefix sums have the total behind the last."""

    own: cute.Tensor  # rows
    before: cute.Tensor  # rows of the same expert that come first, from lower ranks
    sent: cute.Tensor  # rows of all lower segments
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


def _pieces_of(tile_m: int) -> int:
    """Tickets of a full tile."""
    return -(-tile_m // TICKET_ROWS)


def cut_segment(own: Int32, before: Int32, tile_m: int) -> tuple[Int32, Int32]:
    """Tickets and runs of a segment."""
    head = head_of(own, before, tile_m)
    rest = own - head
    tickets = (
        ceil_div(head, TICKET_ROWS)
        + rest // tile_m * _pieces_of(tile_m)
        + ceil_div(rest % tile_m, TICKET_ROWS)
    )
    return tickets, cutlass.min(own, 1) + ceil_div(rest, tile_m)


@cute.jit
def piece_row(
    segment: Int32, piece: Int32, segments: cutlass.Constexpr, tile_m: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32]:
    """Run, first row and end of a ticket of a segment; past the last one all its rows."""
    own, per_tile = segments.own[segment], _pieces_of(tile_m)
    head = head_of(own, segments.before[segment], tile_m)
    in_head = ceil_div(head, TICKET_ROWS)
    run, row, end = Int32(0), piece * TICKET_ROWS, head
    if piece >= in_head:
        past = piece - in_head
        run = 1 + past // per_tile
        row = head + past // per_tile * tile_m + past % per_tile * TICKET_ROWS
        end = cutlass.min(own, head + run * tile_m)
    return run, cutlass.min(row, own), cutlass.min(end, row + TICKET_ROWS)


@cute.jit
def ticket_of(
    ticket: Int32, segments: cutlass.Constexpr, plan: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32, Int32]:
    """Segment, run of that segment, first row of the segment's, and number of rows of a ticket."""
    tickets, settings = segments.tickets, plan.settings
    segment = last_at_most(tickets, 0, settings.num_experts, ticket)
    run, row, end = piece_row(segment, ticket - tickets[segment], segments, settings.tile_m)
    return segment, run, row, end - row


@cute.jit
def run_of(
    run: Int32, segments: cutlass.Constexpr, plan: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32, Int32]:
    """Segment of a run, the run of that segment, its first row and number of rows."""
    settings = plan.settings
    segment = last_at_most(segments.runs, 0, settings.num_experts, run)
    within = run - segments.runs[segment]
    row = rows_before(segment, within, segments, settings.tile_m)
    return segment, within, row, rows_before(segment, within + 1, segments, settings.tile_m) - row


@cute.jit
def rows_before(
    segment: Int32, run: Int32, segments: cutlass.Constexpr, tile_m: cutlass.Constexpr
) -> Int32:
    """Rows of a segment's runs before this one; all of them where there are no more."""
    own, rows = segments.own[segment], Int32(0)
    if run > 0:
        head = head_of(own, segments.before[segment], tile_m)
        rows = cutlass.min(own, head + (run - 1) * tile_m)
    return rows


@cute.jit
def pieces_before(
    segment: Int32, run: Int32, segments: cutlass.Constexpr, tile_m: cutlass.Constexpr
) -> Int32:
    """Tickets of the segment's runs before this one; of all runs where there are no more."""
    pieces = Int32(0)
    if run > 0:
        head = head_of(segments.own[segment], segments.before[segment], tile_m)
        in_runs = ceil_div(head, TICKET_ROWS) + (run - 1) * _pieces_of(tile_m)
        all_pieces = segments.tickets[segment + 1] - segments.tickets[segment]
        pieces = cutlass.min(in_runs, all_pieces)
    return pieces


def turn_of(peer, rank: Int32, num_ranks: int):
    """When a peer is served: rank + 1 first, the rank itself last."""
    return (peer + (2 * num_ranks - 1) - rank) % num_ranks


@cute.jit
def hash_run(run: Int32, epoch: Int32, plan: cutlass.Constexpr) -> Uint32:
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
def rows_before_by_hash(
    run: Int32,  # of all runs
    epoch: Int32,
    lane: Int32,
    segments: cutlass.Constexpr,
    plan: cutlass.Constexpr,
) -> Int32:
    """Runs by hash, ties as they come: rows of all that stand before this one. Called by a warp."""
    settings, runs = plan.settings, segments.runs
    key, rows = hash_run(run, epoch, plan), Int32(0)
    for segment in cutlass.range(lane, settings.num_experts, LANES, unroll=1):
        first = runs[segment]
        for other in cutlass.range(first, runs[segment + 1], unroll=1):
            its_key = hash_run(other, epoch, plan)
            if its_key < key or (its_key == key and other < run):
                within = other - first
                end = rows_before(segment, within + 1, segments, settings.tile_m)
                rows += end - rows_before(segment, within, segments, settings.tile_m)
    return cute.arch.warp_reduction_sum(rows)
