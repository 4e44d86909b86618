"""Torch on the CPU beside the host executor: gloo between rank processes, one thread a rank.

Knows nothing of oracles and of what is measured beside it. Rows are NumPy's and torch's at once: no
copy stands between the two.

Windows are those of the host executor's launches: from behind the barrier to this rank's last row
or token. Of a dispatch `plan` is the route, exchange of counts included. Combine takes the route of
its dispatch, as our combine takes its Plan, and has nothing left to plan.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tilepipe.baselines.collective import Collective, joined
from tilepipe.baselines.layer import Route, TorchLayer
from tilepipe.fabric.host import HostHeap
from tilepipe.host.launch import Stamps

__all__ = ["HostTorch", "joined_on_host"]

_CPU = torch.device("cpu")


@contextmanager
def joined_on_host(
    heap: HostHeap, *, limit_s: float, start_limit_s: float
) -> Iterator[Collective | None]:
    """Torch's group over the ranks of a heap; None where the rank is alone.

    Rank 0 keeps the store on a port that is free, and tells it through the heap. Raises
    TimeoutError where the store cannot be reached, and what `joined` raises.
    """
    # As the BLAS of our own contenders.
    torch.set_num_threads(1)
    if heap.num_ranks == 1:
        yield None
        return
    limit = timedelta(seconds=start_limit_s)
    own = None
    if heap.rank == 0:
        own = TCPStore("127.0.0.1", 0, is_master=True, timeout=limit, wait_for_workers=False)
    port = heap.said_by_all(own.port if own else 0)[0]
    try:
        store = own or TCPStore("127.0.0.1", port, timeout=limit)
    except RuntimeError as error:
        heap.abort()
        raise TimeoutError(
            f"rank {heap.rank} did not reach torch's store of rank 0 within {start_limit_s:g} s "
            f"(launch.time_limit_s): {error}"
        ) from error
    with joined(
        store,
        backend="gloo",
        rank=heap.rank,
        num_ranks=heap.num_ranks,
        limit_s=limit_s,
        give_up=heap.abort,
    ) as collective:
        yield collective
        heap.barrier()  # the store goes with rank 0


class HostTorch:
    """The layer of one rank, in NumPy's terms."""

    def __init__(
        self,
        topk_idx: NDArray[np.int32],  # (num_tokens, num_topk)
        topk_weights: NDArray[np.float32],  # (num_tokens, num_topk)
        *,
        num_experts: int,
        num_received: int,
        hidden: int,  # of the rows that travel
        collective: Collective | None,
        weights: Sequence[NDArray[np.float32]] = (),  # per expert here (N, K), exact in bf16
        second: Sequence[NDArray[np.float32]] = (),  # the same of a layer's second GEMM
    ) -> None:
        num_tokens, num_topk = topk_idx.shape
        self._topk_idx = torch.from_numpy(topk_idx.astype(np.int64))
        self._topk_weights = torch.from_numpy(topk_weights)
        self._layer = TorchLayer(
            num_tokens=num_tokens,
            num_topk=num_topk,
            num_experts=num_experts,
            num_received=num_received,
            hidden=hidden,
            device=_CPU,
            weights=_stacked(weights) if weights else None,
            collective=collective,
        )
        self._second = _stacked(second) if second else None
        self._route = self._layer.make_route(self._topk_idx)
        self._product = torch.zeros(0, 0, dtype=torch.bfloat16)

    @property
    def received(self) -> NDArray[np.uint16]:  # (num_received, hidden), by expert, no gaps
        """Rows that the latest dispatch has brought."""
        return _bits(self._layer.received)

    @property
    def product(self) -> NDArray[np.uint16]:  # (num_received, N), by expert, no gaps
        """Rows that the latest GEMM has made."""
        return _bits(self._product)

    @property
    def out(self) -> NDArray[np.uint16]:  # (num_tokens, hidden)
        """Tokens that the latest combine has summed."""
        return _bits(self._layer.out)

    def poison(self, value: int) -> None:
        """Overwrite all outputs with these bf16 bits."""
        self._layer.poison(value, self._route)
        self._product = torch.zeros(0, 0, dtype=torch.bfloat16)

    # Launches. Each runs on all ranks at once.

    def dispatch(self, x: NDArray[np.uint16]) -> Stamps:  # (num_tokens, hidden) bf16 bits
        """Every row to its expert's rank."""
        return self._routed(lambda route: self._layer.dispatch(route, _rows(x)))

    def dispatch_gemm(self, x: NDArray[np.uint16]) -> Stamps:  # (num_tokens, hidden) bf16 bits
        """The same, then each expert's rows times its weight."""

        def work(route: Route) -> None:
            self._product = self._layer.multiply(route, self._layer.dispatch(route, _rows(x)))

        return self._routed(work)

    def combine(self, y: NDArray[np.uint16]) -> Stamps:  # (num_received, hidden) bf16 bits
        """Rows home, and their weighted sum."""
        start_ns = time.monotonic_ns()
        self._layer.combine(self._route, _rows(y), self._topk_weights)
        return _stamps(start_ns, start_ns)

    def gemm_combine(self, a: NDArray[np.uint16]) -> Stamps:  # (num_received, K) bf16 bits
        """Each expert's rows times its weight, then the same."""
        start_ns = time.monotonic_ns()
        y = self._layer.multiply(self._route, _rows(a))
        self._layer.combine(self._route, y, self._topk_weights)
        return _stamps(start_ns, start_ns)

    def moe_layer(self, x: NDArray[np.uint16]) -> Stamps:  # (num_tokens, hidden) bf16 bits
        """Rows to their experts, through both products, home, and their weighted sum."""
        second = self._second
        assert second is not None, "a layer without second weights"
        return self._routed(
            lambda route: self._layer.forward(route, _rows(x), self._topk_weights, second)
        )

    def _routed(self, work: Callable[[Route], object]) -> Stamps:
        start_ns = time.monotonic_ns()
        self._route = self._layer.make_route(self._topk_idx)
        planned_ns = time.monotonic_ns()
        work(self._route)
        return _stamps(start_ns, planned_ns)


def _stacked(weights: Sequence[NDArray[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(np.stack(weights)).bfloat16()


def _stamps(start_ns: int, planned_ns: int) -> Stamps:
    end_ns = time.monotonic_ns()
    return Stamps(start_ns=start_ns, planned_ns=planned_ns, computed_ns=end_ns, sent_ns=end_ns)


def _rows(bits: NDArray[np.uint16]) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


def _bits(rows: torch.Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = rows.view(torch.uint16).numpy()
    return bits
