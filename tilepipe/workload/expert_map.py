"""Read from a file which expert each physical expert holds.

Knows nothing of routing, of ranks and of what a replica is for.

Formats: `.json`, a list of expert numbers, a list of such lists with one for every layer, or an
object that holds one of these as `physical_to_logical_map` (what SGLang takes as
`--init-expert-location`) or `phy2log` (EPLB's name); `.npy`, such an array of one or two
dimensions; `.npz`, one under either name. -1 stands for a physical expert that holds none.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.paths import path_fault
from tilepipe.workload.trace.stored import BROKEN

__all__ = ["map_refusal", "read_expert_map"]

_NAMES = ("physical_to_logical_map", "phy2log")
_SUFFIXES = (".json", ".npy", ".npz")
_WRITE_AGAIN = "write the file again"
_LARGEST_ID = 2**31 - 1


def read_expert_map(path: str, layer: int | None) -> NDArray[np.int32]:  # (num_physical,)
    """The row of `layer`, or the only row; a ValueError says what to repair."""
    if fault := path_fault(path, key="placement.path", suffixes=_SUFFIXES):
        raise map_refusal(path, *fault)
    match Path(path).suffix:
        case ".json":
            rows = _rows_of_json(path)
        case ".npy" | ".npz":
            rows = _rows_of_array(path)
        case ".pt" | ".pth":
            raise map_refusal(
                path,
                "a file of torch, which may run code when it is read",
                "store the map as JSON: json.dump(physical_to_logical_map.tolist(), file)",
            )
        case suffix:
            found = f"unknown suffix {suffix or '(none)'}"
            raise map_refusal(path, found, "give a .json, .npy or .npz file")
    return _row(path, layer, rows)


def map_refusal(path: str, found: str, next_step: str) -> ValueError:
    """What is wrong with a map, in a sentence."""
    return ValueError(f"placement.path={path}: {found}; {next_step}")


def _rows_of_json(path: str) -> NDArray[np.int32]:  # (num_physical,) or (num_layers, num_physical)
    try:
        found = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError):
        raise map_refusal(path, "is not valid JSON, or was cut short", _WRITE_AGAIN) from None
    if isinstance(found, dict):
        found = found[_only_name(path, list(found))]
    nested = isinstance(found, list) and any(isinstance(row, list) for row in found)
    rows = found if nested else [found]
    for number, row in enumerate(rows):
        _refuse_bad_list(path, row, f"layer {number}" if nested else "the map")
    lengths = sorted({len(row) for row in rows})
    if len(lengths) > 1:
        uneven = f"has {lengths[0]} physical experts in one layer and {lengths[-1]} in another"
        raise map_refusal(path, uneven, "write as many for every layer")
    return np.array(found, dtype=np.int32)


def _only_name(path: str, names: list[str]) -> str:
    """The one of our names that a file has."""
    ours = [name for name in names if name in _NAMES]
    if len(ours) == 1:
        return ours[0]
    if not ours and "logical_count" in names:
        raise map_refusal(
            path,
            "holds logical_count, from which a map is yet to be made",
            "make it with EPLB, or type placement=balanced",
        )
    raise map_refusal(
        path,
        f"holds {', '.join(sorted(names)[:8]) or 'nothing'}, not exactly one of "
        f"{' and '.join(_NAMES)}",
        "store the map once, under one of these names",
    )


def _refuse_bad_list(path: str, row: Any, where: str) -> None:
    if not isinstance(row, list) or not row:
        raise map_refusal(path, f"{where} is no list of expert numbers", _WRITE_AGAIN)
    for place, entry in enumerate(row):
        if type(entry) is not int or not -1 <= entry <= _LARGEST_ID:
            text = json.dumps(entry)
            said = text if len(text) <= 20 else f"{text[:20]}..."
            found = f"{where} holds {said} at place {place}, which is no expert number"
            raise map_refusal(path, found, "allowed are whole numbers, and -1 for none")


def _rows_of_array(path: str) -> NDArray[np.int32]:  # (num_physical,) or (num_layers, num_physical)
    array = _load_array(path)
    if array.dtype.kind not in "iu":
        raise map_refusal(path, f"the map is {array.dtype}, not integers", "store expert numbers")
    if array.ndim not in (1, 2) or array.size == 0:
        found = f"the map has shape {array.shape}"
        raise map_refusal(path, found, "store (num_physical,) or (num_layers, num_physical)")
    wrong = array[(array < -1) | (array > _LARGEST_ID)]
    if wrong.size:
        found = f"the map holds {wrong[0]}, which is no expert number"
        raise map_refusal(path, found, "allowed are whole numbers, and -1 for none")
    # A copy: it must not hang on the file.
    return np.array(array, dtype=np.int32, order="C")


def _load_array(path: str) -> NDArray[Any]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded as arrays:
            names = list(arrays.files)
            held = {name: arrays[name] for name in names if name in _NAMES}
    except BROKEN:
        found = "not an array file of numbers, or cut short"
        raise map_refusal(path, found, _WRITE_AGAIN) from None
    array: NDArray[Any] = held[_only_name(path, names)]
    return array


def _row(path: str, layer: int | None, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    if rows.ndim == 1:
        if layer is None:
            return rows
        raise ValueError(
            f"placement.layer={layer}: {path} does not tell layers apart; type placement.layer=null"
        )
    wanted = 0 if layer is None and len(rows) == 1 else layer
    if wanted is None or wanted >= len(rows):
        typed, last = "null" if layer is None else layer, len(rows) - 1
        held = f"layers 0..{last}" if last else "layer 0"
        raise ValueError(f"placement.layer={typed}: {path} holds {held}; type one of them")
    chosen: NDArray[np.int32] = rows[wanted]
    return chosen
