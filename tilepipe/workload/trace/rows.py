"""Recorded rows: what a reader hands over, how they are checked, chosen, kept and dealt to ranks.

Knows nothing of files and formats.

A reader is a generator of blocks: rows of one layer that follow each other in the file. It may
leave out what a selection does not ask for, and notes in `Met` what it met on the way. All else
happens once, here, whatever the format: one form for all rows, distinct expert numbers, usable
weights, the window. Reading stops as soon as the window is full, unless a layer was left open:
`layer: null` promises that there is only one, so the rest of the file is looked through.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.refusals import layer_refusal, refusal, request_refusal, shown

__all__ = [
    "BAD_WEIGHT",
    "MAX_BLOCK_ROWS",
    "MAX_EXPERTS",
    "MAX_LAYER",
    "Block",
    "Met",
    "Reader",
    "Selection",
    "Trace",
    "check",
    "collect",
    "deal",
]

# Rows a reader takes at a time: enough to hide Python's cost, few enough to stay in cache.
MAX_BLOCK_ROWS = 65_536
# More than any model has: a number beyond is no expert's.
MAX_EXPERTS = 2**20
# What fits in 31 bits: a number beyond, or below 0, is no layer's.
MAX_LAYER = 2**31 - 1
# Rows for which room is made at once: memory that is not touched costs nothing, and growing zeroes
# it first. (2 cores, 2026-11, Parquet, topk 8 with weights: 100 of 390 ns a row.)
_MOST_EXPECTED = 2**24
BAD_WEIGHT = "a weight that is negative, infinite in float32 or no number"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which recorded rows are wanted; the window counts rows of the layer and request chosen."""

    layer: int | None = None  # None: the file holds one layer
    request: str | None = None  # None: all requests
    first_token: int = 0
    max_tokens: int | None = None  # None: all that follow
    # What some answers of engines do not say themselves.
    num_layers: int | None = None
    num_topk: int | None = None


@dataclass(frozen=True, eq=False)
class Trace:
    """The chosen rows of one layer, in file order; ids of one row are distinct but for -1."""

    topk_idx: NDArray[np.int32]  # (num_tokens, num_topk), -1 = dropped slot
    topk_weights: NDArray[np.float32] | None  # (num_tokens, num_topk), None: not recorded
    layer: int | None  # None: the file does not tell layers apart
    layers: tuple[int, ...]  # layers met before reading stopped


@dataclass(frozen=True, eq=False, kw_only=True)
class Block:
    """Rows as recorded, unchecked."""

    ids: NDArray[np.integer]  # (num_rows, num_topk)
    weights: NDArray[np.number] | None  # (num_rows, num_topk)
    layer: int | None  # None: the file does not tell layers apart
    place: Callable[[int], str]  # where a row of this block stands in the file

    def cut(self, start: int, stop: int) -> "Block":
        """Its rows start..stop."""
        weights = None if self.weights is None else self.weights[start:stop]
        return Block(
            ids=self.ids[start:stop],
            weights=weights,
            layer=self.layer,
            place=lambda row: self.place(row + start),
        )


@dataclass(kw_only=True)
class Met:
    """What reading has met so far."""

    layers: set[int] = field(default_factory=set)
    complete: bool = False  # `layers` are all layers of the file
    requests: set[str] = field(default_factory=set)
    skipped: int = 0  # rows that a reader left out because they lie before the window
    num_rows: int | None = None  # no more are to come, where the file says so


Reader = Callable[[str, Selection, Met], Iterator[Block]]


def collect(path: str, reader: Reader, selection: Selection) -> Trace:
    """Read, check and keep the chosen rows; a ValueError says what to repair or to type."""
    met, rows, num_before = Met(), _Rows(path), 0
    for block in reader(path, selection, met):
        if selection.layer is not None and block.layer is None:
            raise layer_refusal(path, selection.layer, ())
        if selection.layer is None and len(met.layers) > 1:
            if met.complete:
                break
            continue  # to name all layers in the refusal
        first = max(0, selection.first_token - met.skipped - num_before)
        num_before += len(block.ids)
        stop = len(block.ids)
        if selection.max_tokens is not None:
            stop = min(stop, first + selection.max_tokens - len(rows))
        if first < stop:
            rows.append(block.cut(first, stop), at_most=_at_most(selection, met))
        full = selection.max_tokens is not None and len(rows) >= selection.max_tokens
        if full and (selection.layer is not None or met.complete):
            break
    _refuse_choice(path, selection, met, num_rows=met.skipped + num_before, num_kept=len(rows))
    layer = selection.layer if selection.layer is not None else min(met.layers, default=None)
    return Trace(rows.topk_idx(), rows.topk_weights(), layer, tuple(sorted(met.layers)))


def _at_most(selection: Selection, met: Met) -> int:
    known = [count for count in (selection.max_tokens, met.num_rows) if count is not None]
    return min([*known, _MOST_EXPECTED]) if known else 0


