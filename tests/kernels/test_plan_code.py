"""The code of the plan kernels, for every order, granularity and layout; needs no GPU."""

import re

import pytest

from tests.kernels.sass import disassemble
from tilepipe.config.choices import Granularity, HomeGranularity, Layout, Order

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = [
    (Order.edf, Granularity.tile, Layout.padded, 8, 256),
    (Order.edf, Granularity.expert, Layout.packed, 1, 32),
    (Order.edf_list, Granularity.token, Layout.padded, 8, 512),
    (Order.expert, Granularity.tile, Layout.packed, 2, 64),
    (Order.token, Granularity.expert, Layout.padded, 8, 160),
    (Order.random, Granularity.tile, Layout.padded, 3, 384),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0].name}-{case[3]}")
def codes(request):
    from tilepipe.kernels.launcher import compile_launch, plan_constants_of
    from tilepipe.schedule.settings import PlanSettings
    from tilepipe.schedule.shape import Shape

    order, granularity, layout, num_ranks, num_experts = request.param
    settings = PlanSettings(
        num_ranks=num_ranks,
        num_experts=num_experts,
        num_topk=8,
        num_n_tiles=16,
        num_chunks=4,
        order=order,
        granularity=granularity,
        home_granularity=HomeGranularity.token,
        layout=layout,
        seed=2**40 + 3,
    )
    shape = Shape(max_tokens=4096, num_tokens=4096 * num_ranks, capacity_factor=1.5)
    constants = plan_constants_of(settings, shape)
    return [compile_launch(name, constants) for name in ("plan", "plan_returns")]


def test_every_value_has_a_register_and_no_load_goes_around_the_launch(codes):
    for code in codes:
        machine = disassemble(code.cubin)
        assert machine.frame_bytes == 0
        assert not [code for code in machine.opcodes if code.startswith(("LDL", "STL"))]
        assert not [code for code in machine.opcodes if "CONSTANT" in code]
        assert machine.num_registers <= 64  # 1024 threads share 65 536
        assert ".nc" not in re.sub(r"//.*", "", code.ptx)


def test_a_plan_passes_the_gate_before_it_reads_counts_or_homes(codes):
    plan, returns = (code.ptx for code in codes)

    # The exchange waits for 64-bit words of peers, a launch without one for 32-bit words.
    for look in ("ld.acquire.sys.global.b64", "ld.relaxed.sys.global.b64"):
        assert look not in returns
        assert plan.index("fence.acq_rel.sys") < plan.index(look)


def test_rows_are_written_sixteen_bytes_at_a_time(codes):
    plan, _ = (code.ptx for code in codes)

    # A thread has four rows under way; nothing else is written so.
    assert len(re.findall(r"st\.global\S*\.v4\.b32", plan)) == 4
