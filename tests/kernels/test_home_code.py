"""The code of GEMM -> combine in one launch: what it must hold and must not.

Compiled for sm_90a; needs no GPU.
"""

import re
from dataclasses import dataclass

import pytest

from tests.kernels.sass import MachineCode, disassemble
from tests.kernels.test_gemm_code import LAUNCH_REGISTERS, registers_shared_out
from tests.kernels.waits import waits_in
from tilepipe.config.choices import Copy, Granularity, Layout, Push, Roles, Walk
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.overlap.home import HomePlan, Reduces, plan_home_launch

pytestmark = pytest.mark.filterwarnings("ignore")

# who pushes, copy, ranks of the launch, granularity, CTAs of a cluster, order of tiles
PLANS = {
    "simt": (Push.ctas, Copy.simt, 1, Granularity.tile, 1, Walk.chunk),
    "tma_cluster": (Push.ctas, Copy.tma, 8, Granularity.token, 2, Walk.expert),
    "sent": (Push.epilogue, Copy.simt, 1, Granularity.tile, 1, Walk.chunk),
    "sent_cluster": (Push.epilogue, Copy.simt, 8, Granularity.tile, 2, Walk.expert),
    "sent_beside": (Push.epilogue, Copy.simt, 1, Granularity.tile, 1, Walk.chunk),
    "beside": (Push.epilogue, Copy.simt, 8, Granularity.tile, 1, Walk.chunk),
    "beside_cluster": (Push.epilogue, Copy.tma, 1, Granularity.tile, 2, Walk.expert),
}


@dataclass(frozen=True)
class Compiled:
    """The kernel of one plan, as PTX and as machine code."""

    plan: HomePlan
    ptx: str
    machine: MachineCode


@pytest.fixture(scope="module", params=PLANS)
def compiled(request):
    # Only where it is wanted: the import takes two seconds.
    from tilepipe.kernels.overlap.launch import compile_overlap

    push, copy, num_ranks, granularity, cluster_m, walk = PLANS[request.param]
    problem = GemmProblem(
        n=7168,
        k=2048,
        num_experts=32,
        layout=Layout.packed,
        group_align=128,
        publish=True,
        num_chunks=4,
        sends=push is Push.epilogue,
    )
    tuning = GemmTuning(cluster_m=cluster_m, walk=walk)
    plan = plan_home_launch(
        plan_gemm(problem, tuning, num_gemm_ctas=cluster_m, num_sms=132),
        Constants(
            num_ranks=num_ranks,
            num_experts_per_rank=32,
            num_topk=8,
            row_bytes=14_336,
            granularity=granularity,
            num_chunks=4,
            num_parts=4 if walk is Walk.chunk else 1,
            copy=copy,
            num_warps=8,
        ),
        roles=Roles.beside if request.param.startswith("beside") else Roles.switch,
        reduces=Reduces.beside if request.param == "sent_beside" else Reduces.all,
        num_launch_ranks=num_ranks,
        a_rank_pitch=4096 * 2048,
        d_rank_pitch=4096 * 7168,
    )
    code = compile_overlap(plan)
    return Compiled(plan, code.ptx, disassemble(code.cubin))


def test_all_roles_have_a_register_for_every_value(compiled):
    machine = compiled.machine

    assert ".local" not in compiled.ptx
    assert [code for code in machine.opcodes if code.startswith(("LDL", "STL"))] == []
    assert (machine.frame_bytes, machine.num_registers) == (0, LAUNCH_REGISTERS)


def test_warps_that_multiply_leave_registers_to_one_that_reduces_beside_them(compiled):
    fewer, more = registers_shared_out(compiled.ptx)

    assert fewer + 2 * more <= 3 * LAUNCH_REGISTERS, "more than the launch has"
    assert (fewer > 40) == (compiled.plan.roles is Roles.beside)


def test_rows_are_told_at_home_behind_a_release_for_all_devices(compiled):
    if compiled.plan.push is Push.epilogue:
        pytest.skip("whoever completes a chunk tells, see below")
    by_bulk = compiled.plan.constants.copy is Copy.tma
    told = compiled.ptx.index("red.relaxed.sys.global.add.s32")
    release = compiled.ptx.rindex("fence.acq_rel.sys", 0, told)

    if by_bulk:
        fence = compiled.ptx.rindex("fence.proxy.async.global", 0, release)
        done = compiled.ptx.rindex("cp.async.bulk.wait_group \t0", 0, fence)
        pushed = compiled.ptx.rindex("cp.async.bulk.global.shared::cta", 0, done)
        assert pushed < done < fence < release < told
    else:
        stored = compiled.ptx.rindex("st.global", 0, release)
        assert stored < release < told


