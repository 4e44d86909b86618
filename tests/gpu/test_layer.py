"""A whole layer on a device: every token, and the same bits as unfused, behind one gate."""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.gpu.layers import ChosenLayer, LayerCase  # noqa: E402
from tests.gpu.test_overlap import name_of, routings_of  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Order,
    Push,
    Roles,
    StoreMode,
    Walk,
)
from tilepipe.experiments.cuda.oracle import poison  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.fabric.watch import WatchdogTimeout  # noqa: E402
from tilepipe.kernels.gemm.plan import GemmTuning  # noqa: E402
from tilepipe.kernels.swiglu import bind_swiglu  # noqa: E402
from tilepipe.measure.gate import BF16_POISON  # noqa: E402

# Sent by the epilogue of the second GEMM, chunk after chunk of all experts.
SENT = {"push": Push.epilogue, "walk": Walk.chunk, "num_chunks": 2}
ALONE = [
    {},
    {"num_ranks": 2},
    {"num_ranks": 4, "copy": Copy.simt},
    {"num_ranks": 8},
    {"copy": Copy.simt, "roles": Roles.fixed},
    {"granularity": Granularity.token, "num_ranks": 2},
    {"granularity": Granularity.expert, "num_ranks": 4},
    {"home_granularity": HomeGranularity.rank, "num_ranks": 2},
    {"num_chunks": 2, "num_ranks": 2},
    SENT,
    {**SENT, "num_ranks": 4, "layout": Layout.packed},
    {**SENT, "num_ranks": 8, "copy": Copy.simt, "roles": Roles.fixed},
    {**SENT, "roles": Roles.beside},
    {**SENT, "num_ranks": 4, "layout": Layout.packed, "roles": Roles.beside},
    {"push": Push.epilogue, "hidden": 712},
    {"order": Order.random, "num_ranks": 4},
    {"layout": Layout.packed, "num_ranks": 2},
    {"tuning": GemmTuning(cluster_m=2)},
    {"tuning": GemmTuning(store=StoreMode.direct), "num_ranks": 2},
    # Of both GEMMs K and N that are no multiple of a tile, and an odd number of N tiles.
    {"hidden": 712, "intermediate": 264},
    {"num_topk": 8, "num_experts": 16, "num_ranks": 4},
]
AXES = {
    "num_ranks": [1, 2, 4, 8],
    "copy": list(Copy),
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
    "order": list(Order),
    "layout": list(Layout),
    "roles": [Roles.fixed, Roles.switch],  # rows are not sent by the epilogue
    "num_chunks": [1, 2],
    "kind": ["uniform", "one_expert", "masked"],
}
KINDS = ("uniform", "one_expert", "masked")
CASES = [*ALONE, *pairwise(AXES, lambda case: True)]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_token_is_right_and_has_the_bits_of_the_unfused_layer(case):
    case = dict(case)
    kind = case.pop("kind", "uniform")
    chosen = ChosenLayer(**case)
    routings = routings_of(chosen, kind)
    layer = LayerCase(chosen, routings)

    for number, routing in enumerate(routings):
        layer.prepare(routing, payload=number + 1)
        layer.run(layer.fused)
        assert layer.wrong() == [], f"launch {number}"
        fused = layer.tokens(Slot.out)
        layer.run(layer.unfused)
        assert layer.wrong(Slot.reduced) == [], f"launch {number}, unfused"
        unfused = layer.tokens(Slot.reduced)
        for rank, (ours, theirs) in enumerate(zip(fused, unfused, strict=True)):
            assert torch.equal(ours, theirs), f"launch {number}, rank {rank}"


@pytest.mark.parametrize(
    "case",
    [
        {"num_ranks": 2},
        {"num_ranks": 8, "copy": Copy.simt},
        {"granularity": Granularity.token},
        {**SENT, "num_ranks": 4},
        {**SENT, "num_ranks": 4, "roles": Roles.beside},
    ],
    ids=name_of,
)
def test_a_hundred_layers_of_changing_routing_stay_right(case):
    chosen = ChosenLayer(**case)
    routings = [routing for kind in KINDS for routing in routings_of(chosen, kind)]
    layer = LayerCase(chosen, routings)

    for number in range(100):
        layer.prepare(routings[number % len(routings)], payload=number + 1)
        layer.run(layer.fused)
        assert layer.wrong() == [], f"launch {number}"


