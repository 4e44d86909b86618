"""Write files so that an earlier one survives whatever happens.

Knows nothing of what is in them.
"""

import errno
import os
from pathlib import Path

from tilepipe.stopping import half_written

__all__ = [
    "StoreError",
    "cause_of",
    "check_can_enter",
    "check_results_dir",
    "store_error",
    "temporary_for",
    "write_bytes",
]

_PROBE_BYTES = 64 * 1024  # about one point's files, so that a full disk is seen before a run


class StoreError(OSError):
    """A result that could not be kept, in one sentence; `errno` says why."""

    def __str__(self) -> str:
        return str(self.strerror)


def cause_of(error: OSError) -> str:
    """Why the system refused, in its own words."""
    return os.strerror(error.errno) if error.errno else str(error)


def store_error(path: Path, error: OSError) -> StoreError:
    """One sentence with path, cause and next step, for any failed write."""
    cause = cause_of(error)
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    step = "free some space or name another folder" if full else "name a folder that can be written"
    return StoreError(error.errno or errno.EIO, f"{path}: {cause}: {step} with results_dir=")


def temporary_for(path: Path) -> Path:
    """Name of the half-written file, in the same folder so that the rename stays on one disk."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_bytes(path: Path, content: bytes) -> None:
    """Put content at path, all of it or none: what was there before stays until it is safe.

    A device or a pipe is written to and stays what it is; of a link the file it leads to is
    replaced.
    """
    try:
        # By the name that was given: what /dev/stdout leads to may have none of its own.
        if path.exists() and not path.is_file() and not path.is_dir():
            with path.open("wb") as stream:
                stream.write(content)
            return
        place = path.resolve() if path.is_symlink() else path
        temporary = temporary_for(place)
        with half_written(temporary):
            try:
                with temporary.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, place)
            except BaseException:
                _remove(temporary)
                raise
        _sync_folder(place.parent)
    except OSError as error:
        raise store_error(path, error) from error


def check_results_dir(path: Path) -> None:
    """Fail with a sentence, before anything is run, where results could not be kept."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store_error(path, error) from error
    probe = temporary_for(path / "probe")
    with half_written(probe):
        try:
            write_bytes(probe, bytes(_PROBE_BYTES))
        except StoreError as error:
            # Name the folder that was asked for, not the probe.
            raise store_error(path, error) from error
        _remove(probe)


def check_can_enter(folder: Path) -> None:
    """Fail with a sentence where an earlier folder of results is shut."""
    if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise store_error(folder, PermissionError(errno.EACCES, ""))


def _remove(path: Path) -> None:
    """Best effort: what cannot be removed is named by validate."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
