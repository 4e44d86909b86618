"""Dispatch alone on the GPU, the GEMM held out.

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

__all__ = ["TRIAL", "CudaDispatch"]


class CudaDispatch:
    """One contender: every row sent and received."""

    contenders = ("dispatch",)
    checked = ("dispatch",)

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        session.group.launcher.prepare(session.group.opening(exchange=True), "dispatch")

    def prepare(self, contender: str, launch: int) -> None:
        self.session.fill_rows_to_send(launch)

    def poison(self, contender: str) -> None:
        for rank in self.session.ranks:
            poison(self.session.group.tensor(rank, Slot.recv_x))
            poison(self.session.group.tensor(rank, Slot.row_home))

    def run(self, contender: str) -> None:
        self.session.group.open(exchange=True)
        self.session.group.dispatch()

    def time(self, contender: str) -> Components:
        group = self.session.group
        parts: list[Part] = [
            ("plan", partial(group.open, exchange=True)),
            ("stage", group.dispatch),
        ]
        return self.session.time(parts, whole=True)

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        group, oracle = self.session.group, self.session.oracle(rank)
        layout = group.plans[rank].layout
        rows, homes = group.tensor(rank, Slot.recv_x), group.tensor(rank, Slot.row_home)
        return [
            *(self.session.check_plan(rank, contender=contender) if stage == "before" else []),
            oracle.check_dispatched(launch, rows, layout, contender=contender, stage=stage),
            oracle.check_homes(homes, layout, contender=contender, stage=stage),
        ]


TRIAL = CudaDispatch
