"""From the settings of a placement to physical experts, for one routing.

Knows nothing of how a placement is made or a map is read.
"""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from tilepipe.config import placements
from tilepipe.workload.balance import balanced
from tilepipe.workload.expert_map import map_refusal, read_expert_map
from tilepipe.workload.placement import Placed, Placement, assign, contiguous, round_robin
from tilepipe.workload.routing import Routing

__all__ = ["place"]


def place(settings: placements.Placement, routing: Routing) -> Placed:
    """Send each choice of a routing to a physical expert, as the settings ask.

    Every rank finds the same. Raises ValueError for a map that cannot be read or does not fit.
    """
    num_ranks, num_experts = len(routing.topk_idx), routing.num_experts
    match settings:
        case placements.ContiguousPlacement():
            return assign(contiguous(num_experts, num_ranks), routing)
        case placements.RoundRobinPlacement():
            return assign(round_robin(num_experts, num_ranks), routing)
        case placements.FilePlacement():
            return assign(_from_file(settings, num_experts, num_ranks), routing)
        case placements.BalancedPlacement():
            count, replica = settings.num_redundant, settings.replica
            return balanced(routing, num_redundant=count, replica=replica)
    assert_never(settings)


def _from_file(settings: placements.FilePlacement, num_experts: int, num_ranks: int) -> Placement:
    expert_of = read_expert_map(settings.path, settings.layer)
    _refuse_misfit(settings.path, expert_of, num_experts, num_ranks)
    return Placement(
        expert_of=expert_of,
        num_experts=num_experts,
        num_ranks=num_ranks,
        replica=settings.replica,
    )


def _refuse_misfit(
    path: str,
    expert_of: NDArray[np.int32],  # (num_physical,), -1 = holds none
    num_experts: int,
    num_ranks: int,
) -> None:
    num_physical = len(expert_of)
    if num_physical < num_experts:
        raise map_refusal(
            path,
            f"{num_physical} physical experts cannot hold workload.num_experts={num_experts}",
            "make the map for this many experts, or type another workload",
        )
    if num_physical % num_ranks:
        raise map_refusal(
            path,
            f"{num_physical} physical experts are no multiple of launch.num_ranks={num_ranks}",
            "make the map for this many ranks, or type a divisor as launch.num_ranks",
        )
    if int(expert_of.max()) >= num_experts:
        place = int(np.argmax(expert_of >= num_experts))
        raise map_refusal(
            path,
            f"physical expert {place} holds expert {expert_of[place]}, but "
            f"workload.num_experts={num_experts}",
            "make the map for this many experts, or type another workload",
        )
    missing = np.setdiff1d(np.arange(num_experts), expert_of)
    if len(missing):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise map_refusal(
            path,
            f"no physical expert holds expert {missing[0]}{more} of {num_experts}",
            "give every expert one at least",
        )
