"""Dispatch alone, the GEMM held out.

Knows nothing of other operations.
"""

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, whole_launch
from tilepipe.experiments.setting import Components, Memory
from tilepipe.measure.gate import poison
from tilepipe.records import Verdict

__all__ = ["TRIAL", "Dispatch"]


class Dispatch:
    """One contender: every row sent and received."""

    contenders = ("dispatch",)
    checked = ("dispatch",)

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden)

    def __init__(self, session: Session) -> None:
        self.session = session
        self._hidden = session.config.workload.hidden
        self._oracle = Oracle(session.placed, rank=session.rank)

    def prepare(self, contender: str, launch: int) -> None:
        self._x = self.session.rows_to_send(launch, self._hidden)

    def poison(self, contender: str) -> None:
        poison(self.session.host.recv_x[: self.session.extent])

    def run(self, contender: str) -> Components:
        return whole_launch(self.session.host.dispatch(self._x))

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        host = self.session.host
        layout = host.current_plan.layout
        return [
            self._oracle.check_dispatched(
                launch, host.recv_x, layout, contender=contender, stage=stage
            )
        ]

    def counts(self) -> dict[str, int]:
        return self.session.counts()


TRIAL = Dispatch
