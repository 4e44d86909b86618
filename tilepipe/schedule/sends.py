"""Sends of one rank: runs of rows with one destination tile, cut into tickets, in an order.

Knows nothing of who executes them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Order
from tilepipe.schedule.settings import TICKET_ROWS, PlanSettings

__all__ = ["Runs", "Tickets", "cut_tickets", "hash32", "order_tickets"]

_UINT32 = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Rows that one rank sends and that share a tile, one entry a run, in canonical order.

    That is (peer, tile) on the way out and (tile, peer) on the way home.
    """

    peer: NDArray[np.int32]  # rank that receives
    first_row: NDArray[np.int32]  # first row at the receiver (dispatch) or here (combine)
    source_start: NDArray[np.int32]  # first index into the sender's row list
    num_rows: NDArray[np.int32]
    tile: NDArray[np.int32]  # M tile of the rank that owns the expert
    expert: NDArray[np.int32]  # number in the whole group
    deadline: NDArray[np.int64]  # when the receiver first needs a row of this run


@dataclass(frozen=True, kw_only=True)
class Tickets:
    """Pieces of runs of up to TICKET_ROWS rows, in sending order; one entry each."""

    peer: NDArray[np.int32]
    first_row: NDArray[np.int32]
    source_start: NDArray[np.int32]
    num_rows: NDArray[np.int32]
    tile: NDArray[np.int32]
    expert: NDArray[np.int32]
    deadline: NDArray[np.int64]
    run: NDArray[np.int32]  # index of the run it was cut from

    def __len__(self) -> int:
        return len(self.peer)


def hash32(*words: int | NDArray[np.int64]) -> NDArray[np.uint32]:
    """Fixed 32-bit hash of the words, one after the other.

    Every step is the finaliser of MurmurHash3 (Appleby, public domain) over 32-bit lanes, so that
    a kernel reproduces it with 32-bit integer arithmetic.
    """
    state: NDArray[np.uint64] = np.asarray(0x9E3779B9, np.uint64)
    for word in words:
        # Masked before NumPy sees it: a seed may be any Python integer.
        state = state ^ np.asarray(word & 0xFFFFFFFF).astype(np.uint64)
        state = ((state ^ (state >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & _UINT32
        state = ((state ^ (state >> np.uint64(13))) * np.uint64(0xC2B2AE35)) & _UINT32
        state = state ^ (state >> np.uint64(16))
    return state.astype(np.uint32)


def cut_tickets(runs: Runs) -> Tickets:
    """Cut every run into tickets, in canonical order."""
    pieces = -(-runs.num_rows // TICKET_ROWS)
    run = np.repeat(np.arange(len(pieces), dtype=np.int32), pieces)
    starts = np.cumsum(pieces) - pieces
    done = (np.arange(len(run), dtype=np.int32) - starts[run].astype(np.int32)) * TICKET_ROWS
    return Tickets(
        peer=runs.peer[run],
        first_row=runs.first_row[run] + done,
        source_start=runs.source_start[run] + done,
        num_rows=np.minimum(runs.num_rows[run] - done, TICKET_ROWS),
        tile=runs.tile[run],
        expert=runs.expert[run],
        deadline=runs.deadline[run],
        run=run,
    )


def order_tickets(
    tickets: Tickets,
    first_token: NDArray[np.int64],  # (num_tickets,) token of each ticket's first row
    *,
    rank: int,
    epoch: int,
    settings: PlanSettings,
) -> Tickets:
    """Put tickets, which come in canonical order, into sending order.

    Every sort is stable, so ties, and tickets of one run among themselves, stay as they came.

    edf: a queue per peer by deadline, all queues served ticket by ticket starting at rank + 1.
    edf_list: one list by deadline (in-cast: runs differ in length). expert: by expert. token: by
    the ticket's first token. random: runs by `hash32(seed, epoch, run)`.
    """
    turn = (tickets.peer.astype(np.int64) - rank - 1) % settings.num_ranks
    match settings.order:
        case Order.edf:
            by_queue = np.lexsort((tickets.deadline, turn))
            place = _place_in_group(turn, by_queue)
            order = np.lexsort((turn, place))
        case Order.edf_list:
            order = np.lexsort((turn, tickets.deadline))
        case Order.expert:
            order = np.argsort(tickets.expert, kind="stable")
        case Order.token:
            order = np.argsort(first_token, kind="stable")
        case Order.random:
            key = hash32(settings.seed, epoch, tickets.run.astype(np.int64))
            order = np.argsort(key, kind="stable")
    return Tickets(**{name: getattr(tickets, name)[order] for name in Tickets.__annotations__})


def _place_in_group(
    group: NDArray[np.int64], grouped_order: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Position of every element inside its group, when `grouped_order` sorts by group first."""
    sizes = np.bincount(group, minlength=1)
    starts = np.cumsum(sizes) - sizes
    place = np.empty(len(group), np.int64)
    place[grouped_order] = np.arange(len(group)) - starts[group[grouped_order]]
    return place
