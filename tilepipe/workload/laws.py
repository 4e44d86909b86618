"""The laws by which tokens choose distinct experts, one small function per law.

Knows nothing of gate weights, token counts per rank, traces or configuration files.

Draws are the same on every machine and NumPy version: of NumPy's generator only `random()` is used
(53 bits of PCG64's raw stream), popularity is rounded to integers, and choosing is integer
arithmetic. Gumbel keys were the alternative: they need one float64 logarithm per (token, expert),
whose last bit differs between machines, and cost ten times as much as `choose`, which needs one
number per (token, slot). (2 cores, 2026-11: 8 ranks x 16 384 tokens x topk 8 of 256: 0.1 s.)
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Group",
    "all_local",
    "all_remote",
    "choose",
    "hot_expert",
    "hot_rank",
    "lognormal_shares",
    "masked",
    "uniform_shares",
    "zipf_shares",
]

# Popularity is a whole number of 2**-40 of all draws: coarse enough to hide the last bit of exp and
# pow, fine enough that the least popular expert can still be chosen.
_SHARES_IN_ALL = 2**40


@dataclass(frozen=True, kw_only=True)
class Group:
    """The expert-parallel group; to a law by rank expert e is on e // num_experts_per_rank."""

    num_ranks: int
    num_experts: int
    num_topk: int

    @property
    def num_experts_per_rank(self) -> int:
        assert self.num_experts % self.num_ranks == 0, f"{self.num_experts} on {self.num_ranks}"
        return self.num_experts // self.num_ranks


def uniform_shares(num_experts: int) -> NDArray[np.int64]:
    """Every expert equally likely."""
    return np.ones(num_experts, dtype=np.int64)


def zipf_shares(
    rng: np.random.Generator, num_experts: int, *, exponent: float
) -> NDArray[np.int64]:
    """Popularity place ** -exponent; which expert has which place is drawn."""
    by_place = _whole_shares([place**-exponent for place in range(1, num_experts + 1)])
    shares = np.empty_like(by_place)
    shares[np.argsort(rng.random(num_experts), kind="stable")] = by_place
    return shares


def lognormal_shares(
    rng: np.random.Generator, num_experts: int, *, sigma: float
) -> NDArray[np.int64]:
    """Popularity exp(sigma x normal), the normals by Box-Muller."""
    radius_draws, angle_draws = rng.random((2, num_experts)).tolist()
    return _whole_shares(
        [
            # 1 - draw lies in (0, 1], where the logarithm is finite.
            math.exp(sigma * math.sqrt(-2 * math.log(1 - radius)) * math.cos(math.tau * angle))
            for radius, angle in zip(radius_draws, angle_draws, strict=True)
        ]
    )


def _whole_shares(popularity: list[float]) -> NDArray[np.int64]:
    whole = math.fsum(popularity)
    return np.array(
        [max(1, round(value / whole * _SHARES_IN_ALL)) for value in popularity], dtype=np.int64
    )


def choose(
    rng: np.random.Generator,
    shares: NDArray[np.int64],  # (num_choices,), all > 0: how likely each one is
    *,
    num_tokens: int,
    num_topk: int,
) -> NDArray[np.int64]:  # (num_tokens, num_topk), ids distinct in a row
    """Draw without replacement: each slot in proportion to the shares of those not taken yet.

    Choices lie side by side on a line, each as long as its share. A ticket is drawn on the line
    without the taken ones, then moved right by every taken one that starts at or before it.
    """
    assert num_topk <= len(shares), f"{num_topk} distinct ids of {len(shares)}"
    ends = np.cumsum(shares)
    starts = ends - shares
    draws = rng.random((num_topk, num_tokens))
    chosen = np.empty((num_topk, num_tokens), dtype=np.int64)
    taken = np.empty_like(chosen)  # the first slot_idx rows of chosen, ascending per token
    left = np.full(num_tokens, ends[-1] if len(ends) else 0, dtype=np.int64)
    for slot_idx in range(num_topk):
        # A draw is below 1 and left below 2**53, so that the product rounds below left.
        tickets = (draws[slot_idx] * left).astype(np.int64)
        for before in taken[:slot_idx]:
            tickets += np.where(starts[before] <= tickets, shares[before], 0)
        chosen[slot_idx] = np.searchsorted(ends, tickets, side="right")
        left -= shares[chosen[slot_idx]]
        taken[slot_idx] = chosen[slot_idx]
        taken[: slot_idx + 1].sort(axis=0)
    return chosen.T


