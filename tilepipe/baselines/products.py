"""Grouped products by torch and by QuACK, and a dense one by cuBLAS, of the same operands.

Knows nothing of our kernels, of plans and of how time is taken.

QuACK's own search for a configuration compiles dozens of kernels. Here it has a few candidates: its
default and those that its search has found on shapes like these; `quickest` asks a clock.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

__all__ = ["QUACK_CONFIGS", "Operands", "Product", "has_quack", "product_of", "quickest"]

# QuACK's names for tile, cluster and consumers; none: its default. Tiles are those that its search
# tries on Hopper; all are handed out dynamically, which was faster there.
QUACK_CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "128x256_2x1": {"tile_m": 128, "tile_n": 256, "cluster_m": 2, "pingpong": False},
    "128x256_1x1": {"tile_m": 128, "tile_n": 256, "cluster_m": 1, "pingpong": False},
    "256x192_2x1": {"tile_m": 256, "tile_n": 192, "cluster_m": 2, "pingpong": False},
    "256x128_2x1": {"tile_m": 256, "tile_n": 128, "cluster_m": 2, "pingpong": False},
    "128x192_2x1_pingpong": {"tile_m": 128, "tile_n": 192, "cluster_m": 2, "pingpong": True},
    "128x128_2x1_pingpong": {"tile_m": 128, "tile_n": 128, "cluster_m": 2, "pingpong": True},
}

# Multiplies into an output of its own, and returns that.
Product = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """Rows of experts side by side, without gaps, and a weight each; a copy has its own output."""

    a: torch.Tensor  # (rows, k) bf16
    b: torch.Tensor  # (experts, n, k) bf16
    ends: torch.Tensor  # (experts,) int32: row behind the last one of each expert
    out: torch.Tensor = field(init=False)  # (rows, n) bf16

    def __post_init__(self) -> None:
        shape = len(self.a), self.b.shape[1]
        out = torch.empty(shape, dtype=torch.bfloat16, device=self.a.device)
        object.__setattr__(self, "out", out)


def has_quack() -> bool:
    """Whether QuACK is installed; the extra `baselines` brings it."""
    return find_spec("quack") is not None


def product_of(name: str, operands: Operands, *, config: str = "default") -> Product:
    """A product by `torch_grouped_mm`, `quack` in a configuration, or `cublas_dense`."""
    match name:
        case "torch_grouped_mm":
            return _torch(operands)
        case "quack":
            return _quack(operands, QUACK_CONFIGS[config])
        case "cublas_dense":
            return _dense(operands)
    raise AssertionError(f"no product by {name}")


def quickest(products: Mapping[str, Product], time_ns: Callable[[Product], int]) -> str:
    """Name of the one that a clock finds fastest; of equals the first.

    Leaves out those that this version of a library refuses; raises RuntimeError where it refuses
    all of them.
    """
    times: dict[str, int] = {}
    refused = ""
    for name, product in products.items():
        try:
            times[name] = time_ns(product)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            refused = f"{name}: {error}"
    if not times:
        raise RuntimeError(f"every configuration is refused, the last one {refused}")
    return min(times, key=lambda name: times[name])


def _torch(operands: Operands) -> Product:
    by_k = operands.b.transpose(1, 2)

    def product() -> torch.Tensor:
        # It has no output argument.
        out: torch.Tensor = torch._grouped_mm(operands.a, by_k, offs=operands.ends)
        return out

    return product


def _dense(operands: Operands) -> Product:
    one = operands.b[0].T
    return lambda: torch.matmul(operands.a, one, out=operands.out)


def _quack(operands: Operands, chosen: Mapping[str, Any]) -> Product:
    from quack.gemm_config import GemmConfig
    from quack.gemm_interface import default_config, gemm_tuned

    config = GemmConfig(**chosen) if chosen else default_config(operands.a.device)
    by_k = operands.b.transpose(1, 2)
    bounds = torch.nn.functional.pad(operands.ends, (1, 0))

    def product() -> torch.Tensor:
        # The function behind the search.
        gemm_tuned.fn(
            operands.a,
            by_k,
            operands.out,
            cu_seqlens_m=bounds,
            dynamic_scheduler=True,
            config=config,
        )
        return operands.out

    return product
