"""Figures as drawn: equal bytes for equal figures, and texts that can be read."""

import re
from dataclasses import replace
from itertools import combinations
from unittest import mock

import pytest
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.text import Text

from tilepipe.report.draw import canvas_of, svg_of
from tilepipe.report.shapes import (
    BarFigure,
    Bars,
    DotFigure,
    DotPanel,
    Dots,
    Level,
    Line,
    LineFigure,
    Value,
)
from tilepipe.report.writing import figures_of


def value(middle, reach=0.1):
    return Value(value=middle, low=middle - reach, high=middle + reach)


def lines(num_lines, x, *, label="16384 tokens, simt, 16 warps"):
    return LineFigure(
        slug="lines",
        title="lines",
        caption="",
        x_label="communication CTAs",
        y_label="GB/s of one GPU, bytes read and written",
        lines=tuple(
            Line(
                label=f"{label} {i}",
                x=x,
                y=tuple(value(10.0 * p) for p in x),
                color=i // 2,
                dash=i % 2,
            )
            for i in range(num_lines)
        ),
        levels=(Level(label="memory, 4 800 GB/s", value=4800.0),),
    )


def rows(num_rows, label):
    return tuple(f"{label}, {i} tokens" for i in range(num_rows))


def dots(num_rows, label, *, panels=1):
    series = tuple(
        Dots(label=name, values=tuple(value(i + 1.0) for i in range(num_rows)))
        for name in ("fused", "sequential", "lower bound max(GEMM, push) + reduce")
    )
    return DotFigure(
        slug="dots",
        title="dots",
        caption="",
        rows=rows(num_rows, label),
        panels=(DotPanel(x_label="fullest rank over mean", dots=series),) * panels,
    )


def bars(num_rows, label):
    return BarFigure(
        slug="bars",
        title="bars",
        caption="",
        rows=rows(num_rows, label),
        x_label="ms",
        parts=tuple(
            Bars(
                label=name,
                color=i,
                values=tuple(None if p == i else value(50.0 - 20 * i) for p in range(num_rows)),
            )
            for i, name in enumerate(("plan", "gemm_all", "sm_tax", "sync_tax", "contention"))
        ),
        totals=tuple(value(90.0) for _ in range(num_rows)),
    )


LONG = "hot_expert, hot expert 17, flags by expert, edf_list, tma, 16 warps, 3 stages"
HARD = {
    "eight lines": lines(8, (8.0, 12.0, 16.0, 24.0, 36.0, 48.0)),
    "crowded ticks": lines(2, (1.0, 2.0, 3.0, 4.0, 100.0, 101.0, 132.0)),
    "one place": lines(1, (1.0,)),
    "long labels of lines": lines(3, (8.0, 16.0), label=LONG),
    "one row": dots(1, "edf"),
    "long rows": dots(16, LONG),
    "two panels": dots(12, "lognormal, sigma 1.5", panels=2),
    "one bar": bars(1, "edf"),
    "long bars": bars(16, LONG),
}


def text_boxes(figure):
    """Every text that is drawn, with its box in pixels, and the figure's own box."""
    canvas = canvas_of(figure)
    renderer = RendererAgg(canvas.bbox.width, canvas.bbox.height, canvas.dpi)
    drawn = []
    # Ticks beyond the axes exist, but are never drawn.
    note = {"autospec": True, "side_effect": lambda text, _: drawn.append(text)}
    with mock.patch.object(Text, "draw", **note):
        canvas.draw(renderer)
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in drawn]
    return [(text, box) for text, box in boxes if text and box.width], canvas.bbox


def check_texts(figure):
    boxes, whole = text_boxes(figure)
    assert len(boxes) > 3
    for text, box in boxes:
        inside = (
            box.x0 >= whole.x0 - 0.5
            and box.y0 >= whole.y0 - 0.5
            and box.x1 <= whole.x1 + 0.5
            and box.y1 <= whole.y1 + 0.5
        )
        assert inside, f"{text!r} leaves the figure: {box} in {whole}"
    for (one, a), (other, b) in combinations(boxes, 2):
        # Boxes include the room below a line's letters: a pixel of it may be shared.
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
        assert apart, f"{one!r} lies on {other!r}"


@pytest.mark.parametrize("name", HARD)
def test_no_text_lies_on_another_or_leaves_the_figure(name):
    check_texts(HARD[name])


def test_no_text_of_a_report_lies_on_another_or_leaves_its_figure(full_report):
    for figure in figures_of(full_report):
        check_texts(figure)


@pytest.mark.parametrize("name", ["eight lines", "two panels", "long bars"])
def test_equal_figures_give_equal_bytes(name):
    assert svg_of(HARD[name]) == svg_of(HARD[name])


def test_no_date_and_no_maker_is_in_a_drawing():
    svg = svg_of(HARD["eight lines"])

    assert "<metadata" not in svg
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b|[Mm]atplotlib v", svg)


def test_ids_of_two_drawings_in_one_page_differ():
    one = svg_of(replace(HARD["one bar"], slug="one"))
    other = svg_of(replace(HARD["one bar"], slug="other"))

    ids = [set(re.findall(r'\bid="([^"]*)"', svg)) for svg in (one, other)]

    assert ids[0]
    assert not ids[0] & ids[1]
    used = set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', one))
    assert used
    assert {a or b for a, b in used} <= ids[0]


def test_text_stays_text_and_a_drawing_has_a_name():
    svg = svg_of(replace(HARD["eight lines"], title='a "title" & more <'))

    assert ">communication CTAs</text>" in svg
    assert svg.startswith('<svg role="img" aria-label="a &quot;title&quot; &amp; more &lt;" ')
    assert "<style" not in svg


def test_a_negative_part_is_drawn_to_the_left_of_zero():
    figure = replace(
        bars(1, "edf"),
        parts=(
            Bars(label="plan", color=0, values=(value(3.0),)),
            Bars(label="gemm_all", color=1, values=(value(5.0),)),
            Bars(label="late", color=2, values=(value(-2.0),)),
        ),
        totals=(value(6.0),),
    )

    axes = canvas_of(figure).axes[0]

    spans = [(box.get_x(), box.get_x() + box.get_width()) for box in axes.patches]
    assert spans == [(0, 3), (3, 8), (0, -2)]
    marks = [line.get_xdata().tolist() for line in axes.lines if line.get_label() == "e2e"]
    assert marks == [[6.0]]
