"""The hand-out of tiles without tiles: what racecheck says of the smallest right program.

    compute-sanitizer --tool racecheck --report-api-errors no python -m tests.gpu.handshake HOW

Warp 0 writes records of 8 words into two slots of shared memory, warp 1 reads them. HOW they tell
each other: `phases`, by the barriers and functions of the grouped GEMM; `threads`, by barriers of
all threads; `nothing`, not at all, which is a race. Racecheck finds the third and keeps silent on
the second. If it reports the first as it reports the GEMM's hand-out, it does not see the order
that phases of a barrier give, and its word on the hand-out says nothing.
"""

import sys

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_ptr
from cutlass.utils import SmemAllocator

from benchmarks.program import need_gpus, run
from tilepipe.kernels.gemm.barriers import arrive, hand_word

SLOTS, WORDS, ROUNDS = 2, 8, 64
WAYS = ("phases", "threads", "nothing")


@cute.jit
def _wait(barrier: cute.Pointer, phase: Int32):
    while not cute.arch.mbarrier_try_wait(barrier, phase):
        pass


@cute.jit
def _arrive(barrier: cute.Pointer, lane: Int32):
    if lane == 0:
        arrive(barrier, Int32(0), False)


def handshake(how: str):
    """Host function of one launch of one CTA: `out` gets the sums of the words of every round."""

    @cute.kernel
    def kernel(out: cute.Pointer):
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        memory = SmemAllocator()
        handed = memory.allocate_array(Int64, 2 * SLOTS, byte_alignment=16)
        taken = handed + SLOTS
        records = memory.allocate_array(Int32, SLOTS * WORDS, byte_alignment=16)
        if warp == 0 and lane < 2 * SLOTS:
            cute.arch.mbarrier_init(handed + lane, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        sums = cute.make_tensor(out, cute.make_layout(ROUNDS))
        for count in cutlass.range(ROUNDS, unroll=1):
            slot = count % SLOTS
            record = records + slot * WORDS
            if warp == 0:
                if cutlass.const_expr(how == "phases"):
                    _wait(taken + slot, (count // SLOTS + 1) % 2)  # at first nobody has to
                hand_word(record, lane, count + lane, 1)
                if cutlass.const_expr(how == "phases"):
                    _arrive(handed + slot, lane)
            if cutlass.const_expr(how == "threads"):
                cute.arch.sync_threads()
            if warp == 1:
                if cutlass.const_expr(how == "phases"):
                    _wait(handed + slot, count // SLOTS % 2)
                words = cute.make_tensor(record, cute.make_layout(WORDS))
                total = Int32(0)
                for i in cutlass.range_constexpr(WORDS):
                    total += words[i]
                cute.arch.sync_warp()
                if lane == 0:
                    sums[count] = total
                if cutlass.const_expr(how == "phases"):
                    _arrive(taken + slot, lane)
            if cutlass.const_expr(how == "threads"):
                cute.arch.sync_threads()

    @cute.jit
    def host(out: cute.Pointer, stream: cuda.CUstream):
        kernel(out).launch(grid=[1, 1, 1], block=[64, 1, 1], stream=stream)

    return host


def main() -> int:
    """Exit code 1 where sums are wrong; without an order they may be."""
    need_gpus()
    num_wrong = 0
    for how in sys.argv[1:] or WAYS:
        sums = torch.zeros(ROUNDS, dtype=torch.int32, device="cuda")
        pointer = make_ptr(Int32, sums.data_ptr(), cute.AddressSpace.gmem, assumed_align=16)
        handshake(how)(pointer, cuda.CUstream(torch.cuda.current_stream().cuda_stream))
        torch.cuda.synchronize()
        expected = [WORDS * count + WORDS * (WORDS - 1) // 2 for count in range(ROUNDS)]
        wrong = sums.tolist() != expected
        sys.stdout.write(f"{how}: {'wrong' if wrong else 'right'}\n")
        num_wrong += wrong and how != "nothing"
    return int(num_wrong > 0)


if __name__ == "__main__":
    run(main)
