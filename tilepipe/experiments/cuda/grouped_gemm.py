"""Grouped GEMM alone on the GPU, on rows that have arrived, beside the libraries' products.

Knows nothing of other operations.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from tilepipe.baselines.products import (
    QUACK_CONFIGS,
    Operands,
    Product,
    has_quack,
    product_of,
    quickest,
)
from tilepipe.config.choices import Granularity
from tilepipe.config.schemas import Config, GroupedGemmKernel
from tilepipe.experiments.cuda.layer import expert_weights
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import Components, Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.defaults import tuning_of_tile
from tilepipe.kernels.gemm.launch import GroupedGemm, upload_tiles
from tilepipe.kernels.gemm.plan import GemmProblem, plan_gemm
from tilepipe.records import Verdict
from tilepipe.workload.shapes import gemm_shape

__all__ = ["TRIAL", "CudaGroupedGemm"]

# Ours, compared with the oracle like every product of the same rows.
_OWN = ("gemm_all", "gemm_flags")
_TRIAL_RUNS = 6


class CudaGroupedGemm:
    """Ours without flags and with flags that are set, torch's, quack's, and a dense product."""

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        shape = gemm_shape(session.config.workload, session.config.operation)
        assert shape is not None, "an operation without a GEMM"
        self._n, self._k = shape.n, shape.k
        self.contenders = (*_OWN, "torch_grouped_mm", *(["quack"] * has_quack()), "cublas_dense")
        # A dense product takes the weight of one expert for all rows: it has another result.
        self.checked = tuple(name for name in self.contenders if name != "cublas_dense")
        self._ranks = {rank: _Rank(session, rank, self._n, self._k) for rank in session.ranks}
        self._launches: dict[str, list[Callable[[], None]]] = {
            name: [rank.launch_of(name) for rank in self._ranks.values()]
            for name in self.contenders
        }

    def prepare(self, contender: str, launch: int) -> None:
        for rank, own in self._ranks.items():
            own.fill(self.session.oracle(rank), launch)

    def poison(self, contender: str) -> None:
        for own in self._ranks.values():
            poison(own.out_of(contender))

    def run(self, contender: str) -> None:
        self._set_flags()
        self._multiply(contender)

    def time(self, contender: str) -> Components:
        return self.session.time(
            [("plan", self._set_flags), ("stage", partial(self._multiply, contender))],
            whole=False,
        )

    def _set_flags(self) -> None:
        """All rows are here. Ahead of every launch: where ranks meet, their gate lowers flags."""
        for rank in self.session.ranks:
            self.session.group.tensor(rank, Slot.ready).fill_(torch.iinfo(torch.int32).max)

    def _multiply(self, contender: str) -> None:
        for launch in self._launches[contender]:
            launch()

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        own, oracle = self._ranks[rank], self.session.oracle(rank)
        return [
            oracle.check_products(
                launch,
                own.out_of(contender),
                own.first_rows_of(contender),
                experts=own.experts,
                num_k=self._k,
                contender=contender,
                stage=stage,
            )
        ]


class _Rank:
    """Operands, outputs and launches of one rank."""

    def __init__(self, session: CudaSession, rank: int, n: int, k: int) -> None:
        self._session, self._rank, self._n, self._k = session, rank, n, k
        group = session.group
        self._layout = layout = group.plans[rank].layout
        self._rows = group.tensor(rank, Slot.recv_x).view(torch.bfloat16)
        _, held = layout.held_rows()
        self._held = torch.from_numpy(held).to(session.device)
        self.experts = session.placed.placement.experts_on(rank).tolist()
        self._b = expert_weights(self.experts, n, k, session.device)
        # Libraries take rows without gaps.
        ends = torch.from_numpy(np.cumsum(layout.expert_rows, dtype=np.int32))
        self._operands = Operands(self._b.new_empty(len(held), k), self._b, ends.to(session.device))
        self._outs: dict[str, torch.Tensor] = {}

    def fill(self, oracle: DeviceOracle, launch: int) -> None:
        """Rows as a dispatch of that launch would have left them, gaps poisoned."""
        poison(self._rows)
        oracle.fill_arrived(launch, self._operands.a)
        self._rows.index_copy_(0, self._held, self._operands.a)

    def out_of(self, contender: str) -> torch.Tensor:
        return self._outs[contender]

    def first_rows_of(self, contender: str) -> list[int]:
        """Where each expert begins in the output of a contender."""
        if contender in _OWN:
            return [int(first) for first in self._layout.expert_first_row[:-1]]
        ends = np.cumsum(self._layout.expert_rows)
        return [int(first) for first in ends - self._layout.expert_rows]

    def launch_of(self, contender: str) -> Callable[[], None]:
        """A launch into an output of its own."""
        if contender in _OWN:
            self._outs[contender] = self._b.new_empty(len(self._rows), self._n)
            return self._own(contender)
        operands = replace(self._operands)
        self._outs[contender] = operands.out
        return self._library(contender, operands)

    def _own(self, contender: str) -> Callable[[], None]:
        session, config = self._session, self._session.config
        kernel, group = config.kernel, session.group
        assert isinstance(kernel, GroupedGemmKernel), "another operation"
        num_sms = torch.cuda.get_device_properties(session.device).multi_processor_count
        plan = plan_gemm(
            GemmProblem(
                n=self._n,
                k=self._k,
                num_experts=group.settings.num_experts_per_rank,
                layout=kernel.layout,
                group_align=kernel.tile_m,
                wait=Granularity.tile if contender == "gemm_flags" else None,
            ),
            tuning_of_tile(kernel.tile_m, kernel.tile_n, store=kernel.store, alone=True),
            num_gemm_ctas=num_sms if kernel.num_gemm_ctas is None else kernel.num_gemm_ctas,
            num_sms=num_sms,
        )
        upload_tiles(group.heap, self._rank, self._layout, plan)
        gemm = GroupedGemm(
            plan, num_ranks=group.settings.num_ranks, limit_ns=int(group.watchdog_s * 1e9)
        )
        return gemm.bind(group.heap, self._rank, a=self._rows, b=self._b, d=self._outs[contender])

    def _library(self, contender: str, operands: Operands) -> Callable[[], None]:
        config = "default"
        if contender == "quack":
            products = {
                name: product_of(contender, operands, config=name) for name in QUACK_CONFIGS
            }
            config = quickest(products, self._trial_ns)
        product = product_of(contender, operands, config=config)

        def launch() -> None:
            # Some have no output argument: what they return is the output.
            self._outs[contender] = product()

        return launch

    def _trial_ns(self, product: Product) -> int:
        """The median of a few runs; the first, which compiles, does not count."""
        timer = self._session.timer

        def run() -> None:
            product()

        found = [timer.measure([("stage", run)])["stage"] for _ in range(_TRIAL_RUNS)]
        return int(np.median(found[1:]))


TRIAL = CudaGroupedGemm
