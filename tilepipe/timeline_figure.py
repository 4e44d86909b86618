"""A recorded launch as one static picture: lanes as rows, time to the right.

Knows nothing of files. matplotlib is imported where something is drawn, not with this module.

Colours are those of Okabe and Ito, told apart by every common kind of colour blindness; a wait,
which is what one looks for, is the darkest of the warm ones. What is narrower than the picture can
show is drawn together with its neighbours: see `_strips`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

from tilepipe.records import Span, SpanKind
from tilepipe.results.recording import Recording
from tilepipe.results.spans import by_lane, lane_times, longest_waits, unblocking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.path import Path as MatplotlibPath

__all__ = ["timeline_figure", "to_svg"]

_COLOURS = {
    SpanKind.gate: "#999999",
    SpanKind.plan: "#CC79A7",
    SpanKind.send: "#E69F00",
    SpanKind.wait: "#D55E00",
    SpanKind.copy: "#56B4E9",
    SpanKind.tile: "#0072B2",
    SpanKind.reduce: "#009E73",
    SpanKind.idle: "#F2F2F2",
}
_WORDS = {SpanKind.send: "send ticket", SpanKind.copy: "copy (read rows)"}
_INK = "#333333"
_LANE_IN, _MIN_LANE_IN, _MAX_HEIGHT_IN = 0.32, 0.03, 14.0
# Share of the drawn time below which a span is no more than a hairline, a third of a pixel.
_HAIRLINE = 1 / 3000
_PARTED = 12  # hairlines
_MAX_ARROWS = 6
_MAX_VECTOR = 4000  # strips
# Lanes past which their rows are too low for words.
_MAX_LABELLED = 40


@dataclass(frozen=True)
class _Look:
    """How large the picture is, and what it says of itself."""

    width_in: float
    around_in: float  # height of what is not lanes
    font_pt: float
    legend_columns: int
    whole: bool  # title, origin and shares are in the picture, not beside it


_ALONE = _Look(width_in=10.0, around_in=1.55, font_pt=8, legend_columns=8, whole=True)
# As narrow as other figures of a page: scaled to a phone's width its words are still read.
_IN_A_PAGE = _Look(width_in=4.8, around_in=1.0, font_pt=8.5, legend_columns=4, whole=False)


@dataclass(frozen=True)
class _View:
    """The stretch of time that is drawn, and the unit in which it is told."""

    zero_ns: int
    start_us: float
    end_us: float

    @property
    def unit_us(self) -> float:
        return 1e3 if self.end_us >= 1e4 else 1.0

    @property
    def unit(self) -> str:
        return "ms" if self.end_us >= 1e4 else "µs"

    @property
    def hairline_ns(self) -> float:
        return (self.end_us - self.start_us) * 1e3 * _HAIRLINE

    def x(self, time_ns: int) -> float:
        return (time_ns - self.zero_ns) / 1e3 / self.unit_us

    def shows(self, span: Span) -> bool:
        start_us, end_us = ((t - self.zero_ns) / 1e3 for t in (span.start_ns, span.end_ns))
        return end_us >= self.start_us and start_us <= self.end_us


@dataclass(frozen=True)
class _Row:
    rank: int
    lane: str
    spans: list[Span]
    y: float


def timeline_figure(
    recording: Recording,
    *,
    ranks: Sequence[int] | None = None,  # None: all
    window_us: tuple[float, float] | None = None,  # None: the whole launch
    in_a_page: bool = False,
) -> "Figure":
    """The picture; the caller saves it, see `to_svg`.

    In a page it is narrow, and title, origin and shares are left to the page.
    """
    from matplotlib.figure import Figure

    look = _IN_A_PAGE if in_a_page else _ALONE
    rows = _rows(recording, sorted(recording.spans if ranks is None else ranks))
    lane_in = _LANE_IN if len(rows) <= _MAX_LABELLED else _MIN_LANE_IN
    height_in = min(_MAX_HEIGHT_IN, lane_in * len(rows))
    figure = Figure(figsize=(look.width_in, height_in + look.around_in), layout="constrained")
    axes = figure.subplots()
    whole_us = (recording.end_ns - recording.start_ns) / 1e3
    view = _View(recording.start_ns, *(window_us or (0.0, whole_us)))
    _draw(axes, rows, view)
    axes.set_xlim(view.start_us / view.unit_us, view.end_us / view.unit_us)
    axes.set_ylim(rows[-1].y + 0.6, -0.6)
    axes.set_xlabel(f"{view.unit} since the first rank began")
    groups = _label(axes, rows, look)
    _arrows(axes, recording, rows, view)
    _legend(figure, rows, look, title=_title(recording))
    if not look.whole:
        return figure
    _tell_shares(axes, rows, groups)
    figure.supxlabel(_caption(recording), fontsize=7.5, color=_INK, x=0.01, ha="left")
    return figure


def to_svg(figure: "Figure", *, title: str) -> bytes:
    """The picture as SVG, equal bytes for equal spans."""
    from matplotlib import rc_context

    sink = BytesIO()
    # Words stay words, and ids come from a fixed salt instead of the clock.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tilepipe"}):
        figure.savefig(sink, format="svg", dpi=200, metadata={"Date": None, "Title": title})
    return sink.getvalue()


def _rows(recording: Recording, ranks: Sequence[int]) -> list[_Row]:
    """Lanes from top to bottom, a little apart where another rank begins."""
    rows: list[_Row] = []
    y = 0.0
    for place, rank in enumerate(ranks):
        for lane, spans in by_lane(recording.spans[rank]).items():
            rows.append(_Row(rank, lane, spans, y + 0.35 * place))
            y += 1
    return rows


def _draw(axes: "Axes", rows: Sequence[_Row], view: _View) -> None:
    """All strips of a kind as one path: an object each would make the file five times as long."""
    from matplotlib.patches import PathPatch

    boxes: dict[tuple[SpanKind, bool], list[tuple[float, float, float]]] = {}
    for row in rows:
        shown = [span for span in row.spans if view.shows(span)]
        for kind, start_ns, end_ns in _strips(shown, hairline_ns=view.hairline_ns):
            wide = end_ns - start_ns >= _PARTED * view.hairline_ns
            box = (view.x(start_ns), view.x(end_ns), row.y)
            boxes.setdefault((kind, wide), []).append(box)
    # Past this, a picture of its pixels is the smaller file.
    many = sum(map(len, boxes.values())) > _MAX_VECTOR
    for (kind, wide), found in boxes.items():
        # A white line parts neighbours of a kind, but would wash out what is only a few lines wide.
        width = 0.3 if wide and kind is not SpanKind.idle else 0.0
        style = {"facecolor": _COLOURS[kind], "edgecolor": "white", "linewidth": width}
        axes.add_patch(PathPatch(_outline(found), rasterized=many, **style))


def _outline(boxes: Sequence[tuple[float, float, float]]) -> "MatplotlibPath":
    """Rectangles from left to right around the height of their lane."""
    from matplotlib.path import Path

    corners = [
        corner
        for left, right, y in boxes
        for corner in (
            (left, y - 0.4),
            (right, y - 0.4),
            (right, y + 0.4),
            (left, y + 0.4),
            (left, y - 0.4),
        )
    ]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(boxes)
    return Path(corners, codes)


def _strips(spans: Sequence[Span], *, hairline_ns: float) -> list[tuple[SpanKind, int, int]]:
    """Kind, start and end of what is drawn: each span, but for runs of hairlines.

    Those become one strip of the kind that most of its time went to, as wide as they are together:
    no picture of this width could show them apart, and its file would be as long as the recording.
    """
    strips: list[tuple[SpanKind, int, int]] = []
    run: dict[SpanKind, int] = {}
    begun_ns = 0

    def close(end_ns: int) -> None:
        if run:
            strips.append((max(run, key=lambda kind: run[kind]), begun_ns, end_ns))
            run.clear()

    for span in spans:
        length_ns = span.end_ns - span.start_ns
        if length_ns >= hairline_ns:
            close(span.start_ns)
            strips.append((span.kind, span.start_ns, span.end_ns))
            continue
        if not run:
            begun_ns = span.start_ns
        run[span.kind] = run.get(span.kind, 0) + length_ns
        if span.end_ns - begun_ns >= hairline_ns:
            close(span.end_ns)
    if spans:
        close(spans[-1].end_ns)
    return _joined(strips, narrow_ns=_PARTED * hairline_ns)


def _joined(
    strips: Sequence[tuple[SpanKind, int, int]], *, narrow_ns: float
) -> list[tuple[SpanKind, int, int]]:
    """Narrow neighbours of one kind as one: no line parts them, and a seam would look like one."""
    joined: list[tuple[SpanKind, int, int]] = []
    last_narrow = False
    for kind, start_ns, end_ns in strips:
        narrow = end_ns - start_ns < narrow_ns
        if narrow and last_narrow and joined[-1][0] is kind:
            joined[-1] = (kind, joined[-1][1], end_ns)
        else:
            joined.append((kind, start_ns, end_ns))
        last_narrow = narrow
    return joined


def _label(axes: "Axes", rows: Sequence[_Row], look: _Look) -> dict[str, list[_Row]]:
    """Names at the left; of whole ranks where lanes are many. Returns the rows of each."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    by_rank = len(rows) > _MAX_LABELLED
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        lane = f"  {'SM ' if row.lane[0].isdecimal() else ''}{row.lane}"
        groups.setdefault(f"rank {row.rank}{'' if by_rank else lane}", []).append(row)
    places = [found[0].y for found in groups.values()]
    axes.set_yticks(places, list(groups), fontsize=look.font_pt)
    return groups


