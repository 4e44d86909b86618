"""Where a program's lines and tables go: a terminal, a pipe, or a reader that has left.

Knows nothing of what they say.
"""

import os
import sys
from typing import Any

from rich.console import Console, RenderableType

from tilepipe.streams import BearingStream

__all__ = ["Lines"]

# Where output goes to a file or pipe, lines are wide enough for the tables.
_PIPED_WIDTH = 160


class _Console(Console):
    """A console whose reader may leave: the program goes on without showing anything."""

    def on_broken_pipe(self) -> None:
        """Instead of rich's own, which ends the process."""
        self.quiet = True
        # What is still in the stream's buffer would fail again when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class Lines:
    """Standard output, line by line and table by table."""

    def __init__(self) -> None:
        stream: Any = BearingStream(sys.stdout)
        console = _Console(file=stream)
        terminal = console.is_terminal
        self.console: Console = console if terminal else _Console(file=stream, width=_PIPED_WIDTH)

    def say(self, text: str) -> None:
        """A line, as it is."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, what: RenderableType) -> None:
        """A table; on a terminal narrower than its numbers its lines wrap, none are cut."""
        width = max(self.console.width, self.console.measure(what).minimum)
        self.console.print(what, width=width, crop=False, no_wrap=True, overflow="ignore")
