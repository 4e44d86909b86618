"""Small kernels around the functions of semaphore.py, to compile and read."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_ptr

from tilepipe.kernels.semaphore import (
    Scope,
    add_relaxed,
    claim,
    load_relaxed,
    publish_add,
    publish_set,
    raise_to,
    release_fence,
    set_relaxed,
    wait_at_least,
)

WORDS = {32: Int32, 64: Int64}


def pointer(dtype=Int32):
    return make_ptr(dtype, 0, cute.AddressSpace.gmem, assumed_align=16)


def entry(body, dtype=Int32):
    """A host function that launches `body(data, word, n)` with one warp, and its arguments.

    `dtype` is that of the word; rows are Int32.
    """

    @cute.kernel
    def kernel(data: cute.Pointer, word: cute.Pointer, n: Int32):
        body(data, word, n)

    @cute.jit
    def host(data: cute.Pointer, word: cute.Pointer, n: Int32, stream: cuda.CUstream):
        kernel(data, word, n).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)

    return host, (pointer(), pointer(dtype), Int32(0), make_fake_stream())


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
        elif cutlass.const_expr(how == "batch_set"):
            release_fence(scope)
            for i in cutlass.range_constexpr(4):
                set_relaxed(word + 8 * i, n, scope)  # neighbours would become one vector
        rows[0] = n + 1  # a later launch's row: must not replace the first

    return entry(body)


def waiting(scope: Scope, async_reader: bool, width: int = 32):
    dtype = WORDS[width]

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        early = rows[4]
        expected = dtype(n)
        if wait_at_least(word, expected, data + 8, Int64(1000), scope, async_reader, dtype):
            late = rows[5]
            rows[8] = early + late

    return entry(body, dtype)


def reading_again(scope: Scope, width: int):
    """One row before a wait and behind it; no word is below the lowest number, so of the wait a
    first look is left."""
    dtype, lowest = WORDS[width], -(2 ** (width - 1))

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        early = rows[4]
        wait_at_least(word, dtype(lowest), data + 8, Int64(1000), scope, False, dtype)
        rows[8] = early + rows[4]

    return entry(body, dtype)


def waiting_twice(scope: Scope, width: int):
    """Two waits in a row of which first looks are left."""
    dtype, lowest = WORDS[width], -(2 ** (width - 1))

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        for place in cutlass.range_constexpr(2):
            wait_at_least(word, dtype(lowest), data + 8, Int64(1000), scope, False, dtype)
            rows[place] = n

    return entry(body, dtype)


def claiming(scope: Scope, width: int):
    """Two claims in a row, of whatever the word held."""
    dtype = WORDS[width]

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        rows[0] = Int32(claim(word, dtype(n), scope))
        rows[1] = Int32(claim(word, dtype(n), scope))

    return entry(body, dtype)


def raising(scope: Scope, width: int):
    dtype = WORDS[width]

    @cute.jit
    def body(data, word, n):
        raise_to(word, dtype(n), scope)

    return entry(body, dtype)


def looking_twice(scope: Scope, width: int):
    dtype = WORDS[width]

    @cute.jit
    def body(data, word, n):
        rows = cute.make_tensor(data, cute.make_layout(1024))
        rows[0] = Int32(load_relaxed(word, dtype, scope))
        rows[1] = Int32(load_relaxed(word, dtype, scope))

    return entry(body, dtype)


def setting_twice(scope: Scope, width: int):
    dtype = WORDS[width]

    @cute.jit
    def body(data, word, n):
        set_relaxed(word, dtype(n), scope)
        set_relaxed(word, dtype(n) + 1, scope)

    return entry(body, dtype)


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
