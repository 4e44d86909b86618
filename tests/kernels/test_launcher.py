"""Settings that no kernel can have are refused with what to type instead; needs no GPU."""

import re
import types

import pytest

from tilepipe.config.choices import Copy
from tilepipe.schedule.settings import PlanSettings
from tilepipe.schedule.shape import Shape

SENDERS = ("dispatch", "push", "combine")


def constants_for(name, *, hidden=7168, dispatch_hidden=None, num_topk=8, num_ranks=8, **knobs):
    from tilepipe.kernels.launcher import Knobs, constants_of

    settings = PlanSettings(num_ranks=num_ranks, num_experts=32 * num_ranks, num_topk=num_topk)
    shape = Shape(
        max_tokens=1,
        num_tokens=1,
        dispatch_hidden=hidden if dispatch_hidden is None else dispatch_hidden,
        home_hidden=hidden,
    )
    return constants_of(name, settings, shape, Knobs(num_ctas=1, **knobs))


# Rows of hidden 7168 are of 14 336 bytes: 16 of them fit beside a table of 8 ranks and barriers.
FITTING = [(1, 14), (2, 6), (4, 3), (4, 4), (8, 2)]
TOO_LARGE = [(2, 14), (4, 5), (8, 3), (17, 1), (32, 1)]


@pytest.mark.parametrize("name", SENDERS)
@pytest.mark.parametrize(("num_warps", "num_stages"), FITTING)
def test_rings_that_fit_are_taken(name, num_warps, num_stages):
    knobs = {"copy": Copy.tma, "num_warps": num_warps, "num_stages": num_stages}

    constants = constants_for(name, **knobs)

    assert {key: getattr(constants, key) for key in knobs} == knobs


@pytest.mark.parametrize("name", ["dispatch", "push"])
@pytest.mark.parametrize(("num_warps", "num_stages"), TOO_LARGE)
def test_rings_that_an_sm_has_no_room_for_are_refused(name, num_warps, num_stages):
    sentence = (
        rf"kernel.num_stages={num_stages}: {num_warps} warps x that many stages of 14336 bytes "
        r"need \d+ bytes of shared memory, and an SM has 232448; lower it, or kernel.num_comm_warps"
    )

    with pytest.raises(ValueError, match=sentence) as refused:
        constants_for(name, copy=Copy.tma, num_warps=num_warps, num_stages=num_stages)

    needed = int(re.findall(r"need (\d+)", str(refused.value))[0])
    assert 232_448 < needed < num_warps * num_stages * 14_336 + 4096
    assert "\n" not in str(refused.value)


def test_stages_are_no_matter_where_lanes_copy_by_themselves():
    by_simt = constants_for("dispatch", num_warps=32, num_loads=7, num_stages=14)

    assert by_simt.copy is Copy.simt


@pytest.mark.parametrize("copy", list(Copy))
@pytest.mark.parametrize(("num_topk", "most"), [(1, 20), (8, 20), (16, 20), (24, 16), (32, 12)])
def test_combine_refuses_more_warps_than_its_sums_have_room_for(copy, num_topk, most):
    # Small rows: only registers and the rings of sums count.
    knobs = {"copy": copy, "hidden": 64, "num_topk": num_topk}
    assert constants_for("combine", num_warps=most, **knobs).num_warps == most
    sentence = (
        rf"kernel.num_comm_warps={most + 1}: combine with workload.num_topk={num_topk} has "
        rf"registers and shared memory for {most} warps; use at most {most}"
    )

    with pytest.raises(ValueError, match=sentence):
        constants_for("combine", num_warps=most + 1, **knobs)

    assert constants_for("dispatch", num_warps=most + 1, **knobs).num_warps == most + 1


def test_rows_without_payload_are_told_by_ordinary_stores():
    # Combine learns the ways home from a dispatch that moves nothing.
    knobs = {"copy": Copy.tma, "dispatch_hidden": 0}

    assert constants_for("dispatch", **knobs).copy is Copy.simt
    assert constants_for("combine", num_warps=4, **knobs).copy is Copy.tma


@pytest.mark.parametrize("name", ["open", "open_exchange", "reduce"])
def test_what_moves_no_rows_is_the_same_code_for_both_copies(name):
    found = [constants_for(name, copy=copy, num_warps=2, num_stages=6) for copy in Copy]

    assert found[0] == found[1]


@pytest.fixture
def plans_on(monkeypatch):
    """A function that prepares a plan kernel on a device of as many SMs; returns its CTAs."""
    torch = pytest.importorskip("torch")
    from tilepipe.fabric.table import NUM_SLOTS
    from tilepipe.kernels import launcher
    from tilepipe.kernels.residency import Residency

    compiled = []

    def prepare(num_ranks, num_sms):
        sms = types.SimpleNamespace(multi_processor_count=num_sms)
        found = Residency(
            ctas_per_sm=1, num_sms=num_sms, num_registers=64, shared_bytes=0, local_bytes=0
        )
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sms)
        monkeypatch.setattr(launcher, "residency_of", lambda *_, **__: found)
        monkeypatch.setattr(launcher, "compile_launch", lambda _, wanted: compiled.append(wanted))
        monkeypatch.setattr(launcher, "_bound", lambda *_: None)
        settings = PlanSettings(num_ranks=num_ranks, num_experts=32 * num_ranks, num_topk=8)
        launcher.Launcher(
            torch.zeros((num_ranks, NUM_SLOTS), dtype=torch.int64),
            settings,
            Shape(max_tokens=4096, num_tokens=4096),
            launcher.Knobs(num_ctas=1),
            ranks=range(num_ranks),
            limit_ns=1,
        ).prepare("plan")
        return compiled[-1].num_ctas

    return prepare


def test_ranks_that_share_few_sms_are_planned_by_fewer_ctas(plans_on):
    assert [plans_on(8, num_sms) for num_sms in (132, 64, 63, 8)] == [8, 8, 7, 1]


def test_a_plan_whose_ctas_would_not_all_run_at_once_is_refused(plans_on):
    sentence = (
        r"launch.num_ranks=8: the plan kernel's 8 ranks x 1 CTAs of 1024 threads must run at once, "
        r"and this GPU holds 6; lower it, or type kernel.planner=numpy"
    )

    with pytest.raises(ValueError, match=sentence):
        plans_on(8, 6)
