"""The code of the grouped GEMM, in a few of its plans: what it must hold and must not.

Compiled for sm_90a; needs no GPU.
"""

import re
from dataclasses import dataclass, replace

import pytest

from tests.kernels.sass import MachineCode, disassemble
from tests.kernels.waits import waits_in
from tilepipe.config.choices import Granularity, Layout, StoreMode
from tilepipe.kernels.gemm.choices import Clip, Consumers, Epilogue, Major
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, KernelPlan, plan_gemm

pytestmark = pytest.mark.filterwarnings("ignore")

PADDED = GemmProblem(n=4096, k=7168, num_experts=32, layout=Layout.padded, group_align=128)
PACKED = replace(PADDED, layout=Layout.packed)
HOOKED = replace(PACKED, wait=Granularity.tile, publish=True)
PING_PONG = GemmTuning(consumers=Consumers.ping_pong, tile_n=192)
PLANS = {
    "plain": (PADDED, GemmTuning()),
    "hooked_cluster": (HOOKED, GemmTuning(cluster_m=2)),
    "hooked_direct": (
        replace(HOOKED, wait=Granularity.token, b_major=Major.n),
        GemmTuning(store=StoreMode.direct),
    ),
    "per_group": (
        replace(PACKED, epilogue=Epilogue.swiglu_interleaved),
        GemmTuning(clip=Clip.per_group),
    ),
    "gate_up_cluster": (
        replace(PADDED, epilogue=Epilogue.swiglu_concatenated, b_major=Major.n),
        GemmTuning(cluster_m=2),
    ),
    "narrow_fetches": (PACKED, GemmTuning(wide_b=False)),
    # Two blocks a warpgroup, as in a tile of 256 rows.
    "hooked_ping_pong": (
        replace(HOOKED, wait=Granularity.expert, epilogue=Epilogue.row_scale),
        PING_PONG,
    ),
}
# Of a CTA of 384 threads before warps give registers away or take them: 65 536 / 384, by eights.
LAUNCH_REGISTERS = 168


@dataclass(frozen=True)
class Compiled:
    """The kernel of one plan, as PTX and as machine code."""

    plan: KernelPlan
    ptx: str
    machine: MachineCode

    def count(self, opcode: str) -> int:
        return sum(code.startswith(opcode) for code in self.machine.opcodes)


@pytest.fixture(scope="module", params=PLANS)
def compiled(request):
    # Only where it is wanted: the import takes two seconds.
    from tilepipe.kernels.gemm.launch import compile_gemm

    problem, tuning = PLANS[request.param]
    plan = plan_gemm(problem, tuning, num_gemm_ctas=132, num_sms=132)
    code = compile_gemm(plan)
    return Compiled(plan, code.ptx, disassemble(code.cubin))


def test_products_are_whole_columns_of_a_tile_by_64_rows(compiled):
    plan = compiled.plan
    shape = f"m64n{plan.tile_n}k16.f32.bf16.bf16"
    found = re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", compiled.ptx)
    opcodes = [code for code in compiled.machine.opcodes if code.startswith("HGMMA")]

    # Four K steps of 16 in a stage, of every block, ahead of the loop and in it; apart for every
    # number of blocks that have rows.
    fewest = 1 if plan.skips_blocks else plan.blocks_per_group
    num_blocks = sum(range(fewest, plan.blocks_per_group + 1))
    assert found == [shape] * (2 * 4 * num_blocks)
    assert len(opcodes) == len(found)


def test_a_stage_is_multiplied_while_the_one_before_is_still_under_way(compiled):
    waits = re.findall(r"wgmma\.wait_group\.sync\.aligned\s+(\d+)", compiled.ptx)

    plan = compiled.plan
    assert waits == ["1", "0"] * (plan.blocks_per_group if plan.skips_blocks else 1)
    # No product waits for the one before it: that would be a wait for every one of them.
    assert compiled.count("WARPGROUP.DEPBAR") == len(waits)


def test_operands_are_loaded_by_tma_b_to_all_ctas_of_a_cluster(compiled):
    plan = compiled.plan
    # Into this CTA's shared memory, or into that of the cluster.
    loads = re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared::(\w+)\.global", compiled.ptx)
    multicast, alone = loads.count(("3", "cluster")), loads.count(("3", "cta"))
    # An N-major B is boxes of 64 columns.
    boxes = plan.tile_n // 64 if plan.problem.b_major is Major.n else plan.num_b_parts

    assert loads.count(("2", "cta")) == plan.num_a_parts
    assert compiled.count("UTMALDG.2D") >= 1
    assert (compiled.count("UTMALDG.3D.MULTICAST") > 0) == (plan.cluster_m == 2)
    assert (multicast, alone) == ((boxes, 0) if plan.cluster_m == 2 else (0, boxes))


