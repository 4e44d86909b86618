"""How a benchmark begins and ends: what it needs is there, and what it has measured is kept.

Knows nothing of what is measured. Ends 0, 1 when some job failed, 2 where nothing could be run, 130
when it was asked to end: each but the first with a sentence.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tilepipe.stopping import ASKING, EXIT_STOPPED, Interrupted, leave
from tilepipe.streams import BearingStream, errors_borne

__all__ = ["EXIT_LATE", "NotHere", "job_code", "need_gpus", "num_started", "run", "run_jobs"]

EXIT_LATE = 124  # a job that did not end in time, as `timeout` has it
_EXIT_NOT_RUN = 2
# Seconds in which a job that is asked to end writes what it has.
_GRACE_S = 10.0


class NotHere(Exception):
    """What a benchmark needs and this machine lacks, in a sentence."""


def run(main: Callable[[], int | str]) -> NoReturn:
    """Run a benchmark to its end, or to where a signal asks it to end: it writes what it has."""
    asked: list[int] = []

    def hear(signum: int, frame: FrameType | None) -> None:
        if not asked:  # what the first has set off comes to its end
            asked.append(signum)
            raise Interrupted(signal.Signals(signum).name)

    for number in ASKING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, hear)
    # What it shows on its way may be lost, not what it measures.
    stream: Any = BearingStream(sys.stdout, reader_may_leave=True)
    code: int | str
    try:
        with errors_borne(), redirect_stdout(stream):
            code = main()
            stream.flush()
    except NotHere as lacking:
        code = _told(str(lacking), _EXIT_NOT_RUN)
    except Interrupted as error:
        code = _told(f"stopped by {error}: what was measured before is written", EXIT_STOPPED)
    leave(_told(code, 1) if isinstance(code, str) else code)


def _told(sentence: str, code: int) -> int:
    with errors_borne():
        sys.stderr.write(f"{sentence}\n")
    return code


def need_gpus(count: int = 1) -> None:
    """Raise NotHere where torch cannot use so many GPUs."""
    import torch

    if torch.version.cuda is None:
        raise NotHere(
            f"this program needs {_gpus(count)}, and torch {torch.__version__} was built without "
            "CUDA; install a build with it (python -m tilepipe.doctor says more)"
        )
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < count:
        raise NotHere(
            f"this program needs {_gpus(count)} and torch finds {found}; start it on a host with "
            "them (python -m tilepipe.doctor says what is missing)"
        )


def _gpus(count: int) -> str:
    return f"{count} NVIDIA GPU{'s' if count > 1 else ''}"


def _typed_module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def num_started() -> int:
    """Processes that were started together; raises NotHere where none were."""
    size = os.environ.get("WORLD_SIZE")
    if size is None:
        raise NotHere(
            "WORLD_SIZE is not set: start a process a GPU, as in python -m torch.distributed.run "
            f"--nproc-per-node 2 -m {_typed_module()} FOLDER"
        )
    return int(size)


def job_code(words: Sequence[str], *, errors: Path, limit_s: float) -> int:
    """Exit code of a job in a process of its own, stderr in a file; EXIT_LATE after `limit_s`.

    A job that is late, or left behind by an exception here, is asked to end and may write what it
    has; then it is killed.
    """
    with errors.open("w", encoding="utf-8") as file:
        job = subprocess.Popen(words, stderr=file)
        try:
            return job.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            return EXIT_LATE
        finally:
            _end(job)


def run_jobs(
    program: str,  # module that takes FOLDER --job NAME
    jobs: Iterable[str],
    folder: Path,
    *,
    more: Sequence[str] = (),
    total_s: float,
    limit_s: float,
    least_s: float,
) -> bool:
    """Each job in a process of its own, one after the other; whether one failed, or found no time.

    None is started with less than `least_s` left of `total_s`, and none runs beyond `limit_s`.
    """
    begin, failed = time.monotonic(), False
    for job in jobs:
        left = total_s - (time.monotonic() - begin)
        if left < least_s:
            sys.stdout.write(f"{job}: found no time\n")
            failed = True
            continue
        words = [sys.executable, "-m", program, str(folder), "--job", job, *more]
        errors = folder / f"{job}.stderr"
        code = job_code(words, errors=errors, limit_s=min(left, limit_s))
        failed |= code != 0
        sys.stdout.write(f"{job}: ended with {code} after {time.monotonic() - begin:.0f} s\n")
        sys.stdout.flush()
    return failed


def _end(job: "subprocess.Popen[bytes]") -> None:
    if job.poll() is not None:
        return
    job.terminate()
    try:
        job.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        job.wait()
