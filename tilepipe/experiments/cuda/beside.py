"""Baselines as further contenders of a trial on the GPU: same gate, payload and rotation.

Knows nothing of how a baseline moves rows. Where each rank has a GPU torch exchanges rows by NCCL;
ranks of one process are one process to torch, which holds all tokens and all experts.

Windows. `plan` is torch's route, counts exchanged and the host's wait for them included. `stage`
is the work behind it, enqueued ahead of the device like that of our kernels, so that no gap between
torch's launches lies inside; e2e is their sum. Combine takes the route of its dispatch and has a
stage only.

Not yet run on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.recording import Recordable
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.cuda.trial import CudaTrial, Gated
from tilepipe.experiments.setting import Components, plan_settings
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.measure.gate import BF16_POISON
from tilepipe.records import Verdict
from tilepipe.schedule.layout import count_rows, make_layout

__all__ = ["BesideTorch", "with_baselines"]


@contextmanager
def with_baselines(trial: CudaTrial) -> Iterator[Gated]:
    """The trial, and beside it what `measure.baselines` asks for and this version has."""
    session = trial.session
    config, heap = session.config, session.group.heap
    wanted = Baseline.torch in config.measure.baselines
    if not wanted or torch_contender(config.operation, executor="cuda") is None:
        yield trial
        return
    if heap.is_whole:
        yield BesideTorch(trial, None)
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
        yield BesideTorch(trial, collective)


class BesideTorch:
    """A trial with torch's contender last."""

    def __init__(self, trial: Gated, collective: Collective | None) -> None:
        self.session: CudaSession = trial.session
        self._trial = trial
        config, routing, ranks = self.session.config, self.session.routing, self.session.ranks
        name = torch_contender(config.operation, executor="cuda")
        assert name is not None, "no such contender"
        self._name, self._operation = name, config.operation
        counts = np.stack([count_rows(ids, routing.num_experts) for ids in routing.topk_idx])
        packed = replace(plan_settings(config, self.session.placed), layout=Layout.packed)
        self._layouts = {rank: make_layout(rank, counts, packed) for rank in ranks}
        ids = np.concatenate([routing.topk_idx[rank] for rank in ranks]).astype(np.int64)
        weights = np.concatenate([routing.topk_weights[rank] for rank in ranks])
        # Where the tokens, and the received rows, of each own rank lie among those of all.
        self._tokens = _slices({rank: len(routing.topk_idx[rank]) for rank in ranks})
        self._rows = _slices({rank: layout.num_rows for rank, layout in self._layouts.items()})
        hidden, device = config.workload.hidden, self.session.device
        num_received = sum(layout.num_rows for layout in self._layouts.values())
        self._layer = TorchLayer(
            num_tokens=len(ids),
            num_topk=ids.shape[1],
            num_experts=routing.num_experts,
            num_received=num_received,
            hidden=hidden,
            device=device,
            collective=collective,
        )
        self._topk_idx = torch.from_numpy(ids).to(device)
        self._topk_weights = torch.from_numpy(weights).to(device)
        num_inputs = len(ids) if self._operation is Operation.dispatch else num_received
        self._inputs = torch.zeros(num_inputs, hidden, dtype=torch.bfloat16, device=device)
        self._make_route()

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
            if self._operation is Operation.dispatch:
                inputs = self._inputs[self._tokens[rank]]
                fill_rows(inputs, launch, rank, torch.arange(len(inputs), device=inputs.device))
            else:
                _, source, token, slot = self.session.received_homes(rank)
                fill_rows(self._inputs[self._rows[rank]], launch, source, token, slot=slot)

    def fused(self, num_stamps: int) -> BoundLaunch:
        """The trial's own; asked for only where that has one."""
        assert isinstance(self._trial, Recordable)
        return self._trial.fused(num_stamps)

    def poison(self, contender: str) -> None:
        if contender != self._name:
            self._trial.poison(contender)
        else:
            self._layer.poison(BF16_POISON, self._route)

    def run(self, contender: str) -> None:
        if contender != self._name:
            self._trial.run(contender)
            return
        if self._operation is Operation.dispatch:
            self._make_route()
        self._work()

    def time(self, contender: str) -> Components:
        if contender != self._name:
            return self._trial.time(contender)
        plan = self._make_route if self._operation is Operation.dispatch else None
        return self.session.time_apart(plan, self._work)

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        if contender != self._name:
            return self._trial.check(contender, rank, launch, stage)
        named = {"contender": contender, "stage": stage}
        oracle = self.session.oracle(rank)
        if self._operation is Operation.dispatch:
            received = self._layer.received[self._rows[rank]]
            layout = self._layouts[rank]
            return [oracle.check_dispatched(launch, received, layout, **named)]
        return [oracle.check_summed(launch, self._layer.out[self._tokens[rank]], **named)]

    def _make_route(self) -> None:
        self._route = self._layer.make_route(self._topk_idx)

    def _work(self) -> None:
        if self._operation is Operation.dispatch:
            self._layer.dispatch(self._route, self._inputs)
        else:
            self._layer.combine(self._route, self._inputs, self._topk_weights)


def _slices(counts: dict[int, int]) -> dict[int, slice]:
    ends = accumulate(counts.values())
    return {rank: slice(end - counts[rank], end) for rank, end in zip(counts, ends, strict=True)}
