"""What a rank of the cuda executor keeps in device memory, buffer by buffer.

Knows nothing of torch and of launches.
"""

from dataclasses import replace

import numpy as np

from tilepipe.fabric.host import ArraySpec
from tilepipe.fabric.table import NUM_WORDS, Slot, Stamp
from tilepipe.kernels.gemm.tiles import RECORD_WORDS
from tilepipe.kernels.plan_constants import MAX_PLAN_CTAS, plan_constants_of
from tilepipe.schedule.layout import tile_capacity
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape, capacity_of

__all__ = ["buffer_specs", "counter_capacity"]


def counter_capacity(settings: PlanSettings, shape: Shape) -> int:
    """Readiness counters to reserve: one an M tile, or one an expert, whichever is more."""
    tiles = tile_capacity(settings, capacity_of(settings, shape))
    return max(tiles, settings.num_experts_per_rank)


def buffer_specs(settings: PlanSettings, shape: Shape) -> dict[Slot, ArraySpec]:
    """All buffers of a rank but its record; what an operation has no use for has no columns."""
    ranks, experts, topk = settings.num_ranks, settings.num_experts, settings.num_topk
    rows, counters = capacity_of(settings, shape), counter_capacity(settings, shape)
    tokens = max(shape.max_tokens, 1)
    tiles = tile_capacity(settings, rows)
    slots = tokens * topk
    dispatched, returned = shape.dispatch_hidden, shape.home_hidden
    held = max(rows, 1)
    home = settings.homeward
    has_second = settings.second_gemm is not None
    # Rows go home as a GEMM stores them: that it is timed with spare buffers, or is a layer's.
    pushes_stored = returned > 0 and (shape.spare or has_second)
    plan = replace(plan_constants_of(settings, shape), num_ctas=MAX_PLAN_CTAS)
    spare_in, spare_home = (int(shape.spare and size > 0) for size in (dispatched, returned))
    sizes: dict[Slot, tuple[tuple[int, ...], type]] = {
        Slot.recv_x: ((held, dispatched), np.int16),
        Slot.row_home: ((held,), np.int64),
        Slot.row_flag: ((held,), np.int32),
        Slot.ready: ((counters,), np.int32),
        Slot.home_y: ((slots, returned), np.int16),
        Slot.token_ready: ((tokens * settings.num_parts,), np.int32),
        Slot.rank_ready: ((ranks,), np.int32),
        Slot.mailbox: ((2, ranks, experts + 1), np.int64),
        Slot.gate_ready: ((ranks,), np.int32),
        Slot.abort: ((1,), np.int32),
        Slot.spare_x: ((held * spare_in, dispatched), np.int16),
        Slot.spare_row_home: ((held * spare_in,), np.int64),
        Slot.spare_flag: ((held * spare_in,), np.int32),
        Slot.spare_ready: ((counters * spare_in,), np.int32),
        Slot.spare_y: ((slots * spare_home, returned), np.int16),
        Slot.spare_token_ready: ((tokens * settings.num_parts * spare_home,), np.int32),
        Slot.spare_rank_ready: ((ranks * spare_home,), np.int32),
        Slot.links: ((2,), np.int64),
        Slot.words: ((NUM_WORDS,), np.int32),
        Slot.x: ((tokens, dispatched), np.int16),
        Slot.sends: ((slots, 4), np.int32),
        Slot.tiles: ((tiles, 2), np.int32),
        Slot.ready_expected: ((counters,), np.int32),
        Slot.rows_to: ((experts,), np.int32),
        Slot.counts: ((ranks, experts), np.int32),
        Slot.y: ((held if returned else 0, returned), np.int16),
        Slot.returns: ((held,), np.int32),
        Slot.out: ((tokens, returned), np.int16),
        Slot.reduced: ((tokens, returned), np.int16),
        Slot.topk_idx: ((tokens, topk), np.int32),
        Slot.topk_weights: ((tokens, topk), np.float32),
        Slot.token_expected: ((tokens,), np.int32),
        Slot.rank_expected: ((ranks,), np.int32),
        Slot.stamps: ((len(Stamp),), np.int64),
        Slot.scratch: ((plan.scratch_words,), np.int32),
        Slot.plan_rounds: ((MAX_PLAN_CTAS,), np.int64),
        # Tiles may be handed out in halves.
        Slot.gemm_tiles: ((2 * tiles, RECORD_WORDS), np.int32),
        Slot.second_tiles: ((2 * tiles * has_second, RECORD_WORDS), np.int32),
        Slot.push_units: ((tiles * home.num_chunks * pushes_stored, 4), np.int32),
        Slot.tile_stored: ((tiles * home.num_n_tiles,), np.int32),
    }
    return {slot: ArraySpec(shape=size, dtype=dtype) for slot, (size, dtype) in sizes.items()}
