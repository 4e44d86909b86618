"""What a fused launch is planned as, and every sentence that refuses one. Needs no GPU."""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Copy, Granularity, Layout, Roles
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.choices import Clip
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.gemm.tiles import TileWord, pack_cluster_tiles, place_of_ticket
from tilepipe.kernels.overlap.plan import (
    check_roles,
    num_first_tiles,
    plan_overlap,
    split_chip,
)
from tilepipe.kernels.residency import Residency
from tilepipe.schedule.layout import make_layout
from tilepipe.schedule.settings import PlanSettings

PROBLEM = GemmProblem(
    n=4096,
    k=7168,
    num_experts=32,
    layout=Layout.packed,
    group_align=128,
    wait=Granularity.tile,
)
CONSTANTS = Constants(
    num_ranks=1,
    num_experts_per_rank=32,
    num_topk=8,
    row_bytes=14_336,
    granularity=Granularity.tile,
    copy=Copy.tma,
    num_warps=4,
)
SETTINGS = {"roles": Roles.fixed, "ring_bytes": 3 * 14_336}


def gemm_plan(**tuning):
    return plan_gemm(PROBLEM, GemmTuning(**tuning), num_gemm_ctas=124, num_sms=132)


def test_one_code_serves_every_split():
    plans = {
        plan_overlap(
            plan_gemm(PROBLEM, GemmTuning(), num_gemm_ctas=count, num_sms=132),
            CONSTANTS,
            **SETTINGS,
        )
        for count in (132, 124, 16)
    }

    assert len(plans) == 1


@pytest.mark.parametrize("roles", list(Roles))
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ctas_join_in_step_where_many_ranks_share_a_gpu(num_ranks, roles):
    asked = {**SETTINGS, "roles": roles, "num_launch_ranks": num_ranks}
    plan = plan_overlap(gemm_plan(), replace(CONSTANTS, num_ranks=num_ranks), **asked)

    assert plan.joins == (roles is Roles.switch and num_ranks >= 4)
    at_once = plan_overlap(
        gemm_plan(), replace(CONSTANTS, num_ranks=num_ranks), joins=False, **asked
    )
    assert at_once == replace(plan, joins=False)


def test_pitches_of_ranks_count_only_where_a_launch_holds_several():
    one, two = (
        plan_overlap(
            gemm_plan(),
            replace(CONSTANTS, num_ranks=2),
            num_launch_ranks=count,
            a_rank_pitch=512,
            d_rank_pitch=256,
            **SETTINGS,
        )
        for count in (1, 2)
    )

    assert (one.a_rank_pitch, one.d_rank_pitch) == (0, 0)
    assert (two.a_rank_pitch, two.d_rank_pitch) == (512, 256)


def test_more_warps_than_a_cta_has_are_refused():
    with pytest.raises(ValueError, match=r"num_comm_warps=16: .* type at most 12"):
        plan_overlap(gemm_plan(), replace(CONSTANTS, num_warps=16), **SETTINGS)


def test_stages_beyond_the_operands_are_refused():
    with pytest.raises(ValueError, match=r"kernel.num_stages=3: 6 warps x 43008 bytes .* lower it"):
        plan_overlap(gemm_plan(), replace(CONSTANTS, num_warps=6), **SETTINGS)


def test_a_patched_descriptor_is_refused_for_several_ranks():
    constants = replace(CONSTANTS, num_ranks=2)

    with pytest.raises(ValueError, match=r"clip=per_group: .* type clip=ragged"):
        plan_overlap(gemm_plan(clip=Clip.per_group), constants, num_launch_ranks=2, **SETTINGS)


def test_tables_of_more_ranks_than_fit_beside_the_stages_are_refused():
    constants = replace(CONSTANTS, num_ranks=32)

    with pytest.raises(ValueError, match=r"num_stages=4: .* plan the GEMM with gemm_bytes"):
        plan_overlap(gemm_plan(), constants, **SETTINGS)
    assert plan_overlap(gemm_plan(num_stages=3), constants, **SETTINGS).gemm.num_stages == 3


@given(
    num_sms=st.integers(2, 160),
    num_ranks=st.integers(1, 8),
    num_comm_ctas=st.integers(1, 80),
    cluster_m=st.sampled_from([1, 2]),
)
def test_a_split_gives_every_sm_one_role_in_whole_clusters(
    num_sms, num_ranks, num_comm_ctas, cluster_m
):
    try:
        split = split_chip(
            num_sms,
            num_launch_ranks=num_ranks,
            num_comm_ctas=num_comm_ctas,
            cluster_m=cluster_m,
        )
    except ValueError:
        own = num_sms // num_ranks // cluster_m * cluster_m
        assert num_comm_ctas % cluster_m or num_comm_ctas > own - cluster_m
    else:
        assert split.num_comm_ctas == num_comm_ctas
        assert split.num_gemm_ctas >= cluster_m
        assert num_comm_ctas % cluster_m == split.num_gemm_ctas % cluster_m == 0
        left = num_sms - num_ranks * split.num_ctas
        assert 0 <= left < num_ranks * cluster_m


