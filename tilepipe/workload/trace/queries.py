"""JSON per query with the experts of every layer of every token, of MoE_expert_selection_trace.

Knows nothing of other formats.

A file (core12345/MoE_expert_selection_trace, with arXiv 2510.05497) is one query, a list of steps:
the prompt first, then one step per generated token. A step maps a layer's number, as a string, to
null (a layer without experts) or to one list of ids per token of the step.
"""

import re
from collections.abc import Iterator
from typing import Any

from tilepipe.workload.trace.refusals import refusal, request_refusal
from tilepipe.workload.trace.rows import Block, Met, Selection
from tilepipe.workload.trace.runs import Runs
from tilepipe.workload.trace.values import values

__all__ = ["is_step", "read_query"]

_LAYER = re.compile("[0-9]{1,9}")


def is_step(value: Any) -> bool:
    """Whether a JSON value looks like a step: all of its keys are layer numbers."""
    return isinstance(value, dict) and bool(value) and all(map(_LAYER.fullmatch, value))


def read_query(path: str, selection: Selection, met: Met) -> Iterator[Block]:
    """Blocks of all steps; steps and rows count from 0."""
    if selection.request is not None:
        raise request_refusal(path, selection.request, ())
    runs = Runs(path, lambda place: "{}, layer {}, row {}".format(*place), ids="experts")
    for place, step in values(path):
        if not is_step(step):
            raise refusal(path, f"{place} is no object of layer numbers")
        for key, rows in step.items():
            layer = int(key)
            if rows is None:
                continue
            if not isinstance(rows, list):
                raise refusal(path, f"{place}, layer {layer} has no list of tokens")
            met.layers.add(layer)
            if selection.layer in (None, layer):
                for row, ids in enumerate(rows):
                    yield from runs.add(layer, (place, layer, row), ids)
    yield from runs.rest()
