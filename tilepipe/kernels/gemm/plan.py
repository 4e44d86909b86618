"""What a grouped GEMM is compiled for: decided once, by one function, or refused in a sentence.

Knows nothing of CuTe and torch. Host allocation, kernel, cache key and results read the KernelPlan
and derive nothing again.

Sizes of a CTA. Two consumer warpgroups multiply, in blocks of 64 rows: the four warps of a
warpgroup hold 16 rows each, so whoever stages a block writes all its rows. A block that splits
columns between pairs of warps, as the 64-row layouts of later architectures do, would not fit that
staging; `tile_m` is refused unless it is whole blocks of each warpgroup.
"""

from dataclasses import dataclass, field
from typing import Any

from tilepipe.config.choices import Granularity, Layout, StoreMode, Walk
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.choices import (
    Clip,
    Consumers,
    DescriptorSlot,
    Epilogue,
    Major,
)
from tilepipe.kernels.gemm.problem import BF16_BYTES, GemmProblem, GemmTuning, check_operands

__all__ = [
    "BESIDE_RINGS_BYTES",
    "BLOCK_M",
    "DESCRIPTOR_BYTES",
    "MAX_SUMS",
    "STAGED_COLUMNS",
    "STAGING_BUFFERS",
    "GemmProblem",
    "GemmTuning",
    "KernelPlan",
    "check_workspace",
    "plan_gemm",
]

# Rows that one warpgroup multiplies at a time, four warps of 16.
BLOCK_M = 64
# Columns that are staged at a time: 128 bytes, the width of the swizzle.
STAGED_COLUMNS = 64
# Blocks that each warpgroup may have staged, one being written while the other is stored.
STAGING_BUFFERS = 2
NUM_CONSUMERS = 2
DESCRIPTOR_BYTES = 128
# Elements of K in a stage: 128 bytes, the width of the swizzle.
TILE_K = 64
# Registers of a consumer thread for sums; the rest addresses and stages what they become.
MAX_SUMS = 192
# Barriers, the tile records handed over, and what aligning the rings to 1024 bytes may cost.
BESIDE_RINGS_BYTES = 2048
# K tiles before the end of a tile's loads at which the next one is claimed, beside the stages.
_CLAIM_LEAD = 4


