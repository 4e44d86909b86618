"""What a sweep shows on the screen: a line a point, then tables.

Knows nothing of files; the same numbers, with their intervals, stand in the Parquet files.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table
from rich.text import Text

from tilepipe.config.choices import Fabric, Regime
from tilepipe.records import Interval, Outcome, Point, Status
from tilepipe.results.accounting import MAIN, efficiency_mark
from tilepipe.results.breakdown import way_of
from tilepipe.results.pointfile import command_of
from tilepipe.results.summary import Reduced, Series, reduce_series, slowest_rank, summary_rows

__all__ = [
    "breakdown_table",
    "figures_table",
    "progress_line",
    "reasons_table",
    "times_table",
    "told",
]

# Column of summary.parquet -> its heading; a column is shown where points differ in it.
_AXES = {
    "repetition": "round",
    "hardware": "hardware",
    "num_ranks": "ranks",
    "num_tokens_total": "tokens,\nall ranks",
    "hidden": "hidden",
    "intermediate": "interm.",
    "num_experts": "experts",
    "num_topk": "topk",
    "law": "routing",
    "routing_seed": "seed",
    "routing_layer": "layer",
    "placement": "placement",
    "num_redundant": "redund.",
    "placement_layer": "map\nlayer",
    "placement_replica": "replica",
    "order": "order",
    "granularity": "gran.",
    "home_granularity": "home",
    "layout": "layout",
    "copy": "copy",
    "num_comm_ctas": "CTAs",
    "num_comm_warps": "warps",
    "num_loads": "loads",
    "num_stages": "stages",
    "stage_bytes": "stage\nbytes",
    "flag_batch": "batch",
    "roles": "roles",
    "push": "push",
    "walk": "walk",
    "num_chunks": "chunks",
    "planner": "planner",
    "tile_m": "tile_m",
    "tile_n": "tile_n",
    "store": "store",
    "num_gemm_ctas": "GEMM\nCTAs",
    "capacity_factor": "capacity",
    "l2": "L2",
    "pace_gbps": "pace\nGB/s",
    "pace_latency_ns": "pace\nns",
}
# Shown where points of one placement differ in them: else its name says enough.
_OF_PLACEMENT = ("num_redundant", "placement_layer", "placement_replica")
# In the order of the columns.
_CONTENDERS = {
    "fused": "fused",
    "sequential": "seq.",
    "dispatch": "dispatch",
    "combine": "combine",
    "push": "push",
    "reduce": "reduce",
    "gemm_all": "gemm",
    "gemm_split": "gemm split",
    "gemm_flags": "gemm flags",
    "gemm_publish": "gemm publ.",
    "gemm_contended": "gemm cont.",
    "dispatch_gemm": "disp. gemm",
    "swiglu": "SwiGLU",
    "gemm_combine": "gemm comb.",
    "unsynced": "unsynced",
    "blas_per_expert": "BLAS",
    "torch_sequential": "torch seq.",
    "torch_dispatch": "torch",
    "torch_combine": "torch",
    "torch_layer": "torch",
    "torch_grouped_mm": "torch",
    "quack": "QuACK",
    "cublas_dense": "dense",
}
# Terms whose names are longer than their numbers.
_TERMS = {
    "contention": "conten-\ntion",
    "publish_tax": "publ. tax",
    "dispatch_gemm": "dispatch\ngemm",
    "gemm_combine": "gemm\ncombine",
}
_NUMBER_WIDTH = 7
# A rate from whose median its interval reaches this far says so.
_FAR_PERCENT = 10
# Shown even where all points agree: without it no line says how large the point was.
_ALWAYS = ("num_tokens_total",)
# Of the point's own contender.
_FIGURES = {
    "logical_gbps": "logical\nGB/s",
    "wire_gbps": "wire\nGB/s",
    "gbps_per_cta": "GB/s\na CTA",
    "link_share": "of\nlink",
    "memory_share": "of\nmemory",
    "tflops": "TFLOP/s",
    "efficiency": "effic.",
    "speedup": "speed-up",
}
_IMBALANCE = {"expert_max_over_mean": "expert", "rank_max_over_mean": "rank"}


def told(point: Point) -> str:
    """A point in the words that compose it again."""
    words = command_of(point).partition("tilepipe.run")[2].strip() or point.name
    if point.executor == "host":
        # Keys of a GPU, which an experiment that is for both sets to null here.
        words = re.sub(r" *(?:[\w.]+=null|'[\w.]+=\{[^}]*:null\}')(?= |$)", "", words).strip()
    return f"{words} (repetition {point.repetition})" if point.repetition else words


def progress_line(
    outcome: Outcome, *, number: int, total: int, reused: bool, again: bool = False
) -> str:
    """One line when a point has ended; `again`: the line before gave the same reason."""
    how = f"{outcome.status.name}, reused" if reused else outcome.status.name
    said = told(outcome.point)
    if outcome.status is not Status.ok:
        said = f"as before ({said})" if again else f"{outcome.reason} ({said})"
    return f"[{number}/{total}] {how}: {said}"


def reasons_table(outcomes: Sequence[Outcome]) -> Table:
    """Points that are not ok, and why."""
    table = Table(title="points that are not ok", title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("status", "point", "reason"):
        table.add_column(heading, overflow="fold")
    alike: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.status is not Status.ok:
            key = (outcome.status.name, outcome.reason)
            alike.setdefault(key, []).append(told(outcome.point))
    for (status, reason), points in alike.items():
        which = points[0] if len(points) == 1 else f"{len(points)} points"
        table.add_row(status, Text(which), Text(reason))
    return table


def times_table(outcomes: Sequence[Outcome], *, narrow: bool) -> Table:
    """One row per point: each contender's time without plan, and how far its interval reaches.

    Where it is narrow the reach is left out; it stands in summary.parquet.
    """
    firsts = [_first_row(outcome) for outcome in outcomes]
    series = [slowest_rank(outcome.records) for outcome in outcomes]
    times = [_working_times(found) for found in series]
    contenders = [name for name in _CONTENDERS if any(name in found for found in times)]
    chained = any(row["regime"] == Regime.chained.name for row in firsts)
    what = "chained: the period" if chained else "median of the slowest rank"
    table, axes = _table(f"ms without plan, {what}", firsts)
    all_ok = all(row["status"] == Status.ok.name for row in firsts)
    if not all_ok:
        table.add_column("status")
    for name in contenders:
        table.add_column(_CONTENDERS[name], justify="right", min_width=_NUMBER_WIDTH)
    marks = _add_marks(table, firsts)
    for row, found, mark in zip(firsts, times, marks, strict=True):
        table.add_row(
            *(_cell(row[axis]) for axis in axes),
            *([] if all_ok else [row["status"]]),
            *(_time(found.get(name), narrow=narrow) for name in contenders),
            *mark,
        )
    return table


def _working_times(series: Series) -> dict[str, NDArray[np.int64]]:
    """Each contender's stage; the whole launch where its plan does not show."""
    whole = {name: times for (name, part), times in series.items() if part == "e2e"}
    return whole | {name: times for (name, part), times in series.items() if part == "stage"}


