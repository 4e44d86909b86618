"""GEMM -> combine of the ranks of a group: plans of kernels, what is uploaded, launches.

Knows nothing of configuration files, oracle or clocks.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from tilepipe.config.choices import Push, Roles, Walk
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.launch import upload_tiles
from tilepipe.kernels.gemm.plan import KernelPlan
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import constants_of
from tilepipe.kernels.overlap.group import (
    Layer,
    bind_alone,
    bind_fused,
    ctas_beside,
    plan_layer,
    rank_pitch,
)
from tilepipe.kernels.overlap.home import Reduces, order_units, plan_home_launch
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.kernels.overlap.plan import Split, check_roles
from tilepipe.schedule.completion import order_tokens

__all__ = ["fused_home_launch", "gemm_home_launch", "upload_home"]


def _plan(
    group: DeviceGroup,
    layer: Layer,
    *,
    publish: bool,
    num_gemm_ctas: int,
    push: Push = Push.ctas,
    walk: Walk = Walk.expert,
) -> KernelPlan:
    own = replace(layer, tuning=replace(layer.tuning, walk=walk))
    hooks = {"publish": publish, "num_chunks": group.settings.homeward.num_chunks}
    hooks["sends"] = push is Push.epilogue
    return plan_layer(group, own, "push", num_gemm_ctas=num_gemm_ctas, **hooks)


def upload_home(
    group: DeviceGroup, layer: Layer, *, num_gemm_ctas: int, walk: Walk | None = None
) -> None:
    """Tell the launches that follow which tiles there are, in which order units go home, and in
    which tokens are reduced.

    The last tiles are cut for so many CTAs of each rank; launches of any other number are right.
    `walk` None: as the settings of the group say; any launch takes any order.
    """
    walk = walk or group.settings.walk
    plan = _plan(group, layer, publish=True, num_gemm_ctas=num_gemm_ctas, walk=walk)
    orders = {
        rank: order_tokens(
            group.plans[rank],
            [its.layout.num_tiles for its in group.plans],
            num_tokens=len(group.routing.topk_idx[rank]),
            num_parts=group.settings.num_parts,
        )
        for rank in group.ranks
    }
    for rank in group.ranks:
        layout = group.plans[rank].layout
        records = upload_tiles(group.heap, rank, layout, plan)
        units = order_units(records, layout, plan, group.settings.granularity)
        group.heap.fill(rank, Slot.push_units, units)
        group.heap.fill(rank, Slot.reduce_order, orders[rank])
        words = group.tensor(rank, Slot.words)
        words[int(Word.num_units)] = len(units)
        words[int(Word.max_stored)] = len(group.tensor(rank, Slot.tile_stored))


def fused_home_launch(
    group: DeviceGroup,
    layer: Layer,
    a: torch.Tensor,  # (ranks of this process, receive rows, k) bf16
    *,
    roles: Roles = Roles.fixed,
    push: Push = Push.ctas,
    reduces: Reduces = Reduces.all,
    sending: torch.Tensor | None = None,  # table of communication; None: that of all
    num_stamps: int = 0,  # that a warp has room for; 0: none is left
) -> BoundLaunch:
    """A launch of both on torch's current stream, behind the gate of the group.

    Raises ValueError where the two do not fit together or not onto the chip.
    """
    check_roles(roles, group.knobs.num_ctas)
    split = Split(num_comm_ctas=group.knobs.num_ctas, num_gemm_ctas=ctas_beside(group, layer))
    how = {"roles": roles, "push": push, "reduces": reduces, "sending": sending}
    return _bound(group, layer, a, split, num_stamps=num_stamps, **how)


def gemm_home_launch(
    group: DeviceGroup,
    layer: Layer,
    a: torch.Tensor,  # (ranks of this process, receive rows, k) bf16
    *,
    num_gemm_ctas: int,  # of each rank
    publish: bool = False,
) -> Callable[[], None]:
    """The GEMM alone on some SMs; with `publish` it tells of tiles, which nobody hears.

    Ranks that share a launch multiply at once: theirs is the fused kernel, nobody communicating.
    """
    if len(group.ranks) > 1:
        split = Split(num_comm_ctas=0, num_gemm_ctas=num_gemm_ctas)
        return _bound(
            *(group, layer, a, split), roles=Roles.fixed, reduces=Reduces.none, publish=publish
        )
    plan = _plan(group, layer, publish=publish, num_gemm_ctas=num_gemm_ctas)
    (rank,) = group.ranks
    out = group.tensor(rank, Slot.y).view(torch.bfloat16)
    return bind_alone(group, layer, plan, a=a[0], d=out)


def _bound(
    group: DeviceGroup,
    layer: Layer,
    a: torch.Tensor,
    split: Split,
    *,
    roles: Roles,
    push: Push = Push.ctas,
    reduces: Reduces,
    publish: bool = True,
    sending: torch.Tensor | None = None,
    num_stamps: int = 0,
) -> BoundLaunch:
    """A launch of the fused kernel of all ranks of this process."""
    ranks = group.ranks
    products = [group.tensor(rank, Slot.y).view(torch.bfloat16) for rank in ranks]
    constants = constants_of("push", group.settings, group.shape, group.knobs)
    plan = plan_home_launch(
        _plan(
            *(group, layer),
            publish=publish,
            num_gemm_ctas=split.num_gemm_ctas,
            push=push,
            walk=group.settings.walk,
        ),
        replace(constants, num_parts=group.settings.num_parts),
        roles=roles,
        reduces=reduces,
        num_launch_ranks=len(ranks),
        a_rank_pitch=a.stride(0),
        d_rank_pitch=rank_pitch(products),
    )
    return bind_fused(
        *(group, layer, plan, split),
        a=a[0],
        d=products[0],
        sending=sending,
        num_stamps=num_stamps,
    )
