"""Logs of one JSON object per line and token, as vLLM-MoE-Logger writes them.

Knows nothing of other formats.

A line holds `layer`, `topk_ids` and perhaps `topk_weights` and `req_id`; lines of `"type": "meta"`
are skipped (weiran0129/vLLM-MoE-Logger, `moe_logger.py`, for vLLM 0.11). `token_idx` restarts with
every request, so it names no row. The names of `names.py` are known too.

Two ways give the same rows. Arrow's parser takes a few megabytes of lines at once. Where it
stumbles, or meets anything out of the ordinary, Python's takes the same lines one by one: it knows
the line to blame, and what Arrow refuses but is sound (NaN in a row of another layer).
(2 cores, 2026-11, topk 8 with weights, 300 bytes a line: 0.6 M lines/s against 0.15 M.)
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import Any

import numpy as np

from tilepipe.config.routings import LOG_LINES
from tilepipe.workload.trace.columns import Columns, blocks_of
from tilepipe.workload.trace.names import Names, find_names
from tilepipe.workload.trace.refusals import refusal, request_refusal, shown
from tilepipe.workload.trace.rows import MAX_LAYER, Block, Met, Selection
from tilepipe.workload.trace.runs import Runs

__all__ = ["read_log"]

_CHUNK_BYTES = 4 << 20


def read_log(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of the log; its first line of a token settles the names."""
    names, number = None, 1
    numbered = False
    with open(path, "rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        # Whole lines: a chunk ends where its last line does.
        while chunk := file.read(_CHUNK_BYTES) + file.readline():
            if names is None:
                names, numbered = _first_names(path, chunk, number)
            if names is not None:
                if selection.request is not None and names.request is None:
                    raise request_refusal(path, selection.request, ())
                met.complete = names.layer is None
                columns = _parse(chunk, number, names, numbered=numbered)
                blocks = None if columns is None else blocks_of(columns, selection, met)
                if blocks is None:
                    yield from _slow(path, chunk, number, names, selection, met)
                else:
                    yield from blocks
            number += chunk.count(b"\n")


def _records(path: str, chunk: bytes, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number and object of every line that is neither empty nor metadata."""
    # A decoder of its own saves a fifth of json.loads' time. Bytes, decoded line by line, so that a
    # broken character has a line number too.
    decode = json.JSONDecoder().decode
    for place, line in enumerate(chunk.split(b"\n"), start=number):
        if not line or line.isspace():
            continue
        try:
            record = decode(str(line, "utf-8"))
        except UnicodeDecodeError:
            raise refusal(path, f"line {place} is not UTF-8", "write it as UTF-8") from None
        except (ValueError, RecursionError):
            raise refusal(path, f"line {place} is not valid JSON, or was cut short") from None
        if not isinstance(record, dict):
            raise refusal(path, f"line {place} is not a JSON object")
        if record.get("type") != "meta":
            yield place, record


def _first_names(path: str, chunk: bytes, number: int) -> tuple[Names | None, bool]:
    """Names in the first line of a token, and whether its request is a number."""
    for place, record in _records(path, chunk, number):
        names = find_names(path, record, place=f"line {place}", example=LOG_LINES)
        numbered = names.request is not None and type(record[names.request]) is int
        # Rows further down may have weights: that must be seen, to be refused.
        weights = names.weights or "topk_weights"
        return Names(names.ids, weights, names.layer, names.request), numbered
    return None, False


def _slow(
    path: str, chunk: bytes, number: int, names: Names, selection: Selection, met: Met
) -> Iterator[Block]:
    runs = Runs(
        path, lambda place: f"line {place}", ids=names.ids, weights=names.weights or "weights"
    )
    for place, record in _records(path, chunk, number):
        layer = None if names.layer is None else record.get(names.layer)
        if names.layer is not None:
            if type(layer) is not int or not 0 <= layer <= MAX_LAYER:
                told = f"has no layer number as {names.layer} {shown(layer)}"
                raise refusal(path, f"line {place} {told}")
            met.layers.add(layer)
        if selection.layer not in (None, layer) and names.layer is not None:
            continue
        if names.request is not None:
            request = str(record.get(names.request))
            met.requests.add(request)
            if selection.request not in (None, request):
                continue
        ids = record.get(names.ids)
        yield from runs.add(layer, place, ids, record.get(names.weights or ""))
    yield from runs.rest()


def _parse(chunk: bytes, number: int, names: Names, *, numbered: bool) -> Columns | None:
    """The lines as columns, or None where something in the chunk is out of the ordinary."""
    # Here and not above: only who reads such files waits for them to load.
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.json as pj

    kinds = {"type": pa.string(), names.ids: pa.list_(pa.int64())}
    if names.weights is not None:
        kinds[names.weights] = pa.list_(pa.float64())
    if names.layer is not None:
        kinds[names.layer] = pa.int64()
    if names.request is not None:
        kinds[names.request] = pa.int64() if numbered else pa.string()
    try:
        str(chunk, "utf-8")  # Arrow does not look into fields that are not wanted
        table = pj.read_json(
            pa.BufferReader(chunk),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(chunk) + 1),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema(kinds), unexpected_field_behavior="ignore"
            ),
        ).combine_chunks()
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    # Blank lines, or two objects on a line: then rows are not lines.
    if table.num_rows != chunk.count(b"\n") + (not chunk.endswith(b"\n")):
        return None
    numbers = np.arange(number, number + table.num_rows)
    is_meta = pc.fill_null(pc.equal(table["type"], "meta"), False).to_numpy()
    if is_meta.any():
        table, numbers = table.filter(~is_meta), numbers[~is_meta]
    return Columns.of(table, names, numbers, tell=lambda line: f"line {line}")
