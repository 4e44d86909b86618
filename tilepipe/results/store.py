"""Keep and find what points left: `<results_dir>/<name>/<config_id>-<build_id>/`.

Knows nothing of how a point was run or of what its numbers mean.

point.json is written last: a folder without it is a point that never ended. Nothing is overwritten
but summary.parquet, which is made anew from the point folders.
"""

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tilepipe.records import Outcome, Point
from tilepipe.results.check import examine_point, is_set_aside, load_point
from tilepipe.results.files import StoreError, store_error, write_bytes
from tilepipe.results.pointfile import document_of, kept, to_json
from tilepipe.results.tables import breakdown_table, samples_table, summary_table, to_parquet

__all__ = [
    "REPORT_FOLDER",
    "UNDER_WAY",
    "WRAPPED_FOLDER",
    "FolderBusy",
    "claim_folder",
    "clear_cut_short",
    "hold_folder",
    "point_folders",
    "read_outcome",
    "read_points",
    "stored_documents",
    "write_outcome",
    "write_summary",
]

# What a point's folder is called, after its name, while it is being measured.
UNDER_WAY = ".new"

# Below the results folder: output of tools that points were run under, no measurements.
WRAPPED_FOLDER = "wrapped"

# Below a results folder: figures and tables made of its points, no measurements either.
REPORT_FOLDER = "report"


class FolderBusy(StoreError):
    """Another living run holds the point folder."""


@contextmanager
def claim_folder(results_dir: Path, point: Point) -> Iterator[Path]:
    """A fresh, empty folder for the point, `logs/` in it, that no other run gets meanwhile.

    It lies beside the point's place under another name until the block ends well; then it takes
    that place, and what was there becomes `<folder>.<n>` with the first free n from 1. So a run
    that is cut short takes nothing away. Raises FolderBusy while a living run has claimed the
    point, StoreError where the folder cannot be made.
    """
    place = results_dir / point.name / point.folder
    fresh = place.with_name(f"{place.name}{UNDER_WAY}")
    with ExitStack() as held:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            # Looking, clearing and making are one step for other runs: they wait at the parent.
            with _locked(place.parent, wait=True):
                if fresh.exists():
                    with _locked(fresh, wait=False):
                        shutil.rmtree(fresh)  # of a run that was killed
                (fresh / "logs").mkdir(parents=True)
                held.enter_context(_locked(fresh, wait=False))
        except StoreError:
            raise
        except OSError as error:
            raise store_error(fresh, error) from error
        try:
            yield fresh
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        try:
            if place.exists():
                place.rename(_first_free(place))
            fresh.rename(place)
        except OSError as error:
            raise store_error(place, error) from error


def hold_folder(folder: Path) -> AbstractContextManager[None]:
    """Keep other runs off an existing folder; raises FolderBusy while a living run holds it."""
    return _locked(folder, wait=False)


def clear_cut_short(name_dir: Path) -> None:
    """Remove what runs that are gone had under way; living ones hold theirs."""
    for folder in sorted(name_dir.glob(f"*{UNDER_WAY}")):
        with suppress(OSError), _locked(folder, wait=False):
            shutil.rmtree(folder)


@contextmanager
def _locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock of a folder until the block ends or this process dies.

    The lock is on the folder itself: it follows a rename and leaves no file behind.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:
                raise FolderBusy(
                    errno.EBUSY,
                    f"{folder}: another run is measuring this point: "
                    "wait for it or name another folder with results_dir=",
                ) from error
            # Some network file systems lock no folders: there the user keeps runs apart.
            if error.errno not in (errno.ENOLCK, errno.EBADF, errno.ENOTSUP, errno.EINVAL):
                raise
        yield
    finally:
        os.close(descriptor)


def write_outcome(folder: Path, outcome: Outcome, provenance: Mapping[str, Any]) -> None:
    """Store a point in its folder. A point that is not ok loses its times here, if it has any."""
    stored = kept(outcome)
    # All content is made before the first file, its share of the summary too: an outcome that
    # cannot be stored leaves nothing, and cannot spoil the summary of the others.
    to_parquet(summary_table([stored], last_sweep=()))
    contents = {
        "samples.parquet": to_parquet(samples_table(stored)),
        "breakdown.parquet": to_parquet(breakdown_table(stored)),
        "point.json": to_json(document_of(stored, provenance)),
    }
    for name, content in contents.items():
        write_bytes(folder / name, content)


def read_outcome(folder: Path) -> Outcome:
    """The outcome stored in a sound point folder; ValueError names the first fault of another."""
    outcome, faults = load_point(folder)
    if outcome is None or faults:
        raise ValueError(f"{folder}: {faults[0]}: run the point again with resume=none")
    return outcome


def stored_documents(name_dir: Path) -> list[dict[str, Any]]:
    """point.json of every point that ended below an experiment's folder, unread tables and all.

    For a look at what there is; what cannot be read is left out, `validate` names it.
    """
    documents = []
    for folder in point_folders(name_dir):
        try:
            document = json.loads((folder / "point.json").read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            documents.append(document)
    return documents


def point_folders(name_dir: Path) -> list[Path]:
    """Folders of points that ended, by name; those set aside for a newer run are left out."""
    if not name_dir.is_dir():
        return []
    return sorted(
        path.parent
        for path in name_dir.glob("*/point.json")
        if not is_set_aside(path.parent) and path.parent.suffix != UNDER_WAY
    )


def read_points(name_dir: Path) -> list[tuple[Path, Outcome]]:
    """Every sound point below an experiment's folder, of older versions too, by folder name."""
    examined = [(folder, *examine_point(folder)) for folder in point_folders(name_dir)]
    return [
        (folder, stored.outcome)
        for folder, stored, faults in examined
        if stored is not None and not faults
    ]


def write_summary(name_dir: Path, outcomes: Iterable[Outcome]) -> Path:
    """Make summary.parquet anew of every sound point below; `outcomes` are the last sweep's.

    One of those without a sound folder (its disk was full) is shown too, from memory.
    """
    last = {outcome.point.folder: kept(outcome) for outcome in outcomes}
    stored = {folder.name: outcome for folder, outcome in read_points(name_dir)}
    shown = [outcome for _, outcome in sorted({**last, **stored}.items(), key=lambda kv: kv[0])]
    path = name_dir / "summary.parquet"
    try:
        name_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise store_error(path, error) from error
    write_bytes(path, to_parquet(summary_table(shown, last_sweep=last)))
    return path


def _first_free(folder: Path) -> Path:
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    return aside
