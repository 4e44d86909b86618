"""Put a report into a folder: report.md, report.html and figures/.

Knows nothing of points. What was there before is replaced file by file, each of them whole.
"""

from pathlib import Path

from tilepipe.report.content import Report
from tilepipe.report.draw import svg_of
from tilepipe.report.markdown import FIGURES_FOLDER, markdown_of
from tilepipe.report.page import page_of
from tilepipe.report.shapes import Figure, Grid
from tilepipe.results.files import write_bytes

__all__ = ["figures_of", "write_report"]


def figures_of(report: Report) -> list[Figure]:
    """Every figure of the report, in its order."""
    return [
        item
        for section in report.sections
        for part in section.parts
        for item in part.items
        if not isinstance(item, Grid)
    ]


def write_report(report: Report, folder: Path) -> None:
    """Write all files; raises OSError where that cannot be done."""
    svgs = {figure.slug: svg_of(figure) for figure in figures_of(report)}
    page = page_of(report, svgs)
    text = markdown_of(report)
    (folder / FIGURES_FOLDER).mkdir(parents=True, exist_ok=True)
    for slug, svg in svgs.items():
        write_bytes(folder / FIGURES_FOLDER / f"{slug}.svg", svg.encode())
    # An earlier report's figures that this one no longer names.
    for path in sorted((folder / FIGURES_FOLDER).glob("*.svg")):
        if path.stem not in svgs and path.stem.startswith(("cuda-", "host-")):
            path.unlink()
    write_bytes(folder / "report.html", page.encode())
    write_bytes(folder / "report.md", text.encode())
