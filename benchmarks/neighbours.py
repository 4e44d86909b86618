"""How far each point of a sweep of communication CTAs lies above the line through its neighbours.

    python -m benchmarks.neighbours FOLDER [--most 1.04]

Reads every point below a results folder; needs no GPU. Points that differ in nothing but
kernel.num_comm_ctas are a sweep; of a fused launch its time without plan counts, else that of
communication. A cliff, such as clusters that find no place, shows as a point far above the line;
the two ends of a sweep have none. Exit code 1: some point lies above `--most`.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.program import run
from tilepipe.records import Status
from tilepipe.report.points import SETTINGS, find_points
from tilepipe.results.accounting import MAIN

__all__ = ["Sweep", "over_line", "sweeps_of"]

MOST = 1.04  # of the line through the neighbours


@dataclass(frozen=True)
class Sweep:
    """Times of one launch by communication CTAs."""

    title: str
    times: dict[int, float]  # CTAs -> time, in any unit


def over_line(times: Mapping[int, float]) -> dict[int, float]:
    """Every count that has neighbours on both sides -> its time over the line through them."""
    counts = sorted(times)
    found = {}
    for before, count, after in zip(counts, counts[1:], counts[2:], strict=False):
        share = (count - before) / (after - before)
        line = times[before] * (1 - share) + times[after] * share
        found[count] = times[count] / line
    return found


def sweeps_of(rows: Iterable[Mapping[str, Any]]) -> list[Sweep]:
    """Sweeps of two points or more, of rows of `report.points`."""
    kept = [row for row in rows if row["status"] == Status.ok.name and row["num_comm_ctas"]]
    main = [row for row in kept if row["contender"] == MAIN.get(row["operation"], row["operation"])]
    columns = [name for name in SETTINGS if name != "num_comm_ctas"]
    sweeps: dict[tuple[Any, ...], dict[int, float]] = {}
    for row in main:
        sweep = sweeps.setdefault(tuple(row[name] for name in columns), {})
        sweep[row["num_comm_ctas"]] = row["work_ns"]
    varying = [i for i in range(len(columns)) if len({settings[i] for settings in sweeps}) > 1]
    named = [columns.index("operation"), *(i for i in varying if columns[i] != "operation")]
    return [
        Sweep(" ".join(f"{columns[i]}={settings[i]}" for i in named), times)
        for settings, times in sweeps.items()
        if len(times) > 1
    ]


def told(sweep: Sweep) -> list[str]:
    """A line for each count of a sweep: CTAs, milliseconds, over the line, over the least."""
    above, least = over_line(sweep.times), min(sweep.times.values())
    return [
        f"{count:5d} {sweep.times[count] / 1e6:9.4f} ms  "
        f"{f'{above[count]:.4f}' if count in above else '   end'}  {sweep.times[count] / least:.4f}"
        for count in sorted(sweep.times)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--most", type=float, default=MOST)
    chosen = parser.parse_args(argv)
    if not chosen.folder.is_dir():
        sys.stderr.write(f"{chosen.folder}: no such folder; name one that results_dir= was\n")
        return 2
    found = sweeps_of(find_points(chosen.folder).points.to_pylist())
    if not found:
        sys.stderr.write(
            f"{chosen.folder}: holds no two points that differ in kernel.num_comm_ctas alone; run "
            "a sweep of it, such as +experiment=dispatch_gemm\n"
        )
        return 2
    high = 0
    for sweep in found:
        sys.stdout.write("\n".join([sweep.title, " CTAs      time   over line  over least"]) + "\n")
        sys.stdout.writelines(f"{line}\n" for line in told(sweep))
        high += sum(ratio > chosen.most for ratio in over_line(sweep.times).values())
    sys.stdout.write(f"{high} of the points lie above {chosen.most:g} x the line\n")
    return int(high > 0)


if __name__ == "__main__":
    run(main)
