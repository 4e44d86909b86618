"""How numbers and their origin are told: times with intervals, captions, warnings.

Knows nothing of which figure says it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tilepipe.config.choices import Fabric, Order
from tilepipe.report.groups import MODEL, OWN, label, owner_of, spell, varying
from tilepipe.report.shapes import Value

__all__ = ["NULL", "amount", "caption", "scaled", "time_unit", "told_value", "warnings_of", "work"]

Row = dict[str, Any]

_INTERVALS = {
    "order95": "intervals: 95 %, of the median, by order statistics",
    "bootstrap95": "intervals: 95 %, by bootstrap",
    "range": "intervals: range of all iterations, fewer than six",
}
# Settings that a caption leaves to the files.
_UNTOLD = ("repetition", "routing_seed", "dtype")
_BYTES = {
    "wire_gbps": "wire_bytes",
    "memory_gbps": "bytes read and written",
    "logical_gbps": "logical_bytes",
}
_LIMITS = {"link_gbps": "link", "hbm_gbps": "memory", "pace_gbps": "pace"}
_SHORT_COMMIT = 8
NULL = "-"  # stands where nothing was measured


def time_unit(values_ns: Iterable[float | None]) -> tuple[str, float]:
    """Unit for times of this size, and nanoseconds in it: milliseconds from ten of them on."""
    largest = max((abs(value) for value in values_ns if value is not None), default=0)
    return ("ms", 1e6) if largest >= 1e7 else ("µs", 1e3)


def scaled(value: float, low: float, high: float, divisor: float) -> Value:
    """A value and its interval in another unit."""
    return Value(value=value / divisor, low=low / divisor, high=high / divisor)


def work(row: Row, divisor: float) -> Value:
    """Time of the row's work, its plan left out."""
    return scaled(row["work_ns"], row["work_low_ns"], row["work_high_ns"], divisor)


def amount(value: float | None) -> str:
    """Three significant digits, whole numbers from a hundred on; a dash for null."""
    return NULL if value is None else _rounded(value, _decimals(value))


def told_value(value: Value | None, *, mark: str = "") -> str:
    """The value and the ends of its interval, which need not lie evenly about it.

    Three digits of the value, fewer where its interval is wider than it; `mark` stands behind it.
    """
    if value is None:
        return NULL
    if value.low == value.value == value.high:
        return f"{amount(value.value)}{mark}"
    decimals = _decimals(max(abs(value.value), (value.high - value.low) / 2))
    if max(value.value - value.low, value.high - value.value) < 10.0**-decimals:
        decimals += 1
    low, middle, high = (_rounded(v, decimals) for v in (value.low, value.value, value.high))
    return f"{middle}{mark} ({low} to {high})"


def _decimals(value: float) -> int:
    size = abs(value)
    return 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3


def _rounded(value: float, decimals: int) -> str:
    # A narrow no-break space between thousands; no minus before a rounded zero.
    text = f"{value:,.{decimals}f}".replace(",", "\u202f")
    return text.removeprefix("-") if not float(text.replace("\u202f", "")) else text


def caption(rows: Sequence[Row], *, kinds: Iterable[str | None] = (), note: str = "") -> str:
    """Where the numbers of a figure come from: machine, date, commit, executor, conditions.

    `kinds` are the interval kinds of what is drawn; without them those of the rows. All rows must
    be of one executor.
    """
    executors = {row["executor"] for row in rows}
    assert len(executors) == 1, f"a figure of executors {sorted(executors)}"
    points = {row["folder"] for row in rows}
    parts = [
        _listed(row["machine"] for row in rows),
        dates(rows),
        _commits(rows),
        f"executor {executors.pop()}",
        _pacing(rows),
        _conditions(rows),
        _ranks(rows),
        f"{len(points)} {'point' if len(points) == 1 else 'points'}",
    ]
    found = sorted({kind for kind in (kinds or (row["interval_kind"] for row in rows)) if kind})
    intervals = [_INTERVALS[kind] for kind in found]
    told = [name for name in (*MODEL, *OWN) if name not in _UNTOLD]
    differ = varying(rows, told)
    common = [name for name in told if name not in differ]
    # What belongs to one of several copies or laws is the same for its rows only.
    owned = [name for name in common if owner_of(name) in differ]
    shared = label(rows[0], [name for name in common if name not in owned])
    each = [name for name in owned if owner_of(name) == "copy"]
    copies = sorted({row["copy"] for row in rows if row["copy"]})
    sentences = [
        "; ".join(part for part in parts if part),
        f"same for all: {shared}" if shared else "",
        "; ".join(_of_copy(rows, copy, each) for copy in copies) if each else "",
        *intervals,
        note,
        _disclaimer(rows),
    ]
    return " ".join(f"{s[0].upper()}{s[1:].rstrip('.')}." for s in sentences if s)


def _of_copy(rows: Sequence[Row], copy: str, names: Sequence[str]) -> str:
    return f"{copy}: {label(next(row for row in rows if row['copy'] == copy), names)}"


def dates(rows: Iterable[Row]) -> str:
    """The day on which points ended, or the first and the last."""
    days = sorted({row["ended_utc"][:10] for row in rows if row["ended_utc"]})
    if not days:
        return "date unknown"
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"


