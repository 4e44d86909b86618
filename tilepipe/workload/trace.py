"""Read routing that was recorded from a real model and deal its tokens to ranks.

Knows nothing of the laws that draw routing, or of what is done with it.

Formats: `.jsonl`, one object a line with `layer`, `topk_ids` and `topk_weights` (may be missing in
all rows), lines of `"type": "meta"` skipped; `.npy`, an integer array (num_tokens, num_topk) or
(num_layers, num_tokens, num_topk); `.npz` with such an array `topk_ids` or `topk_idx` and perhaps
`topk_weights`. Rows stay in file order: `token_idx` of a log restarts with every request, so it
names no row. JSONL is streamed: beside the rows of the chosen layer only one line is in memory, and
a row's line number is looked up again only when a sentence needs it.
"""

import json
import zipfile
import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Trace", "deal", "place_of_row", "read_trace"]

_RECORD_AGAIN = "record the file again or repair it there"


@dataclass(frozen=True, eq=False)
class Trace:
    """The recorded rows of one layer, in file order; ids of one row are distinct but for -1."""

    topk_idx: NDArray[np.int32]  # (num_tokens, num_topk), -1 = dropped slot
    topk_weights: NDArray[np.float32] | None  # (num_tokens, num_topk), None: not recorded
    layer: int | None  # None: the file does not tell layers apart
    layers: tuple[int, ...]  # all layers of the file


def read_trace(path: str, layer: int | None) -> Trace:
    """The rows of `layer`, or of the only layer there is; a ValueError says what to repair."""
    if not Path(path).is_file():
        raise _refusal(path, "no such file", "type routing.path=FILE")
    match Path(path).suffix:
        case ".jsonl":
            return _read_jsonl(path, layer)
        case ".npy" | ".npz":
            return _read_arrays(path, layer)
        case suffix:
            raise _refusal(
                path,
                f"unknown suffix {suffix or '(none)'}",
                "give a .jsonl, .npy or .npz file",
            )


def deal(trace: Trace, num_ranks: int, num_tokens: int | None) -> tuple[Trace, ...]:
    """Contiguous blocks, one per rank, longer ones first, sizes differing by at most one.

    `num_tokens` caps the tokens per rank: the first num_ranks x num_tokens of the trace are dealt.
    """
    num_dealt = len(trace.topk_idx)
    if num_tokens is not None:
        num_dealt = min(num_dealt, num_ranks * num_tokens)
    size, num_longer = divmod(num_dealt, num_ranks)
    ends = [(rank + 1) * size + min(rank + 1, num_longer) for rank in range(num_ranks)]
    starts = [0, *ends[:-1]]
    weights = trace.topk_weights
    return tuple(
        Trace(
            trace.topk_idx[start:end],
            None if weights is None else weights[start:end],
            trace.layer,
            trace.layers,
        )
        for start, end in zip(starts, ends, strict=True)
    )


def place_of_row(path: str, layer: int | None, row: int) -> str:
    """Where a row of the chosen layer stands; lines count from 1, rows of an array from 0."""
    if Path(path).suffix != ".jsonl":
        return f"row {row}"
    numbers = (
        number for number, record in _records(path) if layer is None or record["layer"] == layer
    )
    for _ in range(row):
        next(numbers)
    return f"line {next(numbers)}"


def _refusal(path: str, found: str, next_step: str) -> ValueError:
    return ValueError(f"routing.path={path}: {found}; {next_step}")


def _layer_refusal(path: str, layer: int | None, layers: tuple[int, ...]) -> ValueError:
    typed = "null" if layer is None else layer
    if not layers:
        return ValueError(
            f"routing.layer={typed}: {path} does not tell layers apart; type routing.layer=null"
        )
    present = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
    return ValueError(
        f"routing.layer={typed}: {path} holds {present}; type routing.layer={layers[0]}"
        + (" or another of them" if len(layers) > 1 else "")
    )


