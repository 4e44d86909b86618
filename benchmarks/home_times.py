"""GEMM -> combine fused, beside its parts and the sequence of them, for one rank of a group.

    python -m benchmarks.home_times FOLDER [--total-s 150]

Workload deepseek_v3_ep8_rank, 4096 tokens, K 2048, N 7168, loopback with one rank. As
overlap_times: a process a job with a limit, every output compared with the FP32 oracle before and
after it is timed, contenders of a line interleaved.
"""

import argparse
import csv
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.beside_limit import config_of
from benchmarks.overlap_times import COLUMNS, KNOBS, Contender, compared_rows
from benchmarks.program import need_gpus, run, run_jobs
from tilepipe.config.choices import Copy, Roles
from tilepipe.config.schemas import Config
from tilepipe.experiments.cuda.layer import layers_of
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.session import opened_session
from tilepipe.experiments.setting import Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.kernels.overlap.group import spare_table
from tilepipe.kernels.overlap.home import Reduces
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch, upload_home

# job -> copy, link rate, CTAs
JOBS: dict[str, tuple[Copy, float | None, tuple[int, ...]]] = {
    "home_simt": (Copy.simt, None, (12, 16, 8, 24)),
    "home_tma": (Copy.tma, None, (12, 16, 8, 24)),
    "home_simt_paced": (Copy.simt, 360.0, (12, 16)),
}
JOB_LIMIT_S = 60.0
# CTAs at which pushes alone, and what follows them, are fast on the free chip.
WHOLE = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--total-s", type=float, default=150.0)
    parser.add_argument("--iters", type=int, default=12)
    chosen = parser.parse_args()
    need_gpus()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.job:
        run_job(chosen.job, chosen.folder, chosen.iters)
        return 0
    failed = run_jobs(
        *("benchmarks.home_times", JOBS, chosen.folder),
        more=("--iters", str(chosen.iters)),
        total_s=chosen.total_s,
        limit_s=JOB_LIMIT_S,
        least_s=1,
    )
    return int(failed)


