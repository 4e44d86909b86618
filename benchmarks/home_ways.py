"""GEMM -> combine fused, by who pushes, in which order tiles are taken and how many CTAs reduce.

    python -m benchmarks.home_ways FOLDER [--total-s 120]

Workload, checks and windows as in home_times; all ways of a line at one number of CTAs are
interleaved, and each is compared with the FP32 oracle before and after it is timed.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.home_times import HomeBench, home_config
from benchmarks.overlap_times import COLUMNS, KNOBS, Contender, compared_rows
from benchmarks.program import need_gpus, run
from tilepipe.config.choices import Copy, Push, Roles, Walk
from tilepipe.config.schemas import Config
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.kernels.overlap.home import Reduces
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home

CTAS = (8, 16, 24, 12, 32, 4, 40)
# Who pushes, order of tiles, chunks.
WAYS: dict[str, tuple[Push, Walk, int]] = {
    "ctas_expert_4": (Push.ctas, Walk.expert, 4),
    "epilogue_expert_4": (Push.epilogue, Walk.expert, 4),
    "ctas_chunk_4": (Push.ctas, Walk.chunk, 4),
    "epilogue_chunk_2": (Push.epilogue, Walk.chunk, 2),
    "epilogue_chunk_4": (Push.epilogue, Walk.chunk, 4),
    "epilogue_chunk_7": (Push.epilogue, Walk.chunk, 7),
    "epilogue_chunk_14": (Push.epilogue, Walk.chunk, 14),
}
# What `upload_home` and the plan of a group write, and differs from way to way.
_SLOTS = (
    *(Slot.gemm_tiles, Slot.push_units, Slot.reduce_order),
    *(Slot.token_expected, Slot.rank_expected),
)
_WORDS = (Word.num_gemm_tiles, Word.num_units, Word.max_stored, Word.max_tokens, Word.max_parts)


@dataclass(frozen=True)
class Way:
    """A contender, the group that it belongs to, and what is put back ahead of each launch."""

    contender: Contender
    group: DeviceGroup
    restore: Callable[[], None]


class WaysBench(HomeBench):
    """One layer in memory, for fused launches of any way."""

    watchdog_s = 1.0

    def __init__(self, stack: ExitStack, config: Config | None = None) -> None:
        # Room for the most counters that a way has.
        super().__init__(stack, config or home_config("kernel.walk=chunk", "kernel.num_chunks=14"))

    def group_by(self, knobs: Knobs, walk: Walk, num_chunks: int) -> DeviceGroup:
        own = self.session.group
        settings = replace(own.settings, walk=walk, num_chunks=num_chunks)
        group = DeviceGroup(
            *(settings, own.shape, knobs),
            watchdog_s=self.watchdog_s,
            heap=own.heap,
            device=own.device,
        )
        group.set_routing(self.session.routing)
        return group

    def way(self, group: DeviceGroup, contender: Contender) -> Way:
        """Plan the launches of a group, and remember what they read."""
        group.set_routing(self.session.routing)  # another group may have planned since
        upload_home(group, self.layer, num_gemm_ctas=contender.num_gemm_ctas)
        kept = {slot: group.tensor(self.rank, slot).clone() for slot in _SLOTS}
        words = {word: int(group.tensor(self.rank, Slot.words)[int(word)]) for word in _WORDS}

        def restore() -> None:
            for slot, values in kept.items():
                group.tensor(self.rank, slot).copy_(values)
            block = group.tensor(self.rank, Slot.words)
            for word, value in words.items():
                block[int(word)] = value

        return Way(contender, group, restore)

    def ways(self, num_ctas: int) -> dict[str, Way]:
        knobs = replace(KNOBS[Copy.simt], num_ctas=num_ctas)
        whole = self.layer.num_sms
        plain = self.group_by(knobs, Walk.expert, 4)
        split = whole - num_ctas
        gemm = partial(gemm_home_launch, plain, self.layer, self.a)
        found = {
            "gemm_all": self.way(plain, Contender([gemm(num_gemm_ctas=whole)], whole)),
            "gemm_split": self.way(plain, Contender([gemm(num_gemm_ctas=split)], split)),
        }
        # What sending costs by itself: nobody reduces.
        for walk in Walk:
            group = self.group_by(knobs, walk, 4)
            sent = fused_home_launch(
                group, self.layer, self.a, push=Push.epilogue, reduces=Reduces.none
            )
            found[f"sent_{walk.name}_4"] = self.way(group, Contender([sent], split))
        for name, (push, walk, num_chunks) in WAYS.items():
            sys.stderr.write(f"{num_ctas} {name}\n")
            group = self.group_by(knobs, walk, num_chunks)
            launch = fused_home_launch(group, self.layer, self.a, roles=Roles.switch, push=push)
            found[name] = self.way(group, Contender([launch], split))
        return found

    def line(self, num_ctas: int, num_iters: int) -> list[list[object]]:
        ways = self.ways(num_ctas)
        return self.rows_of(ways, checked=WAYS, num_iters=num_iters)

    def rows_of(
        self, ways: dict[str, Way], *, checked: Iterable[str], num_iters: int
    ) -> list[list[object]]:
        """Compare and time ways of any groups; rows of the table."""
        return compared_rows(
            ways,
            checks={name: partial(self.check_way, ways[name]) for name in checked},
            timed=lambda name: partial(self.time_way, ways[name]),
            num_iters=num_iters,
        )

    def time_way(self, way: Way, number: int) -> dict[str, tuple[int, int]]:
        way.restore()
        (launch,) = way.contender.launches
        opening = partial(way.group.open, exchange=False)
        windows = self.session.timer.measure([("plan", opening), ("stage", launch)])
        way.group.check()
        return {"stage": (windows["start_ns"], windows["stage"])}

    def check_way(self, way: Way) -> str:
        return self.check(way.group, way.contender, Slot.out, prepare=way.restore)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total-s", type=float, default=120.0)
    parser.add_argument("--iters", type=int, default=16)
    parser.add_argument("--ctas", type=int, nargs="*", default=CTAS)
    chosen = parser.parse_args()
    need_gpus()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    with ExitStack() as stack, (chosen.folder / "home_ways.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        bench = WaysBench(stack)
        for num_ctas in chosen.ctas:
            if time.monotonic() - begin > chosen.total_s:
                sys.stdout.write(f"{num_ctas} CTAs: found no time\n")
                continue
            for row in bench.line(num_ctas, chosen.iters):
                line = ["home_ways", num_ctas, *row]
                writer.writerow(line)
                file.flush()
                sys.stdout.write(" ".join(map(str, line)) + "\n")
                sys.stdout.flush()
    torch.cuda.synchronize()
    return 0


if __name__ == "__main__":
    run(main)
