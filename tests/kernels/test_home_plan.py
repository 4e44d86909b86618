"""How stored tiles go home, and every sentence that refuses a plan. Needs no GPU."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Copy, Granularity, Layout, Push, Roles, Walk
from tilepipe.config.limits import COLUMN_BYTES, SHARED_BYTES
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.gemm.tiles import pack_cluster_tiles
from tilepipe.kernels.overlap.home import (
    REDUCING_WARPS,
    RING_BYTES,
    Reduces,
    home_gemm_bytes,
    order_units,
    plan_home_launch,
)
from tilepipe.kernels.reduction import columns_of, num_units_of, unit_at
from tilepipe.schedule.completion import plan_completion
from tilepipe.schedule.layout import make_layout
from tilepipe.schedule.settings import PlanSettings, home_chunks_of

PROBLEM = GemmProblem(
    n=7168,
    k=2048,
    num_experts=32,
    layout=Layout.packed,
    group_align=128,
    publish=True,
    num_chunks=4,
)
CONSTANTS = Constants(
    num_ranks=1,
    num_experts_per_rank=32,
    num_topk=8,
    row_bytes=14_336,
    granularity=Granularity.tile,
    num_chunks=4,
    num_warps=8,
)
SETTINGS = {"roles": Roles.switch}


def gemm_plan(problem=PROBLEM, **tuning):
    return plan_gemm(problem, GemmTuning(**tuning), num_gemm_ctas=120, num_sms=132)


@pytest.mark.parametrize("copy", list(Copy))
def test_pieces_are_chunks_or_whole_rows_and_groups_fit_a_ring(copy):
    constants = replace(CONSTANTS, copy=copy)

    by_chunk = plan_home_launch(gemm_plan(), constants, **SETTINGS)
    whole = plan_home_launch(
        gemm_plan(), replace(constants, granularity=Granularity.token), **SETTINGS
    )

    assert (by_chunk.num_pieces, by_chunk.piece_bytes) == (4, 3584)
    assert (whole.num_pieces, whole.piece_bytes) == (1, 14_336)
    for plan in (by_chunk, whole):
        assert 1 <= plan.group_rows <= 32
        assert plan.num_groups * plan.group_rows >= plan.gemm.tile_m
        if copy is Copy.tma:
            assert plan.group_rows * plan.piece_bytes <= RING_BYTES


@given(
    hidden=st.integers(1, 2048).map(lambda count: 8 * count),
    copy=st.sampled_from(Copy),
    layout=st.sampled_from(Layout),
    by_rank=st.booleans(),
    num_ranks=st.sampled_from([1, 2, 8]),
)
def test_what_is_sent_by_default_is_never_refused(hidden, copy, layout, by_rank, num_ranks):
    num_chunks = home_chunks_of(2 * hidden, 512, push=Push.epilogue)
    problem = replace(PROBLEM, n=hidden, layout=layout, num_chunks=num_chunks, sends=True)
    gemm = plan_gemm(
        problem,
        GemmTuning(walk=Walk.chunk),
        num_gemm_ctas=1,
        num_sms=132,
        smem_bytes=home_gemm_bytes(num_ranks),
    )
    constants = replace(
        CONSTANTS,
        num_ranks=num_ranks,
        row_bytes=2 * hidden,
        num_chunks=num_chunks,
        num_parts=num_chunks,
        copy=copy,
        by_rank=by_rank,
    )

    plan = plan_home_launch(gemm, constants, roles=Roles.switch)

    assert (plan.push, plan.num_pieces, plan.share) == (Push.epilogue, num_chunks, 1)


@pytest.mark.parametrize("num_ranks", range(1, 9))
@pytest.mark.parametrize("copy", list(Copy))
def test_a_gemm_planned_for_its_room_leaves_enough_beside_it(copy, num_ranks):
    gemm = plan_gemm(
        PROBLEM,
        GemmTuning(),
        num_gemm_ctas=1,
        num_sms=132,
        smem_bytes=home_gemm_bytes(num_ranks),
    )

    plan = plan_home_launch(
        gemm,
        replace(CONSTANTS, copy=copy, num_ranks=num_ranks),
        **SETTINGS,
    )

    assert plan.smem_bytes <= SHARED_BYTES
    assert plan.gemm.num_stages == 4


def test_rings_leave_alone_what_is_staged_to_be_stored():
    gemm = gemm_plan()

    assert gemm.num_stages * gemm.stage_bytes >= REDUCING_WARPS * RING_BYTES
    assert plan_home_launch(gemm, CONSTANTS, **SETTINGS).smem_bytes <= 227 * 1024


@pytest.mark.parametrize("copy", list(Copy))
def test_eight_ranks_have_room_for_their_addresses_and_all_stages(copy):
    problem = replace(PROBLEM, sends=True)
    gemm = plan_gemm(
        *(problem, GemmTuning()),
        num_gemm_ctas=16,
        num_sms=132,
        smem_bytes=home_gemm_bytes(8),
    )

    plan = plan_home_launch(gemm, replace(CONSTANTS, num_ranks=8, copy=copy), roles=Roles.switch)

    assert gemm.num_stages == 4
    assert plan.smem_bytes <= SHARED_BYTES


def test_chunks_of_unlike_size_are_refused():
    uneven = replace(PROBLEM, num_chunks=3)

    with pytest.raises(ValueError, match=r"num_chunks=3: .* type kernel.granularity=token"):
        plan_home_launch(gemm_plan(uneven), replace(CONSTANTS, num_chunks=3), **SETTINGS)


def test_more_warps_than_have_rings_are_refused():
    with pytest.raises(ValueError, match=r"num_comm_warps=12: .* at most 8 warps by copy=tma"):
        plan_home_launch(gemm_plan(), replace(CONSTANTS, copy=Copy.tma, num_warps=12), **SETTINGS)
    with pytest.raises(ValueError, match=r"num_comm_warps=16: .* at most 12 warps by copy=simt"):
        plan_home_launch(gemm_plan(), replace(CONSTANTS, num_warps=16), **SETTINGS)


def test_pieces_wider_than_a_ring_are_refused():
    wide = replace(CONSTANTS, copy=Copy.tma, granularity=Granularity.token, row_bytes=28_672)

    with pytest.raises(ValueError, match=r"pieces of 28672 bytes do not fit .* type kernel.copy"):
        plan_home_launch(gemm_plan(), wide, **SETTINGS)


def test_too_small_operands_for_the_rings_of_the_reduction_are_refused():
    with pytest.raises(ValueError, match=r"num_stages=2: .* choose more stages or a larger tile"):
        plan_home_launch(gemm_plan(num_stages=2), CONSTANTS, **SETTINGS)


def test_tables_of_more_ranks_than_fit_beside_the_stages_are_refused():
    with pytest.raises(ValueError, match=r"num_stages=4: .* plan the GEMM with home_gemm_bytes"):
        plan_home_launch(gemm_plan(), replace(CONSTANTS, num_ranks=32), **SETTINGS)


@pytest.mark.parametrize(
    ("problem", "tuning", "said"),
    [
        ({"sends": True}, {}, "kernel.push=epilogue"),
        ({}, {"walk": Walk.chunk}, "kernel.walk=chunk"),
    ],
)
@pytest.mark.parametrize("granularity", [Granularity.token, Granularity.expert])
def test_chunks_that_go_home_one_by_one_are_refused_where_whole_rows_are_waited_for(
    problem, tuning, said, granularity
):
    gemm = gemm_plan(replace(PROBLEM, **problem), **tuning)

    with pytest.raises(ValueError, match=f"{said}: .*={granularity.value} waits for whole rows"):
        plan_home_launch(gemm, replace(CONSTANTS, granularity=granularity), **SETTINGS)


def test_what_is_staged_is_sent_a_tile_wide_and_nothing_is_stored_here_by_tma():
    stored = plan_home_launch(gemm_plan(), CONSTANTS, **SETTINGS)
    sent = plan_home_launch(gemm_plan(replace(PROBLEM, sends=True)), CONSTANTS, **SETTINGS)

    assert (stored.push, stored.gemm.stores_by_tma, stored.moved_bytes) == (Push.ctas, True, 3584)
    assert (sent.push, sent.gemm.stores_by_tma, sent.moved_bytes) == (Push.epilogue, False, 512)
    assert sent.gemm.staging_bytes == stored.gemm.staging_bytes > 0
    assert sent.gemm.clip is None


@pytest.mark.parametrize(
    ("push", "by_rank", "beside"),
    [(Push.epilogue, False, 3), (Push.epilogue, True, 0), (Push.ctas, False, 0)],
)
def test_all_parts_but_the_last_are_reduced_beside_a_gemm_that_sends(push, by_rank, beside):
    problem = replace(PROBLEM, sends=push is Push.epilogue)
    constants = replace(CONSTANTS, num_parts=4, by_rank=by_rank)

    plans = {
        reduces: plan_home_launch(gemm_plan(problem), constants, reduces=reduces, **SETTINGS)
        for reduces in Reduces
    }

    parts = {reduces: plan.num_reduced_parts for reduces, plan in plans.items()}
    assert parts == {Reduces.all: 4, Reduces.beside: beside, Reduces.none: 0}
    assert [key for key, plan in plans.items() if plan.stops_reducing] == [Reduces.beside] * (
        beside > 0
    )


@given(
    num_tokens=st.integers(1, 5),
    num_vectors=st.integers(1, 130),
    num_parts=st.integers(1, 4),
)
def test_units_of_all_parts_cover_every_byte_of_every_token_once_part_after_part(
    num_tokens, num_vectors, num_parts
):
    constants = replace(CONSTANTS, row_bytes=16 * num_vectors * num_parts, num_parts=num_parts)
    seen = np.zeros((num_tokens, constants.row_bytes), np.int32)
    order = []

    for number in range(num_units_of(constants, num_tokens)):
        unit = unit_at(constants, number, num_tokens)
        order.append((unit.part, unit.token, unit.begin))
        for column in range(columns_of(constants)):
            begin = unit.begin + column * COLUMN_BYTES
            seen[unit.token, begin : min(begin + COLUMN_BYTES, unit.end)] += 1
            assert begin >= unit.end or begin // constants.part_bytes == unit.part

    assert (seen == 1).all()
    assert order == sorted(order)
    for parts in range(1, num_parts + 1):
        first = num_units_of(constants, num_tokens, parts)
        assert {part for part, *_ in order[:first]} == set(range(parts))
        assert all(part >= parts for part, *_ in order[first:])


@given(
    rows=st.lists(st.integers(0, 700), min_size=1, max_size=6),
    num_chunks=st.sampled_from([1, 2, 3, 5]),
    cluster_m=st.sampled_from([1, 2]),
    num_cut=st.integers(0, 3),
    granularity=st.sampled_from(list(Granularity)),
    walk=st.sampled_from(list(Walk)),
)
def test_every_unit_goes_home_once_in_the_order_of_its_last_tile(
    rows, num_chunks, cluster_m, num_cut, granularity, walk
):
    problem = replace(PROBLEM, n=1280, num_experts=len(rows), num_chunks=num_chunks)
    gemm = gemm_plan(problem, cluster_m=cluster_m, raster_m=2, walk=walk)
    settings = PlanSettings(
        num_ranks=1,
        num_experts=len(rows),
        num_topk=1,
        layout=Layout.packed,
        num_n_tiles=gemm.num_n_tiles,
        num_chunks=num_chunks,
        granularity=granularity,
    )
    layout = make_layout(0, np.array([rows], np.int32), settings)
    records = pack_cluster_tiles(
        layout,
        num_cut=num_cut if gemm.cuts_tail else 0,
        tile_m=128,
        cluster_m=cluster_m,
        raster_m=2,
        plan_tile_m=128,
        walk=walk,
    )

    units = order_units(records, layout, gemm, granularity)

    tiles = range(layout.num_tiles)
    chunks = range(num_chunks) if granularity is Granularity.tile else range(1)
    assert sorted(map(tuple, units[:, :2].tolist())) == [(t, c) for t in tiles for c in chunks]
    if granularity is Granularity.tile:
        assert len(units) == plan_completion(layout, settings).num_units
    for tile, _, first, count in units.tolist():
        if granularity is Granularity.expert:
            expert = layout.tiles[tile, 0]
            own = np.flatnonzero(layout.tiles[:, 0] == expert)
            assert (first, count) == (own[0], len(own))
        else:
            assert (first, count) == (tile, 1)
    # Experts are handed out one after the other, so their units come so; or chunks are.
    experts = layout.tiles[units[:, 0], 0]
    if walk is Walk.expert:
        assert (np.diff(experts) >= 0).all()
    elif granularity is Granularity.tile:
        assert sorted(zip(units[:, 1], experts, strict=True)) == list(
            zip(units[:, 1], experts, strict=True)
        )
