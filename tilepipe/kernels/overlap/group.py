"""Dispatch -> GEMM of the ranks of a group: plans of kernels, weights, outputs, launches.

Knows nothing of configuration files, oracle or clocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from tilepipe.config.choices import Roles
from tilepipe.fabric.device_heap import DeviceHeap
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.gemm.launch import GroupedGemm, upload_tiles
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, KernelPlan, plan_gemm
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import constants_of
from tilepipe.kernels.overlap.home import HomePlan, home_gemm_bytes
from tilepipe.kernels.overlap.launch import BoundLaunch, FusedLaunch, make_plan
from tilepipe.kernels.overlap.plan import (
    OverlapPlan,
    Split,
    check_roles,
    gemm_bytes,
    num_first_tiles,
    split_chip,
    stamped,
)

__all__ = [
    "Layer",
    "bind_alone",
    "bind_fused",
    "ctas_alone",
    "ctas_beside",
    "fused_launch",
    "gemm_launch",
    "plan_layer",
    "rank_pitch",
    "spare_table",
    "upload_layer",
]


@dataclass(frozen=True)
class Layer:
    """Weights of the experts of the ranks of this process, and how they are multiplied."""

    weights: torch.Tensor  # (experts of all ranks of this process, n, k) bf16
    tuning: GemmTuning
    num_sms: int
    epilogue: Epilogue = Epilogue.none  # what becomes of a product before it is rounded
    is_second: bool = False  # the second GEMM of a layer that has two

    @property
    def n(self) -> int:
        return self.weights.shape[1]

    @property
    def k(self) -> int:
        return self.weights.shape[2]


def plan_layer(
    group: DeviceGroup, layer: Layer, work: str, *, num_gemm_ctas: int, **hooks: Any
) -> KernelPlan:
    """The GEMM of the layer beside communication of a kind; `hooks` of GemmProblem."""
    settings = group.settings
    if work == "push":
        room = home_gemm_bytes(settings.num_ranks)
    else:
        room = gemm_bytes(constants_of(work, settings, group.shape, group.knobs))
    return plan_gemm(
        GemmProblem(
            n=layer.n,
            k=layer.k,
            num_experts=settings.num_experts_per_rank,
            layout=settings.layout,
            group_align=settings.tile_m,
            epilogue=layer.epilogue,
            is_second=layer.is_second,
            **hooks,
        ),
        layer.tuning,
        num_gemm_ctas=num_gemm_ctas,
        num_sms=layer.num_sms,
        smem_bytes=room,
    )


def bind_alone(
    group: DeviceGroup, layer: Layer, plan: KernelPlan, *, a: torch.Tensor, d: torch.Tensor
) -> Callable[[], None]:
    """A launch of the GEMM alone, of the one rank of this process."""
    gemm = GroupedGemm(
        plan, num_ranks=group.settings.num_ranks, limit_ns=int(group.watchdog_s * 1e9)
    )
    (rank,) = group.ranks
    return gemm.bind(group.heap, rank, a=a, b=layer.weights, d=d)


def bind_fused(
    group: DeviceGroup,
    layer: Layer,
    plan: OverlapPlan | HomePlan,
    split: Split,
    *,
    a: torch.Tensor,  # (rows, k) of the first rank
    d: torch.Tensor,  # (rows, n) of the first rank
    sending: torch.Tensor | None,  # table of communication; None: that of all
    num_stamps: int = 0,  # that a warp has room for; 0: none is left
) -> BoundLaunch:
    """A launch of a fused kernel, of all ranks of this process."""
    launch = FusedLaunch(
        stamped(plan, num_stamps) if num_stamps else plan,
        split,
        limit_ns=int(group.watchdog_s * 1e9),
        pace_gbps=group.knobs.pace_gbps,
        pace_latency_ns=group.knobs.pace_latency_ns,
    )
    table = group.heap.table
    return launch.bind(
        table,
        table if sending is None else sending,
        first_rank=group.ranks.start,
        a=a,
        b=layer.weights,
        d=d,
    )


def upload_layer(
    group: DeviceGroup,
    layer: Layer,
    *,
    num_gemm_ctas: int,
    num_first_ctas: int | None = None,  # None: those of the GEMM beside communication
) -> None:
    """Tell the launches that follow which tiles the plans of the group have, and which are first.

    The last tiles are cut for so many CTAs of each rank, and the first ones are what
    `num_first_ctas` begin with: who joins later finds its rows there. Launches of any other number
    are right.

    Every destination's first tiles take about as many rows of all ranks as each rank sends to all
    destinations: so many at the front of its sends are what GEMMs begin with.
    """
    plan = plan_layer(group, layer, "dispatch", num_gemm_ctas=num_gemm_ctas)
    first_ctas = ctas_beside(group, layer) if num_first_ctas is None else num_first_ctas
    for rank in group.ranks:
        own = group.plans[rank]
        records = upload_tiles(group.heap, rank, own.layout, plan)
        tiles = num_first_tiles(
            *(records, plan), num_m_tiles=own.layout.num_tiles, num_gemm_ctas=first_ctas
        )
        first = min(own.num_sent, int(own.layout.tiles[:tiles, 2].sum()))
        words = group.tensor(rank, Slot.words)
        words[int(Word.num_first)] = first
        words[int(Word.num_rest)] = own.num_sent - first
        words[int(Word.num_first_tiles)] = tiles


def _split(group: DeviceGroup, layer: Layer) -> Split:
    return split_chip(
        layer.num_sms,
        num_launch_ranks=len(group.ranks),
        num_comm_ctas=group.knobs.num_ctas,
        cluster_m=layer.tuning.cluster_m,
    )


def ctas_beside(group: DeviceGroup, layer: Layer) -> int:
    """CTAs of each rank's GEMM beside communication; raises ValueError where none is left."""
    return _split(group, layer).num_gemm_ctas


