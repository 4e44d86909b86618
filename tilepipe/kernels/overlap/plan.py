"""What a fused launch is compiled for and how it splits the chip, or why it is refused.

Knows nothing of CuTe and torch. Kernel, allocation and results read these and derive nothing again.

All CTAs of a launch are resident at once: they are one grid, no larger than what the device holds,
so nobody waits for a CTA that has found no SM. Communication CTAs are whole clusters of the GEMM's
shape, since lone ones would break pairs of SMs apart.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Copy, Granularity, Roles
from tilepipe.config.limits import FUSED_WARPS, SHARED_BYTES
from tilepipe.fabric.table import near_table_bytes
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.choices import Clip
from tilepipe.kernels.gemm.plan import BESIDE_RINGS_BYTES, KernelPlan
from tilepipe.kernels.gemm.tiles import TileWord, places_of_tickets

__all__ = [
    "FEWEST_JOIN",
    "OverlapPlan",
    "Split",
    "check_roles",
    "gemm_bytes",
    "num_first_tiles",
    "plan_overlap",
    "split_chip",
    "stamped",
]

_ALIGN = 128
# Ranks on a GPU from which on joining in step gains anything: one and two lose up to 0.4 %.
FEWEST_JOIN = 4
_BARRIER_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Split:
    """CTAs of each rank by role, whole clusters."""

    num_comm_ctas: int
    num_gemm_ctas: int

    @property
    def num_ctas(self) -> int:
        return self.num_comm_ctas + self.num_gemm_ctas


@dataclass(frozen=True, kw_only=True)
class OverlapPlan:
    """Everything that is fixed in a fused kernel; the split is not, one code serves all."""

    gemm: KernelPlan  # of one rank; its number of CTAs says nothing here
    constants: Constants  # of communication
    roles: Roles
    opens: bool  # all CTAs push the rows that GEMMs begin with
    gates: bool  # CTAs of the GEMM begin together, once all of those are here
    joins: bool  # who has sent begins with tiles when others do, not at once
    num_launch_ranks: int  # ranks in one launch
    a_rank_pitch: int  # elements from one rank's A to the next one's
    d_rank_pitch: int
    ring_bytes: int  # shared memory of a communication warp
    smem_bytes: int
    num_stamps: int = 0  # that a warp has room for; 0: none is left

    @property
    def cluster_m(self) -> int:
        return self.gemm.cluster_m


def plan_overlap(
    gemm: KernelPlan,
    constants: Constants,
    *,
    roles: Roles,
    opens: bool = False,
    gates: bool = False,
    joins: bool = True,
    ring_bytes: int,  # of a communication warp
    num_launch_ranks: int = 1,
    a_rank_pitch: int = 0,
    d_rank_pitch: int = 0,
) -> OverlapPlan:
    """Decide the rest, or raise ValueError with one sentence that says what to change."""
    if constants.num_warps > FUSED_WARPS:
        raise ValueError(
            f"kernel.num_comm_warps={constants.num_warps}: CTAs of a fused launch have "
            f"{FUSED_WARPS} warps; type at most {FUSED_WARPS}"
        )
    room = gemm.num_stages * gemm.stage_bytes + gemm.staging_bytes
    if constants.num_warps * ring_bytes > room:
        raise ValueError(
            f"kernel.num_stages={constants.num_stages}: {constants.num_warps} warps x "
            f"{ring_bytes} bytes of stages lie where the GEMM keeps its operands, {room} bytes; "
            "lower it, or kernel.num_comm_warps"
        )
    if num_launch_ranks > 1 and gemm.clip is Clip.per_group:
        raise ValueError(
            f"clip=per_group: a descriptor is patched for one rank, and this launch holds "
            f"{num_launch_ranks}; type clip=ragged"
        )
    own_bytes = room + _beside_bytes(constants)
    if own_bytes > SHARED_BYTES:
        raise ValueError(
            f"num_stages={gemm.num_stages}: a fused CTA needs {own_bytes} bytes of shared memory, "
            f"and an SM has {SHARED_BYTES}; plan the GEMM with gemm_bytes"
        )
    return OverlapPlan(
        gemm=replace(gemm, num_gemm_ctas=gemm.cluster_m, workspace_bytes=0),
        constants=constants,
        roles=roles,
        opens=opens,
        # Counters of experts stand for more rows than the first tiles need: each is a gate itself.
        gates=gates and gemm.problem.wait is Granularity.tile,
        joins=joins and roles is Roles.switch and num_launch_ranks >= FEWEST_JOIN,
        num_launch_ranks=num_launch_ranks,
        a_rank_pitch=a_rank_pitch if num_launch_ranks > 1 else 0,
        d_rank_pitch=d_rank_pitch if num_launch_ranks > 1 else 0,
        ring_bytes=ring_bytes,
        smem_bytes=own_bytes,
    )


def stamped(plan: Any, num_stamps: int) -> Any:
    """The plan of the same launch whose warps leave so many stamps each; of either fused launch.

    Raises ValueError where shared memory has no room to count them.
    """
    # Barriers of the GEMM, two tile records and the counts of twelve warps share two lines.
    beside = 8 * (2 * plan.gemm.num_stages + 4) + 2 * 32 + 12 * 4
    own_bytes = plan.smem_bytes + _ALIGN * max(0, -(-beside // _ALIGN) - 2)
    if own_bytes > SHARED_BYTES:
        raise ValueError(
            f"measure.timeline=true: a stamped CTA needs {own_bytes} bytes of shared memory, and "
            f"an SM has {SHARED_BYTES}; lower kernel.num_stages, or type measure.timeline=false"
        )
    return replace(plan, num_stamps=num_stamps, smem_bytes=own_bytes)


def _beside_bytes(constants: Constants) -> int:
    """Shared memory beside operands and staging: barriers and records, addresses of all ranks.

    Barriers of bulk copies twice: rows may be pushed in two rounds.
    """
    by_bulk = constants.copy is Copy.tma
    sizes = (
        near_table_bytes(constants.num_ranks),
        *[constants.num_warps * constants.num_stages * _BARRIER_BYTES * by_bulk] * 2,
    )
    return 2 * _ALIGN + sum(-(-size // _ALIGN) * _ALIGN for size in sizes)


def gemm_bytes(constants: Constants) -> int:
    """Shared memory to plan the GEMM of a fused launch for, so that all else fits beside it."""
    return SHARED_BYTES - max(0, _beside_bytes(constants) - BESIDE_RINGS_BYTES)


def split_chip(num_sms: int, *, num_launch_ranks: int, num_comm_ctas: int, cluster_m: int) -> Split:
    """Communication CTAs as asked and, for the GEMM, all that is left, on each rank alike.

    None is asked for with Roles.beside. Raises ValueError where a role would go without.
    """
    own = num_sms // num_launch_ranks // cluster_m * cluster_m
    most = own - cluster_m
    if not 0 <= num_comm_ctas <= most:
        raise ValueError(
            f"kernel.num_comm_ctas={num_comm_ctas}: {num_launch_ranks} ranks share {num_sms} SMs, "
            f"{own} each, and the GEMM needs {cluster_m} of them; choose 1..{most}"
        )
    if num_comm_ctas % cluster_m:
        raise ValueError(
            f"kernel.num_comm_ctas={num_comm_ctas}: CTAs of a launch are clusters of {cluster_m}; "
            f"choose a multiple of {cluster_m}"
        )
    return Split(num_comm_ctas=num_comm_ctas, num_gemm_ctas=own - num_comm_ctas)


def check_roles(roles: Roles, num_comm_ctas: int) -> None:
    """Refuse roles that the communication CTAs of a rank do not go with: with Roles.beside tiles
    would be handed out twice, with others nobody would communicate. Raises ValueError."""
    if (roles is Roles.beside) != (num_comm_ctas == 0):
        wanted = "no CTA communicates alone" if roles is Roles.beside else "some CTAs communicate"
        raise ValueError(
            f"kernel.num_comm_ctas={num_comm_ctas}: with kernel.roles={roles.value} {wanted}; plan "
            f"for {'0' if roles is Roles.beside else '1 or more'}"
        )


def num_first_tiles(
    records: NDArray[np.int32],  # (num_cluster_tiles, RECORD_WORDS), in hand-out order
    gemm: KernelPlan,
    *,
    num_m_tiles: int,
    num_gemm_ctas: int,
) -> int:
    """M tiles of a rank up to the last one that its CTAs begin with, all at once."""
    tickets = np.arange(min(num_gemm_ctas // gemm.cluster_m, len(records) * gemm.num_n_tiles))
    if not len(tickets):
        return 0
    there = places_of_tickets(
        records, tickets, num_n_tiles=gemm.num_n_tiles, num_chunks=gemm.num_chunks
    )
    begun = records[there.cluster_tile]
    height = gemm.problem.group_align
    ends = begun[:, TileWord.m_tile] + -(-begun[:, TileWord.valid] // height)
    return min(num_m_tiles, int(ends.max()))
