"""A comparison on the screen: lines and tables. Knows nothing of how a verdict is reached."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from tilepipe.compare.comparison import Row, Shift
from tilepipe.compare.differences import Fact
from tilepipe.compare.judge import Ratio, Verdict
from tilepipe.compare.pairs import Lone, Side, device_of

__all__ = ["breakdown_tables", "facts_table", "lone_lines", "side_line", "verdict_tables"]

# Terminal columns that a setting takes before it is folded: it may be a path.
_MOST_COLUMNS = 16
# Of a setting in which points of one side only differ from all others.
_TOLD_VALUES = 4
_STYLES = {
    Verdict.SAME: "",
    Verdict.FASTER: "green",
    Verdict.SLOWER: "bold red",
    Verdict.AMBIGUOUS: "yellow",
}


def side_line(side: Side, where: str) -> str:
    """Where a side's numbers come from, in a line."""
    outcomes = [point.outcome for point in side.points]
    days = sorted({outcome.started_utc[:10] for outcome in outcomes} - {""})
    executors = "/".join(sorted({point.executor for point in side.points}))
    devices = "; ".join(sorted({device_of(point) for point in side.points}))
    builds = ", ".join(sorted({outcome.point.build_id for outcome in outcomes}))
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "an unknown day"
    return (
        f"{side.label}: {where}: {len(side.points)} points, executor {executors}, {devices}, "
        f"build {builds}, {when}"
    )


def lone_lines(lone: Sequence[Lone]) -> list[str]:
    """Points of one side only, counted by the keys in which the nearest counterpart differs."""
    lines = []
    for label, other in (("A", "B"), ("B", "A")):
        alike: dict[tuple[str, ...], list[Lone]] = {}
        for each in lone:
            if each.label == label:
                alike.setdefault(tuple(each.differing), []).append(each)
        for keys, points in alike.items():
            told = ", ".join(f"{key} ({_values(points, key)})" for key in keys)
            differ = f"the nearest of {other} differ in {told}" if keys else "no other is as near"
            lines.append(f"{len(points)} points only in {label}: {differ}")
    return lines


def facts_table(facts: Sequence[Fact]) -> Table:
    """What else differs between the sides."""
    table = _table("what differs beside the times", "fact", "A", "B")
    for fact in facts:
        table.add_row(fact.fact, ", ".join(fact.a) or "-", ", ".join(fact.b) or "-")
    return table


def verdict_tables(rows: Sequence[Row]) -> list[Table]:
    """One table an experiment: settings in which its rows differ, times, ratio, verdict."""
    tables = []
    for name in dict.fromkeys(row.name for row in rows):
        mine = [row for row in rows if row.name == name]
        axes = _axes([row.settings for row in mine])
        executors = ", ".join(sorted({row.executor for row in mine}))
        table = _table(f"{name}, executor {executors}: time of B over that of A")
        _add_axes(table, axes, [row.settings for row in mine])
        table.add_column("contender", no_wrap=True)
        for heading in ("A ms", "B ms", "B/A", "95 % interval"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("verdict", no_wrap=True)
        for row in sorted(mine, key=lambda row: _place(row.settings, axes)):
            table.add_row(
                *_cells(row.settings, axes),
                row.contender,
                _ms(row.a_ns),
                _ms(row.b_ns),
                "-" if row.ratio.value is None else f"{row.ratio.value:.4f}",
                _told_interval(row.ratio, row.rounds),
                Text(row.verdict.name, style=_STYLES[row.verdict]),
            )
        tables.append(table)
    return tables


def breakdown_tables(shifts: Sequence[Shift]) -> list[Table]:
    """One table an experiment: B - A of each term, `~` where it may be 0."""
    tables = []
    for name in dict.fromkeys(shift.name for shift in shifts):
        mine = [shift for shift in shifts if shift.name == name]
        axes = _axes([shift.settings for shift in mine])
        terms = list(dict.fromkeys(shift.term for shift in mine))
        title = f"{name}: breakdown, B - A in us (not judged; ~ may be 0)"
        table = _table(title)
        _add_axes(table, axes, [shift.settings for shift in mine])
        for term in terms:
            table.add_column(term, justify="right", no_wrap=True)
        points: dict[tuple[str, tuple[int, ...]], dict[str, Shift]] = {}
        for shift in sorted(mine, key=lambda shift: _place(shift.settings, axes)):
            points.setdefault((shift.config_id, shift.rounds), {})[shift.term] = shift
        for found in points.values():
            settings = next(iter(found.values())).settings
            table.add_row(*_cells(settings, axes), *(_difference(found.get(t)) for t in terms))
        tables.append(table)
    return tables


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _axes(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys in which rows differ; the operation's name says nothing twice."""
    keys = dict.fromkeys(key for each in settings for key in each)
    return [
        key
        for key in keys
        if len({str(each.get(key)) for each in settings}) > 1 and not key.endswith("operation")
    ]


def _add_axes(table: Table, axes: Iterable[str], settings: Sequence[Mapping[str, Any]]) -> None:
    """A column a key; a name goes over several lines, and neither words nor numbers are torn."""
    for axis in axes:
        name = "round" if axis == "repetition" else axis.rpartition(".")[2]
        heading = name.replace("_", "_\n")
        cells = [_cell(each, axis) for each in settings]
        width = max(map(len, (*heading.split("\n"), *cells)))
        table.add_column(heading, overflow="fold", min_width=min(width, _MOST_COLUMNS))


def _cells(settings: Mapping[str, Any], axes: Iterable[str]) -> list[str]:
    return [_cell(settings, axis) for axis in axes]


def _cell(settings: Mapping[str, Any], axis: str) -> str:
    return "-" if settings.get(axis) is None else str(settings[axis])


def _place(settings: Mapping[str, Any], axes: Iterable[str]) -> list[tuple[str, float, str]]:
    """Sorts rows by their settings: numbers by size, words by letter, nothing first."""
    found = []
    for axis in axes:
        value = settings.get(axis)
        number = value if isinstance(value, (int, float)) else 0
        found.append((type(value).__name__ if value is not None else "", number, str(value)))
    return found


def _values(lone: Sequence[Lone], key: str) -> str:
    own, there = (
        _some(list(dict.fromkeys(str(each.differing[key][place]) for each in lone)))
        for place in (0, 1)
    )
    return f"{own}; there {there}"


def _some(words: Sequence[str]) -> str:
    """The first of many, and how many more there are."""
    more = f" and {len(words) - _TOLD_VALUES} more" if words[_TOLD_VALUES:] else ""
    return ", ".join(words[:_TOLD_VALUES]) + more


def _told_interval(found: Ratio, rounds: Sequence[int]) -> str:
    if found.method == "same_samples":
        return "the same samples"
    if found.low is None or found.high is None:
        return found.reason
    over = f", {len(rounds)} rounds" if found.method == "rounds95" else ""
    return f"{found.low:.4f}..{found.high:.4f}{over}"


def _difference(shift: Shift | None) -> str:
    found = None if shift is None else shift.difference
    if found is None:
        return "-"
    return f"{found.value / 1e3:+.1f}{'~' if found.low <= 0 <= found.high else ''}"


def _ms(value_ns: int) -> str:
    return f"{value_ns / 1e6:.4f}"
