"""Kernels that use semaphore.py between CTAs of one device."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.kernels.semaphore import Scope, now_ns, publish_add, wait_at_least

THREADS = 256
ROWS = 64  # a row is one Int32 a thread


def relay(scope: Scope):
    """CTA 0 writes rows and raises a counter row by row; CTA 1 waits for each and copies it."""

    @cute.kernel
    def kernel(
        rows: cute.Pointer,
        out: cute.Pointer,
        words: cute.Pointer,  # counter, abort word
        value: Int32,
        limit_ns: Int64,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        source = cute.make_tensor(rows, cute.make_layout(ROWS * THREADS))
        target = cute.make_tensor(out, cute.make_layout(ROWS * THREADS))
        deadline = now_ns() + limit_ns
        if block == 0:
            for row in cutlass.range(ROWS, unroll=1):
                source[row * THREADS + thread] = value + row * THREADS + thread
                cute.arch.sync_threads()
                if thread == 0:
                    publish_add(words, Int32(1), scope)
        else:
            for row in cutlass.range(ROWS, unroll=1):
                if thread == 0:
                    wait_at_least(words, row + 1, words + 1, deadline, scope, False)
                cute.arch.sync_threads()
                target[row * THREADS + thread] = source[row * THREADS + thread]

    @cute.jit
    def host(
        rows: cute.Pointer,
        out: cute.Pointer,
        words: cute.Pointer,
        value: Int32,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ):
        kernel(rows, out, words, value, limit_ns).launch(
            grid=[2, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    return host


@cute.kernel
def _waiter(words: cute.Pointer, limit_ns: Int64):
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        begin = now_ns()
        came = wait_at_least(words, Int32(1), words + 1, begin + limit_ns, Scope.sys, True)
        took = now_ns() - begin
        words_as_tensor = cute.make_tensor(words, cute.make_layout(4))
        words_as_tensor[2] = Int32(1) if came else Int32(2)
        words_as_tensor[3] = Int32(took // 1000)


@cute.jit
def wait_alone(words: cute.Pointer, limit_ns: Int64, stream: cuda.CUstream):
    """One CTA waits for words[0]; words[2]: 1 it came, 2 it did not; words[3]: microseconds."""
    _waiter(words, limit_ns).launch(grid=[1, 1, 1], block=[32, 1, 1], stream=stream)