def _refuse_choice(
    path: str, selection: Selection, met: Met, *, num_rows: int, num_kept: int
) -> None:
    several = selection.layer is None and len(met.layers) > 1
    absent = selection.layer is not None and bool(met.layers) and selection.layer not in met.layers
    if several or absent:
        raise layer_refusal(path, selection.layer, met.layers)
    if num_kept:
        return
    if selection.request is not None and met.requests and selection.request not in met.requests:
        raise request_refusal(path, selection.request, met.requests)
    if num_rows:
        raise ValueError(
            f"routing.first_token={selection.first_token}: {path} holds {num_rows} tokens of this "
            f"choice; type at most {num_rows - 1}"
        )
    raise refusal(path, "no token is recorded in it")


class _Rows:
    """Checked rows, packed; the first one fixes topk and whether weights are there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_rows = 0
        self._ids: NDArray[np.int32] | None = None  # (room, num_topk)
        self._weights: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return self._num_rows

    def append(self, block: Block, *, at_most: int) -> None:
        """Keep more rows; of all together there will hardly be more than `at_most`."""
        first, num_topk = self._ids is None, block.ids.shape[1]
        if self._ids is None:
            self._ids = np.empty((at_most, num_topk), np.int32)
        if num_topk != self._ids.shape[1]:
            told = f"has {num_topk} ids where the rows before have {self._ids.shape[1]}"
            raise refusal(self._path, f"{block.place(0)} {told}")
        if first and block.weights is not None:
            self._weights = np.empty((at_most, num_topk), np.float32)
        if (block.weights is None) != (self._weights is None):
            told = "no weights where the rows before have some"
            if self._weights is None:
                told = "weights where the rows before have none"
            raise refusal(self._path, f"{block.place(0)} has {told}")
        ids, weights = check(self._path, block)
        end = self._num_rows + len(ids)
        _make_room(self._ids, end)
        self._ids[self._num_rows : end] = ids
        if self._weights is not None:
            _make_room(self._weights, end)
            self._weights[self._num_rows : end] = weights
        self._num_rows = end

    def topk_idx(self) -> NDArray[np.int32]:  # (num_tokens, num_topk)
        ids = np.empty((0, 0), np.int32) if self._ids is None else self._ids
        return ids[: self._num_rows]

    def topk_weights(self) -> NDArray[np.float32] | None:  # (num_tokens, num_topk)
        return None if self._weights is None else self._weights[: self._num_rows]


def _make_room(array: NDArray[np.generic], num_rows: int) -> None:
    """Grow in place by half: a concatenation at the end would hold all rows twice."""
    if num_rows > len(array):
        # Nothing else refers to it before reading has ended.
        array.resize((max(num_rows, len(array) * 3 // 2), array.shape[1]), refcheck=False)


def check(path: str, block: Block) -> tuple[NDArray[np.int32], NDArray[np.float32] | None]:
    """Ids and weights of a block in which every row is sound; refuses the first that is not."""
    ids = block.ids
    if ids.size and (ids.min() < -1 or ids.max() >= MAX_EXPERTS):
        wrong = (ids < -1) | (ids >= MAX_EXPERTS)
        raise _first_refusal(path, block, wrong, "an id that is no expert number", ids)
    if _has_repeats(ids):
        ascending = np.sort(ids, axis=1)
        again = (ascending[:, 1:] == ascending[:, :-1]) & (ascending[:, 1:] >= 0)
        raise _first_refusal(path, block, again, "the same expert twice", ascending[:, 1:])
    # Only now: a cast before the check would wrap ids around.
    narrow = ids.astype(np.int32, copy=False)
    if block.weights is None:
        return narrow, None
    with np.errstate(over="ignore"):  # too large for float32 becomes inf, refused below
        weights = block.weights.astype(np.float32, copy=False)
    usable = np.isfinite(weights) & (weights >= 0)
    if not usable.all():
        raise _first_refusal(path, block, ~usable, BAD_WEIGHT, block.weights)
    return narrow, weights


def _has_repeats(ids: NDArray[np.integer]) -> bool:
    """Whether any row holds an expert twice.

    Every slot against every other, a whole column of slots at a time. (2 cores, 2026-11, topk 8:
    17 ns a row; sorting the rows takes 49.)
    """
    slots = np.ascontiguousarray(ids.T)
    for distance in range(1, len(slots)):
        equal = slots[distance:] == slots[:-distance]
        if equal.any() and (slots[distance:][equal] >= 0).any():
            return True
    return False


def _first_refusal(
    path: str,
    block: Block,
    wrong: NDArray[np.bool_],  # (num_rows, any)
    found: str,
    values: NDArray[np.number],  # as `wrong`
) -> ValueError:
    row = int(np.argmax(wrong.any(axis=1)))
    value = values[row][wrong[row]][0].item()
    return refusal(path, f"{block.place(row)} has {found} {shown(value)}")


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
