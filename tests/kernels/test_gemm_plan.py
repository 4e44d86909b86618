"""Every decision of the grouped GEMM's plan: what it takes, what it refuses and why."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Granularity, Layout, StoreMode
from tilepipe.kernels.gemm.choices import (
    Clip,
    Consumers,
    DescriptorSlot,
    Epilogue,
    Major,
)
from tilepipe.kernels.gemm.plan import (
    DESCRIPTOR_BYTES,
    GemmProblem,
    GemmTuning,
    check_workspace,
    plan_gemm,
)

PADDED = GemmProblem(n=4096, k=7168, num_experts=32, layout=Layout.padded, group_align=128)
PACKED = replace(PADDED, layout=Layout.packed)
SWIGLU = replace(PADDED, epilogue=Epilogue.swiglu_interleaved)
PLAIN = GemmTuning()


def planned(problem=PADDED, tuning=PLAIN, **grid):
    return plan_gemm(problem, tuning, **{"num_gemm_ctas": 132, "num_sms": 132, **grid})


def test_equal_decisions_are_equal_plans_and_share_a_hash():
    assert planned() == planned()
    assert hash(planned()) == hash(planned())
    assert planned() != planned(num_gemm_ctas=124)
    with pytest.raises(AttributeError):
        planned().num_stages = 3


def test_a_plain_tile_has_as_many_stages_as_there_is_room_for():
    plan = planned()

    # 16 KiB of A and 32 KiB of B a stage, 32 KiB of staging.
    assert (plan.num_stages, plan.stage_bytes, plan.staging_bytes) == (4, 48 * 1024, 32 * 1024)
    assert plan.smem_bytes <= 232_448
    assert (plan.num_n_tiles, plan.num_k_tiles, plan.out_n) == (16, 112, 4096)
    assert plan.num_chunks == 16
    # Four stages and four more K tiles before the last.
    assert plan.claim_at == 104


@pytest.mark.parametrize(
    ("problem", "clip", "expected"),
    [
        (PADDED, None, Clip.whole),
        (PADDED, Clip.ragged, Clip.ragged),
        (PADDED, Clip.per_group, Clip.per_group),
        (PACKED, None, Clip.ragged),
        (PACKED, Clip.ragged, Clip.ragged),
        (PACKED, Clip.per_group, Clip.per_group),
    ],
)
def test_tma_stores_end_with_an_expert_as_its_layout_needs(problem, clip, expected):
    assert planned(problem, GemmTuning(clip=clip)).clip is expected


@pytest.mark.parametrize("problem", [PADDED, PACKED])
def test_direct_stores_have_no_descriptor_and_no_staging(problem):
    plan = planned(problem, GemmTuning(store=StoreMode.direct))

    assert (plan.clip, plan.staging_bytes, plan.workspace_bytes) == (None, 0, 0)
    assert not plan.uses_store_warp
    assert planned(
        replace(problem, publish=True), GemmTuning(store=StoreMode.direct)
    ).uses_store_warp


@pytest.mark.parametrize("num_gemm_ctas", [1, 100, 132])
def test_only_per_group_descriptors_need_a_workspace_of_ctas_x_slots_x_128_bytes(num_gemm_ctas):
    sizes = {
        clip: planned(PADDED, GemmTuning(clip=clip), num_gemm_ctas=num_gemm_ctas).workspace_bytes
        for clip in Clip
    }

    assert sizes == {
        Clip.whole: 0,
        Clip.ragged: 0,
        Clip.per_group: num_gemm_ctas * len(DescriptorSlot) * 128,
    }


def test_every_descriptor_slot_is_documented_where_it_is_named():
    import inspect

    from tilepipe.kernels.gemm import choices

    text = inspect.getsource(choices.DescriptorSlot)
    for slot in DescriptorSlot:
        assert re.search(rf"^    {slot.name} = {slot.value}  # \S", text, re.MULTILINE)
    assert f"{DESCRIPTOR_BYTES} bytes" in text


def test_a_workspace_is_taken_where_it_is_large_enough_and_aligned():
    plan = planned(PACKED, GemmTuning(clip=Clip.per_group))

    check_workspace(plan, num_bytes=plan.workspace_bytes, address=1024)
    check_workspace(planned(), num_bytes=0, address=1)
    with pytest.raises(ValueError, match=r"holds 16895 bytes, but 132 CTAs.*need 16896"):
        check_workspace(plan, num_bytes=plan.workspace_bytes - 1, address=1024)
    with pytest.raises(ValueError, match="begins at 0x440: descriptors need multiples of 128"):
        check_workspace(plan, num_bytes=plan.workspace_bytes, address=1024 + 64)


@pytest.mark.parametrize(
    ("tuning", "groups", "blocks"),
    [
        (GemmTuning(), 2, 1),
        (GemmTuning(tile_m=256, tile_n=128), 2, 2),
        (GemmTuning(tile_m=64, consumers=Consumers.ping_pong), 1, 1),
        (GemmTuning(tile_m=128, tile_n=192, consumers=Consumers.ping_pong), 1, 2),
    ],
)
def test_blocks_of_64_rows_are_shared_among_the_warpgroups_of_a_tile(tuning, groups, blocks):
    plan = planned(tuning=tuning)

    assert (plan.groups_per_tile, plan.blocks_per_group) == (groups, blocks)
    assert plan.groups_per_tile * plan.blocks_per_group * 64 == tuning.tile_m


@pytest.mark.parametrize("epilogue", list(Epilogue))
@pytest.mark.parametrize("cluster_m", [1, 2])
def test_outputs_are_halved_and_b_is_parted_where_gate_and_up_ask_for_it(epilogue, cluster_m):
    plan = planned(replace(PADDED, epilogue=epilogue), GemmTuning(cluster_m=cluster_m))

    halved = epilogue in (Epilogue.swiglu_interleaved, Epilogue.swiglu_concatenated)
    assert plan.out_n == plan.d_pitch == (2048 if halved else 4096)
    assert plan.out_tile_n == (128 if halved else 256)
    parted = epilogue is Epilogue.swiglu_concatenated or cluster_m == 2
    assert plan.num_b_parts == (2 if parted else 1)


def refused(problem=PADDED, tuning=PLAIN, *, match, **grid):
    with pytest.raises(ValueError, match=match) as caught:
        planned(problem, tuning, **grid)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert ";" in sentence, "no next step"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"out_major": Major.m}, "out_major=m: rows of an expert end anywhere"),
        ({"out_major": Major.k}, "out_major=k"),
        ({"b_major": Major.m}, "b_major=m: B is"),
        ({"k": 7164}, "k=7164: a row of A is 14328 bytes"),
        ({"k": 0}, "k=0: a row of A"),
        ({"n": 4100}, "n=4100: a row of D is 8200 bytes"),
        ({"a_pitch": 7172}, "a_pitch=7172: a row and its gap is 14344 bytes"),
        ({"a_pitch": 7160}, "a_pitch=7160: rows have 7168 elements"),
        ({"d_pitch": 4097}, "d_pitch=4097: a row and its gap"),
        ({"d_pitch": 4088}, "d_pitch=4088: rows have 4096 elements"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"num_chunks": 0}, r"num_chunks=0: 4096 columns are 16 tiles of 256; choose 1\.\.16"),
        ({"num_chunks": 17}, "num_chunks=17"),
        ({"group_align": 96}, "clip=whole: groups are padded to 96 rows and blocks have 64"),
    ],
)
def test_a_problem_that_the_kernel_cannot_have_is_refused(change, match):
    refused(replace(PADDED, **change), match=match)


def test_gate_and_up_must_be_as_many_columns_and_whole_vectors():
    refused(replace(SWIGLU, n=4097), match="n=4097: gate and up are as many columns each")
    refused(replace(SWIGLU, n=4104), match="n / 2=2052: a row of D is 4104 bytes")
    assert planned(replace(SWIGLU, n=4112)).out_n == 2056


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"tile_m": 64}, "tile_m=64: 2 warpgroups a tile take blocks of 64 rows each.*of 128"),
        ({"tile_m": 192}, "tile_m=192"),
        ({"tile_m": 0}, "tile_m=0"),
        ({"tile_m": 96, "consumers": Consumers.ping_pong}, "tile_m=96: 1 warpgroup a tile"),
        ({"tile_n": 96}, "tile_n=96.*pieces of 64 columns"),
        ({"tile_n": 320}, "tile_n=320.*256 at most"),
        ({"tile_n": 0}, "tile_n=0"),
        ({"tile_n": 192, "cluster_m": 2}, "tile_n=192.*cluster_m=2.*pieces of 128 columns"),
        ({"tile_m": 256}, "tile_m=256 x tile_n=256.*would hold 256 sums.*registers for 192"),
        ({"consumers": Consumers.ping_pong}, "a thread of 1 warpgroup would hold 256 sums"),
        ({"raster_m": 0}, "raster_m=0"),
        ({"cluster_m": 3}, "cluster_m=3: .*choose 1 or 2"),
        ({"num_stages": 1}, "num_stages=1: stages of 49152 bytes beside 32768 bytes.*fit 4 times"),
        ({"num_stages": 5}, "num_stages=5"),
        ({"store": StoreMode.direct, "clip": Clip.ragged}, "clip=ragged: direct stores check"),
    ],
)
def test_a_tuning_that_the_kernel_cannot_have_is_refused(change, match):
    refused(tuning=GemmTuning(**change), match=match)


def test_swiglu_tiles_are_whole_staged_columns_of_gate_and_up():
    refused(SWIGLU, GemmTuning(tile_n=192), match="epilogue=swiglu_interleaved.*of 128 columns")


def test_whole_stores_into_packed_rows_are_refused():
    refused(
        PACKED,
        GemmTuning(clip=Clip.whole),
        match="clip=whole: with layout=packed a whole block runs into the next expert's rows",
    )


def test_a_clipped_store_asks_nothing_of_the_padding():
    plan = planned(replace(PADDED, group_align=96), GemmTuning(clip=Clip.ragged))

    assert plan.clip is Clip.ragged


@pytest.mark.parametrize(
    ("change", "allowed"),
    [
        ({"wait": Granularity.tile}, False),
        ({"wait": Granularity.token}, False),
        ({"wait": Granularity.expert}, True),
        ({"publish": True}, False),
        ({}, True),
    ],
)
def test_semaphores_of_tiles_need_tiles_of_the_plan(change, allowed):
    problem, tuning = replace(PADDED, **change), GemmTuning(tile_m=256, tile_n=128)

    if allowed:
        assert planned(problem, tuning).tile_m == 256
    else:
        refused(problem, tuning, match="tile_m=256: semaphores stand for tiles of 128 rows")
    assert planned(problem).tile_m == 128


@pytest.mark.parametrize(
    ("num_gemm_ctas", "cluster_m", "match"),
    [
        (0, 1, r"num_gemm_ctas=0.*choose 1\.\.132"),
        (133, 1, "num_gemm_ctas=133: one runs on each SM, and this GPU has 132"),
        (1, 2, r"num_gemm_ctas=1.*choose 2\.\.132"),
        (131, 2, "num_gemm_ctas=131: clusters hold 2 CTAs"),
    ],
)
def test_a_grid_is_whole_clusters_one_cta_an_sm(num_gemm_ctas, cluster_m, match):
    refused(tuning=GemmTuning(cluster_m=cluster_m), match=match, num_gemm_ctas=num_gemm_ctas)


@given(
    tile_m=st.sampled_from([64, 128, 192, 256]),
    tile_n=st.sampled_from([64, 128, 192, 256]),
    cluster_m=st.sampled_from([1, 2]),
    consumers=st.sampled_from(list(Consumers)),
    store=st.sampled_from(list(StoreMode)),
    epilogue=st.sampled_from(list(Epilogue)),
    layout=st.sampled_from(list(Layout)),
    clip=st.sampled_from([None, *Clip]),
)
def test_whatever_is_planned_fits_and_holds_together(
    tile_m, tile_n, cluster_m, consumers, store, epilogue, layout, clip
):
    problem = replace(PADDED, epilogue=epilogue, layout=layout)
    tuning = GemmTuning(
        tile_m=tile_m,
        tile_n=tile_n,
        cluster_m=cluster_m,
        consumers=consumers,
        store=store,
        clip=clip,
    )
    try:
        plan = planned(problem, tuning)
    except ValueError:
        return

    assert plan.smem_bytes <= 232_448
    assert plan.num_stages >= 2
    assert (plan.clip is None) == (store is StoreMode.direct)
    assert not (layout is Layout.packed and plan.clip is Clip.whole)
    assert plan.out_tile_n % 64 == 0
    assert plan.tile_n // plan.num_b_parts % 64 == 0
    assert plan.tile_m * plan.tile_n // (128 * plan.groups_per_tile) <= 192
    assert 0 <= plan.claim_at < plan.num_k_tiles
