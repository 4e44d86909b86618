"""Which experts each token of each rank goes to, and with what gate weight.

Knows nothing of where rows lie, in what order they travel or what moves them.
"""

import math
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from tilepipe.config import routings
from tilepipe.workload import laws, quota
from tilepipe.workload.trace import Selection, Trace, deal, place_of_row, read_counts, read_trace

__all__ = ["Imbalance", "Routing", "draw", "imbalance", "rows_of_experts"]

_DrawnLaw = (
    routings.UniformRouting
    | routings.ZipfRouting
    | routings.LognormalRouting
    | routings.HotExpertRouting
    | routings.HotRankRouting
    | routings.AllLocalRouting
    | routings.AllRemoteRouting
    | routings.MaskedRouting
    | routings.RaggedRouting
)

# Streams of one seed; ids and weights have one each per rank, the others one for all ranks.
_POPULARITY, _IDS, _WEIGHTS, _QUOTA = 0, 1, 2, 3


@dataclass(frozen=True, eq=False)
class Routing:
    """The choices of all tokens, one array per rank; ranks may hold different token counts.

    Ids of one row are distinct, but for -1 = dropped slot, whose weight is 0. Weights of a drawn
    row sum to 1 over its valid slots; recorded weights stay as recorded. Where a rank is asked for,
    ids are physical experts (see `placement`): id e lives on rank e // (num_experts // num_ranks).
    """

    topk_idx: tuple[NDArray[np.int32], ...]  # per rank (num_tokens, num_topk)
    topk_weights: tuple[NDArray[np.float32], ...]  # per rank (num_tokens, num_topk)
    num_experts: int


@dataclass(frozen=True, kw_only=True)
class Imbalance:
    """Largest over mean number of rows; None where there are no rows."""

    expert_max_over_mean: float | None
    rank_max_over_mean: float | None


def draw(
    law: routings.Routing,
    *,
    num_ranks: int,
    num_tokens: int | None,  # per rank; None only with a trace: as many as it holds
    num_experts: int,
    num_topk: int,
) -> Routing:
    """The routing that a law describes; equal arguments give equal arrays on every machine."""
    assert num_topk <= num_experts, f"topk {num_topk} of {num_experts} experts"
    group = laws.Group(num_ranks=num_ranks, num_experts=num_experts, num_topk=num_topk)
    if isinstance(law, routings.TraceRouting):
        return _from_trace(law, group, num_tokens=num_tokens)
    assert num_tokens is not None, "only a trace knows its number of tokens"
    if isinstance(law, routings.CountsRouting):
        return _from_counts(law, group, num_tokens=num_tokens)
    shares = _popularity(law, num_experts)
    topk_idx, topk_weights = [], []
    for rank in range(num_ranks):
        choices = _choices(law, shares, group, rank=rank, num_tokens=num_tokens)
        ids = np.ascontiguousarray(choices, dtype=np.int32)
        topk_idx.append(ids)
        topk_weights.append(_drawn_weights(ids, _stream(law.seed, _WEIGHTS, rank)))
    return Routing(tuple(topk_idx), tuple(topk_weights), num_experts)


def imbalance(routing: Routing, num_ranks: int) -> Imbalance:
    """How much more than the mean the fullest expert, and the fullest receiving rank, gets."""
    rows = rows_of_experts(routing)
    return Imbalance(
        expert_max_over_mean=_max_over_mean(rows),
        rank_max_over_mean=_max_over_mean(rows.reshape(num_ranks, -1).sum(axis=1)),
    )


def rows_of_experts(routing: Routing) -> NDArray[np.int64]:  # (num_experts,)
    """Rows that all ranks together send to each expert of the routing's own numbering."""
    rows = np.zeros(routing.num_experts, np.int64)
    for ids in routing.topk_idx:
        rows += np.bincount(ids[ids >= 0], minlength=routing.num_experts)
    return rows


