"""Dispatch and combine on a real device, bit for bit: unusual inputs alone and a pairwise cover.

Every case runs three launches of each in one memory, with other routing and other payload.
"""

import pytest

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from omegaconf import OmegaConf  # noqa: E402

from tests.experiments.groups import random_routing  # noqa: E402
from tests.experiments.pairwise import pairwise  # noqa: E402
from tests.experiments.test_conformance import TOKENS  # noqa: E402
from tests.gpu.groups import CheckedGroup  # noqa: E402
from tilepipe.config.choices import (  # noqa: E402
    Copy,
    Granularity,
    HomeGranularity,
    Layout,
    Order,
)
from tilepipe.config.limits import MAX_COMBINE_WARPS, STAGE_BYTES  # noqa: E402
from tilepipe.config.register import CONF_DIR  # noqa: E402
from tilepipe.experiments.cuda.oracle import poison  # noqa: E402
from tilepipe.fabric.table import Slot, Word  # noqa: E402
from tilepipe.kernels.launcher import Knobs  # noqa: E402
from tilepipe.schedule.settings import PlanSettings  # noqa: E402

NUM_LAUNCHES = 3
# Shared memory for rings, beside tables and barriers.
RING_BYTES = 200 * 1024
PACE = {"pace_gbps": 50.0, "pace_latency_ns": 2_000}
PLAIN = {
    "tokens": "127",
    "kind": "uniform",
    "hidden": 64,
    "num_experts": 8,
    "num_topk": 2,
    "num_ranks": 2,
    "tile_m": 128,
    "order": Order.edf,
    "granularity": Granularity.tile,
    "home_granularity": HomeGranularity.token,
    "layout": Layout.padded,
    "num_ctas": 3,
    "num_warps": 8,
    "copy, depth": (Copy.simt, 14),
    "flag_batch": 4,
    "paced": False,
}
BULK = {"copy, depth": (Copy.tma, 3), "num_warps": 4}
DEEPEST_SIMT, DEEPEST_BULK = {"copy, depth": (Copy.simt, 16)}, {"copy, depth": (Copy.tma, 14)}
AXES = {
    "tokens": [name for name in TOKENS if name != PLAIN["tokens"]],
    "kind": ["uniform", "one_expert", "masked"],
    "hidden": [64, 2880, 7168, 14_336],
    "num_experts": [8, 160, 384, 512],
    "num_topk": [1, 2, 6, 8, 16],
    "num_ranks": [1, 2, 4, 8],
    "tile_m": [16, 128],
    "order": list(Order),
    "granularity": list(Granularity),
    "home_granularity": list(HomeGranularity),
    "layout": list(Layout),
    "num_ctas": [1, 3, 8],
    "num_warps": [2, 4, 8, 16],
    # Loads that a lane has in flight, or stages of a warp's ring.
    "copy, depth": [
        *((Copy.simt, num_loads) for num_loads in (1, 7, 14)),
        *((Copy.tma, num_stages) for num_stages in (1, 2, 3, 6)),
    ],
    "flag_batch": [1, 4, 32],
    "paced": [False, True],
}
# Axes that decide what is compiled: their values meet in few cases, which others share.
CODE = (
    *("num_ranks", "num_experts", "num_topk", "hidden", "granularity", "home_granularity"),
    *("copy, depth", "num_warps", "flag_batch", "paced"),
)
# Hidden sizes of the models that have a workload file.
HIDDEN = sorted({OmegaConf.load(path).hidden for path in (CONF_DIR / "workload").glob("*.yaml")})
ALONE = [
    *({"tokens": name} for name in TOKENS),
    {"kind": "one_expert"},
    {"kind": "masked"},
    *({"hidden": hidden, "tile_m": 16} for hidden in HIDDEN if hidden >= 2048),
    # One vector of one lane; the largest row of a feed-forward layer.
    {"hidden": 8},
    {"hidden": 14_336, "num_topk": 8, "num_warps": 16},
    *({"num_experts": count, "tile_m": 16} for count in (160, 384, 512)),
    {"num_topk": 1},
    {"num_topk": 6},
    {"num_topk": 16, "num_experts": 160, "tile_m": 16},
    # A slot on every lane of a warp.
    {"num_topk": 32, "num_experts": 160, "tile_m": 16, "num_warps": 4},
    {"num_ranks": 1},
    {"num_ranks": 3, "num_experts": 384, "tile_m": 16},
    {"num_ranks": 8},
    {"num_chunks": 3},
    {"num_chunks": 3, "home_granularity": HomeGranularity.rank},
    {"num_ctas": 1, "num_warps": 1, "copy, depth": (Copy.simt, 1), "flag_batch": 1},
    {"num_warps": MAX_COMBINE_WARPS, **DEEPEST_SIMT, "flag_batch": 32, "hidden": 4096},
    {"paced": True},
    # What is special to bulk copies: ends of claims and rings, ranks without rows, rows in pieces.
    *({**BULK, "tokens": name} for name in TOKENS),
    {**BULK, "kind": "one_expert", "num_topk": 1},
    {**BULK, "kind": "masked", "num_ranks": 8},
    {**BULK, "hidden": 8},
    {**BULK, "hidden": 14_336, "flag_batch": 32},
    {**BULK, "num_chunks": 3, "home_granularity": HomeGranularity.rank},
    {**BULK, "paced": True},
    # Many short pieces, the last one shorter.
    {**BULK, "stage_bytes": 2048, "num_warps": 8},
    {**BULK, "stage_bytes": 512, "num_warps": 16, "hidden": 2880},
    {"num_ctas": 1, "num_warps": 1, **DEEPEST_BULK, "hidden": 7168, "tile_m": 16},
]


