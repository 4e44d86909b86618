"""Publish and wait on words in global memory: the one owner of memory order in kernels.

Knows nothing of what is published. No other module passes `sem=` to a load, store or atomic; a test
compiles every function here and reads its PTX.

Contract, per function: who calls it, what must come before, what it orders.

CuTe DSL 4.8.1 has two holes (sm_90a, 2026-11, PTX read): `cute.arch.load(sem="acquire")` and
`cute.arch.store(sem="release")` are no compiler barriers, so plain accesses move across them.
Hence: publishing is a fence followed by a relaxed access, and an acquiring load is followed by an
empty instruction that the compiler takes for one that may read and write anything.

Memory model: PTX ISA, memory consistency model. `fence.acq_rel` then a relaxed write is a release
pattern; it is cumulative, so rows written by other threads of a CTA are covered once a CTA barrier
lies between them and the fence.
"""

from enum import Enum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

__all__ = [
    "POLLS_PER_LOOK",
    "Scope",
    "acquire_fence",
    "add_relaxed",
    "claim",
    "load_relaxed",
    "now_ns",
    "publish_add",
    "publish_set",
    "raise_to",
    "release_bulk_fence",
    "release_fence",
    "rest",
    "set_relaxed",
    "wait_at_least",
    "wait_telling",
]

# Polls between two looks at clock and abort word: a look costs more than a poll.
POLLS_PER_LOOK = 64


class Scope(Enum):
    """Who may see a word."""

    gpu = "gpu"  # CTAs of one device
    sys = "sys"  # every device and the host: peers over NVLink


@cute.jit
def release_fence(scope: cutlass.Constexpr):
    """Order all earlier writes of this thread, and what it has seen by barriers, before what it
    writes next. One fence may precede many `add_relaxed`: a batch of flags costs one fence."""
    if cutlass.const_expr(scope is Scope.sys):
        cute.arch.fence_acq_rel_sys()
    else:
        cute.arch.fence_acq_rel_gpu()


@cute.jit
def release_bulk_fence(scope: cutlass.Constexpr):
    """As `release_fence`, for rows stored by bulk copies of this thread that have completed.

    The copies ran in the async proxy; the proxy fence makes sure that the generic release which
    follows covers them.
    """
    cute.arch.fence_proxy("async.global")
    release_fence(scope)


@cute.jit
def add_relaxed(word: cute.Pointer, rows: Int32, scope: cutlass.Constexpr):
    """Raise a counter after a `release_fence`; by itself it publishes nothing."""
    cute.arch.red(word, rows, op="add", dtype="s32", sem="relaxed", scope=scope.value)


@cute.jit
def set_relaxed(word: cute.Pointer, value, scope: cutlass.Constexpr):
    """Write a word after a `release_fence`; by itself it publishes nothing."""
    cute.arch.store(word, value, sem="relaxed", scope=scope.value)


@cute.jit
def load_relaxed(word: cute.Pointer, dtype: cutlass.Constexpr, scope: cutlass.Constexpr):
    """A word as it is now; orders nothing."""
    return cute.arch.load(word, dtype, sem="relaxed", scope=scope.value)


@cute.jit
def _load_acquire(word: cute.Pointer, dtype: cutlass.Constexpr, scope: cutlass.Constexpr):
    """A word as it is now, before all later reads of this thread."""
    seen = cute.arch.load(word, dtype, sem="acquire", scope=scope.value)
    _stay_behind()
    return seen


