"""Dumps of SGLang's expert distribution recorder (`.pt`), per token and as counts.

Knows nothing of other formats.

What is written (`eplb/expert_distribution.py`, 2026-11), with `torch.save`, depends on
`--expert-distribution-recorder-mode`:

- `per_token`: `records`, one per forward pass of this rank, each with `topk_ids_of_layer` int32
  (num_layers, num_tokens, 8); 8 whatever the model's topk, the rest of a row is -1, and so is
  every row of a layer without experts.
- `stat`, `stat_approx`: `logical_count` int32 (steps, num_layers, num_experts), summed over ranks.
- `per_pass`: `records` with `global_physical_count` (num_layers, num_physical_experts) only.

Ids and physical counts number the slots that experts lie in: where experts are replicated, or moved
by EPLB, they are translated by `last_physical_to_logical_map`, the last map of the recording.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.refusals import refusal, request_refusal
from tilepipe.workload.trace.rows import MAX_BLOCK_ROWS, MAX_EXPERTS, Block, Met, Selection
from tilepipe.workload.trace.torchfile import Tensor, open_torch

__all__ = ["is_counts", "read_recorder", "recorded_counts"]

_IDS, _MAP = "topk_ids_of_layer", "last_physical_to_logical_map"
_PHYSICAL, _LOGICAL = "global_physical_count", "logical_count"


def is_counts(path: str) -> bool:
    """Whether the dump tells no token apart."""
    with open_torch(path) as dump:
        return not any(_IDS in record for record in _records(path, dump))


def _records(path: str, dump: Any) -> list[dict[str, Any]]:
    if isinstance(dump, dict):
        records = dump.get("records", [])
        if isinstance(records, list) and all(isinstance(record, dict) for record in records):
            if records or _LOGICAL in dump:
                return records
            if "records" in dump:
                raise refusal(path, "no token is recorded in it")
    found = ", ".join(map(str, dump)) if isinstance(dump, dict) and dump else "no dictionary"
    raise refusal(
        path,
        f"holds {found}, neither records nor {_LOGICAL}",
        "dump it with SGLang's expert distribution recorder",
    )


def read_recorder(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of a dump per token; records and their tokens count from 0."""
    if selection.request is not None:
        raise request_refusal(path, selection.request, ())
    with open_torch(path) as dump:
        records = _records(path, dump)
        if not any(_IDS in record for record in records):
            raise refusal(path, "holds counts, not tokens", "type routing=counts")
        logical = _map(path, dump)
        for number, record in enumerate(records):
            tensor = _tensor(path, record, _IDS, f"record {number}", num_axes=3)
            ids = tensor.read()
            if logical is not None and len(logical) != len(ids):
                raise refusal(path, f"record {number} has {len(ids)} layers, its map another count")
            num_topk = _used(ids)
            for layer in range(len(ids)) if num_topk else ():
                yield from _of_layer(
                    path, ids[layer, :, :num_topk], layer, number, logical, selection, met
                )


def _used(ids: NDArray[np.int32]) -> int:  # (num_layers, num_tokens, 8)
    """Slots of a row up to the last that any row uses."""
    return int(np.flatnonzero((ids != -1).any(axis=(0, 1))).max(initial=-1)) + 1


def _of_layer(
    path: str,
    ids: NDArray[np.int32],  # (num_tokens, num_topk)
    layer: int,
    record: int,
    logical: NDArray[np.int64] | None,  # (num_layers, num_physical_experts)
    selection: Selection,
    met: Met,
) -> Iterator[Block]:
    if (ids == -1).all():
        return  # a layer without experts
    met.layers.add(layer)
    if selection.layer not in (None, layer):
        return
    if logical is not None:
        beyond = (ids >= logical.shape[1]).any(axis=1)
        if beyond.any():
            row = int(np.argmax(beyond))
            told = f"record {record}, token {row} has id {ids[row].max()}"
            raise refusal(path, f"{told}, its map only {logical.shape[1]}")
        # What lies below 0 stays as it is: dropped, or for the check of all rows to refuse.
        ids = np.where(ids >= 0, logical[layer][np.maximum(ids, 0)], ids)
    for start in range(0, len(ids), MAX_BLOCK_ROWS):
        yield Block(
            ids=ids[start : start + MAX_BLOCK_ROWS],
            weights=None,
            layer=layer,
            place=lambda row, start=start: f"record {record}, token {start + row}",  # type: ignore[misc]
        )


def recorded_counts(path: str) -> NDArray[np.int64]:  # (num_layers, num_experts)
    """Tokens per layer and expert of a dump that tells no token apart."""
    with open_torch(path) as dump:
        records = _records(path, dump)
        if not records:
            counts = _tensor(path, dump, _LOGICAL, "the dump", num_axes=3).read()
            return np.asarray(counts.sum(axis=0, dtype=np.int64))
        physical = _summed(path, records)
        logical = _map(path, dump)
        if logical is None:
            return physical
        if logical.shape != physical.shape:
            raise refusal(path, f"counts are {physical.shape}, their map {logical.shape}")
        counts = np.zeros((len(physical), int(logical.max(initial=-1)) + 1), np.int64)
        np.add.at(counts, (np.arange(len(physical))[:, None], logical), physical)
        return counts


def _summed(
    path: str, records: list[dict[str, Any]]
) -> NDArray[np.int64]:  # (num_layers, num_physical_experts)
    whole: NDArray[np.int64] | None = None
    for number, record in enumerate(records):
        counts = _tensor(path, record, _PHYSICAL, f"record {number}", num_axes=2).read()
        if whole is not None and counts.shape != whole.shape:
            told = f"record {number} has counts {counts.shape} where those before have"
            raise refusal(path, f"{told} {whole.shape}")
        whole = counts.astype(np.int64) if whole is None else whole + counts
    assert whole is not None, "no record"
    return whole


def _map(path: str, dump: dict[str, Any]) -> NDArray[np.int64] | None:
    """Physical to logical experts (num_layers, num_physical_experts); None where it is missing."""
    if dump.get(_MAP) is None:
        return None
    logical = _tensor(path, dump, _MAP, "the dump", num_axes=2).read().astype(np.int64)
    if logical.min(initial=0) < 0 or logical.max(initial=0) >= MAX_EXPERTS:
        raise refusal(path, f"{_MAP} holds numbers that are no expert's")
    return logical


def _tensor(path: str, held: dict[str, Any], name: str, place: str, *, num_axes: int) -> Tensor:
    tensor = held.get(name)
    if not isinstance(tensor, Tensor):
        raise refusal(path, f"{place} has no tensor {name}")
    if len(tensor.shape) != num_axes or tensor.dtype.kind not in "iu":
        raise refusal(path, f"{place} has {name} of {tensor.dtype} {tensor.shape}")
    return tensor
