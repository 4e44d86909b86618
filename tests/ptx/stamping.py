"""Communication whose warps leave stamps, to compile and to interpret.

Knows nothing of what stamps must say.
"""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from tilepipe.fabric.table import Slot
from tilepipe.kernels.combine import reduce_tokens
from tilepipe.kernels.dispatch import wait_rows
from tilepipe.kernels.edges import Edge
from tilepipe.kernels.entries import communication_host
from tilepipe.kernels.gemm.plan import DESCRIPTOR_BYTES
from tilepipe.kernels.memory import LANES, shared_table
from tilepipe.kernels.move import move_rows, warp_memory
from tilepipe.kernels.stamps import begin_tape, end_tape

__all__ = ["stamped_entry"]


def stamped_entry(constants, *, combines, tracks, room):
    """As `dispatch_entry` or `combine_entry`; `tracks`: where they lie, known when compiling."""
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
        ring, barriers = warp_memory(memory, warp, lane, constants, moves=True, reduces=combines)
        # Tracks lie behind the descriptors of all CTAs.
        workspace = Int64(tracks) - Int64(num_ranks * num_ctas) * DESCRIPTOR_BYTES
        tape = begin_tape(room, memory, workspace, warp=warp, lane=lane)
        way = (ring, barriers, constants, row_cost_ns, latency_ns, limit_ns, tape)
        move_rows(Edge.home if combines else Edge.dispatch, near, rank, lane, *way)
        if combines:
            out = (constants, Slot.out, True, limit_ns, tape)
            reduce_tokens(near, rank, lane, ring, *out)
        else:
            own = (cta // num_ranks) * constants.num_warps + warp
            all_warps = num_ctas * constants.num_warps
            wait_rows(near, rank, own, all_warps, lane, constants, limit_ns)
        end_tape(tape)

    return communication_host(kernel, num_threads)
