"""A placement made for given rows: the fullest experts replicated, then packed evenly.

Knows nothing of files and of what a token is.

The idea is DeepSeek's EPLB (github.com/deepseek-ai/EPLB, MIT), its `global` policy: each redundant
physical expert goes to the expert with the most rows a replica, then the fullest replica first to
the emptiest rank that has room. Here it is made from the rows that will be sent, so it shows the
best that such a balancer can do, not what one does that must guess from rows of the past.
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
    for _ in range(num_physical - len(rows)):
        num_replicas[np.argmax(rows / num_replicas)] += 1  # the first of equals
    expert = np.repeat(np.arange(len(rows)), num_replicas)
    share = (rows / num_replicas)[expert]
    num_local = num_physical // num_ranks
    held: list[list[int]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for place in np.argsort(-share, kind="stable").tolist():
        name = int(expert[place])
        # A second replica on a rank spreads nothing: of equally full ranks take one without.
        _, _, rank = min(
            (load[rank], name in held[rank], rank)
            for rank in range(num_ranks)
            if len(held[rank]) < num_local
        )
        held[rank].append(name)
        load[rank] += float(share[place])
    return np.array([sorted(names) for names in held], dtype=np.int32).reshape(-1)
