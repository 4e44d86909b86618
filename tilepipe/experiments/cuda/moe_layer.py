"""A whole MoE layer on the GPU: two fused launches behind one gate, and what they are made of.

Knows nothing of other operations.

The first launch dispatches and multiplies, SwiGLU in its epilogue; the second multiplies and brings
home. One gate is enough for both (rules 3 and 4 of the launch protocol): it zeroes the counters of
both, and whatever a rank that is ahead stores at a peer, be it rows that go home while the peer
still dispatches, meets buffers whose readers of the launch before have ended and counters that are
zero. Within a rank the stream orders the two; the first ends behind its last row, so the second
finds all ways home.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from tilepipe.config.choices import Push, Roles, Walk
from tilepipe.config.schemas import Config, MoeLayerKernel
from tilepipe.experiments.cuda.launches import Homeward
from tilepipe.experiments.cuda.layer import layers_of
from tilepipe.experiments.cuda.layer_oracle import LayerOracle
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.session import CudaSession
from tilepipe.experiments.setting import Components, Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.overlap.group import (
    ctas_alone,
    ctas_beside,
    fused_launch,
    gemm_launch,
    upload_layer,
)
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home
from tilepipe.kernels.swiglu import bind_swiglu
from tilepipe.records import Verdict

__all__ = ["TRIAL", "CudaMoeLayer"]

# Those that begin with tokens, and so with an exchange of counts.
_SENDING = ("fused", "sequential", "dispatch_gemm")


class CudaMoeLayer(Homeward):
    """The layer fused, its parts one after the other, and its halves with SwiGLU apart."""

    contenders = ("fused", "sequential", "dispatch_gemm", "swiglu", "gemm_combine")
    checked = ("fused", "sequential")

    @staticmethod
    def memory(config: Config) -> Memory:
        hidden = config.workload.hidden
        return Memory(dispatch_hidden=hidden, home_hidden=hidden)

    def __init__(self, session: CudaSession) -> None:
        self.session = session
        group, config = session.group, session.config
        assert isinstance(config.kernel, MoeLayerKernel)
        assert config.kernel.roles is not None, "a key of the host executor"
        assert config.kernel.push is not None, "a key of the host executor"
        plain, self.second = layers_of(session)
        self.first = replace(plain, epilogue=Epilogue.swiglu_concatenated)
        rows = len(group.tensor(session.ranks[0], Slot.recv_x))

        def buffer(columns: int) -> torch.Tensor:
            shape = (len(session.ranks), rows, columns)
            return torch.empty(*shape, dtype=torch.bfloat16, device=session.device)

        # Gate and up side by side, of the half whose SwiGLU is a pass of its own; and activated.
        self._product, self._h = buffer(plain.n), buffer(self.second.k)
        self._alone, self._beside = ctas_alone(group, plain), ctas_beside(group, plain)
        self._oracles: dict[int, LayerOracle] = {}
        self._launches = self._bind(config.kernel.roles, config.kernel.push)
        openings = (group.opening(exchange=exchange) for exchange in (True, False))
        group.launcher.prepare(*openings, "reduce")

    def _bind(self, roles: Roles, push: Push) -> dict[str, list[Callable[[], None]]]:
        """What each contender launches, one after the other, behind the gate."""
        group, h = self.session.group, self._h
        # On the free chip communication takes all of it: more CTAs are never slower.
        launcher = group.launcher_on(self.first.num_sms // len(group.ranks))
        launcher.prepare("dispatch", "push")
        # Who changes roles, or has two, opens and begins together: measured, that is never slower.
        together = roles is not Roles.fixed
        arriving = partial(fused_launch, group, roles=roles, opens=together, gates=together)
        homeward = fused_home_launch(group, self.second, h, roles=roles, push=push)
        activate = bind_swiglu(
            self._product.flatten(0, 1), h.flatten(0, 1), num_sms=self.first.num_sms
        )
        return {
            "fused": [arriving(self.first, h), homeward],
            "sequential": [
                partial(launcher.launch, "dispatch"),
                gemm_launch(group, self.first, h, num_gemm_ctas=self._alone),
                gemm_home_launch(group, self.second, h, num_gemm_ctas=self._alone),
                partial(launcher.launch, "push"),
                group.reduce,
            ],
            "dispatch_gemm": [arriving(replace(self.first, epilogue=Epilogue.none), self._product)],
            "swiglu": [activate],
            "gemm_combine": [homeward],
        }

    def prepare(self, contender: str, launch: int) -> None:
        group, kernel = self.session.group, self.session.config.kernel
        assert isinstance(kernel, MoeLayerKernel)
        unfused = contender == "sequential"
        # CTAs of each rank that are there for the last tiles.
        first = self._beside if kernel.roles is Roles.fixed and not unfused else self._alone
        upload_layer(group, self.first, num_gemm_ctas=first)
        second, walk = (self._alone, Walk.expert) if unfused else (self._beside, None)
        upload_home(group, self.second, num_gemm_ctas=second, walk=walk)
        if contender in _SENDING:
            self.session.fill_rows_to_send(launch)

    def poison(self, contender: str) -> None:
        group = self.session.group
        for rank in self.session.ranks:
            for slot in (Slot.recv_x, Slot.y, Slot.home_y, self._output(contender)):
                poison(group.tensor(rank, slot))
            poison(group.tensor(rank, Slot.row_home))
        poison(self._h)

    def time(self, contender: str) -> Components:
        whole = contender in self.checked
        return self.session.time(self._parts(contender), whole=whole)

    def opening(self, contender: str) -> Callable[[], None]:
        return partial(self.session.group.open, exchange=contender in _SENDING)

    def oracle(self, rank: int) -> LayerOracle:
        """The oracle of a rank, made when it is first asked."""
        session = self.session
        if rank not in self._oracles:
            self._oracles[rank] = LayerOracle(
                session.routing,
                rank=rank,
                experts=session.placed.placement.expert_of.tolist(),
                intermediate=self.second.k,
                device=session.device,
            )
        return self._oracles[rank]

    def check(self, contender: str, rank: int, launch: int, stage: str) -> list[Verdict]:
        out = self.tokens_of(contender, rank)
        return [self.oracle(rank).check(launch, out, contender=contender, stage=stage)]


TRIAL = CudaMoeLayer
