"""Write stored tables as CSV or JSON: `python -m tilepipe.export DIR`. Runs wherever pyarrow runs.

Knows nothing of how points are run; rows are those of the Parquet tables, nothing is reduced.

DIR is a results folder, an experiment's or a point's own, of this or an older schema version.
What was not measured is empty in CSV and null in JSON; integers are written in full. Ends 0, 1 when
some point could not be read (the others are written), 2 when none could, or for a mistyped word.
"""

import argparse
import difflib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from tilepipe.records import Status
from tilepipe.results.columns import allowed_words
from tilepipe.results.files import StoreError, cause_of, write_bytes
from tilepipe.results.reading import Reading, StoredPoint, read_results
from tilepipe.results.schema import BREAKDOWN, SAMPLES, SUMMARY, TIMELINE
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["main", "meanings", "to_csv", "to_json"]

_SCHEMAS = {"summary": SUMMARY, "breakdown": BREAKDOWN, "samples": SAMPLES, "timeline": TIMELINE}
_TOLD = ("unit", "meaning", "window")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command, as the module says."""
    typed = _parser().parse_args(arguments)
    reading = read_results(typed.folder)
    for sentence in (*reading.faults, *reading.notes):
        _complain(sentence)
    if not reading.points:
        return 2
    try:
        if typed.output is not None and typed.output == typed.meanings:
            raise ValueError(f"--meanings {typed.meanings}: is --output too: name another file")
        columns = _columns(_SCHEMAS[typed.table], typed.columns)
        points = _filtered(reading.points, names=typed.name, statuses=typed.status)
        table: pa.Table = getattr(Reading(points=points), typed.table).select(columns)
        form = typed.format or _form_of(typed.output)
        _write(_FORMS[form](table), typed.output, "--output")
        if typed.meanings is not None:
            form = typed.format or _form_of(typed.meanings)
            _write(_FORMS[form](meanings(table.schema)), typed.meanings, "--meanings")
    except ValueError as error:
        _complain(str(error))
        return 2
    return int(bool(reading.faults))


def to_csv(table: pa.Table) -> bytes:
    """A heading and a line a row; words are quoted, so that null and an empty word differ."""
    text = io.BytesIO()
    pyarrow.csv.write_csv(table, text)
    return text.getvalue()


def to_json(table: pa.Table) -> bytes:
    """A list of objects, one a line, whose keys are the columns."""
    lines = [json.dumps(row, allow_nan=False, ensure_ascii=False) for row in table.to_pylist()]
    return ("[" + ",".join(f"\n{line}" for line in lines) + "\n]\n").encode()


_FORMS = {"csv": to_csv, "json": to_json}


def meanings(schema: pa.Schema) -> pa.Table:
    """A row a column of the schema: its type, unit, meaning, timed window and allowed words."""
    rows = [
        {
            "column": column.name,
            "type": str(column.type),
            **{key: column.metadata[key.encode()].decode() for key in _TOLD},
            "allowed": ",".join(allowed_words(column)) or None,
        }
        for column in schema
    ]
    keys = ("column", "type", *_TOLD, "allowed")
    return pa.Table.from_pylist(rows, schema=pa.schema([(key, pa.string()) for key in keys]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilepipe.export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="results folder to read")
    parser.add_argument(
        "--table", choices=tuple(_SCHEMAS), default="summary", help="default: summary"
    )
    parser.add_argument(
        "--format", choices=tuple(_FORMS), help="default: by the file's name, else csv"
    )
    parser.add_argument(
        "--columns",
        metavar="A,B",
        help="these columns in this order (default: all); tilepipe.list columns has them",
    )
    parser.add_argument("--name", metavar="A,B", help="points of these experiments only")
    parser.add_argument("--status", metavar="A,B", help="points that ended so only, as ok")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: stdout")
    parser.add_argument(
        "--meanings",
        metavar="FILE",
        type=Path,
        help="also write what the columns mean: type, unit, meaning, window, allowed words",
    )
    return parser


def _columns(schema: pa.Schema, typed: str | None) -> list[str]:
    if typed is None:
        return list(schema.names)
    chosen = [word.strip() for word in typed.split(",")]
    for column in chosen:
        if column not in schema.names:
            near = difflib.get_close_matches(column, schema.names, n=1)
            step = f"did you mean {near[0]}" if near else "see python -m tilepipe.list columns"
            table = schema.metadata[b"table"].decode()
            raise ValueError(f"--columns {column}: {table} has no such column: {step}")
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"--columns {typed}: names a column twice: name each once")
    return chosen


def _filtered(
    points: Sequence[StoredPoint], *, names: str | None, statuses: str | None
) -> tuple[StoredPoint, ...]:
    kept_names = _words("--name", names, sorted({point.name for point in points}))
    kept_statuses = _words("--status", statuses, list(Status.__members__))
    return tuple(
        point
        for point in points
        if point.name in kept_names and point.outcome.status.name in kept_statuses
    )


def _words(option: str, typed: str | None, allowed: Sequence[str]) -> Sequence[str]:
    """The words of a comma list; all that are allowed where none was typed."""
    if typed is None:
        return allowed
    words = [word.strip() for word in typed.split(",")]
    for word in words:
        if word not in allowed:
            raise ValueError(f"{option} {word}: must be one of {', '.join(allowed)}")
    return words


def _form_of(path: Path | None) -> str:
    return "json" if path is not None and path.suffix == ".json" else "csv"


def _write(content: bytes, path: Path | None, option: str) -> None:
    if path is None or str(path) == "-":
        sys.stdout.write(content.decode())
        sys.stdout.flush()
        return
    try:
        write_bytes(path, content)
    except StoreError as error:
        cause = cause_of(error)
        raise ValueError(f"{option} {path}: {cause}: name a file that can be written") from error


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    leave(heard_out(main))
