"""The code of fused launches with stamps and without: nothing is left where nobody asks for them.

Compiled for sm_90a; needs no GPU.
"""

import re
from dataclasses import replace

import pytest

from tests.kernels.sass import disassemble
from tests.kernels.test_gemm_code import LAUNCH_REGISTERS
from tilepipe.config.choices import Copy, Granularity, Layout, Roles
from tilepipe.config.limits import SHARED_BYTES
from tilepipe.kernels.constants import Constants
from tilepipe.kernels.gemm.plan import GemmProblem, GemmTuning, plan_gemm
from tilepipe.kernels.overlap.home import plan_home_launch
from tilepipe.kernels.overlap.plan import stamped

pytestmark = pytest.mark.filterwarnings("ignore")

CLOCKS = re.compile(r"%clock|%globaltimer_lo|%smid")


# Little code, for what holds of any tile.
SMALL = GemmTuning(tile_n=64)


def dispatching(tuning=None, **changes):
    from tilepipe.kernels.overlap.launch import make_plan

    problem = GemmProblem(
        n=4096,
        k=7168,
        num_experts=32,
        layout=Layout.padded,
        group_align=128,
        wait=Granularity.tile,
    )
    plan = make_plan(
        plan_gemm(problem, tuning or GemmTuning(), num_gemm_ctas=1, num_sms=132),
        constants_of(num_warps=4, copy=Copy.tma),
        roles=Roles.fixed,
    )
    return replace(plan, **changes)


def returning(tuning=None):

    problem = GemmProblem(
        n=7168,
        k=2048,
        num_experts=32,
        layout=Layout.packed,
        group_align=128,
        publish=True,
        num_chunks=4,
    )
    return plan_home_launch(
        plan_gemm(problem, tuning or GemmTuning(), num_gemm_ctas=1, num_sms=132),
        constants_of(num_warps=8, copy=Copy.simt, num_chunks=4),
        roles=Roles.switch,
    )


def constants_of(**changes):
    return Constants(
        num_ranks=1,
        num_experts_per_rank=32,
        num_topk=8,
        row_bytes=14_336,
        granularity=Granularity.tile,
        **changes,
    )


def without_hooks(monkeypatch, plan):
    """The kernel of a plan whose text has no stamps to leave: every hook does nothing at all."""
    from tilepipe.kernels import bulk, combine, simt
    from tilepipe.kernels.gemm import grouped_sm90
    from tilepipe.kernels.overlap import dispatch_gemm, entries, gemm_combine, launch, pushes

    hooks = {
        "lap": lambda *what: None,
        "moment": lambda tape: None,
        "begin_tape": lambda *what, **told: None,
        "end_tape": lambda tape: None,
    }
    texts = (bulk, combine, simt, grouped_sm90, dispatch_gemm, entries, gemm_combine, pushes)
    for module in texts:
        for name, nothing in hooks.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, nothing)
    return launch.compile_overlap.__wrapped__(plan).ptx


@pytest.mark.parametrize("made", [dispatching, returning], ids=lambda made: made.__name__)
def test_without_stamps_the_code_is_that_of_a_kernel_that_has_no_hooks(made, monkeypatch):
    from tilepipe.kernels.overlap.launch import compile_overlap

    plain = compile_overlap(made(SMALL)).ptx

    bare = without_hooks(monkeypatch, made(SMALL))

    assert not CLOCKS.search(plain)
    assert plain == bare


@pytest.mark.parametrize("made", [dispatching, returning], ids=lambda made: made.__name__)
def test_stamps_find_registers_and_the_first_one_is_a_store_of_sixteen_bytes(made):
    from tilepipe.kernels.overlap.launch import compile_overlap

    code = compile_overlap(stamped(made(), 512))

    machine = disassemble(code.cubin)
    assert (machine.frame_bytes, machine.num_registers) == (0, LAUNCH_REGISTERS)
    assert code.ptx.count("%clock;") == code.ptx.count("%globaltimer_lo;") > 8
    assert ".v4.b32" in code.ptx[code.ptx.index("%smid") :].split("\n$L", 1)[0]


def test_a_cta_without_room_for_its_counts_is_refused_in_a_sentence():
    # Many stages: their barriers take the lines that counts would lie in.
    plan = dispatching(smem_bytes=SHARED_BYTES)
    plan = replace(plan, gemm=replace(plan.gemm, num_stages=9))

    with pytest.raises(ValueError, match=r"measure\.timeline=true: a stamped CTA needs 232576 by"):
        stamped(plan, 512)
