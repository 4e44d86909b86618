"""Kernels that use semaphore.py between CTAs of one device."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from tilepipe.kernels.semaphore import (
    Scope,
    claim,
    now_ns,
    publish_add,
    raise_to,
    wait_at_least,
)

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
        if block == 0:
            for row in cutlass.range(ROWS, unroll=1):
                source[row * THREADS + thread] = value + row * THREADS + thread
                cute.arch.sync_threads()
                if thread == 0:
                    publish_add(words, Int32(1), scope)
        else:
            for row in cutlass.range(ROWS, unroll=1):
                if thread == 0:
                    wait_at_least(words, row + 1, words + 1, limit_ns, scope, False)
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


def wait_alone(dtype):
    """One CTA waits for a word of `dtype`.

    found[0]: 1 it came, 2 it did not; found[1]: microseconds until then.
    """

    @cute.kernel
    def kernel(
        word: cute.Pointer, expected: dtype, abort: cute.Pointer, found: cute.Pointer, limit: Int64
    ):
        thread, _, _ = cute.arch.thread_idx()
        if thread == 0:
            begin = now_ns()
            came = wait_at_least(word, expected, abort, limit, Scope.sys, True, dtype)
            took = now_ns() - begin
            answer = cute.make_tensor(found, cute.make_layout(2))
            answer[0] = Int32(1) if came else Int32(2)
            answer[1] = Int32(took // 1000)

    @cute.jit
    def host(
        word: cute.Pointer,
        expected: dtype,
        abort: cute.Pointer,
        found: cute.Pointer,
        limit_ns: Int64,
        stream: cuda.CUstream,
    ):
        kernel(word, expected, abort, found, limit_ns).launch(
            grid=[1, 1, 1], block=[32, 1, 1], stream=stream
        )

    return host


def claims(dtype, num_ctas: int):
    """Every thread of every CTA claims one place of a queue and marks it; one word keeps the
    highest number of a thread."""

    @cute.kernel
    def kernel(queue: cute.Pointer, highest: cute.Pointer, marks: cute.Pointer):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        number = block * THREADS + thread
        place = claim(queue, dtype(1), Scope.gpu)
        raise_to(highest, dtype(number), Scope.gpu)
        marked = cute.make_tensor(marks, cute.make_layout(num_ctas * THREADS))
        marked[Int32(place)] = marked[Int32(place)] + number + 1

    @cute.jit
    def host(
        queue: cute.Pointer, highest: cute.Pointer, marks: cute.Pointer, stream: cuda.CUstream
    ):
        kernel(queue, highest, marks).launch(
            grid=[num_ctas, 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    return host
