"""From global memory through shared memory and registers and back: every value at its place.

Layouts are those that the kernel is compiled with, evaluated on the host; what TMA, WGMMA, stmatrix
and shuffles do is written down here as the PTX manual has it.
"""

import re
from dataclasses import replace
from functools import cache

import pytest

from tilepipe.config.choices import Layout
from tilepipe.kernels.gemm.choices import Clip, Consumers, Epilogue, Major
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm

pytestmark = pytest.mark.filterwarnings("ignore")

PADDED = GemmProblem(n=4096, k=7168, num_experts=32, layout=Layout.padded, group_align=128)
PLANS = {
    "cooperative": (PADDED, GemmTuning()),
    "tall": (PADDED, GemmTuning(tile_m=256, tile_n=128)),
    "ping_pong": (PADDED, GemmTuning(tile_n=192, consumers=Consumers.ping_pong)),
    "cluster": (PADDED, GemmTuning(cluster_m=2)),
    "n_major": (replace(PADDED, b_major=Major.n), GemmTuning()),
    "n_major_cluster": (replace(PADDED, b_major=Major.n), GemmTuning(cluster_m=2)),
    "gate_up": (
        replace(PADDED, layout=Layout.packed, epilogue=Epilogue.swiglu_concatenated),
        GemmTuning(),
    ),
}


def plan_of(name):
    problem, tuning = PLANS[name]
    return plan_gemm(problem, tuning, num_gemm_ctas=132, num_sms=132)


@cache
def layouts_of(name):
    """All that is asked of the layouts of a plan, as plain numbers."""
    import cutlass.cute as cute
    from cutlass import BFloat16, Int32
    from cutlass.cute.runtime import make_ptr

    plan, found = plan_of(name), {}

    @cute.jit
    def traced(pointer: cute.Pointer, rows: Int32):
        look(plan, found, pointer, rows)

    pointer = make_ptr(BFloat16, 0, cute.AddressSpace.gmem, assumed_align=16)
    cute.compile(traced, pointer, Int32(1), options="--gpu-arch sm_90a")
    return found


