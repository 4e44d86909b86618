"""Copy backend of bulk copies (TMA): rows stream through a warp's own ring in shared memory.

Knows nothing of which edge the rows belong to.

Lane 0 of a warp issues, waits and publishes: bulk groups belong to the thread that has committed
them. It starts loads as far ahead as stages allow and stores what has come; a stage is filled again
once the store out of it has read it. Flags follow by age: those of the oldest rows are raised when
the groups of their stores have completed, while younger ones are still under way.

Lanes hold what is known of the next rows, up to 32 and four to a claim, since a lone thread that
loads its row's place before each copy is bound by that latency (17 of 50 GB/s an SM on an H200).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from tilepipe.config.limits import max_flag_batch
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.edges import (
    Edge,
    count_of,
    first_of,
    flag_value,
    has_single_writers,
    note_beside,
    place_in_order,
    queue_of,
    second_of,
    way_of,
)
from tilepipe.kernels.memory import LANES, address, buffer, element, word
from tilepipe.kernels.pace import sleep_until, wait_for_link
from tilepipe.kernels.semaphore import (
    Scope,
    add_relaxed,
    claim,
    now_ns,
    release_bulk_fence,
    set_relaxed,
)
from tilepipe.kernels.stamps import Event, lap
from tilepipe.kernels.watchdog import abort_word

__all__ = ["BARRIER_BYTES", "CLAIM_ROWS", "batch_of", "init_ring", "move_rows", "ring_bytes"]

# Rows claimed at a time; lanes hold as many claims as fit into a warp.
CLAIM_ROWS = 4
BARRIER_BYTES = 8
# Tries between two looks at the clock; a try sleeps in hardware for a while.
_TRIES_PER_LOOK = 64


def ring_bytes(constants: Constants) -> int:
    """Shared memory of one warp's stages."""
    return constants.num_stages * constants.piece_bytes


def _stores_behind(constants: Constants) -> int:
    """Stores that may be under way at once; the oldest has read its stage before a load starts."""
    return (constants.num_stages + 1) // 2


def _loads_ahead(constants: Constants) -> int:
    """Pieces whose loads may be under way, the one that is stored next among them."""
    return constants.num_stages - _stores_behind(constants) + 1


def _rows_of_claim(edge: Edge) -> int:
    """Rows that a warp claims at a time. Of those that open a launch, for which every CTA waits,
    one: then all warps of all CTAs share them."""
    return 1 if edge is Edge.opening else CLAIM_ROWS


def batch_of(constants: Constants) -> int:
    """Rows whose flags share a release: as asked, or as many as lanes can remember."""
    return min(constants.flag_batch, max_flag_batch(constants.num_stages))


@cute.jit
def init_ring(barriers: Int32, lane: Int32, constants: cutlass.Constexpr):
    """Set up the barriers of a warp's stages; a fence and a CTA barrier must follow."""
    if lane < constants.num_stages:
        cute.arch.mbarrier_init(_shared(barriers + lane * BARRIER_BYTES), 1)


