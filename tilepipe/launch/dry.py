"""List a sweep without running it: points, memory, and what would be reused.

Knows nothing of how points run.
"""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from tilepipe.config.choices import Resume
from tilepipe.launch.describing import Describing, Undescribed
from tilepipe.launch.preflight import missing_hardware, refusal
from tilepipe.launch.reuse import reusable
from tilepipe.launch.table import told
from tilepipe.records import Point

__all__ = ["dry_table"]


def dry_table(
    points: Sequence[Point], describing: Describing, *, results_dir: Path, resume: Resume
) -> tuple[Table, list[str]]:
    """The true list of points in the order of the run, and the sentences of wrong ones.

    Raises Interrupted as `describing` does.
    """
    count = f"{len(points)} point{'s' if len(points) != 1 else ''}"
    table = Table(title=f"{count}, nothing is run")
    for heading in ("#", "point", "what would happen", "ranks", "MiB a rank"):
        table.add_column(heading, justify="right" if heading in ("#", "ranks") else "left")
    wrong = []
    for number, point in enumerate(points, start=1):
        size, chosen, fault = "-", "", refusal(point)
        if not fault:
            try:
                described = describing.described(point)
                size = f"{described.num_bytes / 2**20:.1f}"
                if described.num_comm_ctas is not None:
                    chosen = f"; num_comm_ctas: {described.num_comm_ctas}"
            except (ValueError, OSError, MemoryError, Undescribed) as error:
                fault = str(error)
        happens = fault or _happens(point, results_dir, resume) + chosen
        wrong += [fault] if fault else []
        ranks = str(point.config["launch"]["num_ranks"])
        # Text: brackets of a list are no markup.
        table.add_row(str(number), Text(told(point)), Text(happens), ranks, size)
    return table, wrong


def _happens(point: Point, results_dir: Path, resume: Resume) -> str:
    if reason := missing_hardware(point):
        return f"skipped: {reason}"
    stored = reusable(results_dir, point, resume)
    return "run" if stored is None else f"reuse {point.folder} ({stored.status.name})"
