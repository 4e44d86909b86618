"""Torch's layer as a further contender of a whole layer on the GPU.

Knows nothing of how torch moves rows; see `beside` for who joins its group and for windows: `plan`
is torch's route, `stage` permute, both `grouped_mm`, SwiGLU between them and the way back.
"""

from itertools import accumulate

import numpy as np
import torch

from tilepipe.baselines.asked import ROUNDINGS
from tilepipe.baselines.collective import Collective
from tilepipe.baselines.layer import TorchLayer
from tilepipe.experiments.cuda.beside import linked_bytes
from tilepipe.experiments.cuda.moe_layer import CudaMoeLayer
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.trial import Gated
from tilepipe.experiments.setting import Components
from tilepipe.measure.device import Part
from tilepipe.measure.gate import BF16_POISON
from tilepipe.records import Verdict
from tilepipe.schedule.layout import count_rows

__all__ = ["BesideTorchLayer"]

_NAME = "torch_layer"


class BesideTorchLayer:
    """The trial of a layer with torch's contender last; both have the same weights in memory."""

    def __init__(self, trial: Gated, collective: Collective | None) -> None:
        assert isinstance(trial, CudaMoeLayer), "another operation"
        self.session = session = trial.session
        self._trial = trial
        routing, ranks = session.routing, session.ranks
        hidden, device = session.config.workload.hidden, session.device
        ids = np.concatenate([routing.topk_idx[rank] for rank in ranks]).astype(np.int64)
        routed = np.concatenate([routing.topk_weights[rank] for rank in ranks])
        # Where the tokens of each own rank lie among those of all.
        counts = [len(routing.topk_idx[rank]) for rank in ranks]
        ends = accumulate(counts)
        self._tokens = {
            rank: slice(end - count, end)
            for rank, count, end in zip(ranks, counts, ends, strict=True)
        }
        per_expert = sum(count_rows(ids, routing.num_experts) for ids in routing.topk_idx)
        num_local = routing.num_experts // len(routing.topk_idx)
        own = slice(ranks[0] * num_local, (ranks[-1] + 1) * num_local)
        self._layer = TorchLayer(
            num_tokens=len(ids),
            num_topk=ids.shape[1],
            num_experts=routing.num_experts,
            num_received=int(np.asarray(per_expert)[own].sum()),
            hidden=hidden,
            device=device,
            weights=trial.first.weights,
            collective=collective,
        )
        self._topk_idx = torch.from_numpy(ids).to(device)
        self._topk_weights = torch.from_numpy(routed).to(device)
        self._x = torch.zeros(len(ids), hidden, dtype=torch.bfloat16, device=device)
        self._make_route()

    @property
    def contenders(self) -> tuple[str, ...]:
        return (*self._trial.contenders, _NAME)

    @property
    def checked(self) -> tuple[str, ...]:
        return (*self._trial.checked, _NAME)

    def prepare(self, contender: str, launch: int) -> None:
        if contender != _NAME:
            self._trial.prepare(contender, launch)
            return
        for rank, tokens in self._tokens.items():
            inputs = self._x[tokens]
            fill_rows(inputs, launch, rank, torch.arange(len(inputs), device=inputs.device))

    def poison(self, contender: str) -> None:
        if contender != _NAME:
            self._trial.poison(contender)
        else:
            self._layer.poison(BF16_POISON, self._route)

    def run(self, contender: str) -> None:
        if contender != _NAME:
            self._trial.run(contender)
            return
        self._make_route()
        self._work()

    def time(self, contender: str) -> Components:
        if contender != _NAME:
            return self._trial.time(contender)
        pace_gbps = self.session.config.launch.pace_gbps
        least_ns = {}
        if pace_gbps is not None:
            moved_ns = round(linked_bytes(self.session) / pace_gbps)
            least_ns = {"moved": moved_ns, "returned": moved_ns}
        return self.session.time_apart(self._make_route, self._steps(), least_ns)

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        if contender != _NAME:
            return self._trial.check(contender, rank, launch, stage)
        out, oracle = self._layer.out[self._tokens[rank]], self._trial.oracle(rank)
        told = {"contender": contender, "stage": stage}
        return [oracle.check(launch, out, num_roundings=ROUNDINGS, **told)]

    def _make_route(self) -> None:
        self._route = self._layer.make_route(self._topk_idx)

    def _work(self) -> None:
        for _, step in self._steps():
            step()

    def _steps(self) -> list[Part]:
        """What follows the route; `moved` and `returned` are what links would do."""
        layer, route, weights = self._layer, self._route, self._topk_weights
        second = self._trial.second.weights

        def send() -> None:
            layer.dispatch(route, self._x)

        def multiply() -> None:
            self._results = layer.apply_experts(route, layer.received, second)

        def bring_home() -> None:
            layer.bring_home(route, self._results)

        def add_up() -> None:
            layer.add_up(weights)

        return [
            *(("moved", send), ("multiplied", multiply)),
            *(("returned", bring_home), ("added", add_up)),
        ]
