"""Combine alone: rows that lie at their experts go home and are summed.

Knows nothing of other operations.
"""

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, computing_stage, whole_launch
from tilepipe.experiments.setting import Components, Memory
from tilepipe.measure.gate import BF16_POISON, poison
from tilepipe.records import Verdict

__all__ = ["TRIAL", "Combine"]


class Combine:
    """The whole of it, its pushes alone, and the reduction of rows that are all home."""

    contenders = ("combine", "push", "reduce")
    checked = ("combine",)

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(home_hidden=config.workload.hidden)

    def __init__(self, session: Session) -> None:
        self.session = session
        hidden = session.config.workload.hidden
        self._y = session.receive_buffer(hidden)
        self._out, self._reduced = session.home_buffer(hidden), session.home_buffer(hidden)
        self._oracle = Oracle(session.placed, rank=session.rank)
        session.exchange_homes()

    def prepare(self, contender: str, launch: int) -> None:
        if contender == "combine":
            self.session.fill_received(launch, self._y)

    def poison(self, contender: str) -> None:
        poison(self._out)
        self.session.host.poison_home(BF16_POISON)

    def run(self, contender: str) -> Components:
        host = self.session.host
        if contender == "reduce":
            return computing_stage(host.reduce(self._reduced))
        if contender == "push":
            return whole_launch(host.push(self._y))
        return whole_launch(host.combine(self._y, self._out))

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        return [self._oracle.check_combined(launch, self._out, contender=contender, stage=stage)]

    def counts(self) -> dict[str, int]:
        return self.session.counts()


TRIAL = Combine
