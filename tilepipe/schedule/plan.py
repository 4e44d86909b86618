"""The Plan of one launch, rank by rank: layout, hand-out, sends and readiness.

This is the readable specification; a device maker must agree with it bit for bit. Executors read it
and recompute nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Granularity, HomeGranularity
from tilepipe.schedule.layout import (
    ReceiveLayout,
    count_rows,
    first_rows,
    make_handout,
    make_layout,
)
from tilepipe.schedule.sends import Runs, Tickets, cut_tickets, order_tickets
from tilepipe.schedule.settings import PlanSettings

__all__ = [
    "HomePlan",
    "RankPlan",
    "Readiness",
    "homeward_plan",
    "make_plan",
    "make_rank_plan",
    "plan_home",
    "plan_returns",
]


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What the consumer of dispatched rows waits for.

    With granularity token nobody raises a counter: row r is ready once `flag[r] == epoch`, and
    `expected` says how many such flags make a tile.
    """

    counter_of_tile: NDArray[np.int32]  # (num_tiles,) counter that guards an M tile
    expected: NDArray[np.int64]  # (num_counters,) rows; ready when seen >= expected


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """All that one rank needs to send its rows and to consume the rows it receives."""

    rank: int
    layout: ReceiveLayout
    handout: NDArray[np.int32]  # (num_tiles * num_n_tiles, 2): M tile, N tile
    readiness: Readiness
    row_token: NDArray[np.int32]  # (num_sent,) token of each sent row, by (expert, token)
    row_slot: NDArray[np.int32]  # (num_sent,) top-k slot of each sent row
    tickets: Tickets  # in sending order; source_start indexes row_token and row_slot

    @property
    def num_sent(self) -> int:
        return len(self.row_token)


@dataclass(frozen=True, kw_only=True)
class HomePlan:
    """What a rank waits for before it reduces its tokens, in chunk arrivals."""

    token_expected: NDArray[np.int64]  # (num_tokens,) valid slots x chunks
    rank_expected: NDArray[np.int64]  # (num_ranks,) rows sent to a rank x chunks
    by_rank: bool  # wait for whole source ranks instead of tokens


