"""Recordings in NumPy's files, `.npy` and `.npz`.

Knows nothing of other formats, or of how an array is read.

Ids are (num_tokens, num_topk) or (num_layers, num_tokens, num_topk) under one of the names of
`names.py`, with weights of the same shape. Under `routed_experts` the axes are those of the array
that vLLM (0.11 on) and SGLang (0.5.6 on) hand out: (num_tokens, num_layers, num_topk). A `.npy` has
no name, so one whose first axis is longer than any model is deep is refused.
"""

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from tilepipe.workload.trace.names import COUNTS, ROUTED, Names, find_names
from tilepipe.workload.trace.refusals import layer_refusal, refusal, request_refusal
from tilepipe.workload.trace.rows import MAX_BLOCK_ROWS, Block, Met, Selection
from tilepipe.workload.trace.stored import Stored, open_arrays

__all__ = ["read_arrays"]

_MOST_LAYERS = 512


def read_arrays(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of the wanted layers; rows count from 0 in each layer."""
    if selection.request is not None:
        raise request_refusal(path, selection.request, ())
    met.complete = True
    with open_arrays(path) as arrays:
        if ROUTED in arrays:
            yield from _tokens_first(path, arrays[ROUTED], selection, met)
        else:
            ids, weights = _named(path, arrays)
            yield from _layers_first(path, ids, weights, selection, met)


def _named(path: str, arrays: dict[str, Stored]) -> tuple[Stored, Stored | None]:
    if "" in arrays:
        return arrays[""], None
    if any(name in arrays for name in COUNTS):
        raise refusal(path, "holds counts, not tokens", "type routing=counts")
    names: Names = find_names(path, arrays)
    return arrays[names.ids], None if names.weights is None else arrays[names.weights]


def _layers_first(
    path: str, ids: Stored, weights: Stored | None, selection: Selection, met: Met
) -> Iterator[Block]:
    _refuse_bad(path, ids, weights)
    if len(ids.shape) == 2:
        yield from _pieces(ids, weights, None, selection, met)
        return
    if ids.shape[0] > _MOST_LAYERS:
        raise refusal(
            path,
            f"the ids have shape {ids.shape}, more layers than any model",
            f"store (num_tokens, num_layers, num_topk) in a .npz under the name {ROUTED}",
        )
    for layer in _wanted(path, ids.shape[0], selection, met):
        of_layer = None if weights is None else weights.layer(layer)
        yield from _pieces(ids.layer(layer), of_layer, layer, selection, met)


def _wanted(path: str, num_layers: int, selection: Selection, met: Met) -> list[int]:
    met.layers = set(range(num_layers))
    if selection.layer is None:
        return sorted(met.layers)
    if selection.layer not in met.layers:
        raise layer_refusal(path, selection.layer, met.layers)
    return [selection.layer]


def _pieces(
    ids: Stored, weights: Stored | None, layer: int | None, selection: Selection, met: Met
) -> Iterator[Block]:
    """Blocks of (num_tokens, num_topk), from the first wanted row on."""
    num_rows = met.num_rows = ids.shape[0]
    begin = met.skipped = min(selection.first_token, num_rows)
    for start in range(begin, num_rows, MAX_BLOCK_ROWS):
        stop = min(start + MAX_BLOCK_ROWS, num_rows)
        yield _block(
            ids.rows(start, stop), None if weights is None else weights.rows(start, stop), layer,
            start,
        )  # fmt: skip


def _tokens_first(path: str, ids: Stored, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of (num_tokens, num_layers, num_topk)."""
    if len(ids.shape) != 3:
        raise refusal(
            path,
            f"{ROUTED} has shape {ids.shape}",
            "store (num_tokens, num_layers, num_topk)",
        )
    _refuse_bad(path, ids, None)
    num_rows, num_layers = ids.shape[:2]
    met.num_rows = num_rows
    layers = _wanted(path, num_layers, selection, met)
    begin = met.skipped = min(selection.first_token, num_rows)
    step = max(1, MAX_BLOCK_ROWS // num_layers)
    for start in range(begin, num_rows, step):
        tokens = ids.rows(start, min(start + step, num_rows))
        for layer in layers:
            yield _block(tokens[:, layer], None, layer, start)


def _block(ids: NDArray[Any], weights: NDArray[Any] | None, layer: int | None, start: int) -> Block:
    return Block(ids=ids, weights=weights, layer=layer, place=lambda row: f"row {row + start}")


def _refuse_bad(path: str, ids: Stored, weights: Stored | None) -> None:
    if ids.dtype.kind not in "iu":
        raise refusal(path, f"the ids are {ids.dtype}, not integers", "store expert numbers")
    if len(ids.shape) not in (2, 3) or ids.shape[-1] == 0:
        raise refusal(
            path,
            f"the ids have shape {ids.shape}",
            "store (num_tokens, num_topk) or (num_layers, num_tokens, num_topk)",
        )
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind not in "fiu"):
        raise refusal(
            path,
            f"the weights are {weights.dtype} {weights.shape} beside ids {ids.shape}",
            "store one number per id",
        )
