"""What a grouped GEMM must have made of its operands, in FP32 on the device that holds them.

Knows nothing of kernels, plans and where operands come from.

Bounds are those of `measure.gate`: num_terms x 2^-23 x sum(|a||b|) for sums in another order, the
sum bounded by the norms of row and column, and half a unit in the last place of the rounding. What
an epilogue does to a value it does to its bound: silu has no slope above 1.1, and its exponential
and reciprocal are good to 2^-20.
"""

from collections.abc import Callable, Iterator

import torch

from tilepipe.measure.gate import TOLERANCES
from tilepipe.records import Verdict

__all__ = [
    "compare_bounded",
    "compare_products",
    "concatenated_swiglu",
    "exact_product",
    "interleaved_swiglu",
    "scaled_rows",
]

_TOLERANCE = TOLERANCES["bf16"]
# Rows multiplied at a time: their float32 products stay below half a GB.
_BATCH_ROWS = 4096
_SLOPE, _APPROXIMATE = 1.1, 2**-20

# (values, bounds, rows) -> (values, bounds)
Epilogue = Callable[[torch.Tensor, torch.Tensor, slice], tuple[torch.Tensor, torch.Tensor]]


def compare_products(
    got: torch.Tensor,  # (rows, n') bf16
    groups: Iterator[tuple[slice, torch.Tensor, torch.Tensor]],  # rows, A of them, B (n, k)
    *,
    epilogue: Epilogue | None = None,
    contender: str,
    stage: str,
) -> Verdict:
    """Rows of every group against A x B of it; the other rows are not looked at."""
    num_values, num_wrong, max_error, detail = 0, 0, 0.0, ""
    for rows, a, b in groups:
        weights = b.float()
        norms = torch.linalg.vector_norm(weights, dim=1)
        for start in range(0, len(a), _BATCH_ROWS):
            part = a[start : start + _BATCH_ROWS].float()
            place = slice(rows.start + start, rows.start + start + len(part))
            want = exact_product(part, weights)
            bound = torch.outer(torch.linalg.vector_norm(part, dim=1), norms)
            bound *= _TOLERANCE.per_term * part.shape[1]
            if epilogue is not None:
                want, bound = epilogue(want, bound, place)
            bound = _TOLERANCE.rounding * (want.abs() + bound) + bound
            found = got[place].float()
            error = (found - want).abs()
            # NaN compares false, so it is asked what is right.
            wrong = ~(error <= bound)
            count = int(torch.count_nonzero(wrong))
            if count and not detail:
                first = int(wrong.flatten().to(torch.uint8).argmax())
                row, column = divmod(first, wrong.shape[1])
                detail = (
                    f"the first at [{place.start + row}, {column}]: got {found[row, column]:g}, "
                    f"want {want[row, column]:g} within {bound[row, column]:g}"
                )
            num_values, num_wrong = num_values + wrong.numel(), num_wrong + count
            worst = float(torch.nan_to_num(error, nan=torch.inf).max()) if wrong.numel() else 0.0
            max_error = max(max_error, worst)
    if num_wrong:
        detail = f"{num_wrong} of {num_values} values differ, {detail}"
    return Verdict(
        contender=contender,
        stage=stage,
        passed=num_wrong == 0,
        num_values=num_values,
        num_wrong=num_wrong,
        max_error=max_error,
        detail=detail,
    )


def compare_bounded(
    got: torch.Tensor,  # (rows, columns) bf16
    want: torch.Tensor,  # the same, float32
    bound: torch.Tensor,  # how far a value may be off
    *,
    contender: str,
    stage: str,
) -> Verdict:
    """Every value within its own bound."""
    found = got.float()
    # NaN compares false, so it is asked what is right.
    wrong = ~((found - want).abs() <= bound)
    num_wrong = int(torch.count_nonzero(wrong))
    detail = ""
    if num_wrong:
        row, column = divmod(int(wrong.flatten().to(torch.uint8).argmax()), wrong.shape[1])
        detail = (
            f"{num_wrong} of {wrong.numel()} values differ, the first at [{row}, {column}]: got "
            f"{found[row, column]:g}, want {want[row, column]:g} within {bound[row, column]:g}"
        )
    error = torch.nan_to_num((found - want).abs(), nan=torch.inf)
    return Verdict(
        contender=contender,
        stage=stage,
        passed=num_wrong == 0,
        num_values=wrong.numel(),
        num_wrong=num_wrong,
        max_error=float(error.max()) if error.numel() else 0.0,
        detail=detail,
    )


def exact_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A x B^T with FP32 products and sums, whatever the process allows elsewhere."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return a @ b.T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed


def _swiglu(
    gate: torch.Tensor, up: torch.Tensor, of_gate: torch.Tensor, of_up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    silu = torch.nn.functional.silu(gate)
    value = silu * up
    bound = _SLOPE * of_gate * (up.abs() + of_up) + silu.abs() * of_up
    return value, bound + _APPROXIMATE * value.abs()


def interleaved_swiglu(
    values: torch.Tensor, bounds: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns 2i and 2i + 1 are gate and up of output i."""
    return _swiglu(values[:, 0::2], values[:, 1::2], bounds[:, 0::2], bounds[:, 1::2])


def concatenated_swiglu(
    values: torch.Tensor, bounds: torch.Tensor, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns i and n / 2 + i are gate and up of output i."""
    gate, up = values.chunk(2, dim=1)
    return _swiglu(gate, up, *bounds.chunk(2, dim=1))


def scaled_rows(scale: torch.Tensor) -> Epilogue:
    """Every row times its own factor, (rows,) float32."""

    def scaled(
        values: torch.Tensor, bounds: torch.Tensor, rows: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        factor = scale[rows, None]
        value = values * factor
        # One more rounding to float32.
        return value, bounds * factor.abs() + 2**-24 * value.abs()

    return scaled
