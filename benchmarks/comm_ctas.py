"""Both fused launches at every number of communication CTAs, on 1 to 8 ranks, with clusters.

    python -m benchmarks.comm_ctas OUT.csv [--job dispatch_gemm-1-1 ...] [--at-once] [--total-s 150]

A job is operation-ranks-cluster: ranks share the chip, 4096 tokens of deepseek_v3_ep8_rank between
them, 32 experts; cluster is how many M tiles a cluster of CTAs has. A process a job; OUT gets a
line for each count, also for those that cannot be resident, with the sentence by which they are
refused. Roles are switch, or beside where the count is 0, which jobs with clusters leave out.
Counts of a job run interleaved; each is compared with the FP32 oracle on poisoned memory before it
is timed. `over_line` is the time over the line through both neighbours. With `--at-once` dispatch
-> GEMM of four ranks and more, without clusters, is timed once more with CTAs that join the GEMM
when they have sent, not in step with the others.
However it ends (SIGINT, SIGTERM, --total-s), OUT holds what was compared and timed until then.
"""

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.beside_limit import config_of
from benchmarks.neighbours import over_line
from benchmarks.program import EXIT_LATE, job_code, need_gpus, run
from tilepipe.config.choices import Operation, Roles
from tilepipe.experiments.cuda.layer import layers_of
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.session import opened_session
from tilepipe.experiments.setting import Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.kept import codes_kept, default_folder
from tilepipe.kernels.overlap.group import ctas_alone, ctas_beside, fused_launch, upload_layer
from tilepipe.kernels.overlap.home_group import fused_home_launch, upload_home
from tilepipe.kernels.overlap.plan import FEWEST_JOIN
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.stats import median_interval

OPERATIONS = (Operation.dispatch_gemm, Operation.gemm_combine)
GROUPS = ((1, 1), (1, 2), (8, 1), (2, 1), (4, 1), (2, 2), (4, 2), (8, 2))
JOBS = tuple(f"{op.name}-{ranks}-{cluster}" for ranks, cluster in GROUPS for op in OPERATIONS)
CTAS = (0, *range(2, 17), *range(18, 65, 2))
COLUMNS = (
    *("operation", "num_ranks", "cluster_m", "copy", "roles", "num_comm_ctas"),
    *("median_us", "low_us", "high_us", "over_line", "verdict"),
)
AT_ONCE = "switch_at_once"  # as roles are called in the table
_TOKENS = 4096  # of all ranks
_LAUNCH = 1
_NUM_WARMUPS = 2


class Way(NamedTuple):
    """A launch of a job."""

    num_ctas: int  # that communicate, of each rank
    joins: bool = True  # in step, where many ranks share the GPU

    @property
    def roles(self) -> Roles:
        return Roles.switch if self.num_ctas else Roles.beside

    @property
    def name(self) -> str:
        return self.roles.name if self.joins else AT_ONCE


def ways_of(job: str, ctas: Iterable[int], *, at_once: bool) -> Iterator[Way]:
    operation, ranks, cluster = job.split("-")
    twice = operation == Operation.dispatch_gemm.name and int(ranks) >= FEWEST_JOIN
    twice = twice and at_once and cluster == "1"
    for count in ctas:
        if count or cluster == "1":  # no configuration has a warp that sends in clusters
            yield Way(count)
        if count and twice:
            yield Way(count, joins=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--job", choices=JOBS, action="append")
    parser.add_argument("--total-s", type=float, default=150.0)
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--ctas", type=counts_of, default=CTAS, help="counts, such as 2,4,8")
    parser.add_argument("--at-once", action="store_true", help="also without joining in step")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    need_gpus()
    if chosen.inside:
        (job,) = chosen.job
        with codes_kept(default_folder()):
            ways = tuple(ways_of(job, chosen.ctas, at_once=chosen.at_once))
            run_job(job, chosen.out, chosen.iters, ways)
        return 0
    parts = {job: chosen.out.with_suffix(f".{job}.csv") for job in chosen.job or JOBS}
    for part in parts.values():
        part.unlink(missing_ok=True)  # of an earlier run
    try:
        return int(run_jobs(parts, chosen))
    finally:
        lines = [line for part in parts.values() if part.is_file() for line in read(part)]
        write(chosen.out, lines)


def run_jobs(parts: Mapping[str, Path], chosen: argparse.Namespace) -> bool:
    """Each job in a process of its own; whether one failed, or found no time."""
    begin, failed = time.monotonic(), False
    asked = ",".join(str(count) for count in chosen.ctas)
    for job, part in parts.items():
        left = chosen.total_s - (time.monotonic() - begin)
        words = [sys.executable, "-m", "benchmarks.comm_ctas", str(part), "--job", job, "--inside"]
        words += ["--iters", str(chosen.iters), "--ctas", asked]
        words += ["--at-once"] * chosen.at_once
        code = EXIT_LATE
        if left > 0:
            code = job_code(words, errors=part.with_suffix(".stderr"), limit_s=left)
        failed |= code != 0
        sys.stdout.write(f"{job}: ended with {code} after {time.monotonic() - begin:.0f} s\n")
        sys.stdout.flush()
    return failed


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))[1:]