def look(plan, found, pointer, rows):
    """Evaluate the layouts; plain Python, so that its loops are not staged."""
    import cutlass.cute as cute

    from tilepipe.kernels.gemm import operands

    layouts = operands.smem_layouts(plan)
    found["swizzles"] = [str(layout.inner) for layout in layouts]
    heights = (plan.tile_m, plan.tile_n, 64)
    for key, layout, height in zip("abd", layouts, heights, strict=True):
        # Corners and a few beside them: the layouts are linear in powers of two.
        places = {0, 1, 7, 8, 9, 63, 64, 192, height // 2 - 1, height // 2, height - 1}
        found[key] = {
            (row, column): 2 * int(cute.crd2idx((row, column, 0), layout.outer))
            for row in sorted(place for place in places if place < height)
            for column in (0, 1, 7, 8, 31, 32, 63)
        }
        found[f"{key} bytes"] = 2 * int(cute.cosize(layout.outer))
    tiled = operands.make_tiled_mma(plan)
    identity = cute.make_identity_tensor((plan.tile_m, plan.tile_n))
    found["sums"] = {}
    for group in range(plan.groups_per_tile):
        for thread in (0, 5, 31, 97):
            part = tiled.get_slice(128 * group + thread).partition_C(identity)
            found["sums"][group, thread] = [
                tuple(int(at) for at in part[i]) for i in range(cute.size(part))
            ]
    tensors = operands.global_tensors(plan, pointer, pointer, pointer, rows)
    atoms = operands.atoms(plan, layouts, tensors[0], tensors[1], tensors[3])
    found["boxes"] = [
        re.search(r'tma_gbasis = <"([^"]*)">', str(atom._trait.value.type)).group(1)
        for atom, _ in atoms
    ]


def swizzled(byte):
    """The 128-byte swizzle: bits 4..6 of an address by its bits 7..9."""
    return byte ^ (byte >> 3 & 0x70)


@pytest.mark.parametrize("name", PLANS)
def test_rings_and_staging_have_the_swizzle_of_128_bytes_and_their_bytes(name):
    plan, found = plan_of(name), layouts_of(name)

    assert found["swizzles"] == ["S<3,4,3>"] * 3
    assert found["a bytes"] == plan.num_stages * plan.tile_m * 128
    assert found["b bytes"] == plan.num_stages * plan.tile_n * 128
    assert found["d bytes"] == plan.staging_bytes
    assert found["a bytes"] + found["b bytes"] == plan.num_stages * plan.stage_bytes


@pytest.mark.parametrize("name", PLANS)
def test_a_box_of_tma_lies_as_its_ring_does(name):
    plan, found = plan_of(name), layouts_of(name)
    part_n = plan.tile_n // plan.num_b_parts

    # The inner dimension of a box is 64 elements, 128 bytes; @1 is K of an operand, @0 its rows.
    assert found["boxes"][0] == f"(64,{plan.tile_m // plan.num_a_parts}):(1@1,1@0)"
    if plan.problem.b_major is Major.k:
        assert found["boxes"][1] == f"(64,{part_n},1):(1@1,1@0,1@2)"
    else:
        assert found["boxes"][1] == "(64,64,1):(1@0,1@1,1@2)"
    if plan.clip is Clip.ragged:
        assert found["boxes"][2] == "(64,64,1):(1@1,1@0,1@2)"
    else:
        assert found["boxes"][2] == "(64,64):(1@1,1@0)"
    # TMA fills a box row by row, 128 bytes each; a wider tile of an N-major B is boxes in a row.
    for key in "ad":
        assert all(byte == 128 * row + 2 * column for (row, column), byte in found[key].items())
    for (row, column), byte in found["b"].items():
        if plan.problem.b_major is Major.k:
            assert byte == 128 * row + 2 * column
        else:
            assert byte == row // 64 * 64 * 128 + 128 * column + row % 64 * 2


@pytest.mark.parametrize("name", ["cooperative", "ping_pong", "gate_up"])
def test_the_descriptor_of_b_that_the_host_makes_has_the_box_of_the_kernel(name, monkeypatch):
    import cuda.bindings.driver as cuda
    import torch

    from tilepipe.kernels.gemm import launch

    plan, asked = plan_of(name), []

    def encode(*arguments):
        asked.extend(arguments)
        return cuda.CUresult.CUDA_ERROR_INVALID_VALUE, None

    monkeypatch.setattr(launch.cuda, "cuTensorMapEncodeTiled", encode)
    b = torch.empty(32, 4096, 7168, dtype=torch.bfloat16, device="meta")

    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE for B") as caught:
        launch.wide_descriptor(plan, b)

    assert "plan with wide_b=False" in str(caught.value)
    sizes, strides, box = ([int(size) for size in found] for found in asked[3:6])
    assert (sizes, strides) == ([7168, 4096, 32], [2 * 7168, 2 * 4096 * 7168])
    assert layouts_of(name)["boxes"][1] == f"({box[0]},{box[1]},{box[2]}):(1@1,1@0,1@2)"
    assert asked[9] is cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B


@pytest.mark.parametrize("name", PLANS)
def test_parts_of_a_tile_lie_one_behind_the_other(name):
    plan, found = plan_of(name), layouts_of(name)
    half = plan.tile_n // 2

    if plan.num_b_parts == 2:
        offset = plan.tile_n * 128 // 2
        assert found["b"][half, 0] == found["b"][0, 0] + offset
        assert max(byte for (row, _), byte in found["b"].items() if row < half) < offset
    for part in range(1, plan.num_a_parts):
        # Blocks of the warpgroups in turn.
        assert found["a"][64 * part, 0] == found["a"][0, 0] + part * 64 * 128


@pytest.mark.parametrize("name", PLANS)
def test_a_thread_holds_the_sums_that_its_epilogue_thinks_it_holds(name):
    plan, found = plan_of(name), layouts_of(name)

    for (group, thread), places in found["sums"].items():
        warp, lane = thread // 32, thread % 32
        expected = []
        for i in range(plan.blocks_per_group):
            block = i * plan.groups_per_tile + group
            for j in range(plan.tile_n // 8):
                for half in range(2):
                    for column in range(2):
                        row = 64 * block + 16 * warp + lane // 4 + 8 * half
                        expected.append((row, 8 * j + 2 * (lane % 4) + column))
        assert places == expected


# From here on integers alone: the arithmetic of the epilogue, lane by lane.


def stmatrix(memory, addresses, words):
    """Four 8 x 8 matrices: lanes 8i .. 8i + 7 give the rows' addresses of matrix i, whose row r
    holds the words i of lanes 4r .. 4r + 3."""
    for lane in range(32):
        for quad in range(4):
            holder = lane % 8 * 4 + quad
            for column in range(2):
                byte = addresses[lane] + 4 * quad + 2 * column
                assert byte not in memory, "written twice"
                memory[byte] = words[lane // 8][holder][column]


def test_a_staged_block_is_what_tma_reads():
    from tilepipe.kernels.gemm.epilogue import matrix_place, staged_byte

    memory = {}
    for warp in range(4):
        for pair in range(4):
            words = []
            for i in range(4):
                group, half = 2 * pair + i // 2, i % 2
                words.append(
                    [
                        [
                            (16 * warp + lane // 4 + 8 * half, 8 * group + 2 * (lane % 4) + column)
                            for column in range(2)
                        ]
                        for lane in range(32)
                    ]
                )
            places = [matrix_place(lane, warp, pair) for lane in range(32)]
            stmatrix(memory, [staged_byte(*place) for place in places], words)

    # TMA reads row by row, 128 bytes each, behind the swizzle.
    assert {
        (row, column): memory[swizzled(128 * row + 2 * column)]
        for row in range(64)
        for column in range(64)
    } == {(row, column): (row, column) for row in range(64) for column in range(64)}
    assert len(memory) == 64 * 64


def test_rows_of_a_matrix_lie_in_different_banks():
    from tilepipe.kernels.gemm.epilogue import matrix_place, staged_byte

    for warp in range(4):
        for pair in range(4):
            places = [matrix_place(lane, warp, pair) for lane in range(32)]
            addresses = [staged_byte(*place) for place in places]
            for i in range(4):
                # Eight rows of 16 bytes are all 32 banks of 4 bytes.
                assert len({at % 128 // 16 for at in addresses[8 * i : 8 * i + 8]}) == 8


def test_a_quad_exchanges_words_until_each_lane_holds_neighbours():
    from tilepipe.kernels.gemm.epilogue import words_kept, words_to_send

    held = [[100 * lane + word for word in range(4)] for lane in range(4)]
    for distance in (1, 2):
        sent = [words_to_send(held[lane], distance, lane) for lane in range(4)]
        held = [words_kept(held[lane], sent[lane ^ distance], distance, lane) for lane in range(4)]

    # Lane q held word (columns 2q, 2q + 1) of four column groups, now all words of group q.
    assert held == [[100 * lane + word for lane in range(4)] for word in range(4)]


def test_interleaved_gate_and_up_become_neighbouring_outputs():
    from tilepipe.kernels.gemm.epilogue import neighbours_of

    for first in range(0, 32, 4):
        # Lane q has made outputs q and 4 + q of eight.
        made = {first + quad: (quad, 4 + quad) for quad in range(4)}
        for quad in range(4):
            low, high, upper = neighbours_of(first + quad)
            # prmt: selector 0x5410 takes the lower halves of both words, 0x7632 the upper ones.
            assert 0x5410 + upper * 0x2222 == (0x7632 if upper else 0x5410)
            assert (made[low][upper], made[high][upper]) == (2 * quad, 2 * quad + 1)


@pytest.mark.parametrize("num_rows", [1, 63, 64])
def test_a_ragged_store_ends_with_the_last_row_and_begins_with_the_first(num_rows):
    # Dimensions (row of a block, column, row): the base lies one block below the output.
    block, pitch, first = 64, 1000, 4711
    inside = range(block)
    stored = {}
    for row in range(block):
        at = block - num_rows + row
        if at in inside:
            stored[row] = -block * pitch + at * pitch + (first + num_rows) * pitch

    assert stored == {row: (first + row) * pitch for row in range(num_rows)}