def figures_table(outcomes: Sequence[Outcome], *, narrow: bool = False) -> Table:
    """One row per point: rates and overlap of its own contender, and imbalance of the routing.

    A rate whose time is that unsure tells how far its interval reaches, unless it is narrow.
    """
    mains = [_main_row(_rows(outcome)) for outcome in outcomes]
    figures = [key for key in _FIGURES if any(row[key] is not None for row in mains)]
    found = [slowest_rank(outcome.records) for outcome in outcomes]
    signs = [
        {
            "efficiency": efficiency_mark(row["operation"], series, way_of(row)),
            "speedup": _speedup_mark(row),
        }
        for row, series in zip(mains, found, strict=True)
    ]
    unsure = "; ~: may be 1" if {"speedup", "efficiency"} & set(figures) else ""
    if any(sign["efficiency"] == "!" for sign in signs):
        unsure += "; !: above 1, parts were slower alone"
    table, axes = _table(f"figures{unsure}; expert, rank: max/mean rows", mains)
    for key in figures:
        table.add_column(_FIGURES[key], justify="right")
    for heading in _IMBALANCE.values():
        table.add_column(heading, justify="right")
    marks = _add_marks(table, mains)
    for row, series, sign, mark in zip(mains, found, signs, marks, strict=True):
        reach = "" if narrow else _reach(_working_times(series).get(row["contender"]))
        cells = [
            _number(row[key]) + sign.get(key, reach if row[key] is not None else "")
            for key in figures
        ]
        cells += [_number(row[key]) for key in _IMBALANCE]
        table.add_row(*(_cell(row[axis]) for axis in axes), *cells, *mark)
    return table


def _speedup_mark(row: Mapping[str, Any]) -> str:
    if row["speedup"] is None:
        return ""
    return "~" if row["speedup_low"] <= 1 <= row["speedup_high"] else ""


def _reach(series: NDArray[np.int64] | None) -> str:
    """How far the interval of a time reaches, where that is far."""
    if series is None:
        return ""
    found = reduce_series(series)
    percent = _percent(found)
    return f" ±{percent:.0f}%" if percent >= _FAR_PERCENT else ""


def _percent(found: Reduced) -> float:
    """The larger half of the interval, in percent of the median; 0 where that is 0."""
    reach = max(found.high_ns - found.median_ns, found.median_ns - found.low_ns)
    return 100 * reach / found.median_ns if found.median_ns > 0 else 0.0


