"""Draw distinct experts for every token so that each expert gets exactly the tokens it is due.

Knows nothing of where the shares come from, of ranks or of gate weights.

Totals are the shares of all slots by largest remainder, in whole numbers. An expert takes a token
at most once: one whose share exceeds the number of tokens gets every token, and what is left goes
to the others in proportion. Experts are then dealt out in turn, each to as many tokens in a row as
it is due, around and around (McNaughton's rule): no token meets an expert twice, and all end with
num_topk. Such tokens are too regular, neighbours nearly equal, so tokens meet in random pairs, put
together what they do not share and deal it out anew between them (the curveball trade, which keeps
both totals and distinctness). Only `random()` of the generator and whole numbers are used, so the
draw is the same on every machine.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["draw_by_quota", "quotas"]

# A key is a whole number below this with an id in the bits beneath: 31 + 20 bits of 63.
_KEYS = 2**31
_ID_BITS = 20


def quotas(
    shares: NDArray[np.int64],  # (num_experts,), 0 or more; at least num_topk above 0
    *,
    num_tokens: int,
    num_topk: int,
) -> NDArray[np.int64]:  # (num_experts,), sum num_tokens x num_topk, none above num_tokens
    """Tokens each expert is due."""
    assert np.count_nonzero(shares) >= num_topk, f"{num_topk} distinct of {shares}"
    # Python's numbers: the products exceed 64 bits.
    weights = dict(enumerate(shares.tolist()))
    left, due = num_tokens * num_topk, {}
    while True:
        whole = sum(weights.values())
        full = [e for e, weight in weights.items() if left * weight >= num_tokens * whole]
        if not full or not left:
            break
        for expert in full:
            due[expert] = num_tokens
            del weights[expert]
        left -= num_tokens * len(full)
    if left:
        due.update({expert: left * weight // whole for expert, weight in weights.items()})
        missing = num_tokens * num_topk - sum(due.values())
        # Largest remainder first, then the lower number.
        by_remainder = sorted(weights, key=lambda e: (-(left * weights[e] % whole), e))
        for expert in by_remainder[:missing]:
            due[expert] += 1
    return np.array([due.get(expert, 0) for expert in range(len(shares))], dtype=np.int64)


def draw_by_quota(
    rng: np.random.Generator,
    due: NDArray[np.int64],  # (num_experts,), as `quotas` gives it
    *,
    num_tokens: int,
    num_topk: int,
) -> NDArray[np.int64]:  # (num_tokens, num_topk), ids distinct in a row
    """Tokens in random order, whose experts come `due` often."""
    assert due.sum() == num_tokens * num_topk, f"{due.sum()} slots of {num_tokens} x {num_topk}"
    assert len(due) <= 1 << _ID_BITS, f"{len(due)} experts"
    order = np.argsort(rng.random(len(due)), kind="stable")
    turns = np.repeat(order, due[order]).reshape(num_topk, num_tokens)
    ids = turns.T[np.argsort(rng.random(num_tokens), kind="stable")]
    # After n trades a token is a blend of 2 ** n, and the turns make len(due) + num_topk kinds of
    # token at most. (256 experts: from 8 trades on, how often pairs meet differs from what 40
    # trades give by no more than two seeds differ.)
    num_trades = 1 + (len(due) + num_topk).bit_length() if num_tokens > 1 else 0
    for _ in range(num_trades):
        order = np.argsort(rng.random(num_tokens), kind="stable")
        half = num_tokens // 2
        ids[order[: 2 * half]] = _trade(rng, ids[order[:half]], ids[order[half : 2 * half]])
    slots = np.argsort(rng.random(ids.shape), axis=1, kind="stable")
    return np.take_along_axis(ids, slots, axis=1)


def _trade(
    rng: np.random.Generator,
    first: NDArray[np.int64],  # (num_pairs, num_topk)
    second: NDArray[np.int64],  # (num_pairs, num_topk)
) -> NDArray[np.int64]:  # (2 x num_pairs, num_topk): the first of each pair, then the second
    """Deal what two tokens do not share out between them; both keep what they share."""
    num_topk = first.shape[1]
    pooled = np.sort(np.concatenate([first, second], axis=1), axis=1)
    keys = 1 + (rng.random(pooled.shape) * (_KEYS - 2)).astype(np.int64)
    shared = pooled[:, 1:] == pooled[:, :-1]
    # One copy goes to each of the two: the lowest key to the one, the highest to the other.
    keys[:, :-1][shared] = 0
    keys[:, 1:][shared] = _KEYS - 1
    dealt = np.sort(keys << _ID_BITS | pooled, axis=1) & ((1 << _ID_BITS) - 1)
    return np.concatenate([dealt[:, :num_topk], dealt[:, num_topk:]])