def _records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number from 1 and object of every line that is neither empty nor metadata."""
    # A decoder of its own saves a fifth of json.loads' time. Bytes, decoded line by line, so that a
    # broken character has a line number too.
    decode = json.JSONDecoder().decode
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                record = decode(str(line, "utf-8"))
            except (ValueError, RecursionError):
                raise _refusal(
                    path, f"line {number} is not valid JSON, or was cut short", _RECORD_AGAIN
                ) from None
            if not isinstance(record, dict):
                raise _refusal(path, f"line {number} is not a JSON object", _RECORD_AGAIN)
            if record.get("type") != "meta":
                yield number, record


def _read_jsonl(path: str, layer: int | None) -> Trace:
    rows = _Rows(path)
    layers: set[int] = set()
    wanted = layer
    for number, record in _records(path):
        row_layer = record.get("layer")
        if type(row_layer) is not int:
            raise _refusal(path, f"line {number} has no whole number as layer", _RECORD_AGAIN)
        layers.add(row_layer)
        if wanted is None:
            wanted = row_layer
        if row_layer == wanted:
            rows.append(number, record)
    present = tuple(sorted(layers))
    if not present:
        raise _refusal(path, "no line holds a token", _RECORD_AGAIN)
    if wanted not in layers or (layer is None and len(layers) > 1):
        raise _layer_refusal(path, layer, present)
    return _trace(path, rows.topk_idx(), rows.topk_weights(), wanted, present)


class _Rows:
    """The rows read so far, packed; the first row fixes topk and whether weights are there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._ids = array("i")
        self._weights = array("f")
        self._num_topk = 0
        self._has_weights = False

    def append(self, number: int, record: dict[str, Any]) -> None:
        ids, weights = record.get("topk_ids"), record.get("topk_weights")
        if not isinstance(ids, list) or not ids:
            raise self._refusal(number, "has no list topk_ids")
        if not self._ids:
            self._num_topk = len(ids)
            self._has_weights = weights is not None
        if len(ids) != self._num_topk:
            raise self._refusal(
                number, f"has {len(ids)} topk_ids where the rows before have {self._num_topk}"
            )
        if any(type(entry) is bool for entry in ids):
            raise self._refusal(number, "has a topk_ids entry that is no expert number")
        try:
            self._ids.extend(ids)  # refuses floats, strings and null by itself
        except (TypeError, OverflowError):
            raise self._refusal(number, "has a topk_ids entry that is no expert number") from None
        if self._has_weights:
            self._append_weights(number, weights)
        elif weights is not None:
            raise self._refusal(number, "has topk_weights where the rows before have none")

    def _append_weights(self, number: int, weights: Any) -> None:
        if not isinstance(weights, list) or len(weights) != self._num_topk:
            raise self._refusal(number, f"has no {self._num_topk} topk_weights, one per id")
        try:
            self._weights.extend(weights)
        except (TypeError, OverflowError):
            raise self._refusal(number, "has a topk_weights entry that is no number") from None

    def _refusal(self, number: int, found: str) -> ValueError:
        return _refusal(self._path, f"line {number} {found}", _RECORD_AGAIN)

    def topk_idx(self) -> NDArray[np.int32]:  # (num_tokens, num_topk)
        return np.frombuffer(self._ids, dtype=np.int32).reshape(-1, self._num_topk)

    def topk_weights(self) -> NDArray[np.float32] | None:  # (num_tokens, num_topk)
        if not self._has_weights:
            return None
        return np.frombuffer(self._weights, dtype=np.float32).reshape(-1, self._num_topk)


def _read_arrays(path: str, layer: int | None) -> Trace:
    ids, weights = _load_arrays(path)
    _refuse_bad_arrays(path, ids, weights)
    layers = tuple(range(len(ids))) if ids.ndim == 3 else ()
    if len(layers) == 1 and layer is None:
        layer = 0
    if (layer is None) != (not layers) or (layer is not None and layer not in layers):
        raise _layer_refusal(path, layer, layers)
    if layer is not None:
        ids, weights = ids[layer], None if weights is None else weights[layer]
    if ids.size == 0:
        raise _refusal(path, "the array holds no token", _RECORD_AGAIN)
    return _trace(path, ids, weights, layer, layers)


def _load_arrays(path: str) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Ids and, where stored, weights; of a .npy only the layer that is used gets read."""
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded, None
        with loaded as arrays:
            names = sorted(arrays.files)
            named = [name for name in names if name in ("topk_ids", "topk_idx")]
            if len(named) == 1:
                weights = arrays["topk_weights"] if "topk_weights" in names else None
                return arrays[named[0]], weights
    except (AttributeError, ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error):
        raise _refusal(path, "not an array file of numbers, or cut short", _RECORD_AGAIN) from None
    raise _refusal(
        path,
        f"holds {', '.join(names) or 'no array'}, not exactly one of topk_ids and topk_idx",
        "store the ids once, under one of these names",
    )


def _refuse_bad_arrays(path: str, ids: NDArray[Any], weights: NDArray[Any] | None) -> None:
    if ids.dtype.kind not in "iu":
        raise _refusal(path, f"the ids are {ids.dtype}, not integers", "store expert numbers")
    if ids.ndim not in (2, 3):
        raise _refusal(
            path,
            f"the ids have shape {ids.shape}",
            "store (num_tokens, num_topk) or (num_layers, num_tokens, num_topk)",
        )
    if weights is not None and (weights.shape != ids.shape or weights.dtype.kind not in "fiu"):
        raise _refusal(
            path,
            f"topk_weights is {weights.dtype} {weights.shape} beside ids {ids.shape}",
            "store one number per id",
        )


def _trace(
    path: str,
    ids: NDArray[Any],  # (num_tokens, num_topk) integers of any width
    weights: NDArray[Any] | None,  # (num_tokens, num_topk)
    layer: int | None,
    layers: tuple[int, ...],
) -> Trace:
    """Check every row, then narrow: a cast before the check would wrap ids around."""
    _refuse_first(path, layer, (ids < -1) | (ids > 2**31 - 1), "an id that is no expert number")
    _refuse_first(path, layer, _repeats(ids), "the same expert twice")
    narrow = None
    if weights is not None:
        with np.errstate(over="ignore"):  # too large for float32 becomes inf, refused below
            narrow = np.array(weights, dtype=np.float32, order="C")
        usable = np.isfinite(narrow) & (narrow >= 0)
        _refuse_first(path, layer, ~usable, "a weight that is negative, infinite or no number")
    # Copies: the result must not hang on the file, which may be memory-mapped.
    return Trace(np.array(ids, dtype=np.int32, order="C"), narrow, layer, layers)


def _repeats(ids: NDArray[Any]) -> NDArray[np.bool_]:  # (num_tokens, num_topk - 1)
    """Where a row, sorted, holds an expert again."""
    ascending = np.sort(ids, axis=1)
    again: NDArray[np.bool_] = ascending[:, 1:] == ascending[:, :-1]
    return again & (ascending[:, 1:] >= 0)


def _refuse_first(
    path: str,
    layer: int | None,
    wrong: NDArray[np.bool_],  # (num_tokens, any)
    found: str,
) -> None:
    rows = wrong.any(axis=1)
    if rows.any():
        place = place_of_row(path, layer, int(np.argmax(rows)))
        raise _refusal(path, f"{place} has {found}", _RECORD_AGAIN)