def make_rank_plan(
    rank: int,
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk) of this rank
    counts: NDArray[np.int32],  # (num_ranks, num_experts), exchanged
    settings: PlanSettings,
    *,
    epoch: int,
) -> RankPlan:
    """Derive the plan of `rank` from its own routing and everybody's counts."""
    assert topk_idx.shape[1] == settings.num_topk, f"{topk_idx.shape} for topk {settings.num_topk}"
    layout = make_layout(rank, counts, settings)
    flat = topk_idx.reshape(-1)
    valid = np.flatnonzero(flat >= 0)
    # The narrowest key that holds every expert: keys of one or two bytes sort by radix.
    key = flat[valid].astype(np.min_scalar_type(settings.num_experts - 1))
    by_expert = valid[np.argsort(key, kind="stable")]
    row_token = (by_expert // settings.num_topk).astype(np.int32)
    tickets = cut_tickets(_dispatch_runs(rank, counts, settings))
    return RankPlan(
        rank=rank,
        layout=layout,
        handout=make_handout(layout, settings),
        readiness=_readiness(layout, settings),
        row_token=row_token,
        row_slot=(by_expert % settings.num_topk).astype(np.int32),
        tickets=order_tickets(
            tickets,
            row_token[tickets.source_start].astype(np.int64),
            rank=rank,
            epoch=epoch,
            settings=settings,
        ),
    )


def make_plan(
    topk_idx: Sequence[NDArray[np.int32]],  # per rank (num_tokens, num_topk)
    settings: PlanSettings,
    *,
    epoch: int = 1,
) -> tuple[RankPlan, ...]:
    """Plans of all ranks, as each would make its own after the exchange."""
    counts = np.stack([count_rows(ids, settings.num_experts) for ids in topk_idx])
    return tuple(
        make_rank_plan(rank, ids, counts, settings, epoch=epoch)
        for rank, ids in enumerate(topk_idx)
    )


def _dispatch_runs(rank: int, counts: NDArray[np.int32], settings: PlanSettings) -> Runs:
    """Runs of `rank`, one for each destination tile that its rows touch, by (expert, tile)."""
    num_local, tile_m = settings.num_experts_per_rank, settings.tile_m
    expert_of = np.arange(settings.num_experts, dtype=np.int64)
    rows = counts[rank].astype(np.int64)
    before = counts[:rank].sum(axis=0, dtype=np.int64)  # rows of lower ranks come first
    source_start = np.cumsum(rows) - rows
    lo, hi = before // tile_m, -(-(before + rows) // tile_m)
    num_runs = np.where(rows > 0, hi - lo, 0)
    expert = np.repeat(expert_of, num_runs)
    within = np.arange(len(expert)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
    tile_in_expert = lo[expert] + within
    begin = np.maximum(tile_in_expert * tile_m, before[expert])
    end = np.minimum((tile_in_expert + 1) * tile_m, before[expert] + rows[expert])
    first_row = first_rows(counts, settings)[:, :-1].reshape(-1)
    tiles_of = (-(-counts.sum(axis=0, dtype=np.int64) // tile_m)).reshape(settings.num_ranks, -1)
    first_tile = (np.cumsum(tiles_of, axis=1) - tiles_of).reshape(-1)
    tile = first_tile[expert] + tile_in_expert
    return Runs(
        peer=(expert // num_local).astype(np.int32),
        first_row=(first_row[expert] + begin).astype(np.int32),
        source_start=(source_start[expert] + begin - before[expert]).astype(np.int32),
        num_rows=(end - begin).astype(np.int32),
        tile=tile.astype(np.int32),
        expert=expert.astype(np.int32),
        deadline=_deadlines(tile, tile_in_expert, settings),
    )


def _deadlines(
    tile: NDArray[np.int64], tile_in_expert: NDArray[np.int64], settings: PlanSettings
) -> NDArray[np.int64]:
    """Hand-out position of the first output tile that reads a row of M tile `tile`.

    The M tiles of a raster group open with the N tiles of the first chunk each, so tile m of a
    group that begins at M tile g is first asked for at `g * num_n_tiles + (m - g) * chunk_tiles`.
    """
    group_start = tile - tile_in_expert % settings.raster_m
    lead = sum(settings.chunk_of_n_tile(n) == 0 for n in range(settings.num_n_tiles))
    deadline: NDArray[np.int64] = group_start * settings.num_n_tiles + (tile - group_start) * lead
    return deadline


def _readiness(layout: ReceiveLayout, settings: PlanSettings) -> Readiness:
    if settings.granularity is Granularity.expert:
        return Readiness(
            counter_of_tile=layout.tiles[:, 0].copy(),
            expected=layout.expert_rows.astype(np.int64),
        )
    return Readiness(
        counter_of_tile=np.arange(layout.num_tiles, dtype=np.int32),
        expected=layout.tiles[:, 2].astype(np.int64),
    )


def plan_returns(
    layout: ReceiveLayout,
    row_rank: NDArray[np.int32],  # (extent,) source rank of each receive row; gaps are not read
    row_token: NDArray[np.int32],  # (extent,) its token there
    settings: PlanSettings,
    *,
    epoch: int,
) -> Tickets:
    """Tickets that carry the rows of an expert rank home, in sending order.

    Rows of a tile come by (source rank, token), so the rows for one home are one run. Deadline =
    the first token of the run, since a home reduces its tokens in their order; `token` goes by
    the first token of each ticket instead.
    """
    tile_of, rows = layout.held_rows()
    peer, token = row_rank[rows].astype(np.int64), row_token[rows].astype(np.int64)
    starts = np.flatnonzero(
        np.r_[True, (np.diff(tile_of) != 0) | (np.diff(peer) != 0)] if len(rows) else []
    )
    num_rows = np.diff(np.r_[starts, len(rows)])
    runs = Runs(
        peer=peer[starts].astype(np.int32),
        first_row=rows[starts].astype(np.int32),
        source_start=rows[starts].astype(np.int32),
        num_rows=num_rows.astype(np.int32),
        tile=tile_of[starts].astype(np.int32),
        expert=layout.rank * settings.num_experts_per_rank + layout.tiles[tile_of[starts], 0],
        deadline=token[starts],
    )
    tickets = cut_tickets(runs)
    return order_tickets(
        tickets,
        row_token[tickets.first_row].astype(np.int64),
        rank=layout.rank,
        epoch=epoch,
        settings=settings,
    )


def homeward_plan(plan: RankPlan, settings: PlanSettings) -> RankPlan:
    """The plan as the GEMM sees it whose rows go home: with the hand-out of the second of two."""
    if settings.second_gemm is None:
        return plan
    return replace(plan, handout=make_handout(plan.layout, settings.homeward))


def plan_home(
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk) of this rank
    settings: PlanSettings,
) -> HomePlan:
    """Thresholds of the push -> reduce edge of one rank."""
    num_chunks = settings.homeward.num_chunks
    counts = count_rows(topk_idx, settings.num_experts).reshape(settings.num_ranks, -1)
    return HomePlan(
        token_expected=(topk_idx >= 0).sum(axis=1, dtype=np.int64) * num_chunks,
        rank_expected=counts.sum(axis=1, dtype=np.int64) * num_chunks,
        by_rank=settings.home_granularity is HomeGranularity.rank,
    )
