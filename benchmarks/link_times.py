"""Rows between GPUs: what decides their rate, by our kernels, by NCCL and by copy engines.

    python -m torch.distributed.run --nproc-per-node 4 -m benchmarks.link_times FOLDER

One process a GPU, all GPUs sending and receiving at once; rows of 14 336 bytes, workload
deepseek_v3. Contenders of a block run interleaved on the same rows; blocks follow each other, the
most telling ones first, until the time is used up. What our kernels move is compared bit for bit in
each block before it is timed. FOLDER gets, as a block ends,

    link_times.csv     GB/s of rows that cross a link, of one GPU and direction, over the time of
                       the slowest rank
    link_samples.csv   that time, iteration by iteration
    link_counts.csv    by rank: clock, power, what held it back, and what the links count themselves

Blocks differ in who sends to whom: `uniform` to all, itself included; `remote` to all others;
`pairs` to one other rank, which sends back; `ring` to the next rank. `phases_K`: rank after rank in
K rounds, rows that stay spread over all of them, so that each rank hears about one other at a time.
`span_K`: rows lie K times as far apart where they arrive, so as many bytes reach over K times the
memory; `copy_engines_again` copies over a fourth of the memory four times.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from benchmarks.beside_limit import BACKENDS
from benchmarks.link_counters import read_links
from benchmarks.program import need_gpus, num_started, run
from benchmarks.ranks import append_lines, group_config, slowest_times
from tilepipe.baselines.collective import Collective, joined
from tilepipe.config.choices import Copy, Order
from tilepipe.config.schemas import Config
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.cuda.session import CudaSession, opened_session
from tilepipe.experiments.setting import Memory
from tilepipe.fabric.table import Slot
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.kept import codes_kept
from tilepipe.kernels.launcher import Knobs, Launcher
from tilepipe.measure.clocks import ClockWatch
from tilepipe.measure.contenders import run_interleaved
from tilepipe.measure.stats import median_interval
from tilepipe.records import Clocks, Sample
from tilepipe.schedule.packed import SLOT_BITS
from tilepipe.workload.routing import Routing

MOST_TOKENS = 16_384
WATCHDOG_S = 5.0
SIMT, TMA = BACKENDS[Copy.simt], BACKENDS[Copy.tma]


@dataclass(frozen=True, kw_only=True)
class Block:
    """Launches on the same rows."""

    pattern: str
    num_tokens: int  # of a rank
    knobs: dict[str, Knobs]  # by contender
    order: Order = Order.edf
    phases: int = 0  # rounds in which ranks are served one after the other; 0: as the order has it
    others: bool = False  # NCCL and copy engines beside
    span: int = 1  # dispatch: rows where they arrive lie so many rows apart
    work: str = "dispatch"

    @property
    def label(self) -> str:
        words = [self.work, self.pattern, self.order.name]
        words += [f"phases_{self.phases}"] * (self.phases > 0) + [f"span_{self.span}"] * (
            self.span > 1
        )
        return "_".join(words)


def at_ctas(prefix: str, knobs: Knobs, *counts: int) -> dict[str, Knobs]:
    return {f"{prefix}_{count}": replace(knobs, num_ctas=count) for count in counts}


_MANY = at_ctas("simt", SIMT, 10, 16, 24, 36) | at_ctas("tma", TMA, 10, 16, 24, 36)
_FEW = at_ctas("simt", SIMT, 24, 36) | at_ctas("tma", TMA, 24)
_FAIR = {
    name: replace(knobs, flag_batch=batch)
    for count in (10, 12, 16)
    for copy, plain, batches in (("simt", SIMT, (4, 8, 16)), ("tma", TMA, (8, 16)))
    for batch in batches
    for name, knobs in at_ctas(f"{copy}_batch_{batch}", plain, count).items()
}
_FENCES = {
    f"simt_24_batch_{batch}": replace(SIMT, num_ctas=24, flag_batch=batch)
    for batch in (1, 2, 4, 8, 16)
}
_DEPTHS = {
    "simt_24_8x14": replace(SIMT, num_ctas=24, num_warps=8),
    "simt_24_32x7": replace(SIMT, num_ctas=24, num_warps=32, num_loads=7),
    "simt_64": replace(SIMT, num_ctas=64),
}
BLOCKS = (
    Block(pattern="remote", num_tokens=4096, knobs=_FAIR, others=True),
    Block(pattern="remote", num_tokens=4096, knobs=_FAIR, work="push"),
    Block(pattern="uniform", num_tokens=4096, knobs=_MANY, others=True),
    Block(pattern="uniform", num_tokens=16_384, knobs=_FEW, others=True),
    Block(pattern="uniform", num_tokens=4096, knobs=_FEW, span=4),
    Block(pattern="uniform", num_tokens=4096, knobs=_FENCES | _DEPTHS),
    Block(pattern="uniform", num_tokens=4096, knobs=_FENCES, work="push"),
    Block(pattern="uniform", num_tokens=8192, knobs=_FEW, others=True),
    Block(pattern="uniform", num_tokens=2048, knobs=_FEW, others=True),
    Block(pattern="uniform", num_tokens=16_384, knobs=_MANY, work="push"),
    Block(pattern="uniform", num_tokens=4096, knobs=_MANY, work="push"),
    Block(pattern="pairs", num_tokens=4096, knobs=_FEW, others=True),
    *(Block(pattern="uniform", num_tokens=4096, knobs=_FEW, phases=count) for count in (1, 16)),
    Block(pattern="ring", num_tokens=4096, knobs=_FEW),
    *(
        Block(pattern="uniform", num_tokens=4096, knobs=_FEW, order=order)
        for order in (Order.token, Order.random, Order.edf_list)
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--total-s", type=float, default=60.0)
    parser.add_argument("--iters", type=int, default=15)
    parser.add_argument("--only", default="", help="a pattern: of these blocks, label_tokens")
    chosen = parser.parse_args()
    num_ranks = num_started()
    need_gpus(num_ranks)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    # The point whose memory holds every block.
    words = ("kernel=dispatch", f"workload.num_tokens={MOST_TOKENS}")
    config = group_config(num_ranks, *words)
    codes = codes_kept(chosen.folder / "codes")
    with codes, Links(config, chosen.folder, chosen.iters) as links:
        for block in BLOCKS:
            if not re.search(chosen.only, f"{block.label}_{block.num_tokens}"):
                continue
            early = time.monotonic() - begin < chosen.total_s
            if not links.session.group.heap.all_agree(early):
                break
            links.run(block)
    return 0


def routing_of(block: Block, *, num_ranks: int, num_experts: int, num_topk: int) -> Routing:
    """Distinct experts of each token, of the ranks that the pattern allows."""
    rng, local = np.random.default_rng(7), num_experts // num_ranks
    topk_idx = []
    for rank in range(num_ranks):
        keys = rng.random((block.num_tokens, num_experts), dtype=np.float32)
        peers = {
            "uniform": range(num_ranks),
            "remote": [peer for peer in range(num_ranks) if peer != rank],
            "pairs": [rank ^ 1],
            "ring": [(rank + 1) % num_ranks],
        }[block.pattern]
        barred = [expert for expert in range(num_experts) if expert // local not in peers]
        keys[:, barred] = 2.0
        topk_idx.append(np.argpartition(keys, num_topk, axis=1)[:, :num_topk].astype(np.int32))
    weights = tuple(np.full(ids.shape, 1 / num_topk, np.float32) for ids in topk_idx)
    return Routing(topk_idx=tuple(topk_idx), topk_weights=weights, num_experts=num_experts)


class Links:
    """Memory of one rank, its peers mapped, for blocks one after the other."""

    def __init__(self, config: Config, folder: Path, num_iters: int) -> None:
        self.config, self.folder, self.num_iters = config, folder, num_iters
        self._open = ExitStack()
        hidden = config.workload.hidden
        memory = Memory(dispatch_hidden=hidden, home_hidden=hidden)
        self.session: CudaSession = self._open.enter_context(opened_session(config, memory))
        (self.rank,) = self.session.ranks
        self.num_ranks = config.launch.num_ranks
        store, _, _ = next(rendezvous("env://"))
        self.collective: Collective = self._open.enter_context(
            joined(
                PrefixStore("links", store),
                backend="nccl",
                rank=self.rank,
                num_ranks=self.num_ranks,
                limit_s=60.0,
                give_up=lambda: None,
                device=self.session.device,
            )
        )
        self._uuid = str(torch.cuda.get_device_properties(self.session.device).uuid)
        self._of_peers: dict[int, torch.Tensor] = {}
        self._sides = [torch.cuda.Stream() for _ in range(self.num_ranks - 1)]

    def __enter__(self) -> "Links":
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def run(self, block: Block) -> None:
        """Check and time all contenders of a block; rank 0 writes its lines."""
        workload, own = self.config.workload, self.session.group
        routing = routing_of(
            block,
            num_ranks=self.num_ranks,
            num_experts=workload.num_experts,
            num_topk=workload.num_topk,
        )
        settings = replace(own.settings, order=block.order)
        group = DeviceGroup(
            *(settings, own.shape, SIMT), watchdog_s=WATCHDOG_S, heap=own.heap, device=own.device
        )
        group.set_routing(routing)
        if block.phases:
            self._serve_in_phases(group, block.phases)
        if block.span > 1:
            self._spread(group, block.span)
        tokens = torch.arange(block.num_tokens, device=own.device)
        fill_rows(group.tensor(self.rank, Slot.x), 1, self.rank, tokens)
        bodies = self._bodies(block, group, routing)
        before, watch = read_links(self._uuid), ClockWatch(self._uuid)
        with watch:
            samples = run_interleaved(
                {name: partial(self._time, parts) for name, parts in bodies.items()},
                num_warmups=2,
                num_iters=self.num_iters,
                barrier=own.heap.barrier,
            )
            group.check()
        counted = read_links(self._uuid).since(before)
        self._count(block, counted, watch.clocks)
        self._write(block, samples, routing)

    def _serve_in_phases(self, group: DeviceGroup, num_rounds: int) -> None:
        """Put the sends of this rank into another order, in place."""
        sends = group.tensor(self.rank, Slot.sends)[: group.plans[self.rank].num_sent]
        peer = (sends[:, 1] >> SLOT_BITS).cpu().numpy()
        due = np.zeros(len(peer))
        for turn in range(self.num_ranks):
            own = np.flatnonzero(peer == (self.rank + 1 + turn) % self.num_ranks)
            due[own] = np.arange(len(own)) * num_rounds / max(len(own), 1)
            if turn < self.num_ranks - 1:
                whole = np.floor(due[own])
                due[own] = whole + (turn + due[own] - whole) / (self.num_ranks - 1)
        order = torch.from_numpy(np.argsort(due, kind="stable")).to(sends.device)
        sends.copy_(sends[order])

    def _spread(self, group: DeviceGroup, apart: int) -> None:
        """Let rows of this rank arrive `apart` rows from each other, in place."""
        extent = max(plan.layout.extent for plan in group.plans)
        assert extent * apart <= len(group.tensor(self.rank, Slot.recv_x)), "no room for the span"
        group.tensor(self.rank, Slot.sends)[:, 2] *= apart

    def _bodies(
        self, block: Block, group: DeviceGroup, routing: Routing
    ) -> dict[str, list[tuple[str, Callable[[], None]]]]:
        """What each contender launches; ours have been compared with the oracle."""
        exchange = block.work == "dispatch"
        bodies: dict[str, list[tuple[str, Callable[[], None]]]] = {}
        opening = partial(group.open, exchange=exchange)
        oracle = DeviceOracle(routing, rank=self.rank, device=group.device)
        for name, knobs in block.knobs.items():
            launcher = self._launcher(group, knobs)
            launcher.prepare("dispatch", block.work)
            self._check(group, launcher, oracle, block.span)
            bodies[name] = [("plan", opening), ("stage", partial(launcher.launch, block.work))]
        if block.others:
            size = int((routing.topk_idx[self.rank] >= 0).sum()), self.config.workload.hidden
            rows, out = (
                torch.zeros(size, dtype=torch.bfloat16, device=group.device) for _ in range(2)
            )
            if block.pattern == "uniform":
                bodies["nccl"] = [("stage", partial(self.collective.exchange, out, rows))]
            peers = [(self.rank + turn) % self.num_ranks for turn in range(1, self.num_ranks)]
            if block.pattern == "pairs":
                peers = [self.rank ^ 1]
            share = size[0] // (self.num_ranks if block.pattern == "uniform" else len(peers))
            bodies["copy_engines"] = [("stage", partial(self._copy, peers, rows, share))]
            again = partial(self._copy, peers, rows, share // 4, times=4)
            bodies["copy_engines_again"] = [("stage", again)]
        return bodies

    def _launcher(self, group: DeviceGroup, knobs: Knobs) -> Launcher:
        return Launcher(
            *(group.heap.table, group.settings, group.shape, knobs),
            ranks=group.ranks,
            limit_ns=int(WATCHDOG_S * 1e9),
        )

    def _check(
        self, group: DeviceGroup, launcher: Launcher, oracle: DeviceOracle, span: int
    ) -> None:
        """Rows of one launch, bit for bit."""
        poison(group.tensor(self.rank, Slot.recv_x))
        group.heap.barrier()
        group.open(exchange=True)
        launcher.launch("dispatch")
        group.synchronize()
        verdict = oracle.check_dispatched(
            *(1, group.tensor(self.rank, Slot.recv_x)[::span], group.plans[self.rank].layout),
            contender="dispatch",
            stage="before",
        )
        assert verdict.passed, verdict.detail

    def _copy(self, peers: list[int], rows: torch.Tensor, share: int, times: int = 1) -> None:
        """As many bytes to each peer, by copy engines, a stream each; the same ones some times."""
        begun = torch.cuda.Event()
        begun.record()
        size = share * rows.shape[1] * rows.element_size()
        for side, peer in zip(self._sides, peers, strict=False):
            # Rows that lie there are written anew before anybody looks at them.
            theirs = self._peer_memory(peer)[: self.num_ranks * size]
            place = self.rank * size
            side.wait_event(begun)
            with torch.cuda.stream(side):
                for _ in range(times):
                    theirs[place : place + size].copy_(
                        rows[:share].view(torch.uint8).flatten(), non_blocking=True
                    )
            torch.cuda.current_stream().wait_stream(side)

    def _peer_memory(self, peer: int) -> torch.Tensor:  # uint8
        """All that a peer has in symmetric memory, as this process may store there."""
        heap: Any = self.session.group.heap
        if peer not in self._of_peers:
            theirs = heap._library.get_peer_tensor(heap._memory, peer)
            self._of_peers[peer] = theirs.view(torch.uint8).flatten()
        return self._of_peers[peer]

    def _time(self, parts: list[Any], number: int) -> dict[str, tuple[int, int]]:
        windows = self.session.timer.measure(parts)
        return {"stage": (windows["start_ns"], windows["stage"])}

    def _count(self, block: Block, counted: dict[str, int | None], clocks: Clocks | None) -> None:
        """Add a line of this rank, of all that a block has run."""
        told = {
            "sm_mhz_min": clocks and clocks.sm_mhz_min,
            "sm_mhz_max": clocks and clocks.sm_mhz_max,
            "power_w": clocks and clocks.power_w_max,
            "reasons": clocks and " ".join(clocks.reasons),
        }
        line = {"block": block.label, "num_tokens": block.num_tokens, "rank": self.rank}
        heap = self.session.group.heap
        for turn in range(self.num_ranks):
            if turn == self.rank:
                append_lines(self.folder / "link_counts.csv", [{**line, **told, **counted}])
            heap.barrier()

    def _write(self, block: Block, samples: tuple[Sample, ...], routing: Routing) -> None:
        """Times of the slowest rank, once every rank has told its own."""
        slowest = slowest_times(self.folder, self.session.group.heap, self.rank, samples)
        if self.rank == 0:
            self._summarize(block, slowest, routing)

    def _summarize(self, block: Block, slowest: dict[str, list[int]], routing: Routing) -> None:
        local = self.config.workload.num_experts // self.num_ranks
        row_bytes = 2 * self.config.workload.hidden
        crossing = sum(
            int((ids // local != rank).sum()) for rank, ids in enumerate(routing.topk_idx)
        )
        own = {"block": block.label, "num_tokens": block.num_tokens}
        lines = []
        for name, times in slowest.items():
            found = median_interval(np.array(times, np.int64))
            line = {
                **own,
                "contender": name,
                "wire_gbps": f"{crossing * row_bytes / self.num_ranks / found.value:.1f}",
                "median_us": f"{found.value / 1e3:.1f}",
                "low_us": f"{found.low / 1e3:.1f}",
                "high_us": f"{found.high / 1e3:.1f}",
            }
            lines.append(line)
            sys.stdout.write(" ".join(map(str, line.values())) + "\n")
        append_lines(self.folder / "link_times.csv", lines)
        samples = [
            {**own, "contender": name, "iteration": iteration, "us": f"{taken / 1e3:.1f}"}
            for name, times in slowest.items()
            for iteration, taken in enumerate(times)
        ]
        append_lines(self.folder / "link_samples.csv", samples)
        sys.stdout.flush()


if __name__ == "__main__":
    run(main)
