"""What every operation sets up on the cuda executor: the ranks of this process, which are all of a
group or, where each has a GPU, one.

Knows nothing of any one operation, of files and tables.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from tilepipe.config.choices import L2, Planner, Regime
from tilepipe.config.schemas import Config, FusedKernel, GroupedGemmKernel
from tilepipe.experiments.comm_ctas import asks_for_comm_ctas, with_comm_ctas
from tilepipe.experiments.cuda.heap import open_heap, watchdog_s
from tilepipe.experiments.cuda.oracle import DeviceOracle
from tilepipe.experiments.cuda.payload import fill_rows
from tilepipe.experiments.setting import (
    Components,
    Memory,
    counts_of,
    placed_routing,
    plan_settings,
    shape_of,
)
from tilepipe.fabric.table import Slot
from tilepipe.kernels.buffers import buffer_specs
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import Knobs
from tilepipe.measure.clocks import ClockWatch
from tilepipe.measure.device import CudaStream, DeviceTimer, L2Flush, Part
from tilepipe.records import Verdict
from tilepipe.schedule.layout import count_rows
from tilepipe.schedule.packed import SLOT_BITS, TOKEN_BITS
from tilepipe.workload.placement import Placed

__all__ = ["CudaSession", "knobs_of", "opened_session"]

# Launches of a chain: many beside its two ends, few enough for one queue of the device.
_CHAIN_LENGTH = 16


def knobs_of(config: Config) -> Knobs:
    """How a configuration, which `check_config` has let pass, launches communication kernels."""
    kernel, launch = config.kernel, config.launch
    if isinstance(kernel, GroupedGemmKernel):
        return Knobs(num_ctas=1)  # nothing travels; gates alone are launched
    assert isinstance(kernel.num_comm_ctas, int), "auto is resolved before"
    typed: dict[str, Any] = {
        "copy": kernel.copy,
        "num_warps": kernel.num_comm_warps,
        "num_loads": kernel.num_loads,
        "num_stages": kernel.num_stages,
        "stage_bytes": kernel.stage_bytes,
        "flag_batch": kernel.flag_batch,
    }
    return Knobs(
        num_ctas=kernel.num_comm_ctas,
        pace_gbps=launch.pace_gbps,
        pace_latency_ns=launch.pace_latency_ns,
        **{name: value for name, value in typed.items() if value is not None},
    )


def plans_on_device(config: Config) -> bool:
    """Whether a kernel makes the Plan of every launch."""
    if isinstance(config.kernel, GroupedGemmKernel):
        return False
    return config.kernel.planner is Planner.device


@contextmanager
def opened_session(config: Config, memory: Memory) -> Iterator["CudaSession"]:
    """Draw and place the routing, reserve memory, and give it back, whatever happens between.

    Raises what `draw`, `place`, `open_heap` and `DeviceGroup` raise.
    """
    placed = placed_routing(config)
    settings, shape = plan_settings(config, placed), shape_of(config, placed.physical, memory)
    with open_heap(config, buffer_specs(settings, shape)) as heap:
        if asks_for_comm_ctas(config):
            properties = torch.cuda.get_device_properties(heap.device)
            config = with_comm_ctas(config, placed, num_sms=properties.multi_processor_count)
        group = DeviceGroup(
            settings,
            shape,
            knobs_of(config),
            heap=heap,
            watchdog_s=watchdog_s(config),
            plans_on_device=plans_on_device(config),
        )
        yield CudaSession(config, placed, group)


class CudaSession:
    """Routing, oracle and timer of a group, for the life of a point."""

    def __init__(self, config: Config, placed: Placed, group: DeviceGroup) -> None:
        """Plan all launches to come; raises what `set_routing` raises."""
        self.config, self.placed, self.group = config, placed, group
        self.routing = placed.physical
        self.device = group.device
        group.set_routing(self.routing)
        self.ranks: Sequence[int] = group.ranks
        self._oracles: dict[int, DeviceOracle] = {}
        stream = torch.cuda.current_stream()
        flush = L2Flush(stream) if config.measure.l2 is L2.cold else None
        self.timer = DeviceTimer(
            CudaStream(stream),
            flush=flush,
            meet=None if group.heap.is_whole else group.meet,
            agree=group.heap.all_agree,
        )
        if not group.heap.is_whole:
            group.launcher.prepare("open")

    def oracle(self, rank: int) -> DeviceOracle:
        """The oracle of a rank, made when it is first asked."""
        if rank not in self._oracles:
            self._oracles[rank] = DeviceOracle(self.routing, rank=rank, device=self.device)
        return self._oracles[rank]

    def check_plan(self, rank: int, *, contender: str, returns: bool = False) -> list[Verdict]:
        """Compare what a kernel has planned for the latest launch with NumPy's, bit for bit.

        `returns`: the way back too, which the latest launch has planned. No verdict where NumPy's
        plan is the one that was uploaded.
        """
        group = self.group
        if not group.plans_on_device:
            return []
        wrong = group.plan_differences(rank, returns_epoch=group.epoch if returns else None)
        detail = f"the device's plan differs from NumPy's in {', '.join(wrong)}" if wrong else ""
        return [
            Verdict(
                contender=contender,
                stage="before",
                passed=not wrong,
                num_values=group.plans[rank].num_sent,
                num_wrong=len(wrong),
                max_error=0.0,
                detail=detail,
            )
        ]

    def clock_watch(self) -> ClockWatch:
        """Watches the clocks of this device."""
        return ClockWatch(str(torch.cuda.get_device_properties(self.device).uuid))

    def fill_rows_to_send(self, launch: int) -> None:
        """Input rows of a launch, on every rank of this process."""
        for rank in self.ranks:
            tokens = torch.arange(len(self.routing.topk_idx[rank]), device=self.device)
            fill_rows(self.group.tensor(rank, Slot.x), launch, rank, tokens)

    def exchange_homes(self) -> None:
        """Dispatch rows without payload: afterwards every receive row knows its way home."""
        assert self.group.shape.dispatch_hidden == 0
        self.group.heap.barrier()
        self.group.open(exchange=True)
        self.group.dispatch()
        self.group.synchronize()

    def fill_received(self, launch: int) -> None:
        """Rows as an expert would have made them, told by home and slot, on every own rank."""
        for rank in self.ranks:
            rows, source, token, slot = self.received_homes(rank)
            y = self.group.tensor(rank, Slot.y)
            fill_rows(y, launch, source, token, slot=slot, row_idx=rows)

    def received_homes(
        self, rank: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Receive rows of an own rank that hold one, by expert, source rank and token, and the
        source rank, token and slot of each."""
        _, held = self.group.plans[rank].layout.held_rows()
        rows = torch.from_numpy(held).to(self.device)
        homes = self.group.tensor(rank, Slot.row_home)[rows]
        token = (homes >> SLOT_BITS) & ((1 << TOKEN_BITS) - 1)
        return rows, homes >> (TOKEN_BITS + SLOT_BITS), token, homes & ((1 << SLOT_BITS) - 1)

    def time(self, parts: Sequence[Part], *, whole: bool) -> Components:
        """Run and time the parts `plan` and `stage` of one launch.

        `whole`: it is an operation of its own, plan included; else only the stage counts. Raises
        WatchdogTimeout for a wait that reached its limit.
        """
        if self.config.launch.wrap is not None:
            return self._run_wrapped(parts, whole=whole)
        if self.config.measure.regime is Regime.chained:
            chain = self.timer.measure_chained(parts, _CHAIN_LENGTH)
            self.group.check()
            if chain.host_bound:
                raise RuntimeError(
                    "measure.regime=chained: the host enqueues launches slower than this GPU runs "
                    f"them, {chain.period_ns} ns each; type measure.regime=isolated, or more tokens"
                )
            return {"e2e" if whole else "stage": (chain.start_ns, chain.period_ns)}
        windows = self.timer.measure(parts)
        self.group.check()
        start_ns, plan_ns, stage_ns = windows["start_ns"], windows["plan"], windows["stage"]
        if not whole:
            return {"stage": (start_ns, stage_ns)}
        return {"e2e": (start_ns, plan_ns + stage_ns), "plan": (start_ns, plan_ns)}

    def time_apart(
        self,
        plan: Callable[[], None] | None,
        steps: Sequence[Part],
        least_ns: Mapping[str, int] | None = None,  # by step: what a link would take, not measured
    ) -> Components:
        """Run and time a launch that is none of ours; its plan, if any, makes the host wait for
        the device.

        The plan's window holds that wait; the steps are timed behind it, as any other stage, none
        of them counted as less than `least_ns` has for it.
        """
        if self.config.launch.wrap is not None:
            parts: list[Part] = [] if plan is None else [("plan", plan)]
            return self._run_wrapped([*parts, *steps], whole=plan is not None)
        planned = None if plan is None else self.timer.measure_waiting(plan)
        window = self.timer.measure(steps)
        least = least_ns or {}
        stage_ns = sum(max(window[name], least.get(name, 0)) for name, _ in steps)
        if planned is None:
            return {"stage": (window["start_ns"], stage_ns)}
        start_ns, plan_ns = planned
        return {"e2e": (start_ns, plan_ns + stage_ns), "plan": planned}

    def _run_wrapped(self, parts: Sequence[Part], *, whole: bool) -> Components:
        """Run once, for a tool to look at: what it does to times is not ours to measure."""
        start_ns = time.monotonic_ns()
        for _, launch in parts:
            launch()
        self.group.synchronize()
        window = (start_ns, time.monotonic_ns() - start_ns)
        return {"e2e" if whole else "stage": window}

    def counts(self, rank: int) -> dict[str, int]:
        """What plan and routing say of one rank, and windows that were taken again."""
        between = np.stack(
            [count_rows(ids, self.group.settings.num_experts) for ids in self.routing.topk_idx]
        )
        counts = counts_of(
            self.config,
            self.placed,
            between,
            self.group.plans[rank],
            heap_bytes=self.group.heap.rank_bytes,
        )
        kernel = self.config.kernel
        if isinstance(kernel, FusedKernel):  # whose number may have been found here
            counts["num_comm_ctas"] = self.group.knobs.num_ctas
        return {**counts, "windows_retaken": self.timer.num_repeated}
