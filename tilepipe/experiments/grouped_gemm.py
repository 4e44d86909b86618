"""Grouped GEMM alone, on rows that have arrived.

Knows nothing of other operations.
"""

import time

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, computing_stage
from tilepipe.experiments.setting import Components, Memory
from tilepipe.measure.gate import poison
from tilepipe.records import Verdict

__all__ = ["TRIAL", "GroupedGemmAlone"]


class GroupedGemmAlone:
    """Two contenders: tile by tile in hand-out order, and one BLAS call an expert."""

    contenders = ("gemm_all", "blas_per_expert")
    checked = contenders

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden)

    def __init__(self, session: Session) -> None:
        self.session = session
        self._hidden = session.config.workload.hidden
        self._gemm = session.gemm()
        columns = 2 * session.config.workload.intermediate
        self._out = {name: session.receive_buffer(columns) for name in self.contenders}
        self._oracle = Oracle(session.placed, rank=session.rank)
        self._launch = 0

    def prepare(self, contender: str, launch: int) -> None:
        # Rows arrive by a dispatch outside every window; all ranks prepare in step.
        host = self.session.host
        host.dispatch(self.session.rows_to_send(launch, self._hidden))

    def poison(self, contender: str) -> None:
        poison(self._out[contender])

    def run(self, contender: str) -> Components:
        host, out = self.session.host, self._out[contender]
        if contender == "gemm_all":
            return computing_stage(host.grouped_gemm(host.recv_x, self._gemm, out))
        start_ns = time.monotonic_ns()
        self._gemm.run_per_expert(host.current_plan, host.recv_x, out)
        return {"stage": (start_ns, time.monotonic_ns() - start_ns)}

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        return [
            self._oracle.check_gemm(
                launch,
                self._out[contender],
                self.session.host.current_plan.layout,
                num_k=self._hidden,
                contender=contender,
                stage=stage,
            )
        ]

    def counts(self) -> dict[str, int]:
        return self.session.counts()


TRIAL = GroupedGemmAlone
