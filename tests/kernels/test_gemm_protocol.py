"""The warps of a grouped GEMM among themselves: no order of events makes them wait for ever, reads
a stage too early, fills one too early, or stores a block twice, elsewhere or not at all."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.kernels.gemm_engine import TEXT, Engine
from tilepipe.config.choices import Granularity, Layout, StoreMode
from tilepipe.kernels.gemm.choices import Clip, Consumers, Epilogue
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.gemm.tiles import TileWord, pack_cluster_tiles
from tilepipe.schedule.layout import make_layout
from tilepipe.schedule.settings import PlanSettings

PING_PONG = GemmTuning(consumers=Consumers.ping_pong, tile_n=128, raster_m=2)
TUNINGS = {
    "cooperative": GemmTuning(raster_m=2),
    "two_stages": GemmTuning(num_stages=2),
    "tall": GemmTuning(tile_m=256, tile_n=128),
    "cluster": GemmTuning(cluster_m=2, raster_m=1),
    "ping_pong": PING_PONG,
    "ping_pong_odd": replace(PING_PONG, tile_n=192, num_stages=3),
    "ping_pong_cluster": replace(PING_PONG, cluster_m=2, num_stages=2),
    "per_group": GemmTuning(clip=Clip.per_group),
    "direct": GemmTuning(store=StoreMode.direct),
    "direct_ping_pong": replace(PING_PONG, store=StoreMode.direct, cluster_m=2),
}
ROWS = [0, 1, 257, 128]


def launched(
    name,
    *,
    seed,
    k=320,
    text=TEXT,
    rows=ROWS,
    num_cut=0,
    slow_warp=None,
    stopped_at=None,
    **problem,
):
    """An engine that has run all tiles of one cluster."""
    asked = GemmProblem(
        n=512,
        k=k,
        num_experts=len(rows),
        layout=Layout.packed,
        group_align=TUNINGS[name].tile_m,
        **{"publish": True, "num_chunks": 2, **problem},
    )
    cluster_m = TUNINGS[name].cluster_m
    plan = plan_gemm(asked, TUNINGS[name], num_gemm_ctas=cluster_m, num_sms=132)
    settings = PlanSettings(
        num_ranks=1,
        num_experts=len(rows),
        num_topk=1,
        tile_m=plan.tile_m,
        layout=Layout.packed,
        num_n_tiles=plan.num_n_tiles,
    )
    layout = make_layout(0, np.array([rows], np.int32), settings)
    records = pack_cluster_tiles(
        layout,
        tile_m=plan.tile_m,
        cluster_m=cluster_m,
        raster_m=plan.tuning.raster_m,
        plan_tile_m=plan.tile_m,
        num_cut=num_cut,
    )
    way = {"slow_warp": slow_warp, "stopped_at": stopped_at}
    engine = Engine(plan, records, seed=seed, text=text, **way)
    engine.run()
    return engine, layout


def expected_blocks(engine):
    """Every block with rows, of every N tile and warp, once."""
    plan, width = engine.plan, 64 if engine.plan.tuning.store is StoreMode.tma else 32
    columns = range(0, plan.num_n_tiles * plan.out_tile_n, width)
    return {
        ((record[TileWord.first_row] + above, column, record[TileWord.expert]), warp): 1
        for record in engine.tiles
        for above in range(0, record[TileWord.valid], 64)
        for column in columns
        for warp in range(4)
    }


def expect_all(engine, layout):
    plan = engine.plan
    assert engine.stored == expected_blocks(engine)
    assert engine.queue == 0
    # A stamp says when a tile was done: one of the first warp of those that took it, whole or half.
    leading = (4, 8) if plan.is_ping_pong else (4,)
    stamped = Counter()
    for (warp, *tile), rows in engine.stamped.items():
        stamped[tuple(tile)] += rows * (warp in leading)
    assert stamped == {
        (m_tile, n_tile): valid
        for m_tile, valid in enumerate(layout.tiles[:, 2].tolist())
        for n_tile in range(plan.num_n_tiles)
    }
    if plan.problem.publish:
        told = {
            (m_tile * plan.num_chunks + chunk): int(valid)
            * sum(n * plan.num_chunks // plan.num_n_tiles == chunk for n in range(plan.num_n_tiles))
            for m_tile, valid in enumerate(layout.tiles[:, 2])
            for chunk in range(plan.num_chunks)
        }
        assert engine.told == told


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", TUNINGS)
def test_every_block_is_multiplied_stored_and_told_once_whatever_comes_first(name, seed):
    expect_all(*launched(name, seed=seed))


SENDING = [name for name in TUNINGS if not name.startswith("direct") and TUNINGS[name].clip is None]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SENDING)
def test_every_block_is_sent_by_the_warps_that_made_it_and_told_behind_all_of_them(name, seed):
    expect_all(*launched(name, seed=seed, sends=True))


@pytest.mark.parametrize("name", TUNINGS)
def test_rows_that_come_at_any_time_are_loaded_by_who_knows_that_they_came(name):
    engine, layout = launched(name, seed=4, wait=Granularity.tile)

    expect_all(engine, layout)
    # Before they are loaded whoever loads them has heard of all.
    assert set().union(*engine.readable.values()) == set(range(layout.num_tiles))


@pytest.mark.parametrize("name", TUNINGS)
def test_no_tile_is_handed_out_once_the_abort_word_has_been_seen_and_all_warps_end(name):
    engine, _ = launched(name, seed=8, wait=Granularity.tile, stopped_at=3)

    # The look that finds it comes ahead of a claim, which is the last.
    assert (engine.num_handed, engine.queue) == (3, 4)
    assert engine.stored.items() < expected_blocks(engine).items()


# Whoever tells of tiles that others store or send waits for nobody but them, and may be late:
# barriers of two tiles in a row must be two, or the second tile is counted at the first one's.
@pytest.mark.parametrize("slow_warp", [0, 1, 2, 4, 11])
@pytest.mark.parametrize(
    ("name", "sends"),
    [*((name, True) for name in SENDING), ("direct", False), ("direct_ping_pong", False)],
)
def test_a_warp_may_be_as_slow_as_it_likes(name, sends, slow_warp):
    expect_all(*launched(name, seed=9, sends=sends, slow_warp=slow_warp))


@pytest.mark.parametrize("name", ["cooperative", "ping_pong", "tall", "direct"])
def test_tiles_that_are_handed_out_in_halves_are_stored_and_told_once(name):
    engine, layout = launched(name, seed=5, num_cut=2, rows=[300, 200])

    assert len(engine.tiles) == layout.num_tiles + 2
    expect_all(engine, layout)


@pytest.mark.parametrize(
    ("name", "num_blocks"), [("cooperative", 1), ("tall", 1), ("ping_pong", 2)]
)
def test_cooperative_warpgroups_do_not_multiply_blocks_without_rows(name, num_blocks):
    engine, _ = launched(name, seed=6, rows=[64])

    a_block = engine.plan.num_k_tiles * 4 * engine.plan.num_n_tiles
    assert engine.num_products == 4 * a_block * num_blocks  # of four warps


@pytest.mark.parametrize("name", ["cooperative", "ping_pong", "cluster"])
@pytest.mark.parametrize("k", [8, 64, 72, 704])
def test_any_number_of_k_tiles_goes_round_the_ring(name, k):
    expect_all(*launched(name, seed=7, k=k))


@pytest.mark.parametrize("name", ["cooperative", "ping_pong_cluster"])
@pytest.mark.parametrize("epilogue", [Epilogue.swiglu_interleaved, Epilogue.swiglu_concatenated])
def test_gate_and_up_meet_in_the_right_outputs(name, epilogue):
    expect_all(*launched(name, seed=3, epilogue=epilogue))


@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
def test_a_launch_without_hooks_or_without_rows_ends_too(name):
    expect_all(*launched(name, seed=1, publish=False))
    engine, _ = launched(name, seed=1, rows=[0, 0])
    assert not engine.stored


def test_a_tile_is_claimed_when_the_loads_of_the_one_before_are_almost_all_issued():
    engine, _ = launched("cooperative", seed=2, k=704)
    plan = engine.plan

    # The first is claimed at once; the one behind it late in its loads, and so on.
    assert engine.claimed_at[0] == 0
    for number, loaded in enumerate(engine.claimed_at[1:]):
        assert loaded >= number * plan.num_k_tiles + plan.claim_at


# Text of the kernel -> what it becomes: a fault that must be noticed.
FAULTS = {
    "a stage is given back before its products have ended": (
        "warpgroup.wait_group(1)\n        _give_back(place, shared, last)",
        "warpgroup.wait_group(2)\n        _give_back(place, shared, last)",
    ),
    "ping-pong without turns": (
        "meet_named(int(Named.turn) + group, 2 * THREADS_OF_GROUP)",
        "pass",
    ),
    "the producer waits for nobody": (
        "place.wait(shared.empty + stage, phase, Item.empty)",
        "pass",
    ),
    "consumers wait for no load": (
        "place.wait(shared.full + stage, phase, Item.full)",
        "place.wait(shared.full + stage, phase ^ 1, Item.full)",
    ),
    "rows are told while their stores are under way": (
        "cute.arch.cp_async_bulk_wait_group(0, read=False)\n    alive",
        "cute.arch.cp_async_bulk_wait_group(0, read=True)\n    alive",
    ),
    "a buffer is given back one store early": (
        "cute.arch.cp_async_bulk_wait_group(1, read=True)",
        "cute.arch.cp_async_bulk_wait_group(2, read=True)",
    ),
    "a null tile keeps its stages": (
        "_pass_tile(place, shared, stage, phase)",
        "pass",
    ),
    "nobody says that the tile before has been read": (
        "take_record(place, shared, count + 1)  # of the tile before",
        "pass",
    ),
    "a tile is claimed without a look at the abort word": (
        "stop = load_relaxed(abort, Int32, Scope.sys)",
        "stop = 0",
    ),
    "a tile is handed out though the abort word is raised": (
        "more = more and cute.arch.vote_all_sync(stop == 0)",
        "pass",
    ),
    "a tile is handed over before its rows have come": (
        "late = _wait_for_rows(place, gates, first_row, valid, expert, m_tile, False)",
        "late = 0",
    ),
    "who loads rows that another warp waited for does not fence": (
        'cute.arch.fence_proxy("async.global")\n                waited',
        "waited",
    ),
    "nobody in a cluster waits for rows": (
        "late = _wait_for_rows(place, gates, first_row, valid, expert, m_tile, True)",
        "late = 0",
    ),
    "blocks are not told to be staged": (
        "arrive_named(int(Named.written) + buffer_idx)",
        "pass",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_engine_notices(fault):
    right, wrong = FAULTS[fault]
    assert right in TEXT
    wrong = TEXT.replace(right, wrong)
    with pytest.raises(AssertionError):  # noqa: PT012  whichever meets it first
        for seed, name in product(range(3), ("ping_pong", "cluster", "cooperative")):
            expect_all(*launched(name, seed=seed, text=wrong, wait=Granularity.tile))
            stopped, _ = launched(name, seed=seed, text=wrong, wait=Granularity.tile, stopped_at=2)
            assert stopped.num_handed == 2
