"""Dispatch -> GEMM, fused and unfused, with the stages of its breakdown.

Knows nothing of other operations.
"""

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle, merged
from tilepipe.experiments.session import Session, computing_stage, whole_launch
from tilepipe.experiments.setting import GATE_LAUNCH, Components, Memory
from tilepipe.host.launch import Form
from tilepipe.measure.gate import compare_exact, poison
from tilepipe.records import Verdict

__all__ = ["TRIAL", "DispatchGemm"]


class DispatchGemm:
    """Contenders are the forms of the launch, and dispatch alone."""

    contenders = ("fused", "sequential", "dispatch", "gemm_all", "gemm_flags", "gemm_contended")
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden, spare=True)

    def __init__(self, session: Session) -> None:
        self.session = session
        workload = session.config.workload
        self._hidden = workload.hidden
        self._gemm = session.gemm()
        names = (*self.checked, "other")
        self._out = {name: session.receive_buffer(2 * workload.intermediate) for name in names}
        self._oracle = Oracle(session.placed, rank=session.rank)
        self._num_early = 0
        self._in_gate = False

    def prepare(self, contender: str, launch: int) -> None:
        self._in_gate = launch == GATE_LAUNCH
        if contender not in ("gemm_all", "gemm_flags"):
            self._x = self.session.rows_to_send(launch, self._hidden)

    def poison(self, contender: str) -> None:
        poison(self.session.host.recv_x[: self.session.extent])
        poison(self._out[contender])

    def run(self, contender: str) -> Components:
        host = self.session.host
        if contender == "dispatch":
            return whole_launch(host.dispatch(self._x))
        out = self._out.get(contender, self._out["other"])
        # Counting looks at all flags for every tile: not in a launch that is timed.
        stamps = host.dispatch_gemm(
            self._x, self._gemm, out, Form(contender), count_early=self._in_gate
        )
        if contender not in self.checked:
            return computing_stage(stamps)
        if contender == "fused" and self._in_gate:
            self._num_early = stamps.early
        return whole_launch(stamps)

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        out, layout = self._out[contender], self.session.host.current_plan.layout
        verdict = self._oracle.check_gemm(
            launch, out, layout, num_k=self._hidden, contender=contender, stage=stage
        )
        if contender == "fused" or stage == "after" or not verdict.passed:
            return [verdict]
        # Before the timed loop both saw one payload: overlap must not change a bit.
        same = [
            compare_exact(
                out[first : first + valid],
                self._out["fused"][first : first + valid],
                contender=contender,
                stage=stage,
            )
            for _, first, valid in layout.tiles.tolist()
        ]
        return [verdict, merged(same, contender=contender, stage=stage)]

    def counts(self) -> dict[str, int]:
        return {**self.session.counts(), "tiles_before_last_row": self._num_early}


TRIAL = DispatchGemm
