"""Names under which recorders store ids, weights, layers and requests, and how to find them.

Knows nothing of formats; whoever writes files by hand may use any of these names.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tilepipe.workload.trace.refusals import refusal

__all__ = [
    "COUNTS",
    "IDS",
    "LAYER",
    "REQUEST",
    "ROUTED",
    "WEIGHTS",
    "Names",
    "find_names",
    "one_name",
]

# Expert numbers of a token, then gate weights in the same order.
IDS = ("topk_ids", "topk_idx", "indices", "experts")
WEIGHTS = ("topk_weights", "scores", "weights")
LAYER = ("layer", "layer_id", "layer_idx")
REQUEST = ("req_id", "request_id", "request")
# What engines call an array whose axes are token, layer, slot.
ROUTED = "routed_experts"
# Tokens per expert, with no token told apart.
COUNTS = ("logical_count", "expert_counts", "counts")


@dataclass(frozen=True)
class Names:
    """The names one file uses; None: it has no such thing."""

    ids: str
    weights: str | None
    layer: str | None
    request: str | None


def find_names(
    path: str, found: Collection[str], *, place: str = "the file", example: str = ""
) -> Names:
    """Pick the known names out of those found; refuses none or two of a kind."""
    ids = one_name(path, found, IDS, place)
    if ids is None:
        there = ", ".join(found) or "nothing"
        raise refusal(
            path,
            f"{place} holds {there}, but none of {', '.join(IDS)}",
            "store the ids under one of these names" + (f", as in {example}" if example else ""),
        )
    return Names(
        ids,
        one_name(path, found, WEIGHTS, place),
        one_name(path, found, LAYER, place),
        one_name(path, found, REQUEST, place),
    )


def one_name(
    path: str, found: Collection[str], known: tuple[str, ...], place: str = "the file"
) -> str | None:
    """The known name that is there, None where none is; refuses two."""
    there = [name for name in known if name in found]
    if len(there) > 1:
        raise refusal(
            path,
            f"{place} holds {' and '.join(there)}, which mean the same",
            "store it once, under one of these names",
        )
    return there[0] if there else None