def write(path: Path, lines: list[list[str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(lines)


def counts_of(typed: str) -> tuple[int, ...]:
    return tuple(sorted({int(count) for count in typed.split(",")}))


def run_job(job: str, out: Path, num_iters: int, ways: Iterable[Way]) -> None:
    """Compare and time every launch of a job; its lines are written whatever ends it."""
    name, ranks, cluster = job.split("-")
    verdicts: dict[Way, str] = {}
    taken: dict[Way, list[int]] = {}  # nanoseconds of each, without warm-ups
    head = [name, ranks, cluster]
    try:
        with ExitStack() as stack:
            bench = Bench(stack, Operation[name], num_ranks=int(ranks), cluster_m=int(cluster))
            head += [bench.session.config.kernel.copy.name]
            for way in ways:
                if way.num_ctas <= bench.num_sms:
                    verdicts[way] = bench.prepare(way)
            taken |= {way: [] for way, verdict in verdicts.items() if verdict == "ok"}
            run_interleaved(
                {f"{way.name} {way.num_ctas}": partial(_keep, bench, way, taken) for way in taken},
                num_warmups=_NUM_WARMUPS,
                num_iters=num_iters,
                barrier=lambda: None,
            )
    finally:
        lines = lines_of(head, verdicts, taken)
        write(out, lines)
        sys.stdout.writelines(" ".join(line) + "\n" for line in lines)
        sys.stdout.flush()


def _keep(
    bench: "Bench", way: Way, taken: dict[Way, list[int]], number: int
) -> dict[str, tuple[int, int]]:
    """One launch, its time kept as soon as it is known."""
    windows = bench.timed(way, number)
    if number >= _NUM_WARMUPS * len(taken):
        taken[way].append(windows["stage"][1])
    return windows


def lines_of(
    head: list[str], verdicts: Mapping[Way, str], taken: Mapping[Way, list[int]]
) -> list[list[str]]:
    """Lines of the table, of what was compared and timed so far."""
    found = {
        way: median_interval(np.array(times, np.int64)) for way, times in taken.items() if times
    }
    above: dict[Way, float] = {}
    for joins in (True, False):  # counts of one kind are neighbours
        alike = [way for way in found if way.num_ctas and way.joins is joins]
        ratios = over_line({way.num_ctas: found[way].value for way in alike})
        above |= {Way(count, joins): ratio for count, ratio in ratios.items()}
    lines = []
    for way, verdict in verdicts.items():
        middle = found.get(way)
        times = ["", "", ""]
        if middle is not None:
            times = [f"{ns / 1e3:.1f}" for ns in (middle.value, middle.low, middle.high)]
        ratio = f"{above[way]:.4f}" if way in above else ""
        lines.append([*head, way.name, str(way.num_ctas), *times, ratio, verdict])
    return lines


@dataclass(frozen=True)
class _Launch:
    fused: Callable[[], None]
    num_gemm_ctas: int  # for which the last tiles are cut
    num_first_ctas: int  # that begin with tiles


class Bench:
    """One layer in memory, for launches with any split of the chip."""

    def __init__(
        self, stack: ExitStack, operation: Operation, *, num_ranks: int, cluster_m: int
    ) -> None:
        self.operation = operation
        config = config_of(
            operation.name,
            f"launch.num_ranks={num_ranks}",
            f"workload.num_tokens={_TOKENS // num_ranks}",
            "kernel.num_comm_ctas=2",
        )
        self.homeward = operation is Operation.gemm_combine
        hidden = config.workload.hidden
        # Only a heap with spare buffers has room for units that go home as tiles are stored.
        memory = Memory(dispatch_hidden=hidden)
        if self.homeward:
            memory = Memory(home_hidden=hidden, spare=True)
        self.session = stack.enter_context(opened_session(config, memory))
        group, device = self.session.group, self.session.device
        if self.homeward:
            self.session.exchange_homes()
        (layer,) = layers_of(self.session)
        self.layer = replace(layer, tuning=replace(layer.tuning, cluster_m=cluster_m))
        self.num_sms = layer.num_sms // num_ranks
        rows = len(group.tensor(0, Slot.y if self.homeward else Slot.recv_x))
        columns = self.layer.k if self.homeward else self.layer.n
        # Rows as a layer before has made them, or products.
        self.rows = torch.zeros(num_ranks, rows, columns, dtype=torch.bfloat16, device=device)
        self._fill()
        self._launches: dict[Way, _Launch] = {}

    def _fill(self) -> None:
        if not self.homeward:
            self.session.fill_rows_to_send(_LAUNCH)
            return
        for a, rank in zip(self.rows, self.session.ranks, strict=True):
            rows, source, token, slot = self.session.received_homes(rank)
            fill_rows(a, _LAUNCH, source, token, slot=slot, row_idx=rows)

    def prepare(self, way: Way) -> str:
        """Bind a launch and compare what it leaves; `ok`, or what is wrong or refused."""
        own = self.session.group
        knobs = replace(own.knobs, num_ctas=way.num_ctas)
        group = DeviceGroup(
            own.settings, own.shape, knobs, heap=own.heap, watchdog_s=2.0, device=own.device
        )
        try:
            if self.homeward:
                push = self.session.config.kernel.push
                fused = fused_home_launch(
                    *(group, self.layer, self.rows), roles=way.roles, push=push
                )
                num_gemm_ctas = num_first_ctas = ctas_beside(group, self.layer)
            else:
                fused = fused_launch(
                    *(group, self.layer, self.rows),
                    roles=way.roles,
                    opens=True,
                    gates=True,
                    joins=way.joins,
                )
                num_gemm_ctas = ctas_alone(group, self.layer)
                num_first_ctas = ctas_beside(group, self.layer)
        except ValueError as error:
            return str(error)
        self._launches[way] = _Launch(fused, num_gemm_ctas, num_first_ctas)
        return self._checked(way)

    def _upload(self, way: Way) -> None:
        launch, group = self._launches[way], self.session.group
        if self.homeward:
            upload_home(group, self.layer, num_gemm_ctas=launch.num_gemm_ctas)
        else:
            upload_layer(
                *(group, self.layer),
                num_gemm_ctas=launch.num_gemm_ctas,
                num_first_ctas=launch.num_first_ctas,
            )

    def _checked(self, way: Way) -> str:
        group, homeward = self.session.group, self.homeward
        outputs = (Slot.y, Slot.home_y, Slot.out) if homeward else (Slot.recv_x,)
        for rank in self.session.ranks:
            for slot in outputs:
                poison(group.tensor(rank, slot))
        if not homeward:
            poison(self.rows)
        self._upload(way)
        group.open(exchange=not homeward)
        self._launches[way].fused()
        group.synchronize()
        wrong = [detail for rank in self.session.ranks if (detail := self._differs(rank))]
        return wrong[0] if wrong else "ok"

    def _differs(self, rank: int) -> str:
        """How the output of a rank differs from the oracle's; empty where it does not."""
        session, group = self.session, self.session.group
        named = {"contender": "fused", "stage": "before"}
        placement, oracle = session.placed.placement, session.oracle(rank)
        if self.homeward:
            out = group.tensor(rank, Slot.out)[: len(session.routing.topk_idx[rank])]
            verdict = oracle.check_gemm_combined(
                _LAUNCH,
                out.view(torch.bfloat16),
                experts=placement.expert_of.tolist(),
                num_k=self.layer.k,
                **named,
            )
        else:
            first_rows = group.plans[rank].layout.expert_first_row[:-1].tolist()
            verdict = oracle.check_products(
                _LAUNCH,
                self.rows[rank],
                first_rows,
                experts=placement.experts_on(rank).tolist(),
                num_k=self.layer.k,
                **named,
            )
        return "" if verdict.passed else verdict.detail

    def timed(self, way: Way, number: int) -> dict[str, tuple[int, int]]:
        """One window of a launch, behind the gate."""
        group = self.session.group
        self._upload(way)
        opening = partial(group.open, exchange=not self.homeward)
        windows = self.session.timer.measure(
            [("plan", opening), ("stage", self._launches[way].fused)]
        )
        group.check()
        return {"stage": (windows["start_ns"], windows["stage"])}


if __name__ == "__main__":
    run(main)
