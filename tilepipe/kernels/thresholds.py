"""What a rank waits for, written by the CTAs that plan it: tiles and counters, tokens at home.

Knows nothing of tickets and orders.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from tilepipe.config.choices import Granularity
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.memory import LANES
from tilepipe.kernels.scan import last_at_most, sum_of

__all__ = ["write_home_waits", "write_waits"]


@cute.jit
def write_waits(member: cutlass.Constexpr, experts: cutlass.Constexpr):
    """Tiles of this rank, and what its consumer waits for; a share of each member."""
    settings, plan = member.plan.settings, member.plan
    local, tile_m, rank = settings.num_experts_per_rank, settings.tile_m, member.rank
    words, tile_rows = member.at(Slot.words, Int32), member.at(Slot.tiles, Int32)
    expected = member.at(Slot.ready_expected, Int32)
    of_rank = member.at(Slot.rank_expected, Int32)
    tiles, rows, total, sent = experts.tiles, experts.rows, experts.total, experts.sent
    first = rank * local
    num_tiles = tiles[first + local] - tiles[first]
    per_expert = settings.granularity is Granularity.expert
    for tile in cutlass.range(member.first, num_tiles, member.step, unroll=1):
        expert = last_at_most(tiles, first, local, tiles[first] + tile)
        done = (tiles[first] + tile - tiles[expert]) * tile_m
        valid = cutlass.min(total[expert] - done, tile_m)
        tile_rows[2 * tile] = rows[expert] - rows[first] + done
        tile_rows[2 * tile + 1] = valid
        if cutlass.const_expr(not per_expert):
            expected[tile] = valid
    if cutlass.const_expr(per_expert):
        for i in cutlass.range(member.first, local, member.step, unroll=1):
            expected[i] = total[first + i]
    if member.number == 0:
        for peer in cutlass.range(member.thread, settings.num_ranks, plan.num_threads, unroll=1):
            owed = sent[(peer + 1) * local] - sent[peer * local]
            of_rank[peer] = owed * settings.homeward.num_chunks
        if member.thread < LANES:
            received = sum_of(total, first, first + local, member.thread)
            if member.thread == 0:
                words[int(Word.num_sends)] = sent[settings.num_experts]
                words[int(Word.num_tiles)] = num_tiles
                words[int(Word.num_counters)] = Int32(local) if per_expert else num_tiles
                words[int(Word.num_returns)] = received


@cute.jit
def write_home_waits(member: cutlass.Constexpr):
    """What home waits for, token by token; not by the leader, which has the gate to pass."""
    plan, settings = member.plan, member.plan.settings
    num_topk, threads = settings.num_topk, plan.num_threads
    ids, at_home = member.at(Slot.topk_idx, Int32), member.at(Slot.token_expected, Int32)
    free = max(plan.num_ctas - 1, 1)
    if member.number > 0 or cutlass.const_expr(plan.num_ctas == 1):
        begin = cutlass.max(member.number - 1, 0) * threads + member.thread
        num_tokens = member.at(Slot.words, Int32)[int(Word.num_tokens)]
        for token in cutlass.range(begin, num_tokens, free * threads, unroll=1):
            kept = Int32(0)
            for slot in cutlass.range_constexpr(num_topk):
                if ids[token * num_topk + slot] >= 0:
                    kept += settings.homeward.num_chunks
            at_home[token] = kept
