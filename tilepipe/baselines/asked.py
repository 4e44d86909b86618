"""Which baselines a point asks for, which contender each is, and what to say of one left out.

Knows nothing of torch and of how a baseline runs.
"""

from collections.abc import Sequence
from importlib.util import find_spec

from tilepipe.config.choices import Baseline, Operation

__all__ = ["ROUNDINGS", "left_out", "torch_contender"]

# Of a value between the products of torch's layer: gate, up, silu and their product, each to bf16.
ROUNDINGS = 4

# Operation -> the contender that does it with torch.
_TORCH = {
    Operation.dispatch: "torch_dispatch",
    Operation.combine: "torch_combine",
    Operation.dispatch_gemm: "torch_sequential",
    Operation.gemm_combine: "torch_sequential",
    Operation.moe_layer: "torch_layer",
}
_DEEPEP = "https://github.com/deepseek-ai/DeepEP"


def torch_contender(operation: Operation) -> str | None:
    """The contender that does an operation with torch; None where this version has none."""
    return _TORCH.get(operation)


def left_out(names: Sequence[str], operation: str, *, executor: str) -> tuple[str, ...]:
    """A sentence for each baseline of `measure.baselines` that is not run beside a point."""
    sentences = []
    for name in names:
        if name == Baseline.deepep.name:
            sentences.append(_deepep())
        elif torch_contender(Operation[operation]) is None:
            sentences.append(
                f"baseline torch left out: on executor {executor} this version has none for "
                f"{operation}; drop torch from measure.baselines"
            )
    return tuple(sentences)


def _deepep() -> str:
    if find_spec("deep_ep") is None:
        return (
            "baseline deepep left out: the package deep_ep is not installed; build it from "
            f"{_DEEPEP} on a host with NVLink GPUs, or drop deepep from measure.baselines"
        )
    return (
        "baseline deepep left out: deep_ep is installed, but this version of TilePipe has no "
        f"contender that calls it; run the tests of {_DEEPEP} beside, or drop deepep from "
        "measure.baselines"
    )
