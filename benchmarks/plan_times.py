"""How long the device takes to make the Plan, by stamps of its kernels, beside NumPy on this host.

    python -m benchmarks.plan_times [OUT.csv]

8 ranks in one launch on one GPU. A time runs from the last rank's entry to the last rank's exit, so
it holds no rank's wait for another to be launched, but the exchange and the gate. Column phases:
medians up to the end of each phase, from the same beginning, over the last rank's leader.
"""

import csv
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.program import need_gpus, run
from tilepipe.config.choices import Granularity, HomeGranularity, Order
from tilepipe.fabric.table import Slot, Stamp
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape
from tilepipe.workload.routing import Routing

NUM_RANKS, NUM_EXPERTS, NUM_TOPK = 8, 256, 8
NUM_WARMUPS, NUM_LAUNCHES = 3, 20
TIMES = ("median_us", "low_us", "high_us", "phases")
COLUMNS = ("order", "granularity", "num_tokens", "kernel", *TIMES)
# Ends of the phases of each kernel that its leaders leave, in order.
PHASES = {
    "plan": (Stamp.plan_counted, Stamp.plan_opened, Stamp.plan_laid_out, Stamp.plan_ordered),
    "plan_returns": (Stamp.returns_opened, Stamp.returns_laid_out),
}
ENDS = {
    "plan": (Stamp.plan_entry, Stamp.plan_exit),
    "plan_returns": (Stamp.returns_entry, Stamp.returns_exit),
}
# Tokens of a rank at which every order and granularity is looked at, then sizes for the default.
CASES = [
    *((order, Granularity.tile, tokens) for order in Order for tokens in (4096, 16_384)),
    *((Order.edf, granularity, 4096) for granularity in (Granularity.token, Granularity.expert)),
    *((Order.edf, Granularity.tile, tokens) for tokens in (1, 16, 128, 1024, 2048, 8192)),
]


def routing_of(num_tokens: int) -> Routing:
    """Uniform choices of every rank."""
    rng = np.random.default_rng(7)
    ids = [
        np.argsort(rng.random((num_tokens, NUM_EXPERTS)), axis=1)[:, :NUM_TOPK].astype(np.int32)
        for _ in range(NUM_RANKS)
    ]
    weights = tuple(np.full(found.shape, 1 / NUM_TOPK, np.float32) for found in ids)
    return Routing(topk_idx=tuple(ids), topk_weights=weights, num_experts=NUM_EXPERTS)


def group_of(order: Order, granularity: Granularity, num_tokens: int) -> DeviceGroup:
    """A group that moves rows without payload: only their way home."""
    settings = PlanSettings(
        num_ranks=NUM_RANKS,
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        granularity=granularity,
        home_granularity=HomeGranularity.token,
        order=order,
        seed=7,
    )
    shape = Shape(max_tokens=num_tokens, num_tokens=NUM_RANKS * num_tokens)
    knobs = Knobs(num_ctas=8, num_warps=8)
    return DeviceGroup(settings, shape, knobs, watchdog_s=5.0, plans_on_device=True)


def elapsed_us(group: DeviceGroup, entry: Stamp, leaving: Stamp) -> float:
    """From the last rank's entry to the last rank's exit of the latest launch."""
    stamps = [group.tensor(rank, Slot.stamps).tolist() for rank in group.ranks]
    return (max(found[leaving] for found in stamps) - max(found[entry] for found in stamps)) / 1e3


def times_of(group: DeviceGroup) -> dict[str, list[tuple[float, ...]]]:
    """Microseconds of both plan kernels, launch by launch: in all, then up to each phase's end."""
    times: dict[str, list[tuple[float, ...]]] = {kernel: [] for kernel in PHASES}
    for number in range(NUM_WARMUPS + NUM_LAUNCHES):
        group.open(exchange=True)
        group.dispatch()
        group.open(exchange=False)
        group.synchronize()
        if number >= NUM_WARMUPS:
            for kernel, (entry, leaving) in ENDS.items():
                ends = (leaving, *PHASES[kernel])
                times[kernel].append(tuple(elapsed_us(group, entry, end) for end in ends))
    return times


def rows() -> Iterator[dict[str, Any]]:
    """One row a case and kernel, NumPy's time for all ranks among them; plans are compared."""
    for order, granularity, num_tokens in CASES:
        group, routing = group_of(order, granularity, num_tokens), routing_of(num_tokens)
        begin = time.perf_counter()
        group.set_routing(routing)
        on_host = (time.perf_counter() - begin) * 1e6
        times = times_of(group)
        if order is not Order.random:  # which differs from launch to launch
            wrong = {rank: group.plan_differences(rank) for rank in group.ranks}
            assert not any(wrong.values()), wrong
        base = {"order": order.name, "granularity": granularity.name, "num_tokens": num_tokens}
        for kernel, found in times.items():
            low, median, high = np.quantile([t[0] for t in found], (0.0, 0.5, 1.0)).round(2)
            phases = " ".join(f"{np.median(t):.1f}" for t in zip(*found, strict=True))
            yield {
                **base,
                "kernel": kernel,
                "median_us": float(median),
                "low_us": float(low),
                "high_us": float(high),
                "phases": phases.split(" ", 1)[1],
            }
        numpy_us = round(on_host, 0)
        yield {**base, "kernel": "numpy", "median_us": numpy_us}
        del group
        torch.cuda.empty_cache()


def main() -> int:
    """Write the table to the file that is named, or to standard output."""
    need_gpus()
    with open(sys.argv[1], "w", newline="") if len(sys.argv) > 1 else sys.stdout as out:
        table = csv.DictWriter(out, COLUMNS)
        table.writeheader()
        for row in rows():
            table.writerow(row)
            out.flush()
    return 0


if __name__ == "__main__":
    run(main)
