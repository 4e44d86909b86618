"""What a grouped GEMM is asked to do, and how.

Knows nothing of what has room, and of what the two come to together.
"""

from dataclasses import dataclass

from tilepipe.config.choices import Granularity, Layout, StoreMode, Walk
from tilepipe.kernels.gemm.choices import Clip, Consumers, Epilogue, Major

__all__ = ["BF16_BYTES", "GemmProblem", "GemmTuning", "check_operands"]

BF16_BYTES = 2
# What TMA and 16-byte stores ask of addresses and pitches.
_VECTOR_BYTES = 16


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
    wide_b: bool = True  # fetch a K-major B from memory by 256 bytes
    store: StoreMode = StoreMode.tma
    clip: Clip | None = None


def check_operands(problem: GemmProblem) -> None:
    """Layouts and pitches that loads and stores can take; raises ValueError for others."""
    if problem.out_major is not Major.n:
        raise ValueError(
            f"out_major={problem.out_major.value}: rows of an expert end anywhere, which only an "
            "N-major output can clip; type out_major=n"
        )
    if problem.b_major is Major.m:
        raise ValueError("b_major=m: B is (experts, N, K); type b_major=k or b_major=n")
    _check_multiple("k", problem.k, "a row of A")
    columns = problem.n
    if problem.epilogue.is_swiglu:
        if problem.n % 2:
            raise ValueError(f"n={problem.n}: gate and up are as many columns each; make it even")
        columns = problem.n // 2
    _check_multiple("n / 2" if problem.epilogue.is_swiglu else "n", columns, "a row of D")
    for name, pitch, least in (
        ("a_pitch", problem.a_pitch, problem.k),
        ("d_pitch", problem.d_pitch, columns),
    ):
        if pitch is not None:
            _check_multiple(name, pitch, "a row and its gap")
            if pitch < least:
                raise ValueError(
                    f"{name}={pitch}: rows have {least} elements; choose at least that"
                )
    if problem.num_experts < 1:
        raise ValueError(
            f"num_experts={problem.num_experts}: B holds a matrix each; choose at least 1"
        )


def _check_multiple(name: str, elements: int, what: str) -> None:
    num_bytes = elements * BF16_BYTES
    if elements < 1 or num_bytes % _VECTOR_BYTES:
        raise ValueError(
            f"{name}={elements}: {what} is {num_bytes} bytes, and TMA takes multiples of "
            f"{_VECTOR_BYTES}; choose a multiple of {_VECTOR_BYTES // BF16_BYTES} elements"
        )
