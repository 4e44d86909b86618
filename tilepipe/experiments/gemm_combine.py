"""GEMM -> combine, fused and unfused, with the stages of its breakdown.

Knows nothing of other operations.
"""

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, computing_stage, whole_launch
from tilepipe.experiments.setting import Components, Memory
from tilepipe.host.launch import Form
from tilepipe.measure.gate import BF16_POISON, compare_exact, poison
from tilepipe.records import Verdict

__all__ = ["TRIAL", "GemmCombine"]


class GemmCombine:
    """Contenders are the forms of the launch, and pushes and reduction alone."""

    contenders = (
        "fused",
        "sequential",
        "push",
        "reduce",
        "gemm_all",
        "gemm_publish",
        "gemm_contended",
    )
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(home_hidden=config.workload.hidden, spare=True)

    def __init__(self, session: Session) -> None:
        self.session = session
        workload = session.config.workload
        self._num_k = workload.intermediate
        self._gemm = session.gemm()
        self._a = session.receive_buffer(workload.intermediate)
        self._y = session.receive_buffer(workload.hidden)
        names = (*self.checked, "other")
        self._out = {name: session.home_buffer(workload.hidden) for name in names}
        self._oracle = Oracle(session.placed, rank=session.rank)
        self._early_pushes: list[int] = []
        session.exchange_homes()

    def prepare(self, contender: str, launch: int) -> None:
        if contender in self.checked:
            self.session.fill_received(launch, self._a)

    def poison(self, contender: str) -> None:
        poison(self._y)
        poison(self._out[contender])
        self.session.host.poison_home(BF16_POISON)

    def run(self, contender: str) -> Components:
        host = self.session.host
        out = self._out.get(contender, self._out["other"])
        if contender == "push":
            return whole_launch(host.push(self._y))
        if contender == "reduce":
            return computing_stage(host.reduce(out))
        stamps = host.gemm_combine(self._a, self._gemm, self._y, out, Form(contender))
        if contender not in self.checked:
            return computing_stage(stamps)
        if contender == "fused":
            self._early_pushes.append(stamps.early)
        return whole_launch(stamps)

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        out = self._out[contender]
        verdict = self._oracle.check_gemm_combined(
            launch, out, num_k=self._num_k, contender=contender, stage=stage
        )
        if contender == "fused" or stage == "after" or not verdict.passed:
            return [verdict]
        # Before the timed loop both saw one payload: overlap must not change a bit.
        return [
            verdict,
            compare_exact(out, self._out["fused"], contender=contender, stage=stage),
        ]

    def counts(self) -> dict[str, int]:
        early = max(self._early_pushes, default=0)
        return {**self.session.counts(), "pushes_before_last_tile": early}


TRIAL = GemmCombine
