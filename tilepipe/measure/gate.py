"""Compare outputs with the oracle, so that no wrong result is ever timed.

Knows nothing of operations, ranks or files; sees two arrays and says how they differ.

Tolerance of a sum of products, derived and not fitted. Both sides multiply bf16 values, whose
products are exact in FP32, and add num_terms of them in FP32, each in its own order. To first
order one such sum is off by at most num_terms x 2^-24 x sum(|a||b|), the two by twice that:

    reorder = num_terms x 2^-23 x sum(|a||b|)
    |got - want| <= rounding x (|want| + reorder) + reorder

with `want` not rounded to the output type, and `rounding` = 2^-8 for bf16: eight significant
bits, hence half a unit in the last place is at most 2^-8 of the value. A sum that cancels is
small beside sum(|a||b|): that is why a tolerance relative to the value alone would refuse
correct results, or accept wrong ones once it were wide enough.

Tolerance of a layer, whose second product takes what SwiGLU has made of the first. The bounds above
would pass through the second product as if all its terms erred alike, and be wider than its values.
But between the products every value is rounded to bf16, and that is an error of its own for each:
uniform within 2^-8 of the value, so that a sum of them is sub-Gaussian. With R roundings of a value

    deviation = 8 x sqrt(R / 3) x 2^-8 x 1.1 x norm(gate x up) x max(|b|)

is exceeded once in 10^14 values: silu has no slope above 1.1, and |silu(gate)| is at most |gate|.
What FP32 sums of the first product are off vanishes beside its roundings. Ours is rounded once; who
stores gate, up, silu and their product, each rounded, has R = 4. The second product, the rounding
in which a row travels and that of the weighted sum add their own bounds as above.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.records import Verdict

__all__ = [
    "BF16_POISON",
    "TOLERANCES",
    "Tolerance",
    "activation_deviation",
    "compare_close",
    "compare_exact",
    "poison",
]

BF16_POISON = 0x7FC1  # a quiet NaN unlike those of arithmetic: x86 makes 0xFFC0, NVIDIA 0x7FFF


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a sum of products may be from the oracle's; see the module docstring."""

    rounding: float  # relative to the value: the rounding to the output type
    per_term: float  # relative to sum(|a||b|), per summed term: sums in another order


TOLERANCES: dict[str, Tolerance] = {
    "bf16": Tolerance(rounding=2**-8, per_term=2**-23),  # FP32 sum, rounded once to 8 bits
    "float32": Tolerance(rounding=0.0, per_term=2**-23),  # FP32 sum, kept as it is
}


def activation_deviation(num_roundings: int) -> float:
    """`deviation` of the module docstring, by norm(gate x up) x max(|b|)."""
    return 8 * math.sqrt(num_roundings / 3) * TOLERANCES["bf16"].rounding * 1.1


def _poison_of(dtype: np.dtype[Any]) -> Any:
    if dtype.kind == "f":
        return np.nan
    assert dtype.kind in "iu", f"no poison for {dtype}"
    assert dtype.itemsize >= 2, f"{dtype} has no value to spare for a poison"
    if dtype == np.uint16:
        return BF16_POISON  # bf16 is carried as uint16
    limits = np.iinfo(dtype)
    return limits.min if dtype.kind == "i" else limits.max


def poison(array: NDArray[Any]) -> None:
    """Overwrite an output with a value that both comparisons always refuse."""
    array[...] = _poison_of(array.dtype)


