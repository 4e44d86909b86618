"""Shared memory that is reckoned with is what a kernel is launched with; needs no GPU."""

import re

import pytest

from tilepipe.config.choices import Copy, Granularity
from tilepipe.kernels.constants import Constants

pytestmark = pytest.mark.filterwarnings("ignore")

KIB = 1024
MOVING = {"moves": True, "reduces": False}
BOTH = {"moves": True, "reduces": True}
REDUCING = {"moves": False, "reduces": True}
PARTS = {"dispatch": MOVING, "push": MOVING, "combine": BOTH, "reduce": REDUCING}


def constants_of(**chosen):
    plain = {
        "num_ranks": 8,
        "num_experts_per_rank": 4,
        "num_topk": 8,
        "row_bytes": 14_336,
        "granularity": Granularity.tile,
        "copy": Copy.tma,
        "num_warps": 4,
    }
    return Constants(**{**plain, **chosen})


def launched_bytes(code):
    """Dynamic shared memory in the launch that the host function makes: a field of its block."""
    text = str(code.function.ir_module)
    (field,) = re.findall(r"(%\d+) = llvm\.getelementptr %\d+\[0, 2\] .*array<3 x i32>, i64", text)
    (name,) = re.findall(rf"llvm\.store (%\d+), {field} ", text)
    (value,) = re.findall(rf"{name} = llvm\.mlir\.constant\((\d+) : i64\)", text)
    return int(value)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("dispatch", {}),
        ("dispatch", {"copy": Copy.simt}),
        ("dispatch", {"row_bytes": 5_760, "num_warps": 2, "num_stages": 14}),
        ("push", {"row_bytes": 28_672, "num_warps": 8, "num_stages": 1, "num_ranks": 1}),
        ("combine", {"num_warps": 2, "num_stages": 6}),
        # The ring of sums is the larger one.
        ("combine", {"num_warps": 8, "num_stages": 1, "num_topk": 16}),
        ("combine", {"copy": Copy.simt, "num_warps": 16}),
        ("reduce", {"num_warps": 8}),
    ],
)
def test_a_kernel_is_launched_with_the_shared_memory_that_is_reckoned(name, chosen):
    from tilepipe.kernels.launcher import compile_launch
    from tilepipe.kernels.move import shared_bytes

    constants = constants_of(**chosen)
    reckoned = shared_bytes(constants, **PARTS[name])

    launched = launched_bytes(compile_launch(name, constants))

    # Reckoned in steps of 128 bytes, each part by itself.
    assert launched <= reckoned < launched + 128


def test_a_warp_of_both_takes_turns_in_the_larger_of_two_rings():
    from tilepipe.kernels.move import warp_bytes

    constants = constants_of(num_stages=1, num_warps=8, num_topk=16, row_bytes=28_672)
    by_simt = constants_of(copy=Copy.simt, num_warps=8, num_topk=16, row_bytes=28_672)

    assert warp_bytes(constants, **MOVING) == constants.piece_bytes == 14 * KIB
    # 192 KiB hold 24 columns of 16 slots, three a warp.
    assert warp_bytes(constants, **REDUCING) == warp_bytes(constants, **BOTH) == 3 * 16 * 512
    assert warp_bytes(by_simt, **MOVING) == 0
    assert warp_bytes(by_simt, **BOTH) == 3 * 16 * 512


@pytest.mark.parametrize(
    ("row_bytes", "num_pieces", "piece_bytes"),
    [(0, 1, 16), (16, 1, 16), (14_336, 1, 14_336), (14_352, 2, 7_184), (28_672, 2, 14_336)],
)
def test_a_row_is_cut_into_pieces_that_fit_a_stage(row_bytes, num_pieces, piece_bytes):
    constants = constants_of(row_bytes=row_bytes)

    assert (constants.num_pieces, constants.piece_bytes) == (num_pieces, piece_bytes)


def test_pieces_of_any_row_cover_it_and_none_is_empty_or_too_large():
    for row_bytes in range(16, 80_000, 16):
        constants = constants_of(row_bytes=row_bytes)
        last = row_bytes - (constants.num_pieces - 1) * constants.piece_bytes

        assert constants.piece_bytes % 16 == 0
        assert 0 < last <= constants.piece_bytes <= 14_336
