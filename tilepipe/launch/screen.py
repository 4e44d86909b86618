"""What a sweep shows while it runs: lines, a progress bar on a terminal, tables at the end.

Knows nothing of how points run or where they are stored.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tilepipe.launch.console import Lines
from tilepipe.launch.table import (
    breakdown_table,
    figures_table,
    progress_line,
    reasons_table,
    times_table,
)
from tilepipe.records import Outcome, Status

__all__ = ["Screen"]

# Narrower terminals get the tables without intervals.
_WIDE = 110


class Screen(Lines):
    """Output of one sweep of `num_points` points."""

    def __init__(self, num_points: int) -> None:
        super().__init__()
        self._num_points = num_points
        self._errors = Console(stderr=True)
        self._counts: Counter[str] = Counter()
        self._reason = ""  # of the point that ended last
        self._bar: Progress | None = None

    def say_error(self, text: str) -> None:
        """A line on stderr, as it is."""
        self._errors.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Keep a bar below the lines while the block runs; nothing where output is piped."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as self._bar:
            self._task = self._bar.add_task(self._described(), total=self._num_points)
            yield
        self._bar = None

    def ended(self, outcome: Outcome, *, reused: bool) -> None:
        """A point has ended, or was there already."""
        self._counts[_kind(outcome, reused)] += 1
        line = progress_line(
            outcome,
            number=self._counts.total(),
            total=self._num_points,
            reused=reused,
            again=outcome.reason == self._reason,
        )
        self._reason = outcome.reason
        self.say(line)
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=self._described())

    def show_results(self, outcomes: Sequence[Outcome], path: Path) -> None:
        """Tables of one experiment, and where its numbers are."""
        if any(outcome.status is Status.ok for outcome in outcomes):
            narrow = self.console.width < _WIDE
            self.show(times_table(outcomes, narrow=narrow))
            self.show(figures_table(outcomes, narrow=narrow))
        if any(outcome.terms for outcome in outcomes):
            self.show(breakdown_table(outcomes))
        if len(outcomes) > 1 and any(outcome.status is not Status.ok for outcome in outcomes):
            self.show(reasons_table(outcomes))
        for sentence in sorted({text for outcome in outcomes for text in outcome.left_out}):
            self.say(sentence)
        self.say(f"results: {path}")

    def _described(self) -> str:
        kinds = ("done", "reused", "failed", "skipped")
        return ", ".join(f"{self._counts[kind]} {kind}" for kind in kinds)


def _kind(outcome: Outcome, reused: bool) -> str:
    if reused:
        return "reused"
    if outcome.status is Status.ok:
        return "done"
    return "skipped" if outcome.status in (Status.unsupported, Status.skipped) else "failed"