def rate(row: Row, column: str) -> Value:
    """A rate of the row with the interval of its time: a longer time is a lower rate."""
    done = row[column] * row["work_ns"]
    return Value(
        value=row[column],
        low=min(row[column], done / row["work_high_ns"]),
        high=max(row[column], done / max(row["work_low_ns"], 1)),
    )


def warnings_of(rows: Sequence[Row]) -> list[str]:
    """What a reader must know before believing a row: rates above a peak, lowered clocks.

    Alike ones of an experiment are one sentence, with the highest rate of them.
    """
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        for rate_column, limit_column in _limited(row):
            found, limit = row[rate_column], row[limit_column]
            if found and limit and found > limit:
                cause = _CAUSES[limit_column](row)
                key = (row["name"], row["contender"], rate_column, limit_column, cause)
                alike.setdefault(key, []).append(row)
    warnings = []
    for (name, contender, rate_column, limit_column, cause), found in alike.items():
        worst = max(found, key=lambda row: row[rate_column] / row[limit_column])
        count = f"{len(found)} points, the highest" if len(found) > 1 else "point"
        warnings.append(
            f"{name}, {contender}: {amount(worst[rate_column])} GB/s of {_BYTES[rate_column]} are "
            f"more than the {_LIMITS[limit_column]}'s {amount(worst[limit_column])} GB/s: {cause} "
            f"({count} {worst['folder']})"
        )
    slowed = {row["folder"]: row["clock_reasons"] for row in rows if row["throttled"]}
    return warnings + [
        f"{folder}: the clock was lowered while it ran: {why}"
        for folder, why in sorted(slowed.items())
    ]


def _limited(row: Row) -> list[tuple[str, str]]:
    """Columns of the row's rates, each with that of the limit that counts the same bytes."""
    limited = [("wire_gbps", "link_gbps"), ("memory_gbps", "hbm_gbps")]
    if row["contender"] != "reduce":  # moves nothing between ranks
        # With one rank all rows are paced, though none of them crosses a link.
        limited.append(("wire_gbps" if row["num_ranks"] > 1 else "logical_gbps", "pace_gbps"))
    return limited


def _above_memory(row: Row) -> str:
    if row["l2"] == "warm":
        return "rows may have been served by a warm L2 cache"
    if row["contender"] == "dispatch" and row["order"] == Order.token.name:
        return (
            "rows of a token are sent one after the other, and L2 serves every read but the first"
        )
    return "no byte basis explains that: check hardware.hbm_gbps and the timed window"


def _above_link(row: Row) -> str:
    if row["fabric"] == Fabric.loopback.name:
        return "ranks share one GPU, no row crossed a link, so this is a rate of its memory"
    if _shares_gpus(row):
        return "several ranks share a GPU, so rows between them crossed no link"
    return "no byte basis explains that: check hardware.link_gbps and the timed window"


def _above_pace(row: Row) -> str:
    return "what a bucket saved while it was idle passes at once, which tells in short launches"


_CAUSES = {"link_gbps": _above_link, "hbm_gbps": _above_memory, "pace_gbps": _above_pace}


def _shares_gpus(row: Row) -> bool:
    return bool(
        row["executor"] == "cuda" and row["num_gpus"] and row["num_ranks"] > row["num_gpus"]
    )


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(sorted({str(value) for value in values}))


def _commits(rows: Sequence[Row]) -> str:
    told = set()
    for row in rows:
        if row["commit"] is None:
            told.add("commit unknown")
        else:
            changed = " with uncommitted changes" if row["dirty"] else ""
            told.add(f"commit {row['commit'][:_SHORT_COMMIT]}{changed}")
    return ", ".join(sorted(told))


def _pacing(rows: Sequence[Row]) -> str:
    told = set()
    for row in rows:
        words = [spell(k, row[k]) for k in ("pace_gbps", "pace_latency_ns") if row[k]]
        told.add(", ".join(words) or "not paced")
    return ", ".join(sorted(told))


def _conditions(rows: Sequence[Row]) -> str:
    told = {
        ", ".join(spell(k, row[k]) for k in ("regime", "l2") if row[k] is not None) for row in rows
    }
    return " and ".join(sorted(word for word in told if word))


def _ranks(rows: Sequence[Row]) -> str:
    told = {
        f"{row['num_ranks']} {'rank' if row['num_ranks'] == 1 else 'ranks'} over {row['fabric']}"
        for row in rows
    }
    return ", ".join(sorted(told))


def _disclaimer(rows: Sequence[Row]) -> str:
    if rows[0]["executor"] == "host":
        return "times of a CPU: they say nothing of NVLink or SMs"
    if any(row["fabric"] == Fabric.loopback.name and row["num_ranks"] > 1 for row in rows):
        return "ranks share one GPU: proves no link bandwidth"
    if any(_shares_gpus(row) for row in rows):
        return "ranks take turns on a GPU: proves no link bandwidth"
    if any(row["num_ranks"] == 1 for row in rows):
        return "one rank: no row crosses a link"
    return ""