@dataclass(frozen=True, kw_only=True)
class KernelPlan:
    """Everything that is fixed in the kernel and around it."""

    problem: GemmProblem
    tuning: GemmTuning
    num_gemm_ctas: int
    num_stages: int
    clip: Clip | None  # None: stored directly
    out_n: int
    a_pitch: int
    d_pitch: int
    num_n_tiles: int
    num_chunks: int
    num_k_tiles: int
    claim_at: int  # K tile at whose load the next tile is claimed
    smem_bytes: int
    workspace_bytes: int
    # Derived constants that kernels read often.
    tile_m: int = field(init=False)
    tile_n: int = field(init=False)
    cluster_m: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "cluster_m"):
            object.__setattr__(self, name, getattr(self.tuning, name))

    @property
    def waits_ahead(self) -> bool:
        """Whether rows are waited for by the warp that hands tiles out, not by the one that loads.

        Not in clusters, where one warp hands out for all CTAs.
        """
        return self.problem.wait is not None and self.cluster_m == 1

    @property
    def tiles_slot(self) -> Slot:
        """Where the records of the cluster tiles lie."""
        return Slot.second_tiles if self.problem.is_second else Slot.gemm_tiles

    @property
    def tiles_word(self) -> Word:
        """Where their number stands."""
        return Word.num_second_tiles if self.problem.is_second else Word.num_gemm_tiles

    @property
    def is_ping_pong(self) -> bool:
        return self.tuning.consumers is Consumers.ping_pong

    @property
    def groups_per_tile(self) -> int:
        """Warpgroups that multiply one tile."""
        return _groups_per_tile(self.tuning)

    @property
    def blocks_per_group(self) -> int:
        """Blocks of 64 rows that each holds; block i of group g is number i x groups + g."""
        return self.tile_m // (BLOCK_M * self.groups_per_tile)

    @property
    def out_tile_n(self) -> int:
        """Output columns of a tile."""
        return self.tile_n // 2 if self.problem.epilogue.is_swiglu else self.tile_n

    @property
    def num_b_parts(self) -> int:
        """Pieces of a B tile that are loaded apart: gate and up, or one each CTA of a cluster."""
        return _num_b_parts(self.problem, self.tuning)

    @property
    def num_a_parts(self) -> int:
        """Pieces of an A tile that are loaded apart: the blocks, where those without rows are not
        multiplied and so need not come."""
        return self.tile_m // BLOCK_M if self.skips_blocks else 1

    @property
    def widens_b(self) -> bool:
        """Whether a launch takes the descriptor of B that its host has made."""
        by_k = self.problem.b_major is Major.k
        return self.tuning.wide_b and by_k and self.cluster_m == 1

    @property
    def stage_bytes(self) -> int:
        return (self.tile_m + self.tile_n) * TILE_K * BF16_BYTES

    @property
    def staging_bytes(self) -> int:
        return _staging_bytes(self.tuning)

    @property
    def skips_blocks(self) -> bool:
        """Whether blocks without rows are left out of the products.

        Cooperative tiles of 128 x 256 gain by it: 7 % and 3 % where 4096 rows lie by zipf's law.
        Ping-pong tiles lose, the more the smaller they are, 10 % of 128 x 128 at 32 768 such rows
        (H200, 2026-11, against QuACK in the same run).
        """
        return not self.is_ping_pong

    @property
    def cuts_tail(self) -> bool:
        """Whether half a tile is whole blocks, takes half the time, and is wanted at the end.

        Chunk by chunk the last M tiles would be cut in every chunk, not at the end alone.
        """
        halves = self.cluster_m == 1 and self.tile_m % (2 * BLOCK_M) == 0
        by_expert = self.tuning.walk is Walk.expert or self.num_chunks == 1
        wanted = self.tuning.cuts_tail and by_expert
        return wanted and self.skips_blocks and halves

    def turn_of(self, i: int, part: int) -> int:
        """Which buffer of its warpgroup takes a part of block i.

        Buffers take turns through all blocks of a tile: a store gives its buffer back only once the
        next one has started, so the next one must not need it.
        """
        return (i * (self.out_tile_n // STAGED_COLUMNS) + part) % STAGING_BUFFERS

    def told_at(self, group: Any, count: Any) -> Any:
        """Which barrier says that a warpgroup has stored or sent its part of the count-th tile.

        Odd and even tiles have one each: a warpgroup may be done with the next tile before the warp
        that tells has met it for this one, and would be counted twice.
        """
        turn = 0 if self.is_ping_pong else count % 2  # ping_pong: a group has every second tile
        return group * STAGING_BUFFERS + turn

    @property
    def stores_by_tma(self) -> bool:
        """Whether a warp stores what the others have staged."""
        return self.tuning.store is StoreMode.tma and not self.problem.sends

    @property
    def uses_store_warp(self) -> bool:
        """Whether a warp of its own stores or publishes."""
        return self.stores_by_tma or self.problem.publish


def plan_gemm(
    problem: GemmProblem,
    tuning: GemmTuning,
    *,
    num_gemm_ctas: int,
    num_sms: int,
    smem_bytes: int = 232_448,  # of one CTA: 227 KiB on sm_90
) -> KernelPlan:
    """Decide everything, or raise ValueError with one sentence that says what to change."""
    check_operands(problem)
    _check_tile(problem, tuning)
    clip = _clip_of(problem, tuning)
    _check_hooks(problem, tuning)
    _check_grid(tuning, num_gemm_ctas, num_sms)
    num_stages = _stages_of(problem, tuning, smem_bytes)
    num_n_tiles = -(-problem.n // tuning.tile_n)
    num_chunks = num_n_tiles if problem.num_chunks is None else problem.num_chunks
    if not 1 <= num_chunks <= num_n_tiles:
        raise ValueError(
            f"num_chunks={num_chunks}: {problem.n} columns are {num_n_tiles} tiles of "
            f"{tuning.tile_n}; choose 1..{num_n_tiles}"
        )
    num_k_tiles = -(-problem.k // TILE_K)
    out_n = problem.n // 2 if problem.epilogue.is_swiglu else problem.n
    slots = len(DescriptorSlot) if clip is Clip.per_group else 0
    ring_bytes = num_stages * (tuning.tile_m + tuning.tile_n) * TILE_K * BF16_BYTES
    return KernelPlan(
        problem=problem,
        tuning=tuning,
        num_gemm_ctas=num_gemm_ctas,
        num_stages=num_stages,
        clip=clip,
        out_n=out_n,
        a_pitch=problem.k if problem.a_pitch is None else problem.a_pitch,
        d_pitch=out_n if problem.d_pitch is None else problem.d_pitch,
        num_n_tiles=num_n_tiles,
        num_chunks=num_chunks,
        num_k_tiles=num_k_tiles,
        claim_at=max(0, num_k_tiles - _CLAIM_LEAD - num_stages),
        smem_bytes=ring_bytes + _staging_bytes(tuning) + BESIDE_RINGS_BYTES,
        workspace_bytes=num_gemm_ctas * slots * DESCRIPTOR_BYTES,
    )


def check_workspace(plan: KernelPlan, *, num_bytes: int, address: int) -> None:
    """Refuse a workspace that kernels would write past, or whose slots no TMA would read.

    Raises ValueError; a plan without slots takes any.
    """
    if num_bytes < plan.workspace_bytes:
        raise ValueError(
            f"the workspace holds {num_bytes} bytes, but {plan.num_gemm_ctas} CTAs with "
            f"{len(DescriptorSlot)} descriptor slot each need {plan.workspace_bytes}; allocate "
            "KernelPlan.workspace_bytes"
        )
    if plan.workspace_bytes and address % DESCRIPTOR_BYTES:
        raise ValueError(
            f"the workspace begins at {address:#x}: descriptors need multiples of "
            f"{DESCRIPTOR_BYTES} bytes; allocate it with torch"
        )


def _check_tile(problem: GemmProblem, tuning: GemmTuning) -> None:
    """Tiles that warpgroups can hold and stage."""
    groups = _groups_per_tile(tuning)
    rows = BLOCK_M * groups
    if tuning.tile_m < rows or tuning.tile_m % rows:
        raise ValueError(
            f"tile_m={tuning.tile_m}: {groups} warpgroup{'s' * (groups > 1)} a tile take blocks of "
            f"{BLOCK_M} rows each; choose a multiple of {rows}"
        )
    parts = _num_b_parts(problem, tuning)
    columns = STAGED_COLUMNS * (2 if problem.epilogue.is_swiglu or parts == 2 else 1)
    if not columns <= tuning.tile_n <= 256 or tuning.tile_n % columns:
        raise ValueError(
            f"tile_n={tuning.tile_n}: with epilogue={problem.epilogue.value} and "
            f"cluster_m={tuning.cluster_m} a tile is pieces of {columns} columns, 256 at most; "
            f"choose a multiple of {columns}"
        )
    sums = tuning.tile_m * tuning.tile_n // (128 * groups)
    if sums > MAX_SUMS:
        raise ValueError(
            f"tile_m={tuning.tile_m} x tile_n={tuning.tile_n}: a thread of {groups} warpgroup"
            f"{'s' * (groups > 1)} would hold {sums} sums, and has registers for {MAX_SUMS}; "
            "choose a smaller tile"
        )
    if tuning.raster_m < 1:
        raise ValueError(
            f"raster_m={tuning.raster_m}: so many tiles walk together; choose at least 1"
        )


def _clip_of(problem: GemmProblem, tuning: GemmTuning) -> Clip | None:
    """What ends a store at the last row of an expert."""
    clip = tuning.clip
    if tuning.store is StoreMode.direct or problem.sends:
        if clip is not None:
            raise ValueError(
                f"clip={clip.value}: {'sent rows' if problem.sends else 'direct stores'} check "
                "every row and have no descriptor; leave it out, or type store=tma"
                f"{' and kernel.push=ctas' if problem.sends else ''}"
            )
        return None
    if problem.layout is Layout.packed and clip is Clip.whole:
        raise ValueError(
            "clip=whole: with layout=packed a whole block runs into the next expert's rows; type "
            "clip=ragged or clip=per_group"
        )
    if clip is None:
        clip = Clip.whole if problem.layout is Layout.padded else Clip.ragged
    if clip is Clip.whole and problem.group_align % BLOCK_M:
        raise ValueError(
            f"clip=whole: groups are padded to {problem.group_align} rows and blocks have "
            f"{BLOCK_M}; pad to a multiple of {BLOCK_M}, or type clip=ragged"
        )
    return clip


def _check_hooks(problem: GemmProblem, tuning: GemmTuning) -> None:
    """Semaphores are told apart by the tiles of the Plan."""
    by_tile = problem.wait in (Granularity.tile, Granularity.token) or problem.publish
    if by_tile and problem.group_align != tuning.tile_m:
        raise ValueError(
            f"tile_m={tuning.tile_m}: semaphores stand for tiles of {problem.group_align} rows; "
            f"type tile_m={problem.group_align}, or plan with tile_m={tuning.tile_m}"
        )
    assert problem.publish or not problem.sends, "rows are sent, and nobody tells"
    if problem.sends and tuning.store is not StoreMode.tma:
        raise ValueError(
            f"store={tuning.store.value}: kernel.push=epilogue sends rows from where tiles are "
            "staged, and this stages none; type store=tma, or kernel.push=ctas"
        )


def _check_grid(tuning: GemmTuning, num_gemm_ctas: int, num_sms: int) -> None:
    """One CTA an SM, whole clusters."""
    if tuning.cluster_m not in (1, 2):
        raise ValueError(f"cluster_m={tuning.cluster_m}: two CTAs at most share B; choose 1 or 2")
    if not tuning.cluster_m <= num_gemm_ctas <= num_sms:
        raise ValueError(
            f"num_gemm_ctas={num_gemm_ctas}: one runs on each SM, and this GPU has {num_sms}; "
            f"choose {tuning.cluster_m}..{num_sms}"
        )
    if num_gemm_ctas % tuning.cluster_m:
        raise ValueError(
            f"num_gemm_ctas={num_gemm_ctas}: clusters hold {tuning.cluster_m} CTAs; choose a "
            f"multiple of {tuning.cluster_m}"
        )


def _stages_of(problem: GemmProblem, tuning: GemmTuning, smem_bytes: int) -> int:
    """Stages as asked, or as many as there is room for."""
    stage_bytes = (tuning.tile_m + tuning.tile_n) * TILE_K * BF16_BYTES
    room = (smem_bytes - _staging_bytes(tuning) - BESIDE_RINGS_BYTES) // stage_bytes
    wanted = room if tuning.num_stages is None else tuning.num_stages
    if not 2 <= wanted <= room:
        raise ValueError(
            f"num_stages={wanted}: stages of {stage_bytes} bytes beside "
            f"{_staging_bytes(tuning)} bytes of staging fit {max(room, 0)} times into "
            f"{smem_bytes}; choose 2 at least, or a smaller tile"
        )
    return wanted


def _groups_per_tile(tuning: GemmTuning) -> int:
    return NUM_CONSUMERS if tuning.consumers is Consumers.cooperative else 1


def _num_b_parts(problem: GemmProblem, tuning: GemmTuning) -> int:
    halves = problem.epilogue is Epilogue.swiglu_concatenated or tuning.cluster_m == 2
    return 2 if halves else 1


def _staging_bytes(tuning: GemmTuning) -> int:
    """What the threads of the epilogue write: a block of each warpgroup in each buffer."""
    if tuning.store is StoreMode.direct:
        return 0
    block_bytes = BLOCK_M * STAGED_COLUMNS * BF16_BYTES
    return NUM_CONSUMERS * STAGING_BUFFERS * block_bytes