def run_job(job: str, folder: Path, num_iters: int) -> None:
    """All lines of a job, each written as it is known."""
    copy, rate, ctas = JOBS[job]
    with (folder / f"{job}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        with ExitStack() as stack:
            bench = HomeBench(stack, home_config())
            for num_ctas in ctas:
                knobs = replace(KNOBS[copy], num_ctas=num_ctas, pace_gbps=rate)
                for row in bench.point(knobs, num_iters):
                    line = [job, num_ctas, *row]
                    writer.writerow(line)
                    file.flush()
                    sys.stdout.write(" ".join(map(str, line)) + "\n")
                sys.stdout.flush()


def home_config(*overrides: str) -> Config:
    """The way home on which CTAs push, unless overridden."""
    return config_of("gemm_combine", "kernel.push=ctas", "kernel.walk=expert", *overrides)


class HomeBench:
    """One layer in memory, for launches with any split of the chip, of the first rank that this
    process has."""

    def __init__(self, stack: ExitStack, config: Config) -> None:
        hidden = config.workload.hidden
        self.session = stack.enter_context(
            opened_session(config, Memory(home_hidden=hidden, spare=True))
        )
        self.session.exchange_homes()
        (self.layer,) = layers_of(self.session)
        group = self.session.group
        self.rank = self.session.ranks[0]
        rows = len(group.tensor(self.rank, Slot.y))
        self.a = torch.empty(
            1, rows, self.layer.k, dtype=torch.bfloat16, device=self.session.device
        )
        self.spare = spare_table(group.heap)
        self.payload = 0

    def group_of(self, knobs: Knobs) -> DeviceGroup:
        """A group with other knobs on the same memory and plans."""
        own = self.session.group
        group = DeviceGroup(
            own.settings, own.shape, knobs, watchdog_s=1.0, heap=own.heap, device=own.device
        )
        group.set_routing(self.session.routing)
        return group

    def contenders(self, group: DeviceGroup) -> dict[str, Contender]:
        """What is compared and timed at one split."""
        whole, split = self.layer.num_sms, self.layer.num_sms - group.knobs.num_ctas
        fused = partial(fused_home_launch, group, self.layer, self.a)
        gemm = partial(gemm_home_launch, group, self.layer, self.a)
        gemm_all = gemm(num_gemm_ctas=whole)
        free = self.group_of(replace(group.knobs, num_ctas=WHOLE))
        return {
            "gemm_all": Contender([gemm_all], whole),
            "fused_fixed": Contender([fused()], split),
            "fused_switch": Contender([fused(roles=Roles.switch)], split),
            "sequential": Contender([gemm_all, free.push, group.reduce], whole),
            "gemm_split": Contender([gemm(num_gemm_ctas=split)], split),
            "gemm_publish": Contender([gemm(num_gemm_ctas=split, publish=True)], split),
            "push_split": Contender([group.push], split),
            "push_free": Contender([free.push], split),
            "reduce": Contender([group.reduce], split, preset=True),
            "gemm_contended": Contender([fused(reduces=Reduces.none, sending=self.spare)], split),
        }

    def point(self, knobs: Knobs, num_iters: int) -> list[list[Any]]:
        """Compare and time everything at one split; rows of the table."""
        group = self.group_of(knobs)
        contenders = self.contenders(group)
        for name, one in contenders.items():
            # Who does not end, or faults, is named by the last line.
            sys.stderr.write(f"{knobs.num_ctas} {name}\n")
            sys.stderr.flush()
            upload_home(group, self.layer, num_gemm_ctas=one.num_gemm_ctas)
            group.open(exchange=False, preset=one.preset)
            for launch in one.launches:
                launch()
            group.synchronize()
        checked = {"fused_fixed": Slot.out, "fused_switch": Slot.out, "sequential": Slot.reduced}
        return compared_rows(
            contenders,
            checks={
                name: partial(self.check, group, contenders[name], slot)
                for name, slot in checked.items()
            },
            timed=lambda name: partial(self.timed, group, contenders[name]),
            num_iters=num_iters,
        )

    def timed(
        self, group: DeviceGroup, contender: Contender, number: int
    ) -> dict[str, tuple[int, int]]:
        """One window of the launches, behind the gate."""
        upload_home(group, self.layer, num_gemm_ctas=contender.num_gemm_ctas)

        def all_of_them() -> None:
            for launch in contender.launches:
                launch()

        opening = partial(group.open, exchange=False, preset=contender.preset)
        windows = self.session.timer.measure([("plan", opening), ("stage", all_of_them)])
        group.check()
        return {"stage": (windows["start_ns"], windows["stage"])}

    def check(
        self,
        group: DeviceGroup,
        contender: Contender,
        slot: Slot,
        prepare: Callable[[], None] | None = None,  # None: tell of tiles and units
    ) -> str:
        """Run on poisoned memory with a payload of its own; what is wrong, or nothing."""
        if prepare is None:
            prepare = partial(upload_home, group, self.layer, num_gemm_ctas=contender.num_gemm_ctas)
        prepare()
        self.payload += 1
        rows, source, token, home_slot = self.session.received_homes(self.rank)
        fill_rows(self.a[0], self.payload, source, token, slot=home_slot, row_idx=rows)
        for written in (Slot.y, Slot.home_y, slot):
            poison(group.tensor(self.rank, written))
        group.open(exchange=False)
        for launch in contender.launches:
            launch()
        group.synchronize()
        placement = self.session.placed.placement
        verdict = self.session.oracle(self.rank).check_gemm_combined(
            self.payload,
            group.tensor(self.rank, slot).view(torch.bfloat16),
            experts=placement.expert_of.tolist(),
            num_k=self.layer.k,
            contender="fused",
            stage="before",
        )
        return "" if verdict.passed else verdict.detail


if __name__ == "__main__":
    run(main)
