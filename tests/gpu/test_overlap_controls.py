"""Fused launches with something broken on purpose: the check fails, or a wait says what it missed.

Communication is fast here, so a broken wait may go unseen: what has to be late is slowed.
"""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import re  # noqa: E402

from cutlass import Boolean  # noqa: E402

from tests.gpu.fused_points import (  # noqa: E402
    CASES,
    FINE,
    HIGH_THRESHOLD,
    NO_SENDS,
    NO_TILE,
    SIZES,
    spoiled,
)
from tests.gpu.overlaps import Chosen, FusedCase, HomeCase  # noqa: E402
from tests.gpu.processes import told  # noqa: E402
from tests.gpu.test_overlap import routings_of  # noqa: E402
from tests.launch.points import compose_point  # noqa: E402
from tilepipe.config.choices import Copy, Granularity, HomeGranularity, Roles  # noqa: E402
from tilepipe.fabric.table import Slot  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.overlap import launch, pushes  # noqa: E402
from tilepipe.launch.driver import run_points  # noqa: E402

NAME = "h200_x1" if "H200" in torch.cuda.get_device_name() else "generic_x1"
# Two tiles of 127 rows each, which one warp brings row by row, each 26 us after the one before. It
# raises flags every 32 rows at the latest, so half of a tile is told of long before the rest comes.
LATE_OUT = {
    "num_experts": 2,
    "num_ctas": 1,
    "knobs": {"num_warps": 1, "flag_batch": 1},
    "pace_gbps": 0.02,
}
# Who multiplies has long begun to reduce when the rows cross.
LATE_HOME = {
    "n": 1024,
    "num_ranks": 2,
    "roles": Roles.switch,
    "pace_gbps": 2.0,
    "pace_latency_ns": 20_000,
}


def out_case(**chosen):
    chosen = Chosen(**chosen)
    (routing,) = routings_of(chosen, count=1)
    fused = FusedCase(chosen, [routing])
    fused.prepare(routing, 1)
    return fused


def home_case(**chosen):
    chosen = Chosen(**chosen)
    (routing,) = routings_of(chosen, count=1)
    home = HomeCase(chosen, [routing])
    home.prepare(routing, 1)
    return home


@pytest.fixture
def fresh_code():
    """Code that is compiled within the test, and that no other test gets."""
    launch.compile_overlap.cache_clear()
    yield
    launch.compile_overlap.cache_clear()


@pytest.mark.parametrize("granularity", [Granularity.tile, Granularity.expert])
@pytest.mark.parametrize("copy", list(Copy))
def test_with_half_the_threshold_products_are_of_rows_that_had_not_come(copy, granularity):
    fused = out_case(copy=copy, granularity=granularity, **LATE_OUT)
    for rank in fused.group.ranks:
        fused.group.tensor(rank, Slot.ready_expected).floor_divide_(2)

    faults = fused.run()

    assert any("products" in fault for fault in faults), faults
    assert not any("homes" in fault for fault in faults), faults


def test_with_half_the_threshold_tokens_are_reduced_before_all_rows_are_home():
    home = home_case(**LATE_HOME)
    for rank in home.group.ranks:
        home.group.tensor(rank, Slot.token_expected).floor_divide_(2)

    faults = home.run()

    assert any("tokens" in fault for fault in faults), faults


def test_with_a_low_threshold_by_rank_tokens_are_reduced_too_early():
    home = home_case(home_granularity=HomeGranularity.rank, **LATE_HOME)
    for rank in home.group.ranks:
        home.group.tensor(rank, Slot.rank_expected).floor_divide_(2)

    faults = home.run()

    assert any("tokens" in fault for fault in faults), faults


