"""A group of ranks whose launches are interpreted, on the CPU: as DeviceGroup, without a device.

Knows nothing of what a launch must leave behind.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from tests.ptx.machine import Launch, Machine, Pace, Task
from tests.ptx.memory import Memory
from tests.ptx.parse import Program, parse
from tilepipe.config.limits import SHARED_BYTES
from tilepipe.fabric.table import Slot
from tilepipe.kernels.buffers import buffer_specs
from tilepipe.kernels.group import DeviceGroup
from tilepipe.kernels.launcher import (
    _PARTS,
    Knobs,
    compile_launch,
    constants_of,
    opens,
    plan_constants_of,
)
from tilepipe.kernels.move import shared_bytes
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

__all__ = ["InterpretedGroup", "memory_of", "program_of"]


@cache
def program_of(name: str, constants: Any) -> Program:
    """The kernel of a launch, compiled and read once."""
    return parse(compile_launch(name, constants).ptx)


def memory_of(group: DeviceGroup, **more: tuple[int, int]) -> Memory:
    """All buffers of a group, each by itself: a step past the end of one is in no other. `more`:
    address and bytes of others."""
    buffers = {"table": (group.heap.table.data_ptr(), group.heap.table.nbytes)}
    for rank in group.ranks:
        for slot in buffer_specs(group.settings, group.shape):
            tensor = group.tensor(rank, slot)
            buffers[f"{slot.name} of rank {rank}"] = (tensor.data_ptr(), tensor.nbytes)
    buffers |= more
    records = group.heap._records
    buffers["records"] = (records.data_ptr(), records.nbytes)
    return Memory(buffers)


class InterpretedGroup(DeviceGroup):
    """Launches are kept until `synchronize`, which runs them, those of one rank in their order."""

    def __init__(
        self,
        settings: PlanSettings,
        shape: Shape,
        knobs: Knobs,
        *,
        seed: int = 0,
        pace: Pace | None = None,
        races: bool = False,
        apart: bool = False,  # each rank has its own stream, as in processes of their own
        limit_ns: int = 50_000_000,  # of a wait, on the clock of the machine
        plans_on_device: bool = False,
        plan_changes: Mapping[str, int] | None = None,  # CTAs and threads of the plan kernels
        programs: Mapping[str, Program] | None = None,  # of some launches, in place of their own
    ) -> None:
        super().__init__(
            settings,
            shape,
            knobs,
            watchdog_s=limit_ns / 1e9,
            plans_on_device=plans_on_device,
            device=torch.device("cpu"),
        )
        self.machine = Machine(memory_of(self), seed=seed, pace=pace, races=races)
        self._limit_ns = limit_ns
        self.more_shared_bytes = 0  # of programs in place of a launch's own
        self._plan_changes = dict(plan_changes or {})
        self._programs = dict(programs or {})
        self._streams: list[list[Task]] = [[] for _ in (self.ranks if apart else range(1))]
        self.launcher.launch = self._keep  # type: ignore[method-assign]

    def synchronize(self) -> None:
        """Run what has been launched, and check it as DeviceGroup does."""
        self.run()
        self.check()

    def run(self) -> None:
        """Run what has been launched; raises Fault."""
        streams = [list(stream) for stream in self._streams]
        for stream in self._streams:
            stream.clear()
        self.machine.run(streams)

    def drop(self, rank: int) -> None:
        """Forget what a rank was to run, as if its process had died."""
        self._streams[rank].clear()

    def then(self, rank: int, function: Callable[[], None]) -> None:
        """What the host does for a rank once its launches so far have ended."""
        self._streams[rank if len(self._streams) > 1 else 0].append(function)

    def touch(self, rank: int, *slots: Slot, writes: bool) -> None:
        """Say that the host reads or writes whole buffers; from a function given to `then`."""
        tensors = [self.tensor(rank, slot) for slot in slots]
        places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.nbytes]
        stream = rank if len(self._streams) > 1 else 0
        self.machine.host_touches(stream, places, writes=writes)

    def _keep(self, name: str) -> None:
        ranks = self.ranks
        if len(self._streams) == 1:
            self._streams[0].append(self._launch(name, ranks.start, len(ranks)))
            return
        for rank, stream in zip(ranks, self._streams, strict=True):
            stream.append(self._launch(name, rank, 1))

    def _launch(self, name: str, first_rank: int, num_ranks: int) -> Launch:
        table = self.heap.table.data_ptr()
        constants: Any
        if name.startswith("plan"):
            constants = plan_constants_of(self.settings, self.shape)
            constants = replace(constants, **self._plan_changes)
        else:
            constants = constants_of(name, self.settings, self.shape, self.knobs)
        program = self._programs.get(name) or program_of(name, constants)
        if opens(name):
            return Launch(
                name=name,
                program=program,
                arguments=(table, first_rank, self._limit_ns),
                num_ctas=num_ranks * (constants.num_ctas if name.startswith("plan") else 1),
                shared_bytes=SHARED_BYTES if name.startswith("plan") else 0,
            )
        gbps = self.knobs.pace_gbps
        cost_ns = 0 if gbps is None else round(constants.row_bytes / gbps)
        rank_ctas = self.knobs.num_ctas
        return Launch(
            name=name,
            program=program,
            arguments=(
                *(table, first_rank, num_ranks, rank_ctas),
                *(cost_ns, self.knobs.pace_latency_ns, self._limit_ns),
            ),
            num_ctas=num_ranks * rank_ctas,
            shared_bytes=shared_bytes(constants, **_PARTS[name]) + self.more_shared_bytes,
        )