def word(value):
    if isinstance(value, tuple):
        return "".join(map(word, value))
    return str(getattr(value, "name", value))


def tokens_of(case, number):
    """Tokens of every rank in launch `number`: what one rank has, its neighbour has next."""
    ranks = range(case["num_ranks"])
    return [TOKENS[case["tokens"]]((rank + number) % len(ranks), len(ranks)) for rank in ranks]


def can_be_code(case):
    """Whether experts divide over ranks, padding stays small and rings find room."""
    if case["num_experts"] % case["num_ranks"] or case["num_topk"] > case["num_experts"]:
        return False
    tile_m = case.get("tile_m", min(AXES["tile_m"]))
    reserved = case["num_experts"] // case["num_ranks"] * tile_m * case["hidden"]
    copy, num_stages = case["copy, depth"]
    rings = case["num_warps"] * num_stages * min(2 * case["hidden"], STAGE_BYTES)
    return reserved < 12e6 and (copy is Copy.simt or rings <= RING_BYTES)


def allowed(case):
    tokens = tokens_of(case, 0)
    moved = sum(tokens) * case["num_topk"] * case["hidden"]
    capacity = max(tokens) * case["num_ranks"] ** 2 * case["num_topk"] * case["hidden"]
    most = 2e6 if case["paced"] else 12e6
    return can_be_code(case) and moved < most and capacity < 60e6


def routings_of(case):
    return [
        random_routing(
            tokens_of(case, number),
            num_experts=case["num_experts"],
            num_topk=case["num_topk"],
            kind=case["kind"],
            seed=number,
        )
        for number in range(NUM_LAUNCHES)
    ]


def group_of(case, routings):
    plan_keys = (
        *("num_ranks", "num_experts", "num_topk", "tile_m"),
        *("order", "granularity", "home_granularity", "layout"),
    )
    num_chunks = case.get("num_chunks", 1)
    settings = PlanSettings(
        num_n_tiles=num_chunks,
        num_chunks=num_chunks,
        seed=3,
        **{key: case[key] for key in plan_keys},
    )
    knobs = Knobs(
        **{key: case[key] for key in ("num_ctas", "num_warps", "flag_batch")},
        **copying(*case["copy, depth"]),
        **{key: case[key] for key in ("stage_bytes",) if key in case},
        **(PACE if case["paced"] else {}),
    )
    return CheckedGroup(settings, knobs, routings, hidden=case["hidden"])


def copying(copy, depth):
    """Knobs of a copy; those of the other one stay, so that they are no code of their own."""
    return {"copy": copy, "num_loads" if copy is Copy.simt else "num_stages": depth}


def run_case(case):
    routings = routings_of(case)
    checked = group_of(case, routings)
    for number, routing in enumerate(routings):
        checked.prepare(routing, payload=11 + number)
        assert checked.dispatch() == [], f"dispatch {number}"
        assert checked.combine() == [], f"combine {number}"


@pytest.mark.parametrize("change", ALONE, ids=lambda change: "-".join(map(word, change.values())))
def test_dispatch_and_combine_equal_the_oracle_on_one_unusual_input(change):
    run_case({**PLAIN, **change})


CODES = pairwise({name: AXES[name] for name in CODE}, can_be_code)
COVER = pairwise(AXES, allowed, parts=CODES)


def test_the_cover_holds_every_value_of_every_axis():
    assert {name: {case[name] for case in COVER} for name in AXES} == {
        name: set(values) for name, values in AXES.items()
    }


