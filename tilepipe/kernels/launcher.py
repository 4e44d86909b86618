"""Compile the kernels of a group once and launch them by name.

Knows nothing of plans and of what lies in memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.config.choices import Copy, Granularity, HomeGranularity
from tilepipe.config.limits import SHARED_BYTES, STAGE_BYTES, max_combine_warps
from tilepipe.kernels.combine import combine_entry
from tilepipe.kernels.compile import Code, compile_code
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.dispatch import dispatch_entry
from tilepipe.kernels.kept import kept
from tilepipe.kernels.memory import LANES
from tilepipe.kernels.move import shared_bytes
from tilepipe.kernels.plan import plan_entry
from tilepipe.kernels.plan_constants import MAX_PLAN_CTAS, PlanConstants, plan_constants_of
from tilepipe.kernels.protocol import gate_entry
from tilepipe.kernels.residency import Residency, residency_of
from tilepipe.kernels.returns import returns_entry
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

__all__ = [
    "LAUNCHES",
    "CompileError",
    "Knobs",
    "Launcher",
    "compile_launch",
    "constants_of",
    "plan_constants_of",
]

_BF16_BYTES = 2

# The reduction alone has the chip to itself.
_REDUCE_WARPS = 8

# name of a launch -> makes its host function from its constants
LAUNCHES: dict[str, Callable[[Any], Any]] = {
    "open": lambda constants: gate_entry(constants, exchange=False),
    "open_preset": lambda constants: gate_entry(constants, exchange=False, preset=True),
    "open_exchange": lambda constants: gate_entry(constants, exchange=True),
    "open_exchange_preset": lambda constants: gate_entry(constants, exchange=True, preset=True),
    "plan": plan_entry,
    "plan_returns": returns_entry,
    "dispatch": dispatch_entry,
    "combine": lambda constants: combine_entry(constants, push=True, reduce=True),
    "push": lambda constants: combine_entry(constants, push=True, reduce=False),
    "reduce": lambda constants: combine_entry(constants, push=False, reduce=True),
}


# What a launch does with rows.
_PARTS = {
    "dispatch": {"moves": True, "reduces": False},
    "combine": {"moves": True, "reduces": True},
    "push": {"moves": True, "reduces": False},
    "reduce": {"moves": False, "reduces": True},
}


class CompileError(RuntimeError):
    """A kernel did not compile; the message names it and what the compiler said."""


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """How communication kernels are launched."""

    num_ctas: int  # of each rank; 0: a fused launch has none, and what is launched alone an SM each
    copy: Copy = Copy.simt
    num_warps: int = 16  # of a CTA
    num_loads: int = 14  # SIMT: 16-byte loads that a lane has in flight
    num_stages: int = 3  # TMA: pieces of a row that a warp's ring holds
    stage_bytes: int = STAGE_BYTES  # TMA: room of a stage
    flag_batch: int = 4  # rows of a warp whose flags share one release fence
    pace_gbps: float | None = None  # 1e9 byte/s of each link; None: not throttled
    pace_latency_ns: int = 0

    @property
    def paced(self) -> bool:
        return self.pace_gbps is not None or self.pace_latency_ns > 0


def constants_of(name: str, settings: PlanSettings, shape: Shape, knobs: Knobs) -> Constants:
    """What the launch `name` is compiled for; raises ValueError for knobs that it cannot have.

    A gate's code knows nothing of rows, so gates of unlike rows are the same code.
    """
    group = {
        "num_ranks": settings.num_ranks,
        "num_experts_per_rank": settings.num_experts_per_rank,
        "paced": knobs.paced,
    }
    if name.startswith("open"):
        granularity = settings.granularity if name.endswith("preset") else Granularity.tile
        return Constants(row_bytes=0, num_topk=1, granularity=granularity, **group)
    hidden = shape.dispatch_hidden if name == "dispatch" else shape.home_hidden
    rows = {
        "row_bytes": hidden * _BF16_BYTES,
        "num_topk": settings.num_topk,
        "granularity": settings.granularity,
        "by_rank": settings.home_granularity is HomeGranularity.rank,
        "num_chunks": settings.homeward.num_chunks,
    }
    if name == "reduce":
        return Constants(num_warps=_REDUCE_WARPS, **rows, **group)
    constants = Constants(
        # Rows without payload, sent for their way home alone, are nothing to copy in bulk.
        copy=knobs.copy if hidden else Copy.simt,
        num_warps=knobs.num_warps,
        num_loads=knobs.num_loads,
        num_stages=knobs.num_stages,
        stage_bytes=knobs.stage_bytes,
        flag_batch=knobs.flag_batch,
        **rows,
        **group,
    )
    if name == "combine":
        _check_combine(constants)
    _check_rings(name, constants)
    return constants


def _check_rings(name: str, constants: Constants) -> None:
    """Refuse rings that an SM has no room for."""
    needed = shared_bytes(constants, **_PARTS[name])
    if needed > SHARED_BYTES:
        raise ValueError(
            f"kernel.num_stages={constants.num_stages}: {constants.num_warps} warps x that many "
            f"stages of {constants.piece_bytes} bytes need {needed} bytes of shared memory, and an "
            f"SM has {SHARED_BYTES}; lower it, or kernel.num_comm_warps"
        )


def _check_combine(constants: Constants) -> None:
    """Refuse more warps than registers and shared memory allow."""
    most = max_combine_warps(constants.num_topk)
    if constants.num_warps > most:
        raise ValueError(
            f"kernel.num_comm_warps={constants.num_warps}: combine with "
            f"workload.num_topk={constants.num_topk} has registers and shared memory for {most} "
            f"warps; use at most {most}"
        )


def opens(name: str) -> bool:
    """Whether a launch is the gate of another."""
    return name.startswith(("open", "plan"))


def stand_ins(name: str) -> tuple[Any, ...]:
    """Arguments of the host function of a launch, for compiling it."""
    table = make_ptr(Int64, 0, cute.AddressSpace.gmem, assumed_align=16)
    sizes = (Int32(0), Int32(1), Int64(1))
    if not opens(name):
        sizes = (Int32(0), Int32(1), Int32(1), Int64(1), Int64(1), Int64(1))
    return (table, *sizes, make_fake_stream())


@kept
def compile_launch(name: str, constants: Constants | PlanConstants) -> Code:
    """Compile a launch for stand-in arguments, once in a process; raises CompileError."""
    try:
        return compile_code(LAUNCHES[name](constants), stand_ins(name))
    except (AssertionError, OSError):  # a fault of ours; no room for what the compiler writes
        raise
    except Exception as error:  # the DSL raises whatever its passes raise
        first = str(error).strip().splitlines()[:1]
        raise CompileError(f"kernel {name} does not compile: {' '.join(first)}") from error


class Launcher:
    """Launches of one group on torch's current stream; none waits for the device."""

    def __init__(
        self,
        table: torch.Tensor,  # (num_ranks, slots) int64 addresses
        settings: PlanSettings,
        shape: Shape,
        knobs: Knobs,
        *,
        ranks: range,  # those of this process, which a launch holds
        limit_ns: int,  # of one wait inside a launch
    ) -> None:
        self._settings, self._shape, self._knobs = settings, shape, knobs
        self._ranks = ranks
        self._limit_ns = limit_ns
        self._table = make_ptr(Int64, table.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
        self._ready: dict[str, Callable[[cuda.CUstream], None]] = {}
        self.residency: dict[str, Residency] = {}

    def launch(self, name: str) -> None:
        """Launch `name`, compiled by an earlier `prepare` or now."""
        if name not in self._ready:
            self.prepare(name)
        self._ready[name](cuda.CUstream(torch.cuda.current_stream().cuda_stream))

    def prepare(self, *names: str) -> None:
        """Compile launches; raises CompileError, or ValueError where CTAs would not all fit."""
        for name in names:
            if name not in self._ready:
                constants: Constants | PlanConstants
                if name.startswith("plan"):
                    constants = self._plan_constants()
                else:
                    constants = constants_of(name, self._settings, self._shape, self._knobs)
                code = compile_launch(name, constants)
                arguments = self._arguments(name, code, constants)
                self._ready[name] = _bound(code, arguments)

    def _plan_constants(self) -> PlanConstants:
        """As many CTAs a rank as one SM each allows, up to what the plan has use for."""
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        most = max(1, device.multi_processor_count // len(self._ranks))
        return plan_constants_of(self._settings, self._shape, max_ctas=min(most, MAX_PLAN_CTAS))

    def _check_plan(self, name: str, code: Code, constants: PlanConstants) -> None:
        """Refuse plan kernels whose CTAs, which wait for each other, would not all run at once."""
        num_ranks, num_ctas = len(self._ranks), constants.num_ctas
        found = self.residency[name] = residency_of(
            code, num_threads=constants.num_threads, dynamic_bytes=constants.shared_bytes
        )
        if num_ranks * num_ctas > found.max_ctas:
            raise ValueError(
                f"launch.num_ranks={num_ranks}: the plan kernel's {num_ranks} ranks x {num_ctas} "
                f"CTAs of {constants.num_threads} threads must run at once, and this GPU holds "
                f"{found.max_ctas}; lower it, or type kernel.planner=numpy"
            )

    def _arguments(
        self, name: str, code: Code, constants: Constants | PlanConstants
    ) -> tuple[Any, ...]:
        num_ranks, knobs = len(self._ranks), self._knobs
        ranks = (self._table, Int32(self._ranks.start), Int32(num_ranks))
        if isinstance(constants, PlanConstants):
            self._check_plan(name, code, constants)
        if isinstance(constants, PlanConstants) or opens(name):
            return (*ranks, Int64(self._limit_ns))
        num_threads = constants.num_warps * LANES
        found = self.residency[name] = residency_of(
            code,
            num_threads=num_threads,
            dynamic_bytes=shared_bytes(constants, **_PARTS[name]),
        )
        if found.local_bytes:
            raise ValueError(
                f"kernel.num_comm_warps={constants.num_warps}: with kernel.num_loads="
                f"{constants.num_loads} threads have too few registers and would spill "
                f"{found.local_bytes} bytes each; lower one of the two"
            )
        num_ctas = knobs.num_ctas
        if name == "reduce":  # nothing waits in it, and it has the chip to itself
            num_ctas = max(1, found.max_ctas // num_ranks)
        if num_ranks * num_ctas > found.max_ctas:
            raise ValueError(
                f"kernel.num_comm_ctas={num_ctas}: {num_ranks} ranks x {num_ctas} CTAs of "
                f"{num_threads} threads must run at once, and this GPU holds {found.max_ctas}; use "
                f"at most {found.max_ctas // num_ranks}, or fewer kernel.num_comm_warps"
            )
        row_cost_ns = 0.0 if knobs.pace_gbps is None else constants.row_bytes / knobs.pace_gbps
        return (
            *ranks,
            Int32(num_ctas),
            Int64(round(row_cost_ns)),
            Int64(knobs.pace_latency_ns),
            Int64(self._limit_ns),
        )


def _bound(code: Code, arguments: tuple[Any, ...]) -> Callable[[cuda.CUstream], None]:
    # Bound to the device now, so that loading the code is no part of the first launch.
    function = code.function.to(torch.cuda.current_device())
    return lambda stream: function(*arguments, stream)
