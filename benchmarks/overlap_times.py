"""Dispatch -> GEMM fused, beside its parts and the sequence of them, for one rank of a group.

    python -m benchmarks.overlap_times FOLDER [--total-s 240]

Workload deepseek_v3_ep8_rank, 4096 tokens, K 7168, N 4096, loopback with one rank, granularity
tile. A process a job, in the order of JOBS, each with a limit, so that a launch that hangs costs
its job alone; FOLDER gets a CSV a job, a line as it is known. Every contender that has an output is
compared with the FP32 oracle on poisoned memory before it is timed, and once more afterwards.
Contenders of a line have run interleaved; ratios are medians of pairs with a 95 % interval.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.beside_limit import BACKENDS, config_of
from benchmarks.program import need_gpus, run, run_jobs
from tilepipe.config.choices import Copy, Roles
from tilepipe.experiments.cuda.layer import expert_weights
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.session import opened_session
from tilepipe.experiments.setting import Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.gemm.plan import GemmTuning
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.kernels.overlap.group import (
    Layer,
    fused_launch,
    gemm_launch,
    spare_table,
    upload_layer,
)
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.stats import median_interval, paired_ratio

N = 4096
KNOBS = {
    Copy.tma: BACKENDS[Copy.tma],
    Copy.simt: Knobs(num_ctas=8, copy=Copy.simt, num_warps=12, num_loads=14),
}
CTAS = (8, 12, 6, 16, 24, 4)
BEST_ALONE = 48  # CTAs at which dispatch on the free chip is fast
PACED_GBPS = 360.0


# Ways to give CTAs their roles.
TOGETHER = {"opens": True, "gates": True}
FUSED: dict[str, dict[str, Any]] = {
    "fused_fixed": {},
    "fused_switch": {"roles": Roles.switch},
    "fused_gate": {"gates": True},
    "fused_open": {"opens": True},
    "fused_together": TOGETHER,
    "fused_together_switch": {**TOGETHER, "roles": Roles.switch},
}
# job -> copy, M tiles of a cluster, link rate, CTAs
JOBS: dict[str, tuple[Copy, int, float | None, tuple[int, ...]]] = {
    "tma": (Copy.tma, 1, None, CTAS),
    "simt": (Copy.simt, 1, None, CTAS),
    "tma_cluster": (Copy.tma, 2, None, (8, 12)),
    "tma_paced": (Copy.tma, 1, PACED_GBPS, (8, 10, 12)),
    "simt_paced": (Copy.simt, 1, PACED_GBPS, (8, 10, 12)),
}
JOB_LIMIT_S = 75.0
COLUMNS = (
    *("job", "num_comm_ctas", "contender", "median_us", "low_us", "high_us"),
    *("x_gemm_all", "ratio_low", "ratio_high", "verdict"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--job", choices=JOBS)
    parser.add_argument("--total-s", type=float, default=240.0)
    parser.add_argument("--iters", type=int, default=12)
    chosen = parser.parse_args()
    need_gpus()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.job:
        run_job(chosen.job, chosen.folder, chosen.iters)
        return 0
    failed = run_jobs(
        *("benchmarks.overlap_times", JOBS, chosen.folder),
        more=("--iters", str(chosen.iters)),
        total_s=chosen.total_s,
        limit_s=JOB_LIMIT_S,
        least_s=15,
    )
    return int(failed)


def run_job(job: str, folder: Path, num_iters: int) -> None:
    """All lines of a job, each written as it is known."""
    copy, cluster_m, rate, ctas = JOBS[job]
    with (folder / f"{job}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        with ExitStack() as stack:
            bench = Bench(stack, cluster_m=cluster_m)
            for num_ctas in ctas:
                knobs = replace(KNOBS[copy], num_ctas=num_ctas, pace_gbps=rate)
                for row in bench.point(knobs, num_iters):
                    line = [job, num_ctas, *row]
                    writer.writerow(line)
                    file.flush()
                    sys.stdout.write(" ".join(map(str, line)) + "\n")
                sys.stdout.flush()


@dataclass(frozen=True)
class Contender:
    """Launches that are timed together, and what they find."""

    launches: list[Callable[[], None]]
    num_gemm_ctas: int  # for which the last tiles are cut
    preset: bool = False  # flags are set ahead
    num_first_ctas: int | None = None  # whose first tiles open; None: of the GEMM beside others


def row_of(name: str, found: list[int] | None, base: list[int], wrong: str) -> list[Any]:
    """Times of a contender and their ratio to the GEMM alone; none where it was wrong."""
    if found is None:
        return [name, "", "", "", "", "", "", wrong]
    own = median_interval(np.array(found, np.int64))
    ratio = paired_ratio(np.array(found, np.int64), np.array(base, np.int64))
    times = [round(value / 1e3, 1) for value in (own.value, own.low, own.high)]
    ratios = [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)]
    return [name, *times, *ratios, wrong or "ok"]


def compared_rows(
    contenders: Collection[str],
    *,
    checks: Mapping[str, Callable[[], str]],  # of those that have an output
    timed: Callable[[str], Callable[[int], dict[str, tuple[int, int]]]],
    num_iters: int,
) -> list[list[Any]]:
    """Compare, time interleaved and compare again; a contender that was wrong has no times."""
    wrong = {name: check() for name, check in checks.items()}
    right = [name for name in contenders if not wrong.get(name)]
    samples = run_interleaved(
        {name: timed(name) for name in right},
        num_warmups=2,
        num_iters=num_iters,
        barrier=lambda: None,
    )
    wrong |= {name: check() for name, check in checks.items() if name in right}
    times = {
        name: [sample.duration_ns for sample in samples if sample.contender == name]
        for name in right
    }
    return [
        row_of(name, times.get(name), times["gemm_all"], wrong.get(name, "")) for name in contenders
    ]


class Bench:
    """One layer in memory, for launches with any split of the chip."""

    def __init__(self, stack: ExitStack, *, cluster_m: int) -> None:
        config = config_of("dispatch_gemm")
        self.k = config.workload.hidden
        self.session = stack.enter_context(
            opened_session(config, Memory(dispatch_hidden=self.k, spare=True))
        )
        group, device = self.session.group, self.session.device
        experts = self.session.placed.placement.experts_on(0).tolist()
        weights = expert_weights(experts, N, self.k, device)
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self.layer = Layer(weights, GemmTuning(cluster_m=cluster_m), self.num_sms)
        rows = len(group.tensor(0, Slot.recv_x))
        self.out = torch.empty(1, rows, N, dtype=torch.bfloat16, device=device)
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

    def contenders(self, group: DeviceGroup) -> dict[str, "Contender"]:
        """What is compared and timed at one split."""
        layer, out, spare = self.layer, self.out, self.spare
        fused = partial(fused_launch, group, layer, out)
        split = self.num_sms - group.knobs.num_ctas
        gemm = partial(gemm_launch, group, layer, out)
        gemm_all = gemm(num_gemm_ctas=self.num_sms)
        dispatch_free = self.group_of(replace(group.knobs, num_ctas=BEST_ALONE)).dispatch
        whole = self.num_sms
        return {
            "gemm_all": Contender([gemm_all], whole),
            **{
                name: Contender([fused(**how)], whole if "roles" in how else split)
                for name, how in FUSED.items()
            },
            "sequential": Contender([dispatch_free, gemm_all], whole),
            "gemm_split": Contender([gemm(num_gemm_ctas=split)], split),
            "gemm_flags": Contender([gemm(num_gemm_ctas=split, wait=True)], split, preset=True),
            "pair_without_waits": Contender([fused(wait=False)], split),
            "gemm_contended": Contender([fused(sending=spare)], split, preset=True),
            "dispatch_split": Contender([group.dispatch], split),
            "dispatch_free": Contender([dispatch_free], split),
        }

    def point(self, knobs: Knobs, num_iters: int) -> list[list[Any]]:
        """Compare and time everything at one split; rows of the table."""
        group = self.group_of(knobs)
        contenders = self.contenders(group)
        checked = (*FUSED, "sequential")
        return compared_rows(
            contenders,
            checks={name: partial(self.check, group, contenders[name]) for name in checked},
            timed=lambda name: partial(self.timed, group, contenders[name]),
            num_iters=num_iters,
        )

    def _upload(self, group: DeviceGroup, contender: Contender) -> None:
        upload_layer(
            *(group, self.layer),
            num_gemm_ctas=contender.num_gemm_ctas,
            num_first_ctas=contender.num_first_ctas,
        )

    def _open(self, group: DeviceGroup, preset: bool) -> None:
        group.open(exchange=True, preset=preset)

    def timed(
        self, group: DeviceGroup, contender: Contender, number: int
    ) -> dict[str, tuple[int, int]]:
        """One window of the launches, behind the gate."""
        self._upload(group, contender)

        def all_of_them() -> None:
            for launch in contender.launches:
                launch()

        parts = [("plan", partial(self._open, group, contender.preset)), ("stage", all_of_them)]
        windows = self.session.timer.measure(parts)
        group.check()
        return {"stage": (windows["start_ns"], windows["stage"])}

    def check(self, group: DeviceGroup, contender: Contender) -> str:
        """Run on poisoned memory with a payload of its own; what is wrong, or nothing."""
        self._upload(group, contender)
        self.payload += 1
        self.session.fill_rows_to_send(self.payload)
        poison(group.tensor(0, Slot.recv_x))
        poison(self.out)
        self._open(group, contender.preset)
        for launch in contender.launches:
            launch()
        group.synchronize()
        layout = group.plans[0].layout
        verdict = self.session.oracle(0).check_products(
            self.payload,
            self.out[0],
            [int(first) for first in layout.expert_first_row[:-1]],
            experts=self.session.placed.placement.experts_on(0).tolist(),
            num_k=self.k,
            contender="fused",
            stage="before",
        )
        return "" if verdict.passed else verdict.detail


if __name__ == "__main__":
    run(main)
