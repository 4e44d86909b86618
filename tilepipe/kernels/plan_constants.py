"""What the plan kernels are compiled for, and what each keeps where in a rank's scratch.

Knows nothing of addresses; imports no GPU stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tilepipe.config.choices import Granularity, Order
from tilepipe.kernels.constants import Constants
from tilepipe.schedule.settings import TICKET_ROWS, PlanSettings
from tilepipe.schedule.shape import Shape, capacity_of

__all__ = ["MAX_PLAN_CTAS", "PlanConstants", "plan_constants_of"]

# CTAs that make the plan of one rank, at most; 8 ranks of them fit a device of 132 SMs.
MAX_PLAN_CTAS = 8
# Slots of tokens for each CTA where there are fewer: one a thread.
_CTA_SLOTS = 1024


@dataclass(frozen=True, kw_only=True)
class PlanConstants:
    """Sizes and choices that are fixed in both plan kernels."""

    settings: PlanSettings
    capacity: int  # receive rows of every rank
    max_tickets: int  # room for tickets of one rank
    max_runs: int
    max_tokens: int  # of any rank
    num_ctas: int = 1  # of each rank
    num_threads: int = 1024  # of a CTA

    @property
    def num_warps(self) -> int:
        """Of a CTA."""
        return self.num_threads // 32

    @property
    def gate(self) -> Constants:
        """What the gate inside it is compiled for."""
        return Constants(
            num_ranks=self.settings.num_ranks,
            num_experts_per_rank=self.settings.num_experts_per_rank,
            num_topk=1,
            row_bytes=0,
            granularity=Granularity.tile,
        )

    @property
    def plan_parts(self) -> Mapping[str, int]:
        """Words of scratch by what dispatch's plan keeps there."""
        slots, by_token = self.max_tokens * self.settings.num_topk, self._order is Order.token
        return {
            "counts": self.num_ctas * (self.settings.num_experts + 1),
            "totals": self.num_ctas,
            "ranks": slots,  # rows of a warp to the same expert before each slot
            "firsts": slots * by_token,  # ticket << 5 | rows where a slot is its ticket's first
            "token_rows": self.max_tokens * by_token,
            "starts": self.max_tickets,
        }

    @property
    def returns_parts(self) -> Mapping[str, int]:
        """Words of scratch by what the plan of the way back keeps there."""
        by_token, by_queue = self._order is Order.token, self._order is Order.edf
        return {
            "queue_rows": self.max_tickets * by_queue,
            "run_places": self.max_runs * by_queue,
            "tokens": self.max_tickets * by_token,
            "turns": self.max_tickets * by_token,
            "members": self.max_tickets * by_token,
            "bins": (self.max_tokens + 1) * by_token,
            "bin_rows": (self.max_tokens + 1) * by_token,
        }

    @property
    def scratch_words(self) -> int:
        """Room for either plan."""
        return max(sum(self.plan_parts.values()), sum(self.returns_parts.values()))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a CTA, at most: histograms of warps, columns of experts, the table."""
        columns = (self.num_warps + 12) * (self.settings.num_experts + 8)
        return 4 * (columns + 16 * 32) + 512 * self.settings.num_ranks

    @property
    def _order(self) -> Order:
        return self.settings.order


def plan_constants_of(
    settings: PlanSettings, shape: Shape, *, max_ctas: int = MAX_PLAN_CTAS
) -> PlanConstants:
    """What both plan kernels of a group are compiled for; `max_ctas`: of each rank."""
    capacity, tokens = capacity_of(settings, shape), max(shape.max_tokens, 1)
    rows = max(shape.max_tokens * settings.num_topk, capacity)
    # One a tile that it fills, and two ends an expert.
    runs = rows // settings.tile_m + 2 * settings.num_experts
    return PlanConstants(
        settings=settings,
        capacity=capacity,
        max_tickets=rows // TICKET_ROWS + runs,  # full ones, and a short one a run
        max_runs=runs,
        max_tokens=tokens,
        num_ctas=max(1, min(max_ctas, tokens * settings.num_topk // _CTA_SLOTS)),
    )
