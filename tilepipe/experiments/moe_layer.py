"""A whole MoE layer, fused and unfused, and what it is made of.

Knows nothing of other operations.
"""

import time

import numpy as np

from tilepipe.config.schemas import Config
from tilepipe.experiments.oracle import Oracle
from tilepipe.experiments.session import Session, whole_launch
from tilepipe.experiments.setting import Components, Memory
from tilepipe.host.gemm import GroupedGemm, swiglu
from tilepipe.host.launch import Form
from tilepipe.measure.gate import BF16_POISON, compare_exact, poison
from tilepipe.records import Verdict
from tilepipe.workload import bf16

__all__ = ["TRIAL", "MoeLayer"]

# Rows activated at a time: their float32 scratch stays in cache.
_BATCH_ROWS = 64


class MoeLayer:
    """The layer fused, its parts one after the other, and its halves with SwiGLU apart."""

    contenders = ("fused", "sequential", "dispatch_gemm", "swiglu", "gemm_combine")
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        hidden = config.workload.hidden
        return Memory(dispatch_hidden=hidden, home_hidden=hidden)

    def __init__(self, session: Session) -> None:
        self.session = session
        workload = session.config.workload
        self._hidden, self._intermediate = workload.hidden, workload.intermediate
        first, second, tile_n = *map(session.weights, (0, 1)), session.config.kernel.tile_n
        self._plain = GroupedGemm(first, tile_n=tile_n)
        self._gemms = (
            GroupedGemm(first, tile_n=tile_n, gated=True),
            GroupedGemm(second, tile_n=tile_n),
        )
        self._product = session.receive_buffer(2 * workload.intermediate)
        self._h = session.receive_buffer(workload.intermediate)
        self._y = session.receive_buffer(workload.hidden)
        names = (*self.checked, "other")
        self._out = {name: session.home_buffer(workload.hidden) for name in names}
        self._oracle = Oracle(session.placed, rank=session.rank)

    def prepare(self, contender: str, launch: int) -> None:
        if contender not in ("swiglu", "gemm_combine"):
            self._x = self.session.rows_to_send(launch, self._hidden)

    def poison(self, contender: str) -> None:
        host = self.session.host
        for rows in (host.recv_x[: self.session.extent], self._h, self._y, self._out[contender]):
            poison(rows)
        host.poison_home(BF16_POISON)

    def run(self, contender: str) -> Components:
        host, out = self.session.host, self._out.get(contender, self._out["other"])
        match contender:
            case "dispatch_gemm":
                arriving = host.dispatch_gemm(self._x, self._plain, self._product, Form.fused)
                return _stage_of(whole_launch(arriving))
            case "swiglu":
                return self._activate()
            case "gemm_combine":
                home = host.gemm_combine(self._h, self._gemms[1], self._y, out, Form.fused)
                return _stage_of(whole_launch(home))
        layer = (self._x, self._gemms, self._h, self._y, out)
        return whole_launch(host.moe_layer(*layer, Form(contender)))

    def _activate(self) -> Components:
        """SwiGLU as a pass of its own over the rows of the latest product."""
        start_ns = time.monotonic_ns()
        layout = self.session.host.current_plan.layout
        for first, count in zip(
            layout.expert_first_row.tolist(), layout.expert_rows.tolist(), strict=False
        ):
            for start in range(first, first + count, _BATCH_ROWS):
                rows = slice(start, min(start + _BATCH_ROWS, first + count))
                gate, up = np.split(bf16.from_bits(self._product[rows]), 2, axis=1)
                self._h[rows] = bf16.to_bits(swiglu(gate, up))
        return {"stage": (start_ns, time.monotonic_ns() - start_ns)}

    def check(self, contender: str, launch: int, stage: str) -> list[Verdict]:
        out = self._out[contender]
        verdict = self._oracle.check_layer(
            launch, out, intermediate=self._intermediate, contender=contender, stage=stage
        )
        if contender == "fused" or stage == "after" or not verdict.passed:
            return [verdict]
        # Before the timed loop both saw one payload: overlap must not change a bit.
        return [
            verdict,
            compare_exact(out, self._out["fused"], contender=contender, stage=stage),
        ]

    def counts(self) -> dict[str, int]:
        return self.session.counts()


def _stage_of(launch: Components) -> Components:
    """The work of a launch, its plan left out."""
    (start_ns, whole_ns), (_, plan_ns) = launch["e2e"], launch["plan"]
    return {"stage": (start_ns + plan_ns, whole_ns - plan_ns)}


TRIAL = MoeLayer
