"""List a sweep without running it: points, memory, and what would be reused.

Knows nothing of how points run.
"""

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from tilepipe.config.choices import Resume
from tilepipe.launch.preflight import missing_hardware, refusal
from tilepipe.launch.reuse import reusable
from tilepipe.launch.table import told
from tilepipe.launch.worker import describe
from tilepipe.records import Point

__all__ = ["dry_table"]


def dry_table(
    points: Sequence[Point], *, results_dir: Path, resume: Resume
) -> tuple[Table, list[str]]:
    """The true list of points in the order of the run, and the sentences of wrong ones."""
    count = f"{len(points)} point{'s' if len(points) != 1 else ''}"
    table = Table(title=f"{count}, nothing is run")
    for heading in ("#", "point", "what would happen", "ranks", "MiB a rank"):
        table.add_column(heading, justify="right" if heading in ("#", "ranks") else "left")
    wrong = []
    with ExitStack() as stack:
        sizes = _Sizes(stack)
        for number, point in enumerate(points, start=1):
            size, fault = "-", refusal(point)
            if not fault:
                try:
                    size = f"{sizes.of(point.config) / 2**20:.1f}"
                except (ValueError, OSError) as error:
                    fault = str(error)
                except MemoryError:
                    workload = point.config["workload"]
                    tokens, experts = workload["num_tokens"], workload["num_experts"]
                    fault = (
                        f"workload.num_tokens={tokens}, workload.num_experts={experts}: their "
                        "routing does not fit into this machine's memory; lower one of them"
                    )
            happens = fault or _happens(point, results_dir, resume)
            wrong += [fault] if fault else []
            ranks = str(point.config["launch"]["num_ranks"])
            # Text: brackets of a list are no markup.
            table.add_row(str(number), Text(told(point)), Text(happens), ranks, size)
    return table, wrong


class _Sizes:
    """Bytes that points reserve, found out in a process: only there an experiment is imported."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pool = self._stack.enter_context(ProcessPoolExecutor(1, mp_context=context))

    def of(self, container: dict[str, Any]) -> int:
        """As `describe`; MemoryError too where the process was killed, and the next has another."""
        try:
            return self._pool.submit(describe, container).result()
        except BrokenProcessPool as error:
            self._start()
            raise MemoryError("the process was killed") from error


def _happens(point: Point, results_dir: Path, resume: Resume) -> str:
    if reason := missing_hardware(point):
        return f"skipped: {reason}"
    stored = reusable(results_dir, point, resume)
    return "run" if stored is None else f"reuse {point.folder} ({stored.status.name})"