def _max_over_mean(rows: NDArray[np.int64]) -> float | None:
    total = int(rows.sum())
    return int(rows.max()) * len(rows) / total if total else None


def _stream(seed: int, purpose: int, rank: int) -> np.random.Generator:
    """A stream of its own for each purpose and rank, so that no law shifts another's numbers."""
    return np.random.Generator(
        np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(purpose, rank)))
    )


def _popularity(law: _DrawnLaw, num_experts: int) -> NDArray[np.int64]:  # (num_experts,) shares
    rng = _stream(law.seed, _POPULARITY, 0)
    match law:
        case routings.ZipfRouting():
            return laws.zipf_shares(rng, num_experts, exponent=law.exponent)
        case routings.LognormalRouting():
            return laws.lognormal_shares(rng, num_experts, sigma=law.sigma)
        case _:
            return laws.uniform_shares(num_experts)


def _choices(
    law: _DrawnLaw,
    shares: NDArray[np.int64],  # (num_experts,)
    group: laws.Group,
    *,
    rank: int,
    num_tokens: int,
) -> NDArray[np.int64]:  # (num_tokens of this rank, num_topk)
    rng = _stream(law.seed, _IDS, rank)
    match law:
        case routings.UniformRouting() | routings.ZipfRouting() | routings.LognormalRouting():
            return laws.choose(rng, shares, num_tokens=num_tokens, num_topk=group.num_topk)
        case routings.RaggedRouting():
            num_tokens = _ragged_tokens(law.min_share, group, rank=rank, num_tokens=num_tokens)
            return laws.choose(rng, shares, num_tokens=num_tokens, num_topk=group.num_topk)
        case routings.HotExpertRouting():
            return laws.hot_expert(
                rng, group, hot=law.hot_expert, share=law.hot_share, num_tokens=num_tokens
            )
        case routings.HotRankRouting():
            return laws.hot_rank(
                rng, group, hot=law.hot_rank, share=law.hot_share, num_tokens=num_tokens
            )
        case routings.AllLocalRouting():
            return laws.all_local(rng, group, rank=rank, num_tokens=num_tokens)
        case routings.AllRemoteRouting():
            return laws.all_remote(rng, group, rank=rank, num_tokens=num_tokens)
        case routings.MaskedRouting():
            return laws.masked(rng, group, share=law.masked_share, num_tokens=num_tokens)
    assert_never(law)


def _ragged_tokens(min_share: float, group: laws.Group, *, rank: int, num_tokens: int) -> int:
    """Evenly spaced from min_share x num_tokens on the first rank to num_tokens on the last."""
    place = rank / (group.num_ranks - 1) if group.num_ranks > 1 else 1.0
    return math.floor(num_tokens * (min_share + (1 - min_share) * place) + 0.5)


def _drawn_weights(
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk)
    rng: np.random.Generator,
) -> NDArray[np.float32]:  # (num_tokens, num_topk)
    """Whole numbers 1..65536 over their sum: one division, so that no machine rounds otherwise."""
    parts = np.where(topk_idx >= 0, np.floor(rng.random(topk_idx.shape) * 65536) + 1, 0.0)
    whole = np.maximum(parts.sum(axis=1, keepdims=True), 1)  # 1: a row without valid slots
    return np.asarray(parts / whole, dtype=np.float32)


def _from_trace(
    law: routings.TraceRouting, group: laws.Group, *, num_tokens: int | None
) -> Routing:
    wanted = _selection(law, group, num_tokens)
    trace = read_trace(law.path, wanted)
    recorded_topk = trace.topk_idx.shape[1]
    if recorded_topk != group.num_topk:
        raise ValueError(
            f"workload.num_topk={group.num_topk}: {law.path} was recorded with topk "
            f"{recorded_topk}; type workload.num_topk={recorded_topk}"
        )
    _refuse_unknown_experts(law, wanted, trace, group)
    blocks = deal(trace, group.num_ranks, num_tokens)
    return Routing(
        tuple(block.topk_idx for block in blocks),
        tuple(_recorded_weights(block) for block in blocks),
        group.num_experts,
    )