@pytest.mark.parametrize(
    "case", [{"num_ranks": 4}, {"copy": Copy.simt, "roles": Roles.fixed}], ids=name_of
)
def test_a_captured_layer_replays_with_other_routing_and_leaves_the_bits_of_an_eager_one(case):
    chosen = ChosenLayer(**case)
    routings = [routing for kind in KINDS for routing in routings_of(chosen, kind)]
    layer = LayerCase(chosen, routings)
    layer.prepare(routings[0], payload=1)
    # What is captured has been launched before, so its code is loaded.
    layer.run(layer.fused)
    assert layer.wrong() == []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layer.group.open(exchange=True)
        for launch in layer.fused:
            launch()

    for number, routing in enumerate(routings, start=2):
        layer.prepare(routing, payload=number)
        layer.run(layer.fused)
        eager = layer.tokens(Slot.out)
        layer.poison()
        graph.replay()
        layer.group.synchronize()
        assert layer.wrong() == [], f"replay {number}"
        assert all(map(torch.equal, eager, layer.tokens(Slot.out))), f"replay {number}"


@pytest.mark.parametrize("granularity", list(Granularity))
def test_rows_that_never_come_end_in_a_sentence(granularity):
    chosen = ChosenLayer(num_ranks=2, granularity=granularity, roles=Roles.fixed, watchdog_s=0.3)
    (routing,) = routings_of(chosen, count=1)
    layer = LayerCase(chosen, [routing])
    layer.prepare(routing, payload=1)
    layer.group.tensor(1, Slot.words)[int(Word.num_sends)] = 0

    with pytest.raises(WatchdogTimeout, match=r"role gemm_receive(_row)?, (counter|row) \d+: "):
        layer.run(layer.fused)


def test_rows_that_never_come_home_end_in_a_sentence():
    chosen = ChosenLayer(watchdog_s=0.3)
    (routing,) = routings_of(chosen, count=1)
    layer = LayerCase(chosen, [routing])
    layer.prepare(routing, payload=1)
    layer.group.tensor(0, Slot.words)[int(Word.num_second_tiles)] -= 1

    with pytest.raises(WatchdogTimeout, match=r"role (push, M tile|reduce, token) \d+: expected"):
        layer.run(layer.fused)


def test_a_layer_whose_rows_come_late_waits_for_them():
    chosen = ChosenLayer(num_ranks=4, pace_gbps=0.5, pace_latency_ns=20_000, watchdog_s=10.0)
    routings = routings_of(chosen)
    layer = LayerCase(chosen, routings)

    for number, routing in enumerate(routings):
        layer.prepare(routing, payload=number + 1)
        layer.run(layer.fused)
        assert layer.wrong() == [], f"launch {number}"


def test_tokens_of_another_payload_or_without_swiglu_are_wrong():
    chosen = ChosenLayer(num_ranks=2)
    (routing,) = routings_of(chosen, count=1)
    layer = LayerCase(chosen, [routing])
    layer.prepare(routing, payload=1)
    layer.run(layer.fused)
    assert layer.wrong() == []

    layer.payload = 2
    assert len(layer.wrong()) == 2
    layer.payload = 1
    layer.h.fill_(1.0)
    layer.group.open(exchange=False)
    layer.fused[1]()
    layer.group.synchronize()
    assert len(layer.wrong()) == 2


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (129, 264), (4096, 2048)])
def test_swiglu_as_a_pass_is_silu_of_gate_times_up(rows, columns):
    product = torch.randn(rows, 2 * columns, dtype=torch.bfloat16, device="cuda") * 3
    out = torch.empty(rows + 1, columns, dtype=torch.bfloat16, device="cuda")
    poison(out)

    bind_swiglu(product, out[:rows], num_sms=132)()

    gate, up = product.float().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    assert bool(((out[:rows].float() - want).abs() <= want.abs() * (2**-8 + 2**-18)).all())
    assert bool((out[rows].view(torch.int16) == BF16_POISON).all())
