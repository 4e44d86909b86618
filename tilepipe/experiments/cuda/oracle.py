"""What each output of a launch must be on one rank, checked on the device that holds it.

As `experiments.oracle`, from routing and payload alone; knows nothing of plans, `row_home` words
or anything that a kernel has written. Everything runs on the current stream; counts and the first
difference are all that leaves the device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, starmap
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from tilepipe.experiments.cuda.payload import fill_rows, row_bits
from tilepipe.experiments.cuda.products import compare_bounded, compare_products, exact_product
from tilepipe.experiments.oracle import merged
from tilepipe.measure.gate import BF16_POISON, TOLERANCES, compare_exact
from tilepipe.records import Verdict
from tilepipe.schedule.layout import ReceiveLayout
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS
from tilepipe.workload.payload import WEIGHTS_LAUNCH, weight_scale
from tilepipe.workload.routing import Routing

__all__ = ["DeviceOracle", "poison"]

_TOLERANCE = TOLERANCES["bf16"]

# Values compared at a time: 16 bytes each and the hash's scratch, half a GB (H200, 2026-11). Ever
# smaller batches take the host longer than the device.
_BATCH_VALUES = 2**25


class DeviceOracle:
    """Expected outputs of one rank."""

    def __init__(self, routing: Routing, *, rank: int, device: torch.device | str) -> None:
        self._rank = rank
        self._device = torch.device(device)
        self._topk_idx = routing.topk_idx[rank]
        self._topk_weights = self._moved(routing.topk_weights[rank])
        source, token, slot, self._places = _expected_rows(routing, rank)
        self._source, self._token = self._moved(source), self._moved(token)
        self._homes = self._moved(source << (TOKEN_BITS + SLOT_BITS) | token << SLOT_BITS | slot)

    def check_dispatched(
        self,
        launch: int,
        recv_x: torch.Tensor,  # (capacity, hidden) bf16
        layout: ReceiveLayout,
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Received rows, bit for bit."""

        def sent(rows: slice) -> torch.Tensor:
            return row_bits(launch, self._source[rows], self._token[rows], recv_x.shape[1])

        return self._check_received(
            recv_x.view(torch.int16), sent, layout, contender=contender, stage=stage
        )

    def check_homes(
        self,
        row_home: torch.Tensor,  # (capacity,) int64: source rank << 48 | token << 16 | slot
        layout: ReceiveLayout,
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """The way back of every received row."""
        return self._check_received(
            row_home, self._homes.__getitem__, layout, contender=contender, stage=stage
        )

    def check_combined(
        self,
        launch: int,
        out: torch.Tensor,  # (num_tokens, hidden) bf16
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Weighted sums of rows that `payload.fill_rows` has made by home and slot, bit for bit."""

        def summed(tokens: slice) -> torch.Tensor:
            return self._combined(launch, tokens, out.shape[1])

        return _compare(
            out.view(torch.int16), summed, len(self._topk_idx), contender=contender, stage=stage
        )

    def check_summed(
        self,
        launch: int,
        out: torch.Tensor,  # (num_tokens, hidden) bf16
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """The same sums by a contender that adds in an order of its own, as `compare_close`."""
        verdicts = []
        for tokens in _batches(tuple(out.shape)):
            want, scale = self._summed(launch, tokens, out.shape[1])
            reorder = _TOLERANCE.per_term * self._topk_idx.shape[1] * scale
            bound = _TOLERANCE.rounding * (want.abs() + reorder) + reorder
            error = (out[tokens].float() - want).abs()
            wrong = ~(error <= bound)  # NaN compares false, so it is asked what is right
            num_wrong = int(torch.count_nonzero(wrong))
            detail = ""
            if num_wrong:
                row = int(wrong.any(dim=1).to(torch.uint8).argmax())
                column = int(wrong[row].to(torch.uint8).argmax())
                detail = (
                    f"{num_wrong} of {wrong.numel()} values differ, the first at "
                    f"[{tokens.start + row}, {column}]: got {float(out[tokens][row, column])}, "
                    f"want {float(want[row, column])}"
                )
            verdicts.append(
                Verdict(
                    contender=contender,
                    stage=stage,
                    passed=num_wrong == 0,
                    num_values=wrong.numel(),
                    num_wrong=num_wrong,
                    max_error=float(error.nan_to_num(torch.inf).max()) if len(error) else 0.0,
                    detail=detail,
                )
            )
        return merged(verdicts, contender=contender, stage=stage)

    def fill_arrived(
        self,
        launch: int,
        rows: torch.Tensor,  # (num_rows, hidden) bf16
    ) -> None:
        """Rows as a dispatch of that launch would have left them, expert by expert, no gaps."""
        fill_rows(rows, launch, self._source, self._token)

    def check_products(
        self,
        launch: int,
        got: torch.Tensor,  # (rows, n) bf16
        first_rows: Sequence[int],  # where each local expert begins in it
        *,
        experts: Sequence[int],  # whose weight each local, physical expert holds
        num_k: int,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Rows of a dispatch of that launch times the weights of their expert, in FP32.

        Rows and weights are made anew: what lies in the operands of a kernel is not asked.
        """
        scale, num_n = weight_scale(num_k), got.shape[1]
        columns = torch.arange(num_n, device=self._device)

        def groups() -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
            for number, first, places in zip(experts, first_rows, self._places, strict=True):
                if not len(places):
                    continue
                part = slice(places.start, places.stop)
                a = row_bits(launch, self._source[part], self._token[part], num_k)
                b = row_bits(WEIGHTS_LAUNCH, number, columns, num_k)
                yield (
                    slice(first, first + len(places)),
                    a.view(torch.bfloat16),
                    b.view(torch.bfloat16) * scale,
                )

        return compare_products(got, groups(), contender=contender, stage=stage)

    def check_gemm_combined(
        self,
        launch: int,
        out: torch.Tensor,  # (num_tokens, hidden) bf16
        *,
        experts: Sequence[int],  # whose weight each physical expert of the group holds
        num_k: int,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Weighted sums of filled rows times the weights of their expert, in FP32.

        Bounds are those of a product, of the rounding in which a row travels, and of the last one.
        """
        num_n, scale = out.shape[1], weight_scale(num_k)
        columns = torch.arange(num_n, device=self._device)
        total = torch.zeros(out.shape, dtype=torch.float32, device=self._device)
        bound = torch.zeros_like(total)
        for physical, number in enumerate(experts):
            token, slot = (self._moved(part) for part in np.nonzero(self._topk_idx == physical))
            if not len(token):
                continue
            a = row_bits(launch, self._rank, token, num_k, slot=slot).view(torch.bfloat16).float()
            b = row_bits(WEIGHTS_LAUNCH, number, columns, num_k).view(torch.bfloat16) * scale
            weight = self._topk_weights[token, slot, None]
            rows = exact_product(a, b.float())
            norms = torch.outer(
                torch.linalg.vector_norm(a, dim=1), torch.linalg.vector_norm(b.float(), dim=1)
            )
            error = _TOLERANCE.per_term * num_k * norms
            total.index_add_(0, token, weight * rows)
            bound.index_add_(
                0, token, weight * (error + _TOLERANCE.rounding * (rows.abs() + error))
            )
        bound += _TOLERANCE.rounding * (total.abs() + bound)
        return compare_bounded(out, total, bound, contender=contender, stage=stage)

    def _check_received(
        self,
        got: torch.Tensor,  # (capacity,) or (capacity, hidden)
        want: Callable[[slice], torch.Tensor],  # of places in the order of experts, no gaps
        layout: ReceiveLayout,
        *,
        contender: str,
        stage: str,
    ) -> Verdict:
        """Rows found where each local expert begins, against as many as must have come."""
        verdicts = []
        for expert, places in enumerate(self._places):
            first = int(layout.expert_first_row[expert])
            found = got[first : first + int(layout.expert_rows[expert])]

            def expected(rows: slice, begin: int = places.start) -> torch.Tensor:
                return want(slice(begin + rows.start, begin + rows.stop))

            verdicts.append(
                _compare(found, expected, len(places), contender=contender, stage=stage)
            )
        return merged(verdicts, contender=contender, stage=stage)

    def _combined(
        self, launch: int, tokens: slice, hidden: int
    ) -> torch.Tensor:  # (number of tokens, hidden) int16: bf16 bits
        total, _ = self._summed(launch, tokens, hidden)
        return total.to(torch.bfloat16).view(torch.int16)

    def _summed(
        self, launch: int, tokens: slice, hidden: int
    ) -> tuple[torch.Tensor, torch.Tensor]:  # (number of tokens, hidden) float32 each
        """Weighted sums over slots in their order, and those of the rows' sizes."""
        token = torch.arange(tokens.start, tokens.stop, device=self._device)
        total = torch.zeros(len(token), hidden, dtype=torch.float32, device=self._device)
        sizes = torch.zeros_like(total)
        for slot, ids in enumerate(self._topk_idx[tokens].T):
            kept = self._moved(np.flatnonzero(ids >= 0))
            bits = row_bits(launch, self._rank, token[kept], hidden, slot=slot)
            rows = bits.view(torch.bfloat16).float()
            # Two kernels, so two roundings: nothing here can become a fused multiply-add.
            rows *= self._topk_weights[tokens][kept, slot, None]
            total[kept] += rows
            sizes[kept] += rows.abs()
        return total, sizes

    def _moved(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def poison(tensor: torch.Tensor) -> None:
    """Overwrite an output with what no oracle expects, as `measure.gate.poison` does."""
    match tensor.dtype:
        case torch.bfloat16 | torch.int16:
            tensor.view(torch.int16).fill_(BF16_POISON)
        case torch.int32 | torch.int64:
            tensor.fill_(torch.iinfo(tensor.dtype).min)
        case _:
            assert tensor.dtype.is_floating_point, f"no poison for {tensor.dtype}"
            tensor.fill_(float("nan"))


def _expected_rows(
    routing: Routing, rank: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], list[range]]:
    """Source rank, token and slot of every row that `rank` receives, and the places of each expert.

    By (expert, source rank, token), as `reference.moe.dispatch` orders them.
    """
    num_ranks = len(routing.topk_idx)
    num_local = routing.num_experts // num_ranks
    local = np.concatenate(routing.topk_idx) - rank * num_local
    num_tokens = [len(ids) for ids in routing.topk_idx]
    row, slot = np.nonzero((local >= 0) & (local < num_local))
    expert = local[row, slot]
    order = np.argsort(expert, kind="stable")
    source = np.repeat(np.arange(num_ranks), num_tokens)[row]
    token = np.concatenate([np.arange(count) for count in num_tokens])[row]
    ends = [0, *np.cumsum(np.bincount(expert, minlength=num_local)).tolist()]
    return source[order], token[order], slot[order], list(starmap(range, pairwise(ends)))


@dataclass(frozen=True, kw_only=True)
class _Difference:
    """How one batch differs."""

    num_wrong: int
    max_error: float
    place: tuple[int, ...]  # of the first value that differs
    values: str  # that value in words


def _compare(
    got: torch.Tensor,  # (num_rows,) or (num_rows, num_columns), int16 or int64
    want: Callable[[slice], torch.Tensor],  # makes the same of some rows
    num_rows: int,
    *,
    contender: str,
    stage: str,
) -> Verdict:
    """As `measure.gate.compare_exact`, batch by batch."""
    shape = (num_rows, *got.shape[1:])
    if got.shape != shape:
        nothing = np.zeros((), np.int16)
        return compare_exact(
            np.broadcast_to(nothing, got.shape),
            np.broadcast_to(nothing, shape),
            contender=contender,
            stage=stage,
        )
    batches = (_difference(got[rows], want(rows), rows.start) for rows in _batches(shape))
    found = [difference for difference in batches if difference is not None]
    num_values, num_wrong = got.numel(), sum(difference.num_wrong for difference in found)
    detail = ""
    if found:
        detail = (
            f"{num_wrong} of {num_values} values differ, the first at {list(found[0].place)}: "
            f"{found[0].values}"
        )
    return Verdict(
        contender=contender,
        stage=stage,
        passed=num_wrong == 0,
        num_values=num_values,
        num_wrong=num_wrong,
        max_error=max((difference.max_error for difference in found), default=0.0),
        detail=detail,
    )


def _difference(got: torch.Tensor, want: torch.Tensor, first_row: int) -> _Difference | None:
    wrong = got != want
    num_wrong = int(torch.count_nonzero(wrong))
    if num_wrong == 0:
        return None
    # The first of equal maxima; argmax takes no bool.
    first = int(wrong.flatten().to(torch.uint8).argmax())
    row, *column = (int(position) for position in np.unravel_index(first, wrong.shape))
    found, expected = _carried(got[row, *column]), _carried(want[row, *column])
    one = compare_exact(found, expected, contender="", stage="")
    return _Difference(
        num_wrong=num_wrong,
        max_error=float((_wide(got) - _wide(want)).abs().max()),
        place=(first_row + row, *column),
        # What follows the count and the place, which are those of one value here.
        values=one.detail.partition(": ")[2],
    )


def _carried(value: torch.Tensor) -> NDArray[np.generic]:  # (1,) uint16 for bf16 bits
    array: NDArray[np.generic] = value.reshape(1).cpu().numpy()
    return array.view(np.uint16) if array.dtype == np.int16 else array


def _wide(values: torch.Tensor) -> torch.Tensor:
    """Numbers whose differences do not overflow; bits of bf16 count from 0 to 65535."""
    if values.dtype == torch.int16:
        return values.to(torch.int32) & 0xFFFF
    return values.to(torch.float64)


def _batches(shape: tuple[int, ...]) -> Iterator[slice]:
    num_rows = max(1, _BATCH_VALUES // max(1, prod(shape[1:])))
    for start in range(0, shape[0], num_rows):
        yield slice(start, min(start + num_rows, shape[0]))
