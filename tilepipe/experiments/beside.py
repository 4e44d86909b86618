"""Baselines as further contenders of a trial on the host executor: same gate, payload and rotation.

Knows nothing of how a baseline moves rows; torch is loaded only where a point asks for it.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tilepipe.baselines.asked import ROUNDINGS, torch_contender
from tilepipe.config.choices import Baseline, Operation
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, computing_stage, whole_launch
from tilepipe.experiments.setting import Components
from tilepipe.experiments.trial import Gated, Trial
from tilepipe.measure.gate import BF16_POISON
from tilepipe.records import Verdict
from tilepipe.workload.shapes import gemm_shapes

__all__ = ["with_baselines"]


@contextmanager
def with_baselines(trial: Trial) -> Iterator[Gated]:
    """The trial, and beside it what `measure.baselines` asks for and this machine has."""
    session = trial.session
    if Baseline.torch not in session.config.measure.baselines:
        yield trial
        return
    launch = session.config.launch
    # By name: the host executor runs without torch.
    torch_host = importlib.import_module("tilepipe.baselines.host")
    with torch_host.joined_on_host(
        session.host.heap,
        limit_s=launch.watchdog_ms / 1e3,
        start_limit_s=launch.time_limit_s,
    ) as collective:
        yield _BesideTorch(trial, torch_host.HostTorch, collective)


class _BesideTorch:
    """A trial with torch's contender last."""

    def __init__(self, trial: Gated, host_torch: Any, collective: Any) -> None:
        self.session: Session = trial.session
        self._trial = trial
        config, routing = self.session.config, self.session.routing
        self._operation = config.operation
        name = torch_contender(self._operation)
        assert name is not None, "no such contender"
        self._name = name
        self._workload = config.workload
        self._layout = self.session.packed_layout()
        num_gemms = len(gemm_shapes(self._workload, self._operation))
        weights = [self.session.weights(number) for number in range(num_gemms)]
        self._torch = host_torch(
            self.session.topk_idx,
            self.session.topk_weights,
            num_experts=routing.num_experts,
            num_received=self._layout.num_rows,
            hidden=self._workload.hidden,
            collective=collective,
            weights=weights[0] if weights else (),
            second=weights[1] if len(weights) > 1 else (),
        )
        self._oracle = Oracle(self.session.placed, rank=self.session.rank)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (*self._trial.contenders, self._name)

    @property
    def checked(self) -> tuple[str, ...]:
        return (*self._trial.checked, self._name)

    def prepare(self, contender: str, launch: int) -> None:
        if contender != self._name:
            self._trial.prepare(contender, launch)
        elif self._operation not in (Operation.combine, Operation.gemm_combine):
            self._rows = self.session.rows_to_send(launch, self._workload.hidden)
        else:
            combines = self._operation is Operation.combine
            columns = self._workload.hidden if combines else self._workload.intermediate
            self._rows = self.session.received_rows(launch, columns)

    def poison(self, contender: str) -> None:
        if contender != self._name:
            self._trial.poison(contender)
        else:
            self._torch.poison(BF16_POISON)

    def run(self, contender: str) -> Components:
        if contender != self._name:
            return self._trial.run(contender)
        stamps = getattr(self._torch, self._operation.name)(self._rows)
        if self._operation in (Operation.combine, Operation.gemm_combine):
            return computing_stage(stamps)  # it takes the dispatch's route as it is
        return whole_launch(stamps)

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        if contender != self._name:
            return self._trial.check(contender, launch, stage)
        oracle, torch, layout = self._oracle, self._torch, self._layout
        named = {"contender": contender, "stage": stage}
        match self._operation:
            case Operation.dispatch:
                return [oracle.check_dispatched(launch, torch.received, layout, **named)]
            case Operation.dispatch_gemm:
                num_k = self._workload.hidden
                return [oracle.check_gemm(launch, torch.product, layout, num_k=num_k, **named)]
            case Operation.combine:
                return [oracle.check_summed(launch, torch.out, **named)]
            case Operation.moe_layer:
                return [
                    oracle.check_layer(
                        launch,
                        torch.out,
                        intermediate=self._workload.intermediate,
                        num_roundings=ROUNDINGS,
                        **named,
                    )
                ]
            case _:
                num_k = self._workload.intermediate
                return [oracle.check_gemm_combined(launch, torch.out, num_k=num_k, **named)]

    def counts(self) -> dict[str, int]:
        return self._trial.counts()
