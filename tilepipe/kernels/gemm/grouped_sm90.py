"""Grouped GEMM on Hopper: persistent, warp-specialised, TMA loads, WGMMA, tiles handed out late.

Knows nothing of who brings rows and who takes them away: hooks wait before a tile's first load and
publish after its last store.

Warps. Of the first warpgroup, which gives its registers away, warp 0 loads, warp 1 stores and
publishes, warp 2 of each cluster's first CTA hands tiles out; warp 3 has no role of the GEMM and,
in a fused launch, may communicate beside it. Two more warpgroups multiply.

Hand-out. A ticket stands for an output tile of a cluster. It is claimed when the loads of the tile
before are almost all issued: earlier would tie tiles to CTAs that are still busy, later would leave
the ring empty. The producer says when, by reading the record of the tile before only then. The last
claim of a launch puts the queue back to 0, so that nothing has to be reset between launches.

Clusters. A cluster takes M tiles of one expert side by side; every CTA loads half of the B tile and
multicasts it. A stage is free once both CTAs have multiplied out of it. An odd last M tile leaves
its neighbour a null tile: that CTA loads its half of B, multiplies and stores nothing. Nor are
blocks of 64 rows of which an expert has none loaded for cooperative warpgroups, or multiplied by
them: up to half of a tile.

Rows. The warp that hands tiles out waits for a tile's rows and acquires them before it hands the
record over, while the tile before is still loaded: looking at a flag takes the producer's time
between two tiles otherwise. The record's barrier orders both before the producer, which fences the
async proxy for itself. In a cluster each CTA's producer waits for the rows of its own M tile; since
it loads B, too, a CTA whose rows are late holds up its neighbour.

A wait for rows that reaches its limit leaves a record and raises the abort word; the CTA goes on
with rows that are not there, publishes nothing from then on, and no further tile is handed out.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.memory import SmemAllocator

from tilepipe.config.choices import Granularity, StoreMode
from tilepipe.fabric.table import Role, Slot, Word
from tilepipe.kernels.gemm.barriers import (
    Item,
    Named,
    arrive,
    arrive_named,
    hand_word,
    meet_all,
    meet_named,
)
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.gemm.epilogue import (
    packed_words,
    row_scales,
    stage_words,
    store_words_directly,
)
from tilepipe.kernels.gemm.operands import (
    atoms,
    global_tensors,
    make_tiled_mma,
    part_of,
    partition,
    smem_layouts,
)
from tilepipe.kernels.gemm.plan import (
    BLOCK_M,
    NUM_CONSUMERS,
    STAGED_COLUMNS,
    STAGING_BUFFERS,
    TILE_K,
    KernelPlan,
)
from tilepipe.kernels.gemm.roles import (
    HANDED,
    NUM_THREADS,
    THREADS_OF_GROUP,
    WARPS_OF_GROUP,
    Operands,
    Place,
    Shared,
    late_of,
    read_record,
    take_record,
)
from tilepipe.kernels.gemm.stores import descriptor_pointer, store_tiles
from tilepipe.kernels.gemm.tiles import RECORD_WORDS, TileWord, place_of_ticket
from tilepipe.kernels.memory import LANES, address, buffer, element, word
from tilepipe.kernels.semaphore import (
    Scope,
    claim,
    load_relaxed,
    set_relaxed,
    wait_telling,
)
from tilepipe.kernels.stamps import Event, lap
from tilepipe.kernels.watchdog import give_up

__all__ = [
    "HAND_OUT_WARP",
    "IDLE_WARP",
    "NUM_THREADS",
    "REGISTERS",
    "Operands",
    "Place",
    "allocate",
    "gemm_entry",
    "init_barriers",
    "work_on_tiles",
]

LOAD_WARP, STORE_WARP, HAND_OUT_WARP, IDLE_WARP = 0, 1, 2, 3
# Registers of a thread that loads and of one that multiplies, in units of 8: (40 + 2 x 232) x 128
# = 64 512 of 65 536; where the idle warp has work, those that multiply leave it some of theirs.
REGISTERS = 40, 232


# ---- role: hand tiles out


@cute.jit
def _hand_out(place: cutlass.Constexpr, shared: cutlass.Constexpr, num_clusters: Int32):
    """Claim ticket after ticket and hand the records over, a last one that says there are none."""
    plan = place.plan
    words = address(place.table, place.rank, Slot.words)
    tiles = buffer(address(place.table, place.rank, plan.tiles_slot), Int32)
    num_tickets = buffer(words, Int32)[int(plan.tiles_word)] * plan.num_n_tiles
    if cutlass.const_expr(plan.problem.wait is not None):
        gates = _gates(place)
        abort = element(gates[Slot.abort], Int32(0), Int32)
    count = Int32(0)
    more = Boolean(True)
    while more:
        if count > 0:
            place.wait(shared.taken + count % HANDED, (count - 1) // HANDED % 2, Item.taken)
        if cutlass.const_expr(plan.problem.wait is not None):
            # Beside the claim: what is looked at behind it comes a way to memory later.
            stop = load_relaxed(abort, Int32, Scope.sys)
        ticket = Int32(0)
        if place.lane == 0:
            ticket = claim(word(words, Word.gemm_queue), Int32(1), Scope.gpu)
        ticket = cute.arch.shuffle_sync(ticket, 0)
        more = ticket < num_tickets
        if ticket == num_tickets + num_clusters - 1:
            # Every cluster's last claim but this one has been made.
            if place.lane == 0:
                set_relaxed(word(words, Word.gemm_queue), Int32(0), Scope.gpu)
        if cutlass.const_expr(plan.problem.wait is not None):
            more = more and cute.arch.vote_all_sync(stop == 0)
        own = Int32(-1)  # the word of this lane; as `valid` it says that no tile is left
        if more:
            at = ticket // plan.num_n_tiles * RECORD_WORDS
            there = place_of_ticket(
                ticket,
                tiles[at + int(TileWord.group_place)],
                tiles[at + int(TileWord.group_size)],
                num_n_tiles=plan.num_n_tiles,
                num_chunks=plan.num_chunks,
            )
            own = tiles[there.cluster_tile * RECORD_WORDS + place.lane % RECORD_WORDS]
            if cutlass.const_expr(plan.waits_ahead):
                first_row, valid, expert, m_tile = (
                    cute.arch.shuffle_sync(own, int(number))
                    for number in (
                        TileWord.first_row,
                        TileWord.valid,
                        TileWord.expert,
                        TileWord.m_tile,
                    )
                )
                late = _wait_for_rows(place, gates, first_row, valid, expert, m_tile, False)
                late = Int32(cute.arch.vote_any_sync(late > 0))
                if place.lane % RECORD_WORDS == int(TileWord.late):
                    own = late
            if place.lane % RECORD_WORDS == int(TileWord.n_tile):
                own = there.n_tile
        slot = count % HANDED
        hand_word(shared.records + slot * RECORD_WORDS, place.lane, own, plan.cluster_m)
        if place.lane < plan.cluster_m:
            arrive(shared.handed + slot, place.lane, plan.cluster_m > 1)
        count += 1


# ---- role: load


def _gates(place: Place) -> dict[Slot, Int64]:
    """Where what a wait looks at lies: found once, since fences make every look at the table one at
    memory."""
    slots = (Slot.abort, Slot.words, Slot.ready_expected, Slot.ready)
    if place.plan.problem.wait is Granularity.token:
        slots = (Slot.abort, Slot.words, Slot.row_flag)
    return {slot: address(place.table, place.rank, slot) for slot in slots}


@cute.jit
def _wait_for_rows(
    place: cutlass.Constexpr,
    gates: cutlass.Constexpr,
    first_row: Int32,
    valid: Int32,
    expert: Int32,
    m_tile: Int32,
    loads: cutlass.Constexpr,  # whether this warp issues the loads of the rows, too
):
    """Return once the rows of a tile are here, or the launch is given up; and 1 where this lane's
    first look did not find all.

    Every lane acquires for itself: which one issues the loads is the hardware's choice.
    """
    table, rank, plan = place.table, place.rank, place.plan
    abort = element(gates[Slot.abort], Int32(0), Int32)
    words = buffer(gates[Slot.words], Int32)
    epoch, late = words[int(Word.epoch)], Int32(0)
    if cutlass.const_expr(plan.problem.wait is Granularity.token):
        # Rows come from peers or this GPU, by bulk copies or stores: scope sys, read by TMA.
        for row in cutlass.range(first_row + place.lane, first_row + valid, LANES, unroll=1):
            flag = element(gates[Slot.row_flag], row, Int32)
            came, waited = wait_telling(flag, epoch, abort, place.limit_ns, Scope.sys, loads)
            late = late | Int32(waited)
            if not came:
                seen = load_relaxed(flag, Int32, Scope.sys)
                give_up(
                    *(table, rank, place.num_ranks, Role.gemm_receive_row),
                    *(row, expert, epoch, epoch, seen),
                )
        cute.arch.sync_warp()
        if cutlass.const_expr(loads):
            cute.arch.fence_proxy("async.global")
    else:
        by_expert = plan.problem.wait is Granularity.expert
        counter = expert if by_expert else m_tile
        expected = buffer(gates[Slot.ready_expected], Int32)[counter]
        ready = element(gates[Slot.ready], counter, Int32)
        # Rows come from peers or this GPU, by bulk copies or stores: scope sys, read by TMA.
        came, waited = wait_telling(ready, expected, abort, place.limit_ns, Scope.sys, loads)
        late = Int32(waited)
        if not came and place.lane == 0:
            seen = load_relaxed(ready, Int32, Scope.sys)
            give_up(
                *(table, rank, place.num_ranks, Role.gemm_receive),
                *(counter, expert, epoch, expected, seen),
            )
        cute.arch.sync_warp()
    return late


def _sides_of_a(plan: KernelPlan, shared: Shared, operands: Operands, first_row: Int32):
    """Shared and global side of each part of an A tile, of all stages and all K."""
    rows = plan.tile_m // plan.num_a_parts
    own = cute.domain_offset((first_row, 0), operands.a)
    own = cute.local_tile(own, (rows, TILE_K), (None, None))
    return [
        partition(operands.tma_a, part_of(shared.a, part, rows, plan), own[None, None, part, None])
        for part in range(plan.num_a_parts)
    ]


def _sides_of_b(plan: KernelPlan, shared: Shared, operands: Operands, expert: Int32, n_tile: Int32):
    """The same of a B tile. Part 0 is gate and 1 is up; of a tile without them they are halves."""
    rows, sides = plan.tile_n // plan.num_b_parts, []
    concatenated = plan.problem.epilogue is Epilogue.swiglu_concatenated
    for part in range(plan.num_b_parts):
        column = n_tile * plan.tile_n + part * rows
        if concatenated:
            column = n_tile * rows + part * (plan.problem.n // 2)
        own = cute.domain_offset((column, 0), operands.b[None, None, expert])
        own = cute.local_tile(own, (rows, TILE_K), (0, None))
        sides.append(partition(operands.tma_b, part_of(shared.b, part, rows, plan), own))
    return sides


@cute.jit
def _load(place: cutlass.Constexpr, shared: cutlass.Constexpr, operands: cutlass.Constexpr):
    """Fill stage after stage with the operands of every tile of this CTA."""
    plan = place.plan
    parts, stages = plan.num_b_parts, plan.num_stages
    part_m = plan.tile_m // plan.num_a_parts
    a_bytes, b_bytes = (rows * TILE_K * 2 for rows in (part_m, plan.tile_n))
    mask = cutlass.Int16((1 << plan.cluster_m) - 1)
    wide = {}
    if cutlass.const_expr(operands.b_descriptor is not None):
        # Written by the host, and read by another proxy than any before.
        cpasync.fence_tma_desc_acquire(descriptor_pointer(operands.b_descriptor))
        generic = descriptor_pointer(operands.b_descriptor, cute.AddressSpace.generic)
        wide = {"tma_desc_ptr": generic}
    waits_here = plan.problem.wait is not None and not plan.waits_ahead
    if cutlass.const_expr(waits_here):
        gates = _gates(place)
    count, stage, phase = Int32(0), Int32(0), Int32(1)
    more = Boolean(True)
    while more:
        more, first_row, valid, expert, n_tile, m_tile, _ = read_record(place, shared, count)
        if more:
            if cutlass.const_expr(plan.waits_ahead):
                # What the other warp has acquired is read by copies that lanes of this one issue.
                cute.arch.fence_proxy("async.global")
                waited = late_of(shared, count)
                # Time in which its record did not come is a wait for rows where they were late.
                if waited == 0:
                    lap(place.tape, Event.stand)
                lap(place.tape, Event.wait, m_tile, waited, valid)
            else:
                lap(place.tape, Event.stand)
            b_sides = _sides_of_b(plan, shared, operands, expert, n_tile)
            if cutlass.const_expr(waits_here):
                if valid > 0:
                    late = _wait_for_rows(place, gates, first_row, valid, expert, m_tile, True)
                    lap(place.tape, Event.wait, m_tile, late, valid)
            a_sides = _sides_of_a(plan, shared, operands, first_row)
            expected = Int32(b_bytes)
            for part in cutlass.range_constexpr(plan.num_a_parts):
                expected += Int32(a_bytes) if valid > part * part_m else Int32(0)
            for k in cutlass.range(plan.num_k_tiles, unroll=1):
                if k == plan.claim_at:
                    take_record(place, shared, count + 1)  # of the tile before
                place.wait(shared.empty + stage, phase, Item.empty)
                barrier = shared.full + stage
                if place.lane == 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected)
                cute.arch.sync_warp()
                for part in cutlass.range_constexpr(plan.num_a_parts):
                    to_a, from_a = a_sides[part]
                    # Rows that are multiplied by nobody need not come.
                    if valid > part * part_m:
                        cute.copy(
                            operands.tma_a, from_a[None, k], to_a[None, stage], tma_bar_ptr=barrier
                        )
                for part in cutlass.range_constexpr(parts):
                    to_b, from_b = b_sides[part]
                    if cutlass.const_expr(plan.cluster_m == 1):
                        cute.copy(
                            *(operands.tma_b, from_b[None, k], to_b[None, stage]),
                            tma_bar_ptr=barrier,
                            **wide,
                        )
                    elif place.cta == part:
                        cute.copy(
                            *(operands.tma_b, from_b[None, k], to_b[None, stage]),
                            tma_bar_ptr=barrier,
                            mcast_mask=mask,
                        )
                stage += 1
                if stage == stages:
                    stage, phase = Int32(0), phase ^ 1
            lap(place.tape, Event.load, m_tile, n_tile, cutlass.max(valid, 0))
        count += 1


# ---- role: multiply


def _multiply_block(
    tiled_mma: cute.TiledMma, sums: cute.Tensor, fragments, i: int, step: int, stage: Int32
) -> None:
    """Start one K step of the warpgroup's i-th block of a tile."""
    frag_a, frag_b = fragments
    of_block = cute.append_ones(sums[None, i, 0], up_to_rank=3)
    a = cute.append_ones(frag_a[None, i, step, stage], up_to_rank=2)
    b = cute.append_ones(frag_b[None, 0, step, stage], up_to_rank=2)
    cute.gemm(tiled_mma, of_block, a, b, of_block)


