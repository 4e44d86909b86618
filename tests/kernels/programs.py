"""Small kernels around the functions of semaphore.py, to compile and read."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.kernels.semaphore import (
    Scope,
    add_relaxed,
    publish_add,
    publish_set,
    release_fence,
    wait_at_least,
)


def pointer():
    return make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=16)


def entry(body):
    """A host function that launches `body(data, word, n)` with one warp, and its arguments."""

    @cute.kernel
    def kernel(data: cute.Pointer, word: cute.Pointer, n: Int32):
        body(data, word, n)

    @cute.jit
    def host(data: cute.Pointer, word: cute.Pointer, n: Int32, stream: cuda.CUstream):
        kernel(data, word, n).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    return host, (pointer(), pointer(), Int32(0), make_fake_stream())


def publishing(how: str, scope: Scope):
    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        rows[0] = n  # what is published
        if cutlass.const_expr(how == "add"):
            publish_add(word, Int32(3), scope)
        elif cutlass.const_expr(how == "set"):
            publish_set(word, n, scope)
        elif cutlass.const_expr(how == "batch"):
            release_fence(scope)
            for i in cutlass.range_constexpr(4):
                add_relaxed(word + i, Int32(1), scope)
        rows[0] = n + 1  # a later launch's row: must not replace the first

    return entry(body)


def waiting(scope: Scope, async_reader: bool):
    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        early = rows[4]
        if wait_at_least(word, n, word + 8, Int64(1000), scope, async_reader):
            late = rows[5]
            rows[8] = early + late

    return entry(body)


def naked_acquire():
    """The hole itself: kept so that a DSL that mends it is noticed."""

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        early = rows[4]
        flag = cute.arch.load(word, Int32, sem="acquire", scope="sys")
        late = rows[5]
        rows[8] = early
        rows[9] = late
        rows[10] = flag

    return entry(body)


def naked_release():
    """The other hole: the first store is dropped, so the release publishes nothing."""

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        rows[0] = n
        cute.arch.store(word, Int32(1), sem="release", scope="sys")
        rows[0] = n + 1

    return entry(body)
