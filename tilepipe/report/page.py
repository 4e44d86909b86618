"""Write a report as one HTML page that needs nothing beside it.

Knows nothing of Markdown or of what the numbers mean.
"""

from collections.abc import Iterable, Mapping
from html import escape

from tilepipe.report.content import Report, Section
from tilepipe.report.page_table import TABLE_STYLE, room_px, table_of
from tilepipe.report.shapes import Figure, Grid

__all__ = ["page_of"]

# Longer tables of a figure's numbers are folded; print opens them.
_OPEN_ROWS = 8
# Tables that need more stand below their figure, others to the right of it where that has room.
_BESIDE_PX = 640
STYLE = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; padding: 1rem; max-width: 78rem; background: #fff; color: #111;
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", Arial, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; }}
h2 {{ font-size: 1.3rem; line-height: 1.3; margin-top: 2.2rem; border-bottom: 1px solid #999; }}
h3 {{ font-size: 1.1rem; margin: 1.8rem 0 0.5rem; }}
h4 {{ font-size: 1rem; margin: 0.8rem 0 0.3rem; }}
h1, h2, h3, h4, p, li, figcaption {{ overflow-wrap: anywhere; }}
p, ul {{ max-width: 75ch; }}
nav ul, .lines {{ padding-left: 1.2rem; }}
a {{ color: #0B4F86; }}
figure {{ margin: 0 0 2rem; display: grid; gap: 0.5rem 2rem;
  grid-template-columns: minmax(0, 1fr); }}
figure svg {{ display: block; width: 100%; height: auto; max-width: 42rem; }}
figcaption {{ font-size: 0.875rem; color: #333; max-width: 75ch; }}
figcaption strong {{ display: block; color: #111; font-size: 1rem; }}
{TABLE_STYLE}
.note {{ font-size: 0.875rem; color: #333; }}
.warning {{ border-left: 0.4rem solid #B34700; background: #FFF4EC; padding: 0.5rem 0.8rem;
  margin: 0.6rem 0; overflow-wrap: anywhere; }}
summary {{ cursor: pointer; font-size: 0.875rem; }}
@media screen and (min-width: 64rem) {{
  figure {{ grid-template-columns: 30rem minmax(0, 1fr); grid-template-rows: auto 1fr; }}
  figure svg {{ grid-row: 1 / 3; }}
  figure.wide svg {{ grid-row: 1; }}
  figure.wide details {{ grid-column: 1 / -1; }}
}}
@media print {{
  :root {{ font-size: 10pt; }}
  body {{ max-width: none; padding: 0; }}
  nav, summary {{ display: none; }}
  figure {{ display: block; }}
  figure svg, figcaption, .warning, li {{ break-inside: avoid; }}
  figcaption {{ break-before: avoid; }}
  h2, h3, h4 {{ break-after: avoid; }}
  figure svg {{ max-width: 13cm; }}
  details::details-content {{ content-visibility: visible; height: auto; }}
}}
"""


def page_of(report: Report, svgs: Mapping[str, str]) -> str:
    """The whole file; `svgs` holds each figure's element by its slug."""
    body = [
        f"<h1>{escape(report.title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in report.intro),
        _contents(report),
        *_heading("overview", report.overview.title),
        table_of(report.overview),
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
        body += [*_heading("failed", report.failed.title), table_of(report.failed)]
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
    places = [_place("overview", report.overview.title)]
    places += [_place("warnings", f"Warnings ({len(report.warnings)})")] if report.warnings else []
    for number, section in enumerate(report.sections, start=1):
        name = f"section-{number}"
        parts = [_place(f"{name}-{i}", part.title) for i, part in enumerate(section.parts, 1)]
        places.append(_place(name, section.title, parts))
    places += [] if report.failed is None else [_place("failed", report.failed.title)]
    places += [_place("missing", "Not shown")] if report.missing else []
    places += [_place("faults", "Could not be read")] if report.faults else []
    return f'<nav aria-label="Contents"><ul>{"".join(places)}</ul></nav>'


def _place(name: str, title: str, below: Iterable[str] = ()) -> str:
    """An entry of the contents, and those below it."""
    inner = "".join(below)
    nested = f"<ul>{inner}</ul>" if inner else ""
    return f'<li><a href="#{name}">{escape(title)}</a>{nested}</li>'


def _section(section: Section, name: str, svgs: Mapping[str, str]) -> list[str]:
    body = _heading(name, section.title)
    for number, part in enumerate(section.parts, start=1):
        body.append(f'<h3 id="{name}-{number}">{escape(part.title)}</h3>')
        if part.note:
            body.append(f"<p>{escape(part.note)}</p>")
        for item in part.items:
            if isinstance(item, Grid):
                body += [f"<h4>{escape(item.title)}</h4>", table_of(item)]
            else:
                body.append(_figure(item, svgs[item.slug]))
    return body


def _figure(figure: Figure, svg: str) -> str:
    caption = f"<strong>{escape(figure.title)}</strong> {escape(figure.caption)}"
    numbers, place = "", ""
    if figure.numbers is not None:
        place = ' class="wide"' if room_px(figure.numbers) > _BESIDE_PX else ""
        unfolded = " open" if len(figure.numbers.rows) <= _OPEN_ROWS else ""
        numbers = (
            f"<details{unfolded}><summary>Numbers</summary>\n{table_of(figure.numbers)}\n</details>"
        )
    return (
        f'<figure id="{figure.slug}"{place}>\n{svg}<figcaption>{caption}</figcaption>\n'
        f"{numbers}</figure>"
    )


def _heading(name: str, title: str) -> list[str]:
    return [f'<h2 id="{name}">{escape(title)}</h2>']


def _list(lines: Iterable[str]) -> str:
    return f'<ul class="lines">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>'
