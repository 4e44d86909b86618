"""Signals that ask this process to end: one sentence and exit code 130, at whatever instant.

Knows nothing of what is stopped.

Python's own handler raises wherever the interpreter happens to be: in a library's bookkeeping,
where what was begun is then lost sight of, or in a callback, where it is printed and forgotten.
Here no handler raises unless a second signal says that nobody has looked for the first. Handlers,
not a signal mask: a mask holds for one thread, and the system may choose another.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

__all__ = [
    "ASKING",
    "EXIT_STOPPED",
    "Interrupted",
    "Stopping",
    "end_when_asked",
    "half_written",
    "leave",
    "out_of_the_terminals_reach",
    "temporary_folder",
]

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_STOPPED = 130
# Signals that come this soon after another ask for nothing new: a key that bounces, or a terminal
# and a parent process that both pass on what the user typed.
_BURST_S = 1.0

# What a process that ends at once removes on its way.
_half_written: set[Path] = set()
# That it has begun to: what else asks it to end is heard between two of its steps.
_ending = False


class Interrupted(Exception):
    """The user, or the system, asked this process to end; names the signal."""


def end_when_asked() -> None:
    """Until something else listens, end the process at once with a sentence when it is asked to.

    For a program's first lines, while it loads what it needs. What was ignored before stays so
    (nohup).
    """
    for number in _heard_now():
        signal.signal(number, _end_at_once)


def leave(code: int) -> NoReturn:
    """End the program: all is written and said, and no signal changes the exit code any more."""
    for number in ASKING:
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


@contextmanager
def half_written(path: Path) -> Iterator[None]:
    """Have this file or folder removed should the process end at once during the block.

    It is made inside the block, not before.
    """
    _half_written.add(path)
    try:
        yield
    finally:
        _half_written.discard(path)


@contextmanager
def temporary_folder(prefix: str, *, beside: Path | None = None) -> Iterator[Path]:
    """A new folder for this user alone, gone with all it holds however the block or process ends.

    Lies where the system keeps temporary files, or in the folder `beside`. Its name is drawn here:
    tempfile tells a name once the folder exists, and an end in between would leave it behind.
    Raises OSError where none can be made.
    """
    path = (beside or Path(tempfile.gettempdir())) / f"{prefix}{uuid.uuid4().hex[:12]}"
    with half_written(path):
        path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)


@contextmanager
def out_of_the_terminals_reach() -> Iterator[None]:
    """Keep what a terminal sends to all its processes from those that are started in the block.

    Blocked, which they inherit, and not ignored: what comes here meanwhile is not lost.
    """
    from multiprocessing import resource_tracker  # rarely needed, and never by a program's start

    typed = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, typed)
    try:
        # Running already when others start: its own start ends with SIGINT unblocked.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, typed)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Stopping:
    """What this process has been asked for while it listens.

    The first signal is remembered, for the next `check` to raise. The second, where it finds the
    first unheeded in a block that may be `broken_off`, raises there. The third ends the process,
    and its `ranks` with it.
    """

    def __init__(self) -> None:
        self.ranks: Iterable[int] = ()  # processes that must not outlive this one
        self.told = False  # a sentence has been said
        self._asked: list[int] = []
        self._last_s = 0.0
        self._heeded = False
        self._may_break = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen during the block, main thread only; what was ignored before stays so (nohup)."""
        before = {number: signal.signal(number, self._hear) for number in _heard_now()}
        try:
            yield
        finally:
            for number, handler in before.items():
                # A program that has just begun would end here: nothing is left to stop.
                ours = handler is _end_at_once
                signal.signal(number, signal.SIG_IGN if ours else handler)

    @contextmanager
    def broken_off(self) -> Iterator[None]:
        """Let the second signal raise in the block, wherever that is."""
        self._may_break = True
        try:
            yield
        finally:
            self._may_break = False

    def check(self) -> None:
        """Raise Interrupted if this process has been asked to end."""
        if self._asked:
            self._heeded = True
            raise Interrupted(signal.Signals(self._asked[0]).name)

    def _hear(self, signum: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._asked and now_s - self._last_s < _BURST_S:
            return
        self._last_s = now_s
        self._asked.append(signum)
        if len(self._asked) == 2 and self._may_break and not self._heeded:
            self.check()
        if len(self._asked) > 2:
            self._end(signum)

    def _end(self, signum: int) -> None:
        for pid in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _end(signum, silently=self.told)


def _heard_now() -> list[signal.Signals]:
    return [number for number in ASKING if signal.getsignal(number) is not signal.SIG_IGN]


def _end_at_once(signum: int, frame: FrameType | None) -> None:
    _end(signum)


def _end(signum: int, *, silently: bool = False) -> None:
    """Neither raises nor unwinds, which could go wrong anywhere; open files are lost.

    Returns only within another call, which then goes on: that one has the process's last word.
    """
    global _ending
    if _ending:
        return
    _ending = True
    for path in list(_half_written):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
    if not silently:
        sentence = f"stopped by {signal.Signals(signum).name} before the end\n"
        with suppress(OSError):  # whoever listened has left
            os.write(2, sentence.encode())
    os._exit(EXIT_STOPPED)