@pytest.mark.parametrize("copy", list(Copy))
def test_without_waits_for_stored_tiles_rows_go_home_before_they_are_made(
    copy, monkeypatch, fresh_code
):
    passed = Boolean(True), Boolean(False)  # came, and not late
    monkeypatch.setattr(pushes, "_wait_stored", lambda *arguments: passed)
    # One CTA multiplies for many that push: most rows are asked for long before they are there.
    home = home_case(copy=copy, n=1024, num_ctas=12, num_sms=13, roles=Roles.fixed)

    faults = home.run()

    assert any("tokens" in fault for fault in faults), faults


@pytest.mark.parametrize("copy", list(Copy))
def test_the_same_launches_with_their_waits_are_right(copy):
    assert home_case(copy=copy, n=1024, num_ctas=12, num_sms=13, roles=Roles.fixed).run() == []
    assert home_case(copy=copy, **LATE_HOME).run() == []
    for granularity in (Granularity.tile, Granularity.expert):
        assert out_case(copy=copy, granularity=granularity, **LATE_OUT).run() == []


@pytest.mark.parametrize("granularity", [Granularity.tile, Granularity.expert])
def test_a_threshold_that_is_too_high_ends_in_a_sentence(granularity):
    fused = out_case(num_ranks=2, granularity=granularity, watchdog_s=0.3)
    rows = int(fused.group.tensor(1, Slot.ready_expected)[0])
    fused.group.tensor(1, Slot.ready_expected)[0] += 1

    with pytest.raises(WatchdogTimeout) as caught:
        fused.run()

    assert str(caught.value) == (
        "rank 1 waited 0.3 s (launch.watchdog_ms): role gemm_receive, counter 0: expected "
        f"{rows + 1} rows, seen {rows}; epoch 1"
    )


@pytest.mark.parametrize(
    ("home_granularity", "slot", "role"),
    [
        (HomeGranularity.token, Slot.token_expected, r"reduce, token \d+"),
        (HomeGranularity.rank, Slot.rank_expected, r"reduce, rank 1"),
    ],
    ids=["token", "rank"],
)
def test_a_threshold_at_home_that_is_too_high_ends_in_a_sentence(home_granularity, slot, role):
    home = home_case(
        num_ranks=2, n=1024, watchdog_s=0.3, home_granularity=home_granularity, roles=Roles.switch
    )
    home.group.tensor(0, slot)[1] += 1

    with pytest.raises(WatchdogTimeout) as caught:
        home.run()

    pattern = (
        r"rank 0 waited 0\.3 s \(launch\.watchdog_ms\): role "
        rf"{role}: expected \d+ rows x chunks, seen \d+; epoch \d+"
    )
    assert re.fullmatch(pattern, str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("words", "tokens", "role"),
    [
        (CASES["out_plain"], NO_SENDS, r"gemm_receive, counter \d+: expected \d+ rows"),
        (CASES["out_plain"], HIGH_THRESHOLD, r"gemm_receive, counter 0: expected \d+ rows"),
        (CASES["home_plain"], NO_TILE, r"(push, M tile|reduce, token) \d+: expected \d+ rows"),
    ],
    ids=["no_sends", "high_threshold", "no_tile"],
)
def test_a_fused_point_with_a_fault_is_a_row_and_the_next_point_runs(words, tokens, role, tmp_path):
    group = (f"hardware={NAME}", "launch.num_ranks=2", "workload=tiny", "measure=quick")
    limits = ("kernel.num_comm_ctas=4", "launch.watchdog_ms=300", "launch.time_limit_s=120")
    points = [
        compose_point(*group, *limits, *SIZES, *words, f"workload.num_tokens={count}")
        for count in (tokens, FINE)
    ]

    code = run_points(points, results_dir=tmp_path, entry=spoiled)

    assert code == 1
    status, reason = told(tmp_path)[tokens]
    assert status == "timeout"
    waited = r"rank [01] waited 0\.3 s \(launch\.watchdog_ms\): role "
    assert re.match(waited + role, reason), reason
    assert told(tmp_path)[FINE] == ("ok", "")