@pytest.mark.parametrize("num_comm_ctas", [0, 8])
@pytest.mark.parametrize("roles", list(Roles))
def test_only_roles_beside_tiles_go_without_communication_ctas(roles, num_comm_ctas):
    if (roles is Roles.beside) == (num_comm_ctas == 0):
        check_roles(roles, num_comm_ctas)
        split = split_chip(132, num_launch_ranks=2, num_comm_ctas=num_comm_ctas, cluster_m=2)
        assert (split.num_comm_ctas, split.num_gemm_ctas) == (num_comm_ctas, 66 - num_comm_ctas)
    else:
        with pytest.raises(ValueError, match=rf"num_comm_ctas={num_comm_ctas}: with kernel.roles="):
            check_roles(roles, num_comm_ctas)


def test_a_split_that_leaves_nothing_to_the_gemm_is_refused():
    with pytest.raises(ValueError, match=r"num_comm_ctas=16: 8 ranks share 132 SMs, 16 each"):
        split_chip(132, num_launch_ranks=8, num_comm_ctas=16, cluster_m=1)
    with pytest.raises(ValueError, match=r"num_comm_ctas=5: .* choose a multiple of 2"):
        split_chip(132, num_launch_ranks=1, num_comm_ctas=5, cluster_m=2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_clusters_that_find_no_pair_of_sms_are_refused_and_all_that_do_are_not(
    num_ranks, monkeypatch
):
    # Only here, since the import takes two seconds.
    from tilepipe.kernels.overlap import launch

    # SMs may be paired up in fewer than half as many clusters; the driver knows.
    held = Residency(
        ctas_per_sm=1,
        num_sms=132,
        num_registers=168,
        shared_bytes=0,
        local_bytes=0,
        max_clusters=60,
    )
    function = SimpleNamespace(to=lambda device: None)
    monkeypatch.setattr(launch, "compile_overlap", lambda plan: SimpleNamespace(function=function))
    monkeypatch.setattr(launch, "residency_of", lambda code, **_: held)
    monkeypatch.setattr(launch.torch.cuda, "current_device", lambda: 0)
    constants = replace(CONSTANTS, num_ranks=num_ranks)
    plan = plan_overlap(gemm_plan(cluster_m=2), constants, num_launch_ranks=num_ranks, **SETTINGS)

    def split_of(num_sms):
        return split_chip(num_sms, num_launch_ranks=num_ranks, num_comm_ctas=2, cluster_m=2)

    wanted = num_ranks * split_of(132).num_ctas
    sentence = (
        f"kernel.num_comm_ctas=2: {wanted} CTAs of a launch must run at once, in clusters of 2, "
        "and this GPU holds 120; plan for 120 SMs"
    )
    with pytest.raises(ValueError, match=re.escape(sentence)):
        launch.FusedLaunch(plan, split_of(132), limit_ns=1)
    assert launch.FusedLaunch(plan, split_of(120), limit_ns=1).residency is held


def first_tiles_of(rows, num_gemm_ctas, **tuning):
    """M tiles that CTAs begin with, as planned and as tickets say one by one."""
    gemm = plan_gemm(
        replace(PROBLEM, num_experts=len(rows)), GemmTuning(**tuning), num_gemm_ctas=4, num_sms=132
    )
    settings = PlanSettings(
        num_ranks=1,
        num_experts=len(rows),
        num_topk=1,
        layout=Layout.packed,
        num_n_tiles=gemm.num_n_tiles,
    )
    layout = make_layout(0, np.array([rows], np.int32), settings)
    records = pack_cluster_tiles(
        layout,
        tile_m=gemm.tile_m,
        cluster_m=gemm.cluster_m,
        raster_m=gemm.tuning.raster_m,
        plan_tile_m=settings.tile_m,
    )
    begun = {0}
    for ticket in range(min(num_gemm_ctas // gemm.cluster_m, len(records) * gemm.num_n_tiles)):
        own = records[ticket // gemm.num_n_tiles]
        there = place_of_ticket(
            ticket,
            int(own[TileWord.group_place]),
            int(own[TileWord.group_size]),
            num_n_tiles=gemm.num_n_tiles,
            num_chunks=gemm.num_chunks,
        )
        record = records[there.cluster_tile]
        num_tiles = -(-int(record[TileWord.valid]) // settings.tile_m)
        begun |= {int(record[TileWord.m_tile]) + above + 1 for above in range(num_tiles)}
    planned = num_first_tiles(
        records, gemm, num_m_tiles=layout.num_tiles, num_gemm_ctas=num_gemm_ctas
    )
    return planned, max(begun)


@given(
    rows=st.lists(st.integers(0, 900), min_size=1, max_size=5),
    num_gemm_ctas=st.integers(1, 132),
    cluster_m=st.sampled_from([1, 2]),
    raster_m=st.sampled_from([1, 2, 8]),
)
def test_first_tiles_are_those_of_the_first_tickets_and_no_more(
    rows, num_gemm_ctas, cluster_m, raster_m
):
    planned, begun = first_tiles_of(rows, num_gemm_ctas, cluster_m=cluster_m, raster_m=raster_m)

    assert planned == begun


def test_a_round_of_tiles_opens_with_the_rows_of_one_group_and_not_of_two():
    # 1024 rows of an expert are a group of 8 M tiles by 16 N tiles.
    assert [first_tiles_of([1024] * 4, ctas)[0] for ctas in (14, 125, 128, 129, 132)] == [
        *(8, 8, 8),
        *(9, 12),
    ]
