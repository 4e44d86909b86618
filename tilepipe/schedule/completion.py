"""GEMM -> push -> reduce: which stored output tiles complete a unit that may be pushed, and when
tokens are complete at home.

Knows nothing of queues and threads; an executor counts down what is given here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity
from tilepipe.schedule.layout import ReceiveLayout, tile_capacity
from tilepipe.schedule.plan import RankPlan
from tilepipe.schedule.settings import PlanSettings

__all__ = [
    "CompletionPlan",
    "chunk_columns",
    "completion_capacity",
    "order_tokens",
    "plan_completion",
]


@dataclass(frozen=True, kw_only=True)
class CompletionPlan:
    """Thresholds of one rank's GEMM -> push edge, in stored output tiles.

    A unit is an (M tile, chunk), a row or an expert, by granularity. A row is whole once all chunks
    of its M tile are.
    """

    tiles_of_chunk: NDArray[np.int64]  # (num_tiles, num_chunks)
    tiles_of_expert: NDArray[np.int64]  # (num_experts_per_rank,)
    num_units: int  # that will be published


def plan_completion(layout: ReceiveLayout, settings: PlanSettings) -> CompletionPlan:
    """Thresholds and number of units of one launch."""
    m_tiles_of_expert = np.diff(layout.expert_first_tile).astype(np.int64)
    n_tiles_of_chunk = np.bincount(_chunks(settings), minlength=settings.num_chunks)
    return CompletionPlan(
        tiles_of_chunk=np.tile(n_tiles_of_chunk.astype(np.int64), (layout.num_tiles, 1)),
        tiles_of_expert=m_tiles_of_expert * settings.num_n_tiles,
        num_units={
            Granularity.tile: layout.num_tiles * settings.num_chunks,
            Granularity.token: layout.num_rows,
            Granularity.expert: int((m_tiles_of_expert > 0).sum()),
        }[settings.granularity],
    )


def completion_capacity(settings: PlanSettings, rows: int) -> int:
    """Units to reserve room for when a rank holds at most `rows` receive rows."""
    return {
        Granularity.tile: tile_capacity(settings, rows) * settings.num_chunks,
        Granularity.token: rows,
        Granularity.expert: settings.num_experts_per_rank,
    }[settings.granularity]


def order_tokens(
    plan: RankPlan,  # of the tokens' rank
    num_tiles: Sequence[int],  # M tiles of every rank
    *,
    num_tokens: int,
    num_parts: int,  # of a token, each made by a walk over all tiles
) -> NDArray[np.int32]:  # (num_tokens,)
    """Tokens of a rank by when the last tile of any of their rows is handed out, ties by number.

    All ranks are taken to begin together and to be equally fast, so a tile's turn in the last walk
    of its rank is its time. Tokens without rows are complete before all others.
    """
    tickets = plan.tickets
    tiles_of = np.asarray(num_tiles, np.int64)
    turn = (num_parts - 1) * tiles_of[tickets.peer] + tickets.tile + 1
    start = np.cumsum(tickets.num_rows) - tickets.num_rows
    within = np.arange(plan.num_sent) - np.repeat(start, tickets.num_rows)
    token = plan.row_token[np.repeat(tickets.source_start, tickets.num_rows) + within]
    due = np.zeros(num_tokens, np.int64)
    np.maximum.at(due, token, np.repeat(turn, tickets.num_rows))
    return np.argsort(due, kind="stable").astype(np.int32)


def chunk_columns(settings: PlanSettings, tile_n: int, num_columns: int) -> list[slice]:
    """Columns of each chunk of a row."""
    chunks = _chunks(settings)
    starts = [chunks.index(chunk) * tile_n for chunk in range(settings.num_chunks)]
    ends = [*starts[1:], num_columns]
    return [slice(start, end) for start, end in zip(starts, ends, strict=True)]


def _chunks(settings: PlanSettings) -> list[int]:
    return [settings.chunk_of_n_tile(n_tile) for n_tile in range(settings.num_n_tiles)]