@dsl_user_op
def _stay_behind(*, loc=None, ip=None) -> None:
    """No instruction; the compiler moves no access of memory from behind it to before it."""
    llvm.inline_asm(
        None,
        [],
        "// acquired",
        "~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@cute.jit
def claim(word: cute.Pointer, amount, scope: cutlass.Constexpr):
    """Add to a word and return what it held: another ticket for each caller; orders nothing."""
    return cute.arch.atomic_add(word, amount, sem="relaxed", scope=scope.value)


@cute.jit
def raise_to(word: cute.Pointer, value, scope: cutlass.Constexpr):
    """Make a word at least `value`; returns what it held; orders nothing."""
    return cute.arch.atomic_max(word, value, sem="relaxed", scope=scope.value)


@cute.jit
def publish_add(word: cute.Pointer, rows: Int32, scope: cutlass.Constexpr):
    """Raise a counter by rows that have been written.

    Called by one thread, after a barrier of all threads that wrote the rows with generic stores, or
    after the bulk copies that this thread issued have completed (not merely been read).
    """
    release_fence(scope)
    add_relaxed(word, rows, scope)


@cute.jit
def publish_set(word: cute.Pointer, value, scope: cutlass.Constexpr):
    """Write a single-writer word after all that this thread has to publish; see `publish_add`."""
    release_fence(scope)
    set_relaxed(word, value, scope)


@cute.jit
def acquire_fence(scope: cutlass.Constexpr, async_reader: cutlass.Constexpr):
    """Order what a relaxed poll has seen before all later reads of this thread.

    With `async_reader` the reads are bulk or TMA copies issued by this thread: those run in the
    async proxy, which a generic acquire does not order.
    """
    release_fence(scope)  # fence.acq_rel orders both ways
    if cutlass.const_expr(async_reader):
        cute.arch.fence_proxy("async.global")


@cute.jit
def now_ns() -> Int64:
    """The device-wide clock; its steps are 32 ns on an H200."""
    return Int64(cute.arch.globaltimer())


def rest(time_ns: int) -> None:
    cute.arch.inline_ptx(f"nanosleep.u32 {time_ns};")


@cute.jit
def wait_at_least(
    word: cute.Pointer,
    expected,
    abort: cute.Pointer,
    limit_ns: Int64,
    scope: cutlass.Constexpr,
    async_reader: cutlass.Constexpr,
    dtype: cutlass.Constexpr = Int32,
) -> Boolean:
    """As `wait_telling`, but for the last."""
    came, _ = wait_telling(word, expected, abort, limit_ns, scope, async_reader, dtype)
    return came


@cute.jit
def wait_telling(
    word: cute.Pointer,
    expected,
    abort: cute.Pointer,
    limit_ns: Int64,
    scope: cutlass.Constexpr,
    async_reader: cutlass.Constexpr,
    dtype: cutlass.Constexpr = Int32,
    rest_ns: cutlass.Constexpr = 0,  # between polls: of a warp that must not disturb
    on_late: cutlass.Constexpr = None,  # called once, behind a first look that was too early
) -> tuple[Boolean, Boolean]:
    """Poll until `word >= expected`; True once it is, False when aborted or after `limit_ns`; and
    whether the first look did not find it so.

    Called by every thread that then reads or issues copies, or that meets such threads at a barrier
    (who copies then fences the async proxy for itself). The first look acquires by itself: a fence
    waits for all that the thread has under way. Polls are relaxed (an acquire at sys scope would
    invalidate L1 each time) and one fence behind them acquires. Nothing may be read after False.
    """
    seen = _load_acquire(word, dtype, scope)
    late = seen < expected
    if late:
        if cutlass.const_expr(on_late is not None):
            on_late()
        begin = now_ns()
        alive = Boolean(True)
        while alive and seen < expected:
            polls = Int32(0)
            while polls < POLLS_PER_LOOK and seen < expected:
                if cutlass.const_expr(rest_ns > 0):
                    rest(rest_ns)
                seen = load_relaxed(word, dtype, scope)
                polls += 1
            if seen < expected:
                stop = load_relaxed(abort, Int32, Scope.sys)
                alive = stop == 0 and now_ns() - begin < limit_ns
        acquire_fence(scope, False)
    if cutlass.const_expr(async_reader):
        cute.arch.fence_proxy("async.global")
    return seen >= expected, late
