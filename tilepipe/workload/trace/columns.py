"""Rows that lie in Arrow columns, lists of ids and of weights, as blocks.

Knows nothing of files: JSONL and Parquet both come as such columns.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.names import Names
from tilepipe.workload.trace.rows import MAX_LAYER, Block, Met, Selection

__all__ = ["Columns", "blocks_of"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """One piece of a table."""

    ids: Any  # Arrow array of lists of integers
    weights: Any | None  # Arrow array of lists of numbers, None: the piece has none
    layers: NDArray[np.int64] | None
    requests: Any | None  # Arrow array of strings
    numbers: NDArray[np.int64]  # place of each row in the file
    tell: Callable[[int], str]  # such a place in words

    @staticmethod
    def of(
        table: Any, names: Names, numbers: NDArray[np.int64], *, tell: Callable[[int], str]
    ) -> "Columns | None":
        """Columns of an Arrow table or batch in one chunk; None where some rows lack one."""
        whole = {
            name: _whole(table.column(name))
            for name in (names.ids, names.layer, names.request)
            if name is not None
        }
        if any(column.null_count for column in whole.values()):
            return None
        weights = None if names.weights is None else _whole(table.column(names.weights))
        if weights is not None and weights.null_count == len(weights):
            weights = None
        elif weights is not None and weights.null_count:
            return None
        return Columns(
            ids=whole[names.ids],
            weights=weights,
            layers=None if names.layer is None else whole[names.layer].to_numpy(),
            requests=None if names.request is None else _words(whole[names.request]),
            numbers=numbers,
            tell=tell,
        )

    def where(self, rows: NDArray[np.bool_]) -> "Columns":
        """The rows that are marked."""
        if rows.all():
            return self
        import pyarrow as pa

        mask = pa.array(rows)
        return replace(
            self,
            ids=self.ids.filter(mask),
            weights=None if self.weights is None else self.weights.filter(mask),
            layers=None if self.layers is None else self.layers[rows],
            requests=None if self.requests is None else self.requests.filter(mask),
            numbers=self.numbers[rows],
        )


def _whole(column: Any) -> Any:
    import pyarrow as pa

    if not isinstance(column, pa.ChunkedArray):
        return column
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _words(column: Any) -> Any:
    import pyarrow as pa

    return column.cast(pa.string())


def blocks_of(columns: Columns, selection: Selection, met: Met) -> list[Block] | None:
    """One block per wanted layer; None where one is no number, or its rows differ in form."""
    if columns.layers is None:
        parts: dict[int | None, Columns] = {None: columns}
    else:
        present = np.unique(columns.layers).tolist()
        if present and not 0 <= present[0] <= present[-1] <= MAX_LAYER:
            return None
        met.layers.update(present)
        parts = {
            layer: columns.where(columns.layers == np.int64(layer))
            for layer in present
            if selection.layer in (None, layer)
        }
    blocks = []
    for layer, part in parts.items():
        chosen = _of_request(part, selection, met)
        block = _block(chosen, layer) if len(chosen.numbers) else None
        if block is not None:
            blocks.append(block)
        elif len(chosen.numbers):
            return None
    return blocks


def _of_request(columns: Columns, selection: Selection, met: Met) -> Columns:
    if columns.requests is None:
        return columns
    import pyarrow.compute as pc

    met.requests.update(pc.unique(columns.requests).to_pylist())
    if selection.request is None:
        return columns
    equal = pc.equal(columns.requests, selection.request)
    return columns.where(equal.to_numpy(zero_copy_only=False))


def _block(columns: Columns, layer: int | None) -> Block | None:
    ids = _matrix(columns.ids)
    weights = None if columns.weights is None else _matrix(columns.weights)
    if ids is None or (columns.weights is not None and weights is None):
        return None
    if weights is not None and weights.shape != ids.shape:
        return None
    numbers, tell = columns.numbers, columns.tell
    return Block(ids=ids, weights=weights, layer=layer, place=lambda row: tell(int(numbers[row])))


def _matrix(lists: Any) -> NDArray[Any] | None:  # (num_rows, length of each list)
    """Lists of one length without a missing entry, or None."""
    lengths = lists.value_lengths().to_numpy(zero_copy_only=False)
    length, values = int(lengths[0]), lists.flatten()
    if length == 0 or values.null_count or (lengths != length).any():
        return None
    matrix: NDArray[Any] = values.to_numpy(zero_copy_only=False).reshape(-1, length)
    return matrix