def _tell_shares(axes: "Axes", rows: Sequence[_Row], groups: Mapping[str, list[_Row]]) -> None:
    """Where the time went, to the right of each name."""
    places = [found[0].y for found in groups.values()]
    totals = [lane_times(s for row in found for s in row.spans) for found in groups.values()]
    for column, head in enumerate(("busy", "wait", "copy", "idle")):
        cells = [(rows[0].y - 0.012 * rows[-1].y - 0.78, head)]
        for y, times in zip(places, totals, strict=True):
            cells.append((y, f"{100 * getattr(times, f'{head}_ns') / times.length_ns:.0f} %"))
        for y, text in cells:
            axes.text(
                1.045 + 0.045 * column,
                y,
                text,
                transform=axes.get_yaxis_transform(),
                fontsize=7.5,
                color=_INK,
                va="bottom" if text == head else "center",
                ha="right",
            )


def _arrows(axes: "Axes", recording: Recording, rows: Sequence[_Row], view: _View) -> None:
    """From the send or tile that ended one of the longest waits to what it let begin."""
    place = {(row.rank, row.lane): row.y for row in rows}
    spans = {r: [s for s in found if view.shows(s)] for r, found in recording.spans.items()}
    late = {(rank, s.lane, s.end_ns) for rank, s in longest_waits(spans, _MAX_ARROWS)}
    # Of the whole recording: what a window holds does not tell where a layer's second half begins.
    pairs = unblocking(
        recording.spans, operation=recording.point.operation, granularity=recording.granularity
    )
    style = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
    for (rank, cause), (other, effect) in pairs:
        tail, head = place.get((rank, cause.lane)), place.get((other, effect.lane))
        ends_a_wait = (other, effect.lane, effect.start_ns) in late
        in_view = view.shows(cause) and view.shows(effect)
        if tail is not None and head is not None and ends_a_wait and in_view:
            begin, end = (view.x(cause.end_ns), tail), (view.x(effect.start_ns), head)
            axes.annotate("", end, begin, arrowprops=dict(style))