def ctas_alone(group: DeviceGroup, layer: Layer) -> int:
    """CTAs of each rank's GEMM where nobody communicates: whole clusters."""
    cluster_m = layer.tuning.cluster_m
    return layer.num_sms // len(group.ranks) // cluster_m * cluster_m


def rank_pitch(tensors: list[torch.Tensor]) -> int:
    """Elements from one rank's tensor to the next one's, the same all through; 0 for one."""
    starts = [tensor.data_ptr() for tensor in tensors]
    steps = {after - before for before, after in pairwise(starts)} or {0}
    assert len(steps) == 1, "ranks lie at unequal distances"
    return steps.pop() // tensors[0].element_size()


def fused_launch(
    group: DeviceGroup,
    layer: Layer,
    out: torch.Tensor,  # (ranks of this process, receive rows, n) bf16
    *,
    roles: Roles = Roles.fixed,
    opens: bool = False,  # all CTAs push the rows that GEMMs begin with
    gates: bool = False,  # CTAs of the GEMM begin together
    joins: bool = True,  # where many ranks share the GPU, who has sent joins the GEMM in step
    wait: bool = True,  # False: the GEMM does not look at flags, a control and a bound
    sending: torch.Tensor | None = None,  # table of communication; None: that of all
    num_stamps: int = 0,  # that a warp has room for; 0: none is left
) -> BoundLaunch:
    """A launch of both on torch's current stream, behind the gate of the group.

    Raises ValueError where the two do not fit together or not onto the chip.
    """
    check_roles(roles, group.knobs.num_ctas)
    return _bound(
        *(group, layer, out, _split(group, layer)),
        roles=roles,
        opens=opens,
        gates=gates,
        joins=joins,
        wait=wait,
        sending=sending,
        num_stamps=num_stamps,
    )


def gemm_launch(
    group: DeviceGroup,
    layer: Layer,
    out: torch.Tensor,  # (ranks of this process, receive rows, n) bf16
    *,
    num_gemm_ctas: int,  # of each rank
    wait: bool = False,
) -> Callable[[], None]:
    """The GEMM alone on some SMs; with `wait` it looks at flags, which are set.

    Ranks that share a launch multiply at once: theirs is the fused kernel, nobody communicating.
    """
    if len(group.ranks) > 1:
        split = Split(num_comm_ctas=0, num_gemm_ctas=num_gemm_ctas)
        return _bound(group, layer, out, split, roles=Roles.fixed, wait=wait)
    looks = group.settings.granularity if wait else None
    plan = plan_layer(group, layer, "dispatch", num_gemm_ctas=num_gemm_ctas, wait=looks)
    (rank,) = group.ranks
    rows = group.tensor(rank, Slot.recv_x).view(torch.bfloat16)
    return bind_alone(group, layer, plan, a=rows, d=out[0])


def _bound(
    group: DeviceGroup,
    layer: Layer,
    out: torch.Tensor,
    split: Split,
    *,
    roles: Roles,
    wait: bool,
    opens: bool = False,
    gates: bool = False,
    joins: bool = True,
    sending: torch.Tensor | None = None,
    num_stamps: int = 0,
) -> BoundLaunch:
    """A launch of the fused kernel of all ranks of this process."""
    ranks, settings = group.ranks, group.settings
    received = [group.tensor(rank, Slot.recv_x).view(torch.bfloat16) for rank in ranks]
    looks = settings.granularity if wait else None
    plan = make_plan(
        plan_layer(group, layer, "dispatch", num_gemm_ctas=split.num_gemm_ctas, wait=looks),
        constants_of("dispatch", settings, group.shape, group.knobs),
        roles=roles,
        opens=opens,
        gates=gates,
        joins=joins,
        num_launch_ranks=len(ranks),
        a_rank_pitch=rank_pitch(received),
        d_rank_pitch=out.stride(0),
    )
    return bind_fused(
        *(group, layer, plan, split),
        a=received[0],
        d=out[0],
        sending=sending,
        num_stamps=num_stamps,
    )


_SPARE = {
    Slot.recv_x: Slot.spare_x,
    Slot.row_home: Slot.spare_row_home,
    Slot.row_flag: Slot.spare_flag,
    Slot.ready: Slot.spare_ready,
    Slot.home_y: Slot.spare_y,
    Slot.token_ready: Slot.spare_token_ready,
    Slot.rank_ready: Slot.spare_rank_ready,
}


def spare_table(heap: DeviceHeap) -> torch.Tensor:  # (num_ranks, slots) int64 addresses
    """A table by which rows and flags go where nobody looks, for a heap with spare buffers.

    What the heap keeps no spare of is found where it is: rows go home by what dispatch has left.
    """
    table = heap.table.clone()
    for slot, spare in _SPARE.items():
        if heap.tensor(heap.ranks[0], spare).numel():
            table[:, int(slot)] = heap.table[:, int(spare)]
    return table
