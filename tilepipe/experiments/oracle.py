"""What each output of a launch must be on one rank, from routing and payload alone.

Asks the reference; knows nothing of plans, row_home or anything that an executor has written.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tilepipe.measure.gate import (
    TOLERANCES,
    activation_deviation,
    compare_close,
    compare_exact,
)
from tilepipe.records import Verdict
from tilepipe.reference import moe
from tilepipe.schedule.layout import ReceiveLayout
from tilepipe.workload import bf16, payload
from tilepipe.workload.placement import Placed

__all__ = ["Oracle", "merged"]

_TOLERANCE = TOLERANCES["bf16"]

# Tokens whose slots are held in float32 at a time.
_BATCH = 512


class Oracle:
    """Expected outputs of one rank."""

    def __init__(self, placed: Placed, *, rank: int) -> None:
        self._rank = rank
        # What a token asked for, wherever its experts live: home knows nothing of a placement.
        self._topk_idx = placed.logical.topk_idx[rank]
        self._topk_weights = placed.logical.topk_weights[rank]
        self._num_experts = placed.logical.num_experts
        self._held = placed.placement.experts_on(rank).tolist()
        routing, num_local = placed.physical, placed.placement.num_local
        # The reference moves names of rows in place of rows: (source rank, token).
        names = [
            np.stack([np.full(len(ids), source), np.arange(len(ids))], axis=1)
            for source, ids in enumerate(routing.topk_idx)
        ]
        local = [_local(ids, rank * num_local, num_local) for ids in routing.topk_idx]
        self._names = [
            rows.astype(np.int64) for rows in moe.dispatch(names, local, num_experts=num_local)
        ]

    def check_dispatched(
        self,
        launch: int,
        recv_x: NDArray[np.uint16],  # (capacity, hidden)
        layout: ReceiveLayout,
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Received rows, bit for bit."""
        verdicts = [
            compare_exact(got, bits, contender=contender, stage=stage)
            for got, bits in self._per_expert(launch, recv_x, layout, recv_x.shape[1])
        ]
        return merged(verdicts, contender=contender, stage=stage)

    def check_gemm(
        self,
        launch: int,
        out: NDArray[np.uint16],  # (capacity, N)
        layout: ReceiveLayout,
        *,
        num_k: int,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Rows of dispatch times the weights of their expert, in FP32."""
        verdicts = []
        pairs = self._per_expert(launch, out, layout, num_k)
        for expert, (got, bits) in zip(self._held, pairs, strict=True):
            a = bf16.from_bits(bits)
            b = payload.expert_weights(expert, out.shape[1], num_k)
            (want,) = moe.grouped_gemm([a], [b])
            verdicts.append(
                compare_close(
                    bf16.from_bits(got),
                    want,
                    _TOLERANCE,
                    num_terms=num_k,
                    # |a|.|b| <= norm(a) norm(b), by Cauchy and Schwarz
                    abs_sum=np.outer(_norms(a), _norms(b)),
                    contender=contender,
                    stage=stage,
                )
            )
        return merged(verdicts, contender=contender, stage=stage)

    def check_combined(
        self, launch: int, out: NDArray[np.uint16], *, contender: str, stage: str
    ) -> Verdict:
        """Weighted sums of rows that `Session.fill_received` has made, bit for bit."""
        verdicts = []
        for tokens in _batches(len(out)):
            rows = bf16.from_bits(self._slots(launch, tokens, out.shape[1]))
            want = bf16.to_bits(self._sum(rows, tokens))
            verdicts.append(compare_exact(out[tokens], want, contender=contender, stage=stage))
        return merged(verdicts, contender=contender, stage=stage)

    def check_summed(
        self, launch: int, out: NDArray[np.uint16], *, contender: str, stage: str
    ) -> Verdict:
        """The same sums by a contender that adds in an order of its own."""
        verdicts = []
        for tokens in _batches(len(out)):
            rows = bf16.from_bits(self._slots(launch, tokens, out.shape[1]))
            verdicts.append(
                compare_close(
                    bf16.from_bits(out[tokens]),
                    self._sum(rows, tokens),
                    _TOLERANCE,
                    num_terms=rows.shape[1],
                    abs_sum=self._sum(np.abs(rows), tokens),  # weights are not negative
                    contender=contender,
                    stage=stage,
                )
            )
        return merged(verdicts, contender=contender, stage=stage)

    def check_gemm_combined(
        self, launch: int, out: NDArray[np.uint16], *, num_k: int, contender: str, stage: str
    ) -> Verdict:
        """Weighted sums of filled rows times the weights of their expert, in FP32.

        Beside what `compare_close` allows a sum of num_k products, every row is rounded to bf16
        once before it travels: 2^-8 of its size, added to the bound in the units of `abs_sum`.
        """
        rows, scale = self._multiplied(launch, out.shape[1], num_k)
        everything = np.arange(len(out))
        travel = self._sum(np.abs(rows), everything) * np.float32(
            _TOLERANCE.rounding / (_TOLERANCE.per_term * num_k)
        )
        return compare_close(
            bf16.from_bits(out),
            self._sum(rows, everything),
            _TOLERANCE,
            num_terms=num_k,
            abs_sum=self._sum(scale[:, :, None], everything) + travel,
            contender=contender,
            stage=stage,
        )

    def check_layer(
        self,
        launch: int,
        out: NDArray[np.uint16],
        *,
        intermediate: int,
        num_roundings: int = 1,  # of a value between the products; see measure.gate
        contender: str,
        stage: str,
    ) -> Verdict:
        """Weighted sums of dispatched rows, twice multiplied with SwiGLU between, in FP32."""
        rows, scale = self._expert_rows(launch, out.shape[1], intermediate, num_roundings)
        everything = np.arange(len(out))
        travel = np.abs(rows) * np.float32(_TOLERANCE.rounding / _TOLERANCE.per_term)
        return compare_close(
            bf16.from_bits(out),
            self._sum(rows, everything),
            _TOLERANCE,
            num_terms=1,
            abs_sum=self._sum(scale + travel, everything),
            contender=contender,
            stage=stage,
        )

    def _per_expert(
        self, launch: int, rows: NDArray[np.uint16], layout: ReceiveLayout, num_columns: int
    ) -> Iterator[tuple[NDArray[np.uint16], NDArray[np.uint16]]]:
        """Rows found where each local physical expert begins, and what was dispatched there."""
        for expert, names in enumerate(self._names):
            first = int(layout.expert_first_row[expert])
            bits = payload.row_bits(launch, names[:, 0], names[:, 1], num_columns)
            yield rows[first : first + int(layout.expert_rows[expert])], bits

    def _slots(
        self, launch: int, tokens: NDArray[np.int64], num_columns: int
    ) -> NDArray[np.uint16]:  # (len(tokens), num_topk, num_columns)
        num_topk = self._topk_idx.shape[1]
        bits = payload.row_bits(
            launch,
            self._rank,
            np.repeat(tokens, num_topk),
            num_columns,
            slot=np.tile(np.arange(num_topk), len(tokens)),
        )
        return bits.reshape(len(tokens), num_topk, num_columns)

    def _sum(
        self, rows: NDArray[np.float32], tokens: NDArray[np.int64]
    ) -> NDArray[np.float32]:  # (len(tokens), hidden)
        return moe.combine(rows, self._topk_idx[tokens], self._topk_weights[tokens])

    def _multiplied(
        self, launch: int, num_n: int, num_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Products of every slot of this rank's tokens, and a bound of sum(|a||b|) of each."""
        rows = np.zeros((*self._topk_idx.shape, num_n), np.float32)
        scale = np.zeros(self._topk_idx.shape, np.float32)
        for expert in range(self._num_experts):
            token, slot = np.nonzero(self._topk_idx == expert)
            if not len(token):
                continue
            b = payload.expert_weights(expert, num_n, num_k)
            bits = payload.row_bits(launch, self._rank, token, num_k, slot=slot)
            a = bf16.from_bits(bits)
            (rows[token, slot],) = moe.grouped_gemm([a], [b])
            scale[token, slot] = _norms(a) * _norms(b).max()
        return rows, scale

    def _expert_rows(
        self, launch: int, hidden: int, intermediate: int, num_roundings: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """What experts make of every slot of this rank's tokens, and how far each may be off, in
        units of `per_term`."""
        rows = np.zeros((*self._topk_idx.shape, hidden), np.float32)
        scale = np.zeros_like(rows)
        deviation = np.float32(activation_deviation(num_roundings) / _TOLERANCE.per_term)
        for expert in range(self._num_experts):
            token, slot = np.nonzero(self._topk_idx == expert)
            if not len(token):
                continue
            x = bf16.from_bits(payload.row_bits(launch, self._rank, token, hidden))
            first = payload.expert_weights(expert, 2 * intermediate, hidden)
            second = payload.expert_weights(expert, hidden, intermediate)
            (product,) = moe.grouped_gemm([x], [first])
            gate, up = np.split(product, 2, axis=1)
            activated = moe.swiglu(gate, up)
            (rows[token, slot],) = moe.grouped_gemm([activated], [second])
            scale[token, slot] = intermediate * np.outer(_norms(activated), _norms(second))
            scale[token, slot] += deviation * np.outer(_norms(gate * up), np.abs(second).max(1))
        return rows, scale


def merged(verdicts: list[Verdict], *, contender: str, stage: str) -> Verdict:
    """One verdict over the parts of an output."""
    failed = [verdict for verdict in verdicts if not verdict.passed]
    return Verdict(
        contender=contender,
        stage=stage,
        passed=not failed,
        num_values=sum(verdict.num_values for verdict in verdicts),
        num_wrong=sum(verdict.num_wrong for verdict in verdicts),
        max_error=max((verdict.max_error for verdict in verdicts), default=0.0),
        detail=failed[0].detail if failed else "",
    )


def _local(
    ids: NDArray[np.int32], first_expert: int, num_local: int
) -> NDArray[np.int32]:  # as ids, numbered from the first local expert, -1 elsewhere
    local = ids - np.int32(first_expert)
    return np.where((local >= 0) & (local < num_local), local, np.int32(-1))


def _norms(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Euclidean norm of each row; float32 sums of squares are exact enough for a bound."""
    norms: NDArray[np.float32] = np.sqrt(np.einsum("ij,ij->i", rows, rows))
    return norms * np.float32(1.001)


def _batches(num_tokens: int) -> list[NDArray[np.int64]]:
    return [
        np.arange(start, min(start + _BATCH, num_tokens)) for start in range(0, num_tokens, _BATCH)
    ]
