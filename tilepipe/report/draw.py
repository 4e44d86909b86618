"""Draw figures as SVG text. The only module that loads matplotlib.

Knows nothing of tables, points or pages. Equal figures give equal bytes: no date, no random ids.
Text stays text, so that a page can be searched and scaled; it is laid out for DejaVu Sans, wider
than the fonts that stand in for it elsewhere.
"""

import re
from collections.abc import Sequence
from io import StringIO
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from tilepipe.report.shapes import BarFigure, DotFigure, Figure, LineFigure, Value

__all__ = ["canvas_of", "svg_of"]

# Okabe and Ito's colours, told apart by colour-blind readers, without the yellow.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
# Pale enough for whiskers to be seen on them.
BAR_COLORS = ("#999999", "#56B4E9", "#E69F00", "#009E73", "#D55E00", "#CC79A7")
DASHES = ("-", (0, (4, 2)), (0, (1, 1.5)))
MARKERS = ("o", "s", "|", "^", "D", "v", "x", "P")
# Small on purpose: scaled to a phone's width the text is still read.
WIDTH_IN = 4.8
HEIGHT_IN = 3.1
ROW_IN = 0.3
LABEL_LINE_IN = 0.15
LEGEND_ROW_IN = 0.17
AXIS_IN = 0.55
LABEL_CHARS = 24
LEGEND_LINE_CHARS = 54
LEGEND_CHARS = 30  # of two columns beside each other
MIN_TICK_GAP_PT = 16
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 8.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "svg.fonttype": "none",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"


def svg_of(figure: Figure) -> str:
    """The figure as an `<svg>` element whose ids start with its slug."""
    with mpl.rc_context({**STYLE, "svg.hashsalt": figure.slug}):
        canvas = canvas_of(figure)
        stream = StringIO()
        # Null metadata leaves the element out: it would hold the date.
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        canvas.savefig(stream, format="svg", metadata=nothing)
    return _inline(stream.getvalue(), figure)


def canvas_of(figure: Figure) -> Canvas:
    """The figure laid out, for drawing or for a look at its texts."""
    with mpl.rc_context(STYLE):
        canvas = Canvas(layout="constrained")
        match figure:
            case LineFigure():
                _draw_lines(canvas, figure)
            case DotFigure():
                _draw_dots(canvas, figure)
            case BarFigure():
                _draw_bars(canvas, figure)
        return canvas


def _draw_lines(canvas: Canvas, figure: LineFigure) -> None:
    axes = canvas.subplots()
    for line in figure.lines:
        heights = [value.value for value in line.y]
        axes.errorbar(
            line.x,
            heights,
            yerr=_reach(line.y),
            label=line.label,
            color=COLORS[line.color % len(COLORS)],
            linestyle=DASHES[line.dash % len(DASHES)],
            marker=MARKERS[line.dash % 2],
            markersize=3.5,
            linewidth=1.3,
            capsize=2,
        )
    for place, level in enumerate(figure.levels):
        axes.axhline(
            level.value,
            color="#555555",
            linewidth=1,
            linestyle=DASHES[2 - place],
            label=level.label,
        )
    axes.set_xlabel(figure.x_label)
    axes.set_ylabel(figure.y_label)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _set_ticks(axes, sorted({x for line in figure.lines for x in line.x}))
    _finish(canvas, axes, HEIGHT_IN - AXIS_IN)


def _draw_dots(canvas: Canvas, figure: DotFigure) -> None:
    panels = canvas.subplots(1, len(figure.panels), sharey=True, squeeze=False)[0]
    for axes, panel in zip(panels, figure.panels, strict=True):
        for series, dots in enumerate(panel.dots):
            # Markers of one row lie a little apart, so that equal values both show.
            shift = 0.16 * (series - (len(panel.dots) - 1) / 2)
            drawn = [(place, value) for place, value in enumerate(dots.values) if value is not None]
            values = [value for _, value in drawn]
            axes.errorbar(
                [value.value for value in values],
                [place + shift for place, _ in drawn],
                xerr=_reach(values) if any(v.low < v.high for v in values) else None,
                label=dots.label,
                color=COLORS[series % len(COLORS)],
                marker=MARKERS[series % len(MARKERS)],
                markersize=9 if MARKERS[series % len(MARKERS)] == "|" else 4,
                linestyle="none",
                elinewidth=1,
                capsize=2,
            )
        axes.set_xlabel(panel.x_label)
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5 if len(figure.panels) == 1 else 3))
    height_in = _set_rows(panels, figure.rows)
    many = any(len(panel.dots) > 1 for panel in figure.panels)
    _finish(canvas, panels[0] if many else None, height_in)


