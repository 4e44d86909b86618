"""Experts of a rank's slots counted on the device, and which slot is which of its expert.

Knows nothing of layouts and tickets. Each CTA of a rank has a stretch of tokens, each warp a part
of that stretch's (token, slot) list, of which it has several groups under way at once.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.memory import LANES
from tilepipe.kernels.tickets import ceil_div

__all__ = ["AHEAD", "count_own", "gather_counts", "groups_of", "tokens_of"]

# Groups of a warp's width that a warp has under way.
AHEAD = 4


def tokens_of(member) -> tuple[Int32, Int32]:
    """First token of a member's stretch, and the one behind its last."""
    num_tokens = member.at(Slot.words, Int32)[int(Word.num_tokens)]
    each = ceil_div(num_tokens, member.plan.num_ctas)
    begin = cutlass.min(member.number * each, num_tokens)
    return begin, cutlass.min(begin + each, num_tokens)


@cute.jit
def groups_of(member: cutlass.Constexpr, tokens: cutlass.Constexpr) -> tuple[Int32, Int32, Int32]:
    """Of this thread: first slot, the slot behind its warp's last, batches of its warp."""
    plan, lane, warp = member.plan, member.thread % LANES, member.thread // LANES
    begin, end = tokens[0] * plan.settings.num_topk, tokens[1] * plan.settings.num_topk
    each = ceil_div(ceil_div(end - begin, LANES), plan.num_warps) * LANES
    first = begin + warp * each
    return first + lane, cutlass.min(first + each, end), ceil_div(each, AHEAD * LANES)


def _lanes_below(lane: Int32) -> Uint32:
    return (Uint32(1) << Uint32(lane)) - Uint32(1)


@cute.jit
def _count_batch(
    member: cutlass.Constexpr,
    place: Int32,  # of this lane's first slot
    end: Int32,
    tensors: cutlass.Constexpr,  # ids, histogram, ranks, bad place
):
    """Count some groups of slots; keep how many of the warp have come before each."""
    num_experts = member.plan.settings.num_experts
    lane, warp = member.thread % LANES, member.thread // LANES
    ids, histogram, ranks, bad = tensors
    experts, same = [], []
    for ahead in cutlass.range_constexpr(AHEAD):
        expert = Int32(-1)
        if place + ahead * LANES < end:
            expert = ids[place + ahead * LANES]
        experts.append(expert)
    for ahead in cutlass.range_constexpr(AHEAD):
        expert = experts[ahead]
        if expert < -1 or expert >= num_experts:
            bad[0] = place + ahead * LANES + 1
            expert = Int32(-1)
        experts[ahead] = expert
        same.append(cute.arch.match_sync(0xFFFFFFFF, expert))
    for ahead in cutlass.range_constexpr(AHEAD):
        expert = experts[ahead]
        lower = Int32(cute.arch.popc(same[ahead] & _lanes_below(lane)))
        cell, before = warp * num_experts + expert, Int32(0)
        if expert >= 0:
            before = histogram[cell]
            ranks[place + ahead * LANES] = before + lower
        cute.arch.sync_warp()
        if expert >= 0 and lower == 0:
            histogram[cell] = before + Int32(cute.arch.popc(same[ahead]))
        cute.arch.sync_warp()


@cute.jit
def count_own(
    member: cutlass.Constexpr,
    tokens: cutlass.Constexpr,
    histogram: cute.Tensor,  # (warps, num_experts): afterwards rows of lower warps
    bad: cute.Tensor,  # (1,) of shared memory
    counts: cute.Tensor,  # (num_ctas, num_experts + 1): rows of every member, bad place last
    ranks: cute.Tensor,  # (slots,) rows of the warp before each
):
    """Count the rows of this member's tokens, warp by warp and in all."""
    plan, thread = member.plan, member.thread
    num_experts = plan.settings.num_experts
    for i in cutlass.range(thread, plan.num_warps * num_experts, plan.num_threads, unroll=1):
        histogram[i] = Int32(0)
    if thread == 0:
        bad[0] = Int32(0)
    cute.arch.sync_threads()
    ids = member.at(Slot.topk_idx, Int32)
    place, end, num_batches = groups_of(member, tokens)
    for batch in cutlass.range(num_batches, unroll=1):
        _count_batch(member, place + batch * (AHEAD * LANES), end, (ids, histogram, ranks, bad))
    cute.arch.sync_threads()
    own = member.number * (num_experts + 1)
    for expert in cutlass.range(thread, num_experts, plan.num_threads, unroll=1):
        rows = Int32(0)
        for warp in cutlass.range_constexpr(plan.num_warps):
            here = histogram[warp * num_experts + expert]
            histogram[warp * num_experts + expert] = rows
            rows += here
        counts[own + expert] = rows
    if thread == 0:
        counts[own + num_experts] = bad[0]


@cute.jit
def gather_counts(member: cutlass.Constexpr, counts: cute.Tensor):
    """Add up what the members have counted, where the gate sends it from."""
    plan, num_experts = member.plan, member.plan.settings.num_experts
    rows_to, words = member.at(Slot.rows_to, Int32), member.at(Slot.words, Int32)
    for expert in cutlass.range(member.thread, num_experts + 1, plan.num_threads, unroll=1):
        rows, most = Int32(0), Int32(0)
        for other in cutlass.range_constexpr(plan.num_ctas):
            found = counts[other * (num_experts + 1) + expert]
            rows += found
            most = cutlass.max(most, found)
        if expert < num_experts:
            rows_to[expert] = rows
        else:
            words[int(Word.bad_expert)] = most
