"""Standard streams that are closed, full, cannot show a character, or whose terminal has gone.

Knows nothing of what is written to them.
"""

import io
import os
import sys
from contextlib import suppress
from typing import Any, TextIO

__all__ = ["BearingStream", "mend_standard_streams"]


def mend_standard_streams() -> None:
    """Closed streams lead nowhere, here and in processes that are started; a character that a
    stream cannot show becomes another."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # It takes the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  open as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class BearingStream:
    """A stream for what may be lost: once it cannot be written to, what follows leads nowhere.

    That a reader has left (BrokenPipeError) is passed on.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            raise
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError:
            self._give_up()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self) -> None:
        # What is still in the stream's buffer would fail again when the process ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