def _choose_uniform(
    rng: np.random.Generator, num_choices: int, *, num_tokens: int, num_topk: int
) -> NDArray[np.int64]:
    shares = uniform_shares(num_choices)
    return choose(rng, shares, num_tokens=num_tokens, num_topk=num_topk)


def all_local(
    rng: np.random.Generator, group: Group, *, rank: int, num_tokens: int
) -> NDArray[np.int64]:  # (num_tokens, num_topk)
    """Uniform over the experts of the own rank."""
    num_local = group.num_experts_per_rank
    local = _choose_uniform(rng, num_local, num_tokens=num_tokens, num_topk=group.num_topk)
    return local + rank * num_local


def all_remote(
    rng: np.random.Generator, group: Group, *, rank: int, num_tokens: int
) -> NDArray[np.int64]:  # (num_tokens, num_topk)
    """Uniform over the experts of all other ranks."""
    num_remote = group.num_experts - group.num_experts_per_rank
    remote = _choose_uniform(rng, num_remote, num_tokens=num_tokens, num_topk=group.num_topk)
    return _skip_rank(remote, group, rank=rank)


def _skip_rank(ids: NDArray[np.int64], group: Group, *, rank: int) -> NDArray[np.int64]:
    """Number the experts outside `rank` as if it were not there; this undoes it."""
    num_local = group.num_experts_per_rank
    return ids + np.where(ids >= rank * num_local, num_local, 0)


def hot_expert(
    rng: np.random.Generator, group: Group, *, hot: int, share: float, num_tokens: int
) -> NDArray[np.int64]:  # (num_tokens, num_topk)
    """`share` of the tokens take the hot expert in one slot; other slots are uniform over the rest.

    With topk = number of experts every token takes every expert.
    """
    num_others = group.num_experts - 1
    if group.num_topk > num_others:
        return _choose_uniform(
            rng, group.num_experts, num_tokens=num_tokens, num_topk=group.num_topk
        )
    others = _choose_uniform(rng, num_others, num_tokens=num_tokens, num_topk=group.num_topk)
    ids = others + (others >= hot)
    is_hot = rng.random(num_tokens) < share
    slots = (rng.random(num_tokens) * group.num_topk).astype(np.int64)
    ids[is_hot, slots[is_hot]] = hot
    return ids


def hot_rank(
    rng: np.random.Generator, group: Group, *, hot: int, share: float, num_tokens: int
) -> NDArray[np.int64]:  # (num_tokens, num_topk)
    """Each slot aims at the hot rank's experts with chance `share`, else at the others.

    A slot that finds its side used up takes from the other one.
    """
    num_hot = group.num_experts_per_rank
    num_cold = group.num_experts - num_hot
    hot_ids = hot * num_hot + _choose_uniform(
        rng, num_hot, num_tokens=num_tokens, num_topk=min(group.num_topk, num_hot)
    )
    cold_ids = _skip_rank(
        _choose_uniform(
            rng, num_cold, num_tokens=num_tokens, num_topk=min(group.num_topk, num_cold)
        ),
        group,
        rank=hot,
    )
    aims_hot = rng.random((num_tokens, group.num_topk)) < share
    ids = np.empty((num_tokens, group.num_topk), dtype=np.int64)
    num_hot_taken = np.zeros(num_tokens, dtype=np.int64)
    for slot_idx in range(group.num_topk):
        num_cold_taken = slot_idx - num_hot_taken
        takes_hot = (aims_hot[:, slot_idx] & (num_hot_taken < num_hot)) | (
            num_cold_taken >= num_cold
        )
        tokens_hot, tokens_cold = np.flatnonzero(takes_hot), np.flatnonzero(~takes_hot)
        ids[tokens_hot, slot_idx] = hot_ids[tokens_hot, num_hot_taken[tokens_hot]]
        ids[tokens_cold, slot_idx] = cold_ids[tokens_cold, num_cold_taken[tokens_cold]]
        num_hot_taken += takes_hot
    return ids


def masked(
    rng: np.random.Generator, group: Group, *, share: float, num_tokens: int
) -> NDArray[np.int64]:  # (num_tokens, num_topk), -1 = dropped slot
    """Uniform, with exactly round(share x slots) of the rank's slots dropped."""
    ids = _choose_uniform(rng, group.num_experts, num_tokens=num_tokens, num_topk=group.num_topk)
    slots = np.argsort(rng.random(ids.size), kind="stable")
    dropped = slots[: math.floor(share * ids.size + 0.5)]
    ids[np.unravel_index(dropped, ids.shape)] = -1
    return ids
