"""Parquet with one row per token, as FLAME-MoE-Traces publishes it.

Knows nothing of other formats.

FLAME-MoE-Traces (CMU-FLAME, 2025) has a file per layer with `indices` list<int16> and `scores`
list<float16>, topk 6 of 64 experts, 52 428 800 rows. All names of `names.py` are known, lists of
fixed or free length, integers of any width; further columns are not read. With a layer column,
groups of rows whose statistics exclude the layer are not read either.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tilepipe.workload.trace.columns import Columns, blocks_of
from tilepipe.workload.trace.names import Names, find_names
from tilepipe.workload.trace.refusals import layer_refusal, refusal, request_refusal, shown
from tilepipe.workload.trace.rows import MAX_BLOCK_ROWS, MAX_LAYER, Block, Met, Selection
from tilepipe.workload.trace.runs import uneven

__all__ = ["read_parquet"]

# Column chunks are read through a buffer: a group of rows may hold gigabytes.
_BUFFER_BYTES = 1 << 20


def read_parquet(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of the file's rows; rows count from 0 over the whole file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
            names = _names(path, file.schema_arrow)
            if selection.request is not None and names.request is None:
                raise request_refusal(path, selection.request, ())
            met.num_rows = file.metadata.num_rows
            if names.layer is None:
                met.complete = True
            elif selection.layer is None:
                met.layers, met.complete = _layers(file, names.layer), True
            yield from _blocks(path, file, names, selection, met)
            # Statistics kept groups from being read: their layers are still to be told.
            if names.layer is not None and selection.layer not in (None, *met.layers):
                raise layer_refusal(path, selection.layer, _layers(file, names.layer))
    except (pa.ArrowException, OSError) as error:
        told = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
        raise refusal(path, f"no readable Parquet file, or cut short ({told})") from None


def _names(path: str, schema: Any) -> Names:
    import pyarrow as pa

    names = find_names(path, schema.names)
    for used in (names.ids, names.weights, names.layer, names.request):
        if schema.names.count(used) > 1:
            raise refusal(path, f"holds two columns {used}", "store it once")
    wanted = {names.ids: (pa.types.is_integer, "lists of integers", "store expert numbers")}
    if names.weights is not None:
        wanted[names.weights] = (_is_number, "lists of numbers", "store one number per id")
    for name, (fits, what, next_step) in wanted.items():
        kind = schema.field(name).type
        is_list = any(
            test(kind)
            for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        )
        if not is_list or not fits(kind.value_type):
            raise refusal(path, f"column {name} is {kind}, not {what}", next_step)
    if names.layer is not None and not pa.types.is_integer(schema.field(names.layer).type):
        kind = schema.field(names.layer).type
        raise refusal(path, f"column {names.layer} is {kind}, no integer", "store layer numbers")
    if names.request is not None and not _tells_requests(schema.field(names.request).type):
        told = f"column {names.request} is {schema.field(names.request).type}"
        raise refusal(path, f"{told}, no string or integer", "store names or numbers of requests")
    return names


def _is_number(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _tells_requests(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    known = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(is_kind(kind) for is_kind in (*known, pa.types.is_integer))


def _layers(file: Any, name: str) -> set[int]:
    """Every layer in the file, by statistics where they tell, else by reading the column."""
    layers: set[int] = set()
    for group in range(file.num_row_groups):
        low, high = _span(file, group, name)
        if low is not None and low == high:
            layers.add(low)
            continue
        for batch in file.iter_batches(row_groups=[group], columns=[name], use_threads=False):
            layers.update(batch.column(0).drop_null().unique().to_pylist())
    return layers


def _span(file: Any, group: int, name: str) -> tuple[int | None, int | None]:
    """Lowest and highest value of a column in a group of rows, None where it is not told."""
    metadata = file.metadata.row_group(group)
    for place in range(metadata.num_columns):
        column = metadata.column(place)
        if column.path_in_schema == name:
            told = column.statistics
            if told is not None and told.has_min_max and told.null_count == 0:
                return int(told.min), int(told.max)
    return None, None


def _blocks(path: str, file: Any, names: Names, selection: Selection, met: Met) -> Iterator[Block]:
    wanted = [names.ids, names.weights, names.layer, names.request]
    columns = [name for name in wanted if name is not None]
    # Only where every row counts are rows before the window known without reading them.
    counted = names.layer is None and selection.request is None
    first = 0
    for group in range(file.num_row_groups):
        num_rows = file.metadata.row_group(group).num_rows
        if counted and first + num_rows <= selection.first_token:
            met.skipped += num_rows
        elif not _excluded(file, group, names, selection):
            batches = file.iter_batches(
                MAX_BLOCK_ROWS, row_groups=[group], columns=columns, use_threads=False
            )
            number = first
            for batch in batches:
                yield from _of_batch(path, batch, names, number, selection, met)
                number += batch.num_rows
        first += num_rows


def _excluded(file: Any, group: int, names: Names, selection: Selection) -> bool:
    if names.layer is None or selection.layer is None:
        return False
    low, high = _span(file, group, names.layer)
    return low is not None and high is not None and not low <= selection.layer <= high


def _of_batch(
    path: str, batch: Any, names: Names, number: int, selection: Selection, met: Met
) -> list[Block]:
    numbers = np.arange(number, number + batch.num_rows)
    columns = Columns.of(batch, names, numbers, tell=lambda row: f"row {row}")
    blocks = None if columns is None else blocks_of(columns, selection, met)
    if blocks is not None:
        return blocks
    if batch.num_rows > 1:
        # Halves until each holds rows of one form, or one row that is to blame.
        half = batch.num_rows // 2
        return [
            *_of_batch(path, batch.slice(0, half), names, number, selection, met),
            *_of_batch(path, batch.slice(half), names, number + half, selection, met),
        ]
    raise refusal(path, f"row {number} {_fault(batch, names)}")


def _fault(batch: Any, names: Names) -> str:
    """What is wrong with the one row of this batch."""
    row = {name: batch.column(name)[0].as_py() for name in batch.schema.names}
    layer = row.get(names.layer or "", 0)
    if layer is None or not 0 <= layer <= MAX_LAYER:
        return f"has no layer number as {names.layer} {shown(layer)}"
    if names.request is not None and row[names.request] is None:
        return f"has no {names.request}"
    ids, weights = row[names.ids], row.get(names.weights or "")
    if not ids:
        return f"has no list {names.ids}"
    if None in ids:
        return f"has {names.ids} with an entry that is no whole number {shown(None)}"
    if weights is None or len(weights) != len(ids):
        return uneven(ids, weights, (names.ids, names.weights or "weights"))
    return f"has {names.weights} with an entry that is no number {shown(None)}"
