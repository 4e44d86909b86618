"""What a grouped GEMM is asked to do, and how.

Knows nothing of what has room, and of what the two come to together.
"""

from dataclasses import dataclass

from tilepipe.config.choices import Granularity, Layout, StoreMode, Walk
from tilepipe.kernels.gemm.choices import Clip, Consumers, Epilogue, Major

__all__ = ["GemmProblem", "GemmTuning"]


@dataclass(frozen=True, kw_only=True)
class GemmProblem:
    """What is multiplied: A (rows, k) in groups of one expert, B (experts, n, k), D (rows, n').

    n' is n, or n / 2 where gate and up make one. Pitches are in elements; None: no gap.
    """

    n: int
    k: int
    num_experts: int
    layout: Layout
    group_align: int  # rows to whose multiple the padded layout extends each group; tile_m of waits
    b_major: Major = Major.k
    out_major: Major = Major.n
    epilogue: Epilogue = Epilogue.none
    a_pitch: int | None = None
    d_pitch: int | None = None
    wait: Granularity | None = None  # wait for rows before a tile's first load; None: they are here
    publish: bool = False  # tell which rows of which columns have been stored
    sends: bool = False  # warps send elsewhere what they have staged; nothing is stored here
    num_chunks: int | None = None  # pieces along N that are told apart; None: one an N tile
    is_second: bool = False  # of the two of a layer: its tiles are the rank's second list


@dataclass(frozen=True, kw_only=True)
class GemmTuning:
    """How it is multiplied; None: what suits the problem."""

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 1  # CTAs that take M tiles of one expert side by side and share B
    consumers: Consumers = Consumers.cooperative
    raster_m: int = 8  # cluster tiles of an expert that walk along N together
    walk: Walk = Walk.expert  # chunk: those of all experts walk together, chunk after chunk
    cuts_tail: bool = True  # hand the last tiles out in halves where that fills the SMs better
    num_stages: int | None = None  # None: as many as there is room for
    cuts_columns: bool = True  # the last tiles in quarters, where halves would be wanted
    b_first: bool = False
    a_last: bool = False
    d_first: bool = False
    wide_b: int = 0
    by_place: bool = False
    num_cut: int | None = None
    cuts_rows: bool = True
    store: StoreMode = StoreMode.tma
    clip: Clip | None = None
