"""A process a GPU: the configuration of the group, and times of all ranks brought together.

Knows nothing of what is timed.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.composed import config_from
from tilepipe.config.schemas import Config
from tilepipe.fabric.device_heap import DeviceHeap
from tilepipe.records import Sample

__all__ = ["append_lines", "group_config", "slowest_times"]


def group_config(num_ranks: int, *words: str) -> Config:
    """A point of workload deepseek_v3, a rank on each of so many H200; a lone one is a rank of
    eight."""
    workload = "deepseek_v3" if num_ranks > 1 else "deepseek_v3_ep8_rank"
    return config_from(f"hardware=h200_x{num_ranks}", f"workload={workload}", *words)


def slowest_times(
    folder: Path, heap: DeviceHeap, rank: int, samples: Sequence[Sample]
) -> dict[str, list[int]]:  # by contender, ns, iteration after iteration
    """Time of the slowest rank in each iteration. Called by all ranks; leaves `rankN.csv`, in which
    every sample of the rank stands."""
    with (folder / f"rank{rank}.csv").open("w", encoding="utf-8") as file:
        file.writelines(f"{s.contender},{s.iteration},{s.duration_ns}\n" for s in samples)
    heap.barrier()
    slowest: dict[str, dict[int, int]] = {}
    for other in range(heap.num_ranks):
        for line in (folder / f"rank{other}.csv").read_text().splitlines():
            name, iteration, taken = line.split(",")
            times = slowest.setdefault(name, {})
            times[int(iteration)] = max(times.get(int(iteration), 0), int(taken))
    heap.barrier()
    return {name: [times[i] for i in sorted(times)] for name, times in slowest.items()}


def append_lines(path: Path, lines: Sequence[Mapping[str, object]]) -> None:
    """Add lines to a CSV, under a head where they are its first."""
    fresh = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        if fresh:
            writer.writeheader()
        writer.writerows(lines)
