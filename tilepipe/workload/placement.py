"""Which physical expert each choice of a token goes to, and which rank that one lives on.

Knows nothing of how rows travel and of what multiplies them.

A physical expert is a place for the weights of one expert; an expert with several has replicas.
Every rank holds as many as the others: physical expert p lives on rank p // num_local. Plan,
executors and kernels see physical experts only, and see them as experts; weights and results are
the expert's, whichever replica a row went to.

Which replica a row takes is a function of the routing, so that every rank and every machine knows
it: row n of a source rank for an expert, in token order, takes replica (n + source rank) modulo
their number. A sender counts its rows of an expert anyway, to tell how many will come, so a turn
costs no pass of its own. It splits every source rank's rows to within one, which is what a balancer
that divides counts by replicas relies on. Alternatives: the token's position modulo the replicas
(vLLM) follows any period in the text, and the position of the slot decides alone where topk is a
multiple of the replicas; a hash of the token, as later in vLLM, or a draw (SGLang, `dynamic`) is
even on average only, which shows at a few hundred rows; one replica a source rank (SGLang,
`static`) is `local`, but here other ranks' rows still take turns.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Replica
from tilepipe.workload.routing import Routing

__all__ = [
    "Placed",
    "Placement",
    "assign",
    "contiguous",
    "round_robin",
]


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """The expert that each physical expert holds; every expert is held at least once."""

    expert_of: NDArray[np.int32]  # (num_physical,), -1: this one holds none
    num_experts: int
    num_ranks: int
    replica: Replica = Replica.spread

    @property
    def num_physical(self) -> int:
        """Physical experts of all ranks, unused ones included."""
        return len(self.expert_of)

    @property
    def num_local(self) -> int:
        """Physical experts of one rank."""
        return self.num_physical // self.num_ranks

    def experts_on(self, rank: int) -> NDArray[np.int32]:  # (num_local,), -1: holds none
        """The experts that a rank holds, in the order of its physical ones."""
        return self.expert_of[rank * self.num_local : (rank + 1) * self.num_local]


@dataclass(frozen=True, eq=False, kw_only=True)
class Placed:
    """One routing, told by experts and by physical experts."""

    logical: Routing  # ids are experts
    physical: Routing  # the same choices and weights; ids are physical experts
    placement: Placement


def contiguous(num_experts: int, num_ranks: int, *, num_local: int | None = None) -> Placement:
    """Blocks of experts, longer ones first, sizes differing by at most one.

    `num_local` physical experts a rank, those past its block unused; None: as few as hold them.
    """
    size, num_longer = divmod(num_experts, num_ranks)
    num_local = size + (num_longer > 0) if num_local is None else num_local
    expert_of = np.full((num_ranks, num_local), -1, np.int32)
    first = 0
    for rank in range(num_ranks):
        count = size + (rank < num_longer)
        expert_of[rank, :count] = np.arange(first, first + count)
        first += count
    return Placement(expert_of=expert_of.reshape(-1), num_experts=num_experts, num_ranks=num_ranks)


def round_robin(num_experts: int, num_ranks: int) -> Placement:
    """Expert e on rank e % num_ranks, which divides num_experts."""
    assert num_experts % num_ranks == 0, f"{num_experts} experts on {num_ranks} ranks"
    expert_of = np.arange(num_experts, dtype=np.int32).reshape(-1, num_ranks).T.reshape(-1)
    return Placement(
        expert_of=np.ascontiguousarray(expert_of), num_experts=num_experts, num_ranks=num_ranks
    )


def assign(placement: Placement, routing: Routing) -> Placed:
    """Send every choice to a physical expert of its expert; dropped ones stay dropped."""
    physical = tuple(_assigned(placement, rank, ids) for rank, ids in enumerate(routing.topk_idx))
    return Placed(
        logical=routing,
        physical=Routing(physical, routing.topk_weights, placement.num_physical),
        placement=placement,
    )


def _assigned(
    placement: Placement,
    rank: int,
    topk_idx: NDArray[np.int32],  # (num_tokens, num_topk) experts, -1 = dropped
) -> NDArray[np.int32]:  # (num_tokens, num_topk) physical experts
    replicas, num_replicas = _replicas(placement, rank)
    flat = topk_idx.reshape(-1)
    valid = np.flatnonzero(flat >= 0)
    expert = flat[valid]
    physical = np.full(flat.shape, -1, np.int32)
    if replicas.shape[1] == 1:
        physical[valid] = replicas[expert, 0]
    else:
        turn = _turns(expert, placement.num_experts) + rank
        physical[valid] = replicas[expert, turn % num_replicas[expert]]
    assert (placement.expert_of[physical[valid]] == expert).all(), "a row would meet wrong weights"
    return physical.reshape(topk_idx.shape)


def _turns(
    expert: NDArray[np.int32],  # (num_rows,) in token order
    num_experts: int,
) -> NDArray[np.int64]:  # (num_rows,)
    """How many rows of its expert come before each row."""
    order = np.argsort(expert, kind="stable")
    rows = np.bincount(expert, minlength=num_experts)
    first = np.cumsum(rows) - rows
    turns = np.empty(len(expert), np.int64)
    turns[order] = np.arange(len(expert)) - first[expert[order]]
    return turns


def _replicas(placement: Placement, rank: int) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Physical experts that rows of a source rank may take, by expert, and how many there are.

    (num_experts, largest number) in ascending order, padded by -1, and (num_experts,).
    """
    expert_of, num_experts = placement.expert_of, placement.num_experts
    allowed = expert_of >= 0
    if placement.replica is Replica.local:
        on_rank = np.arange(placement.num_physical) // placement.num_local == rank
        held_here = np.zeros(num_experts, np.bool_)
        held_here[expert_of[allowed & on_rank]] = True
        allowed &= on_rank | ~held_here[expert_of]
    physical = np.flatnonzero(allowed)
    expert = expert_of[physical]
    num_replicas = np.bincount(expert, minlength=num_experts)
    table = np.full((num_experts, int(num_replicas.max(initial=1))), -1, np.int32)
    table[expert, _turns(expert, num_experts)] = physical
    return table, num_replicas
