"""What `gemm_peers` times: operands of one shape, our launches on them, and those of the peers.

Imported only where there is a GPU. Knows nothing of stages, files and processes.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilepipe.baselines.products import (
    QUACK_CONFIGS,
    Operands,
    Product,
    has_quack,
    product_of,
    quickest,
)
from tilepipe.experiments.cuda.oracle import poison
from tilepipe.experiments.cuda.products import compare_products
from tilepipe.fabric.loopback import LoopbackHeap
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.gemm.launch import GroupedGemm, alone_specs, upload_tiles
from tilepipe.kernels.gemm.plan import KernelPlan
from tilepipe.measure.clocks import ClockWatch
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.device import CudaStream, DeviceTimer
from tilepipe.schedule.layout import ReceiveLayout

_TRIAL_RUNS = 6
# Shape -> which of QuACK's configurations won there, by trial on an H200.
_QUACK_FILE = Path(__file__).with_name("quack_h200.json")

Launch = Callable[[], Any]


class Shape:
    """Rows of experts side by side in `a`, one B, and outputs by contender."""

    def __init__(self, name: str, counts: list[int], b: torch.Tensor) -> None:
        self.name, self.counts, self._b = name, counts, b
        _, self._n, self._k = b.shape
        self._rows = sum(counts)
        self.flops = 2 * self._rows * self._n * self._k
        self._a = torch.randn(self._rows, self._k, device="cuda").to(torch.bfloat16)
        ends = np.cumsum(counts)
        self._offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        stream = torch.cuda.current_stream()
        self._timer = DeviceTimer(CudaStream(stream))
        self._kept: list[Any] = []  # what launches point at

    # Ours.

    def own(self, plan: KernelPlan, layout: ReceiveLayout, *, limit_ns: int) -> tuple[Launch, str]:
        """A launch of ours, run once on poison; a sentence where what it left is wrong."""
        num_rows = max(layout.extent, 1)
        _, held = layout.held_rows()
        rows = torch.from_numpy(held).cuda()
        a = torch.full((num_rows, self._k), float("nan"), dtype=torch.bfloat16, device="cuda")
        a[rows] = self._a
        d = torch.empty(num_rows, self._n, dtype=torch.bfloat16, device="cuda")
        poison(d)
        heap = LoopbackHeap(
            alone_specs(
                num_tiles=layout.num_tiles,
                num_chunks=plan.num_chunks,
                num_counters=max(layout.num_tiles, len(self.counts)),
                num_rows=num_rows,
            ),
            num_ranks=1,
            device=a.device,
        )
        upload_tiles(heap, 0, layout, plan)
        _preset(heap)
        gemm = GroupedGemm(plan, limit_ns=limit_ns)
        launch = gemm.bind(heap, 0, a=a, b=self._b, d=d)
        self._kept.append((heap, gemm, a, d))
        launch()
        done = torch.cuda.Event()
        done.record()
        heap.wait(done.query, limit_s=limit_ns / 1e9)
        firsts = layout.expert_first_row[:-1].tolist()
        verdict = compare_products(
            d,
            (
                (slice(first, first + count), a[first : first + count], self._b[expert])
                for expert, (first, count) in enumerate(zip(firsts, self.counts, strict=True))
            ),
            contender="own",
            stage="before",
        )
        left = int(heap.tensor(0, Slot.words)[int(Word.gemm_queue)])
        wrong = verdict.detail
        if not wrong and left:
            wrong = f"the queue of tickets ends with {left}, not 0"
        return launch, wrong

    # Peers.

    def peers(self, quack_file: Path) -> dict[str, Callable[[], tuple[Launch | None, str]]]:
        """Name -> makes its launch, or says why there is none."""
        return {
            "torch": partial(self._library, "torch_grouped_mm"),
            "dense": partial(self._library, "cublas_dense"),
            "quack": partial(self._quack, quack_file),
        }

    def _library(self, name: str) -> tuple[Launch | None, str]:
        return product_of(name, self._operands()), ""

    def _quack(self, file: Path) -> tuple[Launch | None, str]:
        """The fastest of a few configurations, remembered by shape in a file."""
        if not has_quack():
            return None, "quack is not installed; install the extra baselines"
        operands = self._operands()
        known = {}
        for path in (_QUACK_FILE, file):
            if path.exists():
                known |= json.loads(path.read_text("utf-8"))
        if self.name not in known:
            products = {
                config: product_of("quack", operands, config=config) for config in QUACK_CONFIGS
            }
            try:
                known[self.name] = quickest(products, self._trial_ns)
            except RuntimeError as error:
                return None, str(error)
            file.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        return product_of("quack", operands, config=known[self.name]), known[self.name]

    def _operands(self) -> Operands:
        return Operands(self._a, self._b, self._offsets)

    def _trial_ns(self, product: Product) -> int:
        """The median of a few runs; the first, which compiles, does not count."""
        found = [self._timer.measure([("stage", product)])["stage"] for _ in range(_TRIAL_RUNS)]
        return int(np.median(found[1:]))

    # Time.

    def timed(
        self, contenders: dict[str, Launch], num_pairs: int
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """Durations of all, interleaved, in ns; and the clocks while they ran."""

        def once(launch: Launch, number: int) -> dict[str, tuple[int, int]]:
            found = self._timer.measure([("stage", launch)])
            return {"stage": (found["start_ns"], found["stage"])}

        uuid = str(torch.cuda.get_device_properties(0).uuid)
        with ClockWatch(uuid) as watch:
            samples = run_interleaved(
                {name: partial(once, launch) for name, launch in contenders.items()},
                num_warmups=3,
                num_iters=num_pairs,
                barrier=lambda: None,
            )
        times: dict[str, list[int]] = {name: [] for name in contenders}
        for sample in samples:
            times[sample.contender].append(sample.duration_ns)
        clocks = asdict(watch.clocks) if watch.clocks is not None else {}
        seen = {"sm_mhz": clocks.get("sm_mhz", ""), "power_w": clocks.get("power_w_max", "")}
        return {name: np.array(values, np.int64) for name, values in times.items()}, seen


def _preset(heap: LoopbackHeap) -> None:
    """All rows are here: more than any launch waits for."""
    heap.tensor(0, Slot.ready).fill_(2**30)
    heap.tensor(0, Slot.row_flag).fill_(2**30)
    heap.tensor(0, Slot.words)[int(Word.epoch)] = 1
