"""The grouped GEMM on a device: every value against an FP32 oracle, nothing written outside."""

import time
from dataclasses import replace

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.gpu.gemms import LIMIT_NS, Case  # noqa: E402
from tilepipe.config.choices import Granularity, Layout, StoreMode  # noqa: E402
from tilepipe.fabric.table import Slot  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.gemm.choices import (  # noqa: E402
    Clip,
    Consumers,
    Epilogue,
    Major,
)
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402

# Rows of experts: nothing, one, around a tile, around two, all in one.
RAGGED = [0, 1, 127, 128, 129, 0, 255, 257, 64, 65, 3]
ALL_IN_ONE = [0] * 5 + [1100] + [0] * 5
NOTHING = [0] * 11

PING_PONG = GemmTuning(consumers=Consumers.ping_pong, tile_n=128)
TUNINGS = {
    "cooperative": GemmTuning(),
    "narrow": GemmTuning(tile_n=64, raster_m=1),
    "tall": GemmTuning(tile_m=256, tile_n=128),
    "cluster": GemmTuning(cluster_m=2),
    "cluster_narrow": GemmTuning(cluster_m=2, tile_n=128, raster_m=2),
    "ping_pong": PING_PONG,
    "ping_pong_wide": GemmTuning(consumers=Consumers.ping_pong, tile_n=192),
    "ping_pong_flat": GemmTuning(consumers=Consumers.ping_pong, tile_m=64),
    "ping_pong_cluster": replace(PING_PONG, cluster_m=2),
    "two_stages": GemmTuning(num_stages=2),
    "narrow_fetches": GemmTuning(wide_b=False),
}


def expect_right(case):
    """Run a case and look at every value."""
    case.run()
    verdict = case.verdict()
    assert verdict.passed, f"{verdict.detail}\n{case.picture()}"
    assert case.num_written_outside() == 0
    assert case.queue() == 0, "the last claim did not put the queue back"


@pytest.mark.parametrize("rows", [RAGGED, ALL_IN_ONE, NOTHING], ids=["ragged", "one", "none"])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", TUNINGS)
def test_products_are_right_for_any_number_of_rows(name, layout, rows):
    expect_right(Case(rows, layout=layout, tuning=TUNINGS[name]))


