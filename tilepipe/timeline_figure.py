"""A recorded launch as one static picture: lanes as rows, time to the right.

Knows nothing of files. matplotlib is imported where something is drawn, not with this module.

Colours are those of Okabe and Ito, told apart by every common kind of colour blindness; a wait,
which is what one looks for, is the darkest of the warm ones. What is narrower than the picture can
show is drawn together with its neighbours: see `_strips`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

from tilepipe.records import Span, SpanKind
from tilepipe.results.recording import Recording
from tilepipe.results.spans import by_lane, lane_times, longest_waits, unblocking

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
_WIDTH_IN, _LANE_IN, _MIN_LANE_IN, _MAX_HEIGHT_IN = 10.0, 0.32, 0.03, 14.0
# Share of the drawn time below which a span is no more than a hairline, a third of a pixel.
_HAIRLINE = 1 / 3000
_PARTED = 12  # hairlines
_MAX_ARROWS = 6
# Lanes past which their rows are too low for words.
_MAX_LABELLED = 40


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
) -> "Figure":
    """The picture; the caller saves it, see `to_svg`."""
    from matplotlib.figure import Figure

    rows = _rows(recording, sorted(recording.spans if ranks is None else ranks))
    lane_in = _LANE_IN if len(rows) <= _MAX_LABELLED else _MIN_LANE_IN
    height_in = min(_MAX_HEIGHT_IN, lane_in * len(rows))
    figure = Figure(figsize=(_WIDTH_IN, height_in + 1.55), layout="constrained")
    axes = figure.subplots()
    zero_ns = recording.start_ns
    total_us = (recording.end_ns - zero_ns) / 1e3
    from_us, until_us = window_us or (0.0, total_us)
    unit_us, unit = (1e3, "ms") if until_us >= 1e4 else (1.0, "µs")
    for row in rows:
        _draw(axes, row, zero_ns, unit_us=unit_us, hairline_us=(until_us - from_us) * _HAIRLINE)
    axes.set_xlim(from_us / unit_us, until_us / unit_us)
    axes.set_ylim(rows[-1].y + 0.6, -0.6)
    axes.set_xlabel(f"{unit} since the first rank began")
    _label(axes, rows)
    _arrows(axes, recording, rows, unit_us)
    _legend(figure, rows, title=_title(recording))
    figure.supxlabel(_caption(recording), fontsize=7.5, color=_INK, x=0.01, ha="left")
    return figure


def to_svg(figure: "Figure", *, title: str) -> bytes:
    """The picture as SVG, equal bytes for equal spans."""
    from matplotlib import rc_context

    sink = BytesIO()
    # Words stay words, and ids come from a fixed salt instead of the clock.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tilepipe"}):
        figure.savefig(sink, format="svg", metadata={"Date": None, "Title": title})
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


def _draw(axes: "Axes", row: _Row, zero_ns: int, *, unit_us: float, hairline_us: float) -> None:
    scale = 1 / (1e3 * unit_us)
    strips = _strips(row.spans, hairline_ns=hairline_us * 1e3)
    for kind, colour in _COLOURS.items():
        bars = [((a - zero_ns) * scale, (b - a) * scale) for k, a, b in strips if k is kind]
        # A white line parts neighbours of a kind, but would wash out what is only a few lines wide.
        parted = _PARTED * hairline_us / unit_us
        for wide in (True, False):
            chosen = [bar for bar in bars if (bar[1] >= parted) is wide]
            if chosen:
                width = 0.3 if wide and kind is not SpanKind.idle else 0.0
                axes.broken_barh(
                    chosen, (row.y - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=width
                )


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


def _label(axes: "Axes", rows: Sequence[_Row]) -> None:
    """Names at the left, where the time went at the right."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if len(rows) > _MAX_LABELLED:
        firsts = [rows[0], *(b for a, b in pairwise(rows) if a.rank != b.rank)]
        axes.set_yticks([row.y for row in firsts], [f"rank {row.rank}" for row in firsts])
        return
    names = [f"rank {r.rank}  {'SM ' if r.lane[0].isdecimal() else ''}{r.lane}" for r in rows]
    axes.set_yticks([row.y for row in rows], names, fontsize=8)
    transform = axes.get_yaxis_transform()
    heads = ("busy", "wait", "copy", "idle")
    for place, head in enumerate(heads):
        x = 1.045 + 0.045 * place
        cells = [(-0.85, head)]
        for row in rows:
            times = lane_times(row.spans)
            cells.append((row.y, f"{100 * getattr(times, f'{head}_ns') / times.length_ns:.0f} %"))
        for y, text in cells:
            axes.text(
                x, y, text, transform=transform, fontsize=7.5, color=_INK, va="center", ha="right"
            )


def _arrows(axes: "Axes", recording: Recording, rows: Sequence[_Row], unit_us: float) -> None:
    """From the send or tile that ended one of the longest waits to what it let begin."""
    place = {(row.rank, row.lane): row.y for row in rows}
    late = longest_waits(recording.spans, _MAX_ARROWS)
    ends = {(rank, span.lane, span.end_ns) for rank, span in late}
    pairs = unblocking(
        recording.spans, operation=recording.point.operation, granularity=recording.granularity
    )
    for (rank, cause), (other, effect) in pairs:
        known = (rank, cause.lane) in place and (other, effect.lane) in place
        if known and (other, effect.lane, effect.start_ns) in ends:
            start, end = (
                ((time_ns - recording.start_ns) / 1e3 / unit_us, place[at, lane])
                for time_ns, at, lane in (
                    (cause.end_ns, rank, cause.lane),
                    (effect.start_ns, other, effect.lane),
                )
            )
            style = {"arrowstyle": "-|>", "color": "black", "linewidth": 0.9}
            axes.annotate("", end, start, arrowprops={**style, "shrinkA": 0, "shrinkB": 0})


def _legend(figure: "Figure", rows: Sequence[_Row], *, title: str) -> None:
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
        ncols=len(handles),
        frameon=False,
        fontsize=8,
        title=title,
        title_fontsize=10.5,
        alignment="left",
    )
    legend.set_in_layout(True)


def _title(recording: Recording) -> str:
    point = recording.point
    kernel, workload = point.config["kernel"], point.config["workload"]
    words = [f"{key} {kernel[key]}" for key in ("order", "granularity") if kernel.get(key)]
    sizes = f"{len(recording.spans)} ranks, {workload['num_tokens']} tokens a rank"
    return f"{point.operation}: {', '.join([sizes, *words])}"


def _caption(recording: Recording) -> str:
    point = recording.point
    commit = f"commit {recording.commit}" if recording.commit else "no commit known"
    day = recording.ended_utc[:10]
    return (
        f"executor {point.executor}, {recording.device}, {day}, {commit}. One launch, recorded "
        f"after the timed ones; shares are of a rank's whole launch.\n"
        "Arrows: what ended the longest waits."
    )