def _legend(figure: "Figure", rows: Sequence[_Row], look: _Look, *, title: str) -> None:
    from matplotlib.patches import Patch

    seen = {span.kind for row in rows for span in row.spans}
    handles = [
        Patch(
            facecolor=colour, edgecolor="#BBBBBB", linewidth=0.5, label=_WORDS.get(kind, kind.name)
        )
        for kind, colour in _COLOURS.items()
        if kind in seen
    ]
    legend = figure.legend(
        handles=handles,
        loc="outside upper left",
        ncols=min(len(handles), look.legend_columns),
        frameon=False,
        fontsize=look.font_pt,
        title=title if look.whole else None,
        title_fontsize=10.5,
        alignment="left",
    )
    legend.set_in_layout(True)


def _title(recording: Recording) -> str:
    point = recording.point
    kernel, workload = point.config["kernel"], point.config["workload"]
    words = [f"{key} {kernel[key]}" for key in ("order", "granularity") if kernel.get(key)]
    count = len(recording.spans)
    sizes = f"{count} rank{'s' if count > 1 else ''}, {workload['num_tokens']} tokens a rank"
    return f"{point.operation}: {', '.join([sizes, *words])}"


def _caption(recording: Recording) -> str:
    point = recording.point
    commit = f"commit {recording.commit}" if recording.commit else "no commit known"
    day = recording.ended_utc[:10]
    return (
        f"executor {point.executor}, {recording.device}, {day}, {commit}. One launch, recorded "
        "after the timed ones;\nshares are of whole launches; arrows lead from what ended the "
        "longest waits to what it let begin."
    )
