"""Tokens per expert of one layer: from files that hold only such counts, or counted in a trace.

Knows nothing of how tokens are drawn from them.

Counts are stored by SGLang's recorder, or by hand: `.npy`, or `.npz` and JSON under one of the
names `logical_count`, `expert_counts`, `counts`, of shape (num_experts,), (num_layers, num_experts)
or (steps, num_layers, num_experts), whose steps are added up; JSON from layer to counts,
`{"3": [5, 0, 7]}`; CSV with the columns `expert` and `count`, and `layer` where there are several.
"""

import csv
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.names import COUNTS, one_name
from tilepipe.workload.trace.reading import FORMATS, find_format
from tilepipe.workload.trace.recorder import recorded_counts
from tilepipe.workload.trace.refusals import Refusal, layer_refusal, refusal, shown
from tilepipe.workload.trace.rows import MAX_EXPERTS, MAX_LAYER, Met, Selection, check
from tilepipe.workload.trace.stored import open_arrays
from tilepipe.workload.trace.values import values

__all__ = ["Counts", "added", "counts_of_file", "read_counts"]

# Of a file's own words, in a sentence about it.
_MOST_CHARS = 60

# Layer, None where the file tells none apart, -> tokens per expert (num_experts,).
Counts = Mapping[int | None, NDArray[np.int64]]
_MOST = 2**53


def read_counts(path: str, layer: int | None) -> NDArray[np.int64]:  # (num_experts,)
    """Tokens per expert of the layer, or of the only one there is."""
    kind = find_format(path)
    counts = counts_of_file(path, kind)
    if counts is None:
        counts = _counted(path, kind, layer)
    if layer is None and len(counts) == 1:
        return next(iter(counts.values()))
    if layer not in counts:
        raise layer_refusal(path, layer, [known for known in counts if known is not None])
    return counts[layer]


def counts_of_file(
    path: str,
    kind: str,  # as `find_format` says
    *,
    bare: bool = True,
) -> Counts | None:
    """All counts of a file that holds counts; None for a trace.

    A `.npy` says nothing of itself: `bare` takes its numbers for counts.
    """
    if kind.startswith("NumPy"):
        return _of_arrays(path, bare=bare)
    if FORMATS[kind] is not None:
        return None
    if kind.startswith("SGLang"):
        return _layers(path, recorded_counts(path))
    return _of_csv(path) if kind.endswith("CSV") else _of_json(path)


def _of_arrays(path: str, *, bare: bool) -> Counts | None:
    with open_arrays(path) as arrays:
        name = "" if "" in arrays else one_name(path, arrays, COUNTS)
        if name is None or (name == "" and not bare):
            return None
        held = arrays[name]
        return _layers(path, held.rows(0, held.shape[0]) if held.shape else np.zeros(()))


def _of_json(path: str) -> Counts:
    found = list(values(path))
    if len(found) > 1:
        raise refusal(path, f"{found[1][0]} holds counts again", "store one object")
    held = found[0][1]
    name = one_name(path, held, COUNTS)
    if name is not None:
        return _layers(path, _array(path, held[name]))
    return {int(key): _checked(path, _array(path, row), 1) for key, row in held.items()}


def _array(path: str, held: Any) -> NDArray[Any]:
    try:
        return np.array(held)
    except ValueError:
        raise refusal(path, "holds counts of unequal length", "store one per expert") from None


def _of_csv(path: str) -> Counts:
    found: dict[int | None, dict[int, int]] = {}
    for line, layer, expert, count in _csv_lines(path):
        of_layer = found.setdefault(layer, {})
        if not 0 <= expert < MAX_EXPERTS:
            raise refusal(path, f"line {line} has an id that is no expert number {shown(expert)}")
        if expert in of_layer:
            raise refusal(path, f"line {line} has expert {expert} again")
        if not 0 <= (layer or 0) <= MAX_LAYER:
            raise refusal(path, f"line {line} has no layer number as layer {shown(layer)}")
        if not 0 <= count <= _MOST:
            raise refusal(path, f"line {line} has a count out of 0..{_MOST} {shown(count)}")
        of_layer[expert] = count
    if not found:
        raise refusal(path, "no count is recorded in it")
    return {
        layer: _checked(path, np.array([row.get(e, 0) for e in range(max(row) + 1)]), 1)
        for layer, row in found.items()
    }


