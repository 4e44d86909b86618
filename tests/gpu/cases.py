"""A group on one GPU from what a case chooses, and what every launch of it must have left.

Imported only where there is a GPU. Knows nothing of what is launched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from tilepipe.config.choices import (
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Order,
    Push,
    Roles,
    Walk,
)
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.plan import GemmTuning
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

# By copy: what a CTA of twelve warps is given.
KNOBS = {
    Copy.simt: {"num_warps": 12, "num_loads": 4},
    Copy.tma: {"num_warps": 8, "num_stages": 3, "stage_bytes": 7168, "flag_batch": 8},
}


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What every case chooses; the rest follows."""

    num_ranks: int = 1
    num_experts: int = 8
    num_topk: int = 2
    copy: Copy = Copy.tma
    num_ctas: int = 4
    granularity: Granularity = Granularity.tile
    order: Order = Order.edf
    layout: Layout = Layout.padded
    # Of rows on their way home, and of the GEMM that makes them.
    num_chunks: int = 1
    push: Push = Push.ctas
    walk: Walk = Walk.expert
    home_granularity: HomeGranularity = HomeGranularity.token
    tuning: GemmTuning = field(default_factory=GemmTuning)
    pace_gbps: float | None = None
    pace_latency_ns: int = 0
    watchdog_s: float = 2.0
    num_sms: int | None = None  # that both roles share; None: all of them
    knobs: Mapping[str, int] = field(default_factory=dict)  # in place of those of KNOBS


def group_of(
    chosen: Choice,
    routings: Sequence[Routing],
    *,
    num_n_tiles: int,
    num_chunks: int,
    second_gemm: tuple[int, int] | None = None,
    dispatch_hidden: int = 0,
    home_hidden: int = 0,
    spare: bool = False,
) -> DeviceGroup:
    """Ranks whose memory holds any of these routings."""
    tokens = [[len(ids) for ids in routing.topk_idx] for routing in routings]
    return DeviceGroup(
        PlanSettings(
            num_ranks=chosen.num_ranks,
            num_experts=chosen.num_experts,
            num_topk=chosen.num_topk,
            tile_m=chosen.tuning.tile_m,
            num_n_tiles=num_n_tiles,
            num_chunks=num_chunks,
            second_gemm=second_gemm,
            walk=chosen.walk,
            layout=chosen.layout,
            granularity=chosen.granularity,
            home_granularity=chosen.home_granularity,
            order=chosen.order,
        ),
        Shape(
            max_tokens=max(map(max, tokens)),
            num_tokens=max(map(sum, tokens)),
            dispatch_hidden=dispatch_hidden,
            home_hidden=home_hidden,
            tile_n=chosen.tuning.tile_n,
            spare=spare,
        ),
        Knobs(
            # With Roles.beside no CTA communicates.
            num_ctas=0 if getattr(chosen, "roles", None) is Roles.beside else chosen.num_ctas,
            copy=chosen.copy,
            pace_gbps=chosen.pace_gbps,
            pace_latency_ns=chosen.pace_latency_ns,
            **(KNOBS[chosen.copy] | dict(chosen.knobs)),
        ),
        watchdog_s=chosen.watchdog_s,
    )


def num_sms_of(chosen: Choice, device: torch.device) -> int:
    """SMs that the case uses."""
    return chosen.num_sms or torch.cuda.get_device_properties(device).multi_processor_count


def tokens_of(group: DeviceGroup, routing: Routing, slot: Slot) -> list[torch.Tensor]:
    """Bits of the tokens of every rank."""
    return [group.tensor(rank, slot)[: len(routing.topk_idx[rank])].clone() for rank in group.ranks]


def queue_faults(group: DeviceGroup, rank: int) -> list[str]:
    """Every launch leaves the queue of tiles as the next one needs it."""
    queue = int(group.tensor(rank, Slot.words)[int(Word.gemm_queue)])
    return [f"rank {rank}: the queue of tiles is left at {queue}"] * (queue != 0)
