"""The address table and the block of words by which kernels find everything.

Knows nothing of torch, kernels or of who fills the table; see Slot and Word for what lies where.

Row r of the table holds addresses of rank r, 8 bytes each. Kernels get one pointer, to the table,
and constants; whatever differs from launch to launch lies behind an address, so a captured CUDA
graph replays with other routing.
"""

from enum import IntEnum, auto, unique

__all__ = [
    "NUM_SLOTS",
    "NUM_WORDS",
    "OWN_SLOTS",
    "PEER_SLOTS",
    "RECORD_FIELDS",
    "Role",
    "Slot",
    "Stamp",
    "Word",
    "near_table_bytes",
]


class _FromZero(IntEnum):
    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[int]) -> int:
        return count


class Slot(_FromZero):
    """Columns of the table. Peers store into the first ones; the others are a rank's own."""

    recv_x = auto()  # (rows, hidden) bf16: rows that arrive
    row_home = auto()  # (rows,) int64: source rank, token, slot of each
    row_flag = auto()  # (rows,) int32: epoch in which the row came; granularity token
    ready = auto()  # (counters,) int32: rows that have come, by M tile or local expert
    home_y = auto()  # (tokens x topk, hidden) bf16: rows back home
    # (parts x tokens,) int32: rows x chunks that have come home; of whole tokens the first part's
    token_ready = auto()
    rank_ready = auto()  # (num_ranks,) int32: the same by source rank
    mailbox = auto()  # (2, num_ranks, num_experts + 1) int64: epoch << 32 | count, fingerprint last
    gate_ready = auto()  # (num_ranks,) int32: epoch that each rank is ready for
    abort = auto()  # (1,) int32: nonzero once a rank has given up
    # Where rows and flags go that nobody looks at; empty but for operations that overlap.
    spare_x = auto()  # as recv_x
    spare_row_home = auto()  # as row_home
    spare_flag = auto()  # as row_flag
    spare_ready = auto()  # as ready
    spare_y = auto()  # as home_y
    spare_token_ready = auto()  # as token_ready
    spare_rank_ready = auto()  # as rank_ready
    links = auto()  # (2,) int64: when egress and ingress of the rank are free again, ns
    # From here on private.
    words = auto()  # (NUM_WORDS,) int32, see Word
    x = auto()  # (tokens, hidden) bf16: rows to send
    sends = auto()  # (sent rows, 4) int32: token, peer << 16 | slot, row there, counter there
    tiles = auto()  # (tiles, 2) int32: first row, valid rows
    ready_expected = auto()  # (counters,) int32
    rows_to = auto()  # (num_experts,) int32: rows that this rank sends to each expert
    counts = auto()  # (num_ranks, num_experts) int32: everybody's, once exchanged
    y = auto()  # (rows, hidden) bf16: rows to bring home, in receive order
    returns = auto()  # (held rows,) int32: receive row, in sending order
    out = auto()  # (tokens, hidden) bf16: tokens that combine has reduced
    reduced = auto()  # the same, of the reduction alone
    topk_idx = auto()  # (tokens, topk) int32
    topk_weights = auto()  # (tokens, topk) float32
    token_expected = auto()  # (tokens,) int32
    rank_expected = auto()  # (num_ranks,) int32
    stamps = auto()  # (len(Stamp),) int64: moments of the device's clock, see Stamp
    scratch = auto()  # int32: what the plan kernels keep, see PlanConstants
    plan_rounds = auto()  # (CTAs,) int64: rounds that each CTA of the plan kernels has ended
    gemm_tiles = auto()  # (tiles, 8) int32: cluster tiles in hand-out order
    second_tiles = auto()  # the same of a layer's second GEMM
    push_units = auto()  # (units, 4) int32: M tile, chunk, first tile to wait for, how many
    # (tokens,) int32: tokens by when their last rows are due home from GEMMs
    reduce_order = auto()
    tile_stored = auto()  # (tiles x N tiles,) int32: rows stored by (M tile, chunk along N)
    record = auto()  # (len(RECORD_FIELDS),) int64 in pinned host memory: why this rank gave up


NUM_SLOTS = len(Slot)
PEER_SLOTS = int(Slot.words)  # columns into which peers store
OWN_SLOTS = NUM_SLOTS - PEER_SLOTS


def near_table_bytes(num_ranks: int) -> int:
    """What a rank needs of the table: its own columns, and those of all ranks that peers use."""
    return (OWN_SLOTS + num_ranks * PEER_SLOTS) * 8


@unique
class Word(IntEnum):
    """Words of a rank's block. Each queue has a line of 128 bytes to itself."""

    epoch = 0  # number of the launch; the gate raises it
    fingerprint = 1  # of plan settings and layout, equal on all ranks
    num_sends = 2
    num_tiles = 3
    num_counters = 4  # readiness counters in use
    num_returns = 5
    num_tokens = 6
    max_counters = 7  # room for readiness counters
    max_tokens = 8  # room for token counters of a part
    mismatch = 9  # 1 + rank with another fingerprint; 0: none
    bad_expert = 10  # 1 + place in topk_idx of a number that is no expert; 0: none
    overflow_rank = 11  # rank that would receive most rows
    overflow_rows = 12  # as many, where they exceed the room for rows; 0: all fit
    num_gemm_tiles = 13  # cluster tiles of the grouped GEMM
    num_first = 14  # rows at the front of the sends, which the first tiles of all GEMMs need
    num_rest = 15  # the others
    max_stored = 17  # room for counters of stored tiles; 0: none are in use
    num_units = 18  # pieces of tiles that go home one by one
    max_parts = 19  # room for token counters, of all parts
    num_first_tiles = 16  # M tiles that the first tiles of this rank's GEMM are of
    num_second_tiles = 20  # cluster tiles of a layer's second GEMM
    send_queue = 32  # rows claimed so far
    push_queue = 64
    reduce_queue = 96  # units claimed so far
    gemm_queue = 128  # output tiles claimed so far; the last claim of a launch puts it back to 0
    first_queue = 160  # of those at the front, rows claimed so far


NUM_WORDS = 192


class Stamp(_FromZero):
    """Moments that kernels leave, nanoseconds of the device's clock."""

    plan_entry = auto()  # the rank's plan kernel has begun
    plan_counted = auto()  # its leader has counted its share of slots
    plan_opened = auto()  # the leader has passed the gate
    plan_laid_out = auto()  # and knows where every row lands
    plan_ordered = auto()  # all know where every ticket begins
    plan_exit = auto()  # the last CTA has written its part
    returns_entry = auto()  # the same of the way back
    returns_opened = auto()
    returns_laid_out = auto()
    returns_exit = auto()


# Fields of the record of a wait that reached its limit.
RECORD_FIELDS = ("raised", "role", "item", "expert", "epoch", "expected", "seen", "time_ns")


@unique
class Role(IntEnum):
    """Who waited."""

    gate = 1  # for another rank's words; item: that rank
    receive = 2  # for rows; item: M tile, or local expert with granularity expert
    receive_row = 5  # for one row, granularity token; item: receive row, expected: epoch
    reduce = 3  # for a token's rows; item: token
    reduce_rank = 4  # for a rank's rows; item: rank
    gemm_receive = 6  # the GEMM, for rows; item: M tile, or local expert
    gemm_receive_row = 7  # the GEMM, for one row, granularity token; item: receive row
    push_stored = 9  # to push, for stored tiles; item: M tile, expected: rows x N tiles
    gemm_pipeline = 8  # warps of a GEMM CTA for each other; item: which barrier; expected: phase
    plan = 10  # for another CTA of the rank's plan kernel; item: that CTA, expected: round
