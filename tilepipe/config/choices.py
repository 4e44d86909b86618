"""Every choice a user may make by name, and what each one guarantees.

Knows nothing of Hydra, numpy or the code that acts on a choice.
"""

from enum import Enum

__all__ = [
    "L2",
    "Baseline",
    "Copy",
    "Dtype",
    "Fabric",
    "Granularity",
    "HomeGranularity",
    "Law",
    "Layout",
    "Operation",
    "Order",
    "PlacementRule",
    "Planner",
    "Push",
    "Regime",
    "Replica",
    "Resume",
    "Roles",
    "StoreMode",
    "Walk",
]


class Operation(Enum):
    """What a point runs and measures."""

    dispatch = "dispatch"  # every valid (token, slot) row reaches the rank that owns its expert
    combine = "combine"  # every row returns home; a token is the weighted sum of its valid slots
    grouped_gemm = "grouped_gemm"  # received rows times their expert's first weight, no sending
    dispatch_gemm = "dispatch_gemm"  # dispatch and the first GEMM overlapped, tile by tile
    gemm_combine = "gemm_combine"  # the second GEMM and combine overlapped, tile by tile
    moe_layer = "moe_layer"  # dispatch, first GEMM, SwiGLU, second GEMM, combine: both halves


class Fabric(Enum):
    """Who the peers are and how one rank stores into another."""

    host = "host"  # one process per rank on the CPU, POSIX shared memory; needs no GPU
    loopback = "loopback"  # all ranks share one GPU; proves neither link bandwidth nor system scope
    nvshmem = "nvshmem"  # one process per GPU, stores cross NVLink


class Copy(Enum):
    """How a communication CTA moves one token row to a peer."""

    simt = "simt"  # 16-byte vector loads and remote stores by every thread
    tma = "tma"  # bulk async copies through shared memory, issued by one thread


class Order(Enum):
    """In which order a rank takes up its sends; each is a permutation of the same tickets."""

    edf = "edf"  # per destination by first use there; all destinations served at once from rank+1
    edf_list = "edf_list"  # one strict list by first use over all destinations
    expert = "expert"  # by expert number
    token = "token"  # by token number
    random = "random"  # by a fixed 32-bit hash of (seed, epoch, run): the same on every machine


class Granularity(Enum):
    """What one semaphore between communication and GEMM stands for."""

    tile = "tile"  # consumer may start after all rows of one M tile arrived
    token = "token"  # consumer may use each row as soon as that row arrived
    expert = "expert"  # consumer may start after all rows of the expert arrived


class HomeGranularity(Enum):
    """When the reduction at home may add a token up."""

    token = "token"  # once all valid rows of this token are home
    rank = "rank"  # once every source rank has pushed all the rows it owes


class Layout(Enum):
    """Where an expert's rows start in the receive buffer."""

    padded = "padded"  # at a multiple of tile_m: no tile holds rows of two experts
    packed = "packed"  # right after the expert before: no gaps


class Planner(Enum):
    """Who makes the Plan of a launch; both make the same, bit for bit."""

    numpy = "numpy"  # the host; for a GPU before the window, and uploaded
    device = "device"  # a kernel behind the launch gate, inside the window


class StoreMode(Enum):
    """How an output tile of a GEMM gets to memory."""

    tma = "tma"  # staged in shared memory, stored by TMA in blocks of 64 rows x 64 columns
    direct = "direct"  # from registers, 16 bytes a lane, each with its own bounds check


class Roles(Enum):
    """Whether a CTA of a fused launch does one thing or two, in turn or at once."""

    fixed = "fixed"  # a CTA communicates, or multiplies, to the end
    switch = "switch"  # all CTAs send the first rows; who has no more to do joins the others
    beside = "beside"  # all CTAs multiply; a warp of each that the GEMM leaves idle communicates


class Push(Enum):
    """Who brings home what GEMM -> combine has multiplied."""

    ctas = "ctas"  # communication CTAs read stored rows and store them at home
    epilogue = "epilogue"  # the warp that stores a tile stores it at home; no row is kept here


class Walk(Enum):
    """In which order the GEMM of GEMM -> combine takes its output tiles."""

    expert = "expert"  # expert after expert, all columns: a row is complete early, tokens late
    chunk = "chunk"  # chunk of columns after chunk, all experts: a chunk of every token is early


class Dtype(Enum):
    """Element type of token rows and weights; sums are always float32."""

    bf16 = "bf16"  # two bytes an element


class Law(Enum):
    """How tokens choose their experts; the experts of one token are always distinct."""

    uniform = "uniform"  # every expert equally likely
    zipf = "zipf"  # expert popularity falls as 1 / place ** exponent
    lognormal = "lognormal"  # expert popularity is exp(sigma x normal)
    hot_expert = "hot_expert"  # one expert is among the choices of hot_share of the tokens
    # Every slot prefers the experts that one rank has by placement=contiguous, chance hot_share.
    hot_rank = "hot_rank"
    all_local = "all_local"  # every token stays on its rank: nothing crosses a link
    all_remote = "all_remote"  # no token stays on its rank: every row crosses a link
    masked = "masked"  # uniform, with a share of the slots dropped
    ragged = "ragged"  # uniform, with another number of tokens on every rank
    trace = "trace"  # recorded from a real model, read from a file
    counts = "counts"  # random, every expert with the share of tokens that was recorded for it


class PlacementRule(Enum):
    """Which rank holds which expert; every rank holds as many physical experts as the others."""

    contiguous = "contiguous"  # expert e on rank e // experts per rank
    round_robin = "round_robin"  # expert e on rank e % ranks
    file = "file"  # a map of physical experts read from a file, replicas included
    balanced = "balanced"  # made for the point's own routing, its fullest experts replicated


class Replica(Enum):
    """Which of an expert's replicas a row takes: known from routing alone, on every machine."""

    spread = "spread"  # all in turn: a source rank's rows of an expert differ by at most one
    local = "local"  # one on the token's own rank where there is one; else all in turn


class L2(Enum):
    """What the second-level cache of a GPU holds when a launch begins."""

    cold = "cold"  # none of the launch's rows: it is flushed before each launch, outside the window
    warm = "warm"  # whatever the launch before left there


class Regime(Enum):
    """How launches that are timed follow each other."""

    isolated = "isolated"  # the device is drained before each launch; the time is the launch's own
    chained = "chained"  # launches follow back to back; the time is the period between them


class Baseline(Enum):
    """What is measured beside our kernels, in the same points."""

    torch = "torch"  # permute, all-to-all (gloo, NCCL; none where one process is all), grouped GEMM
    deepep = "deepep"  # not called by this version: a point that asks for it says what is missing


class Resume(Enum):
    """Which points of an earlier run count as done; only ones of the same build ever do."""

    ok = "ok"  # those that ended ok and whose files validate
    any = "any"  # those that ended, however, and whose files validate
    none = "none"  # no point; its older folder is set aside, never overwritten
