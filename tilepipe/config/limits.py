"""What kernels can hold, so that a setting past it is refused before any rank starts.

Knows nothing of kernels; they take their limits from here.
"""

__all__ = [
    "COLUMN_BYTES",
    "MAX_COMBINE_WARPS",
    "MAX_LOOPBACK_RANKS",
    "MAX_NVSHMEM_RANKS",
    "MAX_TOPK",
    "RING_BYTES",
    "max_combine_warps",
]

MAX_LOOPBACK_RANKS = 8  # they share one GPU
MAX_NVSHMEM_RANKS = 32  # a lane of a warp watches each rank
MAX_TOPK = 32  # a lane of a warp holds each slot of a token
# Of 1 to 20 warps combine spills no register; of 24 and 32 it does (sm_90a, 2026-11).
MAX_COMBINE_WARPS = 20
# Shared memory of a CTA for the rings in which tokens are reduced, and one column of one slot.
RING_BYTES = 192 * 1024
COLUMN_BYTES = 32 * 16


def max_combine_warps(num_topk: int) -> int:
    """Warps of a CTA that registers and shared memory suffice for: a ring of one stage each."""
    return min(MAX_COMBINE_WARPS, RING_BYTES // (num_topk * COLUMN_BYTES))
