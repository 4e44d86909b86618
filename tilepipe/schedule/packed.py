"""The Plan as the arrays that kernels read, row by row in sending order.

Knows nothing of torch or of where the arrays lie; `fabric/table.py` says which is which.
"""

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity
from tilepipe.schedule.layout import ReceiveLayout
from tilepipe.schedule.plan import RankPlan
from tilepipe.schedule.sends import Tickets
from tilepipe.schedule.settings import PlanSettings

__all__ = ["SLOT_BITS", "TOKEN_BITS", "pack_returns", "pack_sends", "pack_tiles"]

# A row's way home in 8 bytes: source rank << 48 | token << 16 | slot.
SLOT_BITS, TOKEN_BITS = 16, 32


def pack_sends(plan: RankPlan, settings: PlanSettings) -> NDArray[np.int32]:  # (num_sent, 4)
    """One row per sent row: token, peer << 16 | slot, row there, readiness counter there."""
    tickets = plan.tickets
    ticket, within = _spread(tickets)
    source = tickets.source_start[ticket] + within
    counter = tickets.tile
    if settings.granularity is Granularity.expert:
        counter = tickets.expert % settings.num_experts_per_rank
    return np.stack(
        [
            plan.row_token[source],
            (tickets.peer[ticket] << SLOT_BITS) | plan.row_slot[source],
            tickets.first_row[ticket] + within,
            counter[ticket],
        ],
        axis=1,
    ).astype(np.int32)


def pack_returns(tickets: Tickets) -> NDArray[np.int32]:  # (num_rows,)
    """Receive row of every row that goes home; its way lies in `row_home`."""
    ticket, within = _spread(tickets)
    return (tickets.first_row[ticket] + within).astype(np.int32)


def pack_tiles(layout: ReceiveLayout) -> NDArray[np.int32]:  # (num_tiles, 2)
    """First row and valid rows of every M tile."""
    return np.ascontiguousarray(layout.tiles[:, 1:], dtype=np.int32)


def _spread(tickets: Tickets) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Ticket of every row, and the row's place in it."""
    ticket = np.repeat(np.arange(len(tickets)), tickets.num_rows)
    first = np.cumsum(tickets.num_rows) - tickets.num_rows
    return ticket, (np.arange(len(ticket)) - first[ticket]).astype(np.int32)