@cute.jit
def move_rows(
    edge: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    lane: Int32,
    ring: Int32,  # shared memory of this warp's stages
    barriers: Int32,  # shared memory of their barriers
    constants: cutlass.Constexpr,
    row_cost_ns: Int64,  # time that a row takes on a paced link
    latency_ns: Int64,  # of a paced link
    limit_ns: Int64,
    tape: cutlass.Constexpr = None,  # of the warp; None: it leaves no stamps
):
    """Push rows of `rank` until none is left to claim. Called by all lanes of a warp; never waits
    for a peer, so no two ranks can wait for each other."""
    stages, pieces, piece_bytes = constants.num_stages, constants.num_pieces, constants.piece_bytes
    last_bytes = constants.row_bytes - (pieces - 1) * piece_bytes
    behind, ahead, batch = _stores_behind(constants), _loads_ahead(constants), batch_of(constants)
    of_claim = _rows_of_claim(edge)
    num_claims = LANES // of_claim
    words = buffer(address(table, rank, Slot.words), Int32)
    count = words[int(count_of(edge))]
    epoch = words[int(Word.epoch)]

    base = cute.arch.shuffle_sync(_claim_rows(edge, table, rank, lane), 0)
    next_base = cute.arch.shuffle_sync(_claim_rows(edge, table, rank, lane), 0)
    claimed = _claim_rows(edge, table, rank, lane)
    own_claim, in_claim = lane // of_claim, lane % of_claim
    place = count  # of the row that this lane holds; count: none
    if own_claim == 0:
        place = base + in_claim
    elif own_claim == 1:
        place = next_base + in_claim
    a, b, c, d = first_of(edge, table, rank, place, count)
    second = second_of(edge, table, rank, a)
    # When the flag of the row that this lane holds, and those of all before it, may be raised.
    due, latest = Int64(0), Int64(0)

    loaded, load_row, load_part, load_stage = Int32(0), Int32(0), Int32(0), Int32(0)
    stored, store_row, store_part, store_stage = Int32(0), Int32(0), Int32(0), Int32(0)
    phase, told = Int32(0), Int32(0)  # told: rows whose flags are raised
    alive = cute.arch.vote_all_sync(abort_word(table, rank) == 0)
    while alive and cute.arch.shuffle_sync(place, store_row % LANES) < count:
        # Start loads as far ahead as stages allow.
        while loaded < stored + ahead and cute.arch.shuffle_sync(place, load_row % LANES) < count:
            if load_part == 0 and load_row % of_claim == 0:
                # A claim begins: the one after next gets its rows, the next one their ways.
                number = load_row // of_claim
                base = cute.arch.shuffle_sync(claimed, 0)
                if own_claim == (number + 1) % num_claims:
                    second = second_of(edge, table, rank, a)
                if own_claim == (number + 2) % num_claims:
                    place = base + in_claim
                    a, b, c, d = first_of(edge, table, rank, place, count)
                claimed = _claim_rows(edge, table, rank, lane)
            way = way_of(edge, constants, table, rank, (a, b, c, d), second)
            source = _shuffle(way.source, load_row % LANES) + Int64(load_part) * piece_bytes
            if lane == 0:
                if loaded >= stages:
                    cute.arch.cp_async_bulk_wait_group(behind - 1, read=True)
                _bulk_load(
                    source,
                    ring + load_stage * piece_bytes,
                    barriers + load_stage * BARRIER_BYTES,
                    Int32(last_bytes) if load_part == pieces - 1 else Int32(piece_bytes),
                )
            loaded += 1
            load_stage = load_stage + 1 if load_stage + 1 < stages else Int32(0)
            load_part += 1
            if load_part == pieces:
                load_part, load_row = Int32(0), load_row + 1
        # With loads under way: flags of the oldest rows.
        if store_part == 0 and store_row - told == batch + behind:
            # All but the youngest `behind` rows have arrived once their groups are complete.
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(behind * pieces, read=False)
            way = way_of(edge, constants, table, rank, (a, b, c, d), second)
            alive = cute.arch.vote_all_sync(alive and abort_word(table, rank) == 0)
            if alive:
                _tell(edge, table, rank, way.flag, due, told, batch, lane, epoch, constants)
            told += batch
        # Store the oldest piece.
        holder = store_row % LANES
        way = way_of(edge, constants, table, rank, (a, b, c, d), second)
        target = _shuffle(way.target, holder) + Int64(store_part) * piece_bytes
        if cutlass.const_expr(constants.paced):
            if store_part == 0:
                peer = cute.arch.shuffle_sync(way.peer, holder)
                crossed = wait_for_link(table, rank, peer, lane, constants, row_cost_ns, latency_ns)
                latest = cutlass.max(latest, crossed)
                if lane == holder:
                    due = latest
        came = Boolean(True)
        if lane == 0:
            came = _wait_load(barriers + store_stage * BARRIER_BYTES, phase, limit_ns)
            if came:
                _bulk_store(
                    ring + store_stage * piece_bytes,
                    target,
                    Int32(last_bytes) if store_part == pieces - 1 else Int32(piece_bytes),
                )
            cute.arch.cp_async_bulk_commit_group()
        alive = cute.arch.vote_all_sync(alive and came)
        stored += 1
        store_stage += 1
        if store_stage == stages:
            store_stage, phase = Int32(0), phase ^ 1
        store_part += 1
        if store_part == pieces:
            if lane == holder:
                note_beside(edge, table, rank, (a, b, c, d))
            if cutlass.const_expr(tape is not None):
                own = cute.arch.shuffle_sync(place, holder)
                lap(tape, Event.send, own, place_in_order(edge), 1)
            store_part, store_row = Int32(0), store_row + 1
    if lane == 0:
        _drain(barriers, store_stage, phase, loaded - stored, limit_ns, constants)
        cute.arch.cp_async_bulk_wait_group(0, read=False)
    # Without rows lanes hold no way: what lies at the front of the lists is of no launch.
    if alive and store_row > told:
        way = way_of(edge, constants, table, rank, (a, b, c, d), second)
        _tell(edge, table, rank, way.flag, due, told, store_row - told, lane, epoch, constants)
    lap(tape, Event.send)