@pytest.mark.parametrize("consumers", list(Consumers))
@pytest.mark.parametrize("cluster_m", [1, 2])
@pytest.mark.parametrize(
    ("layout", "store", "clip"),
    [
        (Layout.padded, StoreMode.tma, Clip.whole),
        (Layout.padded, StoreMode.tma, Clip.ragged),
        (Layout.padded, StoreMode.tma, Clip.per_group),
        (Layout.padded, StoreMode.direct, None),
        (Layout.packed, StoreMode.tma, Clip.ragged),
        (Layout.packed, StoreMode.tma, Clip.per_group),
        (Layout.packed, StoreMode.direct, None),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_every_way_of_storing_writes_its_rows_and_no_others(
    layout, store, clip, cluster_m, consumers
):
    tuning = GemmTuning(
        tile_n=128, cluster_m=cluster_m, consumers=consumers, store=store, clip=clip
    )

    expect_right(Case(RAGGED, layout=layout, tuning=tuning, gap=8))


@pytest.mark.parametrize("b_major", [Major.k, Major.n])
@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
@pytest.mark.parametrize(("n", "k"), [(264, 72), (8, 8), (248, 1000)])
def test_n_and_k_need_not_be_multiples_of_a_tile(n, k, name, b_major):
    for store in StoreMode:
        tuning = replace(TUNINGS[name], store=store)
        expect_right(
            Case([130, 0, 7], n=n, k=k, layout=Layout.packed, tuning=tuning, b_major=b_major)
        )


@pytest.mark.parametrize(
    "case",
    list(
        pairwise(
            {
                "epilogue": list(Epilogue),
                "b_major": [Major.k, Major.n],
                "cluster_m": [1, 2],
                "store": list(StoreMode),
                "consumers": list(Consumers),
            },
            lambda case: True,
        )
    ),
    ids=lambda case: "-".join(getattr(value, "name", str(value)) for value in case.values()),
)
def test_every_epilogue_is_right(case):
    chosen = {key: case[key] for key in ("cluster_m", "store", "consumers")}
    tuning = GemmTuning(tile_n=128, **chosen)

    expect_right(
        Case(
            *([130, 0, 64, 257],),
            n=528,
            layout=Layout.packed,
            tuning=tuning,
            epilogue=case["epilogue"],
            b_major=case["b_major"],
        )
    )


@pytest.mark.parametrize("num_gemm_ctas", [1, 2, 108, 132])
def test_any_number_of_ctas_makes_the_same_product(num_gemm_ctas):
    expect_right(Case(RAGGED, n=1024, num_gemm_ctas=num_gemm_ctas))


@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
def test_many_tiles_a_cta_go_round_the_rings_often(name):
    # 128 cluster tiles or more a CTA; an odd number of K tiles, so that phases shift.
    expect_right(Case([513, 1024, 7, 900], n=2048, k=704, tuning=TUNINGS[name], num_gemm_ctas=4))


@pytest.mark.parametrize("publish", [False, True])
@pytest.mark.parametrize("name", ["cooperative", "tall"])
def test_tiles_that_are_handed_out_in_halves_make_the_same_product(name, publish):
    tuning = TUNINGS[name]
    rows = [tuning.tile_m * 2, tuning.tile_m * 3]
    case = Case(
        *(rows,),
        n=tuning.tile_n,
        layout=Layout.packed,
        tuning=tuning,
        num_gemm_ctas=4,
        plan_tile_m=tuning.tile_m,
        publish=publish,
    )
    assert len(case.records) == 6, "five tiles on four CTAs: the last one in halves"

    expect_right(case)
    if publish:
        assert case.stored() == [[tuning.tile_m]] * 5


@pytest.mark.parametrize("name", TUNINGS)
def test_two_runs_are_equal_bit_for_bit(name):
    case = Case(RAGGED, k=1024, layout=Layout.packed, tuning=TUNINGS[name])

    case.run()
    first = case.d[case.held].clone()
    for _ in range(5):
        case.run()
        assert torch.equal(case.d[case.held].view(torch.int16), first.view(torch.int16))


def test_a_hundred_launches_in_a_row_need_no_reset():
    case = Case(RAGGED, layout=Layout.packed)
    for _ in range(100):
        case.launch()
    case.synchronize()

    expect_right(case)


# Hooks.


@pytest.mark.parametrize("wait", list(Granularity))
@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
def test_flags_that_are_set_let_every_tile_pass(name, wait):
    expect_right(Case(RAGGED, layout=Layout.packed, tuning=TUNINGS[name], wait=wait))


def raced(case, *, seed):
    """Rows come, and flags after them, on another stream while the launch runs."""
    held = case.held
    rows = case.a[held].clone()
    case.a[held] = float("nan")
    case.lower_flags()
    order = torch.randperm(len(held), generator=torch.Generator().manual_seed(seed)).cuda()
    other = torch.cuda.Stream()
    # What the other stream runs is loaded before anything spins.
    with torch.cuda.stream(other):
        case.a.index_copy_(0, held[order[:1]], case.a[held[order[:1]]])
        torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    case.launch()
    with torch.cuda.stream(other):
        torch.cuda._sleep(2_000_000)
        for part in order.chunk(7):
            case.a.index_copy_(0, held[part], rows[part])
            torch.cuda._sleep(200_000)
        case.raise_flags()
    case.synchronize()
    torch.cuda.synchronize()


@pytest.mark.parametrize("wait", list(Granularity))
@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
def test_rows_that_come_late_are_waited_for(name, wait):
    # SMs stay free for whoever brings the rows.
    case = Case(
        *(RAGGED,), layout=Layout.packed, tuning=TUNINGS[name], num_gemm_ctas=100, wait=wait
    )

    raced(case, seed=1)

    verdict = case.verdict()
    assert verdict.passed, verdict.detail


def test_the_race_is_lost_by_a_launch_that_does_not_wait():
    case = Case(RAGGED, layout=Layout.packed, num_gemm_ctas=100)

    raced(case, seed=1)

    assert not case.verdict().passed


@pytest.mark.parametrize("store", list(StoreMode))
@pytest.mark.parametrize("name", ["cooperative", "cluster", "ping_pong"])
def test_every_tile_is_told_with_its_rows_in_every_chunk(name, store):
    case = Case(
        RAGGED,
        n=1024,
        layout=Layout.packed,
        tuning=replace(TUNINGS[name], store=store),
        publish=True,
        num_chunks=2,
    )

    expect_right(case)
    per_chunk = case.plan.num_n_tiles // 2
    assert case.stored() == [[valid * per_chunk] * 2 for valid in case.layout.tiles[:, 2].tolist()]


def test_a_launch_whose_rows_never_come_ends_with_a_sentence_and_tells_nothing():
    case = Case(*([300, 200],), wait=Granularity.tile, publish=True, num_gemm_ctas=4, n=1024)
    case.lower_flags()

    begin = time.monotonic()
    case.launch()
    with pytest.raises(WatchdogTimeout, match="role gemm_receive, counter"):
        case.synchronize()

    assert time.monotonic() - begin < 10 * LIMIT_NS / 1e9
    assert int(case.heap.tensor(0, Slot.tile_stored).sum()) == 0
