"""Gather rows that come one by one, as Python lists, into blocks.

Knows nothing of where rows come from.
"""

from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from tilepipe.workload.trace.refusals import refusal
from tilepipe.workload.trace.rows import Block

__all__ = ["Runs"]

_MAX_ROWS = 8192


class Runs:
    """One open run of rows per layer; a row of another form, or a full run, closes it."""

    def __init__(
        self, path: str, tell: Callable[[Any], str], *, ids: str = "ids", weights: str = "weights"
    ) -> None:
        self._path = path
        self._tell = tell  # a row's place, as `add` was given it, in words
        self._names = ids, weights  # as the file calls them
        self._open: dict[int | None, _Run] = {}

    def add(self, layer: int | None, place: Any, ids: Any, weights: Any = None) -> Iterator[Block]:
        """Take one row; yields the run it closes, if any."""
        form = self._form(place, ids, weights)
        run = self._open.get(layer)
        if run is not None and (run.form != form or len(run.places) >= _MAX_ROWS):
            yield run.block(layer, self._tell)
            run = None
        if run is None:
            run = self._open[layer] = _Run(form)
        try:
            run.ids.extend(ids)  # refuses floats, strings and null by itself
        except (TypeError, OverflowError):
            raise self._refusal(
                place, f"has a {self._names[0]} entry that is no expert number"
            ) from None
        if weights is not None:
            try:
                run.weights.extend(weights)
            except (TypeError, OverflowError):
                raise self._refusal(
                    place, f"has a {self._names[1]} entry that is no number"
                ) from None
        run.places.append(place)

    def rest(self) -> Iterator[Block]:
        """The runs that are still open."""
        for layer, run in self._open.items():
            yield run.block(layer, self._tell)
        self._open.clear()

    def _form(self, place: Any, ids: Any, weights: Any) -> tuple[int, bool]:
        if not isinstance(ids, list) or not ids:
            raise self._refusal(place, f"has no list {self._names[0]}")
        if any(type(entry) is bool for entry in ids):
            raise self._refusal(place, f"has a {self._names[0]} entry that is no expert number")
        if weights is not None and (not isinstance(weights, list) or len(weights) != len(ids)):
            raise self._refusal(place, f"has no {len(ids)} {self._names[1]}, one per id")
        return len(ids), weights is not None

    def _refusal(self, place: Any, found: str) -> ValueError:
        return refusal(self._path, f"{self._tell(place)} {found}")


class _Run:
    def __init__(self, form: tuple[int, bool]) -> None:
        self.form = form
        self.ids = array("q")
        self.weights = array("d")
        self.places: list[Any] = []

    def block(self, layer: int | None, tell: Callable[[Any], str]) -> Block:
        num_topk, weighted = self.form
        ids = np.frombuffer(self.ids, dtype=np.int64).reshape(-1, num_topk)
        weights = np.frombuffer(self.weights).reshape(-1, num_topk) if weighted else None
        places = self.places
        return Block(ids=ids, weights=weights, layer=layer, place=lambda row: tell(places[row]))