def test_stored_tiles_are_acquired_before_their_rows_are_read(compiled):
    if compiled.plan.push is Push.epilogue:
        pytest.skip("nobody reads them")
    by_bulk = compiled.plan.constants.copy is Copy.tma
    read = compiled.ptx.index(
        "cp.async.bulk.shared::cluster.global" if by_bulk else "ld.global.L1::no_allocate"
    )
    acquire = compiled.ptx.rindex("fence.acq_rel.gpu", 0, read)
    (wait,) = (wait for wait in waits_in(compiled.ptx) if wait.scope == "gpu")
    met = compiled.ptx.index("bar.warp.sync", wait.there)

    # Each lane what it has waited for, and all of them what any has.
    assert wait.look < wait.poll < wait.fence < wait.there < met < acquire < read
    if by_bulk:
        assert "fence.proxy.async.global" in compiled.ptx[wait.there : met]
        assert "fence.proxy.async.global" in compiled.ptx[acquire:read]


def test_rows_at_home_are_acquired_before_they_are_summed(compiled):
    ptx = compiled.ptx
    waits = [wait for wait in waits_in(ptx) if wait.scope == "sys"]
    if compiled.plan.roles is Roles.beside:
        # Of the reduction beside tiles one wait ahead of its loop, and one at the end of each turn.
        rests = [match.start() for match in re.finditer("nanosleep", ptx)]
        loads = [m.start() for m in re.finditer(r"@%p\d+ ld\.global\.L1::no_allocate", ptx)]
        own = [wait for wait in waits if any(wait.look < rest < wait.there for rest in rests)]
        assert len(own) == len(rests) == 2
        assert own[0].there < loads[0] < loads[-1] < own[1].look
        waits = [wait for wait in waits if wait not in own]
    sums = [match.start() for match in re.finditer(r"cp\.async\.cg\.shared\.global", ptx)]

    # Of each reduction one wait ahead of its loop and one in it, for what is fetched behind both.
    alone = compiled.plan.stops_reducing or compiled.plan.roles is Roles.beside
    assert len(waits) == 2 * (1 if alone else 2)
    for ahead, inside in zip(waits[::2], waits[1::2], strict=True):
        fetched = [place for place in sums if place > ahead.look]
        assert ahead.fence < ahead.there < fetched[0] < inside.look
        assert inside.there < next(place for place in sums if place > inside.look)


def test_the_gemm_tells_of_tiles_behind_their_stores_for_its_own_device(compiled):
    by_epilogue = compiled.plan.push is Push.epilogue

    assert compiled.ptx.count("red.relaxed.gpu.global.add.s32") == (not by_epilogue)


def test_who_completes_a_chunk_has_released_its_rows_and_acquired_those_of_others(compiled):
    if compiled.plan.push is not Push.epilogue:
        pytest.skip("communication CTAs push, unit by unit")
    told = compiled.ptx.index("red.relaxed.sys.global.add.s32")
    acquired = compiled.ptx.rindex("fence.acq_rel.sys", 0, told)
    counted = compiled.ptx.rindex("atom.global.add.u32", 0, acquired)  # relaxed, scope gpu
    released = compiled.ptx.rindex("fence.acq_rel.sys", 0, counted)
    met = compiled.ptx.rindex("bar.sync", 0, released)

    assert met < released < counted < acquired < told
    assert "st.global" not in compiled.ptx[met:counted], "warps that met it have stored all rows"
    assert "bar.warp.sync" in compiled.ptx[counted:acquired], "one lane has counted"


def test_rows_that_are_sent_are_stored_16_bytes_a_lane_and_not_by_tma(compiled):
    by_tma = [code for code in compiled.machine.opcodes if code.startswith("UTMASTG")]

    assert bool(by_tma) == (compiled.plan.push is Push.ctas)
    if compiled.plan.push is Push.epilogue:
        wide = [code for code in compiled.machine.opcodes if code.startswith("STG.E.NA.128")]
        # Of a warpgroup four rounds of each of four blocks; and the sums of the reduction, by who
        # does nothing else and by who has multiplied.
        assert len(wide) >= 16 + (1 if compiled.plan.stops_reducing else 2)


def test_only_who_reduces_beside_tiles_takes_the_queue_to_its_end(compiled):
    taken = compiled.ptx.count("atom.global.max.s32") + compiled.ptx.count("red.global.max.s32")

    assert (taken > 0) == compiled.plan.stops_reducing


def test_nothing_is_read_through_the_read_only_path(compiled):
    assert not re.search(r"\bld\.global\S*\.nc\b|\bldu\b|\btex\b", compiled.ptx)
    assert not [code for code in compiled.machine.opcodes if "CONSTANT" in code]
