"""GEMM -> combine on the GPU, fused and unfused, with the stages of its breakdown.

Knows nothing of other operations.
"""

from collections.abc import Callable
from functools import partial

import torch

from tilepipe.config.choices import Push, Roles, Walk
from tilepipe.config.schemas import Config, GemmCombineKernel
from tilepipe.experiments.cuda.launches import Homeward
from tilepipe.experiments.cuda.layer import layers_of
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import Components, Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.overlap.group import ctas_alone, ctas_beside, spare_table
from tilepipe.kernels.overlap.home import Reduces
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home
from tilepipe.kernels.overlap.launch import BoundLaunch
from tilepipe.records import Verdict

__all__ = ["TRIAL", "CudaGemmCombine"]


class CudaGemmCombine(Homeward):
    """The fused launch, its parts one after the other, and the rungs of the ladder between them."""

    contenders = (
        *("fused", "sequential", "push", "reduce", "gemm_all", "gemm_split", "gemm_publish"),
        "gemm_contended",
    )
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        return Memory(home_hidden=config.workload.hidden, spare=True)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        group, kernel = session.group, session.config.kernel
        assert isinstance(kernel, GemmCombineKernel)
        assert kernel.roles is not None, "a key of the host executor"
        assert kernel.push is not None, "a key of the host executor"
        session.exchange_homes()
        (layer,) = layers_of(session)
        self._layer = layer
        rows = len(group.tensor(session.ranks[0], Slot.y))
        self._a = torch.empty(
            len(session.ranks), rows, layer.k, dtype=torch.bfloat16, device=session.device
        )
        self._alone, self._beside = ctas_alone(group, layer), ctas_beside(group, layer)
        self._launches = self._bind(kernel.roles, kernel.push)
        openings = (group.opening(exchange=False, preset=preset) for preset in (False, True))
        group.launcher.prepare(*openings, "push", "reduce")

    def _bind(self, roles: Roles, push: Push) -> dict[str, list[Callable[[], None]]]:
        """What each contender launches, one after the other, behind the gate."""
        group, layer = self.session.group, self._layer
        # On the free chip communication takes all of it: more CTAs are never slower.
        launcher = group.launcher_on(layer.num_sms // len(group.ranks))
        launcher.prepare("push")
        fused = partial(fused_home_launch, group, layer, self._a, push=push)
        self._stamped = {
            "fused": partial(fused, roles=roles),
            "gemm_contended": partial(
                fused,
                # Who reduces beside tiles does so here; who joins behind them is left out.
                roles=Roles.beside if roles is Roles.beside else Roles.fixed,
                reduces=Reduces.beside,
                sending=spare_table(group.heap),
            ),
        }
        gemm = partial(gemm_home_launch, group, layer, self._a)
        gemm_all = gemm(num_gemm_ctas=self._alone)
        return {
            "fused": [self._stamped["fused"]()],
            "sequential": [gemm_all, partial(launcher.launch, "push"), group.reduce],
            "push": [group.push],
            "reduce": [group.reduce],
            "gemm_all": [gemm_all],
            "gemm_split": [gemm(num_gemm_ctas=self._beside)],
            "gemm_publish": [gemm(num_gemm_ctas=self._beside, publish=True)],
            "gemm_contended": [self._stamped["gemm_contended"]()],
        }

    def stamped(self, contender: str, num_stamps: int) -> BoundLaunch:
        return self._stamped[contender](num_stamps=num_stamps)

    def prepare(self, contender: str, launch: int) -> None:
        group = self.session.group
        whole = contender in ("sequential", "gemm_all")
        num_ctas = self._alone if whole else self._beside
        # A GEMM by itself takes its tiles in the order that is best for it.
        walk = Walk.expert if whole or contender == "gemm_split" else None
        upload_home(group, self._layer, num_gemm_ctas=num_ctas, walk=walk)
        if contender in self.checked:
            self._fill(launch)

    def _fill(self, launch: int) -> None:
        """Rows as the layer before would have made them, told by home and slot."""
        for a, rank in zip(self._a, self.session.ranks, strict=True):
            rows, source, token, slot = self.session.received_homes(rank)
            fill_rows(a, launch, source, token, slot=slot, row_idx=rows)

    def poison(self, contender: str) -> None:
        for rank in self.session.ranks:
            for slot in (Slot.y, Slot.home_y, self._output(contender)):
                poison(self.session.group.tensor(rank, slot))

    def time(self, contender: str) -> Components:
        whole = contender in ("fused", "sequential", "push")
        return self.session.time(self._parts(contender), whole=whole)

    def opening(self, contender: str) -> Callable[[], None]:
        group = self.session.group

        def open_launch() -> None:
            if contender == "gemm_contended":
                # No gate zeroes what stands for the flags of tokens elsewhere.
                for rank in self.session.ranks:
                    group.tensor(rank, Slot.spare_token_ready).zero_()
            group.open(exchange=False, preset=contender == "reduce")

        return open_launch

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        session = self.session
        verdict = session.oracle(rank).check_gemm_combined(
            launch,
            self.tokens_of(contender, rank),
            experts=session.placed.placement.expert_of.tolist(),
            num_k=self._layer.k,
            contender=contender,
            stage=stage,
        )
        return [verdict]


TRIAL = CudaGemmCombine
