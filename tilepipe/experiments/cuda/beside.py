"""Baselines as further contenders of a trial on the GPU: same gate, payload and rotation.

Knows nothing of how a baseline moves rows. Where each rank has a GPU torch exchanges rows by NCCL;
ranks of one process are one process to torch, which holds all tokens and all experts.

Windows. `plan` is torch's route, counts exchanged and the host's wait for them included. `stage`
is the work behind it, enqueued ahead of the device like that of our kernels, so that no gap between
torch's launches lies inside; e2e is their sum. Combine and GEMM -> combine take the route of their
dispatch and have a stage only.

Where links are paced torch's copies of rows are not: they count as the longer of what they took
and what the fullest link would take, bytes over rate. Rows of such points are marked as paced.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tilepipe.baselines.asked import torch_contender
from tilepipe.baselines.collective import Collective, joined
from tilepipe.baselines.layer import TorchLayer
from tilepipe.config.choices import Baseline, Layout, Operation
from tilepipe.experiments.cuda.heap import watchdog_s
from tilepipe.experiments.cuda.layer import own_weights
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.recording import Recordable
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.cuda.trial import CudaTrial, Gated
from tilepipe.experiments.setting import Components, plan_settings
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.measure.device import Part
from tilepipe.measure.gate import BF16_POISON
from tilepipe.records import Verdict
from tilepipe.schedule.layout import count_rows, make_layout
from tilepipe.workload.shapes import gemm_shapes, logical_bytes, row_bytes, wire_bytes

__all__ = ["BesideTorch", "with_baselines"]

# Steps that a link does where each rank has a GPU of its own: rows out, and rows home.
_BY_LINK = ("moved", "returned")


@contextmanager
def with_baselines(trial: CudaTrial) -> Iterator[Gated]:
    """The trial, and beside it what `measure.baselines` asks for and this version has."""
    session = trial.session
    config, heap = session.config, session.group.heap
    wanted = Baseline.torch in config.measure.baselines
    if not wanted or torch_contender(config.operation) is None:
        yield trial
        return
    beside = _beside(config.operation)
    if heap.is_whole:
        yield beside(trial, None)
        return
    store, _, _ = next(rendezvous("env://"))
    with joined(
        PrefixStore("baselines", store),
        backend="nccl",
        rank=session.ranks[0],
        num_ranks=heap.num_ranks,
        limit_s=watchdog_s(config),
        give_up=lambda: None,  # whoever closes the heap tells the peers
        device=session.device,
    ) as collective:
        yield beside(trial, collective)


def _beside(operation: Operation) -> Callable[[CudaTrial, Collective | None], Gated]:
    if operation is not Operation.moe_layer:
        return BesideTorch
    # Loads the kernels of both halves: only where they run.
    from tilepipe.experiments.cuda.beside_layer import BesideTorchLayer

    return BesideTorchLayer


class BesideTorch:
    """A trial with torch's contender last."""

    def __init__(self, trial: Gated, collective: Collective | None) -> None:
        self.session: CudaSession = trial.session
        self._trial = trial
        config, routing, ranks = self.session.config, self.session.routing, self.session.ranks
        name = torch_contender(config.operation)
        assert name is not None, "no such contender"
        self._name, self._operation = name, config.operation
        counts = np.stack([count_rows(ids, routing.num_experts) for ids in routing.topk_idx])
        packed = replace(plan_settings(config, self.session.placed), layout=Layout.packed)
        self._layouts = {rank: make_layout(rank, counts, packed) for rank in ranks}
        # Where the tokens, and the received rows, of each own rank lie among those of all.
        self._tokens = _slices({rank: len(routing.topk_idx[rank]) for rank in ranks})
        self._rows = _slices({rank: layout.num_rows for rank, layout in self._layouts.items()})
        self._reserve(collective)
        self._make_route()

    def _weights(self) -> torch.Tensor | None:  # (experts here, n, k) bf16
        """Weights of the experts of all own ranks; None where nothing is multiplied."""
        shapes = gemm_shapes(self.session.config.workload, self._operation)
        return own_weights(self.session, shapes[0]) if shapes else None

    def _reserve(self, collective: Collective | None) -> None:
        """Inputs, outputs and what lies between them, of all own ranks."""
        session, workload = self.session, self.session.config.workload
        routing, ranks, device = session.routing, session.ranks, session.device
        ids = np.concatenate([routing.topk_idx[rank] for rank in ranks]).astype(np.int64)
        routed = np.concatenate([routing.topk_weights[rank] for rank in ranks])
        self._topk_idx = torch.from_numpy(ids).to(device)
        self._topk_weights = torch.from_numpy(routed).to(device)
        num_received = sum(layout.num_rows for layout in self._layouts.values())
        self._layer = TorchLayer(
            num_tokens=len(ids),
            num_topk=ids.shape[1],
            num_experts=routing.num_experts,
            num_received=num_received,
            hidden=workload.hidden,
            device=device,
            weights=self._weights(),
            collective=collective,
        )
        shape = len(ids) if self._sends else num_received, workload.hidden
        if self._operation is Operation.gemm_combine:
            shape = num_received, workload.intermediate
        self._inputs = torch.zeros(shape, dtype=torch.bfloat16, device=device)
        shapes = gemm_shapes(workload, self._operation)
        num_n = shapes[-1].n if shapes else 0
        self._product = torch.zeros(num_received, num_n, dtype=torch.bfloat16, device=device)

    @property
    def _sends(self) -> bool:
        """Whether a launch begins with tokens, and so with a route; else with received rows."""
        return self._operation not in (Operation.combine, Operation.gemm_combine)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (*self._trial.contenders, self._name)

    @property
    def checked(self) -> tuple[str, ...]:
        return (*self._trial.checked, self._name)

    def prepare(self, contender: str, launch: int) -> None:
        if contender != self._name:
            self._trial.prepare(contender, launch)
            return
        for rank in self.session.ranks:
            if self._sends:
                inputs = self._inputs[self._tokens[rank]]
                fill_rows(inputs, launch, rank, torch.arange(len(inputs), device=inputs.device))
            else:
                _, source, token, slot = self.session.received_homes(rank)
                fill_rows(self._inputs[self._rows[rank]], launch, source, token, slot=slot)

    def stamped(self, contender: str, num_stamps: int) -> BoundLaunch:
        """The trial's own; asked for only where that has some."""
        assert isinstance(self._trial, Recordable)
        return self._trial.stamped(contender, num_stamps)

    def opening(self, contender: str) -> Callable[[], None]:
        """The trial's own; asked for only where it has launches that leave stamps."""
        assert isinstance(self._trial, Recordable)
        return self._trial.opening(contender)

    def poison(self, contender: str) -> None:
        if contender != self._name:
            self._trial.poison(contender)
        else:
            self._layer.poison(BF16_POISON, self._route)
            self._product.view(torch.int16).fill_(BF16_POISON)

    def run(self, contender: str) -> None:
        if contender != self._name:
            self._trial.run(contender)
            return
        if self._sends:
            self._make_route()
        self._work()

    def time(self, contender: str) -> Components:
        if contender != self._name:
            return self._trial.time(contender)
        plan = self._make_route if self._sends else None
        pace_gbps = self.session.config.launch.pace_gbps
        if pace_gbps is None:
            return self.session.time_apart(plan, [("stage", self._work)])
        least_ns = dict.fromkeys(_BY_LINK, round(self._linked_bytes / pace_gbps))
        return self.session.time_apart(plan, self._steps(), least_ns)

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        if contender != self._name:
            return self._trial.check(contender, rank, launch, stage)
        named = {"contender": contender, "stage": stage}
        session, workload, layer = self.session, self.session.config.workload, self._layer
        oracle, placement = session.oracle(rank), session.placed.placement
        layout, tokens, rows = self._layouts[rank], self._tokens[rank], self._rows[rank]
        match self._operation:
            case Operation.dispatch:
                return [oracle.check_dispatched(launch, layer.received[rows], layout, **named)]
            case Operation.combine:
                return [oracle.check_summed(launch, layer.out[tokens], **named)]
            case Operation.dispatch_gemm:
                first_rows = [int(first) for first in layout.expert_first_row[:-1]]
                experts = placement.experts_on(rank).tolist()
                products = {"experts": experts, "num_k": workload.hidden, **named}
                return [oracle.check_products(launch, self._product[rows], first_rows, **products)]
            case _:
                experts = placement.expert_of.tolist()
                sums = {"experts": experts, "num_k": workload.intermediate, **named}
                return [oracle.check_gemm_combined(launch, layer.out[tokens], **sums)]

    def _make_route(self) -> None:
        self._route = self._layer.make_route(self._topk_idx)

    def _work(self) -> None:
        for _, step in self._steps():
            step()

    def _steps(self) -> list[Part]:
        """What follows the route; `moved` is what ranks on GPUs of their own would do by link."""
        layer, weights = self._layer, self._topk_weights
        route, inputs = self._route, self._inputs

        def send() -> None:
            layer.dispatch(route, inputs)

        def multiply() -> None:
            self._product = layer.multiply(route, layer.received if self._sends else inputs)

        def bring_home() -> None:
            by_gemm = self._operation is Operation.gemm_combine
            layer.bring_home(route, self._product if by_gemm else inputs)

        def add_up() -> None:
            layer.add_up(weights)

        moved: list[Part] = [("moved", send)]
        if not self._sends:
            moved = [("moved", bring_home), ("added", add_up)]
        match self._operation:
            case Operation.dispatch_gemm:
                return [*moved, ("multiplied", multiply)]
            case Operation.gemm_combine:
                return [("multiplied", multiply), *moved]
            case _:
                return moved

    @cached_property
    def _linked_bytes(self) -> int:
        """What crosses the fullest link one way; of one rank alone, all its rows."""
        routing, workload = self.session.routing, self.session.config.workload
        count = wire_bytes if len(routing.topk_idx) > 1 else logical_bytes
        traffic = count(routing, row_bytes=row_bytes(workload))
        return max(*traffic.sent_bytes, *traffic.received_bytes)


def _slices(counts: dict[int, int]) -> dict[int, slice]:
    ends = accumulate(counts.values())
    return {rank: slice(end - counts[rank], end) for rank, end in zip(counts, ends, strict=True)}
