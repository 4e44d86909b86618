"""Who communicates in a fused launch: CTAs that are set aside, or a warp beside tiles of every CTA.

    python -m benchmarks.beside_tiles FOLDER [--total-s 120]

Workload deepseek_v3_ep8_rank, 4096 tokens, loopback with one rank, granularity tile: dispatch ->
GEMM with K 7168 and N 4096, on no link and on one of 360 GB/s; GEMM -> combine with K 2048 and N
7168, rows sent by the epilogue. A process a job; FOLDER gets a CSV a job. Contenders of a job have
run interleaved, each compared with the FP32 oracle before and after; ratios are medians of pairs
with a 95 % interval, to the GEMM alone.
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

from benchmarks.home_ways import WaysBench
from benchmarks.overlap_times import (
    COLUMNS,
    KNOBS,
    PACED_GBPS,
    TOGETHER,
    Bench,
    Contender,
    compared_rows,
)
from benchmarks.program import need_gpus, run, run_jobs
from tilepipe.config.choices import Copy, Push, Roles, Walk
from tilepipe.kernels.overlap.group import fused_launch, gemm_launch
from tilepipe.kernels.overlap.home import Reduces
from tilepipe.kernels.overlap.home_group import fused_home_launch, gemm_home_launch

# contender -> copy, communication CTAs (0: a warp beside tiles), whether all begin together
OUT: dict[str, tuple[Copy, int, bool]] = {
    "switch_tma_8": (Copy.tma, 8, True),
    "switch_tma_12": (Copy.tma, 12, True),
    "switch_simt_12": (Copy.simt, 12, True),
    "beside_tma": (Copy.tma, 0, True),
    "beside_simt": (Copy.simt, 0, True),
    "beside_tma_apart": (Copy.tma, 0, False),
}
# contender -> communication CTAs, chunks, what is reduced
HOME: dict[str, tuple[int, int, Reduces]] = {
    "switch_8": (8, 4, Reduces.all),
    "switch_4": (4, 4, Reduces.all),
    "beside": (0, 4, Reduces.all),
    "beside_2_chunks": (0, 2, Reduces.all),
    "beside_7_chunks": (0, 7, Reduces.all),
    "sent_alone": (0, 4, Reduces.none),
}
JOB_LIMIT_S = 60.0


def out_rows(num_iters: int, pace_gbps: float | None) -> list[list[Any]]:
    """Dispatch -> GEMM, one rank."""
    with ExitStack() as stack:
        bench = Bench(stack, cluster_m=1)
        group = bench.group_of(replace(KNOBS[Copy.tma], pace_gbps=pace_gbps))
        whole = bench.num_sms
        found = {
            "gemm_all": Contender(
                [gemm_launch(group, bench.layer, bench.out, num_gemm_ctas=whole)], whole
            )
        }
        for name, (copy, num_ctas, gates) in OUT.items():
            own = bench.group_of(replace(KNOBS[copy], num_ctas=num_ctas, pace_gbps=pace_gbps))
            roles = Roles.switch if num_ctas else Roles.beside
            launch = fused_launch(
                *(own, bench.layer, bench.out), roles=roles, **{**TOGETHER, "gates": gates}
            )
            found[name] = Contender([launch], whole, num_first_ctas=whole - num_ctas)
        return compared_rows(
            found,
            checks={name: partial(bench.check, group, found[name]) for name in OUT},
            timed=lambda name: partial(bench.timed, group, found[name]),
            num_iters=num_iters,
        )


def home_rows(num_iters: int) -> list[list[Any]]:
    """GEMM -> combine, one rank."""
    with ExitStack() as stack:
        bench = WaysBench(stack)
        whole = bench.layer.num_sms
        plain = bench.group_by(replace(KNOBS[Copy.simt], num_ctas=8), Walk.expert, 4)
        gemm = gemm_home_launch(plain, bench.layer, bench.a, num_gemm_ctas=whole)
        ways = {"gemm_all": bench.way(plain, Contender([gemm], whole))}
        for name, (num_ctas, num_chunks, reduces) in HOME.items():
            knobs = replace(KNOBS[Copy.simt], num_ctas=num_ctas)
            group = bench.group_by(knobs, Walk.chunk, num_chunks)
            launch = fused_home_launch(
                *(group, bench.layer, bench.a),
                roles=Roles.switch if num_ctas else Roles.beside,
                push=Push.epilogue,
                reduces=reduces,
            )
            ways[name] = bench.way(group, Contender([launch], whole - num_ctas))
        whole_ways = [name for name, (*_, reduces) in HOME.items() if reduces is Reduces.all]
        return bench.rows_of(ways, checked=whole_ways, num_iters=num_iters)


JOBS: dict[str, Callable[[int], list[list[Any]]]] = {
    "dispatch_gemm": partial(out_rows, pace_gbps=None),
    "gemm_combine": home_rows,
    "dispatch_gemm_paced": partial(out_rows, pace_gbps=PACED_GBPS),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total-s", type=float, default=120.0)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--job", choices=JOBS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    need_gpus()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    if chosen.job:
        with (chosen.folder / f"{chosen.job}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            ctas = {name: how[1] for name, how in OUT.items()}
            ctas |= {name: how[0] for name, how in HOME.items()}
            for row in JOBS[chosen.job](chosen.iters):
                writer.writerow([chosen.job, ctas.get(row[0], ""), *row])
                sys.stdout.write(" ".join(map(str, row)) + "\n")
        return 0
    failed = run_jobs(
        *("benchmarks.beside_tiles", JOBS, chosen.folder),
        more=("--iters", str(chosen.iters)),
        total_s=chosen.total_s,
        limit_s=JOB_LIMIT_S,
        least_s=10,
    )
    return int(failed)


if __name__ == "__main__":
    run(main)
