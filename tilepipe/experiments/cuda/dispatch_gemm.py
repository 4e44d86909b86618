"""Dispatch -> GEMM on the GPU, fused and unfused, with the stages of its breakdown.

Knows nothing of other operations.
"""

from collections.abc import Callable
from functools import partial

import torch

from tilepipe.config.choices import Roles
from tilepipe.config.schemas import Config, DispatchGemmKernel
from tilepipe.experiments.cuda.launches import Launched
from tilepipe.experiments.cuda.layer import layers_of
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import Components, Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.overlap.group import (
    ctas_alone,
    ctas_beside,
    fused_launch,
    gemm_launch,
    spare_table,
    upload_layer,
)
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.records import Verdict

__all__ = ["TRIAL", "CudaDispatchGemm"]


class CudaDispatchGemm(Launched):
    """The fused launch, its parts one after the other, and the rungs of the ladder between them."""

    contenders = (
        *("fused", "sequential", "dispatch", "gemm_all", "gemm_split", "gemm_flags"),
        *("gemm_contended", "unsynced"),
    )
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(dispatch_hidden=config.workload.hidden, spare=True)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        group, kernel = session.group, session.config.kernel
        assert isinstance(kernel, DispatchGemmKernel)
        assert kernel.roles is not None, "a key of the host executor"
        (self._layer,) = layers_of(session)
        rows = len(group.tensor(session.ranks[0], Slot.recv_x))
        self._out = {
            name: torch.empty(
                *(len(session.ranks), rows, self._layer.n),
                dtype=torch.bfloat16,
                device=session.device,
            )
            for name in (*self.checked, "other")
        }
        alone, beside = ctas_alone(group, self._layer), ctas_beside(group, self._layer)
        # CTAs of each rank that are there for the last tiles.
        self._num_ctas = dict.fromkeys(self.contenders, beside)
        whole = ["sequential", "gemm_all"]
        if kernel.roles is not Roles.fixed:
            whole += ["fused", "gemm_contended", "unsynced"]
        self._num_ctas |= dict.fromkeys(whole, alone)
        self._launches = self._bind(kernel)
        openings = (group.opening(exchange=True, preset=preset) for preset in (False, True))
        group.launcher.prepare(*openings, "dispatch")

    def _bind(self, kernel: DispatchGemmKernel) -> dict[str, list[Callable[[], None]]]:
        """What each contender launches, one after the other, behind the gate."""
        group, layer, other = self.session.group, self._layer, self._out["other"]
        roles = kernel.roles
        assert roles is not None
        # On the free chip communication takes all of it: more CTAs are never slower.
        launcher = group.launcher_on(layer.num_sms // len(group.ranks))
        launcher.prepare("dispatch")
        # Who changes roles, or has two, opens and begins together: measured, that is never slower.
        together = roles is not Roles.fixed
        fused = partial(fused_launch, group, layer, roles=roles, opens=together, gates=together)
        self._stamped = {
            "fused": partial(fused, self._out["fused"]),
            "gemm_contended": partial(fused, other, sending=spare_table(group.heap)),
        }
        gemm = partial(gemm_launch, group, layer)
        alone, beside = self._num_ctas["gemm_all"], self._num_ctas["gemm_split"]
        return {
            "fused": [self._stamped["fused"]()],
            "sequential": [
                partial(launcher.launch, "dispatch"),
                gemm(self._out["sequential"], num_gemm_ctas=alone),
            ],
            "dispatch": [group.dispatch],
            "gemm_all": [gemm(other, num_gemm_ctas=alone)],
            "gemm_split": [gemm(other, num_gemm_ctas=beside)],
            "gemm_flags": [gemm(other, num_gemm_ctas=beside, wait=True)],
            "gemm_contended": [self._stamped["gemm_contended"]()],
            "unsynced": [fused(other, wait=False)],
        }

    def stamped(self, contender: str, num_stamps: int) -> BoundLaunch:
        return self._stamped[contender](num_stamps=num_stamps)

    def prepare(self, contender: str, launch: int) -> None:
        if contender not in ("gemm_all", "gemm_split", "gemm_flags"):
            self.session.fill_rows_to_send(launch)
        num_ctas = self._num_ctas[contender]
        upload_layer(self.session.group, self._layer, num_gemm_ctas=num_ctas)

    def poison(self, contender: str) -> None:
        for rank in self.session.ranks:
            poison(self.session.group.tensor(rank, Slot.recv_x))
        poison(self._out[contender])

    def time(self, contender: str) -> Components:
        whole = contender in ("fused", "sequential", "dispatch")
        return self.session.time(self._parts(contender), whole=whole)

    def opening(self, contender: str) -> Callable[[], None]:
        group = self.session.group
        # Flags that are set let the GEMM run alone, or beside rows that go elsewhere.
        preset = contender in ("gemm_flags", "gemm_contended")

        def open_launch() -> None:
            if contender == "gemm_contended":
                # No gate zeroes what stands for the flags of rows that go elsewhere.
                for rank in self.session.ranks:
                    group.tensor(rank, Slot.spare_ready).zero_()
            group.open(exchange=True, preset=preset)

        return open_launch

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        session = self.session
        layout, place = session.group.plans[rank].layout, session.ranks.index(rank)
        verdict = session.oracle(rank).check_products(
            launch,
            self._out[contender][place],
            [int(first) for first in layout.expert_first_row[:-1]],
            experts=session.placed.placement.experts_on(rank).tolist(),
            num_k=self._layer.k,
            contender=contender,
            stage=stage,
        )
        return [verdict]


TRIAL = CudaDispatchGemm
