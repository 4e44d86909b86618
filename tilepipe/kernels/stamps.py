"""Stamps that warps of a fused launch leave while it runs, or nothing where nobody asks for them.

Knows nothing of what is stamped; `track.py` says how a track lies in memory and is read.

A kernel is compiled with stamps or without. Without, a tape is None and no function here leaves an
instruction behind: the code is that of a kernel that has never heard of stamps.

One lane of a warp writes: the number of records it keeps in shared memory, a record is one store
of 16 bytes into the warp's own track, and nothing is waited for. What finds no room is counted.

Stamps are plain stores that nobody reads before the launch has ended, so they order nothing.

What it costs (one H200, 4096 tokens of DeepSeek-V3 shapes, 15 launches each in turn, 2026-11):
dispatch -> GEMM 0.3 %, GEMM -> combine 0.6 %. CuTe DSL has an event tracer of its own (IKET,
4.8.1), which compiles away as well; an event of it is about as many instructions, but carries one
number, and is brought back only by a library injected into a process under a launcher of its own.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from tilepipe.kernels.gemm.plan import DESCRIPTOR_BYTES
from tilepipe.kernels.memory import element, store_words
from tilepipe.kernels.track import (
    ITEM_BITS,
    NO_ITEM,
    NUM_TRACKS,
    RECORD_BYTES,
    ROWS_BITS,
    Event,
    track_bytes,
)

__all__ = ["Event", "Tape", "begin_tape", "end_tape", "lap", "moment", "tracks_at"]


@dataclass(frozen=True)
class Tape:
    """Where a warp keeps its stamps."""

    made: Any  # (1,) Int32 of shared memory: records so far
    track: Int64  # address
    room: int  # records
    lane: Any


def tracks_at(workspace: Int64, num_ctas: Int32) -> Int64:
    """Address of the tracks of a launch: behind the descriptors of its CTAs."""
    return workspace + Int64(num_ctas) * DESCRIPTOR_BYTES


def begin_tape(
    room: int,  # records of a warp; 0: the kernel is compiled without stamps
    memory: Any,  # allocator of the kernel's shared memory
    workspace: Int64,
    *,
    warp: Int32,
    lane: Int32,
) -> Tape | None:
    """The tape of a warp, its first record made. Called by all threads of a CTA."""
    if not room:
        return None
    made = memory.allocate_array(Int32, NUM_TRACKS, byte_alignment=16)
    cta, _, _ = cute.arch.block_idx()
    num_ctas, _, _ = cute.arch.grid_dim()
    track = tracks_at(workspace, num_ctas)
    track += Int64(cta * NUM_TRACKS + warp) * track_bytes(room)
    tape = Tape(cute.make_tensor(made + warp, cute.make_layout(1)), track, room, lane)
    _begin(tape)
    return tape


@cute.jit
def _begin(tape: cutlass.Constexpr):
    if tape.lane == 0:
        tape.made[0] = Int32(0)
    lap(tape, Event.begin, Int32(cute.arch.smid()))


@cute.jit
def lap(
    tape: cutlass.Constexpr,  # None: nothing happens
    event: cutlass.Constexpr,
    item: Int32 = NO_ITEM,
    part: Int32 = 0,
    num_rows: Int32 = 0,
    at: cutlass.Constexpr = None,  # moment of before; None: now
):
    """End what this warp has done since its last record. Called by whole warps."""
    if cutlass.const_expr(tape is not None):
        if tape.lane == 0:
            number = tape.made[0]
            tape.made[0] = number + 1
            if number < tape.room:
                clock, timer = moment(tape) if at is None else at
                what = Int32(int(event) << ITEM_BITS) | Int32(item)
                store_words(
                    tape.track + Int64(number + 1) * RECORD_BYTES,
                    (clock, timer, what, (Int32(part) << ROWS_BITS) | Int32(num_rows)),
                )


@dsl_user_op
def _counter(name: str, *, loc=None, ip=None) -> Int32:
    """A special register, now. As an instruction of ours, that clobbers memory: what the compiler
    has for it moves across loads and stores."""
    value = llvm.inline_asm(
        Int32.mlir_type,
        [],
        f"mov.u32 $0, %{name};",
        "=r,~{memory}",
        has_side_effects=True,
        loc=loc,
        ip=ip,
    )
    return Int32(value)


def moment(tape: Tape | None) -> tuple[Int32, Int32] | None:
    """Both clocks now, for a record that is made later or never; None without a tape."""
    if tape is None:
        return None
    return _counter("clock"), _counter("globaltimer_lo")


@cute.jit
def end_tape(tape: cutlass.Constexpr):
    """Make the last record and tell how many there are. Called by whole warps."""
    lap(tape, Event.end)
    if cutlass.const_expr(tape is not None):
        if tape.lane == 0:
            head = cute.make_tensor(element(tape.track, Int32(0), Int32), cute.make_layout(1))
            head[0] = tape.made[0]
