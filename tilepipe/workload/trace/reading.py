"""Find the reader for a file, by its suffix and by what is in it, and read the chosen rows.

Knows nothing of how a format looks inside.
"""

import zipfile
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from pathlib import Path

from tilepipe.config.routings import LOG_LINES
from tilepipe.workload.paths import path_fault
from tilepipe.workload.trace.answers import is_answer, read_answers
from tilepipe.workload.trace.arrays import read_arrays
from tilepipe.workload.trace.jsonl import read_log
from tilepipe.workload.trace.names import COUNTS
from tilepipe.workload.trace.parquet import read_parquet
from tilepipe.workload.trace.queries import is_step, read_query
from tilepipe.workload.trace.recorder import is_counts, read_recorder
from tilepipe.workload.trace.refusals import refusal
from tilepipe.workload.trace.rows import Met, Reader, Selection, Trace, collect
from tilepipe.workload.trace.values import values

__all__ = ["FORMATS", "find_format", "place_of_row", "read_trace"]

# Format in words -> its reader; None: it tells no token apart.
FORMATS: dict[str, Reader | None] = {
    "log, one JSON object a line": read_log,
    "expert selection of a query, JSON": read_query,
    "answers of SGLang or vLLM, JSON": read_answers,
    "NumPy array": read_arrays,
    "NumPy archive": read_arrays,
    "Parquet": read_parquet,
    "SGLang recorder, per token": read_recorder,
    "SGLang recorder, counts": None,
    "counts, JSON": None,
    "counts, CSV": None,
}
_LOG, _QUERY, _ANSWERS, _NPY, _NPZ, _PARQUET, _PT, _PT_COUNTS, _JSON_COUNTS, _CSV = FORMATS
_BY_SUFFIX = {".npy": _NPY, ".npz": _NPZ, ".parquet": _PARQUET, ".pq": _PARQUET, ".csv": _CSV}
_TEXT = (".json", ".jsonl", ".ndjson")
_UTF16 = ("UTF-16", "convert it with iconv -f UTF-16 -t UTF-8")
# First bytes of what readers do not unpack -> what it is, and what the user can do.
_PACKED = {
    b"\x1f\x8b": ("gzip-compressed", "unpack it with gzip -d"),
    b"\x28\xb5\x2f\xfd": ("zstd-compressed", "unpack it with zstd -d"),
    b"BZh": ("bzip2-compressed", "unpack it with bzip2 -d"),
    b"\xfd7zXZ": ("xz-compressed", "unpack it with xz -d"),
    BOM_UTF16_LE: _UTF16,
    BOM_UTF16_BE: _UTF16,
}
_SUFFIXES = (*_TEXT, *_BY_SUFFIX, ".pt")


def read_trace(path: str, selection: Selection) -> Trace:
    """The chosen rows; a ValueError says what to repair, or what to type instead."""
    try:
        return collect(path, _reader(path), selection)
    except OSError as error:  # its disk, or the network's, has given up
        cause = error.strerror or str(error)
        raise refusal(path, f"cannot be read ({cause})", "copy it to another disk") from error


def place_of_row(path: str, selection: Selection, row: int) -> str:
    """Where a row of the trace that `read_trace` gave stands; reads the file again."""
    wanted, met = row + selection.first_token, Met()
    for block in _reader(path)(path, selection, met):
        if wanted - met.skipped < len(block.ids):
            return block.place(wanted - met.skipped)
        wanted -= len(block.ids)
    raise AssertionError(f"{path} has no row {row}")


def _reader(path: str) -> Reader:
    name = find_format(path)
    reader = FORMATS[name]
    if reader is None:
        raise refusal(path, "holds counts, not tokens", "type routing=counts")
    return reader


def find_format(path: str) -> str:
    """Its key in FORMATS; a ValueError where there is no such file or no such format."""
    start = _start(path)
    for mark, (what, next_step) in _PACKED.items():
        if start.startswith(mark):
            raise refusal(path, f"is {what}", f"{next_step}, and type the path of what comes out")
    suffix = Path(path).suffix.lower()
    if suffix in _TEXT:
        return _of_text(path)
    if suffix == ".pt":
        return _PT_COUNTS if is_counts(path) else _PT
    return _BY_SUFFIX.get(suffix) or _by_content(path, suffix, start)


def _start(path: str) -> bytes:
    """The first bytes of a file; refuses what is none, or cannot be read."""
    if fault := path_fault(path, key="routing.path", suffixes=_SUFFIXES):
        raise refusal(path, *fault)
    with open(path, "rb") as file:
        return file.read(64)


def _by_content(path: str, suffix: str, start: bytes) -> str:
    """For a name that says nothing: the first bytes do."""
    if start.startswith(b"PAR1"):
        return _PARQUET
    if start.startswith(b"\x93NUMPY"):
        return _NPY
    if start.startswith(b"PK") and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            is_torch = any(name.endswith("data.pkl") for name in archive.namelist())
        if not is_torch:
            return _NPZ
        return _PT_COUNTS if is_counts(path) else _PT
    if start.removeprefix(BOM_UTF8).lstrip()[:1] in (b"{", b"["):
        return _of_text(path)
    raise refusal(
        path,
        f"unknown suffix {suffix or '(none)'}, and its content is of no known format",
        f"give one of {', '.join(_SUFFIXES)}",
    )


def _of_text(path: str) -> str:
    with open(path, "rb") as file:
        is_array = file.read(64).removeprefix(BOM_UTF8).lstrip()[:1] == b"["
    try:
        first = next((value for _, value in values(path) if not _is_meta(value)), None)
    except ValueError:
        if is_array:
            raise
        return _LOG  # whose reader names the line
    if first is None:
        raise refusal(path, "no token is recorded in it", f"two lines of a log are {LOG_LINES}")
    if is_answer(first):
        return _ANSWERS
    if is_array and not is_step(first):
        raise refusal(
            path,
            "is an array of neither answers nor steps",
            f"write a log as one object a line, as in {LOG_LINES}",
        )
    if is_step(first):
        # Counts of a layer are numbers, tokens of one are lists.
        tokens = is_array or any(row and isinstance(row[0], list) for row in _rows(first))
        return _QUERY if tokens else _JSON_COUNTS
    has_counts = isinstance(first, dict) and any(name in first for name in COUNTS)
    return _JSON_COUNTS if has_counts else _LOG


def _rows(step: dict[str, object]) -> list[list[object]]:
    return [row for row in step.values() if isinstance(row, list)]


def _is_meta(value: object) -> bool:
    return isinstance(value, dict) and value.get("type") == "meta"