@cute.jit
def _multiply_tile(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    sums: cute.Tensor,
    fragments: cutlass.Constexpr,
    num_blocks: cutlass.Constexpr,
    first_stage: Int32,
    first_phase: Int32,
):
    """Multiply all K tiles of the warpgroup's first blocks of a tile; every stage is given back one
    K tile late, once read."""
    plan = place.plan
    frag_a, _ = fragments
    # Of its own: what is set in one branch is no value of another.
    tiled_mma = make_tiled_mma(plan)
    stage, phase, last = first_stage, first_phase, first_stage
    tiled_mma.set(warpgroup.Field.ACCUMULATE, False)
    place.wait(shared.full + stage, phase, Item.full)
    lap(place.tape, Event.stand)
    warpgroup.fence()
    for step in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
        for i in cutlass.range_constexpr(num_blocks):
            _multiply_block(tiled_mma, sums, fragments, i, step, stage)
        tiled_mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    for _ in cutlass.range(plan.num_k_tiles - 1, unroll=1):
        last = stage
        stage += 1
        if stage == plan.num_stages:
            stage, phase = Int32(0), phase ^ 1
        place.wait(shared.full + stage, phase, Item.full)
        warpgroup.fence()
        for step in cutlass.range_constexpr(cute.size(frag_a, mode=[2])):
            for i in cutlass.range_constexpr(num_blocks):
                _multiply_block(tiled_mma, sums, fragments, i, step, stage)
        warpgroup.commit_group()
        warpgroup.wait_group(1)
        _give_back(place, shared, last)
    warpgroup.wait_group(0)
    _give_back(place, shared, stage)


