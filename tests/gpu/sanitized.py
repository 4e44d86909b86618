"""Small launches of every kind, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized [RUNS]

A sanitizer slows kernels down a hundredfold, so the waits' limit is a thousand times the usual one.
"""

import sys
from functools import partial

import numpy as np
import torch

from benchmarks import program
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Order
from tilepipe.experiments.cuda.oracle import DeviceOracle, poison
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.fabric.table import Slot
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

TOKENS, EXPERTS, TOPK, HIDDEN = 37, 8, 3, 136
WATCHDOG_S = 20_000.0


def routing(num_ranks: int, seed: int) -> Routing:
    rng = np.random.default_rng(seed)
    ids = [
        np.argsort(rng.random((TOKENS - 5 * rank, EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
        for rank in range(num_ranks)
    ]
    for part in ids:
        part[rng.random(part.shape) < 0.2] = -1
    weights = tuple(rng.random(part.shape).astype(np.float32) for part in ids)
    return Routing(topk_idx=tuple(ids), topk_weights=weights, num_experts=EXPERTS)


def run(num_ranks: int, *, knobs: Knobs, by_device: bool = False, **chosen: object) -> int:
    """Launches of dispatch, combine, push and reduce; returns how many outputs were wrong."""
    settings = PlanSettings(
        num_ranks=num_ranks, num_experts=EXPERTS, num_topk=TOPK, tile_m=16, **chosen
    )
    shape = Shape(
        max_tokens=TOKENS,
        num_tokens=TOKENS * num_ranks,
        dispatch_hidden=HIDDEN,
        home_hidden=HIDDEN,
    )
    group = DeviceGroup(settings, shape, knobs, watchdog_s=WATCHDOG_S, plans_on_device=by_device)
    wrong = 0
    for launch in (1, 2):
        drawn = routing(num_ranks, launch)
        group.set_routing(drawn)
        for rank in group.ranks:
            tokens = torch.arange(len(drawn.topk_idx[rank]), device="cuda")
            fill_rows(group.tensor(rank, Slot.x), launch, rank, tokens)
            poison(group.tensor(rank, Slot.recv_x))
        group.open(exchange=True)
        group.dispatch()
        group.synchronize()
        names = {"contender": "dispatch", "stage": "sanitized"}
        oracles = [DeviceOracle(drawn, rank=rank, device="cuda") for rank in group.ranks]
        for rank, oracle in enumerate(oracles):
            layout, rows = group.plans[rank].layout, group.tensor(rank, Slot.recv_x)
            wrong += not oracle.check_dispatched(launch, rows, layout, **names).passed
            _fill_received(group, rank, launch)
        for work in ("combine", "push"):
            group.open(exchange=False)
            getattr(group, work)()
        group.open(exchange=False, preset=True)
        group.reduce()
        group.synchronize()
        for rank, oracle in enumerate(oracles):
            num_tokens = len(drawn.topk_idx[rank])
            for slot in (Slot.out, Slot.reduced):
                out = group.tensor(rank, slot)[:num_tokens]
                wrong += not oracle.check_combined(launch, out, **names).passed
    return wrong


def _fill_received(group: DeviceGroup, rank: int, launch: int) -> None:
    _, held = group.plans[rank].layout.held_rows()
    rows = torch.from_numpy(held).cuda()
    homes = group.tensor(rank, Slot.row_home)[rows]
    fill_rows(
        group.tensor(rank, Slot.y),
        launch,
        homes >> (TOKEN_BITS + SLOT_BITS),
        (homes >> SLOT_BITS) & ((1 << TOKEN_BITS) - 1),
        slot=homes & ((1 << SLOT_BITS) - 1),
        row_idx=rows,
    )


def main() -> int:
    program.need_gpus()
    few = Knobs(num_ctas=2, num_warps=4, num_loads=3, flag_batch=3)
    paced = Knobs(num_ctas=2, num_warps=4, num_loads=3, pace_gbps=50.0, pace_latency_ns=500)
    bulk = Knobs(num_ctas=2, copy=Copy.tma, num_warps=2, num_stages=3, flag_batch=3)
    runs = [partial(run, 2, knobs=few), partial(run, 1, knobs=few), partial(run, 2, knobs=paced)]
    runs += [partial(run, 2, knobs=bulk)]
    runs += [partial(run, 2, knobs=few, granularity=each) for each in Granularity]
    runs += [partial(run, 2, knobs=few, by_device=True, order=each) for each in Order]
    runs += [partial(run, 4, knobs=few, home_granularity=HomeGranularity.rank)]
    # racecheck slows down far more than the others: one run is then enough.
    chosen = runs[: int(sys.argv[1])] if len(sys.argv) > 1 else runs
    wrong = sum(each() for each in chosen)
    sys.stdout.write(f"{len(chosen)} runs, {wrong} outputs wrong\n")
    return int(wrong > 0)


if __name__ == "__main__":
    program.run(main)