def test_blocks_are_stored_as_the_plan_says(compiled):
    plan = compiled.plan
    blocks = plan.blocks_per_group * plan.groups_per_tile
    dimensions = "3D" if plan.clip is Clip.ragged else "2D"

    if plan.tuning.store is StoreMode.tma:
        stored = blocks * plan.out_tile_n // 64
        assert compiled.count("UTMASTG") == compiled.count(f"UTMASTG.{dimensions}") == stored
        # Four matrices a store, 16 rows of 16 columns each, of both warpgroups alike.
        assert compiled.count("STSM.16.M88.4") == plan.blocks_per_group * plan.out_tile_n // 16
        assert compiled.count("STG.E.NA.128") == 0
    else:
        assert compiled.count("UTMASTG") == compiled.count("STSM") == 0
        # 16 bytes a lane: 8 of its 32 columns in each of two rows.
        assert compiled.count("STG.E.NA.128") == plan.blocks_per_group * plan.out_tile_n // 16


def test_descriptors_are_patched_behind_a_drain_and_acquired_before_they_are_used(compiled):
    plan, acquire = compiled.plan, "fence.proxy.tensormap::generic.acquire.gpu"
    patches = [match.start() for match in re.finditer(r"tensormap\.replace\S*\s", compiled.ptx)]

    if plan.clip is Clip.per_group:
        drained = compiled.ptx.rindex("cp.async.bulk.wait_group \t0", 0, patches[0])
        released = compiled.ptx.index("fence.proxy.tensormap::generic.release.gpu", patches[-1])
        acquired = compiled.ptx.index(acquire, released)
        used = compiled.ptx.index("cp.async.bulk.tensor.2d.global", patches[-1])
        assert drained < patches[0] < released < acquired < used
        # The extent along M, among what is written anew.
        assert "tensormap.replace.tile.global_dim.global.b1024.b32" in compiled.ptx
    else:
        assert patches == []
    # That of B, which the host has made, once, ahead of all loads.
    loads = [match.start() for match in re.finditer(r"cp\.async\.bulk\.tensor\.3d", compiled.ptx)]
    if plan.widens_b:
        assert compiled.ptx.index(acquire) < loads[0]
    assert compiled.ptx.count(acquire) == (plan.clip is Clip.per_group) + plan.widens_b


def registers_shared_out(ptx):
    """Of a thread that loads, which gives the others away, and of one that multiplies."""
    found = re.findall(r"setmaxnreg\.(\w+)\.sync\.aligned\.u32\s+(\d+)", ptx)
    assert [way for way, _ in found] == ["dec", "inc"]
    return tuple(int(count) for _, count in found)


def test_every_value_has_a_register(compiled):
    machine = compiled.machine

    assert ".local" not in compiled.ptx
    assert [code for code in machine.opcodes if code.startswith(("LDL", "STL"))] == []
    assert machine.frame_bytes == 0
    assert machine.num_registers == LAUNCH_REGISTERS
    # Warps that load give registers to those that multiply.
    assert registers_shared_out(compiled.ptx) == (40, 232)
    assert 3 * LAUNCH_REGISTERS >= 40 + 2 * 232


def test_nothing_is_read_through_the_read_only_path(compiled):
    # Rows, flags and records may be written during the launch.
    assert not re.search(r"\bld\.global\S*\.nc\b|\bldu\b|\btex\b", compiled.ptx)
    assert not [code for code in compiled.machine.opcodes if "CONSTANT" in code]


def test_hooks_are_compiled_out_where_nobody_waits_and_nobody_listens(compiled):
    problem = compiled.plan.problem
    # Behind the giving up of barriers nothing is loaded that a peer may write.
    flags = re.findall(r"ld\.relaxed\.sys\.global", compiled.ptx)
    first_looks = re.findall(r"ld\.acquire\.(\w+)\.global", compiled.ptx)
    told = re.findall(r"red\.relaxed\.(\w+)\.global\.add\.s32", compiled.ptx)

    assert bool(flags) == (problem.wait is not None or problem.publish)
    assert set(first_looks) == ({"sys"} if problem.wait is not None else set())
    assert told == ["gpu"] * problem.publish
    proxies = compiled.ptx.count("fence.proxy.async.global")
    assert bool(proxies) == (problem.wait is not None or problem.publish)


def test_rows_are_acquired_and_fenced_before_the_first_load_of_a_tile(compiled):
    if compiled.plan.waits_ahead:
        expect_rows_acquired_ahead(compiled.ptx)
    elif compiled.plan.problem.wait is not None:
        expect_rows_acquired_by_who_loads(compiled.ptx)
    else:
        assert waits_in(compiled.ptx) == []


def first_load(ptx):
    return re.search(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx).start()


