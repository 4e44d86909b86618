"""Bytes and FLOPs that a routing costs, as named formulas.

Knows nothing of how rows are laid out, cut into tiles or moved.

Only payload rows count: not the 8 bytes of `row_home` beside each row, nor flags or counts.
Combine moves the same rows the other way: its totals are these, its `sent_bytes` are what is
`received_bytes` here.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Operation
from tilepipe.config.limits import ELEM_BYTES
from tilepipe.config.schemas import Workload
from tilepipe.workload.routing import Routing

__all__ = [
    "GemmShape",
    "Traffic",
    "dedup_bytes",
    "dedup_wire_bytes",
    "gemm_shape",
    "gemm_shapes",
    "grouped_gemm_flops",
    "logical_bytes",
    "row_bytes",
    "wire_bytes",
]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Payload bytes of one launch of dispatch."""

    total_bytes: int
    sent_bytes: tuple[int, ...]  # by source rank
    received_bytes: tuple[int, ...]  # by the rank that owns the expert


@dataclass(frozen=True, kw_only=True)
class GemmShape:
    """One expert's weight: `n` output columns, `k` summed over."""

    n: int
    k: int


def row_bytes(workload: Workload) -> int:
    """One token row: hidden x bytes of an element."""
    return workload.hidden * ELEM_BYTES[workload.dtype]


def logical_bytes(routing: Routing, *, row_bytes: int) -> Traffic:
    """Per (token, expert): valid slots x row_bytes, rows that stay on their rank included."""
    return _traffic(_rows_between(routing), row_bytes)


def wire_bytes(routing: Routing, *, row_bytes: int) -> Traffic:
    """What crosses a link, per (token, expert): valid slots on another rank x row_bytes."""
    rows = _rows_between(routing)
    np.fill_diagonal(rows, 0)
    return _traffic(rows, row_bytes)


def dedup_bytes(routing: Routing, *, row_bytes: int) -> Traffic:
    """Per (token, rank): ranks that own an expert of the token x row_bytes, own rank included."""
    return _traffic(_tokens_between(routing), row_bytes)


def dedup_wire_bytes(routing: Routing, *, row_bytes: int) -> Traffic:
    """What would cross a link with one copy of a token for each rank: per (token, other rank)."""
    tokens = _tokens_between(routing)
    np.fill_diagonal(tokens, 0)
    return _traffic(tokens, row_bytes)


def gemm_shapes(workload: Workload, operation: Operation) -> tuple[GemmShape, ...]:
    """The weights an operation multiplies with, one after the other; none without a GEMM."""
    # Gate and up lie side by side in one weight.
    first = GemmShape(n=2 * workload.intermediate, k=workload.hidden)
    second = GemmShape(n=workload.hidden, k=workload.intermediate)
    match operation:
        case Operation.grouped_gemm | Operation.dispatch_gemm:
            return (first,)
        case Operation.gemm_combine:
            return (second,)
        case Operation.moe_layer:
            return (first, second)
        case Operation.dispatch | Operation.combine:
            return ()


def gemm_shape(workload: Workload, operation: Operation) -> GemmShape | None:
    """The weight of an operation that has one; None where there is no GEMM, or more than one."""
    found = gemm_shapes(workload, operation)
    return found[0] if len(found) == 1 else None


def grouped_gemm_flops(num_rows: int, shape: GemmShape) -> int:
    """2 (multiply and add) x rows x n x k; padding rows do not count."""
    return 2 * num_rows * shape.n * shape.k


def _owners(routing: Routing) -> list[NDArray[np.int32]]:  # per rank (num_tokens, num_topk)
    """The rank that owns each slot's expert, -1 where the slot is dropped."""
    num_experts_per_rank = routing.num_experts // len(routing.topk_idx)
    # Floor division keeps -1 at -1.
    return [ids // np.int32(num_experts_per_rank) for ids in routing.topk_idx]


def _rows_between(routing: Routing) -> NDArray[np.int64]:  # (source rank, owning rank)
    num_ranks = len(routing.topk_idx)
    return np.array(
        [np.bincount(owners[owners >= 0], minlength=num_ranks) for owners in _owners(routing)],
        dtype=np.int64,
    )


def _tokens_between(routing: Routing) -> NDArray[np.int64]:  # (source rank, owning rank)
    num_ranks = len(routing.topk_idx)
    tokens = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    for source, owners in enumerate(_owners(routing)):
        for owner in range(num_ranks):
            tokens[source, owner] = np.count_nonzero((owners == owner).any(axis=1))
    return tokens


def _traffic(
    rows: NDArray[np.int64],  # (source rank, owning rank)
    row_bytes: int,
) -> Traffic:
    return Traffic(
        total_bytes=int(rows.sum()) * row_bytes,
        sent_bytes=tuple((rows.sum(axis=1) * row_bytes).tolist()),
        received_bytes=tuple((rows.sum(axis=0) * row_bytes).tolist()),
    )
