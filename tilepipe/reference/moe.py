"""What dispatch, grouped GEMM, SwiGLU and combine mean, in NumPy, for all ranks at once.

Speed is not a goal; knows nothing of plans, tiles, slots of a buffer or bf16.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["combine", "combine_expert_rows", "dispatch", "grouped_gemm", "swiglu"]


def dispatch(
    x: Sequence[NDArray[np.generic]],  # per rank (num_tokens, hidden), any dtype
    topk_idx: Sequence[NDArray[np.int32]],  # per rank (num_tokens, num_topk), -1 = dropped slot
    *,
    num_experts: int,
) -> list[NDArray[np.generic]]:  # per expert (num_rows, hidden)
    """Rows of each expert, ordered by (source rank, source token).

    Raises ValueError when an id lies outside -1 .. num_experts - 1.
    """
    for ids in topk_idx:
        if ids.size and not -1 <= int(ids.min()) <= int(ids.max()) < num_experts:
            raise ValueError(
                f"topk_idx spans {ids.min()}..{ids.max()}, but num_experts={num_experts}: "
                f"allowed is -1..{num_experts - 1}"
            )
    return [
        np.concatenate(
            [rows[(ids == expert).any(axis=1)] for rows, ids in zip(x, topk_idx, strict=True)]
        )
        for expert in range(num_experts)
    ]


def grouped_gemm(
    rows: Sequence[NDArray[np.float32]],  # per expert (num_rows, K)
    weights: Sequence[NDArray[np.float32]],  # per expert (N, K)
) -> list[NDArray[np.float32]]:  # per expert (num_rows, N)
    """`rows[e] @ weights[e].T` in FP32."""
    return [a @ b.T for a, b in zip(rows, weights, strict=True)]


def swiglu(
    gate: NDArray[np.float32],  # (num_rows, N)
    up: NDArray[np.float32],  # the same
) -> NDArray[np.float32]:  # (num_rows, N)
    """`silu(gate) x up`, silu(x) being x / (1 + exp(-x))."""
    # exp of a number that is not above 0 never overflows.
    tail = np.exp(-np.abs(gate))
    sigmoid = np.where(gate >= 0, np.float32(1), tail) / (np.float32(1) + tail)
    return np.asarray(gate * sigmoid * up, np.float32)


def combine(
    rows: NDArray[np.float32],  # (num_tokens, num_topk, hidden): row of every slot, back home
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk), -1 = dropped slot
    topk_weights: NDArray[np.float32],  # (num_tokens, num_topk)
) -> NDArray[np.float32]:  # (num_tokens, hidden)
    """Weighted sum over the slots of each token, FP32, in slot order.

    A dropped slot is skipped by index: whatever its row holds, NaN included, has no effect. A token
    with no valid slot is zero.
    """
    total = np.zeros((rows.shape[0], rows.shape[2]), np.float32)
    for slot in range(rows.shape[1]):
        tokens = np.flatnonzero(topk_idx[:, slot] >= 0)
        total[tokens] += topk_weights[tokens, slot, None] * rows[tokens, slot]
    return total


def combine_expert_rows(
    rows: Sequence[NDArray[np.float32]],  # per expert (num_rows, hidden), in dispatch's order
    topk_idx: Sequence[NDArray[np.int32]],  # per rank (num_tokens, num_topk)
    topk_weights: Sequence[NDArray[np.float32]],  # per rank (num_tokens, num_topk)
) -> list[NDArray[np.float32]]:  # per rank (num_tokens, hidden)
    """Inverse of `dispatch` followed by `combine`: rows find their token by dispatch's order."""
    hidden = rows[0].shape[1]
    home = [np.zeros((*ids.shape, hidden), np.float32) for ids in topk_idx]
    for expert, expert_rows in enumerate(rows):
        done = 0
        for rank, ids in enumerate(topk_idx):
            token, slot = np.nonzero(ids == expert)
            home[rank][token, slot] = expert_rows[done : done + len(token)]
            done += len(token)
    return [combine(*parts) for parts in zip(home, topk_idx, topk_weights, strict=True)]
