"""Gather rows that come one by one, as Python lists, into blocks.

Knows nothing of where rows come from.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tilepipe.workload.trace.refusals import refusal, shown
from tilepipe.workload.trace.rows import BAD_WEIGHT, Block

__all__ = ["Runs", "uneven"]

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
        except TypeError:
            raise self._entry_refusal(place, 0, ids, int) from None
        except OverflowError:
            huge = next(e for e in ids if abs(e) >= 2**63)
            told = f"has an id that is no expert number {shown(huge)}"
            raise self._refusal(place, told) from None
        if weights is not None:
            try:
                run.weights.extend(weights)
            except TypeError:
                raise self._entry_refusal(place, 1, weights, int | float) from None
            except OverflowError:
                huge = next(e for e in weights if type(e) is int and abs(e) >= 2**1023)
                raise self._refusal(place, f"has {BAD_WEIGHT} {shown(huge)}") from None
        run.places.append(place)

    def rest(self) -> Iterator[Block]:
        """The runs that are still open."""
        for layer, run in self._open.items():
            yield run.block(layer, self._tell)
        self._open.clear()

    def _form(self, place: Any, ids: Any, weights: Any) -> tuple[int, bool]:
        if not isinstance(ids, list) or not ids:
            raise self._refusal(place, f"has no list {self._names[0]}")
        # JSON's true and false pass for numbers.
        if any(type(entry) is bool for entry in ids):
            raise self._entry_refusal(place, 0, ids, int)
        if weights is None:
            return len(ids), False
        if not isinstance(weights, list) or len(weights) != len(ids):
            raise self._refusal(place, uneven(ids, weights, self._names))
        if any(type(entry) is bool for entry in weights):
            raise self._entry_refusal(place, 1, weights, int | float)
        return len(ids), True

    def _entry_refusal(self, place: Any, which: int, entries: list[Any], kind: Any) -> ValueError:
        wrong = (e for e in entries if type(e) is bool or not isinstance(e, kind))
        number = "whole number" if kind is int else "number"
        told = f"has {self._names[which]} with an entry that is no {number} {shown(next(wrong))}"
        return self._refusal(place, told)

    def _refusal(self, place: Any, found: str) -> ValueError:
        return refusal(self._path, f"{self._tell(place)} {found}")


def uneven(ids: Sequence[Any], weights: Any, names: tuple[str, str]) -> str:
    """What is wrong with weights that are no list, or one of another length."""
    if not isinstance(weights, list):
        return f"has no list {names[1]}"
    return f"has {names[0]} and {names[1]} of unequal length, {len(ids)} and {len(weights)}"


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
