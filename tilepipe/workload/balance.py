"""A placement made for given rows: the fullest experts replicated, then packed evenly.

Knows nothing of files and of what a token is.

The idea is DeepSeek's EPLB (github.com/deepseek-ai/EPLB, MIT), its `global` policy: each redundant
physical expert goes to the expert with the most rows a replica, then the fullest replica first to
the emptiest rank that has room. Two things differ. An expert gets at most as many replicas as there
are ranks, since five of one expert on four ranks are less even than four; what is then left over
stays unused. And it is made from the rows that will be sent, so it shows the best that such a
balancer can do, not what one does that must guess from rows of the past.
"""

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Replica
from tilepipe.workload.placement import Placed, Placement, assign, contiguous
from tilepipe.workload.routing import Routing, rows_of_experts

__all__ = ["balanced"]


def balanced(routing: Routing, *, num_redundant: int, replica: Replica) -> Placed:
    """The routing in the packed placement, or in contiguous blocks where those are more even.

    Packing is greedy and takes replicas for equally full, which `replica=local` may not make them;
    so the fullest rank's rows are counted, and are never more than with contiguous blocks.
    """
    num_ranks, num_experts = len(routing.topk_idx), routing.num_experts
    num_physical = num_experts + num_redundant
    assert num_physical % num_ranks == 0, f"{num_physical} physical experts on {num_ranks} ranks"
    packed = assign(
        Placement(
            expert_of=_packed(rows_of_experts(routing), num_ranks, num_physical),
            num_experts=num_experts,
            num_ranks=num_ranks,
            replica=replica,
        ),
        routing,
    )
    blocks = assign(
        contiguous(num_experts, num_ranks, num_local=num_physical // num_ranks), routing
    )
    return blocks if _fullest_rank(blocks) < _fullest_rank(packed) else packed


def _fullest_rank(placed: Placed) -> int:
    """Rows of the rank that receives most."""
    rows = rows_of_experts(placed.physical)
    return int(rows.reshape(placed.placement.num_ranks, -1).sum(axis=1).max())


def _packed(
    rows: NDArray[np.int64],  # (num_experts,)
    num_ranks: int,
    num_physical: int,
) -> NDArray[np.int32]:  # (num_physical,), by expert number on each rank
    num_replicas = np.ones(len(rows), np.int64)
    for _ in range(min(num_physical, len(rows) * num_ranks) - len(rows)):
        fullness = np.where(num_replicas < num_ranks, rows / num_replicas, -1.0)
        num_replicas[np.argmax(fullness)] += 1  # the first of equals
    expert = np.repeat(np.arange(len(rows)), num_replicas)
    share = (rows / num_replicas)[expert]
    num_local = num_physical // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for place in np.argsort(-share, kind="stable").tolist():
        name = int(expert[place])
        # Of equally full ranks take one without: two replicas on a rank spread nothing.
        _, _, rank = min(
            (load[rank], name in held[rank], rank)
            for rank in range(num_ranks)
            if len(held[rank]) < num_local
        )
        held[rank].append(name)
        load[rank] += float(share[place])
    expert_of = np.full((num_ranks, num_local), -1, np.int32)
    for rank, names in enumerate(held):
        expert_of[rank, : len(names)] = sorted(names)
    return expert_of.reshape(-1)
