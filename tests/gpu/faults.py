"""Rows written by ordinary stores and read by bulk copies, with and without the proxy fence."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from tilepipe.kernels.semaphore import Scope, publish_add, wait_at_least

THREADS = 256
ROWS = 64  # a row is one Int32 a thread


def relay_to_bulk_reader(*, fenced: bool):
    """CTA 0 writes rows and raises a counter; CTA 1 fetches each by a bulk copy and stores it."""

    @cute.kernel
    def kernel(
        rows: cute.Pointer, out: cute.Pointer, words: cute.Pointer, value: Int32, limit_ns: Int64
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        source = cute.make_tensor(rows, cute.make_layout((THREADS, ROWS)))
        target = cute.make_tensor(out, cute.make_layout((THREADS, ROWS)))
        memory = SmemAllocator()
        stage = memory.allocate_tensor(Int32, cute.make_layout(THREADS), byte_alignment=128)
        barrier = memory.allocate_array(Int64, 1, byte_alignment=128)
        load = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Int32)
        if thread == 0:
            cute.arch.mbarrier_init(barrier, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        for row in cutlass.range(ROWS, unroll=1):
            if block == 0:
                source[thread, row] = value + row * THREADS + thread
                cute.arch.sync_threads()
                if thread == 0:
                    publish_add(words, Int32(1), Scope.gpu)
            else:
                if thread == 0:
                    wait_at_least(words, row + 1, words + 1, limit_ns, Scope.gpu, fenced)
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, THREADS * 4)
                    cute.copy(load, source[None, row], stage, mbar_ptr=barrier)
                cute.arch.mbarrier_wait(barrier, row & 1)
                target[thread, row] = stage[thread]
                cute.arch.sync_threads()

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