def compare_exact(
    got: NDArray[Any],  # integers (bf16 as uint16), or floats compared bit by bit
    want: NDArray[Any],  # the same dtype, free of poison
    *,
    contender: str,
    stage: str,
) -> Verdict:
    """Equal in every bit; `max_error` is in units of the values, infinite for a NaN."""
    assert got.dtype == want.dtype, f"{got.dtype} against {want.dtype}"
    if got.shape != want.shape:
        return _wrong_shape(got, want, contender=contender, stage=stage)
    if got.dtype.kind == "f":
        bits = np.dtype(f"u{got.dtype.itemsize}")
        assert not np.isnan(want).any(), "the oracle holds NaN"
        wrong = (got.view(bits) != want.view(bits)) | np.isnan(got)
    else:
        unwritten = _poison_of(got.dtype)
        assert not (want == unwritten).any(), "the oracle holds the poison"
        wrong = got != want  # want holds no poison, so poison left in got differs
    return _verdict(got, want, wrong, contender=contender, stage=stage)


def compare_close(
    got: NDArray[np.float32],
    want: NDArray[np.float32],  # not rounded to the output type
    tolerance: Tolerance,
    *,
    num_terms: int,  # products per sum: K of a GEMM
    abs_sum: NDArray[np.float32] | float,  # sum(|a||b|) or a bound of it, broadcast to want
    contender: str,
    stage: str,
) -> Verdict:
    """Within the derived bound; NaN and infinity in `got` always fail."""
    if got.shape != want.shape:
        return _wrong_shape(got, want, contender=contender, stage=stage)
    assert np.isfinite(want).all(), "the oracle holds NaN or infinity"
    assert np.isfinite(abs_sum).all(), "the bound holds NaN or infinity"
    reorder = np.float32(tolerance.per_term * num_terms) * np.asarray(abs_sum, dtype=np.float32)
    bound = np.float32(tolerance.rounding) * (np.abs(want) + reorder) + reorder
    with np.errstate(invalid="ignore", over="ignore"):
        # NaN compares false, so it is asked what is right, not what is wrong.
        wrong = ~(np.abs(got - want) <= bound)
    return _verdict(got, want, wrong, contender=contender, stage=stage)


def _verdict(
    got: NDArray[Any], want: NDArray[Any], wrong: NDArray[np.bool_], *, contender: str, stage: str
) -> Verdict:
    num_wrong = int(np.count_nonzero(wrong))
    return Verdict(
        contender=contender,
        stage=stage,
        passed=num_wrong == 0,
        num_values=int(want.size),
        num_wrong=num_wrong,
        max_error=_max_error(got, want),
        detail=_first_difference(got, want, wrong) if num_wrong else "",
    )


def _max_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Largest absolute difference; infinite where `got` is no number."""
    if got.size == 0:
        return 0.0
    if got.dtype.kind == "f":
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.abs(got - want)
        return float(np.where(np.isnan(error), np.inf, error).max())
    # The larger minus the smaller, in the unsigned type, where no difference overflows.
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    above, below = np.maximum(got, want).view(unsigned), np.minimum(got, want).view(unsigned)
    return float((above - below).max())


def _first_difference(got: NDArray[Any], want: NDArray[Any], wrong: NDArray[np.bool_]) -> str:
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    index = "[" + ", ".join(str(int(position)) for position in place) + "]"
    found, expected = got[place], want[place]
    unwritten = _poison_of(got.dtype)
    never_written = np.isnan(found) if got.dtype.kind == "f" else found == unwritten
    note = " (poison or NaN: probably never written)" if never_written else ""
    return (
        f"{int(np.count_nonzero(wrong))} of {wrong.size} values differ, the first at {index}: "
        f"got {_spell(found)}{note}, want {_spell(expected)}"
    )


def _spell(value: Any) -> str:
    return f"0x{int(value):04x}" if value.dtype == np.uint16 else str(value)


def _wrong_shape(got: NDArray[Any], want: NDArray[Any], *, contender: str, stage: str) -> Verdict:
    """Rows too many or missing are a wrong result of the program, not a fault of the gate."""
    return Verdict(
        contender=contender,
        stage=stage,
        passed=False,
        num_values=int(want.size),
        num_wrong=max(int(want.size), 1),
        max_error=float("inf"),
        detail=f"got shape {got.shape}, want {want.shape}",
    )