@pytest.mark.parametrize("number", range(len(COVER)))
def test_dispatch_and_combine_equal_the_oracle_in_a_pairwise_cover(number):
    run_case(COVER[number])


@pytest.mark.parametrize("home_granularity", list(HomeGranularity))
@pytest.mark.parametrize(
    "change", [{}, {"kind": "masked", "num_topk": 6}, {"hidden": 2880}, {**BULK, "hidden": 14_336}]
)
def test_pushes_alone_and_a_reduction_alone_make_what_combine_makes(change, home_granularity):
    case = {**PLAIN, **change, "tile_m": 16, "home_granularity": home_granularity}
    routings = routings_of(case)
    checked = group_of(case, routings)
    group = checked.group

    for number, routing in enumerate(routings):
        checked.prepare(routing, payload=number)
        assert checked.dispatch() == []
        for rank in group.ranks:
            poison(checked.tensor(rank, Slot.reduced))
        group.open(exchange=False)
        group.push()
        group.open(exchange=False, preset=True)
        group.reduce()
        group.synchronize()
        checked.num_launches += 2

        assert checked.wrong_tokens(Slot.reduced) == []
        assert checked.combine() == []


def test_dispatch_takes_32_warps_where_combine_says_how_many_it_takes():
    seven_loads = {"copy, depth": (Copy.simt, 7)}
    case = {**PLAIN, **seven_loads, "num_warps": 32, "hidden": 7168, "tile_m": 16}
    routings = routings_of(case)
    checked = group_of(case, routings)

    for number, routing in enumerate(routings):
        checked.prepare(routing, payload=number)
        assert checked.dispatch() == []
    with pytest.raises(ValueError, match=rf"num_comm_warps=32: .* at most {MAX_COMBINE_WARPS}"):
        checked.group.launcher.prepare("combine")


def test_more_ctas_than_run_at_once_are_refused():
    case = {**PLAIN, "num_ctas": 10_000}
    group = group_of(case, routings_of(case)).group

    with pytest.raises(ValueError, match=r"num_comm_ctas=10000: 2 ranks x 10000 CTAs of 256 thr"):
        group.launcher.prepare("dispatch")


@pytest.mark.parametrize("granularity", [Granularity.tile, Granularity.expert])
def test_nothing_waits_where_counters_are_preset(granularity):
    case = {**PLAIN, "granularity": granularity}
    routing = routings_of(case)[0]
    checked = group_of(case, [routing])
    checked.prepare(routing, payload=1)
    group = checked.group
    expected = [group.plans[rank].readiness.expected.tolist() for rank in group.ranks]

    # Rank 0 sends nothing: without presets its peers would wait for it.
    checked.tensor(0, Slot.words)[int(Word.num_sends)] = 0
    group.open(exchange=True, preset=True)
    group.dispatch()
    group.synchronize()

    for rank, thresholds in enumerate(expected):
        ready = checked.tensor(rank, Slot.ready).tolist()
        assert all(seen >= want for seen, want in zip(ready, thresholds, strict=False))
        assert ready[len(thresholds) :] == [0] * (len(ready) - len(thresholds))


@pytest.mark.parametrize("chosen", [{"num_warps": 16}, {"copy": Copy.tma, "num_warps": 4}])
@pytest.mark.parametrize(("pace", "least_us"), [((1.0, 0), 900), ((None, 300_000), 300)])
def test_a_paced_launch_takes_what_its_link_takes(pace, least_us, chosen):
    # Every row of a rank goes to the other one: 64 x 14336 bytes at 1 GB/s, or one latency.
    routing = random_routing([64, 64], num_experts=2, num_topk=1)
    for rank, ids in enumerate(routing.topk_idx):
        ids[:] = 1 - rank
    gbps, latency_ns = pace
    # Warps enough that none waits for the link between rows whose flags it owes.
    knobs = Knobs(num_ctas=8, pace_gbps=gbps, pace_latency_ns=latency_ns, **chosen)
    settings = PlanSettings(num_ranks=2, num_experts=2, num_topk=1)
    checked = CheckedGroup(settings, knobs, [routing], hidden=7168)
    checked.prepare(routing, payload=5)
    assert checked.dispatch() == []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    checked.group.open(exchange=True)
    begin.record()
    checked.group.dispatch()
    end.record()
    checked.group.synchronize()

    elapsed_us = 1e3 * begin.elapsed_time(end)
    assert least_us <= elapsed_us <= 1.5 * least_us + 100
