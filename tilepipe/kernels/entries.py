"""Host functions around kernels: the arguments of a launch, and how its grid is dealt to ranks.

Knows nothing of what a kernel does; its body is given.
"""

from collections.abc import Callable
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.kernels.constants import Constants
from tilepipe.kernels.memory import LANES, shared_table
from tilepipe.kernels.move import warp_memory

__all__ = ["communication_entry", "communication_host", "rank_entry"]


def rank_entry(num_threads: int, body: Callable[..., Any], *, num_ctas: int = 1) -> Any:
    """As many CTAs for each rank of this process.

    Each thread calls `body(table, rank, number, thread, limit_ns)`; `number` is of the rank's CTAs.
    """

    @cute.kernel
    def kernel(table: cute.Pointer, first_rank: Int32, limit_ns: Int64):
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        body(table, first_rank + cta // num_ctas, cta % num_ctas, thread, limit_ns)

    @cute.jit
    def host(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,  # of this process
        limit_ns: Int64,  # of one wait
        stream: cuda.CUstream,
    ):
        kernel(table, first_rank, limit_ns).launch(
            grid=[num_ranks * num_ctas, 1, 1],
            block=[num_threads, 1, 1],
            min_blocks_per_mp=1,  # all registers that so many threads leave: none may spill
            stream=stream,
        )

    return host


def communication_entry(
    constants: Constants, body: Callable[..., Any], *, moves: bool, reduces: bool
) -> Any:
    """Some CTAs a rank of this process, dealt in turn, the address table in shared memory.

    `body(table, rank, lane, warp, num_warps, ring, barriers, row_cost_ns, latency_ns, limit_ns)` is
    called by all threads; `warp` counts over all warps of the rank.
    """
    num_threads = constants.num_warps * LANES

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,
        num_ctas: Int32,
        row_cost_ns: Int64,
        latency_ns: Int64,
        limit_ns: Int64,
    ):
        lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        memory = SmemAllocator()
        rank = first_rank + cta % num_ranks
        near = shared_table(table, rank, memory, constants.num_ranks, thread, num_threads)
        ring, barriers = warp_memory(memory, warp, lane, constants, moves=moves, reduces=reduces)
        body(
            near,
            rank,
            lane,
            (cta // num_ranks) * constants.num_warps + warp,
            num_ctas * constants.num_warps,
            ring,
            barriers,
            row_cost_ns,
            latency_ns,
            limit_ns,
        )

    return communication_host(kernel, num_threads)


def communication_host(kernel: Any, num_threads: int) -> Any:
    """Launches a kernel of communication, with its arguments, on some CTAs a rank."""

    @cute.jit
    def host(
        table: cute.Pointer,
        first_rank: Int32,
        num_ranks: Int32,  # of this process
        num_ctas: Int32,  # of each rank
        row_cost_ns: Int64,  # of a row on a paced link
        latency_ns: Int64,  # of a paced link
        limit_ns: Int64,  # of one wait
        stream: cuda.CUstream,
    ):
        kernel(table, first_rank, num_ranks, num_ctas, row_cost_ns, latency_ns, limit_ns).launch(
            grid=[num_ranks * num_ctas, 1, 1],
            block=[num_threads, 1, 1],
            min_blocks_per_mp=1,  # all registers that so many threads leave: none may spill
            stream=stream,
        )

    return host
