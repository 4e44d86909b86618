"""GEMM -> combine fused over links, by chunks, CTAs that reduce and the order of tokens.

    python -m torch.distributed.run --nproc-per-node 2 -m benchmarks.home_links FOLDER

One process a GPU, workload deepseek_v3 (on one GPU deepseek_v3_ep8_rank), 4096 tokens a rank,
K 2048, N 7168, rows sent home by the epilogue, roles=switch; further words override keys, as
kernel.tile_n=128. All contenders have run interleaved; every code is compared with the FP32 oracle
before it is timed. FOLDER gets home_links.csv: times of the slowest rank, their ratio to the GEMM
alone, and of fused launches the bound, GEMM on the SMs left and the reduction of the last part, and
its share of the launch. `sequential` is the sum of the parts, each on all SMs; `best_of_both` the
least that any split lets GEMM and pushes take side by side.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.home_ways import Way, WaysBench
from benchmarks.overlap_times import COLUMNS, KNOBS, Contender, row_of
from benchmarks.program import need_gpus, num_started, run
from benchmarks.ranks import group_config, slowest_times
from tilepipe.config.choices import Copy, Push, Roles, Walk
from tilepipe.fabric.table import Slot
from tilepipe.kernels.kept import codes_kept
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.stats import integer_median

# Chunks -> CTAs that only reduce until the others join them.
FUSED = {4: (8, 4, 6, 10, 12, 16), 2: (8, 6, 12), 7: (8,)}
# Chunks and CTAs, with tokens in the order of their numbers.
BY_NUMBER = ((4, 8), (2, 8), (2, 6))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--iters", type=int, default=16)
    chosen = parser.parse_args()
    num_ranks = num_started()
    need_gpus(num_ranks)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(codes_kept(chosen.folder / "codes"))
        bench = LinkedBench(stack, chosen.folder, num_ranks, *chosen.words)
        bench.run(chosen.iters)
    return 0


class LinkedBench(WaysBench):
    """One layer of a rank, its peers mapped."""

    watchdog_s = 5.0  # a rank may load its code later than another

    def __init__(self, stack: ExitStack, folder: Path, num_ranks: int, *words: str) -> None:
        # Room for the most counters that a way has.
        own = ("kernel=gemm_combine", "workload.num_tokens=4096", "kernel.num_chunks=14")
        super().__init__(stack, group_config(num_ranks, *own, *words))
        self.folder = folder
        self.knobs = replace(KNOBS[Copy.simt], num_ctas=8)
        self.plain = self.group_by(self.knobs, Walk.expert, 4)
        self.plain.launcher.prepare("open", "push", "reduce")

    def run(self, num_iters: int) -> None:
        """Check and time everything; rank 0 writes the lines."""
        heap = self.session.group.heap
        self._compile()
        ways = dict(self._parts())
        wrong: dict[str, str] = {}
        for name, way in self._launches():
            ways[name] = way
            code = name.partition("_ctas_")[0]
            if code not in wrong:
                heap.barrier()
                found = self.check_way(way)
                fine = heap.all_agree(not found)
                wrong[code] = "" if fine else found or "wrong on another rank"
        samples = run_interleaved(
            {name: partial(self.time_way, way) for name, way in ways.items()},
            num_warmups=2,
            num_iters=num_iters,
            barrier=heap.barrier,
        )
        times = slowest_times(self.folder, heap, self.rank, samples)
        if self.rank == 0:
            self._write(times, wrong)

    def _compile(self) -> None:
        """Compile all that takes long, each code on one rank; the others find it kept."""
        jobs: list[Callable[[], object]] = [
            *(partial(self._fused, chunks, counts[0]) for chunks, counts in FUSED.items()),
            partial(
                gemm_home_launch, self.plain, self.layer, self.a, num_gemm_ctas=self.layer.num_sms
            ),
        ]
        for job in jobs[self.rank :: self.session.config.launch.num_ranks]:
            job()
        self.session.group.heap.barrier()

    def _parts(self) -> Iterator[tuple[str, Way]]:
        """The GEMM by itself and what follows it where nothing is fused."""
        whole, plain = self.layer.num_sms, self.plain
        counts = sorted({count for counts in FUSED.values() for count in counts})
        gemm = partial(gemm_home_launch, plain, self.layer, self.a)
        for left in (whole, *(whole - count for count in counts)):
            name = "gemm_all" if left == whole else f"gemm_{left}"
            yield name, self.way(plain, Contender([gemm(num_gemm_ctas=left)], left))
        yield "reduce", self.way(plain, Contender([plain.reduce], whole, preset=True))
        for count in (*counts, whole):
            launcher = plain.launcher_on(count)
            launcher.prepare("push")
            push = partial(launcher.launch, "push")
            yield f"push_{count}", self.way(plain, Contender([push], whole))

    def _launches(self) -> Iterator[tuple[str, Way]]:
        """Fused launches, those of one code one after the other."""
        for chunks, counts in FUSED.items():
            for count in counts:
                yield f"chunks_{chunks}_ctas_{count}", self._fused(chunks, count)
        for chunks, count in BY_NUMBER:
            yield (
                f"chunks_{chunks}_by_number_ctas_{count}",
                self._fused(chunks, count, by_number=True),
            )

    def _fused(self, chunks: int, count: int, *, by_number: bool = False) -> Way:
        group = self.group_by(replace(self.knobs, num_ctas=count), Walk.chunk, chunks)
        launch = fused_home_launch(
            *(group, self.layer, self.a), roles=Roles.switch, push=Push.epilogue
        )
        way = self.way(group, Contender([launch], self.layer.num_sms - count))
        return _by_number(way, self.rank) if by_number else way

    def _write(self, times: dict[str, list[int]], wrong: dict[str, str]) -> None:
        """Lines of the table, and what one after the other takes over the best of two at once."""
        medians = {name: _median(found) for name, found in times.items()}
        whole, reduce_ns = self.layer.num_sms, medians["reduce"]
        lines = []
        for name, found in times.items():
            code, _, count = name.partition("_ctas_")
            fault = wrong.get(code, "")
            line = [
                count,
                *row_of(code, None if fault else found, times["gemm_all"], fault),
                "",
                "",
            ]
            if count and not fault:
                parts = int(code.split("_")[1])
                bound = medians[f"gemm_{whole - int(count)}"] + reduce_ns / parts
                line[-2:] = [round(bound / 1e3, 1), round(bound / medians[name], 4)]
            lines.append(line)
        sequential = medians["gemm_all"] + medians[f"push_{whole}"] + reduce_ns
        counts = [int(name[5:]) for name in medians if name.startswith("push_")]
        at_once = min(
            max(medians[f"gemm_{whole - count}"], medians[f"push_{count}"])
            for count in counts
            if count < whole
        )
        told = (("sequential", sequential), ("best_of_both", at_once))
        lines += [["", name, round(value / 1e3, 1), *[""] * 8] for name, value in told]
        with (self.folder / "home_links.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*COLUMNS[1:], "bound_us", "efficiency"))
            writer.writerows(lines)
        sys.stdout.writelines(" ".join(map(str, line)) + "\n" for line in lines)
        sys.stdout.flush()


def _by_number(way: Way, rank: int) -> Way:
    """The same, tokens taken up as they are numbered."""
    order = way.group.tensor(rank, Slot.reduce_order)
    numbers = torch.arange(len(order), dtype=order.dtype, device=order.device)

    def restore() -> None:
        way.restore()
        order.copy_(numbers)

    return replace(way, restore=restore)


def _median(times: Sequence[int]) -> int:
    return int(integer_median(np.array(times, np.int64)))


if __name__ == "__main__":
    run(main)
