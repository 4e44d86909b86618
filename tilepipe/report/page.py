"""Write a report as one HTML page that needs nothing beside it.

Knows nothing of Markdown or of what the numbers mean.
"""

import re
from collections.abc import Iterable, Mapping
from html import escape

from tilepipe.report.content import Report, Section
from tilepipe.report.shapes import Figure, Grid

__all__ = ["page_of"]

# Longer tables of a figure's numbers are folded; print opens them.
_OPEN_ROWS = 8
# A number, perhaps with its interval and a mark, or the dash of one that was not measured.
_NUMBER = re.compile(r"-|-?[\d.\u202f]+~?( \([^()]* to [^()]*\))?~?")
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: #fff; color: #111;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; line-height: 1.3; margin-top: 2.2rem; border-bottom: 1px solid #999; }
h3 { font-size: 1.1rem; margin: 1.6rem 0 0.5rem; }
h4 { font-size: 1rem; margin: 0.8rem 0 0.3rem; }
p, li, figcaption, h2, h3, h4 { overflow-wrap: anywhere; }
p, ul { max-width: 75ch; }
nav ul { padding-left: 1.2rem; }
a { color: #0B4F86; }
.figures { display: grid; gap: 1.5rem 2rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 42rem; }
figcaption { font-size: 0.875rem; color: #333; max-width: 42rem; }
figcaption strong { display: block; color: #111; font-size: 1rem; }
.scroll { overflow-x: auto; max-width: 100%; margin: 0.5rem 0; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: 0.25rem 0.6rem; text-align: left;
  vertical-align: top; }
th { border-bottom: 2px solid #555; }
td.number, th.number { text-align: right; }
td.number { white-space: nowrap; }
td.short { white-space: nowrap; }
td.label { min-width: 12rem; }
td.long { min-width: 14rem; overflow-wrap: anywhere; }
.note { font-size: 0.875rem; color: #333; }
.warning { border-left: 0.4rem solid #B34700; background: #FFF4EC; padding: 0.5rem 0.8rem;
  margin: 0.6rem 0; overflow-wrap: anywhere; }
summary { cursor: pointer; font-size: 0.875rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, summary { display: none; }
  .figures { display: block; }
  figure svg, figcaption, tr, .warning { break-inside: avoid; }
  figcaption, details { break-before: avoid; }
  h2, h3, h4 { break-after: avoid; }
  figure { margin-bottom: 1.2rem; }
  figure svg { max-width: 13cm; }
  .scroll { overflow: visible; }
  table { font-size: 8pt; }
  td.number, td.short { white-space: normal; }
  th, td { padding: 0.1rem 0.3rem; }
  td.label, td.long { min-width: 0; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""


def page_of(report: Report, svgs: Mapping[str, str]) -> str:
    """The whole file; `svgs` holds each figure's element by its slug."""
    body = [
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in report.intro),
        _contents(report),
        *_heading("overview", report.overview.title),
        _table(report.overview),
    ]
    if report.warnings:
        body += _heading("warnings", "Warnings")
        body += [
            f'<div class="warning"><strong>Warning:</strong> {escape(warning)}</div>'
            for warning in report.warnings
        ]
    for number, section in enumerate(report.sections, start=1):
        body += _section(section, f"section-{number}", svgs)
    if report.failed is not None:
        body += [*_heading("failed", report.failed.title), _table(report.failed)]
    if report.missing:
        body += [*_heading("missing", "Not shown"), _list(report.missing)]
    if report.faults:
        body += [*_heading("faults", "Could not be read"), _list(report.faults)]
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            # A browser would ask for an icon otherwise.
            '<link rel="icon" href="data:,">',
            f"<title>{escape(report.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _contents(report: Report) -> str:
    places = [("overview", report.overview.title)]
    places += [("warnings", f"Warnings ({len(report.warnings)})")] if report.warnings else []
    for number, section in enumerate(report.sections, start=1):
        places.append((f"section-{number}", section.title))
    places += [] if report.failed is None else [("failed", report.failed.title)]
    places += [("missing", "Not shown")] if report.missing else []
    places += [("faults", "Could not be read")] if report.faults else []
    items = "".join(f'<li><a href="#{name}">{escape(title)}</a></li>' for name, title in places)
    return f'<nav aria-label="Contents"><ul>{items}</ul></nav>'


def _section(section: Section, name: str, svgs: Mapping[str, str]) -> list[str]:
    body = _heading(name, section.title)
    for part in section.parts:
        body.append(f"<h3>{escape(part.title)}</h3>")
        if part.note:
            body.append(f"<p>{escape(part.note)}</p>")
        figures = [item for item in part.items if not isinstance(item, Grid)]
        if figures:
            body.append('<div class="figures">')
            body += [_figure(figure, svgs[figure.slug]) for figure in figures]
            body.append("</div>")
        for grid in part.items:
            if isinstance(grid, Grid):
                body += [f"<h4>{escape(grid.title)}</h4>", _table(grid)]
    return body


def _figure(figure: Figure, svg: str) -> str:
    caption = f"<strong>{escape(figure.title)}</strong> {escape(figure.caption)}"
    numbers = ""
    if figure.numbers is not None:
        unfolded = " open" if len(figure.numbers.rows) <= _OPEN_ROWS else ""
        numbers = (
            f"<details{unfolded}><summary>Numbers</summary>\n{_table(figure.numbers)}\n</details>"
        )
    return (
        f'<figure id="{figure.slug}">\n{svg}<figcaption>{caption}</figcaption>\n{numbers}</figure>'
    )


def _table(grid: Grid) -> str:
    kinds = [_kind(row[column] for row in grid.rows) for column in range(len(grid.head))]
    head = "".join(
        f"<th{kind}>{escape(cell)}</th>" for kind, cell in zip(kinds, grid.head, strict=True)
    )
    rows = []
    for place, row in enumerate(grid.rows):
        cells = []
        for column, cell in enumerate(row):
            text = escape(cell)
            if (place, column) in grid.best:
                text = f"<strong>{text}</strong>"
            cells.append(f"<td{kinds[column]}>{text}</td>")
        rows.append(f"<tr>{''.join(cells)}</tr>")
    note = f'\n<p class="note">{escape(grid.note)}</p>' if grid.note else ""
    body = "\n".join(rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
    return f'<div class="scroll" tabindex="0">{table}</div>{note}'


def _kind(cells: Iterable[str]) -> str:
    """Class of a column: numbers to the right, long text with room to wrap."""
    found = [cell for cell in cells if cell]
    if found and all(_NUMBER.fullmatch(cell) for cell in found):
        return ' class="number"'
    longest = max((len(cell) for cell in found), default=0)
    name = "long" if longest > 40 else "label" if longest > 24 else "short"
    return f' class="{name}"'


def _heading(name: str, title: str) -> list[str]:
    return [f'<h2 id="{name}">{escape(title)}</h2>']


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
