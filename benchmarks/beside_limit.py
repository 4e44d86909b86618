"""Dispatch and combine beside a plain CUDA copy of the same rows, in one process, interleaved.

    python -m benchmarks.beside_limit OUT.csv

Needs nvcc and one GPU of 132 SMs or more. Workload deepseek_v3_ep8_rank, 4096 tokens, one rank: its
32 768 rows. `copy` is copy_limit.cu on these very rows: from the same source row to the same target
row, in sending order. Each contender is run on poisoned memory and compared bit for bit before it
is timed, and what the last launch left is compared again. Ratios are medians of pairs with a 95 %
interval; every value below comes from one run. Each backend is held against the copy of its own
kind: SIMT loops against `copy`, bulk copies (`_tma`) against `copy_bulk`.
"""

import argparse
import csv
import ctypes
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.composed import config_from
from benchmarks.program import NotHere, need_gpus, run
from tilepipe.config.choices import Copy, Granularity
from tilepipe.config.schemas import Config
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.session import opened_session
from tilepipe.experiments.setting import Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.launcher import Knobs, Launcher
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.stats import median_interval, paired_ratio
from tilepipe.schedule.packed import SLOT_BITS
from tilepipe.stopping import temporary_folder

# As conf/kernel/ has them.
BACKENDS = {
    Copy.simt: Knobs(num_ctas=1),
    Copy.tma: Knobs(
        num_ctas=1, copy=Copy.tma, num_warps=8, num_stages=4, stage_bytes=7_168, flag_batch=8
    ),
}
CTAS = (4, 8, 12, 16, 24, 36, 48)
NUM_ITERS = 30
BATCHES = (1, 2, 4, 8, 16)
# Number of the launch whose payload the rows carry; the same for all, as the copies know no other.
_PAYLOAD = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--iters", type=int, default=NUM_ITERS)
    chosen = parser.parse_args()
    need_gpus()
    write_as_measured(chosen.out, _measured(build_copies(), chosen.iters))
    return 0


