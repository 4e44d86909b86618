"""Combine alone on the GPU: rows that lie at their experts go home and are summed.

Knows nothing of other operations.
"""

from functools import partial

from tilepipe.config.schemas import Config
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import Components, Memory
from tilepipe.fabric.table import Slot
from tilepipe.measure.device import Part
from tilepipe.records import Verdict

__all__ = ["TRIAL", "CudaCombine"]

_OUTPUT = {"combine": Slot.out, "reduce": Slot.reduced}


class CudaCombine:
    """The whole of it, its pushes alone, and the reduction of rows that are all home."""

    contenders = ("combine", "push", "reduce")
    checked = ("combine", "reduce")

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(home_hidden=config.workload.hidden)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        openings = (
            session.group.opening(exchange=False, preset=preset) for preset in (False, True)
        )
        session.group.launcher.prepare(*openings, "combine", "push", "reduce")
        session.exchange_homes()

    def prepare(self, contender: str, launch: int) -> None:
        self.session.fill_received(launch)
        if contender == "reduce":  # brings home what it will sum
            for rank in self.session.ranks:
                poison(self.session.group.tensor(rank, Slot.home_y))
            self.session.group.open(exchange=False)
            self.session.group.push()

    def poison(self, contender: str) -> None:
        for rank in self.session.ranks:
            poison(self.session.group.tensor(rank, _OUTPUT[contender]))
            if contender == "combine":
                poison(self.session.group.tensor(rank, Slot.home_y))

    def run(self, contender: str) -> None:
        for _, launch in self._parts(contender):
            launch()

    def time(self, contender: str) -> Components:
        return self.session.time(self._parts(contender), whole=contender != "reduce")

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        # Of the tokens that the rank has: there is room for those of the rank with the most.
        num_tokens = len(self.session.routing.topk_idx[rank])
        out = self.session.group.tensor(rank, _OUTPUT[contender])[:num_tokens]
        oracle = self.session.oracle(rank)
        planned: list[Verdict] = []
        if stage == "before" and contender == "combine":
            planned = self.session.check_plan(rank, contender=contender, returns=True)
        return [*planned, oracle.check_combined(launch, out, contender=contender, stage=stage)]

    def _parts(self, contender: str) -> list[Part]:
        group = self.session.group
        preset = contender == "reduce"
        opening = partial(group.open, exchange=False, preset=preset)
        return [("plan", opening), ("stage", getattr(group, contender))]


TRIAL = CudaCombine
