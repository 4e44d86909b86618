"""What a figure or table is made of: plain values, before anything is drawn or written.

Knows nothing of matplotlib, HTML or Arrow.
"""

from dataclasses import dataclass

__all__ = [
    "BarFigure",
    "Bars",
    "DotFigure",
    "DotPanel",
    "Dots",
    "Figure",
    "Grid",
    "Level",
    "Line",
    "LineFigure",
    "Value",
]


@dataclass(frozen=True, kw_only=True)
class Value:
    """A figure with the ends of its interval, all in one unit; equal to both where it has none."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A table of text. `best` holds (row, column) of cells that intervals set apart."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    best: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Line:
    """Values over x, ascending. Lines of one `color` or `dash` share what it stands for."""

    label: str
    x: tuple[float, ...]
    y: tuple[Value, ...]
    color: int
    dash: int


@dataclass(frozen=True, kw_only=True)
class Level:
    """A limit, drawn across the figure."""

    label: str
    value: float


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Lines over a common x axis."""

    slug: str  # of its file, unique in a report
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    levels: tuple[Level, ...] = ()
    numbers: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class Dots:
    """One marker's values, one a row of the figure; None where there is none."""

    label: str
    values: tuple[Value | None, ...]


@dataclass(frozen=True, kw_only=True)
class DotPanel:
    """Markers over one x axis."""

    x_label: str
    dots: tuple[Dots, ...]


@dataclass(frozen=True, kw_only=True)
class DotFigure:
    """Rows of markers; panels side by side share the rows."""

    slug: str
    title: str
    caption: str
    rows: tuple[str, ...]
    panels: tuple[DotPanel, ...]
    numbers: Grid | None = None


@dataclass(frozen=True, kw_only=True)
class Bars:
    """One part of every row's bar; None where nothing was measured.

    Parts that mean the same in different figures share a `color`.
    """

    label: str
    color: int
    values: tuple[Value | None, ...]


@dataclass(frozen=True, kw_only=True)
class BarFigure:
    """Stacked bars: what is above 0 to the right, what is below to the left, totals as a mark."""

    slug: str
    title: str
    caption: str
    rows: tuple[str, ...]
    x_label: str
    parts: tuple[Bars, ...]
    totals: tuple[Value, ...]
    numbers: Grid | None = None


Figure = LineFigure | DotFigure | BarFigure
