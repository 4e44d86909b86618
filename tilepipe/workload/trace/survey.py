"""What a recording holds, layer by layer, and how its load would lie on ranks.

Knows nothing of formats, or of how figures are shown.

Experts lie on ranks in contiguous blocks of equal size. A pair of experts meets in a token if the
token chooses both: pairs that meet more often on one rank than across ranks mean fewer copies of a
token to send, so a placement that brings pairs together would save traffic.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tilepipe.workload.trace.counts import Counts, added, counts_of_file
from tilepipe.workload.trace.reading import FORMATS, find_format
from tilepipe.workload.trace.refusals import layer_refusal, refusal
from tilepipe.workload.trace.rows import Block, Met, Selection, check

__all__ = ["LayerSurvey", "Survey", "survey"]

# Sizes of a group, the usual one first.
_USUAL_RANKS = (8, 4, 2, 1)
_ALL = Selection()


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerSurvey:
    """Figures of one layer; None where a file of counts cannot tell."""

    layer: int | None
    rows_per_expert: NDArray[np.int64]  # (num_experts,)
    num_ranks: int
    num_tokens: int | None
    num_topk: int | None
    has_weights: bool | None
    ranks_per_token: float | None  # mean number of ranks that own a token's experts
    # Tokens in which a pair of experts meets, mean over all pairs of that kind.
    meets_within: float | None
    meets_across: float | None
    num_alike: int | None  # tokens at the start that are equal to the first

    @property
    def rows_per_rank(self) -> NDArray[np.int64]:  # (num_ranks,)
        return np.asarray(self.rows_per_expert.reshape(self.num_ranks, -1).sum(axis=1))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A whole file, or one layer of it."""

    format: str
    num_experts: int
    num_requests: int | None  # None: the file names none
    layers: tuple[LayerSurvey, ...]


def survey(
    path: str,
    *,
    num_ranks: int | None = None,  # None: the most of 8, 4, 2 and 1 that divide the experts
    num_experts: int | None = None,  # None: up to the highest number seen, divisible by the ranks
    selection: Selection = _ALL,
    as_counts: bool = False,
) -> Survey:
    """Read a recording once, or twice where the experts must be found first.

    The window of the selection is cut from every layer.
    """
    kind = find_format(path)
    counts = counts_of_file(path, kind, bare=as_counts)
    if as_counts and counts is None:
        raise refusal(path, "holds tokens, not counts", "leave law=counts out")
    if counts is not None:
        return _of_counts(path, kind, counts, num_ranks, num_experts, selection.layer)
    seen = 0 if num_experts is not None else _num_seen(path, kind, selection)
    num_ranks, num_experts = _group(num_ranks, num_experts, seen)
    gathered, met = _gather(path, kind, selection, num_ranks, num_experts)
    layers = tuple(gathered[layer].figures(layer) for layer in sorted(gathered, key=_order))
    return Survey(
        format=kind,
        num_experts=num_experts,
        num_requests=len(met.requests) or None,
        layers=layers,
    )