def _csv_lines(path: str) -> Iterator[tuple[int, int | None, int, int]]:
    """Line, layer (None: no such column), expert and count."""
    with open(path, encoding="utf-8-sig", newline="") as lines:
        table = csv.DictReader(lines, skipinitialspace=True)
        try:
            head = table.fieldnames or []
            if not {"expert", "count"} <= set(head):
                # Behind a quotation mark that is never closed all is one name.
                names = " ".join(", ".join(head).split()) or "none"
                cut = names if len(names) <= _MOST_CHARS else f"{names[:_MOST_CHARS]}..."
                told = f"has the columns {cut}"
                raise refusal(path, told, "name them expert, count and, for several layers, layer")
            for row in table:
                layer = int(row["layer"]) if "layer" in head else None
                yield table.line_num, layer, int(row["expert"]), int(row["count"])
        except Refusal:
            raise
        except UnicodeDecodeError:
            raise refusal(path, "is not UTF-8", "write it as UTF-8") from None
        except (TypeError, ValueError, csv.Error):
            told = f"line {table.line_num} holds something else than whole numbers"
            raise refusal(path, told) from None


def _layers(path: str, held: NDArray[Any]) -> Counts:
    """Counts of every layer that has any: the others are layers without experts."""
    if held.ndim == 3:
        held = _checked(path, held, 3).sum(axis=0, dtype=np.int64)
    if held.ndim == 1:
        return {None: _checked(path, held, 1)}
    counts = _checked(path, held, 2)
    return {layer: counts[layer] for layer in np.flatnonzero(counts.any(axis=1)).tolist()}


def _checked(path: str, held: NDArray[Any], num_axes: int) -> NDArray[np.int64]:
    if held.ndim != num_axes or held.dtype.kind not in "iu" or not held.size:
        raise refusal(
            path,
            f"holds counts of {held.dtype} {held.shape}",
            "store integers (num_experts,) or (num_layers, num_experts)",
        )
    wrong = (held < 0) | (held > _MOST)
    if wrong.any():
        where = [int(axis[0]) for axis in np.nonzero(wrong)]
        place = ", ".join(map("{} {}".format, ("step", "layer", "expert")[-num_axes:], where))
        told = f"has a count out of 0..{_MOST} {shown(held[tuple(where)].item())}"
        raise refusal(path, f"{place} {told}")
    if not held.any():
        raise refusal(path, "holds no count above 0")
    return held.astype(np.int64)


def _counted(path: str, kind: str, layer: int | None) -> Counts:
    """Count the tokens of a trace, a block at a time."""
    reader, met = FORMATS[kind], Met()
    assert reader is not None
    counts: dict[int | None, NDArray[np.int64]] = {}
    for block in reader(path, Selection(layer=layer), met):
        if layer is not None and block.layer is None:
            raise layer_refusal(path, layer, ())
        ids, _ = check(path, block)
        counts[block.layer] = added(counts.get(block.layer), ids)
    if not counts and not met.layers:
        raise refusal(path, "no token is recorded in it")
    return counts or dict.fromkeys(met.layers, np.zeros(0, np.int64))


def added(
    counts: NDArray[np.int64] | None,  # (num_experts so far,)
    ids: NDArray[np.integer],  # (num_rows, num_topk)
) -> NDArray[np.int64]:  # (num_experts now,)
    """Counts with those of more rows."""
    before = np.zeros(0, np.int64) if counts is None else counts
    more = np.bincount(ids[ids >= 0], minlength=len(before))
    more[: len(before)] += before
    return more