def write_as_measured(out: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Each row in the file and on the screen as soon as it is known."""
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = None
        for row in rows:
            if writer is None:
                writer = csv.DictWriter(file, fieldnames=list(row), lineterminator="\n")
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            sys.stdout.write(" ".join(map(str, row.values())) + "\n")
            sys.stdout.flush()


def _measured(library: ctypes.CDLL, num_iters: int) -> Iterator[dict[str, object]]:
    with Bench(library, "dispatch") as bench:
        yield from bench.beside_copy(num_iters)
    with Bench(library, "combine") as bench:
        yield from bench.beside_copy(num_iters)
        yield from bench.reduction(num_iters)
    yield from _granularity(library, num_iters)


def build_copies() -> ctypes.CDLL:
    """The plain copies of copy_limit.cu, compiled by nvcc; NotHere where there is none."""
    if shutil.which("nvcc") is None:
        raise NotHere("nvcc was not found; put the CUDA toolkit's bin folder on PATH")
    source = Path(__file__).with_name("copy_limit.cu")
    words = ["nvcc", "-std=c++17", "-O3", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
    with temporary_folder("tilepipe-copy-") as folder:
        target = folder / "libcopy_limit.so"
        subprocess.run([*words, "-o", str(target), str(source)], check=True)
        library = ctypes.CDLL(str(target))  # stays mapped when the file is gone
    library.copy_limit_launch.argtypes = [ctypes.c_int] * 2 + [ctypes.c_void_p] * 5
    return library


def config_of(operation: str, *overrides: str) -> Config:
    return config_from(
        f"kernel={operation}",
        "workload=deepseek_v3_ep8_rank",
        "hardware=h200_x1",
        "workload.num_tokens=4096",
        *overrides,
    )


class Bench:
    """One operation's rows, and launches of it at several CTA counts."""

    def __init__(self, library: ctypes.CDLL, operation: str, *overrides: str) -> None:
        self.library, self.operation = library, operation
        self.config = config_of(operation, *overrides)
        hidden = self.config.workload.hidden
        is_dispatch = operation == "dispatch"
        self.work = "dispatch" if is_dispatch else "push"
        memory = Memory(dispatch_hidden=hidden) if is_dispatch else Memory(home_hidden=hidden)
        self._open = ExitStack()
        self.session = self._open.enter_context(opened_session(self.config, memory))
        self.group = self.session.group
        if is_dispatch:
            self.session.fill_rows_to_send(_PAYLOAD)
        else:
            self.session.exchange_homes()
            self.session.fill_received(_PAYLOAD)
        self.num_rows = len(self.session.group.routing.topk_idx[0].reshape(-1))
        self.row_bytes = 2 * hidden
        assert library.copy_limit_rows() == self.num_rows
        assert library.copy_limit_row_bytes() == self.row_bytes
        self._source, self._target, self._from, self._to = self._places()

    def __enter__(self) -> "Bench":
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()
        del self._open, self.session, self.group, self._source, self._target
        torch.cuda.empty_cache()

    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Source and target buffers and the row of each, in sending order."""
        group = self.group
        if self.operation == "dispatch":
            sends = group.tensor(0, Slot.sends)[: self.num_rows]
            buffers = (group.tensor(0, Slot.x), group.tensor(0, Slot.recv_x))
            return (*buffers, sends[:, 0].contiguous(), sends[:, 2].contiguous())
        returns = group.tensor(0, Slot.returns)[: self.num_rows].contiguous()
        homes = group.tensor(0, Slot.row_home)[returns.long()]
        topk = self.config.workload.num_topk
        slot = homes & ((1 << SLOT_BITS) - 1)
        to = ((homes >> SLOT_BITS) * topk + slot).to(torch.int32)
        return group.tensor(0, Slot.y), group.tensor(0, Slot.home_y), returns, to

    def copy(self, num_ctas: int, *, bulk: bool) -> None:
        """The plain copy of the same rows."""
        addresses = [t.data_ptr() for t in (self._source, self._target, self._from, self._to)]
        stream = torch.cuda.current_stream().cuda_stream
        code = self.library.copy_limit_launch(int(bulk), num_ctas, *addresses, stream)
        assert code == 0, f"CUDA error {code}"

    def launcher(self, num_ctas: int, *, copy: Copy = Copy.simt, **knobs: Any) -> Launcher:
        """Launches with a backend's default knobs but for those given, on so many CTAs."""
        group = self.group
        launcher = Launcher(
            group.heap.table,
            group.settings,
            group.shape,
            replace(BACKENDS[copy], num_ctas=num_ctas, **knobs),
            ranks=group.ranks,
            limit_ns=2 * 10**9,
        )
        launcher.prepare(self.work)
        return launcher

    def timed(self, work: Callable[[], None]) -> Callable[[int], dict[str, tuple[int, int]]]:
        """A contender: the gate, then the work, which alone is timed."""
        exchange = self.operation == "dispatch"

        def run(_: int) -> dict[str, tuple[int, int]]:
            opening = partial(self.group.open, exchange=exchange)
            windows = self.session.timer.measure([("plan", opening), ("stage", work)])
            self.group.check()
            return {"stage": (windows["start_ns"], windows["stage"])}

        return run

    def beside_copy(self, num_iters: int) -> Iterator[dict[str, object]]:
        for num_ctas in CTAS:
            simt, tma = (self.launcher(num_ctas, copy=copy) for copy in (Copy.simt, Copy.tma))
            contenders = {
                "copy": partial(self.copy, num_ctas, bulk=False),
                "copy_bulk": partial(self.copy, num_ctas, bulk=True),
                self.work: partial(simt.launch, self.work),
                f"{self.work}_tma": partial(tma.launch, self.work),
            }
            yield from self.rows(contenders, num_iters, num_ctas, self.num_rows * self.row_bytes)

    def reduction(self, num_iters: int) -> list[dict[str, object]]:
        """The reduction of rows that are home, beside a memcpy of as many bytes."""
        topk = self.config.workload.num_topk
        moved = self.num_rows * self.row_bytes * (topk + 1) // topk
        half = torch.empty(moved // 2, dtype=torch.uint8, device="cuda")
        other = torch.empty_like(half)
        self.group.launcher.prepare("reduce")
        contenders = {
            "memcpy": lambda: other.copy_(half),
            "reduce": partial(self.group.launcher.launch, "reduce"),
        }
        return self.rows(contenders, num_iters, None, moved, base="memcpy")

    def _check(self, name: str) -> None:
        """Raise where the moved rows, or the reduced tokens, are not what they must be."""
        group, oracle = self.group, self.session.oracle(0)
        words = {"contender": name, "stage": "beside"}
        if name == "memcpy":
            return
        if name == "reduce":
            verdict = oracle.check_combined(_PAYLOAD, group.tensor(0, Slot.reduced), **words)
            assert verdict.passed, f"{name}: {verdict.detail}"
        elif self.operation == "dispatch":
            layout = group.plans[0].layout
            verdict = oracle.check_dispatched(_PAYLOAD, self._target, layout, **words)
            assert verdict.passed, f"{name}: {verdict.detail}"
        else:
            source, target = self._from.long(), self._to.long()
            same = torch.equal(self._target[target], self._source[source])
            assert same, f"{name}: other rows than those to move"

    def _check_poisoned(self, name: str, work: Callable[[], None]) -> None:
        """Run a contender once on poisoned memory and check what it has left."""
        if name == "reduce":
            poison(self.group.tensor(0, Slot.reduced))
        elif name != "memcpy":
            poison(self._target)
        self.group.open(exchange=self.operation == "dispatch")
        work()
        self.group.synchronize()
        self._check(name)

    def rows(
        self,
        works: dict[str, Callable[[], None]],
        num_iters: int,
        num_ctas: int | None,
        num_bytes: int,
        base: str = "copy",
        granularity: str = "",
    ) -> list[dict[str, object]]:
        for name, work in works.items():
            self._check_poisoned(name, work)
        with self.session.clock_watch() as watch:
            samples = run_interleaved(
                {name: self.timed(work) for name, work in works.items()},
                num_warmups=2,
                num_iters=num_iters,
                barrier=lambda: None,
            )
        self._check(list(works)[-1])
        times = {
            name: np.array([s.duration_ns for s in samples if s.contender == name], np.int64)
            for name in works
        }
        rows = []
        for name, taken in times.items():
            of = "copy_bulk" if name.endswith("_tma") else base
            middle, ratio = median_interval(taken), paired_ratio(times[of], taken)
            contender, _, batch = name.partition(" ")
            rows.append(
                {
                    "operation": self.operation,
                    "contender": contender,
                    "granularity": granularity,
                    "flag_batch": batch,
                    "num_ctas": num_ctas,
                    "median_us": round(middle.value / 1e3, 2),
                    "low_us": round(middle.low / 1e3, 2),
                    "high_us": round(middle.high / 1e3, 2),
                    "gbps": round(num_bytes / middle.value, 1),
                    "of": of,
                    "share": round(ratio.value, 4),
                    "share_low": round(ratio.low, 4),
                    "share_high": round(ratio.high, 4),
                    "num_pairs": ratio.num_pairs,
                    "sm_mhz": watch.clocks.sm_mhz if watch.clocks else None,
                    "throttled": watch.clocks.throttled if watch.clocks else None,
                }
            )
        return rows


def _granularity(library: ctypes.CDLL, num_iters: int) -> Iterator[dict[str, object]]:
    """A flag per row against a counter per tile, by rows whose flags share a fence."""
    for granularity in Granularity:
        with Bench(library, "dispatch", f"kernel.granularity={granularity.name}") as bench:
            for num_ctas in (8, 16, 36):
                works: dict[str, Callable[[], None]] = {
                    "copy": partial(bench.copy, num_ctas, bulk=False)
                }
                for batch in BATCHES:
                    launcher = bench.launcher(num_ctas, flag_batch=batch)
                    works[f"dispatch {batch}"] = partial(launcher.launch, "dispatch")
                yield from bench.rows(
                    works,
                    num_iters,
                    num_ctas,
                    bench.num_rows * bench.row_bytes,
                    granularity=granularity.name,
                )


if __name__ == "__main__":
    run(main)