def _selection(law: routings.TraceRouting, group: laws.Group, num_tokens: int | None) -> Selection:
    """What the law names, and no more than the ranks will take: reading stops there."""
    caps = [law.max_tokens] if law.max_tokens is not None else []
    if num_tokens is not None:
        caps.append(max(1, group.num_ranks * num_tokens))  # 1: topk is checked even so
    return Selection(
        layer=law.layer,
        request=law.request,
        first_token=law.first_token,
        max_tokens=min(caps, default=None),
        num_layers=law.num_layers,
        num_topk=group.num_topk,
    )


def _refuse_unknown_experts(
    law: routings.TraceRouting, wanted: Selection, trace: Trace, group: laws.Group
) -> None:
    unknown = trace.topk_idx >= group.num_experts
    if not unknown.any():
        return
    row = int(np.argmax(unknown.any(axis=1)))
    # The next count that holds every id that was read and divides by the ranks.
    needed = -(-(int(trace.topk_idx.max()) + 1) // group.num_ranks) * group.num_ranks
    raise ValueError(
        f"workload.num_experts={group.num_experts}: {place_of_row(law.path, wanted, row)} of "
        f"{law.path} chooses expert {trace.topk_idx[row].max()}; type workload.num_experts={needed}"
    )


def _from_counts(law: routings.CountsRouting, group: laws.Group, *, num_tokens: int) -> Routing:
    """All ranks' tokens at once: totals per expert are those of the group."""
    counts = read_counts(law.path, law.layer)
    _refuse_bad_counts(law, counts, group)
    shares = np.zeros(group.num_experts, np.int64)
    shares[: len(counts)] = counts[: group.num_experts]
    sizes = {"num_tokens": group.num_ranks * num_tokens, "num_topk": group.num_topk}
    rng = _stream(law.seed, _QUOTA, 0)
    ids = quota.draw_by_quota(rng, quota.quotas(shares, **sizes), **sizes).astype(np.int32)
    topk_idx = np.split(ids, group.num_ranks)
    return Routing(
        tuple(topk_idx),
        tuple(
            _drawn_weights(rows, _stream(law.seed, _WEIGHTS, rank))
            for rank, rows in enumerate(topk_idx)
        ),
        group.num_experts,
    )


def _refuse_bad_counts(
    law: routings.CountsRouting, counts: NDArray[np.int64], group: laws.Group
) -> None:
    chosen = np.flatnonzero(counts)
    if not len(chosen):
        raise ValueError(
            f"routing.path={law.path}: no token is counted in it, or none in routing.layer="
            f"{law.layer}; `python -m tilepipe.list routing {law.path}` says what it holds"
        )
    if chosen[-1] >= group.num_experts:
        needed = -(-(int(chosen[-1]) + 1) // group.num_ranks) * group.num_ranks
        raise ValueError(
            f"workload.num_experts={group.num_experts}: {law.path} counts tokens of expert "
            f"{chosen[-1]}; type workload.num_experts={needed}"
        )
    if len(chosen) < group.num_topk:
        raise ValueError(
            f"workload.num_topk={group.num_topk}: {law.path} counts tokens of only {len(chosen)} "
            f"experts; type at most workload.num_topk={len(chosen)}"
        )


def _recorded_weights(block: Trace) -> NDArray[np.float32]:  # (num_tokens, num_topk)
    """As recorded; equal over the valid slots where nothing was recorded."""
    valid = block.topk_idx >= 0
    if block.topk_weights is not None:
        return np.where(valid, block.topk_weights, np.float32(0))
    num_valid = np.maximum(valid.sum(axis=1, keepdims=True), 1)
    return np.asarray(valid / num_valid, dtype=np.float32)