def _group(num_ranks: int | None, num_experts: int | None, seen: int) -> tuple[int, int]:
    """Ranks and experts, the typed ones first."""
    if num_ranks is None:
        num_ranks = next(n for n in _USUAL_RANKS if (num_experts or seen) % n == 0)
    if num_experts is None:
        return num_ranks, -(-seen // num_ranks) * num_ranks
    if num_experts % num_ranks:
        raise ValueError(f"num_ranks={num_ranks}: must divide num_experts={num_experts}")
    return num_ranks, num_experts


def _order(layer: int | None) -> int:
    return -1 if layer is None else layer


def _of_counts(
    path: str,
    kind: str,
    counts: Counts,
    num_ranks: int | None,
    num_experts: int | None,
    layer: int | None,
) -> Survey:
    if layer is not None:
        if layer not in counts:
            raise layer_refusal(path, layer, [known for known in counts if known is not None])
        counts = {layer: counts[layer]}
    seen = max(len(row) for row in counts.values())
    num_ranks, num_experts = _group(num_ranks, num_experts, seen)
    _refuse_beyond(path, seen - 1, num_experts)
    layers = []
    for number in sorted(counts, key=_order):
        rows = np.zeros(num_experts, np.int64)
        rows[: len(counts[number])] = counts[number]
        layers.append(
            LayerSurvey(
                layer=number,
                rows_per_expert=rows,
                num_ranks=num_ranks,
                num_tokens=None,
                num_topk=None,
                has_weights=None,
                ranks_per_token=None,
                meets_within=None,
                meets_across=None,
                num_alike=None,
            )
        )
    return Survey(format=kind, num_experts=num_experts, num_requests=None, layers=tuple(layers))


def _refuse_beyond(path: str, highest: int, num_experts: int) -> None:
    if highest >= num_experts:
        raise ValueError(
            f"num_experts={num_experts}: {path} chooses expert {highest}; type more, or leave the "
            "word out"
        )


def _num_seen(path: str, kind: str, selection: Selection) -> int:
    highest = -1
    for block in _blocks(path, kind, replace(selection, first_token=0), Met()):
        ids, _ = check(path, block)
        highest = max(highest, int(ids.max(initial=-1)))
    return max(1, highest + 1)


def _blocks(path: str, kind: str, selection: Selection, met: Met) -> Iterator[Block]:
    reader = FORMATS[kind]
    assert reader is not None
    return reader(path, selection, met)


def _gather(
    path: str, kind: str, selection: Selection, num_ranks: int, num_experts: int
) -> tuple[dict[int | None, "_Layer"], Met]:
    met, layers, num_read = Met(), dict[int | None, _Layer](), dict[int | None, int]()
    for block in _blocks(path, kind, selection, met):
        if selection.layer is not None and block.layer is None:
            raise layer_refusal(path, selection.layer, ())
        layer = layers.setdefault(block.layer, _Layer(num_ranks=num_ranks, num_experts=num_experts))
        before = num_read.get(block.layer, 0)
        num_read[block.layer] = before + len(block.ids)
        start, stop = max(0, selection.first_token - met.skipped - before), len(block.ids)
        if selection.max_tokens is not None:
            stop = min(stop, start + selection.max_tokens - layer.num_tokens)
        if start < stop:
            layer.add(path, block.cut(start, stop))
    if not layers and met.layers and selection.layer not in (None, *met.layers):
        raise layer_refusal(path, selection.layer, met.layers)
    if not any(layer.num_tokens for layer in layers.values()):
        num_rows = met.skipped + max(num_read.values(), default=0)
        if num_rows:
            told = f"first_token={selection.first_token}: {path} holds {num_rows} tokens a layer"
            raise ValueError(f"{told}; type at most {num_rows - 1}")
        raise refusal(path, "no token is recorded in it")
    return layers, met


@dataclass(kw_only=True)
class _Layer:
    """Sums over the rows of a layer."""

    num_ranks: int
    num_experts: int
    rows: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    num_tokens: int = 0
    num_alike: int = 0
    first: NDArray[np.int32] | None = None  # (num_topk,), the first token
    num_topk: int | None = None
    has_weights: bool = False
    num_ranks_met: int = 0  # over all tokens: ranks that own experts of the token
    num_within: int = 0  # over all tokens: pairs of the token's experts on one rank
    num_pairs: int = 0

    def add(self, path: str, block: Block) -> None:
        ids, weights = check(path, block)
        num_topk = ids.shape[1]
        if self.num_topk not in (None, num_topk):
            told = f"has {num_topk} ids where the rows before have {self.num_topk}"
            raise refusal(path, f"{block.place(0)} {told}")
        _refuse_beyond(path, int(ids.max(initial=-1)), self.num_experts)
        self.num_topk, self.has_weights = num_topk, self.has_weights or weights is not None
        if self.first is None:
            self.first = ids[0].copy()
        if self.num_alike == self.num_tokens:
            other = (ids != self.first).any(axis=1)
            self.num_alike += int(np.argmax(other)) if other.any() else len(ids)
        self.num_tokens += len(ids)
        self.rows = added(self.rows, ids)
        valid = ids >= 0
        num_valid = valid.sum(axis=1, dtype=np.int64)
        self.num_pairs += int((num_valid * (num_valid - 1) // 2).sum())
        # Ascending, dropped slots first: equal ranks then stand side by side.
        size = self.num_experts // self.num_ranks
        owners = np.where(valid, ids // size, -1)
        owners.sort(axis=1)
        starts = owners >= 0
        starts[:, 1:] &= owners[:, 1:] != owners[:, :-1]
        self.num_ranks_met += int(starts.sum())
        for distance in range(1, num_topk):
            same = (owners[:, distance:] == owners[:, :-distance]) & (owners[:, distance:] >= 0)
            self.num_within += int(same.sum())

    def figures(self, layer: int | None) -> LayerSurvey:
        size = self.num_experts // self.num_ranks
        pairs_within = self.num_ranks * size * (size - 1) // 2
        pairs_across = self.num_experts * (self.num_experts - 1) // 2 - pairs_within
        rows = np.zeros(self.num_experts, np.int64)
        rows[: len(self.rows)] = self.rows
        num_across = self.num_pairs - self.num_within
        return LayerSurvey(
            layer=layer,
            rows_per_expert=rows,
            num_ranks=self.num_ranks,
            num_tokens=self.num_tokens,
            num_topk=self.num_topk,
            has_weights=self.has_weights,
            ranks_per_token=self.num_ranks_met / self.num_tokens if self.num_tokens else None,
            meets_within=self.num_within / pairs_within if pairs_within else None,
            meets_across=num_across / pairs_across if pairs_across else None,
            num_alike=self.num_alike,
        )
