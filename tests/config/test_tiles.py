"""Tiles that a GPU's GEMM has: what is refused in time is what the kernel's own plan refuses."""

import itertools
import re

import pytest

from tilepipe.config.checks import check_config
from tilepipe.config.choices import Layout
from tilepipe.config.schemas import config_from_dict
from tilepipe.config.tiles import GEMM_TILES
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.gemm.defaults import tuning_of_tile
from tilepipe.kernels.gemm.plan import GemmProblem, plan_gemm

# All that the schema lets through, of both.
SIZES = range(16, 1025, 16)
GATED = Epilogue.swiglu_concatenated


def planned(tile_m, tile_n, epilogue):
    problem = GemmProblem(
        n=4096, k=7168, num_experts=8, layout=Layout.padded, group_align=tile_m, epilogue=epilogue
    )
    try:
        plan_gemm(problem, tuning_of_tile(tile_m, tile_n), num_gemm_ctas=132, num_sms=132)
    except ValueError:
        return False
    return True


@pytest.fixture
def accepted(container):
    """Whether a tile is accepted of one operation."""
    configs = {}

    def asked(operation, tile_m, tile_n):
        if operation not in configs:
            words = ("hardware=h200_x1", "launch.num_ranks=1", f"kernel={operation}")
            configs[operation] = config_from_dict(container(*words))
        config = configs[operation]
        config.kernel.tile_m, config.kernel.tile_n = tile_m, tile_n
        try:
            check_config(config)
        except ValueError as error:
            if not str(error).startswith("kernel.tile_"):
                raise
            return False
        return True

    return asked


@pytest.mark.parametrize(
    ("operation", "epilogue"),
    [
        ("grouped_gemm", Epilogue.none),
        ("dispatch_gemm", Epilogue.none),
        ("gemm_combine", Epilogue.none),
        ("moe_layer", GATED),
    ],
)
def test_a_tile_is_accepted_where_the_kernel_can_be_planned(operation, epilogue, accepted):
    tiles = list(itertools.product(SIZES, SIZES))

    assert [accepted(operation, *tile) for tile in tiles] == [
        planned(*tile, epilogue) for tile in tiles
    ]


def test_every_tile_that_is_named_is_one_that_may_be_typed():
    assert {size for rows, columns in GEMM_TILES.items() for size in (rows, *columns)} <= set(SIZES)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "kernel=grouped_gemm kernel.tile_m=80",
            "kernel.tile_m=80: a GPU has tiles of 64, 128, 192, 256, 320, 384, 512 or 640 rows; "
            "use one of them, or type hardware=cpu",
        ),
        (
            "kernel=dispatch_gemm kernel.tile_m=192",
            "kernel.tile_n=256: with kernel.tile_m=192 a GPU has tiles of 64 or 128 columns; use "
            "one of them, or type hardware=cpu",
        ),
        (
            "kernel=gemm_combine kernel.tile_m=512 kernel.tile_n=128",
            "kernel.tile_n=128: with kernel.tile_m=512 a GPU has tiles of 64 columns; use one of "
            "them, or type hardware=cpu",
        ),
        (
            "kernel=moe_layer kernel.tile_m=320",
            "kernel.tile_m=320: a GPU has tiles of 64, 128, 192, 256 or 384 rows; use one of "
            "them, or type hardware=cpu",
        ),
    ],
)
def test_a_tile_that_no_kernel_has_is_refused_with_those_that_there_are(words, sentence, container):
    config = config_from_dict(container("hardware=h200_x1", *words.split()))

    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_config(config)


@pytest.mark.parametrize(
    "words", ["hardware=cpu kernel=grouped_gemm", "hardware=h200_x1 kernel=dispatch"]
)
def test_without_a_gemm_on_a_gpu_every_tile_will_do(words, container):
    check_config(config_from_dict(container(*words.split(), "kernel.tile_m=80")))