def breakdown_table(outcomes: Sequence[Outcome]) -> Table:
    """Terms of the fused contender; a row's terms add up to its e2e."""
    timed = [outcome for outcome in outcomes if outcome.terms]
    firsts = [_first_row(outcome) for outcome in timed]
    names = _in_order(term.term for outcome in timed for term in outcome.terms)
    table, axes = _table("breakdown of fused, ms; ~: may be 0", firsts)
    for name in names:
        heading = _TERMS.get(name, name.replace("_", " "))
        table.add_column(heading, justify="right", min_width=_NUMBER_WIDTH)
    for outcome, row in zip(timed, firsts, strict=True):
        values = {term.term: term.interval for term in outcome.terms}
        cells = [_term(values.get(name)) for name in names]
        table.add_row(*(_cell(row[axis]) for axis in axes), *cells)
    return table


def _table(what: str, rows: Sequence[Mapping[str, Any]]) -> tuple[Table, list[str]]:
    """An empty table with a column for each axis in which the points differ."""
    # No more than two spaces between columns: a sweep's tables fit into 80 columns.
    table = Table(
        title=_title(rows, what),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),
    )
    axes = _shown_axes(rows)
    for axis in axes:
        table.add_column(_AXES[axis], justify="right", no_wrap=True)
    return table, axes


def _add_marks(table: Table, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Add a column of what sets rows apart, if anything does, and return each row's cell of it.

    Such rows are never dropped, and always told.
    """
    marks = [_mark(row) for row in rows]
    if not any(marks):
        return [[] for _ in rows]
    table.add_column("mark")
    return [[mark] for mark in marks]


def _mark(row: Mapping[str, Any]) -> str:
    marks = {
        "throttled": row["throttled"],
        "paced": row["pace_gbps"] is not None or row["pace_latency_ns"],
        "chained": row["regime"] == Regime.chained.name,
        "shared_gpu": _shares_gpus(row),
    }
    # One below the other: the table's width is for its numbers.
    return "\n".join(word for word, holds in marks.items() if holds)


def _shares_gpus(row: Mapping[str, Any]) -> bool:
    """Whether ranks were processes that took turns on a GPU; by the option's name, as h200_x8."""
    count = row["hardware"].rpartition("_x")[2]
    num_gpus = int(count) if count.isdecimal() else row["num_ranks"]
    return bool(row["fabric"] == Fabric.nvshmem.name and row["num_ranks"] > num_gpus)


def _rows(outcome: Outcome) -> list[dict[str, Any]]:
    """Its rows of the summary; a number of CTAs that was found, not typed, says so."""
    rows = summary_rows([outcome])
    if outcome.point.config.get("kernel", {}).get("num_comm_ctas") == "auto":
        for row in rows:
            row["num_comm_ctas"] = f"auto: {_cell(row['num_comm_ctas'])}"
    return rows


def _first_row(outcome: Outcome) -> dict[str, Any]:
    return _rows(outcome)[0]


def _main_row(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = MAIN.get(rows[0]["operation"], rows[0]["operation"])
    return next((row for row in rows if row["contender"] == wanted), rows[0])


def _title(rows: Sequence[Mapping[str, Any]], what: str) -> str:
    executors = ", ".join(sorted({_executor(row) for row in rows}))
    ranks = ", ".join(str(count) for count in sorted({row["num_ranks"] for row in rows}))
    return f"{rows[0]['name']}, executor {executors}, ranks {ranks}: {what}"


def _executor(row: Mapping[str, Any]) -> str:
    """With the fabric on a GPU: over loopback no rate is that of a link."""
    executor = str(row["executor"])
    return f"{executor} over {row['fabric']}" if executor == "cuda" else executor


def _shown_axes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    found = any(isinstance(row["num_comm_ctas"], str) for row in rows)
    always = (*_ALWAYS, *["num_comm_ctas"] * found)
    return [axis for axis in _AXES if axis in always or _differs(axis, rows)]


def _differs(axis: str, rows: Sequence[Mapping[str, Any]]) -> bool:
    if axis not in _OF_PLACEMENT:
        return len({row[axis] for row in rows}) > 1
    placements = {row["placement"] for row in rows}
    return len({(row["placement"], row[axis]) for row in rows}) > len(placements)


def _in_order(names: Any) -> list[str]:
    return list(dict.fromkeys(name for name in names if name is not None))


def _cell(value: Any) -> str:
    return "-" if value is None else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _time(series: NDArray[np.int64] | None, *, narrow: bool) -> str:
    """Median, and the larger half of its interval in percent."""
    if series is None:
        return "-"
    found = reduce_series(series)
    if narrow:
        return _ms(found.median_ns)
    percent = f" ±{_percent(found):.0f}%" if found.median_ns > 0 else ""
    return _ms(found.median_ns) + percent


def _term(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return _ms(interval.value) + ("~" if interval.low <= 0 <= interval.high else "")


def _ms(value_ns: int | None) -> str:
    """Two decimals, below a millisecond three: launches on a GPU take tens of microseconds."""
    if value_ns is None:
        return "-"
    return f"{value_ns / 1e6:.{2 if abs(value_ns) >= 1e6 else 3}f}"
