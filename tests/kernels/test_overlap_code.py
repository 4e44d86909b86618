"""The code of fused launches, in a few of their plans: what it must hold and must not.

Compiled for sm_90a; needs no GPU.
"""

import re
from dataclasses import dataclass

import pytest

from tests.kernels.sass import MachineCode, disassemble
from tests.kernels.test_gemm_code import (
    LAUNCH_REGISTERS,
    expect_abort_word_beside_claim,
    expect_rows_acquired_ahead,
    expect_rows_acquired_by_who_loads,
    first_load,
    registers_shared_out,
)
from tests.kernels.waits import waits_in
from tilepipe.config.choices import Copy, Granularity, Layout, Roles, StoreMode
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.choices import Consumers
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.overlap.plan import OverlapPlan, gemm_bytes

pytestmark = pytest.mark.filterwarnings("ignore")

HIDDEN, N = 7168, 4096
# copy, roles, ranks of the launch, granularity, layout, tuning; all begin together but the first
PLANS = {
    "tma": (Copy.tma, Roles.fixed, 1, Granularity.tile, Layout.padded, GemmTuning()),
    "simt_cluster": (
        *(Copy.simt, Roles.switch, 8, Granularity.token, Layout.packed),
        GemmTuning(cluster_m=2),
    ),
    "tma_together": (
        *(Copy.tma, Roles.switch, 8, Granularity.tile, Layout.padded),
        GemmTuning(cluster_m=2),
    ),
    "tma_beside": (*(Copy.tma, Roles.beside, 1, Granularity.tile, Layout.padded), GemmTuning()),
    "simt_beside": (
        *(Copy.simt, Roles.beside, 8, Granularity.token, Layout.packed),
        # Sums take all registers that a thread has for them.
        GemmTuning(consumers=Consumers.ping_pong, tile_n=192),
    ),
    "tma_direct": (
        *(Copy.tma, Roles.switch, 2, Granularity.expert, Layout.packed),
        GemmTuning(store=StoreMode.direct),
    ),
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

    copy, roles, num_ranks, granularity, layout, tuning = PLANS[request.param]
    problem = GemmProblem(
        n=N, k=HIDDEN, num_experts=32, layout=layout, group_align=128, wait=granularity
    )
    constants = Constants(
        num_ranks=num_ranks,
        num_experts_per_rank=32,
        num_topk=8,
        row_bytes=2 * HIDDEN,
        granularity=granularity,
        copy=copy,
        num_warps=4 if copy is Copy.tma else 12,
    )
    plan = make_plan(
        plan_gemm(
            *(problem, tuning),
            num_gemm_ctas=tuning.cluster_m,
            num_sms=132,
            smem_bytes=gemm_bytes(constants),
        ),
        constants,
        roles=roles,
        opens=request.param != "tma",
        gates=request.param != "tma",
        num_launch_ranks=num_ranks,
        a_rank_pitch=4096 * HIDDEN,
        d_rank_pitch=4096 * N,
    )
    code = compile_overlap(plan)
    return Compiled(plan, code.ptx, disassemble(code.cubin))


def test_both_roles_have_a_register_for_every_value(compiled):
    machine = compiled.machine

    assert ".local" not in compiled.ptx
    assert [code for code in machine.opcodes if code.startswith(("LDL", "STL"))] == []
    assert (machine.frame_bytes, machine.num_registers) == (0, LAUNCH_REGISTERS)


def test_warps_that_multiply_leave_registers_to_one_that_sends_beside_them(compiled):
    fewer, more = registers_shared_out(compiled.ptx)

    assert fewer + 2 * more <= 3 * LAUNCH_REGISTERS, "more than the launch has"
    assert (fewer > 40) == (compiled.plan.roles is Roles.beside)


def test_who_sends_beside_tiles_passes_no_gate(compiled):
    # Barrier of all but one of the twelve warps, at a number that nothing else has.
    met = re.findall(r"barrier\.sync\s+12, (\d+);|bar\.sync\s+12, (\d+);", compiled.ptx)

    beside = compiled.plan.roles is Roles.beside and compiled.plan.gates
    assert [first or second for first, second in met] == ["352"] * beside
    if beside:
        assert not re.search(r"bar\w*\.(sync|arrive)\s+12;", compiled.ptx)


def test_who_joins_sleeps_between_looks_at_the_queue(compiled):
    # Nobody else sleeps in a launch without stamps.
    sleeps = re.findall(r"nanosleep\.u32 (\d+);", compiled.ptx)

    assert len(sleeps) == 2 * compiled.plan.joins


def test_a_warp_sends_beside_tiles_by_a_loop_of_its_own(compiled):
    # Loads of a row that is copied through registers: each loop of them has a row's.
    loads = len(re.findall(r"ld\.global\.L1::no_allocate\S*\.v4", compiled.ptx))
    of_a_row = compiled.plan.constants.row_bytes // (16 * 32)
    loops = (compiled.plan.constants.copy is Copy.simt) * (1 + compiled.plan.opens)
    if compiled.plan.roles is Roles.beside:
        loops += 1 - (compiled.plan.constants.copy is Copy.simt)

    assert loads == loops * of_a_row


def test_rows_are_acquired_before_a_tile_is_handed_over_or_by_the_warp_that_loads_it(compiled):
    if compiled.plan.gemm.waits_ahead:
        expect_rows_acquired_ahead(compiled.ptx)
    else:
        expect_rows_acquired_by_who_loads(compiled.ptx)


def test_the_abort_word_is_looked_at_beside_a_claim_of_a_tile_and_ahead_of_it(compiled):
    expect_abort_word_beside_claim(compiled.ptx, compiled.plan.gemm)


def test_ctas_that_begin_together_have_acquired_what_they_waited_for(compiled):
    together = [wait for wait in waits_in(compiled.ptx) if wait.look < first_load(compiled.ptx)]
    alone = not compiled.plan.gemm.waits_ahead  # who loads waits, too

    assert len(together) == compiled.plan.gates + alone
    if compiled.plan.gates:
        met = compiled.ptx.index("bar.sync", together[0].there)
        assert (together[0].scope, met < first_load(compiled.ptx)) == ("sys", True)
        # The barrier passes on what lanes have acquired; rows that are there cost no fence.
        assert "fence" not in compiled.ptx[together[0].there : met]


def test_rows_are_pushed_by_the_copy_that_was_chosen(compiled):
    pushes = len(re.findall(r"cp\.async\.bulk\.global\.shared::cta", compiled.ptx))
    by_bulk = compiled.plan.constants.copy is Copy.tma

    assert (pushes > 0) == by_bulk
    # Rows and what is told of them go to peers; released at system scope.
    assert re.search(r"(red|st)\.relaxed\.sys\.global", compiled.ptx)
    if not by_bulk:
        loads = compiled.plan.constants.num_loads
        assert compiled.count("LDG.E.NA.LTC256B.128") + compiled.count("LDG.E.LTC256B.128") > 0
        assert len(re.findall(r"ld\.global\S*\.v4", compiled.ptx)) >= loads


def test_products_are_pipelined_as_in_the_gemm_alone(compiled):
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", compiled.ptx)

    assert waits == ["1", "0"]
    assert compiled.count("WARPGROUP.DEPBAR") == 2
    assert compiled.count("HGMMA") == 8 * compiled.plan.gemm.blocks_per_group


def test_stages_of_communication_lie_where_operands_will_and_barriers_behind_both(compiled):
    gemm = compiled.plan.gemm
    rings = gemm.num_stages * gemm.stage_bytes + gemm.staging_bytes
    places = [
        int(place)
        for place in re.findall(r"mbarrier\.init\.shared\.b64\s+\[%r\d+\+(\d+)\]", compiled.ptx)
    ]

    assert compiled.plan.constants.num_warps * compiled.plan.ring_bytes <= rings
    assert min(places) >= rings
    assert max(places) < compiled.plan.smem_bytes


def test_nothing_is_read_through_the_read_only_path(compiled):
    assert not re.search(r"\bld\.global\S*\.nc\b|\bldu\b|\btex\b", compiled.ptx)
    assert not [code for code in compiled.machine.opcodes if "CONSTANT" in code]


def test_every_wait_inside_a_cta_is_bounded(compiled):
    # Each wait is a first try and a loop that looks at the clock: those of the GEMM trap, those of
    # bulk copies give up.
    tries = compiled.ptx.count("mbarrier.try_wait")

    assert "mbarrier.test_wait" not in compiled.ptx
    assert tries % 2 == 0
    assert compiled.ptx.count("%globaltimer") >= tries
