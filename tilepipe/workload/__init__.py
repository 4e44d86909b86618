"""What a batch of tokens asks for: routing drawn or recorded, and the bytes and FLOPs it costs.

Knows nothing of tiles, sends, fabrics or devices.
"""

from tilepipe.workload.place import place
from tilepipe.workload.placement import Placed, Placement
from tilepipe.workload.routing import Imbalance, Routing, draw, imbalance
from tilepipe.workload.shapes import (
    GemmShape,
    Traffic,
    dedup_bytes,
    dedup_wire_bytes,
    gemm_shape,
    gemm_shapes,
    grouped_gemm_flops,
    logical_bytes,
    row_bytes,
    wire_bytes,
)
from tilepipe.workload.trace import Selection, Trace, deal, read_counts, read_trace, survey

__all__ = [
    "GemmShape",
    "Imbalance",
    "Placed",
    "Placement",
    "Routing",
    "Selection",
    "Trace",
    "Traffic",
    "deal",
    "dedup_bytes",
    "dedup_wire_bytes",
    "draw",
    "gemm_shape",
    "gemm_shapes",
    "grouped_gemm_flops",
    "imbalance",
    "logical_bytes",
    "place",
    "read_counts",
    "read_trace",
    "row_bytes",
    "survey",
    "wire_bytes",
]
