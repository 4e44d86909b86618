"""Split an end-to-end time into terms that add up to it, and judge the overlap.

Knows nothing of files, ranks or how contenders were run; sees one time per iteration.

    dispatch_gemm   e2e = plan + gemm_all + sm_tax + sync_tax    + contention + late
    gemm_combine    e2e = plan + gemm_all + sm_tax + publish_tax + contention + tail
    moe_layer       e2e = plan + dispatch_gemm + swiglu + gemm_combine + joined

Each term is the difference of two integer medians, one step of a ladder from plan to e2e, so the
sum holds in integers whatever was measured. That makes it no proof of anything by itself. The parts
of a layer are launches of their own. The host
executor has no SMs to give away: gemm_split, the GEMM on those that are left, and with it sm_tax
are not measured there, and the step over it is empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tilepipe.config.choices import Operation, Push, Roles, Walk
from tilepipe.measure.stats import (
    MIN_VALUES_FOR_INTERVAL,
    bootstrap_medians,
    integer_median,
    paired_ratio,
    resample_idx,
)
from tilepipe.records import BreakdownTerm, Interval
from tilepipe.results.schema import TERMS
from tilepipe.schedule.settings import home_chunks_of

__all__ = [
    "Way",
    "bound_mark",
    "breakdown_interval_kind",
    "breakdown_terms",
    "lower_bound_ns",
    "overlap_figures",
    "speedup_figures",
    "terms_error",
    "way_of",
]

SEED = 20_261_129  # fixed: equal samples give equal intervals
NUM_RESAMPLES = 1_000
_BF16_BYTES = 2

# Halves of a layer, each a fused launch of its own, and what lies between them.
_PARTS = ("dispatch_gemm", "swiglu", "gemm_combine")
# operation -> (series that holds the GEMM with flags, the term it brings, the term of the rest)
_LADDERS = {
    "dispatch_gemm": ("gemm_flags", "sync_tax", "late"),
    "gemm_combine": ("gemm_publish", "publish_tax", "tail"),
}


def breakdown_terms(
    operation: str,
    series: Mapping[str, NDArray[np.int64]],  # one slowest-rank time per iteration each
) -> tuple[BreakdownTerm, ...]:
    """e2e first, then its terms, in the order of the module docstring.

    Takes the series e2e, plan, gemm_all, gemm_contended, gemm_flags (dispatch_gemm) or gemm_publish
    (gemm_combine) and, where it is there, gemm_split; of moe_layer e2e, plan and the parts; others
    are ignored. Iteration i of each must be of one rotation.
    """
    is_split = "gemm_split" in series
    names: tuple[str, ...] = ("e2e", "plan", *_PARTS)
    steps = _layer_steps
    if operation in _LADDERS:
        flagged, tax, rest = _LADDERS[operation]
        names = ("e2e", "plan", "gemm_all", *["gemm_split"] * is_split, flagged, "gemm_contended")
        steps = partial(_steps, flagged=flagged, tax=tax, rest=rest)
    lengths = {name: len(series[name]) for name in names}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"iterations differ, {lengths}: a breakdown needs them in pairs")
    medians = {name: integer_median(series[name]) for name in names}
    spread = steps(_repeated(series, names))
    terms = []
    for term, value in steps(medians).items():
        terms.append(BreakdownTerm(term=term, interval=_interval(int(value), spread[term])))
        if term == "gemm_all" and not is_split:
            terms.append(BreakdownTerm(term="sm_tax", interval=None))
    assert terms_error(terms) is None, terms_error(terms)
    return tuple(terms)


def terms_error(terms: tuple[BreakdownTerm, ...] | list[BreakdownTerm]) -> str | None:
    """What is wrong with the terms of one point, in a sentence; None where they add up."""
    names = [term.term for term in terms]
    if len(set(names)) != len(names) or not set(names) <= set(TERMS):
        return f"terms are {names}, want each at most once of {list(TERMS)}"
    values = {term.term: term.interval for term in terms}
    total = values.pop("e2e", None)
    if total is None:
        return "term e2e is missing or null"
    parts = sum(interval.value for interval in values.values() if interval is not None)
    if parts != total.value:
        return f"terms add up to {parts} ns, e2e is {total.value} ns"
    return None


def breakdown_interval_kind(num_iters: int) -> str:
    """Which of the schema's words says how the terms' low and high were found."""
    return "range" if num_iters < MIN_VALUES_FOR_INTERVAL else "bootstrap95"


@dataclass(frozen=True, kw_only=True)
class Way:
    """What a fused launch can hide of its communication, as far as its settings tell."""

    joins: bool = False  # CTAs that have sent all take tiles
    sends: bool = False  # rows leave with their tiles: nobody else takes time to push them
    num_parts: int = 1  # of a token; all but the last are reduced while others are multiplied


def way_of(setting: Mapping[str, Any]) -> Way:
    """Of a point, from keys `operation`, `roles`, `push`, `walk`, `num_chunks`, `hidden` and
    `tile_n`, as they are there.

    Points without `push` and `walk` are of operations, executors or versions that have one way.
    """
    # On the way home CTAs that communicate never multiply: those that have multiplied join them.
    outward = setting.get("operation") == Operation.dispatch_gemm.name
    num_parts, sends = 1, setting.get("push") == Push.epilogue.name
    if setting.get("walk") == Walk.chunk.name:
        sizes = (_BF16_BYTES * setting[key] for key in ("hidden", "tile_n"))
        push = Push.epilogue if sends else None
        num_parts = setting["num_chunks"] or home_chunks_of(*sizes, push=push)
    joins = outward and setting.get("roles") == Roles.switch.name
    return Way(joins=joins, sends=sends, num_parts=num_parts)


def lower_bound_ns(
    gemm_ns: int,  # on the SMs that are left to it; on all where none are given away
    comm_ns: int,
    reduce_ns: int = 0,
    way: Way | None = None,
    *,
    whole_ns: int | None = None,  # GEMM on all SMs; None: as above
) -> int:
    """What no fused launch of these parts can be faster than, links left out, as long as what it
    does is done at the rates of the parts alone: rows that all SMs push at first are few.

    Where CTAs that have sent join the GEMM it goes on at its rate on all SMs: of `gemm_ns` it has
    then done the share that communication takes, and of `whole_ns` the rest is left.
    """
    way = way or Way()
    if way.sends:
        comm_ns = 0
    bound_ns = max(gemm_ns, comm_ns)
    if way.joins and whole_ns is not None and comm_ns < gemm_ns:
        bound_ns = comm_ns + whole_ns * (gemm_ns - comm_ns) // gemm_ns
    return bound_ns + reduce_ns // way.num_parts


def bound_mark(*, bound_ns: tuple[int, int], fused_ns: tuple[int, int]) -> str:
    """How sure it is that a launch took no less than its bound, from the intervals of both.

    Nothing: it took more. ~: it may have taken as much. !: it took less, so the bound's parts were
    slower alone than they were in the launch, and it is no bound.
    """
    if bound_ns[0] > fused_ns[1]:
        return "!"
    return "~" if bound_ns[1] >= fused_ns[0] else ""


def speedup_figures(
    contender: str,
    *,
    fused: NDArray[np.int64],  # (num_iters,) e2e without plan, slowest rank
    sequential: NDArray[np.int64],  # (num_iters,) its parts one after the other, likewise
) -> dict[str, float]:
    """speedup and its interval as figures of the contender; none where a time is 0."""
    if fused.min() <= 0 or sequential.min() <= 0:
        return {}
    ratio = paired_ratio(sequential, fused)
    return {
        f"{contender}/speedup": ratio.value,
        f"{contender}/speedup_low": ratio.low,
        f"{contender}/speedup_high": ratio.high,
    }


def overlap_figures(
    contender: str,
    *,
    fused: NDArray[np.int64],  # (num_iters,) e2e without plan, slowest rank
    sequential: NDArray[np.int64],  # (num_iters,) communication, then GEMM (and reduction)
    gemm_all: NDArray[np.int64],  # (num_iters,)
    gemm_split: NDArray[np.int64] | None = None,  # (num_iters,) on the SMs that are left to it
    comm: NDArray[np.int64],  # (num_iters,) communication alone
    reduce_ns: int = 0,  # gemm_combine: the reduction, which on the host the computing thread does
    way: Way | None = None,
) -> dict[str, float]:
    """efficiency, hidden_share and speedup as figures of the contender.

    The bound is `lower_bound_ns` of gemm_split; where no SMs are given away, as on the host, it is
    that of gemm_all: one thread multiplies, then reduces, while another communicates.
    A figure whose divisor is not above 0 is left out.
    """
    fused_ns, comm_ns, gemm_ns = (int(integer_median(s)) for s in (fused, comm, gemm_all))
    split_ns = gemm_ns if gemm_split is None else int(integer_median(gemm_split))
    figures = {}
    if fused_ns > 0:
        bound_ns = lower_bound_ns(split_ns, comm_ns, reduce_ns, way, whole_ns=gemm_ns)
        figures["efficiency"] = bound_ns / fused_ns
    if comm_ns > 0:
        figures["hidden_share"] = 1 - (fused_ns - gemm_ns) / comm_ns
    told = {f"{contender}/{name}": value for name, value in figures.items()}
    return told | speedup_figures(contender, fused=fused, sequential=sequential)


def _layer_steps(
    ladder: Mapping[str, NDArray[np.int64]],
) -> dict[str, NDArray[np.int64]]:
    """The same of a layer: its parts, and what is left of the whole."""
    parts = {name: ladder[name] for name in _PARTS}
    rest = ladder["e2e"] - ladder["plan"] - sum(parts.values())
    return {"e2e": ladder["e2e"], "plan": ladder["plan"], **parts, "joined": rest}


def _steps(
    ladder: Mapping[str, NDArray[np.int64]], *, flagged: str, tax: str, rest: str
) -> dict[str, NDArray[np.int64]]:
    """Each term as the difference of two rungs; elementwise, so one call serves all resamples."""
    left = ladder.get("gemm_split", ladder["gemm_all"])
    sm_tax = {"sm_tax": left - ladder["gemm_all"]} if "gemm_split" in ladder else {}
    return {
        "e2e": ladder["e2e"],
        "plan": ladder["plan"],
        "gemm_all": ladder["gemm_all"],
        **sm_tax,
        tax: ladder[flagged] - left,
        "contention": ladder["gemm_contended"] - ladder[flagged],
        rest: ladder["e2e"] - ladder["plan"] - ladder["gemm_contended"],
    }


def _repeated(
    series: Mapping[str, NDArray[np.int64]], names: tuple[str, ...]
) -> dict[str, NDArray[np.int64]]:
    """Per name: medians of paired resamples, or the iterations themselves where they are few."""
    num_iters = len(series[names[0]])
    if num_iters < MIN_VALUES_FOR_INTERVAL:
        return {name: series[name] for name in names}
    idx = resample_idx(num_iters, num_resamples=NUM_RESAMPLES, seed=SEED)
    return {name: bootstrap_medians(series[name], idx) for name in names}


def _interval(value: int, spread: NDArray[np.int64]) -> Interval:
    if spread.size >= MIN_VALUES_FOR_INTERVAL:
        low, high = np.percentile(spread, [2.5, 97.5], method="inverted_cdf")
    else:
        low, high = spread.min(), spread.max()
    # A percentile interval may miss the value by a hair; the value is always part of it.
    return Interval(value=value, low=min(int(low), value), high=max(int(high), value))
