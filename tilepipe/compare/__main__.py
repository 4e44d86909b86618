"""Compare two results folders: `python -m tilepipe.compare A B`. Runs wherever pyarrow runs.

A and B are results folders, experiments' or points' own. Says first what differs in configuration
and build, then for each point and contender whether B is SAME, FASTER, SLOWER or AMBIGUOUS: where
the 95 % interval of B/A lies, as to the tolerance. Ends 0 when it has compared all, 1 when some
point could not be read, --fail-on found what it names or no pair has times, 2 for folders that
cannot be read or must not be compared, or for a mistyped word.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from tilepipe.compare.comparison import Comparison, compare
from tilepipe.compare.document import document_of
from tilepipe.compare.pairs import Side, side
from tilepipe.compare.show import (
    breakdown_tables,
    facts_table,
    lone_lines,
    side_line,
    verdict_tables,
)
from tilepipe.launch.console import Lines
from tilepipe.results.files import StoreError, cause_of, write_bytes
from tilepipe.results.pointfile import to_json
from tilepipe.results.reading import read_results
from tilepipe.stopping import leave
from tilepipe.streams import heard_out

__all__ = ["main"]

_FAILING = {"slower": ("SLOWER",), "ambiguous": ("SLOWER", "AMBIGUOUS")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command, as the module says."""
    typed = _parser().parse_args(arguments)
    readings = [read_results(folder) for folder in (typed.a, typed.b)]
    faults = [fault for reading in readings for fault in reading.faults]
    for fault in faults:
        _complain(fault)
    if not all(reading.points for reading in readings):
        return 2
    try:
        a, b = (
            side(label, reading.points, build_id=build_id)
            for label, reading, build_id in zip(
                "AB", readings, (typed.build_a, typed.build_b), strict=True
            )
        )
        found = compare(a, b, tolerance=typed.tolerance, unlike=typed.unlike == "allow")
    except ValueError as error:
        _complain(str(error))
        return 2
    notes = dict.fromkeys(note for reading in readings for note in reading.notes)
    found.notes[:0] = notes
    if typed.json is not None:
        document = document_of(found, a, b, tolerance=typed.tolerance, faults=faults)
        if not _write(to_json(document), typed.json):
            return 2
    if typed.json != "-":
        _show(found, a, b, typed)
    return _exit_code(found, faults, typed.fail_on)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tilepipe.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("a", metavar="A", type=Path, help="folder to compare with")
    parser.add_argument("b", metavar="B", type=Path, help="folder to judge")
    parser.add_argument(
        "--tolerance",
        type=_share,
        default=0.01,
        metavar="SHARE",
        help="B within a factor of 1 + SHARE of A is the same (default 0.01)",
    )
    parser.add_argument(
        "--fail-on",
        choices=tuple(_FAILING),
        help="exit 1 for a verdict SLOWER, or SLOWER or AMBIGUOUS; also where B lost a time that "
        "A has, or a file could not be read",
    )
    parser.add_argument(
        "--unlike",
        choices=("refuse", "allow"),
        default="refuse",
        help="devices that differ: refuse (default) or allow; executors are never compared",
    )
    for label in "ab":
        parser.add_argument(
            f"--build-{label}",
            metavar="ID",
            help=f"points of this build_id only, where {label.upper()} holds several",
        )
    parser.add_argument(
        "--json", metavar="FILE", help="everything found, as JSON; - : to stdout, no tables"
    )
    return parser


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1:  # nan is neither
        raise argparse.ArgumentTypeError(f"{text}: must be a share from 0 to below 1, as 0.01")
    return value


def _show(found: Comparison, a: Side, b: Side, typed: argparse.Namespace) -> None:
    screen = Lines()
    screen.say(side_line(a, str(typed.a)))
    screen.say(side_line(b, str(typed.b)))
    screen.say(f"{found.num_pairs} points in both")
    for line in lone_lines(found.lone):
        screen.say(line)
    for note in found.notes:
        screen.say(f"note: {note}")
    screen.say("")
    if found.facts:
        screen.show(facts_table(found.facts))
    else:
        screen.say("build, libraries, machine and clocks are the same")
    for table in (*verdict_tables(found.rows), *breakdown_tables(found.shifts)):
        screen.show(table)
    for each in found.unjudged:
        which = f"{each.name} {each.config_id} repetition {each.repetition}"
        screen.say(f"not judged: {which}: {each.reason}")
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items())
    screen.say(f"{len(found.rows)} comparisons, tolerance {typed.tolerance:.2%}: {counts}")


def _exit_code(found: Comparison, faults: Sequence[str], fail_on: str | None) -> int:
    if not found.rows:
        _complain("no pair of points has times on both sides: nothing was compared")
        return 1
    if fail_on is None:
        return int(bool(faults))
    failed = any(found.counts[verdict] for verdict in _FAILING[fail_on])
    # A time that is gone, or a file that cannot be read, shows nothing to be as fast as before.
    return int(failed or bool(faults) or any(each.is_loss for each in found.unjudged))


def _write(content: bytes, where: str) -> bool:
    if where == "-":
        sys.stdout.write(content.decode())
        return True
    try:
        write_bytes(Path(where), content)
    except StoreError as error:
        cause = cause_of(error)
        _complain(f"--json {where}: {cause}: name a file that can be written")
        return False
    return True


def _complain(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    leave(heard_out(main))