def claim_of_tiles(ptx):
    """Of all queues that of tiles alone is put back in the launch, by the last who claims."""
    claims = re.finditer(r"atom\.global\.add\.u32\s+%r\d+, \[(%rd\d+)\], 1;", ptx)
    put_back = r"st\.relaxed\.gpu\.global\.b32\s+\[{}\]"
    (claim,) = (claim for claim in claims if re.search(put_back.format(claim[1]), ptx))
    return claim.start()


def expect_rows_acquired_by_who_loads(ptx):
    """Before its first load, by the look that finds them or behind its polls; then it fences the
    proxy; no other warp takes part."""
    load = first_load(ptx)
    # (That CTAs begin together is no part of it: that wait comes before.)
    wait = [wait for wait in waits_in(ptx) if wait.look < load][-1]
    proxy = ptx.rindex("fence.proxy.async.global", 0, load)

    assert wait.scope == "sys"
    assert wait.look < wait.poll < wait.fence < wait.there < proxy < load
    assert "bar.sync" not in ptx[wait.look : load]
    assert "mbarrier.arrive" not in ptx[wait.look : proxy]


def expect_rows_acquired_ahead(ptx):
    """By the warp that hands tiles out, before it hands over; the one that loads fences."""
    load, claim = first_load(ptx), claim_of_tiles(ptx)
    handed = ptx.rindex("mbarrier.try_wait", 0, ptx.rindex("fence.proxy.async.global", 0, load))
    assert not re.search(r"ld\.(acquire|relaxed)", ptx[handed:load])

    waits = [wait for wait in waits_in(ptx) if wait.look > claim]
    there = max(wait.there for wait in waits)
    met = ptx.index("bar.warp.sync", there)  # lanes wait for rows of their own
    record = ptx.index("st.shared", there)
    for wait in waits:
        assert wait.scope == "sys"
        assert claim < wait.look < wait.poll < wait.fence < wait.there < met < record
    assert record < ptx.index("mbarrier.arrive", record)
    # Of rows that are there nothing waits for all that the warp has under way, nor does the proxy:
    # fences stand behind polls, and in records of giving up.
    fences, given_up = (
        ptx[claim:record].count(text) for text in ("fence.acq_rel", "atom.global.sys.add.u32")
    )
    assert fences == len(waits) + given_up
    assert "fence.proxy" not in ptx[claim:record]


def test_the_abort_word_is_looked_at_beside_a_claim_of_a_tile_and_ahead_of_it(compiled):
    expect_abort_word_beside_claim(compiled.ptx, compiled.plan)


def expect_abort_word_beside_claim(ptx, plan):
    """Both are under way at once; where nobody waits for rows there is no look."""
    claim = claim_of_tiles(ptx)
    room = ptx.rindex("trap;", 0, claim)  # of the wait for the record's room
    looks = re.findall(r"ld\.relaxed\.sys\.global\.b32 (%r\d+), \[(%rd\d+)\];", ptx[room:claim])

    assert not re.search(r"\b(bar|vote|shfl|fence|st|red)\.", ptx[room:claim])
    if plan.problem.wait is None:
        assert looks == []
        return
    ((seen, abort),) = looks
    # All lanes agree on what it has found; nothing is loaded in between.
    decided = re.search(rf"setp\.eq\.b32\s+(%p\d+), {seen}, 0;\s+vote\.sync\.all.*, \1, -1;", ptx)
    assert decided is not None
    assert not re.search(r"\bld\.(?!param)", ptx[claim : decided.start()])
    if plan.waits_ahead:
        ahead = [wait for wait in waits_in(ptx) if wait.look > claim]
        assert {wait.abort for wait in ahead} == {abort}
        assert all(decided.end() < wait.look for wait in ahead)


def test_rows_are_told_once_their_stores_have_completed_behind_a_release(compiled):
    plan = compiled.plan
    if plan.problem.publish:
        told = compiled.ptx.index("red.relaxed.gpu.global.add.s32")
        release = compiled.ptx.rindex("fence.acq_rel.gpu", 0, told)
        if plan.tuning.store is StoreMode.tma:
            fence = compiled.ptx.rindex("fence.proxy.async.global", 0, release)
            done = [
                match.start()
                for match in re.finditer(r"cp\.async\.bulk\.wait_group\s+0", compiled.ptx)
            ]
            assert max(place for place in done if place < told) < fence < release < told
        else:
            joined = [match.start() for match in re.finditer(r"bar\.sync\s", compiled.ptx)]
            assert max(place for place in joined if place < told) < release < told


def test_every_wait_inside_a_cta_is_bounded(compiled):
    ptx = compiled.ptx
    tries = ptx.count("mbarrier.try_wait")

    # Each wait is a first try and a loop that looks at the clock and traps beyond the limit.
    assert tries == 2 * ptx.count("trap;")
    assert "mbarrier.test_wait" not in ptx
    looks = ptx.count("%globaltimer")
    assert looks >= 2 * ptx.count("trap;")
