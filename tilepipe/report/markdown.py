"""Write a report as Markdown, its figures as SVG files beside it.

Knows nothing of HTML or of what the numbers mean.
"""

import re
from collections.abc import Iterable

from tilepipe.report.content import Report
from tilepipe.report.shapes import Figure, Grid

__all__ = ["FIGURES_FOLDER", "markdown_of"]

FIGURES_FOLDER = "figures"


def markdown_of(report: Report) -> str:
    """The whole file; figures are named `figures/<slug>.svg`."""
    blocks = [f"# {_text(report.title)}", *(_text(sentence) for sentence in report.intro)]
    blocks += _grid(report.overview, level=2)
    if report.warnings:
        blocks += ["## Warnings", _bullets(f"**Warning:** {_text(w)}" for w in report.warnings)]
    for section in report.sections:
        blocks.append(f"## {_text(section.title)}")
        for part in section.parts:
            blocks += [f"### {_text(part.title)}", *([_text(part.note)] if part.note else [])]
            for item in part.items:
                blocks += _grid(item, level=4) if isinstance(item, Grid) else _figure(item)
    if report.failed is not None:
        blocks += _grid(report.failed, level=2)
    if report.missing:
        blocks += ["## Not shown", _bullets(_text(line) for line in report.missing)]
    if report.faults:
        blocks += ["## Could not be read", _bullets(_text(line) for line in report.faults)]
    return "\n\n".join(blocks) + "\n"


def _figure(figure: Figure) -> list[str]:
    blocks = [
        f"#### {_text(figure.title)}",
        f"![{_text(figure.title)}]({FIGURES_FOLDER}/{figure.slug}.svg)",
        _text(figure.caption),
    ]
    if figure.numbers is not None:
        blocks += _grid(figure.numbers, level=5)
    return blocks


def _grid(grid: Grid, *, level: int) -> list[str]:
    lines = [_line(grid.head), _line("---" for _ in grid.head)]
    for place, row in enumerate(grid.rows):
        cells = [_text(cell) for cell in row]
        for column in range(len(cells)):
            if (place, column) in grid.best:
                cells[column] = f"**{cells[column]}**"
        lines.append(_line(cells))
    title = [f"{'#' * level} {_text(grid.title)}"] if grid.title else []
    note = [_text(grid.note)] if grid.note else []
    return [*title, "\n".join(lines), *note]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _text(text: str) -> str:
    """Text as it stands: nothing of it is markup, and it stays on its line."""
    return re.sub(r"([\\|<>*~`\[\]])", r"\\\1", " ".join(text.split(" "))).replace("\n", " ")