@cute.jit
def _pass_tile(
    place: cutlass.Constexpr, shared: cutlass.Constexpr, first_stage: Int32, first_phase: Int32
):
    """Give back the stages of a tile of which this warpgroup has no row."""
    plan = place.plan
    stage, phase = first_stage, first_phase
    for _ in cutlass.range(plan.num_k_tiles, unroll=1):
        place.wait(shared.full + stage, phase, Item.full)
        _give_back(place, shared, stage)
        stage += 1
        if stage == plan.num_stages:
            stage, phase = Int32(0), phase ^ 1


@cute.jit
def _give_back(place: cutlass.Constexpr, shared: cutlass.Constexpr, stage: Int32):
    """Tell the producers of all CTAs that fill this stage that this warp has read it."""
    cluster_m = place.plan.cluster_m
    cute.arch.sync_warp()
    if place.lane < cluster_m:
        arrive(shared.empty + stage, place.lane, cluster_m > 1)


@cute.jit
def _emit_tile(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    sums: cute.Tensor,
    group: Int32,  # warpgroup
    first_row: Int32,
    valid: Int32,
    n_tile: Int32,
    send: cutlass.Constexpr,
    targets: cutlass.Constexpr,  # of the rows of each block, as `send` has found them
):
    """Turn the sums of this warpgroup into bf16 and stage, store or send them, block by block."""
    plan = place.plan
    epilogue = plan.problem.epilogue
    warp = place.warp % WARPS_OF_GROUP
    per_block = plan.tile_n // 2  # sums of a thread: two row halves of two columns in eight
    for i in cutlass.range_constexpr(plan.blocks_per_group):
        block = i * plan.groups_per_tile
        if cutlass.const_expr(plan.groups_per_tile > 1):
            block = block + group
        num_rows = valid - block * BLOCK_M
        if num_rows > 0:
            of_block = cute.make_tensor(sums.iterator + i * per_block, cute.make_layout(per_block))
            row = first_row + block * BLOCK_M
            scales = None
            if cutlass.const_expr(epilogue is Epilogue.row_scale):
                scales = row_scales(operands.scale, row, num_rows, warp, place.lane)
            width = STAGED_COLUMNS if plan.tuning.store is StoreMode.tma else STAGED_COLUMNS // 2
            for part in cutlass.range_constexpr(plan.out_tile_n // width):
                words = packed_words(
                    *(of_block, part * width // 8, width // 8, plan.tile_n // 8),
                    *(scales, place.lane, epilogue),
                )
                buffer_idx = group * STAGING_BUFFERS + plan.turn_of(i, part)
                if cutlass.const_expr(send is not None):
                    at, column = _block_address(shared.d, buffer_idx), part * width
                    send.send_block(
                        words, at, targets[i], n_tile * plan.out_tile_n + column, warp, place.lane
                    )
                elif cutlass.const_expr(plan.stores_by_tma):
                    meet_named(int(Named.read) + buffer_idx)
                    stage_words(words, _block_address(shared.d, buffer_idx), warp, place.lane)
                    cute.arch.fence_proxy("async.shared", space="cta")
                    arrive_named(int(Named.written) + buffer_idx)
                else:
                    column = n_tile * plan.out_tile_n + part * width
                    store_words_directly(
                        words,
                        operands.d_address + (Int64(row) * plan.d_pitch + Int64(column)) * 2,
                        plan.d_pitch * 2,
                        num_rows,
                        plan.out_n - column,
                        warp,
                        place.lane,
                    )


def _block_address(d: cute.Tensor, buffer_idx: Int32) -> Int32:
    return Int32(d.iterator.toint()) + buffer_idx * (BLOCK_M * STAGED_COLUMNS * 2)


@cute.jit
def _multiply(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    group: Int32,  # warpgroup, 0 or 1
    send: cutlass.Constexpr = None,
):
    """Multiply the tiles of this CTA, or every second one, and hand each on."""
    plan = place.plan
    slice_mma = tiled_mma.get_slice(
        cute.make_layout(plan.groups_per_tile, stride=THREADS_OF_GROUP)(
            group if plan.groups_per_tile > 1 else 0
        )
    )
    frag_a = tiled_mma.make_fragment_A(slice_mma.partition_A(shared.a))
    frag_b = tiled_mma.make_fragment_B(slice_mma.partition_B(shared.b))
    sums = cute.make_rmem_tensor(slice_mma.partition_shape_C((plan.tile_m, plan.tile_n)), Float32)
    count, stage, phase = Int32(0), Int32(0), Int32(0)
    if cutlass.const_expr(plan.is_ping_pong):
        if group == 1:
            arrive_named(int(Named.turn), 2 * THREADS_OF_GROUP)
    more = Boolean(True)
    while more:
        more, first_row, valid, _, n_tile, m_tile, _ = read_record(place, shared, count)
        if more:
            take_record(place, shared, count)
            mine = Boolean(True)
            if cutlass.const_expr(plan.is_ping_pong):
                mine = count % 2 == group
            if mine:
                if cutlass.const_expr(plan.is_ping_pong):
                    # Phases tell odd from even: only behind the other group's last wait is a
                    # phase of this tile's the next one.
                    meet_named(int(Named.turn) + group, 2 * THREADS_OF_GROUP)
                own_rows = valid
                if cutlass.const_expr(plan.groups_per_tile > 1):
                    own_rows = valid - group * BLOCK_M
                apart = BLOCK_M * plan.groups_per_tile
                targets = None
                if cutlass.const_expr(send is not None):
                    above = valid - own_rows
                    targets = send.find_rows(place, first_row + above, own_rows)
                fewest = 0 if plan.skips_blocks else plan.blocks_per_group - 1
                for i in cutlass.range_constexpr(fewest, plan.blocks_per_group):
                    here = own_rows > (i * apart if plan.skips_blocks else 0)
                    if cutlass.const_expr(i + 1 < plan.blocks_per_group):
                        here = here and own_rows <= (i + 1) * apart
                    if here:
                        _multiply_tile(place, shared, sums, (frag_a, frag_b), i + 1, stage, phase)
                if own_rows <= 0:
                    _pass_tile(place, shared, stage, phase)
                if cutlass.const_expr(plan.is_ping_pong):
                    arrive_named(int(Named.turn) + 1 - group, 2 * THREADS_OF_GROUP)
                _emit_tile(
                    *(place, shared, operands, sums, group, first_row, valid, n_tile),
                    *(send, targets),
                )
                if valid > 0:
                    lap(place.tape, Event.tile, m_tile, n_tile, valid)
                    if cutlass.const_expr(plan.problem.publish and plan.clip is None):
                        # An aligned barrier counts whole warps, and lanes part where rows end.
                        cute.arch.sync_warp()
                        arrive_named(int(Named.written) + plan.told_at(group, count))
            ahead = stage + plan.num_k_tiles
            stage = ahead % plan.num_stages
            phase = phase ^ (ahead // plan.num_stages % 2)
        count += 1


# ---- the kernel and its host function


@cute.jit
def init_barriers(shared: cutlass.Constexpr, plan: cutlass.Constexpr, thread: Int32):
    """Set up all barriers of a CTA; nobody may use them before `meet_all`."""
    cluster_m = plan.cluster_m
    if thread == 0:
        for i in cutlass.range_constexpr(plan.num_stages):
            cute.arch.mbarrier_init(shared.full + i, 1)
            # Every warp that multiplies out of a stage, of every CTA that it is filled for.
            cute.arch.mbarrier_init(
                shared.empty + i, WARPS_OF_GROUP * plan.groups_per_tile * cluster_m
            )
        readers = NUM_CONSUMERS * WARPS_OF_GROUP + 1 + plan.uses_store_warp
        for i in cutlass.range_constexpr(HANDED):
            cute.arch.mbarrier_init(shared.handed + i, 1)
            cute.arch.mbarrier_init(shared.taken + i, readers * cluster_m)
        cute.arch.mbarrier_init_fence()


def allocate(memory, plan: KernelPlan, layouts) -> Shared:
    """Shared memory of a CTA, out of an allocator."""
    layout_a, layout_b, layout_d = layouts
    a, b = (
        memory.allocate_tensor(BFloat16, layout.outer, byte_alignment=1024, swizzle=layout.inner)
        for layout in (layout_a, layout_b)
    )
    d = None
    if plan.tuning.store is StoreMode.tma:
        # Four warps of 16 rows write a block, two warpgroups into two buffers each.
        assert WARPS_OF_GROUP * 16 == BLOCK_M, "rows that the epilogue's threads write"
        assert cute.cosize(layout_d) * 2 == plan.staging_bytes, "staging of another size"
        d = memory.allocate_tensor(
            BFloat16, layout_d.outer, byte_alignment=1024, swizzle=layout_d.inner
        )
    barriers = memory.allocate_array(Int64, 2 * plan.num_stages + 2 * HANDED, byte_alignment=16)
    records = memory.allocate_array(Int32, RECORD_WORDS * HANDED, byte_alignment=16)
    return Shared(
        a=a,
        b=b,
        d=d,
        full=barriers,
        empty=barriers + plan.num_stages,
        handed=barriers + 2 * plan.num_stages,
        taken=barriers + (2 * plan.num_stages + HANDED),
        records=records,
    )


@cute.jit
def work_on_tiles(
    place: cutlass.Constexpr,
    shared: cutlass.Constexpr,
    operands: cutlass.Constexpr,
    tiled_mma: cute.TiledMma,
    num_clusters: Int32,  # of the rank that take tiles
    finish: cutlass.Constexpr = None,  # traced for the warps that have multiplied; None: nothing
    send: cutlass.Constexpr = None,  # with GemmProblem.sends: where rows go, and who is told
    beside: cutlass.Constexpr = None,  # traced for the warp that the GEMM leaves idle; None: it is
    registers: cutlass.Constexpr = REGISTERS,
):
    """All roles of a CTA, until no tile is left. Called by all threads, behind `meet_all`."""
    plan, warp = place.plan, place.warp
    if warp < WARPS_OF_GROUP:
        cute.arch.setmaxregister_decrease(registers[0])
        if warp == LOAD_WARP:
            _load(place, shared, operands)
        if cutlass.const_expr(plan.uses_store_warp):
            if warp == STORE_WARP:
                # The record before the first tile has been read: all but the producer say so.
                take_record(place, shared, Int32(1))
                store_tiles(place, shared, operands, send)
        if warp == HAND_OUT_WARP and place.cta == 0:
            _hand_out(place, shared, num_clusters)
        if cutlass.const_expr(beside is not None):
            if warp == IDLE_WARP:
                beside()
    else:
        cute.arch.setmaxregister_increase(registers[1])
        take_record(place, shared, Int32(1))
        _multiply(place, shared, operands, tiled_mma, warp // WARPS_OF_GROUP - 1, send)
        if cutlass.const_expr(finish is not None):
            finish()
    if cutlass.const_expr(plan.cluster_m > 1):
        # The neighbour may still arrive at barriers of this CTA.
        meet_all(plan.cluster_m)


def gemm_entry(plan: KernelPlan, *, num_ranks: int = 1) -> Any:
    """Host function of the grouped GEMM of one rank."""

    @cute.kernel
    def kernel(
        table: cute.Pointer,
        rank: Int32,
        limit_ns: Int64,
        num_clusters: Int32,
        tma_a: cute.CopyAtom,
        m_a: cute.Tensor,
        tma_b: cute.CopyAtom,
        m_b: cute.Tensor,
        tma_d: cute.CopyAtom,
        m_d: cute.Tensor,
        plain_d: cute.Tensor,
        scale: cute.Pointer,
        workspace: Int64,
        b_descriptor: Int64,
        tiled_mma: cute.TiledMma,
        layout_a: cute.ComposedLayout,
        layout_b: cute.ComposedLayout,
        layout_d: cute.ComposedLayout,
    ):
        thread, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta = Int32(0)
        if cutlass.const_expr(plan.cluster_m > 1):
            cta = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == LOAD_WARP:
            cpasync.prefetch_descriptor(tma_a)
            cpasync.prefetch_descriptor(tma_b)
        shared = allocate(SmemAllocator(), plan, (layout_a, layout_b, layout_d))
        place = Place(plan, table, rank, num_ranks, limit_ns, warp, cute.arch.lane_idx(), cta)
        operands = Operands(
            *(tma_a, m_a, tma_b, m_b, tma_d, m_d),
            *(Int64(plain_d.iterator.toint()), plain_d, scale, workspace),
            b_descriptor if plan.widens_b else None,
        )
        init_barriers(shared, plan, thread)
        meet_all(plan.cluster_m)
        work_on_tiles(place, shared, operands, tiled_mma, num_clusters)

    @cute.jit
    def host(
        table: cute.Pointer,
        rank: Int32,
        a: cute.Pointer,  # (rows, k)
        b: cute.Pointer,  # (experts, n, k), or (experts, k, n) with b_major=n
        d: cute.Pointer,  # (rows, out_n)
        scale: cute.Pointer,  # (rows,) float32; not read but by Epilogue.row_scale
        workspace: cute.Pointer,
        b_descriptor: cute.Pointer,  # 128 bytes; not read but with KernelPlan.widens_b
        rows: Int32,  # that A and D have room for
        num_ctas: Int32,  # whole clusters
        limit_ns: Int64,  # of one wait
        stream: cuda.CUstream,
    ):
        m_a, m_b, plain_d, m_d = global_tensors(plan, a, b, d, rows)
        layouts = smem_layouts(plan)
        (tma_a, t_a), (tma_b, t_b), (tma_d, t_d) = atoms(plan, layouts, m_a, m_b, m_d)
        kernel(
            *(table, rank, limit_ns, num_ctas // plan.cluster_m),
            *(tma_a, t_a, tma_b, t_b, tma_d, t_d, plain_d),
            *(scale, Int64(workspace.toint()), Int64(b_descriptor.toint())),
            *(make_tiled_mma(plan), *layouts),
        ).launch(
            grid=[num_ctas, 1, 1],
            block=[NUM_THREADS, 1, 1],
            cluster=[plan.cluster_m, 1, 1],
            min_blocks_per_mp=1,
            stream=stream,
        )

    return host
