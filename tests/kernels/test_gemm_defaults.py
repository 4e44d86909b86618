"""Which tuning a shape and a tile are given: all that are named can be planned."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilepipe.config.choices import Layout, StoreMode
from tilepipe.kernels.gemm.choices import Consumers
from tilepipe.kernels.gemm.defaults import DEFAULTS, default_tuning, tuning_of_tile
from tilepipe.kernels.gemm.plan import GemmProblem, plan_gemm
from tilepipe.schedule.settings import PlanSettings

PROBLEM = GemmProblem(n=4096, k=7168, num_experts=32, layout=Layout.packed, group_align=128)


@pytest.mark.parametrize("default", DEFAULTS, ids=lambda default: default.why)
def test_every_default_can_be_planned(default):
    plan = plan_gemm(PROBLEM, default.tuning, num_gemm_ctas=132, num_sms=132)

    assert plan.num_stages >= 4


@given(counts=st.lists(st.integers(0, 10_000), max_size=64), k=st.integers(8, 20_000))
def test_every_shape_has_a_default_and_more_rows_never_fewer_rows_a_tile(counts, k):
    fewer = default_tuning(counts, k=k)
    more = default_tuning([2 * count for count in counts], k=k)

    assert fewer.tile_m <= more.tile_m


@pytest.mark.parametrize(
    ("counts", "k", "tile"),
    [
        ([128] * 32, 2048, (128, 128)),
        ([128] * 31 + [0], 2048, (128, 128)),
        ([128] * 32, 7168, (128, 256)),
        ([1024] * 32, 2048, (128, 256)),
        ([140] * 32, 2048, (128, 256)),  # a quarter of the blocks is empty
        ([32] * 32, 2048, (64, 256)),
        ([], 2048, (64, 256)),
    ],
)
def test_short_full_tiles_and_skinny_experts_have_tunings_of_their_own(counts, k, tile):
    tuning = default_tuning(counts, k=k)

    assert (tuning.tile_m, tuning.tile_n) == tile


@pytest.mark.parametrize(
    ("tile", "consumers"),
    [
        ((128, 256), Consumers.cooperative),
        ((256, 128), Consumers.cooperative),
        ((128, 192), Consumers.ping_pong),
        ((128, 128), Consumers.ping_pong),
        ((64, 256), Consumers.ping_pong),
    ],
)
def test_a_tile_that_one_warpgroup_can_hold_goes_to_each_in_turn(tile, consumers):
    tuning = tuning_of_tile(*tile)

    assert (tuning.tile_m, tuning.tile_n) == tile
    assert (tuning.consumers, tuning.store) == (consumers, StoreMode.tma)
    assert tuning_of_tile(*tile, store=StoreMode.direct).store is StoreMode.direct
    plan_gemm(PROBLEM, tuning, num_gemm_ctas=132, num_sms=132)


def test_only_a_gemm_alone_walks_more_tiles_together_than_the_plan_of_rows_has():
    settings = {field.name: field.default for field in fields(PlanSettings)}

    assert tuning_of_tile(128, 256).raster_m == settings["raster_m"] == 8
    assert tuning_of_tile(128, 256, alone=True).raster_m == 16
