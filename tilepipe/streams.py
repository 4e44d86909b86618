"""Standard streams that are closed, full, cannot show a character, or whose terminal has gone.

Knows nothing of what is written to them.
"""

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast

__all__ = ["BearingStream", "errors_borne", "heard_out", "mend_standard_streams"]


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

    That a reader has left (BrokenPipeError) is passed on, or is one of the reasons.
    """

    def __init__(self, stream: TextIO, *, reader_may_leave: bool = False) -> None:
        self.failure: OSError | None = None  # why it could not be written to
        self._stream = stream
        self._passed_on = () if reader_may_leave else (BrokenPipeError,)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except self._passed_on:
            raise
        except OSError as error:
            self._give_up(error)
            return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except self._passed_on:
            raise
        except OSError as error:
            self._give_up(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _give_up(self, error: OSError) -> None:
        self.failure = error
        # What is still in the stream's buffer would fail again when the process ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def errors_borne() -> Iterator[None]:
    """Let what is said on standard error be lost where nobody can be told, and nothing else."""
    stream: Any = BearingStream(sys.stderr, reader_may_leave=True)
    with redirect_stderr(stream):
        try:
            yield
        finally:
            stream.flush()


def heard_out(main: Callable[[], int]) -> int:
    """Exit code of a program that is there for what it prints.

    A reader that leaves has seen enough. Where the output cannot be written the program comes to
    its end all the same, says so in a sentence, and does not end 0.
    """
    stream = BearingStream(sys.stdout, reader_may_leave=True)
    with errors_borne():
        with redirect_stdout(cast("TextIO", stream)):
            try:
                code = main()
            except SystemExit as ended:  # argparse has printed its help, or what is wrong
                code = ended.code if isinstance(ended.code, int) else 0
            stream.flush()
        if stream.failure is None or isinstance(stream.failure, BrokenPipeError):
            return code
        cause = os.strerror(stream.failure.errno or errno.EIO)
        sys.stderr.write(f"standard output: {cause}: not all is written; lead it elsewhere\n")
        return code or 1
