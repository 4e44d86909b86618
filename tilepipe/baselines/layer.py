"""Dispatch, grouped GEMM and combine as one writes them with torch: permute, all-to-all, permute.

Knows nothing of clocks, oracle or Plan. Runs on tensors of any device: gloo and the CPU, NCCL and a
GPU, or, without a collective, one process that holds all tokens and all experts.

What lies where. Making the route (`make_route`) sorts slots by expert, exchanges counts, brings the
sizes of the all-to-all to the host, which waits for the device once, and sorts what will come by
expert: it stands where our plan stands. `dispatch` gathers rows in the order in which they leave,
exchanges them and gathers them by expert, no gaps between experts. `combine` is the way back, then
the weighted sum over slots in FP32, rounded once. With all ranks in one process there is nobody to
exchange with: one gather each way is all.

Buffers are reserved beforehand, as those of our kernels are; only scratch of torch's own operators
is not.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tilepipe.baselines.collective import Collective

__all__ = ["Route", "TorchLayer"]

# Public since torch 2.10; before, the same function under its first name.
_grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm


@dataclass(frozen=True, kw_only=True)
class Route:
    """Where the rows of this process go, and where those that come belong."""

    slot: torch.Tensor  # (num_sent,) int64: token x topk + slot of each row, as they leave
    token: torch.Tensor  # (num_sent,) int64
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    arrange: torch.Tensor | None  # (num_received,) int64: which row comes next by expert
    expert_ends: torch.Tensor  # (experts here,) int32: rows of experts up to and with each


class TorchLayer:
    """Tokens and experts of one process, for routings that bring as many rows."""

    def __init__(
        self,
        *,
        num_tokens: int,
        num_topk: int,
        num_experts: int,  # of the whole group
        num_received: int,
        hidden: int,  # of the rows that travel
        device: torch.device,
        weights: torch.Tensor | None = None,  # (experts here, N, K) bf16
        collective: Collective | None = None,  # None: this process is the whole group
    ) -> None:
        self.num_topk = num_topk
        self._weights, self._collective = weights, collective
        num_ranks = collective.num_ranks if collective else 1
        self._num_local = num_experts // num_ranks

        def rows(count: int) -> torch.Tensor:
            return torch.zeros(count, hidden, dtype=torch.bfloat16, device=device)

        self.received = rows(num_received)  # by expert, then source rank and token
        num_moved = num_tokens * num_topk if collective else 0
        self._near = rows(num_moved)  # this side of the exchange, as rows leave or return
        self._far = rows(num_received if collective else 0)  # the other side
        self._home = rows(num_tokens * num_topk)  # rows of dropped slots stay zero
        self.out = rows(num_tokens)
        self._bounds = torch.arange(num_experts + 1, device=device)
        local = torch.arange(self._num_local, device=device)
        self._expert_of_count = local.repeat(num_ranks)

    def make_route(self, topk_idx: torch.Tensor) -> Route:  # (num_tokens, num_topk) int64
        """The route of a routing; -1 in topk_idx is a dropped slot. Collective."""
        experts, order = torch.sort(topk_idx.flatten(), stable=True)
        first = torch.searchsorted(experts, self._bounds)  # dropped slots come before expert 0
        rows_to = first.diff()
        if self._collective is None:
            (num_dropped,) = first[:1].tolist()
            sent = received = [len(order) - num_dropped]
            rows_here, arrange = rows_to, None
        else:
            num_ranks = self._collective.num_ranks
            rows_from = torch.empty_like(rows_to)
            self._collective.exchange(rows_from, rows_to)
            by_rank = [counts.view(num_ranks, -1).sum(1) for counts in (rows_to, rows_from)]
            num_dropped, *sizes = torch.cat([first[:1], *by_rank]).tolist()
            sent, received = sizes[:num_ranks], sizes[num_ranks:]
            rows_here = rows_from.view(num_ranks, -1).sum(0)
            expert = torch.repeat_interleave(
                self._expert_of_count, rows_from, output_size=sum(received)
            )
            arrange = torch.argsort(expert, stable=True)
        slot = order[num_dropped:]
        return Route(
            slot=slot,
            token=slot // self.num_topk,
            sent=sent,
            received=received,
            arrange=arrange,
            expert_ends=rows_here.cumsum(0, dtype=torch.int32),
        )

    def dispatch(self, route: Route, x: torch.Tensor) -> torch.Tensor:  # (num_tokens, hidden) bf16
        """Every row to the process that owns its expert: (num_received, hidden), by expert."""
        if self._collective is None or route.arrange is None:
            return torch.index_select(x, 0, route.token, out=self.received)
        leaving = self._near[: len(route.token)]
        torch.index_select(x, 0, route.token, out=leaving)
        self._collective.exchange(self._far, leaving, route.received, route.sent)
        return torch.index_select(self._far, 0, route.arrange, out=self.received)

    def multiply(self, route: Route, rows: torch.Tensor) -> torch.Tensor:  # (num_received, K) bf16
        """Each expert's rows times its weight: (num_received, N)."""
        assert self._weights is not None, "a layer without weights"
        return _multiplied(route, rows, self._weights)

    def forward(
        self,
        route: Route,
        x: torch.Tensor,  # (num_tokens, hidden) bf16
        topk_weights: torch.Tensor,  # as of combine
        second: torch.Tensor,  # (experts here, hidden, intermediate) bf16
    ) -> torch.Tensor:  # (num_tokens, hidden) bf16
        """The whole layer."""
        y = self.apply_experts(route, self.dispatch(route, x), second)
        return self.combine(route, y, topk_weights)

    def apply_experts(
        self,
        route: Route,
        rows: torch.Tensor,  # (num_received, hidden) bf16, by expert
        second: torch.Tensor,  # (experts here, hidden, intermediate) bf16
    ) -> torch.Tensor:  # (num_received, hidden) bf16
        """Both products; of the layer's own weights the first half makes gate, the second up."""
        gate, up = self.multiply(route, rows).chunk(2, dim=1)
        return _multiplied(route, F.silu(gate).mul_(up), second)

    def combine(
        self,
        route: Route,
        y: torch.Tensor,  # (num_received, hidden) bf16, by expert
        topk_weights: torch.Tensor,  # (num_tokens, num_topk) float32, 0 where a slot is dropped
    ) -> torch.Tensor:  # (num_tokens, hidden) bf16
        """Rows back to their tokens, and the weighted sum over slots."""
        self.bring_home(route, y)
        return self.add_up(topk_weights)

    def bring_home(self, route: Route, y: torch.Tensor) -> None:  # (num_received, hidden) bf16
        """Every row back to its token and slot."""
        returned = y
        if self._collective is not None and route.arrange is not None:
            # As it arranged the rows that came, backwards.
            self._far.index_copy_(0, route.arrange, y)
            returned = self._near[: len(route.slot)]
            self._collective.exchange(returned, self._far, route.sent, route.received)
        self._home.index_copy_(0, route.slot, returned)

    def add_up(
        self,
        topk_weights: torch.Tensor,  # (num_tokens, num_topk) float32, 0 where a slot is dropped
    ) -> torch.Tensor:  # (num_tokens, hidden) bf16
        """The weighted sum over slots of rows that are home."""
        rows = self._home.view(-1, self.num_topk, self._home.shape[1])
        return self.out.copy_(torch.mul(rows, topk_weights[:, :, None]).sum(1))

    def poison(self, value: int, route: Route) -> None:  # value: bf16 bits
        """Overwrite all that a launch of this route writes."""
        for rows in (self.received, self._near, self._far, self.out):
            rows.view(torch.int16).fill_(value)
        self._home.view(torch.int16).index_fill_(0, route.slot, value)


def _multiplied(route: Route, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not len(rows):  # which grouped_mm refuses
        return rows.new_zeros(0, weights.shape[1])
    return _grouped_mm(rows, weights.transpose(-2, -1), offs=route.expert_ends)