def _draw_bars(canvas: Canvas, figure: BarFigure) -> None:
    axes = canvas.subplots()
    above = [0.0] * len(figure.rows)
    below = [0.0] * len(figure.rows)
    height = 0.62
    for number, part in enumerate(figure.parts):
        color = BAR_COLORS[part.color % len(BAR_COLORS)]
        starts = []
        for place, value in enumerate(part.values):
            stack = above if value is None or value.value >= 0 else below
            starts.append(stack[place])
            stack[place] += 0.0 if value is None else value.value
        widths = [0.0 if value is None else value.value for value in part.values]
        places = range(len(figure.rows))
        axes.barh(places, widths, left=starts, height=height, label=part.label, color=color)
        # One level of the bar each: whiskers of neighbouring terms overlap.
        shift = height * ((number + 0.5) / len(figure.parts) - 0.5)
        _whiskers(axes, part.values, starts, shift)
    totals = [value.value for value in figure.totals]
    axes.plot(
        totals,
        range(len(totals)),
        color="black",
        marker="|",
        markersize=16,
        markeredgewidth=1.6,
        linestyle="none",
        label="e2e",
    )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_xlabel(figure.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    _finish(canvas, axes, _set_rows([axes], figure.rows))


def _whiskers(
    axes: Axes, values: Sequence[Value | None], starts: Sequence[float], shift: float
) -> None:
    for place, value in enumerate(values):
        if value is not None:
            ends = [starts[place] + value.low, starts[place] + value.high]
            axes.plot(ends, [place + shift] * 2, color="black", linewidth=0.8)


def _reach(values: Sequence[Value]) -> list[list[float]]:
    """Distances to the ends of the intervals, as errorbar takes them."""
    return [
        [max(0.0, v.value - v.low) for v in values],
        [max(0.0, v.high - v.value) for v in values],
    ]


def _set_ticks(axes: Axes, places: Sequence[float]) -> None:
    """A tick at every value of x where their labels have room, else a few round ones."""
    room_pt = WIDTH_IN * 72 * 0.8
    gaps = [b - a for a, b in zip([0.0, *places], places, strict=False)]
    if min(gaps) / max(places) * room_pt >= MIN_TICK_GAP_PT:
        axes.set_xticks(places)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))


def _set_rows(panels: Sequence[Axes], labels: Sequence[str]) -> float:
    """Rows from the top down; returns the height, in inches, that their labels need."""
    wrapped = [_wrapped(label, LABEL_CHARS) for label in labels]
    panels[0].set_yticks(range(len(labels)), wrapped)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
    most_lines = max(label.count("\n") + 1 for label in wrapped)
    return max(ROW_IN, LABEL_LINE_IN * (most_lines + 0.3)) * max(len(labels), 2)


def _wrapped(label: str, width: int) -> str:
    """The label on lines of its own, broken behind commas, within one of them where it must be."""
    lines = [""]
    for word in label.split(", "):
        joined = f"{lines[-1]}, {word}" if lines[-1] else word
        if lines[-1] and len(joined) >= width:  # a comma may follow
            lines[-1] += ","
            lines.append(word)
        else:
            lines[-1] = joined
    return "\n".join(fill(line, width) for line in lines)


def _finish(canvas: Canvas, axes: Axes | None, body_in: float) -> None:
    """Legend below the axes, and a height that holds both."""
    num_rows = 0
    if axes is not None:
        handles, labels = axes.get_legend_handles_labels()
        # Series first, then what they are held against: limits and totals, which are plain lines.
        last = [isinstance(handle, Line2D) for handle in handles]
        order = sorted(range(len(handles)), key=lambda place: last[place])
        handles, labels = [handles[i] for i in order], [labels[i] for i in order]
        longest = max(len(label) for label in labels)
        num_columns = 1 if longest > LEGEND_CHARS else 2 if longest > LEGEND_CHARS // 2 else 3
        num_columns = min(num_columns, len(labels))
        labels = [_wrapped(label, LEGEND_LINE_CHARS) for label in labels]
        most_lines = max(label.count("\n") + 1 for label in labels)
        num_rows = -(-len(labels) // num_columns) * most_lines
        canvas.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=num_columns,
            frameon=False,
            markerscale=0.7,
            borderpad=0.1,
        )
    canvas.set_size_inches(WIDTH_IN, body_in + AXIS_IN + LEGEND_ROW_IN * num_rows)


def _inline(svg: str, figure: Figure) -> str:
    """An element to stand in a page: no prologue, ids of its own, a title for screen readers."""
    body = svg[svg.index("<svg") :].rstrip()
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.DOTALL)
    body = re.sub(r"<metadata>.*?</metadata>\n?", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{figure.slug}-', body)
    body = re.sub(r'href="#', f'href="#{figure.slug}-', body)
    body = re.sub(r"url\(#", f"url(#{figure.slug}-", body)
    body = body.replace("'DejaVu Sans'", _FONTS)
    # In a page a style element would reach beyond its figure.
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    opening = f'<svg role="img" aria-label="{_attribute(figure.title)}" '
    return body.replace("<svg ", opening, 1) + "\n"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
