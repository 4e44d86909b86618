"""What kernels can hold, so that a setting past it is refused before any rank starts.

Knows nothing of kernels; they take their limits from here.
"""

from tilepipe.config.choices import Dtype

__all__ = [
    "COLUMN_BYTES",
    "ELEM_BYTES",
    "FUSED_WARPS",
    "MAX_COMBINE_WARPS",
    "MAX_LOOPBACK_RANKS",
    "MAX_NVSHMEM_RANKS",
    "MAX_PLANNED_EXPERTS",
    "MAX_TOPK",
    "PLANNED_ORDERS",
    "RING_BYTES",
    "SHARED_BYTES",
    "STAGE_BYTES",
    "WARPS_OF_SM",
    "max_combine_warps",
    "max_flag_batch",
    "num_pieces",
    "piece_bytes",
]

ELEM_BYTES = {Dtype.bf16: 2}
MAX_LOOPBACK_RANKS = 8  # they share one GPU
MAX_NVSHMEM_RANKS = 32  # a lane of a warp watches each rank
FUSED_WARPS = 12  # of every CTA of a fused launch, whatever its role: three warpgroups
MAX_TOPK = 32  # a lane of a warp holds each slot of a token
# The plan kernel counts experts warp by warp: 168 bytes of shared memory an expert.
MAX_PLANNED_EXPERTS = 1024
# Any other it would send by expert.
PLANNED_ORDERS = ("edf", "edf_list", "expert", "token", "random")
# Of 1 to 20 warps combine spills no register; of 24 and 32 it does (sm_90a, 2026-11).
MAX_COMBINE_WARPS = 20
# Shared memory of a CTA for the rings in which tokens are reduced, and one column of one slot.
RING_BYTES = 192 * 1024
COLUMN_BYTES = 32 * 16


def max_combine_warps(num_topk: int) -> int:
    """Warps of a CTA that registers and shared memory suffice for: a ring of one stage each."""
    return min(MAX_COMBINE_WARPS, RING_BYTES // (num_topk * COLUMN_BYTES))


# Of a CTA that has an SM to itself (sm_90: 228 KiB less 1 for the system).
SHARED_BYTES = 227 * 1024
WARPS_OF_SM = 64  # sm_90: 2048 threads
# A stage's room in kernels built without a config: a row of hidden 7168 in bf16. Wider rows are
# split, since the rings of all warps share an SM.
STAGE_BYTES = 14_336


def num_pieces(row_bytes: int, stage_bytes: int) -> int:
    """Pieces in which a bulk copy takes a row, each of which fits a stage."""
    return max(1, -(-row_bytes // stage_bytes))


def piece_bytes(row_bytes: int, stage_bytes: int) -> int:
    """Bytes of a piece, a multiple of 16; the last one may be shorter."""
    vectors = -(-row_bytes // 16)
    return max(1, -(-vectors // num_pieces(row_bytes, stage_bytes))) * 16


def max_flag_batch(num_stages: int) -> int:
    """Rows that a warp which copies in bulk can owe flags for: one a lane.

    Between the oldest row whose flag is owed and the last one known lie the rows in the ring, the
    batch, and three claims of four rows.
    """
    return 32 - 3 * 4 - (num_stages + 1)
