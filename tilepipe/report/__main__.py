"""Make a report of a results folder: `python -m tilepipe.report DIR`. Runs wherever pyarrow runs.

Knows nothing of how points are run; sees files only.

Writes report.html (one page that needs nothing beside it), report.md and figures/ into DIR/report,
or into FOLDER with out=FOLDER. DIR may be the results folder, an experiment's or, with out=, a
point's. Ends 0 once a report of all is written, 1 where something could not be read (it is named,
and the rest reported) or nothing could be reported, 2 for bad arguments.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tilepipe.report.content import report_of
from tilepipe.report.points import find_points
from tilepipe.results.check import POINT_FILES
from tilepipe.results.files import cause_of
from tilepipe.results.folders import folder_fault
from tilepipe.results.store import REPORT_FOLDER
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command."""
    parser = argparse.ArgumentParser(prog="python -m tilepipe.report", description=__doc__)
    parser.add_argument("folder", metavar="DIR", type=Path, help="results folder to report on")
    parser.add_argument(
        "out",
        metavar="out=FOLDER",
        nargs="?",
        help=f"where to write, DIR/{REPORT_FOLDER} if left out",
    )
    parsed = parser.parse_args(arguments)
    root: Path = parsed.folder
    fault = folder_fault(root)
    if fault is not None:
        return _refuse(fault, code=2)
    if parsed.out is None and any((root / name).exists() for name in POINT_FILES):
        sentence = "a point's own folder takes no report: name another place with out=FOLDER"
        return _refuse(f"{root}: {sentence}", code=2)
    if parsed.out is not None and not parsed.out.removeprefix("out="):
        return _refuse("out=: names no folder: write out=FOLDER", code=2)
    if parsed.out is not None and not parsed.out.startswith("out="):
        return _refuse(f"{parsed.out}: not understood: write out={parsed.out}", code=2)
    out = root / REPORT_FOLDER if parsed.out is None else Path(parsed.out.removeprefix("out="))
    return _report(root, out)


def _report(root: Path, out: Path) -> int:
    found = find_points(root)
    for fault in found.faults:
        _tell(fault, error=True)
    if not found.points.num_rows:
        return 1
    try:
        from tilepipe.report.writing import figures_of, write_report  # matplotlib is an extra
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return _refuse("matplotlib is missing: pip install 'tilepipe[plot]', then try again")
    report = report_of(found, title=f"TilePipe report: {root.resolve().name}")
    try:
        write_report(report, out)
    except OSError as error:
        cause = cause_of(error)
        return _refuse(f"{out}: {cause}: name a folder that can be written with out=FOLDER")
    for warning in report.warnings:
        _tell(f"warning: {warning}")
    num_points = len(set(found.points.column("folder").to_pylist()))
    told = (
        f"{num_points} points, {len(figures_of(report))} figures, {len(report.warnings)} warnings"
    )
    _tell(f"{told}, {len(report.missing)} not shown, {len(found.faults)} faults")
    _tell(f"report: {out / 'report.html'}")
    return int(bool(found.faults))


def _refuse(sentence: str, *, code: int = 1) -> int:
    _tell(sentence, error=True)
    return code


def _tell(sentence: str, *, error: bool = False) -> None:
    """On any terminal: names of files may hold what it cannot show."""
    plain = sentence.replace("\u202f", " ").encode("ascii", "backslashreplace").decode()
    print(plain, file=sys.stderr if error else sys.stdout)


if __name__ == "__main__":
    leave(heard_out(main))
