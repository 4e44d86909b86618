"""The code of the first half of a layer: SwiGLU in the epilogue of a fused launch, for nothing.

Compiled for sm_90a; needs no GPU.
"""

from dataclasses import dataclass

import pytest

from tests.kernels.sass import MachineCode, disassemble
from tests.kernels.test_gemm_code import LAUNCH_REGISTERS
from tilepipe.config.choices import Copy, Granularity, Layout, Roles, StoreMode
from tilepipe.fabric.table import Slot, Word
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.choices import Epilogue
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.overlap.plan import OverlapPlan, gemm_bytes

pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, INTERMEDIATE = 7168, 2048
# copy, ranks of the launch, layout, tuning
PLANS = {
    "simt": (Copy.simt, 1, Layout.padded, GemmTuning()),
    "tma_direct": (Copy.tma, 2, Layout.packed, GemmTuning(store=StoreMode.direct)),
}


@dataclass(frozen=True)
class Compiled:
    """The kernel of one plan, as PTX and as machine code."""

    plan: OverlapPlan
    ptx: str
    machine: MachineCode

    def count(self, opcode: str) -> int:
        return sum(code.startswith(opcode) for code in self.machine.opcodes)


@pytest.fixture(scope="module", params=PLANS)
def compiled(request):
    # Only where it is wanted: the import takes two seconds.
    from tilepipe.kernels.overlap.launch import compile_overlap, make_plan

    copy, num_ranks, layout, tuning = PLANS[request.param]
    problem = GemmProblem(
        n=2 * INTERMEDIATE,
        k=HIDDEN,
        num_experts=32,
        layout=layout,
        group_align=128,
        wait=Granularity.tile,
        epilogue=Epilogue.swiglu_concatenated,
    )
    constants = Constants(
        num_ranks=num_ranks,
        num_experts_per_rank=32,
        num_topk=8,
        row_bytes=2 * HIDDEN,
        granularity=Granularity.tile,
        copy=copy,
        num_warps=8 if copy is Copy.tma else 12,
        stage_bytes=7168,
    )
    room = gemm_bytes(constants)
    plan = make_plan(
        plan_gemm(problem, tuning, num_gemm_ctas=1, num_sms=132, smem_bytes=room),
        constants,
        roles=Roles.switch,
        opens=True,
        gates=True,
        num_launch_ranks=num_ranks,
        a_rank_pitch=4096 * HIDDEN,
        d_rank_pitch=4096 * INTERMEDIATE,
    )
    code = compile_overlap(plan)
    return Compiled(plan, code.ptx, disassemble(code.cubin))


def test_no_register_is_spilled_and_products_are_those_of_the_plain_gemm(compiled):
    machine = compiled.machine

    assert ".local" not in compiled.ptx
    assert [code for code in machine.opcodes if code.startswith(("LDL", "STL"))] == []
    assert (machine.frame_bytes, machine.num_registers) == (0, LAUNCH_REGISTERS)
    assert compiled.count("HGMMA") == 8
    assert compiled.plan.gemm.num_stages == 4


def test_every_output_has_one_exponential_and_half_a_tile_is_stored(compiled):
    # Of 128 x 256 sums a thread of two warpgroups holds 128, in pairs of gate and up.
    assert compiled.ptx.count("ex2.approx") == 64
    assert compiled.ptx.count("rcp.approx") == 64
    assert compiled.plan.gemm.out_tile_n == 128


def test_both_gemms_of_a_layer_have_a_list_of_tiles_each():
    lists = []
    for is_second in (False, True):
        problem = GemmProblem(
            n=512, k=512, num_experts=8, layout=Layout.padded, group_align=128, is_second=is_second
        )
        plan = plan_gemm(problem, GemmTuning(), num_gemm_ctas=8, num_sms=132)
        lists.append((plan.tiles_slot, plan.tiles_word))

    assert lists == [
        (Slot.gemm_tiles, Word.num_gemm_tiles),
        (Slot.second_tiles, Word.num_second_tiles),
    ]