@cute.jit
def _drain(
    barriers: Int32,
    stage: Int32,  # of the oldest load that nobody has waited for
    phase: Int32,
    num_loads: Int32,
    limit_ns: Int64,
    constants: cutlass.Constexpr,
):
    """Wait for loads that nobody will store, where the launch was given up.

    Shared memory is another CTA's as soon as this one has ended.
    """
    came = Boolean(True)
    while came and num_loads > 0:
        came = _wait_load(barriers + stage * BARRIER_BYTES, phase, limit_ns)
        num_loads -= 1
        stage += 1
        if stage == constants.num_stages:
            stage, phase = Int32(0), 1 - phase


@cute.jit
def _tell(
    edge: cutlass.Constexpr,
    table: cute.Pointer,
    rank: Int32,
    flag: Int64,  # of the row that this lane holds
    due: Int64,
    first_row: Int32,
    num_rows: Int32,
    lane: Int32,
    epoch: Int32,
    constants: cutlass.Constexpr,
):
    """Raise the flags of rows that have arrived. Called by all lanes; lane 0 has waited for them.

    Each lane raises what it holds. Its fence covers the rows that lane 0 has seen complete, and
    what other lanes have stored beside them, since a barrier of the warp lies between.
    """
    value = flag_value(edge, constants, epoch)
    if cutlass.const_expr(constants.paced):
        if num_rows > 0:
            sleep_until(table, rank, _shuffle(due, (first_row + num_rows - 1) % LANES))
    cute.arch.sync_warp()
    release_bulk_fence(Scope.sys)
    if ((lane - first_row) & (LANES - 1)) < num_rows:  # % may be negative
        raised = element(flag, Int32(0), Int32)
        if cutlass.const_expr(has_single_writers(edge, constants)):
            set_relaxed(raised, value, Scope.sys)
        else:
            add_relaxed(raised, value, Scope.sys)


@cute.jit
def _claim_rows(edge: cutlass.Constexpr, table: cute.Pointer, rank: Int32, lane: Int32) -> Int32:
    """Claim places of a queue for the warp; only lane 0 holds the first of them."""
    place = Int32(0)
    if lane == 0:
        queue = word(address(table, rank, Slot.words), queue_of(edge))
        place = claim(queue, Int32(_rows_of_claim(edge)), Scope.gpu)
    return place


def _shuffle(value: Int64, lane: Int32) -> Int64:
    """An Int64 of another lane."""
    low = cute.arch.shuffle_sync(Int32(value), lane)
    high = cute.arch.shuffle_sync(Int32(value >> 32), lane)
    return (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)


def _bulk_load(source: Int64, stage: Int32, barrier: Int32, num_bytes: Int32) -> None:
    """Start copying to a stage; the barrier completes its phase when all bytes are there."""
    cute.arch.mbarrier_arrive_and_expect_tx(_shared(barrier), num_bytes)
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[stage, source, num_bytes, barrier],
    )


@cute.jit
def _wait_load(barrier: Int32, phase: Int32, limit_ns: Int64) -> Boolean:
    """Wait for a phase of a stage's barrier; False after `limit_ns`."""
    done = cute.arch.mbarrier_try_wait(_shared(barrier), phase)
    if not done:
        begin = now_ns()
        alive = Boolean(True)
        while alive and not done:
            tries = Int32(0)
            while tries < _TRIES_PER_LOOK and not done:
                done = cute.arch.mbarrier_try_wait(_shared(barrier), phase)
                tries += 1
            alive = now_ns() - begin < limit_ns
    return done


def _bulk_store(stage: Int32, target: Int64, num_bytes: Int32) -> None:
    """Start copying from a stage."""
    cute.arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[target, stage, num_bytes],
    )


def _shared(address: Int32) -> cute.Pointer:
    return cute.make_ptr(Int64, address, cute.AddressSpace.smem, assumed_align=8)
